"""CO2 at Mauna Loa: level, slope and season as a linear-Gaussian model, fitted by EM, and ten years of forecast.

Monthly means of the weekly measurements 1958 to 2001, months without any missing. The model has four variances, fitted
to all but the last ten years; these are forecast with intervals, and then one year at a time with all before known.
"""

from __future__ import annotations

import matplotlib.pyplot as plt
import numpy as np
import torch
from common import COLOURS, arguments, report, save, table
from torch import Tensor

import lapis
from lapis.latent import LinearDynamics

AHEAD = 120
LEVELS = (0.5, 0.8, 0.95)


def monthly() -> tuple[Tensor, Tensor]:
    """Middle of each month in years, and mean CO2 in ppm, NaN where there is none."""
    arrays = lapis.data.stored("mauna_loa_co2")
    years, values = arrays["decimal_year"].astype(float), arrays["co2_ppm"].astype(float)
    months = np.floor(years * 12).astype(int)
    months -= (first := int(months.min()))
    counts = np.bincount(months)
    with np.errstate(invalid="ignore"):
        means = np.bincount(months, values) / counts
    return torch.tensor((np.arange(len(means)) + first + 0.5) / 12), torch.tensor(means)


def main() -> None:
    chosen = arguments(__doc__)
    years, co2 = monthly()
    known = co2[: -24 if chosen.quick else -AHEAD]
    if chosen.quick:
        known = known[-60:]
    begin = len(co2) - (24 if chosen.quick else AHEAD)
    model = LinearDynamics.structural(trend=True, season=12).fit(
        known, rounds=5 if chosen.quick else 60, tolerance=1e-1 if chosen.quick else 1e-4
    )
    later = co2[begin:]
    far = model.forecast(len(later))
    near = [model.forecast(12, torch.cat([known, later[:start]])) for start in range(0, len(later), 12)]
    nearer = [torch.cat(parts) for parts in zip(*((f.means, f.covariances) for f in near), strict=True)]
    rows = []
    for name, means, spread in (("all at once", far.means, far.covariances), ("one year at a time", *nearer)):
        gaps, deviations = later - means[:, 0], spread[:, 0, 0].sqrt()
        seen = ~gaps.isnan()
        inside = [(gaps.abs() < deviations * torch.special.ndtri(torch.tensor(0.5 + p / 2))) for p in LEVELS]
        rows.append([
            name, f"{float(gaps[seen].square().mean().sqrt()):.2f}", f"{float(deviations[seen].mean()):.2f}",
            *(f"{float(each[seen].double().mean()):.2f}" for each in inside),
        ])  # fmt: skip
    assert model.Q_ is not None
    assert model.R_ is not None
    noises = [*model.Q_.diagonal().sqrt().tolist(), float(model.R_.sqrt())]
    text = "\n".join([
        f"Forecast of the last {len(later)} months, fitted to {int((~known.isnan()).sum())} months before, in ppm.\n",
        table(["forecast", "RMSE", "mean deviation", *(f"coverage of {100 * p:.0f} %" for p in LEVELS)], rows),
        "\nStandard deviations of the noises a month, in ppm: level {:.3f}, slope {:.4f}, season {:.4f},"
        " observation {:.3f}.".format(*noises),
        f"{len(model.bounds_) - 1} rounds of EM (accelerated): log likelihood {model.bounds_[0]:.1f} to"
        f" {model.bounds_[-1]:.1f} nats.",
    ])  # fmt: skip
    report("mauna_loa", text, chosen)
    draw(chosen, years, co2, begin, model, far, nearer)


def draw(chosen, years, co2, begin, model, far, nearer) -> None:  # type: ignore[no-untyped-def]
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4))
    low, high = (end[:, 0] for end in far.interval(0.95))
    ahead = years[begin:]
    left.plot(years, co2, ".", ms=2, color="0.3", label="monthly means")
    left.plot(ahead, far.means[:, 0], color=COLOURS[1], lw=1, label="forecast from the end of the fit")
    left.fill_between(ahead, low, high, color=COLOURS[1], alpha=0.25, lw=0, label="95 % interval")
    left.set(
        xlabel="year", ylabel="CO2 (ppm)", title="Ten years ahead at once" if not chosen.quick else "Ahead at once"
    )
    left.legend(loc="upper left", frameon=False)
    half = 1.96 * nearer[1][:, 0, 0].sqrt()
    right.plot(ahead, co2[begin:] - nearer[0][:, 0], ".", ms=4, color="0.3", label="observed less forecast")
    right.fill_between(ahead, -half, half, color=COLOURS[0], alpha=0.25, lw=0, label="95 % interval")
    right.axhline(0, color=COLOURS[0], lw=1)
    right.set(xlabel="year", ylabel="ppm", title="One year at a time, all before known")
    right.legend(loc="upper left", frameon=False)
    save(figure, "mauna_loa", chosen)


if __name__ == "__main__":
    main()
