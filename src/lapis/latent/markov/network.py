"""States whose densities a network gives."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from lapis.errors import ModelError
from lapis.latent.markov.emissions import Emissions, Sums, whole_rows_missing
from lapis.options import shown


@dataclass(frozen=True)
class NetworkEmissions(Emissions):
    """Log densities (N, K) of rows (N, D) by a module; the M-step climbs by L-BFGS and never down."""

    module: nn.Module
    n_states_: int
    steps: int = 10
    """Steps of L-BFGS in one M-step."""

    @property
    def n_states(self) -> int:
        return self.n_states_

    def read(self, rows: Tensor) -> Tensor:
        rows = rows if rows.dim() == 2 else rows[:, None]
        like = next(iter(self.module.parameters()), None)
        if rows.is_floating_point():
            whole_rows_missing(rows)
            rows = rows if like is None else rows.to(like)
        return rows

    def log_densities(self, rows: Tensor) -> Tensor:
        missing = rows.isnan().any(1, keepdim=True)
        with in_evaluation(self.module):
            found = self.module(torch.where(missing, torch.zeros_like(rows), rows))
        if not isinstance(found, Tensor) or found.shape != (len(rows), self.n_states):
            raise ModelError(
                "The network gives no log densities",
                expected=f"a tensor ({len(rows)}, {self.n_states}), one column a state",
                got=shown(found),
                do="let it map (T, D) to (T, K)",
            )
        if not bool((found < math.inf).all()):
            raise ModelError(
                "The network's log densities are not finite",
                expected="numbers",
                got="NaN or inf",
                do="check the network",
            )
        return torch.where(missing, torch.zeros_like(found), found)

    def statistics(self, rows: Tensor, weights: Tensor) -> dict[str, Tensor]:
        return {"rows": rows, "weights": weights}

    def expected(self, sums: Sums, pseudo_count: float) -> Tensor:
        weights = sums["weights"]
        logs = self.log_densities(sums["rows"]).to(weights.dtype)
        return torch.where(weights > 0, weights * logs, 0.0).sum()

    def maximised(self, sums: Sums, pseudo_count: float) -> NetworkEmissions:
        """Generalised EM: a better network, by L-BFGS, then back towards the old one until it is no worse."""
        moved = replace(self, module=copy.deepcopy(self.module))
        weights = [p for p in moved.module.parameters() if p.requires_grad]
        if not weights:
            return self
        before = [p.detach().clone() for p in weights]
        floor = float(self.expected(sums, pseudo_count))
        optimiser = torch.optim.LBFGS(weights, max_iter=self.steps, line_search_fn="strong_wolfe")

        def closure() -> Tensor:
            optimiser.zero_grad()
            loss = -moved.expected(sums, pseudo_count) / len(sums["rows"])
            loss.backward()  # type: ignore[no-untyped-call]
            return loss

        with torch.enable_grad():
            optimiser.step(closure)  # type: ignore[no-untyped-call]
        optimiser.zero_grad()
        after = [p.detach().clone() for p in weights]
        for halvings in range(20):
            with torch.no_grad():
                for p, old, new in zip(weights, before, after, strict=True):
                    p.copy_(old + (new - old) * 0.5**halvings)
                finite = all(bool(p.isfinite().all()) for p in weights)
                if finite and float(moved.expected(sums, pseudo_count)) >= floor:
                    return moved
        return self

    def to(self, dtype: torch.dtype) -> NetworkEmissions:
        return self


@contextmanager
def in_evaluation(module: nn.Module) -> Iterator[None]:
    """The module in evaluation mode; each part has its own mode back afterwards."""
    modes = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for part, training in modes:
            part.training = training
