"""The demonstration's experiment: a small network on few digits, its Laplace posteriors, and digits never seen.

The split is fixed before anything is fitted: classes 0 to 7 are known, and their images are divided into a training and
a test set; classes 8 and 9 are held out of training and are what the network should say it does not know. Training, the
prior's tuning by the evidence and every choice here use the training images alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from sklearn.datasets import load_digits  # type: ignore[import-untyped]
from torch import Tensor, nn

from lapis import metrics
from lapis.progress import track

KNOWN, HELD_OUT = tuple(range(8)), (8, 9)
BATCH = 256


@dataclass(frozen=True)
class Setting:
    """How much work to do; `quick` is for a look and for tests, not for numbers to quote."""

    seed: int = 0
    per_class: int = 25
    steps: int = 600
    samples: int = 64

    @classmethod
    def quick(cls, seed: int) -> Setting:
        return cls(seed=seed, per_class=10, steps=150, samples=8)


@dataclass(frozen=True)
class Digits:
    """Images (B, 1, 8, 8), standardised by the training pixels' mean and deviation, and classes (B,)."""

    train: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]
    unknown: tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Row:
    """One method's probabilities on the test digits and on the held-out ones."""

    name: str
    test: Tensor
    unknown: Tensor

    def scores(self, targets: Tensor) -> dict[str, float]:
        values = {
            "Accuracy": metrics.accuracy(self.test, targets),
            "NLL": metrics.nll(self.test, targets),
            "ECE": metrics.ece(self.test, targets),
            "Brier": metrics.brier(self.test, targets),
            "OOD-AUROC": metrics.ood_auroc(entropy(self.test), entropy(self.unknown)),
        }
        return {name: value.item() for name, value in values.items()}


@dataclass(frozen=True)
class Result:
    digits: Digits
    rows: tuple[Row, ...]
    n_weights: int
    effective_parameters: float
    evidence_before: float
    evidence_after: float


def entropy(probs: Tensor) -> Tensor:
    """Entropy of the predictive distribution in nats, (B,)."""
    return torch.special.entr(probs).sum(-1)


def split(setting: Setting) -> Digits:
    """scikit-learn's 1,797 digits: `per_class` training images of each known class, the rest of them for testing."""
    images, classes = load_digits(return_X_y=True)
    x = torch.tensor(images, dtype=torch.float32).reshape(-1, 1, 8, 8)
    y = torch.tensor(classes, dtype=torch.int64)
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(setting.seed))
    members = [order[y[order] == digit] for digit in KNOWN]
    train = torch.cat([indices[: setting.per_class] for indices in members])
    test = torch.cat([indices[setting.per_class :] for indices in members])
    unknown = torch.cat([order[y[order] == digit] for digit in HELD_OUT])
    x = (x - x[train].mean()) / x[train].std()
    return Digits((x[train], y[train]), (x[test], y[test]), (x[unknown], y[unknown]))


def network() -> nn.Sequential:
    """Two convolutions and a linear layer; draws its weights from torch's global generator."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(128, len(KNOWN)),
    )


def trained(data: tuple[Tensor, Tensor], setting: Setting) -> nn.Sequential:
    """The network at the mode of likelihood times prior N(0, 1): full-batch Adam on nll + |theta|^2 / 2, over N."""
    x, y = data
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(setting.seed)
        model = network()
    optimiser = torch.optim.Adam(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, setting.steps)
    for _ in track(range(setting.steps), "Training", setting.steps):
        optimiser.zero_grad()
        penalty = torch.stack([p.square().sum() for p in model.parameters()]).sum() / 2
        loss = nn.functional.cross_entropy(model(x), y) + penalty / len(y)
        loss.backward()  # type: ignore[no-untyped-call]
        optimiser.step()
        schedule.step()
    return model.eval()
