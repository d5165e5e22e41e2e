"""Valid calls at the edge of what numbers allow: the answer is right, or an error or a warning says that it is not."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lapis
from lapis.errors import DataError, LapisError, ModelError, NotPositiveDefiniteError
from lapis.posteriors.laplace.tuning import by_evidence
from lapis.predictions import LatentSamples, predict

F32, F64 = torch.float32, torch.float64
STRUCTURES = ["dense", "diagonal", "kronecker", "ekfac", "lowrank", "implicit"]
STORED = STRUCTURES[:-1]


def mlp(outputs: int = 2, dtype: torch.dtype = F64) -> nn.Module:
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, outputs)).to(dtype)


def data(n: int = 20, outputs: int = 2, dtype: torch.dtype = F64, seed: int = 1) -> tuple[Tensor, Tensor]:
    source = torch.Generator().manual_seed(seed)
    x, y = torch.randn(n, 3, generator=source, dtype=F64), torch.randn(n, outputs, generator=source, dtype=F64)
    return x.to(dtype), y.to(dtype)


def answers(posterior: Any, x: Tensor) -> list[Tensor]:
    """Evidence, predictive variance and a draw."""
    return [posterior.log_evidence(), posterior.predict(x).variance, posterior.sample(1)]


def assert_same(some: list[Tensor], others: list[Tensor]) -> None:
    for one, other in zip(some, others, strict=True):
        torch.testing.assert_close(one, other)


# likelihoods -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spread", [1.0, 30.0, 100.0, 300.0])
def test_the_softmax_factor_is_finite_and_right_in_float32(spread: float) -> None:
    f = spread * torch.randn(300, 1, 5, generator=torch.Generator().manual_seed(0))
    f[0, 0] = torch.tensor([-200.0, -100.0, 0.0, -150.0, -50.0])
    s = lapis.Categorical().factor(f, torch.zeros(300, 1, dtype=torch.long)).double()
    p = f.double().softmax(-1)
    torch.testing.assert_close(s @ s.mT, torch.diag_embed(p) - p[..., None] * p[..., None, :], rtol=1e-5, atol=1e-7)


# the surroundings of a call ----------------------------------------------------------------------------


class CastsItself(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            found: Tensor = self.inner(x)
        return found


@pytest.mark.parametrize("structure", STRUCTURES)
def test_autocast_changes_nothing_around_a_call_or_in_forward(structure: str) -> None:
    model, (x, y) = mlp(dtype=F32), data(dtype=F32)
    plain = answers(lapis.laplace(model, (x, y), "regression", structure=structure), x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        around = answers(lapis.laplace(model, (x, y), "regression", structure=structure), x)
        assert torch.is_autocast_enabled("cpu")
    inside = answers(lapis.laplace(CastsItself(model), (x, y), "regression", structure=structure), x)
    assert_same(around, plain)
    assert_same(inside, plain)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("structure", STRUCTURES)
def test_half_precision_is_as_good_as_its_digits_or_refused(structure: str, dtype: torch.dtype) -> None:
    model, (x, y) = mlp(dtype=dtype), data(dtype=dtype)
    if structure in ("lowrank", "implicit"):
        with pytest.raises(ModelError, match=r"too inexact.*model\.float\(\)"):
            lapis.laplace(model, (x, y), "regression", structure=structure)
        return
    found = lapis.laplace(model, (x, y), "regression", structure=structure)
    exact = lapis.laplace(copy.deepcopy(model).double(), (x.double(), y.double()), "regression", structure=structure)
    assert not found.curvature.tape.plan.general  # the layers' rules hold, or the structure would be another
    torch.testing.assert_close(found.log_evidence(), exact.log_evidence(), rtol=0, atol=0.3)


@pytest.mark.filterwarnings("ignore:Training found nothing:lapis.errors.LapisWarning")
@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_training_and_tuning_work_where_gradients_are_switched_off(
    context: Callable[[], AbstractContextManager[None]],
) -> None:
    model, (x, y) = mlp(1), data(outputs=1)
    plain = lapis.train(copy.deepcopy(model), (x, y), "regression", epochs=4, progress=False)
    with context():
        found = lapis.train(model, (x, y), "regression", epochs=4, progress=False)
        torch.testing.assert_close(found.tune().log_evidence(), plain.tune().log_evidence())


@pytest.mark.filterwarnings("ignore:Tuning .*:lapis.errors.LapisWarning")
@pytest.mark.parametrize("structure", STRUCTURES)
def test_posteriors_work_in_inference_mode_and_remain_usable_outside(structure: str) -> None:
    """What is computed and kept inside, eigenvectors say, must be no inference tensor: autograd refuses these later."""
    model, (x, y) = mlp(1), data(outputs=1)
    uses: tuple[Callable[[lapis.LaplacePosterior], Tensor], ...] = (
        lambda p: p.predict(x).f_variance, lambda p: p.sample(2), lambda p: p.log_prob(p.mean),
        lambda p: p.gaussian_process().kernel(x[:3]), lambda p: p.marginal_variance(), lambda p: p.log_evidence(),
        lambda p: p.tune(method="draws" if structure == "implicit" else "gradient", max_iterations=3).log_evidence(),
    )  # fmt: skip
    outside = lapis.laplace(model, (x, y), "regression", structure=structure)
    expected = [use(outside) for use in uses]
    with torch.inference_mode():
        inside = lapis.laplace(model, (x * 1, y * 1), "regression", structure=structure)
        for use, value in zip(uses, expected, strict=True):
            torch.testing.assert_close(use(inside), value)
        inside.calibrate((x + 0.1, y * 1))
    for use, value in zip(reversed(uses), reversed(expected), strict=True):
        torch.testing.assert_close(use(inside), value)


def test_data_and_weights_made_in_inference_mode() -> None:
    x, y = data(outputs=1)
    with torch.inference_mode():
        inside = mlp(1), x * 1, y * 1
    model = copy.deepcopy(inside[0])
    expected = lapis.laplace(model, (x, y), "regression").predict(x).f_variance
    assert torch.equal(lapis.laplace(model, inside[1:], "regression").predict(inside[1]).f_variance, expected)
    with pytest.raises(ModelError, match="made outside"):
        lapis.train(inside[0], (x, y), "regression", epochs=2, progress=False)


# networks ----------------------------------------------------------------------------------------------


class WithAnEmptyParameter(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.none = inner, nn.Parameter(torch.zeros(0, 3, dtype=F64))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.inner(x) + self.none.sum()
        return found


@pytest.mark.parametrize("structure", STRUCTURES)
def test_empty_parameters_are_no_weights(structure: str) -> None:
    model, (x, y) = mlp(), data()
    found = lapis.laplace(WithAnEmptyParameter(model), (x, y), "regression", structure=structure)
    assert_same(answers(found, x), answers(lapis.laplace(model, (x, y), "regression", structure=structure), x))


@pytest.mark.parametrize("structure", STRUCTURES)
def test_a_bias_alone_can_be_uncertain(structure: str) -> None:
    model, (x, y) = nn.Linear(3, 2).double(), data()
    found = lapis.laplace(model, (x, y), "regression", weights=["bias"], structure=structure)
    torch.testing.assert_close(found.functional_variance(x, diagonal=True), torch.full((20, 2), 1 / 21, dtype=F64))


def test_a_network_without_values_is_refused() -> None:
    with pytest.raises(ModelError, match=r"meta device.*load_state_dict"):
        lapis.laplace(nn.Linear(3, 2, device="meta").double(), data(), "regression")


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@pytest.mark.parametrize("convert", [Tensor.to_sparse, Tensor.to_sparse_csr])
def test_sparse_inputs_are_refused_with_the_remedy(convert: Callable[[Tensor], Tensor]) -> None:
    model, (x, y) = mlp(), data()
    posterior = lapis.laplace(model, (x, y), "regression")
    calls: list[Callable[[], Any]] = [
        lambda: lapis.laplace(model, (convert(x), y), "regression"),
        lambda: lapis.laplace(model, (x, convert(y)), "regression"),
        lambda: posterior.predict(convert(x)),
        lambda: posterior.update((convert(x), y)),
    ]
    for call in calls:
        with pytest.raises(DataError, match=r"not dense.*to_dense"):
            call()


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("slopes", [1, 3])
def test_prelu_with_positive_inputs_only_counts_as_weights_without_effect(structure: str, slopes: int) -> None:
    x, y = data(outputs=1)
    model = nn.Sequential(nn.Linear(3, 3), nn.PReLU(slopes), nn.Linear(3, 1)).double()
    with torch.no_grad():
        model.get_parameter("0.bias").fill_(50.0)
    plain = nn.Sequential(model[0], nn.ReLU(), model[2])
    found = lapis.laplace(model, (x, y), lapis.Gaussian(30.0), structure=structure)
    exact = lapis.laplace(plain, (x, y), lapis.Gaussian(30.0), structure=structure)
    torch.testing.assert_close(found.functional_variance(x), exact.functional_variance(x))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.head = nn.MultiheadAttention(2, 1, batch_first=True), nn.Linear(2, 1)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(self.attention(x, x, x, need_weights=False)[0].mean(1))
        return found


def test_the_hessian_of_attention_is_the_one_by_double_differentiation() -> None:
    model = Attention().double()
    x, y = torch.randn(4, 3, 2, dtype=F64), torch.randn(4, 1, dtype=F64)
    posterior = lapis.laplace(model, (x, y), "regression", structure="dense", curvature="hessian", prior=100.0)
    names = [name for name, _ in model.named_parameters()]

    def loss(flat: Tensor) -> Tensor:
        shapes = [p.shape for p in model.parameters()]
        parts = torch.split(flat, [shape.numel() for shape in shapes])
        values = {n: part.reshape(shape) for n, part, shape in zip(names, parts, shapes, strict=True)}
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            f: Tensor = torch.func.functional_call(model, values, (x,))
        return 0.5 * (f - y).square().sum()

    flat = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    exact = torch.autograd.functional.hessian(loss, flat)  # type: ignore[no-untyped-call]
    torch.testing.assert_close(posterior.precision() - 100 * torch.eye(len(flat), dtype=F64), exact)


class FusedAttention(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        h = super().forward(x)[:, None, None]
        found: Tensor = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(h, h, h)[0][:, 0, 0]
        return found


def test_a_hessian_that_torch_cannot_compute_is_an_error_with_the_remedy() -> None:
    with pytest.raises(LapisError, match=r'second derivatives.*curvature="ggn"'):
        lapis.laplace(FusedAttention(3, 2).double(), data(), "regression", structure="dense", curvature="hessian")


# draws -------------------------------------------------------------------------------------------------


def in_parts(x: Tensor, y: Tensor, size: int, order: Tensor) -> list[tuple[Tensor, Tensor]]:
    return list(zip(torch.split(x[order], size), torch.split(y[order], size), strict=True))


PRIORS = {"one": lapis.Prior(2.0), "own for biases": lapis.Prior(2.0, groups="parameter")}


@pytest.mark.parametrize("dtype", [F64, F32])
@pytest.mark.parametrize("bias", ["joint", "separate"])
@pytest.mark.parametrize("structure", ["kronecker", "ekfac"])
@pytest.mark.parametrize("prior", PRIORS)
def test_draws_do_not_depend_on_batches_or_the_order_of_data(
    prior: str, structure: str, bias: Any, dtype: torch.dtype
) -> None:
    """Four examples for layers of more inputs: eigenvalues repeat, and their eigenvectors are arbitrary."""
    model, (x, y) = nn.Sequential(nn.Linear(3, 6), nn.ReLU(), nn.Linear(6, 2)).to(dtype), data(4, dtype=dtype)
    found = [
        lapis.laplace(
            model, in_parts(x, y, size, order), "regression", structure=structure, bias=bias, prior=PRIORS[prior]
        )
        for size, order in ((4, torch.arange(4)), (1, torch.tensor([2, 0, 3, 1])), (3, torch.tensor([3, 2, 1, 0])))
    ]
    tolerance = 1e-9 if dtype == F64 else 1e-4
    for other in found[1:]:
        torch.testing.assert_close(other.sample(3), found[0].sample(3), rtol=tolerance, atol=tolerance)
        predicted = other.predict(x, method="sampled", samples=3).f_variance
        torch.testing.assert_close(predicted, found[0].predict(x, method="sampled", samples=3).f_variance)


@pytest.mark.parametrize("structure", ["kronecker", "ekfac"])
def test_signs_of_eigenvectors_are_fixed_in_large_blocks_too(structure: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lapis.curvature.blocks.kronecker.eigenbasis.SYMMETRIC_ROOT", 0)
    model, (x, y) = mlp(), data(40)
    order = torch.randperm(40, generator=torch.Generator().manual_seed(0))
    one = lapis.laplace(model, in_parts(x, y, 40, torch.arange(40)), "regression", structure=structure)
    other = lapis.laplace(model, in_parts(x, y, 7, order), "regression", structure=structure)
    torch.testing.assert_close(one.sample(3), other.sample(3), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("prior", PRIORS)
@pytest.mark.parametrize("structure", ["kronecker", "ekfac"])
def test_rotated_noise_is_drawn_with_the_posteriors_covariance(structure: str, prior: str) -> None:
    x, y = data(30)
    posterior = lapis.laplace(mlp(), (x, y), "regression", structure=structure, prior=PRIORS[prior])
    for gaussian, block in zip(posterior.gaussians, posterior.curvature.blocks, strict=True):
        root = gaussian.color(torch.eye(block.size, dtype=F64))  # row i is the draw of unit noise i
        torch.testing.assert_close(root.mT @ root, gaussian.solve(torch.eye(block.size, dtype=F64)))
        if prior == "one":
            torch.testing.assert_close(root, root.mT)


# float32 -----------------------------------------------------------------------------------------------


def in_both(
    structure: str, seed: int, *, noise: float = 1.0, scale: float = 1.0, examples: int = 40, copies: int = 1
) -> tuple[Tensor, Tensor]:
    """Output variances of one small network in float32 and in float64, at and beyond its data."""
    torch.manual_seed(seed)
    model, (x, y) = mlp(dtype=F32), data(examples, dtype=F32, seed=seed)
    found = []
    for dtype in (F32, F64):
        own, a, b = copy.deepcopy(model).to(dtype), (scale * x).to(dtype), y.to(dtype)
        batches = [(a.repeat(copies, 1), b.repeat(copies, 1))] * (4 if copies > 1 else 1)
        posterior = lapis.laplace(own, batches, lapis.Gaussian(noise), structure=structure)
        found.append(posterior.functional_variance(torch.cat([a, 2 * a, 0.3 * scale - a]), diagonal=True).double())
    return found[0], found[1]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("structure", "noise", "scale"),
    [
        ("dense", 1e-3, 1.0),
        ("dense", 1e-4, 1.0),
        ("lowrank", 1e-4, 1.0),
        ("lowrank", 1.0, 1e4),
        ("kronecker", 1e-3, 1.0),
    ],
)
def test_float32_variances_are_right_under_little_noise_and_large_inputs(
    structure: str, noise: float, scale: float, seed: int
) -> None:
    found, exact = in_both(structure, seed, noise=noise, scale=scale)
    torch.testing.assert_close(found, exact, rtol=0.01, atol=0)


@pytest.mark.parametrize("structure", ["kronecker", "ekfac", "dense"])
def test_float32_variances_are_right_on_few_points_copied_often(structure: str) -> None:
    found, exact = in_both(structure, 0, examples=5, copies=5000)
    torch.testing.assert_close(found, exact, rtol=0.01, atol=0)


def test_lowrank_from_few_rows_or_from_few_weights_is_the_exact_decomposition() -> None:
    for examples in (4, 60):  # fewer outputs than weights, and more
        model, (x, y) = mlp(dtype=F32), data(examples, dtype=F32)
        posterior = lapis.laplace(model, (x, y), "regression", structure="lowrank", prior=1e-6)
        exact = lapis.laplace(copy.deepcopy(model).double(), (x.double(), y.double()), "regression", structure="dense")
        values = torch.linalg.eigvalsh(exact.precision() - torch.eye(exact.n_weights, dtype=F64)).flip(0)
        (block,) = posterior.curvature.blocks
        assert len(block.values) == int((values > 1e-8).sum())
        torch.testing.assert_close(block.values, values[: len(block.values)], rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(block.vectors @ block.vectors.mT, torch.eye(len(block.values), dtype=F64))


def test_lowrank_says_what_float32_products_lose(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lapis.curvature.blocks.leading.FEW", 0)
    (x, y), noise = data(40, dtype=F32), lapis.Gaussian(1e-4)
    with pytest.warns(lapis.LapisWarning, match=r"lost in torch.float32.*model\.double\(\)"):
        lapis.laplace(nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2)), (x, y), noise, structure="lowrank")


@pytest.mark.parametrize("structure", ["dense", "packed", "kronecker"])
def test_sums_in_float32_that_the_prior_cannot_bear_are_told(
    structure: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Wide layers are summed in float32; here every layer counts as wide. Files remember."""
    packed = structure == "packed"
    if packed:
        monkeypatch.setattr("lapis.curvature.blocks.partition.PACKED", 1)
    noise = 0.01 if packed else torch.tensor([0.01, 0.02])  # for which outputs are kept apart
    monkeypatch.setattr("lapis.curvature.blocks.dense.gram.EXACT_SIZE", 0)
    monkeypatch.setattr("lapis.curvature.blocks.kronecker.factors.EXACT_WIDTH", 0)
    x, y = data(200, dtype=F32)
    model = mlp(dtype=F32)
    fine = lapis.laplace(model, (x, y), "regression", structure="dense" if packed else structure)
    assert fine.predict(x).f_variance.isfinite().all()
    poor = fine.with_noise(0.01).with_prior(1e-3)
    poor.save(tmp_path / "poor")
    fine.save(tmp_path / "fine")
    lapis.load(tmp_path / "fine", model).predict(x)
    for use in (
        lambda: poor.with_prior(1e-3).sample(1),
        lambda: poor.predict(x),
        lambda: poor.update((x, y)).predict(x),
        lambda: lapis.load(tmp_path / "poor", model).predict(x),
        lambda: lapis.load(tmp_path / "fine", model).with_noise(noise).with_prior(1e-3).sample(1),
    ):
        with pytest.warns(lapis.LapisWarning, match=r"summed in torch.float32.*model\.double\(\)"):
            use()


