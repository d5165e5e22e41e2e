"""The networks and data that every contender is measured on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

VOCABULARY = 1000
TOKENS = 16


class Batches(list[tuple[Tensor, Tensor]]):
    """Batches cut beforehand, so that nobody's time includes collating examples; peers ask for `dataset`."""

    def __init__(self, x: Tensor, y: Tensor, batch_size: int) -> None:
        super().__init__(zip(x.split(batch_size), y.split(batch_size), strict=True))
        self.dataset = TensorDataset(x, y)


@dataclass(frozen=True)
class Case:
    """A network, how much data of which shape it sees, and the jobs that make sense on it.

    `steps` of Adam make the network fit its data a little, so that evidence and variances are of usual size.
    """

    title: str
    network: Callable[[], nn.Module]
    shape: tuple[int, ...]
    outputs: int
    examples: int
    batch_size: int
    steps: int
    jobs: tuple[str, ...]
    likelihood: str = "classification"
    tokens: bool = False
    patience: float = 45.0
    """Seconds after which a run, or what it starts from, is cut off."""

    def inputs(self, n: int, seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        if self.tokens:
            return torch.randint(VOCABULARY, (n, *self.shape), generator=generator)
        return torch.randn(n, *self.shape, generator=generator)

    def targets(self, x: Tensor) -> Tensor:
        """What a random linear teacher says, with noise: something that can be learned in part."""
        generator = torch.Generator().manual_seed(2)
        flat = x.flatten(1).float() / (VOCABULARY if self.tokens else 1)
        scores = flat @ torch.randn(flat.shape[1], self.outputs, generator=generator) / flat.shape[1] ** 0.5
        scores = scores + 0.3 * torch.randn(scores.shape, generator=generator)
        return scores if self.likelihood == "regression" else scores.argmax(1)


@dataclass(frozen=True)
class Problem:
    """A case made real: the trained network in evaluation mode, and its data."""

    case: Case
    model: nn.Module
    batches: Batches

    def points(self, n: int) -> Tensor:
        return self.case.inputs(n, seed=3)

    def loss(self, f: Tensor, y: Tensor) -> Tensor:
        if self.case.likelihood == "regression":
            return 0.5 * (f - y).square().sum()
        return F.cross_entropy(f, y, reduction="sum")

    def epoch(self) -> None:
        """The yardstick: one plain forward and backward pass over the data."""
        for x, y in self.batches:
            self.model.zero_grad()
            self.loss(self.model(x), y).backward()


def problem(case: Case, examples: int | None = None) -> Problem:
    """The same network and data in every process."""
    torch.manual_seed(0)
    model = case.network()
    x = case.inputs(examples or case.examples, seed=1)
    made = Problem(case, model, Batches(x, case.targets(x), case.batch_size))
    optimiser = torch.optim.Adam(model.parameters(), lr=1e-3)
    for step in range(case.steps):
        inputs, targets = made.batches[step % len(made.batches)]
        optimiser.zero_grad()
        (made.loss(model(inputs), targets) / len(targets)).backward()
        optimiser.step()
    model.zero_grad()
    model.eval()
    return made


def mlp(*widths: int, activation: type[nn.Module] = nn.ReLU) -> nn.Sequential:
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(widths):
        layers += [nn.Linear(inputs, outputs), activation()]
    return nn.Sequential(*layers[:-1])


def regressor() -> nn.Sequential:
    return mlp(1, 50, 50, 1, activation=nn.Tanh)


def lenet() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(1, 6, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10),
    )  # fmt: skip


def small_cnn() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, stride=2, padding=1), nn.ReLU(),
        nn.Conv2d(8, 16, 3, stride=2, padding=1), nn.ReLU(),
        nn.Conv2d(16, 16, 3, stride=2, padding=1), nn.ReLU(),
        nn.Flatten(), nn.Linear(64, 18), nn.ReLU(), nn.Linear(18, 10),
    )  # fmt: skip


