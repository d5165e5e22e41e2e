"""Classification of tables, in scikit-learn's manner."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import numpy as np
import torch
from sklearn.base import ClassifierMixin
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import column_or_1d, validate_data

from lapis.estimators.base import LaplaceEstimator


class LaplaceClassifier(ClassifierMixin, LaplaceEstimator):  # type: ignore[misc]
    """A perceptron, or any network, whose class probabilities average over its Laplace posterior.

    The prior is tuned on the training data alone (`lapis.train`), the posterior's width by leave-one-out. Three-fold
    cross-validation chooses a factor of the logits, and whether to train on under a looser prior. Inputs are
    standardised. Sample weights count examples: whole numbers. Arguments are those of `LaplaceRegressor`.

    >>> import numpy as np
    >>> x = np.linspace(-2, 2, 40)[:, None]
    >>> labels = np.where(x[:, 0] > 0, "right", "left")
    >>> classifier = LaplaceClassifier(hidden=4, epochs=300).fit(x, labels)
    >>> classifier.predict([[-1.0], [1.0]]).tolist()
    ['left', 'right']
    """

    task: ClassVar[Literal["regression", "classification"]] = "classification"

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> LaplaceClassifier:
        """Train on inputs (N, D) and classes (N,) of any kind; a row of weight k counts as k equal rows."""
        rows, targets = validate_data(self, X, y, dtype="float64", ensure_min_samples=2)
        check_classification_targets(targets)
        rows, targets = self._counted(rows, targets, sample_weight)
        self.classes_, indices = np.unique(column_or_1d(targets, warn=True), return_inverse=True)
        if len(self.classes_) < 2:
            raise ValueError(f"A classifier needs examples of two classes; got 1 class, {self.classes_.tolist()[0]!r}")
        inputs = torch.from_numpy(np.ascontiguousarray(rows))
        self._train(inputs, torch.from_numpy(indices).long(), len(self.classes_), tuple(self.classes_.tolist()))
        return self

    def predict_proba(self, X: Any) -> Any:
        """Probabilities (N, C) in the order of `classes_`."""
        rows = self._rows(X)
        return self.predictor_.probabilities(rows).probs.numpy()

    def predict_log_proba(self, X: Any) -> Any:
        """Logarithms of `predict_proba`."""
        return np.log(self.predict_proba(X))

    def predict(self, X: Any) -> Any:
        """The most probable classes."""
        likeliest = self.predict_proba(X).argmax(1)
        return self.classes_[likeliest]