def test_a_ggn_that_rounds_to_indefinite_does_not_advise_the_ggn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lapis.curvature.blocks.dense.gram.EXACT_SIZE", 0)
    x, y = data(12, dtype=F32)
    twice = (x.repeat(2, 1), y.repeat(2, 1))  # 24 rows an output, of rank 12
    posterior = lapis.laplace(mlp(dtype=F32), twice, lapis.Gaussian(1e-5), structure="dense", prior=1e-6)
    with pytest.raises(NotPositiveDefiniteError, match=r"after rounding.*model\.double\(\)") as caught:
        posterior.solve(torch.ones(posterior.n_weights))
    assert "ggn" not in str(caught.value)


# derivatives that do not exist -------------------------------------------------------------------------


class Root(nn.Module):
    """sqrt |x w|: finite everywhere, and without a derivative at x = 0."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, 1, dtype=F64))

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.weight).abs().sqrt()


@pytest.mark.parametrize("dtype", [torch.float32, F64])
@pytest.mark.parametrize("structure", STRUCTURES)
def test_gradients_that_are_not_finite_are_errors(structure: str, dtype: torch.dtype) -> None:
    x, y = (part.to(dtype) for part in data(6, 1))
    bad = x.clone()
    bad[2] = 0
    with pytest.raises(LapisError, match="not finite"):
        lapis.laplace(Root().to(dtype), (bad, y), "regression", structure=structure).log_evidence()
    posterior = lapis.laplace(Root().to(dtype), (x, y), "regression", structure=structure)
    for use in (posterior.predict, posterior.functional_variance, posterior.functional_covariance):
        with pytest.raises(ModelError, match="not finite"):
            use(bad)
    assert posterior.predict(x).f_variance.isfinite().all()


@pytest.mark.parametrize("structure", STRUCTURES)
def test_hooks_on_weights_do_not_enter_the_jacobian(structure: str) -> None:
    model, (x, y) = mlp(), data()
    plain = lapis.laplace(model, (x, y), "regression", structure=structure)
    handle = model.get_parameter("0.weight").register_hook(lambda g: 3 * g)
    assert_same(answers(lapis.laplace(model, (x, y), "regression", structure=structure), x), answers(plain, x))
    assert handle.id in model.get_parameter("0.weight")._backward_hooks  # type: ignore[operator]


# evidence and predictions ------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:Tuning stopped before it converged:lapis.errors.LapisWarning")
@pytest.mark.parametrize("structure", ["dense", "diagonal"])
def test_the_record_of_tuning_is_the_evidence_of_the_result(structure: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where theta* is not unique: here the mode that is found last is another than those of the search."""
    x, y = data(15, 1)
    start = lapis.laplace(mlp(2), (x, y), "heteroscedastic", structure=structure).at_tangent_mode((x, y))
    found = start.tune(max_iterations=2)
    assert found.tuning is not None
    torch.testing.assert_close(torch.tensor(found.tuning.log_evidence, dtype=F64), found.log_evidence())
    original, calls = by_evidence.at_mode, []

    def elsewhere(posterior: Any, problem: Any, begin: Any = None, *, anywhere: bool = False) -> Any:
        mode = original(posterior, problem, begin, anywhere=anywhere)
        calls.append(mode)
        return replace(mode, tangent=replace(mode.tangent, weights=mode.tangent.weights + 0.1 * len(calls)))

    monkeypatch.setattr(by_evidence, "at_mode", elsewhere)
    found = start.tune(max_iterations=2)
    assert found.tuning is not None
    torch.testing.assert_close(torch.tensor(found.tuning.log_evidence, dtype=F64), found.log_evidence())


