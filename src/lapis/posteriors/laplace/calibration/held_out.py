"""The log likelihood of held-out data under changed prior precisions, temperature and noise of a Laplace posterior.

With prior factors c_g, a temperature factor T and a noise factor n, v = T n^2, the precision of the weights is
C / v + sum_g c_g Lambda_g, and the outputs' covariance

    V = v J (C + sum_g u_g Lambda_g)^-1 J^T = v sum_g F_g(u_g),    u_g = v c_g,

where every block of weights belongs to one group g, and with one factor for all groups always. One pass over the data
finds F on a grid of u; every candidate (u on the grid, any v) then costs a link only. Logits can be multiplied by a
sharpness s besides: N(s f, s^2 V).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lapis.batches import Batch, all_finite, naming
from lapis.curvature.backward.seeds import position_seeds, unit_factor
from lapis.curvature.blocks.block import common_group
from lapis.curvature.blocks.sweep import sweep
from lapis.curvature.budget import work_bytes
from lapis.curvature.outputs import check_width
from lapis.curvature.working_memory import examples_at_once
from lapis.errors import NotPositiveDefiniteError
from lapis.likelihoods import Likelihood
from lapis.posteriors.laplace.calibration.recalled import Part, Recalled
from lapis.predictions import LatentGaussian
from lapis.predictions import predict as predict_outputs
from lapis.progress import track
from lapis.ranks import Ranks

if TYPE_CHECKING:
    from lapis.posteriors.laplace.stored import LaplacePosterior
    from lapis.posteriors.over_weights import LinearisedPosterior

STEP = 0.5
"""Distance of grid points in log2 u."""

MOST_GROUPS = 8
"""Up to this many prior groups have factors of their own."""

SHARE = 4
"""F may take 1 / SHARE of the memory budget."""


@dataclass(frozen=True)
class Setting:
    """Logarithms to base 2 of the factors u of each group (or one for all groups), temperature, noise and sharpness."""

    u: tuple[float, ...]
    temperature: float = 0.0
    noise: float = 0.0
    sharpness: float = 0.0

    @property
    def v(self) -> float:
        """log2 of T n^2, by which the data's curvature is divided."""
        return self.temperature + 2 * self.noise

    def applied(self, posterior: Any) -> Any:
        """The posterior with these factors and its own width, without the records of earlier searches."""
        prior = posterior.weight_prior
        octaves = torch.tensor(self.u, dtype=torch.float64, device=prior.precision.device) - self.v
        precision = prior.precision.detach() * octaves.exp2()
        changed = posterior._changed(
            prior=replace(posterior.prior, precision=precision),
            weight_prior=prior.with_precision(precision),
            temperature=posterior.temperature * 2**self.temperature,
            likelihood=noisier(posterior.likelihood, self.noise),
        )
        return replace(changed, width=posterior.width, sharpness=2**self.sharpness)


def noisier(likelihood: Likelihood, octaves: float) -> Likelihood:
    """The likelihood with its noise, if it has one, times 2^octaves."""
    if likelihood.noise is None or octaves == 0:
        return likelihood
    return likelihood.with_noise(likelihood.noise.detach() * 2**octaves)


