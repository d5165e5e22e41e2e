"""Decisions under uncertainty: Thompson sampling and upper confidence bounds, from any posterior."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from lapis.errors import LikelihoodError, OptionError
from lapis.options import check_arguments
from lapis.posteriors import Posterior
from lapis.predictions import Latent, LatentGaussian, LatentMixture, LatentSamples
from lapis.predictions.latent import square_root

Over = Literal["inputs", "outputs"]


def thompson(
    posterior: Posterior,
    x: Any,
    n: int = 1,
    *,
    over: Over = "inputs",
    generator: torch.Generator | None = None,
) -> Tensor:
    """Choices that are optimal for functions drawn from the posterior: each is taken as often as it may be the best.

    Args:
        posterior: of expected rewards: real (Gaussian), counts (Poisson) or yes-or-no (Bernoulli). The reward of a
            choice is an output of the network, larger is better.
        x: candidates, or contexts.
        n: draws of the function.
        over: "inputs": x are B candidates for a network with one output; the result is (n,), the best candidate of each
            drawn function. "outputs": x are contexts for a network with one output an action; the result is (n, B), or
            (B,) if n is 1, the best action in each context.
        generator: source of randomness; seeded with 0 when not given.
    """
    check_arguments(thompson, locals())
    source = generator or torch.Generator(posterior.network.device).manual_seed(0)
    draws = _draws(_latent(posterior, x, over, n, source), n, over, source)  # (n, B, C)
    if over == "inputs":
        return draws[..., 0].argmax(1)
    best = draws.argmax(-1)
    return best[0] if n == 1 else best


def upper_confidence(
    posterior: Posterior,
    x: Any,
    n: int = 1,
    *,
    width: float = 2.0,
    over: Over = "inputs",
    samples: int | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Choices with the largest mean + width * standard deviation of the expected reward.

    Args:
        posterior: as in `thompson`.
        x: candidates, or contexts.
        n: with over="inputs", how many of the best candidates to return, the best first.
        width: standard deviations above the mean; more explores more.
        over: "inputs": the result is (n,), indices of candidates. "outputs": (B,), the best action in each context.
        samples: networks drawn by sampled posteriors.
        generator: source of randomness; seeded with 0 when not given.
    """
    check_arguments(upper_confidence, locals())
    source = generator or torch.Generator(posterior.network.device).manual_seed(0)
    _check_rewards(posterior)
    latent = posterior.predict(x, samples=samples, generator=source, progress=False).latent
    bounds = (latent.mean.double() + width * latent.variance.double().clamp_min(0).sqrt())[:, 0]
    _check_outputs(bounds.shape[-1], latent.shape[1], over)
    if over == "outputs":
        return bounds.argmax(-1)
    if n > len(bounds):
        raise OptionError("Bad n", expected=f"at most the {len(bounds)} candidates", got=str(n), do="lower it")
    return bounds[:, 0].topk(n).indices


def _latent(posterior: Posterior, x: Any, over: Over, n: int, source: torch.Generator) -> Latent:
    """The distribution of the outputs; of all candidates together where they are compared with each other."""
    _check_rewards(posterior)
    linearised = posterior.methods[0] == "linearised"
    together = linearised and over == "inputs"
    samples = None if linearised else max(n, 1)
    covariance: Literal["full"] | None = "full" if linearised and not together else None
    prediction = posterior.predict(
        x, joint=together, covariance=covariance, samples=samples, generator=source, progress=False
    )
    latent = prediction.latent
    _check_outputs(latent.shape[-1], latent.shape[1], over)
    return latent


def _draws(latent: Latent, n: int, over: Over, source: torch.Generator) -> Tensor:
    """n drawn functions at the inputs, (n, B, C), in float64."""
    if isinstance(latent, LatentMixture):
        weights = latent.weights.to(source.device)
        parts = torch.multinomial(weights, n, replacement=True, generator=source).tolist()
        return torch.cat([_draws(latent.parts[k], 1, over, source) for k in parts])
    if isinstance(latent, LatentSamples):
        values = latent.values[:, :, 0].double()
        rows = torch.arange(n) if len(values) == n else torch.randint(len(values), (n,), generator=source)
        return values[rows]
    assert isinstance(latent, LatentGaussian)
    mean = latent.mean[:, 0].double()
    noise = torch.randn(n, *mean.shape, dtype=torch.float64, device=mean.device, generator=source)
    if latent.joint is not None:
        return mean + (noise.flatten(1) @ square_root(latent.joint.double()).mT).reshape(noise.shape)
    assert latent.covariance is not None
    return mean + torch.einsum("bcd,nbd->nbc", square_root(latent.covariance[:, 0].double()), noise)


def _check_rewards(posterior: Posterior) -> None:
    if posterior.likelihood.name not in ("gaussian", "bernoulli", "poisson"):
        raise LikelihoodError(
            "The outputs are no rewards",
            expected="a posterior with a gaussian, bernoulli or poisson likelihood",
            got=posterior.likelihood.name,
            do="model the reward of a choice, for example 1 for a right answer and 0 for a wrong one",
        )


def _check_outputs(outputs: int, positions: int, over: Over) -> None:
    if positions != 1 or (outputs != 1) == (over == "inputs"):
        raise OptionError(
            f'over="{over}" does not fit the network',
            expected="one output, the reward of a candidate" if over == "inputs" else "one output for each action",
            got=f"{outputs} outputs at {positions} positions",
            do='pass over="outputs" for networks with one output an action, over="inputs" for one output',
        )
