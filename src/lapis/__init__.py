"""Lapis: error bars for trained PyTorch networks, by Laplace approximations and their kin."""

from __future__ import annotations

from functools import partial
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from lapis import decisions, latent, learning_rule, lifelong, metrics, optim
from lapis.curvature.recording.listener import register_rule
from lapis.decisions import active
from lapis.distributed import load_statistics, statistics
from lapis.errors import (
    DataError,
    FileError,
    LapisError,
    LapisWarning,
    LikelihoodError,
    MemoryBudgetError,
    ModelError,
    NotPositiveDefiniteError,
    OptionError,
    PriorError,
    StructureError,
)
from lapis.likelihoods import (
    Bernoulli,
    Categorical,
    Custom,
    Gaussian,
    HeteroscedasticGaussian,
    Likelihood,
    Poisson,
)
from lapis.network import split_vector
from lapis.normalised import normalised_groups
from lapis.options import check_arguments
from lapis.posteriors import (
    SWAG,
    DrawnPosterior,
    ImplicitPosterior,
    LaplacePosterior,
    Posterior,
    VariationalPosterior,
    load,
)
from lapis.posteriors.dropout import dropout
from lapis.posteriors.laplace.arithmetic.merging import merge
from lapis.posteriors.laplace.fit import laplace
from lapis.posteriors.laplace.subnetwork import Subnetwork
from lapis.posteriors.mixture import mixture
from lapis.predictions import Prediction
from lapis.priors import Prior
from lapis.training import Comparison, compare, ensemble, swag, train
from lapis.training.variational.fit import variational

if TYPE_CHECKING:
    from lapis import plots
else:

    def __getattr__(name: str) -> Any:
        """`lapis.plots`, imported when first used: matplotlib takes a noticeable part of a second."""
        if name == "plots":
            return import_module("lapis.plots")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


try:
    __version__ = version("lapis")
except PackageNotFoundError:  # run from a source tree that is not installed
    __version__ = "0+unknown"


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def unflatten(vector: Tensor, like: Posterior | nn.Module) -> dict[str, Tensor] | list[dict[str, Tensor]]:
    """A flat weight vector (P,) as a dictionary of parameters, or a stack (n, P) as a list of dictionaries.

    `like` is a posterior (its chosen weights), or a model (its trainable ones). The dictionaries go straight into
    `torch.func.functional_call`.
    """
    check_arguments(unflatten, locals())
    if isinstance(like, Posterior):
        split = like.network.unflatten
    else:
        shapes = {name: tuple(p.shape) for name, p in like.named_parameters() if p.requires_grad}
        split = partial(split_vector, shapes=shapes)
    return [split(row) for row in vector] if vector.dim() == 2 else split(vector)


__all__ = [
    "SWAG",
    "Bernoulli",
    "Categorical",
    "Comparison",
    "Custom",
    "DataError",
    "DrawnPosterior",
    "FileError",
    "Gaussian",
    "HeteroscedasticGaussian",
    "ImplicitPosterior",
    "LapisError",
    "LapisWarning",
    "LaplacePosterior",
    "Likelihood",
    "LikelihoodError",
    "MemoryBudgetError",
    "ModelError",
    "NotPositiveDefiniteError",
    "OptionError",
    "Poisson",
    "Posterior",
    "Prediction",
    "Prior",
    "PriorError",
    "StructureError",
    "Subnetwork",
    "VariationalPosterior",
    "active",
    "compare",
    "decisions",
    "dropout",
    "ensemble",
    "laplace",
    "latent",
    "learning_rule",
    "lifelong",
    "load",
    "load_statistics",
    "merge",
    "metrics",
    "mixture",
    "normalised_groups",
    "optim",
    "plots",
    "register_rule",
    "statistics",
    "swag",
    "train",
    "unflatten",
    "variational",
]
