"""Optimisers that leave a posterior behind: their iterates, and the habits of torch that all of them keep."""

from __future__ import annotations

import copy
import io
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lapis
from lapis.optim import IVON, VOGN, VON, BayesBiNN
from lapis.optim.draws import Draws

F64 = torch.float64
N = 24


def network(dtype: torch.dtype = F64) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)).to(dtype)


def batch(number: int, size: int = 8, dtype: torch.dtype = F64) -> tuple[Tensor, Tensor]:
    source = torch.Generator().manual_seed(number)
    x = torch.randn(size, 3, generator=source, dtype=F64)
    return x.to(dtype), torch.randn(size, 2, generator=source, dtype=F64).to(dtype)


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return (model(x) - y).square().sum(-1).mean() / 2


def closure_of(optimiser: Any, model: nn.Module, x: Tensor, y: Tensor) -> Callable[[], Tensor]:
    def closure() -> Tensor:
        optimiser.zero_grad()
        loss = loss_of(model, x, y)
        loss.backward()
        return loss

    return closure


def train(optimiser: Any, model: nn.Module, steps: range) -> None:
    for number in steps:
        optimiser.step(closure_of(optimiser, model, *batch(number)))


def weights(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


OPTIMISERS: dict[str, Callable[[nn.Module], Any]] = {
    "ivon": lambda model: IVON(
        model.parameters(), lr=0.1, data_size=N, prior_precision=0.5, betas=(0.9, 0.95), hess_init=0.7, draws=2
    ),
    "von": lambda model: VON(model.parameters(), lr=0.1, data_size=N, draws=2),
    "bayesbinn": lambda model: BayesBiNN(
        model.parameters(), lr=0.01, data_size=N, start=1.0, temperature=0.5, momentum=0.5, draws=2
    ),
    "vogn": lambda model: VOGN(model, lr=0.02, data_size=N, betas=(0.9, 0.95), hess_init=0.1, draws=2),
}
every_optimiser = pytest.mark.parametrize("name", OPTIMISERS)


def ivon_by_hand(model: nn.Module, steps: int, draws: int, **o: Any) -> tuple[Tensor, Tensor]:
    """Weights and Hessian after some steps of the published formulas, one weight vector at a time."""
    tau = o.get("temperature", 1.0)
    ess, d = N / tau, o["prior_precision"] * tau / N
    b1, b2 = o["betas"]
    m = weights(model)
    h, v = torch.full_like(m, o["hess_init"]), torch.zeros_like(m)
    noise = Draws(0)
    trial = copy.deepcopy(model)
    for t in range(1, steps + 1):
        g, product = torch.zeros_like(m), torch.zeros_like(m)
        for _ in range(draws):
            (e,) = noise.normal([m])
            noise.count()
            theta = m + e / torch.sqrt(ess * (h + d))
            nn.utils.vector_to_parameters(theta, trial.parameters())
            loss = loss_of(trial, *batch(t - 1))
            gradient = torch.cat([x.reshape(-1) for x in torch.autograd.grad(loss, list(trial.parameters()))])
            g += gradient / draws
            product += (theta - m) * gradient / draws
        k = ess * (h + d) * product
        v = b1 * v + (1 - b1) * g
        h = b2 * h + (1 - b2) * k + 0.5 * (1 - b2) ** 2 * (h - k) ** 2 / (h + d)
        step = (v / (1 - b1**t) + d * m) / (h + d)
        radius = o.get("clip_radius", math.inf)
        rate = o["lr"] * (o["hess_init"] + d if o.get("rescale_lr", True) else 1)
        m = m - rate * step.clamp(-radius, radius)
    return m, h


@pytest.mark.parametrize("options", [{}, {"temperature": 0.3, "clip_radius": 0.2, "rescale_lr": False}])
@pytest.mark.parametrize("draws", [1, 3])
def test_ivon_follows_the_published_formulas(options: dict[str, Any], draws: int) -> None:
    settings = {"lr": 0.1, "prior_precision": 0.5, "betas": (0.9, 0.95), "hess_init": 0.7, **options}
    model = network()
    m, h = ivon_by_hand(model, 20, draws, **settings)
    optimiser = IVON(model.parameters(), data_size=N, draws=draws, **settings)
    train(optimiser, model, range(20))
    assert torch.allclose(weights(model), m, rtol=1e-10, atol=1e-12)
    found = torch.cat([optimiser.state[p]["hessian"].reshape(-1) for p in model.parameters()])
    assert torch.allclose(found, h, rtol=1e-10)
    posterior = optimiser.posterior(model, lapis.Gaussian(1.0))
    size = N / settings.get("temperature", 1.0)
    precision = size * (h + settings["prior_precision"] / size)
    assert torch.allclose(posterior.marginal_variance(), 1 / precision, rtol=1e-10)
    assert torch.equal(posterior.mean, weights(model))
    assert posterior.n_data == N


def regressions(copies: int) -> tuple[nn.Linear, Callable[[], Tensor], Tensor, Tensor]:
    """Independent copies of one linear regression, as rows of a matrix; its posterior's precision and mean."""
    x = torch.randn(N, 3, dtype=F64, generator=torch.Generator().manual_seed(1))
    y = x @ torch.tensor([1.0, -2.0, 0.5], dtype=F64) + 0.3
    model = nn.Linear(3, copies, bias=False).double()
    precision = x.mT @ x + 0.5 * torch.eye(3, dtype=F64)
    return (
        model,
        lambda: (model(x) - y[:, None]).square().sum(-1).mean() / 2,
        precision,
        torch.linalg.solve(precision, x.mT @ y),
    )


def test_estimates_of_the_hessian_are_unbiased() -> None:
    """The mean of 20,000 estimates for each of 3 weights is within 5 standard errors: false alarms below 2e-6."""
    model, loss, precision, mean = regressions(500)
    model.weight.data.copy_(mean + 0.1)
    optimiser = IVON(model.parameters(), data_size=N, prior_precision=0.5)
    scale = N * optimiser.defaults["hess_init"] + 0.5  # N (h + d)
    found = []
    for _ in range(40):
        optimiser.zero_grad()
        with optimiser.sampled():
            loss().backward()
        found.append(optimiser._seen[model.weight] * scale)
    estimates = torch.cat(found)
    truth = (precision.diagonal() - 0.5) / N
    error = estimates.std(0) / math.sqrt(len(estimates))
    assert bool(((estimates.mean(0) - truth).abs() < 5 * error).all())
    assert bool((error < 0.05 * truth).all())


@pytest.mark.parametrize("start", [0.5, 2.0])
def test_ivon_learns_the_mean_field_posterior_of_a_linear_regression(start: float) -> None:
    """Its optimum has the exact mean, and the precisions A_ii. The mean of 1000 runs is within 5 standard errors (false
    alarms below 2e-6 for each of 6 numbers) and 2 %, which allows for the finite memory of the averages. Of the first
    Hessian b2^1500 = .002 is left: with b2 = .998 it were .05, and the start would be seen.
    """
    model, loss, precision, mean = regressions(1000)
    options = {"prior_precision": 0.5, "betas": (0.9, 0.996), "hess_init": start, "rescale_lr": False}
    optimiser = IVON(model.parameters(), lr=0.1, data_size=N, **options)

    def closure() -> Tensor:
        optimiser.zero_grad()
        value = loss()
        value.backward()
        return value

    for _ in range(1500):
        optimiser.step(closure)
    precisions = N * optimiser.state[model.weight]["hessian"] + 0.5
    for found, truth in ((model.weight.detach(), mean), (precisions, precision.diagonal())):
        error = found.std(0) / math.sqrt(1000)
        assert bool(((found.mean(0) - truth).abs() < 5 * error + 0.02 * truth.abs()).all())
        assert bool((error < 0.02 * truth.abs()).all())


@every_optimiser
def test_resumed_run_is_the_uninterrupted_one(name: str) -> None:
    model = network()
    optimiser = OPTIMISERS[name](model)
    train(optimiser, model, range(6))
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimiser": optimiser.state_dict()}, file)
    train(optimiser, model, range(6, 12))
    again = network()
    other = OPTIMISERS[name](again)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    again.load_state_dict(saved["model"])
    other.load_state_dict(saved["optimiser"])
    train(other, again, range(6, 12))
    assert torch.equal(weights(model), weights(again))
    copied = copy.deepcopy(other)
    assert copied.state_dict()["state"].keys() == other.state_dict()["state"].keys()


@every_optimiser
def test_global_random_numbers_are_untouched(name: str) -> None:
    model = network()
    optimiser = OPTIMISERS[name](model)
    before = torch.get_rng_state()
    train(optimiser, model, range(2))
    assert torch.equal(torch.get_rng_state(), before)


@every_optimiser
def test_weights_are_at_the_mean_after_an_error(name: str) -> None:
    model = network()
    optimiser = OPTIMISERS[name](model)
    train(optimiser, model, range(2))
    mean = weights(model)

    def fails() -> Tensor:
        assert not torch.equal(weights(model), mean)
        raise KeyError("interrupted")

    with pytest.raises(KeyError):
        optimiser.step(fails)
    assert torch.equal(weights(model), mean)
    with pytest.raises(KeyError), optimiser.sampled():
        fails()
    assert torch.equal(weights(model), mean)
    train(optimiser, model, range(2, 3))  # and it goes on


@every_optimiser
def test_plain_loop_takes_the_same_steps_as_a_closure(name: str) -> None:
    results = []
    for plain in (False, True):
        model = network()
        optimiser = OPTIMISERS[name](model)
        optimiser.draws = 1
        for number in range(5):
            if not plain:
                optimiser.step(closure_of(optimiser, model, *batch(number)))
                continue
            optimiser.zero_grad()
            with optimiser.sampled():
                loss_of(model, *batch(number)).backward()
            optimiser.step()
        results.append(weights(model))
    assert torch.equal(*results)


@every_optimiser
def test_microbatches_within_one_draw_are_one_batch(name: str) -> None:
    results = []
    for parts in (1, 4):
        model = network()
        optimiser = OPTIMISERS[name](model)
        for number in range(5):
            x, y = batch(number)
            optimiser.zero_grad()
            with optimiser.sampled():
                for rows in torch.arange(8).chunk(parts):
                    (loss_of(model, x[rows], y[rows]) / parts).backward()
            optimiser.step()
        results.append(weights(model))
    assert torch.allclose(*results, rtol=1e-10)


@every_optimiser
def test_draws_of_several_contexts_add_up_like_the_draws_of_a_closure(name: str) -> None:
    results = []
    for plain in (False, True):
        model = network()
        optimiser = OPTIMISERS[name](model)
        optimiser.draws = 3
        for number in range(5):
            if not plain:
                optimiser.step(closure_of(optimiser, model, *batch(number)))
                continue
            optimiser.zero_grad()
            for _ in range(3):
                with optimiser.sampled():
                    (loss_of(model, *batch(number)) / 3).backward()
            optimiser.step()
        results.append(weights(model))
    assert torch.allclose(*results, rtol=1e-9)


@pytest.mark.parametrize(("name", "draws"), [*((name, 1) for name in OPTIMISERS), ("ivon", 2), ("von", 2)])
def test_a_closure_adds_to_earlier_contexts_unless_it_clears_them(name: str, draws: int) -> None:
    model = network()
    twin = copy.deepcopy(model)
    optimiser, other = OPTIMISERS[name](model), OPTIMISERS[name](twin)
    twin.load_state_dict(model.state_dict())
    optimiser.draws = draws
    for number in range(3):
        with optimiser.sampled():
            (loss_of(model, *batch(number)) / 2).backward()
        optimiser.step(lambda number=number: (loss_of(model, *batch(number, 4)) / 2).backward())
        optimiser.zero_grad()
        other.zero_grad()
        with other.sampled():
            (loss_of(twin, *batch(number)) / 2).backward()
        for _ in range(draws):
            with other.sampled():
                (loss_of(twin, *batch(number, 4)) / 2 / draws).backward()
        other.step()
    assert torch.allclose(weights(model), weights(twin), rtol=1e-9)
    with optimiser.sampled():
        (100 * loss_of(model, *batch(7))).backward()
    other._noise.count()
    other.draws = draws
    optimiser.step(closure_of(optimiser, model, *batch(8)))
    other.step(closure_of(other, twin, *batch(8)))
    assert torch.allclose(weights(model), weights(twin), rtol=1e-9)


@every_optimiser
def test_gradients_at_the_mean_are_not_taken_for_those_of_a_draw(name: str) -> None:
    model = network()
    optimiser = OPTIMISERS[name](model)
    train(optimiser, model, range(2))
    mean = weights(model)
    if optimiser.attaches:
        optimiser.attach(model).remove()  # who has attached it is not helped again
    loss_of(model, *batch(5)).backward()
    with pytest.raises(lapis.OptionError, match="at the mean"):
        optimiser.step(lambda: loss_of(model, *batch(0)).backward())
    assert torch.equal(weights(model), mean)
    train(optimiser, model, range(2, 3))  # a closure that clears them is as good as ever
    loss_of(model, *batch(5)).backward()
    optimiser.step(lambda: (model.zero_grad(), loss_of(model, *batch(0)).backward())[1])


@every_optimiser
def test_what_a_discarded_context_has_seen_is_forgotten(name: str) -> None:
    results = []
    for discarded in (False, True):
        model = network()
        optimiser = OPTIMISERS[name](model)
        if discarded:
            with optimiser.sampled():
                loss_of(model, *batch(77)).backward()
            optimiser._noise.made -= 1
        optimiser.zero_grad()
        with optimiser.sampled():
            loss_of(model, *batch(0)).backward()
        optimiser.step()
        results.append(weights(model))
    assert torch.equal(*results)


@every_optimiser
def test_schedulers_and_groups_have_their_say(name: str) -> None:
    model = network()
    optimiser = OPTIMISERS[name](model)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimiser, lambda epoch: 0.0 if epoch else 1.0)
    train(optimiser, model, range(1))
    scheduler.step()
    before = weights(model)
    train(optimiser, model, range(1, 3))
    assert torch.equal(weights(model), before)
    assert optimiser.param_groups[0]["lr"] == 0


