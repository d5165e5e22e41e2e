"""Predictions for a likelihood of which only the density is known."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from lapis.predictions.base import Prediction


@dataclass(frozen=True, eq=False, repr=False)
class FunctionPrediction(Prediction):
    """The outputs' distribution, and log E_f[p(y | f)] by Monte Carlo over f."""

    def _position_log_prob(self, target: Tensor) -> Tensor:
        return self._monte_carlo_log_prob(target)
