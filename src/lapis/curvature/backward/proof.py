"""The proof that recorded uses explain the weights: they must add up to autograd's gradient."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from lapis.curvature.backward.record import Record
from lapis.curvature.recording.sites import Site
from lapis.errors import ModelError
from lapis.network import Network
from lapis.proofs import rounding


def unexplained(record: Record, network: Network, sites: Sequence[Site]) -> set[str]:
    """Parameters whose recorded uses do not reproduce autograd's gradient.

    For a random seed v and random coefficients c, sum_b c_b J_b^T v_b from the recorded uses must be the gradient of
    sum_b c_b v_b . f_b. It is only if every use is known and credited to the right example.
    """
    known = [site for site in sites if record.explains(site)]
    f = record.f
    _refuse_reentrant_checkpoints(f)
    generator = torch.Generator(device=f.device).manual_seed(0)
    seed = torch.empty_like(f).normal_(generator=generator)
    coefficients = f.new_empty(len(record)).normal_(generator=generator)
    parameters = list(network.parameters.values())
    mixed = seed * coefficients[:, None, None]
    try:
        rest = network.gather(torch.autograd.grad(f, parameters, mixed, retain_graph=True, allow_unused=True))
    except RuntimeError as error:
        raise ModelError(
            "The network cannot be differentiated",
            expected="outputs that torch.autograd.grad can differentiate in the weights",
            got=str(error).strip().splitlines()[0],
            do="use operations that have derivatives",
        ) from error
    parts = {name: rest[network.span(name)] for name in network.names}
    relative = rounding(rest.dtype)
    floor = 1e-12 if rest.dtype == torch.float64 else 1e-3 * relative
    whole = floor * rest.norm()
    allowed = {name: relative * part.norm() + whole for name, part in parts.items()}
    claimed: Counter[str] = Counter()
    for site, contribution in zip(known, record.contributions(seed[None], known), strict=True):
        claims = site.parts(contribution.gradient(coefficients).reshape(site.shape))
        for slot, claim, (start, stop) in zip(site.slots, claims, site.spans(network), strict=True):
            rest[start:stop] -= slot.restore(claim)
            claimed[slot.name] += slot.size
    return {
        name
        for name, entries in claimed.items()
        if entries != parts[name].numel() or not bool(parts[name].norm() <= allowed[name])
    }


def _refuse_reentrant_checkpoints(f: Tensor) -> None:
    """Refuse checkpoints that run their own backward pass: torch.autograd.grad does not see the weights inside."""
    waiting, seen = [f.grad_fn], set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if node.name() == "CheckpointFunctionBackward":
            raise ModelError(
                "The network cannot be differentiated",
                expected="activation checkpoints that torch.autograd.grad can pass",
                got="torch.utils.checkpoint with use_reentrant=True",
                do="checkpoint with use_reentrant=False",
            )
        waiting += [before for before, _ in node.next_functions]
