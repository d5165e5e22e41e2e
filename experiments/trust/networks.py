"""The networks, and training as it is usually done: Adam or SGD, a cosine schedule, weight decay, no validation."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lapis.likelihoods import Likelihood
from trust.data import PADDING


@dataclass(frozen=True)
class Training:
    """How a network is trained; `decay` is torch's weight decay."""

    epochs: int
    optimiser: str = "adam"
    """One of "adam", "adamw" (usual for Transformers) and "sgd" (with momentum)."""
    rate: float = 1e-3
    decay: float = 5e-4
    batch: int = 128
    augment: bool = False
    """Shift by up to four pixels and mirror at random, as is usual for CIFAR-10."""


def perceptron(inputs: int, hidden: tuple[int, ...], outputs: int) -> nn.Sequential:
    layers: list[nn.Module] = [nn.Flatten()]
    for width in hidden:
        layers += [nn.Linear(inputs, width), nn.ReLU()]
        inputs = width
    return nn.Sequential(*layers, nn.Linear(inputs, outputs))


def lenet() -> nn.Sequential:
    """46,678 weights."""
    return nn.Sequential(
        nn.Conv2d(1, 6, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(400, 100), nn.ReLU(), nn.Linear(100, 36), nn.ReLU(), nn.Linear(36, 10),
    )  # fmt: skip


class Residual(nn.Module):
    """Two convolutions with batch norm beside a skip connection, which is a 1 x 1 convolution where shapes change."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU(),
            nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False), nn.BatchNorm2d(outputs),
        )  # fmt: skip
        same = stride == 1 and inputs == outputs
        project = (nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))
        self.skip = nn.Identity() if same else nn.Sequential(*project)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.body(x) + self.skip(x))


def resnet(channels: int, widths: tuple[int, ...], blocks: int, first_stride: int) -> nn.Sequential:
    """Batch norm throughout; three stages of three blocks are ResNet-20."""
    stem = [nn.Conv2d(channels, widths[0], 3, first_stride, 1, bias=False), nn.BatchNorm2d(widths[0]), nn.ReLU()]
    body: list[nn.Module] = []
    inputs = widths[0]
    for stage, width in enumerate(widths):
        for block in range(blocks):
            body.append(Residual(inputs, width, 2 if stage > 0 and block == 0 else 1))
            inputs = width
    return nn.Sequential(*stem, *body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, 10))


class Transformer(nn.Module):
    """Words and places embedded, two encoder layers, the mean over the words classified."""

    def __init__(self, words: int, length: int, classes: int, width: int = 32, hidden: int = 64) -> None:
        super().__init__()
        self.words = nn.Embedding(words, width, padding_idx=PADDING)
        self.places = nn.Parameter(0.1 * torch.randn(length, width))
        layer = nn.TransformerEncoderLayer(width, 4, hidden, dropout=0.1, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        absent = x == PADDING
        tokens = self.layers(self.words(x) + self.places, src_key_padding_mask=absent)
        present = (~absent)[..., None].to(tokens.dtype)
        return self.head(self.norm((tokens * present).sum(1) / present.sum(1)))


def train(model: nn.Module, x: Tensor, y: Tensor, likelihood: Likelihood, how: Training, seed: int) -> nn.Module:
    """Minimise the mean negative log likelihood."""
    generator = torch.Generator().manual_seed(seed)
    parameters = list(model.parameters())
    optimiser: torch.optim.Optimizer
    if how.optimiser == "sgd":
        optimiser = torch.optim.SGD(parameters, how.rate, momentum=0.9, weight_decay=how.decay, nesterov=True)
    else:
        kind = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[how.optimiser]
        optimiser = kind(parameters, how.rate, weight_decay=how.decay)
    steps = how.epochs * -(-len(x) // how.batch)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, steps)
    model.train()
    for _ in range(how.epochs):
        for part in torch.randperm(len(x), generator=generator).split(how.batch):
            inputs = augmented(x[part], generator) if how.augment else x[part]
            optimiser.zero_grad()
            raw = model(inputs)
            f = likelihood.canonical(raw)
            targets = likelihood.targets(y[part], f, raw.shape)
            likelihood.nll(f, targets).mean().backward()
            optimiser.step()
            schedule.step()
    return model.eval()


def augmented(x: Tensor, generator: torch.Generator) -> Tensor:
    """Every image shifted by up to four pixels, zeros coming in, and half of them mirrored."""
    down, across = torch.randint(0, 9, (2, len(x)), generator=generator)
    padded = nn.functional.pad(x, (4, 4, 4, 4))
    size = torch.arange(x.shape[-1])
    mirrored = torch.rand(len(x), generator=generator) < 0.5
    columns = torch.where(mirrored[:, None], size.flip(0), size)
    rows, columns = down[:, None] + size, across[:, None] + columns
    at = torch.arange(len(x))[:, None, None, None]
    depth = torch.arange(x.shape[1])[None, :, None, None]
    return padded[at, depth, rows[:, None, :, None], columns[:, None, None, :]]
