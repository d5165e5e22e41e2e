"""Every structure, on every network of the table, against naive float64 references, through the public API.

Errors are relative, in the Frobenius norm: 1e-9 for curvature in float64 (some thousand roundings), 1e-8 for
variances (after an inversion), 1e-4 for float32.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import itertools
import math
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lapis
import reference
from cases import CASES, F64, GatedTie, MaskedTokens, WeightedPositions, call, categorical, take
from eigenbases import assert_defined, bases_of
from lapis.curvature import accumulate, plan
from lapis.curvature.backward.record import Record
from lapis.curvature.blocks.dense import gram
from lapis.curvature.recording import patches
from lapis.curvature.tape import Tape
from lapis.errors import LapisError, LapisWarning, ModelError
from lapis.network import Network
from untouched import untouched

pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
every_case = pytest.mark.parametrize("name", CASES)
every_structure = pytest.mark.parametrize("structure", ["dense", "diagonal", "kronecker"])
PRIOR = 0.37


def some_cases(*names: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("name", names)


def relative_error(found: Tensor, expected: Tensor) -> float:
    assert found.shape == expected.shape
    return float((found.to(F64) - expected).norm() / expected.norm())


def fit(name: str, structure: str, dtype: torch.dtype = F64, data: Any = None, **options: Any) -> Any:
    """A posterior of a fresh model of the case."""
    case = CASES[name]
    options = {"structure": structure, "prior": PRIOR, **options}
    data = [batch_of(name, dtype)] if data is None else data
    return lapis.laplace(case.make_model(dtype), data, case.likelihood.build(), **options)


@functools.cache
def batch_of(name: str, dtype: torch.dtype = F64) -> tuple[Any, Tensor]:
    return CASES[name].make_batch(dtype)


@functools.cache
def posterior_of(name: str, structure: str, **options: Any) -> Any:
    """The case's posterior in float64. Posteriors are values, so tests can share it."""
    return fit(name, structure, **options)


def curvature_in(posterior: Any, prior: float = PRIOR) -> Tensor:
    precision = posterior.precision()
    return precision - prior * torch.eye(len(precision), dtype=precision.dtype)


def split(name: str, *sizes: int) -> list[tuple[Any, Tensor]]:
    """The case's data in batches of the given sizes; one more takes the rest."""
    x, y = batch_of(name)
    edges = [0, *itertools.accumulate(sizes), len(y)]
    return [(take(x, slice(a, b)), y[a:b]) for a, b in itertools.pairwise(edges)]


def precision_by_definition(name: str, structure: str) -> Tensor:
    curvature = reference.case_curvature(name, structure)
    return curvature + PRIOR * torch.eye(len(curvature), dtype=F64)


@functools.cache
def joint_covariance(name: str, structure: str) -> Tensor:
    """J Sigma J^T from the naive references, (B, T C, B, T C)."""
    jacobian = torch.stack(reference.case_jacobians(name))
    rows = jacobian.flatten(0, 1)
    joint = rows @ torch.linalg.solve(precision_by_definition(name, structure), rows.T)
    return joint.reshape(*jacobian.shape[:2], *jacobian.shape[:2])


def output_shape(name: str) -> tuple[int, ...]:
    """(B, *positions, C) of the case's outputs."""
    model, x, _, spec = reference.case_data(name)
    with torch.no_grad():
        raw = call(reference.evaluated(model), x)
    if raw.ndim == 1:
        return (len(raw), 1)
    return tuple(raw.movedim(1, -1).shape if spec.channels == "first" else raw.shape)


# ----------------------------------------------------------------------------------------------------------
# Curvature


@every_case
def test_dense_is_the_reference_ggn(name: str) -> None:
    assert relative_error(curvature_in(posterior_of(name, "dense")), reference.case_ggn(name)) < 1e-9


@every_case
def test_diagonal_is_the_diagonal_of_the_reference_ggn(name: str) -> None:
    expected = reference.case_curvature(name, "diagonal")
    assert relative_error(curvature_in(posterior_of(name, "diagonal")), expected) < 1e-9


@every_case
@pytest.mark.parametrize("options", [{}, {"sharing": "reduce"}, {"bias": "separate"}], ids=str)
def test_kronecker_is_its_definition(name: str, options: dict[str, str]) -> None:
    expected = reference.case_curvature(name, "kronecker", **options)
    assert relative_error(curvature_in(posterior_of(name, "kronecker", **options)), expected) < 1e-9


@some_cases("conv2d_grouped", "self_attention", "tied_without_bias", "pixels_gaussian")
def test_reduced_kronecker_with_separate_bias_is_its_definition(name: str) -> None:
    options = {"sharing": "reduce", "bias": "separate"}
    expected = reference.case_curvature(name, "kronecker", **options)
    assert relative_error(curvature_in(fit(name, "kronecker", **options)), expected) < 1e-9


