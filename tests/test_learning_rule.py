"""The Bayesian learning rule: families, their parameters, and the rule in all its forms, against naive references."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import lapis
from lapis import learning_rule
from lapis.learning_rule import (
    Bernoulli,
    Categorical,
    DiagonalGaussian,
    Dirichlet,
    Family,
    FixedGaussian,
    FixedSpikeAndSlab,
    FullGaussian,
    GaussianMixture,
    KroneckerGaussian,
    SpikeAndSlab,
    expected_gradient,
    run,
    step,
)


def tensor(*values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


S = tensor([2.0, 0.6], [0.6, 1.5])
FULL = FullGaussian(tensor(0.3, -0.7), S)
MEMBERS: dict[str, Family] = {
    "fixed": FixedGaussian(tensor(0.3, -0.7), torch.linalg.inv(S)),
    "full": FULL,
    "diagonal": DiagonalGaussian(tensor(0.3, -0.7), tensor(2.0, 0.8)),
    "kronecker": KroneckerGaussian(tensor(0.3, -0.7, 0.2, 1.0, 0.5, -0.4), S, torch.eye(3).double() + 0.3),
    "mixture": GaussianMixture((FullGaussian(tensor(-1.0, 0.0), 3 * S), FULL), tensor(0.3, 0.7)),
    "learned mixture": GaussianMixture(
        (DiagonalGaussian(tensor(-1.0), tensor(3.0)), DiagonalGaussian(tensor(0.8), tensor(2.0))),
        tensor(0.3, 0.7),
        True,
    ),
    "bernoulli": Bernoulli(tensor(0.4, -1.1, 0.2)),
    "categorical": Categorical(tensor(0.4, -1.1, 0.2)),
    "dirichlet": Dirichlet(tensor(1.4, 0.6, 3.0)),
    "spike and slab": SpikeAndSlab(tensor(0.3, -0.7), tensor(2.0, 0.8), tensor(0.6, 0.3)),
    "dropout": FixedSpikeAndSlab(tensor(0.3, -0.7, 1.0), tensor(0.6), 2.0, torch.tensor([0, 0, -1])),
}
STATISTICS: dict[str, Callable[[Tensor], Sequence[Tensor]]] = {
    "fixed": lambda t: (t,),
    "full": lambda t: (t, torch.outer(t, t)),
    "diagonal": lambda t: (t, t.square()),
    "bernoulli": lambda t: (t,),
    "categorical": lambda t: (t,),
    "dirichlet": lambda t: (t.log(),),
    "spike and slab": lambda t: ((t != 0).double(), t, t.square()),
}
"""T(theta) of the families that are exponential families in all their parameters."""


def parameters(q: Family, vector: Tensor) -> list[Tensor]:
    """Natural parameters from independent numbers: symmetric matrices are given by their upper triangles."""
    found, start = [], 0
    for own in q.natural():
        if own.dim() == 2:
            rows, columns = torch.triu_indices(*own.shape)
            part = torch.zeros_like(own).index_put((rows, columns), vector[start : start + len(rows)])
            found.append(part + part.T - part.diag().diag())
            start += len(rows)
        else:
            found.append(vector[start : start + len(own)])
            start += len(own)
    return found


def independent(q: Family, parts: Sequence[Tensor]) -> Tensor:
    """The inverse of `parameters`."""
    return torch.cat([p[tuple(torch.triu_indices(*p.shape))] if p.dim() == 2 else p for p in parts])


def integral(q: Family, function: Callable[[Tensor], Tensor]) -> Tensor:
    """E_q[function] of rows, differentiable in q's parameters: a sum over all vectors, or a fine grid."""
    if isinstance(q, Bernoulli):
        points, volume = tensor(*itertools.product((-1.0, 1.0), repeat=q.size)), 1.0
    elif isinstance(q, Categorical):
        points, volume = torch.eye(q.size).double(), 1.0
    else:
        line = torch.linspace(-12, 12, 481, dtype=torch.float64)
        points = torch.cartesian_prod(*[line] * q.size).reshape(-1, q.size)
        volume = float(line[1] - line[0]) ** q.size
    return (q.log_prob(points).exp() * function(points)).sum() * volume


