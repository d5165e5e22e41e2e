"""Low-rank, implicit and drawn posteriors against dense float64 matrices, for every network of the table of cases.

Exact quantities must agree to 1e-8; estimates within three of their standard errors; draws pass chi-square tests. False
alarms: an estimate has three independent chances, each with at most 2 % (a t variable with seven degrees of freedom
beyond 3), so 1e-5 a case; each chi-square test has 1e-6.
"""

from __future__ import annotations

import functools
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from scipy.stats import chi2
from torch import Tensor, nn

import lapis
import lapis.curvature.products.ggn
from cases import CASES
from lapis.curvature.products.ggn import Solved
from lapis.evidence.fixed_point import stretch
from lapis.posteriors.laplace.matrix_free import descending
from reference import case_data, case_ggn, case_jacobians
from untouched import untouched

pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")

F64 = torch.float64
PRECISION = 0.8
every_case = pytest.mark.parametrize("name", list(CASES))


def draw(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@functools.cache
def implicit(name: str, space: str = "auto") -> lapis.ImplicitPosterior:
    if space != "auto":
        return implicit(name).with_solver(space=space)
    model, x, y, spec = case_data(name)
    prior = lapis.Prior(PRECISION, "parameter")
    posterior = lapis.laplace(model, (x, y), spec.build(), structure="implicit", prior=prior)
    return posterior.with_solver(tolerance=1e-12)


@functools.cache
def precision(name: str) -> Tensor:
    ggn = case_ggn(name)
    return ggn + PRECISION * torch.eye(len(ggn), dtype=torch.float64)


def close(found: Tensor, expected: Tensor, tolerance: float = 1e-8) -> None:
    assert found.shape == expected.shape
    assert float((found - expected).abs().max()) <= tolerance * max(float(expected.abs().max()), 1e-12)


def small_problem(structure: str = "implicit", **options: Any) -> tuple[Any, nn.Module, Tensor, Tensor]:
    """A classifier with 68 weights and 30 examples."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 4)).double()
    x, y = draw(1, 30, 3), torch.randint(4, (30,), generator=generator(2))
    return lapis.laplace(model, (x, y), "classification", structure=structure, **options), model, x, y


# ----------------------------------------------------------------------------------------------------------
# Every architecture


@every_case
def test_solves_and_variances_are_those_of_the_dense_matrix(name: str) -> None:
    exact = precision(name)
    vector = draw(1, len(exact))
    for space in ("weights", "outputs"):
        close(implicit(name, space).solve(vector), torch.linalg.solve(exact, vector))
    _, x, _, _ = case_data(name)
    latent = implicit(name)._linearised(first_of(x), "full")
    rows = case_jacobians(name)[0].reshape(*latent.mean.shape[1:], -1)
    close(latent.covariance[0], torch.stack([row @ torch.linalg.solve(exact, row.T) for row in rows]))


def first_of(x: Any) -> Any:
    """One example."""
    if isinstance(x, dict):
        return {key: value[:1] for key, value in x.items()}
    return tuple(part[:1] for part in x) if isinstance(x, tuple) else x[:1]


@every_case
def test_draws_have_the_right_covariance_in_either_space(name: str) -> None:
    """G^T is G's adjoint and G^T G the GGN: so Lambda^1/2 e + G^T u has covariance A, and the solve A^-1."""
    exact, curvature = precision(name), implicit(name).curvature
    v, u = draw(2, 1, len(exact)), draw(3, 1, curvature.rows)
    close(curvature.root_transposed(curvature.root(v)), v @ case_ggn(name))
    close((curvature.root(v) * u).sum(), (curvature.root_transposed(u) * v).sum())
    e = draw(4, 1, len(exact))
    target = math.sqrt(PRECISION) * e + curvature.root_transposed(u)
    for space in ("weights", "outputs"):
        close(implicit(name, space).gaussian.draws(e, u).vectors, torch.linalg.solve(exact, target.T).T)
    white = implicit(name).draw(4, generator=generator(5)).deviations @ torch.linalg.cholesky(exact)
    total = float(white.square().sum())
    assert chi2.ppf(5e-7, white.numel()) < total < chi2.isf(5e-7, white.numel())


@every_case
def test_log_determinants_and_traces_lie_within_three_standard_errors(name: str) -> None:
    posterior, exact = implicit(name), precision(name)
    logdet = float(torch.logdet(exact)) - len(exact) * math.log(PRECISION)
    gamma = float(torch.trace(torch.linalg.solve(exact, case_ggn(name))))
    for seed in range(3):
        spectrum = posterior.gaussian.spectrum(8, 24, generator(seed), False)
        found = (spectrum.trace(torch.log), spectrum.trace(lambda t: 1 - 1 / t))
        errors = [abs(float(e.value) - x) for e, x in zip(found, (logdet, gamma), strict=True)]
        bounds = [3 * float(e.standard_error) + float(e.truncation) + 1e-8 for e in found]
        if all(error <= bound for error, bound in zip(errors, bounds, strict=True)):
            return
    pytest.fail(f"{found} against {logdet} and {gamma}")


@every_case
def test_both_objectives_have_the_draw_as_their_minimiser(name: str) -> None:
    """The mean of the minibatch gradients over an epoch is (I + F^T F) y - e - F^T u, zero at the draw."""
    posterior = implicit(name, "weights")
    exact = posterior.draw(2, generator=generator(7))
    root = posterior.gaussian.precision.sqrt()
    somewhere = draw(8, *exact.deviations.shape)
    for objective in ("noisy", "low_noise"):
        descent = descending.Descent(posterior, objective, 2, exact.drawing.seed, 2)
        count = len(descent.parts)
        assert sorted(descent.minibatch(step) for step in range(count)) == list(range(count))
        for y in (exact.deviations * root, somewhere):
            mean = torch.stack([descent.gradient(y, step) for step in range(count)]).mean(0)
            expected = (y / root) @ precision(name) / root - (exact.deviations @ precision(name)) / root
            assert float((mean - expected).abs().max()) <= 1e-8 * float(descent.target.abs().max())


@every_case
def test_low_rank_with_every_eigenpair_is_dense(name: str) -> None:
    model, x, y, spec = case_data(name)
    size = len(precision(name))
    prior = lapis.Prior(PRECISION, "parameter")
    with untouched(model):
        found = lapis.laplace(model, (x, y), spec.build(), structure="lowrank", rank=size, prior=prior)
        latent = found._linearised(x, "full")
    close(found.precision(), precision(name))
    close(found._logdet(), torch.logdet(precision(name)))
    close(found.marginal_variance(), torch.linalg.inv(precision(name)).diagonal())
    covariance = latent.covariance.reshape(-1, *latent.covariance.shape[2:])
    rows = torch.cat([j.reshape(-1, latent.mean.shape[-1], size) for j in case_jacobians(name)])
    close(covariance, rows @ torch.linalg.solve(precision(name), rows.mT))


# ----------------------------------------------------------------------------------------------------------
# One problem in depth


def dense() -> lapis.LaplacePosterior:
    return small_problem("dense")[0]


def test_many_draws_have_the_posterior_covariance_in_every_direction() -> None:
    """Whitened draws (400, 68): each direction's sum of squares is chi-square with 400 degrees of freedom."""
    posterior, *_ = small_problem()
    white = posterior.draw(400, generator=generator(1)).deviations @ torch.linalg.cholesky(dense().precision())
    totals = white.square().sum(0)
    assert float(totals.min()) > chi2.ppf(1e-8, 400)
    assert float(totals.max()) < chi2.isf(1e-8, 400)


def test_samples_in_turn_are_samples_at_once() -> None:
    posterior, *_ = small_problem()
    source = generator(4)
    turn = torch.cat([posterior.sample(1, generator=source) for _ in range(3)])
    close(posterior.sample(3, generator=generator(4)), turn)


def test_log_prob_and_summary_use_the_estimated_determinant() -> None:
    posterior, *_ = small_problem()
    theta = posterior.mean + 0.1 * draw(5, 3, posterior.n_weights)
    shift = posterior.log_prob(theta) - dense().log_prob(theta)
    assert float((shift - shift[0]).abs().max()) < 1e-8
    error = 0.5 * float(posterior._spectrum.trace(torch.log).standard_error)
    assert float(shift[0].abs()) <= 4 * error
    assert "+-" in posterior.summary()


def test_the_space_is_the_smaller_one() -> None:
    posterior, *_ = small_problem()
    assert posterior.curvature.rows == 90
    assert posterior.space == "weights"
    _, model, x, y = small_problem()
    fewer = lapis.laplace(model, (x[:10], y[:10]), "classification", structure="implicit")
    assert fewer.curvature.rows == 30
    assert fewer.space == "outputs"


@pytest.mark.parametrize("space", ["weights", "outputs"])
def test_marginal_variances_lie_within_their_standard_errors(space: Any) -> None:
    """68 t variables with 255 degrees of freedom, each beyond 6 with probability 7e-9: 5e-7 in all."""
    posterior, model, x, y = small_problem()
    dense = lapis.laplace(model, (x, y), "classification", structure="dense").marginal_variance().double()
    found = posterior.with_solver(space=space).marginal_variance_estimate(probes=256, generator=generator(1))
    assert float(((found.value - dense).abs() / found.standard_error).max()) < 6
    assert float(found.standard_error.max()) < 0.1 * float(dense.max())
    close(posterior.marginal_variance(), posterior.marginal_variance_estimate().value)


def test_marginal_variances_without_curvature_are_the_priors() -> None:
    """A network whose outputs ignore the weights: no probe is noisy."""
    model = nn.Linear(3, 1).double()
    posterior = lapis.laplace(
        model, (torch.zeros(4, 3, dtype=torch.float64), draw(1, 4, 1)), "regression", structure="implicit"
    )
    found = posterior.with_prior(4.0).marginal_variance_estimate(probes=2)
    close(found.value[:3], torch.full((3,), 0.25, dtype=torch.float64))
    assert float(found.standard_error.max()) < 1e-12


def test_a_kronecker_preconditioner_changes_the_work_and_not_the_answer() -> None:
    posterior, model, x, y = small_problem(prior=1e-3)
    kronecker = lapis.laplace(model, (x, y), "classification", structure="kronecker")
    helped = posterior.with_solver(preconditioner=kronecker)
    plain, fast = posterior.draw(4), helped.draw(4)
    close(plain.deviations, fast.deviations, 1e-6)
    assert sum(fast.drawing.iterations) < sum(plain.drawing.iterations)


@every_case
def test_a_dual_step_vanishes_at_the_draw_and_keeps_weights_and_dual_variables_together(name: str) -> None:
    """At y = F^T-image of a = u - F y every minibatch's step is zero; elsewhere y - e moves as F^T a does."""
    posterior = implicit(name, "weights")
    exact = posterior.draw(2, generator=generator(7))
    root, size = posterior.gaussian.precision.sqrt(), posterior.n_weights
    descent = descending.Descent(posterior, "dual", 2, exact.drawing.seed, 2)
    assert descent.rows is not None
    y = exact.deviations * root
    pushed = [part.root(y / root) * descent.scale**0.5 for part in descent.parts]
    duals = torch.cat([u - f for u, f in zip(descent.rows, pushed, strict=True)], 1)
    somewhere = draw(8, 2, size + duals.shape[1])
    for step in range(len(descent.parts)):
        assert float(descent.gradient(torch.cat([y, duals], 1), step).abs().max()) <= 1e-7 * float(y.abs().max())
        moved = descent.gradient(somewhere, step)
        pulled = descent._pulled(descent.data, moved[:, size:])
        assert float((pulled - moved[:, :size]).abs().max()) <= 1e-8 * float(moved.abs().max())


@pytest.mark.parametrize("objective", ["noisy", "low_noise", "dual"])
def test_sgd_comes_to_the_draws_that_cg_solves_for(objective: Any) -> None:
    posterior, *_ = small_problem()
    exact = posterior.draw(4, generator=generator(2))
    epochs = 300 if objective == "dual" else 1500
    found = posterior.draw(4, solver="sgd", objective=objective, epochs=epochs, batch_size=15, generator=generator(2))
    error = (found.deviations - exact.deviations).norm() / exact.deviations.norm()
    assert float(error) < {"noisy": 0.05, "low_noise": 0.02, "dual": 0.001}[objective]
    assert max(found.drawing.residuals) < 0.1


@pytest.mark.parametrize(
    ("solver", "stop", "at_once"),
    [("block", 9, 3), ("block", 30, 1), ("cg", 9, 3), ("cg", 30, 1), ("sgd", 90, 3), ("dual", 90, 3)],
)
def test_an_interrupted_draw_goes_on_where_it_stopped(
    solver: Any, stop: int, at_once: int, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With draws made one by one the first is finished by then, and is in the file too."""
    posterior, model, *_ = small_problem()
    monkeypatch.setattr(type(posterior), "vectors_at_once", lambda _: at_once)
    options: dict[str, Any] = {"solver": solver, "generator": None}
    if solver in ("sgd", "dual"):
        options |= {"epochs": 40, "batch_size": 10, "solver": "sgd"}
        options["objective"] = "dual" if solver == "dual" else "low_noise"
    if solver == "block":
        options |= {"error": 1e-6}
    whole = posterior.draw(3, **options)
    name = "root" if solver == "dual" else "product"  # what a step calls
    product, calls = getattr(lapis.curvature.products.ggn.ImplicitCurvature, name), list[int]()

    def interrupted(self: Any, vectors: Tensor) -> Tensor:
        calls.append(len(vectors))
        if len(calls) == stop:
            raise KeyboardInterrupt
        found: Tensor = product(self, vectors)
        return found

    path = tmp_path / "draw.lapis"
    with monkeypatch.context() as patch:
        patch.setattr(lapis.curvature.products.ggn.ImplicitCurvature, name, interrupted)
        with pytest.raises(KeyboardInterrupt):
            posterior.draw(3, **options, checkpoint=path)
    assert path.exists()
    count = len(calls)
    with monkeypatch.context() as patch:
        patch.setattr(lapis.curvature.products.ggn.ImplicitCurvature, name, interrupted)
        resumed = posterior.draw(3, **options, checkpoint=path)
    assert torch.equal(resumed.deviations, whole.deviations)
    assert resumed.drawing == whole.drawing
    if solver in ("sgd", "dual"):
        assert len(calls) - count < 120 - 60
    close(resumed.deviations, whole.deviations)
    one = torch.ones(posterior.n_weights, dtype=torch.float64)
    one[0], one[1] = 1.5, 0.5  # the same sum
    assert bool((posterior.weight_prior.vector() == 1).all())
    for prior in (2.0, lapis.Prior(one, groups="weight")):
        with pytest.raises(lapis.FileError, match="another draw"):
            posterior.with_prior(prior).draw(3, **options, checkpoint=path)
    with pytest.raises(lapis.FileError, match="holds a checkpoint of a draw"):
        lapis.load(path, model)


def test_a_drawn_posterior_predicts_by_its_draws_and_comes_back_from_a_file(tmp_path: Any) -> None:
    posterior, model, x, _ = small_problem()
    drawn = posterior.draw(6)
    drawn.save(tmp_path / "drawn")
    loaded = lapis.load(tmp_path / "drawn", model)
    assert isinstance(loaded, lapis.DrawnPosterior)
    assert loaded.drawing == drawn.drawing
    rows = torch.stack([torch.cat([g.reshape(4, -1) for g in jacobian(model, one)], 1) for one in x[:3]])
    pushed = torch.einsum("bcp,kp->kbc", rows, drawn.deviations)
    close(drawn.functional_variance(x[:3], diagonal=True), pushed.square().mean(0), 1e-10)
    close(loaded.functional_variance(x[:3]), torch.einsum("kbc,kbd->bcd", pushed, pushed) / 6, 1e-10)
    joint = torch.einsum("kbc,kad->bcad", pushed, pushed) / 6
    close(loaded.functional_covariance(x[:3]), joint, 1e-10)
    close(loaded.predict(x).probs, drawn.predict(x).probs)
    sampled = drawn.predict(x[:3], method="sampled")
    assert sampled.latent.values.shape[0] == 6
    assert sorted(map(float, drawn.sample(6)[:, 0])) == sorted(map(float, drawn.deviations[:, 0] + drawn.mean[0]))
    with pytest.raises(lapis.OptionError, match="fewer draws"):
        drawn.sample(7)


def jacobian(model: nn.Module, one: Tensor) -> list[Tensor]:
    names = dict(model.named_parameters())
    found = torch.func.jacrev(lambda p: torch.func.functional_call(model, p, (one[None],))[0])(names)
    return [found[name].detach() for name in names]


def test_an_implicit_posterior_comes_back_with_its_data_only(tmp_path: Any) -> None:
    posterior, model, x, y = small_problem(prior=lapis.Prior(1.5, "layer"), temperature=0.7)
    posterior.save(tmp_path / "file")
    order = torch.randperm(30, generator=generator(1))
    loaded = lapis.load(tmp_path / "file", model, data=(x[order], y[order]))
    vector = draw(6, posterior.n_weights)
    close(loaded.solve(vector), posterior.solve(vector))
    with pytest.raises(lapis.FileError, match="needs its data"):
        lapis.load(tmp_path / "file", model)
    with pytest.raises(lapis.DataError, match="not the data"):
        lapis.load(tmp_path / "file", model, data=(x[:20], y[:20]))
    stored = small_problem("dense")[0]
    stored.save(tmp_path / "dense")
    with pytest.raises(lapis.FileError, match="leave data out"):
        lapis.load(tmp_path / "dense", model, data=(x, y))


def test_changes_of_prior_noise_temperature_and_data_are_those_of_dense() -> None:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(2, 5), nn.Tanh(), nn.Linear(5, 2)).double()
    x, y = draw(1, 20, 2), draw(2, 20, 2)
    pair = [lapis.laplace(model, (x, y), lapis.Gaussian(0.5), structure=s) for s in ("implicit", "dense")]
    vector = draw(3, pair[0].n_weights)
    for change in (
        lambda p: p.with_prior(lapis.Prior([0.5, 2.0], "layer")),
        lambda p: p.with_noise(0.3),
        lambda p: p.with_temperature(0.5),
        lambda p: p.update((x[:5], y[:5] + 1)),
    ):
        one, two = (change(posterior) for posterior in pair)
        close(one.solve(vector), two.solve(vector))
        close(one.functional_variance(x[:2]), two.functional_variance(x[:2]))
        assert one.n_data == two.n_data
        assert one.curvature.digest == two.curvature.digest


def test_single_precision_stays_single() -> None:
    _, model, x, y = small_problem()
    model.float()
    posterior = lapis.laplace(model, (x.float(), y), "classification", structure="implicit")
    drawn = posterior.draw(3)
    assert drawn.deviations.dtype == torch.float32
    exact = lapis.laplace(model, (x.float(), y), "classification", structure="dense")
    found = posterior.functional_variance(x[:3].float())
    close(found.double(), exact.functional_variance(x[:3].float()).double(), 1e-4)


# ----------------------------------------------------------------------------------------------------------
# Low rank


def test_an_adaptive_rank_changes_variances_by_its_fraction_at_most() -> None:
    found, _, x, _ = small_problem("lowrank", prior=3.0)
    exact = small_problem("dense", prior=3.0)[0]
    assert len(found.curvature.blocks[0].values) < 59
    ratio = found.functional_variance(x, diagonal=True) / exact.functional_variance(x, diagonal=True)
    assert float(ratio.min()) > 1 - 1e-8
    assert float(ratio.max()) < 1.0101
    assert "above 0.03" in " ".join(found.choices)


@pytest.mark.parametrize("groups", ["one", "layer", "weight"])
def test_low_rank_closed_forms_agree_with_each_other(groups: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lapis.curvature.blocks.lowrank.COLUMNS", 7)  # draws are coloured in pieces
    found, _, x, _ = small_problem("lowrank", rank=20)
    size = found.n_weights
    precision = {"one": 0.7, "layer": [0.7, 2.0], "weight": draw(7, size).abs() + 0.2}[groups]
    found = found.with_prior(lapis.Prior(precision, groups)).with_temperature(0.8)
    matrix = found.precision()
    close(found._logdet(), torch.logdet(matrix))
    close(found.marginal_variance(), torch.linalg.inv(matrix).diagonal())
    close(found.solve(draw(8, size)), torch.linalg.solve(matrix, draw(8, size)))
    theta = found.mean + draw(9, 2, size)
    expected = torch.distributions.MultivariateNormal(found.mean, precision_matrix=matrix).log_prob(theta)
    close(found.log_prob(theta), expected)
    (gaussian,) = found.gaussians
    root = gaussian.color(torch.eye(size, dtype=torch.float64))
    close(root.T @ root, torch.linalg.inv(gaussian.matrix()))
    joint = found.functional_covariance(x[:3])
    close(joint.diagonal(dim1=0, dim2=2).movedim(-1, 0), found.functional_variance(x[:3]))


def test_low_rank_evidence_is_differentiable_and_tunes_like_dense(tmp_path: Any) -> None:
    found, model, x, y = small_problem("lowrank", rank=68)
    one, two = (p.tune(groups="layer") for p in (found, dense()))
    close(one.weight_prior.precision, two.weight_prior.precision, 1e-5)
    close(one.log_evidence(), two.log_evidence())
    one.save(tmp_path / "file")
    close(lapis.load(tmp_path / "file", model).log_evidence(), one.log_evidence())
    with pytest.raises(lapis.StructureError, match="do not add up"):
        found.update((x, y))


def test_repeated_eigenvalues_are_all_found() -> None:
    """A linear layer with Gaussian noise repeats the spectrum of its inputs once for every output."""
    model = nn.Linear(4, 3).double()
    x = draw(1, 12, 4)
    found = lapis.laplace(model, (x, draw(2, 12, 3)), "regression", structure="lowrank", prior=1e-2)
    assert len(found.curvature.blocks[0].values) == 15
    fifth = lapis.laplace(model, (x, draw(2, 12, 3)), "regression", structure="lowrank", rank=5)
    top = torch.linalg.eigvalsh(found.precision()).flip(0)[:5] - 1e-2
    close(fifth.curvature.blocks[0].values, top)


# ----------------------------------------------------------------------------------------------------------
# Tuning from draws


def regression() -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    x = torch.linspace(-1, 1, 40, dtype=torch.float64)[:, None]
    y = torch.sin(4 * x) + 0.1 * draw(1, 40, 1)
    model = nn.Sequential(nn.Linear(1, 10), nn.Tanh(), nn.Linear(10, 1)).double()
    optimiser = torch.optim.Adam(model.parameters(), 0.02)
    for _ in range(300):
        optimiser.zero_grad()
        (model(x) - y).square().mean().backward()
        optimiser.step()
    return model, x, y


@pytest.mark.parametrize("space", ["weights", "outputs"])
@pytest.mark.parametrize("mode", [False, True])
def test_tuning_from_many_draws_comes_to_the_exact_fixed_point(space: str, mode: bool) -> None:
    """200 draws: gamma, about 8, has a standard error of at most sqrt(2 * 8 / 200) = 0.28; five are allowed."""
    model, x, y = regression()
    found = lapis.laplace(model, (x, y), lapis.Gaussian(0.2), structure="implicit").with_solver(space=space)
    exact = lapis.laplace(model, (x, y), lapis.Gaussian(0.2), structure="dense")
    if mode:
        found, exact = found.at_tangent_mode(), exact.at_tangent_mode((x, y))
    exact = exact.tune(method="fixed_point")
    found = found.tune(samples=200, max_iterations=30, tolerance=1e-4)
    assert found.tuning.converged
    assert len(found.tuning.path) == found.tuning.iterations
    gamma = float(exact.effective_parameters())
    assert abs(found.tuning.gamma[0] - gamma) < 5 * math.sqrt(2 * gamma / 200)
    ratio = float(found.weight_prior.precision / exact.weight_prior.precision)
    assert abs(math.log(ratio)) < 0.25
    assert abs(math.log(float(found.likelihood.noise / exact.likelihood.noise))) < 0.05
    if mode:
        close(found.mode, exact.mode, 0.2)


def test_groups_are_tuned_from_draws_too() -> None:
    model, x, y = regression()
    found = lapis.laplace(model, (x, y), lapis.Gaussian(0.1), structure="implicit")
    exact = lapis.laplace(model, (x, y), lapis.Gaussian(0.1), structure="dense").tune(groups="layer", noise=False)
    found = found.tune(samples=400, groups="layer", noise=False, max_iterations=60)
    logs = (found.weight_prior.precision / exact.weight_prior.precision).log()
    assert float(logs.abs().max()) < 0.35
    with pytest.raises(lapis.OptionError, match="every weight"):
        found.tune(groups="weight")


def test_the_g_prior_is_the_diagonal_of_the_ggn_and_undoes_rescaled_weights() -> None:
    """Each of 31 entries is a mean of 2000 squares, relative error sqrt(2 / 2000); 6 of them: false alarm 6e-8."""
    model, x, y = regression()
    posterior = lapis.laplace(model, (x, y), lapis.Gaussian(0.1), structure="implicit")
    prior = posterior.g_prior(2.0, samples=2000)
    exact = (lapis.laplace(model, (x, y), lapis.Gaussian(0.1), structure="dense").precision().diagonal() - 1) / 40
    assert float((prior.scales / exact - 1).abs().max()) < 6 * math.sqrt(2 / 2000)
    tuned = posterior.with_prior(prior).tune(samples=8)
    assert tuned.weight_prior.scales is not None
    dense_prior = lapis.laplace(model, (x, y), lapis.Gaussian(0.1), structure="dense", prior=prior)
    close(posterior.with_prior(prior).solve(draw(1, 31)), dense_prior.solve(draw(1, 31)))
    close(dense_prior.log_evidence(), posterior.with_prior(prior)._evidence(torch.logdet(dense_prior.precision())))
    with pytest.raises(lapis.PriorError, match="every weight"):
        lapis.laplace(model, (x, y), "regression", structure="kronecker", prior=prior)


# ----------------------------------------------------------------------------------------------------------
# Refusals


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"structure": "implicit", "curvature": "empirical"}, "exact products"),
        ({"structure": "lowrank", "curvature": "sampled"}, "exact products"),
        ({"structure": "implicit", "rank": 3}, "no meaning"),
        ({"structure": "lowrank", "rank": 0}, "Bad rank"),
        ({"structure": "lowrank", "rank": 60, "memory_budget": 100_000}, "do not fit"),
    ],
)
def test_bad_options_of_a_fit_are_refused(options: dict[str, Any], match: str) -> None:
    _, model, x, y = small_problem()
    with pytest.raises(lapis.LapisError, match=match):
        lapis.laplace(model, (x, y), "classification", **options)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"solver": "adam"}, "Unknown solver"),
        ({"solver": "block", "objective": "noisy"}, "no objective"),
        ({"error": 0.1, "epochs": 3}, "no epochs"),
        ({"solver": "sgd", "objective": "quiet"}, "Unknown objective"),
        ({"solver": "sgd", "epochs": 0}, "Bad epochs"),
        ({"samples": 0}, "Bad samples"),
        ({"solver": "cg", "error": 0.1}, "error of their variances"),
        ({"solver": "block", "error": 0.0}, "error"),
        ({"solver": "block", "clip": 1.0}, "no clip"),
    ],
)
def test_bad_options_of_a_draw_are_refused(options: dict[str, Any], match: str) -> None:
    posterior, *_ = small_problem()
    with pytest.raises(lapis.OptionError, match=match):
        posterior.draw(**options)


def test_a_solve_that_ends_early_and_a_network_that_changed_are_told() -> None:
    posterior, model, *_ = small_problem(prior=1e-4)
    with pytest.warns(lapis.LapisWarning, match="relative residual"):
        posterior.with_solver(max_iterations=2).solve(draw(1, 68))
    with pytest.warns(lapis.LapisWarning, match="not yet draws"):
        posterior.draw(2, solver="sgd", epochs=1, batch_size=10)
    with pytest.raises(lapis.OptionError, match="Unknown space"):
        posterior.with_solver(space="moon")
    with torch.no_grad():
        model[0].bias += 1
    with pytest.raises(lapis.ModelError, match="changed"):
        posterior.draw(2)


def test_training_by_the_evidence_refuses_an_evidence_without_gradient() -> None:
    _, model, x, y = small_problem()
    with pytest.raises(lapis.OptionError, match="gradient"):
        lapis.train(model, (x, y), "classification", structure="implicit", epochs=1)


def test_all_kinds_of_posterior_are_compared() -> None:
    kinds = {structure: small_problem(structure)[0] for structure in ("dense", "lowrank", "implicit")}
    found = lapis.compare(kinds)
    assert abs(found.log_evidence[0] - found.log_evidence[1]) < 0.1
    error = float(kinds["implicit"].log_evidence_estimate().standard_error)
    assert abs(found.log_evidence[0] - found.log_evidence[2]) < 4 * error


@pytest.mark.parametrize("slope", [-1.4, -0.6, 0.0, 0.45])
def test_rounds_of_draws_make_up_for_the_slope_of_the_iteration(slope: float) -> None:
    """x <- g(x) with a straight g and slope within the bounds: at the fixed point in the third round, however steep."""
    fixed = torch.tensor([1.0, -2.0], dtype=torch.float64)
    x, before = torch.tensor([3.0, 0.5], dtype=torch.float64), None
    for _ in range(2):
        target = fixed + slope * (x - fixed)
        step = stretch(before, x, target) * (target - x)
        x, before = x + step, (x, target)
    torch.testing.assert_close(x, fixed, rtol=1e-12, atol=1e-12)
    assert bool((stretch(before, x, x) <= 2).all())


def test_steep_rounds_of_draws_stay_within_bounds() -> None:
    before = torch.tensor([0.0, 0.0, 1.0], dtype=torch.float64), torch.tensor([1.0, 0.0, 5.0], dtype=torch.float64)
    here, there = torch.ones(3, dtype=torch.float64), torch.tensor([9.0, -99.0, 7.0], dtype=torch.float64)
    assert stretch(before, here, there).tolist() == [2.0, 0.4, 1.0]
    assert stretch(None, here, there).tolist() == [1.0, 1.0, 1.0]


def test_solves_that_rounding_stops_near_the_default_tolerance_are_not_warned_of() -> None:
    """A tolerance of one's own is held to."""
    model, data = nn.Linear(3, 1), (torch.randn(9, 3), torch.randn(9, 1))
    posterior = lapis.laplace(model, data, "regression", structure="implicit", weights="all")
    done = posterior.gaussian.solve(torch.randn(1, 4))

    def stagnated(residual: float) -> Solved:
        stopped = replace(
            done.result,
            relative_residuals=torch.tensor([residual]),
            stopped=("stagnated",),
        )
        return Solved(done.vectors, stopped)

    assert posterior.solved(stagnated(5e-5)) is done.vectors
    for asked, residual in ((posterior, 2e-4), (posterior.with_solver(tolerance=1e-5), 5e-5)):
        with pytest.warns(lapis.LapisWarning, match="stagnated"):
            asked.solved(stagnated(residual))
