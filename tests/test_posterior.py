"""How posteriors behave: as values, as sums over data of any form, and as guests of a model that they leave alone."""

from __future__ import annotations

import dataclasses
import itertools
import logging
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import lapis
import reference
from cases import F64, gaussian
from lapis.curvature.blocks.dense import gram
from lapis.errors import LapisWarning
from untouched import untouched

every_structure = pytest.mark.parametrize("structure", ["dense", "diagonal", "kronecker", "ekfac"])
every_sum = pytest.mark.parametrize("structure", ["dense", "diagonal", "kronecker"])  # EKFAC's basis is that of the fit


def draw(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


X, Y, LABELS = draw(0, 12, 3), draw(1, 12, 2), torch.arange(12) % 2


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).to(F64)


def fit(model: nn.Module | None = None, data: Any = (X, Y), likelihood: Any = None, **options: Any) -> Any:
    likelihood = lapis.Gaussian(0.5) if likelihood is None else likelihood
    return lapis.laplace(network() if model is None else model, data, likelihood, **options)


def close(found: Tensor, expected: Tensor, tolerance: float = 1e-12) -> bool:
    assert found.shape == expected.shape
    return float((found - expected).abs().max()) <= tolerance * float(expected.abs().max())


def assert_equal(one: Any, other: Any, tolerance: float = 1e-12) -> None:
    """Two posteriors agree, up to rounding."""
    assert close(one.precision(), other.precision(), tolerance)
    assert close(one.log_evidence(), other.log_evidence(), tolerance)
    assert close(one.predict(X).f_variance, other.predict(X).f_variance, 100 * tolerance)
    assert one.n_data == other.n_data


# ----------------------------------------------------------------------------------------------------------
# Values

