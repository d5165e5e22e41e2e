"""Posteriors over a network's functions: the interface `Posterior`, and the classes that implement it."""

from lapis.posteriors.binary import BinaryPosterior
from lapis.posteriors.dropout import DropoutPosterior
from lapis.posteriors.ensemble import EnsemblePosterior
from lapis.posteriors.factored import FactoredPosterior
from lapis.posteriors.laplace.matrix_free.drawn import DrawnPosterior
from lapis.posteriors.laplace.matrix_free.implicit import ImplicitPosterior
from lapis.posteriors.laplace.stored import LaplacePosterior
from lapis.posteriors.mixture import MixturePosterior
from lapis.posteriors.over_weights import GaussianPosterior, LinearisedPosterior, WeightPosterior
from lapis.posteriors.posterior import Facts, LatentKind, Posterior, State
from lapis.posteriors.storage import load
from lapis.posteriors.swag import SWAG, SWAGPosterior
from lapis.posteriors.variational import VariationalPosterior

__all__ = [
    "SWAG",
    "BinaryPosterior",
    "DrawnPosterior",
    "DropoutPosterior",
    "EnsemblePosterior",
    "FactoredPosterior",
    "Facts",
    "GaussianPosterior",
    "ImplicitPosterior",
    "LaplacePosterior",
    "LatentKind",
    "LinearisedPosterior",
    "MixturePosterior",
    "Posterior",
    "SWAGPosterior",
    "State",
    "VariationalPosterior",
    "WeightPosterior",
    "load",
]
