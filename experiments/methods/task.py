"""A problem that every method is tried on: its data, and its networks, trained once and kept."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn
from trust.data import Labelled
from trust.networks import Training, train

import lapis
from methods import kept


@dataclass
class Task:
    """Data, how networks are made and trained, and what was made so far.

    Network 0 is the one that all methods for a single trained network share; the others are further members of the
    ensemble. Networks with dropout are trained with it.
    """

    name: str
    seed: int
    train: Labelled
    validation: Labelled
    likelihood: str | lapis.Likelihood
    make: Callable[[float], nn.Module]
    """A new network, from a dropout probability."""
    training: Training
    cache: Path
    dropout: float = 0.1
    members: int = 5
    snapshots: int = 20
    """Epochs of SWAG after training."""
    variational_steps: int | None = None
    subnetwork: int = 1000
    posteriors: dict[str, lapis.Posterior] = field(default_factory=dict)
    networks: dict[tuple[int, float], nn.Module] = field(default_factory=dict)

    def generator(self) -> torch.Generator:
        return torch.Generator().manual_seed(self.seed)

    def network(self, number: int = 0, dropout: float = 0.0) -> nn.Module:
        """A trained network, in evaluation mode."""
        if (number, dropout) not in self.networks:
            seed = 1000 * self.seed + number
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed)
                model = self.make(dropout)
                described = kept.description(model, self.training, self.likelihood, self.train)
                path = self.cache / f"{self.name}-{self.seed}-{number}{'-dropout' if dropout else ''}.safetensors"
                if kept.restore(model, path, described) is None:
                    started = time.process_time()
                    family = lapis.likelihoods.resolve(self.likelihood)
                    train(model, *self.train, family, self.training, seed)
                    kept.keep(model, path, described, time.process_time() - started)
            self.networks[number, dropout] = model.eval()
        return self.networks[number, dropout]
