"""MC dropout: drawn networks, the weights that they have, and what cannot be drawn."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lapis
from lapis.posteriors.predicting import masks
from lapis.posteriors.predicting.masks import bernoulli
from untouched import untouched

F64 = torch.float64


class Module(nn.Module):
    """A network from its layers and a function of them and the inputs."""

    def __init__(self, forward: Callable[..., Tensor], **layers: nn.Module) -> None:
        super().__init__()
        self.function = forward
        for name, layer in layers.items():
            self.add_module(name, layer)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


class Functional(nn.Module):
    """Functional dropout that follows self.training, beside batch norm, which must not."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.norm, self.two = nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2)
        self.norm.running_mean.normal_()

    def forward(self, x: Tensor) -> Tensor:
        return self.two(F.dropout(self.norm(self.one(x)).relu(), 0.3, self.training))


def attention(batch_first: bool, weights: bool) -> nn.Module:
    def forward(net: Any, x: Tensor) -> Tensor:
        x = x if batch_first else x.transpose(0, 1)
        y = net.attention(x, x, x, need_weights=weights)[0]
        return net.out(y if batch_first else y.transpose(0, 1))

    return Module(
        forward, attention=nn.MultiheadAttention(4, 2, dropout=0.3, batch_first=batch_first), out=nn.Linear(4, 2)
    )


def folded(positions_first: bool) -> nn.Module:
    """Examples and positions folded into one axis, in either order."""

    def forward(net: Any, x: Tensor) -> Tensor:
        y = x.transpose(0, 1) if positions_first else x
        y = net.out(net.drop(y.reshape(-1, 4))).reshape(*y.shape[:2], 2)
        return y.transpose(0, 1) if positions_first else y

    return Module(forward, drop=nn.Dropout(0.4), out=nn.Linear(4, 2))


def recurrent(kind: Callable[..., nn.Module]) -> nn.Module:
    layer = kind(4, 6, 2, dropout=0.3, batch_first=True)
    return Module(lambda net, x: net.out(net.cells(x)[0][:, -1]), cells=layer, out=nn.Linear(6, 2))


FLAT, IMAGE, SEQUENCE = (4,), (2, 6, 6), (5, 4)

NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear": (lambda: nn.Sequential(nn.Dropout(0.2), nn.Linear(4, 6), nn.ReLU(), nn.Dropout(), nn.Linear(6, 2)), FLAT),
    "in place": (lambda: nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.3, inplace=True), nn.Linear(6, 2)), FLAT),
    "alpha": (lambda: nn.Sequential(nn.Linear(4, 6), nn.SELU(), nn.AlphaDropout(0.3), nn.Linear(6, 2)), FLAT),
    "channels": (
        lambda: nn.Sequential(
            nn.Conv2d(2, 4, 3), nn.Dropout2d(0.3), nn.Conv2d(4, 6, 3, groups=2), nn.Flatten(), nn.Dropout(0.3),
            nn.Linear(24, 2),
        ),
        IMAGE,
    ),
    "feature alpha": (
        lambda: nn.Sequential(nn.Conv2d(2, 4, 3), nn.FeatureAlphaDropout(0.3), nn.Flatten(), nn.Linear(64, 2)), IMAGE
    ),
    "functional": (Functional, FLAT),
    "attention": (lambda: attention(True, False), SEQUENCE),
    "attention, sequence first, with weights": (lambda: attention(False, True), SEQUENCE),
    "transformer": (
        lambda: nn.Sequential(
            nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2, 8, batch_first=True), 2), nn.Linear(4, 2)
        ),
        SEQUENCE,
    ),
    "LSTM": (lambda: recurrent(nn.LSTM), SEQUENCE),
    "GRU": (lambda: recurrent(nn.GRU), SEQUENCE),
    "folded": (lambda: folded(False), SEQUENCE),
    "folded, positions first": (lambda: folded(True), SEQUENCE),
    "fused": (
        lambda: Module(lambda net, x: net.out(torch.native_dropout(x, 0.3, net.training)[0]), out=nn.Linear(4, 2)), FLAT
    ),
    "of weights": (
        lambda: Module(lambda net, x: x @ F.dropout(net.out.weight, 0.3, net.training).T, out=nn.Linear(4, 2)), FLAT
    ),
}  # fmt: skip