TARGETS: dict[str, Callable[[Tensor], Tensor]] = {
    "regression": lambda y: y,
    "heteroscedastic": lambda y: y[:, :1],
    "classification": lambda y: y.argmax(1),
    "binary": lambda y: (y > 0).double(),
    "poisson": lambda y: y.abs().round(),
}
"""Targets of every likelihood for a network with two outputs."""


@pytest.mark.filterwarnings("ignore::lapis.errors.LapisWarning")  # two iterations are not enough, and need not be
@pytest.mark.parametrize("likelihood", TARGETS)
@pytest.mark.parametrize("structure", STORED)
def test_records_of_tuning_are_evidences_for_every_likelihood_and_structure(structure: str, likelihood: str) -> None:
    """At the trained weights and at theta*, with the noise tuned where there is one."""
    x, y = data(12)
    both = (x, TARGETS[likelihood](y))
    fitted = lapis.laplace(mlp(), both, likelihood, structure=structure)
    for start in (fitted, fitted.at_tangent_mode(both)):
        found = start.tune(max_iterations=2)
        assert found.tuning is not None
        record = torch.tensor([found.tuning.log_evidence, found.tuning.trace[-1]], dtype=F64)
        torch.testing.assert_close(record, found.log_evidence().detach().expand(2), rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(
            torch.tensor(found.tuning.gamma, dtype=F64),
            found.effective_parameters(per_group=True),
            rtol=1e-6,
            atol=1e-8,
        )


def test_covariances_by_inexact_solves_are_positive_semi_definite() -> None:
    x, y = data(12, 4, dtype=F32)
    posterior = lapis.laplace(mlp(4, F32), (x, y), lapis.Gaussian(1e-3), structure="implicit", prior=1e-2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", lapis.LapisWarning)  # that solves did not converge
        loose = posterior.with_solver(max_iterations=3)
        each, joint = loose.functional_variance(x), loose.functional_covariance(x).reshape(48, 48)
    for matrix in (each.double(), joint.double()):
        values = torch.linalg.eigvalsh(matrix)
        assert bool((values[..., 0] >= -1e-6 * values[..., -1]).all())


def test_sampled_counts_of_huge_rates_are_infinite_and_not_nan() -> None:
    latent = LatentSamples(torch.tensor([[0.0, 3.0], [900.0, 3.0], [1000.0, 3.0]], dtype=F64)[..., None, None])
    found = predict(lapis.Poisson(), latent)
    with pytest.warns(lapis.LapisWarning, match="of 1 of 2 counts are so uncertain"):
        assert found.mean.flatten().isinf().tolist() == [True, False]
    for value in (found.variance, found.std, *found.interval()):
        assert not value.isnan().any()
    small = LatentSamples(torch.randn(50, 4, 1, 2, dtype=F64))
    rates = small.values.exp()
    torch.testing.assert_close(predict(lapis.Poisson(), small).mean, rates.mean(0)[:, 0])
    torch.testing.assert_close(predict(lapis.Poisson(), small).epistemic_variance, rates.var(0, unbiased=False)[:, 0])
    same = LatentSamples(torch.full((3, 1, 1, 1), 800.0, dtype=F64))
    with pytest.warns(lapis.LapisWarning, match="of 1 of 1 counts"):
        assert float(predict(lapis.Poisson(), same).epistemic_variance) == 0


# noise -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("structure", STRUCTURES)
def test_a_noise_for_other_outputs_is_refused_at_once(structure: str) -> None:
    posterior = lapis.laplace(mlp(), data(), "regression", structure=structure)
    for noise in (torch.ones(3), torch.ones(1), torch.tensor([1.0, 2.0, 3.0])):
        with pytest.raises(LapisError, match=r"noise.*2 \(one per output\)"):
            posterior.with_noise(noise)


@pytest.mark.parametrize("structure", STRUCTURES)
def test_a_noise_for_each_output_can_be_tuned(structure: str) -> None:
    x, y = data(40)
    likelihood = lapis.Gaussian(torch.tensor([0.5, 1.0], dtype=F64))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", lapis.LapisWarning)  # proportions that lowrank and implicit keep
        found = lapis.laplace(mlp(), (x, y), likelihood, structure=structure).tune(max_iterations=8)
    assert found.likelihood.noise is not None
    assert found.likelihood.noise.shape == (2,)


# tiny problems -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [F64, F32])
@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("kind", ["regression", "classification"])
def test_one_example_is_enough(structure: str, kind: str, dtype: torch.dtype) -> None:
    model, (x, y) = mlp(dtype=dtype), data(1, dtype=dtype)
    target = y if kind == "regression" else torch.tensor([1])
    posterior = lapis.laplace(model, (x, target), kind, structure=structure).at_tangent_mode((x, target))
    exact = lapis.laplace(copy.deepcopy(model).double(), (x.double(), target), kind, structure="dense")
    exact = exact.at_tangent_mode((x.double(), target))
    if structure in ("dense", "lowrank"):
        torch.testing.assert_close(posterior.log_evidence(), exact.log_evidence(), rtol=1e-5, atol=1e-5)
    assert posterior.predict(x).f_variance.isfinite().all()


def test_lowrank_without_a_leading_eigenvalue_is_the_prior() -> None:
    x, y = data()
    for dtype in (F32, F64):
        model = mlp(dtype=dtype)
        posterior = lapis.laplace(model, (x.to(dtype), y.to(dtype)), "regression", structure="lowrank", prior=1e9)
        assert len(posterior.curvature.blocks[0].state()["values"]) == 0
        torch.testing.assert_close(posterior.marginal_variance(), torch.full((32,), 1e-9, dtype=dtype))
        assert posterior.predict(x.to(dtype)).f_variance.isfinite().all()
        assert posterior.functional_covariance(x.to(dtype)).isfinite().all()
        assert posterior.sample(2).isfinite().all()
        assert posterior.log_evidence().isfinite()
        at = posterior.at_tangent_mode((x.to(dtype), y.to(dtype)))
        assert at.log_evidence().isfinite()
