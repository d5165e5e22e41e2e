"""Data and models as people have them: labels in dictionaries, indices beside targets, wrapped models, autocast."""

from __future__ import annotations

import copy
from collections import UserDict
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import lapis
from lapis.training.plain import fit_network
from test_contract import EXAMPLES, POSTERIORS, PROBLEMS, answer, fitted
from untouched import untouched

F64 = torch.float64
X = torch.randn(24, 4, dtype=F64, generator=torch.Generator().manual_seed(0))
Y = torch.randint(3, (24,), generator=torch.Generator().manual_seed(1))


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()


class Named(nn.Module):
    """In the manner of Hugging Face: inputs by name, a loss if there are labels, outputs with logits."""

    def __init__(self, form: str = "dictionary") -> None:
        super().__init__()
        self.net, self.form = net(), form

    def forward(self, features: Tensor, mask: Tensor | None = None, labels: Tensor | None = None) -> Any:
        assert labels is None, "labels are no inputs"
        logits = self.net(features if mask is None else features * mask)
        return {"loss": None, "logits": logits} if self.form == "dictionary" else SimpleNamespace(logits=logits)


class Items(Dataset):  # type: ignore[type-arg]
    def __init__(self, **columns: Tensor) -> None:
        self.columns = columns

    def __len__(self) -> int:
        return len(X)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {name: column[index] for name, column in self.columns.items()}


def same(one: lapis.Posterior, x: Any, other: lapis.Posterior, y: Any = X) -> None:
    torch.testing.assert_close(one.predict(x).probs, other.predict(y).probs, rtol=1e-9, atol=1e-12)  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", ["labels", "label"])
@pytest.mark.parametrize("form", ["dictionary", "object"])
def test_labels_inside_a_dictionary_are_targets(name: str, form: str) -> None:
    plain = lapis.laplace(net(), (X, Y), "classification")
    columns = {"features": X, "mask": torch.ones_like(X, dtype=torch.float32), name: Y}
    loader = DataLoader(Items(**columns), batch_size=7)
    for data in (loader, Items(**columns), columns, [UserDict(columns)]):
        posterior = lapis.laplace(Named(form), data, "classification")
        torch.testing.assert_close(posterior.log_evidence(), plain.log_evidence())
        assert posterior.n_data == 24
        for x in (loader, Items(**columns), columns, {"features": X}):
            same(posterior, x, plain)