@every_case
def test_ekfac_is_its_definition_with_the_exact_trace_and_nearer_than_kronecker(name: str) -> None:
    posterior = posterior_of(name, "ekfac")
    assert_defined(posterior, name)
    found, exact = curvature_in(posterior), reference.case_ggn(name)
    kronecker = reference.case_curvature(name, "kronecker")
    for where, _ in bases_of(posterior):
        ours, theirs, right = (matrix[where[:, None], where] for matrix in (found, kronecker, exact))
        assert float(ours.trace()) == pytest.approx(float(right.trace()), rel=1e-9, abs=1e-12)
        assert float((ours - right).norm()) <= float((theirs - right).norm()) * (1 + 1e-9) + 1e-12


@every_case
@every_structure
def test_sums_over_split_batches_are_the_sum_over_one(name: str, structure: str) -> None:
    """A posterior of batches of two and one examples, updated with the rest. The first fit is left alone."""
    whole, parts = posterior_of(name, structure), split(name, 2, 1)
    if CASES[name].data_dependent and structure == "kronecker":
        with pytest.raises(ModelError, match="another way"):
            fit(name, structure, data=parts)
        return
    first = fit(name, structure, data=parts[:2])
    before = first.precision().clone()
    updated = first.update(parts[2:])
    assert torch.equal(first.precision(), before)
    assert updated.n_data == whole.n_data == CASES[name].n
    assert relative_error(updated.precision(), whole.precision()) < 1e-9
    torch.testing.assert_close(updated.log_evidence(), whole.log_evidence(), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("name", "axis"),
    [
        ("self_attention", 1), ("gru_every_step", 1), ("embedding_repeated", 1), ("conv1d_circular", 2),
        ("pixels_bernoulli", 3), ("per_token_gaussian", 1), ("flattened_position_major", 1),
        ("frames_frame_major", 1), ("self_attention_sequence_first", 1),
    ],
)  # fmt: skip
@every_structure
def test_batches_may_differ_in_length(name: str, axis: int, structure: str) -> None:
    """Sequences and images of another size in the second batch: positions are counted as they come."""
    batches, exact = of_two_lengths(name, axis)
    expected = exact if structure == "dense" else torch.diag(exact.diagonal())
    if structure == "kronecker":
        model, *_, spec = reference.case_data(name)
        captures = captured_together(model, batches, spec, CASES[name].layers)
        expected = reference.kronecker(model, exact, captures)
    assert relative_error(curvature_in(fit(name, structure, data=batches)), expected) < 1e-9


@functools.cache
def of_two_lengths(name: str, axis: int) -> tuple[list[tuple[Any, Tensor]], Tensor]:
    """The case's batch, one twice as long along an axis, and the GGN of both."""
    model, x, y, spec = reference.case_data(name)
    longer = torch.cat([x, x.flip(0)], axis)
    with torch.no_grad():
        f = call(reference.evaluated(model), longer)
    batches = [(x, y), (longer, spec.targets(torch.Generator().manual_seed(9), f))]
    return batches, sum(reference.ggn(model, *batch, spec) for batch in batches)


def captured_together(model: nn.Module, batches: list, spec: Any, layers: Any) -> list[reference.Capture]:
    """What the layers see in two batches, as if in one."""
    first, second = (reference.capture(model, *batch, spec, layers) for batch in batches)
    return [
        reference.Capture(one.block, one.inputs + two.inputs, one.gradients + two.gradients)
        for one, two in zip(first, second, strict=True)
    ]


@every_case
@every_structure
def test_float32_is_close_to_float64(name: str, structure: str) -> None:
    found = curvature_in(fit(name, structure, torch.float32))
    assert relative_error(found, reference.case_curvature(name, structure)) < 1e-4


# ----------------------------------------------------------------------------------------------------------
# Variances


@every_case
@every_structure
def test_functional_variance_is_the_explicit_one(name: str, structure: str) -> None:
    """One covariance a position, (B, *positions, C, C); variances alone are laid out as the outputs are."""
    batch, *positions, width = shape = output_shape(name)
    length = math.prod(positions)
    joint = joint_covariance(name, structure).reshape(batch, length, width, batch, length, width)
    each = [joint[n, t, :, n, t] for n in range(batch) for t in range(length)]
    expected = torch.stack(each).reshape(*shape, width)
    posterior, (x, _) = posterior_of(name, structure), batch_of(name)
    assert relative_error(posterior.functional_variance(x), expected) < 1e-8
    variances = expected.diagonal(dim1=-2, dim2=-1)
    if CASES[name].likelihood.channels == "first":
        variances = variances.movedim(-1, 1)
    assert relative_error(posterior.functional_variance(x, diagonal=True), variances) < 1e-8
    assert relative_error(posterior.functional_variance(take(x, slice(1, 2))), expected[1:2]) < 1e-8


