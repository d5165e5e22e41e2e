"""Squares of per-example gradients of a loss that the user computes and backpropagates.

The tape (`curvature/tape`) runs the network itself, in evaluation mode. Here the user's own pass counts, in training
mode with its dropout, so the tape only finds and proves the plan, on a few examples, and says where the examples lie.
Then the user's forward pass is listened to, and the gradients of the backward pass are taken as they arrive at each
layer's output: from a layer's input and that gradient follow the squares, (g^2)^T (a^2) for a linear layer.

For a mean loss over B examples, those gradients are 1/B of the examples' own. Weights that no rule explains take one
backward pass for each example, through the same graph, and so with the same dropout.

Batch norm in training mode couples the examples. The gradient is then divided by *whose activations* it came through,
as in Osawa et al. (2019): the shares still add up to the gradient.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.nn.modules.batchnorm import _BatchNorm

from lapis.batches import Inputs, batch_length, tensors_in
from lapis.curvature.backward.contributions import Contribution, Outer
from lapis.curvature.plan import planned_tape
from lapis.curvature.recording.batch_axis import BatchAxis
from lapis.curvature.recording.layers import Call, Use
from lapis.curvature.recording.listener import Listener
from lapis.curvature.recording.sites import Site
from lapis.curvature.tape import Tape
from lapis.errors import ModelError
from lapis.network import Network
from lapis.optim.kernels import offer, takes_offer, with_offers
from lapis.optim.sampling import state_dtype
from lapis.proofs import rounding


@dataclass(eq=False)
class _Pass:
    """One forward pass of the model, and what its backward pass has left so far."""

    tape: Tape
    length: int
    sites: list[Site]
    """Those that rules explain."""
    earlier: list[_Pass]
    """Passes that had not been backpropagated when this one began."""
    axes: dict[int, BatchAxis | None] = field(default_factory=dict)
    """By the call's id; so are the following."""
    calls: dict[int, Call] = field(default_factory=dict)
    gradients: dict[int, Tensor] = field(default_factory=dict)
    uses: dict[int, list[Use]] = field(default_factory=dict)
    calls_of: dict[int, list[int]] = field(default_factory=dict)
    """Calls that use a site's weights, by the site's index; those of finished sites are taken out."""
    sites_of: dict[int, list[int]] = field(default_factory=dict)
    """Sites that wait for a call, by the call's id."""
    waiting: dict[int, set[int]] = field(default_factory=dict)
    """Calls of a site whose gradient has not arrived."""
    reached: bool = False
    """Whether a backward pass has come through."""
    rounding: float = 0.0
    """Of the coarsest gradient."""
    coefficients: Tensor | None = None
    """Random factors of the examples, while the pass is being proven."""
    truth: Tensor | None = None
    """Autograd's gradient of the loss with these factors, (P,)."""
    claims: Tensor | None = None
    """The same from the recorded layers."""


