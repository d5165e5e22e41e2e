"""Images in 0..1, their corruptions, and the small networks that classify them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from trust.data import Labelled, pixels_of


@dataclass(frozen=True)
class Images:
    """Pixels (N, channels, height, width) in 0..1 and classes of each part; inputs of no known class."""

    train: Labelled
    validation: Labelled
    test: Labelled
    ood: Tensor

    def standard(self, x: Tensor) -> Tensor:
        """What networks see: each channel with the training pixels' mean zero and deviation one."""
        pixels = self.train[0]
        return (x - pixels.mean((0, 2, 3), keepdim=True)) / pixels.std((0, 2, 3), keepdim=True)

    def standardised(self, part: Labelled) -> Labelled:
        return self.standard(part[0]), part[1]


def stored(name: str, other: str, seed: int, train: int, test: int, held: int = 500) -> Images:
    """Random subsets of a data set in files, `held` of them for validation; unknown inputs are of another one."""
    generator = torch.Generator().manual_seed(seed)
    x, y = pixels_of(name, "train")
    drawn = torch.randperm(len(y), generator=generator)
    fitted, kept = drawn[:train], drawn[train : train + held]
    x_test, y_test = pixels_of(name, "test")
    tested = torch.randperm(len(y_test), generator=generator)[:test]
    strange, _ = pixels_of(other, "test")
    strange = strange[torch.randperm(len(strange), generator=generator)[:test]]
    return Images((x[fitted], y[fitted]), (x[kept], y[kept]), (x_test[tested], y_test[tested]), strange)


def small_digits(seed: int, train: int = 300) -> Images:
    """scikit-learn's digits of 8 x 8 pixels, for quick runs without files: 0 to 7 are known, 8 and 9 are not."""
    found = load_digits()
    x = torch.from_numpy(found.images).float()[:, None] / 16
    y = torch.from_numpy(found.target)
    known = (y < 8).nonzero()[:, 0]
    known = known[torch.randperm(len(known), generator=torch.Generator().manual_seed(seed))]
    parts = (known[:train], known[train : train + 100], known[train + 100 : train + 200])
    fitted, held, tested = ((x[part], y[part]) for part in parts)
    return Images(fitted, held, tested, x[y >= 8][:100])


# -- networks -----------------------------------------------------------------------------------------------


def _drop(rate: float) -> list[nn.Module]:
    return [nn.Dropout(rate)] if rate else []


def convolutional(
    shape: tuple[int, int], widths: tuple[int, ...], hidden: int, classes: int, kernel: int, dropout: float = 0.0
) -> nn.Sequential:
    """Convolutions of stride 2, a hidden layer, outputs; dropout, where asked for, before every layer but the first.

    Args:
        shape: channels and width of the (square) images.
    """
    channels, width = shape
    layers: list[nn.Module] = []
    for number, outputs in enumerate(widths):
        layers += [*(_drop(dropout) if number else []), nn.Conv2d(channels, outputs, kernel, 2, kernel // 2), nn.ReLU()]
        channels, width = outputs, -(-width // 2)
    layers += [nn.Flatten(), *_drop(dropout), nn.Linear(channels * width**2, hidden), nn.ReLU(), *_drop(dropout)]
    return nn.Sequential(*layers, nn.Linear(hidden, classes))
