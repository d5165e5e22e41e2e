"""VOGN: its squares are those of the examples' own gradients, for every kind of layer, in training mode."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lapis
from lapis.optim import VOGN
from lapis.optim.draws import Draws
from test_optim import F64, N, weights


class Tied(nn.Module):
    """One matrix, used twice, and once transposed; an embedding; a raw parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.square = nn.Embedding(7, 4), nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.table(tokens)
        h = self.square(self.square(h).tanh()) * self.scale
        return F.linear(h, self.table.weight).mean(1)[:, :2]


class Attention(nn.Module):
    """Self-attention, layer norm, and the first token alone: rows are picked by an index."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.norm, self.head = nn.LayerNorm(4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        mixed, _ = self.attention(x, x, x, need_weights=False)
        return self.head(self.norm(x + mixed)[:, 0])


class Recurrent(nn.Module):
    """A layer without a rule, followed by one with."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.GRU(3, 4, batch_first=True), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.cell(x)[0][:, -1])


def images(n: int, source: torch.Generator) -> Tensor:
    return torch.randn(n, 2, 6, 6, dtype=F64, generator=source)


def rows(*shape: int) -> Callable[[int, torch.Generator], Tensor]:
    return lambda n, source: torch.randn(n, *shape, dtype=F64, generator=source)


