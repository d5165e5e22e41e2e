"""Exact posteriors are calibrated over simulated data, and wrong ones are noticed; `make sbc` is the long run."""

from __future__ import annotations

import torch

from sbc import ALARM, FITS, MODELS, p_values, ranks, spread

DRAWS, SIMULATIONS = 9, 80
LEAN = ("dense", "kronecker", "lowrank (all)", "implicit")


def test_ranks_of_exact_posteriors_are_uniform() -> None:
    """False alarm at a rate of 1e-3 for any other seed."""
    found = ranks(MODELS["linear Gaussian"], {name: FITS[name] for name in LEAN}, SIMULATIONS, DRAWS, seed=0)
    tests = sum(values.shape[1] for values in found.values())
    for name, values in found.items():
        assert float(p_values(values, DRAWS).min()) > ALARM / tests, name


def test_posteriors_of_another_width_are_noticed() -> None:
    found = ranks(
        MODELS["linear Gaussian"],
        {
            "too narrow": lambda *problem: FITS["dense"](*problem).with_temperature(1 / 6),
            "too wide": lambda *problem: FITS["dense"](*problem).with_temperature(40.0),
        },
        SIMULATIONS,
        DRAWS,
        seed=0,
    )
    for values in found.values():
        assert float(p_values(values, DRAWS).min()) < ALARM / 36
    assert spread(found["too narrow"], DRAWS) > 1.2
    assert spread(found["too wide"], DRAWS) < 0.8


def test_uniform_ranks_have_uniform_p_values() -> None:
    uniform = torch.randint(20, (400, 300), generator=torch.Generator().manual_seed(0))
    values = p_values(uniform, 19)
    assert abs(float(values.mean()) - 0.5) < 4 * (1 / 12 / 300) ** 0.5  # four standard errors: 6e-5
    assert abs(spread(uniform, 19) - 1) < 0.02
