"""What a diagnosis checks of Laplace posteriors: prior, effective parameters, noise, searches, doubt at the data."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from lapis.posteriors.diagnosis.data import Seen
from lapis.posteriors.diagnosis.report import Notes

if TYPE_CHECKING:
    from lapis.posteriors.laplace.family import LaplaceFamily

SMALLEST, LARGEST = 1e-8, 1e8
"""Prior precisions outside of this range say that data and prior do not meet."""

ALL, MANY = 0.95, 50
"""Above this share of effective parameters, of more than MANY weights, the network may be too small."""

DOUBTFUL = 1.25
"""Factor by which sum tr(H V) may differ from gamma without a finding."""

NOISY = 1.5
"""Factor between the noise and the residuals' standard deviation that is no finding yet."""


def examine(posterior: LaplaceFamily, notes: Notes, seen: Seen | None, progress: bool | None) -> None:
    """See `Posterior._examine`."""
    gamma = float(posterior._gamma(progress))
    _prior(posterior, notes)
    _effective_parameters(posterior, notes, gamma)
    _noise(posterior, notes, gamma)
    _searches(posterior, notes)
    if seen is not None:
        _doubt(posterior, notes, seen, gamma)


def _prior(posterior: LaplaceFamily, notes: Notes) -> None:
    precision = posterior.weight_prior.precision.detach()
    low, high = float(precision.min()), float(precision.max())
    refined = posterior.refinement is not None and posterior.refinement.tuned
    tuned = "tuned by the ELBO" if refined else "tuned" if posterior.tuning else "neither tuned nor calibrated"
    how = "calibrated" if posterior.calibration else tuned
    notes.value("precision", "prior precision", low, how if low == high else f"to {high:.4g} by group; {how}")
    if posterior.width != 1:
        notes.value("width", "width of the covariance", posterior.width, "1; tune narrows what its data rule out")
    if posterior.calibration is not None and posterior.calibration.prefers_plain:
        notes.finding(
            "Calibration found no prior better than the network alone: predictions carry no doubt about the weights.",
            'Use refine(data) before calibrate, structure="ekfac" or "dense", or weights="last_layer".',
        )
        return
    bound = () if posterior.tuning is None else posterior.tuning.at_bound
    if bound:
        notes.finding(
            f"Tuning ran to the end of its range for {_listed(list(bound))}: the data leave it undetermined.",
            "Share one precision among more weights (groups), or fix it: with_prior(...), or tune(noise=False).",
        )
    names = posterior.weight_prior.labels if posterior.weight_prior.group_of is not None else ()
    values = precision.tolist() if names else [low, high]
    labels = names or ("the smallest", "the largest")
    extreme = [
        f"{label} ({value:.2g})"
        for label, value in zip(labels, values, strict=True)
        if not SMALLEST < value < LARGEST and label not in bound
    ]
    if extreme:
        notes.finding(
            f"The prior precision is extreme: {_listed(extreme)}. Weights are held at the prior's mean, or left free.",
            "Scale inputs and targets, or share one precision among more weights (groups).",
        )


def _effective_parameters(posterior: LaplaceFamily, notes: Notes, gamma: float) -> None:
    size = posterior.n_weights
    notes.value("gamma", "effective parameters gamma", gamma, f"of {size:,} weights, {posterior.n_data:,} examples")
    if gamma > ALL * size and size > MANY:
        notes.finding(
            f"The data determine nearly every weight (gamma {gamma:.1f} of {size:,}): the prior has no say.",
            "The network may be too small: compare the evidence of a larger one.",
        )
    if gamma < 0.5 and not (posterior.calibration is not None and posterior.calibration.prefers_plain):
        notes.finding(
            f"The data determine none of the weights (gamma {gamma:.2g}): the posterior is the prior.",
            "Check that the network is trained, and use a smaller prior precision or tune().",
        )


def _noise(posterior: LaplaceFamily, notes: Notes, gamma: float) -> None:
    """The noise of each output against the residuals of the training data, n - gamma of which are free."""
    noise = posterior.likelihood.noise
    if noise is None:
        return
    squared, counts = posterior.curvature.statistics.detach().double().cpu().chunk(2)
    sigma = noise.detach().double().cpu().expand(len(squared))
    free = (counts - gamma / len(counts)).clamp(min=1.0)
    residual = (squared / free).sqrt()
    ratio = (residual / sigma).log().abs()
    worst = int(ratio.argmax())
    which = f" of output {worst}" if len(squared) > 1 else ""
    notes.value("noise", f"noise{which}", float(sigma[worst]), f"residuals of the training data {residual[worst]:.4g}")
    notes.numbers["residuals"] = float(residual[worst])
    if ratio[worst] > max(math.log(NOISY), 4 / math.sqrt(2 * float(free[worst]))):
        notes.finding(
            f"The noise{which} is {sigma[worst]:.3g} where residuals of the training data have a standard deviation of "
            f"{residual[worst]:.3g}.",
            "Use tune(), one noise for each output (lapis.Gaussian(torch.tensor([...]))), or calibrate(validation).",
        )


def _searches(posterior: LaplaceFamily, notes: Notes) -> None:
    """Searches that ended before they converged."""
    records = {
        "Tuning": (posterior.tuning, "Raise max_iterations, or use the other method."),
        "The search for the tangent model's mode": (posterior.tangent, "Raise max_products, or tolerance."),
        "Refinement": (posterior.refinement, "Raise max_rounds, or tolerance."),
    }
    for name, (record, do) in records.items():
        if record is not None and not record.converged:
            notes.finding(f"{name} stopped before it converged: {record.reason}.", do)


def _doubt(posterior: LaplaceFamily, notes: Notes, seen: Seen, gamma: float) -> None:
    """sum tr(H V) against gamma, and S^T V S against one: identity and bound of exact posteriors at their own data."""
    if seen.trace is None:
        return
    largest = seen.largest / posterior.temperature
    fitted, moved = posterior._fitted_to(seen.digest), not torch.equal(posterior.mean, posterior.point)
    bound = "below 1 in exact posteriors" if fitted else "below 1 at training data"
    notes.value("largest_eigenvalue", "largest eigenvalue of S'VS", largest, bound)
    if not fitted or moved:
        return
    trace = seen.trace / (posterior.temperature * posterior.width)
    label = "sum of tr(HV)" if posterior.width == 1 else "sum of tr(HV), at width 1"
    notes.value("trace", label, trace, f"gamma = {gamma:.4g} in exact posteriors")
    if largest > DOUBTFUL or not 1 / DOUBTFUL < trace / max(gamma, 1e-12) < DOUBTFUL:
        notes.finding(
            f"At its own training data the posterior is not what they allow: S'VS reaches {largest:.3g} (exact "
            f"posteriors stay below 1), and sum tr(HV) is {trace:.4g} against gamma = {gamma:.4g}.",
            f'The {posterior.structure} structure is a coarse approximation here: use "ekfac", "dense" or "implicit", '
            "refine(data), or calibrate(validation).",
        )


def _listed(names: list[str]) -> str:
    return ", ".join(map(str, names[:4])) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
