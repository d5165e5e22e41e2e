"""The tangent mode of few weights: a last layer's from its inputs, and any from its summed curvature."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import lapis
from lapis.batches import batches
from lapis.curvature.products.jacobian import Jacobian
from lapis.evidence import tangent
from lapis.evidence.linear_head import LinearHead, linear_head
from lapis.likelihoods import Categorical, Gaussian, Likelihood
from lapis.network import Network
from lapis.posteriors.laplace.tuning import by_evidence


class Tokens(nn.Module):
    """A head without bias, applied to every token of a sequence; classes come first."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(3, 4), nn.Linear(4, 5, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).tanh()).movedim(-1, 1)


def network_of(model: nn.Module, x: Tensor, likelihood: Likelihood) -> Jacobian:
    network = Network(model, "last_layer", example=x)
    stream, _ = batches((x, torch.zeros(len(x))), dtype=x.dtype, device=x.device, batch_size=5)
    return Jacobian(network, likelihood.canonical, list(stream))


HEADS: dict[str, tuple[nn.Module, tuple[int, ...], Likelihood]] = {
    "classes": (nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 3)), (12, 3), Categorical()),
    "regression": (nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)), (12, 3), Gaussian(0.3)),
    "tokens": (Tokens(), (7, 6, 3), Categorical(channels="first")),
    "pixels": (nn.Sequential(nn.Conv2d(2, 3, 3), nn.Conv2d(3, 4, 1)), (6, 2, 5, 5), Categorical(channels="first")),
}


@pytest.mark.parametrize("name", HEADS)
def test_products_from_the_layers_inputs_are_those_of_the_jacobian(name: str) -> None:
    model, shape, likelihood = HEADS[name]
    x = torch.randn(*shape, dtype=torch.float64)
    jacobian = network_of(model.double(), x, likelihood)
    head = linear_head(jacobian)
    assert head is not None
    vectors = torch.randn(2, jacobian.size, dtype=torch.float64)
    seeds = [torch.randn(2, *f.shape, dtype=torch.float64) for f in jacobian.outputs]
    for own, other in zip(head.forward(vectors), jacobian.forward(vectors), strict=True):
        torch.testing.assert_close(own, other)
    torch.testing.assert_close(head.backward(seeds), jacobian.backward(seeds))
    outputs = [f + torch.randn_like(f) for f in jacobian.outputs]
    targets = [f.argmax(-1) if isinstance(likelihood, Categorical) else f for f in outputs]
    product = jacobian.ggn(torch.eye(jacobian.size, dtype=torch.float64), likelihood, targets, outputs)
    torch.testing.assert_close(head.normal(likelihood, targets, outputs), product)
    torch.testing.assert_close(head.ggn(vectors, likelihood, targets, outputs), vectors @ product)


class Scaled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * x


@pytest.mark.parametrize("end", [nn.LogSoftmax(-1), nn.Tanh(), Scaled()])
def test_a_layer_whose_output_is_not_the_networks_is_no_head(end: nn.Module) -> None:
    x = torch.randn(6, 3)
    assert linear_head(network_of(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 3), end), x, Categorical())) is None


def sharp(n: int, dtype: torch.dtype = torch.float64) -> tuple[nn.Module, Tensor, Tensor]:
    """Nearly separable classes and a trained network, whose curvature at t says little about that at theta*."""
    x = torch.randn(n, 16, dtype=dtype)
    y = (x @ torch.randn(16, 10, dtype=dtype)).argmax(-1)
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 10)).to(dtype)
    optimiser = torch.optim.Adam(model.parameters(), 1e-2)
    for _ in range(60):
        optimiser.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimiser.step()
    with torch.no_grad():
        model[2].weight.mul_(3)
    return model, x, y


@pytest.mark.parametrize("structure", ["dense", "diagonal"])
def test_the_mode_is_the_same_by_either_way(structure: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the head, from summed rows of J, and by conjugate gradients with the posterior's precision alone."""
    model, x, y = sharp(200)
    posterior = lapis.laplace(model, (x, y), "classification", weights="last_layer", structure=structure)
    by_head = posterior.at_tangent_mode((x, y))
    monkeypatch.setattr(tangent, "linear_head", lambda jacobian: None)
    by_rows = posterior.at_tangent_mode((x, y))
    monkeypatch.setattr(tangent, "FEW_WEIGHTS", 0)
    plain = posterior.at_tangent_mode((x, y), max_products=20_000)
    assert by_head.tangent is not None
    assert by_rows.tangent is not None
    assert plain.tangent is not None
    assert by_head.tangent.products == 1
    assert isinstance(by_head.tangent.problem._head, LinearHead)  # type: ignore[union-attr]
    assert by_rows.tangent.products < plain.tangent.products
    for found in (by_head, by_rows):
        torch.testing.assert_close(found.mode, plain.mode, rtol=1e-6, atol=1e-7)
        torch.testing.assert_close(found.log_evidence(), plain.log_evidence())


def test_a_last_layers_mode_runs_the_network_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once for its outputs and once for the layer's inputs, also where the rows of J are too many to be kept."""
    model, x, y = sharp(150)
    posterior = lapis.laplace(model, (x, y), "classification", weights="last_layer", structure="diagonal")
    monkeypatch.setattr(by_evidence, "ROWS_BYTES", 0)
    seen: list[int] = []
    handle = model.register_forward_hook(lambda module, args, output: seen.append(len(output)))
    found = posterior.at_tangent_mode((x, y)).tune()
    handle.remove()
    assert found.tangent is not None
    assert found.tangent.converged
    # and a few examples, to locate the layer; at the end the result predicts a sample of the data
    assert sum(seen) <= 4 * len(x) + 20
