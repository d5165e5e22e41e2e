"""Scores of predicted distributions of numbers: Gaussians, mixtures of Gaussians, intervals and samples.

Means and standard deviations have the shape of the targets, or (S, *shape) for mixtures of S Gaussians, such as
sampled predictions: the outputs of S drawn networks, each with the noise about it. Results are means over all targets.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from lapis.metrics._checks import (
    check_same_shape,
    checked_gaussian,
    checked_weights,
    require,
)
from lapis.options import check_arguments, check_between, check_count, checked_numbers, checked_tensor

MANY_LEVELS = tuple(i / 20 for i in range(1, 20))


def rmse(mean: Tensor, targets: Tensor) -> Tensor:
    """Root of the mean squared error over examples and outputs.

    >>> rmse(torch.tensor([1.0, 2.0]), torch.tensor([4.0, 6.0])).item()
    3.535...
    """
    check_same_shape("mean", mean, "targets", targets)
    return (checked_numbers("mean", mean) - checked_numbers("targets", targets)).square().mean().sqrt()


def coverage(lower: Tensor, upper: Tensor, targets: Tensor) -> Tensor:
    """Share of targets inside [lower, upper]; a calibrated 95 % interval covers about 0.95 of them.

    >>> coverage(torch.tensor([0.0, 0.0]), torch.tensor([1.0, 1.0]), torch.tensor([0.5, 2.0])).item()
    0.5
    """
    low, high, y = _intervals(lower, upper, targets)
    return ((low <= y) & (y <= high)).double().mean()


def interval_score(lower: Tensor, upper: Tensor, targets: Tensor, level: float = 0.95) -> Tensor:
    """Mean of (u - l) + 2/a (l - y)_+ + 2/a (y - u)_+ with a = 1 - level (Gneiting and Raftery 2007); lower is better.

    It is smallest, in expectation, for the a/2 and 1 - a/2 quantiles: width counts, and so does what falls outside.

    >>> interval_score(torch.tensor([0.0]), torch.tensor([1.0]), torch.tensor([1.5]), level=0.8).item()
    6.0...
    """
    check_arguments(interval_score, locals())
    _check_levels([level])
    low, high, y = _intervals(lower, upper, targets)
    outside = (low - y).clamp_min(0) + (y - high).clamp_min(0)
    return (high - low + 2 / (1 - level) * outside).mean()


def regression_calibration(
    mean: Tensor,
    std: Tensor,
    targets: Tensor,
    levels: Sequence[float] = (0.5, 0.8, 0.9, 0.95, 0.99),
    *,
    weights: Tensor | None = None,
) -> Tensor:
    """Observed coverage of the central interval of each level, (len(levels),); calibrated: equal to levels.

    A target is in the interval between the quantiles (1 - level)/2 and (1 + level)/2 where |2 PIT - 1| <= level; for
    one Gaussian that is |y - mean| <= std sqrt(2) erfinv(level).

    >>> regression_calibration(torch.zeros(2), torch.ones(2), torch.tensor([0.5, 3.0]), levels=(0.9,)).tolist()
    [0.5]
    """
    check_arguments(regression_calibration, locals())
    _check_levels(levels)
    distance = (2 * pit(mean, std, targets, weights=weights) - 1).abs().flatten()
    return (distance <= torch.tensor(list(levels), dtype=torch.float64).unsqueeze(-1)).double().mean(-1)


def regression_calibration_error(
    mean: Tensor,
    std: Tensor,
    targets: Tensor,
    levels: Sequence[float] = MANY_LEVELS,
    *,
    weights: Tensor | None = None,
) -> Tensor:
    """Mean over levels of |observed coverage - level| of central intervals; zero when calibrated.

    >>> round(regression_calibration_error(torch.zeros(1), torch.ones(1), torch.zeros(1), levels=(0.5, 0.9)).item(), 3)
    0.3
    """
    check_arguments(regression_calibration_error, locals())
    observed = regression_calibration(mean, std, targets, levels, weights=weights)
    return (observed - torch.tensor(list(levels), dtype=torch.float64)).abs().mean()


def pit(mean: Tensor, std: Tensor, targets: Tensor, *, weights: Tensor | None = None) -> Tensor:
    """Probability integral transform F(y) of each target, in the targets' shape: uniform on [0, 1] when calibrated.

    sum_s w_s Phi((y - mean_s) / std_s), with equal weights unless `weights` (S,) are given.

    >>> pit(torch.tensor([0.0, 0.0]), torch.tensor([1.0, 1.0]), torch.tensor([0.0, 1.6449])).tolist()
    [0.5, 0.95...]
    """
    check_arguments(pit, locals())
    centre, scale, y = checked_gaussian(mean, std, targets)
    return _mixed(torch.special.ndtr((y - centre) / scale), checked_weights(weights, len(centre)))


def pit_of_samples(samples: Tensor, targets: Tensor) -> Tensor:
    """Share of the samples (S, *shape) below each target, plus half of those equal to it, in the targets' shape.

    >>> pit_of_samples(torch.tensor([[0.0], [1.0], [2.0], [3.0]]), torch.tensor([1.5])).item()
    0.5
    """
    x, y = _samples(samples, targets, 1)
    return ((x < y).double() + 0.5 * (x == y).double()).mean(0)


def crps(mean: Tensor, std: Tensor, targets: Tensor, *, weights: Tensor | None = None) -> Tensor:
    """Mean continuous ranked probability score, integral of (F(z) - [z >= y])^2; in the targets' unit, lower is better.

    For Gaussians std (z (2 Phi(z) - 1) + 2 phi(z) - 1 / sqrt(pi)) with z = (y - mean) / std; for mixtures
    sum_s w_s A(y - mean_s, std_s^2) - 1/2 sum_st w_s w_t A(mean_s - mean_t, std_s^2 + std_t^2), where A(m, v) = E|X| of
    X ~ N(m, v) (Grimit et al. 2006).

    >>> crps(torch.tensor([0.0]), torch.tensor([1.0]), torch.tensor([0.0])).item()
    0.2336...
    """
    check_arguments(crps, locals())
    centre, scale, y = checked_gaussian(mean, std, targets)
    w = checked_weights(weights, len(centre))
    spread = torch.zeros_like(y)
    for m, s, share in zip(centre, scale, w, strict=True):  # one component at a time: S^2 terms need not fit in memory
        spread += share * _mixed(_expected_size(m - centre, (s.square() + scale.square()).sqrt()), w)
    return (_mixed(_expected_size(y - centre, scale), w) - 0.5 * spread).mean()


def crps_of_samples(samples: Tensor, targets: Tensor, *, fair: bool = True) -> Tensor:
    """Mean CRPS of samples (S, *shape): E|X - y| - 1/2 E|X - X'|.

    Args:
        samples: draws of the predicted targets, noise included.
        targets: of the shape of one draw.
        fair: divide the sum over pairs by S (S - 1), an unbiased estimate of the CRPS of the distribution that was
            drawn from; otherwise by S^2, which is the CRPS of the samples' own empirical distribution.

    >>> crps_of_samples(torch.tensor([[0.0], [2.0]]), torch.tensor([1.0])).item()
    0.0
    >>> crps_of_samples(torch.tensor([[0.0], [2.0]]), torch.tensor([1.0]), fair=False).item()
    0.5
    """
    check_arguments(crps_of_samples, locals())
    x, y = _samples(samples, targets, 2 if fair else 1)
    count = len(x)
    rank = torch.arange(count, dtype=torch.float64).reshape(-1, *[1] * y.dim())
    pairs = ((2 * rank - count + 1) * x.sort(0).values).sum(0)  # sum over i < j of |x_i - x_j|
    return ((x - y).abs().mean(0) - pairs / (count * (count - 1 if fair else count))).mean()


def _expected_size(mean: Tensor, std: Tensor) -> Tensor:
    """E|X| of X ~ N(mean, std^2)."""
    z = mean / std
    density = torch.exp(-0.5 * z.square()) / math.sqrt(2 * math.pi)
    size: Tensor = 2 * std * density + mean * (2 * torch.special.ndtr(z) - 1)
    return size


def _mixed(values: Tensor, weights: Tensor) -> Tensor:
    """sum_s w_s values_s over the first axis."""
    total: Tensor = torch.tensordot(weights, values, 1)
    return total


def _samples(samples: Tensor, targets: Tensor, least: int) -> tuple[Tensor, Tensor]:
    """Checked samples (S, *shape) and targets."""
    fits = checked_tensor("samples", samples).shape[1:] == checked_tensor("targets", targets).shape
    require(
        samples.dim() > 0 and fits and len(samples) >= least,
        "Samples and targets do not fit",
        f"samples (S, *shape) with targets of that shape, S >= {least}",
        f"samples {tuple(samples.shape)}, targets {tuple(targets.shape)}",
        "put the draws along the first axis",
    )
    return checked_numbers("samples", samples), checked_numbers("targets", targets)


def _intervals(lower: Tensor, upper: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Checked ends of intervals, and targets."""
    check_same_shape("lower", lower, "targets", targets)
    check_same_shape("upper", upper, "targets", targets)
    low, high = checked_numbers("lower", lower), checked_numbers("upper", upper)
    require(bool((low <= high).all()), "Empty interval", "lower <= upper", "lower > upper", "swap the two")
    return low, high, checked_numbers("targets", targets)


def _check_levels(levels: Sequence[float]) -> None:
    check_count("number of levels", len(levels))
    for level in levels:
        check_between("level", level, 0, 1)
