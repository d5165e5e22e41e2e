"""Networks of the cases: everyday layers, in stacks, residual blocks, images and adapters."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize


def mlp(*widths: int, activation: Callable[[], nn.Module] = nn.Tanh) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        layers: list[nn.Module] = [nn.Linear(widths[0], widths[1])]
        for a, b in itertools.pairwise(widths[1:]):
            layers += [activation(), nn.Linear(a, b)]
        return nn.Sequential(*layers)

    return build


def stack(*makers: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """A Sequential of fresh modules, made when called."""
    return lambda: nn.Sequential(*(make() for make in makers))


class Apply(nn.Module):
    """A function as a module."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def pooled_tanh() -> nn.Module:
    """tanh and then the mean over all positions of (B, C, ...)."""
    return Apply(lambda x: torch.tanh(x).flatten(2).mean(2))


class Residual(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)


class InPlace(nn.Module):
    """In-place operations straight on layer outputs, in each of their spellings."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = F.silu(self.a(x), inplace=True)
        x = self.b(x).tanh_()
        x = self.c(x)
        x *= 2.0
        x += 1.0
        return x


class SqueezeExcitation(nn.Module):
    """Channels scaled by a network of their means."""

    def __init__(self) -> None:
        super().__init__()
        self.entry, self.exit = nn.Conv1d(1, 3, 2), nn.Linear(3, 2)
        self.gate = nn.Sequential(nn.Linear(3, 2), nn.ReLU(inplace=True), nn.Linear(2, 3), nn.Sigmoid())

    def forward(self, x: Tensor) -> Tensor:
        x = self.entry(x)
        return self.exit(torch.tanh(x * self.gate(x.mean(2))[..., None]).mean(2))


class FixupBlock(nn.Module):
    """A residual block without norm layers: scalar shifts and a scalar scale."""

    def __init__(self) -> None:
        super().__init__()
        self.shift1, self.shift2 = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(()))
        self.scale = nn.Parameter(torch.ones(1))
        self.conv, self.head = nn.Conv2d(2, 2, 3, padding=1, bias=False), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.scale * self.conv(x + self.shift1) + self.shift2
        return self.head(F.relu(x).mean((2, 3)))


class PixelNetwork(nn.Module):
    """A U-Net in miniature: down, up by a transposed convolution, a skip connection, an output a pixel."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.entry, self.down = nn.Conv2d(1, 2, 3, padding=1), nn.Conv2d(2, 2, 2, stride=2)
        self.up, self.exit = nn.ConvTranspose2d(2, 2, 2, stride=2), nn.Conv2d(4, outputs, 1)

    def forward(self, x: Tensor) -> Tensor:
        skip = torch.tanh(self.entry(x))
        x = torch.tanh(self.up(torch.tanh(self.down(skip))))
        return self.exit(torch.cat([skip, x], 1))


class PreActivationBlock(nn.Module):
    """BN - ReLU - convolution twice, with a strided 1x1 shortcut taken after the first activation."""

    def __init__(self) -> None:
        super().__init__()
        self.bn1, self.conv1 = nn.BatchNorm2d(2), nn.Conv2d(2, 3, 3, stride=2, padding=1, bias=False)
        self.bn2, self.conv2 = nn.BatchNorm2d(3), nn.Conv2d(3, 3, 3, padding=1, bias=False)
        self.shortcut, self.relu = nn.Conv2d(2, 3, 1, stride=2, bias=False), nn.ReLU(inplace=True)
        self.head = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.bn1(x))
        x = self.conv2(self.relu(self.bn2(self.conv1(x)))) + self.shortcut(x)
        return self.head(x.mean((2, 3)))


class DictionaryInput(nn.Module):
    """Tokens with a mask and a table of numbers, passed by keyword."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.numbers, self.head = nn.Embedding(6, 3), nn.Linear(2, 3), nn.Linear(3, 2)

    def forward(self, *, words: Tensor, mask: Tensor, table: Tensor) -> Tensor:
        mean = (self.embedding(words) * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
        return self.head(torch.tanh(mean + self.numbers(table)))


class BilinearPair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bilinear, self.head = nn.Bilinear(2, 3, 4), nn.Linear(4, 2)

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        return self.head(torch.tanh(self.bilinear(left, right)))


class Standardise(nn.Module):
    """Weight standardisation as a parametrisation: zero mean and unit norm for each output."""

    def forward(self, weight: Tensor) -> Tensor:
        centred = weight - weight.mean((1, 2), keepdim=True)
        return centred / centred.square().sum((1, 2), keepdim=True).add(1e-3).sqrt()


def standardised_convolution() -> nn.Module:
    convolution = nn.Conv1d(2, 3, 3, bias=False)
    parametrize.register_parametrization(convolution, "weight", Standardise())
    return nn.Sequential(convolution, nn.Tanh(), nn.Flatten(), nn.Linear(9, 2))


def weight_norm() -> nn.Module:
    return nn.Sequential(parametrizations.weight_norm(nn.Linear(3, 4)), nn.Tanh(), nn.Linear(4, 2))


class LowRankAdapter(nn.Module):
    """A frozen layer with a trainable low-rank correction (LoRA), and a trainable head with a frozen bias."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.head = nn.Linear(3, 4), nn.Linear(4, 2)
        self.down, self.up = nn.Linear(3, 1, bias=False), nn.Linear(1, 4, bias=False)
        self.base.requires_grad_(False)
        self.head.bias.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.base(x) + self.up(self.down(x))).mean(1))


def frozen_middle() -> nn.Module:
    """The first weight and the whole second layer frozen: gradients must still flow through them."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    model[0].weight.requires_grad_(False)
    model[2].requires_grad_(False)
    return model


def mixed_modes() -> nn.Module:
    """Dropout in train mode, a batch norm that its owner has put into eval mode."""
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Tanh(), nn.Linear(4, 2))
    model[1].eval()
    return model
