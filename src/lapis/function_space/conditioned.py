"""A Gaussian process conditioned on data, and the data's evidence under it, from kernel matrices.

With f ~ GP(mu, K) and the likelihood expanded at outputs f_0, -log p(y | f) ~ g^T (f - f_0) + 1/2 |f - f_0|^2_H, the
posterior mean is mu(x) + K(x, X) a, its kernel K(x, x') - K(x, X) S B^-1 S^T K(X, x'):

    a = -(I + H K)^-1 (g + H (mu - f_0)),    H = S S^T,    B = I + S^T K S.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lapis.batches import Inputs, batches, joined
from lapis.curvature.products.kernel import KernelCholesky
from lapis.errors import DataError
from lapis.function_space.kernels import check_matrix
from lapis.function_space.process import Process
from lapis.likelihoods import Likelihood

MOST_STEPS, TOLERANCE, HALVINGS = 50, 1e-12, 30
"""Newton's method ends when a step promises less than this share of the loss, or after so many steps."""


@dataclass(frozen=True)
class _Observed:
    """Data in one piece, the process at them, and the network's outputs."""

    inputs: Inputs
    targets: Tensor
    outputs: Tensor
    """f_t, (B, T, C) float64."""
    mean: Tensor
    """Of the process, alike."""
    kernel: Tensor
    """(n, n) float64."""
    likelihood: Likelihood
    temperature: float

    def factor(self, f: Tensor) -> Tensor:
        """S of the tempered likelihood, (B, T, C, R)."""
        return self.likelihood.factor(f, self.targets).detach() / math.sqrt(self.temperature)

    def gradient(self, f: Tensor) -> Tensor:
        """g of the tempered likelihood, (B, T, C)."""
        return self.likelihood.gradient(f, self.targets).detach() / self.temperature

    def at(self, dual: Tensor) -> Tensor:
        """The outputs mu + K a of a dual vector a (n,), (B, T, C)."""
        return self.mean + (self.kernel @ dual).reshape(self.mean.shape)

    def loss(self, dual: Tensor) -> float:
        """-log p(y | f) + 1/2 a^T K a at the outputs of a dual vector (n,)."""
        fit = self.likelihood.nll(self.at(dual), self.targets).sum() / self.temperature
        return float(fit + 0.5 * dual @ (self.kernel @ dual))


@dataclass(frozen=True, eq=False, repr=False)
class ConditionedProcess(Process):
    """A process after data: made by `Process.given`.

    Args:
        base: the process before.
        observed: the data, and `base` at them.
        at: f_0, where the likelihood was expanded.
        factor: S there; its Cholesky factor of B is `solver`.
        dual: a, (n,).
    """

    base: Process
    observed: _Observed
    at: Tensor
    factor: Tensor
    solver: KernelCholesky
    dual: Tensor

    def _cross(self, inputs: Inputs) -> Tensor:
        """K(x, X), float64."""
        return self.base._kernel(inputs, self.observed.inputs).double()

    def _mean(self, inputs: Inputs) -> tuple[Tensor, tuple[int, ...]]:
        mean, shape = self.base._mean(inputs)
        return mean + (self._cross(inputs) @ self.dual).reshape(mean.shape), shape

    def _kernel(self, left: Inputs, right: Inputs | None) -> Tensor:
        before = self.base._kernel(left, right)
        here = self._cross(left)
        across = here if right is None else self._cross(right)
        return (before.double() - here @ self.solver.solve(across.mT)).to(before.dtype)

    def _product(self, inputs: Inputs, vectors: Tensor) -> Tensor:
        cross = self._cross(inputs)
        return self.base._product(inputs, vectors) - (cross @ self.solver.solve((vectors @ cross).mT)).mT

    def _functions(self, places: Sequence[Inputs], samples: int, generator: torch.Generator) -> list[Tensor]:
        """Matheron's rule: draws of the base, corrected by what they miss of pseudo-targets drawn with their noise."""
        *before, there = self.base._functions([*places, self.observed.inputs], samples, generator)
        s = self.factor
        noise = torch.randn(
            samples, *s.shape[:2], s.shape[-1], dtype=s.dtype, generator=generator, device=generator.device
        )
        noisy = (s @ noise.to(s.device).unsqueeze(-1)).squeeze(-1)
        misses = self.observed.gradient(self.at) + _curved(s, there - self.at) + noisy
        duals = _dual(self.observed.kernel, self.solver, misses.flatten(1).mT)
        return [
            drawn + (self._cross(inputs) @ duals).mT.reshape(drawn.shape)
            for drawn, inputs in zip(before, places, strict=True)
        ]

    def squared_distance(self) -> Tensor:
        raise DataError(
            "The evidence of more data is taken at the mode",
            expected="log_evidence(data, at_mode=True), or all the data at once",
            got="a process that is conditioned on data already, and t",
            do="pass at_mode=True",
        )


