"""Settings of the solver of implicit posteriors."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import torch

from lapis.options import check_arguments
from lapis.posteriors.laplace.stored import LaplacePosterior

TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-5}
"""Default tolerances on the relative residual of a solve."""

ROUNDING = 10.0
"""Solves that stagnate within this factor of a default tolerance have gone as far as their dtype allows."""


@dataclass(frozen=True)
class Solver:
    """How systems with the posterior precision are solved.

    Args:
        space: "weights" (P unknowns), "outputs" (examples x outputs unknowns), or "auto": the smaller one.
        tolerance: on |A x - b| / |b|; 1e-10 for a float64 network and 1e-5 for float32 when None. A solve that misses
            this default by less than a factor of ten, because rounding lets it go no further, is not warned of.
        max_iterations: of conjugate gradients.
        preconditioner: a posterior of the same network and data in a stored structure, preferably "kronecker"; it is
            updated with the prior. For space "weights" only.
        mode: how Jacobian products are computed: one of `lapis.curvature.products.modes`, or "fastest", which times
            them on this machine. None applies a fixed rule, so that results do not depend on the machine's load.
    """

    space: Literal["auto", "weights", "outputs"] = "auto"
    tolerance: float | None = None
    max_iterations: int = 2000
    preconditioner: LaplacePosterior | None = field(default=None, repr=False)
    mode: str | None = None

    def __post_init__(self) -> None:
        check_arguments(Solver, vars(self))
