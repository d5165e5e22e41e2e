"""Bayesian linear regression: the fixed point and the gradient reach the evidence's analytically known optimum.

With X^T X = n I the evidence splits: X^T y / sqrt(n) ~ N(0, (n / alpha + s^2) I_p), the other n - p directions of y are
N(0, s^2). So s^2 = (|y|^2 - |X^T y|^2 / n) / (n - p) and alpha = n / (|X^T y|^2 / (n p) - s^2).
"""

from __future__ import annotations

import torch
from common import arguments, report, table
from torch import nn

import lapis


def main() -> None:
    chosen = arguments(__doc__)
    torch.set_default_dtype(torch.float64)
    rows, worst = [], 0.0
    for seed in range(chosen.seed, chosen.seed + (2 if chosen.quick else 5)):
        torch.manual_seed(seed)
        n, p = 80, 6
        x = torch.linalg.qr(torch.randn(n, p))[0] * n**0.5
        y = x @ torch.randn(p, 1) + 0.7 * torch.randn(n, 1)
        inside = float((x.T @ y).square().sum()) / n
        variance = (float(y.square().sum()) - inside) / (n - p)
        alpha, noise = n / (inside / p - variance), variance**0.5
        for method in ("fixed_point", "gradient"):
            start = lapis.laplace(nn.Linear(p, 1, bias=False), (x, y), lapis.Gaussian(3.0), prior=50.0)
            tuned = start.at_tangent_mode((x, y)).tune(method=method)
            errors = (
                abs(float(tuned.weight_prior.precision[0]) / alpha - 1),
                abs(float(tuned.likelihood.noise) / noise - 1),
            )
            worst = max(worst, *errors)
            rows.append((seed, method, f"{alpha:.6f}", f"{errors[0]:.1e}", f"{noise:.6f}", f"{errors[1]:.1e}",
                         tuned.tuning.iterations, f"{sum(tuned.tuning.gamma):.3f}"))  # fmt: skip
    head = ("seed", "method", "alpha", "relative error", "noise", "relative error", "iterations", "gamma")
    assert worst < 1e-6, worst
    report(
        "linear_regression", table(head, rows) + f"\n\nLargest relative error {worst:.1e} (claim: below 1e-6).", chosen
    )


if __name__ == "__main__":
    main()
