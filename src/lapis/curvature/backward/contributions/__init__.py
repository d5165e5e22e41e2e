"""Contributions: a batch's Jacobian for one site's weights in factored form, and the sums that structures need of it.

With B examples and M seeds (scalar functions of the outputs) the Jacobian of a site is J[b, m, weight]. It is never
stored whole unless a structure asks for its `rows`:

* `Outer`: J[b, m, k, o, i] = sum_t g[k, m, b, t, o] a[k, b, t, i]: linear maps over T positions, in K groups.
* `Lookup`: J[b, m, o, v] = sum_t g[m, b, o, t] [index[b, t] = v]: embeddings.
* `Rows`: J given as it is: norm layers, raw parameters, everything else.
"""

from typing import TypeAlias

from lapis.curvature.backward.contributions.lookup import Lookup
from lapis.curvature.backward.contributions.outer import CHUNK_BYTES, Outer
from lapis.curvature.backward.contributions.rows import Rows

__all__ = ["CHUNK_BYTES", "Contribution", "Lookup", "Outer", "Rows"]

Contribution: TypeAlias = Outer | Lookup | Rows
