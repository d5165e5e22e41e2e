"""Networks with error bars for tables, in scikit-learn's manner, and in files that hold all that a prediction needs."""

from __future__ import annotations

from lapis.estimators.classifier import LaplaceClassifier
from lapis.estimators.predictor import Predictor, load_predictor
from lapis.estimators.regressor import LaplaceRegressor

__all__ = ["LaplaceClassifier", "LaplaceRegressor", "Predictor", "load_predictor"]