def test_an_input_called_labels_stays_an_input_where_the_targets_come_beside_it() -> None:
    class Conditional(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net()

        def forward(self, x: Tensor, labels: Tensor) -> Tensor:
            out: Tensor = self.net(x * labels[:, None])
            return out

    weights = torch.rand(24, dtype=F64, generator=torch.Generator().manual_seed(3))
    inputs, scaled = {"x": X, "labels": weights}, X * weights[:, None]
    posterior = lapis.laplace(Conditional(), (inputs, Y), "classification")
    same(posterior, inputs, lapis.laplace(net(), (scaled, Y), "classification"), scaled)


@pytest.mark.parametrize(
    "third", [torch.arange(24), torch.arange(24).flip(0).numpy(), [f"image{i}.png" for i in range(24)]], ids=str
)
def test_an_index_or_a_name_beside_the_targets_is_left_out(third: Any) -> None:
    plain = lapis.laplace(net(), (X, Y), "classification")
    batches = [(X[i : i + 8], Y[i : i + 8], third[i : i + 8]) for i in range(0, 24, 8)]
    for data in (batches, (X, Y, third)):
        same(lapis.laplace(net(), data, "classification"), iter(batches), plain)


def test_a_triple_that_may_have_two_inputs_is_refused_with_what_to_do() -> None:
    """(ids, mask, labels), as tutorials have it: class labels repeat, an index does not."""
    loader = DataLoader(TensorDataset(X, torch.ones_like(X), Y), batch_size=12)
    with pytest.raises(lapis.DataError, match=r"not a pair.*list of length 3.*\(\(ids, mask\), labels\)"):
        lapis.laplace(net(), loader, "classification")
    with pytest.raises(lapis.DataError, match=r'dictionary with "labels".*Got: {features: \(24, 4\) float64}'):
        lapis.laplace(net(), [{"features": X}], "classification")


def test_single_examples_and_pairs_in_the_place_of_inputs_are_refused_with_what_to_do() -> None:
    examples = [{"features": x, "labels": y} for x, y in zip(X, Y, strict=True)]
    with pytest.raises(lapis.DataError, match="batch single examples first"):
        lapis.laplace(Named(), examples, "classification")
    with pytest.raises(lapis.DataError, match="pass the first alone"):
        lapis.laplace(net(), (X, Y), "classification").predict((X, Y))
    with pytest.raises(lapis.DataError, match=r"Got: \(24 x {features: \(4,\) float64, labels: \(\) int64}\)"):
        lapis.laplace(Named(), Items(features=X, labels=Y), "classification").predict(examples)


def test_training_shuffles_a_dictionary_as_it_does_a_pair() -> None:
    losses = [
        fit_network(model, data, "classification", epochs=3, batch_size=8)
        for model, data in ((net(), (X, Y)), (Named(), {"features": X, "labels": Y}))
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-12)


@pytest.mark.parametrize("items", [(X, Y), X], ids=["pairs", "inputs"])
def test_prediction_of_a_loader_shows_progress_where_asked(
    items: Any, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich draws no bars in files
    posterior = lapis.laplace(net(), (X, Y), "classification")
    data = TensorDataset(*items) if isinstance(items, tuple) else TensorDataset(items)
    probs = posterior.predict(DataLoader(data, batch_size=5), progress=True).probs  # type: ignore[attr-defined]
    assert probs.shape == (24, 3)
    assert "prediction" in capfd.readouterr().err


# models --------------------------------------------------------------------------------------------------


@pytest.fixture
def process_group(tmp_path: Path) -> Iterator[None]:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


compiling = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the compiler's own modules

WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "compile": torch.compile,  # type: ignore[dict-item]
    "DataParallel": nn.DataParallel,
    "DistributedDataParallel": nn.parallel.DistributedDataParallel,
    "both": lambda model: nn.DataParallel(torch.compile(model)),  # type: ignore[arg-type]
}


@compiling
@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("name", WRAPPERS)
def test_a_wrapped_model_has_the_posterior_of_the_model_inside(name: str, tmp_path: Path) -> None:
    plain = lapis.laplace(net(), (X, Y), "classification")
    model = net()
    wrapped = WRAPPERS[name](model)
    with untouched(model):
        posterior = lapis.laplace(wrapped, (X, Y), "classification")
        assert posterior.network.module is model
        same(posterior, X, plain)
        posterior.save(tmp_path / "wrapped.lapis")
        same(lapis.load(tmp_path / "wrapped.lapis", net()), X, plain)
        plain.save(tmp_path / "plain.lapis")
        same(lapis.load(tmp_path / "plain.lapis", wrapped), X, plain)
        same(lapis.laplace(wrapped, (X, Y), "classification", weights="2"), X,
             lapis.laplace(net(), (X, Y), "classification", weights="2"))  # fmt: skip


def test_training_reaches_the_model_inside_a_wrapper() -> None:
    results = []
    for wrap in (lambda model: model, nn.DataParallel):
        model = net()
        options = {"epochs": 3, "burn_in": 1, "every": 1}
        with pytest.warns(lapis.LapisWarning):  # three epochs are too few, and it says so
            posterior = lapis.train(wrap(model), (X, Y), "classification", **options)
        swag = lapis.swag(wrap(copy.deepcopy(model)), (X, Y), "classification", epochs=1, snapshots=3, rank=2)
        results.append((posterior.predict(X).probs, swag.predict(X, samples=3).probs))  # type: ignore[attr-defined]
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other)


