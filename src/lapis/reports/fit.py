"""Sections about the fit itself: what was fitted to what, how the evidence climbed, what each layer has learnt."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lapis.batches import batches, describe, take
from lapis.posteriors import LaplacePosterior, Posterior, VariationalPosterior
from lapis.posteriors.laplace.family import LaplaceFamily
from lapis.reports.content import BLUE, COLOURS, GREY, Chart, Fact, Section, Table, axis, class_name

LAYERS = 40
"""Parameters listed at most; the others are summed up."""

MANY = 2**16
"""Examples whose targets are counted."""

BETTER = "in nats. Of two models of the same data the one with more is to be preferred."
MEANINGS = {
    "posterior": "How uncertainty about the weights is represented.",
    "uncertain weights": "Weights that have a distribution; all others are taken as known.",
    "examples": "Examples that the posterior was fitted to.",
    "likelihood": "What the network's outputs say about the targets.",
    "noise": "Standard deviation of the targets around the network's function.",
    "prior precision": "How strongly weights were expected to be near zero, before any data.",
    "log evidence": f"How well model and prior predict the training data, {BETTER}",
    "ELBO": f"A lower bound of the log evidence: how well model and prior predict the training data, {BETTER}",
    "effective parameters": "Weights that the data determine; the others stay where the prior has them.",
}


def summary(posteriors: Mapping[str, Posterior], notes: Sequence[str] = ()) -> Section:
    """Facts about the first posterior."""
    name, first = next(iter(posteriors.items()))
    kind = type(first).__name__
    if isinstance(first, LaplaceFamily):
        kind = f"{first.structure} {kind}"
    found = {
        "posterior": kind,
        "uncertain weights": f"{first.n_weights:,}",
        "examples": f"{first.n_data:,}" if first.n_data else "none",
        "likelihood": first.likelihood.name,
    }
    if first.likelihood.noise is not None:
        found["noise"] = _span(first.likelihood.noise)
    if isinstance(first, (LaplaceFamily, VariationalPosterior)):
        found["prior precision"] = _span(first.weight_prior.precision)
    evidence = first._evidence_of_data()
    if evidence is not None:
        bound = isinstance(first, VariationalPosterior) or getattr(first, "refinement", None) is not None
        found["ELBO" if bound else "log evidence"] = f"{float(evidence.value.detach()):.2f}"
    gamma = effective_by_parameter(first)
    if gamma is not None:
        found["effective parameters"] = f"{sum(gamma.values()):.1f} of {first.n_weights:,}"
    facts = [Fact(label, value, MEANINGS[label]) for label, value in found.items()]
    others = f" It is compared with {len(posteriors) - 1} more below." if len(posteriors) > 1 else ""
    return Section("summary", "Summary", f"The posterior “{name}” in numbers.{others}", facts, notes)


def _span(values: Tensor) -> str:
    """One number, or the smallest and the largest."""
    low, high = float(values.detach().min()), float(values.detach().max())
    return f"{low:.4g}" if low == high else f"{low:.3g} to {high:.3g}"


def data_and_model(posterior: Posterior, data: Any, batch_size: int | None, classes: list[str] | None) -> Section:
    """Layers of the network and, given the training data, how their targets are distributed."""
    network = posterior.network
    rows = [
        [name, " x ".join(map(str, network.shapes[name])) or "1", f"{network.sizes[name]:,}"] for name in network.names
    ]
    if len(rows) > LAYERS:
        rest = sum(network.sizes[name] for name in network.names[LAYERS:])
        rows = [*rows[:LAYERS], [f"and {len(rows) - LAYERS} more", "", f"{rest:,}"]]
    module = type(network.module).__name__
    everything = sum(p.numel() for p in network.module.parameters())
    facts = [
        Fact("network", module, f"A torch module with {everything:,} weights."),
        Fact("inputs", posterior.facts.signature or "not known", "Shape and type of a batch at the fit."),
        Fact("outputs", str(posterior.n_outputs or "not known"), "Numbers that the network gives for each prediction."),
    ]
    charts = []
    if data is not None:
        targets, signature, count = _targets(posterior, data, batch_size)
        facts.append(Fact("training examples", f"{count:,}", f"Here: batches of {signature}."))
        charts = [_target_chart(posterior, targets, classes)]
    lead = "What was learnt from what. The table lists the parameters whose weights are uncertain."
    return Section("model", "Data and model", lead, facts, (), Table(("parameter", "shape", "weights"), rows), charts)


def _targets(posterior: Posterior, data: Any, batch_size: int | None) -> tuple[Tensor, str, int]:
    network = posterior.network
    found: list[Tensor] = []
    signature, count = "", 0
    for batch in batches(data, dtype=network.dtype, device=network.device, batch_size=batch_size)[0]:
        signature = signature or describe(take(batch.inputs, 0, len(batch)))
        if count < MANY:
            found.append(batch.targets.detach().cpu().flatten())
        count += len(batch)
    return torch.cat(found), signature, count


def _target_chart(posterior: Posterior, targets: Tensor, classes: list[str] | None) -> Chart:
    layout: dict[str, Any]
    if posterior.likelihood.kind == "classification":
        values, counts = torch.unique(targets, return_counts=True)
        named = [class_name(int(value), classes) for value in values.tolist()]
        trace = {"type": "bar", "x": named, "y": counts.tolist(), "marker": {"color": BLUE}}
        layout = {"xaxis": axis("class", type="category"), "yaxis": axis("training targets")}
    else:
        heights, edges = torch.histogram(targets.double(), bins=40)
        centres = ((edges[1:] + edges[:-1]) / 2).tolist()
        trace = {"type": "bar", "x": centres, "y": heights.tolist(), "marker": {"color": BLUE}}
        layout = {"xaxis": axis("target"), "yaxis": axis("training targets"), "bargap": 0.05}
    return Chart(
        "targets", "Training targets", "How often each target occurs in the training data.", [trace], layout, 300
    )


def climb(posteriors: Mapping[str, Posterior]) -> Section | None:
    """Evidence or ELBO over the iterations of the last search; None if nobody searched."""
    charts: list[Chart] = []
    for number, (name, posterior) in enumerate(posteriors.items()):
        for word, title, values, caption in _traces(posterior):
            known = [(i, value) for i, value in enumerate(values) if math.isfinite(value)]
            if not known:
                continue
            x, y = zip(*known, strict=True)
            trace = {"type": "scatter", "mode": "lines+markers", "x": x, "y": y, "name": word,
                     "line": {"color": COLOURS[number % 5]}}  # fmt: skip
            layout = {"xaxis": axis("iteration"), "yaxis": axis(f"{word} (nats)"), "showlegend": False}
            named = f"{title}: {name}" if len(posteriors) > 1 else title
            charts.append(Chart(f"climb-{len(charts)}", named, caption, [trace], layout, 300))
    if not charts:
        return None
    lead = (
        "Prior and noise were chosen to make the training data as probable as possible. A curve that has "
        "levelled off means that the search has found its maximum."
    )
    return Section("evidence", "The climb of the evidence", lead, charts=charts)


def _traces(posterior: Posterior) -> list[tuple[str, str, tuple[float, ...], str]]:
    found = []
    training = getattr(posterior, "training", None)
    if training is not None:
        words = (
            f"After each of {len(training.log_evidence)} evaluations in {training.epochs} epochs; {training.reason}."
        )
        found.append(("log evidence", "Training", training.log_evidence, words))
    if isinstance(posterior, LaplaceFamily):
        if posterior.tuning is not None:
            found.append(("log evidence", "Tuning", posterior.tuning.trace, f"{posterior.tuning}."))
        if posterior.refinement is not None:
            found.append(("ELBO", "Refinement", posterior.refinement.trace, f"{posterior.refinement}."))
    if isinstance(posterior, VariationalPosterior):
        found.append(("ELBO", "Variational inference", posterior.inference.trace, f"{posterior.inference}."))
    return [trace for trace in found if len(trace[2]) > 1]  # a point alone is no climb


def effective_by_parameter(posterior: Posterior) -> dict[str, float] | None:
    """sum_i (1 - lambda_i Sigma_ii) over each parameter's weights; None without a prior and marginal variances."""
    if not isinstance(posterior, (LaplacePosterior, VariationalPosterior)):
        return None
    width = posterior.width if isinstance(posterior, LaplacePosterior) else 1.0
    variance = posterior.marginal_variance().detach().double().cpu() / width
    determined = 1 - posterior.weight_prior.vector().detach().cpu() * variance
    return {name: float(determined[posterior.network.span(name)].sum()) for name in posterior.network.names}


