"""Callbacks for other libraries' training loops that leave a posterior behind: one module each, none imported here.

`lapis.integrations.lightning` needs the extra "lightning", `lapis.integrations.transformers` the extra "transformers".
"""
