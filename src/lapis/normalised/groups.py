"""Prior groups for weights that are scale-free because a normalisation follows: traced, then confirmed by rescaling.

The scale of such weights does not affect the function, so a prior precision shared with other weights would be
arbitrary: each scale-free layer gets its own. Recognised are batch, layer, group, instance and RMS norm, weight
standardisation, the direction in weight norm, and hand-written norms.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from functools import cached_property

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from lapis.batches import Inputs, as_inputs
from lapis.errors import LapisWarning, OptionError, users_level
from lapis.network import Network, Weights, evaluating
from lapis.normalised.trace import ZERO, Broken, Degree, Trace
from lapis.options import check_arguments

SCALES = (0.5, 3.0)
"""Factors by which candidate weights are rescaled."""

INVARIANT = 0.05
"""Largest change of the outputs under rescaling, relative to that under a random change of the same size, that counts
as invariance. Not zero, because the epsilon inside norm layers matters when activations are small."""

OTHERS = "others"


def normalised_groups(model: nn.Module, x: Inputs, weights: Weights = "all") -> dict[str, list[str]]:
    """Parameter names by prior group: one group for each scale-free layer or parameter, and one for all others.

    A traced forward pass finds the weights in which the outputs have degree 0 (see `Trace`); rescaling confirms each.
    Where the trace meets an unknown operation, rescaling alone decides; where rescaling contradicts the trace, the
    weights stay with the others. Both cases issue a LapisWarning.

    Pass the result to `lapis.Prior(groups=...)` or `posterior.tune(groups=...)`; there, `groups="normalised"` does the
    same on the first examples of the fit. Batch norm uses the statistics of `x` here: pass a handful of examples.

    >>> model = nn.Sequential(nn.Linear(2, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 1))
    >>> normalised_groups(model, torch.randn(16, 2))
    {'0': ['0.weight', '0.bias'], 'others': ['1.weight', '1.bias', '3.weight', '3.bias']}
    """
    check_arguments(normalised_groups, locals())
    first = next(model.parameters())
    inputs = as_inputs(x, first.dtype, first.device)
    return find_normalised(Network(model, weights, example=inputs), inputs)


def find_normalised(network: Network, inputs: Inputs | None) -> dict[str, list[str]]:
    """See `normalised_groups`. A group is named after its layer, or its parameter where only one is scale-free."""
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
    with network.held(), evaluating(network.module), torch.no_grad():
        probe = _Probe(network, inputs)
        # single parameters: a layer's bias may follow the norm (weight standardisation, weight norm's direction)
        alone = {
            layer: [[name] for name in names if len(names) > 1 and len(network.shapes[name]) > 1]
            for layer, names in layers.items()
        }
        degrees = probe.degrees([*layers.values(), *(names for sets in alone.values() for names in sets)])
        for layer, names in layers.items():
            whole = _Candidate(layer, names, degrees[tuple(names)], probe)
            parts = [_Candidate(single[0], single, degrees[tuple(single)], probe) for single in alone[layer]]
            if not whole.free and (any(part.free for part in parts) or whole.far_worse_than(parts)):
                groups |= {part.label: part.names for part in parts if part.accepted()}
            elif whole.accepted():
                groups[layer] = names
    taken = {name for names in groups.values() for name in names}
    others = [name for name in network.names if name not in taken]
    if others:
        label = OTHERS if OTHERS not in groups else f"all {OTHERS}"
        groups[label] = others
    return groups


class _Candidate:
    """Weights that may be scale-free together: their traced degree and, computed on demand, rescaling's sensitivity."""

    def __init__(self, label: str, names: list[str], degree: Degree, probe: _Probe) -> None:
        self.label, self.names, self.degree, self.probe = label, names, degree, probe
        self.free = degree == ZERO
        self.unknown = isinstance(degree, Broken) and not degree.known

    @cached_property
    def sensitivity(self) -> float:
        return self.probe.sensitivity(self.names)

    def far_worse_than(self, parts: Sequence[_Candidate]) -> bool:
        """Whether a single parameter is much closer to scale-free than this layer, where the trace could not decide.

        Needed because a small bias after the norm leaves the whole layer nearly scale-free.
        """
        best = min((part.sensitivity for part in parts if part.unknown), default=float("inf"))
        return not self.unknown or self.sensitivity > 10 * best + 1e-3

    def accepted(self) -> bool:
        """Whether the weights get a precision of their own; warns where trace and rescaling do not agree."""
        if not (self.free or self.unknown) or self.sensitivity == float("inf"):
            return False
        invariant = self.sensitivity <= INVARIANT
        if self.unknown and invariant:
            assert isinstance(self.degree, Broken)
            _warn(
                f"{self.label!r} gets a precision of its own because rescaling it does not move the outputs; the trace "
                f"could not follow it through {self.degree.why!r}"
            )
        elif self.free and not invariant:
            _warn(
                f"a normalisation follows {self.label!r}, but rescaling it moves the outputs by {self.sensitivity:.2g} "
                f"of what a random change does (a large epsilon, or too few examples), so it shares its precision with "
                f"all others"
            )
        return invariant


def _warn(what: str) -> None:
    warnings.warn(f"Normalised groups: {what}.", LapisWarning, stacklevel=users_level())


class _Probe:
    """Compares outputs under changed weights with those under the current weights.

    Rescaled weights run with batch norm in training mode, on the batch's statistics: running statistics would keep the
    old scale. Random changes run in evaluation mode, where batch norm does not cancel a bias or the slope of one input.
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

    def degrees(self, sets: Iterable[Iterable[str]]) -> dict[tuple[str, ...], Degree]:
        """The degree of the outputs in each set of weights, traced with batch norm on the batch's own statistics."""
        named = [tuple(names) for names in sets]
        for norm in self.norms:
            norm.train(True)
        with Trace([[self.weights[name] for name in names] for names in named]) as trace:
            outputs = self.network.call(self.inputs, self.weights)
        found = trace.of(outputs)
        return {names: found.get(index, ZERO) for index, names in enumerate(named)}

    def _change(self, changed: dict[str, Tensor], training: bool) -> float:
        moved = float((self._run(changed, training) - self.outputs[training]).norm())
        return moved if moved == moved else float("inf")

    def sensitivity(self, names: Iterable[str]) -> float:
        """Change of the outputs when `names` are rescaled, relative to that under a random change of the same size.

        The largest over SCALES; infinite for weights that do not affect the outputs.
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
        """`value` plus random noise of `share` times its norm."""
        noise: Tensor = torch.randn(value.shape, generator=self.generator, dtype=torch.float64).to(value)
        size = float(value.norm() / noise.norm().clamp(min=1e-30))
        return value + share * size * noise
