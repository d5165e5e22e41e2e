"""Forward passes with drawn weights: drawn anew for every example where that is exact, else once for the batch.

Examples that share a draw share its noise, and an average over them does not reduce it. Where a layer uses a weight
once for each example, its outputs can be drawn for each example on their own, with the same distribution:

- local reparameterisation (Kingma, Salimans and Welling 2015): the outputs of a linear layer with inputs x are
  independent Gaussians with means x M^T and variances x^2 (S^2)^T, drawn directly;
- flipout (Wen et al. 2018): where a layer has several positions (convolutions, tokens), an example's outputs are
  correlated across them; one drawn perturbation is multiplied by random signs of inputs and outputs for each example,
  which leaves its distribution as it is.

Both are exact for every example, so the gradient of the ELBO stays unbiased. Drawing the outputs of a convolution
independently at every position would not be.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from lapis.batches import Inputs, batch_length
from lapis.curvature.recording.functions import CONVOLUTION, LINEAR, TRANSPOSED, bind
from lapis.network import Network
from lapis.training.variational.approximation import Approximation

LAYERS: dict[Any, tuple[dict[str, Any], int]] = {
    F.linear: (LINEAR, -1),
    F.conv1d: (CONVOLUTION, 1),
    F.conv2d: (CONVOLUTION, 1),
    F.conv3d: (CONVOLUTION, 1),
    F.conv_transpose1d: (TRANSPOSED, 1),
    F.conv_transpose2d: (TRANSPOSED, 1),
    F.conv_transpose3d: (TRANSPOSED, 1),
}
"""Functions that are linear in their weights: their arguments, and the axis of features or channels."""


@dataclass(frozen=True)
class Pass:
    """A forward pass with drawn weights."""

    raw: Tensor
    """The network's output."""
    last: _Drawn | None
    """The latest output of a layer whose weights were drawn for each example."""
    refused: set[str]
    """Parameters that cannot be drawn for each example: the pass is void if there are any."""
    placeholders: dict[str, Tensor]
    """What the module holds in place of parameters drawn for each example. A gradient of one shows another use of it
    than the intercepted one, which also makes the pass void."""

    def moments(self) -> tuple[Tensor, Tensor] | None:
        """Mean and variance of every number of `raw`, given the inputs of the layer that made it.

        None unless `raw` is that layer's output, or a view of it (squeezed, transposed, a part), unchanged since.
        """
        last, raw = self.last, self.raw
        if last is None or last.output._version != last.version or raw.dtype != last.output.dtype:
            return None
        if raw.untyped_storage().data_ptr() != last.output.untyped_storage().data_ptr():
            return None
        found = last.mean, last.variance()
        if raw is last.output:
            return found
        if any(each.stride() != last.output.stride() or each.storage_offset() for each in (*found, last.output)):
            return None
        place = raw.shape, raw.stride(), raw.storage_offset()
        return found[0].as_strided(*place), found[1].as_strided(*place)


@dataclass(frozen=True)
class _Drawn:
    """Outputs of a layer with drawn weights, and their distribution given its inputs."""

    output: Tensor
    version: int
    """How often the output had been changed in place when the layer returned it."""
    mean: Tensor
    variance: Callable[[], Tensor]


def forward(
    network: Network, q: Approximation, inputs: Inputs, each_example: frozenset[str], generator: torch.Generator
) -> Pass:
    """Run the network with weights drawn from q, those in `each_example` anew for every example."""
    centre = q.mean
    if q.loadings is not None:
        u = _normal(q.loadings[:, 0].detach(), generator)
        centre = centre + u @ q.loadings * q.log_deviation.exp()
    means, deviations = network.unflatten(centre), network.tangents(q.log_deviation.exp())
    held = {}
    for name, mean in means.items():
        if name in each_example:
            held[name] = mean.detach().clone().requires_grad_()
        else:
            drawn = mean + deviations[name] * _normal(mean.detach(), generator)
            held[name] = _WithDenseGradient.apply(drawn)  # type: ignore[no-untyped-call]
    placed = {name: held[name] for name in held if name in each_example}
    names = {id(tensor): name for name, tensor in placed.items()}
    drawing = _Drawing(names, means, deviations, batch_length(inputs), generator)
    with drawing:
        raw = network.call(inputs, held)
    return Pass(raw, drawing.last, drawing.refused, placed)


