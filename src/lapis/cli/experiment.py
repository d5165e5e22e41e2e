"""The demonstration's experiment: a small network on few digits, and its Laplace posteriors.

Classes 0 to 7 are known; their images are divided at random into a training and a test set. A fraction of the labels of
both can be replaced by random ones, to imitate label noise. Two other sets are out of distribution: classes 8 and 9,
never trained on, and the test digits with noise added to their pixels. Weights, posteriors and their priors are fitted
to the training images only.

On clean labels the network alone is calibrated already, and a posterior can only do no harm to the test digits while it
helps with the unexpected ones; trained for long on noisy labels (`label_noise=0.2`) the network is overconfident, and
the posterior mends that.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

import lapis
from lapis import metrics
from lapis.cli.shell import one_thread
from lapis.predictions import ClassificationPrediction

KNOWN, HELD_OUT = tuple(range(8)), (8, 9)
PIXEL_NOISE = 1.0
"""Standard deviation of the noise on corrupted digits, in units of the training pixels' own."""
BATCH = 256


@dataclass(frozen=True)
class Setting:
    """Amount of data and training; `quick` is for a first look and for tests, not for numbers to report."""

    seed: int = 0
    label_noise: float = 0.0
    per_class: int = 50
    steps: int = 600
    samples: int = 64
    test_per_class: int = 1000

    @classmethod
    def quick(cls, seed: int, label_noise: float) -> Setting:
        return cls(seed=seed, label_noise=label_noise, per_class=20, steps=150, samples=8, test_per_class=25)


@dataclass(frozen=True)
class Digits:
    """Images (B, 1, 8, 8), standardised by the training pixels' mean and deviation, and labels (B,)."""

    train: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]
    corrupted: Tensor
    """The test images with noisy pixels; their labels are the test labels."""
    unknown: tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Method:
    """One method's probabilities (B, C) on each set of images."""

    name: str
    test: Tensor
    corrupted: Tensor
    unknown: Tensor

    def scores(self, targets: Tensor, *, corrupted: bool = False) -> dict[str, float]:
        """Metrics on the test digits, or on the corrupted ones.

        The AUROC is that of predictive entropy for detecting held-out classes (or corrupted digits) among test digits.
        """
        probs, shifted = (self.corrupted, self.corrupted) if corrupted else (self.test, self.unknown)
        values = {
            "Accuracy": metrics.accuracy(probs, targets),
            "NLL": metrics.nll(probs, targets),
            "ECE": metrics.ece(probs, targets),
            "Brier": metrics.brier(probs, targets),
            "OOD-AUROC": metrics.ood_auroc(entropy(self.test), entropy(shifted)),
        }
        return {name: value.item() for name, value in values.items()}


@dataclass(frozen=True)
class Result:
    """The outcome of one run; `methods` start with the network alone and the posterior of the README."""

    digits: Digits
    methods: tuple[Method, ...]
    fitted: lapis.LaplacePosterior
    tuned: lapis.LaplacePosterior


def entropy(probs: Tensor) -> Tensor:
    """Entropy of the predictive distribution in nats, (B,)."""
    each: Tensor = torch.special.entr(probs)
    return each.sum(-1)


def split(setting: Setting) -> Digits:
    """scikit-learn's 1,797 digits: `per_class` training images of each known class, the others for testing."""
    images, classes = load_digits(return_X_y=True)
    x = torch.tensor(images, dtype=torch.float32).reshape(-1, 1, 8, 8)
    y = torch.tensor(classes, dtype=torch.int64)
    generator = torch.Generator().manual_seed(setting.seed)
    order = torch.randperm(len(y), generator=generator)
    members = [order[y[order] == digit] for digit in KNOWN]
    train = torch.cat([indices[: setting.per_class] for indices in members])
    test = torch.cat([indices[setting.per_class :][: setting.test_per_class] for indices in members])
    unknown = torch.cat([order[y[order] == digit] for digit in HELD_OUT])
    redrawn = torch.rand(len(y), generator=generator) < setting.label_noise
    labels = torch.where(redrawn, torch.randint(len(KNOWN), y.shape, generator=generator), y)
    x = (x - x[train].mean()) / x[train].std()
    corrupted = x[test] + PIXEL_NOISE * torch.randn(x[test].shape, generator=generator)
    return Digits((x[train], labels[train]), (x[test], labels[test]), corrupted, (x[unknown], y[unknown]))


def trained(data: tuple[Tensor, Tensor], setting: Setting) -> nn.Sequential:
    """A 64-32-8 network at a mode of likelihood times prior N(0, 1), by Adam on (nll + |theta|^2 / 2) / N."""
    x, y = data
    with torch.random.fork_rng(devices=[]):  # initial weights use the global generator, which is restored
        torch.manual_seed(setting.seed)
        model = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, len(KNOWN)))
    optimiser = torch.optim.Adam(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, setting.steps)
    for _ in range(setting.steps):
        optimiser.zero_grad()
        penalty = torch.stack([p.square().sum() for p in model.parameters()]).sum() / 2
        loss = nn.functional.cross_entropy(model(x), y) + penalty / len(y)
        loss.backward()  # type: ignore[no-untyped-call]
        optimiser.step()
        schedule.step()
    return model.eval()


@one_thread()
def run(setting: Setting) -> Result:
    """Split, train, fit, tune, predict."""
    digits = split(setting)
    model = trained(digits.train, setting)
    fitted = lapis.laplace(model, digits.train, "classification", progress=False)
    tuned = fitted.tune()
    kronecker = lapis.laplace(model, digits.train, "classification", structure="kronecker", progress=False)
    refined = kronecker.refine(digits.train, tune=True, progress=False)
    last = lapis.laplace(model, digits.train, "classification", weights="last_layer", progress=False).tune()

    def point(x: Tensor) -> Tensor:
        with torch.no_grad():
            probs: Tensor = model(x).softmax(-1)
        return probs

    def linearised(posterior: lapis.Posterior) -> Callable[[Tensor], Tensor]:
        return lambda x: _probs(posterior.predict(x))

    def sampled(x: Tensor) -> Tensor:
        generator = torch.Generator().manual_seed(setting.seed)  # the same networks for every batch
        return _probs(tuned.predict(x, method="sampled", samples=setting.samples, generator=generator))

    predictors: list[tuple[str, Callable[[Tensor], Tensor]]] = [
        ("Network alone", point),
        ("Laplace", linearised(tuned)),
        ("Laplace, refined", linearised(refined)),
        ("Laplace, last layer", linearised(last)),
        ("Laplace, sampled", sampled),
    ]
    methods = []
    for name, predictor in predictors:
        images = (digits.test[0], digits.corrupted, digits.unknown[0])
        sets = [torch.cat([predictor(batch) for batch in torch.split(x, BATCH)]) for x in images]
        methods.append(Method(name, *sets))
    return Result(digits, tuple(methods), fitted, tuned)


def _probs(prediction: lapis.Prediction) -> Tensor:
    assert isinstance(prediction, ClassificationPrediction)
    return prediction.probs.detach()
