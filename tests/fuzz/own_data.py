"""Rooms whose data are not those of a network: latent variables, images, tables, data sets; and fitted objects of them.

Everything is small: a call costs milliseconds.
"""

from __future__ import annotations

import copy
import tempfile
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import lapis
from fuzz.rooms import Make, normal
from fuzz.worlds import World
from lapis import imaging, latent, linear_models
from lapis.latent.mixture_model import MixtureModel, Rows

SIDE = 6
"""Of images."""


def table(r: Random) -> Tensor:
    return normal(r, 12, 2)


def classes() -> Tensor:
    return torch.arange(12) % 2


def sequence(owner: Any, r: Random) -> Any:
    """What a hidden Markov model of symbols takes, or any other model; alone, or in a list."""
    if isinstance(owner, latent.HiddenMarkov) and (
        owner.kind == "discrete" or isinstance(owner.emissions_, latent.DiscreteEmissions)
    ):
        one: Any = torch.tensor([0, 1, 2, 0, 1, 1, 2, 0])
    else:
        one = normal(r, 8, 2)
    return r.choice([one, [one, one[:5]]])


def stochastic(*shape: int) -> Tensor:
    return torch.rand(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).softmax(-1)


def covariances() -> Tensor:
    return torch.eye(2, dtype=torch.float64).repeat(2, 1, 1)


def mixture() -> MixtureModel:
    return MixtureModel(stochastic(2), normal(Random(0), 2, 2), covariances(), "full", 1e-3)


def log_joint(data: Tensor, z: Tensor) -> Tensor:
    """y ~ N(z, 1), z ~ N(0, 1); whatever the form of the data."""
    return -0.5 * (z.square().sum(-1) + (data.reshape(len(data), -1)[:, :1].double() - z).square().sum(-1))


@cache
def operator() -> imaging.LinearOperator:
    return imaging.RayTransform(SIDE, angles=4)


@cache
def measured() -> Tensor:
    truth: Tensor = imaging.disc(SIDE, 2.0)
    return operator() @ truth


@cache
def unet() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return imaging.UNet((2, 2)).start_at(0.5)


@cache
def reconstruction() -> imaging.Reconstruction:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return imaging.reconstruct(
            operator(), measured(), noise=0.1, iterations=2, channels=(2, 2), tuning_steps=1, progress=False
        )


