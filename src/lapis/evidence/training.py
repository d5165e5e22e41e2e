"""The record of training by the evidence."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Training:
    """The record that `lapis.train` leaves on the posterior it returns."""

    epochs: int
    """Epochs trained."""
    best_epoch: int
    """The epoch whose weights were kept: the last, or, with `patience`, the one with the highest evidence."""
    evaluated: tuple[int, ...]
    """Epochs after which curvature was refitted and hyperparameters were tuned."""
    log_evidence: tuple[float, ...]
    """Log evidence after each of those."""
    loss: tuple[float, ...]
    """Mean of -log p(y, theta) / N over each epoch's batches."""
    reason: str
    """Why training ended."""
    constant: float = float("-inf")
    """log p(D) of the best constant prediction: an evidence below it means that the network explains nothing."""
    held: tuple[int, ...] = ()
    """Early epochs with an evidence below `constant`, after which the prior was loosened instead of tuned."""

    steps: int = 0
    """Optimiser steps taken."""
    remaining: float = float("nan")
    """Nats by which a Newton step promises to lower -log p(D, theta) from the weights kept, 1/2 g^T A^-1 g."""
    converged: bool = True
    """False if that is more than gamma and more than a tenth of what the evidence has gained over `constant`."""

    def __post_init__(self) -> None:
        for name in ("evaluated", "log_evidence", "loss", "held"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
