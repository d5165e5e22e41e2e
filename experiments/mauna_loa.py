"""CO2 at Mauna Loa: level, slope and season as a linear-Gaussian model, fitted by EM, and ten years of forecast.

Monthly means of the weekly measurements 1958 to 2001, months without any missing. The model has four variances, fitted
to all but the last ten years; these are forecast with intervals, and then one year at a time with all before known.

A second model asks why intervals ten years ahead are too wide: deviations of the level (El Nino) return instead of
adding up. It has one state more, d_t = rho d_{t-1} + w, and is fitted by the gradient of the log likelihood. Both are
also asked for forecasts from every year since the fifth, months 109 to 120 ahead.
"""

from __future__ import annotations

import matplotlib.pyplot as plt
import numpy as np
import torch
from common import COLOURS, arguments, report, save, table
from scipy.optimize import minimize
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
    returning, rho = with_returning_deviation(model, known, 3 if chosen.quick else 60)
    later = co2[begin:]
    far = model.forecast(len(later))
    nearer = year_by_year(model, known, later)
    rows = []
    for name, each in (("random walk", model), ("deviation that returns", returning)):
        ahead = each.forecast(len(later), known)
        rows.append([name, "all at once", *scores(later, ahead.means, ahead.covariances)])
        rows.append([name, "one year at a time", *scores(later, *year_by_year(each, known, later))])
        if not chosen.quick:
            rows.append([name, "tenth year, from every year", *scores(*tenth_years(each, co2))])
    assert model.Q_ is not None
    assert model.R_ is not None
    noises = [*model.Q_.diagonal().sqrt().tolist(), float(model.R_.sqrt())]
    likelihoods = [float(each.log_likelihood(known)) for each in (model, returning)]
    text = "\n".join([
        f"Forecast of the last {len(later)} months, fitted to {int((~known.isnan()).sum())} months before, in ppm.\n",
        table(["level", "forecast", "RMSE", "mean deviation", *(f"coverage of {100 * p:.0f} %" for p in LEVELS)], rows),
        "\nStandard deviations of the noises a month, in ppm: level {:.3f}, slope {:.4f}, season {:.4f},"
        " observation {:.3f}.".format(*noises),
        f"{len(model.bounds_) - 1} rounds of EM (accelerated): log likelihood {model.bounds_[0]:.1f} to"
        f" {model.bounds_[-1]:.1f} nats.",
        f"With a deviation that returns (rho = {rho:.2f} a month) {likelihoods[1]:.1f}"
        f" instead of {likelihoods[0]:.1f}, with two parameters more.",
    ])  # fmt: skip
    report("mauna_loa", text, chosen)
    draw(chosen, years, co2, begin, far, nearer)


def with_returning_deviation(model: LinearDynamics, known: Tensor, rounds: int) -> tuple[LinearDynamics, float]:
    """The fitted model with a deviation d_t = rho d_{t-1} + w beside the level, and rho."""
    states = len(model.A_)
    enter = torch.eye(states + 1, 4, dtype=torch.float64)
    enter[:, 3] = torch.eye(states + 1, dtype=torch.float64)[states]
    single = torch.ones(1, 1, dtype=torch.float64)

    def made(parameters: Tensor) -> LinearDynamics:
        noises, r, rho = parameters[:4].exp(), parameters[4].exp().reshape(1, 1), parameters[5].tanh()
        spread = noises[3:] / (1 - rho**2)  # of the stationary distribution
        return LinearDynamics(
            A=torch.block_diag(model.A_, rho * single), C=torch.cat([model.C_, single], 1), Q=noises.diag(), R=r,
            m=torch.cat([model.m_, torch.zeros_like(spread)]), P=torch.block_diag(model.P_, spread * single), G=enter,
            fixed=("A", "C", "m", "P"), state_noise="diagonal",
        )  # fmt: skip

    def loss(x: np.ndarray) -> tuple[float, np.ndarray]:
        parameters = torch.tensor(x, requires_grad=True)
        value = -made(parameters).log_likelihood(known)
        value.backward()
        return float(value.detach()), parameters.grad.numpy()

    level, slope, season = model.Q_.diagonal().log().tolist()
    start = [level - 4, slope, season, level, float(model.R_.log()), 1.0]
    found = minimize(loss, start, jac=True, method="L-BFGS-B", bounds=[(-20, 5)] * 5 + [(-1, 3)],
                     options={"maxiter": rounds})  # fmt: skip
    return made(torch.tensor(found.x)), float(np.tanh(found.x[5]))


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