class HeldOut(ABC):
    """The log likelihood of batches of held-out data, summed over examples."""

    indices: range | None = None
    """u may be STEP times any of these, without a pass over the data; None where every candidate takes a pass."""

    def __init__(
        self,
        posterior: LinearisedPosterior,
        batches: Sequence[Batch],
        link: Any,
        recalled: Recalled | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        self.posterior, self.batches, self.link, self.recalled = posterior, batches, link, recalled
        self.ranks = ranks
        """The processes that hold a part of the data each; None for one."""
        self.axes = 1
        """How many prior precisions can be changed one by one; 1 where all change together."""
        with together(ranks):
            self._plain = [self._outputs(batch) for batch in batches]
            for f, _ in self._plain[:1]:
                latent = LatentGaussian(f[:1], torch.zeros_like(f[:1]))
                predict_outputs(posterior.likelihood, latent, link=link)  # refuses unknown links

    @property
    def count(self) -> int:
        """Held-out examples."""
        return summed(sum(map(len, self.batches)), self.ranks)

    def _total(self, make: Callable[[], float]) -> float:
        """The sum over all ranks of a sum over examples; one exchange, unless a rank has no number to give."""
        if self.ranks is None:
            return make()
        number, cause = math.nan, None
        try:
            number = make()
        except Exception as error:  # noqa: BLE001  (the others must hear of it; raised below)
            cause = error
        own = torch.tensor(number, dtype=torch.float64, device=self.posterior.network.device)
        total = float(self.ranks.total(own))
        if math.isnan(total):
            with self.ranks.together("held-out data"):
                if cause is not None:
                    raise cause
        return total

    def _outputs(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """f and targets of a batch, canonical."""
        network, likelihood = self.posterior.network, self.posterior.likelihood
        with naming(batch.where), network.prepared(), torch.no_grad():
            raw = network.call(batch.inputs)
            f = likelihood.canonical(raw).detach().double()  # a network may return a parameter as it is
            check_width(f, self.posterior.n_outputs)
            targets = likelihood.targets(batch.targets, f, raw.shape)
        return f, targets.double() if targets.is_floating_point() else targets

    def plain(self, noise: float, sharpness: float = 0.0) -> float:
        """Of the network alone, with its noise times 2^noise and its logits times 2^sharpness."""
        likelihood = noisier(self.posterior.likelihood, noise)
        return self._total(lambda: -sum(float(likelihood.nll(2**sharpness * f, y).sum()) for f, y in self._plain))

    def log_likelihood(self, setting: Setting) -> float:
        """Of the posterior's predictions; minus infinity where they do not exist."""

        def own() -> float:
            try:
                total = sum(float(part.double().sum()) for part in self._log_probs(setting))
            except NotPositiveDefiniteError:
                return -math.inf
            return -math.inf if math.isnan(total) else total

        if self.recalled is None or self.indices is not None:  # else a candidate takes a pass over the data
            return self._total(own)
        return self.recalled.value(lambda: self._total(own))

    @abstractmethod
    def _log_probs(self, setting: Setting) -> Iterator[Tensor]:
        """log p(y | x) of some examples after the other."""

    @staticmethod
    def _latent(posterior: LinearisedPosterior, batch: Batch) -> LatentGaussian:
        latent = posterior.predict(batch.inputs, progress=False).latent
        assert isinstance(latent, LatentGaussian)
        return latent

    def _log_prob(self, latent: LatentGaussian, factor: float, setting: Setting, targets: Tensor) -> Tensor:
        """With the outputs' covariance times a factor, and the setting's noise and sharpness."""
        covariance = None if latent.covariance is None else factor * latent.covariance
        changed = replace(latent, variance=factor * latent.variance, covariance=covariance)
        likelihood = noisier(self.posterior.likelihood, setting.noise)
        scaled = changed.scaled(2**setting.sharpness) if setting.sharpness else changed
        return predict_outputs(likelihood, scaled, link=self.link).log_prob(targets)

    def extend(self, below: int, above: int) -> None:
        """Add so many indices at the two ends."""
        assert self.indices is not None
        self.indices = range(self.indices.start - below, self.indices.stop + above)


class Predicted(HeldOut):
    """By predictions of the changed posterior: for every structure, each u a pass over the data."""

    _latest: tuple[tuple[float, ...], list[LatentGaussian]] | None = None
    """The last u, and the outputs under it."""

    def __init__(
        self,
        posterior: LinearisedPosterior,
        batches: Sequence[Batch],
        link: Any,
        recalled: Recalled | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        super().__init__(posterior, batches, link, recalled, ranks)
        if recalled is not None:
            recalled.agree()

    def _log_probs(self, setting: Setting) -> Iterator[Tensor]:
        if self._latest is None or self._latest[0] != setting.u:
            changed = Setting(setting.u).applied(self.posterior)
            self._latest = setting.u, [self._latent(changed, batch) for batch in self.batches]
        for batch, latent in zip(self.batches, self._latest[1], strict=True):
            yield self._log_prob(latent, 2.0**setting.v, setting, batch.targets)


class Narrowed(HeldOut):
    """Of a covariance V / u that is known as a whole only, as that of draws: from one prediction of the data."""

    def __init__(
        self,
        posterior: LinearisedPosterior,
        batches: Sequence[Batch],
        link: Any,
        indices: range,
        progress: bool | None,
        ranks: Ranks | None = None,
    ) -> None:
        super().__init__(posterior, batches, link, None, ranks)
        self.indices = indices
        tracked = track(batches, "held-out data", len(batches), progress)
        with together(ranks):
            self._latents = [self._latent(posterior, batch) for batch in tracked]

    def _log_probs(self, setting: Setting) -> Iterator[Tensor]:
        for batch, latent in zip(self.batches, self._latents, strict=True):
            yield self._log_prob(latent, 2.0 ** -setting.u[0], setting, batch.targets)


class Swept(HeldOut):
    """From F on a grid of u."""

    posterior: LaplacePosterior
    indices: range

    def __init__(
        self,
        posterior: LaplacePosterior,
        batches: Sequence[Batch],
        link: Any,
        indices: range,
        progress: bool | None,
        recalled: Recalled | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        super().__init__(posterior, batches, link, recalled, ranks)
        self.indices, self.progress = indices, progress
        self.full = posterior._full_by_default()
        self.groups = self._groups(len(indices))
        self.axes = max(self.groups) + 1
        with together(ranks):
            self._parts = self._pass(indices)

    def _groups(self, factors: int) -> list[int]:
        """The group of each block; all in one if some block has several, if they are many, or do not fit in memory."""
        prior = self.posterior.weight_prior
        found = [common_group(prior, block.sites) for block in self.posterior.curvature.blocks]
        several = [group for group in found if group is not None]
        count = len(prior.precision)
        apart = len(several) == len(found) and len(set(several)) == count <= MOST_GROUPS
        return (
            several if apart and fits(self.posterior, self.batches, factors * count, self.ranks) else [0] * len(found)
        )

    def extend(self, below: int, above: int) -> None:
        """Add so many grid points at the two ends, by another pass over the data."""
        old = self.indices
        lower, upper = range(old.start - below, old.start), range(old.stop, old.stop + above)
        with together(self.ranks):
            pieces = [self._pass(part) if part != old else self._parts for part in (lower, old, upper) if len(part)]
        self._parts = [
            replace(same[0], grid=torch.cat([part.grid for part in same], 1)) for same in zip(*pieces, strict=True)
        ]
        super().extend(below, above)

    def _pass(self, indices: range) -> list[Part]:
        posterior, curvature = self.posterior, self.posterior.curvature
        precision = posterior.weight_prior.precision
        factors = (STEP * torch.tensor(indices, dtype=torch.float64, device=precision.device)).exp2()
        prior = posterior.weight_prior.with_precision(precision.detach())
        scale = posterior.scale.detach()
        sweeps = [sweep(block, prior, scale, factors) for block in curvature.blocks]
        work = work_bytes(posterior.facts.memory_budget)
        found: dict[Any, list[Part]] = {}
        for batch in track(self.batches, "held-out data", len(self.batches), self.progress):
            for part in batch.split(examples_at_once(curvature, 2 * curvature.outputs, work)):
                make = partial(self._part, part, sweeps)
                with naming(part.where), posterior.network.prepared():
                    made = make() if self.recalled is None else self.recalled.part(make, posterior.network.device)
                key = (made.mean.shape[1:], made.raw_shape[1:], made.targets.shape[1:])
                found.setdefault(key, []).append(made)
        return [_joined(parts) for parts in found.values()]

    def _part(self, batch: Batch, sweeps: Sequence[Any]) -> Part:
        posterior, curvature = self.posterior, self.posterior.curvature
        record = curvature.tape.record(batch.inputs)
        f = record.f.detach()
        check_width(f, curvature.outputs)
        by_position = []
        for seeds in position_seeds(unit_factor(f), f.shape[-1]):
            contributions = record.contributions(seeds)
            total: list[Tensor | None] = [None] * self.axes
            for one, sites, group in zip(sweeps, curvature.sites_of, self.groups, strict=True):
                found = one([contributions[site] for site in sites], not self.full).to(f.dtype)
                before = total[group]
                total[group] = found if before is None else before.add_(found)
            by_position.append(torch.stack([part for part in total if part is not None]))
        mean = f if posterior.mean is posterior.point else f + posterior._shift(batch.inputs).to(f.dtype)
        return Part(mean, torch.stack(by_position, 3), batch.targets, tuple(record.raw_shape))

    def _log_probs(self, setting: Setting) -> Iterator[Tensor]:
        places = [round(u / STEP) - self.indices.start for u in setting.u]
        if not all(0 <= place < len(self.indices) for place in places):
            yield torch.tensor(-math.inf)
            return
        for part in self._parts:
            spread = torch.stack([part.grid[group, place] for group, place in enumerate(places)])
            spread = spread.sum(0) * self.posterior.width
            if not all_finite(spread):
                yield torch.tensor(-math.inf)
                return
            variance = spread.diagonal(dim1=-2, dim2=-1) if self.full else spread
            latent = LatentGaussian(part.mean, variance, spread if self.full else None, raw_shape=part.raw_shape)
            yield self._log_prob(latent, 2.0**setting.v, setting, part.targets)


def _joined(parts: Sequence[Part]) -> Part:
    if len(parts) == 1:
        return parts[0]
    shape = (sum(part.raw_shape[0] for part in parts), *parts[0].raw_shape[1:])
    return Part(
        torch.cat([part.mean for part in parts]),
        torch.cat([part.grid for part in parts], 2),
        torch.cat([part.targets for part in parts]),
        shape,
    )


def fits(posterior: LinearisedPosterior, batches: Sequence[Batch], slices: int, ranks: Ranks | None = None) -> bool:
    """Whether so many (co)variances of all held-out outputs fit in their share of the memory budget, on every rank."""
    outputs, network, positions = posterior.n_outputs, posterior.network, 0
    with together(ranks), network.prepared(), torch.no_grad():
        for batch in batches[:1]:
            positions = posterior.likelihood.canonical(network.call(batch.inputs)).shape[1]
    each = positions * outputs * (outputs if posterior._full_by_default() else 1) * network.dtype.itemsize
    found = slices * each * sum(map(len, batches)) <= posterior.facts.memory_budget // SHARE
    return found if ranks is None else all(ranks.numbers(int(found)))


def together(ranks: Ranks | None) -> AbstractContextManager[None]:
    """Work that ends for all ranks when it fails on one of them."""
    return nullcontext() if ranks is None else ranks.together("held-out data")


def summed(number: int, ranks: Ranks | None) -> int:
    """The sum of whole numbers over the ranks."""
    return number if ranks is None else sum(ranks.numbers(number))