CHANGES: dict[str, Callable[[Any], Any]] = {
    "tune": lambda p: p.tune(),
    "update": lambda p: p.update((X[:4], Y[:4])),
    "with_prior": lambda p: p.with_prior(lapis.Prior(5.0, groups="layer")),
    "with_noise": lambda p: p.with_noise(2.0),
    "with_temperature": lambda p: p.with_temperature(0.1),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@every_structure
def test_a_change_makes_a_new_posterior_and_leaves_the_old_one(change: Callable[[Any], Any], structure: str) -> None:
    posterior = fit(structure=structure)
    before = posterior.precision(), posterior.log_evidence(), posterior.sample(2), posterior.predict(X).variance
    summary = posterior.summary()
    changed = change(posterior)
    assert changed is not posterior
    assert not torch.equal(changed.precision(), before[0])
    after = posterior.precision(), posterior.log_evidence(), posterior.sample(2), posterior.predict(X).variance
    assert all(close(one, other, 1e-14) for one, other in zip(before, after, strict=True))
    assert posterior.summary() == summary
    assert posterior.tuning is None
    # a copy made from the sums alone, without anything cached, agrees: nothing has crept into them
    assert_equal(dataclasses.replace(posterior), posterior)


def test_a_posterior_cannot_be_assigned_to() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        fit().temperature = 2.0


def test_what_did_not_change_is_shared() -> None:
    posterior = fit()
    assert posterior.with_prior(3.0).curvature is posterior.curvature
    assert posterior.tune(noise=False).curvature is posterior.curvature
    assert posterior.with_temperature(3.0).mean is posterior.mean


# ----------------------------------------------------------------------------------------------------------
# Sums over data


@pytest.mark.parametrize("curvature", ["ggn", "empirical"])
@every_sum
def test_updating_with_new_data_is_fitting_to_all(structure: str, curvature: str) -> None:
    model = network()
    whole = fit(model, structure=structure, curvature=curvature)
    parts = fit(model, (X[:5], Y[:5]), structure=structure, curvature=curvature)
    assert_equal(parts.update((X[5:], Y[5:])), whole)
    assert_equal(parts.update([(X[5:6], Y[5:6]), (X[6:], Y[6:])]), whole)
    assert_equal(parts.update((X[5:9], Y[5:9])).update((X[9:], Y[9:])), whole)
    other_order = fit(model, (X[5:], Y[5:]), structure=structure, curvature=curvature).update((X[:5], Y[:5]))
    assert_equal(other_order, whole)


def test_updating_a_hessian_is_fitting_to_all() -> None:
    model, options = network(), {"structure": "dense", "curvature": "hessian", "prior": 100.0}
    parts = fit(model, (X[:5], Y[:5]), **options).update((X[5:], Y[5:]))
    assert_equal(parts, fit(model, **options))


@every_sum
def test_an_update_keeps_changed_noise_prior_and_temperature(structure: str) -> None:
    model = network()
    changed = fit(model, (X[:5], Y[:5]), structure=structure).with_noise(2.0).with_prior(3.0).with_temperature(0.7)
    whole = fit(model, likelihood=lapis.Gaussian(2.0), prior=3.0, temperature=0.7, structure=structure)
    assert_equal(changed.update((X[5:], Y[5:])), whole)


@every_structure
def test_another_noise_is_a_refit(structure: str) -> None:
    model = network()
    refitted = fit(model, likelihood=lapis.Gaussian(1.7), structure=structure)
    assert_equal(fit(model, structure=structure).with_noise(1.7), refitted)
    noise = torch.tensor([0.4, 1.2], dtype=F64)
    each = fit(model, likelihood=lapis.Gaussian(noise), structure=structure).with_noise(3 * noise)
    assert_equal(each, fit(model, likelihood=lapis.Gaussian(3 * noise), structure=structure))


@every_structure
def test_another_prior_is_a_refit(structure: str) -> None:
    model, prior = network(), lapis.Prior([0.2, 1.0, 3.0, 0.7], groups="parameter", mean=0.3)
    assert_equal(fit(model, structure=structure).with_prior(prior), fit(model, prior=prior, structure=structure))


@every_structure
def test_temperature_divides_the_log_likelihood(structure: str) -> None:
    """q ~ p(D | theta)^(1/T) p(theta): curvature / T + prior, and the evidence of that; a refit says the same."""
    model, unit = network(), torch.eye(26, dtype=F64)
    warm = fit(model, structure=structure, prior=0.8)
    cold = warm.with_temperature(0.25)
    assert close(cold.precision(), 4 * (warm.precision() - 0.8 * unit) + 0.8 * unit)
    logdet = torch.linalg.slogdet(cold.precision()).logabsdet
    prior = 26 * math.log(0.8) - 0.8 * cold.mean.square().sum()
    assert close(cold.log_evidence(), 4 * warm.log_likelihood() + 0.5 * (prior - logdet))
    assert_equal(cold, fit(model, structure=structure, prior=0.8, temperature=0.25))
    assert_equal(cold.with_temperature(1.0), warm)


# ----------------------------------------------------------------------------------------------------------
# Which weights


class HeadFirst(nn.Module):
    """The layer that is called last is the one defined first; and there is a weight of no layer."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.body = nn.Linear(4, 2), nn.Linear(3, 4)
        self.shift = nn.Parameter(torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.body(x + self.shift)))


SELECTIONS: dict[str, tuple[Any, list[str]]] = {
    "all": ("all", ["shift", "head.weight", "head.bias", "body.weight", "body.bias"]),
    "last layer": ("last_layer", ["head.weight", "head.bias"]),
    "module": ("head", ["head.weight", "head.bias"]),
    "pattern": ("*.bias", ["head.bias", "body.bias"]),
    "patterns": (["body.*", "shift"], ["shift", "body.weight", "body.bias"]),
    "function": (lambda name, parameter: parameter.dim() == 2, ["head.weight", "body.weight"]),
}


@pytest.mark.parametrize(("weights", "names"), SELECTIONS.values(), ids=SELECTIONS)
@every_structure
def test_weights_are_chosen_and_ordered_as_the_model_names_them(weights: Any, names: list[str], structure: str) -> None:
    model = HeadFirst().to(F64)
    posterior = fit(model, weights=weights, structure=structure)
    parameters = dict(model.named_parameters())
    assert posterior.network.names == tuple(names)
    assert posterior.n_weights == sum(parameters[name].numel() for name in names)
    assert torch.equal(posterior.mean, torch.cat([parameters[name].detach().flatten() for name in names]))
    places, start = [], 0
    for name, parameter in parameters.items():
        places += range(start, start + parameter.numel()) if name in names else []
        start += parameter.numel()
    expected = reference.ggn(model, X, Y, gaussian(0.5))[places][:, places]
    found = posterior.precision() - torch.eye(len(places), dtype=F64)
    if structure == "dense":
        assert close(found, expected, 1e-9)
    if structure == "diagonal":
        assert close(found, torch.diag(expected.diagonal()), 1e-9)


def test_the_last_layer_of_a_layer_is_itself() -> None:
    assert fit(nn.Linear(3, 2).to(F64), weights="last_layer").n_weights == 8


def test_frozen_weights_are_not_uncertain() -> None:
    model = network()
    model[2].weight.requires_grad_(False)
    assert fit(model).network.names == ("0.weight", "0.bias", "2.bias")
    assert fit(model, weights="last_layer").network.names == ("2.bias",)


# ----------------------------------------------------------------------------------------------------------
# Choices made on the user's behalf


def test_the_structure_chosen_is_said(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="lapis"):
        small = fit()
    assert small.structure == "dense"
    assert any("dense, chosen for 26 weights" in record.message for record in caplog.records)
    assert "dense, chosen for 26 weights" in small.summary()
    wide = nn.Sequential(nn.Linear(3, 500), nn.Tanh(), nn.Linear(500, 2)).to(F64)
    large = fit(wide)
    assert large.structure == "kronecker"
    assert "kronecker, chosen for 3,002 weights" in large.summary()
    assert "kronecker LaplacePosterior, 3,002 weights, 12 examples, gaussian" in repr(large)
    assert fit(structure="diag").structure == "diagonal"


def test_a_network_that_changes_back_can_be_used_again() -> None:
    model = lively()
    posterior = fit(model, weights="last_layer")
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    expected = posterior.predict(X).variance
    model(X)  # in train mode: batch norm moves
    model.load_state_dict(state)
    assert torch.equal(posterior.predict(X).variance, expected)


def test_the_structure_chosen_fits_in_memory() -> None:
    posterior = fit(memory_budget=10_000)
    assert posterior.structure == "kronecker"
    assert "26 weights (too many for dense in memory_budget)" in posterior.summary()


def test_sampling_many_outputs_is_said_and_can_be_forbidden() -> None:
    model = nn.Linear(1, 300).to(F64)
    data = (X[:3, :1], torch.arange(3))
    with pytest.warns(LapisWarning, match='300 outputs .* sampled; curvature="exact" forbids'):
        sampled = fit(model, data, "categorical", structure="diagonal")
    assert any("drawn target" in choice for choice in sampled.choices)
    exact = fit(model, data, "categorical", structure="diagonal", curvature="exact")
    asked = fit(model, data, "categorical", structure="diagonal", curvature="sampled")
    assert torch.equal(asked.precision(), sampled.precision())
    assert not torch.equal(exact.precision(), sampled.precision())


def test_the_summary_tells_what_matters() -> None:
    text = fit(prior=lapis.Prior([0.5, 2.0], groups="layer")).summary()
    for part in (
        "26 weights from 12 examples",
        "Gaussian",
        "0.5 .. 2 (2 groups)",
        "log evidence",
        "effective parameters",
    ):
        assert part in text


# ----------------------------------------------------------------------------------------------------------
# Data in any form


class Pairs(Dataset[tuple[Tensor, Tensor]]):
    def __len__(self) -> int:
        return len(X)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return X[index], Y[index]


class Stream(IterableDataset[tuple[Tensor, Tensor]]):
    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return iter(zip(X, Y, strict=True))


class Batches:
    """An iterable without a length."""

    def __iter__(self) -> Iterator[Any]:
        return iter([[X[:5], Y[:5]], [X[5:], Y[5:]]])


FORMS: dict[str, Callable[[], Any]] = {
    "pair of tensors": lambda: (X, Y),
    "list of two tensors": lambda: [X, Y],
    "pair of arrays": lambda: (X.numpy(), Y.numpy()),
    "single-precision arrays": lambda: (X.numpy().astype(np.float32), Y.numpy().astype(np.float32)),
    "data set": lambda: TensorDataset(X, Y),
    "map-style data set": Pairs,
    "iterable data set": Stream,
    "loader": lambda: DataLoader(Pairs(), batch_size=5),
    "loader without a length": lambda: DataLoader(Stream(), batch_size=5),
    "shuffled loader": lambda: DataLoader(Pairs(), batch_size=5, shuffle=True),
    "list of batches": lambda: [(X[:7], Y[:7]), (X[7:], Y[7:])],
    "list of two batches": lambda: [(X[:6], Y[:6]), (X[6:], Y[6:])],
    "tuple of batches": lambda: ((X[:6], Y[:6]), (X[6:], Y[6:])),
    "single batch": lambda: [(X, Y)],
    "single examples": lambda: [(X[n : n + 1], Y[n : n + 1]) for n in range(12)],
    "an empty batch between": lambda: [(X[:7], Y[:7]), (X[:0], Y[:0]), (X[7:], Y[7:])],
    "batches of arrays": lambda: [(X[:7].numpy(), Y[:7].numpy()), (X[7:].numpy(), Y[7:].numpy())],
    "targets as lists": lambda: [(X[:7], Y[:7].tolist()), (X[7:], Y[7:].tolist())],
    "generator": lambda: ((X[n : n + 4], Y[n : n + 4]) for n in range(0, 12, 4)),
    "iterable without a length": Batches,
}


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_data_in_any_form_give_the_same_posterior(form: Callable[[], Any]) -> None:
    model, data = network(), form()
    tolerance = 1e-6 if isinstance(data, tuple) and getattr(data[0], "dtype", None) == np.float32 else 1e-12
    expected = fit(model)
    found = fit(model, data)
    assert found.n_data == 12
    assert close(found.precision(), expected.precision(), tolerance)
    assert close(found.log_evidence(), expected.log_evidence(), tolerance)


@pytest.mark.parametrize("batch_size", [1, 5, 100])
def test_the_batch_size_does_not_matter(batch_size: int) -> None:
    model = network()
    for data in ((X, Y), Pairs()):
        assert_equal(fit(model, data, batch_size=batch_size), fit(model))


@every_structure
def test_little_memory_cuts_the_work_and_not_the_answer(structure: str) -> None:
    """Down to single examples, in the fit and in predictions."""
    model = network()
    seen: list[int] = []
    model.register_forward_hook(lambda module, inputs, output: seen.append(len(inputs[0])))
    whole = fit(model, structure=structure)
    posterior = fit(model, structure=structure, memory_budget=3 * 8 * 26**2 if structure == "dense" else 1200)
    seen.clear()
    found = posterior.update((X, Y)).marginal_variance(), posterior.functional_variance(X), posterior.log_evidence()
    assert structure == "dense" or max(seen) < 12
    expected = whole.update((X, Y)).marginal_variance(), whole.functional_variance(X), whole.log_evidence()
    assert all(close(one, other) for one, other in zip(found, expected, strict=True))


@pytest.mark.parametrize("groups", ["one", "layer", "weight"])
def test_few_rows_beside_the_weights_give_the_same_dense_posterior(
    groups: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Evidence, its gradient and tuning from rows that were never multiplied; then everything that needs the matrix."""
    model, data = network(), (X[:5], Y[:5])

    def slope(posterior: Any) -> Tensor:
        precision = torch.linspace(0.5, 2.0, len(posterior.weight_prior.precision), dtype=F64, requires_grad=True)
        value = posterior.with_prior(lapis.Prior(precision, groups=groups)).with_noise(0.8).log_evidence()
        return torch.cat([value[None], *torch.autograd.grad(value, precision)]).detach()

    few = fit(model, data, structure="dense", prior=lapis.Prior(0.7, groups=groups))
    monkeypatch.setattr(gram, "FEW_ROWS", 0.0)
    many = fit(model, data, structure="dense", prior=lapis.Prior(0.7, groups=groups))
    (rows,), (none,) = ([block.few_rows for block in p.curvature.blocks] for p in (few, many))
    assert none is None
    assert rows.shape == (10, 26)
    assert close(slope(few), slope(many), 1e-10)
    if groups == "one":
        assert close(few.tune().weight_prior.precision, many.tune().weight_prior.precision, 1e-8)
    assert few.curvature.blocks[0].few_rows is not None
    few.save(tmp_path / "few")
    assert_equal(lapis.load(tmp_path / "few", model), many)
    assert few.curvature.blocks[0].few_rows is None
    assert_equal(few.update((X[5:], Y[5:])), many.update((X[5:], Y[5:])))
    assert_equal(few, many)


@pytest.mark.parametrize("groups", ["one", "layer"])
def test_dense_log_determinants_and_variances_have_first_and_second_derivatives(
    groups: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By prior precisions and by the noise, where the matrix has several strips."""
    monkeypatch.setattr(gram, "STRIP", 7)
    monkeypatch.setattr(gram, "FEW_ROWS", 0.0)
    posterior = fit(network(), structure="dense", prior=lapis.Prior(0.7, groups=groups))
    block = posterior.curvature.blocks[0]
    precision = torch.linspace(0.5, 2.0, len(posterior.weight_prior.precision), dtype=F64, requires_grad=True)
    scale = torch.tensor(1.3, dtype=F64, requires_grad=True)
    prior = posterior.weight_prior.with_precision(precision)
    curvature = block.curvature.clone()

    def derivatives(value: Tensor) -> list[Tensor]:
        first = torch.autograd.grad(value, (precision, scale), create_graph=True)
        plain = torch.autograd.grad(value, (precision, scale), retain_graph=True)
        second = [torch.autograd.grad(f.sum(), (precision, scale), retain_graph=True) for f in first]
        return [value, *first, *plain, *itertools.chain.from_iterable(second)]

    matrix = scale * curvature + prior.vector().diag()
    found = derivatives(block.gaussian(prior, scale).logdet())
    expected = derivatives(torch.linalg.slogdet(matrix).logabsdet)
    assert all(close(one.detach(), other.detach(), 1e-9) for one, other in zip(found, expected, strict=True))
    weight = torch.linspace(-1.0, 2.0, len(curvature), dtype=F64)
    found = derivatives(block.gaussian(prior, scale).variance() @ weight)
    expected = derivatives(torch.linalg.inv(matrix).diagonal() @ weight)
    assert all(close(one.detach(), other.detach(), 1e-9) for one, other in zip(found, expected, strict=True))
    fixed = block.gaussian(posterior.weight_prior.with_precision(precision.detach()), scale.detach())
    assert torch.equal(fixed.variance(), block.gaussian(prior, scale).variance())
    assert close(fixed.factor(), torch.linalg.cholesky(matrix).detach(), 1e-10)


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(2, 3), nn.Embedding(4, 3)

    def forward(self, left: Tensor, right: Tensor, scale: float = 1.0) -> Tensor:
        return scale * torch.tanh(self.left(left) + self.right(right))[:, :2]


def test_inputs_may_be_tuples_and_dictionaries() -> None:
    model = TwoInputs().to(F64)
    left, right = X[:, :2], torch.arange(12) % 4
    positional = fit(model, ((left, right), Y))
    by_name = fit(model, [({"left": left, "right": right}, Y)])
    arrays = fit(model, ({"left": left.numpy(), "right": right.numpy()}, Y.numpy()), batch_size=5)
    scaled = fit(model, [({"left": left, "right": right, "scale": 1.0}, Y)])
    for other in (by_name, arrays, scaled):
        assert close(other.precision(), positional.precision())
    for method in ("linearised", "sampled"):
        one = positional.predict((left, right), method=method)
        two = by_name.predict({"left": left, "right": right}, method=method)
        assert close(one.variance, two.variance)
    explicit = reference.jacobians(model, (left, right), gaussian(0.5))
    covariance = torch.linalg.inv(positional.precision())
    expected = torch.stack([jacobian @ covariance @ jacobian.T for jacobian in explicit])
    assert close(positional.functional_variance((left, right)), expected, 1e-9)


def test_a_network_in_single_precision_takes_arrays_in_double() -> None:
    model = network().float()
    posterior = fit(model, (X.numpy(), Y.numpy()))
    assert posterior.predict(X.numpy()).mean.dtype == torch.float32
    assert close(posterior.precision(), fit(model.double(), (X, Y)).precision(), 1e-4)


# ----------------------------------------------------------------------------------------------------------
# Models are left as found


class Counting(nn.Module):
    """Buffers that the forward pass changes: one in place, one by putting another tensor in its place."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("last", torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        f = self.layer(x)
        self.last = f.detach().mean(0)
        return f


def lively() -> nn.Sequential:
    """Train mode, with dropout, batch norm, one part in evaluation mode, a frozen weight, gradients, a hook."""
    parts = [nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 3), nn.BatchNorm1d(3), Counting()]
    model = nn.Sequential(*parts).to(F64).train()
    model[4].eval()
    model[0].bias.requires_grad_(False)
    model[3].weight.grad = torch.ones_like(model[3].weight)
    model.register_forward_hook(lambda *_: None)
    model(X)
    return model


@every_structure
def test_the_model_comes_back_as_it_was_after_everything(structure: str) -> None:
    model = lively()
    likelihood = lapis.Categorical()
    with untouched(model):
        posterior = fit(model, (X, LABELS), likelihood, structure=structure)
        posterior.predict(X, link="mc").probs  # noqa: B018
        posterior.predict(X, method="sampled").mutual_information  # noqa: B018
        posterior.predict(X, joint=True).log_prob(LABELS)
        posterior.functional_variance(X, diagonal=True)
        posterior.functional_covariance(X)
        posterior.tune().update((X, LABELS)).sample(3)
        posterior.summary()
        fit(model, (X, LABELS), likelihood, structure=structure, weights="last_layer", curvature="sampled")


def test_dropout_and_batch_statistics_play_no_part() -> None:
    model = lively()
    trained = fit(model)
    still = lively()
    still.load_state_dict(model.state_dict())
    assert_equal(trained, fit(still.eval()))


def test_gradients_may_be_switched_off_around() -> None:
    model = network()
    expected = fit(model)
    with torch.no_grad():
        found = fit(model)
        tuned = found.tune()
        prediction = found.predict(X)
    assert_equal(found, expected)
    assert found.log_evidence().requires_grad is False
    assert close(tuned.log_evidence(), expected.tune().log_evidence())
    assert close(prediction.variance, expected.predict(X).variance)


def test_nothing_is_drawn_from_the_global_generator() -> None:
    model = network()
    state = torch.get_rng_state()
    first, again = (fit(model, Pairs(), "gaussian", curvature="sampled", fisher_samples=2) for _ in range(2))
    assert torch.equal(first.precision(), again.precision())
    first.sample(2)
    first.predict(X, method="sampled")
    fit(model, (X, LABELS), "categorical").predict(X, link="mc").probs  # noqa: B018
    assert torch.equal(torch.get_rng_state(), state)


# ----------------------------------------------------------------------------------------------------------
# Predictions of a posterior


def test_sampled_predictions_are_those_of_sampled_networks() -> None:
    model = network()
    posterior = fit(model)
    draws = posterior.sample(7, generator=torch.Generator().manual_seed(3))
    outputs = torch.stack([torch.func.functional_call(model, d, (X,)) for d in lapis.unflatten(draws, posterior)])
    prediction = posterior.predict(X, method="sampled", samples=7, generator=torch.Generator().manual_seed(3))
    assert prediction.method == "sampled"
    assert close(prediction.mean, outputs.mean(0).detach())
    assert close(prediction.epistemic_variance, outputs.var(0, unbiased=False).detach())


@every_structure
def test_predictions_do_not_depend_on_their_batch(structure: str) -> None:
    posterior = fit(lively(), structure=structure)
    whole = posterior.predict(X)
    for n in (0, 7):
        alone = posterior.predict(X[n : n + 1])
        assert close(alone.mean, whole.mean[n : n + 1])
        assert close(alone.f_covariance, whole.f_covariance[n : n + 1])
        assert close(alone.log_prob(Y[n : n + 1]), whole.log_prob(Y)[n : n + 1])


def test_predictions_hold_as_much_covariance_as_asked_for() -> None:
    posterior = fit()
    full, diagonal, joint = (
        posterior.predict(X),
        posterior.predict(X, covariance="diagonal"),
        posterior.predict(X, joint=True),
    )
    whole = posterior.functional_covariance(X)
    each = torch.stack([whole[n, :, n] for n in range(12)])
    assert close(full.f_covariance, each)
    assert close(posterior.functional_variance(X), each)
    assert close(posterior.functional_variance(X, diagonal=True), each.diagonal(dim1=1, dim2=2))
    assert diagonal.f_covariance is None
    assert close(diagonal.f_variance, full.f_variance)
    assert close(joint.f_covariance, each)
    assert joint.log_prob(Y).shape == ()
    assert full.log_prob(Y).shape == (12,)
    many = fit(nn.Linear(3, 40).to(F64), (X, draw(3, 12, 40)))
    assert many.predict(X).f_covariance is None
    assert many.predict(X, covariance="full").f_covariance.shape == (12, 40, 40)


def test_outputs_without_a_channel_keep_their_shape() -> None:
    class Flat(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x).squeeze(-1)

    posterior = fit(Flat().to(F64), (X, Y[:, 0]))
    prediction = posterior.predict(X)
    assert prediction.mean.shape == prediction.variance.shape == prediction.log_prob(Y[:, 0]).shape == (12,)
    assert posterior.functional_variance(X).shape == (12, 1, 1)
    assert posterior.functional_variance(X, diagonal=True).shape == (12, 1)


# ----------------------------------------------------------------------------------------------------------
# Weight vectors as dictionaries


def test_unflatten_is_the_inverse_of_flattening() -> None:
    model = HeadFirst().to(F64)
    posterior = fit(model, weights=["head.*", "shift"])
    parts = lapis.unflatten(posterior.mean, posterior)
    assert isinstance(parts, dict)
    assert list(parts) == ["shift", "head.weight", "head.bias"]
    assert all(torch.equal(part, dict(model.named_parameters())[name]) for name, part in parts.items())
    several = lapis.unflatten(posterior.sample(3), posterior)
    assert [list(each) for each in several] == [list(parts)] * 3
    assert torch.equal(torch.cat([p.flatten() for p in several[1].values()]), posterior.sample(3)[1])
    outputs = torch.func.functional_call(model, several[0], (X,))
    assert outputs.shape == (12, 2)
    whole = lapis.unflatten(torch.arange(29.0), model)
    assert isinstance(whole, dict)
    assert {name: part.shape for name, part in whole.items()} == {n: p.shape for n, p in model.named_parameters()}


# ----------------------------------------------------------------------------------------------------------
# Rules of the user's own


def power_layer() -> type[nn.Module]:
    """A new class every time, so that rules registered by one test are unknown to the next."""

    class Power(nn.Module):
        """x -> |x|^exp(a) * b: no rule of the library reads it."""

        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Parameter(torch.tensor([0.1, -0.2, 0.3, 0.2])), nn.Parameter(torch.tensor(1.3))

        def forward(self, x: Tensor) -> Tensor:
            return (x.abs() + 0.1) ** self.a.exp() * self.b

    return Power


def right_rule(module: nn.Module, inputs: tuple[Any, ...], gradients: Tensor) -> dict[str, Tensor]:
    """(M, B, 4) -> {"a": (M, B, 4), "b": (M, B)}."""
    base = inputs[0].abs() + 0.1
    power = base ** module.a.exp()
    return {
        "a": gradients * power * module.b * base.log() * module.a.exp(),
        "b": (gradients * power).sum(-1),
    }


def with_power(kind: type[nn.Module]) -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), kind(), nn.Linear(4, 2)).to(F64)


