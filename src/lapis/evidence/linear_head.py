"""The Jacobian of weights that enter the outputs linearly, as those of a last layer do, from the layer's inputs.

With features a_n (I,), the layer's inputs and a one for its bias, and V (C, I) the weights, f_n = V a_n: J_n v is a
product with a_n, and the curvature is sum_n H_n (x) a_n a_n^T. The network runs once, for the features.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lapis.curvature.plan import planned_tape
from lapis.curvature.products.jacobian import Jacobian
from lapis.curvature.recording.sites import Site
from lapis.likelihoods import Likelihood
from lapis.likelihoods.base import Separable

WORK_BYTES = 2**25
"""Features are multiplied by entries of H for so many bytes of examples at a time."""


class LinearHead:
    """J in factored form, with the products of `Jacobian` in float64."""

    def __init__(self, jacobian: Jacobian, site: Site, features: Sequence[Tensor]) -> None:
        self.network, self.outputs, self.size = jacobian.network, jacobian.outputs, jacobian.size
        self.features = features
        """a of each batch, (B, T, I) float64."""
        order = torch.arange(self.size, device=self.network.device)
        self._order = site.gather(order, self.network).reshape(self.outputs[0].shape[-1], -1)
        """Where V[c, i] lies in the flat vector of weights, (C, I)."""

    def forward(self, vectors: Tensor) -> list[Tensor]:
        """J v of each vector: for every batch (k, B, T, C)."""
        matrices = vectors[:, self._order]
        return [torch.einsum("bti,kci->kbtc", a, matrices) for a in self.features]

    def backward(self, seeds: Sequence[Tensor]) -> Tensor:
        """J^T u, (k, P), for u given as (k, B, T, C) batch by batch."""
        total = torch.stack([torch.einsum("bti,kbtc->kci", a, u) for a, u in zip(self.features, seeds, strict=True)])
        return self._flat(total.sum(0))

    def ggn(
        self, vectors: Tensor, likelihood: Likelihood, targets: Sequence[Tensor], outputs: Sequence[Tensor]
    ) -> Tensor:
        """sum_n J_n^T H_n J_n v, (k, P), with the likelihood's curvature H at `outputs`."""
        parts = zip(outputs, targets, self.forward(vectors), strict=True)
        return self.backward([likelihood.curved(f, y, u) for f, y, u in parts])

    def normal(self, likelihood: Likelihood, targets: Sequence[Tensor], outputs: Sequence[Tensor]) -> Tensor:
        """sum_n J_n^T H_n J_n, (P, P), with the likelihood's curvature H at `outputs`."""
        classes, width = self._order.shape
        total = torch.zeros(classes, width, classes, width, dtype=torch.float64, device=self._order.device)
        apart = isinstance(likelihood, Separable)
        units = torch.eye(classes, dtype=torch.float64, device=self._order.device)
        for every, f, y in zip(self.features, outputs, targets, strict=True):
            step = max(1, WORK_BYTES // (8 * every.shape[1] * classes * (width + classes)))
            for part in (slice(start, start + step) for start in range(0, len(every), step)):
                a = every[part].flatten(0, 1)
                seeds = units[:, None, None].expand(-1, *f[part].shape)
                hessian = likelihood.curved(f[part], y[part], seeds).flatten(1, 2)
                for c in range(classes):
                    stop = c + 1 if apart else classes
                    weighted = (hessian[c, :, c:stop, None] * a[:, None]).flatten(1)
                    total[c:stop, :, c] += (weighted.mT @ a).reshape(stop - c, width, width)
        for c in range(classes):
            total[c, :, c + 1 :] = total[c + 1 :, :, c].movedim(0, 1)
        flat = torch.empty_like(total.reshape(self.size, self.size))
        index = self._order.flatten()
        flat[index[:, None], index] = total.reshape(self.size, self.size)
        return flat

    def _flat(self, matrices: Tensor) -> Tensor:
        """(k, C, I) as vectors (k, P)."""
        flat = torch.empty(len(matrices), self.size, dtype=matrices.dtype, device=matrices.device)
        flat[:, self._order.flatten()] = matrices.flatten(1)
        return flat


def linear_head(jacobian: Jacobian) -> LinearHead | None:
    """The Jacobian in factored form; None if the chosen weights are not one linear map onto the outputs."""
    network = jacobian.network
    features: list[Tensor] = []
    with network.prepared():
        tape, _ = planned_tape(network, jacobian.canonical, jacobian.batches[0].inputs)
        sites = tape.plan.sites
        if len(sites) != 1 or sites[0].kind != "outer" or tape.plan.general:
            return None
        (site,) = sites
        width = site.size // jacobian.outputs[0].shape[-1]
        if 8 * width * jacobian.n_outputs // jacobian.outputs[0].shape[-1] > jacobian.memory_budget // 4:
            return None
        for batch in jacobian.batches:
            a = tape.record(batch.inputs).head_inputs()
            if a is None:
                return None
            features.append(a.double())
    return LinearHead(jacobian, site, features)
