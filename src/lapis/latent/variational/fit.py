"""Variational EM: for any joint density p(y, z | theta) that can be evaluated and differentiated.

    log p(y) = ELBO(q, theta) + KL(q || p(z | y, theta)),    ELBO = E_q[log p(y, z | theta) - log q(z)]

    E: steps up the ELBO in q           M: steps up the ELBO in theta

Gradients are pathwise, z = mean + S noise. In the E-step log q is differentiated through z only: that gradient has the
same expectation, and no noise where q is the posterior (the difference is then log p(y), whatever the draw).
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lapis.errors import DataError, LapisWarning, ModelError, OptionError
from lapis.latent.variational.approximation import Approximation, Gaussians, approximation, latent_size
from lapis.options import check_arguments, check_count, checked_tensor, shown
from lapis.progress import track

LogJoint = Callable[..., Tensor]

LAST_RATE = 0.01
"""What is left of the learning rate in the last round."""

BETAS = (0.9, 0.99)
"""Of Adam: squares of a hundred steps, so that the large gradients of a wide start are soon forgotten."""

JUDGED = 64
"""Draws that decide whether a fit has converged."""

TOLERANCE = 1e-3
"""Nats a datum that are no gain."""


@dataclass(frozen=True)
class VariationalFit:
    """What `variational_em` found."""

    log_joint: LogJoint
    """The fitted module, or the function that was given."""
    parameters: Mapping[str, Tensor]
    """theta."""
    approximation: Approximation
    elbos: tuple[float, ...]
    """Estimates after every round, in nats, of all data."""
    converged: bool
    """Whether some more rounds with larger steps raise the ELBO no further."""
    n_latent: int
    _data: Any
    _function: Callable[[Any, Tensor], Tensor]

    @property
    def q(self) -> Gaussians:
        """Of each datum of the fit."""
        return self.of(self._data)

    def of(self, data: Any) -> Gaussians:
        """q of these data: those of the fit, or others where q is a network."""
        with torch.no_grad():
            found: Gaussians = self.approximation(torch.arange(_count(data)), data)
        return found

    def elbo(self, draws: int = 1000, *, generator: torch.Generator | None = None) -> tuple[float, float]:
        """The ELBO of all data, and the standard error of this estimate."""
        check_arguments(VariationalFit.elbo, locals())
        check_count("draws", draws, least=2)
        source = generator or torch.Generator().manual_seed(0)
        with torch.no_grad():
            values = _values(self._function, self.q, self._data, _noise(draws, self.q, source)).sum(1).double()
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
    count, dtype = _count(data), _dtype(data)
    source = generator or torch.Generator().manual_seed(0)
    function, theta, fitted = _model(log_joint, parameters)
    over = copy.deepcopy(q) if isinstance(q, nn.Module) else q
    latent = latent_size(over, data) if n_latent is None else n_latent
    family = approximation(over, count, latent, dtype)
    _values(function, family(torch.arange(count), data), data, torch.zeros(2, count, latent, dtype=dtype))
    ascent = _Ascent(function, family, theta, data, steps, draws, batch_size, source)
    elbos = []
    for done in track(range(rounds), "variational EM", rounds, progress):
        ascent.round(learning_rate * LAST_RATE ** (done / rounds))
        elbos.append(ascent.elbo(draws))
    gain = ascent.gain(max(rounds // 10, 5), learning_rate * LAST_RATE**0.5)
    converged = gain <= 0
    if not converged:
        warnings.warn(
            f"The ELBO was still climbing after {rounds} rounds ({gain:.2g} nats in a few larger steps): "
            f"raise rounds, or learning_rate ({learning_rate:g}).",
            LapisWarning,
            stacklevel=2,
        )
    values_of_theta = {name: value.detach() for name, value in theta.items()}
    return VariationalFit(fitted, values_of_theta, family, tuple(elbos), converged, latent, data, function)


class _Ascent:
    """Steps up the ELBO: by turns in q, and in theta."""

    def __init__(
        self,
        function: Callable[[Any, Tensor], Tensor],
        family: Approximation,
        theta: Mapping[str, Tensor],
        data: Any,
        steps: int,
        draws: int,
        batch_size: int | None,
        source: torch.Generator,
    ) -> None:
        self.function, self.family, self.data, self.source = function, family, data, source
        self.steps, self.draws, self.count = steps, draws, _count(data)
        self.batch_size = min(batch_size or self.count, self.count)
        groups: list[list[Tensor]] = [[p for p in family.parameters() if p.requires_grad], list(theta.values())]
        self.halves = [(half, g, torch.optim.Adam(g, betas=BETAS)) for half, g in enumerate(groups) if g]

    def round(self, rate: float) -> None:
        """Some steps in q, then some in theta."""
        for half, group, optimiser in self.halves:
            optimiser.param_groups[0]["lr"] = rate
            for _ in range(self.steps):
                rows = torch.arange(self.count)
                if self.batch_size < self.count:
                    rows = torch.randperm(self.count, generator=self.source)[: self.batch_size]
                part = _rows(self.data, rows)
                gaussians = self.family(rows, part)
                noise = _noise(self.draws, gaussians, self.source)
                values = _values(self.function, gaussians if half == 0 else gaussians.detached(), part, noise)
                loss = -values.mean(0).sum() * (self.count / len(rows))
                found = torch.autograd.grad(loss, group, allow_unused=True)
                for p, gradient in zip(group, found, strict=True):
                    p.grad = gradient
                optimiser.step()
                optimiser.zero_grad()

    @torch.no_grad()
    def draw(self, draws: int, source: torch.Generator) -> Tensor:
        """The ELBO's integrand, summed over the data, (draws,)."""
        gaussians = self.family(torch.arange(self.count), self.data)
        return _values(self.function, gaussians, self.data, _noise(draws, gaussians, source)).sum(1).double()

    def elbo(self, draws: int) -> float:
        """An estimate."""
        value = float(self.draw(draws, self.source).mean())
        if not value > -float("inf"):
            raise DataError(
                "The ELBO is not finite", expected="a number", got=str(value),
                do="lower learning_rate, or check log_joint",
            )  # fmt: skip
        return value

    def gain(self, rounds: int, rate: float) -> float:
        """What some more rounds with larger steps bring, beyond three standard errors and the tolerance; then go back.

        A falling rate ends every trace flat, wherever it is. Both ends are judged by the same draws, so that most of
        their noise cancels.
        """
        parameters = [p for _, group, _ in self.halves for p in group]
        kept = [p.detach().clone() for p in parameters]
        before = self.draw(JUDGED, torch.Generator().manual_seed(0))
        for done in range(rounds):
            self.round(rate * LAST_RATE ** (done / (2 * rounds)))
        gains = self.draw(JUDGED, torch.Generator().manual_seed(0)) - before
        with torch.no_grad():
            for p, old in zip(parameters, kept, strict=True):
                p.copy_(old)
        slack = TOLERANCE * self.count + 1e-4 * abs(float(before.mean()))
        return float(gains.mean() - 3 * gains.std() / JUDGED**0.5) - slack


