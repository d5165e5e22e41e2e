"""Likelihoods p(y | f): what the network's outputs mean."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from lapis.errors import FileError, LikelihoodError, OptionError
from lapis.likelihoods.base import Likelihood
from lapis.likelihoods.bernoulli import Bernoulli
from lapis.likelihoods.categorical import Categorical
from lapis.likelihoods.custom import Custom
from lapis.likelihoods.gaussian import Gaussian
from lapis.likelihoods.heteroscedastic import HeteroscedasticGaussian
from lapis.likelihoods.poisson import Poisson

__all__ = [
    "Bernoulli",
    "Categorical",
    "Custom",
    "Gaussian",
    "HeteroscedasticGaussian",
    "Likelihood",
    "Poisson",
    "from_config",
    "resolve",
]

_BUILT_IN: dict[str, type[Gaussian | Categorical | Bernoulli | Poisson | HeteroscedasticGaussian]] = {
    "gaussian": Gaussian,
    "categorical": Categorical,
    "bernoulli": Bernoulli,
    "poisson": Poisson,
    "heteroscedastic": HeteroscedasticGaussian,
}
_ALIASES = {
    "regression": "gaussian",
    "classification": "categorical",
    "binary": "bernoulli",
    "counts": "poisson",
}


def resolve(likelihood: str | Likelihood) -> Likelihood:
    """A likelihood by name, or the one that was passed.

    >>> resolve("classification")
    Categorical(channels='last', ignore_index=-100)
    """
    if isinstance(likelihood, Likelihood):
        return likelihood
    key = _ALIASES.get(likelihood, likelihood) if isinstance(likelihood, str) else None
    if key not in _BUILT_IN:
        raise OptionError(
            "Unknown likelihood",
            expected=", ".join(f'"{name}"' for name in (*_BUILT_IN, *_ALIASES)) + ", or a Likelihood",
            got=repr(likelihood),
            do="choose one, or write your own with lapis.Custom(nll)",
        )
    return _BUILT_IN[key]()


def from_config(config: Mapping[str, Any]) -> Likelihood:
    """The likelihood that `to_config` described."""
    settings = dict(config)
    name = settings.pop("name", None)
    if name == Custom.name:
        raise LikelihoodError(
            "A custom likelihood is a function, and files keep no functions",
            expected=f"the likelihood {settings.get('label')!r} that was used for the fit",
            got="its name only",
            do="pass it to lapis.load(path, model, likelihood=...)",
        )
    if name not in _BUILT_IN:
        raise FileError(
            "Unknown likelihood in a file", expected=", ".join(_BUILT_IN), got=repr(name), do="use the original file"
        )
    try:
        if "noise" in settings and isinstance(settings["noise"], list):
            return Gaussian(**{**settings, "noise": torch.tensor(settings["noise"], dtype=torch.float64)})
        return _BUILT_IN[name](**settings)
    except TypeError as error:
        raise FileError(
            f"The settings of the {name} likelihood in a file do not fit",
            expected="the settings that its constructor takes",
            got=str(config),
            do="use the original file",
        ) from error
