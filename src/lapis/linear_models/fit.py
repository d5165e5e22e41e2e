"""Fitting a linear model: features in any form, one solve for the mean, and draws by optimisation."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import torch
from scipy import sparse
from torch import Tensor

from lapis.batches import batches
from lapis.errors import DataError, LikelihoodError
from lapis.likelihoods import Likelihood
from lapis.likelihoods import resolve as resolve_likelihood
from lapis.linear_models.design import Dense, Design, Features, Matrix, Streamed, as_design, as_rows
from lapis.linear_models.posterior import Drawing, LinearPosterior
from lapis.linear_models.prior import LinearPrior
from lapis.linear_models.system import System
from lapis.linear_models.tuning import curvature, drawn, mode
from lapis.options import UNREADABLE, check_arguments

MEMORY_BUDGET = 4 * 2**30


def linear(
    features: Any,
    data: Any,
    likelihood: str | Likelihood,
    prior: Any = 1.0,
    *,
    samples: int = 32,
    solver: Literal["cg", "sgd"] = "cg",
    epochs: int = 20,
    batch_size: int | None = None,
    tolerance: float = 1e-5,
    max_iterations: int = 2000,
    generator: torch.Generator | None = None,
    memory_budget: int = MEMORY_BUDGET,
    progress: bool | None = None,
) -> LinearPosterior:
    """The posterior of the weights w of a linear model f = Phi w, w ~ N(0, prior^-1), however large.

    Mean and draws take products with Phi and its transpose only: time and memory grow with the entries of Phi, n + d.
    For a Gaussian likelihood the posterior is exact; else it is the Laplace posterior at the mode. Means and variances
    have no intercept: add a column of ones for one.

    Args:
        features: a function of inputs that returns (B, d) (`lapis.RandomFourierFeatures`, a network's body); or Phi
            itself: a matrix (n, d), dense or sparse, of torch, numpy or scipy; or an operator with a shape, `@` and a
            transpose, such as scipy's LinearOperator.
        data: with a function, inputs and targets in any form that `lapis.laplace` takes; with Phi, the targets (n,).
        likelihood: "regression", "binary", "poisson" or a `Likelihood` of one output.
        prior: a precision, or one for each weight, (d,).
        samples: draws of the weights, from which variances come: with relative errors of sqrt(2 / samples).
        solver: of the draws. "cg": conjugate gradients, with A's diagonal as preconditioner. "sgd": Nesterov's method
            on minibatches of rows, with the low-noise objective; for matrices.
        epochs: of SGD.
        batch_size: rows of a minibatch of SGD (1,000 by default); for a function also how many inputs it gets at once.
        tolerance: on relative residuals of conjugate gradients.
        max_iterations: of conjugate gradients.
        generator: source of the draws' seed; seed 0 when not given.
        memory_budget: bytes; features of a function are kept if they fit in half of it, else computed for every
            product.
        progress: show a bar; by default on a terminal only.

    >>> import torch, lapis
    >>> x = torch.linspace(-2, 2, 50, dtype=torch.float64)[:, None]
    >>> features = lapis.RandomFourierFeatures(1, 40)
    >>> posterior = lapis.linear(features, (x, torch.sin(2 * x[:, 0])), lapis.Gaussian(0.1))
    >>> posterior
    <LinearPosterior, 40 weights, 50 observations, gaussian>
    >>> low, high = posterior.predict(x).interval(0.95)
    """
    check_arguments(linear, locals(), apart=("likelihood",))
    chosen = resolve_likelihood(likelihood)
    if chosen.name in ("categorical", "heteroscedastic"):
        raise LikelihoodError(
            "A linear model has one output",
            expected='"regression", "binary", "poisson" or a Likelihood of one output',
            got=repr(likelihood),
            do="fit one binary model for each class, or lapis.laplace to a torch.nn.Linear",
        )
    if chosen.noise is not None and chosen.noise.numel() != 1:
        raise LikelihoodError(
            "A linear model has one output", expected="one noise", got=str(chosen.noise.numel()), do="pass one number"
        )
    function: Features | None = features if callable(features) and not hasattr(features, "shape") else None
    if function is None:
        design, y = as_design(features), _targets(data)
    else:
        design, y = _of_function(function, data, batch_size, memory_budget)
    n, d = design.shape
    if y.shape not in ((n,), (n, 1)):
        raise DataError(
            "Features and targets do not fit",
            expected=f"{n:,} targets, one for each row of features",
            got=str(tuple(y.shape)),
            do="pass targets (n,); for several outputs fit one model each",
        )
    outputs = torch.zeros(n, 1, 1, dtype=torch.float64)
    chosen.check_outputs(outputs)
    targets = chosen.targets(y, outputs, (n,) if y.dim() == 1 else (n, 1))
    targets = targets.double() if targets.is_floating_point() else targets
    found = LinearPrior.of(prior, d)
    system = System(
        design,
        curvature(chosen, outputs.reshape(-1), targets),
        found.vector(),
        tolerance,
        max_iterations,
        memory_budget,
    )
    source = generator or torch.Generator().manual_seed(0)
    how = Drawing(samples, solver, epochs, batch_size or 1000, int(torch.randint(2**62, (), generator=source)))
    mean, system = mode(system, chosen, targets, torch.zeros(d, dtype=torch.float64))
    deviations = drawn(system, how, None, progress)
    return LinearPosterior(system, targets, chosen, found, function, mean, deviations, how, y.dim() == 1)


def _targets(data: Any) -> Tensor:
    """The targets that come with a matrix; of a pair (anything, targets) the second."""
    if isinstance(data, (tuple, list)) and len(data) == 2 and isinstance(data[1], (Tensor, np.ndarray)):
        data = data[1]
    try:
        return torch.as_tensor(np.asarray(data) if isinstance(data, list) else data)
    except UNREADABLE as error:
        raise DataError(
            "The targets are not numbers",
            expected="targets (n,), one for each row of the matrix",
            got=f"{type(data).__name__} ({error})",
            do="pass a tensor, an array or a list",
        ) from error


def _of_function(features: Features, data: Any, batch_size: int | None, memory_budget: int) -> tuple[Design, Tensor]:
    """The features of all inputs: sparse ones stay sparse, dense ones are kept if they fit in half of the budget."""
    stream, _ = batches(data, dtype=torch.float64, device=torch.device("cpu"), batch_size=batch_size)
    held = list(stream)
    lengths, y = [len(batch) for batch in held], torch.cat([batch.targets for batch in held])
    first = features(held[0].inputs)
    if sparse.issparse(first):
        parts = [first, *(features(batch.inputs) for batch in held[1:])]
        return Matrix(sparse.vstack(parts)), y
    width = as_rows(first, lengths[0]).shape[1]
    inputs = [batch.inputs for batch in held]
    if 16 * sum(lengths) * width > memory_budget:
        return Streamed(features, inputs, lengths, width), y
    rows = [as_rows(features(each), length, width) for each, length in zip(inputs, lengths, strict=True)]
    return Dense(torch.cat(rows)), y