@every_structure
def test_a_rule_of_the_user_s_own_is_used_and_gives_the_reference(structure: str) -> None:
    kind, calls = power_layer(), []
    model = with_power(kind)
    unaided = fit(model, structure=structure)
    assert any("general" in choice and "1.a" in choice for choice in unaided.choices)

    @lapis.register_rule(kind)
    def rule(module: nn.Module, inputs: tuple[Any, ...], gradients: Tensor) -> dict[str, Tensor]:
        calls.append(gradients.shape)
        return right_rule(module, inputs, gradients)

    with untouched(model):
        aided = fit(model, structure=structure)
    assert calls
    assert not any("general" in choice for choice in aided.choices)
    assert_equal(aided, unaided, 1e-10)
    if structure == "dense":
        expected = reference.ggn(model, X, Y, gaussian(0.5))
        assert close(aided.precision() - torch.eye(len(expected), dtype=F64), expected, 1e-9)


def wrong_by_a_factor(module: nn.Module, inputs: Any, gradients: Tensor) -> dict[str, Tensor]:
    return {name: 1.01 * part for name, part in right_rule(module, inputs, gradients).items()}


def wrong_example(module: nn.Module, inputs: Any, gradients: Tensor) -> dict[str, Tensor]:
    """Right in the sum over examples, each credited to its neighbour."""
    return {name: part.roll(1, 1) for name, part in right_rule(module, inputs, gradients).items()}


