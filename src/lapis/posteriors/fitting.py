"""Fitting a Laplace posterior: checks before any long work, a plan of the network's layers, one pass over the data."""

from __future__ import annotations

import logging
import warnings
from itertools import chain
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lapis.batches import batches, describe, take
from lapis.curvature.fit import Curvature, accumulate, check_outputs
from lapis.curvature.plan import plan
from lapis.curvature.structure import build_blocks, resolve_structure, to_device
from lapis.errors import DataError, LapisWarning, OptionError
from lapis.likelihoods import Likelihood
from lapis.likelihoods import resolve as resolve_likelihood
from lapis.network import Network, Weights
from lapis.posteriors.laplace import LaplacePosterior, check_temperature
from lapis.priors import Prior, as_prior

log = logging.getLogger("lapis")

MANY_OUTPUTS = 256
"""Above this many outputs an example (positions included) curvature="ggn" samples the Fisher information instead."""

PLANNING_EXAMPLES = 8
"""Examples on which the network's layers are identified and the tape is proven against autograd."""

CURVATURES = {
    "ggn": "ggn",
    "exact": "ggn",
    "sampled": "sampled",
    "fisher": "sampled",
    "empirical": "empirical",
    "hessian": "hessian",
}


def laplace(
    model: nn.Module,
    data: Any,
    likelihood: str | Likelihood,
    *,
    structure: str = "auto",
    weights: Weights = "all",
    prior: Prior | float | Tensor = 1.0,
    curvature: str = "ggn",
    temperature: float = 1.0,
    sharing: Literal["expand", "reduce"] = "expand",
    bias: Literal["joint", "separate"] = "joint",
    fisher_samples: int = 1,
    generator: torch.Generator | None = None,
    batch_size: int | None = None,
    memory_budget: int = 4 * 2**30,
    progress: bool | None = None,
) -> LaplacePosterior:
    r"""Fit a Laplace posterior to a trained network in one pass over its training data.

    q(theta) = N(t, A^-1), A = sum_n J_n^T H_n J_n / temperature + Lambda, at the trained weights t.

    Args:
        model: any module; it comes back exactly as it was. Curvature is taken in evaluation mode.
        data: a DataLoader, a Dataset, a pair (inputs, targets), or an iterable of such batches. Inputs may be a tensor,
            a tuple (positional arguments) or a dictionary (keywords).
        likelihood: "regression", "classification", "binary", "poisson", "heteroscedastic", or a `Likelihood`.
        structure: "dense", "diagonal", "kronecker", or "auto" (dense for small networks, else kronecker).
        weights: "all", "last_layer", name patterns or module names, or a function of (name, parameter).
        prior: a precision, or a `Prior`.
        curvature: "ggn" (exact; sampled, with a warning, when an example has very many outputs), "exact", "sampled"
            (Fisher information from `fisher_samples` drawn targets), "empirical", or "hessian" (dense only).
        temperature: the likelihood enters as p(D | theta)^(1 / temperature).
        sharing: how Kronecker factors treat positions that share weights: each an example, or merged first.
        bias: whether a bias shares its weight's Kronecker block or has its own.
        generator: source of randomness for sampled curvature; seeded with 0 when not given.
        batch_size: for data that are not batched yet.
        memory_budget: bytes; work is cut to fit, and refused before it starts when it cannot.
        progress: show a progress bar; by default on a terminal only.

    >>> import torch, lapis
    >>> x = torch.linspace(-1, 1, 20)[:, None]
    >>> model = torch.nn.Linear(1, 1)
    >>> posterior = lapis.laplace(model, (x, 2 * x), "regression")
    >>> posterior.predict(x).mean.shape
    torch.Size([20, 1])
    """
    likelihood = resolve_likelihood(likelihood)
    _check_options(curvature, temperature, sharing, bias, fisher_samples, batch_size, memory_budget)
    chosen_prior = as_prior(prior)
    probe = Network(model)
    stream, total = batches(data, dtype=probe.dtype, device=probe.device, batch_size=batch_size)
    first = next(stream, None)
    if first is None:
        raise DataError("There is no data", expected="at least one example", got="empty batches", do="check the loader")
    few = take(first.inputs, 0, min(len(first), PLANNING_EXAMPLES))
    network = Network(model, weights, example=few)
    chosen, note = resolve_structure(structure, network.size, memory_budget)
    if CURVATURES[curvature] == "hessian" and chosen != "dense":
        raise OptionError(
            "The Hessian is available for the dense structure only",
            expected='structure="dense"',
            got=f"structure={structure!r}, which is {chosen}",
            do='use curvature="ggn", or structure="dense" on fewer weights',
        )
    weight_prior = chosen_prior.resolve(network)
    with network.prepared():
        with torch.no_grad():
            outputs = likelihood.canonical(network.call(few))
        check_outputs(outputs, 0, f"batch {first.index}")
        likelihood.check_outputs(outputs)
        tape = plan(network, likelihood.canonical, few, separate_bias=bias == "separate")
    network.signature = describe(first.inputs)
    kind, choices = CURVATURES[curvature], [note]
    if curvature == "ggn" and outputs[0].numel() > MANY_OUTPUTS:
        kind = "sampled"
        choices.append(
            f"Fisher information from {fisher_samples} drawn target(s), for {outputs[0].numel()} outputs an example"
        )
        warnings.warn(
            f"With {outputs[0].numel()} outputs an example the Fisher information is sampled; "
            'curvature="exact" forbids that.',
            LapisWarning,
            stacklevel=2,
        )
    if tape.general:
        choices.append(f"general per-example rule for {', '.join(sorted(tape.general))}")
    blocks = build_blocks(chosen, tape.sites, sharing, memory_budget)
    to_device(blocks, network.device)
    for choice in choices:
        log.info("%s", choice)
    sums = Curvature(
        kind=kind,
        tape=tape,
        blocks=blocks,
        statistics=torch.zeros((), dtype=torch.float64, device=network.device),
        fisher_samples=fisher_samples,
        signature=network.signature,
        outputs=outputs.shape[-1],
    )
    for block in blocks:
        block.check(weight_prior)
    accumulate(
        sums,
        network,
        likelihood,
        chain([first], stream),
        total=total,
        generator=generator or torch.Generator(network.device).manual_seed(0),
        memory_budget=memory_budget,
        progress=progress,
    )
    return LaplacePosterior(
        network=network,
        likelihood=likelihood,
        fitted_likelihood=likelihood,
        prior=chosen_prior,
        weight_prior=weight_prior,
        curvature=sums,
        structure=chosen,
        mean=network.flat(),
        fingerprint=network.fingerprint(),
        temperature=temperature,
        memory_budget=memory_budget,
        choices=tuple(choices),
    )


def _check_options(
    curvature: str,
    temperature: float,
    sharing: str,
    bias: str,
    fisher_samples: int,
    batch_size: int | None,
    budget: int,
) -> None:
    check_temperature(temperature)
    for name, value, allowed in (
        ("curvature", curvature, tuple(CURVATURES)),
        ("sharing", sharing, ("expand", "reduce")),
        ("bias", bias, ("joint", "separate")),
    ):
        if value not in allowed:
            raise OptionError(
                f"Unknown {name}",
                expected=", ".join(map(repr, allowed)),
                got=repr(value),
                do="choose one of these",
            )
    for name, number in (
        ("fisher_samples", fisher_samples),
        ("batch_size", 1 if batch_size is None else batch_size),
        ("memory_budget", budget),
    ):
        if isinstance(number, bool) or not isinstance(number, int) or number < 1:
            raise OptionError(
                f"Bad {name}", expected="a whole number, at least 1", got=repr(number), do="pass a positive number"
            )
