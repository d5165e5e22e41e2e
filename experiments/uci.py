"""UCI regression with `lapis.train` and its defaults: RMSE, log likelihood and coverage on the standard splits.

One hidden layer of 50 ReLU units (100 for protein), as in the literature; inputs and targets are standardised by the
training part, scores are on the original scale. The plain network has the same weights and noise, without doubt about
the weights. MC dropout's figures are those published by its authors (one hidden layer, 10 x epochs).

Splits that were run are kept in docs/results/uci.json, and not run again; `--sets` and `--splits` choose some, and
`--activation tanh` is kept apart.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import time
import warnings

import numpy as np
import torch
from common import RESULTS, table
from torch import Tensor, nn

import lapis

PUBLISHED = {
    "boston": (2.90, -2.40),
    "concrete": (4.83, -2.94),
    "energy": (0.54, -1.21),
    "power-plant": (4.01, -2.81),
    "protein": (4.27, -2.87),
    "wine-quality-red": (0.62, -0.93),
    "yacht": (0.67, -1.25),
}
"""RMSE and log likelihood of MC dropout."""


Split = tuple[Tensor, Tensor, Tensor, Tensor, float]
"""Standardised training inputs and targets, test inputs, and test targets; the deviation of the targets."""


def table_of(name: str) -> dict[str, np.ndarray]:
    """The arrays of a data set."""
    return lapis.data.stored(f"uci/{name}")


def split(name: str, number: int) -> Split:
    """A standard split."""
    held = table_of(name)
    return standardised(held["X"], held["y"], held[f"train_index_{number}"], held[f"test_index_{number}"])


def standardised(x: np.ndarray, y: np.ndarray, train: np.ndarray, test: np.ndarray) -> Split:
    """Inputs (n, d) and targets (n,) in units of the training part's deviations."""
    y = y.reshape(-1, 1)
    mean, deviation = x[train].mean(0), x[train].std(0)
    x = (x - mean) / np.where(deviation > 0, deviation, 1.0)
    centre, scale = y[train].mean(), y[train].std()
    y = (y - centre) / scale
    tensors = (torch.from_numpy(part).float() for part in (x[train], y[train], x[test], y[test]))
    return *tensors, float(scale)  # type: ignore[return-value]


ACTIVATIONS: dict[str, type[nn.Module]] = {"relu": nn.ReLU, "tanh": nn.Tanh}


def run(name: str, number: int, activation: str) -> dict[str, float]:
    x, y, x_test, y_test, scale = split(name, number)
    torch.manual_seed(number)
    hidden = 100 if name == "protein" else 50
    model = nn.Sequential(nn.Linear(x.shape[1], hidden), ACTIVATIONS[activation](), nn.Linear(hidden, 1))
    start = time.process_time()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always", lapis.LapisWarning)
        posterior = lapis.train(model, (x, y), "regression", progress=False)
    spent = time.process_time() - start
    prediction = posterior.predict(x_test, progress=False)
    lower, upper = prediction.interval(0.95)
    noise = float(posterior.likelihood.noise)
    plain = torch.distributions.Normal(prediction.f_mean, noise)
    tail = (plain.cdf(y_test) - 0.5).abs()
    return {
        "rmse": float((prediction.mean - y_test).square().mean().sqrt()) * scale,
        "log_likelihood": float(prediction.log_prob(y_test).double().mean()) - math.log(scale),
        "plain": float(plain.log_prob(y_test).double().mean()) - math.log(scale),
        "plain_coverage": float((tail <= 0.475).double().mean()),
        "coverage": float(((y_test >= lower) & (y_test <= upper)).double().mean()),
        "log_evidence": float(posterior.log_evidence()),
        "gamma": float(posterior.effective_parameters()),
        "warned": float(len(said)),
        "seconds": spent,
    }


def shown(values: list[float], digits: int) -> str:
    error = float(np.std(values, ddof=1)) / math.sqrt(len(values)) if len(values) > 1 else math.nan
    return f"{np.mean(values):.{digits}f} ± {error:.{digits}f}"


def summary(rows: dict[str, dict[str, float]], activation: str) -> str:
    lines = []
    for name, (rmse, log_likelihood) in PUBLISHED.items():
        found = [row for key, row in rows.items() if key.rsplit("/", 1)[0] == name]
        if not found:
            continue
        ours = [row["log_likelihood"] for row in found]
        error = float(np.std(ours, ddof=1)) / math.sqrt(len(ours)) if len(ours) > 1 else math.nan
        level, plain = (100 * float(np.mean([row[key] for row in found])) for key in ("coverage", "plain_coverage"))
        met = np.mean(ours) + error >= log_likelihood
        lines.append(
            (
                name, len(found), shown([row["rmse"] for row in found], 2), f"{rmse:.2f}", shown(ours, 2),
                shown([row["plain"] for row in found], 2), f"{log_likelihood:.2f}", "yes" if met else "no",
                f"{level:.1f} %", f"{plain:.1f} %", sum(row["warned"] > 0 for row in found),
                f"{np.mean([row['seconds'] for row in found]):.0f}",
            )
        )  # fmt: skip
    head = (
        "set", "splits", "RMSE", "MC dropout", "log likelihood", "without doubt", "MC dropout", "within one error",
        "95 % cover", "without doubt", "warned", "CPU s",
    )  # fmt: skip
    said = " ".join((__doc__ or "").split()).replace("ReLU units", f"{ACTIVATIONS[activation].__name__} units")
    return f"{said}\n\n{table(head, lines)}\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sets", default=",".join(PUBLISHED), help="names, separated by commas")
    parser.add_argument("--splits", type=int, default=20, help="at most so many splits a set")
    parser.add_argument("--activation", choices=ACTIVATIONS, default="relu")
    parser.add_argument("--quick", action="store_true", help="one split of yacht, kept apart")
    chosen = parser.parse_args()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    name = "uci_quick" if chosen.quick else "uci" if chosen.activation == "relu" else f"uci_{chosen.activation}"
    path = RESULTS / f"{name}.json"
    rows: dict[str, dict[str, float]] = json.loads(path.read_text()) if path.exists() and not chosen.quick else {}
    wanted = ["yacht"] if chosen.quick else chosen.sets.split(",")
    for number in range(1 if chosen.quick else chosen.splits):
        for data in wanted:
            if f"{data}/{number}" in rows or (data == "protein" and number >= 5):
                continue
            rows[f"{data}/{number}"] = run(data, number, chosen.activation)
            print(data, number, {key: round(value, 3) for key, value in rows[f"{data}/{number}"].items()}, flush=True)  # noqa: T201
            if not chosen.quick:
                path.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
                (RESULTS / f"{name}.md").write_text(summary(rows, chosen.activation), encoding="utf-8")
    print(summary(rows, chosen.activation))  # noqa: T201


if __name__ == "__main__":
    main()
