"""`python -m lapis`: the command without its script."""

from __future__ import annotations

from lapis.cli import app

if __name__ == "__main__":
    app(prog_name="lapis")
