"""The network linearised at its trained weights t: images f(t) + J (theta - t), through products with J."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.func import functional_call, jvp, vjp, vmap

from lapis.curvature.products.differentiation import differentiable
from lapis.imaging.tangent.filters import Block, blocks_of
from lapis.network.untouched import restored_modes

WORK_BYTES = 2**28
"""Of the activations of images that are worked on together."""


class TangentImage:
    """f(t) and J of a network that makes one image from a fixed input, J by its products with vectors.

    Weights are those of the convolutions (biases stay), block by block in the order of `blocks`, flat (P,). Images are
    flat (pixels,). Everything is in the given dtype; the network itself is left as it is.

    Args:
        network: makes images (1, height, width) of `inputs`; it is run in evaluation mode.
        inputs: (1, channels, height, width).
        dtype: float64 where rounding must not matter, float32 to save time.
    """

    def __init__(self, network: nn.Module, inputs: Tensor, dtype: torch.dtype = torch.float64) -> None:
        self.blocks: tuple[Block, ...] = blocks_of(network)
        self.dtype = dtype
        state = {name: _as(value.detach(), dtype) for name, value in network.state_dict().items()}
        names = [name for block in self.blocks for name in block.weights]
        self._shapes = {name: state[name].shape for name in names}
        self._rest = {name: value for name, value in state.items() if name not in self._shapes}
        self._network = network
        self.inputs = inputs.detach().to(dtype)
        self.weights = torch.cat([state[name].flatten() for name in names])
        """t, (P,)."""
        with torch.no_grad(), restored_modes(network):
            self.image = self._image(self.weights)
            """f(t), (pixels,)."""
        widths = sum(m.out_channels for m in network.modules() if isinstance(m, nn.Conv2d))
        bytes_each = 4 * widths * self.image.numel() * self.weights.element_size() + self.weights.nbytes
        self.together = max(1, min(64, WORK_BYTES // bytes_each))
        """Vectors that are multiplied at once."""

    def _image(self, weights: Tensor) -> Tensor:
        self._network.eval()
        found: Tensor = functional_call(self._network, {**self._rest, **self._unflat(weights)}, (self.inputs,))
        return found.flatten()

    @property
    def size(self) -> int:
        """P."""
        return self.weights.numel()

    def push(self, vectors: Tensor) -> Tensor:
        """J v (k, pixels) for rows v of (k, P)."""

        def one(vector: Tensor) -> Tensor:
            found: Tensor = jvp(self._image, (self.weights,), (vector,))[1]
            return found

        return self._in_parts(vmap(one), vectors)

    def pull(self, images: Tensor) -> Tensor:
        """J^T u (k, P) for rows u of (k, pixels)."""
        with differentiable(), restored_modes(self._network):
            back = vjp(self._image, self.weights)[1]
        return self._in_parts(vmap(lambda image: back(image)[0]), images)

    def _in_parts(self, function: Callable[[Tensor], Tensor], rows: Tensor) -> Tensor:
        with differentiable(), restored_modes(self._network):
            return torch.cat([function(part).detach() for part in torch.split(rows, self.together)])

    def _unflat(self, weights: Tensor) -> dict[str, Tensor]:
        parts = torch.split(weights, [shape.numel() for shape in self._shapes.values()])
        return {name: part.reshape(shape) for (name, shape), part in zip(self._shapes.items(), parts, strict=True)}


def _as(value: Tensor, dtype: torch.dtype) -> Tensor:
    """A copy, in the dtype if it holds real numbers."""
    return value.to(dtype, copy=True) if value.is_floating_point() else value.clone()