def wrong_for_one_parameter(module: nn.Module, inputs: Any, gradients: Tensor) -> dict[str, Tensor]:
    return {**right_rule(module, inputs, gradients), "b": torch.zeros(gradients.shape[:2], dtype=F64)}


every_wrong_rule = pytest.mark.parametrize("rule", [wrong_by_a_factor, wrong_example, wrong_for_one_parameter])


@every_wrong_rule
@every_structure
def test_a_wrong_rule_is_noticed_and_the_answer_is_still_right(rule: Any, structure: str) -> None:
    kind = power_layer()
    model = with_power(kind)
    expected = fit(model, structure=structure).update((X, Y))
    variance = expected.predict(X).f_variance
    lapis.register_rule(kind)(rule)
    found = fit(model, structure=structure)
    assert any("general" in choice and "1.b" in choice for choice in found.choices)
    found = found.update((X, Y))
    assert_equal(found, expected, 1e-10)
    assert close(found.predict(X).f_variance, variance, 1e-9)


@every_wrong_rule
@every_structure
def test_a_rule_registered_later_is_no_part_of_a_posterior(rule: Any, structure: str, tmp_path: Path) -> None:
    """Nobody has proven it for that network; and in one that is loaded from a file it is proven before it is used."""
    kind = power_layer()
    model = with_power(kind)
    posterior = fit(model, structure=structure)
    posterior.save(tmp_path / "posterior.lapis")
    expected = posterior.predict(X).f_variance, posterior.update((X, Y)).precision()
    lapis.register_rule(kind)(rule)
    loaded = lapis.load(tmp_path / "posterior.lapis", model)
    for other in (posterior, loaded):
        assert close(other.predict(X).f_variance, expected[0], 1e-9)
        assert close(other.update((X, Y)).precision(), expected[1], 1e-9)


