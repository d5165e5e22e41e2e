"""Fitting a Laplace posterior: checks before any long work, a plan of the network's layers, passes over the data."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, Literal, overload

import torch
from torch import Tensor, nn

from lapis.batches import Inputs, check_repeatable, describe, naming, take
from lapis.curvature.backward.proof import unexplained
from lapis.curvature.blocks.partition import NAMES, Structure, build_blocks, resolve_structure, to_device
from lapis.curvature.outputs import check_factors
from lapis.curvature.plan import PLANNING_EXAMPLES, planned_tape
from lapis.curvature.products.ggn import ImplicitCurvature
from lapis.curvature.sample import Sample
from lapis.curvature.sums import Curvature
from lapis.curvature.tape import Tape
from lapis.errors import LapisWarning, ModelError, OptionError, PriorError
from lapis.likelihoods import Likelihood
from lapis.likelihoods import resolve as resolve_likelihood
from lapis.network import Network, Weights
from lapis.options import check_arguments, check_choice
from lapis.posteriors.laplace.arguments import refuse_options
from lapis.posteriors.laplace.matrix_free.implicit import ImplicitPosterior
from lapis.posteriors.laplace.passes import DataSource, Passes
from lapis.posteriors.laplace.stored import LaplacePosterior
from lapis.posteriors.laplace.subnetwork import Subnetwork
from lapis.posteriors.laplace.suspicion import suspicion
from lapis.posteriors.posterior import MEMORY_BUDGET, Facts
from lapis.priors import Prior, as_prior
from lapis.shards import Distributed

log = logging.getLogger("lapis")

MANY_OUTPUTS = 256
"""Above this many outputs per example (positions included) curvature="ggn" samples the Fisher information instead."""

CURVATURES = {
    "ggn": "ggn",
    "exact": "ggn",
    "sampled": "sampled",
    "fisher": "sampled",
    "empirical": "empirical",
    "hessian": "hessian",
}

MATRIX_FREE = ("lowrank", "implicit")


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
    if NAMES.get(structure) == "ekfac" and basis is None:
        check_repeatable(data)
    choices: list[str] = []
    which: Weights
    if isinstance(weights, Subnetwork):
        structure = "dense" if structure == "auto" else structure
        resolve_structure(structure, weights.size(probe), memory_budget)  # refused before the variances are fitted

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
    network = probe if isinstance(which, str) and which in ("all", "auto") else Network(model, which, example=few)
    chosen, note = resolve_structure(structure, network.size, memory_budget)
    if isinstance(which, str) and which == "auto" and structure == "auto" and likelihood.kind == "classification":
        last = _last_layer(model, few, chosen_prior) if chosen != "dense" else None
        if last is not None:
            network = last
            chosen, note = resolve_structure(structure, network.size, memory_budget)
            note = f"the last layer of a classifier with {probe.size:,} weights; {note}"
    network.example = few
    _check_structure(chosen, structure, curvature)
    _refuse_without_meaning(chosen, structure, {"rank": rank}, ("lowrank",))
    _refuse_without_meaning(chosen, structure, {"sharing": sharing, "bias": bias}, ("kronecker", "ekfac"))
    _refuse_without_meaning(chosen, structure, {"basis": basis}, ("ekfac",))
    if chosen in MATRIX_FREE and network.dtype not in (torch.float32, torch.float64):
        raise ModelError(
            f"Products with vectors in {network.dtype} are too inexact to solve or decompose with",
            expected=f'float32 or float64 weights with structure="{chosen}"',
            got=str(network.dtype),
            do='convert the network: model.float(), or use structure="kronecker", "diagonal" or "dense"',
        )
    weight_prior = chosen_prior.resolve(network)

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

    with network.prepared():
        weights_now, fingerprint = network.flat(), network.fingerprint()
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
            warnings.warn(seen, LapisWarning, stacklevel=2)
        network.signature = describe(first.inputs)
        fit = Passes(network, likelihood, source, weight_prior, temperature, memory_budget, progress)
        if chosen in MATRIX_FREE:
            refuse_options(f"The {chosen} structure is no sum that a file could hold", checkpoint=checkpoint)
        source.agree(network, chosen, likelihood, weight_prior, tape)
        if chosen == "implicit":
            products = fit.implicit()
            return ImplicitPosterior(curvature=products, **common(products))
        kind, choices = CURVATURES[curvature], [*choices, note]
        if curvature == "ggn" and outputs[0].numel() > MANY_OUTPUTS and chosen not in MATRIX_FREE:
            kind = "sampled"
            choices.append(
                f"Fisher information from {fisher_samples or 1} drawn target(s), for {outputs[0].numel()} outputs an "
                "example"
            )
            warnings.warn(
                f"With {outputs[0].numel()} outputs an example the Fisher information is sampled; "
                'curvature="exact" forbids that.',
                LapisWarning,
                stacklevel=2,
            )
        if kind != "sampled":
            refuse_options(f"The {kind} curvature draws no targets", fisher_samples=fisher_samples)
        if tape.plan.general:
            choices.append(f"general per-example rule for {', '.join(sorted(tape.plan.general))}")
        blocks = build_blocks(chosen, tape.plan.sites, sharing or "expand", bias or "joint", memory_budget)
        to_device(blocks, network.device)
        for block in blocks:
            block.check(weight_prior)
        sums = Curvature(
            kind=kind,
            tape=tape,
            blocks=blocks,
            statistics=torch.zeros((), dtype=torch.float64, device=network.device),
            fisher_samples=fisher_samples or 1,
            signature=network.signature,
            outputs=outputs.shape[-1],
            positions=outputs.shape[1],
            sample=Sample(outputs[0].numel()),
        )
        if kind == "ggn" and chosen != "lowrank":
            check_factors(outputs[:1], memory_budget, 'curvature="sampled"')
        if basis is not None:
            _check_basis(basis, sums, fingerprint)
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


def _last_layer(model: nn.Module, few: Inputs, prior: Prior) -> Network | None:
    """The network with its last layer chosen; None where there is none, or the prior is about other weights too."""
    try:
        network = Network(model, "last_layer", example=few)
        prior.resolve(network)
    except (ModelError, PriorError):
        return None
    return network


def _check_structure(chosen: Structure, requested: str, curvature: str) -> None:
    if CURVATURES[curvature] == "hessian" and chosen != "dense":
        raise OptionError(
            "The Hessian is available for the dense structure only",
            expected='structure="dense"',
            got=f"structure={requested!r}, which is {chosen}",
            do='use curvature="ggn", or structure="dense" on fewer weights',
        )
    if chosen in MATRIX_FREE and CURVATURES[curvature] != "ggn":
        raise OptionError(
            f"The {chosen} structure is made of exact products with the GGN",
            expected='curvature="ggn" or "exact"',
            got=repr(curvature),
            do='leave curvature out, or use structure="kronecker", "diagonal" or "dense"',
        )


def _check_basis(basis: LaplacePosterior, sums: Curvature, fingerprint: str) -> None:
    """OptionError unless the posterior has eigenvectors for every matrix of weights in these sums."""
    wanted: dict[str, Any] = {
        "structure": "kronecker or ekfac",
        "network": fingerprint,
        "choice of weights": [site.label for block in sums.blocks for site in block.sites],
        "division of the weights": [block.sites for block in sums.blocks],
        "treatment of positions and biases": [block.options() for block in sums.blocks],
    }
    found = {
        "structure": wanted["structure"] if basis.structure in ("kronecker", "ekfac") else basis.structure,
        "network": basis.facts.fingerprint,
        "choice of weights": [site.label for block in basis.curvature.blocks for site in block.sites],
        "division of the weights": [block.sites for block in basis.curvature.blocks],
        "treatment of positions and biases": [block.options() for block in basis.curvature.blocks],
    }
    for name, value in wanted.items():
        if found[name] != value:
            raise OptionError(
                f"The basis is of another {name}",
                expected=str(value)[:200],
                got=str(found[name])[:200],
                do='fit the basis to the same network with the same options, by structure="kronecker"',
            )


def _refuse_without_meaning(
    chosen: Structure, requested: str, options: Mapping[str, Any], structures: Sequence[str]
) -> None:
    """Raise OptionError for options that were given but belong to other structures."""
    for name, value in options.items():
        if value is not None and chosen not in structures:
            raise OptionError(
                f"{name} has no meaning here",
                expected=f"{name}=None, or structure=" + " or ".join(f'"{other}"' for other in structures),
                got=f"{name}={value!r} with structure={requested!r}, which is {chosen}",
                do=f"leave {name} out",
            )
