"""Likelihoods against torch.distributions and autograd, and what they say about targets that do not fit."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from scipy import stats
from torch import Tensor, distributions

from lapis import errors, likelihoods
from lapis.likelihoods import (
    Bernoulli,
    Categorical,
    Custom,
    Gaussian,
    HeteroscedasticGaussian,
    Likelihood,
    Poisson,
)

B, T, C = 4, 3, 4


@dataclass
class Case:
    """A likelihood, canonical outputs and targets, and log p(y | f) (B, T) by torch.distributions."""

    likelihood: Likelihood
    f: Tensor
    y: Tensor
    log_prob: Callable[[Tensor, Tensor], Tensor]


def outputs(*shape: int, scale: float = 1.0, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return scale * torch.randn(*shape, dtype=torch.float64, generator=generator)


def heteroscedastic_log_prob(f: Tensor, y: Tensor) -> Tensor:
    return distributions.Normal(f[..., : C // 2], (0.5 * f[..., C // 2 :]).exp()).log_prob(y).sum(-1)


def pinball(f: Tensor, y: Tensor) -> Tensor:
    """A convex density that is none of the built-in ones: sum_c log(2 cosh(f_c - y_c)), of one example."""
    return torch.logaddexp(f - y, y - f).sum()


def cases() -> dict[str, Case]:
    f = outputs(B, T, C, scale=2.0)
    sigma = torch.tensor([0.5, 1.0, 2.0, 0.1], dtype=torch.float64)
    classes = torch.arange(B * T).reshape(B, T) % C
    soft = outputs(B, T, C, seed=1).softmax(-1)
    real = outputs(B, T, C, seed=2)
    counts = outputs(B, T, C, seed=3).abs().mul(4).round()
    labels = (outputs(B, T, C, seed=4) > 0).double()
    return {
        "gaussian": Case(Gaussian(0.3), f, real, lambda f, y: distributions.Normal(f, 0.3).log_prob(y).sum(-1)),
        "gaussian_per_output": Case(
            Gaussian(sigma), f, real, lambda f, y: distributions.Normal(f, sigma).log_prob(y).sum(-1)
        ),
        "categorical": Case(Categorical(), f, classes, lambda f, y: distributions.Categorical(logits=f).log_prob(y)),
        "categorical_soft": Case(Categorical(), f, soft, lambda f, y: (y * f.log_softmax(-1)).sum(-1)),
        "bernoulli": Case(Bernoulli(), f, labels, lambda f, y: distributions.Bernoulli(logits=f).log_prob(y).sum(-1)),
        "poisson": Case(Poisson(), f, counts, lambda f, y: distributions.Poisson(f.exp()).log_prob(y).sum(-1)),
        "heteroscedastic": Case(HeteroscedasticGaussian(), f, real[..., : C // 2], heteroscedastic_log_prob),
        "custom": Case(Custom(pinball), f, real, lambda f, y: -(2 * (f - y).cosh()).log().sum(-1)),
    }


CASES = cases()
SAMPLED = [name for name in CASES if name not in ("custom", "categorical_soft")]
every_case = pytest.mark.parametrize("name", CASES)


def close(a: Tensor, b: Tensor, tolerance: float = 1e-12) -> None:
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


@every_case
def test_nll_is_the_density_of_torch_distributions_with_all_constants(name: str) -> None:
    case = CASES[name]
    close(case.likelihood.nll(case.f, case.y), -case.log_prob(case.f, case.y).sum(1))
    close(case.likelihood.position_nll(case.f, case.y), -case.log_prob(case.f, case.y))


@every_case
def test_gradient_is_autograds(name: str) -> None:
    case = CASES[name]
    f = case.f.clone().requires_grad_()
    (expected,) = torch.autograd.grad(case.log_prob(f, case.y).sum().neg(), f)
    close(case.likelihood.gradient(case.f, case.y), expected)


def hessian(case: Case, y: Tensor) -> Tensor:
    """Hessian of -log p in the outputs of each position, (B, T, C, C), by autograd."""
    rows, targets = case.f.reshape(B * T, C), y.reshape(B * T, *y.shape[2:])
    blocks = [
        torch.func.jacrev(torch.func.jacrev(lambda row, t=target: -case.log_prob(row, t)))(row)
        for row, target in zip(rows, targets, strict=True)
    ]
    return torch.stack(blocks).reshape(B, T, C, C)


@pytest.mark.parametrize("name", [name for name in CASES if name != "heteroscedastic"])
def test_factor_squares_to_the_hessian(name: str) -> None:
    case = CASES[name]
    s = case.likelihood.factor(case.f, case.y)
    assert s.shape[:3] == (B, T, C)
    close(s @ s.mT, hessian(case, case.y), 1e-11)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_softmax_factors_of_half_precision_are_rounded_ones(dtype: torch.dtype) -> None:
    f, y = torch.randn(5, 2, 4).to(dtype), torch.zeros(5, 2, dtype=torch.long)
    torch.testing.assert_close(Categorical().factor(f, y), Categorical().factor(f.double(), y).to(dtype))


def test_columns_of_softmax_factors_lie_one_after_another() -> None:
    """They go back through the network as seeds: another order in memory is a copy of them all."""
    s = Categorical().factor(torch.randn(5, 2, 4), torch.zeros(5, 2, dtype=torch.long))
    assert s.movedim(-1, 0).is_contiguous()


def test_factor_of_heteroscedastic_noise_squares_to_the_expected_hessian() -> None:
    """The Hessian is quadratic in y, so three Gauss-Hermite nodes per target give its expectation exactly."""
    case = CASES["heteroscedastic"]
    mean, log_variance = case.f[..., : C // 2], case.f[..., C // 2 :]
    expected = torch.zeros(B, T, C, C, dtype=torch.float64)
    for node, weight in ((-math.sqrt(3), 1 / 6), (0.0, 2 / 3), (math.sqrt(3), 1 / 6)):
        expected += weight * hessian(case, mean + node * (0.5 * log_variance).exp())
    s = case.likelihood.factor(case.f, case.y)
    close(s @ s.mT, expected, 1e-10)


@every_case
def test_curvature_times_vectors_is_s_st(name: str) -> None:
    case = CASES[name]
    s = case.likelihood.factor(case.f, case.y)
    u = outputs(3, B, T, C, seed=5)
    close(case.likelihood.curved(case.f, case.y, u), ((s @ s.mT) @ u.unsqueeze(-1)).squeeze(-1), 1e-11)
    assert case.likelihood.curved(case.f, case.y, u.float()).dtype == torch.float32


@pytest.mark.parametrize("name", SAMPLED)
def test_sampled_gradients_have_mean_zero_and_second_moment_s_st(name: str) -> None:
    """False-alarm rate 1e-6 a likelihood: normal limits for the sums, Bonferroni over all entries."""
    case = CASES[name]
    draws = 20_000
    f = case.f[:1, :1].expand(draws, 1, C)
    y = case.y[:1, :1].expand(draws, *case.y[:1, :1].shape[1:])
    generator = torch.Generator().manual_seed(1)
    g = case.likelihood.sampled_gradient(f, y, generator)[:, 0]
    s = case.likelihood.factor(case.f, case.y)[0, 0]
    products = torch.cat([g, (g.unsqueeze(-1) * g.unsqueeze(-2)).flatten(1)], -1)
    expected = torch.cat([torch.zeros(C, dtype=torch.float64), (s @ s.mT).flatten()])
    error = products.std(0) / math.sqrt(draws)
    limit = float(stats.norm.isf(0.5e-6 / len(expected)))
    off = (products.mean(0) - expected).abs()
    assert bool((off <= limit * error + 1e-12).all()), (off / error).max()


@pytest.mark.parametrize("name", SAMPLED)
def test_sampled_gradients_follow_the_generator_alone(name: str) -> None:
    case = CASES[name]
    draws = [
        case.likelihood.sampled_gradient(case.f, case.y, torch.Generator().manual_seed(seed)) for seed in (7, 7, 8)
    ]
    assert torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[0], draws[2])


@every_case
def test_log_likelihood_of_summed_statistics_is_minus_the_summed_nll(name: str) -> None:
    case = CASES[name]
    parts = [case.likelihood.statistics(case.f[part], case.y[part]) for part in ([0], [1, 2, 3])]
    total = case.likelihood.log_likelihood(parts[0] + parts[1])
    assert total.dtype == torch.float64
    assert total.dim() == 0
    close(total, -case.likelihood.nll(case.f, case.y).sum())


def test_log_likelihood_is_differentiable_in_the_noise() -> None:
    case = CASES["gaussian"]
    noise = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
    statistics = Gaussian().statistics(case.f, case.y)
    (slope,) = torch.autograd.grad(Gaussian(noise).log_likelihood(statistics), noise)
    close(slope, statistics[:C].sum() / 0.7**3 - B * T * C / torch.tensor(0.7, dtype=torch.float64))


@every_case
def test_float32_agrees_with_float64(name: str) -> None:
    case = CASES[name]
    y = case.y.float() if case.y.is_floating_point() else case.y
    for method in ("nll", "gradient", "factor"):
        narrow = getattr(case.likelihood, method)(case.f.float(), y)
        assert narrow.dtype == torch.float32
        if name == "custom" and method == "factor":
            narrow = narrow @ narrow.mT  # eigenvectors have a sign of their own
            wide = hessian(case, case.y)
        else:
            wide = getattr(case.likelihood, method)(case.f, case.y)
        torch.testing.assert_close(narrow.double(), wide, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("likelihood", [Gaussian(), Categorical(), Bernoulli()])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_extreme_outputs_stay_finite_in_float32(likelihood: Likelihood, sign: float) -> None:
    f = torch.tensor([[[sign * 1e3, -sign * 1e3, 0.0]]])
    y = likelihood.targets(torch.tensor([1]) if likelihood.name == "categorical" else torch.ones(1, 3), f)
    for value in (
        likelihood.nll(f, y),
        likelihood.gradient(f, y),
        likelihood.factor(f, y),
        likelihood.sampled_gradient(f, y, torch.Generator()),
        likelihood.statistics(f, y),
    ):
        assert bool(torch.isfinite(value).all())


def test_small_rates_and_variances_stay_finite_in_float32_and_overflow_is_an_error() -> None:
    f = torch.full((1, 1, 2), -1e3)
    assert bool(torch.isfinite(Poisson().nll(f, torch.ones(1, 1, 2))).all())
    assert bool(torch.isfinite(Poisson().factor(f, torch.ones(1, 1, 2))).all())
    with pytest.raises(errors.LikelihoodError, match="overflows"):
        Poisson().check_outputs(-f)
    with pytest.raises(errors.LikelihoodError, match="log variances"):
        HeteroscedasticGaussian().check_outputs(f)


def test_confident_softmax_keeps_its_curvature_in_float32() -> None:
    """1 - p is zero in float32 here; the curvature of the likely class, p (1 - p), must not be."""
    f = torch.tensor([[[20.0, 0.0, 1.0]]])
    s = Categorical().factor(f, torch.zeros(1, 1, dtype=torch.long))
    wide = Categorical().factor(f.double(), torch.zeros(1, 1, dtype=torch.long))
    exact = wide @ wide.mT
    variances = exact.diagonal(dim1=-2, dim2=-1)  # an entry's natural size: sqrt(H_ii H_jj)
    size = (variances.unsqueeze(-1) * variances.unsqueeze(-2)).sqrt()
    assert bool((((s @ s.mT).double() - exact).abs() <= 1e-6 * size).all())
    u = torch.tensor([3.0, -1.0, 2.0])
    product = Categorical().curved(f, torch.zeros(1, 1, dtype=torch.long), u.expand(1, 1, 1, 3))[0, 0, 0]
    assert bool(((product - exact[0, 0] @ u.double()).abs() <= 1e-6 * (exact[0, 0] @ u.double()).abs()).all())


def test_ignored_positions_count_for_nothing() -> None:
    case = CASES["categorical"]
    y = case.y.clone()
    y[:, 1] = -100
    kept = [0, 2]
    likelihood = Categorical()
    y = likelihood.targets(y, case.f)
    close(likelihood.nll(case.f, y), likelihood.nll(case.f[:, kept], y[:, kept]))
    generator = torch.Generator().manual_seed(0)
    for value in (
        likelihood.position_nll(case.f, y),
        likelihood.gradient(case.f, y),
        likelihood.factor(case.f, y),
        likelihood.curved(case.f, y, outputs(1, B, T, C, seed=5))[0],
        likelihood.sampled_gradient(case.f, y, generator),
    ):
        assert bool((value[:, 1] == 0).all())
        assert bool((value[:, kept] != 0).any())
    zero = Categorical(ignore_index=0)
    assert float(zero.nll(case.f, torch.zeros(B, T, dtype=torch.long)).sum()) == 0.0


def test_one_hot_soft_labels_are_hard_labels() -> None:
    case = CASES["categorical"]
    soft = case.likelihood.targets(torch.nn.functional.one_hot(case.y, C).float(), case.f)
    for method in ("nll", "gradient", "factor"):
        function = getattr(case.likelihood, method)
        close(function(case.f, soft), function(case.f, case.y))


@every_case
def test_channels_first_is_channels_last_permuted(name: str) -> None:
    case = CASES[name]
    last = case.likelihood
    if isinstance(last, Custom):
        first: Likelihood = Custom(pinball, channels="first")
    else:
        first = likelihoods.from_config({**last.to_config(), "channels": "first"})
    raw = case.f.reshape(B, 1, T, C)
    raw_first = raw.movedim(-1, 1)
    close(first.canonical(raw_first), last.canonical(raw))
    close(first.layout(case.f, raw_first.shape), raw_first)
    close(last.layout(case.f, raw.shape), raw)
    y = case.y.reshape(B, 1, T, *case.y.shape[2:])
    y_first = y.movedim(-1, 1) if y.dim() == 4 else y
    close(first.targets(y_first, case.f, raw_first.shape), case.y)
    close(last.targets(y, case.f, raw.shape), case.y)
    close(first.targets(y_first, case.f), last.targets(y, case.f))


@pytest.mark.parametrize("shape", [(5,), (5, 1), (5, 3), (5, 2, 4, 3), (0, 3)])
@pytest.mark.parametrize("channels", ["last", "first"])
def test_layout_inverts_canonical(shape: tuple[int, ...], channels: str) -> None:
    likelihood = Gaussian(channels=channels)  # type: ignore[arg-type]
    raw = outputs(*shape)
    f = likelihood.canonical(raw)
    assert f.dim() == 3
    close(likelihood.layout(f, raw.shape), raw)


@pytest.mark.parametrize(
    ("likelihood", "raw_shape", "y"),
    [
        (Gaussian(), (5,), torch.ones(5)),
        (Gaussian(), (5, 1), torch.ones(5)),
        (Gaussian(), (5, 1), torch.ones(5, 1, dtype=torch.int32)),
        (Gaussian(channels="first"), (5, 1, 2, 3), torch.ones(5, 2, 3)),
        (Bernoulli(), (5,), torch.ones(5, dtype=torch.bool)),
        (Bernoulli(), (5, 2), torch.ones(5, 2, dtype=torch.uint8)),
        (Poisson(), (5, 1), torch.ones(5, dtype=torch.int64)),
        (HeteroscedasticGaussian(), (5, 2), torch.ones(5)),
        (Gaussian(), (5, 1), [1.0] * 5),
        (Gaussian(), (5, 1), torch.ones(5).numpy()),
    ],
)
def test_a_single_output_may_be_left_out_of_the_targets(
    likelihood: Likelihood, raw_shape: tuple[int, ...], y: object
) -> None:
    f = likelihood.canonical(outputs(*raw_shape))
    target = likelihood.targets(y, f, raw_shape)
    assert target.dtype == f.dtype
    width = f.shape[-1] // 2 if isinstance(likelihood, HeteroscedasticGaussian) else f.shape[-1]
    assert target.shape == (*f.shape[:2], width)
    assert torch.equal(target, likelihood.targets(y, f))


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("likelihood", "shape", "y", "words"),
    [
        (Gaussian(), (2, 3), torch.zeros(2), r"wrong shape.*\(2, 3\).*Got: \(2,\)"),
        (Gaussian(), (2, 3), torch.zeros(2, 4), r"wrong shape.*\(2, 3\).*Got: \(2, 4\)"),
        (Gaussian(), (2, 3), torch.zeros(4, 3), r"batch size.*2 examples.*\(4, 3\)"),
        (Gaussian(), (2, 3), torch.tensor([[0, 0, 0], [0, NAN, 0]]), r"not finite.*nan at index \(1, 1\)"),
        (Gaussian(), (2, 1), torch.tensor([0.0, INF]), r"not finite.*inf at index 1"),
        (Gaussian(), (2, 1), torch.zeros(2, dtype=torch.complex64), r"complex.*real"),
        (Gaussian(), (2, 1), ["a", "b"], r"not numbers"),
        (Gaussian(), (2, 4, 3, 1), torch.zeros(2, 3, 4, 1), r"wrong shape.*\(2, 4, 3, 1\)"),
        (Categorical(), (2, 3), torch.tensor([0, 3]), r"out of range for 3 classes.*0 to 2.*3 at index 1"),
        (Categorical(), (2, 3), torch.tensor([-1, 0]), r"out of range.*-1 at index 0"),
        (Categorical(ignore_index=None), (2, 3), torch.tensor([0, -100]), r"out of range"),
        (Categorical(), (2, 3), torch.tensor([0.0, 1.0]), r"Soft labels.*integer classes \(\.long\(\)\)"),
        (Categorical(), (2, 3), torch.eye(3).long()[:2], r"wrong shape.*one-hot rows as floating-point"),
        (Categorical(), (2, 3), torch.tensor([True, False]), r"booleans.*\.long\(\)"),
        (Categorical(), (2, 3), torch.full((2, 3), 0.5), r"do not sum to one"),
        (Categorical(), (2, 3), torch.tensor([[2.0, -1, 0], [0, 1, 0]]), r"some are negative"),
        (Categorical(), (2, 3), torch.full((2, 3), NAN), r"not finite"),
        (Categorical(), (2, 4, 3), torch.zeros(2, 5, dtype=torch.long), r"wrong shape.*\(2, 4\)"),
        (Bernoulli(), (2, 1), torch.tensor([-1, 1]), r"outside \[0, 1\].*-1/\+1"),
        (Bernoulli(), (2, 1), torch.tensor([0.0, NAN]), r"not finite"),
        (Bernoulli(), (2, 2), torch.zeros(2), r"wrong shape"),
        (Poisson(), (2, 1), torch.tensor([0.5, 1]), r"no counts.*0\.5 at index"),
        (Poisson(), (2, 1), torch.tensor([-1, 1]), r"no counts"),
        (HeteroscedasticGaussian(), (2, 4), torch.zeros(2, 4), r"wrong shape.*\(2, 2\)"),
        (Custom(pinball), (2, 4, 1), torch.zeros(2, 3), r"positions.*\(2, 4\)"),
        (Custom(pinball), (2, 1), torch.full((2, 1), NAN), r"not finite"),
    ],
)
def test_bad_targets_say_what_was_expected_what_came_and_what_to_do(
    likelihood: Likelihood, shape: tuple[int, ...], y: object, words: str
) -> None:
    f = likelihood.canonical(torch.zeros(shape))
    with pytest.raises(errors.DataError, match=words) as caught:
        likelihood.targets(y, f, shape)
    assert all(word in str(caught.value) for word in ("Expected:", "Got:", "Do:"))


def test_targets_without_the_networks_shape_still_need_the_right_number_of_positions() -> None:
    f = torch.zeros(2, 12, 3)
    with pytest.raises(errors.DataError, match="12 in all"):
        Gaussian().targets(torch.zeros(2, 11, 3), f)
    with pytest.raises(errors.DataError, match="12 in all"):
        Categorical().targets(torch.zeros(2, 11, dtype=torch.long), f)


def test_nearly_normalised_soft_labels_are_normalised() -> None:
    y = torch.tensor([[0.33333, 0.33333, 0.33333]], dtype=torch.float64)
    target = Categorical().targets(y, torch.zeros(1, 1, 3, dtype=torch.float64))
    close(target.sum(-1), torch.ones(1, 1, dtype=torch.float64))


@pytest.mark.parametrize(
    ("likelihood", "width", "words"),
    [
        (Categorical(), 1, "bernoulli"),
        (HeteroscedasticGaussian(), 3, "even C"),
        (Gaussian(torch.ones(2)), 3, "3 .one per output"),
        (Gaussian(), 0, "C >= 1"),
    ],
)
def test_outputs_that_do_not_fit_the_likelihood_are_refused(likelihood: Likelihood, width: int, words: str) -> None:
    with pytest.raises(errors.LikelihoodError, match=words):
        likelihood.check_outputs(torch.zeros(2, 1, width))


@every_case
def test_outputs_that_fit_pass(name: str) -> None:
    CASES[name].likelihood.check_outputs(CASES[name].f)


@pytest.mark.parametrize("noise", [0.0, -1.0, NAN, INF, torch.ones(2, 2), torch.tensor([1.0, 0.0]), "loud"])
def test_a_noise_that_is_no_standard_deviation_is_refused(noise: float) -> None:
    with pytest.raises(errors.OptionError, match="noise"):
        Gaussian(noise)


def test_noise_can_be_replaced_only_where_there_is_one() -> None:
    louder = Gaussian(0.5, channels="first").with_noise(2.0)
    assert louder.noise.item() == 2.0
    assert louder.channels == "first"
    assert Categorical().noise is None
    with pytest.raises(errors.LikelihoodError, match="no noise"):
        Categorical().with_noise(1.0)


def test_curvature_scale_takes_curvature_from_one_noise_to_another() -> None:
    case = CASES["gaussian"]
    now = torch.tensor(0.6, dtype=torch.float64, requires_grad=True)
    scale = Gaussian(now).curvature_scale(Gaussian(0.3))
    assert isinstance(scale, Tensor)
    before = Gaussian(0.3).factor(case.f, case.y)
    after = Gaussian(0.6).factor(case.f, case.y)
    close(scale.detach() * (before @ before.mT), after @ after.mT)
    (slope,) = torch.autograd.grad(scale, now)
    close(slope, torch.tensor(-2 * 0.3**2 / 0.6**3, dtype=torch.float64))
    # a noise still has a slope where it is the fitted one
    (slope,) = torch.autograd.grad(Gaussian(now).curvature_scale(Gaussian(now)), now)
    close(slope, torch.tensor(-2 / 0.6, dtype=torch.float64))


def test_curvature_scale_needs_one_factor_for_all_outputs() -> None:
    noise = torch.tensor([0.5, 1.0], dtype=torch.float64)
    close(torch.as_tensor(Gaussian(2 * noise).curvature_scale(Gaussian(noise))), torch.tensor(0.25).double())
    with pytest.raises(errors.LikelihoodError, match="refit"):
        Gaussian(1.0).curvature_scale(Gaussian(noise))
    with pytest.raises(errors.LikelihoodError, match="different numbers"):
        Gaussian(torch.ones(3)).curvature_scale(Gaussian(noise))
    with pytest.raises(errors.LikelihoodError, match="differentiated"):
        Gaussian(noise.clone().requires_grad_()).curvature_scale(Gaussian(noise))
    with pytest.raises(errors.LikelihoodError, match="refit"):
        Categorical().curvature_scale(Bernoulli())
    assert Categorical().curvature_scale(Categorical()) == 1.0
    assert Custom(pinball).curvature_scale(Custom(pinball)) == 1.0
    with pytest.raises(errors.LikelihoodError, match="refit"):
        Custom(pinball, "a").curvature_scale(Custom(pinball, "b"))


@every_case
def test_configurations_survive_json(name: str) -> None:
    likelihood = CASES[name].likelihood
    config = json.loads(json.dumps(likelihood.to_config()))
    if name == "custom":
        with pytest.raises(errors.LikelihoodError, match="likelihood="):
            likelihoods.from_config(config)
        return
    again = likelihoods.from_config(config)
    assert type(again) is type(likelihood)
    assert again.to_config() == likelihood.to_config()
    assert repr(again) == repr(likelihood)


@pytest.mark.parametrize("config", [{"name": "wishart"}, {}, {"name": "poisson", "noise": 1.0}])
def test_configurations_that_describe_nothing_are_refused(config: dict[str, object]) -> None:
    with pytest.raises(errors.FileError):
        likelihoods.from_config(config)


def test_likelihoods_have_the_names_people_know() -> None:
    names = {
        "gaussian": Gaussian,
        "regression": Gaussian,
        "categorical": Categorical,
        "classification": Categorical,
        "bernoulli": Bernoulli,
        "binary": Bernoulli,
        "poisson": Poisson,
        "counts": Poisson,
        "heteroscedastic": HeteroscedasticGaussian,
    }
    for name, kind in names.items():
        assert type(likelihoods.resolve(name)) is kind
    given = Poisson()
    assert likelihoods.resolve(given) is given
    for unknown in ("guassian", 3):
        with pytest.raises(errors.OptionError, match="heteroscedastic"):
            likelihoods.resolve(unknown)  # type: ignore[arg-type]


def test_unknown_options_are_refused() -> None:
    with pytest.raises(errors.OptionError, match="channels"):
        Gaussian(channels="middle")  # type: ignore[arg-type]
    with pytest.raises(errors.OptionError, match="ignore_index"):
        Categorical(ignore_index=1.5)  # type: ignore[arg-type]
    with pytest.raises(errors.OptionError, match="a function"):
        Custom(3)  # type: ignore[arg-type]
    with pytest.raises(errors.LikelihoodError, match="batch dimension"):
        Gaussian().canonical(torch.tensor(1.0))


def test_custom_functions_may_take_one_example_or_a_batch() -> None:
    f, y = outputs(6, 1, 3), outputs(6, 1, 3, seed=1)
    expected = Gaussian().nll(f, y)
    constant = 1.5 * math.log(2 * math.pi)
    functions: list[Callable[[Tensor, Tensor], Tensor]] = [
        lambda f, y: 0.5 * ((f - y) ** 2).sum() + constant,
        lambda f, y: 0.5 * ((f - y) ** 2).sum(-1) + constant,
        lambda f, y: 0.5 * ((f - y) ** 2).sum(1) + constant,
        lambda f, y: 0.5 * sum((f[:, c] - y[:, c]) ** 2 for c in range(3)) + constant,
        lambda f, y: 0.5 * sum((f[c] - y[c]) ** 2 for c in range(3)) + constant,
        lambda f, y: 0.5 * ((f - y) ** 2).sum() + (constant if f[0] > y[0] else 1 * constant),
    ]
    for function in functions:
        likelihood = Custom(function)
        target = likelihood.targets(y[:, 0], f)
        close(likelihood.nll(f, target), expected)
        s = likelihood.factor(f, target)
        close(s @ s.mT, torch.eye(3, dtype=torch.float64).expand(6, 1, 3, 3))


def test_custom_functions_that_are_mistaken_are_refused() -> None:
    f, y = outputs(6, 1, 3), outputs(6, 3, seed=1)
    faulty: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
        "mixes": lambda f, y: ((f - y) ** 2).sum(1) / f.shape[0],
        "no value per example": lambda f, y: (f - y) ** 2,
        "failed": lambda f, y: f @ y[:, :2],
    }
    for words, function in faulty.items():
        with pytest.raises(errors.LikelihoodError, match=words):
            Custom(function).targets(y, f)
    with pytest.raises(errors.LikelihoodError, match="differentiated"):
        Custom(lambda f, y: y.sum()).gradient(f, y.unsqueeze(1))


def test_custom_functions_that_are_not_convex_are_refused_and_linear_ones_have_no_curvature() -> None:
    f, y = outputs(6, 1, 3), outputs(6, 1, 3, seed=1)
    with pytest.raises(errors.LikelihoodError, match="empirical"):
        Custom(lambda f, y: -((f - y) ** 2).sum()).factor(f, y)
    with pytest.raises(errors.LikelihoodError, match="empirical"):
        Custom(lambda f, y: -((f - y) ** 2).sum()).curved(f, y, outputs(2, 6, 1, 3, seed=2))
    linear = Custom(lambda f, y: (f * y).sum())
    assert float(linear.factor(f, y).abs().max()) == 0.0
    close(linear.gradient(f, y), y)
    with pytest.raises(errors.LikelihoodError, match="drawn"):
        linear.sampled_gradient(f, y)


def test_custom_categorical_is_categorical_at_every_position() -> None:
    case = CASES["categorical"]
    cross_entropy = torch.nn.functional.cross_entropy
    for function in (cross_entropy, lambda f, y: cross_entropy(f, y, reduction="none")):
        custom = Custom(function)
        y = custom.targets(case.y, case.f)
        close(custom.nll(case.f, y), case.likelihood.nll(case.f, case.y))
        close(custom.gradient(case.f, y), case.likelihood.gradient(case.f, case.y))
        s, t = custom.factor(case.f, y), case.likelihood.factor(case.f, case.y)
        close(s @ s.mT, t @ t.mT, 1e-8)


def test_the_softmax_factor_is_differentiable() -> None:
    """d(S S^T) is that of diag(p) - p p^T."""
    f = torch.randn(3, 1, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0), requires_grad=True)
    y, weight = torch.zeros(3, 1, dtype=torch.long), torch.linspace(-1, 1, 16, dtype=torch.float64).reshape(4, 4)
    factor, p = Categorical().factor(f, y), f.softmax(-1)
    (found,) = torch.autograd.grad(((factor @ factor.mT) * weight).sum(), f)
    (expected,) = torch.autograd.grad(((torch.diag_embed(p) - p[..., None] * p[..., None, :]) * weight).sum(), f)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
