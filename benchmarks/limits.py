"""The physical limit of each job: its floating point operations at the machine's own matrix-product rate.

Counted: forward passes, backward passes to every layer's output (one a seed, none below the first layer), and the
products between recorded inputs and gradients, as general products (symmetry would halve some). Not counted: anything
elementwise, eigendecompositions, drawing weights, copies. Operations in float64 count twice.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.cases import Problem
from benchmarks.jobs import SAMPLES, points, split
from benchmarks.measure import Clock


@dataclass(frozen=True)
class Layer:
    """A matrix of weights (outputs, inputs), used at so many positions of an example."""

    outputs: int
    inputs: int
    positions: int

    @property
    def weights(self) -> int:
        """With a bias."""
        return self.outputs * (self.inputs + 1)

    @property
    def product(self) -> int:
        """Multiplications and additions of one use on one example."""
        return 2 * self.outputs * self.inputs * self.positions


def layers(problem: Problem) -> list[Layer]:
    """The linear, convolution and attention layers, in the order of use."""
    found: list[Layer] = []

    def note(module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        if isinstance(module, nn.MultiheadAttention):
            width, positions = module.embed_dim, inputs[0].shape[1]
            found.extend((Layer(3 * width, width, positions), Layer(width, width, positions)))
        elif isinstance(module, nn.Conv2d):
            found.append(Layer(module.out_channels, module.weight[0].numel(), output[0, 0].numel()))
        elif isinstance(module, nn.Linear):
            found.append(Layer(module.out_features, module.in_features, output[0].numel() // module.out_features))

    hooks = [module.register_forward_hook(note) for module in problem.model.modules()]
    problem.model(problem.points(1))
    for hook in hooks:
        hook.remove()
    return found


def forward_flops(model: nn.Module, x: Tensor) -> int:
    with FlopCounterMode(display=False) as counter:
        model(x)
    return counter.get_total_flops()


def rotation(layer: Layer, seeds: int) -> int:
    """Into the eigenbases: the inputs and gradients at every position, or the Jacobian, whichever is smaller."""
    apart = layer.positions * (layer.inputs**2 + seeds * layer.outputs**2)
    together = seeds * layer.outputs * layer.inputs * (layer.outputs + layer.inputs)
    return 2 * min(apart, together)


def pairs(used: Sequence[Layer], seeds: int) -> int:
    """All weights with all weights: row by row, or by position where there are fewer of these."""
    return sum(2 * one.weights * two.weights * min(seeds, one.positions, two.positions) for one in used for two in used)


def flops(job: str, problem: Problem) -> float | None:
    """None where no matrix product is needed (evidence and tuning work on eigenvalues)."""
    structure, action = split(job)
    used = layers(problem)
    if structure == "last":
        used = used[-1:]
    outputs, weights = problem.case.outputs, sum(p.numel() for p in problem.model.parameters())
    forward = forward_flops(problem.model, problem.points(1))
    below = 0 if problem.case.tokens else used[0].product
    if structure == "ggn":  # tangents through inputs and weights, gradients to inputs and weights
        vectors = int(action.removeprefix("vectors"))
        return float(len(problem.batches.dataset) * (forward + 2 * vectors * (2 * forward - below)))
    backward = 0 if structure == "last" else outputs * (forward - below)
    rows = sum(outputs * layer.product for layer in used)
    if action == "fit":
        n = len(problem.batches.dataset)
        if structure == "dense":
            return float(n * (forward + backward + rows + pairs(used, outputs)))
        if structure == "diag":
            squares = sum(layer.product * (outputs if layer.positions > 1 else 1) for layer in used)
            return float(n * (forward + backward + squares))
        moments = sum(2 * layer.positions * (layer.inputs**2 + outputs * layer.outputs**2) for layer in used)
        return float(n * (forward + backward + moments))
    n = points(action)
    if action.startswith("predict"):
        if structure == "dense":
            return n * (forward + backward + rows + 2.0 * outputs * weights**2)
        rotations = 0 if structure == "diag" else sum(rotation(layer, outputs) for layer in used)
        entries = outputs if action.endswith("diagonal") else outputs**2
        contraction = sum(
            outputs * layer.product + 2 * entries * layer.outputs * layer.inputs
            if layer.positions > 1
            else layer.product + 2 * entries * layer.outputs
            for layer in used
        )
        return float(n * (forward + backward + contraction + rotations))
    return float(SAMPLES * n * forward) if action == "sample" else None


def matrix_product_rate(clock: Clock, size: int = 2048, repeats: int = 9) -> float:
    """Operations a second of a float32 matrix product."""
    matrix = torch.randn(size, size)
    seconds = []
    for _ in range(repeats):
        start = clock()
        matrix @ matrix
        seconds.append(clock() - start)
    return 2 * size**3 / statistics.median(seconds)
