"""How many examples and seeds are worked on at once, so that a pass stays within its working memory."""

from __future__ import annotations

from lapis.curvature.sums import Curvature

WORK_BYTES = 64 * 2**20
"""Working memory that one pass aims at, when the budget allows it."""

COLLECTED_SEEDS = 3
"""Seeds that are backpropagated one by one are collected up to this many, and multiplied with the layer inputs
together: wider products, in more memory. For networks with convolutions.
"""

ALL_SEEDS_BYTES, ALL_SEEDS_EXAMPLES = 32 * 2**20, 32
"""All seeds are collected instead where at least this many examples fit in this many bytes: layer inputs (patches of
images) are then made once, for one layer at a time, and need not be kept for more seeds.
"""


def _bytes(curvature: Curvature, *, summing: bool, keep_inputs: bool = True) -> tuple[int, int]:
    """Working memory of an example: independent of seeds, and for each seed.

    `summing`: to add to the sums, as against predicting. `keep_inputs`: layer inputs are kept for more seeds, where
    these are multiplied with them.
    """
    sizes = curvature.tape.example_bytes
    inputs = sizes.largest_moment if summing and curvature.takes_moments else sizes.largest
    if keep_inputs and curvature.forms_jacobian:
        inputs = sizes.inputs
    # the outputs of layers, before and after the activations, take about as much as the gradients
    row = curvature.row_length * curvature.tape.network.dtype.itemsize
    return 2 * (inputs + sizes.gradients), sizes.gradients + row


def examples_at_once(curvature: Curvature, seeds: int, work: int, *, summing: bool = False) -> int:
    """How many examples fit in `work` bytes with that many seeds; `summing`: to add to the sums."""
    fixed, each = _bytes(curvature, summing=summing)
    return max(1, work // max(1, fixed + seeds * each))


def seeds_at_once(curvature: Curvature, examples: int, work: int) -> int:
    """How many seeds of a batch fit in `work` bytes, when they are added to the sums."""
    fixed, each = _bytes(curvature, summing=True)
    return max(1, (work - examples * fixed) // max(1, examples * each))


def examples_with_all_seeds(curvature: Curvature, work: int) -> int:
    """Of how many examples all seeds can be collected, if no layer inputs are kept; 0 where that does not pay."""
    if curvature.kind != "ggn" or not curvature.forms_jacobian or curvature.row_length:
        return 0
    fixed, each = _bytes(curvature, summing=True, keep_inputs=False)
    return min(work, ALL_SEEDS_BYTES) // max(1, fixed + curvature.outputs * each)


def part_length(curvature: Curvature, work: int) -> int:
    """How many examples of a batch are added to the sums at once."""
    most = examples_at_once(curvature, 1, work, summing=True)
    with_all_seeds = examples_with_all_seeds(curvature, work)
    collects_all = not curvature.tape.batches_seeds and with_all_seeds >= ALL_SEEDS_EXAMPLES
    return min(most, with_all_seeds) if collects_all else most
