"""The modes in which the Jacobian of a few examples is multiplied, and the rule that picks one.

Every mode runs the network once with an autograd graph and gets J^T u from it by backward passes. They differ in how
J v is computed, and in whether several vectors go through the network together:

    one_pass        J v by forward-mode differentiation in the same run that builds the graph
    forward         J v by forward-mode differentiation in runs of their own, one vector after another
    double          J v as the derivative of J^T u with respect to u (double backward), one vector after another
    batched         J v of all vectors in one vmapped forward-mode run; J^T u one vector after another
    batched_both    as batched, with J^T u of all vectors in one vmapped backward pass
    batched_double  double backward of all vectors at once, and J^T u of all vectors at once
    rows            J itself by per-example gradients: slow, but needs first derivatives only
"""

from __future__ import annotations

import math

from torch.nn.modules.conv import _ConvNd

from lapis.errors import OptionError
from lapis.network import Network

ONE_VECTOR_MODES = ("one_pass", "forward", "double", "rows")
"""The modes for a single vector, in the order in which they are tried when the preferred one cannot be used."""

SEVERAL_VECTORS_MODES = ("batched", "batched_both", "batched_double", "double", "forward", "rows")
"""The modes for several vectors, in the order in which they are tried when the preferred one cannot be used."""

BATCHED_MODES = frozenset({"batched", "batched_both", "batched_double"})
"""Modes that compute J v of several vectors in one vmapped pass: memory grows with their number."""

BATCHED_BACKWARD_MODES = frozenset({"batched_both", "batched_double"})
"""Modes that compute J^T u of several vectors in one vmapped backward pass."""

MODES_BY_MEMORY = ("forward", "one_pass", "double", "batched", "batched_double", "batched_both", "rows")
"""All modes, from the one that takes the least memory to the one that takes the most."""

SMALL_GRAPH_BYTES = 16 * 2**10
"""Up to this size of an example's graph, a network without convolutions multiplies several vectors by
"batched_double".
"""

LARGE_GRAPH_BYTES = 2**19
"""Beyond this size of an example's graph, vectors go through the network one after another."""


SPLIT_GRAPH_BYTES, SPLIT_PARTS = 16 * 2**20, 3
"""In mode "one_pass", a batch whose graph holds more bytes than the first of these is worked on in so many parts.
The mode takes about three times the graph's memory; three parts take no more than the graph of the whole batch, and are
still large enough to keep the processor busy.
"""

TANGENT_BYTES = 16 * 2**20
"""In the batched modes, a batch is worked on in parts whose tangents of the largest layer take no more than this.
Above 32 MB every tensor is made of new pages by the system: four vectors and 1,000 images of a LeNet (75 MB) took 1.84
training epochs a vector at once, 1.30 in halves, 1.01 in quarters, 1.07 in eighths.
"""


def default_mode(network: Network, several: bool, graph_bytes: int) -> str:
    """The preferred mode, by a fixed rule, so that the same network gives bitwise the same products on every run.

    Args:
        network: whose Jacobian is multiplied.
        several: whether there are several vectors, or one.
        graph_bytes: what the autograd graph of one example holds.
    """
    # GGN products on the networks of benchmarks/cases.py, float32, one thread, seconds relative to the fastest mode:
    #
    # one vector           one_pass  forward  double
    #   MLPs (a) (d) (f)   1 to 1.35 1.2-1.35 1 to 1.2   (d), where one_pass is not the fastest, takes 2 ms
    #   LeNet (b), CNN (h)     1     1.1-1.3    1.6
    #   transformer (e)        1      1.3       1.3
    #   ResNets (c) (g)        1     1 to 1.1   1.6
    #
    # eight vectors        graph of an example   forward  double  batched  batched_both  batched_double
    #   MLPs (a) (d) (f)     0.4 to 5 KB        1.4-4.2  1.05-2.1 1.05-1.5  1.05-1.1       1
    #   CNN (h), LeNet (b)   4 and 47 KB        1.6-1.9  1.7-2.4    1       1 to 1.1      1.8-2
    #   transformer (e)      89 KB               1.4      1.1       1         1            1.25
    #   ResNets (c) (g)      1.5 and 4.5 MB     1 to 1.05   1.3   1 to 1.2  1.05-1.1       1.5-1.6
    #
    # With two vectors the same mode is the fastest, or within 5 % of it. Several vectors at once save calls on small
    # layers; on large ones their tangents leave the cache, and "forward" takes far less memory. "batched" takes less
    # memory than "batched_both".
    if not several:
        return "one_pass"
    if graph_bytes > LARGE_GRAPH_BYTES:
        return "forward"
    convolves = any(isinstance(module, _ConvNd) for module in network.module.modules())
    return "batched" if convolves or graph_bytes > SMALL_GRAPH_BYTES else "batched_double"


def least_parts(mode: str, examples: int, vectors: int, graph_bytes: int, largest_bytes: int) -> int:
    """Into how many parts at least so many examples are cut for a product with so many vectors at once.

    Args:
        mode: of the product.
        examples: of the batch.
        vectors: that go through the network together.
        graph_bytes: what the autograd graph of one example holds.
        largest_bytes: the largest tensor of it.
    """
    if mode in BATCHED_MODES:
        return max(1, math.ceil(examples * vectors * largest_bytes / TANGENT_BYTES))
    return SPLIT_PARTS if mode == "one_pass" and examples * graph_bytes > SPLIT_GRAPH_BYTES else 1


def checked_mode(mode: str | None) -> str | None:
    """The mode of multiplication as `Jacobian` takes it; OptionError for an unknown one."""
    if mode is not None and mode not in (*MODES_BY_MEMORY, "fastest"):
        raise OptionError(
            "Unknown mode of multiplication",
            expected=", ".join(("None", "fastest", *MODES_BY_MEMORY)),
            got=repr(mode),
            do="choose one of these",
        )
    return mode
