"""Choosing the examples of a pool whose labels are worth most, by any posterior's predictions."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from lapis.batches import batch_length
from lapis.decisions.active.criteria import CRITERIA, curvature_root
from lapis.decisions.active.joint import greedy_classes, greedy_gaussian
from lapis.decisions.active.pool import parts, pick
from lapis.errors import DataError, MemoryBudgetError, OptionError
from lapis.likelihoods import Categorical
from lapis.options import UNREADABLE, check_arguments
from lapis.posteriors import Posterior
from lapis.predictions import LatentGaussian, LatentSamples
from lapis.progress import track

Single = Literal["entropy", "bald", "variation_ratios", "variance", "information_gain", "memorable"]
"""Criteria that look at one example at a time."""

By = Literal[Single, "batch", "diverse", "random"]

CANDIDATES = 20
"""Batch-aware choices look at this many times n examples, those with the highest mutual information alone."""

COPIES = 4
"""Matrices of the candidates' joint covariance that are in memory at a time, in float64."""


def scores(
    posterior: Posterior,
    pool: Any,
    by: Single = "bald",
    *,
    samples: int | None = None,
    generator: torch.Generator | None = None,
    progress: bool | None = None,
) -> Tensor:
    """The worth of each example's label, (N,) in float64, larger is better; the pool is read in parts.

    Args:
        posterior: any of Lapis's.
        pool: inputs in memory, a Dataset, or a DataLoader in a fixed order; targets in it are not looked at.
        by: "entropy", "bald" (mutual information of label and weights), "variation_ratios" (1 - largest probability),
            "variance" (of the probabilities or means), "information_gain" (of a Laplace step), "memorable" (the
            likelihood's curvature, sum_c p_c (1 - p_c) for classes).
        samples: networks drawn by sampled posteriors, or points of the link.
        generator: source of randomness; seeded with 0 when not given. All parts see the same drawn networks.
        progress: show a bar; by default on a terminal only.
    """
    check_arguments(scores, locals())
    criterion = CRITERIA[by]
    state = None if generator is None else generator.get_state()
    found = []
    for part in track(parts(pool, posterior.network), "pool", None, progress):
        if generator is not None and state is not None:
            generator.set_state(state)
        prediction = posterior.predict(part, samples=samples, generator=generator, progress=False)
        found.append(criterion(prediction).cpu())
    if not found:
        raise _too_few(1, 0)
    values = torch.cat(found)
    if not bool(values.isfinite().all()):
        raise DataError(
            f"The predictions of the pool give no {by} everywhere",
            expected="finite values",
            got=f"{int((~values.isfinite()).sum())} of {len(values)} that are not",
            do="look at posterior.predict of these examples",
        )
    return values


def acquire(
    posterior: Posterior,
    pool: Any,
    n: int,
    by: By = "bald",
    *,
    exclude: Any = None,
    candidates: int | None = None,
    samples: int | None = None,
    generator: torch.Generator | None = None,
    progress: bool | None = None,
) -> Tensor:
    """Indices (n,) of the pool's examples whose labels are worth most, the best first.

    Args:
        posterior: any of Lapis's.
        pool: inputs in memory, a Dataset, or a DataLoader in a fixed order; targets in it are not looked at.
        n: how many examples to choose.
        by: one of the criteria of `scores`, which rank examples one by one; "batch", which chooses examples that say
            most about the weights together; "diverse", the largest variance of the outputs that is left after the
            examples chosen before; or "random".
        exclude: indices that must not be chosen, such as those that have labels already.
        candidates: examples that "batch" and "diverse" compare jointly, those with the highest mutual information; by
            default 20 n, or as many as fit the posterior's memory budget.
        samples: networks drawn by sampled posteriors, or points of the link.
        generator: source of randomness; seeded with 0 when not given.
        progress: show a bar; by default on a terminal only.
    """
    check_arguments(acquire, locals())
    if by == "random":
        source = generator or torch.Generator().manual_seed(0)
        size = sum(batch_length(part) for part in parts(pool, posterior.network))
        values = torch.rand(size, generator=source, device=source.device).cpu().double()
    else:
        single: Single = "bald" if by == "batch" or by == "diverse" else by
        values = scores(posterior, pool, single, samples=samples, generator=generator, progress=progress)
    allowed = torch.ones(len(values), dtype=torch.bool)
    allowed[_indices(exclude, len(values))] = False
    if int(allowed.sum()) < n:
        raise _too_few(n, int(allowed.sum()))
    ranked = torch.where(allowed, values, -torch.inf).argsort(descending=True, stable=True)
    if by not in ("batch", "diverse"):
        return ranked[:n]
    count = min(int(allowed.sum()), candidates or CANDIDATES * n)
    if count < n:
        raise OptionError(
            "There are too few candidates", expected=f"at least n = {n}", got=str(count), do="raise candidates"
        )
    best = ranked[: _affordable(posterior, count, n, candidates is not None)]
    inputs = pick(pool, best.tolist(), posterior.network)
    return best[_together(posterior, inputs, n, by, samples, generator)]


