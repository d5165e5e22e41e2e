"""The U-net whose outputs are the images that a deep image prior thinks of."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor, nn

from lapis.errors import OptionError
from lapis.options import check_arguments, check_between, check_positive

SLOPE = 0.2
"""Of the leaky rectifiers, below zero."""
LEAST_SHARE = 0.02
"""Bounded images start at least this far inside their bounds."""


class UNet(nn.Module):
    """An encoder and decoder of convolutions with skip connections: (B, inputs, height, width) to (B, height, width).

    The network of the probabilistic deep image prior (Antoran, Barbano, Leuschner, Hernandez-Lobato, Jin 2022). Its
    blocks, which share a prior, are `inward`, `down.0`, `down.1`, ..., `up.0`, ... (3 x 3 convolutions) and
    `skip.0`, ..., `outward` (1 x 1).

    Args:
        channels: of each scale, from fine to coarse. Each scale halves the resolution. The publication has 32.
        skips: channels of the skip connection at each scale but the coarsest, coarse to fine; 0 is none.
        norm: "group" normalises groups of channels after each 3 x 3 convolution.
        dropout: probability that a channel is left out after each 3 x 3 convolution, while training and while
            samples are drawn by dropout.
        inputs: channels of the input.
        bounds: of the pixels, kept by a sigmoid; None leaves them free.
    """

    def __init__(
        self,
        channels: Sequence[int] = (16, 16, 16),
        skips: Sequence[int] | None = None,
        *,
        norm: Literal["none", "group"] = "none",
        dropout: float = 0.0,
        inputs: int = 1,
        bounds: tuple[float, float] | None = (0.0, 1.0),
    ) -> None:
        check_arguments(UNet, locals(), signed=("bounds",), apart=("skips", "dropout"))
        check_positive("dropout", dropout, or_zero=True)
        if dropout:
            check_between("dropout", dropout, 0, 1)
        super().__init__()
        skips = (4,) * (len(channels) - 1) if skips is None else skips
        fits = bool(channels) and isinstance(skips, Sequence) and len(skips) == len(channels) - 1
        if not fits or any(not isinstance(c, int) or isinstance(c, bool) or c < 0 for c in skips):
            raise OptionError(
                "Bad skips", expected=f"{len(channels) - 1} numbers of channels", got=repr(skips), do="give one a scale"
            )

        def block(*widths: int, stride: int = 1) -> nn.Sequential:
            layers: list[nn.Module] = []
            for index, (before, after) in enumerate(pairwise(widths)):
                layers.append(nn.Conv2d(before, after, 3, stride if index == 0 else 1, 1))
                if norm == "group":
                    layers.append(nn.GroupNorm(_groups(after), after))
                layers.append(nn.LeakyReLU(SLOPE))
                if dropout:
                    layers.append(nn.Dropout2d(dropout))
            return nn.Sequential(*layers)

        self.inward = block(inputs, channels[0])
        self.down = nn.ModuleList(block(fine, coarse, coarse, stride=2) for fine, coarse in pairwise(channels))
        steps = list(zip(reversed(channels[1:]), reversed(channels[:-1]), skips, strict=True))
        self.skip = nn.ModuleList(
            nn.Sequential(nn.Conv2d(fine, kept, 1)) if kept else nn.Sequential() for _, fine, kept in steps
        )
        self.up = nn.ModuleList(block(coarse + kept, fine, fine) for coarse, fine, kept in steps)
        self.outward = nn.Sequential(nn.Conv2d(channels[0], 1, 1))
        self.bounds = bounds

    def start_at(self, level: float) -> UNet:
        """Set the last bias so that images begin around `level`, in place.

        An image that is mostly dark is then approached from nearby: a first long way down through a sigmoid costs many
        iterations, and may end where its slope vanishes.
        """
        check_arguments(UNet.start_at, locals(), signed=("level",))
        bias = self.outward[0].bias
        assert isinstance(bias, nn.Parameter)
        if self.bounds is not None:
            low, high = self.bounds
            share = min(max((level - low) / (high - low), LEAST_SHARE), 1 - LEAST_SHARE)
            level = math.log(share / (1 - share))
        with torch.no_grad():
            bias.fill_(level)
        return self

    def forward(self, inputs: Tensor) -> Tensor:
        features = [self.inward(inputs)]
        for down in self.down:
            features.append(down(features[-1]))
        x = features.pop()
        for up, skip in zip(self.up, self.skip, strict=True):
            beside = features.pop()
            x = nn.functional.interpolate(x, size=beside.shape[-2:], mode="bilinear", align_corners=True)
            x = up(torch.cat([x, skip(beside)], 1) if any(True for _ in skip.children()) else x)
        images: Tensor = self.outward(x)[:, 0]
        if self.bounds is None:
            return images
        low, high = self.bounds
        return low + (high - low) * images.sigmoid()


def _groups(channels: int) -> int:
    """Groups of about eight channels, and at least of four where that divides."""
    for size in (8, 4, 2):
        if channels % size == 0:
            return channels // size
    return 1
