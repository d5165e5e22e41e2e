"""What files hold of every Laplace posterior besides its curvature: mean, prior, and the records of what was done."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from torch import Tensor

from lapis.curvature.blocks.partition import NAMES
from lapis.evidence import TangentMode, Tuning
from lapis.likelihoods import Gaussian, Likelihood, from_config
from lapis.network import Network
from lapis.posteriors.laplace.calibration.search import Calibration
from lapis.posteriors.laplace.refinement.rounds import Refinement
from lapis.posteriors.over_weights import LinearisedPosterior
from lapis.posteriors.posterior import Facts, State
from lapis.priors import WeightPrior
from lapis.schema import optional, record, wrong

if TYPE_CHECKING:
    from lapis.posteriors.laplace.family import LaplaceFamily

TANGENT = ("converged", "remaining", "iterations", "products", "reason")
"""Fields of `TangentMode` that a file holds besides its tensors."""


def family_state(posterior: LaplaceFamily) -> State:
    """Mean, prior, tuning and tangent mode."""
    prior, tangent = posterior.weight_prior, posterior.tangent
    tensors = {"mean": posterior.mean, **prior.tensors()}
    if posterior.point is not posterior.mean:
        tensors["point"] = posterior.point
    if tangent is not None:
        tensors |= {"tangent.weights": tangent.weights, "tangent.statistics": tangent.statistics}
    config = {
        "structure": posterior.structure,
        "fitted_likelihood": posterior.fitted_likelihood.to_config(),
        **prior.config(),
        "temperature": posterior.temperature,
        "digest": posterior.curvature.digest,
        "tuning": posterior.tuning and asdict(posterior.tuning),
        "tangent": tangent and {name: getattr(tangent, name) for name in TANGENT},
        "calibration": posterior.calibration and asdict(posterior.calibration),
        "refinement": posterior.refinement and asdict(posterior.refinement),
        "width": posterior.width,
        "sharpness": posterior.sharpness,
    }
    return State(config, tensors)


def family_fields(state: State, network: Network, likelihood: Likelihood, facts: Facts) -> dict[str, Any]:
    """The fields shared by all structures, from a state; FileError for entries that make no sense."""
    fitted = likelihood if likelihood.name == "custom" else from_config(state.entry("fitted_likelihood", dict))
    if fitted.name != likelihood.name:
        raise wrong("fitted likelihood", repr(likelihood.name), repr(fitted.name))
    likelihood.curvature_scale(fitted)  # an error if their noises have other proportions
    prior = WeightPrior.from_file(state.config, state.tensors, network)
    mean, point = LinearisedPosterior.mean_and_point(state, network)
    return {
        "network": network,
        "likelihood": likelihood,
        "facts": facts,
        "mean": mean,
        "point": point,
        "fitted_likelihood": fitted,
        "prior": prior.to_prior(),
        "weight_prior": prior,
        "structure": state.word("structure", tuple(NAMES.values())),
        "temperature": state.number("temperature"),
        "tuning": optional(Tuning, state.entry("tuning", dict | None)),
        "tangent": _tangent(state, network, likelihood, facts),
        "calibration": optional(Calibration, state.entry("calibration", dict | None)),
        "refinement": optional(Refinement, state.entry("refinement", dict | None)),
        "width": state.number("width"),
        "sharpness": state.number("sharpness"),
    }


def statistics_from(state: State, name: str, likelihood: Likelihood, facts: Facts) -> Tensor:
    """The sums that the likelihood needs for log p(D), of the form that it has them in."""
    if isinstance(likelihood, Gaussian):
        return state.tensor(name, (2 * facts.n_outputs,), least=0)
    return state.tensor(name, (1,))


def _tangent(state: State, network: Network, likelihood: Likelihood, facts: Facts) -> TangentMode | None:
    found = state.entry("tangent", dict | None)
    if found is None:
        return None
    weights = state.tensor("tangent.weights", (network.size,))
    statistics = statistics_from(state, "tangent.statistics", likelihood, facts)
    return record(TangentMode, found | {"weights": weights, "statistics": statistics})