def _values(function: Callable[[Any, Tensor], Tensor], q: Gaussians, data: Any, noise: Tensor) -> Tensor:
    """log p(y, z) - log q(z), (draws, N), with log q differentiated through z only."""
    z = q.draw(noise)
    found = function(data, z)
    if not isinstance(found, Tensor) or found.shape != z.shape[:2]:
        raise ModelError(
            "log_joint has values of another shape",
            expected=f"(draws, N) = {tuple(z.shape[:2])}",
            got=shown(found),
            do="sum over all but the first two axes of z",
        )
    return found - q.detached().log_prob(z)


def _noise(draws: int, q: Gaussians, source: torch.Generator) -> Tensor:
    """Standard normal (draws, N, L), in mirrored pairs."""
    half = torch.randn((draws + 1) // 2, *q.means.shape, generator=source, dtype=q.means.dtype)
    return torch.cat([half, -half])[:draws]


def _model(
    log_joint: LogJoint, parameters: Mapping[str, Tensor] | None
) -> tuple[Callable[[Any, Tensor], Tensor], dict[str, Tensor], LogJoint]:
    """A function of (data, z), theta as leaves, and what to hand back."""
    if isinstance(log_joint, nn.Module):
        if parameters is not None:
            raise OptionError("theta is told twice", expected="a module, or parameters", got="both", do="leave one out")
        fitted = copy.deepcopy(log_joint)
        return fitted, {name: p for name, p in fitted.named_parameters() if p.requires_grad}, fitted
    if parameters is None:
        return log_joint, {}, log_joint
    theta = {name: checked_tensor(name, p).detach().clone().requires_grad_() for name, p in parameters.items()}
    return lambda data, z: log_joint(data, z, theta), theta, log_joint


def _tensors(data: Any) -> tuple[Tensor, ...]:
    return data if isinstance(data, tuple) else (data,)


def _count(data: Any) -> int:
    """Rows of the data."""
    sizes = {len(checked_tensor("data", part)) if checked_tensor("data", part).dim() else 0 for part in _tensors(data)}
    if len(sizes) != 1 or 0 in sizes:
        raise DataError(
            "Bad data", expected="tensors with one row a datum", got=f"{sorted(sizes)} rows", do="check them"
        )
    return sizes.pop()


def _dtype(data: Any) -> torch.dtype:
    found = [part.dtype for part in _tensors(data) if part.is_floating_point()]
    return found[0] if found else torch.get_default_dtype()


def _rows(data: Any, rows: Tensor) -> Any:
    return tuple(part[rows] for part in data) if isinstance(data, tuple) else data[rows]
