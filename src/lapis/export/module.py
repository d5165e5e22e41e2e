"""A posterior's prediction as one module: no Lapis is needed where it runs, and torch.export and ONNX take it."""

from __future__ import annotations

import re
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lapis.errors import LikelihoodError, ModelError, OptionError
from lapis.export.links import Probabilities
from lapis.export.parts import Covariance
from lapis.export.tangent import Tangent
from lapis.likelihoods import Bernoulli, Categorical, Gaussian
from lapis.network.calling import first_line
from lapis.options import check_arguments
from lapis.posteriors.laplace.stored import LaplacePosterior
from lapis.posteriors.posterior import Posterior

Link = Literal["quasi", "mean_field", "probit"]

OUTPUTS = {"regression": ("mean", "std", "epistemic_std"), "classification": ("probs", "entropy", "logit_std")}
"""What the module returns, in order."""


class Predictive(nn.Module):
    """x -> (mean, std, epistemic_std), or (probs, entropy, logit_std), by the linearised network.

    The Jacobian of each example is formed, (B, C, P): meant for last layers and small networks.
    """

    noise: Tensor
    shift: Tensor

    def __init__(self, posterior: LaplacePosterior, link: Link) -> None:
        super().__init__()
        network, likelihood = posterior.network, posterior.likelihood
        self.task = "regression" if isinstance(likelihood, Gaussian) else "classification"
        self.link = link
        self.binary = isinstance(likelihood, Bernoulli)
        self.probabilities = Probabilities(link, posterior.n_outputs, self.binary).to(network.device, network.dtype)
        self.sharpness = posterior._sharpness()
        self.tangent, self.covariance = Tangent(posterior), Covariance(posterior)
        noise = likelihood.noise.detach() if isinstance(likelihood, Gaussian) else torch.zeros(())
        self.register_buffer("noise", noise.to(network.device, network.dtype))
        self.moved = not torch.equal(posterior.mean, posterior.point)
        """Whether the posterior's mean is not where the network is linearised."""
        self.register_buffer("shift", (posterior.mean - posterior.point).to(network.dtype))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        f, jacobian = self.tangent(x)
        if self.moved:
            f = f + jacobian @ self.shift
        f, covariance = self.sharpness * f, self.sharpness**2 * self.covariance(jacobian)
        variance = torch.diagonal(covariance, dim1=-2, dim2=-1).clamp_min(0)
        if self.task == "regression":
            return f, (variance + self.noise.square()).sqrt(), variance.sqrt()
        probs = self.probabilities(f, variance, covariance)
        terms = -probs * probs.clamp_min(torch.finfo(probs.dtype).tiny).log()
        if self.binary:
            other = 1 - probs
            return probs, terms - other * other.clamp_min(torch.finfo(probs.dtype).tiny).log(), variance.sqrt()
        return probs, terms.sum(-1), variance.sqrt()


def predictive(posterior: Posterior, *, link: Link = "quasi") -> Predictive:
    """A stored Laplace posterior's linearised prediction as a module: probabilities (or mean) and uncertainty at once.

    Regression gives (mean, std, epistemic_std), each (B, K); classification (probs (B, C), entropy (B,), logit_std
    (B, C)), for labels with one logit each all (B, C). The module is a copy, in evaluation mode, and holds all that it
    needs: `torch.export.export` and `torch.onnx.export` take it, see `lapis.export.to_onnx`.

    Args:
        posterior: dense, diagonal, Kronecker or EKFAC, over all weights of a small network or a last layer.
        link: as in `posterior.predict`: "quasi" (default, an integral), or in closed form "mean_field" or "probit".

    >>> import lapis
    >>> x, model = torch.randn(20, 3), nn.Linear(3, 2)
    >>> posterior = lapis.laplace(model, (x, torch.arange(20) % 2), "classification").tune()
    >>> probs, entropy, logit_std = predictive(posterior)(x)
    >>> bool(torch.allclose(probs, posterior.predict(x).probs, atol=1e-5))
    True
    """
    check_arguments(predictive, locals())
    if not isinstance(posterior, LaplacePosterior):
        raise OptionError(
            f"{type(posterior).__name__} cannot be exported",
            expected="a LaplacePosterior, whose covariance is stored",
            got=type(posterior).__name__,
            do='fit with structure="diagonal", "kronecker" or "dense"',
        )
    if not isinstance(posterior.likelihood, (Gaussian, Categorical, Bernoulli)):
        raise LikelihoodError(
            f"The {posterior.likelihood.name} likelihood cannot be exported",
            expected="gaussian, categorical or bernoulli",
            got=posterior.likelihood.name,
            do="predict in Python",
        )
    posterior.check_network()
    _check_outputs(posterior)
    made = Predictive(posterior, link)
    _prove(made, posterior)
    return made


def _prove(made: Predictive, posterior: LaplacePosterior) -> None:
    """Raise unless the module's outputs are those of the posterior, on a few inputs of the fit or like them."""
    example, regression = _like_the_data(posterior), made.task == "regression"
    told: Any = posterior.predict(example, method="linearised", link=None if regression else made.link)
    try:
        found = made(example)
    except (RuntimeError, IndexError, TypeError) as error:
        raise _not_so(f"an error: {first_line(error)}") from error
    if regression:
        wanted = (told.mean, told.std, told.epistemic_variance.sqrt())
    else:
        wanted = (told.probs, told.entropy, told.f_variance.sqrt())
    tolerance = 1e-6 if posterior.network.dtype == torch.float64 else 1e-3
    for one, other in zip(found, wanted, strict=True):
        off = float((one - other.reshape(one.shape)).abs().max() / other.abs().max().clamp_min(1e-30))
        if not off <= tolerance:
            raise _not_so(f"other numbers, by {off:.2g} of the largest")


def _not_so(got: str) -> ModelError:
    return ModelError(
        "The network cannot be exported",
        expected="layers that are called once, each row an example, and whose weights nothing else uses",
        got=got,
        do='fit with weights="last_layer", or predict in Python',
    )


def _like_the_data(posterior: LaplacePosterior) -> Tensor:
    """The example that the fit kept; of a loaded posterior, made-up inputs of the shape that its file names."""
    network = posterior.network
    if isinstance(network.example, Tensor):
        return network.example
    found = re.fullmatch(r"\((\d+(?:, \d+)*),?\) (\w+)", posterior.facts.signature)
    if found is None:
        raise ModelError(
            "Nothing says what the inputs are like",
            expected="a posterior that was fitted to data",
            got=posterior.facts.signature or "one without data",
            do="fit it again",
        )
    shape, dtype = [int(side) for side in found[1].split(", ")][1:], getattr(torch, found[2])
    source = torch.Generator().manual_seed(0)
    made = torch.randn(4, *shape, generator=source, dtype=torch.float64)
    return (made if dtype.is_floating_point else made > 0).to(network.device, dtype)


def _check_outputs(posterior: LaplacePosterior) -> None:
    """One tensor in, one position out."""
    example: Any = posterior.network.example
    if example is not None and not isinstance(example, Tensor):
        raise ModelError(
            "The network takes several inputs", expected="one tensor", got=type(example).__name__, do="wrap it"
        )
    if posterior.curvature.positions > 1:
        raise ModelError(
            "The network has outputs at several positions",
            expected="outputs (B, C)",
            got=f"{posterior.curvature.positions} positions",
            do="export the network that ends in one position",
        )