def test_groups_keep_options_of_their_own() -> None:
    model = network()
    groups = [{"params": model[0].parameters(), "lr": 0.0}, {"params": model[2].parameters(), "prior_precision": 9.0}]
    optimiser = IVON(groups, lr=0.1, data_size=N)
    first, last = model[0].weight.detach().clone(), model[2].weight.detach().clone()
    train(optimiser, model, range(3))
    assert torch.equal(model[0].weight, first)
    assert not torch.equal(model[2].weight, last)
    hessian = torch.cat([optimiser.state[p]["hessian"].reshape(-1) for p in model.parameters()])
    of_prior = 1 / optimiser.posterior(model, lapis.Gaussian(1.0)).marginal_variance() - N * hessian
    assert torch.allclose(of_prior, torch.cat([torch.full((20,), 1.0), torch.full((12,), 9.0)]).to(F64))


@every_optimiser
def test_parameters_without_gradient_are_skipped(name: str) -> None:
    model = network()
    model.unused = nn.Parameter(torch.ones(3, dtype=F64))  # type: ignore[assignment]
    model[0].bias.requires_grad_(False)
    frozen = model[0].bias.detach().clone()
    optimiser = OPTIMISERS[name](model)
    for number in range(2):
        optimiser.step(closure_of(optimiser, model, *batch(number)))
    assert torch.equal(model[0].bias, frozen)
    assert model.unused.grad is None


