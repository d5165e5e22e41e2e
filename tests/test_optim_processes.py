"""The Gaussian processes that training goes through: equal to the posterior's, and not moved by further training."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import lapis

X = torch.linspace(-1, 1, 12, dtype=torch.float64)[:, None]
Y = torch.sin(3 * X)


@pytest.mark.parametrize("name", ["Adam", "RMSprop", "IVON", "VOGN", "VON"])
def test_the_process_of_now_is_that_of_the_posterior_and_stays(name: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    kind: Any = getattr(lapis.optim, name)
    optimiser = kind(model if name == "VOGN" else model.parameters(), lr=0.01, data_size=12)

    def closure() -> torch.Tensor:
        optimiser.zero_grad()
        loss = (model(X) - Y).square().mean() / 2
        loss.backward()
        return loss

    for _ in range(3):
        optimiser.step(closure)
    process = optimiser.gaussian_process(model)
    posterior = optimiser.posterior(model, "regression")
    mean, covariance = posterior.predict(X, method="linearised").f_mean.clone(), posterior.functional_covariance(X)
    torch.testing.assert_close(process.mean(X), mean)
    torch.testing.assert_close(process.kernel(X), covariance)
    for _ in range(3):
        optimiser.step(closure)
    torch.testing.assert_close(process.mean(X), mean)  # of a copy: training went on without it
    later = optimiser.gaussian_process(model)
    assert not torch.allclose(later.mean(X), mean)


def test_a_radius_that_is_no_number_is_refused() -> None:
    model = nn.Linear(1, 1)
    for radius in (torch.tensor([]), "a", -1.0):
        with pytest.raises(lapis.LapisError, match="clip_radius"):
            lapis.optim.IVON(model.parameters(), data_size=3, clip_radius=radius)  # type: ignore[arg-type]
