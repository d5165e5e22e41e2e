"""EKFAC with its options, priors and two passes, against naive float64 references (`eigenbases`).

`test_curvature` has its definition on every network. Errors are relative, in the Frobenius norm: 1e-9 for curvature in
float64, 1e-8 for variances (after an inversion), 1e-4 for float32.
"""

from __future__ import annotations

import copy
import functools
import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lapis
import reference
from cases import CASES, F64, take
from eigenbases import assert_defined, bases_of, by_definition, curvature_in, exact_of, relative_error
from lapis.curvature.blocks.kronecker import ekfac
from lapis.errors import DataError, ModelError

pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
PRIOR = 0.37
MANY_KINDS = (
    "mlp_gaussian", "conv2d_grouped", "conv_transpose2d_grouped", "embedding_padding", "self_attention", "tied_linears",
    "pixels_bernoulli", "batch_norm2d",
)  # fmt: skip


def fit(name: str, dtype: torch.dtype = F64, data: Any = None, **options: Any) -> Any:
    case = CASES[name]
    data = [case.make_batch(dtype)] if data is None else data
    options = {"structure": "ekfac", "prior": PRIOR, **options}
    return lapis.laplace(case.make_model(dtype), data, case.likelihood.build(), **options)


@functools.cache
def posterior_of(name: str, **options: Any) -> Any:
    return fit(name, **options)


def split(name: str, *edges: int) -> list[tuple[Any, Tensor]]:
    """The case's data in batches that end before these examples, and one with the rest."""
    x, y = CASES[name].make_batch()
    return [(take(x, slice(a, b)), y[a:b]) for a, b in itertools.pairwise([0, *edges, len(y)])]


# ----------------------------------------------------------------------------------------------------------
# Curvature


@pytest.mark.parametrize("name", MANY_KINDS)
@pytest.mark.parametrize(
    "options",
    [
        {"sharing": "reduce"},
        {"sharing": "reduce", "bias": "separate"},
        {"curvature": "empirical"},
    ],
    ids=str,
)
def test_ekfac_is_its_definition_with_every_option(name: str, options: dict[str, str]) -> None:
    assert_defined(fit(name, **options), name, **options)


@pytest.mark.parametrize("name", MANY_KINDS)
def test_float32_is_close_to_float64(name: str) -> None:
    assert_defined(fit(name, torch.float32), name, 1e-4)