@pytest.mark.parametrize("name", ["ivon", "vogn"])
@pytest.mark.parametrize("autocast", [False, True])
def test_half_precision_weights_and_autocast(name: str, autocast: bool) -> None:
    dtype = torch.float32 if autocast else torch.bfloat16
    model = network(dtype)
    optimiser = OPTIMISERS[name](model)
    start = loss_of(model, *batch(0, dtype=dtype)).item()
    for _ in range(30):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            optimiser.step(closure_of(optimiser, model, *batch(0, dtype=dtype)))
    assert loss_of(model, *batch(0, dtype=dtype)).item() < 0.9 * start
    moments = [v for state in optimiser.state.values() for v in state.values() if isinstance(v, Tensor)]
    assert {each.dtype for each in moments} == {torch.float32}
    again = network(dtype)
    other = OPTIMISERS[name](again)
    other.load_state_dict(optimiser.state_dict())
    assert {v.dtype for s in other.state.values() for v in s.values() if isinstance(v, Tensor)} == {torch.float32}


def test_several_dtypes_in_the_groups() -> None:
    one, two = nn.Linear(2, 2).double(), nn.Linear(2, 2)
    optimiser = IVON([{"params": one.parameters()}, {"params": two.parameters()}], data_size=N)
    before = weights(two)

    def closure() -> Tensor:
        optimiser.zero_grad()
        loss = two(one(torch.ones(3, 2, dtype=F64)).float()).square().mean()
        loss.backward()
        return loss

    optimiser.step(closure)
    assert not torch.equal(weights(two), before)
    assert {p.dtype for p in two.parameters()} == {torch.float32}