def layers(posteriors: Mapping[str, Posterior]) -> Section | None:
    """Effective parameters of each parameter tensor, and their share."""
    traces = []
    sizes: dict[str, int] = {}
    for number, (name, posterior) in enumerate(posteriors.items()):
        gamma = effective_by_parameter(posterior)
        if gamma is None:
            continue
        sizes = sizes or posterior.network.sizes
        kept = list(gamma)[:LAYERS]
        hover = [f"{gamma[p]:.2f} of {posterior.network.sizes[p]:,} weights" for p in kept]
        traces.append(
            {"type": "bar", "orientation": "h", "y": kept, "x": [gamma[p] for p in kept], "name": name,
             "hovertext": hover, "hoverinfo": "text+name", "marker": {"color": COLOURS[number % 5]}}
        )  # fmt: skip
        if number == 0:
            traces.append(
                {"type": "scatter", "mode": "markers", "y": kept, "x": [posterior.network.sizes[p] for p in kept],
                 "name": "size of the layer", "marker": {"color": GREY, "symbol": "line-ns-open", "size": 14}}
            )  # fmt: skip
    if not traces:
        return None
    rows = max(len(trace["y"]) for trace in traces)
    across = axis("effective parameters", type="log", dtick=1)
    layout = {"xaxis": across, "yaxis": {"autorange": "reversed"}, "barmode": "group"}
    caption = (
        "The bar is the number of weights that the data determine; the mark is the number of all. A layer with a short "
        "bar could be smaller, or has not been trained."
    )
    height = min(1200, 140 + 34 * rows * max(1, len(traces) - 1))
    chart = Chart("layers", "Effective parameters by layer", caption, traces, layout, height)
    lead = (
        "Each direction in the space of weights is decided partly by the data and partly by the prior. Effective "
        "parameters add up the data's share."
    )
    return Section("layers", "What each layer has learnt", lead, charts=[chart])