class _WithDenseGradient(torch.autograd.Function):
    """The tensor itself; embeddings may have sparse gradients, which autograd cannot take apart into weights."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0].to_dense()


class _Drawing(TorchFunctionMode):
    """Intercepts layers whose weights are placeholders, and draws their outputs for every example."""

    def __init__(
        self,
        names: dict[int, str],
        means: dict[str, Tensor],
        deviations: dict[str, Tensor],
        examples: int,
        generator: torch.Generator,
    ) -> None:
        super().__init__()
        self._names, self._means, self._deviations = names, means, deviations
        self._examples, self._generator = examples, generator
        self._used: set[str] = set()
        self.refused: set[str] = set()
        self.last: _Drawn | None = None

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func not in LAYERS:
            return func(*args, **(kwargs or {}))
        signature, axis = LAYERS[func]
        arguments = bind(signature, args, kwargs or {})
        names = {key: self._names.get(id(arguments[key])) for key in ("weight", "bias")}
        taken = {name for name in names.values() if name is not None}
        if not taken:
            return func(**arguments)
        x = arguments["input"]
        batched = x.dim() >= 2 and x.shape[0] == self._examples and x.dim() >= arguments["weight"].dim()
        self.refused |= taken if not batched else taken & self._used
        self._used |= taken
        mean_of = {key: arguments[key] if name is None else self._means[name] for key, name in names.items()}
        spread_of = {key: self._spread(arguments[key], name) for key, name in names.items()}
        mean = func(**arguments | mean_of)
        if not batched:
            return mean

        def variance() -> Tensor:
            squares = {key: None if spread is None else spread.square() for key, spread in spread_of.items()}
            known: Tensor = func(**arguments | squares | {"input": x.square()})
            return known

        if mean.numel() == self._examples * mean.shape[axis]:  # one position: independent outputs
            known = variance()
            output = mean + _root(known) * _normal(mean.detach(), self._generator)
            self.last = _Drawn(output, output._version, mean, lambda: known)
            return output
        drawn = {
            key: None if spread is None else spread * _normal(spread.detach(), self._generator)
            for key, spread in spread_of.items()
        }
        perturbed = func(**arguments | drawn | {"input": x * self._signs(x, axis)})
        output = mean + self._signs(mean, axis) * perturbed
        self.last = _Drawn(output, output._version, mean, variance)
        return output

    def _spread(self, argument: Tensor | None, name: str | None) -> Tensor | None:
        """The deviations of an argument: zero where it is no placeholder."""
        if argument is None:
            return None
        return torch.zeros_like(argument) if name is None else self._deviations[name]

    def _signs(self, like: Tensor, axis: int) -> Tensor:
        """Random signs for each example and feature, shared by all positions."""
        shape = [1] * like.dim()
        shape[0], shape[axis] = like.shape[0], like.shape[axis]
        source = self._generator
        signs = torch.randint(2, shape, generator=source, device=source.device).mul_(2).sub_(1)
        return signs.to(like.device, like.dtype)


def _normal(like: Tensor, generator: torch.Generator) -> Tensor:
    """Standard normal numbers in the same shape and dtype."""
    noise = torch.randn(like.shape, dtype=like.dtype, generator=generator, device=generator.device)
    return noise.to(like.device)


def _root(variance: Tensor) -> Tensor:
    """The square root, with gradient zero where it is zero: outputs that no uncertain weight reaches."""
    return variance.clamp_min(torch.finfo(variance.dtype).tiny).sqrt()


@dataclass
class Draws:
    """Draws passes over batches, and finds on the way which parameters can be drawn for each example."""

    network: Network
    q: Approximation
    each_example: frozenset[str] = field(default=frozenset())

    @staticmethod
    def found(network: Network, q: Approximation, samples: list[Inputs], generator: torch.Generator) -> Draws:
        """Try all parameters on a few examples; batches of different sizes tell examples from other axes."""
        draws = Draws(network, q, frozenset(network.names))
        for inputs in samples:
            draws.gradient(inputs, lambda made: made.raw.sum(), [q.mean], generator)
        return draws

    def gradient(
        self, inputs: Inputs, loss: Callable[[Pass], Tensor], wanted: list[Tensor], generator: torch.Generator
    ) -> tuple[Tensor, list[Tensor]]:
        """The loss of a pass, detached, and its gradients; zero for tensors that it does not depend on."""
        while True:
            made = forward(self.network, self.q, inputs, self.each_example, generator)
            if not self._refuse(made.refused):
                value = loss(made)
                placeholders = made.placeholders
                found = torch.autograd.grad(value, [*wanted, *placeholders.values()], allow_unused=True)
                used = zip(placeholders, found[len(wanted) :], strict=True)
                if not self._refuse({name for name, gradient in used if gradient is not None}):
                    pairs = zip(wanted, found, strict=False)
                    return value.detach(), [torch.zeros_like(p) if g is None else g for p, g in pairs]

    def value(self, inputs: Inputs, loss: Callable[[Pass], Tensor], generator: torch.Generator) -> Tensor:
        """The loss of a pass, without gradients."""
        while True:
            with torch.no_grad():
                made = forward(self.network, self.q, inputs, self.each_example, generator)
                if not self._refuse(made.refused):
                    return loss(made)

    def _refuse(self, names: set[str]) -> bool:
        """Draw these once for a batch from now on; whether there are any."""
        self.each_example -= names
        return bool(names)