def bad_calls() -> Iterator[tuple[str, Callable[[], Any]]]:
    model = network()
    params = list(model.parameters())
    yield "data_size", lambda: IVON(params, lr=0.1)
    yield "lr", lambda: IVON(params, lr=-0.1, data_size=N)
    yield "betas", lambda: IVON(params, data_size=N, betas=(0.9, 1.0))
    yield "prior_precision", lambda: IVON(params, data_size=N, prior_precision=0.0)
    yield "prior_precision", lambda: IVON([{"params": params, "prior_precision": -1.0}], data_size=N)
    yield "data_size", lambda: IVON(params, data_size=0)
    yield "no parameters", lambda: IVON(model, data_size=N)
    yield "no parameters", lambda: IVON([], data_size=N)
    yield "real numbers", lambda: IVON([torch.zeros(2, dtype=torch.complex64)], data_size=N)
    yield "ranks", lambda: IVON(params, data_size=N, synchronise=True)
    optimiser = IVON(params, data_size=N)
    yield "drawn weights", lambda: optimiser.step()
    yield "no gradients", lambda: optimiser.step(lambda: loss_of(model, *batch(0)))
    yield "another network", lambda: optimiser.posterior(copy.deepcopy(model), "regression")
    yield "no state", lambda: optimiser.load_state_dict(torch.optim.Adam(params).state_dict())

    def nested() -> None:
        with optimiser.sampled():
            optimiser.step(closure_of(optimiser, model, *batch(0)))

    yield "draw already", nested

    def sparse() -> None:
        table = nn.Embedding(4, 2, sparse=True)
        strange = IVON(table.parameters(), data_size=N)
        with strange.sampled():
            table(torch.tensor([1])).sum().backward()

    yield "sparse", sparse


@pytest.mark.parametrize("number", range(16))
def test_mistakes_are_refused_in_words(number: int) -> None:
    words, call = list(bad_calls())[number]
    with pytest.raises(lapis.LapisError, match=words):
        call()


def test_an_evaluation_at_drawn_weights_leaves_no_trace() -> None:
    model = network()
    optimiser = OPTIMISERS["ivon"](model)
    with optimiser.sampled(), torch.no_grad():
        model(batch(0)[0])
    with pytest.raises(lapis.OptionError, match="drawn weights"):
        optimiser.step()
