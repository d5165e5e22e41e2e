"""Draws that are made some together after the others: those made so far, in a checkpoint too."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

from lapis.checkpoint import Checkpoint, Offered
from lapis.schema import count, entry, tensor, wrong

if TYPE_CHECKING:
    from lapis.posteriors.laplace.matrix_free.implicit import ImplicitPosterior


class Made:
    """The draws made so far, with what is known of each of them.

    Args:
        posterior: the one that is drawn from.
        samples: how many draws there are to be.
        kept: a checkpoint; what an earlier run left in it is taken over.
        records: names of what is known of each draw, with the type of a list of them.
    """

    def __init__(
        self, posterior: ImplicitPosterior, samples: int, kept: Checkpoint, records: Mapping[str, Any]
    ) -> None:
        self.draws = posterior.mean.new_empty(samples, posterior.n_weights)
        """(samples, P); the rows of those that are not made yet have no meaning."""
        self.records: dict[str, list[Any]] = {name: [] for name in records}
        self.products = 0
        """Products with the curvature, one for each vector."""
        self._kept = kept
        if not kept.tensors:
            return
        self.records = {name: list(entry(kept.facts, name, kind)) for name, kind in records.items()}
        self.products = count(kept.facts, "products", least=0)
        if len(set(map(len, self.records.values()))) > 1 or len(self) > samples:
            names = " and ".join(self.records)
            raise wrong(names, f"as many of one as of the other, at most {samples}", str(len(self)))
        if len(self):
            self.draws[: len(self)] = tensor(kept.tensors, "done", (len(self), posterior.n_weights), self.draws.dtype)

    def __len__(self) -> int:
        return len(next(iter(self.records.values())))

    def add(self, draws: Tensor, products: int, **records: Iterable[Any]) -> None:
        """Some more, which the checkpoint gets at once."""
        first = len(self)
        self.draws[first : first + len(draws)] = draws
        for name, values in records.items():
            self.records[name] += values
        self.products += products
        self._kept.offer(*self._state(), now=True)

    def follow(self, state: Callable[[], Offered]) -> None:
        """Let the checkpoint ask for the state of the solve that goes on, beside the draws made before it."""

        def offered() -> Offered:
            solve = state()
            if solve is None:
                return None
            (tensors, facts), (more_tensors, more_facts) = self._state(), solve
            return tensors | more_tensors, facts | more_facts

        self._kept.follow(offered)

    def _state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        done = {"done": self.draws[: len(self)]} if len(self) else {}
        return done, {**self.records, "products": self.products}
