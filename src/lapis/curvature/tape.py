"""The tape: forward passes that record how each chosen weight was used, and along which axis the examples lie.

A `Record` of one batch holds what backward passes need to turn gradients at layer outputs into per-example gradients of
the weights. `plan.planned_tape` builds a tape whose plan is proven against autograd.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lapis.batches import Inputs, batch_length, map_tensors, take
from lapis.curvature.backward.entries import Entries
from lapis.curvature.backward.gradients import Given
from lapis.curvature.backward.per_example import PerExample
from lapis.curvature.backward.proof import unexplained
from lapis.curvature.backward.record import Record
from lapis.curvature.outputs import check_finite
from lapis.curvature.recording.batch_axis import BatchAxis, locate
from lapis.curvature.recording.layers import Call, Use
from lapis.curvature.recording.listener import MODULE_RULES, Listener, listening
from lapis.curvature.recording.sites import Plan, entire
from lapis.errors import DataError, ModelError
from lapis.network import Network
from lapis.proofs import close


class ExampleBytes(NamedTuple):
    """Bytes of memory per example."""

    inputs: int
    """Inputs of all layers."""
    largest: int
    """Inputs of the layer with the largest ones."""
    largest_moment: int
    """Working memory of the largest layer when only the second moments of layer inputs are needed."""
    gradients: int
    """Gradients of one seed at the outputs of all layers."""


Located = list[tuple[BatchAxis, torch.Size]]
"""For each recorded call of a forward pass, the axis that holds the examples, and the lengths of all other axes."""


class Tape:
    """Records batches of one network. `outputs` converts the raw output to (B, T, C)."""

    def __init__(self, network: Network, outputs: Callable[[Tensor], Tensor]) -> None:
        self.network = network
        self.outputs = outputs
        self.plan = Plan()
        self.example_bytes = ExampleBytes(0, 0, 0, 0)
        self.batches_seeds = True
        """Whether the latest record backpropagates several seeds together."""
        self._slots = {id(parameter): entire(network, name) for name, parameter in network.parameters.items()}
        self._entries = Entries(network)
        self._axes: dict[Any, list[BatchAxis | None]] = {}
        """By batch length, calls and shapes: the axis of the examples in each call."""
        self._folds: dict[Any, BatchAxis] = {}
        """By number and key of a call: the axis found when only one candidate fitted."""
        self._located: dict[Any, Located] = {}
        """By the calls of a pass: the axis of the examples in each, if every call had only one candidate."""
        self._per_example = PerExample(network, outputs)
        self._rules = dict(MODULE_RULES)
        """A copy of the user's own rules: those registered later are not proven for this network."""
        self._trusted = not self._rules
        """Whether every rule in use is proven for this network."""

    def record(self, inputs: Inputs) -> Record:
        """Run the network forward; must be called, and the record used, inside `network.prepared()`."""
        raw, f, listener = self._forward(inputs)
        axes = self._find_axes(inputs, f, listener)
        uses: list[tuple[Call, Use]] = []
        lost = set(listener.unread)
        for call, axis in zip(listener.calls, axes, strict=True):
            explained = call.rule(call, axis) if axis is not None else []
            uses += [(call, use) for use in explained]
            read = {slot.rows for use in explained for slot in (use.weight, use.bias) if slot is not None}
            lost |= {slot.name for slot in call.slots.values() if slot.rows not in read}
        trace = None
        if self._trusted and not listener.picks:
            length = batch_length(inputs)
            shapes = [
                (_alone(call.probe.shape, axis, length), _alone(call.output_shape, axis, length))
                for call, axis in zip(listener.calls, axes, strict=True)
            ]
            trace = ([call.key for call in listener.calls], axes, shapes, f.dtype, frozenset(lost))
        record = Record(
            inputs, raw.shape, f, uses, lost, trace, self.plan, self._per_example, self._entries, self.network.proofs
        )
        self.batches_seeds = record.gradients.batched
        if self.plan.sites and (listener.picks or not self._trusted):
            # indexed rows may belong to other examples than in the planning batch; user rules need a proof here, since
            # the sites may come from a file
            doubtful = unexplained(record, self.network, self.plan.sites)
            record.lost |= doubtful
            self._trusted = self._trusted or not doubtful
        return record

    def listening(self) -> AbstractContextManager[Listener]:
        """Within the context, record calls that use chosen weights, whoever runs the network."""
        return listening(self.network, self._slots, self.plan.general, self._rules)

    def record_of(self, length: int, uses: list[tuple[Call, Use]], gradients: Mapping[int, Tensor]) -> Record:
        """The record of a pass over `length` examples that was differentiated elsewhere.

        `gradients`: at the output of each call, (M, *output), by the call's id.
        """
        f = next(iter(gradients.values())).new_zeros(length, 1, 1)
        record = Record(
            (), f.shape, f, uses, set(), None, self.plan, self._per_example, self._entries, self.network.proofs
        )
        record.gradients = Given(f, record.calls, self.network.proofs, gradients)
        return record

    def _forward(self, inputs: Inputs) -> tuple[Tensor, Tensor, Listener]:
        """Raw outputs, checked outputs (B, T, C), and the listener with the recorded calls."""
        with self.listening() as listener:
            raw = self.network.call(inputs)
        length = batch_length(inputs)
        if raw.dim() == 0 or raw.shape[0] != length:
            raise DataError(
                "The network's output does not keep the batch axis",
                expected=f"{length} examples along the first axis",
                got=f"output of shape {tuple(raw.shape)} for inputs of {length} examples",
                do="pass a batch (add a first axis to a single example) to a network that keeps it",
            )
        f = self.outputs(raw)
        check_finite(f)
        if not f.requires_grad:
            raise ModelError(
                "The output does not depend on the chosen weights",
                expected="at least one chosen weight that reaches the output through differentiable operations",
                got="an output without gradient",
                do="choose other weights, or remove .detach() and no_grad from the forward pass",
            )
        return raw, f, listener

    def _find_axes(self, inputs: Inputs, f: Tensor, listener: Listener) -> list[BatchAxis | None]:
        """The axis of the examples in each recorded call; None where there is none."""
        length, calls = batch_length(inputs), listener.calls
        signature = (length, tuple((call.key, tuple(call.probe.shape)) for call in calls))
        if signature not in self._axes:
            known = None if listener.picks else self.known_axes(calls, length)
            self._axes[signature] = known or self._measure_axes(inputs, f, calls, length)
        return self._axes[signature]

    def known_axes(self, calls: list[Call], length: int) -> list[BatchAxis | None] | None:
        """The axes found on a batch of another size, if they were unique and all other axes have the same lengths."""
        known = self._located.get(tuple(call.key for call in calls))
        if known is None:
            return None
        axes: list[BatchAxis | None] = []
        for call, (axis, rest) in zip(calls, known, strict=True):
            shape = call.probe.shape
            if _without(shape, axis.dim) != rest or shape[axis.dim] != length * axis.fold:
                return None
            axes.append(axis)
        return axes

    def _measure_axes(self, inputs: Inputs, f: Tensor, calls: list[Call], length: int) -> list[BatchAxis | None]:
        """Compare with a batch of another size: the axis whose length changes holds the examples."""
        if length > 1:
            fewer = min(2, length - 1)
            _, other, listener = self._forward(take(inputs, 0, fewer))
            large, small, sizes = calls, listener.calls, (length, fewer)
            self._check_independence(f[:fewer], other)
        else:
            _, other, listener = self._forward(map_tensors(lambda x: torch.cat([x, x]), inputs))
            large, small, sizes = listener.calls, calls, (2, 1)
            self._check_independence(other[:1], f)
        if [call.key for call in large] != [call.key for call in small]:
            return [None] * len(calls)  # which layers run depends on the examples: only the general rule applies
        axes: list[BatchAxis | None] = []
        located: Located = []
        for number, (one, two) in enumerate(zip(large, small, strict=True)):
            fits = locate(one.probe, two.probe, *sizes)
            key = (number, one.key)
            # identical inputs fit several folds: prefer the one found before
            if len(fits) == 1:
                self._folds[key] = fits[0]
                located.append((fits[0], _without(one.probe.shape, fits[0].dim)))
            same = [axis for axis in fits if key in self._folds and axis.alike(self._folds[key])]
            axes.append(same[0] if same else fits[0] if fits else None)
        if len(located) == len(large):
            self._located[tuple(call.key for call in large)] = located
        if length == 1:  # the whole axis belongs to the one example
            return [
                axis and BatchAxis(axis.dim, call.probe.shape[axis.dim], 1)
                for axis, call in zip(axes, calls, strict=True)
            ]
        return axes

    @staticmethod
    def _check_independence(one: Tensor, two: Tensor) -> None:
        if one.shape != two.shape or not close(one, two):
            raise ModelError(
                "An example's output changes with the other examples in its batch",
                expected="outputs that depend on their own example only",
                got="another output for the same example in a smaller batch",
                do="use running statistics in batch norm (track_running_stats=True), and no statistics over the batch",
            )


def _alone(shape: torch.Size, axis: BatchAxis | None, length: int) -> tuple[int, ...]:
    """The shape for one example instead of `length`; unchanged if `axis` does not hold the examples here."""
    if axis is None or len(shape) <= axis.dim or shape[axis.dim] != length * axis.fold:
        return shape
    return (*shape[: axis.dim], axis.fold, *shape[axis.dim + 1 :])


def _without(shape: torch.Size, dim: int) -> torch.Size:
    return shape[:dim] + shape[dim + 1 :]
