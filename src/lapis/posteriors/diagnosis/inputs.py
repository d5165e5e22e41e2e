"""Scales of the network's inputs: features far from zero, or of very different sizes, are hard on any prior."""

from __future__ import annotations

import torch
from torch import Tensor

from lapis.batches import Inputs, tensors_in
from lapis.posteriors.diagnosis.report import Notes

LARGE = 20.0
"""A root mean square above this is unscaled: weights of any usual size, and a prior around zero, expect about one."""

DIFFERENT = 1e4
"""Ratio of the largest to the smallest standard deviation among the features."""


class InputMoments:
    """Count, mean and sum of squared deviations of each feature of each floating input; updated part by part.

    Features are the columns of inputs (B, F); inputs with more axes count as one feature.
    """

    def __init__(self) -> None:
        self.count: list[float] = []
        self.mean: list[Tensor] = []
        self.deviation: list[Tensor] = []

    def add(self, inputs: Inputs) -> None:
        for number, tensor in enumerate(t for t in tensors_in(inputs) if t.is_floating_point()):
            rows = (tensor if tensor.dim() == 2 else tensor.reshape(-1, 1)).detach().double().cpu()
            count, mean = float(len(rows)), rows.mean(0)
            deviation = (rows - mean).square().sum(0)
            if number == len(self.count):
                self.count.append(count)
                self.mean.append(mean)
                self.deviation.append(deviation)
            elif mean.shape == self.mean[number].shape:  # the mean and spread of two parts together
                before, gap = self.count[number], mean - self.mean[number]
                total = before + count
                self.mean[number] = self.mean[number] + gap * count / total
                self.deviation[number] = self.deviation[number] + deviation + gap.square() * before * count / total
                self.count[number] = total

    def judge(self, notes: Notes) -> None:
        """Note the largest feature, and what is unscaled."""
        if not self.mean:
            return
        means = torch.cat(self.mean)
        spreads = torch.cat([d / n for d, n in zip(self.deviation, self.count, strict=True)]).sqrt()
        sizes = (means.square() + spreads.square()).sqrt()
        largest = int(sizes.argmax())
        notes.value("input_size", "largest input feature (RMS)", float(sizes[largest]), "about 1, at most a few")
        which = f"feature {largest}" if len(means) > 1 else "the input"
        if sizes[largest] > LARGE:
            notes.finding(
                f"Inputs are not scaled: {which} has mean {float(means[largest]):.4g} and standard deviation "
                f"{float(spreads[largest]):.4g}.",
                "Subtract the mean and divide by the standard deviation of the training data, and train again: one "
                "prior precision cannot suit weights of such different effect.",
            )
        varying = spreads[spreads > 1e-9 * sizes.clamp(min=1e-300)]
        if len(varying) < len(spreads):
            constant = float(len(spreads) - len(varying))
            notes.value("constant_features", "constant input features", constant, "none: they tell nothing")
        if len(varying) > 1 and float(varying.max() / varying.min()) > DIFFERENT:
            notes.finding(
                f"Input features have very different scales: standard deviations from {float(varying.min()):.3g} to "
                f"{float(varying.max()):.3g}.",
                "Scale each feature to standard deviation one, and train again.",
            )
