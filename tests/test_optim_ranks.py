"""Two processes of torch.distributed: the same run as one process with the same draws, or with the whole batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import lapis
from lapis.optim import IVON, VOGN
from ranks import run
from test_optim import N, batch, loss_of, network, weights

STEPS = 3


def made(kind: str, model: Any, **options: Any) -> Any:
    if kind == "vogn":
        return VOGN(model, lr=0.02, data_size=N, hess_init=0.1, betas=(0.9, 0.95), **options)
    return IVON(model.parameters(), lr=0.1, data_size=N, betas=(0.9, 0.95), **options)


def half(number: int, rank: int) -> tuple[Tensor, Tensor]:
    x, y = batch(number)
    return x[4 * rank : 4 * rank + 4], y[4 * rank : 4 * rank + 4]


def trained(rank: int) -> dict[str, Tensor]:
    """The weights of one of two processes, for each way to train."""
    found = {}
    for kind in ("ivon", "vogn", "parallel"):
        model = network()
        optimiser = made(kind, model, synchronise=kind != "parallel")
        called = torch.nn.parallel.DistributedDataParallel(model) if kind == "parallel" else model
        for number in range(STEPS):
            optimiser.zero_grad()
            with optimiser.sampled():
                loss_of(called, *half(number, rank)).backward()
            optimiser.step()
        found[kind] = weights(model)
    model = network()
    parallel, optimiser = torch.nn.parallel.DistributedDataParallel(model), made("ivon", model, synchronise=True)
    with optimiser.sampled():
        loss_of(parallel, *half(0, rank)).backward()
    with pytest.raises(lapis.OptionError, match="averaged over the ranks already"):
        optimiser.step()
    return found


def alone(kind: str) -> Tensor:
    """One process: two draws a step, one for each half of the batch; or one draw for the whole."""
    model = network()
    optimiser = made(kind, model)
    for number in range(STEPS):
        optimiser.zero_grad()
        for rank in range(1 if kind == "parallel" else 2):
            with optimiser.sampled():
                whole = kind == "parallel"
                loss = loss_of(model, *batch(number)) if whole else loss_of(model, *half(number, rank)) / 2
                loss.backward()
        optimiser.step()
    return weights(model)


def test_two_processes_take_the_steps_of_one(tmp_path: Path) -> None:
    first, second = run(trained, 2, tmp_path)
    assert isinstance(first, dict), first
    for kind, value in first.items():
        assert torch.equal(value, second[kind]), kind
        assert torch.allclose(value, alone(kind), rtol=1e-9), kind