@every_case
@every_structure
def test_functional_covariance_is_the_explicit_one(name: str, structure: str) -> None:
    """Joint over examples and all of their outputs: (B, *positions, C) twice."""
    shape, (x, _) = output_shape(name), batch_of(name)
    found = posterior_of(name, structure).functional_covariance(x)
    assert relative_error(found, joint_covariance(name, structure).reshape(*shape, *shape)) < 1e-8


@every_case
@every_structure
def test_marginal_variance_is_the_diagonal_of_the_inverse(name: str, structure: str) -> None:
    inverse = torch.linalg.inv(precision_by_definition(name, structure))
    assert relative_error(posterior_of(name, structure).marginal_variance(), inverse.diagonal()) < 1e-8


@some_cases("mlp_categorical", "conv2d_grouped", "embedding_padding", "weight_norm")
@every_structure
def test_samples_have_the_mean_and_covariance_of_the_posterior(name: str, structure: str) -> None:
    """2000 whitened draws are 2000 P standard normals: five statistics of them, each nearly standard normal.

    Each lies outside +-4.42 with probability 1e-5 if the draws are right.
    """
    precision, n = precision_by_definition(name, structure), 2000
    samples = posterior_of(name, structure).sample(n, generator=torch.Generator().manual_seed(3))
    assert samples.shape == (n, len(precision))
    weights = reference.parameters(CASES[name].make_model()).values()
    theta = torch.cat([weight.detach().reshape(-1) for weight in weights])
    white = (samples.to(F64) - theta) @ torch.linalg.cholesky(precision)
    freedom = white.numel()
    assert abs(float(white.sum())) / math.sqrt(freedom) < 4.42
    assert abs(float(white.square().sum()) - freedom) / math.sqrt(2 * freedom) < 4.42
    directions = torch.randn(len(precision), 3, generator=torch.Generator().manual_seed(4), dtype=F64)
    along = (white @ torch.linalg.qr(directions)[0]).square().sum(0)
    assert ((along - n) / math.sqrt(2 * n)).abs().max() < 4.42


# ----------------------------------------------------------------------------------------------------------
# Other kinds of curvature


@some_cases(
    "mlp_gaussian", "mlp_custom", "mlp_heteroscedastic", "mlp_ignored_examples", "conv1d_circular",
    "layer_norm", "lstm", "cross_attention", "causal_language_model", "pixels_categorical",
    "embedding_padding", "weight_norm",
)  # fmt: skip
@every_structure
def test_empirical_fisher_is_the_reference(name: str, structure: str) -> None:
    """Per-example gradients of the observed nll, summed over positions before the outer product."""
    expected = reference.case_curvature(name, structure, curvature="empirical")
    assert relative_error(curvature_in(fit(name, structure, curvature="empirical")), expected) < 1e-9


@some_cases(
    "mlp_gaussian", "mlp_categorical", "mlp_custom", "conv1d_circular", "self_attention", "tied_linears",
    "reused_linear",
)  # fmt: skip
def test_hessian_is_the_reference(name: str) -> None:
    expected = reference.hessian(*reference.case_data(name))
    prior = 1.0 + 2 * float(torch.linalg.eigvalsh(expected).abs().max())
    found = curvature_in(fit(name, "dense", curvature="hessian", prior=prior), prior)
    assert relative_error(found, expected) < 1e-9
    parts = fit(name, "dense", data=split(name, 2, 1), curvature="hessian", prior=prior)
    assert relative_error(curvature_in(parts, prior), expected) < 1e-9


@pytest.mark.parametrize("structure", ["diagonal", "kronecker", "ekfac"])
def test_hessian_is_refused_where_it_has_no_meaning(structure: str) -> None:
    with pytest.raises(LapisError):
        fit("mlp_gaussian", structure, curvature="hessian")


@pytest.mark.parametrize(
    ("name", "structure"),
    [
        ("mlp_gaussian", "dense"), ("mlp_categorical", "dense"), ("mlp_bernoulli", "dense"),
        ("mlp_poisson", "dense"), ("mlp_heteroscedastic", "dense"), ("per_token_gaussian", "dense"),
        ("mlp_categorical", "diagonal"), ("mlp_categorical", "kronecker"), ("per_token_gaussian", "kronecker"),
    ],
)  # fmt: skip
def test_sampled_fisher_has_the_exact_curvature_as_its_mean(name: str, structure: str) -> None:
    """Over 40 fits with 4 draws each, mean(v^T F v) - v^T F_exact v is 0 within its standard error.

    Two directions v; |t| with 39 degrees of freedom exceeds 5.5 with probability 2.6e-6 if that is true.
    """
    exact = reference.case_curvature(name, structure)
    v = torch.randn(2, len(exact), generator=torch.Generator().manual_seed(5), dtype=F64)
    draws = []
    for seed in range(40):
        generator = torch.Generator().manual_seed(seed)
        posterior = fit(name, structure, curvature="sampled", fisher_samples=4, generator=generator)
        draws.append(torch.einsum("vp,pq,vq->v", v, curvature_in(posterior).to(F64), v))
    found = torch.stack(draws)
    expected = torch.einsum("vp,pq,vq->v", v, exact, v)
    assert found.std(0).min() > 0
    t = (found.mean(0) - expected) / (found.std(0) / math.sqrt(len(found)))
    assert t.abs().max() < 5.5