class Residual(nn.Module):
    """Two 3x3 convolutions with batch norm, and a shortcut that is a 1x1 convolution where shapes change."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU(),
            nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False), nn.BatchNorm2d(outputs),
        )  # fmt: skip
        self.shortcut: nn.Module = nn.Identity()
        if stride > 1 or inputs != outputs:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.body(x) + self.shortcut(x))


def resnet(widths: tuple[int, ...], blocks: int, outputs: int = 10) -> nn.Sequential:
    """Stages of so many residual blocks, each of another width and, but for the first, half the resolution."""
    layers: list[nn.Module] = [nn.Conv2d(3, widths[0], 3, 1, 1, bias=False), nn.BatchNorm2d(widths[0]), nn.ReLU()]
    inputs = widths[0]
    for stage, width in enumerate(widths):
        for block in range(blocks):
            layers.append(Residual(inputs, width, 2 if stage > 0 and block == 0 else 1))
            inputs = width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, outputs))


def resnet20() -> nn.Sequential:
    return resnet((16, 32, 64), blocks=3)


def resnet18() -> nn.Sequential:
    return resnet((64, 128, 256, 512), blocks=2)


class Transformer(nn.Module):
    """Two encoder layers of width 64 over 16 tokens, averaged, then classified."""

    def __init__(self, width: int = 64, outputs: int = 10) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.place = nn.Parameter(0.02 * torch.randn(TOKENS, width))
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, outputs)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.encoder(self.embedding(tokens) + self.place).mean(1))


FITS = ("kron_fit", "kron_ready", "diag_fit", "last_fit")
PREDICTIONS = ("kron_predict64", "kron_predict256", "kron_predict256_diagonal", "diag_predict64")
REST = ("kron_sample", "kron_evidence", "kron_tune")
DENSE = ("dense_fit", "dense_ready", "dense_predict256", "dense_evidence", "dense_tune")

PRODUCTS = ("ggn_vectors1", "ggn_vectors8")
"""GGN-vector products."""

EVERYTHING = FITS + PREDICTIONS + REST + PRODUCTS
LAST = ("last_fit", "last_predict64", "last_predict256", "last_predict256_diagonal")
LAST += ("last_sample", "last_evidence", "last_tune", *PRODUCTS)
LARGE = ("kron_fit", "diag_fit", "last_fit", "diag_predict64", "last_predict256", *PRODUCTS)

CASES = {
    "a": Case("MLP 784-256-256-10", lambda: mlp(784, 256, 256, 10), (784,), 10, 2000, 250, 60, EVERYTHING),
    "b": Case("LeNet, 62k weights", lenet, (1, 28, 28), 10, 1000, 125, 40, EVERYTHING),
    "c": Case("ResNet-20, 272k weights", resnet20, (3, 32, 32), 10, 256, 64, 8, EVERYTHING, patience=120.0),
    "d": Case(
        "regression MLP 1-50-50-1",
        regressor,
        (1,),
        1,
        200,
        200,
        200,
        FITS + DENSE + REST + PRODUCTS,
        likelihood="regression",
    ),
    "e": Case("Transformer, 16 tokens", Transformer, (TOKENS,), 10, 512, 64, 16, EVERYTHING, tokens=True),
    "f": Case("512 features, 100 classes", lambda: mlp(64, 512, 100), (64,), 100, 1000, 125, 40, LAST),
    "g": Case("ResNet-18, 11.2M weights", resnet18, (3, 32, 32), 10, 64, 16, 1, LARGE, patience=180.0),
    "h": Case("CNN, 5k weights", small_cnn, (1, 16, 16), 10, 500, 125, 40, DENSE),
}


def find(name: str) -> Case:
    """One of the cases, or `outputs-C`: a network with C outputs, for growth in C."""
    if name in CASES:
        return CASES[name]
    outputs = int(name.removeprefix("outputs-"))
    return Case(f"MLP 256-256-{outputs}", lambda: mlp(256, 256, outputs), (256,), outputs, 500, 125, 0, ())
