"""Sections about the predictions: scores, calibration, and confidence in and out of distribution."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lapis import metrics
from lapis.posteriors import Posterior
from lapis.posteriors.diagnosis.scores import LABELS, Scores
from lapis.predictions import ClassificationPrediction
from lapis.reports.content import COLOURS, GREY, ORANGE, Chart, Fact, Section, Table, axis
from lapis.reports.judged import Judged, confidence, doubt

PLAIN = "network alone"

MEANINGS = {
    "nll": "Surprise at the right answer, in nats; lower is better. It punishes confident mistakes most.",
    "accuracy": "Share of right answers.",
    "ece": "Mean distance between how sure the predictions are and how often they are right; 0 is ideal.",
    "brier": "Squared distance between probabilities and the truth; lower is better.",
    "confidence": "Mean probability of the predicted class; it should equal the accuracy.",
    "rmse": "Typical size of the error, in the unit of the targets.",
    "coverage": "Share of targets inside their 95 % intervals; 95 % is ideal.",
}
CLAIMS = "What was claimed, beside what happened."
HIGHER, NEITHER = ("accuracy",), ("confidence", "coverage")


def scores(results: Mapping[str, Judged], evidences: Mapping[str, float], on: str, notes: Sequence[str]) -> Section:
    """A table of all posteriors and the network alone, and what each score means."""
    first = next(iter(results.values()))
    rows: dict[str, dict[str, float]] = {PLAIN: first.plain.values()}
    rows |= {name: each.posterior.values() for name, each in results.items()}
    columns = [name for name in LABELS if name in rows[PLAIN]]
    best = set()
    for place, column in enumerate(columns, 1):
        if column in NEITHER:
            continue
        values = [round(row[column], 4) for row in rows.values()]
        top = (max if column in HIGHER else min)(values)
        best |= {(number, place) for number, value in enumerate(values) if value == top}
    cells = [[name, *(f"{row[column]:.4f}" for column in columns)] for name, row in rows.items()]
    head = ["", *(LABELS[column].split(",")[0] for column in columns)]
    if evidences:
        head.append("log evidence or ELBO")
        for row in cells:
            row.append(f"{evidences[row[0]]:.1f}" if row[0] in evidences else "")
    facts = [
        Fact(LABELS[column].split(",")[0], f"{rows[name][column]:.4f}", MEANINGS[column])
        for name in list(results)[:1]
        for column in columns
    ]
    lead = f"How well {first.count:,} {on} examples are predicted, by the plain network and by its posterior."
    return Section("scores", "How good the predictions are", lead, facts, notes, Table(head, cells, frozenset(best)))


def calibration(results: Mapping[str, Judged]) -> Section | None:
    """Reliability of classes, or coverage of intervals; None for likelihoods that have neither."""
    first = next(iter(results.values()))
    if first.posterior.bins:
        return Section("calibration", "Can the probabilities be believed?", CLAIMS, charts=[_reliabilities(results)])
    if first.pits:
        return Section("calibration", "Can the intervals be believed?", CLAIMS, charts=[_coverages(results)])
    return None


def _reliabilities(results: Mapping[str, Judged]) -> Chart:
    plain = next(iter(results.values())).plain
    named: dict[str, Scores] = {PLAIN: plain} | {name: each.posterior for name, each in results.items()}
    traces = [_diagonal(), *(_reliability(name, each, i) for i, (name, each) in enumerate(named.items()))]
    caption = (
        "Of predictions that claim 80 %, four in five should be right: points on the dashed line. Points below it are "
        "too sure, points above it too cautious. Bars are one standard error; small points are few examples."
    )
    return Chart("reliability", "Reliability", caption, traces, _square("confidence", "accuracy"), 440)


def _coverages(results: Mapping[str, Judged]) -> Chart:
    levels = torch.linspace(0.05, 0.95, 19, dtype=torch.float64)
    traces = [_diagonal()]
    for number, (name, each) in enumerate(results.items()):
        distance = (2 * torch.cat(each.pits) - 1).abs()
        observed = (distance <= levels[:, None]).double().mean(1)
        error = (levels * (1 - levels) / len(distance)).sqrt()
        traces.append(
            {"type": "scatter", "mode": "lines+markers", "x": levels.tolist(), "y": observed.tolist(), "name": name,
             "error_y": {"type": "data", "array": error.tolist(), "thickness": 1},
             "line": {"color": COLOURS[number % 5]}}
        )  # fmt: skip
    caption = (
        "Of targets, 80 % should lie inside the 80 % intervals: points on the dashed line. Below it the intervals are "
        "too short, above it too long. Bars are one standard error."
    )
    return Chart("coverage", "Coverage of intervals", caption, traces, _square("claimed", "observed"), 440)


def _square(across: str, up: str) -> dict[str, Any]:
    """A layout for shares against shares."""
    return {"xaxis": axis(across, range=[0, 1.02]), "yaxis": axis(up, range=[0, 1.05])}


def _diagonal() -> dict[str, Any]:
    return {"type": "scatter", "mode": "lines", "x": [0, 1], "y": [0, 1], "name": "as it should be",
            "line": {"color": GREY, "dash": "dash", "width": 1}, "hoverinfo": "skip"}  # fmt: skip


def _reliability(name: str, found: Scores, number: int) -> dict[str, Any]:
    bins = found.reliability()
    used = bins.count > 0
    sure, right, count = bins.confidence[used], bins.accuracy[used], bins.count[used]
    error = (right * (1 - right) / count).sqrt()
    colour = GREY if name == PLAIN else COLOURS[(number - 1) % 5]
    return {"type": "scatter", "mode": "lines+markers", "x": sure.tolist(), "y": right.tolist(), "name": name,
            "error_y": {"type": "data", "array": error.tolist(), "thickness": 1}, "line": {"color": colour},
            "marker": {"size": (5 + 9 * (count / count.max()).sqrt()).tolist()},
            "hovertext": [f"{int(n):,} examples" for n in count.tolist()]}  # fmt: skip


def outside(posterior: Posterior, inside: Judged, data: Any, on: str, progress: bool | None) -> Section:
    """Doubt on the examples at hand, and on others that are unlike the training data."""
    prediction = posterior.predict(data, progress=progress)
    unknown, known = doubt(prediction), torch.cat(inside.doubts)
    area = float(metrics.ood_auroc(known, unknown))
    of_classes = isinstance(prediction, ClassificationPrediction)
    word = "predictive entropy (nats)" if of_classes else "standard deviation of the function"
    charts = [_two_histograms("doubt", "Uncertainty in and out of distribution", word, known, unknown, on)]
    often = "How often an unfamiliar example is less certain than a familiar one: 1 always, 0.5 by chance."
    means = f"{float(known.mean()):.3g} / {float(unknown.mean()):.3g}"
    facts = [
        Fact("AUROC", f"{area:.3f}", often),
        Fact("mean uncertainty", means, f"On {on} examples, and on unfamiliar ones."),
    ]
    if isinstance(prediction, ClassificationPrediction):
        sure, title = (torch.cat(inside.confidences), confidence(prediction)), "Confidence in and out of distribution"
        charts.append(_two_histograms("sure", title, "confidence", *sure, on))
    lead = f"{len(unknown):,} examples unlike the training data should be less certain than {on} examples."
    return Section("outside", "Does it know what it does not know?", lead, facts, charts=charts)


def _two_histograms(name: str, title: str, word: str, known: Tensor, unknown: Tensor, on: str) -> Chart:
    low, high = float(min(known.min(), unknown.min())), float(max(known.max(), unknown.max()))
    high = high if high > low else low + 1.0
    traces = []
    for label, values, colour in ((f"{on} examples", known, GREY), ("out of distribution", unknown, ORANGE)):
        shares, edges = torch.histogram(values, bins=30, range=(low, high))
        centres = ((edges[1:] + edges[:-1]) / 2).tolist()
        traces.append(
            {"type": "bar", "x": centres, "y": (shares / len(values)).tolist(), "name": label, "opacity": 0.7,
             "marker": {"color": colour}}
        )  # fmt: skip
    layout = {"xaxis": axis(word), "yaxis": axis("share of examples"), "barmode": "overlay", "bargap": 0}
    return Chart(name, title, "The less the two overlap, the better.", traces, layout, 320)
