"""Sums over data as values: made anywhere, added, subtracted, saved; a posterior when a prior comes to them.

    statistics(all data) = statistics(shard 1) + statistics(shard 2) + ...

to rounding, for dense, diagonal and Kronecker structures: the posterior does not depend on who saw which example. The
same holds for EKFAC statistics in one basis, which is found from Kronecker statistics. Low-rank statistics add up to
what each of them kept of its data, and know a bound on what they left out.
"""

from __future__ import annotations

import os
import warnings
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from lapis.curvature.blocks.lowrank import LowRankBlock
from lapis.curvature.blocks.partition import NAMES
from lapis.curvature.sample import Sample
from lapis.curvature.sums import Curvature
from lapis.errors import DataError, LapisWarning, OptionError, users_level
from lapis.likelihoods import Likelihood
from lapis.network import Weights
from lapis.options import check_arguments
from lapis.posteriors import LaplacePosterior, load
from lapis.posteriors.laplace.arithmetic.merging import agreement
from lapis.posteriors.laplace.fit import laplace
from lapis.posteriors.laplace.passes import basis_digest
from lapis.posteriors.laplace.subnetwork import Subnetwork
from lapis.posteriors.posterior import MEMORY_BUDGET
from lapis.priors import Prior

FEW = 8
"""Fewer examples than so many, all of them in another sum, may be other examples with equal numbers."""

OMITTED = 0.1
"""Curvature beyond this fraction of the smallest prior precision that was left out causes a warning."""

REMEDIES = {
    "basis": 'pass basis=... to each: the sum of their Kronecker statistics (structure="kronecker")',
    "choice of single weights": "choose them once: Subnetwork(n, from_=posterior of some data), or masks",
    "chosen weights": "choose the same weights: Subnetwork(n, from_=posterior of some data), masks or names",
}
"""What to do where statistics differ in one thing, if it is more than making them alike."""


