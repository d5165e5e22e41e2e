"""Models side by side: log evidence, effective parameters, and what the differences mean."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lapis.errors import OptionError
from lapis.network import outside_inference_mode
from lapis.options import check_arguments
from lapis.posteriors.evidences import log_evidences
from lapis.posteriors.laplace.family import LaplaceFamily


@dataclass(frozen=True)
class Comparison:
    """A table of models, in the order given; printing it shows the best first."""

    names: tuple[str, ...]
    log_evidence: tuple[float, ...]
    difference: tuple[float, ...]
    """To the best model, in nats: at most zero."""
    probability: tuple[float, ...]
    """Of each model, had all the same probability before the data."""
    effective_parameters: tuple[float, ...]
    n_weights: tuple[int, ...]
    taken_at: tuple[str, ...]
    """"t" (the trained weights) or "theta*" (the tangent model's mode)."""
    n_data: int

    @property
    def best(self) -> str:
        return self.names[max(range(len(self.names)), key=self.log_evidence.__getitem__)]

    def __str__(self) -> str:
        head = ("model", "log evidence", "difference", "probability", "gamma", "weights", "at")
        order = sorted(range(len(self.names)), key=lambda i: -self.log_evidence[i])
        rows = [
            (
                self.names[i],
                f"{self.log_evidence[i]:.3f}",
                f"{self.difference[i]:.3f}",
                f"{self.probability[i]:.3g}",
                f"{self.effective_parameters[i]:.2f}",
                f"{self.n_weights[i]:,}",
                self.taken_at[i],
            )
            for i in order
        ]
        widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
        return "\n".join(
            "  ".join(
                cell.ljust(w) if j == 0 else cell.rjust(w) for j, (cell, w) in enumerate(zip(row, widths, strict=True))
            )
            for row in (head, *rows)
        )


@outside_inference_mode
def compare(posteriors: Sequence[LaplaceFamily] | Mapping[str, LaplaceFamily]) -> Comparison:
    """Compare models of the same data by their evidence; a mapping names them.

    Refused: posteriors of different data (their evidences say nothing about each other), of different temperatures, and
    evidences of which some are taken at t, some at theta*.

    >>> import torch, lapis
    >>> x = torch.linspace(-1, 1, 20)[:, None]
    >>> models = {"line": torch.nn.Linear(1, 1), "constant": torch.nn.Linear(1, 1, bias=False)}
    >>> table = lapis.compare({name: lapis.laplace(m, (x, x), "regression") for name, m in models.items()})
    >>> table.n_data, table.n_weights
    (20, (2, 1))
    """
    check_arguments(compare, locals())
    named = dict(posteriors) if isinstance(posteriors, Mapping) else {str(i): p for i, p in enumerate(posteriors)}
    if not named:
        raise OptionError("Nothing to compare", expected="at least one posterior", got="none", do="pass some")
    evidence = log_evidences(named)
    return Comparison(
        tuple(named),
        tuple(evidence.tolist()),
        tuple((evidence - evidence.max()).tolist()),
        tuple(evidence.softmax(0).tolist()),
        tuple(float(posterior.effective_parameters()) for posterior in named.values()),
        tuple(posterior.n_weights for posterior in named.values()),
        tuple("t" if posterior.mode is None else "theta*" for posterior in named.values()),
        next(iter(named.values())).n_data,
    )
