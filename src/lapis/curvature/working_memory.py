"""How many examples and seeds to process together, so that a pass stays within its working memory."""

from __future__ import annotations

from lapis.curvature.sums import Curvature

COLLECTED_SEEDS = 3
"""Where seeds are backpropagated one by one (networks with convolutions), this many are collected and multiplied by the
layer inputs together: fewer, wider products at the cost of memory.
"""

ALL_SEEDS_BYTES, ALL_SEEDS_EXAMPLES = 32 * 2**20, 32
"""All seeds are collected instead if at least this many examples then fit in this many bytes: layer inputs (patches of
images) are then computed once, for one layer at a time, and need not be kept for later seeds.
"""


def _bytes(curvature: Curvature, *, summing: bool, keep_inputs: bool = True) -> tuple[int, int]:
    """Working memory of one example: a fixed part, and a part for each seed.

    `summing` is for adding to the sums, as opposed to predicting. `keep_inputs` counts the inputs of all layers, kept
    for later seeds, if some block multiplies gradients by them.
    """
    sizes = curvature.tape.example_bytes
    inputs = sizes.largest_moment if summing and curvature.takes_moments else sizes.largest
    if keep_inputs and curvature.forms_jacobian:
        inputs = sizes.inputs
    # layer outputs, before and after activations, take about as much memory as the gradients
    itemsize = curvature.tape.network.dtype.itemsize
    seed = curvature.positions * curvature.outputs * itemsize if curvature.positions > 1 else 0
    return 2 * (inputs + sizes.gradients), sizes.gradients + seed + curvature.row_length * itemsize


def examples_at_once(curvature: Curvature, seeds: int, work: int, *, summing: bool = False) -> int:
    """How many examples fit in `work` bytes with `seeds` seeds each; for `summing` see `_bytes`."""
    fixed, each = _bytes(curvature, summing=summing)
    return max(1, work // max(1, fixed + seeds * each))


def predicted_at_once(curvature: Curvature, full: bool, work: int) -> int:
    """How many examples fit in `work` bytes while (co)variances of their outputs are computed.

    Gradients are in memory twice, themselves and multiplied by the covariance; rows over all weights of a block, which
    are factorised in float64, more often; covariances of an example's outputs (`full`) for a block and their sum.
    """
    outputs, itemsize = curvature.outputs, curvature.tape.network.dtype.itemsize
    fixed, each = _bytes(curvature, summing=False)
    each += curvature.row_length * (itemsize + 8)
    covariances = 2 * outputs**2 * (itemsize + (8 if curvature.row_length else 0)) if full else 0
    held = curvature.positions * outputs * (outputs if full else 1) * itemsize
    return max(1, work // max(1, fixed + 2 * outputs * each + covariances + held))


def seeds_at_once(curvature: Curvature, examples: int, work: int) -> int:
    """How many seeds of a batch of `examples` fit in `work` bytes while adding to the sums."""
    fixed, each = _bytes(curvature, summing=True)
    return max(1, (work - examples * fixed) // max(1, examples * each))


def examples_with_all_seeds(curvature: Curvature, work: int) -> int:
    """For how many examples all seeds can be collected without keeping layer inputs; 0 where that does not pay."""
    if curvature.kind != "ggn" or not curvature.forms_jacobian or curvature.row_length:
        return 0
    fixed, each = _bytes(curvature, summing=True, keep_inputs=False)
    return min(work, ALL_SEEDS_BYTES) // max(1, fixed + curvature.outputs * each)


def part_length(curvature: Curvature, work: int) -> int:
    """How many examples of a batch are added to the sums together."""
    most = examples_at_once(curvature, 1, work, summing=True)
    with_all_seeds = examples_with_all_seeds(curvature, work)
    collects_all = not curvature.tape.batches_seeds and with_all_seeds >= ALL_SEEDS_EXAMPLES
    return min(most, with_all_seeds) if collects_all else most