def test_sampled_fisher_repeats_with_its_generator() -> None:
    def once() -> Tensor:
        generator = torch.Generator().manual_seed(7)
        return fit("mlp_categorical", "dense", curvature="sampled", generator=generator).precision()

    assert torch.equal(once(), once())


def test_many_outputs_are_sampled_and_said_so() -> None:
    """260 outputs an example are more than the exact curvature is made from unasked."""
    model = nn.Sequential(nn.Linear(1, 2)).to(F64)
    x = torch.randn(2, 130, 1, dtype=F64)
    data = [(x, torch.zeros(2, 130, 2, dtype=F64))]
    with pytest.warns(LapisWarning, match="sampled"):
        lapis.laplace(model, data, "gaussian", structure="diagonal")
    exact = lapis.laplace(model, data, "gaussian", structure="dense", curvature="exact", prior=PRIOR)
    rows = torch.cat([x, torch.ones_like(x)], -1).reshape(-1, 2)
    order = [0, 2, 1, 3]  # both weights, then both biases
    expected = torch.kron(torch.eye(2, dtype=F64), rows.T @ rows)[order][:, order]
    assert relative_error(curvature_in(exact), expected) < 1e-9


# ----------------------------------------------------------------------------------------------------------
# Exactness, parts of a network, refusals


@pytest.mark.parametrize(
    ("name", "sharing"),
    [("deep_linear", "expand"), ("deep_linear", "reduce"), ("deep_linear_pooled", "reduce")],
)
@pytest.mark.parametrize("structure", ["kronecker", "ekfac"])
def test_kronecker_is_exact_on_deep_linear_networks(name: str, sharing: str, structure: str) -> None:
    """Without sharing in both flavours; with mean pooling over positions in the reduced one."""
    found = curvature_in(fit(name, structure, sharing=sharing))
    exact = reference.case_ggn(name)
    sizes = [parameter.numel() for parameter in CASES[name].make_model().parameters()]
    start = 0
    for weight, bias in zip(sizes[::2], sizes[1::2], strict=True):
        block = slice(start, start + weight + bias)
        assert relative_error(found[block, block], exact[block, block]) < 1e-9
        start = block.stop


@pytest.mark.parametrize(
    ("name", "layer"),
    [
        ("mlp_categorical", "2"),
        ("vision_transformer", "head"),
        ("tied_linears", "head"),
        ("transformer_encoder_layer_padded", "head"),
    ],
)
@every_structure
def test_last_layer_is_its_block_of_the_whole(name: str, layer: str, structure: str) -> None:
    whole = reference.case_curvature(name, structure)
    start, chosen = 0, []
    for parameter_name, parameter in reference.parameters(CASES[name].make_model()).items():
        if parameter_name.startswith(layer + "."):
            chosen += range(start, start + parameter.numel())
        start += parameter.numel()
    expected = whole[chosen][:, chosen]
    for weights in ("last_layer", [layer + ".*"]):
        assert relative_error(curvature_in(fit(name, structure, weights=weights)), expected) < 1e-9


def masked_tokens(signs: list[list[int]], seed: int) -> Tensor:
    """Inputs for `MaskedTokens`, (B, T, 2): 1 for tokens that the layer sees, 0 for others."""
    x = torch.rand(len(signs), 4, 2, generator=torch.Generator().manual_seed(seed), dtype=F64) + 0.1
    x[..., 0] *= 2 * torch.tensor(signs, dtype=F64) - 1
    return x


REGULAR = masked_tokens([[1, 1, 0, 0], [1, 0, 1, 0]], 0)
ALL = masked_tokens([[1, 1, 1, 1], [1, 1, 1, 1]], 1)
UNEVEN = masked_tokens([[1, 1, 1, 0], [0, 0, 0, 1]], 2)
ONE_SIDED = masked_tokens([[0, 0, 0, 0], [1, 1, 1, 1]], 3)
SURPRISES = {
    "uneven": (lambda: MaskedTokens(False), REGULAR, UNEVEN),
    "uneven, used twice": (lambda: MaskedTokens(True), REGULAR, UNEVEN),
    "one-sided": (lambda: MaskedTokens(False), REGULAR, ONE_SIDED),
    "one-sided, used twice": (lambda: MaskedTokens(True), REGULAR, ONE_SIDED),
    "all, then uneven": (lambda: MaskedTokens(False), ALL, UNEVEN),
    "all, then uneven, used twice": (lambda: MaskedTokens(True), ALL, UNEVEN),
    "gate": (GatedTie, -REGULAR[0].abs(), REGULAR[0].abs()),
    "zeros": (WeightedPositions, REGULAR, torch.zeros(3, 4, 2, dtype=F64)),
}