@cache
def fitted(kind: str) -> Any:
    """Fitted once, and not to the end, of which the library warns; what a call may change is copied by `THINGS`."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return _fitted(kind)


def _fitted(kind: str) -> Any:
    r = Random(0)
    x = table(r)
    if kind == "regressor":
        return lapis.LaplaceRegressor(3, epochs=2).fit(x.numpy(), x[:, 0].numpy())
    if kind == "classifier":
        return lapis.LaplaceClassifier(3, epochs=2).fit(x.numpy(), classes().numpy())
    if kind == "mixture":
        return latent.GaussianMixture(2, tolerance=1e3).fit(x.numpy())
    if kind == "bayesian mixture":
        return latent.BayesianGaussianMixture(2, tolerance=1e3).fit(x.numpy())
    if kind == "symbols":
        return latent.HiddenMarkov(2, symbols=3).fit([torch.tensor([0, 1, 2, 0, 1])], tolerance=1e3, restarts=1)
    if kind == "rows":
        return latent.HiddenMarkov(2, "gaussian").fit([x], tolerance=1e3, restarts=1)
    if kind == "dynamics":
        return latent.LinearDynamics(2).fit([x], tolerance=1e3)
    if kind == "variational":
        return latent.variational_em(log_joint, "full", x, n_latent=1, rounds=2)
    assert kind == "linear"
    return linear_models.linear(x, (x, x[:, 0]), "regression", samples=4)


THINGS: dict[str, Callable[[World, Random], Any]] = {
    **{
        kind: lambda w, r, kind=kind: copy.deepcopy(fitted(kind))  # type: ignore[misc]
        for kind in ("regressor", "classifier", "mixture", "bayesian mixture", "symbols", "rows", "dynamics")
    },
    "variational": lambda w, r: fitted("variational"),
    "linear": lambda w, r: fitted("linear"),
    "predictor": lambda w, r: fitted(r.choice(["regressor", "classifier"])).predictor_,
    "reconstruction": lambda w, r: reconstruction(),
    "operator": lambda w, r: operator(),
    "U-net": lambda w, r: copy.deepcopy(unet()),
    "exported": lambda w, r: module(),
}
"""Fitted objects to begin with."""


@cache
def module() -> nn.Module:
    """A prediction to be exported."""
    return lapis.export.predictive(fitted("regressor").posterior_)


@cache
def kept() -> Path:
    """A folder with a saved predictor, and small files in place of the usual data sets."""
    folder = Path(tempfile.mkdtemp(prefix="lapis-fuzz-data-"))
    fitted("regressor").predictor_.save(folder / "predictor")
    pixels, labels = np.zeros((4, 8, 8), np.uint8), np.arange(4)
    parts = {"x_train": pixels, "x_test": pixels, "y_train": labels, "y_test": labels}
    for name in ("mnist", "fashion_mnist", "cifar10"):
        np.savez(folder / f"{name}.npz", **parts)
    (folder / "uci").mkdir()
    rows = {"train_index_0": np.arange(3), "test_index_0": np.arange(3, 4)}
    np.savez(folder / "uci" / "yacht.npz", X=np.ones((4, 2)), y=np.ones(4), n_splits=np.array(1), **rows)
    return folder


def pictures(w: World, r: Random, o: Any) -> Tensor:
    return normal(r, 2, 1, SIDE, SIDE).sigmoid().to(w.dtype)


IN: dict[str, dict[str, Make]] = {
    "latent": {
        "X": lambda w, r, o: r.choice([table(r), table(r).numpy()]),
        "y": lambda w, r, o: None,
        "labels": lambda w, r, o: None,
        "sequences": lambda w, r, o: sequence(o, r),
        "sequence": lambda w, r, o: sequence(o, r),
        "data": lambda w, r, o: table(r),
        "n_states": lambda w, r, o: 2,
        "n_components": lambda w, r, o: r.choice([1, 2]),
        "symbols": lambda w, r, o: 3,
        "emissions": lambda w, r, o: r.choice(
            [
                "discrete",
                "gaussian",
                latent.DiscreteEmissions(stochastic(2, 3)),
                latent.GaussianEmissions(normal(r, 2, 2), covariances()),
            ]
        ),
        "initial": lambda w, r, o: r.choice([None, stochastic(2)]),
        "transitions": lambda w, r, o: r.choice([None, stochastic(2, 2)]),
        "probabilities": lambda w, r, o: stochastic(2, 3),
        "means": lambda w, r, o: normal(r, 2, 2),
        "covariances": lambda w, r, o: covariances(),
        "least": lambda w, r, o: None,
        "centre": lambda w, r, o: None,
        "dtype": lambda w, r, o: r.choice([torch.float32, torch.float64]),
        "rounds": lambda w, r, o: r.choice([1, 2]),
        "restarts": lambda w, r, o: 1,
        "numbers": lambda w, r, o: (1, 2),
        "n_latent": lambda w, r, o: r.choice([1, 2]),
        **{name: lambda w, r, o: None for name in ("A", "C", "Q", "R", "m", "P", "G", "start", "freedom")},
        "fixed": lambda w, r, o: r.choice([(), ("Q",)]),
        "season": lambda w, r, o: r.choice([None, 3]),
        "n": lambda w, r, o: 3,
        "random_state": lambda w, r, o: r.choice([0, 1]),
        "steps": lambda w, r, o: 1,
        "draws": lambda w, r, o: 2,
        "log_joint": lambda w, r, o: log_joint,
        "q": lambda w, r, o: r.choice(["mean_field", "full"]),
        "parameters": lambda w, r, o: None,
        "other": lambda w, r, o: o,
        "factor": lambda w, r, o: 0.5,
    },
    "em": {
        "model": lambda w, r, o: r.choice([mixture(), lambda source: mixture()]),
        "data": lambda w, r, o: Rows(table(r)),
    },
    "imaging": {
        "size": lambda w, r, o: r.choice([SIDE, (4, 6)]),
        "angles": lambda w, r, o: r.choice([4, (0.0, 0.5, 1.0)]),
        "detectors": lambda w, r, o: None,
        "operator": lambda w, r, o: operator(),
        "data": lambda w, r, o: measured(),
        "sinogram": lambda w, r, o: r.choice([measured(), measured().numpy()]),
        "image": lambda w, r, o: normal(r, SIDE, SIDE),
        "truth": lambda w, r, o: normal(r, SIDE, SIDE),
        "images": lambda w, r, o: normal(r, 2, SIDE, SIDE),
        "window": lambda w, r, o: 3,
        "span": lambda w, r, o: None,
        "matrix": lambda w, r, o: normal(r, 5, 4).numpy(),
        "image_shape": lambda w, r, o: (2, 2),
        "data_shape": lambda w, r, o: None,
        "known": lambda w, r, o: normal(r, 4, 6) > 0,
        "bounds": lambda w, r, o: (0.0, 1.0),
        "radius": lambda w, r, o: 2.0,
        "positions": lambda w, r, o: np.linspace(-3, 3, 5),
        "iterations": lambda w, r, o: r.choice([1, 2]),
        "network": lambda w, r, o: r.choice([None, copy.deepcopy(unet())]),
        "channels": lambda w, r, o: (2, 2),
        "skips": lambda w, r, o: None,
        "factor": lambda w, r, o: 2,
        "supersampling": lambda w, r, o: 2,
        "inputs": lambda w, r, o: 1,
        "dropout": lambda w, r, o: 0.1,
        "rate": lambda w, r, o: 0.01,
        "variation": lambda w, r, o: r.choice([None, 0.5]),
        "weight": lambda w, r, o: 0.1,
        "max_iterations": lambda w, r, o: 5,
        "tuning_steps": lambda w, r, o: 1,
        "steps": lambda w, r, o: 1,
        "rows": lambda w, r, o: slice(0, 2),
        "columns": lambda w, r, o: slice(1, 3),
        "dtype": lambda w, r, o: torch.float64,
        "device": lambda w, r, o: "cpu",
        "noise": lambda w, r, o: r.choice([None, 0.1]),
    },
    "forward": {"inputs": lambda w, r, o: normal(r, 1, 1, SIDE, SIDE).float()},
    "disc": {"centre": lambda w, r, o: (0.0, 1.0), "size": lambda w, r, o: SIDE},
    "shepp_logan": {"size": lambda w, r, o: SIDE},
    "disc_sinogram": {"centre": lambda w, r, o: (0.0, 1.0), "angles": lambda w, r, o: np.linspace(0, 3, 4)},
    "estimators": {
        "X": lambda w, r, o: r.choice([table(r), table(r).numpy()]),
        "x": lambda w, r, o: r.choice([table(r), table(r).numpy()]),
        "y": lambda w, r, o: classes() if isinstance(o, lapis.LaplaceClassifier) else table(r)[:, 0],
        "hidden": lambda w, r, o: r.choice([2, (2, 2)]),
        "activation": lambda w, r, o: r.choice(["tanh", "relu"]),
        "module": lambda w, r, o: None,
        "structure": lambda w, r, o: r.choice(["auto", "dense", "diagonal", "kronecker"]),
        "every": lambda w, r, o: None,
        "learning_rate": lambda w, r, o: None,
        "random_state": lambda w, r, o: 0,
        "targets": lambda w, r, o: None,
        "table": lambda w, r, o: {"columns": ["a", "b"]},
        "path": lambda w, r, o: w.folder / "predictor",
    },
    "load_predictor": {"path": lambda w, r, o: kept() / "predictor", "model": lambda w, r, o: None},
    "export": {
        "module": lambda w, r, o: module(),
        "example": lambda w, r, o: table(r),
        "predictor": lambda w, r, o: fitted(r.choice(["regressor", "classifier"])).predictor_,
        "x": lambda w, r, o: table(r) if o is module() or type(o).__name__ == "Scaled" else w.inputs,
        "path": lambda w, r, o: w.folder / "exported.pt2",
    },
    "data": {
        "x": pictures,
        "name": lambda w, r, o: r.choice(["mnist", "cifar10"]),
        "part": lambda w, r, o: r.choice(["train", "test"]),
        "make": lambda w, r, o: None,
        "degrees": lambda w, r, o: r.choice([15.0, -15.0]),
        "share": lambda w, r, o: 0.5,
        "rows": lambda w, r, o: r.choice([2, 10]),
    },
    "uci": {"name": lambda w, r, o: "yacht"},
    "gap_splits": {"x": lambda w, r, o: table(r)},
    "linear_models": {
        "features": lambda w, r, o: table(r),
        "data": lambda w, r, o: (table(r), table(r)[:, 0]),
        "likelihood": lambda w, r, o: "regression",
        "prior": lambda w, r, o: r.choice([0.5, 2.0]),
        "x": lambda w, r, o: table(r),
        "vectors": lambda w, r, o: normal(r, 2, 2),
        "inputs": lambda w, r, o: 2,
        "size": lambda w, r, o: 4,
        "lengthscale": lambda w, r, o: 1.0,
        "groups": lambda w, r, o: None,
        "noise": lambda w, r, o: True,
    },
    "with_noise": {"noise": lambda w, r, o: 0.5},
    "playground": {"port": lambda w, r, o: 0},
}
IN["LaplaceRegressor"] = IN["LaplaceClassifier"] = IN["estimators"]
"""Joined to `values.IN`."""
