"""Mistakes and cases of a new user's first day, that must not do silent harm."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor, nn

import lapis
from lapis.likelihoods import Bernoulli, Categorical, Likelihood


class Plain(nn.Module):
    """Probabilities computed by hand: autograd's graph shows neither softmax nor sigmoid."""

    def __init__(self, binary: bool) -> None:
        super().__init__()
        self.binary = binary

    def forward(self, x: Tensor) -> Tensor:
        return 1 / (1 + (-x).exp()) if self.binary else x.exp() / x.exp().sum(-1, keepdim=True)


ENDS: dict[str, tuple[nn.Module, str, str | None]] = {
    "softmax": (nn.Softmax(-1), "classification", "ends in a softmax"),
    "softmax by hand": (Plain(False), "classification", "sums to one"),
    "sigmoid of classes": (nn.Sigmoid(), "classification", "ends in a sigmoid"),
    "sigmoid": (nn.Sigmoid(), "binary", "ends in a sigmoid"),
    "sigmoid by hand": (Plain(True), "binary", "near to both ends"),
    "log softmax": (nn.LogSoftmax(-1), "classification", None),
    "logits": (nn.Identity(), "classification", None),
    "logits of two classes": (nn.Identity(), "binary", None),
}


@pytest.mark.parametrize("structure", ["kronecker", "implicit"])
@pytest.mark.parametrize("name", ENDS)
def test_outputs_that_are_probabilities_already_are_told_of_at_the_fit(name: str, structure: str) -> None:
    end, likelihood, words = ENDS[name]
    x = torch.randn(200, 4)
    layer = nn.Linear(4, 1 if likelihood == "binary" else 3)
    with torch.no_grad():
        layer.weight.mul_(6)
    y = torch.randint(2, (200,))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        lapis.laplace(nn.Sequential(layer, end), (x, y), likelihood, structure=structure)
    messages = [str(one.message) for one in caught if issubclass(one.category, lapis.LapisWarning)]
    if words is None:
        assert not messages
    else:
        (message,) = messages
        assert words in message
        assert "Remove" in message
        assert caught[0].filename == __file__


@pytest.mark.parametrize("likelihood", [Categorical(), Bernoulli()])
def test_ordinary_logits_are_not_suspected(likelihood: Likelihood) -> None:
    """Logits of any mean and spread, 1,000 sets of 200: at most 2 in 100 look like a sigmoid's by accident."""
    generator = torch.Generator().manual_seed(0)
    alarms = 0
    for _ in range(1000):
        mean, spread = torch.rand(1, generator=generator), torch.rand(1, generator=generator)
        logits = mean + spread * torch.randn(200, 1, 3, generator=generator)
        alarms += likelihood.suspicion(logits) is not None
    constant = torch.full((100, 1, 4), 0.25)
    assert alarms <= (0 if isinstance(likelihood, Categorical) else 20)
    assert likelihood.suspicion(constant) is None


@pytest.mark.parametrize("groups", ["one", "layer"])
def test_a_float32_noise_for_each_output_can_be_tuned(groups: str) -> None:
    """Rounded to float32 the proportions of a scaled noise are no longer those of the fit; with groups by autograd."""
    x, y = torch.randn(40, 2), torch.randn(40, 2)
    model = nn.Sequential(nn.Linear(2, 5), nn.Tanh(), nn.Linear(5, 2))
    posterior = lapis.laplace(model, (x, y), lapis.Gaussian(noise=torch.rand(2) + 0.1), structure="dense")
    tuned = posterior.tune(groups=groups)  # type: ignore[arg-type]
    noise = tuned.likelihood.noise
    assert noise is not None
    assert noise.dtype == torch.float64
    assert bool(torch.isfinite(tuned.predict(x).variance).all())
    assert float(tuned.log_evidence().detach()) > float(posterior.log_evidence().detach())
    twice = tuned.with_noise(2 * noise.float())
    torch.testing.assert_close(twice.log_evidence(), tuned.with_noise(2 * noise).log_evidence(), rtol=1e-6, atol=0)


def test_a_causal_mask_of_infinities_in_a_buffer_is_no_fault() -> None:
    """Language models keep one; infinite weights, and buffers with NaN, are refused (tests/test_bad_input.py)."""

    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(2, 3)
            self.register_buffer("mask", torch.full((4, 4), -torch.inf).triu(1))

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.mask.softmax(-1) @ x)

    x, y = torch.randn(8, 4, 2), torch.randint(3, (8, 4))
    model = Masked()
    prediction = lapis.laplace(model, (x, y), "classification").predict(x)
    model.mask = model.mask.clamp_min(-1e9)
    torch.testing.assert_close(prediction.probs, lapis.laplace(model, (x, y), "classification").predict(x).probs)