@pytest.mark.parametrize("surprise", SURPRISES)
@every_structure
def test_what_a_later_batch_reveals_is_exact_or_refused(structure: str, surprise: str) -> None:
    """The first batch looks regular, the second shows that a layer is used otherwise than it seemed.

    The right answer or a LapisError; never a wrong number. Such a layer may count as a matrix or not, but for
    the gated one, whose second use no matrix explains.
    """
    make, *inputs = SURPRISES[surprise]
    model, spec = make().to(F64), CASES["mlp_gaussian"].likelihood
    data = [(x, torch.zeros(len(x), 2, dtype=F64)) for x in inputs]
    exact = sum(reference.ggn(model, *batch, spec) for batch in data)
    definitions = {"dense": [exact], "diagonal": [torch.diag(exact.diagonal())]}
    definitions["kronecker"] = [
        reference.kronecker(model, exact, captured_together(model, data, spec, layers))
        for layers in ([("head",)] if make is GatedTie else [("inner", "head"), ("head",)])
    ]
    try:
        posterior = lapis.laplace(model, data, spec.build(), structure=structure, prior=PRIOR)
    except LapisError:
        return
    assert min(relative_error(curvature_in(posterior), right) for right in definitions[structure]) < 1e-9


@pytest.mark.parametrize("surprise", SURPRISES)
def test_what_a_prediction_reveals_is_exact_or_refused(surprise: str) -> None:
    """The same when the surprise comes after the fit."""
    make, x, other = SURPRISES[surprise]
    model, spec = make().to(F64), CASES["mlp_gaussian"].likelihood
    data = [(x, torch.zeros(len(x), 2, dtype=F64))]
    posterior = lapis.laplace(model, data, spec.build(), structure="dense", prior=PRIOR)
    covariance = torch.linalg.inv(posterior.precision())
    expected = torch.stack([jacobian @ covariance @ jacobian.T for jacobian in reference.jacobians(model, other, spec)])
    try:
        found = posterior.functional_variance(other)
    except LapisError:
        return
    assert relative_error(found, expected) < 1e-8


@pytest.mark.parametrize(("picks", "runs"), [(False, 1), (True, 2)])
def test_where_examples_lie_is_measured_once(picks: bool, runs: int) -> None:
    """Another batch size needs no second run, unless the network picks rows: these may be other examples then."""

    class Counted(nn.Linear):
        count = 0

        def forward(self, x: Tensor) -> Tensor:
            self.count += 1
            return super().forward(x[torch.arange(len(x))] if picks else x)

    model = Counted(3, 2).double()
    tape, x = Tape(Network(model), lambda raw: raw[:, None]), torch.randn(6, 3, dtype=F64)
    with tape.network.prepared():
        tape.record(x)
        assert model.count == 2
        tape.record(x[:4])
        assert model.count == 2 + runs
        model.count = 0
        tape.record(x[:, None])  # other axes than before
        assert model.count == 2


class Changing(nn.Module):
    """A network whose way of using its weights is an attribute, which a user may set between two fits."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)
        self.way = "plain"

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        if self.way == "twice":
            h = h + nn.functional.linear(x.square(), self.first.weight)
        if self.way == "hidden":  # not by a function with a rule
            h = h * torch.linalg.vector_norm(self.first.weight)
        if self.way == "batch":
            h = h - h.mean(0)
        return self.last(self.norm(h).tanh())


def changing() -> tuple[Changing, tuple[Tensor, Tensor]]:
    torch.manual_seed(3)
    return Changing().double(), (torch.randn(12, 3, dtype=F64), torch.randn(12, 2, dtype=F64))


@every_structure
@pytest.mark.parametrize("way", ["plain", "twice", "hidden"])
def test_a_network_is_proven_once_and_again_when_it_changes(
    way: str, structure: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, data = changing()
    lapis.laplace(model, data, "regression", structure=structure)
    proofs: list[int] = []
    unexplained = plan.unexplained
    monkeypatch.setattr(plan, "unexplained", lambda *args: proofs.append(1) or unexplained(*args))
    model.way = way
    again = lapis.laplace(model, data, "regression", structure=structure)
    assert len(proofs) == (way != "plain")
    fresh, _ = changing()
    fresh.way = way
    expected = lapis.laplace(fresh, data, "regression", structure=structure)
    assert len(proofs) == 1 + (way != "plain")
    torch.testing.assert_close(again.log_evidence(), expected.log_evidence(), rtol=0, atol=0)
    assert again.choices == expected.choices


class Layout(nn.Module):
    """A linear layer that sees (examples, tokens, features), or with `flipped` tokens first."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.flipped = nn.Linear(3, 2, dtype=F64), False

    def forward(self, x: Tensor) -> Tensor:
        return (self.layer(x.transpose(0, 1)).transpose(0, 1) if self.flipped else self.layer(x)).square().sum(1)