def quartic(theta: Tensor) -> Tensor:
    """A polynomial of degree four, on which quadrature is exact, with slopes that differ between weights."""
    weights = torch.arange(1.0, theta.shape[-1] + 1).double()
    centre = (weights * theta).sum(-1) / theta.shape[-1] - 0.5
    return 0.2 * centre**4 + centre**2 + (0.3 * theta.square() * weights).sum(-1) + 0.1 * theta.prod(-1)


@pytest.mark.parametrize("name", MEMBERS)
def test_natural_and_expectation_parameters_determine_each_other(name: str) -> None:
    q = MEMBERS[name]
    theta = q.sample(3)
    for again in (q.with_natural(q.natural()), q.with_expectation(q.expectation())):
        torch.testing.assert_close(again.log_prob(theta), q.log_prob(theta), rtol=1e-9, atol=1e-9)
        for one, other in zip(again.expectation(), q.expectation(), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", STATISTICS)
def test_log_probabilities_have_the_slope_of_an_exponential_family(name: str) -> None:
    """d log q(theta) / d lambda = T(theta) - mu."""
    q, weights = MEMBERS[name], MEMBERS[name].sample(4, generator=torch.Generator().manual_seed(1))
    leaves = [part.clone().requires_grad_() for part in q.natural()]
    for theta in weights:
        slopes = torch.autograd.grad(q.with_natural(leaves).log_prob(theta), leaves)
        for slope, statistic, mu in zip(slopes, STATISTICS[name](theta), q.expectation(), strict=True):
            torch.testing.assert_close(slope, statistic - mu, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", ["full", "diagonal", "bernoulli", "categorical", "dirichlet", "spike and slab"])
def test_the_gradient_of_the_entropy_in_mu_is_minus_lambda(name: str) -> None:
    """With the chain rule: d H / d lambda = -(d mu / d lambda) lambda; in a symmetric matrix every entry counts."""
    q = MEMBERS[name]
    leaves = [part.clone().requires_grad_() for part in q.natural()]
    member = q.with_natural(leaves)
    slopes = torch.autograd.grad(member.entropy(), leaves, retain_graph=True, allow_unused=True, materialize_grads=True)
    towards = sum((mu * own.detach()).sum() for mu, own in zip(member.expectation(), leaves, strict=True))
    for slope, expected in zip(slopes, torch.autograd.grad(towards, leaves), strict=True):
        torch.testing.assert_close(slope, -expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", MEMBERS)
def test_draws_have_the_mean_and_the_entropy(name: str) -> None:
    """4000 draws, at most 7 means and an entropy each, all within 5 standard errors: false alarm below 1e-5 a family.

    The mixture's own entropy is an estimate from 10,000 draws, which adds to the error."""
    q = MEMBERS[name]
    theta = q.sample(4000, generator=torch.Generator().manual_seed(7))
    logs = -q.log_prob(theta)
    for found, expected in ((theta, q.mean), (logs, q.entropy())):
        error = found.std(0) / math.sqrt(4000) * (1.2 if "mixture" in name else 1)
        assert bool(((found.mean(0) - expected).abs() <= 5 * error + 1e-12).all())


def natural_gradient(q: Family, loss: Callable[[Tensor], Tensor]) -> Tensor:
    """F^-1 grad_lambda (E_q[loss] - H(q)) in independent numbers, by autograd of integrals; F by E[-d^2 log q]."""
    point = independent(q, q.natural()).detach()

    def objective(vector: Tensor) -> Tensor:
        member = q.with_natural(parameters(q, vector))
        return integral(member, lambda theta: loss(theta) + member.log_prob(theta))

    def divergence(vector: Tensor) -> Tensor:
        member = q.with_natural(parameters(q, vector))
        return integral(q, lambda theta: q.log_prob(theta) - member.log_prob(theta))

    fisher = torch.autograd.functional.hessian(divergence, point)
    leaf = point.clone().requires_grad_()
    (slope,) = torch.autograd.grad(objective(leaf), leaf)
    return torch.linalg.pinv(fisher, rtol=1e-10) @ slope


@pytest.mark.parametrize("name", ["fixed", "full", "diagonal", "bernoulli", "categorical"])
def test_the_rule_is_natural_gradient_descent(name: str) -> None:
    q, rate = MEMBERS[name], 0.1
    found = independent(q, step(q, quartic, rate, "quadrature", batched=True).natural())
    expected = independent(q, q.natural()) - rate * natural_gradient(q, quartic)
    if name == "categorical":
        found, expected = found - found.mean(), expected - expected.mean()
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", ["full", "diagonal", "bernoulli", "categorical", "spike and slab"])
def test_the_rule_is_mirror_descent(name: str) -> None:
    """Its result minimises <gradient, mu'> + KL(q' | q) / rate over q'; KL is -H(q') - <lambda, mu'> and a constant."""
    q, rate = MEMBERS[name], 0.1
    gradient = q.objective_gradient(*_asked(quartic, "quadrature"))
    new = step(q, quartic, rate, "quadrature", batched=True)

    def proximal(vector: Tensor) -> Tensor:
        other = q.with_natural(parameters(q, vector))
        pairs = zip(gradient, q.natural(), other.expectation(), strict=True)
        return sum((((g - own / rate) * mu).sum() for g, own, mu in pairs), -other.entropy() / rate)

    leaf = independent(q, new.natural()).detach().requires_grad_()
    value = proximal(leaf)
    (slope,) = torch.autograd.grad(value, leaf)
    value = value.detach()
    assert float(slope.abs().max()) < 1e-8
    for seed in range(5):
        noise = 1e-2 * torch.randn(leaf.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        assert float(proximal(leaf.detach() + noise)) >= float(value)


def _asked(loss: Callable[[Tensor], Tensor], kind: Any, **options: Any) -> tuple[Any, Any]:
    from lapis.learning_rule.expectations import Expectation
    from lapis.learning_rule.losses import Loss

    chosen = {"samples": None, "points": None, "curvature": None, "generator": None, **options}
    return Loss(loss, True), Expectation.of(kind, **chosen)


def test_a_kronecker_step_is_the_natural_gradient_of_its_precision() -> None:
    """The change of S = U x V; the factors' own changes are determined up to a constant only."""
    q = MEMBERS["kronecker"]
    assert isinstance(q, KroneckerGaussian)
    hessian = torch.randn(6, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    hessian = hessian @ hessian.T + torch.eye(6)

    def loss(theta: Tensor) -> Tensor:
        return theta @ hessian @ theta / 2

    def dense(vector: Tensor) -> Tensor:
        return torch.kron(vector[:4].reshape(2, 2), vector[4:].reshape(3, 3))

    def divergence(vector: Tensor) -> Tensor:  # of two Gaussians with one mean
        other = dense(vector)
        return ((torch.linalg.inv(q.matrix) @ other).trace() - torch.linalg.slogdet(other)[1]) / 2

    def objective(vector: Tensor) -> Tensor:
        precision = dense(vector)
        return ((hessian @ torch.linalg.inv(precision)).trace() + torch.linalg.slogdet(precision)[1]) / 2

    point = torch.cat([q.rows.flatten(), q.columns.flatten()])
    fisher = torch.autograd.functional.hessian(divergence, point)
    slope = torch.autograd.functional.jacobian(objective, point)
    _, tangent = torch.autograd.functional.jvp(dense, point, -torch.linalg.pinv(fisher, rtol=1e-9) @ slope)
    rate = 1e-6
    new = step(q, loss, rate)
    torch.testing.assert_close((new.matrix - q.matrix) / rate, tangent, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(new.mean, q.mean - rate * torch.linalg.solve(new.matrix, hessian @ q.mean))


def test_a_mixture_follows_the_natural_gradient_of_its_blocks() -> None:
    """Against autograd of the objective on a grid, and the blocks of the Fisher information of theta and component."""
    q, rate = MEMBERS["learned mixture"], 0.1
    assert isinstance(q, GaussianMixture)
    weights = q.weights
    assert weights is not None
    leaf = independent(q, q.natural()).detach().requires_grad_()
    member = q.with_natural(parameters(q, leaf))
    value = integral(member, lambda theta: quartic(theta) + member.log_prob(theta))
    (slope,) = torch.autograd.grad(value, leaf)
    blocks = [torch.diag(weights[:-1]) - torch.outer(weights[:-1], weights[:-1])]
    for weight, part in zip(weights, q.components, strict=True):
        jacobian = torch.autograd.functional.jacobian(
            lambda v, part=part: independent(part, part.with_natural(parameters(part, v)).expectation()),
            independent(part, part.natural()),
        )
        blocks.append(weight * jacobian)
    expected = leaf.detach() - rate * torch.linalg.solve(torch.block_diag(*blocks), slope)
    # 60 points: the logarithm of a mixture is no polynomial
    found = step(q, quartic, rate, "quadrature", points=60, batched=True)
    torch.testing.assert_close(independent(q, found.natural()), expected, rtol=1e-5, atol=1e-5)


def test_components_far_apart_do_not_see_each_other() -> None:
    parts = FullGaussian(tensor(-40.0), tensor([2.0])), FullGaussian(tensor(40.0), tensor([3.0]))
    q = GaussianMixture(parts)
    new = step(q, lambda theta: theta.cos().sum() + theta.square().sum(), 0.5)
    for part, moved in zip(parts, new.components, strict=True):
        alone = step(part, lambda theta: theta.cos().sum() + theta.square().sum(), 0.5)
        torch.testing.assert_close(moved.mean, alone.mean)
        torch.testing.assert_close(moved.matrix, alone.matrix)


EXACT = [name for name in MEMBERS if name != "dirichlet"]


def gradients(name: str, kind: str, repeats: int, **options: Any) -> Tensor:
    """Estimates of grad_mu E_q[quartic], (repeats, numbers)."""
    q, generator = MEMBERS[name], torch.Generator().manual_seed(3)
    found = []
    for _ in range(repeats):
        parts = expected_gradient(q, quartic, kind, generator=generator, batched=True, **options)  # type: ignore[arg-type]
        found.append(independent(q, parts))
    return torch.stack(found)


@pytest.mark.parametrize("kind", ["monte_carlo", "reparameterised", "function_values"])
@pytest.mark.parametrize("name", EXACT)
def test_estimates_from_draws_are_unbiased(name: str, kind: str) -> None:
    """Means of 60 estimates are within 5 standard errors of quadrature: with at most 11 numbers a case, and t with 59
    degrees of freedom, false alarm below 1e-4 a case."""
    options: dict[str, Any] = {"samples": 40}
    if kind == "reparameterised":
        if name not in ("full", "diagonal", "kronecker", "mixture", "learned mixture"):
            return
        kind, options = "monte_carlo", {"samples": 40, "curvature": "reparameterised"}
    q = MEMBERS[name]
    points = {} if isinstance(q, (Bernoulli, Categorical)) else {"points": 4 if q.size > 2 else 8}
    exact = independent(q, expected_gradient(q, quartic, "quadrature", batched=True, **points))
    found = gradients(name, kind, 60, **options)
    if name == "categorical" and kind == "function_values":
        assert bool(found.isfinite().all())
    assert bool(((found.mean(0) - exact).abs() <= 5 * found.std(0) / math.sqrt(60) + 1e-9).all())


@pytest.mark.parametrize("kind", ["monte_carlo", "function_values"])
def test_estimates_of_a_dirichlet_are_unbiased(kind: str) -> None:
    """For loss = a^T theta the exact gradient is F^-1 d(a^T mean)/d alpha; false alarm below 1e-4."""
    q, slopes = Dirichlet(tensor(1.4, 0.6, 3.0)), tensor(1.0, -2.0, 0.5)
    alpha = q.concentration.clone().requires_grad_()
    (slope,) = torch.autograd.grad(slopes @ (alpha / alpha.sum()), alpha)
    fisher = torch.autograd.functional.jacobian(lambda a: Dirichlet(a).expectation()[0], q.concentration)
    exact, generator = torch.linalg.solve(fisher, slope), torch.Generator().manual_seed(0)
    found = torch.stack([
        expected_gradient(q, lambda theta: theta @ slopes, kind, samples=50, generator=generator, batched=True)[0]  # type: ignore[arg-type]
        for _ in range(60)
    ])  # fmt: skip
    assert bool(((found.mean(0) - exact).abs() <= 5 * found.std(0) / math.sqrt(60)).all())


@pytest.mark.parametrize("alpha", [(1.4, 0.6, 3.0), (0.3, 0.2, 0.4), (40.0, 7.0, 2.0), (5.0, 0.5)])
def test_quadrature_of_a_dirichlet_is_exact(alpha: tuple[float, ...]) -> None:
    """For a^T theta + |theta|^2 + c^T log theta: F^-1 times the gradient in alpha of the first two's means, and c."""
    q, slopes = Dirichlet(tensor(*alpha)), tensor(1.0, -2.0, 0.5)[: len(alpha)]
    leaf = q.concentration.clone().requires_grad_()
    total = leaf.sum()
    expected = slopes @ (leaf / total) + (leaf * (leaf + 1)).sum() / (total * (total + 1))
    (slope,) = torch.autograd.grad(expected, leaf)
    fisher = torch.autograd.functional.jacobian(lambda a: Dirichlet(a).expectation()[0], q.concentration)
    exact = torch.linalg.solve(fisher, slope) + slopes.flip(0)

    def loss(theta: Tensor) -> Tensor:
        return theta @ slopes + theta.square().sum(-1) + theta.log() @ slopes.flip(0)

    for points, relative in ((20, 1e-3), (60, 1e-8)):
        (found,) = expected_gradient(q, loss, "quadrature", points=points, batched=True)
        assert float((found - exact).norm() / exact.norm()) < relative


def test_kronecker_factors_share_their_scale_out() -> None:
    """Only U x V matters: a step does not depend on who has the scale, and leaves it with both."""
    q = MEMBERS["kronecker"]
    assert isinstance(q, KroneckerGaussian)
    lopsided = KroneckerGaussian(q.mean, q.rows * 1e6, q.columns / 1e6)
    one, other = (step(each, quartic, 0.3, "monte_carlo", samples=4, batched=True) for each in (q, lopsided))
    torch.testing.assert_close(one.matrix, other.matrix)
    torch.testing.assert_close(one.mean, other.mean)
    torch.testing.assert_close(other.rows.diagonal().mean(), other.columns.diagonal().mean())


@pytest.mark.parametrize("name", ["full", "diagonal", "kronecker"])
def test_curvature_from_gradients_is_the_expected_hessian(name: str) -> None:
    q = MEMBERS[name]
    points = 4 if q.size > 2 else 10
    by_hessian, by_gradients = (
        expected_gradient(q, quartic, "quadrature", points=points, curvature=curvature, batched=True)  # type: ignore[arg-type]
        for curvature in ("hessian", "reparameterised")
    )
    for one, other in zip(by_hessian, by_gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


def test_a_batched_loss_gives_the_same_step() -> None:
    for q in MEMBERS.values():
        kind: Any = "local" if isinstance(q, Dirichlet) else "monte_carlo"
        one, two = (step(q, quartic, 0.05, kind, batched=batched) for batched in (False, True))
        for left, right in zip(one.natural(), two.natural(), strict=True):
            torch.testing.assert_close(left, right)


@pytest.mark.parametrize("name", ["full", "diagonal", "kronecker", "mixture", "learned mixture"])
def test_the_improved_rule_keeps_precisions_positive_where_the_plain_one_fails(name: str) -> None:
    q = MEMBERS[name]

    def concave(theta: Tensor) -> Tensor:
        return -20 * theta.square().sum(-1)

    with pytest.raises(lapis.NotPositiveDefiniteError, match=r"improved"):
        step(q, concave, 0.5)
    step(q, concave, 0.5, improved=True)


def test_the_improved_rule_is_the_plain_one_to_first_order() -> None:
    gaps = []
    for rate in (1e-2, 1e-3):
        plain, better = (
            step(FULL, quartic, rate, "quadrature", points=4, batched=True, improved=flag) for flag in (False, True)
        )
        gaps.append(float((plain.precision - better.precision).abs().max()))
    assert gaps[1] == pytest.approx(gaps[0] / 100, rel=0.05)
    change = (step(FULL, quartic, 1e-2, "quadrature", points=4, batched=True).precision - FULL.precision) / 1e-2
    improved = step(FULL, quartic, 1e-2, "quadrature", points=4, batched=True, improved=True).precision
    naive = FULL.precision + 1e-2 * change + 1e-4 / 2 * change @ torch.linalg.inv(FULL.precision) @ change
    torch.testing.assert_close(improved, naive)


def test_drawn_expectations_take_the_improved_rule_by_default() -> None:
    draws = torch.Generator().manual_seed(0)
    options: dict[str, Any] = {"samples": 2, "generator": draws}
    chosen = {}
    for improved in (None, True, False):
        draws.manual_seed(0)
        chosen[improved] = step(FULL, quartic, 0.3, "monte_carlo", improved=improved, **options).precision
    torch.testing.assert_close(chosen[None], chosen[True])
    assert not torch.allclose(chosen[None], chosen[False])


def test_a_run_ends_where_the_gradient_vanishes_and_says_so() -> None:
    start = FullGaussian(tensor(1.0, 1.0), torch.eye(2).double())
    found = run(start, quartic, 0.3, "quadrature", batched=True, max_iterations=300, tolerance=1e-10)
    assert found.converged
    assert found.iterates[0] is start
    assert found.iterates[-1] is found.q
    again = step(found.q, quartic, 1.0, "quadrature", batched=True)
    torch.testing.assert_close(again.precision, found.q.precision, rtol=1e-7, atol=1e-7)
    short = run(start, quartic, lambda number: 0.1 / (1 + number), max_iterations=3)
    assert not short.converged
    assert len(short.residuals) == 3
    torch.testing.assert_close(short.iterates[2].mean, step(short.iterates[1], quartic, 0.05).mean)
    drawn = run(start, quartic, 0.1, "monte_carlo", max_iterations=3)
    assert "not judged" in drawn.reason
    assert len(set(drawn.residuals)) == 3


def line(theta: Tensor) -> Tensor:
    return theta.sum(-1)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: step(FULL, quartic, 0.1, samples=3), "samples has no meaning"),
        (lambda: step(FULL, quartic, 0.1, points=3), "points has no meaning"),
        (lambda: step(FULL, quartic, 0.1, curvature="reparameterised"), "No noise"),
        (lambda: step(FULL, quartic, 0.1, "function_values", curvature="hessian"), "curvature has no meaning"),
        (lambda: step(FULL, quartic, 0.1, "function_values", samples=1), "at least 2"),
        (lambda: step(FULL, quartic, 0.1, "exactly"), "Unknown expectation"),
        (lambda: step(FULL, quartic, -0.1), "Bad rate"),
        (lambda: step("q", quartic, 0.1), "Bad q"),
        (lambda: step(MEMBERS["bernoulli"], quartic, 0.1, curvature="hessian"), "no curvature to choose"),
        (lambda: step(MEMBERS["bernoulli"], quartic, 0.1, improved=True), "no improved rule"),
        (lambda: step(Dirichlet(torch.ones(9)), line, 0.1, "quadrature"), "Too many dimensions"),
        (lambda: step(Bernoulli(torch.zeros(40)), line, 0.1, "quadrature"), "Too many dimensions"),
        (lambda: step(FULL, lambda theta: theta, 0.1), "no real number"),
        (lambda: step(FULL, lambda theta: theta.sum() / 0, 0.1), "not finite"),
        (lambda: step(FULL, lambda theta: torch.tensor(1.0), 0.1), "no gradient"),
        (lambda: run(FULL, quartic, lambda number: -1.0), "Bad rate"),
        (lambda: FullGaussian(tensor(0.0, 1.0), torch.eye(3)), "right size"),
        (lambda: FullGaussian(tensor(0.0, 1.0), -torch.eye(2)), "positive definite"),
        (lambda: FullGaussian(tensor(0.0, 1.0), tensor([1.0, 0.5], [0.0, 1.0])), "symmetric"),
        (lambda: KroneckerGaussian(tensor(0.0, 1.0), torch.eye(2), torch.eye(2)), "factors"),
        (lambda: GaussianMixture((FULL,)), "components"),
        (lambda: GaussianMixture((FULL, FULL), tensor(0.5, 0.6)), "sum"),
        (lambda: SpikeAndSlab(tensor(0.0), tensor(1.0), tensor(1.5)), "probability"),
        (lambda: FixedSpikeAndSlab(tensor(0.0), tensor(0.5), 1.0, torch.tensor([3])), "no group"),
        (lambda: FULL.with_natural([tensor(0.0)]), "do not fit"),
        (lambda: FULL.log_prob(tensor(0.0)), "does not fit"),
        (lambda: Bernoulli(tensor(0.0)).with_expectation([tensor(1.0)]), "out of range"),
        (lambda: Dirichlet(tensor(1.0, 1.0)).with_expectation([tensor(0.0, 0.0)]), "No Dirichlet"),
    ],
)
def test_what_has_no_meaning_is_refused_in_words(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(lapis.LapisError, match=message):
        call()


def test_linear_losses_and_losses_without_some_weights_have_derivatives() -> None:
    q = step(FULL, lambda theta: 3 * theta[0], 0.5)
    torch.testing.assert_close(q.precision, FULL.precision / 2)
    torch.testing.assert_close(q.mean, FULL.mean - 0.5 * torch.linalg.solve(q.precision, tensor(3.0, 0.0)))


def test_a_curvature_of_ones_own_is_used() -> None:
    ggn = tensor([3.0, 1.0], [1.0, 4.0])
    q = step(FULL, quartic, 1.0, curvature=lambda theta: ggn)
    torch.testing.assert_close(q.precision, ggn)
    torch.testing.assert_close(
        step(FULL, quartic, 1.0, curvature=lambda theta: ggn.diagonal()).precision, ggn.diag().diag()
    )


def test_an_expert_without_any_probability_left_has_a_finite_step() -> None:
    q = Categorical(tensor(0.0, -1000.0))
    assert bool(step(q, line, 0.5, "monte_carlo").mean.isfinite().all())


def test_every_family_says_what_it_is() -> None:
    assert repr(FULL) == "<FullGaussian over 2 weights>"
    assert all(name in dir(lapis.learning_rule) for name in learning_rule.__all__)
