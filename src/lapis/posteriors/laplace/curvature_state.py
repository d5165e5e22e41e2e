"""Stored curvature as contents of a file: the sums of every block, and the plan by which layers were recorded."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from lapis.curvature.blocks.block import Block
from lapis.curvature.blocks.partition import BUILDERS, Structure, build_blocks, is_packed
from lapis.curvature.recording.sites import Plan
from lapis.curvature.seen import KEPT, LIMIT, Seen
from lapis.curvature.sums import MOST_APART, Curvature
from lapis.curvature.tape import ExampleBytes, Tape
from lapis.likelihoods import Likelihood
from lapis.network import Network
from lapis.posteriors.posterior import Facts, State
from lapis.schema import under, word, wrong


def curvature_state(sums: Curvature) -> State:
    """The sums, for a file."""
    blocks = {f"block.{i}.{name}": t for i, block in enumerate(sums.blocks) for name, t in block.state().items()}
    for c, parts in enumerate(sums.apart or ()):
        for i, part in enumerate(parts):
            blocks |= {f"output.{c}.{i}.{name}": tensor for name, tensor in part.part_state(c == 0).items()}
    options: dict[str, str] = {}
    for block in sums.blocks:
        options |= block.options()
    config = {
        "options": options,
        "eps": [block.eps() for block in sums.blocks],
        "curvature": sums.kind,
        "fisher_samples": sums.fisher_samples,
        "example_bytes": sums.tape.example_bytes,
        "sites": [site.to_config() for site in sums.tape.plan.sites],
        "general": sorted(sums.tape.plan.general),
        "apart": len(sums.apart or ()),
        "positions": sums.positions,
        "seen": sums.seen.limit,
    }
    seen = {"seen": sums.seen.tensor()} if len(sums.seen.hashes) else {}
    return State(config, blocks | seen | {"statistics": sums.statistics})


def curvature_from_state(
    state: State, network: Network, likelihood: Likelihood, facts: Facts, statistics: Tensor
) -> Curvature:
    """Rebuild the tape from its stored plan, and fill the blocks with their sums."""
    options = {"sharing": "expand", "bias": "joint"} | state.entry("options", dict[str, str])
    tape = Tape(network, likelihood.canonical)
    tape.plan = Plan.from_config(state.entry("sites", list), state.entry("general", list[str]), network)
    tape.example_bytes = ExampleBytes(*state.entry("example_bytes", tuple[int, int, int, int]))
    structure: Structure = state.word("structure", tuple(BUILDERS))  # type: ignore[assignment]
    if structure == "dense" and not is_packed(network.size):  # before a matrix of this size is allocated
        state.tensor("block.0.curvature", (network.size, network.size))
    sharing, bias = word(options, "sharing", ("expand", "reduce")), word(options, "bias", ("joint", "separate"))
    blocks = build_blocks(structure, tape.plan.sites, sharing, bias, facts.memory_budget)
    for i, block in enumerate(blocks):
        block.load(block.check_state(under(f"block.{i}.", state.tensors)))
    _take_eps(blocks, state.entry("eps", list[dict[str, float]]))
    kind = state.word("curvature", ("ggn", "sampled", "empirical", "hessian"))
    apart = None
    if state.count("apart", least=0, most=MOST_APART):
        if state.config["apart"] != facts.n_outputs or kind != "ggn":
            raise wrong("apart", f"0, or {facts.n_outputs} outputs of the GGN", repr(state.config["apart"]))
        apart = [[block.fresh() for block in blocks] for _ in range(facts.n_outputs)]
    for c, parts in enumerate(apart or ()):
        for i, part in enumerate(parts):
            part.load(part.check_state(under(f"output.{c}.{i}.", state.tensors), part=True))
            part.inherit([blocks[i]])
    return Curvature(
        kind, tape, blocks, statistics, facts.n_data, state.count("fisher_samples"), facts.signature, facts.n_outputs,
        state.count("digest", least=0), apart=apart, positions=state.count("positions"),
        seen=_seen(state, facts.n_data),
    )  # fmt: skip


def _seen(state: State, n_data: int) -> Seen:
    """The fingerprints of some examples; unknown in files that are older than they."""
    if "seen" not in state.tensors:
        return Seen.unknown()
    hashes = state.tensor("seen", (-1,), torch.int64).cpu().numpy().view(np.uint64)
    limit = state.count("seen", least=0, most=LIMIT)
    if len(hashes) > min(KEPT, n_data) or bool((np.diff(hashes.astype(object)) < 0).any()) or (hashes > limit).any():
        raise wrong("seen", f"at most {KEPT} sorted fingerprints up to the limit", f"{len(hashes)}")
    return Seen(hashes, limit)


def _take_eps(blocks: Sequence[Block], found: list[dict[str, float]]) -> None:
    """Tell the blocks how precisely they were summed."""
    fits = [eps.keys() for eps in found] == [block.eps().keys() for block in blocks]
    if not fits or not all(0.0 <= value < 1.0 for eps in found for value in eps.values()):
        raise wrong("eps", "the precisions of the sums of each block, from 0 to 1", str(found)[:80])
    for block, eps in zip(blocks, found, strict=True):
        block.take_eps(eps)
