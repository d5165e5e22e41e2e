"""Weights that a normalisation follows: found by tracing degrees of homogeneity, confirmed by rescaling."""

from __future__ import annotations

import copy
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lapis
from lapis.normalised.trace import Broken, Trace


class Formula(nn.Module):
    """Layers a, b, norm and head, joined by a formula."""

    def __init__(self, formula: Callable[[Any, Tensor], Tensor], norm: nn.Module, bias: bool = True) -> None:
        super().__init__()
        self.formula, self.norm = formula, norm
        self.a, self.b, self.head = nn.Linear(4, 4), nn.Linear(4, 4, bias=bias), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.formula(self, x))


def post_norm(net: Any, x: Tensor) -> Tensor:
    return net.norm(x + net.b(net.a(x).relu()))


def inner_norm(net: Any, x: Tensor) -> Tensor:
    return x + net.b(net.norm(net.a(x)).tanh())


def through_relu(net: Any, x: Tensor) -> Tensor:
    return net.norm(net.b(net.a(x).relu()))


def by_hand(net: Any, x: Tensor) -> Tensor:
    h = net.b(net.a(x).tanh())
    return (h - h.mean(-1, keepdim=True)) / (h.var(-1, keepdim=True) + 1e-9).sqrt()


FORMULAS: dict[str, tuple[Callable[[], Formula], set[str]]] = {
    "a sum of different scales before the norm": (lambda: Formula(post_norm, nn.LayerNorm(4)), set()),
    "a norm inside a residual branch": (lambda: Formula(inner_norm, nn.LayerNorm(4)), {"a"}),
    "relu and a linear map without bias before the norm": (
        lambda: Formula(through_relu, nn.LayerNorm(4, eps=1e-9), bias=False), {"a", "b"},
    ),
    "a bias between": (lambda: Formula(through_relu, nn.BatchNorm1d(4, eps=1e-9)), {"b"}),
    "a norm written by hand": (lambda: Formula(by_hand, nn.Identity()), {"b"}),
    "unit length": (lambda: Formula(lambda net, x: nn.functional.normalize(net.b(x)), nn.Identity()), {"b"}),
    "saturation is no norm": (lambda: Formula(lambda net, x: (1000 * net.b(x)).tanh(), nn.Identity()), set()),
}  # fmt: skip


@pytest.mark.parametrize("case", list(FORMULAS))
def test_scale_free_layers_are_told_from_those_that_look_like_it(case: str) -> None:
    torch.manual_seed(0)
    make, expected = FORMULAS[case]
    assert (
        set(lapis.normalised_groups(make().double(), torch.randn(9, 4, dtype=torch.float64))) - {"others"} == expected
    )


@pytest.mark.parametrize("tracked", [True, False])
def test_instance_norm_counts(tracked: bool) -> None:
    norm = nn.InstanceNorm2d(4, affine=True, track_running_stats=tracked)
    net = nn.Sequential(nn.Conv2d(1, 4, 3), norm, nn.ReLU(), nn.Flatten(), nn.Linear(64, 2))
    before = copy.deepcopy(net.state_dict())
    assert set(lapis.normalised_groups(net, torch.randn(9, 1, 6, 6))) == {"0", "others"}
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())


def test_scale_free_weights_that_the_trace_cannot_follow_are_told() -> None:
    net = Formula(lambda net, x: torch.atan2(net.b(x), net.b(x).roll(1, -1)), nn.Identity())
    with pytest.warns(lapis.LapisWarning, match="'b' gets a precision of its own .* could not follow it .* 'atan2'"):
        assert set(lapis.normalised_groups(net, torch.randn(9, 4))) == {"b", "others"}


def test_a_norm_that_does_not_normalise_is_told() -> None:
    net = nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6, eps=10.0), nn.Linear(6, 2))
    with pytest.warns(lapis.LapisWarning, match="a normalisation follows '0', but rescaling it moves the outputs"):
        assert set(lapis.normalised_groups(net, torch.randn(9, 4))) == {"others"}


@pytest.mark.parametrize("k", [0.25, 4.0])
def test_traced_degrees_are_how_tensors_scale(k: float) -> None:
    """A chain of the operations that have a rule: measured powers of k against the traced ones."""
    torch.manual_seed(0)
    w, v, x = (torch.rand(3, 3, dtype=torch.float64) + 0.5 for _ in range(3))

    def chain(w: Tensor) -> list[Tensor]:
        h = (x @ w).relu()
        wide = torch.cat([h, 2 * h], 1)
        return [
            h, h.square() / 3, h.pow(3).sqrt(), h * (h @ v), h.var(1), h.rsqrt(), v / h, wide[:, 1:].sum(0),
            torch.addmm(h, h, v), torch.maximum(h, h.t()), h / h.std(),
            nn.functional.layer_norm(h, (3,), v[0], None, 0.0),
            nn.functional.conv1d(h[None], w[:2, :, None]), h.softmax(1), h + v,
        ]  # fmt: skip

    with Trace([[w]]) as trace:
        results = chain(w)
    degrees = [trace.of(result).get(0, 0) for result in results]
    assert [d if not isinstance(d, Broken) else None for d in degrees] == [
        1, 2, Fraction(3, 2), 2, 2, Fraction(-1, 2), -1, 1, 1, 1, 0, 0, 2, None, None,
    ]  # fmt: skip
    for degree, result, scaled in zip(degrees, results, chain(k * w), strict=True):
        if not isinstance(degree, Broken):
            torch.testing.assert_close(scaled, k ** float(degree) * result, rtol=1e-4, atol=0)
        else:
            assert degree.known
