"""Valid calls at the edge of what numbers allow: the answer is right, or an error or a warning says that it is not."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lapis
from lapis.errors import DataError, LapisError, ModelError

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
def test_training_and_tuning_work_without_gradients_or_say_why_not(
    context: Callable[[], AbstractContextManager[None]],
) -> None:
    model, (x, y) = mlp(1), data(outputs=1)
    plain = lapis.train(copy.deepcopy(model), (x, y), "regression", epochs=4, progress=False)
    if context is torch.no_grad:
        with context():
            found = lapis.train(model, (x, y), "regression", epochs=4, progress=False)
            torch.testing.assert_close(found.tune().log_evidence(), plain.tune().log_evidence())
        return
    with context(), pytest.raises(ModelError, match="inference mode"):
        lapis.train(model, (x, y), "regression", epochs=4, progress=False)
    with context(), pytest.raises(ModelError, match="inference mode"):
        plain.tune()


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
    monkeypatch.setattr("lapis.curvature.blocks.eigenbasis.SYMMETRIC_ROOT", 0)
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
