"""The network linearised at weights t, f(x) + J(x) (theta - t): what turns Gaussians over weights into processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lapis.batches import Batch, Inputs, batch_length
from lapis.curvature.outputs import check_finite
from lapis.curvature.products.jacobian import Jacobian
from lapis.likelihoods import Likelihood
from lapis.network import Network, full_precision
from lapis.network.inputs import check_inputs

PART = 256
"""Examples that the network runs on together, where memory allows."""


@dataclass(frozen=True, eq=False)
class Tangent:
    """The linear model of a network at weights t.

    Args:
        network: and its chosen weights.
        likelihood: of its outputs.
        point: t (P,), float64 or the network's dtype.
        elsewhere: whether t are other weights than the module holds; it then runs at t.
        signature: of inputs that are known to work, for error messages.
        memory_budget: bytes of working memory.
        check: raises an error if the network has changed since t was its weights.
    """

    network: Network
    likelihood: Likelihood
    point: Tensor
    elsewhere: bool
    signature: str
    memory_budget: int
    check: Callable[[], None]

    @contextmanager
    def ready(self) -> Iterator[None]:
        """The network checked, at t, and kept from other threads, until the context ends."""
        with self.network.held(), full_precision(self.network.device):
            self.check()
            with self.network.at(self.point) if self.elsewhere else nullcontext():
                yield

    def inputs(self, x: Any) -> Inputs:
        """Checked inputs on the network's device."""
        return check_inputs(x, self.network, self.signature)

    def jacobian(self, inputs: Inputs, targets: Tensor | None = None) -> Jacobian:
        """J of all examples, by its products; to be used while `ready`."""
        length = batch_length(inputs)
        batch = Batch(inputs, torch.zeros(length, device=self.network.device) if targets is None else targets, 0)
        parts = list(batch.split(PART))
        jacobian = Jacobian(
            self.network, self.likelihood.canonical, parts, memory_budget=self.memory_budget, kept_bytes=0
        )
        for f in jacobian.outputs:
            check_finite(f)
            self.likelihood.check_outputs(f)
        return jacobian

    def outputs(self, jacobian: Jacobian, deviation: Tensor | None) -> Tensor:
        """f + J d for one deviation d (P,) of the weights from t, None for zero: (B, T, C) float64."""
        f = torch.cat(jacobian.outputs)
        return f if deviation is None else f + torch.cat(jacobian.forward(deviation.double()[None]), 1)[0]

    def raw_shape(self, jacobian: Jacobian) -> tuple[int, ...]:
        """The shape of the network's own output for all examples."""
        return (sum(map(len, jacobian.outputs)), *jacobian.shapes[0][1:])
