"""Fitting a Laplace posterior: checks before any long work, a plan of the network's layers, passes over the data."""

from __future__ import annotations

import logging
import os
import warnings
from dataclasses import replace
from typing import Any, Literal, overload

import torch
from torch import Tensor, nn

from lapis.batches import Batch, Inputs, check_repeatable, describe, naming, take
from lapis.curvature.backward.proof import unexplained
from lapis.curvature.blocks.partition import Structure, resolve_structure
from lapis.curvature.plan import PLANNING_EXAMPLES, planned_tape
from lapis.curvature.products.ggn import ImplicitCurvature
from lapis.curvature.sums import Curvature
from lapis.curvature.tape import Tape
from lapis.errors import LapisWarning, ModelError, PriorError, users_level
from lapis.likelihoods import Likelihood
from lapis.likelihoods import resolve as resolve_likelihood
from lapis.network import Network, Weights, outside_inference_mode
from lapis.options import check_arguments, check_choice
from lapis.posteriors.laplace.arguments import refuse_options
from lapis.posteriors.laplace.fit_options import CURVATURES, MATRIX_FREE, FitOptions
from lapis.posteriors.laplace.matrix_free.implicit import ImplicitPosterior
from lapis.posteriors.laplace.passes import DataSource, Passes
from lapis.posteriors.laplace.stored import LaplacePosterior
from lapis.posteriors.laplace.subnetwork import Subnetwork
from lapis.posteriors.laplace.suspicion import suspicion
from lapis.posteriors.posterior import MEMORY_BUDGET, Facts
from lapis.priors import Prior, as_prior
from lapis.shards import Distributed

log = logging.getLogger("lapis")


