"""Convolutions under VOGN: the weight gradient is the sum of the examples' own, which the squares need anyway."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lapis.network import Network
from lapis.optim import VOGN, kernels
from lapis.optim.squares import Squares

F64 = torch.float64
CONVOLUTIONS: dict[str, Callable[[], nn.Module]] = {
    "2d, strided, dilated": lambda: nn.Conv2d(4, 6, (3, 2), stride=(2, 1), padding=(1, 2), dilation=(1, 2)),
    "2d, in groups, no bias": lambda: nn.Conv2d(4, 6, 3, groups=2, bias=False),
    "2d, depthwise": lambda: nn.Conv2d(4, 8, 3, groups=4, padding="valid"),
    "2d, same": lambda: nn.Conv2d(4, 3, 3, padding="same"),
    "2d, same, more after": lambda: nn.Conv2d(4, 3, 2, padding="same"),
    "2d, reflected": lambda: nn.Conv2d(4, 3, 3, padding=1, padding_mode="reflect"),
    "2d, transposed": lambda: nn.ConvTranspose2d(4, 3, 3, stride=2),
    "1d": lambda: nn.Sequential(nn.Flatten(2), nn.Conv1d(4, 3, 5, padding=2, stride=3)),
    "3d": lambda: nn.Sequential(nn.Unflatten(1, (2, 2)), nn.Conv3d(2, 3, (2, 3, 3), padding=1)),
}


def network(name: str) -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(CONVOLUTIONS[name](), nn.Tanh(), nn.Flatten(), nn.LazyLinear(3)).double()
    x = torch.randn(5, 4, 7, 6, dtype=F64)
    model(x)
    return model, x, torch.arange(5) % 3


def one_by_one(model: nn.Module, x: Tensor, y: Tensor) -> list[list[Tensor]]:
    """Gradients of the mean loss, example by example."""
    return [
        list(torch.autograd.grad(F.cross_entropy(model(x[i : i + 1]), y[i : i + 1]) / len(x), list(model.parameters())))
        for i in range(len(x))
    ]


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_squares_and_gradients_of_convolutions_are_those_of_single_examples(name: str) -> None:
    model, x, y = network(name)
    each = one_by_one(model, x, y)
    squares = Squares(Network(model))
    for _ in range(2):  # with a proof, and without
        model.zero_grad()
        with squares.recording():
            F.cross_entropy(model(x), y).backward()
            found, examples = squares.totals()
        assert examples == len(x)
        for number, (key, p) in enumerate(model.named_parameters()):
            own = torch.stack([gradients[number] for gradients in each])
            assert p.grad is not None
            torch.testing.assert_close(p.grad, own.sum(0), rtol=1e-9, atol=1e-12)
            torch.testing.assert_close(found[key], own.square().sum(0), rtol=1e-9, atol=1e-15)


def test_the_offered_gradient_is_the_one_that_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the test above says something of it: an offer that is one per cent wrong is seen in `p.grad`."""
    model, x, y = network("2d, same")
    offer = kernels.offer
    monkeypatch.setattr("lapis.optim.squares.offer", lambda node, gradient: offer(node, 1.01 * gradient))
    squares = Squares(Network(model))
    with squares.recording():
        F.cross_entropy(model(x), y).backward()
    gradient = model[0].weight.grad
    plain = sum(gradients[0] for gradients in one_by_one(model, x, y))
    torch.testing.assert_close(gradient, 1.01 * plain, rtol=1e-9, atol=1e-12)


def test_gradients_of_gradients_still_pass_through_convolutions() -> None:
    model, x, _ = network("2d, same")

    def penalty(call: Callable[..., Any]) -> tuple[Tensor, ...]:
        inputs = x.clone().requires_grad_()
        loss = call(F.conv2d, (inputs, model[0].weight, model[0].bias), {"padding": "same"}).tanh().square().sum()
        slopes = torch.autograd.grad(loss, (inputs, model[0].weight), create_graph=True)
        return torch.autograd.grad(sum(slope.square().sum() for slope in slopes), (inputs, *model[0].parameters()))

    plain = penalty(lambda func, args, kwargs: func(*args, **kwargs))
    for one, two in zip(plain, penalty(kernels.with_offers), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-9, atol=1e-12)


def test_under_autocast_convolutions_are_torchs_own() -> None:
    model, x, y = network("2d, same")
    model, x = model.float(), x.float()
    optimiser = VOGN(model, data_size=5)
    for _ in range(2):
        optimiser.zero_grad()
        with optimiser.sampled(), torch.autocast("cpu", dtype=torch.bfloat16):
            F.cross_entropy(model(x), y).backward()
        optimiser.step()
    assert all(bool(p.isfinite().all()) for p in model.parameters())
