"""Dense posteriors over many weights, stored as triangles: the same posterior as from whole matrices."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lapis
from lapis.curvature.blocks import partition
from lapis.curvature.blocks.dense import packed, triangle
from lapis.curvature.blocks.dense.packed import PackedBlock
from lapis.curvature.blocks.dense.triangle import Triangle, triangle_bytes

F64 = torch.float64


def lower(size: int, seed: int = 0) -> tuple[Tensor, Triangle]:
    """A positive definite matrix, and its triangle with something else above the diagonal."""
    rows = torch.randn(2 * size, size, dtype=F64, generator=torch.Generator().manual_seed(seed))
    found = Triangle.zeros(size, torch.device("cpu"))
    found.add_products(rows[:size])
    found.add_products(rows[size:].clone())
    for (start, _), strip in zip(found.spans, found.rows, strict=True):
        strip[:, start:] += torch.ones_like(strip[:, start:]).triu(1)
    return rows.T @ rows, found


@pytest.mark.parametrize("size", [1, 7, 20])
def test_a_triangle_does_what_the_whole_matrix_does(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triangle, "WIDTH", 7)
    matrix, found = lower(size)
    vectors = torch.randn(size, 3, dtype=F64)
    torch.testing.assert_close(found.whole(), matrix)
    torch.testing.assert_close(found.diagonal(), matrix.diagonal())
    torch.testing.assert_close(found.times(vectors), matrix @ vectors)
    prior = torch.rand(size, dtype=F64) + 0.5
    precision = 0.3 * matrix + prior.diag()
    factor = found.cholesky(torch.tensor(0.3, dtype=F64), prior)
    assert factor is not None
    whole = torch.linalg.cholesky(precision)
    for (start, stop), strip in zip(factor.spans, factor.rows, strict=True):
        torch.testing.assert_close(strip[:, :start], whole[start:stop, :start])
        torch.testing.assert_close(strip[:, start:].tril(), whole[start:stop, start:stop])
    torch.testing.assert_close(factor.solve(vectors), torch.linalg.solve_triangular(whole, vectors, upper=False))
    torch.testing.assert_close(
        factor.solve_transposed(vectors), torch.linalg.solve_triangular(whole.T, vectors, upper=True)
    )
    torch.testing.assert_close(factor.inverse_diagonal(), torch.linalg.inv(precision).diagonal())
    assert found.cholesky(torch.tensor(-9.0, dtype=F64), prior) is None
    assert sum(strip.nbytes for strip in found.rows) == triangle_bytes(size)


def problem(kind: str) -> tuple[nn.Module, tuple[Tensor, Tensor], Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 7), nn.Tanh(), nn.Linear(7, 3)).double()
    x = torch.randn(40, 3, dtype=F64)
    if kind == "regression":
        return model, (x, torch.randn(40, 3, dtype=F64)), lapis.Gaussian(0.7)
    return model, (x, torch.randint(3, (40,))), "classification"


def both(kind: str, monkeypatch: pytest.MonkeyPatch, **options: Any) -> tuple[Any, Any, nn.Module, Any]:
    """The posterior from whole matrices and from triangles, which buffer a few rows only."""
    model, data, likelihood = problem(kind)
    plain = lapis.laplace(model, data, likelihood, structure="dense", **options)
    monkeypatch.setattr(partition, "PACKED", 1)
    monkeypatch.setattr(triangle, "WIDTH", 16)
    monkeypatch.setattr(packed, "BUFFER_BYTES", 20_000)
    other = lapis.laplace(model, data, likelihood, structure="dense", **options)
    assert isinstance(other.curvature.blocks[0], PackedBlock)
    assert not isinstance(plain.curvature.blocks[0], PackedBlock)
    return plain, other, model, data


@pytest.mark.parametrize("kind", ["regression", "classification"])
@pytest.mark.parametrize(
    "options", [{}, {"weights": lapis.Subnetwork(30)}, {"prior": lapis.Prior(2.0, groups="layer")}]
)
def test_posteriors_are_the_same(kind: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    plain, other, _, (x, y) = both(kind, monkeypatch, **options)
    close = torch.testing.assert_close
    close(other.precision(), plain.precision())
    close(other.log_evidence(), plain.log_evidence())
    close(other.marginal_variance(), plain.marginal_variance())
    close(other.effective_parameters(per_group=True), plain.effective_parameters(per_group=True))
    close(other.sample(3), plain.sample(3))
    close(other.log_prob(plain.sample(3)), plain.log_prob(plain.sample(3)))
    close(other.solve(plain.sample(3)), plain.solve(plain.sample(3)))
    close(other.functional_variance(x), plain.functional_variance(x))
    close(other.functional_variance(x, diagonal=True), plain.functional_variance(x, diagonal=True))
    close(other.functional_covariance(x[:4]), plain.functional_covariance(x[:4]))
    close(other.predict(x[:4]).log_prob(y[:4]), plain.predict(x[:4]).log_prob(y[:4]))
    close(other.with_prior(5.0).log_evidence(), plain.with_prior(5.0).log_evidence())


def test_tuning_updates_and_files_are_the_same(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    plain, other, model, (x, y) = both("classification", monkeypatch)
    one, two = plain.tune(), other.tune()
    torch.testing.assert_close(two.weight_prior.precision, one.weight_prior.precision, rtol=1e-3, atol=0)
    more = (x[:9] + 1, y[:9])
    torch.testing.assert_close(other.update(more).precision(), plain.update(more).precision())
    torch.testing.assert_close(other.precision(), plain.precision())
    other.save(tmp_path / "packed.lapis")
    loaded = lapis.load(tmp_path / "packed.lapis", copy.deepcopy(model))
    assert isinstance(loaded, lapis.LaplacePosterior)
    assert isinstance(loaded.curvature.blocks[0], PackedBlock)
    torch.testing.assert_close(loaded.precision(), plain.precision())
    with pytest.raises(lapis.StructureError, match="Calibrating takes eigenvectors"):
        other.calibrate(more)


def test_hessians_and_failures_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, other, _, _ = both("regression", monkeypatch, curvature="hessian", prior=100.0)
    torch.testing.assert_close(other.precision(), plain.precision())
    torch.testing.assert_close(other.log_evidence(), plain.log_evidence())
    with pytest.raises(lapis.NotPositiveDefiniteError, match="not positive definite"):
        other.with_prior(1e-9).marginal_variance()


def test_bytes_of_many_weights_are_told_beforehand() -> None:
    """The 42,438 weights of the published ResNet-18 fit in 20 GB; the default budget refuses them, with the bytes."""
    assert partition.dense_bytes(42_438) < 16 * 2**30
    assert partition.dense_bytes(8_000) < 2 * 2**30
    model = nn.Linear(300, 200)
    with pytest.raises(lapis.MemoryBudgetError, match=r"42,438 weights does not fit.* Got: 15,[\d,]+ bytes"):
        lapis.laplace(model, iter([]), "regression", weights=lapis.Subnetwork(42_438, "magnitude"))
