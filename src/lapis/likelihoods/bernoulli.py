"""Binary classification by a logistic function: one logit, or several independent labels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from lapis.likelihoods._draws import seeded
from lapis.likelihoods._probabilities import fill_unit_interval, final_function
from lapis.likelihoods._targets import per_output, raise_at
from lapis.likelihoods.base import Kind, Separable


class Bernoulli(Separable):
    """p(y_c = 1 | f) = sigmoid(f_c), independently for each output (multi-label when C > 1).

    Targets are (B, C), (B,) when C = 1, or laid out as the outputs; of any dtype, booleans included, with
    values in [0, 1] (fractions are soft labels: -log p = -y log sigmoid(f) - (1 - y) log sigmoid(-f)).
    """

    name: ClassVar[str] = "bernoulli"
    kind: ClassVar[Kind] = "classification"
    is_elementwise: ClassVar[bool] = True

    def suspicion(self, f: Tensor) -> str | None:
        """Outputs that are probabilities already."""
        last = final_function(f)
        if last is not None:
            seen = f"the network ends in a {last}"
        elif fill_unit_interval(f):
            seen = f"all {f.numel()} outputs lie in [0, 1] and come near to both ends"
        else:
            return None
        return (
            f"Outputs look like probabilities: {seen}. The bernoulli likelihood takes logits and applies a sigmoid "
            "itself. Remove the network's last sigmoid, or return torch.logit of its probabilities."
        )

    def targets(self, y: Any, f: Tensor, raw_shape: Sequence[int] | None = None) -> Tensor:
        positions = None if raw_shape is None else self.positions(raw_shape)
        labels = per_output(y, f, width=f.shape[-1], channels=self.channels, positions=positions, what="Binary targets")
        bad = (labels < 0) | (labels > 1)
        if bad.any():
            raise_at(
                labels,
                bad,
                "outside [0, 1]",
                expected="0 and 1, booleans, or probabilities between",
                do="relabel the targets (-1/+1 becomes 0/1), or use the categorical likelihood for classes",
            )
        return labels

    def position_nll(self, f: Tensor, y: Tensor) -> Tensor:
        return -(y * logsigmoid(f) + (1 - y) * logsigmoid(-f)).sum(-1)

    def gradient(self, f: Tensor, y: Tensor) -> Tensor:
        """sigmoid(f) - y."""
        return f.sigmoid() - y

    def link(self, f: Tensor) -> Tensor:
        return f.sigmoid()

    def root(self, f: Tensor) -> Tensor:
        """sqrt(p (1 - p)), through logarithms: in float32, 1 - sigmoid(f) rounds to zero for f >= 17."""
        return (0.5 * (logsigmoid(f) + logsigmoid(-f))).exp()

    def sampled_gradient(self, f: Tensor, y: Tensor, generator: torch.Generator | None = None) -> Tensor:
        p = f.detach().sigmoid()
        source = seeded(generator, f.device)
        return p - torch.bernoulli(p.to(source.device), generator=source).to(f.device)
