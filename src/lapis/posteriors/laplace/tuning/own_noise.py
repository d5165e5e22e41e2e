"""Tuning each output's own Gaussian noise, where the outputs' curvature is kept apart.

The evidence's slope in log sigma_c is E_c / T + gamma_c - n_c / T, with E_c the output's squared errors over sigma_c^2
and gamma_c = tr(A^-1 K_c) / (T sigma_c^2) its share of gamma, with A = sum_c K_c / (T sigma_c^2) + Lambda.
Rounds of two steps: precisions and one factor of all noises maximise the evidence (on eigenvalues, where these decide
it), then each output takes MacKay's update sigma_c^2 <- SSE_c / (n_c - T gamma_c). The first round starts from the
residuals. As gamma_c depends little on the noise, a few rounds are enough.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lapis.curvature.blocks.abilities import Traces
from lapis.errors import StructureError
from lapis.evidence import Tuning
from lapis.evidence.fixed_point import stretch
from lapis.posteriors.laplace.tuning import by_evidence

if TYPE_CHECKING:
    from lapis.posteriors.laplace.family import LaplaceFamily
    from lapis.posteriors.laplace.stored import LaplacePosterior

ROUNDS = 50
"""Largest number of rounds."""

WIDEST = 1e6
"""Largest ratio of two outputs' noises: an output that fits perfectly has no noise of its own."""

LONGEST_STEP = 2.0
"""Largest step in the logarithm of a noise."""

LONGEST = 10.0
"""Largest factor by which a step is stretched: slopes up to 0.9 are corrected fully."""

UNLIKE = 1.5
"""Residuals whose proportions differ from the noise's by more than this factor cause a warning, if these are fixed."""


def tune(
    posterior: LaplacePosterior, method: str, max_iterations: int, tolerance: float | None
) -> tuple[LaplacePosterior, list[str]]:
    """The posterior at the prior precisions and noises (C,) that maximise the evidence, and what to warn of."""
    goal, left = tolerance or 1e-6, max_iterations
    records: list[Tuning] = []
    best, messages, error = posterior, list[str](), math.inf
    sigma, before = _residual_noise(posterior), None
    floor = float(sigma.max()) / WIDEST
    perfect = sigma <= floor
    for _ in range(ROUNDS):
        together = not bool(perfect.any())  # a perfect output would have all noises shrink
        try:
            found, said = by_evidence.maximised(_under(best, sigma.clamp(min=floor)), method, together, left, tolerance)
        except StructureError:
            if not records:
                raise
            break
        assert found.tuning is not None
        left -= found.tuning.iterations
        value = found.tuning.log_evidence
        worse = bool(records) and value < records[-1].log_evidence - 1e-10 * max(1.0, abs(value))
        if not worse:
            best, messages = found, said
            records.append(found.tuning)
            move, slope = _mackay(found)
            perfect = (_noise(found).to(slope) <= floor * (1 + 1e-6)) & (slope < 0)
            error = float(torch.where(perfect, 0.0, slope).abs().max()) / max(1.0, sum(found.tuning.gamma))
            here = _noise(found).to(move).log()
            sigma, before = (here + stretch(before, here, here + move, LONGEST) * move).exp(), (here, here + move)
        elif float((sigma / _noise(best)).log().abs().max()) > 1e-9:
            sigma = _noise(best) * (sigma / _noise(best)) ** 0.25  # too long a step
        else:
            break
        if error <= goal or left < 1 or "noise" in records[-1].at_bound:
            break
    tuning = _joined(records, error <= goal, error, posterior)
    if bool(perfect.any()) and "noise" not in records[-1].at_bound:
        outputs = ", ".join(map(str, perfect.nonzero()[:, 0].tolist()))
        messages.append(
            f"The noise of output {outputs} ran to the end of its range, {1 / WIDEST:g} of the largest residuals: the "
            "fit is perfect, and nothing bounds the noise from below. Use noise=False, or leave that output out."
        )
    if not tuning.converged and records[-1].converged:
        messages.append(f"Tuning of each output's noise stopped before it converged: {tuning.reason}.")
    return replace(best, tuning=tuning), messages


