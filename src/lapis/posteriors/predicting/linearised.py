"""Outputs of the linearised network: f(x) and J Sigma J^T, for a covariance Sigma of weights in three forms.

Stored in blocks (`linearised`, which never forms all of J), as a solver (`by_solves`), or as draws (`by_draws`).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from functools import reduce
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lapis.batches import Batch, Inputs, batch_length, take
from lapis.curvature.backward.contributions import Contribution
from lapis.curvature.backward.record import Record
from lapis.curvature.backward.seeds import position_seeds, unit_factor
from lapis.curvature.blocks.block import BlockGaussian
from lapis.curvature.budget import work_bytes
from lapis.curvature.outputs import check_outputs, check_spread, check_width
from lapis.curvature.products.jacobian import Jacobian
from lapis.curvature.sums import Curvature
from lapis.curvature.working_memory import predicted_at_once
from lapis.errors import LapisWarning, MemoryBudgetError, check_fits, users_level
from lapis.network import Network
from lapis.predictions import LatentGaussian
from lapis.proofs import close

if TYPE_CHECKING:
    from lapis.posteriors.posterior import LatentKind

EXAMPLES_AT_ONCE = 256
"""Examples that are processed together in `by_draws`."""

SOLVED_BYTES = 64
"""Memory for an entry of J while it is solved for: in the network's dtype, in float64, solved, and copies of these."""

MANY_PASSES = 2**14
"""More backward passes for an example than this cause a warning."""

HEAD_COVARIANCE = "covariances of a last layer's outputs from its inputs"

PROVEN_OUTPUTS = 3
"""Outputs on which that is compared with the Jacobian's way."""


def linearised(
    network: Network,
    curvature: Curvature,
    gaussians: Sequence[BlockGaussian],
    inputs: Inputs,
    kind: LatentKind,
    memory_budget: int,
) -> LatentGaussian:
    """Mean and (co)variance of the outputs at `inputs`."""
    length = batch_length(inputs)
    step = length
    if kind != "joint":
        step = min(length, predicted_at_once(curvature, kind == "full", work_bytes(memory_budget)))
    mean, spread, shape = _part(network, curvature, gaussians, take(inputs, 0, step), kind, memory_budget, length)
    if step < length:
        # Allocate all results now: small tensors that stay, between large ones that are freed, would fragment memory.
        mean, spread = (
            torch.cat([first, first.new_empty(length - step, *first.shape[1:])]) for first in (mean, spread)
        )
    for start in range(step, length, step):
        stop = min(start + step, length)
        mean[start:stop], spread[start:stop], _ = _part(
            network, curvature, gaussians, take(inputs, start, stop), kind, memory_budget, length
        )
    return _latent(mean, spread, kind, (length, *shape[1:]))


def _latent(mean: Tensor, spread: Tensor, kind: LatentKind, raw_shape: tuple[int, ...]) -> LatentGaussian:
    """Outputs (B, T, C) with `spread`: variances (B, T, C), covariances (B, T, C, C), or joint (B T C, B T C)."""
    check_spread(spread)
    mean = mean.detach()  # of a network that returns its weights themselves
    if kind == "joint":
        return LatentGaussian(mean, spread.diagonal().reshape(mean.shape), None, spread, raw_shape)
    if kind == "diagonal":
        return LatentGaussian(mean, spread, raw_shape=raw_shape)
    return LatentGaussian(mean, spread.diagonal(dim1=-2, dim2=-1), spread, raw_shape=raw_shape)


def _part(
    network: Network,
    curvature: Curvature,
    gaussians: Sequence[BlockGaussian],
    inputs: Inputs,
    kind: LatentKind,
    memory_budget: int,
    length: int,
) -> tuple[Tensor, Tensor, torch.Size]:
    """Outputs of some of `length` examples, their (co)variance in the same dtype, and the raw output's shape."""
    with network.prepared():
        record = curvature.tape.record(inputs)
        f = record.f.detach()
        check_width(f, curvature.outputs)
        if kind == "joint":
            spread = _joint(record, curvature, gaussians, memory_budget)
        else:
            if kind == "full":
                check_covariances(length * f.shape[1], f.shape[2], f.element_size(), memory_budget)
            quick = _of_head(record, network, gaussians, kind)
            spread = _each(record, curvature, gaussians, kind, memory_budget) if quick is None else quick
    return f, spread.to(f.dtype), record.raw_shape