@every_structure
def test_examples_are_found_again_where_as_many_tokens_could_hide_that_they_moved(structure: str) -> None:
    model, data = Layout(), (torch.randn(5, 5, 3, dtype=F64), torch.randn(5, 2, dtype=F64))
    expected = lapis.laplace(model, data, "regression", structure=structure)
    model.flipped = True
    found = lapis.laplace(model, data, "regression", structure=structure)
    assert relative_error(found.precision(), expected.precision()) < 1e-12


def test_what_is_known_of_a_network_does_not_excuse_it_from_checks() -> None:
    model, data = changing()
    lapis.laplace(model, data, "regression")
    model.way = "batch"
    with pytest.raises(ModelError, match="other examples in its batch"):
        lapis.laplace(model, data, "regression")


def test_a_forgotten_network_takes_its_plan_along() -> None:
    model, data = changing()
    lapis.laplace(model, data, "regression", structure="kronecker")
    known = weakref.ref(next(iter(plan._PROVEN[model].values())))
    assert known() is not None
    del model
    gc.collect()
    assert known() is None


def test_statistics_over_the_batch_are_refused() -> None:
    norm = nn.BatchNorm1d(4, track_running_stats=False)
    model = nn.Sequential(nn.Linear(3, 4), norm, nn.Linear(4, 2)).to(F64)
    data = [(torch.randn(6, 3, dtype=F64), torch.randn(6, 2, dtype=F64))]
    with pytest.raises(ModelError, match="batch"):
        lapis.laplace(model, data, "gaussian")


# ----------------------------------------------------------------------------------------------------------
# The model comes back as it was


@every_case
def test_the_model_is_exactly_as_found(name: str) -> None:
    """Modes, hooks, gradients, flags, values, classes; and torch's own random numbers and functions."""
    case = CASES[name]
    model, (x, y) = case.make_model(), case.make_batch()
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.full_like(parameter, 3.0)
    calls: list[int] = []
    model.register_forward_hook(lambda *_: calls.append(1))
    with untouched(model):
        for structure in ("dense", "diagonal", "kronecker"):
            posterior = lapis.laplace(model, [(x, y)], case.likelihood.build(), structure=structure, prior=PRIOR)
            posterior.functional_variance(x)
    assert calls


class Shortened(nn.Module):
    """Looks rows up by the function, with a norm that belongs to the class."""

    max_norm = 0.5

    def __init__(self) -> None:
        super().__init__()
        self.rows, self.last = nn.Parameter(torch.randn(5, 3, dtype=F64)), nn.Linear(6, 2, dtype=F64)

    def forward(self, index: Tensor) -> Tensor:
        return self.last(nn.functional.embedding(index, self.rows, max_norm=self.max_norm).flatten(1))


@pytest.mark.parametrize("own", [False, True])
def test_a_network_that_rewrites_its_weights_is_not_changed(own: bool) -> None:
    """An embedding with max_norm rescales its rows whenever it is called: put back, or refused."""
    plain = nn.Sequential(nn.Embedding(5, 3, max_norm=0.5), nn.Flatten(), nn.Linear(6, 2)).to(F64)
    model = Shortened() if own else plain
    before = {key: value.clone() for key, value in model.state_dict().items()}
    data = [(torch.tensor([[0, 1], [2, 3], [4, 0]]), torch.zeros(3, 2, dtype=F64))]
    with contextlib.suppress(LapisError):
        lapis.laplace(model, data, "gaussian")
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


GEOMETRIES: dict[str, tuple[tuple[int, ...], int, tuple[int, ...], dict[str, Any]]] = {
    "line": ((3, 4, 9), 1, (3,), {"stride": 1, "dilation": 1, "padding": 1}),
    "image": ((2, 3, 8, 7), 1, (3, 2), {"stride": 1, "dilation": 1, "padding": 0}),
    "padded": ((2, 1, 6, 6), 1, (5, 5), {"stride": 1, "dilation": 1, "padding": 2}),
    "same": ((2, 2, 8, 6), 1, (4, 3), {"stride": (1, 1), "dilation": 1, "padding": "same"}),
    "sparse": ((2, 2, 8, 11), 1, (3, 3), {"stride": (1, 2), "dilation": (1, 3), "padding": (1, 2)}),
    "groups": ((2, 6, 7, 6), 3, (3, 3), {"stride": 1, "dilation": 1, "padding": 1}),
    "depthwise": ((2, 4, 7, 6), 4, (2, 3), {"stride": 1, "dilation": 1, "padding": 1}),
    "volume": ((2, 2, 6, 5, 4), 1, (3, 2, 2), {"stride": (1, 2, 1), "dilation": 1, "padding": (1, 0, 1)}),
}


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("name", GEOMETRIES)
def test_moments_of_overlapping_patches_are_those_of_patches(name: str, bias: bool) -> None:
    shape, groups, kernel, arguments = GEOMETRIES[name]
    x = torch.randn(shape, dtype=F64, generator=torch.Generator().manual_seed(0))
    a = patches.patches(x, kernel, arguments, groups).flatten(1, 2)
    if bias:
        a = torch.cat([a, torch.ones_like(a[..., :1])], -1)
    start = torch.randn(groups, a.shape[-1], a.shape[-1], dtype=F64, generator=torch.Generator().manual_seed(1))
    total = start.clone()
    patches.add_patch_moment(total, x, kernel, arguments, groups)
    assert relative_error((total - start).tril(), (a.mT @ a).tril()) < 1e-13


