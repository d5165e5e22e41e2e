"""How the expectation of a loss under q is taken: at the mean, by draws, by quadrature, or from function values."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from functools import cache
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from lapis.errors import OptionError
from lapis.learning_rule.losses import Function
from lapis.options import check_count

Kind = Literal["local", "monte_carlo", "quadrature", "function_values"]
Curvature = Literal["hessian", "reparameterised", "squared_gradients"]
SAMPLES, POINTS = 16, 20
MOST_NODES = 2**17
"""Of a product grid or an enumeration; more would take minutes."""


@dataclass(frozen=True)
class Expectation:
    """The choices behind E_q[loss], checked against each other."""

    kind: Kind
    samples: int
    points: int
    curvature: Curvature | Function | None
    generator: torch.Generator

    @property
    def is_stochastic(self) -> bool:
        """Whether it is an estimate from draws."""
        return self.kind in ("monte_carlo", "function_values")

    @classmethod
    def of(
        cls,
        kind: Kind,
        samples: int | None,
        points: int | None,
        curvature: Curvature | Function | None,
        generator: torch.Generator | None,
    ) -> Expectation:
        """OptionError for choices that have no meaning together."""
        drawn = kind in ("monte_carlo", "function_values")
        for name, given, fits, where in (
            ("samples", samples, drawn, '"monte_carlo" or "function_values"'),
            ("generator", generator, drawn, '"monte_carlo" or "function_values"'),
            ("points", points, kind == "quadrature", '"quadrature"'),
            ("curvature", curvature, kind != "function_values", '"local", "monte_carlo" or "quadrature"'),
        ):
            if given is not None and not fits:
                raise OptionError(
                    f"{name} has no meaning here",
                    expected=f"{name} with expectation {where} only",
                    got=f'expectation="{kind}"',
                    do=f"leave {name} out, or choose such an expectation",
                )
        if isinstance(curvature, str) and kind == "local" and curvature == "reparameterised":
            raise OptionError(
                "No noise to take the curvature from",
                expected='curvature="hessian", "squared_gradients" or a function at the mean',
                got='curvature="reparameterised" with expectation="local"',
                do='use expectation="monte_carlo" or "quadrature" with it',
            )
        samples = SAMPLES if samples is None else samples
        if kind == "function_values":
            check_count("samples", samples, least=2)  # the mean of the values is their baseline
        return cls(kind, samples, points or POINTS, curvature, generator or torch.Generator().manual_seed(0))


def refuse_curvature(how: Expectation, name: str) -> None:
    """For families whose expectation parameters take no Hessian."""
    if how.curvature is not None:
        raise OptionError(
            f"{name} has no curvature to choose",
            expected="curvature=None",
            got=repr(how.curvature),
            do="leave curvature out: it is for Gaussians whose precision is learned",
        )


def check_nodes(*grids: tuple[int, int]) -> None:
    """Refuse products of grids, each with so many points for so many dimensions, that would take forever."""
    if sum(dimensions * math.log(each) for each, dimensions in grids) > math.log(MOST_NODES):
        shape = " times ".join(f"{each}^{dimensions}" for each, dimensions in grids)
        raise OptionError(
            "Too many dimensions for this quadrature",
            expected=f"at most {MOST_NODES:,} points in all",
            got=shape,
            do='take fewer points, or expectation="monte_carlo"',
        )


@cache
def hermite(points: int) -> tuple[Tensor, Tensor]:
    """Gauss-Hermite nodes and weights for a standard normal, (points,) each; exact to degree 2 points - 1."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(points)
    return torch.from_numpy(nodes), torch.from_numpy(weights / weights.sum())


def normal_grid(points: int, dimensions: int) -> tuple[Tensor, Tensor]:
    """The product rule: nodes (points^dimensions, dimensions) and weights."""
    check_nodes((points, dimensions))
    nodes, weights = hermite(points)
    return product(nodes.expand(dimensions, -1)), product(weights.expand(dimensions, -1)).prod(1)


def product(columns: Tensor) -> Tensor:
    """All choices of one entry from each row of `columns` (dimensions, k): (k^dimensions, dimensions)."""
    dimensions, k = columns.shape
    index = torch.tensor(list(itertools.product(range(k), repeat=dimensions)))
    return columns.T.gather(0, index)


def centred(values: Tensor) -> Tensor:
    """Values less the mean of the others, over n: sums of these times scores are unbiased, and vary less."""
    return (values - values.mean()) / (len(values) - 1)
