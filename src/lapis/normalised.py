"""Which weights are scale-free because a normalisation follows: found by rescaling them, and watching the outputs.

The scale of such weights means nothing, so a prior precision that they share with others has no meaning either: each
gets its own. The numbers decide, not the names of layers, so any normalisation counts: batch, layer, group, instance
and RMS norm, weight standardisation, the direction in weight norm, a norm written by hand.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from lapis.batches import Inputs, as_inputs
from lapis.errors import OptionError
from lapis.network import Network, Weights, evaluating

SCALES = (0.5, 3.0)
"""Factors that the weights are multiplied by."""

INVARIANT = 0.05
"""Rescaling may move the outputs by this share of what a random change of the same size does. Not zero: the epsilon
inside norm layers weighs in when activations are small."""

OTHERS = "others"


def normalised_groups(model: nn.Module, x: Inputs, weights: Weights = "all") -> dict[str, list[str]]:
    """Parameter names by prior group: one group for each scale-free layer or parameter, and one for all others.

    For `lapis.Prior(groups=...)` and `posterior.tune(groups=...)`; there, `groups="normalised"` does the same on the
    first examples of the fit. Batch norm runs on the statistics of `x` meanwhile: pass a handful of examples.

    >>> model = nn.Sequential(nn.Linear(2, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 1))
    >>> normalised_groups(model, torch.randn(16, 2))
    {'0': ['0.weight', '0.bias'], 'others': ['1.weight', '1.bias', '3.weight', '3.bias']}
    """
    first = next(model.parameters())
    inputs = as_inputs(x, first.dtype, first.device)
    return find_normalised(Network(model, weights, example=inputs), inputs)


def find_normalised(network: Network, inputs: Inputs | None) -> dict[str, list[str]]:
    """See `normalised_groups`; the labels are layers' names, or parameters' where one alone is scale-free."""
    if inputs is None:
        raise OptionError(
            "Finding normalised weights needs example inputs",
            expected="a posterior fitted in this process",
            got="none at hand (a posterior from a file has no data)",
            do="pass groups=lapis.normalised_groups(model, x)",
        )
    layers: dict[str, list[str]] = {}
    for name in network.names:
        layers.setdefault(name.rpartition(".")[0] or name, []).append(name)
    groups: dict[str, list[str]] = {}
    with evaluating(network.module), torch.no_grad():
        probe = _Probe(network, inputs)
        for layer, names in layers.items():
            whole = probe.sensitivity(names)
            alone = {
                name: probe.sensitivity([name]) for name in names if len(names) > 1 and len(network.shapes[name]) > 1
            }
            # a bias behind a standardised weight is small, not scale-free: the weight alone then does far better
            if whole <= INVARIANT and not (alone and whole > 10 * min(alone.values()) + 1e-3):
                groups[layer] = names
            else:
                groups |= {name: [name] for name, value in alone.items() if value <= INVARIANT}
    taken = {name for names in groups.values() for name in names}
    others = [name for name in network.names if name not in taken]
    if others:
        label = OTHERS if OTHERS not in groups else f"all {OTHERS}"
        groups[label] = others
    return groups


class _Probe:
    """Compares outputs under changed weights with those under the weights as they are.

    Rescaling is judged with batch norm on the batch's own statistics, as in training: running ones keep the old scale.
    Other changes are judged in evaluation mode, where a batch norm does not swallow a bias or the slope of one input.
    """

    def __init__(self, network: Network, inputs: Inputs) -> None:
        self.network, self.inputs = network, inputs
        self.weights = {name: p.detach() for name, p in network.parameters.items()}
        self.norms = [module for module in network.module.modules() if isinstance(module, _NormBase)]
        self.generator = torch.Generator().manual_seed(0)
        self.outputs = {training: self._run({}, training) for training in (True, False)}

    def _run(self, changed: dict[str, Tensor], training: bool) -> Tensor:
        for norm in self.norms:
            norm.train(training)
        return self.network.call(self.inputs, {**self.weights, **changed}).double()

    def _change(self, changed: dict[str, Tensor], training: bool) -> float:
        moved = float((self._run(changed, training) - self.outputs[training]).norm())
        return moved if moved == moved else float("inf")

    def sensitivity(self, names: Iterable[str]) -> float:
        """Change of the outputs when all of `names` are multiplied by a factor, over that of a random change as large.

        Infinite for weights that do not matter at all.
        """
        chosen = {name: self.weights[name] for name in names}
        worst = 0.0
        for scale in SCALES:
            scaled = self._change({name: scale * value for name, value in chosen.items()}, True)
            random = self._change({name: self._nudged(value, abs(scale - 1)) for name, value in chosen.items()}, False)
            if random <= 1e-6 * float(self.outputs[False].norm()):
                return float("inf")
            worst = max(worst, scaled / random)
        return worst

    def _nudged(self, value: Tensor, share: float) -> Tensor:
        noise: Tensor = torch.randn(value.shape, generator=self.generator, dtype=torch.float64).to(value)
        size = float(value.norm() / noise.norm().clamp(min=1e-30))
        return value + share * size * noise