@pytest.mark.parametrize("bias", ["joint", "separate"])
@pytest.mark.parametrize("sharing", ["expand", "reduce"])
def test_kronecker_factors_are_the_same_however_patches_are_summed(
    sharing: str, bias: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A convolution that is used twice, next to one whose patches share no rows."""

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Conv2d(2, 2, 3, padding=1), nn.Conv2d(2, 3, 3, stride=2)

        def forward(self, x: Tensor) -> Tensor:
            h: Tensor = self.second(torch.tanh(self.first(torch.tanh(self.first(x)))))
            return h.mean((2, 3))

    torch.manual_seed(0)
    model, data = Twice().double(), (torch.randn(5, 2, 8, 9, dtype=F64), torch.randn(5, 3, dtype=F64))
    seen: list[int] = []
    add = patches.add_patch_moment
    monkeypatch.setattr(
        "lapis.curvature.recording.patches.add_patch_moment", lambda *given: (seen.append(1), add(*given))
    )

    def factors() -> list[Tensor]:
        found = lapis.laplace(model, data, "regression", structure="kronecker", sharing=sharing, bias=bias, prior=PRIOR)  # type: ignore[arg-type]
        return [block.state()["inputs"].tril() for block in found.curvature.blocks]

    quick = factors()
    assert len(seen) == (3 if sharing == "expand" else 0)  # two uses, and a proof for their geometry
    monkeypatch.setattr(patches, "MANY_ROWS", math.inf)
    assert all(relative_error(one, other) < 1e-12 for one, other in zip(quick, factors(), strict=True))


@pytest.mark.parametrize("dtype", [F64, torch.float32])
@pytest.mark.parametrize("chunk", [2**10, 2**24])
def test_dense_curvature_by_factors_of_layers_at_few_positions_is_the_reference(
    chunk: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Linear layers before and behind a convolution, which goes by rows; several batches, many strips or one."""
    monkeypatch.setattr(gram, "CHUNK_BYTES", chunk)
    multiplied: list[int] = []
    add = gram.Gram._add_factored
    monkeypatch.setattr(gram.Gram, "_add_factored", lambda *args: multiplied.append(args[1]) or add(*args))
    model = nn.Sequential(
        nn.Linear(20, 12, bias=False), nn.Tanh(), nn.Unflatten(1, (1, 3, 4)), nn.Conv2d(1, 4, 3, padding=1), nn.Tanh(),
        nn.Flatten(), nn.Linear(48, 15), nn.Tanh(), nn.Linear(15, 7),
    ).to(dtype)  # fmt: skip
    x, y = torch.randn(130, 20, dtype=dtype), torch.randint(7, (130,))
    data = list(zip(x.split((50, 50, 30)), y.split((50, 50, 30)), strict=True))
    posterior = lapis.laplace(model, data[:2], "classification", structure="dense", prior=PRIOR).update(data[2:])
    expected = reference.ggn(model.double(), x.double(), y, categorical())
    expected.diagonal().add_(PRIOR)
    assert relative_error(posterior.precision(), expected) < (1e-9 if dtype == F64 else 1e-4)
    assert set(multiplied) == {0, 2, 3}
    few = lapis.laplace(model.to(dtype), (x[:20], y[:20]), "classification", structure="dense", prior=PRIOR)
    (rows,) = (block.few_rows for block in few.curvature.blocks)
    expected = reference.ggn(model.double(), x[:20].double(), y[:20], categorical())
    assert rows.shape == (120, len(expected))
    order = torch.cat(
        [site.gather(torch.arange(len(expected)), few.network).flatten() for site in few.curvature.tape.plan.sites]
    )
    assert relative_error(rows.T @ rows, expected[order][:, order]) < (1e-9 if dtype == F64 else 1e-4)


def _one_per_cent_more_rows(factors: Any, *outputs: slice, _rows: Any = gram._Factors.rows) -> Tensor:
    return _rows(factors, *outputs) * 1.01


def _one_per_cent_more_of_a_small_site(
    total: gram.Gram, site: int, *rest: Any, _add: Any = gram.Gram._add_factored
) -> None:
    """Between the last layer and the rows of the convolution only, which are a small part of the sum."""
    (begin, end), (start, stop) = total._spans[3], total._spans[1]
    before = total._total[begin:end, start:stop].clone()
    _add(total, site, *rest)
    total._total[begin:end, start:stop] += 0.01 * (total._total[begin:end, start:stop] - before)


@functools.cache
def _many_outputs_and_their_curvature() -> tuple[nn.Module, list[tuple[Tensor, Tensor]], list[Tensor]]:
    """A network whose products are worth taking by factors, two batches, and the reference of each: computed once."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(20, 12, bias=False), nn.Tanh(), nn.Unflatten(1, (1, 3, 4)), nn.Conv2d(1, 4, 3, padding=1), nn.Tanh(),
        nn.Flatten(), nn.Linear(48, 15), nn.Tanh(), nn.Linear(15, 7),
    ).double()  # fmt: skip
    data = [(torch.randn(145, 20).double(), torch.randint(7, (145,))) for _ in range(2)]
    return model, data, [reference.ggn(model, *batch, categorical()) for batch in data]


@pytest.mark.parametrize("dtype", [F64, torch.float32])
@pytest.mark.parametrize(
    ("where", "wrong"),
    [("_Factors.rows", _one_per_cent_more_rows), ("Gram._add_factored", _one_per_cent_more_of_a_small_site)],
    ids=["rows", "products"],
)
def test_factors_that_are_wrong_are_noticed_and_not_used(
    where: str, wrong: Any, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """In a first fit, and in an update that adds to a sum that is there already."""
    exact, batches, halves = _many_outputs_and_their_curvature()
    model, data = copy.deepcopy(exact).to(dtype), [(x.to(dtype), y) for x, y in batches]
    right = lapis.laplace(model, data[:1], "classification", structure="dense", prior=PRIOR)
    with monkeypatch.context() as patch:
        patch.setattr(f"lapis.curvature.blocks.dense.gram.{where}", wrong)
        posteriors = {
            1: lapis.laplace(model, data[:1], "classification", structure="dense", prior=PRIOR),
            2: lapis.laplace(model, data, "classification", structure="dense", prior=PRIOR),
            3: right.update(data[1:]),
        }
    assert caplog.text.count(gram.FACTORED_PRODUCTS) == len(posteriors)
    for key, posterior in posteriors.items():
        expected = halves[0].clone() if key == 1 else halves[0] + halves[1]
        expected.diagonal().add_(PRIOR)
        assert relative_error(posterior.precision(), expected) < (1e-9 if dtype == F64 else 1e-4)


@pytest.mark.parametrize(
    ("together", "curvature", "expected"),
    [
        ({}, "exact", [(5, 8)]),
        ({"ALL_SEEDS_BYTES": 0}, "exact", [(3, 8), (2, 8)]),
        ({"ALL_SEEDS_BYTES": 25_000, "ALL_SEEDS_EXAMPLES": 1}, "exact", [(5, 4), (5, 4)]),
        ({"ALL_SEEDS_BYTES": 25_000, "ALL_SEEDS_EXAMPLES": 8}, "exact", [(3, 8), (2, 8)]),
        ({"ALL_SEEDS_BYTES": 25_000, "ALL_SEEDS_EXAMPLES": 1}, "empirical", [(1, 8)]),
    ],
    ids=["all together", "a few at a time", "all together in parts", "parts too small", "one seed"],
)
def test_seeds_through_convolutions_are_collected(
    together: dict[str, int], curvature: str, expected: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seeds and examples that go together, by the memory that they need; the sums are the same."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(48, 6)).double()
    data = (torch.randn(8, 1, 6, 6, dtype=F64), torch.arange(8) % 6)
    truth = {"exact": reference.ggn, "empirical": reference.empirical_fisher}[curvature]
    precision = PRIOR + truth(model, *data, categorical()).diagonal()
    seen: list[tuple[int, int]] = []
    original = accumulate._add_seeds

    def add_seeds(curvature: Any, record: Record, seeds: Tensor, *rest: Any) -> None:
        seen.append((seeds.shape[0], seeds.shape[1]))
        original(curvature, record, seeds, *rest)

    monkeypatch.setattr(accumulate, "_add_seeds", add_seeds)
    for name, value in together.items():
        monkeypatch.setattr(f"lapis.curvature.working_memory.{name}", value)
    options = {"structure": "diagonal", "curvature": curvature, "prior": PRIOR}
    posterior = lapis.laplace(model, data, "classification", **options)
    assert seen == expected
    assert relative_error(1 / posterior.marginal_variance(), precision) < 1e-9
