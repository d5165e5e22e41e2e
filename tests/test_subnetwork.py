"""Subnetworks: which weights are chosen, and that their posterior is that of the whole GGN's rows and columns."""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from scipy.optimize import minimize_scalar
from scipy.stats import chi2
from torch import Tensor, nn

import lapis
from cases import CASES
from lapis.curvature.backward.contributions import Lookup, Outer
from lapis.curvature.backward.per_example import PerExample
from untouched import untouched

F64 = torch.float64


def regression() -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 7), nn.Tanh(), nn.Linear(7, 2)).double()
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(15, 3, dtype=F64, generator=generator)
    return model, (x, torch.randn(15, 2, dtype=F64, generator=generator))


def size(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def chosen(posterior: Any) -> list[int]:
    """Flat indices of the posterior's weights among all."""
    found, start = [], 0
    for name, p in posterior.network.module.named_parameters():
        if name in posterior.network.names:
            own = posterior.network.indices.get(name, torch.arange(p.numel()))
            found += (own + start).tolist()
        start += p.numel()
    return found


def best(scores: Tensor, n: int) -> list[int]:
    return sorted(scores.topk(n).indices.tolist())


# which weights -----------------------------------------------------------------------------------------


def test_weights_of_largest_marginal_variance_are_chosen(caplog: pytest.LogCaptureFixture) -> None:
    model, data = regression()
    prior = lapis.Prior(2.0)
    variance = lapis.laplace(model, data, "regression", structure="diagonal", prior=prior).marginal_variance()
    with untouched(model), caplog.at_level(logging.INFO, "lapis"):
        posterior = lapis.laplace(model, data, "regression", weights=lapis.Subnetwork(9), prior=prior)
    assert chosen(posterior) == best(variance, 9)
    assert posterior.structure == "dense"
    assert "diagonal Laplace posterior fitted to the same data first" in caplog.text
    assert any("9 of 44 weights" in choice for choice in posterior.choices)


def test_weights_that_the_data_do_not_reach_are_chosen_first_and_counted() -> None:
    """An input that is always zero: its weights keep the prior's variance, which is the largest of all."""
    model, (x, y) = regression()
    silent = x.clone()
    silent[:, 1] = 0
    posterior = lapis.laplace(model, (silent, y), "regression", weights=lapis.Subnetwork(9))
    assert set(range(1, 21, 3)) < set(chosen(posterior))
    assert any("7 of them have the prior's variance" in choice for choice in posterior.choices)
    with pytest.warns(lapis.LapisWarning, match="No example reaches any of the 5 chosen weights"):
        lapis.laplace(model, (silent, y), "regression", weights=lapis.Subnetwork(5))


def test_variances_may_come_from_another_posterior_of_some_of_the_weights() -> None:
    model, data = regression()
    head = lapis.laplace(model, data, "regression", structure="kronecker", weights="2")
    scores = torch.full((size(model),), -math.inf, dtype=F64)
    scores[-16:] = head.marginal_variance()
    posterior = lapis.laplace(model, data, "regression", weights=lapis.Subnetwork(5, from_=head))
    assert chosen(posterior) == best(scores, 5)
    some = lapis.laplace(model, data, "regression", weights=torch.arange(0, 44, 3), structure="diagonal")
    scores = torch.full((size(model),), -math.inf, dtype=F64)
    scores[::3] = some.marginal_variance()
    posterior = lapis.laplace(model, data, "regression", weights=lapis.Subnetwork(4, "variance", some))
    assert chosen(posterior) == best(scores, 4)


def test_weights_are_chosen_by_magnitude_by_scores_by_masks_and_at_random() -> None:
    model, data = regression()
    flat = torch.cat([p.detach().reshape(-1) for p in model.parameters()])

    def fit(*args: Any, **options: Any) -> list[int]:
        return chosen(lapis.laplace(model, data, "regression", weights=lapis.Subnetwork(*args, **options)))

    assert fit(6, "magnitude") == best(flat.abs(), 6)
    scores = torch.rand(44, generator=torch.Generator().manual_seed(3))
    assert fit(6, by=scores) == best(scores, 6)
    assert fit(6, by=torch.zeros(44)) == list(range(6))
    mask = scores < 0.2
    assert fit(by=mask) == fit(int(mask.sum()), by=mask) == mask.nonzero()[:, 0].tolist()
    assert fit(by={"2.bias": torch.tensor([False, True])}) == [43]
    assert fit(6, "random") == fit(6, "random", generator=torch.Generator().manual_seed(0))
    assert fit(6, "random") != fit(6, "random", generator=torch.Generator().manual_seed(1))
    assert len(set(fit(44, "random"))) == 44


def test_mistakes_are_named_before_the_data_are_read() -> None:
    model, data = regression()

    def unread() -> Iterator[Any]:
        raise AssertionError("the data were read")
        yield

    other = nn.Linear(3, 5).double()
    strange = lapis.laplace(other, (data[0], torch.zeros(15, 5, dtype=F64)), "regression", structure="diagonal")
    for make, error, message in (
        (lambda: lapis.Subnetwork(0), lapis.OptionError, "Bad n"),
        (lambda: lapis.Subnetwork(), lapis.OptionError, "Bad n"),
        (lambda: lapis.Subnetwork(3, by="size"), lapis.OptionError, "Unknown by"),
        (lambda: lapis.Subnetwork(3, by=None), lapis.OptionError, "Unknown by"),
        (lambda: lapis.Subnetwork(3, by="random", from_=strange), lapis.OptionError, "from_ has no meaning"),
        (lambda: lapis.Subnetwork(3, generator=torch.Generator()), lapis.OptionError, "generator has no meaning"),
        (lambda: lapis.Subnetwork(3, from_=3), lapis.OptionError, "No variances"),
        (lambda: lapis.Subnetwork(45), lapis.OptionError, "not as many weights"),
        (lambda: lapis.Subnetwork(3, from_=strange), lapis.ModelError, "another network"),
        (lambda: lapis.Subnetwork(3, by=torch.rand(43)), lapis.OptionError, "scores do not fit"),
        (lambda: lapis.Subnetwork(3, by=torch.arange(44)), lapis.OptionError, "scores do not fit"),
        (lambda: lapis.Subnetwork(3, by=torch.ones(44).bool()), lapis.OptionError, "another number of weights"),
        (lambda: lapis.Subnetwork(3), lapis.DataError, "read only once"),
    ):
        with pytest.raises(error, match=message):
            lapis.laplace(model, unread(), "regression", weights=make())
    with pytest.raises(lapis.MemoryBudgetError, match=r"over 44 weights does not fit.*Got: [\d,]+ bytes"):
        lapis.laplace(model, unread(), "regression", weights=lapis.Subnetwork(44, "magnitude"), memory_budget=20_000)


# their posterior ---------------------------------------------------------------------------------------


def reference(noise: float = 0.5) -> tuple[Any, nn.Module, Any, Tensor, Tensor, Tensor]:
    """A posterior over 11 weights; naive: the whole network's GGN, cut to their rows and columns, and their values."""
    model, data = regression()
    likelihood = lapis.Gaussian(noise)
    posterior = lapis.laplace(model, data, likelihood, weights=lapis.Subnetwork(11), prior=1.3)
    parameters = dict(model.named_parameters())

    def outputs(*values: Tensor) -> Tensor:
        return torch.func.functional_call(model, dict(zip(parameters, values, strict=True)), (data[0],)).reshape(-1)

    parts = torch.autograd.functional.jacobian(outputs, tuple(parameters.values()))
    jacobian = torch.cat([part.flatten(1) for part in parts], 1)
    index = torch.tensor(chosen(posterior))
    flat = torch.cat([p.detach().reshape(-1) for p in parameters.values()])[index]
    return posterior, model, data, jacobian.T @ jacobian / noise**2, index, flat


def naive_evidence(ggn: Tensor, weights: Tensor, log_likelihood: Tensor, precision: float) -> Tensor:
    n = len(weights)
    posterior = ggn + precision * torch.eye(n, dtype=F64)
    return (
        log_likelihood
        - 0.5 * precision * weights.square().sum()
        + 0.5 * n * math.log(precision)
        - 0.5 * torch.logdet(posterior)
    )


def test_the_posterior_is_that_of_the_whole_ggn_cut_to_its_rows_and_columns() -> None:
    posterior, model, data, ggn, index, weights = reference()
    cut = ggn[index][:, index]
    precision = cut + 1.3 * torch.eye(11, dtype=F64)
    torch.testing.assert_close(posterior.precision(), precision, rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(posterior.marginal_variance(), torch.linalg.inv(precision).diagonal())
    torch.testing.assert_close(posterior.mean, weights)
    log_likelihood = posterior.likelihood.nll(model(data[0])[:, None], data[1][:, None]).sum().neg().detach()
    expected = naive_evidence(cut, weights, log_likelihood, 1.3)
    torch.testing.assert_close(posterior.log_evidence(), expected)
    # tuned by the same evidence
    found = minimize_scalar(
        lambda log: -float(naive_evidence(cut, weights, log_likelihood, math.exp(log))), bounds=(-9, 9),
        method="bounded", options={"xatol": 1e-9},
    )  # fmt: skip
    tuned = posterior.tune(noise=False)
    torch.testing.assert_close(
        tuned.weight_prior.precision, torch.tensor([math.exp(found.x)], dtype=F64), rtol=1e-4, atol=0
    )
    # predictions from the chosen columns of the Jacobian; networks with the others at their trained values
    x = torch.randn(4, 3, dtype=F64, generator=torch.Generator().manual_seed(5))
    jacobian = torch.autograd.functional.jacobian(
        lambda w: posterior.network.call(x, posterior.network.unflatten(w)), posterior.mean
    )
    variance = torch.einsum("bcp,pq,bdq->bcd", jacobian, torch.linalg.inv(precision), jacobian)
    torch.testing.assert_close(posterior.functional_variance(x), variance)


def test_draws_have_the_posterior_s_covariance_and_leave_other_weights_alone() -> None:
    """Squared Mahalanobis distances of 4,000 draws, and of their mean, are chi-square: false alarms 1 in 10,000."""
    posterior, model, _, ggn, index, weights = reference()
    precision = ggn[index][:, index] + 1.3 * torch.eye(11, dtype=F64)
    draws = posterior.sample(4000, generator=torch.Generator().manual_seed(0)) - weights
    white = draws @ torch.linalg.cholesky(precision)
    low, high = chi2.ppf([2.5e-5, 1 - 2.5e-5], 11 * 4000)
    assert low < float(white.square().sum()) < high
    assert float(4000 * white.mean(0).square().sum()) < chi2.ppf(1 - 2.5e-5, 11)
    # every direction by itself: the trace alone does not see a rotation
    low, high = chi2.ppf([1e-5 / 11, 1 - 1e-5 / 11], 4000)
    along = draws @ torch.linalg.eigh(precision).eigenvectors
    scaled = along.square().sum(0) * torch.linalg.eigvalsh(precision)
    assert bool(((scaled > low) & (scaled < high)).all())
    before = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    parameters = dict(model.named_parameters()) | lapis.unflatten(weights + draws[0], posterior)
    after = torch.cat([p.detach().reshape(-1) for p in parameters.values()])
    assert torch.equal((after != before).nonzero()[:, 0], index)


def test_updates_and_files_keep_the_choice(tmp_path: Path) -> None:
    model, (x, y) = regression()
    which = lapis.Subnetwork(11, "magnitude")
    whole = lapis.laplace(model, (x, y), lapis.Gaussian(0.5), weights=which)
    some = lapis.laplace(model, (x[:6], y[:6]), lapis.Gaussian(0.5), weights=which).update((x[6:], y[6:]))
    torch.testing.assert_close(some.precision(), whole.precision())
    torch.testing.assert_close(some.log_evidence(), whole.log_evidence())
    some.save(tmp_path / "some.lapis")
    loaded = lapis.load(tmp_path / "some.lapis", copy.deepcopy(model))
    assert isinstance(loaded, lapis.LaplacePosterior)
    assert chosen(loaded) == chosen(whole)
    assert loaded.choices == some.choices
    torch.testing.assert_close(loaded.precision(), whole.precision())
    torch.testing.assert_close(loaded.predict(x).variance, whole.predict(x).variance)


# their columns of the Jacobian -------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:Using padding=.same. with even kernel lengths")
@pytest.mark.parametrize("name", CASES)
def test_columns_of_single_weights_are_those_of_the_whole_jacobian(name: str) -> None:
    """In every network of the suite; where rules for layers explain all weights, they explain single ones too."""
    case = CASES[name]
    model, data = case.make_model(), case.make_batch()
    options: dict[str, Any] = {"structure": "dense", "curvature": "exact"}
    whole = lapis.laplace(model, data, case.likelihood.build(), weights="all", **options)
    mask = torch.rand(whole.n_weights, generator=torch.Generator().manual_seed(4)) < 0.4
    with untouched(model):
        part = lapis.laplace(model, data, case.likelihood.build(), weights=mask, **options)
    assert part.network.indices
    torch.testing.assert_close(part.precision(), whole.precision()[mask][:, mask], rtol=1e-8, atol=1e-10)
    general = part.curvature.tape.plan.general & set(part.network.indices)
    assert general <= whole.curvature.tape.plan.general


class Layers(nn.Module):
    """An embedding, a convolution, norms and a linear layer: of each some weights are chosen."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.convolution = nn.Embedding(11, 4), nn.Conv1d(4, 6, 3)
        self.norm, self.head = nn.BatchNorm1d(6), nn.Linear(6, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.norm(self.convolution(self.table(tokens).mT)).tanh().mean(2))


def test_no_columns_but_those_chosen_are_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the rows of whole layers nor per-example gradients are formed, in the fit or in predictions."""
    torch.manual_seed(0)
    model = Layers().double()
    tokens = torch.randint(11, (9, 8), generator=torch.Generator().manual_seed(0))
    data = (tokens, torch.arange(9) % 3)
    mask = torch.arange(size(model)) % 3 == 1
    whole = lapis.laplace(model, data, "classification", structure="dense", weights="all")
    expected = whole.precision()[mask][:, mask]

    def formed(*_: Any) -> Tensor:
        raise AssertionError("columns of other weights were computed")

    for kind, name in ((Outer, "rows"), (Outer, "pieces"), (Lookup, "rows"), (PerExample, "_whole_rows")):
        monkeypatch.setattr(kind, name, formed)
    part = lapis.laplace(model, data, "classification", weights=lapis.Subnetwork(by=mask))
    assert set(part.network.indices) == set(dict(model.named_parameters()))
    torch.testing.assert_close(part.precision(), expected)
    assert bool((part.predict(tokens).f_variance > 0).all())
