"""Draws that share their products: block conjugate gradients, its estimate of errors, and when it is chosen."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lapis
from lapis.solvers import BlockState, CGProgress, Diagonal, Operator, block_conjugate_gradients, conjugate_gradients

DOUBLE = torch.float64


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def system(k: int, size: int = 120) -> tuple[Tensor, Tensor, Tensor]:
    """A with eigenvalues from 1,000 down to 1, k right-hand sides, and the solutions."""
    basis, _ = torch.linalg.qr(torch.randn(size, size, dtype=DOUBLE, generator=generator(0)))
    values = 1 + 1e3 * torch.exp(-torch.arange(size, dtype=DOUBLE) / 8)
    matrix = (basis * values) @ basis.mT
    rhs = torch.randn(k, size, dtype=DOUBLE, generator=generator(1))
    return matrix, rhs, torch.linalg.solve(matrix, rhs.mT).mT


def squared(matrix: Tensor, rows: Tensor) -> Tensor:
    return (rows @ matrix * rows).sum(1)


def test_every_iterate_is_the_best_of_the_space_that_the_right_hand_sides_span_together() -> None:
    matrix, rhs, exact = system(3)
    inverse = 1 / torch.linspace(0.5, 2, len(matrix), dtype=DOUBLE)
    space, power, errors = [], rhs * inverse, []

    def note(now: BlockState) -> None:
        nonlocal power
        space.append(power)
        power = power @ matrix * inverse
        basis = torch.linalg.qr(torch.cat(space).mT)[0]
        best = (basis @ torch.linalg.solve(basis.mT @ matrix @ basis, basis.mT @ rhs.mT)).mT
        torch.testing.assert_close(now.solution, best, rtol=1e-7, atol=1e-9)
        torch.testing.assert_close(now.residual, rhs - now.solution @ matrix, rtol=1e-6, atol=1e-9)
        errors.append(squared(matrix, now.solution - exact))
        if len(errors) > 1:
            torch.testing.assert_close(now.decrements[-1], errors[-2] - errors[-1], rtol=1e-6, atol=1e-9)

    done = block_conjugate_gradients(
        Operator.from_matrix(matrix), rhs, preconditioner=Diagonal(1 / inverse), callback=note, max_iterations=6
    )
    assert (done.iterations, done.products, done.stopped) == (6, 18, "max_iterations")


def test_eight_right_hand_sides_together_take_less_than_half_of_the_iterations_of_each_alone() -> None:
    matrix, rhs, exact = system(8)
    operator, start = Operator.from_matrix(matrix), squared(matrix, exact).sum()
    counts = []
    for solve in (block_conjugate_gradients, conjugate_gradients):
        seen: list[float] = []

        def note(now: BlockState | CGProgress, seen: list[float] = seen) -> bool:
            seen.append(float(squared(matrix, now.solution - exact).sum() / start))
            return seen[-1] < 1e-4

        solve(operator, rhs, callback=note, max_iterations=100)  # type: ignore[operator]
        counts.append(len(seen))
    assert 2 * counts[0] < counts[1]


@pytest.mark.parametrize("dtype", [torch.float32, DOUBLE])
def test_dependent_and_zero_right_hand_sides_are_solved_too(dtype: torch.dtype) -> None:
    matrix, rhs, exact = system(3)
    mixed = torch.stack([rhs[0], rhs[1], rhs[0], rhs[0] - 2 * rhs[1], 0 * rhs[0], rhs[2]]).to(dtype)
    solutions = torch.stack([exact[0], exact[1], exact[0], exact[0] - 2 * exact[1], 0 * exact[0], exact[2]])
    start = torch.ones_like(mixed)
    for begin in (None, start):
        found = block_conjugate_gradients(Operator.from_matrix(matrix.to(dtype)), mixed, start=begin, max_iterations=90)
        tolerance = 1e-3 if dtype == torch.float32 else 1e-8
        torch.testing.assert_close(found.solution.double(), solutions, rtol=tolerance, atol=tolerance)
    nothing = block_conjugate_gradients(Operator.from_matrix(matrix), torch.zeros(2, len(matrix), dtype=DOUBLE))
    assert nothing.stopped == "exhausted"
    assert not nothing.solution.any()


def test_an_indefinite_matrix_is_refused() -> None:
    matrix, rhs, _ = system(2)
    with pytest.raises(lapis.NotPositiveDefiniteError, match="negative or zero curvature"):
        block_conjugate_gradients(Operator.from_matrix(matrix - 50 * torch.eye(len(matrix), dtype=DOUBLE)), rhs)


def posterior(dtype: torch.dtype = DOUBLE) -> tuple[lapis.ImplicitPosterior, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 20), nn.Tanh(), nn.Linear(20, 5)).to(dtype)
    x, y = 2 * torch.randn(80, 8, dtype=dtype), torch.randint(5, (80,))
    found = lapis.laplace(model, (x, y), "classification", structure="implicit", weights="all", prior=0.1)
    assert isinstance(found, lapis.ImplicitPosterior)
    return found, torch.randn(40, 8, dtype=dtype)


@pytest.mark.parametrize("error", [0.2, 0.05, 0.01])
def test_the_error_asked_for_is_kept_and_not_by_far(error: float) -> None:
    made, test = posterior()
    exact = made.draw(4, solver="cg").predict(test).f_variance
    drawn = made.draw(4, solver="block", error=error)
    found = float((drawn.predict(test).f_variance / exact - 1).abs().mean())
    assert error / 30 < found < error
    assert drawn.drawing.converged
    assert drawn.drawing.solver == "block"
    assert len(set(drawn.drawing.iterations)) == 1


@pytest.mark.parametrize("preconditioned", [False, True])
def test_draws_together_are_the_draws_of_each_alone_in_blocks_of_any_size(
    preconditioned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, _ = posterior()
    if preconditioned:
        data = made.curvature.batches[0]
        kronecker: Any = lapis.laplace(
            made.network.module, (data.inputs, data.targets), "classification", weights="all"
        )
        made = made.with_solver(space="weights", preconditioner=kronecker)
    exact = made.draw(5, solver="cg").deviations
    torch.testing.assert_close(made.draw(5, solver="block", error=1e-7).deviations, exact, rtol=1e-5, atol=1e-6)
    monkeypatch.setattr(type(made), "vectors_at_once", lambda _: 2)
    parts = made.draw(5, solver="block", error=1e-7)
    torch.testing.assert_close(parts.deviations, exact, rtol=1e-5, atol=1e-6)
    assert len(parts.drawing.iterations) == 5


def test_the_solver_is_chosen_by_size_and_by_what_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    made, _ = posterior()
    assert made.draw(2).drawing.solver == "cg"
    assert made.draw(2, error=0.1).drawing.solver == "block"
    monkeypatch.setattr(lapis.posteriors.laplace.matrix_free.drawing, "EXACT", 100)
    assert made.draw(2).drawing.solver == "block"
    assert made.with_solver(tolerance=1e-3).draw(2).drawing.solver == "cg"
    assert made.with_solver(space="outputs").draw(2).drawing.solver == "cg"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", lapis.LapisWarning)  # its residual
        assert made.draw(2, epochs=4, batch_size=10).drawing.solver == "sgd"
    with pytest.raises(lapis.OptionError, match="have no epochs"):
        made.draw(2, epochs=40, error=0.1)


def test_the_time_is_foretold_and_an_early_end_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    made, _ = posterior(torch.float32)
    made.draw(4, solver="block", progress=True)
    said = " ".join(capsys.readouterr().err.split())
    assert "4 together: about 25 products of at most" in said
    assert 'solver="sgd" would take 22 passes' in said
    made.draw(8, solver="block", progress=True)
    assert "sgd" not in capsys.readouterr().err
    made.draw(4, solver="cg", progress=True)
    assert "4 together, to a residual of 1e-05: usually far" in " ".join(capsys.readouterr().err.split())
    made.draw(4, solver="sgd", epochs=30, batch_size=20, progress=True)
    assert "SGD, 4 together: 120 steps of" in " ".join(capsys.readouterr().err.split())
    for solver in ("block", "cg"):
        made.draw(4, solver=solver, progress=False)
        assert "together" not in capsys.readouterr().err
    with pytest.warns(lapis.LapisWarning, match="estimated relative error of"):
        drawn = made.with_solver(max_iterations=4).draw(3, solver="block", error=1e-4)
    assert not drawn.drawing.converged
