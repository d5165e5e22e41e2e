"""Exported predictions are those of the posterior, in eager mode, through torch.export and in onnxruntime."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import lapis
from lapis.cli import app
from lapis.estimators import load_predictor
from lapis.export import exported, of_predictor, predictive, to_onnx

F64 = torch.float64
X = torch.randn(30, 4, dtype=F64, generator=torch.Generator().manual_seed(0))


def net(outputs: int) -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.LayerNorm(5), nn.Linear(5, outputs)).double()


def plain(outputs: int) -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, outputs)).double()


def gelu(outputs: int) -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 5), nn.GELU(), nn.Linear(5, outputs)).double()


TARGETS: dict[str, Any] = {
    "classification": torch.arange(30) % 3,
    "regression": torch.stack([X[:, 0], X.sum(1)], 1),
    "binary": (X[:, :1] > 0).double(),
}
OUTPUTS = {"classification": 3, "regression": 2, "binary": 1}
FITS: dict[str, tuple[Any, dict[str, Any]]] = {
    "dense": (plain, {"structure": "dense", "weights": "all"}),
    "diagonal": (plain, {"structure": "diagonal", "weights": "all"}),
    "kronecker": (plain, {"structure": "kronecker", "weights": "all"}),
    "gelu": (gelu, {"structure": "kronecker", "weights": "all"}),
    "own bias": (plain, {"structure": "kronecker", "weights": "all", "prior": lapis.Prior(1.0, groups="parameter")}),
    "ekfac": (plain, {"structure": "ekfac", "weights": "all"}),
    "last layer": (net, {"weights": "last_layer"}),
    "last layer, kronecker": (net, {"weights": "last_layer", "structure": "kronecker"}),
    "single weights": (plain, {"weights": torch.arange(5 * 4 + 5 + 5 * 1 + 1) % 2 == 0}),
}


def fitted(name: str, task: str) -> lapis.LaplacePosterior:
    make, options = FITS[name]
    if name == "single weights":
        model = make(1)
        return lapis.laplace(model, (X, TARGETS["binary"]), task, **options).tune()
    return lapis.laplace(make(OUTPUTS[task]), (X, TARGETS[task]), task, **options).tune()


@pytest.mark.parametrize("task", TARGETS)
@pytest.mark.parametrize("name", FITS)
def test_the_module_predicts_as_the_posterior_does(name: str, task: str) -> None:
    if name == "single weights" and task != "binary":
        return
    posterior = fitted(name, task)
    new = 2 * X[:7] + 1
    for link in ("quasi",) if task == "regression" else ("quasi", "mean_field", "probit"):
        found = predictive(posterior, link=link)(new)  # type: ignore[arg-type]
        expected: Any = posterior.predict(new, link=None if task == "regression" else link)  # type: ignore[arg-type]
        if task == "regression":
            wanted = (expected.mean, expected.std, expected.epistemic_variance.sqrt())
        else:
            wanted = (expected.probs, expected.entropy, expected.f_variance.sqrt())
        for one, other in zip(found, wanted, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-7, atol=1e-9)


def test_a_moved_mean_and_a_temperature_are_exported_too() -> None:
    posterior = lapis.laplace(plain(3), (X, TARGETS["classification"]), "classification", structure="dense")
    moved = replace(posterior, mean=posterior.mean + 0.1)
    for each in (moved, replace(posterior, sharpness=0.7)):
        expected: Any = each.predict(X)
        torch.testing.assert_close(predictive(each)(X)[0], expected.probs, rtol=1e-7, atol=1e-9)


class Body(nn.Module):
    """Convolutions, a norm, attention and a residual: only the last layer is chosen."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv1d(1, 6, 3, padding=1), nn.BatchNorm1d(6)
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True)
        self.head = nn.Linear(6, outputs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a = torch.relu(self.norm(self.conv(x.unsqueeze(1)))).mT
        a = a + self.attention(a, a, a, need_weights=False)[0]
        return self.head(a.mean(1))


@pytest.mark.parametrize("classes", [2, 3])
def test_the_last_layer_of_any_body_is_exported(classes: int) -> None:
    torch.manual_seed(0)
    posterior = lapis.laplace(
        Body(classes).double().eval(), (X, torch.arange(30) % classes), "classification", weights="last_layer"
    )
    module, expected = predictive(posterior), posterior.predict(X)
    torch.testing.assert_close(module(X)[0], expected.probs, rtol=1e-6, atol=1e-8)  # type: ignore[union-attr]
    program = exported(module, X[:3]).module()
    torch.testing.assert_close(program(X)[0], module(X)[0], rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("rows", [1, 4])
def test_any_number_of_examples_shows_where_they_are(rows: int) -> None:
    """Torch takes equal sizes for one and the same: here 4 examples of 4 columns."""
    module = predictive(fitted("gelu", "regression"))
    torch.testing.assert_close(exported(module, X[:rows]).module()(X), module(X), rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize(
    ("name", "task"),
    [("diagonal", "regression"), ("last layer", "classification"), ("kronecker", "binary"), ("gelu", "regression")],
)
def test_onnxruntime_gives_the_same_numbers(name: str, task: str, tmp_path: Path) -> None:
    pytest.importorskip("onnxscript", reason="ONNX export needs the extra `export`: make test-extras")
    runtime = pytest.importorskip("onnxruntime", reason="ONNX export needs the extra `export`: make test-extras")
    inputs = X if name == "gelu" else X.float()  # runtimes have no error function in float64
    module = predictive(fitted(name, task)).to(inputs.dtype)
    to_onnx(module, inputs[:3], tmp_path / "model.onnx")
    session = runtime.InferenceSession(tmp_path / "model.onnx")
    for rows in (1, 30):
        found = session.run(None, {"x": inputs[:rows].numpy()})
        for one, other in zip(found, module(inputs[:rows]), strict=True):
            np.testing.assert_allclose(one, other, atol=1e-5)


@pytest.mark.filterwarnings("ignore::lapis.LapisWarning")
def test_a_fitted_file_becomes_a_program_for_batches_of_any_size_with_its_units(tmp_path: Path) -> None:
    regressor = lapis.LaplaceRegressor(4, epochs=20, every=20, structure="diagonal").fit(X, 100 * X[:, 0] + 5)
    predictor = regressor.predictor_.with_table(
        {"names": list("abcd"), "categories": {}, "target": "y", "whole": False}
    )
    predictor.save(tmp_path / "model.lapis")
    values = predictor.values(X)
    mean, std, epistemic = of_predictor(load_predictor(tmp_path / "model.lapis"))(X)
    torch.testing.assert_close(mean, values.mean)
    torch.testing.assert_close(std, values.std)
    torch.testing.assert_close(epistemic, values.epistemic_std)
    run = CliRunner().invoke
    done = run(app, ["export", str(tmp_path / "model.lapis"), "--out", str(tmp_path / "model.pt2")])
    assert done.exit_code == 0, done.output
    assert "x (4 columns, float64) -> mean, std, epistemic_std" in done.stdout
    program = torch.export.load(tmp_path / "model.pt2").module()
    for rows in (1, 30):
        torch.testing.assert_close(program(X[:rows]), (mean[:rows], std[:rows], epistemic[:rows]))
    refused = run(app, ["export", str(tmp_path / "model.lapis"), "--out", "model.exe"])
    assert refused.exit_code == 1
    assert ".onnx or .pt2" in refused.stderr


def test_what_cannot_be_exported_says_so() -> None:
    data = (X, TARGETS["classification"])
    with pytest.raises(lapis.OptionError, match="ImplicitPosterior cannot be exported"):
        predictive(lapis.laplace(plain(3), data, "classification", structure="implicit"))
    with pytest.raises(lapis.ModelError, match=r"'2.weight' cannot be exported.*Got: LayerNorm.*last_layer"):
        predictive(lapis.laplace(net(3), data, "classification", weights="all"))
    with pytest.raises(lapis.LikelihoodError, match="poisson likelihood cannot be exported"):
        predictive(lapis.laplace(plain(1), (X, torch.ones(30, 1).double()), "poisson"))
    with pytest.raises(lapis.OptionError, match="one example or more"):
        exported(predictive(fitted("diagonal", "classification")), X[:0])
