"""Sequences of tasks for life-long learners: permuted and split images, clouds in the plane."""

from __future__ import annotations

import torch
from torch import nn
from trust.data import Labelled, pixels_of

from lapis.lifelong import Lesson
from methods.images import small_digits


def parts_of(name: str) -> tuple[Labelled, Labelled]:
    """All images of a data set as rows of pixels in 0..1, with classes."""
    if name == "digits":
        images = small_digits(0, train=600)
        return (images.train[0].flatten(1), images.train[1]), (images.test[0].flatten(1), images.test[1])
    train, test = (pixels_of(name, part) for part in ("train", "test"))
    if name == "cifar10_small":  # images, for convolutions
        return train, test
    return (train[0].flatten(1), train[1]), (test[0].flatten(1), test[1])


def first(part: Labelled, count: int | None) -> Labelled:
    return part[0][:count], part[1][:count]


def permuted(name: str, tasks: int, seed: int, limit: int | None = None) -> list[Lesson]:
    train, test = parts_of(name)
    train = first(train, limit)
    lessons = []
    for number in range(tasks):
        source = torch.Generator().manual_seed(1000 * seed + number)
        order = torch.randperm(train[0].shape[1], generator=source)
        lessons.append(Lesson((train[0][:, order], train[1]), (test[0][:, order], test[1])))
    return lessons


def split(name: str, tasks: int, heads: bool, limit: int | None = None) -> list[Lesson]:
    """Two classes a task, 2k and 2k + 1; of each at most `limit` training images."""
    train, test = parts_of(name)

    def pair(part: Labelled, number: int) -> Labelled:
        x, y = part
        own = y // 2 == number
        return x[own], y[own] % 2

    return [Lesson(first(pair(train, k), limit), pair(test, k), k if heads else None) for k in range(tasks)]


def clouds(seed: int) -> list[Lesson]:
    """Five tasks along a circle: two clouds each, one within the circle and one without, by turns."""

    def drawn(number: int, count: int, source: torch.Generator) -> Labelled:
        angle = torch.tensor(2 * torch.pi * number / 5)
        y = torch.arange(count) % 2
        inner = (y == number % 2).float()
        radius = 3.0 - 1.6 * inner
        centre = torch.stack([angle.cos() * radius, angle.sin() * radius], 1)
        return centre + 0.35 * torch.randn(count, 2, generator=source), y

    source = torch.Generator().manual_seed(seed)
    return [Lesson(drawn(k, 200, source), drawn(k, 200, source)) for k in range(5)]


def perceptron(*widths: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for i in range(len(widths) - 1):
        layers += [nn.Linear(widths[i], widths[i + 1]), nn.ReLU()]
    return nn.Sequential(*layers[:-1])
