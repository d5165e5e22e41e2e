"""Outputs of the members of an ensemble: one by one, or small ones of one architecture together."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lapis.batches import Inputs, describe, take
from lapis.curvature.outputs import check_outputs
from lapis.errors import ModelError
from lapis.likelihoods import Likelihood
from lapis.network import Network, split_vector
from lapis.posteriors.predicting.sampled import COMPARED_EXAMPLES, are_small, run_together
from lapis.predictions import LatentSamples
from lapis.proofs import close

TOGETHER = "members of an ensemble that run together"
"""Name in `Network.proofs`."""


def are_of_one_architecture(networks: Sequence[Network]) -> bool:
    """Whether all are built of the same layers, with tensors of the same names, shapes and dtypes."""

    def form(network: Network) -> list[object]:
        tensors = [(name, tensor.shape, tensor.dtype) for name, tensor in network.tensors().items()]
        return [tensors, *(type(module) for module in network.module.modules())]

    return all(form(network) == form(networks[0]) for network in networks[1:])


def are_alike(networks: Sequence[Network]) -> bool:
    """The same, with the same parameters chosen."""
    return all(network.names == networks[0].names for network in networks) and are_of_one_architecture(networks)


def member_outputs(members: Sequence[Network], likelihood: Likelihood, width: int, inputs: Inputs) -> LatentSamples:
    """Outputs of all members, (K, B, T, C); ModelError if their shapes differ."""
    if all(are_small(member, len(members)) for member in members) and are_alike(members):
        latent = _together(members, likelihood, inputs)
        if latent is not None:
            check_outputs(latent.values.flatten(0, 1), width)
            return latent
    return _one_by_one(members, likelihood, width, inputs)


def _one_by_one(members: Sequence[Network], likelihood: Likelihood, width: int, inputs: Inputs) -> LatentSamples:
    outputs: list[Tensor] = []
    shape: torch.Size | None = None
    for number, member in enumerate(members):
        with member.prepared(), torch.no_grad():
            raw = member.call(inputs)
        shape = shape or raw.shape
        if raw.shape != shape:
            raise ModelError(
                "The members of the ensemble have different outputs",
                expected=f"shape {tuple(shape)}, as the first",
                got=f"{tuple(raw.shape)} of member {number}",
                do="use networks for one task, with outputs of one shape",
            )
        outputs.append(likelihood.canonical(raw))
        check_outputs(outputs[-1], width)
    return LatentSamples(torch.stack(outputs), raw_shape=tuple(shape or ()))


def _together(members: Sequence[Network], likelihood: Likelihood, inputs: Inputs) -> LatentSamples | None:
    """All members under vmap, each with its own parameters and buffers; None where that is not proven right.

    Integer buffers, which count batches, are those of the first member. Where the outputs depend on them, or on
    attributes of the modules that differ, the comparison with the members themselves says so.
    """
    first = members[0]
    if TOGETHER in first.proofs.refused:
        return None
    floating = {name: tensor for name, tensor in first.tensors().items() if tensor.is_floating_point()}
    if any(tensor.dtype != first.dtype for tensor in floating.values()):
        return None
    shapes = {name: tuple(tensor.shape) for name, tensor in floating.items()}
    constant = set(shapes) - set(first.names)
    held = [member.tensors() for member in members]
    stacked = torch.stack([torch.cat([each[name].reshape(-1) for name in shapes]) for each in held])

    def split(vector: Tensor) -> dict[str, Tensor]:
        parts = split_vector(vector, shapes).items()
        return {name: part.detach() if name in constant else part for name, part in parts}

    found = run_together(first, likelihood.canonical, stacked, split, inputs)
    if found is None:
        return None
    values, shape = found

    def agrees() -> bool:
        expected = _one_by_one(members, likelihood, 0, take(inputs, 0, COMPARED_EXAMPLES)).values
        return close(expected, values[:, :COMPARED_EXAMPLES])

    if not first.proofs.holds(TOGETHER, describe(inputs), agrees):
        return None
    return LatentSamples(values, raw_shape=tuple(shape))