@compiling
def test_compiled_parts_run_as_plain_code_and_may_run_compiled_again_afterwards() -> None:
    """Else recording would look into the compiler's own traces, if it saw anything at all."""
    ran: list[str] = []

    def backend(graph: Any, _: Any) -> Any:
        ran.append("compiled")
        return graph.forward

    inner = net()
    part = torch.compile(inner[0], backend=backend)
    model = nn.Sequential(part, *inner[1:])  # type: ignore[arg-type]
    posterior = lapis.laplace(model, (X, Y), "classification")
    same(posterior, X, lapis.laplace(net(), (X, Y), "classification"))
    assert not ran
    model(X)
    assert ran
    torch._dynamo.reset()


def test_autocast_around_lapis_changes_nothing() -> None:
    model = net().float()
    data = (X.float(), Y)
    plain = lapis.laplace(model, data, "classification").tune()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        posterior = lapis.laplace(model, data, "classification").tune()
        assert torch.equal(posterior.predict(data[0]).probs, plain.predict(data[0]).probs)  # type: ignore[attr-defined]
    assert float(posterior.log_evidence()) == float(plain.log_evidence())


@pytest.mark.parametrize("name", POSTERIORS)
def test_a_posterior_moves_to_another_device_with_a_copy_of_its_network(name: str) -> None:
    """cpu:0 is not cpu to torch, although tensors that are moved there are on cpu: the whole way, on any machine."""
    posterior, model, x = fitted(name)
    chosen = PROBLEMS["classification"]
    data = (chosen.inputs(EXAMPLES), chosen.targets(EXAMPLES)) if type(posterior).needs_data else None
    assert posterior.to("cpu") is posterior
    with untouched(model):
        there = posterior.to("cpu:0", data=data)
        assert there.network.module is not model
        torch.testing.assert_close(answer(there, x, "classification"), answer(posterior, x, "classification"))


@pytest.mark.parametrize("device", ["meta", "abacus", "cuda:99"])
def test_a_device_that_is_not_there_is_refused(device: str) -> None:
    with pytest.raises(lapis.OptionError, match="Bad device"):
        fitted("dense")[0].to(device)


# channels ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "inputs", "targets", "likelihood", "end"),
    [
        (nn.Conv2d(1, 3, 1), (4, 1, 5, 6), torch.zeros(4, 5, 6, dtype=torch.long), "classification", "first"),
        (nn.Conv1d(1, 3, 1), (4, 1, 5), torch.zeros(4, 5, dtype=torch.long), "classification", "first"),
        (nn.Conv2d(1, 1, 1), (4, 1, 5, 6), torch.zeros(4, 5, 6), "regression", "first"),
        (nn.Linear(4, 3), (4, 5, 4), torch.zeros(4, 5, dtype=torch.long), lapis.Categorical(channels="first"), "last"),
        (nn.Linear(4, 3), (4, 5, 4), torch.zeros(4, 5, 3), lapis.Gaussian(channels="first"), None),
    ],
)
def test_channels_at_the_wrong_end_are_named(
    model: nn.Module, inputs: tuple[int, ...], targets: Tensor, likelihood: Any, end: str | None
) -> None:
    x = torch.zeros(inputs)
    if end is None:  # equally well (B, C, T): one may say so
        assert lapis.laplace(model, (x, targets), likelihood).n_data == 4
        return
    name = "Gaussian" if targets.is_floating_point() else "Categorical"
    with pytest.raises(lapis.DataError, match=rf'use channels="{end}", as in lapis.{name}\(channels="{end}"\)'):
        lapis.laplace(model, (x, targets), likelihood)
    fixed = getattr(lapis, name)(channels=end)
    assert lapis.laplace(model, (x, targets), fixed).n_data == 4


def test_numpy_counts_as_an_index_only_if_it_is_whole() -> None:
    with pytest.raises(lapis.DataError, match="not a pair"):
        lapis.laplace(net(), [(X, Y, np.linspace(0, 1, 24))], "classification")