def test_a_rule_for_a_layer_that_was_known_is_no_obstacle_to_loading(tmp_path: Path) -> None:
    """The file speaks of a matrix with Kronecker factors, the rule of rows: predictions are the same."""

    class Affine(nn.Linear):
        pass

    model = nn.Sequential(Affine(3, 4), nn.Tanh(), nn.Linear(4, 2)).to(F64)
    posterior = fit(model, structure="kronecker")
    posterior.save(tmp_path / "posterior.lapis")

    @lapis.register_rule(Affine)
    def rule(module: nn.Module, inputs: tuple[Any, ...], gradients: Tensor) -> dict[str, Tensor]:
        return {"weight": gradients[..., None] * inputs[0][:, None], "bias": gradients}

    loaded = lapis.load(tmp_path / "posterior.lapis", model)
    assert close(loaded.predict(X).f_variance, posterior.predict(X).f_variance, 1e-10)


def test_batches_of_other_lengths_do_not_confuse_the_tape() -> None:
    """Every split of the data into batches, lengths of one included."""
    model = network()
    expected = fit(model)
    for sizes in itertools.permutations((1, 2, 9)):
        edges = [0, *itertools.accumulate(sizes)]
        assert_equal(fit(model, [(X[a:b], Y[a:b]) for a, b in itertools.pairwise(edges)]), expected)
