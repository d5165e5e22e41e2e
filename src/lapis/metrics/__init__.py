"""Metrics of accuracy, calibration and doubt: small functions of tensors, averaged over examples.

Classification metrics take probabilities (B, C) and classes (B,), both with any further positions: (B, ..., C) and
(B, ...). Binary predictions are one-dimensional, the probability of class 1: (B,) and (B,). Targets equal to
`ignore_index` are left out. Sums are in float64 on the CPU; the result is a 0-d float64 tensor unless stated otherwise.
"""

from lapis.metrics.classification import Reliability, accuracy, adaptive_ece, brier, ece, nll, reliability
from lapis.metrics.ranking import (
    RiskCoverage,
    aupr,
    aurc,
    auroc,
    misclassification_auroc,
    ood_auroc,
    risk_coverage,
)
from lapis.metrics.regression import (
    coverage,
    crps,
    crps_of_samples,
    interval_score,
    pit,
    pit_of_samples,
    regression_calibration,
    regression_calibration_error,
    rmse,
)
from lapis.metrics.resampling import Bootstrap, bootstrap

__all__ = [
    "Bootstrap",
    "Reliability",
    "RiskCoverage",
    "accuracy",
    "adaptive_ece",
    "aupr",
    "aurc",
    "auroc",
    "bootstrap",
    "brier",
    "coverage",
    "crps",
    "crps_of_samples",
    "ece",
    "interval_score",
    "misclassification_auroc",
    "nll",
    "ood_auroc",
    "pit",
    "pit_of_samples",
    "regression_calibration",
    "regression_calibration_error",
    "reliability",
    "risk_coverage",
    "rmse",
]
