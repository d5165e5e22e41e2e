"""From Gaussian logits to mean probabilities by operations that exporters can trace, without branches on values.

The numbers are those of the default link of `posterior.predict`, "quasi": quadrature where there are two classes, else
the same Sobol points along the same root of the covariance.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from lapis.predictions.integrals.links import probit
from lapis.predictions.integrals.quadrature import gauss_hermite
from lapis.predictions.integrals.quasi import RANK, default_points, normal_points


class Sigmoid(nn.Module):
    """E[sigmoid(z)], z ~ N(mean, variance), elementwise: Gauss-Hermite up to a variance of one; above, with a logistic
    variable t, E[Phi((mean + t) / sqrt(variance))] by the trapezoidal rule.
    """

    nodes: Tensor
    weights: Tensor
    grid: Tensor
    density: Tensor

    def __init__(self) -> None:
        super().__init__()
        z, log_weights = gauss_hermite()
        t = torch.arange(-40.0, 40.25, 0.5, dtype=torch.float64)
        for name, values in (
            ("nodes", z), ("weights", log_weights.exp()), ("grid", t),
            ("density", (-t.abs() - 2 * torch.log1p((-t.abs()).exp())).softmax(0)),
        ):  # fmt: skip
            self.register_buffer(name, values)

    def forward(self, mean: Tensor, variance: Tensor) -> Tensor:
        m, deviation = mean.unsqueeze(-1), variance.clamp_min(0).sqrt().unsqueeze(-1)
        narrow = torch.sigmoid(m + deviation.clamp_max(1.0) * self.nodes) @ self.weights
        below = (1 + torch.erf((m + self.grid) / (math.sqrt(2) * deviation.clamp_min(1.0)))) / 2
        return torch.where(variance > 1, below @ self.density, narrow)


class Softmax(nn.Module):
    """E[softmax(f)], f ~ N(mean, covariance) with three classes or more, at the points of `integrals/quasi`."""

    points: Tensor
    precedence: Tensor

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.rank = min(RANK, classes - 1)
        self.alone = self.rank < classes - 1
        z = normal_points(default_points(classes), self.rank + classes * self.alone, 0)
        self.register_buffer("points", z.clone())
        self.register_buffer("precedence", torch.linspace(1.0, 0.999, classes, dtype=torch.float64))

    def forward(self, mean: Tensor, covariance: Tensor) -> Tensor:
        root, left = self._root(covariance)
        f = mean.unsqueeze(-1) + root @ self.points[: self.rank]
        if self.alone:
            f = f + left.clamp_min(0).sqrt().unsqueeze(-1) * self.points[self.rank :]
        return torch.softmax(f, 1).mean(-1)

    def _root(self, covariance: Tensor) -> tuple[Tensor, Tensor]:
        """R (B, C, rank) and d (B, C) as `integrals/quasi.shift_free_root` finds them."""
        largest = torch.diagonal(covariance, dim1=-2, dim2=-1).abs().amax(-1, keepdim=True)
        wide = covariance - covariance.mean(-1, keepdim=True)
        wide = wide - wide.mean(-2, keepdim=True)
        classes, smallest = covariance.shape[-1], torch.finfo(covariance.dtype).eps
        left = torch.diagonal(wide, dim1=-2, dim2=-1)
        columns: list[Tensor] = []
        numbers = torch.arange(classes, device=covariance.device)
        for _ in range(self.rank):
            chosen = (numbers == (left * self.precedence).argmax(-1, keepdim=True)).to(wide.dtype)  # one-hot (B, C)
            pivot = (left * chosen).sum(-1, keepdim=True)
            column = (wide * chosen.unsqueeze(1)).sum(-1)
            for done in columns:
                column = column - (done * chosen).sum(-1, keepdim=True) * done
            usable = pivot > classes * smallest * largest
            column = torch.where(usable, column / torch.where(usable, pivot, torch.ones_like(pivot)).sqrt(), 0 * column)
            left = (left - column * column) * (1 - chosen)
            columns.append(column)
        return torch.stack(columns, -1), left


class Probabilities(nn.Module):
    """Means, variances (B, C) and covariances (B, C, C) of logits -> probabilities (B, C), by a link."""

    def __init__(self, link: str, classes: int, binary: bool) -> None:
        super().__init__()
        self.link, self.binary, self.classes = link, binary, classes
        self.integral: nn.Module | None = None
        if link == "quasi":
            self.integral = Sigmoid() if binary or classes == 2 else Softmax(classes)

    def forward(self, f: Tensor, variance: Tensor, covariance: Tensor) -> Tensor:
        if self.integral is not None:
            if self.binary:
                found: Tensor = self.integral(f, variance)
            elif self.classes == 2:
                spread = variance.sum(-1) - 2 * covariance[:, 0, 1]
                second = self.integral(f[:, 1] - f[:, 0], spread)
                found = torch.stack([1 - second, second], -1)
            else:
                found = self.integral(f, covariance)
            return found
        if self.binary:
            return torch.sigmoid(probit(f, variance))
        if self.link == "probit":
            return torch.softmax(probit(f, variance), -1)
        spread = variance.unsqueeze(-1) + variance.unsqueeze(-2) - 2 * covariance
        exponents = probit(f.unsqueeze(-2) - f.unsqueeze(-1), spread)
        return torch.softmax(-torch.logsumexp(exponents, -1), -1)
