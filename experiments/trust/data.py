"""The data of every setting: training, validation, test, shifted and out-of-distribution parts.

Data sets are looked for in $LAPIS_DATA, then in ../shared/data; digits come from scikit-learn, counts are drawn.
"""

from __future__ import annotations

import gzip
import os
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

import lapis
from lapis.cli import experiment as demo

ROOT = Path(__file__).parents[2]
ROTATION = 30.0
"""Degrees by which shifted images are turned."""
PIXEL_NOISE = 0.1
"""Standard deviation of the noise on shifted colour images, pixels being 0 to 1."""
WORD_DROPOUT = 0.3
"""Share of the words of shifted sentences that are replaced by the unknown word."""
INPUT_NOISE = 0.5
"""Standard deviation of the noise on shifted inputs of regressions, inputs being standardised."""
PADDING, UNKNOWN = 0, 1

Labelled = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Data:
    """(inputs, targets) of each part; out-of-distribution inputs have no targets, and regressions have no such part."""

    train: Labelled
    validation: Labelled
    test: Labelled
    shifted: Labelled
    ood: Tensor | None


def folder() -> Path:
    return Path(os.environ.get("LAPIS_DATA", ROOT.parent / "shared" / "data"))


def digits(seed: int, label_noise: float, per_class: int = 50) -> Data:
    """The demonstration's digits: classes 0 to 7 known, 8 and 9 not; 300 test images become the validation set."""
    parts = demo.split(demo.Setting(seed=seed, label_noise=label_noise, per_class=per_class))
    x, y = parts.test
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(seed))
    held, test = order[:300], order[300:]
    shifted = (parts.corrupted[test], y[test])
    return Data(parts.train, (x[held], y[held]), (x[test], y[test]), shifted, parts.unknown[0])