@pytest.mark.parametrize("name", ["conv2d_grouped", "pixels_bernoulli", "embedding_padding"])
def test_cutting_the_work_changes_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seed by seed, and example by example both in a pass and where the Jacobian is rotated."""
    monkeypatch.setattr(ekfac, "CHUNK_BYTES", 1)
    monkeypatch.setattr("lapis.curvature.budget.WORK_BYTES", 1)
    assert_defined(fit(name), name)


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.data_dependent])
def test_layers_that_only_some_examples_pass_are_refused(name: str) -> None:
    with pytest.raises(ModelError, match="another way"):
        fit(name, data=split(name, 2, 3))


def test_sampled_fisher_has_the_exact_trace_as_its_mean() -> None:
    """Over 40 fits with 4 draws each; |t| with 39 degrees of freedom exceeds 5 with probability 1.3e-5 if it has."""
    exact = float(exact_of("mlp_categorical").trace())
    found = torch.stack([
        curvature_in(
            fit("mlp_categorical", curvature="sampled", fisher_samples=4, generator=torch.Generator().manual_seed(seed))
        ).trace()
        for seed in range(40)
    ])  # fmt: skip
    assert abs(float(found.mean()) - exact) / float(found.std() / math.sqrt(40)) < 5
    assert float(found.std()) > 0


# ----------------------------------------------------------------------------------------------------------
# The posterior under one prior precision, and under one for each parameter


@pytest.mark.parametrize("name", MANY_KINDS)
@pytest.mark.parametrize("bias", ["joint", "separate"])
@pytest.mark.parametrize("groups", ["one", "parameter"])
def test_the_posterior_is_curvature_plus_prior(name: str, bias: str, groups: str) -> None:
    """Precision, evidence, marginal and functional variances, solves: all of the dense matrix of the definition."""
    model, x, *_ = reference.case_data(name)
    sizes = {key: p.numel() for key, p in reference.parameters(model).items()}
    # a hundred times more and a hundred times less for biases than for weights
    alpha = {key: PRIOR * (1 if key.endswith("weight") else (0.01, 100)[i % 4 // 2]) for i, key in enumerate(sizes)}
    if groups == "one":
        alpha = dict.fromkeys(sizes, PRIOR)
    prior = lapis.Prior(alpha, groups="parameter") if groups == "parameter" else PRIOR
    posterior = fit(name, bias=bias, prior=prior)
    curvature = by_definition(posterior, exact_of(name), reference.case_curvature(name, "kronecker", bias=bias))
    diagonal = torch.cat([torch.full((n,), alpha[key], dtype=F64) for key, n in sizes.items()])
    expected = curvature + torch.diag(diagonal)
    assert relative_error(posterior.precision(), expected) < 1e-9
    covariance = torch.linalg.inv(expected)
    assert relative_error(posterior.marginal_variance(), covariance.diagonal()) < 1e-8
    vectors = torch.randn(3, len(expected), dtype=F64, generator=torch.Generator().manual_seed(1))
    assert relative_error(posterior.solve(vectors), vectors @ covariance) < 1e-8
    squares = (diagonal * posterior.mean.square()).sum()
    logdets = diagonal.log().sum() - torch.linalg.slogdet(expected).logabsdet
    evidence = posterior.log_likelihood() + 0.5 * (logdets - squares)
    torch.testing.assert_close(posterior.log_evidence(), evidence, rtol=1e-9, atol=1e-9)
    rows = torch.stack(reference.case_jacobians(name))
    flat = rows.flatten(0, 1)
    joint = posterior.functional_covariance(x).reshape(len(flat), len(flat))
    assert relative_error(joint, flat @ covariance @ flat.T) < 1e-8
    variances = (rows @ covariance * rows).sum(-1)
    found = posterior.functional_variance(x, diagonal=True)
    if CASES[name].likelihood.channels == "first":
        found = found.movedim(1, -1)
    assert relative_error(found.reshape(variances.shape), variances) < 1e-8
    width = posterior.n_outputs
    each = torch.einsum("nap,pq,nbq->nab", rows, covariance, rows).reshape(len(rows), -1, width, *variances.shape[1:])
    each = torch.stack([each[:, t, :, t * width : (t + 1) * width] for t in range(each.shape[1])], 1)
    assert relative_error(posterior.functional_variance(x).reshape(each.shape), each) < 1e-8


@pytest.mark.parametrize("positions", [1, 40])
def test_a_bias_with_its_own_precision_keeps_its_variance_in_float32(positions: int) -> None:
    """Both forms of a rotated Jacobian, factors and rows (more positions than inputs)."""
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Flatten(), nn.Linear(4 * positions, 2))
    x, y = torch.randn(9, positions, 3), torch.randn(9, 2)
    prior = lapis.Prior({"0.weight": 1.0, "0.bias": 30.0, "3.weight": 20.0, "3.bias": 0.1}, groups="parameter")
    single = lapis.laplace(model, (x, y), "regression", structure="ekfac", prior=prior)
    exact = lapis.laplace(
        copy.deepcopy(model).double(), (x.double(), y.double()), "regression", structure="ekfac", prior=prior
    )
    assert relative_error(single.functional_variance(x), exact.functional_variance(x.double())) < 1e-4


# ----------------------------------------------------------------------------------------------------------
# Two passes, and more data later


@pytest.mark.parametrize("name", MANY_KINDS)
def test_sums_over_split_batches_are_the_sum_over_one(name: str) -> None:
    posterior = fit(name, data=split(name, 2, 3))
    assert_defined(posterior, name)
    assert posterior.n_data == CASES[name].n
    assert posterior.curvature.digest == posterior_of(name).curvature.digest


@pytest.mark.parametrize("name", MANY_KINDS)
def test_an_update_adds_second_moments_in_the_basis_of_the_fit(name: str) -> None:
    """Not what a fit to all data would be; its trace is exact all the same."""
    old, *new = split(name, 4, 5)
    first = fit(name, data=[old])
    before = first.precision().clone()
    updated = first.update(iter(new))
    assert torch.equal(first.precision(), before)
    for (_, one), (_, two) in zip(bases_of(first), bases_of(updated), strict=True):
        assert torch.equal(one, two)
    expected = by_definition(first, exact_of(name), reference.case_curvature(name, "kronecker"))
    assert relative_error(curvature_in(updated), expected) < 1e-9
    assert updated.n_data == CASES[name].n


def regression() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1))


def test_data_that_can_be_read_only_once_are_refused_before_any_work() -> None:
    x = torch.randn(8, 3)
    stream = iter([(x, x[:, :1])])
    with pytest.raises(DataError, match=r"only once.*for two passes.*Got: an iterator.*list\(iterator\)"):
        lapis.laplace(regression(), stream, "regression", structure="ekfac")
    assert len(list(stream)) == 1


def test_data_that_change_between_the_passes_are_refused() -> None:
    class Shrinking:
        """One example less each time it is read."""

        length = 8

        def __iter__(self) -> Any:
            self.length -= 1
            x = torch.randn(self.length, 3)
            return iter([(x, x[:, :1])])

    with pytest.raises(DataError, match=r"7 examples, as in the first pass.*6 in the second"):
        lapis.laplace(regression(), Shrinking(), "regression", structure="ekfac")


def test_a_loader_may_shuffle() -> None:
    x = torch.randn(20, 3, generator=torch.Generator().manual_seed(1))
    data, model = TensorDataset(x, x[:, :1]), regression()
    shuffled = DataLoader(data, batch_size=3, shuffle=True, generator=torch.Generator().manual_seed(2))
    one, two = (lapis.laplace(model, each, "regression", structure="ekfac") for each in (data, shuffled))
    torch.testing.assert_close(one.log_evidence(), two.log_evidence(), rtol=1e-5, atol=1e-5)


def test_a_network_without_matrices_needs_one_pass() -> None:
    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.randn(3, dtype=F64))
            self.runs = 0

        def forward(self, x: Tensor) -> Tensor:
            self.runs += 1
            return x * self.scale.exp()

    x = torch.randn(6, 3, dtype=F64)
    runs = []
    for structure in ("ekfac", "dense"):
        torch.manual_seed(0)
        model = Scale()
        posterior = lapis.laplace(model, (x, x), "regression", structure=structure)
        runs.append((model.runs, posterior.log_evidence()))
    assert runs[0] == runs[1]
