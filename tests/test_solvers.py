"""Each solver against dense linear algebra: exactness, convergence bounds, calibrated errors, resuming, refusals.

Statistical tests have fixed seeds. Their limits are set so that a correct program would fail, over random seeds, with
probability below ALARM each.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from scipy import stats
from torch import Tensor

from lapis import solvers
from lapis.errors import DataError, LapisError, NotPositiveDefiniteError, OptionError, StructureError
from lapis.solvers import Operator
from lapis.solvers.descent import Averaging
from lapis.solvers.operator import Property, normal_block
from lapis.solvers.probes import probe_blocks

ALARM = 1e-4


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=seeded(seed), dtype=dtype)


def with_spectrum(eigenvalues: Tensor, seed: int = 0) -> Tensor:
    """A symmetric matrix with these eigenvalues and random eigenvectors."""
    vectors = torch.linalg.qr(normal(len(eigenvalues), len(eigenvalues), seed=seed)).Q
    matrix = vectors @ torch.diag(eigenvalues.to(torch.float64)) @ vectors.mT
    return (matrix + matrix.mT) / 2


def decaying(size: int, seed: int = 0, floor: float = 0.0) -> Tensor:
    return with_spectrum(100.0 * 0.8 ** torch.arange(size, dtype=torch.float64) + floor, seed)


class Counting:
    """A matrix that counts the vectors it is applied to."""

    def __init__(self, matrix: Tensor) -> None:
        self.matrix, self.blocks = matrix, list[int]()

    def operator(self) -> Operator:
        def product(v: Tensor) -> Tensor:
            self.blocks.append(len(v))
            return v @ self.matrix

        return Operator(product, len(self.matrix), self.matrix.dtype)


# Operators ----------------------------------------------------------------------------------------------------------


def test_verify_passes_what_holds_and_names_what_does_not() -> None:
    matrix = with_spectrum(torch.linspace(0.1, 3, 20))
    for dtype in (torch.float32, torch.float64):
        Operator.from_matrix(matrix.to(dtype)).verify(seeded())
    lopsided = matrix + torch.triu(matrix, 1)
    Operator.from_matrix(lopsided, "general").verify(seeded())
    with pytest.raises(StructureError, match=r"not symmetric.*Expected.*Got.*Do"):
        Operator.from_matrix(lopsided, "symmetric").verify(seeded())
    with pytest.raises(NotPositiveDefiniteError, match=r"Expected.*Got.*Do"):
        Operator.from_matrix(-matrix).verify(seeded())
    Operator.from_matrix(-matrix, "symmetric").verify(seeded())
    with pytest.raises(StructureError, match=r"not linear.*Do"):
        Operator(lambda v: v @ matrix + 1, 20).verify(seeded())


@pytest.mark.parametrize(
    "product",
    [lambda v: v[:, :2], lambda v: v.float(), lambda v: v / 0, lambda v: v.sum(0)],
    ids=["narrow", "float32", "infinite", "flat"],
)
def test_products_of_another_form_are_refused(product: Callable[[Tensor], Tensor]) -> None:
    with pytest.raises(StructureError, match="Expected"):
        Operator(product, 3)(torch.ones(2, 3, dtype=torch.float64))


def test_an_operator_takes_one_vector_or_rows_of_its_size() -> None:
    operator = Operator.from_matrix(torch.arange(9.0).reshape(3, 3), "general")
    assert operator(torch.tensor([1.0, 0.0, 2.0])).tolist() == [4.0, 13.0, 22.0]
    for shape in [(2,), (2, 2), (1, 2, 3)]:
        with pytest.raises(DataError, match="fit the operator"):
            operator(torch.ones(shape))


def test_products_carry_no_graph() -> None:
    weight = torch.eye(3, dtype=torch.float64, requires_grad=True)
    operator = Operator(lambda v: v @ weight, 3)
    found = solvers.conjugate_gradients(operator, torch.ones(1, 3, dtype=torch.float64, requires_grad=True))
    assert not found.solution.requires_grad


# Preconditioners ----------------------------------------------------------------------------------------------------


def preconditioners(size: int = 12, dtype: torch.dtype = torch.float64) -> list[tuple[Any, Tensor]]:
    """Each with the matrix it stands for."""
    diagonal = torch.linspace(0.5, 2, size, dtype=dtype)
    values = torch.tensor([1e4, 3.0, 0.2, 0.0], dtype=dtype)
    vectors = normal(4, size, dtype=dtype)  # neither orthogonal nor normalised
    lowrank = torch.diag(diagonal) + vectors.mT @ torch.diag(values) @ vectors
    dense = with_spectrum(torch.linspace(1, 4, size)).to(dtype)
    factor = torch.linalg.inv(torch.linalg.cholesky(dense)).mT  # L with L L^T = M^-1, far from symmetric
    general = solvers.CallablePreconditioner(
        lambda v: v @ torch.linalg.inv(dense), lambda v: v @ factor.mT, lambda v: v @ factor, torch.logdet(dense)
    )
    return [
        (solvers.Identity(), torch.eye(size, dtype=dtype)),
        (solvers.Diagonal(diagonal), torch.diag(diagonal)),
        (solvers.LowRankPlusDiagonal(values, vectors, diagonal), lowrank),
        (general, dense),
    ]


@pytest.mark.parametrize("index", range(4), ids=["identity", "diagonal", "low rank", "callable"])
def test_preconditioners_agree_with_their_matrix(index: int) -> None:
    preconditioner, matrix = preconditioners()[index]
    eye = torch.eye(len(matrix), dtype=torch.float64)
    inverse = torch.linalg.inv(matrix)
    root = preconditioner.root(eye).mT
    torch.testing.assert_close(preconditioner.solve(eye), inverse)
    torch.testing.assert_close(root @ root.mT, inverse)
    torch.testing.assert_close(preconditioner.root_transposed(eye).mT, root.mT)
    torch.testing.assert_close(preconditioner.logdet(), torch.logdet(matrix))
    target = Operator.from_matrix(with_spectrum(torch.linspace(1, 9, 12), seed=5))
    spectrum = torch.linalg.eigvals(inverse @ target(eye)).real.sort().values
    torch.testing.assert_close(torch.linalg.eigvalsh(solvers.preconditioned(target, preconditioner)(eye)), spectrum)


def test_low_rank_preconditioner_stays_positive_in_float32() -> None:
    vectors = torch.linalg.qr(normal(200, 5, dtype=torch.float32)).Q.mT
    values, diagonal = torch.full((5,), 1e9), torch.ones(200)
    preconditioner = solvers.LowRankPlusDiagonal(values, vectors, diagonal)
    quotients = (preconditioner.solve(vectors) * vectors).sum(1)
    assert (quotients > 0).all()  # the textbook Woodbury formula gives 1 - 1 + rounding here


# Conjugate gradients ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "close"), [(torch.float64, 1e-8), (torch.float32, 1e-2)], ids=str)
@pytest.mark.parametrize("index", range(4), ids=["identity", "diagonal", "low rank", "callable"])
def test_solves_agree_with_the_dense_solution(dtype: torch.dtype, close: float, index: int) -> None:
    matrix = with_spectrum(torch.logspace(-1, 1.5, 12), seed=1)
    rhs = normal(6, 12, seed=2)
    preconditioner = preconditioners(dtype=dtype)[index][0]
    tolerance = 1e-11 if dtype == torch.float64 else 1e-4  # rounding alone leaves up to condition * eps = 4e-5
    found = solvers.conjugate_gradients(
        Operator.from_matrix(matrix.to(dtype)), rhs.to(dtype), preconditioner=preconditioner, tolerance=tolerance
    )
    assert found.converged.all()
    assert found.solution.dtype == dtype
    expected = torch.linalg.solve(matrix, rhs.mT).mT
    torch.testing.assert_close(found.solution.double(), expected, rtol=close, atol=close)
    true = (rhs - found.solution.double() @ matrix).norm(dim=1)
    assert (true <= (tolerance + 10 * torch.finfo(dtype).eps) * rhs.norm(dim=1)).all()


@pytest.mark.parametrize("condition", [10.0, 1000.0])
def test_error_falls_at_least_as_fast_as_the_chebyshev_bound(condition: float) -> None:
    matrix = with_spectrum(torch.linspace(1, condition, 80), seed=3)
    rhs = normal(3, 80)
    exact = torch.linalg.solve(matrix, rhs.mT).mT
    errors = [((exact @ matrix) * exact).sum(1).sqrt()]

    def record(state: solvers.CGProgress) -> None:
        gap = state.solution - exact
        errors.append(((gap @ matrix) * gap).sum(1).sqrt())

    solvers.conjugate_gradients(Operator.from_matrix(matrix), rhs, tolerance=1e-9, callback=record)
    assert len(errors) > 10
    rate = (condition**0.5 - 1) / (condition**0.5 + 1)
    for iteration, error in enumerate(errors):
        assert (error <= 2 * rate**iteration * errors[0] * (1 + 1e-6) + 1e-12).all()
        assert iteration == 0 or (error <= errors[iteration - 1] * (1 + 1e-9) + 1e-12).all()


def test_as_many_iterations_as_distinct_eigenvalues() -> None:
    matrix = with_spectrum(torch.tensor([1.0, 5.0, 20.0]).repeat(10))
    found = solvers.conjugate_gradients(Operator.from_matrix(matrix), normal(4, 30), tolerance=1e-10)
    assert found.iterations.tolist() == [3] * 4


def test_converged_right_hand_sides_are_frozen_and_cost_nothing() -> None:
    matrix = with_spectrum(torch.logspace(0, 2, 40))
    values, vectors = torch.linalg.eigh(matrix)
    rhs = torch.stack([vectors[:, 7], normal(40), vectors[:, 3] + vectors[:, 30]])
    counting = Counting(matrix)
    found = solvers.conjugate_gradients(counting.operator(), rhs, tolerance=1e-10)
    assert found.iterations[0] == 1
    assert found.iterations[2] == 2
    assert counting.blocks == [3, 2] + [1] * (int(found.iterations[1]) - 2) + [3]  # the last: true residuals
    assert found.products == sum(counting.blocks)
    torch.testing.assert_close(found.solution[0], vectors[:, 7] / values[7])
    for i in range(3):
        alone = solvers.conjugate_gradients(Operator.from_matrix(matrix), rhs[i : i + 1], tolerance=1e-10)
        torch.testing.assert_close(alone.solution[0], found.solution[i], rtol=1e-9, atol=1e-12)
        assert abs(alone.iterations[0] - found.iterations[i]) <= 2


def test_preconditioning_pays_on_ill_conditioned_systems() -> None:
    size = 60
    scales = torch.logspace(-2, 2, size, dtype=torch.float64)
    matrix = scales[:, None] * with_spectrum(torch.linspace(1, 3, size)) * scales
    values, vectors = torch.linalg.eigh(with_spectrum(torch.cat([torch.logspace(3, 6, 10), torch.linspace(1, 2, 50)])))
    spiked = vectors @ torch.diag(values) @ vectors.mT
    lowrank = solvers.LowRankPlusDiagonal(values[-10:], vectors[:, -10:].mT, torch.ones(size, dtype=torch.float64))
    for problem, preconditioner in ((matrix, solvers.Diagonal(matrix.diagonal())), (spiked, lowrank)):
        operator, rhs = Operator.from_matrix(problem), normal(2, size)
        plain = solvers.conjugate_gradients(operator, rhs, tolerance=1e-8, max_iterations=200)
        helped = solvers.conjugate_gradients(operator, rhs, tolerance=1e-8, preconditioner=preconditioner)
        assert helped.converged.all()
        assert helped.iterations.max() <= 25
        assert plain.iterations.min() >= 2 * helped.iterations.max()


def test_the_exact_preconditioner_needs_one_iteration() -> None:
    preconditioner, matrix = preconditioners()[2]
    rhs = normal(3, 12)
    found = solvers.conjugate_gradients(
        Operator.from_matrix(matrix), rhs, preconditioner=preconditioner, tolerance=1e-7
    )
    assert found.iterations.tolist() == [1, 1, 1]


def test_a_solve_cut_short_says_so_and_goes_on_from_its_solution() -> None:
    matrix = with_spectrum(torch.logspace(0, 3, 60))
    operator, rhs = Operator.from_matrix(matrix), normal(2, 60)
    short = solvers.conjugate_gradients(operator, rhs, tolerance=1e-10, max_iterations=12)
    assert short.stopped == ("max_iterations",) * 2
    assert not short.converged.any()
    torch.testing.assert_close(short.residual_norms, (rhs - short.solution @ matrix).norm(dim=1))
    torch.testing.assert_close(short.relative_residuals, short.residual_norms / rhs.norm(dim=1))
    halted = solvers.conjugate_gradients(operator, rhs, tolerance=1e-10, callback=lambda state: state.iteration == 12)
    assert halted.stopped == ("callback",) * 2
    assert torch.equal(halted.solution, short.solution)
    resumed = solvers.conjugate_gradients(operator, rhs, tolerance=1e-10, start=short.solution)
    whole = solvers.conjugate_gradients(operator, rhs, tolerance=1e-10)
    assert resumed.converged.all()
    torch.testing.assert_close(resumed.solution, whole.solution, rtol=1e-6, atol=1e-8)
    again = solvers.conjugate_gradients(operator, rhs, tolerance=1e-9, start=whole.solution)
    assert again.iterations.tolist() == [0, 0]
    assert torch.equal(again.solution, whole.solution)


def test_warm_start_near_the_solution_saves_iterations() -> None:
    matrix = with_spectrum(torch.logspace(0, 2, 60))
    operator, rhs = Operator.from_matrix(matrix), normal(1, 60)
    cold = solvers.conjugate_gradients(operator, rhs)
    near = torch.linalg.solve(1.001 * matrix, rhs.mT).mT
    assert solvers.conjugate_gradients(operator, rhs, start=near).iterations < cold.iterations


def test_zero_right_hand_side_has_the_zero_solution() -> None:
    operator = Operator.from_matrix(with_spectrum(torch.linspace(1, 2, 9)))
    rhs = torch.stack([torch.zeros(9, dtype=torch.float64), normal(9)])
    found = solvers.conjugate_gradients(operator, rhs, start=torch.ones(2, 9, dtype=torch.float64))
    assert found.converged.all()
    assert not found.solution[0].any()
    assert found.relative_residuals[0] == 0


def test_an_energy_tolerance_stops_in_the_preconditioners_metric_without_a_product_more() -> None:
    matrix = with_spectrum(torch.logspace(0, 2, 40))
    metric = matrix + with_spectrum(torch.logspace(-1, 1, 40), seed=1)
    inverse = torch.linalg.inv(metric)
    vectors = torch.linalg.eigh(matrix).eigenvectors
    # the second has converged before the first product, the third is exactly zero
    rhs = torch.stack([normal(40), 1e-9 * vectors[:, 3], torch.zeros(40, dtype=torch.float64), vectors[:, 30]])
    preconditioner = solvers.CallablePreconditioner(lambda v: v @ inverse)
    counting = Counting(matrix)

    def solve(**options: Any) -> solvers.CGResult:
        return solvers.conjugate_gradients(counting.operator(), rhs, preconditioner=preconditioner, **options)

    found = solve(energy_tolerance=1e-10)
    assert found.products == sum(counting.blocks) == found.iterations.sum()
    assert found.converged.all()
    assert found.iterations[1] == found.iterations[2] == 0
    left = rhs - found.solution @ matrix
    assert ((left @ inverse * left).sum(1) <= 1.01e-10).all()
    one_less = solve(energy_tolerance=1e-10, max_iterations=int(found.iterations.max()) - 1)
    left = rhs - one_less.solution @ matrix
    assert (left @ inverse * left).sum(1).max() > 1e-10
    assert "max_iterations" in one_less.stopped
    exact = solvers.CallablePreconditioner(lambda v: v @ torch.linalg.inv(matrix))
    once = solvers.conjugate_gradients(
        Operator.from_matrix(matrix), rhs[:1], preconditioner=exact, energy_tolerance=1e-9
    )
    assert once.products == 1


def test_an_impossible_tolerance_is_reported_with_the_true_residual() -> None:
    matrix = with_spectrum(torch.logspace(0, 3, 50)).float()
    rhs = normal(2, 50, dtype=torch.float32)
    found = solvers.conjugate_gradients(Operator.from_matrix(matrix), rhs, tolerance=1e-9)
    assert found.stopped == ("stagnated",) * 2
    true = (rhs.double() - found.solution.double() @ matrix.double()).norm(dim=1)
    torch.testing.assert_close(found.residual_norms, true, rtol=0.5, atol=0.0)


def test_drift_of_the_recursion_is_repaired_by_restarts() -> None:
    """From far away the recursive residual loses digits in proportion to the first one; the true one says so."""
    matrix = with_spectrum(torch.logspace(0, 2, 60))
    rhs, far = normal(2, 60), 1e8 * normal(2, 60, seed=1)
    counting = Counting(matrix)
    found = solvers.conjugate_gradients(counting.operator(), rhs, start=far, tolerance=1e-10)
    assert found.converged.all()
    assert ((rhs - found.solution @ matrix).norm(dim=1) <= 1.01e-10 * rhs.norm(dim=1)).all()
    assert found.products > found.iterations.sum() + 2 * len(rhs)  # more than the first and one last true residual


def test_negative_curvature_is_raised_or_flagged() -> None:
    matrix = torch.diag(torch.cat([torch.linspace(1, 2, 9), torch.tensor([-1.0])]).double())
    rhs = torch.ones(2, 10, dtype=torch.float64)
    rhs[0, -1] = 0  # this one never meets the negative direction
    operator = Operator.from_matrix(matrix)
    with pytest.raises(NotPositiveDefiniteError, match=r"Expected.*Got.*Do"):
        solvers.conjugate_gradients(operator, rhs)
    found = solvers.conjugate_gradients(operator, rhs, on_negative_curvature="flag")
    assert found.stopped == ("converged", "negative_curvature")
    torch.testing.assert_close(found.residual_norms[1], (rhs[1] - found.solution[1] @ matrix).norm())
    bad = solvers.CallablePreconditioner(lambda v: -v)
    with pytest.raises(NotPositiveDefiniteError, match="preconditioner"):
        solvers.conjugate_gradients(Operator.from_matrix(matrix.abs()), rhs, preconditioner=bad)


# Lanczos and eigenpairs ---------------------------------------------------------------------------------------------


def test_complete_lanczos_is_the_eigendecomposition() -> None:
    matrix = with_spectrum(torch.cat([torch.logspace(-6, 3, 40), -torch.logspace(-3, 2, 10)]))
    run = solvers.lanczos(Operator.from_matrix(matrix, "symmetric"), 50, generator=seeded())
    assert run.stopped == "complete"
    torch.testing.assert_close(run.basis @ run.basis.mT, torch.eye(50, dtype=torch.float64), rtol=0, atol=1e-12)
    values, rotation, bounds = run.ritz()
    torch.testing.assert_close(values.sort().values, torch.linalg.eigvalsh(matrix), rtol=0, atol=1e-10)
    vectors = run.vectors(rotation)
    torch.testing.assert_close(vectors @ matrix, values[:, None] * vectors, rtol=0, atol=1e-9)
    assert bounds.max() < 1e-12 * 1e3


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_lanczos_bounds_hold(dtype: torch.dtype) -> None:
    matrix = decaying(100).to(dtype)
    run = solvers.lanczos(Operator.from_matrix(matrix, "symmetric"), 25, generator=seeded())
    eye = torch.eye(25, dtype=dtype)
    torch.testing.assert_close(run.basis @ run.basis.mT, eye, rtol=0, atol=100 * torch.finfo(dtype).eps)
    values, rotation, bounds = run.ritz()
    spectrum = torch.linalg.eigvalsh(matrix.double())
    distance = (values[:, None] - spectrum).abs().min(1).values
    assert (distance <= bounds + 20 * torch.finfo(dtype).eps * 100).all()
    vectors = run.vectors(rotation).double()
    residuals = (vectors @ matrix.double() - values[:, None] * vectors).norm(dim=1)
    torch.testing.assert_close(residuals, bounds, rtol=1e-3, atol=100 * 100 * torch.finfo(dtype).eps)
    assert bounds[0] < 1e-2 < bounds.max()


def test_lanczos_goes_on_after_an_invariant_subspace() -> None:
    matrix = with_spectrum(torch.tensor([7.0, 7.0, 7.0, 2.0, 2.0]))
    run = solvers.lanczos(Operator.from_matrix(matrix), 5, generator=seeded())
    expected = torch.tensor([7, 7, 7, 2, 2], dtype=torch.float64)
    torch.testing.assert_close(run.ritz()[0], expected, rtol=0, atol=1e-10)


EIGENSOLVERS = [solvers.lanczos_eigenpairs, solvers.subspace_eigenpairs]


@pytest.mark.parametrize("solve", EIGENSOLVERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_leading_eigenpairs_agree_with_eigh(solve: Callable[..., solvers.Eigenpairs], dtype: torch.dtype) -> None:
    spectrum = 50 * 0.85 ** torch.arange(120, dtype=torch.float64)
    spectrum[1::3] *= -1
    matrix = with_spectrum(spectrum)
    counting = Counting(matrix.to(dtype))
    operator = counting.operator()
    found = solve(operator, rank=10, generator=seeded())
    assert found.stopped == "rank"
    assert found.converged.all()
    assert found.products == sum(counting.blocks)
    close = torch.finfo(dtype).eps ** 0.5
    torch.testing.assert_close(found.values, spectrum[:10], rtol=0, atol=50 * close)
    vectors = found.vectors.double()
    torch.testing.assert_close(vectors @ vectors.mT, torch.eye(10).double(), rtol=0, atol=1e3 * torch.finfo(dtype).eps)
    residuals = (vectors @ matrix - found.values[:, None] * vectors).norm(dim=1)
    torch.testing.assert_close(residuals, found.residuals, rtol=0.1, atol=2e3 * torch.finfo(dtype).eps)
    assert (residuals <= 1.1 * close * 50).all()


@pytest.mark.parametrize("solve", EIGENSOLVERS)
def test_adaptive_rank_finds_all_above_the_threshold_and_no_more(solve: Callable[..., solvers.Eigenpairs]) -> None:
    spectrum = 50 * 0.9 ** torch.arange(150, dtype=torch.float64)
    operator = Operator.from_matrix(with_spectrum(spectrum))
    for threshold in (100.0, 20.0, 0.5):  # 0, 9 and 44 of them: none, fewer and more than the first block
        found = solve(operator, rank=80, threshold=threshold, generator=seeded())
        expected = spectrum[spectrum >= threshold]
        assert found.stopped == "threshold"
        torch.testing.assert_close(found.values, expected, rtol=1e-6, atol=0)
        assert found.vectors.shape == (len(expected), 150)
    capped = solve(operator, rank=20, threshold=0.5, generator=seeded())
    assert capped.stopped == "rank"
    torch.testing.assert_close(capped.values, spectrum[:20], rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("solve", "limit"), [(EIGENSOLVERS[0], {"max_steps": 12}), (EIGENSOLVERS[1], {"max_iterations": 2})]
)
def test_eigenpairs_that_did_not_converge_are_marked(solve: Callable[..., Any], limit: dict[str, int]) -> None:
    matrix = with_spectrum(torch.linspace(1, 2, 100))
    found = solve(Operator.from_matrix(matrix), rank=10, generator=seeded(), **limit)
    assert found.stopped == "limit"
    assert not found.converged.all()
    residuals = (found.vectors @ matrix - found.values[:, None] * found.vectors).norm(dim=1)
    torch.testing.assert_close(residuals, found.residuals, rtol=1e-6, atol=1e-12)


def test_subspace_iteration_finds_repeated_eigenvalues_and_uses_its_start() -> None:
    spectrum = torch.tensor([9.0, 9.0, 9.0, 5.0, 5.0] + [1.0] * 45).double()
    matrix = with_spectrum(spectrum)
    operator = Operator.from_matrix(matrix)
    found = solvers.subspace_eigenpairs(operator, rank=5, generator=seeded())
    torch.testing.assert_close(found.values, spectrum[:5])
    near = Operator.from_matrix(with_spectrum(0.8 ** torch.arange(60)) + 1e-6 * torch.eye(60))
    cold = solvers.subspace_eigenpairs(near, rank=6, generator=seeded())
    warm = solvers.subspace_eigenpairs(near, rank=6, start=cold.vectors, generator=seeded(1))
    assert warm.products < cold.products / 2
    torch.testing.assert_close(warm.values, cold.values)


def test_eigenpairs_of_the_whole_space_and_of_zero() -> None:
    matrix = with_spectrum(torch.arange(1.0, 7.0))
    for solve in EIGENSOLVERS:
        found = solve(Operator.from_matrix(matrix), rank=6, generator=seeded())
        torch.testing.assert_close(found.values, torch.arange(6.0, 0.0, -1.0).double())
        zero = solve(Operator.from_matrix(torch.zeros(6, 6), "symmetric"), rank=2, generator=seeded())
        assert zero.values.tolist() == [0, 0]


def test_largest_eigenvalue_is_a_close_upper_estimate() -> None:
    for seed in range(20):
        matrix = decaying(200, seed, floor=0.1)
        found = solvers.largest_eigenvalue(Operator.from_matrix(matrix), generator=seeded(seed))
        assert 100.1 * (1 - 1e-12) <= found <= 100.2
        early = solvers.largest_eigenvalue(Operator.from_matrix(matrix), steps=8, generator=seeded(seed))
        assert 100.1 <= early <= 110  # the Ritz values themselves lie below
    smallest = Operator.from_matrix(-decaying(50, floor=0.1), "symmetric")
    assert solvers.largest_eigenvalue(smallest, steps=50, generator=seeded()) == pytest.approx(-0.1, abs=0.01)


# Traces -------------------------------------------------------------------------------------------------------------


def test_hutchinson_is_exact_for_diagonal_matrices() -> None:
    diagonal = normal(30).exp()
    operator = Operator.from_matrix(torch.diag(diagonal))
    trace = solvers.hutchinson_trace(operator, probes=2, generator=seeded())
    torch.testing.assert_close(trace.value, diagonal.sum())
    assert trace.standard_error < 1e-12
    found = solvers.hutchinson_diagonal(operator, probes=3, generator=seeded())
    torch.testing.assert_close(found.value, diagonal)
    assert found.standard_error.max() < 1e-14


@pytest.mark.parametrize("estimate", [solvers.hutch_plus_plus, solvers.xtrace])
@pytest.mark.parametrize("rank", [0, 1, 5])
def test_low_rank_traces_are_exact(estimate: Callable[..., solvers.Estimate], rank: int) -> None:
    spectrum = torch.cat([torch.linspace(2, 1e9, rank), torch.zeros(40 - rank)])
    matrix = with_spectrum(spectrum) if rank else torch.zeros(40, 40, dtype=torch.float64)
    found = estimate(Operator.from_matrix(matrix, "symmetric"), products=24, generator=seeded())
    torch.testing.assert_close(found.value, matrix.trace(), rtol=1e-12, atol=1e-12)
    assert found.standard_error <= 1e-12 * (1 + matrix.trace())


def naive_xtrace(matrix: Tensor, probes: Tensor) -> tuple[Tensor, Tensor]:
    """The mean of the leave-one-out samples and its variance, each sample from its own QR."""

    def sample(i: int, without: int) -> Tensor:
        others = probes[[k for k in range(len(probes)) if k not in (i, without)]]
        basis = torch.linalg.qr(matrix @ others.mT).Q
        rest = probes[i] - basis @ (basis.mT @ probes[i])
        left = len(matrix) - basis.shape[1]
        return (basis.mT @ matrix @ basis).trace() + left * (rest @ matrix @ rest) / (rest @ rest)

    m = len(probes)
    samples = torch.stack([sample(i, i) for i in range(m)])
    pairs = [(i, j) for i in range(m) for j in range(m) if i != j]
    shared = torch.stack([(samples[i] - sample(i, j)) * (samples[j] - sample(j, i)) for i, j in pairs]).mean()
    return samples.mean(), samples.var() / m + shared


@pytest.mark.parametrize("property", ["positive_definite", "general"])
def test_xtrace_equals_its_naive_definition(property: Property) -> None:
    matrix = decaying(40, floor=0.01)
    if property == "general":
        matrix = matrix + torch.triu(normal(40, 40), 1)
    operator = Operator.from_matrix(matrix, property)
    found = solvers.xtrace(operator, products=20, generator=seeded(4), block=3)
    value, variance = naive_xtrace(matrix, normal_block(operator, 10, seeded(4)))
    torch.testing.assert_close(found.value, value, rtol=1e-9, atol=0)
    torch.testing.assert_close(found.standard_error, variance.sqrt(), rtol=1e-6, atol=0)
    assert found.products == 20


def test_xtrace_with_all_products_is_exact() -> None:
    matrix = with_spectrum(torch.linspace(1, 4, 12))
    found = solvers.xtrace(Operator.from_matrix(matrix), products=24, generator=seeded())
    torch.testing.assert_close(found.value, matrix.trace(), rtol=1e-8, atol=0)


TRACES: dict[str, Callable[[Operator, torch.Generator], solvers.Estimate]] = {
    "rademacher": lambda a, g: solvers.hutchinson_trace(a, probes=60, generator=g, block=60),
    "gaussian": lambda a, g: solvers.hutchinson_trace(a, probes=60, generator=g, kind="gaussian", block=60),
    "hutch++": lambda a, g: solvers.hutch_plus_plus(a, products=90, generator=g, block=60),
    "xtrace": lambda a, g: solvers.xtrace(a, products=40, generator=g, block=60),
    "logdet": lambda a, g: solvers.logdet(a, probes=30, steps=12, generator=g, block=30),
    "preconditioned logdet": lambda a, g: solvers.logdet(
        a, probes=30, steps=12, generator=g, preconditioner=solvers.Diagonal(a(torch.eye(60).double()).diag()), block=30
    ),
}


@pytest.mark.parametrize("name", TRACES)
def test_standard_errors_are_calibrated_and_estimates_unbiased(name: str) -> None:
    """95% Student intervals cover in 95% of 200 runs (binomial test), and the errors average to 0 (normal test)."""
    matrix = with_spectrum(torch.logspace(-0.5, 0.5, 60))
    exact = matrix.logdet() if "logdet" in name else matrix.trace()
    operator, runs = Operator.from_matrix(matrix), 200
    found = [TRACES[name](operator, seeded(seed)) for seed in range(runs)]
    scores = torch.stack([(estimate.value - exact) / estimate.standard_error for estimate in found])
    covered = int((scores.abs() <= stats.t.ppf(0.975, found[0].samples - 1)).sum())
    low, high = stats.binom.ppf([ALARM / 4, 1 - ALARM / 4], runs, 0.95)
    assert low <= covered <= high
    assert abs(scores.mean()) * runs**0.5 <= stats.norm.ppf(1 - ALARM / 4) * scores.std()


def test_xtrace_error_counts_what_its_samples_share() -> None:
    """The stated variance is that of the estimates, where samples taken for independent would give half of it.

    300 runs: the ratio of a sample variance to a mean of variances has a relative error of about sqrt(2 / 300) = 8%,
    somewhat more with the tails here; 40% is beyond 4 of these.
    """
    matrix = decaying(80, floor=0.3)
    runs = [solvers.xtrace(Operator.from_matrix(matrix), products=24, generator=seeded(seed)) for seed in range(300)]
    errors = torch.stack([run.value - matrix.trace() for run in runs])
    stated = torch.stack([run.standard_error for run in runs])
    assert 0.6 <= errors.square().mean() / stated.square().mean() <= 1.4


def test_diagonal_standard_errors_are_calibrated() -> None:
    """Over 60 entries of 40 independent runs. Entries of one run are dependent: runs are the units of the test."""
    matrix = with_spectrum(torch.logspace(-1, 1, 60))
    share = []
    for seed in range(40):
        found = solvers.hutchinson_diagonal(Operator.from_matrix(matrix), probes=50, generator=seeded(seed))
        inside = (found.value - matrix.diag()).abs() <= stats.t.ppf(0.975, 49) * found.standard_error
        share.append(inside.double().mean())
    coverage = torch.stack(share)
    assert abs(coverage.mean() - 0.95) <= stats.t.ppf(1 - ALARM / 2, 39) * coverage.std() / 40**0.5 + 0.002


def test_sketching_beats_hutchinson_on_a_decaying_spectrum() -> None:
    matrix = decaying(100)
    operator = Operator.from_matrix(matrix, "symmetric")
    plain = solvers.hutchinson_trace(operator, probes=60, generator=seeded())
    for estimate in (solvers.hutch_plus_plus, solvers.xtrace):
        found = estimate(operator, products=60, generator=seeded())
        assert found.standard_error < plain.standard_error / 20
        assert abs(found.value - matrix.trace()) < 5 * found.standard_error


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_estimates_depend_on_the_generator_only(dtype: torch.dtype) -> None:
    operator = Operator.from_matrix(decaying(33, floor=1.0).to(dtype))
    estimators: list[Callable[[int, int], solvers.Estimate]] = [
        lambda block, seed: solvers.hutchinson_trace(operator, probes=9, generator=seeded(seed), block=block),
        lambda block, seed: solvers.hutchinson_diagonal(operator, probes=9, generator=seeded(seed), block=block),
        lambda block, seed: solvers.hutch_plus_plus(operator, products=27, generator=seeded(seed), block=block),
        lambda block, seed: solvers.xtrace(operator, products=18, generator=seeded(seed), block=block),
        lambda block, seed: solvers.logdet(operator, probes=9, steps=9, generator=seeded(seed), block=block),
    ]
    for estimate in estimators:
        assert torch.equal(estimate(4, 0).value, estimate(4, 0).value)
        assert not torch.equal(estimate(4, 0).value, estimate(4, 1).value)
        torch.testing.assert_close(estimate(4, 0).value, estimate(9, 0).value, rtol=1e-4, atol=1e-4)


# Log-determinants ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reorthogonalise", [True, False])
def test_quadrature_of_each_probe_is_exact_with_enough_steps(reorthogonalise: bool) -> None:
    matrix = with_spectrum(torch.linspace(0.5, 5, 25))
    operator = Operator.from_matrix(matrix)
    quadrature = solvers.spectral_quadrature(
        operator, probes=6, steps=25, generator=seeded(), reorthogonalise=reorthogonalise
    )
    z = torch.cat(list(probe_blocks(operator, 6, seeded())))
    values, vectors = torch.linalg.eigh(matrix)
    for function in (torch.log, torch.reciprocal, lambda t: torch.log(t + 3), lambda t: t / (t + 1)):
        expected = ((z @ vectors).square() * function(values)).sum(1)
        found = quadrature.trace(function)
        torch.testing.assert_close(found.value, expected.mean(), rtol=1e-9, atol=0)
        torch.testing.assert_close(found.standard_error, expected.std() / 6**0.5, rtol=1e-6, atol=0)
        assert found.products == 6 * 25


def test_few_steps_err_upwards_by_about_the_stated_truncation() -> None:
    matrix = with_spectrum(torch.logspace(-2, 2, 120))
    operator = Operator.from_matrix(matrix)
    exact = solvers.logdet(operator, probes=8, steps=120, generator=seeded())
    previous = float("inf")
    for steps in (8, 16, 32):
        found = solvers.logdet(operator, probes=8, steps=steps, generator=seeded())
        bias = found.value - exact.value
        assert 0 < bias <= 1.5 * found.truncation
        assert found.truncation < previous
        previous = float(found.truncation)


def test_a_preconditioner_reduces_both_errors() -> None:
    values, vectors = torch.linalg.eigh(decaying(100, floor=0.5))
    operator, exact = Operator.from_matrix(vectors @ torch.diag(values) @ vectors.mT), values.log().sum()
    plain = solvers.logdet(operator, probes=20, steps=10, generator=seeded())
    ones = torch.ones(100, dtype=torch.float64)
    top = solvers.LowRankPlusDiagonal(values[-15:] - 0.5, vectors[:, -15:].mT, 0.5 * ones)
    helped = solvers.logdet(operator, preconditioner=top, probes=20, steps=10, generator=seeded())
    assert helped.standard_error < plain.standard_error / 3
    assert helped.truncation < plain.truncation / 100
    assert abs(helped.value - exact) < 4 * helped.standard_error
    whole = solvers.LowRankPlusDiagonal(values, vectors.mT, 1e-9 * ones)
    perfect = solvers.logdet(operator, preconditioner=whole, probes=2, steps=3, generator=seeded())
    torch.testing.assert_close(perfect.value, exact, rtol=0, atol=1e-6)
    assert perfect.standard_error < 1e-6


@pytest.mark.parametrize("reorthogonalise", [True, False])
def test_logdet_survives_exhausted_krylov_spaces(reorthogonalise: bool) -> None:
    for spectrum in ([3.0] * 20, [3.0, 1.0] * 10):
        matrix = with_spectrum(torch.tensor(spectrum))
        found = solvers.logdet(
            Operator.from_matrix(matrix),
            probes=400,
            steps=20,
            generator=seeded(),
            kind="gaussian",
            block=400,
            reorthogonalise=reorthogonalise,
        )
        # Gaussian probes: 20 + 20/10 degrees of freedom make |error| / SE ~ normal; 4 standard errors: ALARM.
        assert abs(found.value - matrix.logdet()) <= 4 * found.standard_error


@pytest.mark.parametrize("reorthogonalise", [True, False])
def test_float32_logdet_is_within_its_error(reorthogonalise: bool) -> None:
    matrix = with_spectrum(torch.logspace(0, 3, 150))
    found = solvers.logdet(
        Operator.from_matrix(matrix.float()),
        probes=30,
        steps=60,
        generator=seeded(),
        reorthogonalise=reorthogonalise,
    )
    assert found.value.dtype == torch.float64
    assert abs(found.value - matrix.logdet()) <= 4 * found.standard_error + found.truncation


# Stochastic gradient descent ----------------------------------------------------------------------------------------


class Regression:
    """A z - b as a sum over data; a minibatch is a function of the step alone."""

    def __init__(self, data: int = 200, size: int = 12, targets: int = 3, batch: int = 20) -> None:
        self.x, self.y = normal(data, size, seed=1), normal(data, targets, seed=2)
        self.batch, self.size = batch, size
        self.matrix = self.x.mT @ self.x + torch.eye(size, dtype=torch.float64)
        self.rhs = (self.x.mT @ self.y).mT
        self.exact = torch.linalg.solve(self.matrix, self.rhs.mT).mT

    def full(self, z: Tensor, step: int) -> Tensor:
        return z @ self.matrix - self.rhs

    def stochastic(self, z: Tensor, step: int) -> Tensor:
        rows = torch.randperm(len(self.x), generator=seeded(step))[: self.batch]
        x, y = self.x[rows], self.y[rows]
        return len(self.x) / self.batch * ((z @ x.mT - y.mT) @ x) + z

    def run(self, gradient: str = "full", callback: Any = None, **options: Any) -> solvers.SGDResult:
        settings = solvers.SGDSettings(**{"steps": 300, "learning_rate": 1e-3, **options})
        return solvers.sgd(getattr(self, gradient), self.begin(settings), callback=callback)

    def begin(self, settings: solvers.SGDSettings) -> solvers.SGDState:
        return solvers.SGDState.begin(torch.zeros_like(self.rhs), settings)


@pytest.mark.parametrize("averaging", ["none", "tail", "geometric"])
def test_descent_reaches_the_solution(averaging: Averaging) -> None:
    problem = Regression()
    rate = solvers.sgd_learning_rate(Operator.from_matrix(problem.matrix), generator=seeded())
    found = problem.run(learning_rate=rate, averaging=averaging, tail=0.05)
    assert found.stopped == "steps"
    torch.testing.assert_close(found.solution, problem.exact, rtol=0, atol=1e-5)
    assert (found.state.gradient_norms[-1] < 1e-6 * found.state.gradient_norms[0]).all()


def test_steps_are_those_of_nesterov() -> None:
    problem = Regression()
    position = ahead = torch.zeros_like(problem.rhs)
    for step in range(50):
        before, position = position, ahead - 1e-3 * problem.stochastic(ahead, step)
        ahead = position + 0.8 * (position - before)
    found = problem.run("stochastic", steps=50, momentum=0.8, averaging="none")
    torch.testing.assert_close(found.solution, ahead, rtol=1e-10, atol=1e-14)


def test_averages_are_weighted_means_of_the_iterates() -> None:
    problem, iterates = Regression(), list[Tensor]()

    def keep(state: solvers.SGDState) -> None:
        iterates.append(state.iterate.clone())

    tail = problem.run("stochastic", steps=40, tail=0.25, callback=keep)
    torch.testing.assert_close(tail.solution, torch.stack(iterates[30:]).mean(0))
    geometric = problem.run("stochastic", steps=40, tail=0.25, averaging="geometric")
    weights = (1 - 1 / 10) ** torch.arange(39, -1, -1, dtype=torch.float64)
    expected = (weights[:, None, None] * torch.stack(iterates)).sum(0) / weights.sum()
    torch.testing.assert_close(geometric.solution, expected)


def test_averaging_removes_gradient_noise() -> None:
    problem = Regression()
    options = {"steps": 1000, "learning_rate": 4e-4}
    last = problem.run("stochastic", averaging="none", **options).solution - problem.exact
    for averaging in ("tail", "geometric"):
        gap = problem.run("stochastic", averaging=averaging, **options).solution - problem.exact
        assert gap.norm() < last.norm() / 3


def test_clipping_shortens_each_right_hand_side_alone() -> None:
    problem = Regression()
    problem.rhs = problem.rhs * torch.tensor([[1e3], [1.0], [1e-3]], dtype=torch.float64)
    found = problem.run(steps=1, momentum=0.0, clip=1.0, averaging="none")
    lengths = problem.rhs.norm(dim=1)
    expected = 1e-3 * problem.rhs / lengths.clamp(min=1.0)[:, None]
    torch.testing.assert_close(found.solution, expected)
    assert found.state.clipped.tolist() == (lengths > 1).long().tolist()
    torch.testing.assert_close(found.state.gradient_norms[0], lengths)


@pytest.mark.parametrize("averaging", ["none", "tail", "geometric"])
@pytest.mark.parametrize("stop", [1, 37, 99])
def test_a_resumed_run_equals_an_uninterrupted_one(averaging: str, stop: int) -> None:
    problem = Regression()
    options = {"steps": 100, "averaging": averaging, "clip": 300.0}
    whole = problem.run("stochastic", **options)
    part = problem.run("stochastic", callback=lambda state: state.step == stop, **options)
    assert part.stopped == "callback"
    assert part.state.step == stop
    tensors = {name: tensor.clone() for name, tensor in part.state.tensors().items()}
    restored = solvers.SGDState.load(tensors, json.loads(json.dumps(part.state.config())))
    resumed = solvers.sgd(problem.stochastic, restored)
    assert torch.equal(resumed.solution, whole.solution)
    for name, tensor in whole.state.tensors().items():
        assert torch.equal(tensor, resumed.state.tensors()[name]), name
    assert restored.step == stop  # left as it was
    assert torch.equal(restored.iterate, part.state.iterate)
    assert 0 < int(whole.state.clipped.sum()) < 300


def test_right_hand_sides_descend_independently() -> None:
    problem = Regression()
    together = problem.run(steps=50).solution
    problem.rhs = problem.rhs[1:2]
    torch.testing.assert_close(problem.run(steps=50).solution[0], together[1])


@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9])
def test_the_stable_learning_rate_is_sharp(momentum: float) -> None:
    problem = Regression()
    operator = Operator.from_matrix(problem.matrix)
    options = {"momentum": momentum, "averaging": "none", "steps": 800}
    rates = [
        solvers.sgd_learning_rate(operator, momentum=momentum, fraction=0.98, steps=12, generator=seeded()) * factor
        for factor in (1.0, 1.06)
    ]
    found = problem.run(learning_rate=rates[0], **options)
    torch.testing.assert_close(found.solution, problem.exact, rtol=0, atol=1e-6)
    with pytest.raises(OptionError, match=r"diverged.*Expected.*Got.*Do"):
        problem.run(learning_rate=rates[1], **options)


# Refusals -----------------------------------------------------------------------------------------------------------


def test_ill_posed_inputs_are_refused_with_what_to_do() -> None:
    operator = Operator.from_matrix(with_spectrum(torch.linspace(1, 2, 8)))
    symmetric = Operator.from_matrix(with_spectrum(torch.linspace(-1, 2, 8)), "symmetric")
    general = Operator.from_matrix(normal(8, 8), "general")
    ones, g = torch.ones(2, 8, dtype=torch.float64), seeded()
    settings = solvers.SGDSettings(steps=1, learning_rate=0.1)
    cases: list[tuple[type[LapisError], Callable[[], object]]] = [
        (DataError, lambda: Operator.from_matrix(torch.ones(2, 3))),
        (OptionError, lambda: Operator(lambda v: v, 0)),
        (OptionError, lambda: Operator(lambda v: v, 3, torch.float16)),
        (OptionError, lambda: Operator(lambda v: v, 3, property="definite")),  # type: ignore[arg-type]
        (DataError, lambda: solvers.conjugate_gradients(operator, ones[0])),
        (DataError, lambda: solvers.conjugate_gradients(operator, ones[:, :7])),
        (DataError, lambda: solvers.conjugate_gradients(operator, ones.float())),
        (DataError, lambda: solvers.conjugate_gradients(operator, ones / 0)),
        (DataError, lambda: solvers.conjugate_gradients(operator, ones, start=ones[:1])),
        (OptionError, lambda: solvers.conjugate_gradients(operator, ones, tolerance=0.0)),
        (OptionError, lambda: solvers.conjugate_gradients(operator, ones, energy_tolerance=0.0)),
        (OptionError, lambda: solvers.conjugate_gradients(operator, ones, max_iterations=-1)),
        (OptionError, lambda: solvers.conjugate_gradients(operator, ones, on_negative_curvature="ignore")),  # type: ignore[arg-type]
        (StructureError, lambda: solvers.conjugate_gradients(symmetric, ones)),
        (
            DataError,
            lambda: solvers.conjugate_gradients(operator, ones, preconditioner=solvers.Diagonal(torch.ones(8))),
        ),
        (
            DataError,
            lambda: solvers.conjugate_gradients(operator, ones, preconditioner=solvers.Diagonal(ones[0, :5])),
        ),
        (
            DataError,
            lambda: solvers.conjugate_gradients(
                operator, ones, preconditioner=solvers.CallablePreconditioner(lambda v: v.float())
            ),
        ),
        (NotPositiveDefiniteError, lambda: solvers.Diagonal(-ones[0])),
        (DataError, lambda: solvers.Diagonal(ones)),
        (DataError, lambda: solvers.Diagonal(ones[0, :0])),
        (DataError, lambda: solvers.Diagonal(ones[0].to(torch.complex64))),
        (DataError, lambda: solvers.LowRankPlusDiagonal(ones[0, :2] * 1j, ones, ones[0])),
        (DataError, lambda: solvers.LowRankPlusDiagonal(ones[0, :3], ones, ones[0])),
        (NotPositiveDefiniteError, lambda: solvers.LowRankPlusDiagonal(-ones[0, :2], ones, ones[0])),
        (
            OptionError,
            lambda: solvers.logdet(
                operator, preconditioner=solvers.CallablePreconditioner(lambda v: v), probes=2, generator=g
            ),
        ),
        (StructureError, lambda: solvers.lanczos(general, 3, generator=g)),
        (OptionError, lambda: solvers.lanczos(symmetric, 9, generator=g)),
        (DataError, lambda: solvers.lanczos(symmetric, 3, start=0 * ones[0], generator=g)),
        (OptionError, lambda: solvers.lanczos_eigenpairs(symmetric, rank=9, generator=g)),
        (OptionError, lambda: solvers.lanczos_eigenpairs(symmetric, rank=2, threshold=0.0, generator=g)),
        (OptionError, lambda: solvers.lanczos_eigenpairs(symmetric, rank=4, max_steps=3, generator=g)),
        (DataError, lambda: solvers.subspace_eigenpairs(symmetric, rank=2, start=ones[:, :3], generator=g)),
        (OptionError, lambda: solvers.hutchinson_trace(operator, probes=1, generator=g)),
        (OptionError, lambda: solvers.hutchinson_trace(operator, probes=2, kind="sparse", generator=g)),  # type: ignore[arg-type]
        (OptionError, lambda: solvers.hutch_plus_plus(operator, products=5, generator=g)),
        (OptionError, lambda: solvers.xtrace(operator, products=18, generator=g)),
        (StructureError, lambda: solvers.logdet(symmetric, generator=g)),
        (NotPositiveDefiniteError, lambda: solvers.spectral_quadrature(symmetric, generator=g).trace(torch.log)),
        (OptionError, lambda: solvers.spectral_quadrature(symmetric, generator=g).trace(torch.sum)),
        (OptionError, lambda: solvers.SGDSettings(steps=10, learning_rate=-1.0)),
        (OptionError, lambda: solvers.SGDSettings(steps=10, learning_rate=1.0, momentum=1.0)),
        (OptionError, lambda: solvers.SGDSettings(steps=10, learning_rate=1.0, averaging="mean")),  # type: ignore[arg-type]
        (DataError, lambda: solvers.SGDState.begin(ones[0], settings)),
        (DataError, lambda: solvers.sgd(lambda z, step: z[0], solvers.SGDState.begin(ones, settings))),
        (OptionError, lambda: solvers.sgd_learning_rate(operator, fraction=1.5, generator=g)),
    ]
    for kind, attempt in cases:
        with pytest.raises(kind, match=r"Expected: .*Got: "):
            attempt()
