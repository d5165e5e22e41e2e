"""Outputs of the members of an ensemble: one by one, or small ones of one architecture together."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from lapis.batches import Inputs, batch_length, describe, take
from lapis.curvature.outputs import check_outputs
from lapis.curvature.products.differentiation import DERIVATIVE_ERRORS, differentiable
from lapis.errors import ModelError
from lapis.likelihoods import Likelihood
from lapis.network import Network
from lapis.posteriors.predicting.sampled import COMPARED_EXAMPLES, SMALL_RUN, are_small
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


def stack_members(members: Sequence[Network]) -> dict[str, Tensor] | None:
    """Floating parameters and buffers of all members by name, (K, ...); None unless they may run together."""
    if not all(are_small(member, len(members)) for member in members) or not are_alike(members):
        return None
    held = [member.tensors() for member in members]
    floating = [name for name, tensor in held[0].items() if tensor.is_floating_point()]
    return {name: torch.stack([tensors[name] for tensors in held]) for name in floating}


def member_outputs(
    members: Sequence[Network],
    stacked: dict[str, Tensor] | None,
    likelihood: Likelihood,
    width: int,
    inputs: Inputs,
) -> LatentSamples:
    """Outputs of all members, (K, B, T, C); ModelError if their shapes differ. `stacked` is by `stack_members`."""
    if stacked is not None and TOGETHER not in members[0].proofs.refused:
        latent = _together(members, stacked, likelihood, inputs)
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


def _together(
    members: Sequence[Network], stacked: dict[str, Tensor], likelihood: Likelihood, inputs: Inputs
) -> LatentSamples | None:
    """All members under vmap, each with its own parameters and buffers; None where that is not proven right.

    Integer buffers, which count batches, are those of the first member. Where the outputs depend on them, or on
    attributes of the modules that differ, the comparison with the members themselves says so.
    """
    first, length = members[0], batch_length(inputs)
    held = sum(first.example_bytes.get(describe(take(inputs, 0, 1)), (SMALL_RUN,)))
    step = max(1, SMALL_RUN // (held * length))
    starts = range(0, len(members), step)
    parts = [{name: tensor[start : start + step] for name, tensor in stacked.items()} for start in starts]
    with first.prepared(), differentiable(), torch.no_grad():
        try:
            raw = torch.cat([torch.func.vmap(partial(first.call, inputs))(part) for part in parts])
        except DERIVATIVE_ERRORS:  # torch cannot vmap the network
            first.proofs.refused.add(TOGETHER)
            return None
    values = likelihood.canonical(raw.flatten(0, 1))
    if len(values) != len(members) * length:  # not one row an example: alone, members say so
        return None
    values = values.reshape(len(members), length, *values.shape[1:])

    def agrees() -> bool:
        expected = _one_by_one(members, likelihood, 0, take(inputs, 0, COMPARED_EXAMPLES)).values
        return close(expected, values[:, :COMPARED_EXAMPLES])

    if not first.proofs.holds(TOGETHER, describe(inputs), agrees):
        return None
    return LatentSamples(values, raw_shape=tuple(raw.shape[1:]))


def check_same_beside_weights(
    networks: Sequence[Network],
    problem: str = "Weights alone are no draw of these networks",
    do: str = "use predict, which runs every network as it is",
) -> None:
    """ModelError unless the networks differ in their chosen weights only, so that a weight vector says which it is."""
    first = networks[0]
    expected = _beside_weights(first)
    for number, network in enumerate(networks):
        got = "another architecture"
        if are_alike([first, network]):
            found = _beside_weights(network)
            other = [name for name in {**expected, **found} if not _equal(expected.get(name), found.get(name))]
            if not other:
                continue
            got = f"other values in {other[0]!r}"
        raise ModelError(
            problem,
            expected="networks that differ in their weights only",
            got=f"number {number} with {got}",
            do=do,
        )


def _beside_weights(network: Network) -> dict[str, Tensor]:
    """Buffers, frozen parameters and the rest of parameters that are chosen in part; integers only count batches."""
    tensors = {name: tensor for name, tensor in network.tensors().items() if tensor.is_floating_point()}
    whole = [name for name in network.names if name not in network.indices]
    for name, index in network.indices.items():
        tensors[name] = tensors[name].flatten().index_fill(0, index, torch.nan)  # marks what is chosen
    return {name: tensor for name, tensor in tensors.items() if name not in whole}


def _equal(one: Tensor | None, two: Tensor | None) -> bool:
    return one is not None and two is not None and one.shape == two.shape and one.allclose(two, 0, 0, equal_nan=True)
