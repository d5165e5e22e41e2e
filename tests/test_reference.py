"""The references of reference.py against formulas done by hand, the table of cases against its promises."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import reference
from cases import (
    CASES,
    F64,
    LikelihoodSpec,
    bernoulli,
    call,
    categorical,
    gaussian,
    heteroscedastic,
    poisson,
    take,
)

pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
TIGHT = {"rtol": 1e-11, "atol": 1e-11}
every_case = pytest.mark.parametrize("name", CASES)


def linear_problem(outputs: int, spec: LikelihoodSpec) -> tuple[nn.Linear, Tensor, Tensor, Tensor, Tensor]:
    """A linear model with data: (model, x, y, x with a column of ones, outputs f)."""
    generator = torch.Generator().manual_seed(0)
    model = nn.Linear(3, outputs, dtype=F64)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=F64))
    x = torch.randn(7, 3, generator=generator, dtype=F64)
    f = model(x).detach()
    return model, x, spec.targets(generator, f), torch.cat([x, torch.ones(7, 1, dtype=F64)], 1), f


def weights_then_bias(matrix: Tensor, outputs: int) -> Tensor:
    """From the order (output, [inputs, 1]) of a Kronecker product to the order of nn.Linear's parameters."""
    index = torch.arange(outputs * 4).reshape(outputs, 4)
    order = torch.cat([index[:, :3].reshape(-1), index[:, 3]])
    return matrix[order][:, order]


def summed(h: Tensor, x: Tensor) -> Tensor:
    """sum_n kron(H_n, x_n x_n^T) in nn.Linear's order."""
    total = sum(torch.kron(h_n, torch.outer(x_n, x_n)) for h_n, x_n in zip(h, x, strict=True))
    return weights_then_bias(total, h.shape[1])


@pytest.mark.parametrize("noise", [0.7, [0.5, 2.0]])
def test_ggn_of_linear_regression_is_the_normal_matrix(noise: float | list[float]) -> None:
    spec = gaussian(noise)
    model, x, y, ones, _ = linear_problem(2, spec)
    precision = torch.diag(torch.tensor(noise, dtype=F64).expand(2) ** -2)
    by_hand = weights_then_bias(torch.kron(precision, ones.T @ ones), 2)
    torch.testing.assert_close(reference.ggn(model, x, y, spec), by_hand, **TIGHT)


def test_ggn_of_logistic_regression_weighs_inputs_by_the_variance_of_the_label() -> None:
    spec = bernoulli(flat=True)
    model, x, y, ones, f = linear_problem(1, spec)
    p = f.sigmoid()
    by_hand = ones.T @ (p * (1 - p) * ones)
    torch.testing.assert_close(reference.ggn(model, x, y, spec), by_hand, **TIGHT)


@pytest.mark.parametrize("soft", [False, True])
def test_ggn_of_softmax_regression_is_the_sum_of_kronecker_products(soft: bool) -> None:
    spec = categorical(soft=soft)
    model, x, y, ones, f = linear_problem(3, spec)
    p = f.softmax(1)
    h = torch.diag_embed(p) - p[:, :, None] * p[:, None, :]
    torch.testing.assert_close(reference.ggn(model, x, y, spec), summed(h, ones), **TIGHT)


def test_ignored_examples_add_nothing() -> None:
    spec = categorical(ignore=True)
    model, x, y, _, _ = linear_problem(3, spec)
    seen = y != -100
    assert seen.any()
    assert not seen.all()
    torch.testing.assert_close(reference.ggn(model, x, y, spec), reference.ggn(model, x[seen], y[seen], spec), **TIGHT)


def test_ggn_of_poisson_regression_weighs_inputs_by_the_rate() -> None:
    spec = poisson()
    model, x, y, ones, f = linear_problem(2, spec)
    torch.testing.assert_close(reference.ggn(model, x, y, spec), summed(torch.diag_embed(f.exp()), ones), **TIGHT)


