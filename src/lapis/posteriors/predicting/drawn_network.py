"""Drawn networks, one in memory at a time, whose weight matrices are formed only where a forward pass needs them.

A draw of a Kronecker block is W + Q_G (E * s) R^T, with white noise E, standard deviations s and the bases of
`FactoredDraw`. A linear layer's output x W^T + ((x R) (E * s)^T) Q_G^T can be computed without forming the drawn
weight, which is less work for few inputs to a wide layer. Where x is the network's own input, x R and x W^T are the
same in every draw, and are computed once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lapis.batches import Inputs, tensors_in
from lapis.curvature.blocks.block import Block, BlockGaussian, FactoredDraw
from lapis.curvature.recording.sites import Site
from lapis.network import Network


def white_noise(network: Network, generator: torch.Generator) -> Tensor:
    """Standard normal numbers (P,) in the network's dtype, for one draw."""
    noise = torch.randn(network.size, dtype=network.dtype, generator=generator, device=generator.device)
    return noise.to(network.device)


class DrawnNetwork:
    """The parameters of one drawn network, overwritten by each draw; draws are those of `LaplacePosterior.sample`."""

    def __init__(
        self,
        network: Network,
        blocks: Sequence[Block],
        gaussians: Sequence[BlockGaussian],
        mean: Tensor,
        inputs: Inputs,
    ) -> None:
        self.network, self.blocks, self.gaussians = network, blocks, gaussians
        self.means = [[site.gather(mean, network) for site in block.sites] for block in blocks]
        self.flat = mean.clone()
        self.parameters = network.unflatten(self.flat)
        rows = min((tensor.shape[0] for tensor in tensors_in(inputs) if tensor.dim()), default=0)
        given = frozenset(tensor.untyped_storage().data_ptr() for tensor in tensors_in(inputs))
        self.matrices: dict[int, Matrix] = {}
        for i, (block, gaussian) in enumerate(zip(blocks, gaussians, strict=True)):
            linear = len(block.sites) == 1 and _is_linear(block.sites[0], network)
            if linear and (factored := gaussian.factored(mean.dtype)) is not None:
                self.matrices[i] = Matrix(block.sites[0], factored, network.unflatten(mean), given, rows)
                self.parameters |= self.matrices[i].parameters(block.sites[0])

    def draw(self, generator: torch.Generator) -> dict[str, Tensor]:
        """The parameters of the next network; they overwrite those of the previous one."""
        parts = torch.split(white_noise(self.network, generator), [block.size for block in self.blocks])
        for i, (block, gaussian, part) in enumerate(zip(self.blocks, self.gaussians, parts, strict=True)):
            if i in self.matrices:
                self.matrices[i].draw(part)
                continue
            pieces = torch.split(gaussian.color(part[None])[0], [site.size for site in block.sites])
            for site, mean, piece in zip(block.sites, self.means[i], pieces, strict=True):
                site.scatter(mean + piece.reshape(site.shape).to(mean.dtype), self.flat, self.network)
        return self.parameters


def _is_linear(site: Site, network: Network) -> bool:
    """Whether a site is the whole weight of a linear layer, as an (outputs, inputs) matrix."""
    if site.kind != "outer" or site.weight is None:
        return False
    whole_bias = site.bias is None or network.shapes[site.bias.name] == site.bias.view
    return whole_bias and site.weight.axes == (0, 1) and site.weight.view == network.shapes[site.weight.name]