NETWORKS: dict[str, tuple[Callable[[], nn.Module], Callable[[int, torch.Generator], Tensor]]] = {
    "mlp": (lambda: nn.Sequential(nn.Linear(3, 5), nn.ReLU(inplace=True), nn.Linear(5, 2)), rows(3)),
    "cnn": (
        lambda: nn.Sequential(
            nn.Conv2d(2, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(4, 4, 2, groups=2, stride=2), nn.Flatten(), nn.Linear(4, 2),
        ),
        images,
    ),
    "tied": (Tied, lambda n, source: torch.randint(7, (n, 5), generator=source)),
    "attention": (Attention, rows(3, 4)),
    "recurrent": (Recurrent, rows(4, 3)),
}  # fmt: skip
every_network = pytest.mark.parametrize("name", NETWORKS)


def made(name: str) -> tuple[nn.Module, Callable[[int], tuple[Tensor, Tensor]]]:
    torch.manual_seed(0)
    model, inputs = NETWORKS[name]

    def batch(number: int) -> tuple[Tensor, Tensor]:
        source = torch.Generator().manual_seed(number)
        return inputs(6, source), torch.randint(2, (6,), generator=source)

    return model().double(), batch


def vogn_by_hand(model: nn.Module, batch: Any, steps: int, draws: int, **o: Any) -> tuple[Tensor, Tensor]:
    """Weights and squares after some steps, with one backward pass for each example."""
    tau = o["temperature"]
    size, d = N / tau, o["prior_precision"] * tau / N
    b1, b2 = o["betas"]
    m = weights(model)
    h, v = torch.full_like(m, o["hess_init"]), torch.zeros_like(m)
    noise, trial = Draws(0), copy.deepcopy(model)
    for t in range(1, steps + 1):
        x, y = batch(t)
        own = []
        for _ in range(draws):
            (e,) = noise.normal([m])
            noise.count()
            nn.utils.vector_to_parameters(m + e / torch.sqrt(size * (h + d + o["damping"])), trial.parameters())
            for i in range(len(x)):
                loss = F.cross_entropy(trial(x[i : i + 1]), y[i : i + 1])
                found = torch.autograd.grad(loss, list(trial.parameters()))
                own.append(torch.cat([each.reshape(-1) for each in found]))
        gradients = torch.stack(own)
        v = b1 * v + (1 - b1) * gradients.mean(0)
        h = b2 * h + (1 - b2) * gradients.square().mean(0)
        m = m - o["lr"] * (v / (1 - b1**t) + d * m) / (h + d + o["damping"])
    return m, h


@every_network
def test_vogn_follows_one_backward_pass_for_each_example(name: str) -> None:
    model, batch = made(name)
    options = {
        "lr": 0.01, "prior_precision": 0.5, "betas": (0.9, 0.9), "hess_init": 0.1, "damping": 0.01, "temperature": 0.5,
    }  # fmt: skip
    m, h = vogn_by_hand(model, batch, 4, 2, **options)
    optimiser = VOGN(model, data_size=N, draws=2, **options)
    for number in range(1, 5):
        x, y = batch(number)

        def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
            optimiser.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            return loss

        optimiser.step(closure)
    assert torch.allclose(weights(model), m, rtol=1e-8, atol=1e-10)
    found = torch.cat([optimiser.state[p]["hessian"].reshape(-1) for p in model.parameters()])
    assert torch.allclose(found, h, rtol=1e-8, atol=1e-12)
    variance = optimiser.posterior(model, "classification").marginal_variance()
    assert torch.allclose(1 / variance, N / 0.5 * (h + 0.01) + 0.5, rtol=1e-8)


def squares_of(model: nn.Module, loss: Callable[[], Tensor]) -> dict[str, Tensor]:
    """B times the sums that VOGN has seen, without a step and without noise."""
    optimiser = VOGN(model, data_size=N)
    optimiser._perturb = lambda params: None  # type: ignore[method-assign]
    with optimiser.sampled():
        loss().backward()
    return {name: optimiser._seen[p] * optimiser._examples for name, p in model.named_parameters()}


def test_dropout_of_the_user_s_own_pass_counts() -> None:
    """The squares are those of the very masks of the pass: of networks whose weights are masked accordingly."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 6), nn.Dropout(0.5), nn.GRUCell(6, 4), nn.Linear(4, 2)).double()
    x, y = torch.randn(5, 3, dtype=F64), torch.randint(2, (5,))
    masks = []
    model[1].register_forward_hook(lambda _, given, out: masks.append((out / given[0]).detach()))
    found = squares_of(model, lambda: F.cross_entropy(model(x), y))
    expected = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    for i in range(5):
        loss = F.cross_entropy(model[3](model[2](model[0](x[i : i + 1]) * masks[-1][i : i + 1])), y[i : i + 1])
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        for name, gradient in zip(expected, gradients, strict=True):
            expected[name] += gradient.square() / 5
    for name, value in expected.items():
        assert torch.allclose(found[name], value, rtol=1e-9), name


def test_shares_of_coupled_examples_add_up_and_statistics_move_once() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2)).double()
    once = copy.deepcopy(model)
    x, y = torch.randn(6, 3, dtype=F64), torch.randint(2, (6,))
    found = squares_of(model, lambda: F.cross_entropy(model(x), y))
    a = once[0](x)
    a.retain_grad()
    F.cross_entropy(once[3](once[2](once[1](a))), y).backward()
    assert a.grad is not None
    shares = torch.einsum("bo,bi->boi", a.grad * 6, x)
    assert torch.allclose(found["0.weight"], shares.square().mean(0), rtol=1e-9)
    assert torch.equal(model[1].running_mean, once[1].running_mean)
    assert int(model[1].num_batches_tracked) == 1


def test_what_cannot_be_told_apart_is_refused() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    x = torch.randn(4, 3, dtype=F64)
    with pytest.raises(lapis.ModelError, match="ran twice"):
        squares_of(model, lambda: (model(x) + model(x + 1)).square().mean())
    with pytest.raises(lapis.OptionError, match="not computed by the network"):
        squares_of(model, lambda: model[2](model[0](x)).square().mean())

    def twice() -> Tensor:
        out = model(x)
        out.square().mean().backward(retain_graph=True)
        return out.mean()

    with pytest.raises(lapis.ModelError, match="backpropagated twice"):
        squares_of(model, twice)
    with pytest.raises(lapis.OptionError, match="network itself"):
        VOGN(model.parameters(), data_size=N)  # type: ignore[arg-type]
    assert not model._forward_hooks
    assert not model._forward_pre_hooks


def test_passes_with_microbatches_of_shared_layers_are_kept_apart() -> None:
    model, batch = made("tied")
    x, y = batch(1)
    whole = squares_of(model, lambda: F.cross_entropy(model(x), y))

    def parts() -> Tensor:
        (F.cross_entropy(model(x[:3]), y[:3]) / 2).backward()
        return F.cross_entropy(model(x[3:]), y[3:]) / 2

    found = squares_of(model, parts)
    for name, value in whole.items():
        assert torch.allclose(found[name], value, rtol=1e-9), name