def test_ggn_of_heteroscedastic_regression_is_the_mean_hessian_over_targets() -> None:
    """The closed-form Fisher matrix equals E_y[Hessian of the nll], by Gauss-Hermite quadrature over y."""
    spec = heteroscedastic()
    f = torch.tensor([[0.3, -0.4]], dtype=F64)
    nodes, masses = (torch.tensor(a) for a in _hermite(40))
    scale = (f[0, 1] / 2).exp()
    mean = torch.zeros(2, 2, dtype=F64)
    for node, mass in zip(nodes, masses, strict=True):
        y = (f[0, 0] + math.sqrt(2) * scale * node).reshape(1, 1)
        mean += (
            mass
            / math.sqrt(math.pi)
            * torch.autograd.functional.hessian(lambda values, y=y: spec.nll(values[None], y), f[0])
        )
    torch.testing.assert_close(spec.fisher(f), mean, **TIGHT)
    model, x, y, ones, f = linear_problem(2, spec)
    h = torch.diag_embed(torch.stack([(-f[:, 1]).exp(), torch.full((7,), 0.5, dtype=F64)], 1))
    torch.testing.assert_close(reference.ggn(model, x, y, spec), summed(h, ones), **TIGHT)


def _hermite(points: int) -> tuple:
    from numpy.polynomial.hermite import hermgauss

    return hermgauss(points)


@pytest.mark.parametrize("spec", [gaussian(), categorical(), poisson(), bernoulli()], ids=lambda s: s.name)
def test_hessian_of_a_linear_model_is_its_ggn(spec: LikelihoodSpec) -> None:
    model, x, y, _, _ = linear_problem(3, spec)
    torch.testing.assert_close(reference.hessian(model, x, y, spec), reference.ggn(model, x, y, spec), **TIGHT)


def test_empirical_fisher_of_linear_regression_weighs_inputs_by_squared_residuals() -> None:
    spec = gaussian(0.7)
    model, x, y, ones, f = linear_problem(1, spec)
    by_hand = ones.T @ ((f - y) ** 2 / 0.7**4 * ones)
    torch.testing.assert_close(reference.empirical_fisher(model, x, y, spec), by_hand, **TIGHT)


def test_jacobian_matches_central_differences() -> None:
    model, x, _, _ = reference.case_data("self_attention")
    jacobian = torch.stack(reference.case_jacobians("self_attention"))
    model, step = reference.evaluated(model), 1e-5
    columns = []
    with torch.no_grad():
        for parameter in model.parameters():
            for entry in parameter.view(-1):
                above = (entry.add_(step), call(model, x))[1]
                below = (entry.sub_(2 * step), call(model, x))[1]
                entry.add_(step)
                columns.append((above - below) / (2 * step))
    torch.testing.assert_close(jacobian, torch.stack(columns, -1), rtol=1e-7, atol=1e-8)


@pytest.mark.parametrize("bias", ["joint", "separate"])
@pytest.mark.parametrize("sharing", ["expand", "reduce"])
def test_kronecker_of_linear_regression_by_hand(sharing: str, bias: str) -> None:
    """Without positions both flavours give kron(N / sigma^2 I, mean x x^T): the exact GGN, or two blocks."""
    spec = gaussian(0.7)
    model = nn.Sequential(linear_problem(2, spec)[0])
    _, x, y, ones, _ = linear_problem(2, spec)
    exact = reference.ggn(model, x, y, spec)
    captures = reference.capture(model, x, y, spec, ("0",))
    by_hand = weights_then_bias(torch.kron(7 / 0.49 * torch.eye(2, dtype=F64), ones.T @ ones / 7), 2)
    if bias == "separate":
        by_hand[:6, 6:] = by_hand[6:, :6] = 0
    torch.testing.assert_close(reference.kronecker(model, exact, captures, sharing, bias), by_hand, **TIGHT)


