"""`lapis evaluate`: scores on a table whose targets are known."""

from __future__ import annotations

import torch

from lapis import metrics
from lapis.cli.shell import AsJson, as_json, grid, readable, say
from lapis.cli.tables.columns import Columns, class_indices, class_values, real_targets
from lapis.cli.tables.files import Column, read_table
from lapis.cli.tables.fit import Data
from lapis.cli.tables.predict import File, Level, Model, opened
from lapis.errors import OptionError
from lapis.estimators import Predictor
from lapis.options import check_between

MEANINGS = {
    "rmse": "root mean square of the mean's errors",
    "mae": "mean absolute error",
    "r2": "share of the variance that the mean explains",
    "nll": "negative log likelihood, nats a row: low is good",
    "crps": "continuous ranked probability score: low is good",
    "coverage": "share of targets inside the intervals",
    "interval_score": "width of the intervals, and what falls outside",
    "accuracy": "share of rows with the right class",
    "ece": "calibration error: 0 if confidence is accuracy",
    "brier": "squared error of the probabilities",
    "auroc_of_mistakes": "how well doubt tells wrong from right",
}


@readable
def evaluate(file: File, data: Data, model: Model = None, level: Level = 0.95, json: AsJson = False) -> None:
    """Score a fitted file on a table with targets: accuracy, likelihood, calibration."""
    check_between("level", level, 0, 1)
    predictor, columns = opened(file, model)
    table = read_table(data)
    found = scores(predictor, columns, table, level)
    if json:
        as_json({"rows": len(next(iter(table.values()))), **found})
        return
    say(f"[bold]{columns.target}[/] of {len(next(iter(table.values()))):,} rows in {data}\n")
    named = {"coverage": f"coverage of {100 * level:g} %"}
    grid(["score", "", "meaning"], [[named.get(n, n).replace("_", " "), v, MEANINGS[n]] for n, v in found.items()])


def scores(predictor: Predictor, columns: Columns, table: dict[str, Column], level: float = 0.95) -> dict[str, float]:
    """Scores by name."""
    name = columns.target
    if name not in table:
        raise OptionError(
            f"There is no column {name!r}", expected="the target of the fit, to compare with", got=", ".join(table),
            do="use lapis predict for data without targets",
        )  # fmt: skip
    inputs = columns.inputs(table)
    if predictor.task == "classification":
        indices = class_indices(name, class_values(name, table[name]), predictor.classes)
        probs = predictor.probabilities(inputs).probs
        right = probs.argmax(1) == indices
        found = {
            "accuracy": metrics.accuracy(probs, indices), "nll": metrics.nll(probs, indices),
            "ece": metrics.ece(probs, indices), "brier": metrics.brier(probs, indices),
        }  # fmt: skip
        if bool(right.any()) and not bool(right.all()):
            found["auroc_of_mistakes"] = metrics.misclassification_auroc(probs, indices)
    else:
        y = real_targets(name, table[name])
        values = predictor.values(inputs, level=level, targets=y)
        assert values.log_prob is not None
        errors = y - values.mean
        found = {"rmse": metrics.rmse(values.mean, y), "mae": errors.abs().mean()}
        if len(y) > 1 and float((y - y.mean(0)).square().sum()) > 0:
            found["r2"] = 1 - errors.square().sum() / (y - y.mean(0)).square().sum()
        found |= {
            "nll": -values.log_prob.mean(), "crps": metrics.crps(values.mean, values.std, y),
            "coverage": metrics.coverage(values.lower, values.upper, y),
            "interval_score": metrics.interval_score(values.lower, values.upper, y, level),
        }  # fmt: skip
    return {key: float(torch.as_tensor(value)) for key, value in found.items()}