@dataclass(frozen=True, eq=False, repr=False)
class Statistics:
    """What some data say about the weights of a network, as sums; immutable.

    Args:
        fit: the posterior of these data under a prior precision of one, whose sums these are.
    """

    fit: LaplacePosterior

    @property
    def n_data(self) -> int:
        """Examples in the sums."""
        return self.fit.n_data

    @property
    def structure(self) -> str:
        return self.fit.structure

    @property
    def digest(self) -> int:
        """Fingerprint of the examples, whatever their order: that of a sum is the sum modulo 2^64."""
        return self.fit.curvature.digest

    def __repr__(self) -> str:
        return f"<{self.structure} Statistics, {self.fit.n_weights:,} weights, {self.n_data:,} examples>"

    def __add__(self, other: Any) -> Statistics:
        """The sums over both data sets, which must be different ones of the same network."""
        if not isinstance(other, Statistics):
            return NotImplemented
        self._check_alike(other)
        if self.digest == other.digest:
            raise DataError(
                "These are statistics of the same data",
                expected="different examples: each would count twice",
                got=f"fingerprint {self.digest:016x} both times",
                do="leave one of them out",
            )
        self._check_overlap(other)
        sums = self.fit.curvature.plus(other.fit.curvature, 1.0)
        for batch in other.fit.sample_of_data():
            sums.sample.add(batch)
        return Statistics(self._with_sums(sums))

    def __radd__(self, other: Any) -> Statistics:
        """So that `sum(shards)` works, which starts from 0."""
        return self if isinstance(other, int) and other == 0 else NotImplemented

    def __sub__(self, other: Any) -> Statistics:
        """The sums without some of the data: those that `other` is of, each of which must be in these sums."""
        if not isinstance(other, Statistics):
            return NotImplemented
        self._check_alike(other)
        missing = self.fit.curvature.seen.missing(other.fit.curvature.seen)
        if missing:
            raise DataError(
                "Data that are not in these sums cannot be taken out of them",
                expected="statistics of examples that were added, each as often as it was",
                got=f"{missing:,} of the fingerprints compared that are not in the sums",
                do="subtract statistics of a part of the data, of the same numbers in the same form",
            )
        if other.n_data >= self.n_data:
            raise DataError(
                "Nothing would be left",
                expected=f"statistics of fewer than {self.n_data} examples",
                got=str(other.n_data),
                do="subtract a part of the data",
            )
        sums = self.fit.curvature.plus(other.fit.curvature, -1.0)
        sums.sample = Sample()  # it may hold examples that have left
        rest = self._with_sums(sums)
        for block in rest.curvature.blocks:
            block.clamp()
        for gaussian in rest.gaussians:
            gaussian.check()
        return Statistics(rest)

    def _with_sums(self, sums: Curvature) -> LaplacePosterior:
        fit = self.fit._with_sums(sums)
        if fit.structure == "lowrank":
            rank = sum(len(block.values) for block in sums.blocks if isinstance(block, LowRankBlock))
            note = f"rank {rank}: a sum, without curvature up to {self._omitted(sums):.3g}"
            fit = replace(fit, choices=(*fit.choices[:-1], note))
        return fit

    @staticmethod
    def _omitted(sums: Curvature) -> float:
        return max([float(block.omitted) for block in sums.blocks if isinstance(block, LowRankBlock)], default=0.0)

    @property
    def omitted(self) -> float:
        """No direction has more curvature than this that is not in the sums: 0 but for the low-rank structure."""
        return self._omitted(self.fit.curvature)

    def _check_overlap(self, other: Statistics) -> None:
        """DataError where all examples of one are in the other; a warning where some are."""
        shared, mine, theirs = self.fit.curvature.seen.shared(other.fit.curvature.seen)
        if not shared:
            return
        fewer = min(mine, theirs)
        if shared == fewer and fewer >= FEW:
            raise DataError(
                "The examples of one of these statistics are in the other already",
                expected="different examples: each would count twice",
                got=f"all {fewer:,} fingerprints that can be compared in both",
                do="leave one of them out, or subtract first what they share",
            )
        warnings.warn(
            f"These statistics share examples, which count twice: {shared:,} of {fewer:,} fingerprints that can be "
            "compared are in both. That is right only where different examples have equal inputs and targets.",
            LapisWarning,
            stacklevel=users_level(),
        )

    def posterior(self, prior: Prior | float | Tensor = 1.0) -> LaplacePosterior:
        """The Laplace posterior of these data under a prior; no pass over data."""
        found = self.fit.with_prior(prior)
        least = float(found.weight_prior.precision.detach().min())
        if self.omitted > OMITTED * least:
            warnings.warn(
                f"These low-rank sums leave out curvature up to {self.omitted:.3g}, for a prior precision of "
                f"{least:.3g}: variances can be too large by that ratio. Use a larger rank, fewer parts, or another "
                "structure.",
                LapisWarning,
                stacklevel=users_level(),
            )
        return found

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the sums to one file, for `lapis.load_statistics(path, model)`."""
        self.fit.save(path)

    def _check_alike(self, other: Statistics) -> None:
        """OptionError unless both are about one network, with the same options."""
        mine, theirs = agreement(self.fit), agreement(other.fit)
        mine["network"], theirs["network"] = self.fit.facts.fingerprint, other.fit.facts.fingerprint
        mine["basis"], theirs["basis"] = (basis_digest(each.fit.curvature) for each in (self, other))
        for name, value in mine.items():
            if theirs[name] != value:
                raise OptionError(
                    f"The statistics have another {name}",
                    expected=str(value)[:200],
                    got=str(theirs[name])[:200],
                    do=REMEDIES.get(name, "make them alike, with the same network"),
                )


def statistics(
    model: nn.Module,
    data: Any,
    likelihood: str | Likelihood,
    *,
    structure: str = "kronecker",
    weights: Weights | Subnetwork = "all",
    curvature: str = "ggn",
    rank: int | None = None,
    basis: Statistics | None = None,
    generator: torch.Generator | None = None,
    batch_size: int | None = None,
    memory_budget: int = MEMORY_BUDGET,
    progress: bool | None = None,
) -> Statistics:
    """What data say about the weights of a trained network, to be added to what other data say.

    Args:
        model: the trained network, the same wherever statistics are made.
        data: some of the data, in any form that `lapis.laplace` takes.
        likelihood: as in `lapis.laplace`; a noise that is not known can be tuned later.
        structure: "dense", "diagonal", "kronecker", "ekfac" or "lowrank". EKFAC statistics add up in one basis only:
            see `basis`. Low-rank ones keep eigenvalues above 0.01 unless a `rank` is given; what all parts left out
            adds up, is known (`omitted`), and where it is much for a prior `posterior` warns.
        weights: which weights, as in `lapis.laplace`. Parts add up only if all chose the same: for a `Subnetwork`
            give it the variances to choose by.
        curvature: as in `lapis.laplace`.
        rank: eigenpairs kept by low-rank statistics.
        basis: for "ekfac", statistics whose eigenvectors are used, Kronecker (of all data, summed: the result is then
            that of an EKFAC fit to all data) or EKFAC. Without it the basis is found from these data.
        generator: source of randomness for sampled curvature; seeded with 0 when not given.
        batch_size: for data that are not batched yet.
        memory_budget: bytes of working memory.
        progress: show a bar; by default on a terminal only.

    >>> import torch, lapis
    >>> x = torch.linspace(-1, 1, 30)[:, None]
    >>> model = torch.nn.Linear(1, 1)
    >>> parts = [lapis.statistics(model, (part, 2 * part), "regression") for part in torch.split(x, 20)]
    >>> sum(parts).posterior(prior=0.1)
    <kronecker LaplacePosterior, 2 weights, 30 examples, gaussian>
    """
    check_arguments(statistics, locals(), apart=("likelihood", "weights"))
    if NAMES.get(structure) == "implicit":
        raise _no_sums(f"structure={structure!r}")
    within = None if basis is None else basis.fit
    fit: LaplacePosterior = laplace(
        model, data, likelihood, structure=structure, weights=weights, curvature=curvature, generator=generator,
        batch_size=batch_size, memory_budget=memory_budget, progress=progress, rank=rank, basis=within,
    )  # fmt: skip
    return Statistics(fit)


def load_statistics(path: str | os.PathLike[str], model: nn.Module, likelihood: Likelihood | None = None) -> Statistics:
    """The statistics saved at `path`, for the same network with the same weights.

    `likelihood` is needed only if it is a `Custom` one, whose function no file can hold.
    """
    fit = load(path, model, likelihood)
    if not isinstance(fit, LaplacePosterior):
        raise _no_sums(f"a file with a {type(fit).__name__}")
    return Statistics(fit)


def _no_sums(got: str) -> OptionError:
    return OptionError(
        "Only stored curvature is a sum that can be added; an implicit posterior holds its data instead",
        expected='structure "dense", "diagonal", "kronecker", "ekfac" or "lowrank"',
        got=got,
        do='choose one of these; or bring the data together: lapis.laplace(..., structure="implicit", '
        'distributed="shards") under torch.distributed, which leaves them where they are',
    )