def images(name: str, others: tuple[str, ...], seed: int, train: int) -> Data:
    """MNIST or Fashion-MNIST as (N, 1, 28, 28), standardised by the training pixels; shifted: turned by 30 degrees."""
    generator = torch.Generator().manual_seed(seed)
    pixels, labels = pixels_of(name, "train")
    drawn = torch.randperm(len(labels), generator=generator)
    fitted, held = drawn[:train], drawn[train : train + 1000]
    x_test, y_test = pixels_of(name, "test")
    test = torch.randperm(len(y_test), generator=generator)[:2000]
    mean, std = pixels[fitted].mean(), pixels[fitted].std()
    ood = []
    for other in others:
        strange, _ = pixels_of(other, "test")
        ood.append(strange[torch.randperm(len(strange), generator=generator)[: 1000 // len(others)]])
    turned = test[:1000]
    return Data(
        ((pixels[fitted] - mean) / std, labels[fitted]),
        ((pixels[held] - mean) / std, labels[held]),
        ((x_test[test] - mean) / std, y_test[test]),
        ((rotated(x_test[turned]) - mean) / std, y_test[turned]),
        (torch.cat(ood) - mean) / std,
    )


def cifar(seed: int, train: int) -> Data:
    """The subset of CIFAR-10, standardised by channel; shifted: noisy pixels; out of distribution: CIFAR-100."""
    generator = torch.Generator().manual_seed(seed)
    pixels, labels = pixels_of("cifar10_small", "train")
    drawn = torch.randperm(len(labels), generator=generator)
    fitted, held = drawn[:train], drawn[len(drawn) - 1000 :]
    x_test, y_test = pixels_of("cifar10_small", "test")
    strange, _ = pixels_of("cifar100_ood", "test")
    strange = strange[torch.randperm(len(strange), generator=generator)[:1000]]
    noisy = x_test[:1000] + PIXEL_NOISE * torch.randn(x_test[:1000].shape, generator=generator)
    mean = pixels[fitted].mean((0, 2, 3), keepdim=True)
    std = pixels[fitted].std((0, 2, 3), keepdim=True)
    return Data(
        ((pixels[fitted] - mean) / std, labels[fitted]),
        ((pixels[held] - mean) / std, labels[held]),
        ((x_test - mean) / std, y_test),
        ((noisy.clamp(0, 1) - mean) / std, y_test[:1000]),
        (strange - mean) / std,
    )


def pixels_of(name: str, split: str) -> Labelled:
    """Images (N, channels, height, width) in 0..1, and classes."""
    return lapis.data.images(name, split)


def rotated(x: Tensor, degrees: float = ROTATION) -> Tensor:
    """Images turned, bilinear, the corners filled with zeros."""
    return lapis.data.rotated(x, degrees)


def sentences(name: str, other: str, seed: int, length: int) -> Data:
    """Word numbers (N, length), padded with 0; words seen less than three times are unknown (1).

    Shifted: words dropped at random. Out of distribution: sentences of the other data set.
    """
    generator = torch.Generator().manual_seed(seed)
    texts, y = _lines(f"{name}_train")
    order = torch.randperm(len(texts), generator=generator)
    fitted, held = order[500:], order[:500]
    counts = Counter(word for index in fitted.tolist() for word in texts[index].split())
    kept = sorted(word for word, count in counts.items() if count > 2)
    numbers = {word: 2 + place for place, word in enumerate(kept)}

    def encoded(lines: list[str]) -> Tensor:
        rows = torch.full((len(lines), length), PADDING)
        for row, line in zip(rows, lines, strict=True):
            known = [numbers.get(word, UNKNOWN) for word in line.split()[:length]]
            row[: len(known)] = torch.tensor(known)
        return rows

    x, (test_texts, y_test) = encoded(texts), _lines(f"{name}_test")
    x_test, y_test = encoded(test_texts)[:1000], y_test[:1000]
    strange, _ = _lines(f"{other}_test")
    dropped = (torch.rand(x_test.shape, generator=generator) < WORD_DROPOUT) & (x_test != PADDING)
    shifted = torch.where(dropped, UNKNOWN, x_test)
    parts = (x[fitted], y[fitted]), (x[held], y[held]), (x_test, y_test), (shifted, y_test)
    return Data(*parts, encoded(strange)[:1000])


def _lines(name: str) -> tuple[list[str], Tensor]:
    with gzip.open(folder() / "text" / f"{name}.tsv.gz", "rt", encoding="utf-8") as file:
        pairs = [line.rstrip("\n").split("\t", 1) for line in file]
    return [text.lower() for _, text in pairs], torch.tensor([int(label) for label, _ in pairs])


def houses(seed: int, train: int = 2000) -> Data:
    """California's house prices, everything standardised: the scatter differs a lot between districts."""
    with np.load(folder() / "california_housing.npz", allow_pickle=False) as file:
        x, y = torch.from_numpy(file["X"]), torch.from_numpy(file["y"])[:, None]
    x[:, 2:6] = x[:, 2:6].log()  # rooms, bedrooms, population and occupancy have long tails
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(x), generator=generator)
    return _regression(x.float(), y.float(), order, train, generator, standardise=True)


def counts(seed: int, train: int = 500) -> Data:
    """Poisson counts at five standard normal inputs, with rate exp(1 + sin 2 x_1 + x_2 x_3 / 2 - x_4^2 / 4)."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(train + 3000, 5, generator=generator)
    log_rate = 1 + (2 * x[:, 0]).sin() + 0.5 * x[:, 1] * x[:, 2] - 0.25 * x[:, 3].square()
    y = torch.poisson(log_rate.clamp(max=4).exp(), generator=generator)[:, None]
    return _regression(x, y, torch.arange(len(x)), train, generator, standardise=False)


def _regression(
    x: Tensor, y: Tensor, order: Tensor, train: int, generator: torch.Generator, *, standardise: bool
) -> Data:
    fitted, held, test = order[:train], order[train : train + 1000], order[train + 1000 : train + 3000]
    x = (x - x[fitted].mean(0)) / x[fitted].std(0)
    if standardise:
        y = (y - y[fitted].mean(0)) / y[fitted].std(0)
    noisy = x[test] + INPUT_NOISE * torch.randn(x[test].shape, generator=generator)
    parts = [(x[part], y[part]) for part in (fitted, held, test)]
    return Data(parts[0], parts[1], parts[2], (noisy, y[test]), None)