@overload
def laplace(
    model: nn.Module,
    data: Any,
    likelihood: str | Likelihood,
    *,
    structure: Literal["implicit", "matrix_free"],
    weights: Weights | Subnetwork = ...,
    prior: Prior | float | Tensor = ...,
    curvature: str = ...,
    temperature: float = ...,
    generator: torch.Generator | None = ...,
    batch_size: int | None = ...,
    memory_budget: int = ...,
    distributed: Distributed = ...,
    checkpoint: str | os.PathLike[str] | None = ...,
    progress: bool | None = ...,
) -> ImplicitPosterior: ...
@overload
def laplace(
    model: nn.Module,
    data: Any,
    likelihood: str | Likelihood,
    *,
    structure: str = ...,
    weights: Weights | Subnetwork = ...,
    prior: Prior | float | Tensor = ...,
    curvature: str = ...,
    temperature: float = ...,
    sharing: Literal["expand", "reduce"] | None = ...,
    bias: Literal["joint", "separate"] | None = ...,
    fisher_samples: int | None = ...,
    rank: int | None = ...,
    basis: LaplacePosterior | None = ...,
    generator: torch.Generator | None = ...,
    batch_size: int | None = ...,
    memory_budget: int = ...,
    distributed: Distributed = ...,
    checkpoint: str | os.PathLike[str] | None = ...,
    progress: bool | None = ...,
) -> LaplacePosterior: ...
@outside_inference_mode
def laplace(
    model: nn.Module,
    data: Any,
    likelihood: str | Likelihood,
    *,
    structure: str = "auto",
    weights: Weights | Subnetwork = "auto",
    prior: Prior | float | Tensor = 1.0,
    curvature: str = "ggn",
    temperature: float = 1.0,
    sharing: Literal["expand", "reduce"] | None = None,
    bias: Literal["joint", "separate"] | None = None,
    fisher_samples: int | None = None,
    rank: int | None = None,
    basis: LaplacePosterior | None = None,
    generator: torch.Generator | None = None,
    batch_size: int | None = None,
    memory_budget: int = MEMORY_BUDGET,
    distributed: Distributed = False,
    checkpoint: str | os.PathLike[str] | None = None,
    progress: bool | None = None,
) -> LaplacePosterior | ImplicitPosterior:
    r"""Fit a Laplace posterior to a trained network in one pass over its training data (two for "ekfac" by itself).

    q(theta) = N(t, A^-1), A = sum_n J_n^T H_n J_n / temperature + Lambda, at the trained weights t.

    Args:
        model: any module; it is left unchanged. Curvature is computed in evaluation mode.
        data: a DataLoader, a Dataset, a pair (inputs, targets), or an iterable of such batches. Inputs may be a tensor,
            a tuple (positional arguments) or a dictionary (keywords).
        likelihood: "regression", "classification", "binary", "poisson", "heteroscedastic", or a `Likelihood`.
        structure: "dense", "diagonal", "kronecker", "ekfac" (Kronecker blocks with exact second moments along their
            eigenvectors, George et al. 2018: two passes over the data; `update` keeps the eigenvectors of the fit),
            "lowrank" (leading eigenpairs of the GGN), "implicit" (nothing is stored; exact, by solves over the data:
            an `ImplicitPosterior`), or "auto" (dense for small networks, else kronecker).
        weights: "all", "last_layer", name patterns or module names, a function of (name, parameter), masks or indices
            of single weights, or a `Subnetwork` (n single weights, dense unless another structure is named). By default
            ("auto") all, but for a classifier too large for the dense structure, where none is named, the last layer:
            its posterior is exact, and doubts what a structured one over all weights would doubt at the data already.
        prior: a precision, or a `Prior`.
        curvature: "ggn" (exact; sampled, with a warning, when an example has very many outputs), "exact", "sampled"
            (Fisher information from `fisher_samples` drawn targets), "empirical", or "hessian" (dense only). The
            lowrank and implicit structures are always exact.
        temperature: the likelihood enters as p(D | theta)^(1 / temperature).
        sharing: how Kronecker factors treat positions that share weights: "expand" (default) treats each position as an
            example, "reduce" merges an example's positions first (mean input, summed gradient). For "ekfac" these
            factors give the eigenvectors only.
        bias: whether a bias is correlated with its weights in a Kronecker or EKFAC posterior ("joint", the default), or
            not ("separate").
        fisher_samples: targets drawn per example for the sampled Fisher information, 1 by default.
        rank: eigenpairs of the lowrank structure; when None, all above a hundredth of the smallest prior precision.
        basis: for "ekfac", a Kronecker posterior of this network (or an EKFAC one) whose eigenvectors are taken: the
            data are read once then, and fits to different data in one basis are sums that add up.
        generator: source of randomness for sampled curvature; seeded with 0 when not given.
        batch_size: for data that are not batched yet.
        memory_budget: bytes; work is split to fit, and MemoryBudgetError is raised at the start if it cannot fit.
        distributed: True under an initialised torch.distributed: all ranks make the same call, the data are divided
            among them, each example once, and all get the same posterior. Tensors that differ between ranks are taken
            as each rank's own examples; "shards" says so of other data. An implicit posterior stays divided: all ranks
            must call its methods together. Targets drawn for sampled curvature are other ones than in one process.
        checkpoint: a file to save the sums in, at intervals (of several processes: one each, with the rank in its
            name). A call with the same arguments and data goes on from it, and gives the same numbers bit for bit. For
            structures that are sums over data.
        progress: show a progress bar; by default on a terminal only.

    >>> import torch, lapis
    >>> x = torch.linspace(-1, 1, 20)[:, None]
    >>> model = torch.nn.Linear(1, 1)
    >>> posterior = lapis.laplace(model, (x, 2 * x), "regression")
    >>> posterior.predict(x).mean.shape
    torch.Size([20, 1])
    """
    likelihood, chosen_prior, probe = resolve_likelihood(likelihood), as_prior(prior), Network(model)
    check_arguments(laplace, locals(), apart=("prior", "weights"))
    check_choice("curvature", curvature, CURVATURES)
    asked = FitOptions(structure, curvature, sharing, bias, fisher_samples, rank, basis)
    if asked.reads_twice:
        check_repeatable(data)
    choices: list[str] = []
    which: Weights
    if isinstance(weights, Subnetwork):
        asked = replace(asked, structure="dense" if structure == "auto" else structure)
        resolve_structure(asked.structure, weights.size(probe), memory_budget)  # before the variances are fitted

        def variances() -> Tensor:
            check_repeatable(data)
            diagonal = laplace(
                model, data, likelihood, structure="diagonal", weights="all", prior=chosen_prior, batch_size=batch_size,
                curvature="ggn" if CURVATURES[curvature] == "hessian" else curvature, temperature=temperature,
                fisher_samples=fisher_samples, generator=generator, memory_budget=memory_budget, progress=progress,
                distributed=distributed,
            )  # fmt: skip
            return diagonal.marginal_variance()

        which, how = weights.choose(probe, variances)
        choices.append(how)
    else:
        which = weights

    source = DataSource(data, probe, batch_size, distributed)
    first = source.first()  # an error says so where there is none
    few = take(first.inputs, 0, min(len(first), PLANNING_EXAMPLES))
    network, chosen, note = _chosen(probe, which, asked.structure, few, likelihood, chosen_prior, memory_budget)
    asked.check(chosen, network)
    weight_prior = chosen_prior.resolve(network)
    with network.prepared():
        weights_now, fingerprint = network.flat(), network.fingerprint()
        tape, outputs = _first_look(network, likelihood, chosen, first, few)
        fit = Passes(network, likelihood, source, weight_prior, temperature, memory_budget, progress)
        if chosen in MATRIX_FREE:
            refuse_options(f"The {chosen} structure is no sum that a file could hold", checkpoint=checkpoint)
        source.agree(network, chosen, likelihood, weight_prior, tape)

        def common(curvature: Curvature | ImplicitCurvature) -> dict[str, Any]:
            """The fields shared by posteriors of all structures."""
            return {
                "network": network,
                "likelihood": likelihood,
                "facts": Facts(curvature.n_data, curvature.outputs, curvature.signature, fingerprint, memory_budget),
                "mean": weights_now,
                "point": weights_now,
                "fitted_likelihood": likelihood,
                "prior": chosen_prior,
                "weight_prior": weight_prior,
                "structure": chosen,
                "temperature": temperature,
            }

        if chosen == "implicit":
            products = fit.implicit()
            return ImplicitPosterior(curvature=products, **common(products))
        kind, sampling = asked.kind(chosen, outputs)
        choices += [note, *sampling]
        if tape.plan.general:
            choices.append(f"general per-example rule for {', '.join(sorted(tape.plan.general))}")
        sums = asked.empty_sums(chosen, kind, tape, weight_prior, outputs, memory_budget)
        if likelihood.noise is not None:
            sums.keep_apart(memory_budget // 2)
        random = generator or torch.Generator(network.device).manual_seed(0)
        if chosen == "lowrank":
            choices.append(fit.low_rank(sums, rank, random))
        else:
            fit.sums(sums, random, checkpoint, None if basis is None else basis.curvature)
        for choice in choices:
            log.info("%s", choice)
        return LaplacePosterior(curvature=sums, choices=tuple(choices), **common(sums))


def _chosen(
    probe: Network,
    which: Weights,
    requested: str,
    few: Inputs,
    likelihood: Likelihood,
    prior: Prior,
    memory_budget: int,
) -> tuple[Network, Structure, str]:
    """The network with its weights chosen, the structure, and what to tell the user about it."""
    by_name = which if isinstance(which, str) else None
    network = probe if by_name in ("all", "auto") else Network(probe.module, which, example=few)
    chosen, note = resolve_structure(requested, network.size, memory_budget)
    if by_name == "auto" and requested == "auto" and likelihood.kind == "classification" and chosen != "dense":
        last = _last_layer(probe.module, few, prior)
        if last is not None:
            network = last
            chosen, note = resolve_structure(requested, network.size, memory_budget)
            note = f"the last layer of a classifier with {probe.size:,} weights; {note}"
    network.example = few
    return network, chosen, note


def _last_layer(model: nn.Module, few: Inputs, prior: Prior) -> Network | None:
    """The network with its last layer chosen; None where there is none, or the prior is about other weights too."""
    try:
        network = Network(model, "last_layer", example=few)
        prior.resolve(network)
    except (ModelError, PriorError):
        return None
    return network


def _first_look(
    network: Network, likelihood: Likelihood, chosen: Structure, first: Batch, few: Inputs
) -> tuple[Tape, Tensor]:
    """A tape for the network, with a proven plan where sums are stored, and outputs of a few examples, checked."""
    with naming(f"batch {first.index}"):
        if chosen == "implicit":
            tape = Tape(network, likelihood.canonical)
            record = tape.record(few)  # checks that an example's output does not depend on other examples
            unexplained(record, network, ())  # and that it can be differentiated
            outputs = record.f
        else:
            tape, outputs = planned_tape(network, likelihood.canonical, first.inputs)
        likelihood.check_outputs(outputs)
        seen = suspicion(network, likelihood, outputs.detach(), first)
    if seen is not None:
        warnings.warn(seen, LapisWarning, stacklevel=users_level())
    network.signature = describe(first.inputs)
    return tape, outputs
