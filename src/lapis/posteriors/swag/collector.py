"""The collector of SWAG: running moments of the weights that training passes through."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lapis.batches import check_repeatable
from lapis.errors import FileError, ModelError, OptionError
from lapis.files import read, write
from lapis.likelihoods import Likelihood
from lapis.likelihoods import resolve as resolve_likelihood
from lapis.network import Network
from lapis.network.batch_norm import batch_norms
from lapis.options import check_arguments, check_count
from lapis.posteriors.posterior import MEMORY_BUDGET, Facts
from lapis.posteriors.same_data import hold_batches
from lapis.posteriors.swag.posterior import RenewedSWAGPosterior, SWAGPosterior, marginal_variance
from lapis.schema import count, entry, tensor

FILE = "SWAG collector"
"""The kind of a collector's file."""


class SWAG:
    """Collects snapshots of a model's weights in any training loop, and makes a posterior of them.

    Args:
        model: the module that is being trained; only its trainable parameters are read.
        rank: how many of the last deviations are kept for correlations between weights; 0 for none. They take
            rank * P numbers of memory.

    Best called once an epoch, at a constant and rather high learning rate, after the network has been trained.

    >>> import lapis
    >>> model = nn.Linear(1, 1)
    >>> collector = lapis.SWAG(model, rank=2)
    >>> for value in (1.0, 2.0, 3.0):  # any training loop
    ...     _ = nn.init.constant_(model.weight, value)
    ...     collector.collect()
    >>> posterior = collector.posterior("regression")
    >>> posterior.mean[:1], posterior.variance[:1]
    (tensor([2.]), tensor([0.6667]))
    """

    def __init__(self, model: nn.Module, rank: int = 20) -> None:
        check_count("rank", rank, least=0)
        if rank == 1:
            raise OptionError(
                "One deviation has no covariance",
                expected="rank=0 (diagonal), or at least 2",
                got="rank=1",
                do="choose a larger rank",
            )
        self.network, self.rank = Network(model), rank
        self.collected = 0
        """Snapshots so far."""
        self.mean = self.network.flat().double().zero_()
        """Running mean, (P,), in float64."""
        self._squares = torch.zeros_like(self.mean)
        """Sum of squared distances from the mean: unlike mean squares, it does not cancel where weights hardly move."""
        self._deviations: deque[Tensor] = deque(maxlen=rank)

    def __len__(self) -> int:
        return self.collected

    def __repr__(self) -> str:
        return f"<SWAG, {self.network.size:,} weights, {self.collected} snapshots, rank {self.rank}>"

    def collect(self) -> None:
        """Take a snapshot of the model's weights as they are now."""
        weights = self.network.flat()
        if not bool(torch.isfinite(weights).all()):
            raise ModelError(
                "The weights are not finite",
                expected="finite weights at every snapshot",
                got=f"NaN or infinity after {self.collected} snapshots",
                do="train with a smaller learning rate; the snapshots so far can still be used",
            )
        self.collected += 1
        step = weights.double() - self.mean
        self.mean += step / self.collected
        rest = weights.double() - self.mean
        self._squares.addcmul_(step, rest)
        self._deviations.append(rest.to(weights.dtype))

    @property
    def variance(self) -> Tensor:
        """Variance of each weight over all snapshots: mean of squares minus square of the mean, (P,)."""
        self._check_collected()
        return self._squares / self.collected

    @property
    def deviations(self) -> Tensor:
        """The last deviations from the running mean of their time, (K, P), K at most `rank`."""
        return torch.stack(list(self._deviations)) if self._deviations else self.network.flat()[None][:0]

    def marginal_variance(self) -> Tensor:
        """Variance of each weight under the posterior, (P,)."""
        return marginal_variance(self.variance.to(self.network.dtype), self.deviations)

    def posterior(
        self, likelihood: str | Likelihood, data: Any = None, *, memory_budget: int = MEMORY_BUDGET
    ) -> SWAGPosterior:
        """The posterior of the snapshots so far; the model keeps its weights, and must keep them from now on.

        Args:
            likelihood: see `lapis.laplace`.
            data: the training data, or enough of them for batch-norm statistics. Needed for networks with batch norm,
                whose statistics are renewed for every drawn network by a pass over these data, which stay in memory;
                for others optional.
            memory_budget: bytes of working memory for predictions.
        """
        family = resolve_likelihood(likelihood)
        check_arguments(SWAG.posterior, locals())
        variance = self.variance
        layers = batch_norms(self.network.module)
        if layers and data is None:
            raise ModelError(
                f"The network has batch norm ({next(iter(layers))!r}), whose statistics belong to one set of weights",
                expected="data, from which they are renewed for every drawn network",
                got="data=None",
                do="pass the training data, or some thousands of them: collector.posterior(likelihood, data)",
            )
        network = Network(self.network.module, lambda name, _: name in self.network.shapes)
        if network.shapes != self.network.shapes:
            frozen = next(name for name in self.network.names if name not in network.shapes)
            raise ModelError(
                "The network's trainable parameters are not those of the snapshots",
                expected=f"{frozen!r} trainable, as when it was collected",
                got="a frozen parameter",
                do="unfreeze it (requires_grad_), then ask for the posterior",
            )
        if data is not None:
            check_repeatable(data)
        facts = Facts.of(network, family, data, memory_budget)
        network.signature = facts.signature
        dtype = network.dtype
        fields = (network, family, facts, self.mean.to(dtype), variance.to(dtype), self.deviations, self.collected)
        if not layers:
            return SWAGPosterior(*fields)
        return RenewedSWAGPosterior(*fields, batches=tuple(hold_batches(data, network)))

    def _check_collected(self) -> None:
        if self.collected < 2:
            raise ModelError(
                "There are too few snapshots",
                expected="at least 2, better 20 or more",
                got=str(self.collected),
                do="call collect() in the training loop, once an epoch",
            )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write all snapshots to one file, whole or not at all, for `SWAG.load` after an interruption."""
        config, tensors = self.state()
        write(path, config | {"shapes": self.network.shapes}, tensors, FILE)

    def state(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Counts, and copies of the moments and deviations; the inverse of `restored`."""
        tensors = {"mean": self.mean.clone(), "squares": self._squares.clone()}
        if self._deviations:
            tensors["deviations"] = self.deviations
        return {"rank": self.rank, "collected": self.collected}, tensors

    @classmethod
    def restored(cls, model: nn.Module, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> SWAG:
        """The collector of this state; FileError unless it is one of such a model."""
        collector = cls(model, count(config, "rank", least=0))
        network = collector.network
        collector.collected = count(config, "collected", least=0)
        kept, size = min(collector.rank, collector.collected), (network.size,)
        collector.mean = tensor(tensors, "mean", size).to(network.device)
        collector._squares = tensor(tensors, "squares", size, least=0.0).to(network.device)
        if kept:
            collector._deviations.extend(tensor(tensors, "deviations", (kept, *size), network.dtype).to(network.device))
        return collector

    @classmethod
    def load(cls, path: str | os.PathLike[str], model: nn.Module) -> SWAG:
        """The collector saved at `path`, to go on collecting from a model of the same architecture."""
        contents = read(Path(path), FILE)
        config, tensors = contents.config, contents.tensors
        shapes = {name: tuple(shape) for name, shape in entry(config, "shapes", dict[str, list[int]]).items()}
        network = Network(model)
        if list(network.shapes.items()) != list(shapes.items()):
            strange = next(
                (name for name in {**shapes, **network.shapes} if shapes.get(name) != network.shapes.get(name)), ""
            )
            raise FileError(
                "The snapshots belong to another network",
                expected=f"trainable parameters as collected, {strange!r} of shape {shapes.get(strange)}",
                got=f"shape {network.shapes.get(strange)}" if strange in network.shapes else "no such parameter",
                do="build the network that the snapshots were collected from",
            )
        return cls.restored(model, config, tensors)
