"""CO2 at Mauna Loa: level, slope and season as a linear-Gaussian model, fitted by EM, and ten years of forecast.

Monthly means of the weekly measurements 1958 to 2001, months without any missing. Fitted to all but the last ten years;
these are forecast with intervals, and then one year at a time with all before known. Two seasons: one value for each
month (three variances of states), and four waves whose amplitudes and phases drift (ten variances).

The errors of ten years at once are one path, on which months agree: coverage of a single path says little. How little
is told by paths that the fitted model itself draws.
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
    later, rows, expected, lines = co2[begin:], [], [], []
    for name, waves in (("twelve months", None), ("four waves", 4)):
        model = LinearDynamics.structural(trend=True, season=12, harmonics=waves).fit(
            known, rounds=5 if chosen.quick else 60, tolerance=1e-1 if chosen.quick else 1e-4
        )
        far, nearer = model.forecast(len(later), known), year_by_year(model, known, later)
        rows.append([name, "all at once", *scores(later, far.means, far.covariances)])
        rows.append([name, "one year at a time", *scores(later, *nearer)])
        if not chosen.quick:
            rows.append([name, "tenth year, from every year", *scores(*tenth_years(model, co2))])
        shares = coverages_of_paths(model, known, len(later), 50 if chosen.quick else 1000)
        expected.append([name, *(f"{low:.2f} to {high:.2f}, {mean:.2f}" for low, high, mean in shares)])
        assert model.Q_ is not None
        assert model.R_ is not None
        noises = [f"{noise:.4f}" for noise in (*model.Q_.diagonal().sqrt().tolist(), float(model.R_.sqrt()))]
        early = float(model.log_likelihood(known[:36]))
        lines.append(
            f"{name.capitalize()}: standard deviations of the noises a month, in ppm: level {noises[0]}, slope"
            f" {noises[1]}, season {', '.join(noises[2:-1])}, observation {noises[-1]}. {len(model.bounds_) - 1} rounds"
            f" of EM (accelerated): log likelihood {model.bounds_[0]:.1f} to {model.bounds_[-1]:.1f} nats, of which"
            f" {model.bounds_[-1] - early:.1f} after the first three years."
        )
    levels = [f"coverage of {100 * p:.0f} %" for p in LEVELS]
    text = "\n\n".join([
        f"Forecast of the last {len(later)} months, fitted to {int((~known.isnan()).sum())} months before, in ppm.",
        table(["season", "forecast", "RMSE", "mean deviation", *levels], rows),
        "Coverage of all at once in paths that the model itself draws: 5 to 95 % of the paths, and their mean.",
        table(["season", *levels], expected), *lines,
    ])  # fmt: skip
    report("mauna_loa", text, chosen)
    draw(chosen, years, co2, begin, far, nearer)


def coverages_of_paths(model: LinearDynamics, known: Tensor, steps: int, paths: int) -> list[tuple[float, ...]]:
    """Of each level: 5 and 95 % of the shares of months inside, and the mean."""
    source, states = torch.Generator().manual_seed(0), model.filter(known)
    a, c, q, r = (matrix for matrix in (model.A_, model.C_, model.Q_, model.R_) if matrix is not None)

    def normal(like: Tensor) -> Tensor:
        return torch.randn(paths, like.shape[-1], generator=source, dtype=like.dtype)

    x = states.means[-1] + normal(a) @ torch.linalg.cholesky(states.covariances[-1]).mT
    ahead = model.forecast(steps, known)
    gaps = []
    for mean, covariance in zip(ahead.means, ahead.covariances, strict=True):
        x = x @ a.mT + (normal(q) * q.diagonal().sqrt()) @ model.G.mT
        y = x @ c.mT + normal(r) * r.sqrt()
        gaps.append((y[:, 0] - mean[0]) / covariance[0, 0].sqrt())
    sizes = torch.stack(gaps, 1).abs()
    shares = [(sizes < torch.special.ndtri(torch.tensor(0.5 + p / 2))).double().mean(1) for p in LEVELS]
    return [(float(s.quantile(0.05)), float(s.quantile(0.95)), float(s.mean())) for s in shares]


def year_by_year(model: LinearDynamics, known: Tensor, later: Tensor) -> tuple[Tensor, Tensor]:
    """Means and covariances of forecasts of 12 months each."""
    found = [model.forecast(12, torch.cat([known, later[:start]])) for start in range(0, len(later), 12)]
    return torch.cat([each.means for each in found]), torch.cat([each.covariances for each in found])


def tenth_years(model: LinearDynamics, co2: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Months 109 to 120 after every year since the fifth: observed, means, covariances."""
    starts = range(60, len(co2) - AHEAD + 1, 12)
    found = [model.forecast(AHEAD, co2[:start]) for start in starts]
    seen = torch.cat([co2[start + AHEAD - 12 : start + AHEAD] for start in starts])
    return seen, torch.cat([f.means[-12:] for f in found]), torch.cat([f.covariances[-12:] for f in found])


def scores(observed: Tensor, means: Tensor, covariances: Tensor) -> list[str]:
    """RMSE, mean deviation, and coverages."""
    gaps, deviations = observed - means[:, 0], covariances[:, 0, 0].sqrt()
    seen = ~gaps.isnan()
    inside = [(gaps.abs() < deviations * torch.special.ndtri(torch.tensor(0.5 + p / 2))) for p in LEVELS]
    return [
        f"{float(gaps[seen].square().mean().sqrt()):.2f}", f"{float(deviations[seen].mean()):.2f}",
        *(f"{float(each[seen].double().mean()):.2f}" for each in inside),
    ]  # fmt: skip


def draw(chosen, years, co2, begin, far, nearer) -> None:  # type: ignore[no-untyped-def]
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4))
    low, high = (end[:, 0] for end in far.interval(0.95))
    ahead = years[begin:]
    left.plot(years, co2, ".", ms=2, color="0.3", label="monthly means")
    left.plot(ahead, far.means[:, 0], color=COLOURS[1], lw=1, label="forecast from the end of the fit")
    left.fill_between(ahead, low, high, color=COLOURS[1], alpha=0.25, lw=0, label="95 % interval")
    left.set(
        xlabel="year", ylabel="CO2 (ppm)", title="Ten years ahead at once" if not chosen.quick else "Ahead at once"
    )
    left.legend(loc="upper left", frameon=False, markerscale=3)
    half = 1.96 * nearer[1][:, 0, 0].sqrt()
    right.plot(ahead, co2[begin:] - nearer[0][:, 0], ".", ms=4, color="0.3", label="observed less forecast")
    right.fill_between(ahead, -half, half, color=COLOURS[0], alpha=0.25, lw=0, label="95 % interval")
    right.axhline(0, color=COLOURS[0], lw=1)
    right.set(xlabel="year", ylabel="ppm", title="One year at a time, all before known")
    reach = max(float(half.max()), float((co2[begin:] - nearer[0][:, 0]).nan_to_num(0.0).abs().max()))
    right.set(ylim=(-1.15 * reach, 1.6 * reach))  # room for the legend above the intervals
    right.legend(loc="upper center", ncols=2, frameon=False)
    save(figure, "mauna_loa", chosen)


if __name__ == "__main__":
    main()
