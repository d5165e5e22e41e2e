"""Rescaling normalised weights by k leaves the function alone; it should leave the tuned error bars alone too.

For networks with batch and layer norm, one normalised layer's weights (and what batch norm remembers of their outputs)
are multiplied by k. The prior is tuned by the evidence at t or at theta*, with one precision or with one for each
normalised group; the table holds the largest relative change of the predictive variance of f against k = 1.
"""

from __future__ import annotations

import copy
import warnings

import torch
from common import arguments, report, table
from torch import Tensor, nn

import lapis


def network(norm: str, width: int) -> nn.Sequential:
    def layer() -> nn.Module:
        return nn.BatchNorm1d(width, eps=1e-12) if norm == "batch" else nn.LayerNorm(width, eps=1e-12)

    first, second = nn.Linear(1, width), nn.Linear(width, width)
    return nn.Sequential(first, layer(), nn.Tanh(), second, layer(), nn.Tanh(), nn.Linear(width, 1))


def trained(model: nn.Sequential, x: Tensor, y: Tensor, steps: int) -> nn.Sequential:
    optimiser = torch.optim.Adam(model.parameters(), 0.01)
    for _ in range(steps):
        optimiser.zero_grad()
        (model(x) - y).square().mean().backward()
        optimiser.step()
    return model.eval()


def rescaled(model: nn.Sequential, k: float) -> nn.Sequential:
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in other[3].parameters():
            parameter *= k
        if isinstance(other[4], nn.BatchNorm1d):
            other[4].running_mean *= k
            other[4].running_var *= k**2
    return other


def main() -> None:
    chosen = arguments(__doc__)
    torch.set_default_dtype(torch.float64)
    warnings.simplefilter("ignore", lapis.LapisWarning)
    torch.manual_seed(chosen.seed)
    x = torch.linspace(-1, 1, 60)[:, None]
    y = torch.sin(4 * x) + 0.5 * (9 * x).cos() + 0.1 * torch.randn(60, 1)
    at = torch.linspace(-1.5, 1.5, 13)[:, None]
    rows, held = [], 0.0
    for norm in ("batch", "layer"):
        model = trained(network(norm, 6 if chosen.quick else 10), x, y, 200)
        for structure in ("dense", "kronecker"):
            for where in ("t", "theta*"):
                for groups in ("one", "normalised"):
                    found = {}
                    for k in (1.0, 0.1, 10.0):
                        posterior = lapis.laplace(rescaled(model, k), (x, y), lapis.Gaussian(0.1), structure=structure)
                        if where == "theta*":
                            posterior = posterior.at_tangent_mode((x, y))
                        found[k] = posterior.tune(groups=groups).functional_variance(at, diagonal=True)
                    changes = [float((found[k] / found[1.0] - 1).abs().max()) for k in (0.1, 10.0)]
                    rows.append((norm, structure, where, groups, *(f"{change:.1e}" for change in changes)))
                    if where == "theta*" and groups == "normalised":
                        held = max(held, *changes)
    head = ("norm", "structure", "evidence at", "groups", "change, k = 0.1", "change, k = 10")
    assert held < 1e-3, held
    report("invariance", table(head, rows) + f"\n\nWith theta* and groups at most {held:.1e} (claim: 1e-3).", chosen)


if __name__ == "__main__":
    main()
