"""Intercepting a forward pass: every call of a function with a rule, and every module with a rule of the user's own.

Torch functions are intercepted rather than modules, so that weights are seen however they are used: through their
module, through functional calls, tied, or inside attention.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.overrides import TorchFunctionMode

from lapis.batches import map_tensors
from lapis.curvature.recording.batch_axis import BatchAxis
from lapis.curvature.recording.functions import RULES, bind
from lapis.curvature.recording.layers import Call, RowsUse, Use
from lapis.curvature.recording.pooling import quickly_pooled
from lapis.curvature.recording.sites import Slot, whole
from lapis.errors import ModelError
from lapis.network import Network
from lapis.options import check_arguments
from lapis.proofs import Proofs

ModuleRule = Callable[[nn.Module, tuple[Any, ...], Tensor], dict[str, Tensor]]
"""(module, inputs, gradients (M, B, *output)) -> per-example gradients (M, B, *parameter) by parameter name."""

PICKING = frozenset({"__getitem__", "index_select", "masked_select", "gather", "take", "take_along_dim", "index_put_"})
"""Functions that can pick rows by an index that depends on the data."""

WEIGHTS = ("input", "weight", "bias", "other")
"""Arguments that can be chosen weights."""

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
    check_arguments(register_rule, locals())

    def register(rule: ModuleRule) -> ModuleRule:
        MODULE_RULES[kind] = rule
        return rule

    return register


class Listener(TorchFunctionMode):
    """Records every call of a function in RULES that has a chosen weight among its arguments."""

    def __init__(self, slots: Mapping[int, Slot], claimed: frozenset[str], proofs: Proofs) -> None:
        """`slots`: the slot of each whole parameter, by the tensor's id; `claimed`: parameters to leave out."""
        super().__init__()
        self._proofs = proofs
        self._slots = {key: slot for key, slot in slots.items() if slot.name not in claimed}
        self.calls: list[Call] = []
        self.unread: set[str] = set()
        """Parameters that some function without a rule took."""
        self.picks = False
        """Whether rows were picked by an index: which example they belong to may then change from batch to batch."""
        self._expanded: dict[int, Tensor] = {}
        self.call: Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any] = _called
        """How functions with a rule are called; another function in its place must compute the same."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in RULES:
            return self._observe(func, args, kwargs)
        if func is F.max_pool2d and (pooled := quickly_pooled(self._proofs, *args, **kwargs)) is not None:
            return pooled
        if func is F.multi_head_attention_forward:
            with self._listening_to_linear():
                return func(*args, **kwargs)
        output = func(*args, **kwargs)
        self._note_unread(args, kwargs, output)
        if getattr(func, "__name__", "") in PICKING:
            self.picks = True
        return output

    def _note_unread(self, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """Note chosen weights that a function without a rule took, unless it only made a view of them."""
        for tensor in _members((*args, *kwargs.values())):
            base = tensor if id(tensor) in self._slots else tensor._base
            if base is None or id(base) not in self._slots or id(tensor) in self._expanded:
                continue
            if any(out.requires_grad and out._base is not base for out in _members((output,))):
                self.unread.add(self._slots[id(base)].name)

    @contextmanager
    def _listening_to_linear(self) -> Iterator[None]:
        """Record `F.linear` inside torch's attention function too, which would otherwise be a single opaque call."""
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
            name: slot for name in WEIGHTS if name in arguments and (slot := self._resolve(arguments[name])) is not None
        }
        probe = arguments["input"] if "input" not in slots else arguments.get("other")
        output = self.call(function, args, kwargs)
        if slots and isinstance(output, Tensor) and output.requires_grad:
            if probe is None and function is torch.Tensor.expand:
                probe = self._expanded[id(output)] = output
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
        """The slot that a tensor is: a whole chosen parameter, or some of its rows, as attention slices them."""
        if not isinstance(tensor, Tensor) or id(tensor) in self._expanded:
            return None
        if id(tensor) in self._slots:
            return self._slots[id(tensor)]
        base = tensor._base
        if base is None or id(base) not in self._slots:
            return None
        if base.dim() == 0 or tensor.shape[1:] != base.shape[1:] or tensor.stride() != base.stride():
            return None
        start = (tensor.storage_offset() - base.storage_offset()) // max(base.stride(0), 1)
        stop = start + tensor.shape[0]
        return Slot(self._slots[id(base)].name, start, stop, (tensor.numel(),), (0,), (tensor.numel(),))


def _called(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return function(*args, **kwargs)


def _members(values: tuple[Any, ...]) -> Iterator[Tensor]:
    """Tensors among the values, and in lists and tuples among them."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _members(tuple(value))


def _detached(arguments: dict[str, Any]) -> dict[str, Any]:
    return {name: value.detach() if isinstance(value, Tensor) else value for name, value in arguments.items()}


@contextmanager
def listening(
    network: Network,
    slots: Mapping[int, Slot],
    ignored: frozenset[str],
    rules: Mapping[type[nn.Module], ModuleRule],
) -> Iterator[Listener]:
    """Within the context, record calls that use chosen weights, except `ignored` ones.

    `slots`: the slot of each whole parameter, by the tensor's id.
    """
    named = network.module.named_modules() if rules else ()
    modules = [(f"{path}." if path else "", module) for path, module in named if type(module) in rules]
    own = {
        prefix: [
            name
            for name, _ in module.named_parameters(recurse=False)
            if prefix + name in network.parameters and prefix + name not in ignored
        ]
        for prefix, module in modules
    }
    claimed = frozenset(prefix + name for prefix, names in own.items() for name in names)
    listener = Listener(slots, ignored | claimed, network.proofs)
    with ExitStack() as stack:
        for prefix, module in modules:
            if own[prefix]:
                taken = {name: whole(network, prefix + name) for name in own[prefix]}
                handle = module.register_forward_hook(_hook(rules[type(module)], taken, listener.calls))
                stack.callback(handle.remove)
        stack.enter_context(listener)
        yield listener


def _hook(rule: ModuleRule, slots: dict[str, Slot], calls: list[Call]) -> Callable[..., None]:
    """A forward hook that records the call of a module with a rule of the user's own."""

    def hook(module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        if not (isinstance(output, Tensor) and output.requires_grad and inputs and isinstance(inputs[0], Tensor)):
            return
        arguments = {"module": module, "inputs": map_tensors(Tensor.detach, inputs)}
        edge = get_gradient_edge(output)
        calls.append(Call(rule, _module_uses, arguments, slots, output.shape, edge, inputs[0].detach()))

    return hook


def _module_uses(call: Call, axis: BatchAxis) -> list[Use]:
    if not axis.trivial:
        return []

    def rows_of(name: str) -> Callable[[Tensor], Tensor]:
        def rows(raw: Tensor) -> Tensor:
            with torch.no_grad():
                gradients = call.function(call.arguments["module"], call.arguments["inputs"], raw)
            values = gradients.get(name) if isinstance(gradients, dict) else None
            wanted = (*raw.shape[:2], call.slots[name].size)
            if not isinstance(values, Tensor) or values.shape[:2] != wanted[:2] or values.numel() != math.prod(wanted):
                raise ModelError(
                    f"The registered rule for {type(call.arguments['module']).__name__} does not fit",
                    expected=f"a dictionary whose {name!r} has shape {wanted[:2]} + the parameter's",
                    got=f"shape {tuple(values.shape)}" if isinstance(values, Tensor) else f"{type(values).__name__}",
                    do="return the gradient of every seed and example for each of the module's own parameters",
                )
            return values.reshape(wanted)

        return rows

    return [RowsUse(slot, rows_of(name)) for name, slot in call.slots.items()]
