"""Regression of tables, in scikit-learn's manner."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import numpy as np
import torch
from sklearn.base import RegressorMixin
from sklearn.utils.validation import validate_data

from lapis.estimators.base import LaplaceEstimator
from lapis.estimators.scaling import Scaling
from lapis.options import check_arguments


class LaplaceRegressor(RegressorMixin, LaplaceEstimator):  # type: ignore[misc]
    """A perceptron, or any network, with error bars: trained by the evidence, predicted by its Laplace posterior.

    Prior and noise are tuned on the training data alone (`lapis.train`). Inputs and targets are standardised, and
    predictions are in the targets' own units. Sample weights count examples: whole numbers, zero included.

    Args:
        hidden: sizes of the perceptron's hidden layers.
        activation: "tanh", "relu", "gelu" or "silu"; "auto" is gelu for regression and relu for classification.
        module: a function of (inputs, outputs) that makes a network, in place of the perceptron.
        structure: of the posterior, see `lapis.laplace`; "auto" is dense up to 500 weights, else kronecker.
        epochs: of training; by default as many as make 1000 steps.
        every: epochs between tunings of prior and noise; by default a twelfth of all.
        learning_rate: at the start; by default by the number of weights.
        random_state: seed of first weights and shuffling.
        progress: show a bar while training; None shows it on a terminal only.

    >>> import numpy as np
    >>> x = np.linspace(-2, 2, 40)[:, None]
    >>> y = np.sin(2 * x[:, 0]) + 0.2 * np.random.default_rng(0).standard_normal(40)
    >>> regressor = LaplaceRegressor(hidden=8, epochs=600).fit(x, y)
    >>> mean, std = regressor.predict([[0.5], [6.0]], return_std=True)
    >>> bool(std[1] > 3 * std[0])
    True
    """

    task: ClassVar[Literal["regression", "classification"]] = "regression"

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        return tags

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> LaplaceRegressor:
        """Train on inputs (N, D) and targets (N,) or (N, K); a row of weight k counts as k equal rows."""
        rows, targets = validate_data(
            self, X, y, dtype="float64", multi_output=True, y_numeric=True, ensure_min_samples=2
        )
        rows, targets = self._counted(rows, targets, sample_weight)
        values = np.asarray(targets, dtype=np.float64)
        self._single = values.ndim == 1
        columns = torch.from_numpy(values.reshape(len(values), -1).copy())
        scaling = Scaling.of(columns)
        inputs = torch.from_numpy(np.ascontiguousarray(rows))
        self._train(inputs, scaling.apply(columns), columns.shape[1], targets=scaling)
        return self

    def predict(self, X: Any, return_std: bool = False) -> Any:
        """The mean of a new target; with `return_std` also its standard deviation, noise included."""
        check_arguments(LaplaceRegressor.predict, locals())
        rows = self._rows(X)
        found = self.predictor_.values(rows)
        mean, std = (values[:, 0] if self._single else values for values in (found.mean.numpy(), found.std.numpy()))
        return (mean, std) if return_std else mean

    def predict_interval(self, X: Any, level: float = 0.95) -> Any:
        """Lower and upper ends of the intervals that hold a new target with probability `level`."""
        rows = self._rows(X)
        found = self.predictor_.values(rows, level=level)
        lower, upper = found.lower.numpy(), found.upper.numpy()
        return (lower[:, 0], upper[:, 0]) if self._single else (lower, upper)