def made(name: str) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    make, shape = NETWORKS[name]
    return make().double(), torch.randn(7, *shape, dtype=F64)


@pytest.mark.parametrize("name", NETWORKS)
def test_a_draw_is_one_function_of_any_inputs(name: str) -> None:
    """An example has the same outputs alone, in any company and order, and in any number of draws."""
    model, x = made(name)
    posterior = lapis.dropout(model, lapis.Gaussian(0.1))
    with untouched(model):
        values = posterior.predict(x, samples=5).latent.values
        assert float(values.std(0).min()) > 0
        for part in (x[3:4], x[2:6], x.flip(0)):
            index = [int((x == row).flatten(1).all(1).nonzero()) for row in part]
            found = posterior.predict(part, samples=5).latent.values
            torch.testing.assert_close(found, values[:, index], rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(posterior.predict(x, samples=2).latent.values, values[:2], rtol=1e-9, atol=1e-12)


BATCHED = [name for name in NETWORKS if name not in ("functional", "fused", "of weights", "transformer", "GRU")]


@pytest.mark.parametrize("name", BATCHED)
def test_at_one_input_it_is_torchs_own_dropout(name: str) -> None:
    """Mean and variance of outputs, against networks in training mode; 6 standard errors: false alarms below 1e-6."""
    model, x = made(name)
    found = lapis.dropout(model, lapis.Gaussian(0.1)).predict(x[:2], samples=2000).latent.values.flatten(1)
    model.train()
    with torch.no_grad():  # every copy of the input gets its own masks
        expected = torch.stack([model(each.expand(2000, *each.shape)).flatten(1) for each in x[:2]], 1).flatten(1)
    error = ((found.var(0) + expected.var(0)) / 2000).sqrt()
    assert bool(((found.mean(0) - expected.mean(0)).abs() < 6 * error + 1e-12).all())
    squares, other = (found - found.mean(0)).square(), (expected - expected.mean(0)).square()
    error = ((squares.var(0) + other.var(0)) / 2000).sqrt()
    assert bool(((squares.mean(0) - other.mean(0)).abs() < 6 * error + 1e-12).all())


def test_drawn_networks_are_networks_with_columns_of_weights_zeroed() -> None:
    """The weight view: W diag(z) / (1 - p), z ~ Bernoulli(1 - p), layer by layer, written out by hand."""
    model, x = made("linear")
    posterior = lapis.dropout(model, lapis.Gaussian(0.1), (x, x[:, :2]))
    draws = posterior.sample(400, generator=torch.Generator().manual_seed(1))
    values = posterior.predict(x, samples=400, generator=torch.Generator().manual_seed(1)).latent.values
    first, second = model[1], model[4]
    kept = torch.zeros(2)
    for weights, outputs in zip(draws[:50], values[:50], strict=True):
        parts = lapis.unflatten(weights, posterior)
        one, two = ((parts["1.weight"] != 0).any(0).double(), (parts["4.weight"] != 0).any(0).double())
        torch.testing.assert_close(parts["1.weight"], first.weight.detach() * one / 0.8)
        torch.testing.assert_close(parts["4.weight"], second.weight.detach() * two / 0.5)
        assert torch.equal(parts["1.bias"], first.bias)
        hidden = (x @ (first.weight * one / 0.8).T + first.bias).relu()
        torch.testing.assert_close(hidden @ (second.weight * two / 0.5).T + second.bias, outputs[:, 0])
    for weights in draws:
        parts = lapis.unflatten(weights, posterior)
        kept += torch.tensor([float((parts[name] != 0).any(0).double().mean()) for name in ("1.weight", "4.weight")])
    for share, keep, bits in ((kept[0] / 400, 0.8, 1600), (kept[1] / 400, 0.5, 2400)):  # false alarms below 1e-5
        assert abs(float(share) - keep) < 4.5 * math.sqrt(keep * (1 - keep) / bits)


def test_training_with_dropout_climbs_the_elbo_of_bernoulli_columns() -> None:
    """One computation, two names: q(W) = M diag(z) / (1 - p), z ~ Bernoulli(1 - p), whose pathwise gradient of
    E_q[log p(y | W)] in M is the gradient of training with dropout, mask by mask, and whose predictive distribution is
    that of MC dropout: the mean over q, here over all of its masks."""
    model, x = made("linear")
    one, target = x[:1], torch.randn(1, 2, dtype=x.dtype, generator=torch.Generator().manual_seed(2))
    means = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    sizes, rates = (means["1.weight"].shape[1], means["4.weight"].shape[1]), (0.2, 0.5)

    def drawn(masks: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        scaled = [mask / (1 - rate) for mask, rate in zip(masks, rates, strict=True)]
        return means | {"1.weight": means["1.weight"] * scaled[0], "4.weight": means["4.weight"] * scaled[1]}

    for seed in range(5):
        torch.manual_seed(seed)
        model.train().zero_grad()
        (model(one) - target).square().sum().backward()
        torch.manual_seed(seed)  # the same masks again, as draws of q
        pairs = zip(sizes, rates, strict=True)
        masks = [(torch.nn.functional.dropout(torch.ones(1, n, dtype=x.dtype), p) != 0).double() for n, p in pairs]
        outputs = torch.func.functional_call(model.eval(), drawn(masks), (one,))
        found = torch.autograd.grad((outputs - target).square().sum(), list(means.values()))
        for expected, gradient in zip(model.parameters(), found, strict=True):
            torch.testing.assert_close(gradient, expected.grad)
    every = torch.tensor(list(itertools.product((0.0, 1.0), repeat=sum(sizes))), dtype=x.dtype)
    keeps = torch.cat([torch.full((n,), 1 - p, dtype=x.dtype) for n, p in zip(sizes, rates, strict=True)])
    chances = (every * keeps + (1 - every) * (1 - keeps)).prod(1)
    outputs = torch.func.vmap(lambda bits: torch.func.functional_call(model, drawn(bits.split(sizes)), (one,)))(every)
    exact = (chances[:, None, None] * outputs.detach()).sum(0)
    values = lapis.dropout(model, lapis.Gaussian(0.1)).predict(one, samples=1000).latent.values[:, :, 0]
    error = values.std(0) / math.sqrt(1000)  # five of them: false alarms below 2e-6
    assert bool(((values.mean(0) - exact).abs() < 5 * error).all())


@pytest.mark.parametrize("name", ["linear", "in place", "channels", "functional", "fused"])
def test_networks_of_sampled_weights_predict_as_masked_ones(name: str, tmp_path: Path) -> None:
    model, x = made(name)
    posterior = lapis.dropout(model, lapis.Gaussian(0.1))
    values = posterior.predict(x, samples=4).latent.values[:, :, 0]
    model.eval()
    with untouched(model):
        draws = posterior.sample(4)
    for weights, expected in zip(draws, values, strict=True):
        parameters = lapis.unflatten(weights, posterior)
        torch.testing.assert_close(torch.func.functional_call(model, parameters, (x,)), expected)
    seen = lapis.dropout(model, lapis.Gaussian(0.1), (x, values[0]))
    seen.save(tmp_path / "posterior.lapis")
    assert torch.equal(lapis.load(tmp_path / "posterior.lapis", model).sample(4), draws)


def test_weights_are_found_before_any_inputs_are_seen_where_these_can_be_guessed() -> None:
    for name in ("linear", "functional"):
        model, x = made(name)
        draws = lapis.dropout(model, lapis.Gaussian(0.1)).sample(4)
        assert torch.equal(draws, lapis.dropout(model, lapis.Gaussian(0.1), (x, x[:, :2])).sample(4))
    for name in ("channels", "LSTM"):  # images of another size, and no first layer with a rule
        model, _ = made(name)
        with pytest.raises(lapis.OptionError, match="predict before you sample"):
            lapis.dropout(model, lapis.Gaussian(0.1)).sample()


@pytest.mark.parametrize("name", ["alpha", "attention", "transformer", "LSTM", "folded", "of weights"])
def test_masks_that_are_no_weights_are_predicted_but_not_sampled(name: str) -> None:
    model, x = made(name)
    posterior = lapis.dropout(model, lapis.Gaussian(0.1))
    posterior.predict(x)
    with pytest.raises(lapis.ModelError, match="not networks with other weights"):
        posterior.sample()


def test_masks_of_numbers_of_examples_are_told_apart() -> None:
    """As many examples as positions, heads or features: no axis is taken for the examples because of its length."""
    for name in ("folded", "folded, positions first", "attention, sequence first, with weights", "LSTM"):
        model, _ = made(name)
        x = torch.randn(5, 5, 4, dtype=F64)
        posterior = lapis.dropout(model, lapis.Gaussian(0.1))
        whole, one = posterior.predict(x).latent.values, posterior.predict(x[1:2]).latent.values
        torch.testing.assert_close(whole[:, 1:2], one, rtol=1e-9, atol=1e-12)


def test_a_wrong_layout_of_masks_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = made("folded, positions first")
    found = masks._candidates
    monkeypatch.setattr(masks, "_candidates", lambda large, small: found(large, small)[:1])
    with pytest.raises(lapis.ModelError, match="change with the other examples"):
        lapis.dropout(model, lapis.Gaussian(0.1)).predict(x)


class Doubled(nn.Module):
    """Does more in training mode than to drop."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        y = F.dropout(self.out(x), 0.3, self.training)
        return 2 * y if self.training else y


class Noisy(nn.Module):
    """Noise in training mode, and dropout in a layer: only the layer is switched on."""

    def __init__(self) -> None:
        super().__init__()
        self.out, self.drop = nn.Linear(4, 2), nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.out(x) + (torch.randn_like(x[:, :2]) if self.training else 0.0))


class Mixed(nn.Module):
    """Masks that depend on the other examples of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.out, self.drop = nn.Linear(4, 2), nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(x + self.drop(x).mean(0))


def test_what_cannot_be_drawn_is_refused_with_the_remedy() -> None:
    x = torch.randn(6, 4)
    for model in (
        nn.Linear(4, 2),
        nn.Sequential(nn.Dropout(0.0), nn.Linear(4, 2)),
        Module(lambda n, x: n.a(x), a=nn.Linear(4, 2)),
    ):
        with pytest.raises(lapis.ModelError, match=r"no dropout.*add nn.Dropout layers"):
            lapis.dropout(model, "regression").predict(x)
    with pytest.raises(lapis.ModelError, match="no dropout"):  # known before any data
        lapis.dropout(nn.Linear(4, 2), "regression")
    with pytest.raises(lapis.ModelError, match=r"Doubled does more in training mode.*nn.Dropout layers"):
        lapis.dropout(Doubled(), "regression").predict(x)
    with pytest.raises(lapis.ModelError, match="change with the other examples"):
        lapis.dropout(Mixed(), "regression").predict(x)
    random = Module(lambda net, x: net.a(net.d(x)) + torch.randn(len(x), 2), a=nn.Linear(4, 2), d=nn.Dropout())
    with pytest.raises(lapis.ModelError, match=r"no dropout masks.*randn"):
        lapis.dropout(random, "regression").predict(x)
    quiet = lapis.dropout(Noisy(), "regression").predict(x, samples=50).latent.values[:, 0, 0, 0]
    assert len(quiet.unique()) == 2  # dropped, or not: no noise


def test_other_rates_are_another_posterior(tmp_path: Path) -> None:
    model, x = made("linear")
    posterior = lapis.dropout(model, "regression")
    posterior.save(tmp_path / "posterior.lapis")
    model[3].p = 0.1
    with pytest.raises(lapis.ModelError, match="has changed since the fit"):
        posterior.predict(x)
    with pytest.raises(lapis.FileError, match="other dropout layers"):
        lapis.load(tmp_path / "posterior.lapis", model)


def test_masks_of_different_draws_and_layers_are_independent() -> None:
    """Correlations of 4000 bits, 5 standard errors each: false alarms below 1e-5."""
    drawn = torch.stack([bernoulli(seed, number, (4000,), 0.5) for seed in (7, 8) for number in (0, 1)])
    correlations = torch.corrcoef(drawn) - torch.eye(4)
    assert float(correlations.abs().max()) < 5 / math.sqrt(4000)


def test_without_data_outputs_are_checked_at_the_first_prediction() -> None:
    posterior = lapis.dropout(nn.Sequential(nn.Dropout(), nn.Linear(4, 1)), "classification")
    assert (posterior.n_data, posterior.n_outputs) == (0, 0)
    assert "no data" in repr(posterior)
    with pytest.raises(lapis.LikelihoodError):
        posterior.predict(torch.randn(3, 4))
    for bad, message in ((torch.randn(0, 4), "as in training"), (torch.randn(3, 4).double(), "another dtype")):
        with pytest.raises(lapis.DataError, match=message):
            posterior.predict(bad)
