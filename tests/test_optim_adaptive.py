"""Adam and RMSprop with a posterior: torch's own iterates, and the precision that the second moments imply."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import lapis
from lapis.optim import Adam, RMSprop
from test_optim import F64, N, batch, loss_of, network, weights

PAIRS: list[tuple[Callable[..., Any], Callable[..., Any], dict[str, Any]]] = [
    (Adam, torch.optim.Adam, {"lr": 0.01}),
    (Adam, torch.optim.Adam, {"lr": 0.01, "betas": (0.8, 0.99), "weight_decay": 0.1, "amsgrad": True, "foreach": True}),
    (RMSprop, torch.optim.RMSprop, {"lr": 0.01}),
    (RMSprop, torch.optim.RMSprop, {"lr": 0.01, "alpha": 0.9, "momentum": 0.5, "centered": True}),
]


@pytest.mark.parametrize("number", range(len(PAIRS)))
def test_iterates_are_torch_s_own_and_second_moments_the_precision(number: int) -> None:
    ours, theirs, options = PAIRS[number]
    one, two = network(), network()
    first = ours(one.parameters(), data_size=N, prior_precision=0.5, batch_size=8, **options)
    second = theirs(two.parameters(), **options)
    decay = options.get("betas", (0, options.get("alpha", 0.999 if ours is Adam else 0.99)))[1]
    squares = torch.zeros_like(weights(one))
    for step in range(100):
        for model, optimiser in ((one, first), (two, second)):
            optimiser.zero_grad()
            loss_of(model, *batch(step)).backward()
            if model is one:
                gradient = torch.cat([p.grad.reshape(-1) for p in one.parameters()])
                gradient = gradient + options.get("weight_decay", 0) * weights(one)
                squares = decay * squares + (1 - decay) * gradient**2
            optimiser.step()
    assert torch.equal(weights(one), weights(two))
    posterior = first.posterior(one, lapis.Gaussian(1.0))
    expected = N * 8 * squares / (1 - decay**100) + 0.5
    assert torch.allclose(1 / posterior.marginal_variance(), expected, rtol=1e-8)
    other = network()
    again = ours(other.parameters(), data_size=N, prior_precision=0.5, batch_size=8, **options)
    other.load_state_dict(one.state_dict())
    again.load_state_dict(first.state_dict())
    found = again.posterior(other, lapis.Gaussian(1.0)).marginal_variance()
    assert torch.equal(found, posterior.marginal_variance())


def test_parameters_without_gradient_keep_the_prior() -> None:
    model = network()
    posterior = Adam(model.parameters(), data_size=N, prior_precision=4.0).posterior(model, "regression")
    assert torch.equal(posterior.marginal_variance(), torch.full_like(weights(model), 0.25, dtype=F64))


@pytest.mark.parametrize(
    ("words", "options"),
    [("data_size", {}), ("lr", {"data_size": N, "lr": -1.0}), ("no option", {"data_size": N, "betta": 1})],
)
def test_mistakes_are_refused(words: str, options: dict[str, Any]) -> None:
    with pytest.raises(lapis.LapisError, match=words):
        Adam(network().parameters(), **options)