class Squares:
    """Sums over examples of squared gradients, from the user's own passes through a network."""

    def __init__(self, network: Network) -> None:
        self.network = network
        self._tapes: dict[Any, Tape] = {}
        """By shapes and dtypes of the inputs of one example."""
        self._proven: set[Any] = set()
        """Calls of passes whose recorded gradients added up to autograd's."""
        self._doubtful: set[str] = set()
        """Parameters whose recorded gradients did not."""
        self._reset()

    def _reset(self) -> None:
        self._passes: list[_Pass] = []
        self._sums: dict[int, Tensor] = {}
        """By the site's id."""
        self._sites: dict[int, Site] = {}
        network = self.network
        dtype = state_dtype(next(iter(network.parameters.values())))
        self._general = torch.zeros(network.size, dtype=dtype, device=network.device)
        """Squares of weights that no rule explains, (P,)."""
        self._open: tuple[ExitStack, Listener, Tape, int] | None = None
        self._depth = 0
        self._own = False
        """Whether the network runs, or is differentiated, on behalf of this class."""

    @property
    def differentiates(self) -> bool:
        """Whether the present backward pass is one of this class's own."""
        return self._own

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Within the context, passes through the network are recorded; `totals` tells what they gave."""
        self._reset()
        module = self.network.module
        handles = [
            module.register_forward_pre_hook(self.begin, with_kwargs=True),
            module.register_forward_hook(self._end, with_kwargs=True, always_call=True),
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            if self._open is not None:
                self._open[0].close()
                self._open = None

    def totals(self) -> tuple[dict[str, Tensor], int]:
        """The sum over examples of squared gradients of the loss as it was backpropagated, and how many they were."""
        reached = [each for each in self._passes if each.reached]
        for each in reached:
            if any(other.reached for other in each.earlier):
                raise ModelError(
                    "The network ran twice before the loss was backpropagated",
                    expected="one forward pass for each backward pass, with every example in one row",
                    got="gradients of two passes at once",
                    do="concatenate the inputs into one batch, or backpropagate after each pass",
                )
            for index in list(each.waiting):
                self._finish(each, index)
            self._check(each)
        total = self._general
        for key, sum_ in self._sums.items():
            site = self._sites[key]
            for slot, part, (start, stop) in zip(site.slots, site.parts(sum_), site.spans(self.network), strict=True):
                total[start:stop] += slot.restore(part)
        shaped = {name: total[self.network.span(name)].view(self.network.shapes[name]) for name in self.network.names}
        return shaped, sum(each.length for each in reached)

    # the forward pass ------------------------------------------------------------------------------

    def begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A hook before the forward pass: listen from here on."""
        if self._own or not torch.is_grad_enabled():
            return
        if self._open is not None:  # a network that calls itself
            self._depth += 1
            return
        inputs = _inputs(module, args, kwargs)
        tape = self._tape(inputs)
        stack = ExitStack()
        listener = stack.enter_context(tape.listening())
        listener.call = with_offers
        self._open = (stack, listener, tape, batch_length(inputs))

    def _tape(self, inputs: Inputs) -> Tape:
        key = tuple((tensor.shape[1:], tensor.dtype) for tensor in tensors_in(inputs))
        if key not in self._tapes:
            self._own = True
            try:
                with self.network.prepared():
                    self._tapes[key], _ = planned_tape(self.network, _flattened, inputs)
            finally:
                self._own = False
        return self._tapes[key]

    def _end(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if self._own or self._open is None:
            return
        if self._depth:
            self._depth -= 1
            return
        stack, listener, tape, length = self._open
        stack.close()
        self._open = None
        f = output if isinstance(output, Tensor) else getattr(output, "logits", None)
        if isinstance(f, Tensor) and f.requires_grad:
            self._follow(listener, tape, length, f)

    def _follow(self, listener: Listener, tape: Tape, length: int, f: Tensor) -> None:
        """Hooks at every recorded call, and at the output where it is needed."""
        calls, plan = listener.calls, tape.plan
        axes = tape.known_axes(calls, length)
        explained = axes is not None and listener.unread <= plan.general
        general = set(plan.general) | self._doubtful if explained else set(self.network.names)
        sites = [site for site in plan.sites if not any(slot.name in general for slot in site.slots)]
        general = set(self.network.names) - {slot.name for site in sites for slot in site.slots}
        current = _Pass(tape, length, sites, [each for each in self._passes if not each.reached])
        self._passes.append(current)
        for call, axis in zip(calls, axes or [None] * len(calls), strict=True):
            current.calls[id(call)], current.axes[id(call)] = call, axis
        users: dict[tuple[str, int, int], list[int]] = {}
        for call in calls:
            for slot in call.slots.values():
                users.setdefault(slot.rows, []).append(id(call))
        for index, site in enumerate(sites):
            found = list(dict.fromkeys(key for slot in site.slots for key in users.get(slot.rows, ())))
            current.calls_of[index], current.waiting[index] = found, set(found)
            for key in found:
                current.sites_of.setdefault(key, []).append(index)
        for key in current.sites_of:
            edge = current.calls[key].edge
            edge.node.register_prehook(partial(self._arrived, current, key, edge.output_nr))
        trace = (tuple(call.key for call in calls), tuple(tuple(call.output_shape[1:]) for call in calls))
        if sites and (listener.picks or trace not in self._proven):
            current.coefficients = self._factors(length, f)
            self._proven.add(trace)
        if general or current.coefficients is not None:
            f.register_hook(partial(self._at_output, current, get_gradient_edge(f), sorted(general)))  # type: ignore[no-untyped-call]

    def _factors(self, length: int, f: Tensor) -> Tensor:
        """Random factors for the proof; ones where examples are coupled, and only the sum is defined."""
        coupled = any(isinstance(layer, _BatchNorm) and layer.training for layer in self.network.module.modules())
        ones = torch.ones(length, dtype=f.dtype, device=f.device)
        return ones if coupled else ones.normal_(generator=torch.Generator(f.device).manual_seed(0))

    # the backward pass -----------------------------------------------------------------------------

    def _at_output(self, current: _Pass, edge: Any, general: list[str], gradient: Tensor) -> None:
        """Autograd's own gradients through the graph, before the user's backward pass frees it."""
        if self._own:
            return
        current.reached = True
        self._own = True
        try:
            if current.coefficients is not None:
                factors = current.coefficients.reshape(-1, *(1,) * (gradient.dim() - 1))
                current.truth = self._differentiated(edge, gradient * factors, self.network.names)
                current.claims = torch.zeros_like(current.truth)
            if general:
                for row in range(len(gradient)):
                    seed = torch.zeros_like(gradient)
                    seed[row] = gradient[row]
                    self._general += self._differentiated(edge, seed, general).square()
        finally:
            self._own = False

    def _differentiated(self, edge: Any, seed: Tensor, names: Any) -> Tensor:
        """The gradient of sum(seed * f) in some of the parameters, (P,), zero elsewhere."""
        chosen = [self.network.parameters[name] for name in names]
        found = dict(zip(names, torch.autograd.grad([edge], chosen, [seed], True, allow_unused=True), strict=True))
        return self.network.gather([found.get(name) for name in self.network.names]).to(self._general.dtype)

    def _arrived(self, current: _Pass, key: int, number: int, gradients: tuple[Tensor | None, ...]) -> None:
        gradient = gradients[number]
        if self._own or gradient is None:
            return
        current.reached = True
        if key in current.gradients or key not in current.calls:
            raise ModelError(
                "The network's outputs were backpropagated twice",
                expected="one backward pass for each forward pass",
                got="another one through the same graph",
                do="add the losses, and backpropagate their sum",
            )
        with torch.no_grad():
            current.rounding = max(current.rounding, rounding(gradient.dtype))
            current.gradients[key] = gradient.detach().to(self._general.dtype)[None]
            for index in list(current.sites_of[key]):
                current.waiting[index].discard(key)
                if not current.waiting[index]:
                    self._finish(current, index)

    def _finish(self, current: _Pass, index: int) -> None:
        """Add the squares of one site, and let go of what only it has needed."""
        site, keys = current.sites[index], current.calls_of.pop(index)
        del current.waiting[index]
        pairs, gradients = [], {}
        for key in keys:
            call = current.calls[key]
            if key not in current.gradients:  # a branch that the loss does not see
                shape = (1, *call.output_shape)
                current.gradients[key] = self._general.new_zeros(shape)
            if key not in current.uses:
                current.uses[key] = self._uses(call, current.axes[key])
            pairs += [(call, use) for use in current.uses[key]]
            gradients[key] = current.gradients[key]
        if pairs:
            record = current.tape.record_of(current.length, pairs, gradients)
            (found,) = record.contributions(record.f[None], [site])
            total = self._sums.setdefault(id(site), self._general.new_zeros(site.shape))
            self._sites[id(site)] = site
            self._add(found, total, current.calls[keys[0]].edge.node if len(keys) == 1 else None)
            if current.coefficients is not None and current.claims is not None:
                claim = found.gradient(current.coefficients.to(found.dtype)).reshape(site.shape)
                site.scatter(claim.to(current.claims.dtype), current.claims, self.network)
        for key in keys:
            current.sites_of[key].remove(index)
            if not current.sites_of[key]:
                del current.calls[key], current.gradients[key], current.uses[key]

    @staticmethod
    def _add(found: Contribution, total: Tensor, node: Any) -> None:
        """Add the squares; examples' gradients of a kernel, where they are formed, spare autograd their sum."""
        if not (isinstance(found, Outer) and found.direct is not None and takes_offer(node)):
            found.add_square_sum(total)
            return
        weights = total[..., : total.shape[-1] - int(found.bias)]
        gradient, squares = total.new_zeros(2, weights.numel())
        for _, _, jacobian, column in found.pieces():
            own, ones = jacobian.reshape(len(jacobian), -1), total.new_ones(len(jacobian))
            gradient.addmv_(own.mT, ones)
            squares.addmv_(own.square_().mT, ones)  # of a piece that is still in the cache
            if found.bias:
                total[..., -1] += column.square().sum((0, 2))
        weights += squares.view(weights.shape)
        offer(node, gradient)

    def _uses(self, call: Call, axis: BatchAxis | None) -> list[Use]:
        """What the call's rule makes of it, in the precision of the sums (inputs may be in half precision)."""
        assert axis is not None
        dtype = self._general.dtype
        arguments = {
            name: _cast(value, dtype) if isinstance(value, Tensor) else value for name, value in call.arguments.items()
        }
        probe = _cast(call.probe, dtype)
        if probe is call.probe and all(value is call.arguments[name] for name, value in arguments.items()):
            return call.rule(call, axis)
        return call.rule(replace(call, arguments=arguments, probe=probe), axis)

    def _check(self, current: _Pass) -> None:
        """Raise if the recorded layers do not add up to autograd's gradient."""
        if current.truth is None or current.claims is None:
            return
        names = {slot.name for site in current.sites for slot in site.slots}
        relative = max(current.rounding, rounding(self.network.dtype))
        floor = relative * 1e-3 * current.truth.norm()
        wrong = set()
        for name in names:
            truth, claim = current.truth[self.network.span(name)], current.claims[self.network.span(name)]
            if not bool((truth - claim).norm() <= relative * truth.norm() + floor):
                wrong.add(name)
        if wrong:
            self._doubtful |= wrong
            raise ModelError(
                f"The squares of {sorted(wrong)[0]!r} could not be read off its layers",
                expected="recorded gradients that add up to autograd's",
                got="others, since the network does something else in training mode",
                do="take the step again: these weights are differentiated example by example from now on",
            )


def _cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def _flattened(raw: Tensor) -> Tensor:
    """Any output as (B, 1, C)."""
    return raw.reshape(raw.shape[0], 1, -1)


def _inputs(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Inputs:
    """The arguments of a call, in a form that `Network.call` takes."""
    if not kwargs:
        return args
    if not args:
        return dict(kwargs)
    forward: Callable[..., Any] = module.forward
    return dict(inspect.signature(forward).bind(*args, **kwargs).arguments)