def _together(
    posterior: Posterior, inputs: Any, n: int, by: str, samples: int | None, generator: torch.Generator | None
) -> Tensor:
    """The places of n candidates that are best together."""
    linearised = posterior.methods[0] == "linearised"
    prediction = posterior.predict(inputs, joint=linearised, samples=samples, generator=generator, progress=False)
    latent = prediction.latent
    classes = isinstance(posterior.likelihood, Categorical) and latent.shape[1] == 1
    if by == "batch" and classes and isinstance(latent, LatentSamples):
        source = torch.Generator().manual_seed(0 if generator is None else generator.initial_seed())
        return torch.tensor(greedy_classes(latent.values[:, :, 0].softmax(-1).cpu(), n, source))
    if isinstance(latent, LatentGaussian) and latent.joint is not None:
        joint = latent.joint.double().clone()
    elif isinstance(latent, LatentSamples):
        values = latent.values.double().flatten(1)
        gap = values - values.mean(0)
        joint = gap.mT @ gap / len(values)
    else:
        raise OptionError(
            "This posterior does not say how the outputs of several examples vary together",
            expected="a linearised or a sampled posterior",
            got=repr(posterior),
            do='use by="bald"',
        )
    roots = curvature_root(posterior.likelihood, latent.mean.double())
    return torch.tensor(greedy_gaussian(joint, roots, n, by == "diverse"))


def _affordable(posterior: Posterior, count: int, n: int, asked: bool) -> int:
    """How many candidates' joint covariance fits the memory budget; MemoryBudgetError if those asked for do not."""
    outputs = max(1, posterior.n_outputs)
    most = int((posterior.facts.memory_budget / (8 * COPIES)) ** 0.5 / outputs)
    if most >= count:
        return count
    if asked or most < n:
        raise MemoryBudgetError(
            f"The joint covariance of {count} candidates with {outputs} outputs does not fit the memory budget",
            expected=f"at most {posterior.facts.memory_budget:,} bytes (memory_budget)",
            got=f"{8 * COPIES * (count * outputs) ** 2:,} bytes",
            do=f'pass candidates={most}, or use by="bald"' if most >= n else 'use by="bald"',
        )
    return most


def _indices(exclude: Any, size: int) -> Tensor:
    """Indices into the pool, checked."""
    if exclude is None:
        return torch.zeros(0, dtype=torch.long)
    try:
        indices = torch.as_tensor(exclude).cpu()
    except UNREADABLE as error:
        raise _bad_exclude(type(exclude).__name__, size) from error
    if indices.numel() == 0:
        return torch.zeros(0, dtype=torch.long)
    if indices.is_floating_point() or indices.is_complex() or indices.dtype == torch.bool:
        raise _bad_exclude(str(indices.dtype), size)
    if int(indices.min()) < 0 or int(indices.max()) >= size:
        raise _bad_exclude(f"{int(indices.min())} to {int(indices.max())}", size)
    return indices.long().flatten()


def _bad_exclude(got: str, size: int) -> OptionError:
    return OptionError(
        "Bad exclude", expected=f"whole numbers from 0 to {size - 1}", got=got, do="pass indices into the pool"
    )


def _too_few(n: int, left: int) -> DataError:
    return DataError(
        "The pool has too few examples",
        expected=f"at least {n}",
        got=str(left),
        do="ask for fewer, or enlarge the pool",
    )
