"""Networks drawn by dropout: one mask for all examples, whichever layer or function asks for it.

All of torch's dropout (layers, functions, inside attention and recurrent layers) draws its masks by the operators
`bernoulli_` and `native_dropout`. These are intercepted below torch's layers, and get masks that depend on a seed, on
the number of the mask in the forward pass and on the shape of one example alone: the same drawn network for any inputs.
Where the examples lie in a mask, and what else training mode would change, is measured on a few examples.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.dropout import _DropoutNd
from torch.utils._python_dispatch import TorchDispatchMode

from lapis.batches import Inputs, batch_length, map_tensors
from lapis.curvature.products.differentiation import differentiable
from lapis.curvature.recording.batch_axis import BatchAxis
from lapis.errors import LapisError, ModelError
from lapis.network import Network
from lapis.proofs import close

aten = torch.ops.aten

MANY, FEW = 3, 2
"""Batch sizes that are compared; not one, with which networks that squeeze their outputs have trouble."""

Layout = tuple[int, bool]
"""The axis of a mask along which examples lie, and whether they come first where that axis has other entries too."""

MakeMask = Callable[[int, torch.Size, float], Tensor]
"""A whole mask from its number in the forward pass, its shape, and the probability of a one."""

Draw = Callable[[int, int, tuple[int, ...], float], Tensor]
"""A mask from a seed, its number in the forward pass, the shape of one example, and the probability of a one."""


def bernoulli(seed: int, number: int, shape: tuple[int, ...], keep: float) -> Tensor:
    """A mask of ones with probability `keep`, else zeros."""
    return (_uniform(seed, number, shape) < keep).double()


def _perturbed(seed: int, number: int, shape: tuple[int, ...], keep: float) -> Tensor:
    """Numbers around `keep` of which no two are equal, for proofs: a mask of bits could agree by accident."""
    return keep * (0.5 + _uniform(seed, number, shape))


def _expectation(seed: int, number: int, shape: tuple[int, ...], keep: float) -> Tensor:
    return torch.full(shape, keep, dtype=torch.float64)


def _uniform(seed: int, number: int, shape: tuple[int, ...]) -> Tensor:
    """Numbers in [0, 1), from a counter-based generator of their own."""
    return torch.from_numpy(np.random.Generator(np.random.Philox(key=(number << 64) + seed)).random(shape))


@dataclass(frozen=True)
class MaskPlan:
    """How a network draws masks, for examples of one shape."""

    active: tuple[nn.Module, ...]
    """The modules that are in training mode while networks are drawn."""
    layouts: tuple[Layout | None, ...]
    """Of each mask; None for one that all examples share, such as a mask of weights."""


class Masks(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While it is entered, masks come from `make`; `drawn` lists their shapes and probabilities of a one."""

    def __init__(self, make: MakeMask) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.make = make
        self.drawn: list[tuple[torch.Size, float]] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing here is compiled; to skip torch's compiler, torch would import it first, which takes seconds."""
        return False

    def _next(self, shape: torch.Size, keep: float) -> Tensor:
        self.drawn.append((shape, keep))
        return self.make(len(self.drawn) - 1, shape, keep)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is aten.bernoulli_.float:
            keep = args[1] if len(args) > 1 else kwargs.get("p", 0.5)
            return args[0].copy_(self._next(args[0].shape, keep))
        if func is aten.native_dropout.default and args[2] is not False:
            mask = self._next(args[0].shape, 1 - args[1]).to(args[0])
            return args[0] * mask / (1 - args[1]), mask.bool()
        if torch.Tag.nondeterministic_seeded in func.tags and func is not aten.native_dropout.default:
            raise ModelError(
                "The network draws random numbers that are no dropout masks",
                expected="torch's dropout, as layers or functions, or masks made by tensor.bernoulli_(p)",
                got=str(func),
                do="remove that layer, or keep it in evaluation mode whatever the mode of the network",
            )
        return func(*args, **kwargs)


def known_rates(module: nn.Module) -> dict[str, float]:
    """Probability of a zero in every layer of torch that has dropout, by the layer's name."""
    rates = {}
    for name, layer in module.named_modules():
        rate = layer.p if isinstance(layer, _DropoutNd) else 0.0
        if isinstance(layer, nn.MultiheadAttention) or (isinstance(layer, nn.RNNBase) and layer.num_layers > 1):
            rate = layer.dropout
        if rate > 0:
            rates[name] = rate
    return rates