def by_solves(
    network: Network,
    canonical: Callable[[Tensor], Tensor],
    width: int,
    solve: Callable[[Tensor], Tensor],
    inputs: Inputs,
    kind: LatentKind,
    memory_budget: int,
) -> LatentGaussian:
    """As `linearised`, with the covariance given by `solve`, its product with vectors (k, P)."""
    length = batch_length(inputs)
    no_targets = torch.zeros(length, device=network.device)
    single = [Batch(take(inputs, i, i + 1), no_targets[i : i + 1], i) for i in range(length)]
    jacobian = Jacobian(network, canonical, single, memory_budget=memory_budget)
    for f in jacobian.outputs:
        check_outputs(f, width)
    mean = torch.cat(jacobian.outputs).to(network.dtype)
    shape = (length, *jacobian.shapes[0][1:])
    _, positions, outputs = mean.shape
    check_solves(positions * outputs, network, memory_budget)
    if kind == "joint":
        check_joint(mean, memory_budget, 8 * mean.numel() * network.size)
        rows = torch.cat([_gradients(jacobian.of_batches(i)) for i in range(length)])
        joint = _semidefinite(rows.double() @ solve(rows).mT, network.dtype)
        return _latent(mean, joint, kind, shape)
    spread = torch.empty_like(mean) if kind == "diagonal" else mean.new_empty(*mean.shape, outputs)
    at_once = max(1, memory_budget // (SOLVED_BYTES * network.size * positions * outputs))
    for first in range(0, length, at_once):
        stop = min(first + at_once, length)
        rows = torch.stack([_gradients(jacobian.of_batches(i)) for i in range(first, stop)])
        solved = solve(rows.flatten(0, 1)).reshape(rows.shape)
        whole = _semidefinite(rows.double() @ solved.mT, network.dtype)
        cells = whole.reshape(stop - first, positions, outputs, positions, outputs)
        found = cells.diagonal(dim1=1, dim2=3).movedim(-1, 1)
        spread[first:stop] = found.diagonal(dim1=-2, dim2=-1) if kind == "diagonal" else found
    return _latent(mean, spread, kind, shape)


def by_draws(
    network: Network,
    canonical: Callable[[Tensor], Tensor],
    width: int,
    deviations: Tensor,
    inputs: Inputs,
    kind: LatentKind,
    memory_budget: int,
) -> LatentGaussian:
    """As `linearised`, with the covariance mean_k z_k z_k^T of draws z (K, P): K Jacobian-vector products."""
    length = batch_length(inputs)
    mean, spread, done = torch.empty(0), torch.empty(0), 0
    kept: list[Tensor] = []  # J z of all examples, only for their joint covariance
    while done < length:
        part = take(inputs, done, min(done + EXAMPLES_AT_ONCE, length))
        batch = Batch(part, torch.zeros(batch_length(part), device=network.device), 0)
        jacobian = Jacobian(network, canonical, [batch], memory_budget=memory_budget)
        (f,) = jacobian.outputs
        check_outputs(f, width)
        if not done:
            _, positions, outputs = f.shape
            mean = f.new_empty(length, positions, outputs, dtype=network.dtype)
            if kind == "full":
                check_covariances(length * positions, outputs, network.dtype.itemsize, memory_budget)
            elif kind == "joint":
                check_joint(mean, memory_budget)
            spread = mean.new_empty(*mean.shape, outputs) if kind == "full" else torch.empty_like(mean)
        stop = done + len(f)
        mean[done:stop] = f
        draws = jacobian.forward(deviations)[0].double()
        if kind == "diagonal":
            spread[done:stop] = draws.square_().mean(0)
        elif kind == "full":
            spread[done:stop] = torch.einsum("kbtc,kbtd->btcd", draws, draws) / len(draws)
        else:
            kept.append(draws)
        done = stop
    if kind == "joint":
        flat = torch.cat(kept, 1).flatten(1)
        spread = (flat.mT @ flat / len(flat)).to(mean.dtype)
    return _latent(mean, spread, kind, (length, *jacobian.shapes[0][1:]))


def check_covariances(positions: int, outputs: int, itemsize: int, memory_budget: int) -> None:
    """MemoryBudgetError if covariances (C, C) at so many positions of all examples do not fit."""
    each = outputs**2 * itemsize
    if positions * each > memory_budget:
        raise MemoryBudgetError(
            f"Covariances of {outputs:,} outputs at {positions:,} positions do not fit",
            expected=f"at most {memory_budget:,} bytes (memory_budget), enough for {memory_budget // each:,} positions",
            got=f"{positions * each:,} bytes",
            do='use covariance="diagonal", fewer examples or positions at once, or a larger memory_budget',
        )


def check_solves(rows: int, network: Network, memory_budget: int) -> None:
    """MemoryBudgetError if the rows of J of one example, which are solved for, do not fit."""
    needed = rows * network.dtype.itemsize * (2 * network.size + rows)
    check_fits(
        needed,
        memory_budget,
        f"The Jacobian of one example, {rows:,} outputs and {network.size:,} weights, does not fit",
        do='predict with draws, posterior.draw(8).predict(x), or use structure="kronecker" or "diagonal"',
    )


def _gradients(jacobian: Jacobian) -> Tensor:
    """J of one example, (T C, P), in the network's dtype."""
    f = jacobian.outputs[0]
    seeds = torch.eye(f.numel(), dtype=jacobian.network.dtype, device=f.device)
    found = jacobian.backward([seeds.reshape(f.numel(), *f.shape)])
    check_spread(found)
    return found


def _semidefinite(matrix: Tensor, dtype: torch.dtype) -> Tensor:
    """The nearest covariance matrices that `dtype` can hold: solves leave matrices (..., n, n) that are nearly ones."""
    matrix = 0.5 * (matrix + matrix.mT)
    if not bool(torch.linalg.cholesky_ex(matrix).info.any()):
        return matrix.to(dtype)
    values, vectors = torch.linalg.eigh(matrix)
    floor = torch.finfo(dtype).eps * values[..., -1:].clamp(min=0)  # beside rounding to dtype
    nearest: Tensor = (vectors * torch.maximum(values, floor)[..., None, :]) @ vectors.mT
    return nearest.to(dtype)


def check_joint(mean: Tensor, memory_budget: int, more: int = 0) -> None:
    """MemoryBudgetError if the covariance between all outputs (B, T, C), plus `more` bytes, does not fit."""
    total = mean.numel()
    needed = 8 * total**2 + more
    check_fits(
        needed,
        memory_budget,
        f"The covariance between all outputs of {len(mean):,} examples does not fit",
        made_of=f"for {total:,} outputs",
        do="predict fewer examples at once, or without joint=True",
    )


def _of_head(record: Record, network: Network, gaussians: Sequence[BlockGaussian], kind: LatentKind) -> Tensor | None:
    """As `_each`, from the inputs of a last layer; None where the chosen weights are none, or have no form for that."""
    features = record.head_inputs() if len(gaussians) == 1 else None
    if features is None:
        return None
    (gaussian,), diagonal = gaussians, kind == "diagonal"
    found = gaussian.of_features(features.flatten(0, 1), diagonal)
    if found is None:
        return None
    spread = found.reshape(*record.f.shape[:2], *found.shape[1:])

    def agrees() -> bool:
        few = next(position_seeds(unit_factor(record.f.detach()), PROVEN_OUTPUTS))
        plain = gaussian.covariance(record.contributions(few), diagonal)
        own = spread[:, 0, : len(few)] if diagonal else spread[:, 0, : len(few), : len(few)]
        return close(plain, own)

    key = (type(gaussian).__name__, diagonal, features.dtype, *features.shape[1:], *record.f.shape[1:])
    return spread if network.proofs.holds(HEAD_COVARIANCE, key, agrees) else None


def _each(
    record: Record,
    curvature: Curvature,
    gaussians: Sequence[BlockGaussian],
    kind: LatentKind,
    memory_budget: int,
) -> Tensor:
    """Covariance of each position's outputs, (B, T, C, C), or their variances, (B, T, C), in the outputs' dtype.

    They are written into one tensor: a small one for each position, which stays while large ones come and go, would
    fragment memory.
    """
    f, diagonal = record.f.detach(), kind == "diagonal"
    together = f.shape[-1]
    if f[0].numel() > MANY_PASSES:
        warnings.warn(
            f"Predictions take {f[0].numel():,} backward passes for each example, one for every output and position. "
            'Use method="sampled", a last layer with weights of its own (weights="last_layer"), or fewer positions.',
            LapisWarning,
            stacklevel=users_level(),
        )
    if diagonal:
        gradients = 2 * curvature.tape.example_bytes.gradients + curvature.row_length * f.element_size()
        together = max(1, min(together, work_bytes(memory_budget) // (f.nbytes + len(f) * gradients)))
    spread = f.new_empty(f.shape if diagonal else (*f.shape, f.shape[-1]))  # contiguous, unlike f
    rows, done = spread.flatten(1, 2), 0
    for seeds in position_seeds(unit_factor(f), together):
        contributions = record.contributions(seeds)
        parts = (
            gaussian.covariance(_own(contributions, sites), diagonal)
            for gaussian, sites in zip(gaussians, curvature.sites_of, strict=True)
        )
        rows[:, done : done + len(seeds)] = _sum(parts)
        done += len(seeds)
    return spread


def _sum(parts: Iterable[Tensor]) -> Tensor:
    """The sum of the blocks' covariances, which need not be of one dtype."""
    return reduce(torch.add, parts)


def _joint(record: Record, curvature: Curvature, gaussians: Sequence[BlockGaussian], memory_budget: int) -> Tensor:
    """Covariance of all outputs of all examples, (B T C, B T C)."""
    batch, positions, outputs = record.f.shape
    total = batch * positions * outputs
    check_joint(record.f, memory_budget)
    seeds = torch.cat(list(position_seeds(unit_factor(record.f.detach()), outputs)))
    contributions = record.contributions(seeds)
    features = [
        gaussian.features(_own(contributions, sites))
        for gaussian, sites in zip(gaussians, curvature.sites_of, strict=True)
    ]
    parts = (gaussian.kernel(own, own) for gaussian, own in zip(gaussians, features, strict=True))
    return _sum(parts).reshape(total, total)


def _own(contributions: Sequence[Contribution], sites: Sequence[int]) -> list[Contribution]:
    return [contributions[site] for site in sites]
