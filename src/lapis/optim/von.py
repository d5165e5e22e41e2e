"""VON, variational online Newton: a Gaussian with a full covariance over the weights of a small network."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lapis.curvature.hessian import twice_differentiable
from lapis.errors import ModelError, NotPositiveDefiniteError, OptionError
from lapis.likelihoods import Likelihood
from lapis.likelihoods import resolve as resolve_likelihood
from lapis.network import flat_gradient
from lapis.optim.checks import check_betas
from lapis.optim.diagonal import scales
from lapis.optim.gaussian import WithProcess, facts_of, trained_network
from lapis.optim.sampling import SamplingOptimizer, Statistics
from lapis.options import check_arguments
from lapis.posteriors.factored import FactoredPosterior
from lapis.posteriors.posterior import MEMORY_BUDGET

MOST_WEIGHTS = 4000
"""Hessians and factorisations of more weights take minutes a step."""


class VON(WithProcess, SamplingOptimizer):
    r"""The learning rule for a Gaussian with full covariance and the exact Hessian, for some hundred weights.

    With N = `data_size` / `temperature`, d = `prior_precision` / N, S = H + d I and rho = 1 - `beta`, a step draws
    theta ~ N(m, (N S)^-1), takes gradient g and Hessian K of the mean loss there, and moves

        H <- H + rho (K - H) + rho^2 (K - H) S^-1 (K - H) / 2,      m <- m - lr (H + d I)^-1 (g + d m)

    The last term of H keeps S positive definite (`positive`). With `at_mean` nothing is drawn, and the rule is online
    Newton, whose fixed point is the Laplace posterior; with lr=1, beta=0, positive=False it is Newton's method.

    The Hessian is taken when `loss.backward()` is called, within `step(closure)` or `sampled()`.

    Args:
        params: parameters, in one group, of one dtype on one device.
        lr: learning rate.
        data_size: number of training examples.
        prior_precision: of the Gaussian prior N(0, 1 / prior_precision) of each weight.
        beta: decay of the Hessian's average.
        hess_init: H starts as this multiple of the identity.
        temperature: of the posterior.
        at_mean: differentiate at the mean instead of drawing.
        positive: see above; without it a step to an indefinite S is an error.
        draws: of the weights in each `step(closure)`.
        generator: source of the seed, 0 without one; see `SamplingOptimizer`.
    """

    attaches: ClassVar[bool] = False

    def __init__(
        self,
        params: Any,
        lr: float = 0.1,
        *,
        data_size: int | None = None,
        prior_precision: float = 1.0,
        beta: float = 0.9,
        hess_init: float = 1.0,
        temperature: float = 1.0,
        at_mean: bool = False,
        positive: bool = True,
        draws: int = 1,
        generator: torch.Generator | None = None,
    ) -> None:
        check_arguments(VON.__init__, locals(), apart=("lr", "beta", "data_size"))
        defaults = {
            "lr": lr,
            "data_size": data_size,
            "prior_precision": prior_precision,
            "beta": beta,
            "hess_init": hess_init,
            "temperature": temperature,
            "at_mean": at_mean,
            "positive": positive,
        }
        self._hessian: Tensor | None = None
        """Of all losses backpropagated at the present draw, (P, P)."""
        super().__init__(params, defaults, draws=draws, generator=generator)

    def _check_group(self, group: Mapping[str, Any]) -> None:
        super()._check_group(group)
        check_betas((group["beta"],), 1)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add the only group; OptionError if there is one, or if it is too large."""
        super().add_param_group(param_group)
        params = self.param_groups[-1]["params"]
        size = sum(p.numel() for p in params)
        kinds = {(p.dtype, p.device) for p in params}
        if len(self.param_groups) > 1 or len(kinds) > 1 or size > MOST_WEIGHTS:
            raise OptionError(
                "VON keeps one matrix over all weights",
                expected=f"one group of at most {MOST_WEIGHTS:,} weights, of one dtype on one device",
                got=f"{len(self.param_groups)} groups, {len(kinds)} kinds, {size:,} weights",
                do="use IVON or VOGN",
            )

    def _matrix(self) -> Tensor:
        """H, (P, P) float64."""
        params = self._trainable()
        state = self.state[params[0]]
        if not state:
            size = sum(p.numel() for p in params)
            state["step"] = 0
            state["hessian"] = self.param_groups[0]["hess_init"] * torch.eye(
                size, dtype=torch.float64, device=params[0].device
            )
        hessian: Tensor = state["hessian"]
        return hessian

    def _precision(self) -> Tensor:
        """S = H + d I."""
        hessian = self._matrix()
        return hessian + scales(self.param_groups[0])[1] * torch.eye(len(hessian), dtype=hessian.dtype).to(hessian)

    def _perturb(self, params: list[Tensor]) -> None:
        if self.param_groups[0]["at_mean"]:
            return
        root = _root(self._precision())
        (noise,) = self._noise.normal([root[0]])
        drawn = torch.linalg.solve_triangular(root.mT, noise[:, None], upper=True)[:, 0]
        drawn /= scales(self.param_groups[0])[0] ** 0.5
        for p, part in zip(params, _parts(drawn, params), strict=True):
            p.add_(part.to(p.dtype))

    def _listening(self) -> AbstractContextManager[None]:
        return self._taking_hessians()

    @contextmanager
    def _taking_hessians(self) -> Iterator[None]:
        self._hessian = None
        with twice_differentiable(), _Backward(self._take):
            yield

    def _take(self, loss: Tensor) -> None:
        """Add the Hessian of a loss that is about to be backpropagated."""
        params = self._trainable()
        try:
            gradient = flat_gradient(torch.autograd.grad(loss, params, create_graph=True, allow_unused=True), params)
            rows = [
                flat_gradient(torch.autograd.grad(each, params, retain_graph=True, allow_unused=True), params)
                if gradient.requires_grad
                else torch.zeros_like(gradient)
                for each in gradient
            ]
        except RuntimeError as error:
            raise ModelError(
                "The loss has no second derivatives",
                expected="a loss of the network's outputs, from operations that torch can differentiate twice",
                got=str(error).strip().splitlines()[0],
                do="use IVON, which needs first derivatives only",
            ) from error
        found = torch.stack(rows).detach().double()
        self._hessian = found if self._hessian is None else self._hessian + found

    def _statistics(self, gradients: Mapping[Tensor, Tensor]) -> tuple[Statistics, float]:
        if self._hessian is None:
            raise OptionError(
                "The Hessian was not seen",
                expected="loss.backward() within step(closure) or sampled()",
                got="gradients that came in another way",
                do="call the method backward of the loss",
            )
        return {self._trainable()[0]: (self._hessian + self._hessian.mT) / 2}, 0.0

    def _update(self) -> None:
        params, group = self._trainable(), self.param_groups[0]
        hessian, precision = self._matrix(), self._precision()
        rate = 1 - group["beta"]
        change = rate * (self._seen[params[0]] - hessian)
        hessian += change
        if group["positive"]:
            hessian += change @ torch.cholesky_solve(change, _root(precision)) / 2
        self.state[params[0]]["step"] += 1
        gradient = flat_gradient([p.grad for p in params], params).double()
        weights = torch.cat([p.detach().reshape(-1) for p in params]).double()
        gradient += scales(group)[1] * weights
        step = torch.cholesky_solve(gradient[:, None], _root(self._precision()))[:, 0]
        for p, part in zip(params, _parts(step, params), strict=True):
            p.add_(part.to(p.dtype), alpha=-group["lr"])

    def posterior(
        self, model: nn.Module, likelihood: str | Likelihood, data: Any = None, *, memory_budget: int = MEMORY_BUDGET
    ) -> FactoredPosterior:
        """N(m, (N S)^-1); the model must keep its weights from now on. Arguments as in `IVON.posterior`."""
        check_arguments(VON.posterior, locals(), apart=("likelihood",))
        family, network = resolve_likelihood(likelihood), trained_network(self, model)
        facts = facts_of(self, network, family, data, memory_budget)
        held = self._trainable()
        starts = dict(zip(held, torch.tensor([0, *(p.numel() for p in held)]).cumsum(0).tolist(), strict=False))
        order = torch.cat([starts[p] + torch.arange(p.numel()) for p in network.parameters.values()])
        values, vectors = torch.linalg.eigh(self._precision()[order][:, order])
        variances = 1 / (scales(self.param_groups[0])[0] * values)
        if not bool((values > 0).all()):
            raise _indefinite()
        least = variances.min() / 2  # any number below the smallest leaves factors for the rest
        factors = ((variances - least).sqrt() * vectors).mT.contiguous()
        mean = network.flat()
        deviation = least.sqrt().expand(len(mean)).to(mean.dtype).clone()
        return FactoredPosterior(network, family, facts, mean, mean, deviation, factors.to(mean.dtype))


class _Backward(TorchFunctionMode):
    """Shows every tensor that is backpropagated to a function first."""

    def __init__(self, seen: Callable[[Tensor], None]) -> None:
        super().__init__()
        self._seen = seen

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is Tensor.backward:
            self._seen(args[0])
        return func(*args, **(kwargs or {}))


def _root(matrix: Tensor) -> Tensor:
    """The lower Cholesky factor."""
    found = torch.linalg.cholesky_ex(matrix)
    if int(found.info):
        raise _indefinite()
    root: Tensor = found.L
    return root


def _indefinite() -> NotPositiveDefiniteError:
    return NotPositiveDefiniteError(
        "The posterior's precision is not positive definite",
        expected="positive eigenvalues of H + d I",
        got="a negative one: the loss is not convex where it was differentiated",
        do="leave positive=True, or raise prior_precision or beta",
    )


def _parts(vector: Tensor, params: list[Tensor]) -> list[Tensor]:
    sizes = [p.numel() for p in params]
    return [part.view(p.shape) for part, p in zip(torch.split(vector, sizes), params, strict=True)]
