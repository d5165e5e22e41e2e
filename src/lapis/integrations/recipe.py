"""How a callback makes its posterior: checked before training, carried out after it."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

from torch import nn

from lapis.errors import OptionError
from lapis.likelihoods import Likelihood
from lapis.likelihoods import resolve as resolve_likelihood
from lapis.posteriors.laplace.fit import laplace
from lapis.posteriors.laplace.matrix_free.implicit import ImplicitPosterior
from lapis.posteriors.laplace.stored import LaplacePosterior

OWN = ("model", "data", "likelihood")
"""Arguments of `lapis.laplace` that a callback provides itself."""


@dataclass(frozen=True)
class Recipe:
    """A Laplace posterior of a network that does not exist yet.

    Args:
        likelihood: as in `lapis.laplace`.
        tune: whether prior, noise and width are tuned.
        options: further arguments of `lapis.laplace`.
    """

    likelihood: str | Likelihood
    tune: bool
    options: dict[str, Any]

    def __post_init__(self) -> None:
        resolve_likelihood(self.likelihood)
        known = [name for name in inspect.signature(laplace).parameters if name not in OWN]
        unknown = sorted(set(self.options) - set(known))
        if unknown:
            raise OptionError(
                f"Unknown option {unknown[0]!r}",
                expected="options of lapis.laplace: " + ", ".join(known),
                got=", ".join(unknown),
                do="leave it out, or correct its spelling",
            )

    def check_processes(self, processes: int) -> None:
        """Raise OptionError if several processes train and `distributed` was not chosen: each would fit a part."""
        if processes > 1 and not self.options.get("distributed"):
            raise OptionError(
                f"{processes} processes train, and each reads a part of the data",
                expected="all data passed by data=, and distributed=True",
                got="a fit that is not distributed",
                do="pass data=<the training set> and distributed=True: it is divided, each example once",
            )

    def fit(self, model: nn.Module, data: Any) -> LaplacePosterior | ImplicitPosterior:
        """The posterior of the trained network."""
        posterior: LaplacePosterior | ImplicitPosterior = laplace(model, data, self.likelihood, **self.options)
        return posterior.tune() if self.tune else posterior
