"""Every setting: its data, network, training and likelihood; trained networks are kept in .cache/trust/.

from trust.settings import SETTINGS, load_setting   # with experiments/ on sys.path

loaded = load_setting("fashion_lenet", seed=0)  # trains it, unless it is in the cache
posterior = lapis.laplace(loaded.model, loaded.train, loaded.likelihood)
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from methods import kept
from torch import Tensor, nn

import lapis
from lapis.cli import experiment as demo
from trust import data
from trust.data import ROOT, Data, Labelled
from trust.networks import Training, Transformer, lenet, perceptron, resnet, train

CACHE = Path(os.environ.get("LAPIS_TRUST_CACHE", ROOT / ".cache" / "trust"))


@dataclass(frozen=True)
class Setting:
    """Data of a seed, the untrained network that goes with them, and how it is trained (None: as the demo does)."""

    title: str
    data: Callable[[int], Data]
    network: Callable[[], nn.Module]
    training: Training | None
    likelihood: str = "classification"

    @property
    def classification(self) -> bool:
        return self.likelihood == "classification"


@dataclass(frozen=True)
class Loaded:
    """A trained network (evaluation mode) and its data. Every labelled part is (inputs, targets)."""

    name: str
    seed: int
    model: nn.Module
    train: Labelled
    validation: Labelled
    test: Labelled
    shifted: Labelled
    ood: Tensor | None
    likelihood: str
    training_seconds: float

    @property
    def classification(self) -> bool:
        return self.likelihood == "classification"


def _digits(label_noise: float, per_class: int = 50) -> Callable[[int], Data]:
    return lambda seed: data.digits(seed, label_noise, per_class)


def _images(name: str, train: int) -> Callable[[int], Data]:
    others = ("fashion_mnist", "notmnist_small") if name == "mnist" else ("mnist",)
    return lambda seed: data.images(name, others, seed, train)


def _demo_network() -> nn.Module:
    return perceptron(64, (32,), 8)


def _wide() -> nn.Module:
    return perceptron(784, (100, 50), 10)


def _small_resnet() -> nn.Module:
    return resnet(1, (16, 24, 32), 1, first_stride=2)


def _resnet20() -> nn.Module:
    return resnet(3, (8, 16, 32), 3, first_stride=1)


TREC_WORDS, SST2_WORDS = 2500, 5000
"""Rows of the embeddings; the vocabulary differs a little between seeds, and rows beyond it stay as initialised."""

SETTINGS: dict[str, Setting] = {
    "digits_clean": Setting("digits, clean labels", _digits(0.0), _demo_network, None),
    "digits_noisy": Setting("digits, 20 % noisy labels", _digits(0.2), _demo_network, None),
    "mnist_mlp": Setting("MNIST, MLP", _images("mnist", 5000), _wide, Training(20)),
    "mnist_lenet": Setting("MNIST, LeNet", _images("mnist", 5000), lenet, Training(20)),
    "mnist_resnet": Setting(
        "MNIST, ResNet", _images("mnist", 5000), _small_resnet, Training(20, "sgd", 0.05),
    ),
    "fashion_mlp": Setting("Fashion-MNIST, MLP", _images("fashion_mnist", 5000), _wide, Training(20)),
    "fashion_lenet": Setting("Fashion-MNIST, LeNet", _images("fashion_mnist", 10_000), lenet, Training(20)),
    "fashion_resnet": Setting(
        "Fashion-MNIST, ResNet", _images("fashion_mnist", 5000), _small_resnet, Training(20, "sgd", 0.05),
    ),
    "cifar_resnet20": Setting(
        "CIFAR-10, ResNet-20", lambda seed: data.cifar(seed, 9000), _resnet20,
        Training(12, "sgd", 0.1, augment=True),
    ),
    "trec_transformer": Setting(
        "TREC, Transformer", lambda seed: data.sentences("trec6", "sst2", seed, 20),
        lambda: Transformer(TREC_WORDS, 20, 6), Training(12, "adamw", 2e-3, 1e-2, 64),
    ),
    "sst2_transformer": Setting(
        "SST-2, Transformer", lambda seed: data.sentences("sst2", "trec6", seed, 32),
        lambda: Transformer(SST2_WORDS, 32, 2), Training(6, "adamw", 2e-3, 1e-2, 64),
    ),
    "houses": Setting(
        "California, unequal noise", data.houses, lambda: perceptron(8, (50,), 2), Training(60, rate=5e-3),
        "heteroscedastic",
    ),
    "counts": Setting(
        "Poisson counts", data.counts, lambda: perceptron(5, (50,), 1), Training(100, rate=5e-3), "poisson",
    ),
}  # fmt: skip
_BRIEF = Training(40, rate=1e-2, batch=32)
QUICK: dict[str, Setting] = {
    "tiny_clean": Setting("few digits, clean labels", _digits(0.0, 10), lambda: perceptron(64, (8,), 8), _BRIEF),
    "tiny_noisy": Setting("few digits, noisy labels", _digits(0.2, 10), lambda: perceptron(64, (8,), 8), _BRIEF),
}
"""For `--quick`: no file is needed, and a network trains in a tenth of a second."""


def load_setting(name: str, seed: int, cache: Path = CACHE) -> Loaded:
    """Data and trained network of one setting; trained now unless the cache holds it as it is described here."""
    setting = (SETTINGS | QUICK)[name]
    parts = setting.data(seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = setting.network()
        described = kept.description(model, setting.training, setting.likelihood, parts.train)
        path = cache / f"{name}-{seed}.safetensors"
        seconds = kept.restore(model, path, described)
        if seconds is None:
            started = time.process_time()
            model = _trained(setting, model, parts.train, seed)
            seconds = time.process_time() - started
            kept.keep(model, path, described, seconds)
    return Loaded(
        name, seed, model.eval(), parts.train, parts.validation, parts.test, parts.shifted, parts.ood,
        setting.likelihood, seconds,
    )  # fmt: skip


def _trained(setting: Setting, model: nn.Module, part: Labelled, seed: int) -> nn.Module:
    if setting.training is None:
        return demo.trained(part, demo.Setting(seed=seed))
    return train(model, *part, lapis.likelihoods.resolve(setting.likelihood), setting.training, seed)
