"""A prediction of a table's columns as one module: standardisation in, units of the targets out."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lapis.estimators import Predictor
from lapis.export.module import Link, predictive
from lapis.options import check_arguments


class Scaled(nn.Module):
    """Columns (B, D) -> what `Predictive` gives, with real targets in their own units."""

    centre: Tensor
    spread: Tensor
    mean: Tensor
    scale: Tensor

    def __init__(self, predictor: Predictor, link: Link) -> None:
        super().__init__()
        self.inner = predictive(predictor.posterior, link=link)
        self.task = self.inner.task
        self.standardised, self.rescaled = predictor.inputs is not None, predictor.targets is not None
        dtype, one = predictor.posterior.network.dtype, torch.ones(1)
        pairs = (("centre", "spread", predictor.inputs), ("mean", "scale", predictor.targets))
        for centre, spread, scaling in pairs:
            self.register_buffer(centre, (0 * one if scaling is None else scaling.mean).to(dtype))
            self.register_buffer(spread, (one if scaling is None else scaling.scale).to(dtype))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        first, second, third = self.inner((x - self.centre) / self.spread if self.standardised else x)
        if self.task == "regression" and self.rescaled:
            return first * self.scale + self.mean, second * self.scale, third * self.scale
        return first, second, third


def of_predictor(predictor: Predictor, *, link: Link = "quasi") -> Scaled:
    """A predictor's prediction as a module of the table's own columns; see `lapis.export.predictive`."""
    check_arguments(of_predictor, locals())
    return Scaled(predictor, link)
