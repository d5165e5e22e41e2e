"""`python -m benchmarks.latent`: models with latent variables beside scikit-learn and hmmlearn, in time and memory.

Four rounds of EM of a mixture of 20 Gaussians (full covariances, 20 dimensions) on 100,000 points, from the same start.
The sums over paths (forward and backward) of 1,000 sequences of 500 steps under a hidden Markov model with 5 states and
Gaussian emissions of 3 dimensions, all sequences in one call of each library. Growth: the same with fewer and more
points, and sequences. Contenders have processes of their own on one thread and take turns; times are the processor's,
and the lower quartile of all turns counts. Memory is the peak above where a process stood before its data were made.
hmmlearn is measured where it is installed (.venv-bench).
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import warnings
from functools import partial
from pathlib import Path

import numpy as np
import torch

from benchmarks.turns import Step, measure
from lapis.latent import GaussianMixture, HiddenMarkov
from lapis.latent.markov.gaussian import GaussianEmissions

PAGE = Path(__file__).parent.parent / "docs" / "results" / "latent_speed.md"
COMPONENTS, DIMENSIONS, ROUNDS = 20, 20, 4
SEQUENCES, LENGTH, STATES, WIDTH = 1000, 500, 5, 3
GROWTH = {"mixture": (3_000, 10_000, 30_000, 100_000, 300_000), "paths": (100, 300, 1_000, 3_000)}
"""Points, and sequences."""
TARGETS = {"mixture": 1.0, "paths": 5.0}
"""How many times as fast as the peer."""

Rows = dict[str, dict[str, float]]
"""Measurements by contender, or by size."""


def points(count: int) -> tuple[np.ndarray, np.ndarray]:
    """Data (N, D) from clusters, and means (K, D) to start from."""
    source = np.random.default_rng(0)
    centres = 3 * source.standard_normal((COMPONENTS, DIMENSIONS))
    x = centres[source.integers(COMPONENTS, size=count)] + source.standard_normal((count, DIMENSIONS))
    return x, centres + 0.5 * source.standard_normal(centres.shape)


def our_mixture(count: int) -> Step:
    x, start = points(count)
    given = (np.full(COMPONENTS, 1 / COMPONENTS), start, np.tile(np.eye(DIMENSIONS), (COMPONENTS, 1, 1)))
    mixture = GaussianMixture(COMPONENTS, rounds=ROUNDS, tolerance=0.0, start=given)
    return _warm(lambda: mixture.fit(x))


def their_mixture(count: int) -> Step:
    from sklearn import mixture

    x, start = points(count)
    peer = mixture.GaussianMixture(
        COMPONENTS, means_init=start, weights_init=np.full(COMPONENTS, 1 / COMPONENTS), max_iter=ROUNDS, tol=0.0,
        precisions_init=np.tile(np.eye(DIMENSIONS), (COMPONENTS, 1, 1)), init_params="random_from_data",
    )  # fmt: skip
    return _warm(lambda: peer.fit(x))


def chains(count: int) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Observations (sequences, steps, width), and the parameters of a model."""
    source = np.random.default_rng(0)
    transitions = 0.8 * np.eye(STATES) + 0.2 * source.dirichlet(np.ones(STATES), STATES)
    parameters = {
        "initial": np.full(STATES, 1 / STATES),
        "transitions": transitions,
        "means": 2 * source.standard_normal((STATES, WIDTH)),
        "covariances": np.tile(np.eye(WIDTH), (STATES, 1, 1)),
    }
    return source.standard_normal((count, LENGTH, WIDTH)), parameters


def our_paths(count: int = SEQUENCES) -> Step:
    y, parameters = chains(count)
    tensors = {name: torch.as_tensor(value) for name, value in parameters.items()}
    emissions = GaussianEmissions(tensors["means"], tensors["covariances"])
    model = HiddenMarkov(STATES, emissions, initial=tensors["initial"], transitions=tensors["transitions"])
    return _warm(lambda: model.posterior(list(torch.as_tensor(y))))


def their_paths() -> Step:
    from hmmlearn.hmm import GaussianHMM

    y, parameters = chains(SEQUENCES)
    model = GaussianHMM(STATES, covariance_type="full")
    model.startprob_, model.transmat_ = parameters["initial"], parameters["transitions"]
    model.means_, model.covars_ = parameters["means"], parameters["covariances"]
    rows, lengths = y.reshape(-1, WIDTH), [LENGTH] * SEQUENCES
    return _warm(lambda: model.score_samples(rows, lengths))


def _warm(step: Step) -> Step:
    warnings.simplefilter("ignore")
    step()
    return step


def page(results: dict[str, Rows], growth: dict[str, Rows]) -> str:
    lines = [
        "# Latent variables: time and memory",
        "",
        " ".join((__doc__ or "").split("\n\n", 1)[1].split()),
        "",
        "| work | by | ms | times as fast | target | MB |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for work, found in results.items():
        ours = found["Lapis"]["milliseconds"]
        for name, row in found.items():
            faster, wanted = row["milliseconds"] / ours, TARGETS.get(work)
            told = "" if name == "Lapis" or wanted is None else f"{wanted:g}: {'met' if faster >= wanted else 'missed'}"
            ratio = "" if name == "Lapis" else f"{faster:.2f}"
            cells = (work, name, f"{row['milliseconds']:.0f}", ratio, told, f"{row['megabytes']:.0f}")
            lines.append("| " + " | ".join(cells) + " |")
    lines += ["", "## Growth", "", "| work | N | ms | µs a datum | MB |", "| --- | --- | --- | --- | --- |"]
    for work, found in growth.items():
        for size, row in found.items():
            each = 1e3 * row["milliseconds"] / int(size)
            cells = (work, f"{int(size):,}", f"{row['milliseconds']:.0f}", f"{each:.1f}", f"{row['megabytes']:.0f}")
            lines.append("| " + " | ".join(cells) + " |")
        lines.append(f"| {work} | slope | time ~ N^{slope(found):.2f} | | |")
    return "\n".join([*lines, "", "`python -m benchmarks.latent`", ""])


def slope(found: Rows) -> float:
    """Of log time in log N: 1 is linear growth."""
    sizes = np.log([int(size) for size in found])
    return float(np.polyfit(sizes, np.log([row["milliseconds"] for row in found.values()]), 1)[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--points", type=int, default=100_000, help="of the mixture")
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--output", type=Path, default=PAGE)
    chosen = parser.parse_args()
    mixtures = {"Lapis": our_mixture, "scikit-learn": their_mixture}
    paths = {"Lapis": our_paths}
    if importlib.util.find_spec("hmmlearn"):
        paths["hmmlearn"] = their_paths
    results = {
        "mixture": measure({name: partial(ready, chosen.points) for name, ready in mixtures.items()}, chosen.turns),
        "paths": measure(paths, chosen.turns),
    }
    growth = {}
    for work, ready in {"mixture": our_mixture, "paths": our_paths}.items():
        sizes = [size for size in GROWTH[work] if work == "paths" or size <= 3 * chosen.points]
        growth[work] = measure({str(size): partial(ready, size) for size in sizes}, chosen.turns)
    told = json.dumps({"beside peers": results, "growth": growth}, indent=1)
    chosen.output.with_suffix(".json").write_text(told + "\n", encoding="utf-8")
    chosen.output.write_text(page(results, growth), encoding="utf-8")
    print(page(results, growth))  # noqa: T201


if __name__ == "__main__":
    main()