class Matrix:
    """A linear layer's weight, with its bias (if any) as last column: the mean, and one draw at a time.

    `rows` is the expected number of inputs to the layer: if forming the drawn matrix is less work than multiplying that
    many inputs by its factors, it is formed at every draw. `given` holds the storage addresses of the network's inputs.
    """

    def __init__(
        self, site: Site, factored: FactoredDraw, means: Mapping[str, Tensor], given: frozenset[int], rows: int
    ) -> None:
        assert site.weight is not None
        self.weight = means[site.weight.name]
        self.bias = None if site.bias is None else means[site.bias.name]
        self.deviation, self.output_basis, self.input_basis = factored.deviations, factored.outputs, factored.inputs
        self.white = factored.white
        self.given = given
        self.mean = self.weight if self.bias is None else torch.cat([self.weight, self.bias[:, None]], 1)
        height, width = self.mean.shape
        self.forming = rows * height >= width * (height + width)
        self._noise = self.deviation
        self._formed: Tensor | None = self.mean.clone() if self.forming else None
        self._known: tuple[Any, Tensor, Tensor] | None = None

    def draw(self, noise: Tensor) -> None:
        """Overwrite the current draw with the next."""
        self._noise = self.white(noise.reshape(self.deviation.shape)) * self.deviation
        if self.forming:
            torch.addmm(self.mean, self.output_basis @ self._noise, self.input_basis.mT, out=self._formed)
        else:
            self._formed = None

    def parameters(self, site: Site) -> dict[str, Tensor]:
        """What the network is given for the weight and the bias: good for every draw."""
        return {slot.name: self._part(slot is site.bias) for slot in site.slots}

    def _part(self, is_bias: bool) -> Tensor:
        """The drawn weight or bias as a parameter: a view of the formed matrix, or a `Drawn` placeholder."""
        if self._formed is None:
            return Drawn.of(self, is_bias)
        return self._formed[:, -1] if is_bias else self._formed[:, : self.weight.shape[1]]

    def formed(self) -> Tensor:
        """The drawn matrix, with the bias as last column."""
        if self._formed is None:
            self._formed = torch.addmm(self.mean, self.output_basis @ self._noise, self.input_basis.mT)
        return self._formed

    def linear(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """x W^T + b with the drawn weight; b is drawn with it if it is this matrix's own bias, else added unchanged."""
        own = isinstance(bias, Drawn)
        outputs, inputs = self.weight.shape
        rows = x.numel() // max(inputs, 1)
        shared = not x.is_inference() and x.untyped_storage().data_ptr() in self.given
        direct = rows * outputs * (outputs + inputs) + (0 if shared else rows * inputs * (outputs + inputs))
        if direct >= outputs * inputs * (outputs + inputs + rows) or x.dtype != self.weight.dtype:
            formed = self.formed()
            return F.linear(x, formed[:, :inputs], formed[:, inputs] if own else bias)
        at_mean, rotated = self._means(x, bias, own, shared)
        flat = torch.addmm(at_mean, rotated @ self._noise.mT, self.output_basis.mT)
        return flat.reshape(*x.shape[:-1], outputs)

    def _means(self, x: Tensor, bias: Tensor | None, own: bool, shared: bool) -> tuple[Tensor, Tensor]:
        """x W^T + b with the mean weights, and x R, as matrices; cached for the next draw if x is `shared` by draws."""
        key = (x.data_ptr(), x.shape, x.stride(), x._version, own) if shared else None
        if shared and self._known is not None and self._known[0] == key:
            _, at_mean, rotated = self._known
        else:
            flat = x.reshape(-1, x.shape[-1])
            at_mean = F.linear(flat, self.weight, self.bias if own else None)
            rotated = flat @ self.input_basis[: flat.shape[1]]
            if own:
                rotated += self.input_basis[-1]
            if shared:
                self._known = (key, at_mean, rotated)
        return (at_mean if own or bias is None else at_mean + bias), rotated


class Drawn(Tensor):
    """Placeholder of a drawn weight or bias: linear layers use its factors, any other function gets the formed tensor.

    Its own entries are NaN, so that code which bypasses `__torch_function__` cannot go unnoticed.
    """

    matrix: Matrix
    is_bias: bool

    @staticmethod
    def of(matrix: Matrix, is_bias: bool) -> Drawn:
        like = matrix.bias if is_bias else matrix.weight
        assert like is not None
        drawn: Drawn = Tensor._make_subclass(Drawn, like.new_full((), torch.nan).expand(like.shape))
        drawn.matrix, drawn.is_bias = matrix, is_bias
        return drawn

    def formed(self) -> Tensor:
        whole = self.matrix.formed()
        return whole[:, -1] if self.is_bias else whole[:, : self.matrix.weight.shape[1]]

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            if func is F.linear:
                x, weight, bias = _linear_arguments(
                    *args, **{{"input": "x"}.get(key, key): value for key, value in (kwargs or {}).items()}
                )
                if isinstance(weight, Drawn) and not weight.is_bias and not isinstance(x, Drawn):
                    if isinstance(bias, Drawn) and not (bias.matrix is weight.matrix and bias.is_bias):
                        bias = bias.formed()
                    return weight.matrix.linear(x, bias)
            return func(*_formed(args), **_formed(kwargs or {}))


def _linear_arguments(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor | None]:
    return x, weight, bias


def _formed(value: Any) -> Any:
    """The value with every placeholder in it replaced by the formed tensor."""
    if isinstance(value, Drawn):
        return value.formed()
    if isinstance(value, (tuple, list)):
        parts = [_formed(part) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    return {key: _formed(part) for key, part in value.items()} if isinstance(value, dict) else value
