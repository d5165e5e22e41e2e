"""The same jobs as laplace-torch does them, with each of its backends."""

from __future__ import annotations

import threading
from typing import Any

import torch
from curvlinops import GGNLinearOperator
from laplace import Laplace
from laplace.curvature import AsdlGGN, BackPackGGN, CurvlinopsGGN
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from tqdm import tqdm

from benchmarks.cases import Problem
from benchmarks.jobs import SAMPLES, Task, block, points, split

BACKENDS = {"curvlinops": CurvlinopsGGN, "backpack": BackPackGGN, "asdl": AsdlGGN}
"""laplace-torch's default first."""

tqdm.set_lock(threading.RLock())  # its default lock holds a semaphore, which a process that is cut off would leak


def marginal_variance(fitted: Any, structure: str) -> Tensor:
    if structure == "diag":
        return fitted.posterior_variance
    if structure == "dense":
        return fitted.posterior_covariance.diagonal()
    return fitted.posterior_precision.diag(exponent=-1)


def product(problem: Problem, action: str, backend: str) -> Task:
    """curvlinops' operator; the other backends have none. Fused attention, which it cannot differentiate, is off."""
    if backend != "curvlinops":
        raise NotImplementedError("no GGN-vector products over a data set")
    regression = problem.case.likelihood == "regression"
    loss = torch.nn.MSELoss(reduction="sum") if regression else torch.nn.CrossEntropyLoss(reduction="sum")
    torch.backends.mha.set_fastpath_enabled(False)
    parameters = list(problem.model.parameters())
    operator = GGNLinearOperator(problem.model, loss, parameters, problem.batches, check_deterministic=False)
    columns = block(problem, action).T.contiguous()

    def multiply() -> Tensor:
        with sdpa_kernel(SDPBackend.MATH):
            return operator @ columns

    return Task(multiply, lambda products: products.T / (2 if regression else 1))  # (f - y)^2 has twice our curvature


def prepare(job: str, problem: Problem, backend: str) -> Task:
    structure, action = split(job)
    if structure == "ggn":
        return product(problem, action, backend)
    regression = problem.case.likelihood == "regression"

    def fit() -> Any:
        fitted = Laplace(
            problem.model,
            problem.case.likelihood,
            subset_of_weights="last_layer" if structure == "last" else "all",
            hessian_structure={"dense": "full", "last": "kron"}.get(structure, structure),
            backend=BACKENDS[backend],
        )
        fitted.fit(problem.batches)
        return fitted

    def ready() -> tuple[Any, Tensor]:
        fitted = fit()
        return fitted, fitted.log_marginal_likelihood()

    if action == "fit":
        return Task(fit, lambda fitted: marginal_variance(fitted, structure))
    if action == "ready":
        return Task(ready, lambda result: result[1])
    fitted, _ = ready()
    if action.startswith("predict"):
        x = problem.points(points(action))
        diagonal = action.endswith("diagonal")

        def predict() -> Any:
            return fitted(x, pred_type="glm", link_approx="probit", diagonal_output=diagonal)

        def moments_or_probabilities(result: Any) -> Tensor:
            return torch.stack([result[0].flatten(), result[1].flatten()]) if regression else result

        return Task(predict, moments_or_probabilities)
    if action == "sample":
        x = problem.points(points(action))
        return Task(lambda: fitted(x, pred_type="nn", link_approx="mc", n_samples=SAMPLES), lambda _: None)
    if action == "evidence":

        def evidence() -> Tensor:
            precision = torch.ones(1, requires_grad=True)
            value = fitted.log_marginal_likelihood(prior_precision=precision)
            return torch.cat([value.reshape(1), *torch.autograd.grad(value, precision)])

        return Task(evidence, lambda values: values)

    def tune() -> Tensor:
        fitted.optimize_prior_precision(method="marglik", pred_type="glm")
        return fitted.log_marginal_likelihood()

    return Task(tune, lambda value: value)
