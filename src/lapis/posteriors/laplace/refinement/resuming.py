"""A refinement that goes on from a file: the state of its search after a round."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lapis.checkpoint import Checkpoint
from lapis.curvature.sums import Curvature
from lapis.files import tensors_digest
from lapis.predictions.expectations import hessian_factor
from lapis.schema import count, entry, number, tensor, under

if TYPE_CHECKING:
    from lapis.posteriors.laplace.family import LaplaceFamily
    from lapis.posteriors.laplace.refinement.rounds import Problem, Search


def refinement_file(
    path: str | os.PathLike[str] | None, posterior: LaplaceFamily, problem: Problem, settings: dict[str, Any]
) -> Checkpoint | None:
    """The checkpoint of a refinement that begins at this posterior; None without a path."""
    if path is None:
        return None
    sums = posterior.curvature
    tensors = {"precision": posterior.weight_prior.precision, "mean": posterior.mean}
    if isinstance(sums, Curvature):
        tensors |= {f"{i}.{name}": t for i, block in enumerate(sums.blocks) for name, t in block.state().items()}
    same = settings | {
        "network": posterior.facts.fingerprint,
        "data": sums.digest,
        "batches": [len(batch) for batch in problem.held],
        "structure": posterior.structure,
        "likelihood": posterior.likelihood.to_config(),
        "temperature": posterior.temperature,
        "posterior": tensors_digest({name: t.detach().cpu().contiguous() for name, t in tensors.items()}, ""),
    }
    return Checkpoint(path, "refinement", same, posterior.network.key())


def state(search: Search) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """All that the next round depends on."""
    posterior, now = search.posterior, search.now
    noise = posterior.likelihood.noise
    tensors = {"mean": posterior.mean, "precision": posterior.weight_prior.precision, "gradient": now.gradient}
    tensors |= {"statistics": now.statistics} | ({} if noise is None else {"noise": noise})
    tensors |= {f"weights.{i}": each for i, each in enumerate(search.weights)}
    tensors |= {f"hessians.{i}": each for i, each in enumerate(now.hessians)}
    if isinstance(posterior.curvature, Curvature):
        blocks = posterior.curvature.blocks
        tensors |= {f"block.{i}.{name}": t for i, block in enumerate(blocks) for name, t in block.state().items()}
    facts = {
        "elbo": now.elbo, "trace": list(search.trace), "step": search.step, "gain": min(search.gain, 1e300),
        "tuning": search.tuning, "passes": search.problem.passes, "rounds": search.rounds,
    }  # fmt: skip
    return {name: t.detach().clone(memory_format=torch.contiguous_format) for name, t in tensors.items()}, facts


def adopt(search: Search, tensors: dict[str, Tensor], facts: dict[str, Any]) -> None:
    """Go on from a `state`; FileError where it is none of this search."""
    posterior, device = search.posterior, search.posterior.network.device
    size = posterior.n_weights
    tensors = {name: t.to(device) for name, t in tensors.items()}
    precision = tensor(tensors, "precision", tuple(posterior.weight_prior.precision.shape), least=0, above=True)
    weights = [tensor(tensors, f"weights.{i}", h.shape, h.dtype) for i, h in enumerate(search.weights)]
    changes: dict[str, Any] = {
        "mean": tensor(tensors, "mean", (size,), posterior.mean.dtype),
        "prior": replace(posterior.prior, precision=precision),
        "weight_prior": posterior.weight_prior.with_precision(precision),
    }
    noise = posterior.likelihood.noise
    if noise is not None:
        changes["likelihood"] = posterior.likelihood.with_noise(
            tensor(tensors, "noise", tuple(noise.shape), None, least=0, above=True)
        )
    if isinstance(posterior.curvature, Curvature):
        sums = posterior.curvature.emptied()
        for i, block in enumerate(sums.blocks):
            block.load(block.check_state(under(f"block.{i}.", tensors)))
        changes["curvature"] = sums
    elif weights:
        changes["curvature"] = posterior.curvature.with_factors([hessian_factor(w.double()) for w in weights])
    search.posterior, search.weights = replace(posterior, **changes), weights
    hessians = [tensor(tensors, f"hessians.{i}", h.shape, h.dtype) for i, h in enumerate(search.now.hessians)]
    search.now = replace(
        search.now,
        elbo=entry(facts, "elbo", float),
        gradient=tensor(tensors, "gradient", (size,)),
        hessians=hessians,
        statistics=tensor(tensors, "statistics", tuple(search.now.statistics.shape)),
    )
    search.trace = list(entry(facts, "trace", list[float]))
    search.step, search.gain = number(facts, "step"), entry(facts, "gain", float)
    search.tuning = entry(facts, "tuning", bool)
    search.problem.passes, search.rounds = count(facts, "passes"), count(facts, "rounds")
