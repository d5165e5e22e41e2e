"""The best constant prediction: what a network must beat before its evidence says anything about its prior."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lapis.likelihoods import Likelihood

SAMPLE = 65_536
"""Examples that the constant is fitted to, at most; beyond, to a random sample of the batches."""

RANGE = 20.0
"""The noise's factor stays within exp(-20) .. exp(20): constant targets have no noise at all."""


def constant_log_likelihood(likelihood: Likelihood, targets: Sequence[Tensor], outputs: int, noise: bool) -> float:
    """max over c (and the noise's size) of mean_n log p(y_n | f_n = c), with c in R^C the same at all positions.

    Args:
        targets: canonical, (B, T, ...) a batch.
        outputs: C.
        noise: whether the noise may change by a factor, as tuning does.

    By L-BFGS from c = 0. Minus infinity where it fails, so that every network counts as better.
    """
    order = torch.randperm(len(targets), generator=torch.Generator().manual_seed(0)).tolist()
    held: list[Tensor] = []
    count = 0
    for index in order:
        if count >= SAMPLE:
            break
        y = targets[index]
        held.append(y.double() if y.is_floating_point() else y)
        count += len(y)
    base = likelihood.noise.detach().double() if noise and likelihood.noise is not None else None
    device = held[0].device
    constant = torch.zeros(outputs, dtype=torch.float64, device=device, requires_grad=True)
    factor = torch.zeros((), dtype=torch.float64, device=device, requires_grad=True)
    free = [constant] if base is None else [constant, factor]
    search = torch.optim.LBFGS(free, max_iter=50, line_search_fn="strong_wolfe", tolerance_grad=1e-6)

    def loss() -> Tensor:
        size = factor.clamp(-RANGE, RANGE).exp()
        family = likelihood if base is None else likelihood.with_noise(base.to(device) * size)
        parts = [family.nll(constant.expand(*y.shape[:2], outputs), y).sum() for y in held]
        return torch.stack(parts).sum() / count

    def closure() -> float:
        search.zero_grad()
        value = loss()
        value.backward()  # type: ignore[no-untyped-call]
        return float(value.detach())

    with torch.enable_grad():
        search.step(closure)  # type: ignore[no-untyped-call]
    with torch.no_grad():
        best = -float(loss())
    return best if best == best and best != float("inf") else float("-inf")
