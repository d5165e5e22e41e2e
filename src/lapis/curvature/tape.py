"""The tape: forward passes that remember how each chosen weight was used, and where the examples lay in each use."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lapis.batches import Inputs, batch_length, map_tensors, take
from lapis.curvature.axes import BatchAxis, close, locate
from lapis.curvature.general import PerExample
from lapis.curvature.layers import Call, Use
from lapis.curvature.outputs import check_finite
from lapis.curvature.record import Record, Way
from lapis.curvature.recorder import MODULE_RULES, Recorder, listening
from lapis.curvature.sites import Site, whole
from lapis.errors import DataError, ModelError
from lapis.network import Network


class ExampleBytes(NamedTuple):
    """Memory that one example takes."""

    inputs: int
    """What all layers take in."""
    most: int
    """What the layer with most takes in."""
    summed: int
    """The same, when only moments of it are asked for."""
    gradients: int
    """Gradients for each seed."""


Places = list[tuple[BatchAxis, torch.Size]]


class Tape:
    """Records batches of one network. `outputs` turns the raw output into (B, T, C)."""

    def __init__(self, network: Network, outputs: Callable[[Tensor], Tensor]) -> None:
        self.network = network
        self.outputs = outputs
        self._slots = {id(parameter): whole(network, name) for name, parameter in network.parameters.items()}
        self.sites: list[Site] = []
        self.general: frozenset[str] = frozenset()
        self.example_bytes = ExampleBytes(0, 0, 0, 0)
        self._axes: dict[Any, list[BatchAxis | None]] = {}
        self._folds: dict[Any, BatchAxis] = {}
        self.sure: dict[Any, Places] = {}
        """By the calls of a pass: where the examples lay beyond doubt, and how long the other axes were."""
        self.before: Mapping[Any, Places] = {}
        """The same of an earlier tape of the same module."""
        self.batchable = True
        self.way: Way = "together"
        """How the seeds of the latest record go back."""
        self.proven: set[torch.Size] = set()
        """Numbers of seeds and examples for which sending all seeds back at once was checked."""
        self.ahead: Record | None = None
        """The record of a batch that was run before its turn."""
        self.per_example = PerExample(network, outputs)
        self.rules = dict(MODULE_RULES)
        """Rules of the user's own, as they are now: those registered later have no proof for this network."""
        self.trusted = not self.rules

    def record(self, inputs: Inputs) -> Record:
        """Run the network forward; must be called, and the record used, inside `network.prepared()`."""
        ahead, self.ahead = self.ahead, None
        if ahead is not None and ahead.inputs is inputs:
            return ahead
        raw, f, recorder = self._forward(inputs)
        axes = self._find_axes(inputs, f, recorder)
        uses: list[tuple[Call, Use]] = []
        lost = set(recorder.unread)
        for call, axis in zip(recorder.calls, axes, strict=True):
            found = call.rule(call, axis) if axis is not None else []
            uses += [(call, use) for use in found]
            read = {slot.rows for use in found for slot in (use.weight, use.bias) if slot is not None}
            lost |= {slot.name for slot in call.slots.values() if slot.rows not in read}
        trace = None
        if self.trusted and not recorder.picks:
            length = batch_length(inputs)
            shapes = [
                (_alone(call.probe.shape, axis, length), _alone(call.output_shape, axis, length))
                for call, axis in zip(recorder.calls, axes, strict=True)
            ]
            trace = ([call.key for call in recorder.calls], axes, shapes, f.dtype, frozenset(lost))
        record = Record(self, inputs, raw.shape, f, uses, lost, trace)
        self.way = record.way
        if self.sites and (recorder.picks or not self.trusted):  # rules are proven for sites read from a file, too
            unexplained = record.unexplained(self.sites)
            record.lost |= unexplained
            self.trusted = self.trusted or not unexplained
        return record

    def _forward(self, inputs: Inputs) -> tuple[Tensor, Tensor, Recorder]:
        with listening(self.network, self._slots, self.general, self.rules) as recorder:
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
        return raw, f, recorder

    def _find_axes(self, inputs: Inputs, f: Tensor, recorder: Recorder) -> list[BatchAxis | None]:
        length, calls = batch_length(inputs), recorder.calls
        signature = (length, tuple((call.key, tuple(call.probe.shape)) for call in calls))
        if signature not in self._axes:
            known = None
            if not recorder.picks:
                known = _known_axes(self.sure, calls, length) or self._as_before(inputs, f, calls, length)
            self._axes[signature] = known or self._measure_axes(inputs, f, calls, length)
        return self._axes[signature]

    def _as_before(self, inputs: Inputs, f: Tensor, calls: list[Call], length: int) -> list[BatchAxis | None] | None:
        """Those of an earlier tape, where no other axis is as long as there are examples, and none is folded.

        Whether the examples see each other is asked anew.
        """
        key = tuple(call.key for call in calls)
        axes = _known_axes(self.before, calls, length)
        if axes is None or length < 2 or any(length in rest or axis.fold > 1 for axis, rest in self.before[key]):
            return None
        few = min(2, length - 1)
        with torch.no_grad():
            self._check_independence(f[:few], self.outputs(self.network.call(take(inputs, 0, few))))
        self.sure[key] = self.before[key]
        return axes

    def _measure_axes(self, inputs: Inputs, f: Tensor, calls: list[Call], length: int) -> list[BatchAxis | None]:
        """Compare with a batch of another size: the axis whose length changes holds the examples."""
        if length > 1:
            fewer = min(2, length - 1)
            _, other, recorder = self._forward(take(inputs, 0, fewer))
            large, small, sizes = calls, recorder.calls, (length, fewer)
            self._check_independence(f[:fewer], other)
        else:
            _, other, recorder = self._forward(map_tensors(lambda x: torch.cat([x, x]), inputs))
            large, small, sizes = recorder.calls, calls, (2, 1)
            self._check_independence(other[:1], f)
        if [call.key for call in large] != [call.key for call in small]:
            return [None] * len(calls)  # which layers run depends on the examples: only the general rule can tell
        axes: list[BatchAxis | None] = []
        sure: Places = []
        for number, (one, two) in enumerate(zip(large, small, strict=True)):
            fits = locate(one.probe, two.probe, *sizes)
            key = (number, one.key)
            # inputs that are all alike fit several folds: then the one seen before counts
            if len(fits) == 1:
                self._folds[key] = fits[0]
                sure.append((fits[0], _without(one.probe.shape, fits[0].dim)))
            same = [axis for axis in fits if key in self._folds and axis.alike(self._folds[key])]
            axes.append(same[0] if same else fits[0] if fits else None)
        if len(sure) == len(large):
            self.sure[tuple(call.key for call in large)] = sure
        if length == 1:  # nothing to tell apart: all of the axis belongs to the one example
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


def _known_axes(places: Mapping[Any, Places], calls: list[Call], length: int) -> list[BatchAxis | None] | None:
    """Those of another batch size, where they were beyond doubt and all other axes are as long as then."""
    known = places.get(tuple(call.key for call in calls))
    if known is None:
        return None
    axes: list[BatchAxis | None] = []
    for call, (axis, rest) in zip(calls, known, strict=True):
        shape = call.probe.shape
        if _without(shape, axis.dim) != rest or shape[axis.dim] != length * axis.fold:
            return None
        axes.append(axis)
    return axes


def _alone(shape: torch.Size, axis: BatchAxis | None, length: int) -> tuple[int, ...]:
    """The shape that one of `length` examples would have; as it is where they lie elsewhere."""
    if axis is None or len(shape) <= axis.dim or shape[axis.dim] != length * axis.fold:
        return shape
    return (*shape[: axis.dim], axis.fold, *shape[axis.dim + 1 :])


def _without(shape: torch.Size, dim: int) -> torch.Size:
    return shape[:dim] + shape[dim + 1 :]
