"""A posterior without some of its data: their curvature subtracted, and the mean moved by one Newton step.

The mean is taken to be the mode of all data. Without examples whose -log p(y | f) has the gradient g in the outputs,
the gradient of the remaining loss there is -sum J^T g, and Newton's step with the remaining precision A

    mean + A^-1 sum J^T g

is exact where the loss is quadratic: for linear models with Gaussian noise.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from lapis.batches import Batch, example_digests
from lapis.curvature.accumulate import accumulate
from lapis.curvature.blocks.block import Block
from lapis.curvature.products.ggn import ImplicitCurvature
from lapis.curvature.products.jacobian import Jacobian
from lapis.errors import DataError, NotPositiveDefiniteError, OptionError
from lapis.posteriors.same_data import hold_batches

if TYPE_CHECKING:
    from lapis.posteriors.laplace.family import LaplaceFamily
    from lapis.posteriors.laplace.matrix_free.implicit import ImplicitPosterior
    from lapis.posteriors.laplace.stored import LaplacePosterior

Fit = TypeVar("Fit", "LaplacePosterior", "ImplicitPosterior")

ROUNDING = 1e3
"""Diagonals of sums may become negative by this many roundings of what they were."""


def without(posterior: LaplacePosterior, data: Any, batch_size: int | None, progress: bool | None) -> LaplacePosterior:
    """See `LaplacePosterior.without`."""
    sums = posterior.curvature
    if sums.kind == "sampled":
        raise OptionError(
            "The sampled Fisher information of single examples is not known any more",
            expected='a fit with curvature="ggn", "exact", "empirical" or "hessian"',
            got='"sampled"',
            do='fit with curvature="exact"',
        )
    for block in sums.blocks:
        block.check_additive()
    held = hold_batches(data, posterior.network, batch_size)
    gone = _hashes(held)
    sample = sums.sample.batches()
    known = _hashes(sample) if sum(map(len, sample)) == posterior.n_data else None
    _check_part(posterior, gone, known)
    removed = sums.cleared()
    accumulate(
        removed,
        posterior.network,
        posterior.fitted_likelihood,
        held,
        total=len(held),
        generator=torch.Generator(posterior.network.device).manual_seed(0),
        memory_budget=posterior.facts.memory_budget,
        progress=progress,
    )
    rest = sums.plus(removed, -1.0)
    rest.sample = sums.sample.without(gone)
    eps = ROUNDING * torch.finfo(posterior.network.dtype).eps
    for before, after in zip(sums.blocks, rest.blocks, strict=True):
        _check_remains(before, after, eps)
    changed = posterior._with_sums(rest)
    for gaussian in changed.gaussians:
        gaussian.check()
    return _moved(changed, posterior, held)


def without_held(posterior: ImplicitPosterior, data: Any, batch_size: int | None) -> ImplicitPosterior:
    """See `ImplicitPosterior.without`: the data held are searched for those to remove."""
    held = hold_batches(data, posterior.network, batch_size)
    gone = _hashes(held)
    _check_part(posterior, gone, _hashes(posterior.curvature.batches))
    left: list[Batch] = []
    for batch in posterior.curvature.batches:
        kept = []
        for index, each in enumerate(example_digests(batch.inputs, batch.targets).tolist()):
            if gone[each]:
                gone[each] -= 1
            else:
                kept.append(index)
        if kept:
            left.append(replace(batch.chosen(torch.tensor(kept, device=batch.targets.device)), index=len(left)))
    facts, fitted = posterior.facts, posterior.fitted_likelihood
    sums = ImplicitCurvature(
        posterior.network, fitted, left, facts.signature, facts.memory_budget, posterior.solver.mode
    )
    return _moved(posterior._with_sums(sums), posterior, held)


def _hashes(held: Sequence[Batch]) -> Counter[int]:
    """How often each example occurs, by its fingerprint."""
    found: Counter[int] = Counter()
    for batch in held:
        found.update(example_digests(batch.inputs, batch.targets).tolist())
    return found


def _check_part(posterior: LaplaceFamily, gone: Counter[int], known: Counter[int] | None) -> None:
    """DataError unless the examples can be a part of the data of the fit; these are `known` where all are in memory."""
    count = gone.total()
    if count > posterior.n_data or (known is not None and gone - known):
        strange = f"{(gone - known).total()} others among" if known is not None else ""
        raise DataError(
            "These data were not part of the fit",
            expected=f"some of its {posterior.n_data} examples, inputs and targets as they were",
            got=f"{strange} {count} examples".strip(),
            do="pass examples of the fit (without random augmentation)",
        )
    if count == posterior.n_data:
        whole = sum(gone.elements()) % 2**64 == posterior.curvature.digest
        raise DataError(
            "Nothing would be left" if whole else "These data were not part of the fit",
            expected=f"fewer than all {posterior.n_data} examples of the fit",
            got=f"{count} examples",
            do="the prior alone is posterior.gaussian_process().prior()" if whole else "pass examples of the fit",
        )


def _check_remains(before: Block, after: Block, eps: float) -> None:
    """Raise if diagonals of sums of squares become negative by more than rounding: there was less to subtract from."""
    for name in after.added:
        old, new = before.state()[name], after.state()[name]
        if new.dim() >= 2 and new.shape[-1] == new.shape[-2] and name not in after.nonnegative:
            old, new = old.diagonal(dim1=-2, dim2=-1), new.diagonal(dim1=-2, dim2=-1)
        elif name not in after.nonnegative:
            continue
        if before.is_hessian or not bool((new < -eps * old.abs()).any()):
            continue
        raise NotPositiveDefiniteError(
            "The data to remove have more curvature than there is",
            expected=f"data of the fit: curvature of {after.sites[0].label!r} that stays positive",
            got=f"{float((new / old.abs().clamp(min=1e-300)).min()):.3g} of what it was",
            do="pass examples of the fit, once each",
        )
    after.clamp()


def _moved(changed: Fit, posterior: Fit, removed: Sequence[Batch]) -> Fit:
    """The posterior with remaining sums, its mean one Newton step from that of all data."""
    network, likelihood = posterior.network, posterior.likelihood
    jacobian = Jacobian(
        network, likelihood.canonical, removed, memory_budget=posterior.facts.memory_budget, kept_bytes=0
    )
    deviation = posterior.mean.double() - posterior.point.double()
    outputs = jacobian.outputs
    if bool(deviation.any()):
        outputs = [f + moved[0] for f, moved in zip(outputs, jacobian.forward(deviation[None]), strict=True)]
    seeds = [
        likelihood.gradient(f, likelihood.targets(batch.targets, f, shape)).detach()[None] / posterior.temperature
        for f, batch, shape in zip(outputs, removed, jacobian.shapes, strict=True)
    ]
    step: Tensor = changed.solve(jacobian.backward(seeds))[0]
    return replace(changed, mean=(posterior.mean.double() + step).to(posterior.mean.dtype))
