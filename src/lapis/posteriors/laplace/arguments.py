"""Arguments shared by the posteriors of the Laplace family, and their checks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from lapis.errors import OptionError
from lapis.priors import Groups

TOLERATED_LOSS = 0.004
"""Nats an example that a posterior's predictions of its training data may lose against the best width."""


@dataclass(frozen=True)
class TuneOptions:
    """The arguments of `LaplaceFamily.tune`; None where the structure's default is meant."""

    method: str | None
    groups: Groups | None
    noise: bool
    max_iterations: int | None
    tolerance: float | None
    samples: int | None
    solver: str | None
    batch_size: int | None
    tolerated_loss: float | None
    generator: torch.Generator | None
    progress: bool | None


def refuse_options(reason: str, **options: Any) -> None:
    """Raise OptionError for options that were given but have no effect here."""
    for name, value in options.items():
        if value is not None:
            raise OptionError(reason, expected=f"{name}=None", got=repr(value), do=f"leave {name} out")
