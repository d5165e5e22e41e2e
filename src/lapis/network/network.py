"""A torch module as a function of its chosen weights: their layout in a flat vector, and calls of the module.

Flat vectors order the chosen weights as `module.named_parameters()` does; a tied parameter occurs once. A parameter
that is chosen in part contributes its chosen entries only, in ascending order.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from lapis.batches import Inputs, all_finite, describe
from lapis.errors import DataError, ModelError, OptionError
from lapis.hashing import hash_tensors
from lapis.network.calling import arguments, first_line, output_tensor
from lapis.network.choice import Weights, choose
from lapis.network.flat import check_in_memory, flat_gradient, split_vector
from lapis.network.last_layer import last_layer
from lapis.network.locking import held
from lapis.network.untouched import (
    PlainFunctions,
    differentiating,
    evaluating,
    keep_freed_memory,
    without_gradient_hooks,
)
from lapis.network.wrappers import unwrapped
from lapis.options import check_arguments
from lapis.proofs import Proofs

CALL_ERRORS = (RuntimeError, TypeError, ValueError, LookupError, AttributeError, AssertionError)
"""Raised by modules on inputs that they were not made for."""


class Network:
    """A module and the weights that are uncertain; all others are constants."""

    def __init__(self, module: nn.Module, weights: Weights = "all", example: Inputs | None = None) -> None:
        if not isinstance(module, nn.Module):
            raise ModelError(
                "This is no network",
                expected="a torch.nn.Module",
                got=type(module).__name__,
                do="pass the module",
            )
        inner = unwrapped(module)
        with held(inner):  # another thread may have changed flags
            self._begin(inner, weights, example)

    def _begin(self, module: nn.Module, weights: Weights, example: Inputs | None) -> None:
        self.module = module
        self.example = example
        """A few inputs, for properties that only a forward pass reveals."""
        self.signature: str | None = None
        """Shapes and dtypes of inputs that are known to work, for error messages."""
        self.example_bytes: dict[str, tuple[int, int]] = {}
        """Bytes that the graph of one example holds, and of its output, by the example's shapes, where measured."""
        self.proofs = Proofs()
        """Records which shortcuts agree with the plain computation on this network."""
        self._prepared = False
        self._casts = True  # whether the forward pass uses autocast, for all that is known
        trainable = {name: p for name, p in module.named_parameters() if p.requires_grad}
        lazy = [name for name, p in trainable.items() if torch.nn.parameter.is_lazy(p)]
        if lazy:
            raise ModelError(
                f"The network's {lazy[0]!r} has no shape yet",
                expected="weights that exist",
                got="a lazy layer that has never run",
                do="run the network once, and train it",
            )
        trainable = {name: p for name, p in trainable.items() if p.numel()}
        if not trainable:
            raise ModelError(
                "The network has no trainable weights",
                expected="parameters with requires_grad=True",
                got="none",
                do="unfreeze the weights that are to be uncertain",
            )
        chosen = choose(module, weights, trainable, partial(self._last_layer, example))
        self.names: tuple[str, ...] = tuple(chosen)
        self.parameters: dict[str, Tensor] = {name: trainable[name] for name in self.names}
        """The parameters that hold chosen weights."""
        self.indices: dict[str, Tensor] = {name: index for name, index in chosen.items() if index is not None}
        """Flat indices of the chosen entries, for parameters that are chosen in part."""
        self.shapes: dict[str, tuple[int, ...]] = {name: tuple(p.shape) for name, p in self.parameters.items()}
        self.sizes: dict[str, int] = {
            name: len(self.indices[name]) if name in self.indices else p.numel() for name, p in self.parameters.items()
        }
        """Number of chosen entries of each parameter."""
        self.offsets: dict[str, int] = {}
        """Index in the flat vector of each parameter's first chosen entry."""
        self.size = 0
        for name, size in self.sizes.items():
            self.offsets[name] = self.size
            self.size += size
        first = next(iter(self.parameters.values()))
        self.dtype, self.device = first.dtype, first.device
        mixed = {p.dtype for p in self.parameters.values()} | {p.device for p in self.parameters.values()}
        if len(mixed) > 2:
            raise ModelError(
                "The chosen weights do not live together",
                expected="one dtype and one device",
                got=", ".join(sorted(map(str, mixed))),
                do="move the network with .to(...)",
            )
        for name, tensor in self._state():
            check_in_memory(name, tensor)
        self.check_finite()

    # which weights ---------------------------------------------------------------------------------

    def _last_layer(self, example: Inputs | None) -> list[str]:
        """Names of the last layer's parameters, from a forward pass."""
        if example is None:
            raise OptionError(
                "Finding the last layer takes a forward pass",
                expected="an example of the inputs",
                got="none",
                do='name the layer, as in weights="head"',
            )
        with evaluating(self.module), torch.no_grad():
            return last_layer(self.module, partial(self.call, example))

    # flat vectors ----------------------------------------------------------------------------------

    def span(self, name: str) -> slice:
        """Slice of a parameter's chosen entries in the flat vector."""
        return slice(self.offsets[name], self.offsets[name] + self.sizes[name])

    def pick(self, name: str, entries: Tensor) -> Tensor:
        """The chosen entries (..., n) of a parameter, from all of its entries (..., numel)."""
        return entries[..., self.indices[name]] if name in self.indices else entries

    def flat(self) -> Tensor:
        """The chosen weights as one vector (P,), copied."""
        return torch.cat([self.pick(name, p.detach().reshape(-1)) for name, p in self.parameters.items()])

    def gather(self, tensors: Sequence[Tensor | None]) -> Tensor:
        """A vector (P,) over the chosen weights from one tensor per parameter, such as autograd's gradients."""
        whole = flat_gradient(tensors, list(self.parameters.values()))
        if not self.indices:
            return whole
        parts = torch.split(whole, [p.numel() for p in self.parameters.values()])
        return torch.cat([self.pick(name, part) for name, part in zip(self.names, parts, strict=True)])

    def equals(self, vector: Tensor) -> bool:
        """Whether `vector` (P,) equals the module's current chosen weights."""
        parts = torch.split(vector, list(self.sizes.values()))
        pairs = zip(self.parameters.items(), parts, strict=True)
        return all(torch.equal(self.pick(name, p.detach().reshape(-1)), part) for (name, p), part in pairs)

    def unflatten(self, vector: Tensor) -> dict[str, Tensor]:
        """A vector (P,) as a dictionary of whole parameters; entries that are not chosen are the module's own."""
        check_arguments(Network.unflatten, locals())
        if not self.indices:
            return split_vector(vector, self.shapes)
        return {
            name: self._filled(name, part, self.parameters[name].detach().reshape(-1).to(part))
            for name, part in self._split(vector)
        }

    def tangents(self, vector: Tensor) -> dict[str, Tensor]:
        """A direction (P,), or a stack of them (k, P), by parameter; zero at entries that are not chosen."""
        tangents = {}
        for name, part in self._split(vector):
            if name in self.indices:
                zeros = part.new_zeros(*part.shape[:-1], self.parameters[name].numel())
                tangents[name] = self._filled(name, part, zeros)
            else:
                tangents[name] = part.reshape((*part.shape[:-1], *self.shapes[name]))
        return tangents

    def _split(self, vector: Tensor) -> Iterator[tuple[str, Tensor]]:
        if vector.shape[-1:] != (self.size,):
            raise DataError(
                "The vector does not fit the weights",
                expected=f"shape (..., {self.size})",
                got=str(tuple(vector.shape)),
                do="pass vectors over the chosen weights",
            )
        return zip(self.names, torch.split(vector, list(self.sizes.values()), -1), strict=True)

    def _filled(self, name: str, part: Tensor, background: Tensor) -> Tensor:
        """A whole parameter: its chosen entries (..., n) scattered into a flat background (..., numel)."""
        if name in self.indices:
            index = self.indices[name].expand(part.shape)
            part = background.expand(*part.shape[:-1], -1).scatter(-1, index, part)
        return part.reshape((*part.shape[:-1], *self.shapes[name]))

    # calling ---------------------------------------------------------------------------------------

    def call(self, inputs: Inputs, parameters: Mapping[str, Tensor] | None = None) -> Tensor:
        """The output tensor for `inputs`, with `parameters` in place of the module's own."""
        args, kwargs = arguments(inputs)
        try:
            with self._plain():
                if parameters is None:
                    output = self.module(*args, **kwargs)
                else:
                    output = torch.func.functional_call(self.module, dict(parameters), args, kwargs)
        except CALL_ERRORS as error:
            dtype = next(self.module.parameters()).dtype
            several = "; a tuple is several arguments: of a pair (inputs, targets) pass the first alone"
            raise DataError(
                "The network could not run on this input",
                expected="inputs " + (f"like {self.signature}" if self.signature else f"as in training ({dtype})"),
                got=f"{describe(inputs)}, and the network said: {first_line(error)}",
                do="pass inputs of the shape and dtype that the network takes" + several * isinstance(inputs, tuple),
            ) from error
        return output_tensor(output)

    @contextmanager
    def _plain(self) -> Iterator[None]:
        """While prepared: no hooks on tensors, no autocast. Skipped without gradients where it would change nothing."""
        if not self._prepared or not (torch.is_grad_enabled() or self._casts):
            yield
            return
        with PlainFunctions(self.device) as functions:
            yield
        self._casts = functions.casts

    def traced(self, inputs: Inputs, parameters: Mapping[str, Tensor] | None = None) -> tuple[Tensor, list[int]]:
        """The output with its graph, and the bytes of each tensor that the graph saves besides the weights."""
        weights = [*self.module.parameters(), *(parameters or {}).values()]
        weight_storages = {weight.untyped_storage().data_ptr() for weight in weights}
        saved: dict[int, int] = {}

        def note(tensor: Tensor) -> Tensor:
            if tensor.layout == torch.strided and tensor.untyped_storage().data_ptr() not in weight_storages:
                saved[tensor.data_ptr()] = tensor.nbytes  # not its storage's bytes: an example is a view of its batch
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            output = self.call(inputs, parameters)
        return output, list(saved.values())

    @contextmanager
    def replaced(self, parameters: Mapping[str, Tensor]) -> Iterator[None]:
        """Replace parameters by other tensors in every submodule that holds them, until the context ends."""
        with self.held():
            new = {id(self.parameters[name]): tensor for name, tensor in parameters.items()}
            owners: list[tuple[dict[str, Any], str, Tensor]] = [
                (module._parameters, name, parameter)
                for module in self.module.modules()
                for name, parameter in module._parameters.items()
                if parameter is not None and id(parameter) in new
            ]
            try:
                for registry, name, parameter in owners:
                    registry[name] = new[id(parameter)]
                yield
            finally:
                for registry, name, parameter in owners:
                    registry[name] = parameter

    @contextmanager
    def at(self, weights: Tensor) -> Iterator[None]:
        """Let the module hold other chosen weights (P,) until the context ends; its own tensors are not written to.

        Unlike under `replaced`, the parameters stay the same objects, for code that identifies them.
        """
        with self.held():
            before = {name: parameter.data for name, parameter in self.parameters.items()}
            others = self.unflatten(weights.detach().to(self.dtype))
            try:
                for name, values in others.items():
                    self.parameters[name].data = values
                yield
            finally:
                for name, values in before.items():
                    self.parameters[name].data = values

    def held(self) -> AbstractContextManager[None]:
        """Wait until no other thread uses the module through Lapis, and keep them out until the end."""
        return held(self.module)

    @contextmanager
    def prepared(self) -> Iterator[None]:
        """Evaluation mode, gradients for the chosen weights only, no hooks on gradients; restored at the end.

        Threads take turns: see `held`.
        """
        with self.held():
            if self._prepared:
                with torch.enable_grad():
                    yield
            else:
                with self._preparing():
                    yield

    @contextmanager
    def _preparing(self) -> Iterator[None]:
        keep_freed_memory()
        chosen = set(self.names)
        flags = [(p, name in chosen, p.requires_grad) for name, p in self.module.named_parameters()]
        with differentiating(self.device), evaluating(self.module), without_gradient_hooks(self.module):
            try:
                for parameter, wanted, before in flags:
                    if wanted != before:
                        parameter.requires_grad_(wanted)
                self._prepared = True
                yield
            finally:
                self._prepared = False
                for parameter, _, before in flags:
                    if parameter.requires_grad != before:
                        parameter.requires_grad_(before)

    # checks ----------------------------------------------------------------------------------------

    def check_finite(self) -> None:
        """Raise ModelError on NaN or infinity in a parameter, or NaN in a buffer: masks hold infinities."""
        buffers = {name for name, _ in self.module.named_buffers()}
        for name, tensor in self._state():
            if not all_finite(tensor) and (name not in buffers or bool(tensor.isnan().any())):
                raise ModelError(
                    f"The network's {name!r} is not finite",
                    expected="finite weights, and buffers without NaN",
                    got="NaN or infinity",
                    do="train again with a smaller learning rate, or load a good checkpoint",
                )

    def holds(self, fingerprint: str) -> bool:
        """Whether the module has this fingerprint. Writes through `.data` change no version counters: all is read."""
        with self.held():
            return self.fingerprint() == fingerprint

    def _state(self) -> Iterator[tuple[str, Tensor]]:
        """Every parameter and buffer that a state dictionary holds, by name."""
        for path, module in self.module.named_modules():
            for name, tensor in (*module._parameters.items(), *module._buffers.items()):
                if tensor is not None and name not in module._non_persistent_buffers_set:
                    yield f"{path}.{name}" if path else name, tensor

    def tensors(self) -> dict[str, Tensor]:
        """Every parameter and buffer that a state dictionary holds; tied ones once, by their first name."""
        found: dict[int, tuple[str, Tensor]] = {}
        for name, tensor in self._state():
            found.setdefault(id(tensor), (name, tensor.detach()))
        return dict(found.values())

    def fingerprint(self) -> str:
        """A digest of every parameter and buffer: names, shapes, values."""
        return self._digest()[:32]

    def key(self) -> str:
        """What only those know who hold the weights: files that name the fingerprint are sealed with it."""
        return self._digest()[32:]

    def _digest(self) -> str:
        state = list(self._state())
        form = _form(tuple((name, tensor.shape, tensor.dtype) for name, tensor in state))
        return hashlib.sha256(form + hash_tensors([tensor for _, tensor in state])).hexdigest()

    def digests(self) -> dict[str, str]:
        """A short digest of each parameter and buffer, so that errors can name the one that changed."""
        digests = {}
        for name, tensor in self._state():
            digests[name] = hash_tensors([tensor]).hex()[:8]
        return digests


@lru_cache(64)
def _form(state: tuple[tuple[str, torch.Size, torch.dtype], ...]) -> bytes:
    """Names, shapes and types of parameters and buffers, as bytes."""
    return "".join(f"{name}{tuple(shape)}{dtype}" for name, shape, dtype in state).encode()
