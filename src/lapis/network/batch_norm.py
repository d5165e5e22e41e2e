"""Batch norm: which layers of a module keep running statistics, and these statistics under other weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from lapis.batches import Batch
from lapis.network.network import Network


def batch_norms(module: nn.Module) -> dict[str, _BatchNorm]:
    """The batch-norm layers that keep running statistics, by name."""
    return {
        name: layer
        for name, layer in module.named_modules()
        if isinstance(layer, _BatchNorm) and layer.running_mean is not None
    }


def renewed_statistics(
    network: Network, parameters: Mapping[str, Tensor], batches: Sequence[Batch]
) -> dict[str, Tensor]:
    """The buffers of all batch-norm layers under other weights: batch means and variances, averaged over the batches.

    One pass, in which only batch norm is in training mode (no dropout); a batch counts by its number of examples. With
    batches of one size this is `torch.optim.swa_utils.update_bn`. Batches of a single example, which have no variance,
    are left out where there are others.
    """
    layers = batch_norms(network.module)
    buffers = {
        f"{name}.{kind}" if name else kind: torch.zeros_like(buffer)
        for name, layer in layers.items()
        for kind, buffer in layer.named_buffers(recurse=False)
    }
    used = [batch for batch in batches if len(batch) > 1] or list(batches)
    momenta = {layer: layer.momentum for layer in layers.values()}
    seen = 0
    with network.prepared(), torch.no_grad():
        try:
            for layer in layers.values():
                layer.training = True
            for batch in used:
                seen += len(batch)
                for layer in layers.values():
                    layer.momentum = len(batch) / seen
                network.call(batch.inputs, {**parameters, **buffers})
        finally:
            for layer, momentum in momenta.items():
                layer.momentum = momentum
    return buffers
