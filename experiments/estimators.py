"""`LaplaceRegressor` and `LaplaceClassifier` beside scikit-learn's perceptron and Gaussian process: scores and time.

Three bundled sets, three quarters to train on, inputs standardised; nobody is tuned by hand. The perceptrons have 50
hidden units. The noise of scikit-learn's perceptron is the deviation of its training residuals. Its Gaussian process
has an RBF kernel with a scale and, for regression, noise; for ten classes it sees at most 400 rows, as it would take
hours otherwise. The estimators' defaults (steps, activation, prior, cross-validation) were chosen on splits of seeds
100 and above. Each figure is a mean over splits with its standard error; the last column is Lapis minus the other
method in NLL, split by split.
"""

from __future__ import annotations

import time
import warnings
from typing import Any

import numpy as np
from common import arguments, report, table
from sklearn.gaussian_process import GaussianProcessClassifier, GaussianProcessRegressor
from sklearn.gaussian_process.kernels import RBF, ConstantKernel, WhiteKernel
from sklearn.metrics import log_loss
from sklearn.neural_network import MLPClassifier, MLPRegressor
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

import lapis

FEW, SPLITS = 400, 10
HEAD = ("set", "method", "RMSE, or errors", "NLL", "CPU seconds of a fit", "Lapis' NLL minus this")
SETS = {"diabetes": lapis.data.diabetes, "breast cancer": lapis.data.breast_cancer, "digits": lapis.data.digits}


def estimators(name: str, quick: bool, seed: int) -> dict[str, Any]:
    kernel = ConstantKernel(1.0) * RBF(3.0)
    epochs = 100 if quick else None
    perceptron: dict[str, Any] = {"hidden_layer_sizes": (50,), "max_iter": 2000, "random_state": seed}
    if name == "diabetes":
        return {
            "Lapis": lapis.LaplaceRegressor(epochs=epochs, random_state=seed),
            "MLP": make_pipeline(StandardScaler(), MLPRegressor(**perceptron)),
            "GP": make_pipeline(
                StandardScaler(), GaussianProcessRegressor(kernel + WhiteKernel(1.0), normalize_y=True)
            ),
        }
    return {
        "Lapis": lapis.LaplaceClassifier(epochs=epochs, random_state=seed),
        "MLP": make_pipeline(StandardScaler(), MLPClassifier(**perceptron)),
        "GP": make_pipeline(StandardScaler(), GaussianProcessClassifier(kernel, max_iter_predict=20)),
    }


def shown(values: Any, digits: int) -> str:
    """Mean and, of several splits, its standard error."""
    mean = f"{values.mean():.{digits}f}"
    return mean if len(values) < 2 else f"{mean} ± {values.std(ddof=1) / len(values) ** 0.5:.{digits}f}"


def scores(estimator: Any, train: tuple[Any, Any], test: tuple[Any, Any]) -> tuple[float, float]:
    """RMSE and negative log likelihood, or error rate and negative log likelihood, on the test rows."""
    x, y = test
    if hasattr(estimator, "predict_proba"):
        probs = estimator.predict_proba(x)
        return float(np.mean(probs.argmax(1) != y)), float(log_loss(y, probs, labels=estimator.classes_))
    try:
        mean, std = estimator.predict(x, return_std=True)
    except TypeError:
        mean, std = estimator.predict(x), np.std(train[1] - estimator.predict(train[0]))
    density = 0.5 * ((y - mean) / std) ** 2 + np.log(std * np.sqrt(2 * np.pi))
    return float(np.sqrt(np.mean((y - mean) ** 2))), float(np.mean(density))


def main() -> None:
    chosen = arguments(__doc__)
    rows = []
    for name, load in SETS.items():
        x, y = (values.double().flatten(1).numpy() if values.dim() > 1 else values.numpy() for values in load())
        found: dict[str, list[tuple[float, float, float]]] = {}
        for number in range(1 if chosen.quick else SPLITS):
            order = np.random.default_rng(chosen.seed + number).permutation(len(y))
            train, test = order[: 3 * len(y) // 4], order[3 * len(y) // 4 :]
            for method, estimator in estimators(name, chosen.quick, chosen.seed + number).items():
                used = train[:FEW] if method == "GP" and name == "digits" else train
                started = time.process_time()
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    estimator.fit(x[used], y[used])
                seconds = time.process_time() - started
                result = scores(estimator, (x[used], y[used]), (x[test], y[test]))
                found.setdefault(method, []).append((*result, seconds))
        for method, runs in found.items():
            values = np.array(runs)
            if name != "diabetes":
                values[:, 0] *= 100
            apart = np.array(found["Lapis"])[:, 1] - values[:, 1]
            unit = "" if name == "diabetes" else " %"
            score, nll, against = shown(values[:, 0], 1), shown(values[:, 1], 3), shown(apart, 3)
            seconds = f"{values[:, 2].mean():.1f}"
            rows.append((name, method, score + unit, nll, seconds, "" if method == "Lapis" else against))
    report("estimators", f"# Estimators beside scikit-learn's\n\n{table(HEAD, rows)}", chosen)


if __name__ == "__main__":
    main()