def may_drop(module: nn.Module) -> bool:
    """Whether there is a layer with dropout, or a module of the user's whose code mentions dropout or training mode."""
    return bool(known_rates(module)) or any(map(_mentions_dropout, _own_modules(module)))


def _own_modules(module: nn.Module) -> list[nn.Module]:
    """Modules of classes from outside of torch, which may call functional dropout; normalisations are no such."""
    return [
        each
        for each in module.modules()
        if type(each).__module__.partition(".")[0] != "torch" and not isinstance(each, (_NormBase, _DropoutNd))
    ]


def _mentions_dropout(module: nn.Module) -> bool:
    """By the names in the code of its methods, and of functions that it holds."""
    own = [each for each in type(module).__mro__ if each.__module__.partition(".")[0] not in ("torch", "builtins")]
    functions = [getattr(value, "__func__", value) for each in (*own, module) for value in vars(each).values()]
    names = [name for function in functions if hasattr(function, "__code__") for name in function.__code__.co_names]
    return any(word in name for name in names for word in ("training", "dropout", "bernoulli"))


@contextmanager
def _training(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Training mode for these modules alone, not for those inside of them."""
    before = [each.training for each in modules]
    try:
        for each in modules:
            each.training = True
        yield
    finally:
        for each, mode in zip(modules, before, strict=True):
            each.training = mode


def _run(network: Network, inputs: Inputs, active: Sequence[nn.Module], masks: Masks) -> Tensor:
    with network.prepared(), differentiable(), torch.no_grad(), _training(active), masks:
        return network.call(inputs)


def masked(
    network: Network,
    inputs: Inputs,
    plan: MaskPlan,
    seeds: Sequence[int],
    draw: Draw = bernoulli,
    mode: Callable[[MakeMask], Masks] = Masks,
) -> Tensor:
    """Raw outputs of the networks drawn by `seeds`, one after the other along the batch axis."""
    length = batch_length(inputs)

    def mask(number: int, shape: torch.Size, keep: float) -> Tensor:
        _check(number < len(plan.layouts), "more masks than on a few examples")
        layout = plan.layouts[number]
        if layout is None:
            assert len(seeds) == 1, "networks share such a mask if they run together"
            return draw(seeds[0], number, tuple(shape), keep)
        dim, first = layout
        examples = length * len(seeds)
        _check(shape[dim] % examples == 0, f"a mask of shape {tuple(shape)} for {examples} examples")
        one = of_one_example(shape, dim, examples)
        axis = BatchAxis(dim, 1, one[dim]) if first else BatchAxis(dim, one[dim], 1)
        whole = torch.empty(shape, dtype=torch.float64)
        each = torch.stack([draw(seed, number, one, keep) for seed in seeds])
        unfolded = axis.unfold(whole)  # a view
        parts = unfolded.view(len(seeds), length, *unfolded.shape[1:])
        parts.copy_(each.reshape(len(seeds), 1, *unfolded.shape[1:]))
        return whole

    repeated = inputs if len(seeds) == 1 else map_tensors(lambda x: torch.cat([x] * len(seeds)), inputs)
    masks = mode(mask)
    raw = _run(network, repeated, plan.active, masks)
    _check(len(masks.drawn) == len(plan.layouts), "another number of masks than on a few examples")
    return raw


def of_one_example(shape: torch.Size, dim: int, examples: int) -> tuple[int, ...]:
    """The shape of a mask for one of the examples that lie along axis `dim`."""
    return (*shape[:dim], shape[dim] // examples, *shape[dim + 1 :])


def _check(holds: bool, got: str) -> None:
    if not holds:
        raise ModelError(
            "The network's dropout does not treat all examples alike",
            expected="the same masks in every forward pass, with the examples along one of their axes",
            got=got,
            do="use dropout layers that run for every input, and keep the examples apart in their inputs",
        )


def plan_masks(network: Network, inputs: Inputs) -> MaskPlan:
    """Find the modules to switch on, and where the examples lie in each mask; ModelError if there is no dropout.

    A module of the user's is switched on if training mode changes nothing but its masks: filled with their expectation,
    they leave the outputs as they are in evaluation mode.
    """
    index = torch.arange(MANY) % batch_length(inputs)
    many = map_tensors(lambda x: x[index.to(x.device)], inputs)
    few = map_tensors(lambda x: x[:FEW], many)
    known = known_rates(network.module)
    layers = [layer for name, layer in network.module.named_modules() if name in known]
    active = (*layers, *_droppers(network, many))
    large, small = Masks(partial(_expectation, 0)), Masks(partial(_expectation, 0))
    _run(network, many, active, large)
    _run(network, few, active, small)
    _check(len(large.drawn) == len(small.drawn), "masks whose number depends on the inputs")
    if not large.drawn:
        raise no_dropout(network.module)
    found = [_candidates(one, two) for (one, _), (two, _) in zip(large.drawn, small.drawn, strict=True)]
    plan = MaskPlan(active, tuple(each[0] for each in found))
    for number, candidates in enumerate(found):
        if len(candidates) > 1:
            only = partial(_only, number)
            choices = [_with(plan, number, each) for each in candidates]
            plan = next((each for each in choices if _keeps_examples_apart(network, each, many, few, only)), plan)
    _check(
        _keeps_examples_apart(network, plan, many, few, _perturbed),
        "outputs that change with the other examples of a batch",
    )
    return plan


def _droppers(network: Network, inputs: Inputs) -> list[nn.Module]:
    """The user's modules that draw masks in training mode only."""
    own = _own_modules(network.module)
    plain = Masks(partial(_expectation, 0))
    expected = _run(network, inputs, (), plain)

    def effect(modules: list[nn.Module]) -> tuple[bool, int]:
        """Whether training mode leaves the outputs as they are, and how many masks it draws."""
        masks, same = Masks(partial(_expectation, 0)), False
        with suppress(LapisError):  # other outputs than tensors, or random numbers that are no masks
            same = close(_run(network, inputs, modules, masks), expected)
        return same, len(masks.drawn) - len(plain.drawn)

    same, drawn = effect(own)
    if same:
        return own if drawn else []
    chosen = []
    for each in own:
        same, drawn = effect([each])
        if drawn and not same:
            raise ModelError(
                f"{type(each).__name__} does more in training mode than to drop",
                expected="outputs as in evaluation mode, but for the masks of its dropout",
                got="other outputs, with every mask at its expectation",
                do="move its dropout into nn.Dropout layers, which are switched on alone",
            )
        if drawn:
            chosen.append(each)
    return chosen


def no_dropout(module: nn.Module) -> ModelError:
    return ModelError(
        "The network has no dropout",
        expected="dropout layers with p > 0, or functional dropout that follows self.training",
        got=f"{type(module).__name__} without",
        do="add nn.Dropout layers and train with them; for networks without, use lapis.laplace or lapis.ensemble",
    )


def _only(chosen: int, seed: int, number: int, shape: tuple[int, ...], keep: float) -> Tensor:
    draw = _perturbed if number == chosen else _expectation
    return draw(seed, number, shape, keep)


def _candidates(large: torch.Size, small: torch.Size) -> list[Layout | None]:
    """Layouts that a mask can have, from its shapes for MANY and for FEW examples."""
    if large == small:
        return [None]
    fits = [
        dim
        for dim, (one, two) in enumerate(zip(large, small, strict=False))
        if one % MANY == 0 and two * MANY == one * FEW and (*large[:dim], two, *large[dim + 1 :]) == tuple(small)
    ]
    _check(len(fits) == 1, f"masks of shapes {tuple(large)} for {MANY} examples and {tuple(small)} for {FEW}")
    return [(fits[0], True)] if large[fits[0]] == MANY else [(fits[0], True), (fits[0], False)]


def _with(plan: MaskPlan, number: int, layout: Layout | None) -> MaskPlan:
    return MaskPlan(plan.active, (*plan.layouts[:number], layout, *plan.layouts[number + 1 :]))


def _keeps_examples_apart(network: Network, plan: MaskPlan, many: Inputs, few: Inputs, draw: Draw) -> bool:
    """Whether examples have the same outputs in batches of other sizes, under masks of real numbers."""
    return close(masked(network, many, plan, [0], draw)[:FEW], masked(network, few, plan, [0], draw))
