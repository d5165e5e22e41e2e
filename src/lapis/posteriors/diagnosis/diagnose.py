"""Diagnosing a posterior: checks that make sense for every method; each class adds its own (`Posterior._examine`)."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from lapis.posteriors.diagnosis.data import Seen, look
from lapis.posteriors.diagnosis.report import Diagnosis, Notes
from lapis.posteriors.diagnosis.scores import LABELS, LEVEL, excess, tolerable

if TYPE_CHECKING:
    from lapis.posteriors.posterior import Posterior

WORSE = 0.01
"""Nats an example by which a posterior may fall short of the network alone without a finding, on new data."""

MISCALIBRATED = 0.02
"""Difference of mean confidence, or of the coverage of intervals, from what was observed that is no finding yet."""

ERRORS = 3.0
"""Standard errors that a difference must exceed to be no accident; two for the comparison of posterior and network."""


def diagnose(posterior: Posterior, data: Any, batch_size: int | None, progress: bool | None) -> Diagnosis:
    """See `Posterior.diagnose`."""
    notes = Notes()
    seen = None if data is None else look(posterior, data, batch_size, progress)
    about = repr(posterior).strip("<>")
    if seen is not None:
        fitted = posterior._fitted_to(seen.digest)
        about += f"; on {seen.n_data:,} examples" + (" (the training data)" if fitted else "")
        _judge_scores(posterior, notes, seen, fitted)
        if seen.suspicion is not None:
            notes.findings.append(seen.suspicion)
        seen.inputs.judge(notes)
    posterior._examine(notes, seen, progress)
    return notes.diagnosis(about[:1].upper() + about[1:])


def _judge_scores(own: Posterior, notes: Notes, seen: Seen, fitted: bool) -> None:
    plain, posterior = seen.plain.values(), seen.posterior.values()
    for name, label in LABELS.items():
        if name in plain:
            notes.compare(name, label, plain[name], posterior[name])
    gap, error = excess(seen.plain.log_probs, seen.posterior.log_probs)
    if not gap <= max(tolerable(own.likelihood, seen.outputs) if fitted else WORSE, 2 * error):
        notes.finding(
            f"The posterior predicts these data worse than the network alone, by {gap:.3g} nats an example (standard "
            f"error {error:.2g}): it is too doubtful.",
            own._advice(less=True),
        )
    if "confidence" in posterior:
        _judge_confidence(own, notes, posterior, seen.posterior.count, fitted)
    if "coverage" in posterior:
        _judge_coverage(notes, posterior["coverage"], seen.posterior.targets, own.likelihood.kind == "count")


def _judge_confidence(own: Posterior, notes: Notes, scores: dict[str, float], count: int, fitted: bool) -> None:
    accuracy, confidence = scores["accuracy"], scores["confidence"]
    error = math.sqrt(max(accuracy * (1 - accuracy), confidence * (1 - confidence)) / count)
    gap = confidence - accuracy
    if abs(gap) <= max(MISCALIBRATED, ERRORS * error):
        return
    observed = f"mean confidence {confidence:.3f}, accuracy {accuracy:.3f}"
    if gap > 0:
        notes.finding(
            f"The posterior is too sure on these data ({observed}).",
            own._advice(less=False),
        )
    elif not fitted:  # the accuracy on training data is no fair measure of what the posterior should claim
        notes.finding(
            f"The posterior is too cautious on these data ({observed}).",
            own._advice(less=True),
        )


def _judge_coverage(notes: Notes, coverage: float, count: int, discrete: bool) -> None:
    error = math.sqrt(LEVEL * (1 - LEVEL) / count)
    if coverage < LEVEL - max(MISCALIBRATED, ERRORS * error):
        notes.finding(
            f"Intervals of 95 % hold only {100 * coverage:.1f} % of the targets: the posterior is too sure.",
            "Tune the noise (tune), or choose it by held-out data (calibrate); on new data the network may also have "
            "overfitted.",
        )
    elif coverage > LEVEL + max(MISCALIBRATED, ERRORS * error) and not discrete:
        notes.finding(
            f"Intervals of 95 % hold {100 * coverage:.1f} % of the targets: the posterior is too cautious.",
            "Tune the noise (tune), or choose it by held-out data (calibrate).",
        )
