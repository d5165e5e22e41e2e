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
    RankError,
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
from lapis.linear_models import LinearPosterior, RandomFourierFeatures, linear
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
from lapis.reports import report
from lapis.training import Comparison, compare, ensemble, swag, train
from lapis.training.variational.fit import variational

if TYPE_CHECKING:
    from lapis import data, estimators, export, imaging, plots
    from lapis.estimators import LaplaceClassifier, LaplaceRegressor
else:

    def __getattr__(name: str) -> Any:
        """Rooms that most programs do not need, imported when first used."""
        if name in ("data", "estimators", "export", "imaging", "plots"):
            return import_module(f"lapis.{name}")
        if name in ("LaplaceClassifier", "LaplaceRegressor"):
            return getattr(import_module("lapis.estimators"), name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


try:
    __version__ = version("lapis-bayes")
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
    "LaplaceClassifier",
    "LaplacePosterior",
    "LaplaceRegressor",
    "Likelihood",
    "LikelihoodError",
    "LinearPosterior",
    "MemoryBudgetError",
    "ModelError",
    "NotPositiveDefiniteError",
    "OptionError",
    "Poisson",
    "Posterior",
    "Prediction",
    "Prior",
    "PriorError",
    "RandomFourierFeatures",
    "RankError",
    "StructureError",
    "Subnetwork",
    "VariationalPosterior",
    "active",
    "compare",
    "data",
    "decisions",
    "dropout",
    "ensemble",
    "estimators",
    "export",
    "imaging",
    "laplace",
    "latent",
    "learning_rule",
    "lifelong",
    "linear",
    "load",
    "load_statistics",
    "merge",
    "metrics",
    "mixture",
    "normalised_groups",
    "optim",
    "plots",
    "register_rule",
    "report",
    "statistics",
    "swag",
    "train",
    "unflatten",
    "variational",
]
