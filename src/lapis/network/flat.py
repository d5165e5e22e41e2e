"""Tensors of a network as one vector, and back; and the check that they are in memory at all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from lapis.errors import DataError, ModelError


def flat_gradient(gradients: Sequence[Tensor | None], parameters: Sequence[Tensor]) -> Tensor:
    """Autograd's gradients of `parameters` as one vector: zero for unused parameters, dense for sparse gradients."""
    parts = [
        torch.zeros_like(p) if g is None else g.to_dense() if g.layout == torch.sparse_coo else g
        for g, p in zip(gradients, parameters, strict=True)
    ]
    return torch.cat([part.reshape(-1) for part in parts])


def split_vector(vector: Tensor, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
    """A vector (P,) cut into tensors of the given shapes, in order."""
    sizes = [int(torch.Size(shape).numel()) for shape in shapes.values()]
    if vector.dim() != 1 or vector.numel() != sum(sizes):
        raise DataError(
            "The vector does not fit the weights",
            expected=f"shape ({sum(sizes)},)",
            got=str(tuple(vector.shape)),
            do="pass one weight vector, or a stack (n, P) of them",
        )
    return {
        name: part.reshape(shape)
        for (name, shape), part in zip(shapes.items(), torch.split(vector, sizes), strict=True)
    }


def check_in_memory(name: str, tensor: Tensor) -> None:
    """Raise ModelError for a parameter or buffer without values."""
    if tensor.is_meta:
        raise ModelError(
            f"The network's {name!r} has no values",
            expected="weights and buffers in memory",
            got="a tensor on the meta device",
            do='load the weights: model.to_empty(device="cpu"), then model.load_state_dict(...)',
        )
