"""The tape: one forward pass that remembers how each chosen weight was used, then gradients at those uses for any seeds.

For every use the data enter only through the layer's input and the gradients of a few scalar seeds with respect to its
output; the tape turns these into `contributions`, one for each site. It listens to torch functions, so it sees tied
weights, functional calls and the projections inside attention; where the examples lie among a tensor's axes is measured
by running a second, smaller batch.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.overrides import TorchFunctionMode

from lapis.batches import Inputs, batch_length, map_tensors, take
from lapis.curvature import general
from lapis.curvature.contributions import Contribution, Lookup, Outer, Rows
from lapis.curvature.layers import (
    RULES,
    BatchAxis,
    Call,
    LookupUse,
    OuterUse,
    RowsUse,
    Use,
    bind,
)
from lapis.curvature.sites import Site, Slot
from lapis.errors import DataError, ModelError
from lapis.network import Network

ModuleRule = Callable[[nn.Module, tuple[Any, ...], Tensor], dict[str, Tensor]]
"""(module, inputs, gradients (M, B, *output)) -> per-example gradients (M, B, *parameter) by parameter name."""

MODULE_RULES: dict[type[nn.Module], ModuleRule] = {}


def register_rule(kind: type[nn.Module]) -> Callable[[ModuleRule], ModuleRule]:
    """Teach Lapis a layer: a function from the layer's inputs and output-gradients to its weights' gradients.

    The rule gets the module, its positional inputs, and gradients (M, B, *output shape) for M seeds and B examples; it
    returns, for each of the module's own parameters, the gradient of each seed and example, (M, B, *parameter shape).
    Every network is checked against autograd when it is first seen, so a wrong rule is noticed and not used.

    >>> import lapis, torch
    >>> class Scale(torch.nn.Module):
    ...     def __init__(self, width):
    ...         super().__init__()
    ...         self.log_scale = torch.nn.Parameter(torch.zeros(width))
    ...     def forward(self, x):
    ...         return x * self.log_scale.exp()
    >>> @lapis.register_rule(Scale)
    ... def scale_rule(module, inputs, gradients):
    ...     return {"log_scale": gradients * inputs[0] * module.log_scale.exp()}
    """

    def register(rule: ModuleRule) -> ModuleRule:
        MODULE_RULES[kind] = rule
        return rule

    return register


class Recorder(TorchFunctionMode):
    """Notes every call of a function in RULES that has a chosen weight among its arguments."""

    def __init__(self, network: Network, claimed: frozenset[str]) -> None:
        super().__init__()
        self.names = {id(p): name for name, p in network.parameters.items() if name not in claimed}
        self.calls: list[Call] = []

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.multi_head_attention_forward:
            with self._listening_to_linear():
                return func(*args, **kwargs)
        return self._observe(func, args, kwargs) if func in RULES else func(*args, **kwargs)

    @contextmanager
    def _listening_to_linear(self) -> Iterator[None]:
        """Attention projects with `linear` inside one opaque function; listen there too."""
        original = F.linear

        def linear(*args: Any, **kwargs: Any) -> Any:
            return self._observe(original, args, kwargs)

        F.linear = linear
        try:
            yield
        finally:
            F.linear = original

    def _observe(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        signature, rule = RULES[function]
        arguments = bind(signature, args, kwargs)
        slots = {
            name: slot
            for name in ("input", "weight", "bias", "other")
            if (slot := self._resolve(arguments.get(name))) is not None
        }
        probe = arguments["input"] if "input" not in slots else arguments.get("other")
        output = function(*args, **kwargs)
        if slots and isinstance(output, Tensor) and output.requires_grad:
            if probe is None and function is torch.Tensor.expand:
                probe = output
            if isinstance(probe, Tensor):
                self.calls.append(
                    Call(
                        function,
                        rule,
                        _detached(arguments),
                        slots,
                        output.shape,
                        get_gradient_edge(output),
                        probe.detach(),
                    )
                )
        return output

    def _resolve(self, tensor: Any) -> Slot | None:
        """The chosen weights that a tensor is: a whole parameter, or some of its rows (as attention cuts them)."""
        if not isinstance(tensor, Tensor):
            return None
        base = tensor
        if id(tensor) not in self.names:
            if tensor._base is None or id(tensor._base) not in self.names:
                return None
            base = tensor._base
            if base.dim() == 0 or tensor.shape[1:] != base.shape[1:] or tensor.stride() != base.stride():
                return None
        row = base.stride(0) if base.dim() else 1
        start = (tensor.storage_offset() - base.storage_offset()) // max(row, 1)
        stop = start + (tensor.shape[0] if tensor.dim() else 1)
        return Slot(self.names[id(base)], start, stop, (tensor.numel(),), (0,), (tensor.numel(),))


def _detached(arguments: dict[str, Any]) -> dict[str, Any]:
    return {name: value.detach() if isinstance(value, Tensor) else value for name, value in arguments.items()}


class Tape:
    """Records batches of one network. `outputs` turns the raw output into (B, T, C)."""

    def __init__(self, network: Network, outputs: Callable[[Tensor], Tensor]) -> None:
        self.network = network
        self.outputs = outputs
        self.sites: list[Site] = []
        self.general: frozenset[str] = frozenset()
        self.example_bytes = (0, 0)
        """Memory that one example's inputs take, and its gradients for each seed."""
        self._axes: dict[Any, list[BatchAxis | None]] = {}
        self.batchable = True
        self.proven: set[torch.Size] = set()
        """Numbers of seeds and examples for which sending all seeds back at once was checked."""
        self.per_example = general.PerExample(network, outputs)
        self._ruled = [
            (f"{path}." if path else "", module, MODULE_RULES[type(module)])
            for path, module in network.module.named_modules()
            if type(module) in MODULE_RULES
        ]
        self.claimed = frozenset(
            prefix + name
            for prefix, module, _ in self._ruled
            for name, _ in module.named_parameters(recurse=False)
            if prefix + name in network.parameters
        )

    def record(self, inputs: Inputs) -> Record:
        """Run the network forward; must be called, and the record used, inside `network.prepared()`."""
        raw, f, calls = self._forward(inputs)
        axes = self._find_axes(inputs, f, calls)
        uses: list[tuple[Call, Use]] = []
        lost: set[str] = set()
        for call, axis in zip(calls, axes, strict=True):
            found = call.rule(call, axis) if axis is not None else []
            uses += [(call, use) for use in found]
            if not found:
                lost |= {slot.name for slot in call.slots.values()}
        return Record(self, inputs, raw.shape, f, uses, frozenset(lost))

    def _forward(self, inputs: Inputs) -> tuple[Tensor, Tensor, list[Call]]:
        recorder = Recorder(self.network, self.claimed | self.general)
        handles = [self._listen(prefix, module, rule, recorder) for prefix, module, rule in self._ruled]
        try:
            with recorder:
                raw = self.network.call(inputs)
        finally:
            for handle in handles:
                handle.remove()
        length = batch_length(inputs)
        if raw.dim() == 0 or raw.shape[0] != length:
            raise DataError(
                "The network's output does not keep the batch axis",
                expected=f"{length} examples along the first axis",
                got=f"output of shape {tuple(raw.shape)} for inputs of {length} examples",
                do="pass a batch (add a first axis to a single example) to a network that keeps it",
            )
        f = self.outputs(raw)
        if not f.requires_grad:
            raise ModelError(
                "The output does not depend on the chosen weights",
                expected="at least one chosen weight that reaches the output through differentiable operations",
                got="an output without gradient",
                do="choose other weights, or remove .detach() and no_grad from the forward pass",
            )
        return raw, f, recorder.calls

    def _listen(self, prefix: str, module: nn.Module, rule: ModuleRule, recorder: Recorder) -> Any:
        """Record a module that has a rule of the user's own."""
        names = [name for name, _ in module.named_parameters(recurse=False) if prefix + name in self.claimed]
        shapes = {name: self.network.shapes[prefix + name] for name in names}

        def uses(call: Call, axis: BatchAxis) -> list[Use]:
            def rows(raw: Tensor, name: str) -> Tensor:
                return rule(module, call.arguments["inputs"], raw)[name].flatten(2)

            if not axis.trivial:
                return []
            return [RowsUse(slot, lambda raw, name=name: rows(raw, name)) for name, slot in call.slots.items()]  # type: ignore[misc]

        def hook(_module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
            if isinstance(output, Tensor) and output.requires_grad and isinstance(inputs[0], Tensor):
                slots = {}
                for name in names:
                    size = int(torch.Size(shapes[name]).numel())
                    slots[name] = Slot(prefix + name, 0, shapes[name][0] if shapes[name] else 1, (size,), (0,), (size,))
                detached = map_tensors(Tensor.detach, inputs)
                edge = get_gradient_edge(output)
                recorder.calls.append(
                    Call(rule, uses, {"inputs": detached}, slots, output.shape, edge, inputs[0].detach())
                )

        return module.register_forward_hook(hook)

    # where the examples are ---------------------------------------------------------------------------------------------

    def _find_axes(self, inputs: Inputs, f: Tensor, calls: list[Call]) -> list[BatchAxis | None]:
        length = batch_length(inputs)
        signature = (length, tuple((call.key, tuple(call.probe.shape)) for call in calls))
        if signature not in self._axes:
            self._axes[signature] = self._measure_axes(inputs, f, calls, length)
        return self._axes[signature]

    def _measure_axes(self, inputs: Inputs, f: Tensor, calls: list[Call], length: int) -> list[BatchAxis | None]:
        """Compare with a batch of another size: the axis whose length changes holds the examples."""
        if length > 1:
            fewer = min(2, length - 1)
            _, other, small = self._forward(take(inputs, 0, fewer))
            large, sizes = calls, (length, fewer)
            self._check_independence(f[:fewer], other)
        else:
            _, other, large = self._forward(map_tensors(lambda x: torch.cat([x, x]), inputs))
            small, sizes = calls, (2, 1)
            self._check_independence(other[:1], f)
        if [call.key for call in large] != [call.key for call in small]:
            raise ModelError(
                "The network takes another path for another batch size",
                expected="the same layers, whatever the number of examples",
                got=f"{len(large)} uses of weights with {sizes[0]} examples, {len(small)} with {sizes[1]}",
                do="make the forward pass independent of the batch size",
            )
        axes = [_locate(one.probe, two.probe, *sizes) for one, two in zip(large, small, strict=True)]
        if length == 1:  # nothing to tell apart: all of the axis belongs to the one example
            return [
                axis and BatchAxis(axis.dim, call.probe.shape[axis.dim], 1)
                for axis, call in zip(axes, calls, strict=True)
            ]
        return axes

    @staticmethod
    def _check_independence(one: Tensor, two: Tensor) -> None:
        if one.shape != two.shape or not _close(one, two):
            raise ModelError(
                "An example's output changes with the other examples in its batch",
                expected="outputs that depend on their own example only",
                got="another output for the same example in a smaller batch",
                do="use running statistics in batch norm (track_running_stats=True), and no statistics over the batch",
            )


class Record:
    """One batch on the tape: outputs `f` (B, T, C) and the uses of the chosen weights."""

    def __init__(
        self,
        tape: Tape,
        inputs: Inputs,
        raw_shape: torch.Size,
        f: Tensor,
        uses: list[tuple[Call, Use]],
        lost: frozenset[str],
    ) -> None:
        self.tape, self.inputs, self.raw_shape, self.f, self.uses = tape, inputs, raw_shape, f, uses
        self.lost = lost
        """Parameters with a use in this batch that no rule could read."""
        self.calls = list({id(call): call for call, _ in uses}.values())
        self._inputs: dict[int, Tensor] = {}

    def __len__(self) -> int:
        return self.f.shape[0]

    def batched(self) -> bool:
        """Whether to send all seeds back at once: it wins where layers are matrix products, loses on convolutions."""
        return self.tape.batchable and not any("conv" in getattr(call.function, "__name__", "") for call in self.calls)

    def gradients(self, seeds: Tensor) -> dict[int, Tensor]:
        """Gradients of sum(seed * f) at each call's output, (M, *output), by id of the call. `seeds`: (M, B, T, C)."""
        if not self.calls:
            return {}
        edges = [call.edge for call in self.calls]
        found: Sequence[Tensor | None]
        if len(seeds) > 1 and self.batched():
            batched = self._batched_gradients(edges, seeds)
            if batched is not None:
                return self._by_call(batched, len(seeds))
            self.tape.batchable = False
        each = [torch.autograd.grad(self.f, edges, seed, retain_graph=True, allow_unused=True) for seed in seeds]
        found = [
            None if parts[0] is None else (parts[0][None] if len(parts) == 1 else torch.stack(parts))
            for parts in zip(*each, strict=True)
        ]
        return self._by_call(found, len(seeds))

    def _batched_gradients(self, edges: list[Any], seeds: Tensor) -> Sequence[Tensor | None] | None:
        """All seeds at once; None if an operator cannot, or (as some do, silently) gives wrong results."""
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message=".*batching rule.*")
                found: Sequence[Tensor | None] = torch.autograd.grad(
                    self.f, edges, seeds, retain_graph=True, allow_unused=True, is_grads_batched=True
                )
        except RuntimeError:
            return None
        if seeds.shape[:2] not in self.tape.proven:
            mix = torch.linspace(-1, 1, len(seeds) + 1, dtype=seeds.dtype, device=seeds.device)[1:]
            mixed = torch.einsum("m,mbtc->btc", mix, seeds)
            truth = torch.autograd.grad(self.f, edges, mixed, retain_graph=True, allow_unused=True)
            for one, many in zip(truth, found, strict=True):
                if one is not None and many is not None and not _close(one, torch.einsum("m,m...->...", mix, many)):
                    return None
            self.tape.proven.add(seeds.shape[:2])
        return found

    def _by_call(self, found: Sequence[Tensor | None], seeds: int) -> dict[int, Tensor]:
        return {
            id(call): self.f.new_zeros(seeds, *call.output_shape) if gradient is None else gradient
            for call, gradient in zip(self.calls, found, strict=True)
        }

    def contributions(self, seeds: Tensor, sites: Sequence[Site] | None = None) -> list[Contribution]:
        """What the batch says about each site's weights, for `seeds` (M, B, T, C)."""
        sites = self.tape.sites if sites is None else sites
        gradients = self.gradients(seeds)
        uses = [self._uses(site) for site in sites]
        # what only the general rule can do: always, or in this batch (a layer that sees some of the examples, or none)
        loose = [not found or not self._clear(site) for site, found in zip(sites, uses, strict=True)]
        names = {slot.name for site, is_loose in zip(sites, loose, strict=True) if is_loose for slot in site.slots}
        rows = self.tape.per_example.rows(self.inputs, sorted(names), seeds) if names else {}
        return [
            self._general(site, rows) if is_loose else self._contribution(site, found, gradients)
            for site, found, is_loose in zip(sites, uses, loose, strict=True)
        ]

    def _clear(self, site: Site) -> bool:
        return not any(slot.name in self.lost for slot in site.slots)

    def _uses(self, site: Site) -> list[tuple[Call, Use]]:
        wanted = {slot.rows for slot in site.slots}
        return [
            (call, use) for call, use in self.uses if wanted & {s.rows for s in (use.weight, use.bias) if s is not None}
        ]

    def _general(self, site: Site, rows: dict[str, Tensor]) -> Rows:
        """Rows of the general rule in the site's order."""
        parts = []
        for slot in site.slots:
            shape = self.tape.network.shapes[slot.name]
            row = int(torch.Size(shape[1:]).numel())
            parts.append(slot.arrange(rows[slot.name][..., slot.start * row : slot.start * row + slot.size]))
        return Rows((parts[0] if len(parts) == 1 else torch.cat(parts, -1)).flatten(2))

    def _contribution(self, site: Site, chosen: list[tuple[Call, Use]], gradients: dict[int, Tensor]) -> Contribution:
        wanted = {slot.rows for slot in site.slots}
        if site.kind == "outer":
            return self._outer(site, [(use, gradients[id(call)]) for call, use in chosen if isinstance(use, OuterUse)])
        if site.kind == "lookup":
            return self._lookup([(use, gradients[id(call)]) for call, use in chosen if isinstance(use, LookupUse)])
        return Rows(torch.stack([self._rows(use, gradients[id(call)], wanted) for call, use in chosen]).sum(0))

    def _outer(self, site: Site, uses: list[tuple[OuterUse, Tensor]]) -> Outer:
        g = _joined([use.gradient(raw) for use, raw in uses], -1)
        key = id(site)
        if key not in self._inputs:
            if site.weight is None:
                a = g.new_ones(g.shape[1], g.shape[2], g.shape[4], 1)
            else:
                a = _joined([use.inputs() for use, _ in uses], 2)
                if site.bias is not None:
                    a = F.pad(a, (0, 1), value=1.0)
            self._inputs[key] = a
        return Outer(self._inputs[key], g)

    @staticmethod
    def _lookup(uses: list[tuple[LookupUse, Tensor]]) -> Lookup:
        parts = []
        for use, raw in uses:
            g = use.gradient(raw)
            parts.append(g if use.padding is None else g * (use.index != use.padding)[:, None].to(g.dtype))
        first = uses[0][0]
        index = _joined([use.index for use, _ in uses], 1)
        return Lookup(index, _joined(parts, -1), first.entries, first.padding)

    def _rows(self, use: Use, raw: Tensor, wanted: set[tuple[str, int, int]]) -> Tensor:
        """Rows of one use in the parameter's own order."""
        if isinstance(use, RowsUse):
            return use.rows(raw)
        if isinstance(use, LookupUse):
            return use.weight.restore(self._lookup([(use, raw)]).rows().unflatten(-1, use.weight.shape))
        g = use.gradient(raw)
        if use.weight is not None and use.weight.rows in wanted:
            return use.weight.restore(Outer(use.inputs(), g).rows().unflatten(-1, use.weight.shape))
        assert use.bias is not None
        return g.sum(-1).flatten(2)


def _joined(parts: list[Tensor], dim: int) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def _close(one: Tensor, two: Tensor) -> bool:
    if not one.is_floating_point():
        return torch.equal(one, two)
    tolerance = 1e-3 if one.dtype != torch.float64 else 1e-8
    scale = torch.maximum(one.abs().max(), two.abs().max()) if one.numel() else one.new_zeros(())
    return bool(((one - two).abs() <= tolerance * scale + torch.finfo(one.dtype).tiny).all())


def _locate(large: Tensor, small: Tensor, many: int, few: int) -> BatchAxis | None:
    """Which axis holds `many` examples in `large` and the first `few` of them in `small`, and how it is folded."""
    if large.dim() != small.dim():
        return None
    differing = [dim for dim in range(large.dim()) if large.shape[dim] != small.shape[dim]]
    if len(differing) != 1:
        return None
    dim = differing[0]
    if large.shape[dim] % many or large.shape[dim] * few != small.shape[dim] * many:
        return None
    fold = large.shape[dim] // many
    for before in (n for n in range(1, fold + 1) if fold % n == 0):
        axis = BatchAxis(dim, before, fold // before)
        if _close(axis.unfold(large)[:few], axis.unfold(small)):
            return axis
    return None
