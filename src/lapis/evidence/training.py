"""How training by the evidence went."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Training:
    """The record that `lapis.train` leaves on the posterior it returns."""

    epochs: int
    """Epochs trained."""
    best_epoch: int
    """The one whose weights, prior and noise had the highest evidence, and were kept."""
    evaluated: tuple[int, ...]
    """Epochs after which curvature was refitted and hyperparameters were tuned."""
    log_evidence: tuple[float, ...]
    """After each of those."""
    loss: tuple[float, ...]
    """Mean of -log p(y, theta) / N over each epoch's batches."""
    reason: str
    """Why it ended."""
    constant: float = float("-inf")
    """log p(D) of the best constant prediction: an evidence below it speaks for no network at all."""
    held: tuple[int, ...] = ()
    """Epochs whose evidence was below that, early enough to go on training: the prior was loosened, not tuned."""

    def __post_init__(self) -> None:
        for name in ("evaluated", "log_evidence", "loss", "held"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
