"""Drawn networks that never form their weights, and many that run as one, give the outputs of `sample`'s draws; quick
pooling gives torch's.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lapis
from cases import CASES
from lapis.batches import as_inputs
from lapis.curvature.recording.pooling import QuickPooling
from lapis.errors import ModelError
from lapis.network import Network
from lapis.posteriors.predicting import sampled
from lapis.posteriors.predicting.drawn_network import Matrix
from lapis.posteriors.predicting.head import find_head
from lapis.proofs import Proofs
from reference import case_data
from untouched import untouched

F64 = torch.float64


@pytest.fixture
def one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small networks are run like large ones."""
    monkeypatch.setattr(sampled, "SMALL_NETWORK", 0)


class OtherUses(nn.Module):
    """One matrix tied between a linear layer, a bare product and a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(12, 12), nn.Linear(12, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.one(x).tanh()
        h = h + F.linear(2 * x, self.one.weight) + F.linear(input=h, weight=self.one.weight, bias=self.one.bias)
        return self.two(h @ self.one.weight.T) / self.one.weight.norm()


NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "wide": (lambda: nn.Sequential(nn.Linear(40, 30), nn.Tanh(), nn.Linear(30, 2)), (40,)),
    "narrow": (lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)), (3,)),
    "flattened": (lambda: nn.Sequential(nn.Flatten(), nn.Linear(24, 20, bias=False), nn.Linear(20, 2)), (4, 6)),
    "tokens": (lambda: nn.Sequential(nn.Linear(30, 20), nn.Tanh(), nn.Flatten(), nn.Linear(40, 2)), (2, 30)),
    "convolution": (
        lambda: nn.Sequential(nn.Conv2d(1, 3, 3), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(27, 2)),
        (1, 8, 8),
    ),
    "other uses": (OtherUses, (12,)),
}


@pytest.mark.parametrize(("bias", "groups"), [("joint", "one"), ("joint", "parameter"), ("separate", "layer")])
@pytest.mark.parametrize(
    ("structure", "rows"),
    [("kronecker", 9), ("kronecker", 900), ("ekfac", 9), ("diagonal", 9), ("dense", 9)],
    ids=["kronecker", "kronecker, formed at once", "ekfac", "diagonal", "dense"],
)
@pytest.mark.parametrize("name", list(NETWORKS))
def test_drawn_networks_are_those_of_sample(
    name: str, structure: str, rows: int, bias: str, groups: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    build, shape = NETWORKS[name]
    model, x = build().double(), torch.randn(rows, *shape, dtype=F64)
    data = x[:6], torch.randn(6, 2, dtype=F64)
    prior = lapis.Prior(3.0, groups=groups)
    options = {"bias": bias} if structure in ("kronecker", "ekfac") else {}
    posterior = lapis.laplace(model, data, "regression", structure=structure, prior=prior, **options)  # type: ignore[arg-type]
    if groups == "parameter":
        precision = torch.linspace(1.0, 4.0, len(posterior.weight_prior.precision), dtype=F64)
        posterior = posterior.with_prior(lapis.Prior(precision, groups=groups))
    before = x.clone()
    draws = posterior.sample(3, generator=torch.Generator().manual_seed(5))
    outputs = torch.stack(
        [torch.func.functional_call(model, draw, (x,)).detach() for draw in lapis.unflatten(draws, posterior)]
    )
    for small in (2**16, 0):
        monkeypatch.setattr(sampled, "SMALL_NETWORK", small)
        found = posterior.predict(x, method="sampled", samples=3, generator=torch.Generator().manual_seed(5))
        torch.testing.assert_close(found.mean, outputs.mean(0), rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(found.epistemic_variance, outputs.var(0, unbiased=False), rtol=1e-9, atol=1e-10)
        assert torch.equal(x, before)


NOT_TOGETHER = {"lstm", "gru_every_step", "rnn_bidirectional", "routed_experts"}
"""Networks that torch cannot run with many weights at once."""


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
@pytest.mark.parametrize("name", list(CASES))
def test_networks_that_run_together_do_what_each_does_alone(name: str) -> None:
    model, inputs, _, spec = case_data(name)
    network, canonical = Network(model), spec.build().canonical
    x = as_inputs(inputs, network.dtype, network.device)
    noise = torch.randn(3, network.size, generator=torch.Generator().manual_seed(0), dtype=F64)
    weights = network.flat() + 0.1 * noise
    with network.prepared(), torch.no_grad():
        alone = torch.stack([canonical(network.call(x, network.unflatten(w))) for w in weights])
    with untouched(model):
        found = sampled._together(network, canonical, weights, x)
        if name in NOT_TOGETHER:
            assert found is None
        else:
            old = name == "checkpointed" and torch.__version__ < "2.7"  # no batching rule for checkpoints yet
            assert found is not None or old
            if found is not None:
                torch.testing.assert_close(found[0], alone, rtol=1e-10, atol=1e-10)
        values, shape = sampled.together(network, canonical, alone.shape[-1], weights, x)
    torch.testing.assert_close(values, alone, rtol=1e-10, atol=1e-10)
    assert shape[0] == alone.shape[1]


def test_many_networks_are_run_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    network, x = Network(model), torch.randn(5, 3, dtype=F64)
    weights, rows, vmap = torch.randn(7, network.size, dtype=F64), list[int](), torch.func.vmap
    expected = torch.stack([torch.func.functional_call(model, network.unflatten(w), (x,)) for w in weights])

    def counted(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        return lambda some: (rows.append(len(some)), vmap(function)(some))[1]

    monkeypatch.setattr(torch.func, "vmap", counted)
    monkeypatch.setattr(sampled, "SMALL_RUN", 3 * 5 * 4 * 8)  # the hidden layer of three networks
    values, _ = sampled.together(network, lambda f: f[:, None], 2, weights, x)
    torch.testing.assert_close(values[:, :, 0], expected.detach())
    assert rows == [3, 2, 2]


def test_a_wrong_batching_rule_runs_networks_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    network, x = Network(model), torch.randn(5, 3, dtype=F64)
    weights = torch.randn(4, network.size, dtype=F64)
    expected = torch.stack([torch.func.functional_call(model, network.unflatten(w), (x,)) for w in weights])
    monkeypatch.setattr(torch.func, "vmap", lambda f: lambda some: f(some[0]).expand(len(some), -1, -1, -1))
    values, _ = sampled.together(network, lambda f: f[:, None], 2, weights, x)
    torch.testing.assert_close(values[:, :, 0], expected.detach())


def test_what_is_run_together() -> None:
    small = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    assert sampled.are_small(Network(small), 20)
    assert not sampled.are_small(Network(small), 1)
    assert not sampled.are_small(Network(small), 10**6)
    assert not sampled.are_small(Network(nn.Linear(300, 300)), 20)
    assert not sampled.are_small(Network(nn.Sequential(nn.Conv1d(1, 2, 3))), 20)
    small[0].register_forward_hook(lambda *_: None)
    assert not sampled.are_small(Network(small), 20)


def test_an_infinite_output_of_one_of_many_is_named() -> None:
    network, x = Network(nn.Linear(2, 1).double()), torch.ones(3, 2, dtype=F64)
    weights = torch.ones(4, network.size, dtype=F64)
    weights[2] = torch.inf
    with pytest.raises(ModelError, match="not finite"):
        sampled.together(network, lambda f: f[:, None], 1, weights, x)


@pytest.mark.usefixtures("one_by_one")
def test_wide_layers_are_not_formed_and_share_their_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    formed: list[torch.Size] = []
    original = Matrix.formed

    def noted(self: Matrix) -> Tensor:
        formed.append(self.weight.shape)
        return original(self)

    monkeypatch.setattr(Matrix, "formed", noted)
    model, x = NETWORKS["wide"][0]().double(), torch.randn(9, 40, dtype=F64)
    posterior = lapis.laplace(model, (x, torch.randn(9, 2, dtype=F64)), "regression", structure="kronecker")
    posterior.predict(x, method="sampled", samples=4)
    assert formed == [torch.Size((2, 30))] * 4


def test_replaced_parameters_come_back_whatever_happens() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))
    model[2].weight = model[0].weight
    network, x = Network(model), torch.randn(5, 3)
    before = [(name, id(p)) for name, p in model.named_parameters(remove_duplicate=False)]
    others = {name: torch.randn_like(p) for name, p in network.parameters.items()}
    expected = torch.func.functional_call(model, others, (x,))
    with network.replaced(others):
        torch.testing.assert_close(model(x), expected)
    with pytest.raises(RuntimeError), network.replaced(others):
        model(x[:, :2])
    assert [(name, id(p)) for name, p in model.named_parameters(remove_duplicate=False)] == before


@pytest.mark.parametrize("shape", [(2, 3, 9, 8), (3, 7, 7), (1, 1, 4, 4)])
@pytest.mark.parametrize("options", [
    {"kernel_size": 2}, {"kernel_size": 3, "stride": 2}, {"kernel_size": (2, 3), "stride": (1, 2)},
    {"kernel_size": 3, "stride": 1}, {"kernel_size": 2, "padding": 1}, {"kernel_size": 2, "dilation": 2},
    {"kernel_size": 3, "stride": 2, "ceil_mode": True}, {"kernel_size": 4},
])  # fmt: skip
def test_quick_pooling_is_pooling(shape: tuple[int, ...], options: dict[str, object]) -> None:
    x = torch.randn(shape)
    x[..., 1, 1] = torch.nan
    expected = nn.MaxPool2d(**options)(x)  # type: ignore[arg-type]
    with torch.no_grad(), QuickPooling(Proofs()):
        torch.testing.assert_close(nn.MaxPool2d(**options)(x), expected, rtol=0, atol=0, equal_nan=True)  # type: ignore[arg-type]
        values, places = F.max_pool2d(x, 2, return_indices=True)
    assert values.shape == places.shape


class Headed(nn.Module):
    """A body and a head, used in one of several ways; `body` counts its calls."""

    def __init__(self, use: str) -> None:
        super().__init__()
        self.use, self.called = use, 0
        self.body, self.head = nn.Linear(3, 4), nn.Sequential(nn.Tanh(), nn.Linear(4, 4), nn.Linear(4, 2))
        if use == "written":
            self.head[0] = nn.ReLU(inplace=True)
        if use == "hook":
            self.head.register_forward_pre_hook(lambda module, args: (2 * args[0],))
            self.head[1].register_forward_pre_hook(lambda module, args: (args[0] + 1,))
        if use == "parametrised":
            nn.utils.parametrizations.weight_norm(self.head[2])

    def forward(self, x: Tensor) -> Tensor:
        self.called += 1
        h = self.body(x)
        if self.use == "tied":
            h = h @ self.head[1].weight
        if self.use == "twice":
            h = h + self.head(h).sum(-1, keepdim=True)
        out = self.head(h)
        return out.tanh() if self.use == "after" else out


WHOLE = 5
"""Runs for four draws where nothing can be left out: one more, to find that out."""


@pytest.mark.usefixtures("one_by_one")
@pytest.mark.parametrize("structure", ["kronecker", "dense"])
@pytest.mark.parametrize(
    ("use", "weights", "name", "runs"),
    [
        ("plain", "last_layer", "head.2", 1),
        ("plain", "head.1", "head", 1),
        ("plain", ["head.1", "head.2"], "head", 1),
        ("plain", "all", None, WHOLE - 1),
        ("parametrised", "last_layer", "head.2", 1),
        ("hook", "last_layer", "head.2", 1),
        ("hook", "head", None, WHOLE - 1),
        ("written", "head", None, WHOLE),
        ("tied", "head", None, WHOLE),
        ("twice", "head", None, WHOLE),
        ("after", "last_layer", None, WHOLE),
    ],
)
def test_only_the_part_that_differs_between_draws_runs_for_each(
    use: str, weights: str | list[str], name: str | None, runs: int, structure: str
) -> None:
    torch.manual_seed(1)
    model, x = Headed(use).double(), torch.randn(9, 3, dtype=F64)
    data, options = (x, torch.randn(9, 2, dtype=F64)), {"weights": weights, "structure": structure}
    posterior = lapis.laplace(model, data, "regression", **options)  # type: ignore[arg-type]
    draws = posterior.sample(4)
    expected = torch.stack(
        [torch.func.functional_call(model, posterior.network.unflatten(draw), (x,)) for draw in draws]
    )
    model.called = 0
    found = posterior.predict(x, method="sampled", samples=4)
    assert model.called == runs + 3  # one run to measure its memory, two for the proof
    posterior.predict(x, method="sampled", samples=4)
    assert model.called == 2 * runs + 3  # measured and proven once
    assert torch.allclose(found.latent.values[:, :, 0], expected, rtol=1e-9, atol=1e-12)
    network = Network(model, weights, x)
    with network.prepared():
        ending = find_head(network, x)
    assert (None if ending is None else ending.name) == name
    assert all(not module._forward_hooks for module in model.modules())
