"""Variational EM: for any joint density p(y, z | theta) that can be evaluated and differentiated.

    log p(y) = ELBO(q, theta) + KL(q || p(z | y, theta)),    ELBO = E_q[log p(y, z | theta) - log q(z)]

    E: steps up the ELBO in q           M: steps up the ELBO in theta

Gradients are pathwise, z = mean + S noise. In the E-step log q is differentiated through z only: that gradient has the
same expectation, and no noise where q is the posterior (the difference is then log p(y), whatever the draw). After the
steps a search of q and theta together goes on to the top, and tells whether there was more to gain (`ascent`).
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lapis.errors import LapisWarning, OptionError
from lapis.latent.variational.approximation import Approximation, Gaussians, PerDatum, approximation, latent_size
from lapis.latent.variational.ascent import LAST_RATE, Ascent, Function, count_of, integrand, noise_of, tensors_of
from lapis.options import check_arguments, check_count, checked_tensor, shown
from lapis.progress import track

LogJoint = Callable[..., Tensor]


@dataclass(frozen=True)
class VariationalFit:
    """What `variational_em` found."""

    log_joint: LogJoint
    """The fitted module, or the function that was given."""
    parameters: Mapping[str, Tensor]
    """theta."""
    approximation: Approximation
    elbos: tuple[float, ...]
    """Estimates after every round and after the searches, in nats, of all data."""
    gain: tuple[float, float]
    """Nats that the last search after the rounds gained, and their standard error."""
    converged: bool
    """Whether that is next to nothing: a thousandth of a nat a datum, or 1e-4 of the ELBO, whichever is more."""
    n_latent: int
    _data: Any
    _function: Function

    @property
    def q(self) -> Gaussians:
        """Of each datum of the fit."""
        return self.of(self._data)

    def of(self, data: Any) -> Gaussians:
        """q of these data: those of the fit, or others where q is a network."""
        if isinstance(self.approximation, PerDatum) and data is not self._data:
            raise OptionError(
                "q has parameters of its own for each datum of the fit", expected="a network as q, for other data",
                got=shown(data), do="fit with a network, or ask for .q",
            )  # fmt: skip
        with torch.no_grad():
            found: Gaussians = self.approximation(torch.arange(count_of(data)), data)
        return found

    def elbo(self, draws: int = 1000, *, generator: torch.Generator | None = None) -> tuple[float, float]:
        """The ELBO of all data, and the standard error of this estimate."""
        check_arguments(VariationalFit.elbo, locals())
        check_count("draws", draws, least=2)
        source = generator or torch.Generator().manual_seed(0)
        with torch.no_grad():
            values = integrand(self._function, self.q, self._data, noise_of(draws, self.q, source)).sum(1).double()
        return float(values.mean()), float(values.std() / len(values) ** 0.5)


def variational_em(
    log_joint: LogJoint,
    q: Literal["mean_field", "full"] | nn.Module,
    data: Any,
    *,
    n_latent: int | None = None,
    parameters: Mapping[str, Tensor] | None = None,
    rounds: int = 200,
    steps: int = 5,
    draws: int = 8,
    batch_size: int | None = None,
    learning_rate: float = 0.1,
    generator: torch.Generator | None = None,
    progress: bool | None = None,
) -> VariationalFit:
    """Fit q, and theta, by steps up the ELBO.

    Args:
        log_joint: log p(y_i, z_i | theta), (draws, N), of data y with N rows and z (draws, N, n_latent). A module,
            whose parameters are theta (a copy is fitted); or a function of (data, z), or of (data, z, theta) with
            `parameters`. A latent variable of all data at once is that of a single row: data of shape (1, ...).
        q: Gaussians of each datum, "mean_field" or "full", with parameters of their own; or a network that maps data to
            (N, 2 n_latent) means and log standard deviations, with n_latent (n_latent - 1) / 2 more outputs for a full
            covariance (a copy is fitted).
        data: a tensor, or a tuple of tensors, with a datum a row.
        n_latent: size of each z; of a network read off its outputs when None, as means and standard deviations.
        parameters: theta by name, where log_joint is a function of it: where to start.
        rounds: E- and M-steps. The learning rate falls to a hundredth over them.
        steps: steps of Adam in each of both.
        draws: of z in a step; half of them mirrored about the mean.
        batch_size: data a step; all by default.
        learning_rate: of Adam.
        generator: source of randomness; seeded with 0 when not given.
        progress: show a bar; by default on a terminal only.
    """
    check_arguments(variational_em, locals(), apart=("q",))
    count, dtype = count_of(data), _dtype(data)
    source = generator or torch.Generator().manual_seed(0)
    function, theta, fitted = _model(log_joint, parameters)
    over = copy.deepcopy(q) if isinstance(q, nn.Module) else q
    latent = latent_size(over, data) if n_latent is None else n_latent
    family = approximation(over, count, latent, dtype)
    integrand(function, family(torch.arange(count), data), data, torch.zeros(2, count, latent, dtype=dtype))
    ascent = Ascent(function, family, theta, data, steps, draws, batch_size, source)
    elbos = []
    for done in track(range(rounds), "variational EM", rounds, progress):
        ascent.round(learning_rate * LAST_RATE ** (done / rounds))
        elbos.append(ascent.elbo(draws))
    gain, error = ascent.finish(rounds, learning_rate * LAST_RATE**0.5)
    elbos.append(ascent.elbo(draws))
    converged = not ascent.higher(gain, error)
    if not converged:
        warnings.warn(
            f"The ELBO was still climbing after {rounds} rounds: a last search gained {gain:.2g} nats (standard error "
            f"{error:.1g}). Raise rounds, or learning_rate ({learning_rate:g}).",
            LapisWarning,
            stacklevel=2,
        )
    values_of_theta = {name: value.detach() for name, value in theta.items()}
    return VariationalFit(
        fitted, values_of_theta, family, tuple(elbos), (gain, error), converged, latent, data, function
    )


def _model(
    log_joint: LogJoint, parameters: Mapping[str, Tensor] | None
) -> tuple[Function, dict[str, Tensor], LogJoint]:
    """A function of (data, z), theta as leaves, and what to hand back."""
    if isinstance(log_joint, nn.Module):
        if parameters is not None:
            raise OptionError("theta is told twice", expected="a module, or parameters", got="both", do="leave one out")
        fitted = copy.deepcopy(log_joint)
        return fitted, {name: p for name, p in fitted.named_parameters() if p.requires_grad}, fitted
    if parameters is None:
        return log_joint, {}, log_joint
    for name, p in parameters.items():
        if not checked_tensor(name, p).is_floating_point():
            raise OptionError(f"Bad {name}", expected="floating point", got=shown(p), do=f"pass {name}.double()")
    theta = {name: p.detach().clone().requires_grad_() for name, p in parameters.items()}
    return lambda data, z: log_joint(data, z, theta), theta, log_joint


def _dtype(data: Any) -> torch.dtype:
    found = [part.dtype for part in tensors_of(data) if part.is_floating_point()]
    return found[0] if found else torch.get_default_dtype()