def conditioned(process: Process, data: object, steps: int | None, batch_size: int | None) -> ConditionedProcess:
    """See `Process.given`."""
    observed = _observe(process, data, batch_size)
    if steps is None:
        dual = _mode(observed)
        at = observed.at(dual)
        factor, solver, _ = _newton(observed, at)
    else:
        at, dual = observed.outputs, observed.mean.new_zeros(observed.mean.numel())
        for step in range(steps):
            if step:
                dual = _no_worse_than_before(observed, dual) if step == 1 else dual
                at = observed.at(dual)
            factor, solver, target = _newton(observed, at)
            dual = target if step == 0 else _shortened(observed, dual, target)
    return ConditionedProcess(
        process.tangent, process.temperature, process.link, process, observed, at, factor, solver, dual
    )


def evidence(process: Process, data: object, at_mode: bool, batch_size: int | None) -> Tensor:
    """See `Process.log_evidence`."""
    observed = _observe(process, data, batch_size)
    f, cost = observed.outputs, torch.zeros(())
    if at_mode:
        dual = _mode(observed)
        f = observed.at(dual)
        cost = dual @ observed.kernel @ dual
    else:
        cost = process.squared_distance()
    solver = KernelCholesky(observed.kernel, [observed.factor(f)])
    fit = -observed.likelihood.nll(f, observed.targets).sum() / observed.temperature
    return fit - 0.5 * cost - solver.lower.diagonal().log().sum()


def _observe(process: Process, data: object, batch_size: int | None) -> _Observed:
    """Checked data in one piece, and the process at them; refused where the kernel matrix does not fit."""
    tangent = process.tangent
    network, likelihood = tangent.network, tangent.likelihood
    held = list(batches(data, dtype=network.dtype, device=network.device, batch_size=batch_size)[0])
    whole = joined(held)
    if whole is None:
        raise DataError(
            "The examples have different shapes",
            expected="data that fit in one batch",
            got=f"{len(held)} batches of different shapes",
            do="pad them to one length",
        )
    inputs = tangent.inputs(whole.inputs)
    jacobian = tangent.jacobian(inputs)
    outputs = torch.cat(jacobian.outputs)
    targets = likelihood.targets(whole.targets, outputs, tangent.raw_shape(jacobian))
    check_matrix(4 * outputs.numel(), outputs.numel(), 8, tangent.memory_budget)
    mean, _ = process._mean(inputs)
    kernel = process._kernel(inputs, None).double()
    return _Observed(inputs, targets, outputs, mean, kernel, likelihood, process.temperature)


def _curved(s: Tensor, vectors: Tensor) -> Tensor:
    """S S^T v for v (..., B, T, C)."""
    return (s @ (s.mT @ vectors.unsqueeze(-1))).squeeze(-1)


def _dual(kernel: Tensor, solver: KernelCholesky, misses: Tensor) -> Tensor:
    """-(I + H K)^-1 r for columns r (n, k)."""
    return solver.solve(kernel @ misses) - misses


def _newton(observed: _Observed, at: Tensor) -> tuple[Tensor, KernelCholesky, Tensor]:
    """S and its solver at outputs f_0, and the dual vector of the quadratic expansion's mode."""
    s = observed.factor(at)
    solver = KernelCholesky(observed.kernel, [s])
    misses = observed.gradient(at) + _curved(s, observed.mean - at)
    return s, solver, _dual(observed.kernel, solver, misses.reshape(-1, 1))[:, 0]


def _mode(observed: _Observed) -> Tensor:
    """The dual vector of the tangent model's mode, by Newton's method with steps that never raise the loss."""
    dual = _no_worse_than_before(observed, _newton(observed, observed.outputs)[2])
    for _ in range(MOST_STEPS):
        target = _newton(observed, observed.at(dual))[2]
        promised = float((target - dual) @ observed.kernel @ (target - dual))
        if promised <= TOLERANCE * max(1.0, abs(observed.loss(dual))):
            return dual
        dual = _shortened(observed, dual, target)
    return dual


def _no_worse_than_before(observed: _Observed, dual: Tensor) -> Tensor:
    """The first step of Newton's method, which no search has shortened, or the process before the data if it is worse.

    At outputs of a network that is sure of itself H is next to nothing, and a step by it far too long.
    """
    before = torch.zeros_like(dual)
    return dual if observed.loss(dual) <= observed.loss(before) else before


def _shortened(observed: _Observed, dual: Tensor, target: Tensor) -> Tensor:
    """The step from `dual` to `target`, halved until the loss does not grow."""
    before = observed.loss(dual)
    for halving in range(HALVINGS):
        found = dual + 0.5**halving * (target - dual)
        if observed.loss(found) <= before:
            return found
    return dual