def gamma_of_outputs(posterior: LaplacePosterior) -> Tensor:
    """gamma_c = tr(A^-1 K_c) / (T sigma_c^2), (C,): the effective parameters that each output determines."""
    sums = posterior.curvature
    assert sums.apart is not None
    fitted = posterior.fitted_likelihood.noise
    assert fitted is not None
    gaussians = [gaussian for gaussian in posterior.gaussians if isinstance(gaussian, Traces)]
    traces = [
        sum(float(gaussian.trace(part)) for gaussian, part in zip(gaussians, parts, strict=True))
        for parts in sums.apart
    ]
    weights = posterior.scale.detach() / fitted.detach().double() ** 2
    return torch.tensor(traces, dtype=torch.float64, device=weights.device) * weights


def unlike(posterior: LaplaceFamily) -> list[str]:
    """What to warn of where the outputs' noises keep their proportions, and the residuals have others."""
    if posterior.likelihood.noise is None:
        return []
    squared, counts = posterior.evidence_point()[1].detach().double().chunk(2)
    if len(squared) == 1 or not bool((squared > 0).all()):
        return []
    residual = (squared / counts).sqrt()
    ratio = residual / posterior.likelihood.noise.detach().to(residual)
    if float(ratio.max() / ratio.min()) <= UNLIKE:
        return []
    listed = ", ".join(f"{value:.3g}" for value in residual[:8].tolist()) + (", ..." if len(residual) > 8 else "")
    return [
        f"Outputs differ in their residuals (standard deviations {listed}), but one factor of all noises was tuned. "
        "Fit again with each output's own: likelihood=lapis.Gaussian(noise=torch.tensor([...])) with these numbers."
    ]


def _noise(posterior: LaplacePosterior) -> Tensor:
    """The noise of each output, (C,) float64."""
    noise = posterior.likelihood.noise
    assert noise is not None
    return noise.detach().double().expand(posterior.curvature.outputs)


def _under(posterior: LaplacePosterior, sigma: Tensor) -> LaplacePosterior:
    """The posterior under these noises (C,)."""
    likelihood = posterior.likelihood.with_noise(sigma)
    return posterior.with_own_noise(likelihood) or replace(posterior, likelihood=likelihood)


def _residual_noise(posterior: LaplacePosterior) -> Tensor:
    """The residuals' standard deviation of each output; the present noise where there are none."""
    squared, counts = posterior.evidence_point()[1].detach().double().chunk(2)
    residual = (squared / counts).sqrt()
    present = _noise(posterior).to(residual)
    return residual if float(residual.max()) > 1e-12 * float(present.max()) else present


def _mackay(posterior: LaplacePosterior) -> tuple[Tensor, Tensor]:
    """The step in log sigma_c to sigma_c^2 = SSE_c / (n_c - T gamma_c), and the evidence's slope there; both (C,)."""
    squared, counts = posterior.evidence_point()[1].detach().double().chunk(2)
    gamma, temperature = gamma_of_outputs(posterior).to(squared), posterior.temperature
    errors, free = squared / (_noise(posterior).to(squared) ** 2 * temperature), counts / temperature - gamma
    tiny = torch.finfo(torch.float64).tiny
    step = 0.5 * (errors.clamp(min=tiny).log() - free.clamp(min=tiny).log())  # free can be negative off the optimum
    return step.clamp(-LONGEST_STEP, LONGEST_STEP), errors - free


def _joined(records: list[Tuning], converged: bool, error: float, start: LaplacePosterior) -> Tuning:
    """One record of all rounds."""
    last, trace = records[-1], []  # type: ignore[var-annotated]
    for value in (value for record in records for value in record.trace):
        trace.append(max(value, trace[-1]) if trace else value)
    try:
        before = float(start.log_evidence().detach())
    except StructureError:
        before = records[0].start
    reason = last.reason if converged else f"relative slope {error:.1e} after {len(records)} rounds; {last.reason}"
    return replace(
        last,
        start=before,
        iterations=sum(record.iterations for record in records),
        evaluations=sum(record.evaluations for record in records),
        converged=last.converged and (converged or bool(last.at_bound)),
        reason=f"each output's own noise, {len(records)} rounds: {reason}" if converged else reason,
        trace=tuple(trace),
    )
