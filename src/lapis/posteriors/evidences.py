"""Log evidences of several posteriors, after checks that they can be compared."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lapis.errors import DataError, OptionError

if TYPE_CHECKING:
    from lapis.posteriors.posterior import Posterior


@dataclass(frozen=True)
class Evidence:
    """log p(D), or a bound of it, and what it is about."""

    value: Tensor
    """0-d float64."""
    digest: int
    """Fingerprint of the data."""
    kind: str
    """How it was taken: only evidences of one kind can be compared."""


def log_evidences(named: Mapping[str, Posterior]) -> Tensor:
    """log p(D) of each posterior, (K,) float64; refused unless all are of one kind and about the same data."""
    found: dict[str, Evidence] = {}
    for name, posterior in named.items():
        evidence = posterior._evidence_of_data()
        if evidence is None:
            raise OptionError(
                f"{type(posterior).__name__} has no evidence",
                expected="Laplace or variational posteriors",
                got=f"{type(posterior).__name__} for {name!r}",
                do='use a mixture with weights="stacking", which needs predictions of held-out data only',
            )
        found[name] = evidence
    first_name, first = next(iter(found.items()))
    for name, evidence in found.items():
        if evidence.digest != first.digest or named[name].n_data != named[first_name].n_data:
            raise DataError(
                "Posteriors of different data cannot be compared",
                expected=f"{named[first_name].n_data} examples with fingerprint {first.digest:016x} ({first_name!r})",
                got=f"{named[name].n_data} with {evidence.digest:016x} for {name!r}",
                do="fit all models to the same inputs and targets",
            )
        if evidence.kind != first.kind:
            raise OptionError(
                "These evidences are of different kinds",
                expected="one temperature, and all at t or all at theta* (at_tangent_mode)",
                got=f"{first.kind} for {first_name!r}, {evidence.kind} for {name!r}",
                do="make them alike",
            )
    return torch.stack([evidence.value.detach().double().cpu() for evidence in found.values()])
