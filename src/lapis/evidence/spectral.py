"""The evidence from eigenvalues of the curvature: value, slope and second derivatives in closed form.

For eigenvalues l_i, posterior precisions s l_i + alpha_g, fractions c_i = s l_i / (s l_i + alpha_g) determined by the
data, and s = s_0 exp(-2v) for the noise times exp(v), in u = log alpha:

    d log Z / d u_g = 1/2 (gamma_g - alpha_g |theta_g - m_g|^2),  gamma_g = sum_i c_i
    d log Z / d v   = E/T + gamma - n/T
    second derivatives: -1/2 (V_g + alpha_g |theta_g - m_g|^2) in u_g, -V_g in u_g and v, -2 (V + E/T) in v,
    V_g = sum_i c_i (1 - c_i),  V and gamma their sums over groups.

So log Z is concave in all logarithms together wherever the curvature has no negative eigenvalue.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lapis.curvature.blocks.spectrum import GroupedSpectrum
from lapis.evidence.point import Point


@dataclass(frozen=True)
class SpectralEvidence:
    """log Z as a function of logs (G,), or (G + 1,) with the noise's factor last."""

    spectrum: GroupedSpectrum
    scale: float
    """s_0: factor of the curvature at the current noise, temperature included."""
    sizes: NDArray[Any]
    """Number of weights in each group."""
    distance: NDArray[Any]
    """|theta_g - m_g|^2."""
    log_likelihood: float
    """At the current noise, over the temperature."""
    errors: float = 0.0
    """E/T, the sum of squared errors over noise variance and temperature, at the current noise; to tune the noise."""
    targets: float = 0.0
    """n/T, the number of targets over the temperature; to tune the noise."""

    def __call__(self, logs: NDArray[Any]) -> Point | None:
        """The evidence at exp(logs), or None where the posterior precision is not positive definite."""
        groups = len(self.sizes)
        noisy = len(logs) > groups
        u, v = logs[:groups], float(logs[-1]) if noisy else 0.0
        precision, shrink = np.exp(u), math.exp(-2 * v)
        group = self.spectrum.group
        own = precision if group is None else precision[group.numpy()]
        scaled = self.spectrum.values.numpy() * (self.scale * shrink)
        shifted = scaled + own
        with np.errstate(invalid="ignore", divide="ignore"):
            logdet = self.spectrum.counts.numpy() @ np.log(shifted)
            determined = scaled / shifted
            spread = self._sums(determined * (own / shifted))
        gamma, penalty = self._sums(determined), precision * self.distance
        slope, errors = 0.5 * (gamma - penalty), self.errors * shrink
        if noisy:
            slope = np.append(slope, errors + gamma.sum() - self.targets)
        fit = self.log_likelihood + 0.5 * (self.errors - errors) - self.targets * v
        value = fit + 0.5 * float(self.sizes @ u - penalty.sum() - logdet)
        if not (math.isfinite(value) and np.isfinite(slope).all()):
            return None
        return Point(logs, value, slope, penalty, errors if noisy else None, spread)

    def _sums(self, values: NDArray[Any]) -> NDArray[Any]:
        """Sums over the eigenvalues of each group."""
        counts, group = self.spectrum.counts.numpy(), self.spectrum.group
        if group is None:
            return np.array([counts @ values])
        return np.bincount(group.numpy(), counts * values, minlength=len(self.sizes))