def test_kronecker_flavours_of_a_pooled_linear_layer_by_hand() -> None:
    """f_n = mean_t (W a_nt + b): expand takes the mean of a a^T, reduce the outer product of the mean a."""
    spec = gaussian(0.7)
    layer = linear_problem(2, spec)[0]
    x = torch.randn(5, 4, 3, generator=torch.Generator().manual_seed(1), dtype=F64)

    class Pooled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x).mean(1)

    model, y = Pooled(), torch.zeros(5, 2, dtype=F64)
    exact = reference.ggn(model, x, y, spec)
    captures = reference.capture(model, x, y, spec, ("layer",))
    a = F.pad(x, (0, 1), value=1.0)
    rows, means = a.reshape(-1, 4), a.mean(1)
    eye = torch.eye(2, dtype=F64) / 0.49
    expand = torch.kron(5 * 4 * eye / 4**2, rows.T @ rows / 20)
    reduce = torch.kron(5 * eye, means.T @ means / 5)
    torch.testing.assert_close(
        reference.kronecker(model, exact, captures, "expand"), weights_then_bias(expand, 2), **TIGHT
    )
    torch.testing.assert_close(
        reference.kronecker(model, exact, captures, "reduce"), weights_then_bias(reduce, 2), **TIGHT
    )
    torch.testing.assert_close(exact, weights_then_bias(reduce, 2), **TIGHT)


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
@pytest.mark.parametrize("padding", [None, 2])
def test_kronecker_of_a_summed_embedding_counts_tokens(sharing: str, padding: int | None) -> None:
    """f_n = sum_t W[token_nt]: the diagonal of A holds token frequencies, G their number over the variance.

    So kron(G, A) is the count of each token over the variance, whatever was padded.
    """
    spec = gaussian(0.5)
    tokens = torch.tensor([[0, 0, 1], [2, 1, 0], [2, 2, 2]])

    class Bag(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(4, 2, padding_idx=padding, dtype=F64)

        def forward(self, x: Tensor) -> Tensor:
            return self.table(x).sum(1)

    model, y = Bag(), torch.zeros(3, 2, dtype=F64)
    counts = torch.tensor([[2.0, 1, 0, 0], [1, 1, 1, 0], [0, 0, 3, 0]], dtype=F64)
    if padding is not None:
        counts[:, padding] = 0
    eye = torch.eye(2, dtype=F64) / 0.25
    exact = reference.ggn(model, tokens, y, spec)
    torch.testing.assert_close(exact, torch.kron(counts.T @ counts, eye), **TIGHT)
    captures = reference.capture(model, tokens, y, spec, ("table",))
    by_hand = torch.kron(torch.diag(counts.sum(0)), eye)
    torch.testing.assert_close(reference.kronecker(model, exact, captures, sharing), by_hand, **TIGHT)


def test_large_remaining_parameters_keep_their_diagonal_only() -> None:
    name = "raw_matrix_of_520"
    block = reference.case_curvature(name, "kronecker")[:520, :520]
    torch.testing.assert_close(block, torch.diag(reference.case_ggn(name)[:520, :520].diagonal()))


def test_patches_agree_with_unfold() -> None:
    convolution = nn.Conv2d(2, 3, (3, 2), stride=(2, 1), padding=(1, 2), dilation=(1, 2), dtype=F64)
    x = torch.randn(1, 2, 6, 5, generator=torch.Generator().manual_seed(0), dtype=F64)
    extent = convolution(x).shape[2:]
    unfolded = F.unfold(x, (3, 2), dilation=(1, 2), padding=(1, 2), stride=(2, 1))[0].T
    torch.testing.assert_close(reference.patches(convolution, x[0], extent), unfolded, **TIGHT)


# ----------------------------------------------------------------------------------------------------------
# The table


@every_case
def test_recorded_uses_are_the_linear_maps_they_claim_to_be(name: str) -> None:
    """For every use of every matrix layer: outputs = inputs @ matrix^T + a bias, both found by their indices.

    And the recorder, with its attention written out, computes the network's own output.
    """
    model, x, _, _ = reference.case_data(name)
    plain, recorder = reference.evaluated(model), reference.Recorder(model, CASES[name].layers)
    theta = torch.cat([p.detach().reshape(-1) for p in reference.parameters(model).values()])
    for n in range(2):
        example = take(x, slice(n, n + 1))
        torch.testing.assert_close(recorder.run(example), call(plain, example), **TIGHT)
        assert bool(recorder.blocks) == bool(CASES[name].layers)
        for block in recorder.blocks:
            assert block.uses
            for a, out in block.uses:
                rest = out.detach() - a @ theta[block.matrix].T
                rest = rest[a.abs().sum(1) > 0]  # a padding token is no input
                bias = rest[:1] if block.bias is None else theta[block.bias][None]
                torch.testing.assert_close(rest, bias.expand_as(rest), **TIGHT)


@every_case
def test_captured_factors_multiply_to_the_jacobian(name: str) -> None:
    """sum_t g_t a_t^T is the gradient of a seed in the matrix, sum_t g_t in the bias: columns of S^T J."""
    model, x, y, spec = reference.case_data(name)
    roots = reference.seeds(model, x, y, spec, "ggn")
    for each in reference.case_captures(name):
        for n in range(2):
            gradients = roots[n].T @ reference.case_jacobians(name)[n]
            g = torch.stack(each.gradients[n])
            products = torch.einsum("mto,ti->moi", g, each.inputs[n])
            torch.testing.assert_close(products, gradients[:, each.block.matrix], **TIGHT)
            if each.block.bias is not None:
                torch.testing.assert_close(g.sum(1), gradients[:, each.block.bias], **TIGHT)


@every_case
def test_examples_do_not_depend_on_their_batch(name: str) -> None:
    model, x, _, spec = reference.case_data(name)
    with torch.no_grad():
        together = reference.positions(call(reference.evaluated(model), x), spec.channels)
    torch.testing.assert_close(torch.stack(reference.outputs(model, x, spec)), together, **TIGHT)


@every_case
def test_cases_are_small_reproducible_and_curved(name: str) -> None:
    case = CASES[name]
    model, x, y, _ = reference.case_data(name)
    again, (x_again, y_again) = case.make_model(), case.make_batch()
    for one, other in zip(model.state_dict().values(), again.state_dict().values(), strict=True):
        assert torch.equal(one, other)
    for one, other in zip(_tensors(x), _tensors(x_again), strict=True):
        assert torch.equal(one, other)
    assert torch.equal(y, y_again)
    assert all(p.dtype == torch.float32 for p in case.make_model(torch.float32).parameters())
    curvature = reference.case_ggn(name)
    assert len(curvature) < 600
    assert torch.isfinite(curvature).all()
    assert curvature.trace() > 1e-2
    torch.testing.assert_close(curvature, curvature.T, **TIGHT)


def _tensors(x: object) -> list[Tensor]:
    if isinstance(x, Tensor):
        return [x]
    return list(x.values()) if isinstance(x, dict) else list(x)


def test_the_table_is_wide() -> None:
    """At least thirty architectures, every layer kind of the library, every likelihood several times."""
    models = [case.make_model() for case in CASES.values()]
    kinds = {type(module) for model in models for module in model.modules()}
    assert kinds >= {
        nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d,
        nn.ConvTranspose3d, nn.Embedding, nn.EmbeddingBag, nn.BatchNorm1d, nn.BatchNorm2d,
        nn.LayerNorm, nn.GroupNorm,
        nn.InstanceNorm1d, nn.InstanceNorm2d, nn.RMSNorm, nn.MultiheadAttention, nn.TransformerEncoderLayer,
        nn.TransformerDecoderLayer, nn.LSTM, nn.GRU, nn.RNN, nn.Bilinear, nn.PReLU, nn.Dropout,
    }  # fmt: skip
    shapes = {tuple((name, *p.shape) for name, p in model.named_parameters()) for model in models}
    assert len(shapes) >= 30
    names = [case.likelihood.name for case in CASES.values()]
    for name in ("gaussian", "gaussian-per-output", "categorical", "categorical-soft", "categorical-ignore",
                 "bernoulli", "poisson", "heteroscedastic", "custom"):  # fmt: skip
        assert names.count(name) >= 3, name
