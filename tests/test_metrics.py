"""Each metric against scikit-learn or a naive loop, its invariances, and its refusals."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from scipy.integrate import quad
from scipy.special import ndtr
from scipy.stats import norm
from sklearn.metrics import average_precision_score, brier_score_loss, log_loss, roc_auc_score
from torch import Tensor

from lapis import metrics
from lapis.errors import DataError, OptionError

CLASSIFICATION = [metrics.accuracy, metrics.nll, metrics.brier, metrics.ece]


def predictions(n: int = 300, classes: int = 5, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Overconfident random probabilities, and targets that follow them only in part."""
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(n, classes, generator=generator, dtype=torch.float64)
    targets = torch.multinomial((logits / 2).softmax(-1), 1, generator=generator).squeeze(-1)
    return logits.softmax(-1), targets


def test_nll_and_accuracy_agree_with_scikit_learn() -> None:
    probs, targets = predictions()
    labels = list(range(5))
    torch.testing.assert_close(metrics.nll(probs, targets).item(), log_loss(targets, probs, labels=labels))
    naive = sum(float(p.argmax() == y) for p, y in zip(probs, targets, strict=True)) / len(targets)
    assert metrics.accuracy(probs, targets).item() == pytest.approx(naive)


def test_brier_agrees_with_scikit_learn() -> None:
    probs, targets = predictions()
    expected = brier_score_loss(targets, probs, labels=list(range(5)), scale_by_half=False)
    assert metrics.brier(probs, targets).item() == pytest.approx(expected)


def test_binary_vector_means_the_two_class_problem() -> None:
    probs, targets = predictions(classes=2)
    for metric in CLASSIFICATION:
        torch.testing.assert_close(metric(probs[:, 1], targets), metric(probs, targets))
    torch.testing.assert_close(metrics.nll(probs[:, 1], targets.bool()), metrics.nll(probs, targets))


def test_nll_is_infinite_when_the_target_was_ruled_out() -> None:
    assert metrics.nll(torch.tensor([[1.0, 0.0]]), torch.tensor([1])).item() == float("inf")


def naive_ece(probs: Tensor, targets: Tensor, bins: int) -> float:
    total = 0.0
    for b in range(bins):
        inside = [
            (p.max().item(), float(p.argmax() == y))
            for p, y in zip(probs, targets, strict=True)
            if b / bins < p.max().item() <= (b + 1) / bins
        ]
        if inside:
            total += abs(sum(c for c, _ in inside) - sum(a for _, a in inside)) / len(targets)
    return total


@pytest.mark.parametrize("bins", [1, 7, 15])
def test_ece_agrees_with_naive_bins(bins: int) -> None:
    probs, targets = predictions()
    assert metrics.ece(probs, targets, bins=bins).item() == pytest.approx(naive_ece(probs, targets, bins))


def test_confidence_on_an_edge_belongs_to_the_lower_bin() -> None:
    halves = torch.tensor([[0.5, 0.25, 0.25]])
    assert metrics.reliability(halves, torch.tensor([0]), bins=4).count.tolist() == [0, 1, 0, 0]


def test_adaptive_bins_hold_equally_many_and_their_ece_is_the_naive_one() -> None:
    probs, targets = predictions(n=300)
    binned = metrics.reliability(probs, targets, bins=15, adaptive=True)
    assert binned.count.tolist() == [20] * 15
    order = probs.max(-1).values.argsort()
    correct = (probs.argmax(-1) == targets).double()
    gaps = [(probs.max(-1).values[part].mean() - correct[part].mean()).abs().item() for part in order.chunk(15)]
    assert metrics.ece(probs, targets, adaptive=True).item() == pytest.approx(sum(gaps) / 15)


def test_adaptive_ece_ignores_the_order_of_tied_examples() -> None:
    probs = torch.tensor([[0.8, 0.2]]).repeat(40, 1)
    targets = torch.tensor([0] * 25 + [1] * 15)
    value = metrics.ece(probs, targets, adaptive=True)
    torch.testing.assert_close(value, metrics.ece(probs.flip(0), targets.flip(0), adaptive=True))
    assert value.item() == pytest.approx(0.8 - 25 / 40)


def test_more_adaptive_bins_than_examples_is_no_error() -> None:
    probs, targets = predictions(n=4)
    gap = (probs.max(-1).values - (probs.argmax(-1) == targets).double()).abs().mean()
    torch.testing.assert_close(metrics.ece(probs, targets, bins=10, adaptive=True), gap)


@pytest.mark.parametrize("metric", CLASSIFICATION)
def test_positions_count_as_examples_and_ignored_ones_do_not_count(metric: Callable[..., Tensor]) -> None:
    probs, targets = predictions(n=24)
    masked = targets.clone()
    masked[::3] = -100
    keep = masked != -100
    value = metric(probs.reshape(4, 2, 3, 5), masked.reshape(4, 2, 3))
    torch.testing.assert_close(value, metric(probs[keep], targets[keep]))
    torch.testing.assert_close(value, metric(probs, masked))


@pytest.mark.parametrize("decimals", [0, 1, 6])
def test_auroc_agrees_with_scikit_learn_with_and_without_ties(decimals: int) -> None:
    generator = torch.Generator().manual_seed(1)
    labels = torch.randint(2, (200,), generator=generator)
    scores = (torch.randn(200, generator=generator) + labels).round(decimals=decimals)
    assert metrics.auroc(scores, labels).item() == pytest.approx(roc_auc_score(labels, scores))
    torch.testing.assert_close(metrics.auroc(scores, labels.bool()), metrics.auroc(scores, labels.float()))


def test_auroc_depends_on_the_order_of_scores_only_and_flips_with_the_groups() -> None:
    generator = torch.Generator().manual_seed(2)
    inside, outside = torch.randn(50, generator=generator), torch.randn(70, generator=generator) + 1
    value = metrics.ood_auroc(inside, outside)
    torch.testing.assert_close(value, metrics.ood_auroc(inside.exp(), outside.exp()))
    torch.testing.assert_close(value, 1 - metrics.ood_auroc(outside, inside))
    wins = [float(o > i) + 0.5 * float(o == i) for i in inside for o in outside]
    assert value.item() == pytest.approx(sum(wins) / len(wins))


def test_auroc_ranks_infinite_scores() -> None:
    assert metrics.ood_auroc(torch.tensor([-torch.inf, 0.0]), torch.tensor([torch.inf, 1.0])).item() == 1.0


def test_rmse_is_the_root_of_the_mean_over_all_entries() -> None:
    assert metrics.rmse(torch.tensor([[1.0, 2.0]]), torch.tensor([[4.0, 6.0]])).item() == pytest.approx(12.5**0.5)


def test_gaussian_targets_are_covered_at_their_levels() -> None:
    # 20 000 draws: a binomial share strays 5 standard errors (0.018) with probability below 1e-6.
    generator = torch.Generator().manual_seed(3)
    mean, std = torch.randn(10_000, 2, generator=generator), torch.rand(10_000, 2, generator=generator) + 0.1
    targets = mean + std * torch.randn(10_000, 2, generator=generator)
    levels = (0.5, 0.9, 0.99)
    observed = metrics.regression_calibration(mean, std, targets, levels)
    assert torch.allclose(observed, torch.tensor(levels, dtype=torch.float64), atol=0.018)
    z = torch.distributions.Normal(0.0, 1.0).icdf(torch.tensor(0.95))
    interval = metrics.coverage(mean - z * std, mean + z * std, targets)
    assert interval.item() == pytest.approx(observed[1].item(), abs=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rounded_softmax_rows_are_still_probabilities(dtype: torch.dtype) -> None:
    probs, targets = predictions(classes=50)
    torch.testing.assert_close(
        metrics.nll(probs.to(dtype).clamp(min=1e-6), targets),
        metrics.nll(probs, targets),
        rtol=0.05,
        atol=0.05,
    )


def test_adaptive_ece_is_the_ece_of_adaptive_bins() -> None:
    probs, targets = predictions()
    torch.testing.assert_close(
        metrics.adaptive_ece(probs, targets, bins=7), metrics.ece(probs, targets, bins=7, adaptive=True)
    )


@pytest.mark.parametrize("decimals", [0, 1, 6])
def test_aupr_agrees_with_scikit_learn_with_and_without_ties(decimals: int) -> None:
    generator = torch.Generator().manual_seed(1)
    labels = torch.randint(2, (200,), generator=generator)
    scores = (torch.randn(200, generator=generator) + labels).round(decimals=decimals)
    assert metrics.aupr(scores, labels).item() == pytest.approx(average_precision_score(labels, scores))
    infinite = scores.clone()
    infinite[0] = torch.inf
    finite = scores.clone()
    finite[0] = 1e6
    torch.testing.assert_close(metrics.aupr(infinite, labels), metrics.aupr(finite, labels))


def test_mistakes_are_ranked_by_their_doubt() -> None:
    probs, targets = predictions()
    wrong = (probs.argmax(-1) != targets).numpy()
    doubt = 1 - probs.max(-1).values
    assert metrics.misclassification_auroc(probs, targets).item() == pytest.approx(roc_auc_score(wrong, doubt))
    entropy = -(probs * probs.log()).sum(-1)
    expected = roc_auc_score(wrong, entropy)
    assert metrics.misclassification_auroc(probs, targets, entropy).item() == pytest.approx(expected)
    # with positions and ignored targets
    masked = targets.clone()
    masked[::3] = -100
    kept = masked != -100
    for metric in (metrics.misclassification_auroc, metrics.aurc):
        value = metric(probs.reshape(20, 15, 5), masked.reshape(20, 15), entropy.reshape(20, 15))
        torch.testing.assert_close(value, metric(probs[kept], targets[kept], entropy[kept]))


def test_risk_coverage_is_the_naive_mean_over_thresholds() -> None:
    probs, targets = predictions()
    order = probs.max(-1).values.argsort(descending=True)
    wrong = (probs.argmax(-1) != targets).double()[order]
    naive = [float(wrong[: k + 1].mean()) for k in range(len(wrong))]
    assert metrics.aurc(probs, targets).item() == pytest.approx(sum(naive) / len(naive))
    curve = metrics.risk_coverage(1 - probs.max(-1).values, (probs.argmax(-1) != targets).double())
    assert curve.risk.tolist() == pytest.approx(naive)
    assert curve.coverage.tolist() == pytest.approx([(k + 1) / 300 for k in range(300)])
    torch.testing.assert_close(curve.risk[-1], 1 - metrics.accuracy(probs, targets))


def test_tied_doubts_count_as_the_expectation_over_their_orders() -> None:
    from itertools import permutations

    doubt, losses = torch.tensor([0.1, 0.5, 0.5, 0.5, 0.9]), torch.tensor([0.0, 1.0, 0.0, 2.0, 1.0])
    areas = []
    for middle in permutations([1.0, 0.0, 2.0]):
        ordered = torch.tensor([0.0, *middle, 1.0])
        areas.append(float((ordered.cumsum(0) / torch.arange(1, 6)).mean()))
    assert metrics.risk_coverage(doubt, losses).area.item() == pytest.approx(sum(areas) / len(areas))


def test_interval_score_is_the_sum_of_two_quantile_losses() -> None:
    """And so it is lowest at the true quantiles, compared on 20,000 draws with intervals that are 20 % off."""
    generator = torch.Generator().manual_seed(4)
    y = torch.randn(20_000, generator=generator, dtype=torch.float64)
    low, high = torch.full_like(y, -1.6), torch.full_like(y, 1.7)
    a = 0.1

    def pinball(q: Tensor, level: float) -> Tensor:
        return torch.where(y >= q, level * (y - q), (1 - level) * (q - y))

    naive = 2 / a * (pinball(low, a / 2) + pinball(high, 1 - a / 2)).mean()
    torch.testing.assert_close(metrics.interval_score(low, high, y, level=0.9), naive)
    z = float(norm.ppf(0.95))
    best, narrow, wide = (metrics.interval_score(-f * z * y**0, f * z * y**0, y, level=0.9) for f in (1, 0.8, 1.2))
    assert best < min(narrow, wide)


MEANS = torch.tensor([[0.0, 1.0, -2.0], [1.0, 1.5, 3.0], [-0.5, 4.0, 0.2]], dtype=torch.float64)
STDS = torch.tensor([[1.0, 0.3, 2.0], [0.5, 1.0, 0.7], [2.0, 1.0, 0.1]], dtype=torch.float64)
TARGETS = torch.tensor([0.3, -1.0, 2.5], dtype=torch.float64)


@pytest.mark.parametrize("weights", [None, (0.2, 0.5, 0.3)])
def test_crps_and_pit_are_integrals_of_the_predicted_distribution(weights: tuple[float, ...] | None) -> None:
    """Mixtures, and Gaussians as mixtures of one, against scipy's quadrature of (F(z) - [z >= y])^2."""
    w = (1 / 3, 1 / 3, 1 / 3) if weights is None else weights
    given = None if weights is None else torch.tensor(weights, dtype=torch.float64)

    def cdf(z: float, i: int, shares: tuple[float, ...], rows: slice) -> float:
        parts = zip(shares, MEANS[rows, i].tolist(), STDS[rows, i].tolist(), strict=True)
        return float(sum(share * ndtr((z - mean) / std) for share, mean, std in parts))

    def naive(i: int, shares: tuple[float, ...], rows: slice) -> float:
        y = float(TARGETS[i])
        below = quad(lambda z: cdf(z, i, shares, rows) ** 2, -25, y, limit=200)[0]
        return float(below + quad(lambda z: (1 - cdf(z, i, shares, rows)) ** 2, y, 25, limit=200)[0])

    mixed = sum(naive(i, w, slice(None)) for i in range(3)) / 3
    assert metrics.crps(MEANS, STDS, TARGETS, weights=given).item() == pytest.approx(mixed, rel=1e-6)
    single = sum(naive(i, (1.0,), slice(0, 1)) for i in range(3)) / 3
    assert metrics.crps(MEANS[0], STDS[0], TARGETS).item() == pytest.approx(single, rel=1e-6)
    expected = [cdf(float(TARGETS[i]), i, w, slice(None)) for i in range(3)]
    assert metrics.pit(MEANS, STDS, TARGETS, weights=given).tolist() == pytest.approx(expected)


def test_crps_of_samples_is_the_mean_over_all_pairs() -> None:
    generator = torch.Generator().manual_seed(5)
    samples, targets = torch.randn(7, 4, 2, generator=generator), torch.randn(4, 2, generator=generator)
    x, y = samples.double(), targets.double()
    apart = (x[:, None] - x[None]).abs().sum((0, 1))
    for fair, pairs in ((True, 42), (False, 49)):
        naive = ((x - y).abs().mean(0) - 0.5 * apart / pairs).mean()
        torch.testing.assert_close(metrics.crps_of_samples(samples, targets, fair=fair), naive)
    ranks = torch.stack([(x[:, i] < y[i]).double().mean(0) for i in range(4)])
    torch.testing.assert_close(metrics.pit_of_samples(samples, targets), ranks)


def test_scores_of_samples_estimate_those_of_the_distribution() -> None:
    """The fair estimate is unbiased: 2000 means of 5 draws are within 5 standard errors (below 1e-6) of the CRPS."""
    generator = torch.Generator().manual_seed(6)
    draws = torch.randn(2000, 5, 3, generator=generator, dtype=torch.float64) * STDS[0] + MEANS[0]
    values = torch.stack([metrics.crps_of_samples(samples, TARGETS) for samples in draws])
    error = values.std() / 2000**0.5
    assert abs(float(values.mean() - metrics.crps(MEANS[0], STDS[0], TARGETS))) < 5 * float(error)


def test_pit_of_calibrated_predictions_is_uniform_and_has_no_calibration_error() -> None:
    # 10,000 draws of a two-component mixture: a share strays 5 standard errors (0.025) with probability below 1e-6
    generator = torch.Generator().manual_seed(7)
    mean = torch.stack([torch.zeros(10_000), torch.full((10_000,), 3.0)]).double()
    std = torch.stack([torch.ones(10_000), torch.full((10_000,), 0.5)]).double()
    weights = torch.tensor([0.3, 0.7], dtype=torch.float64)
    which = (torch.rand(10_000, generator=generator) > 0.3).long()[None]
    noise = torch.randn(10_000, generator=generator, dtype=torch.float64)
    y = mean.gather(0, which)[0] + std.gather(0, which)[0] * noise
    values = metrics.pit(mean, std, y, weights=weights)
    for level in (0.1, 0.5, 0.9):
        assert abs(float((values <= level).double().mean()) - level) < 0.025
    assert metrics.regression_calibration_error(mean, std, y, weights=weights).item() < 0.025
    assert metrics.regression_calibration_error(mean, 0.5 * std, y, weights=weights).item() > 0.05


def test_bootstrap_errors_are_those_of_a_mean() -> None:
    """The bootstrap's error of a mean is std / sqrt(n); 400 resamples know it to 3.5 %, five times that is 18 %."""
    generator = torch.Generator().manual_seed(8)
    mean, targets = torch.randn(200, generator=generator), torch.zeros(200)

    def absolute(a: Tensor, b: Tensor) -> Tensor:
        return (a - b).abs().double().mean()

    found = metrics.bootstrap(absolute, mean, targets, repeats=400)
    expected = float(mean.abs().double().std(correction=0)) / 200**0.5
    assert found.error.item() == pytest.approx(expected, rel=0.18)
    torch.testing.assert_close(found.value, absolute(mean, targets))
    low, high = found.interval(0.9)
    assert low < found.value < high
    assert high - low == pytest.approx(2 * 1.645 * expected, rel=0.25)
    again = metrics.bootstrap(absolute, mean, targets, repeats=400, generator=torch.Generator().manual_seed(0))
    assert torch.equal(found.resamples, again.resamples)
    assert "+-" in str(found)


def test_bootstrap_resamples_the_axis_of_the_examples() -> None:
    y = torch.randn(40, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    mean, std = torch.stack([y + 1, y - 1]), torch.ones(2, 40, dtype=torch.float64)
    found = metrics.bootstrap(metrics.crps, mean, std, y, axis=(1, 1, 0), repeats=5)
    torch.testing.assert_close(found.resamples, found.value.expand(5))  # every example has the same score
    inside, outside = torch.arange(10.0), torch.arange(5.0, 25.0)
    groups = metrics.bootstrap(metrics.ood_auroc, inside, outside, paired=False, repeats=20)
    assert 0 < groups.error.item() < 0.2
    levels = metrics.bootstrap(metrics.regression_calibration, y, y**0, y + 0.7, repeats=5)
    assert levels.error.shape == (5,)
    rare = metrics.bootstrap(metrics.auroc, torch.arange(6.0), torch.tensor([0, 0, 0, 0, 0, 1]), repeats=20)
    assert rare.value.item() == 1.0
    with pytest.raises(DataError, match="paired=False"):
        metrics.bootstrap(metrics.ood_auroc, inside, outside)
    with pytest.raises(DataError, match="no such axis"):
        metrics.bootstrap(metrics.rmse, y, y, axis=1)
    with pytest.raises(DataError, match="Nothing to resample"):
        metrics.bootstrap(metrics.rmse)
    with pytest.raises(OptionError, match="Bad axis"):
        metrics.bootstrap(metrics.rmse, y, y, axis=(0,))
    with pytest.raises(OptionError, match="Bad repeats"):
        metrics.bootstrap(metrics.rmse, y, y, repeats=1)
    with pytest.raises(OptionError, match="Bad level"):
        found.interval(1.0)


P, Y = torch.tensor([[0.7, 0.3], [0.2, 0.8]]), torch.tensor([0, 1])


@pytest.mark.parametrize(
    ("probs", "targets", "message"),
    [
        (P, torch.tensor([0, 2]), "classes 0 to 1"),
        (P, torch.tensor([0, -1]), "out of range"),
        (P, torch.tensor([0.0, 0.5]), "not classes"),
        (P, torch.tensor([-100, -100]), "Nothing to score"),
        (P, torch.eye(2), "argmax"),
        (P, torch.tensor([0, 1, 1]), r"targets \(3,\)"),
        (P[:, :1], Y, "do not fit"),
        (5 * P, Y, "softmax"),
        (P - 0.5, Y, "softmax"),
        (P * torch.tensor([[1.0], [torch.nan]]), Y, "2 NaN or infinite of 4"),
        (P[:0], Y[:0], "empty"),
        ([[0.7, 0.3]], Y[:1], "as_tensor"),
        (P, [0, 1], "as_tensor"),
    ],
)
@pytest.mark.parametrize("metric", CLASSIFICATION)
def test_bad_probabilities_and_targets_are_refused(
    metric: Callable[..., Tensor], probs: Tensor, targets: Tensor, message: str
) -> None:
    with pytest.raises(DataError, match=message):
        metric(probs, targets)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: metrics.auroc(torch.ones(3), torch.ones(3)), "3 positive, 0 negative"),
        (lambda: metrics.auroc(torch.ones(2), torch.tensor([1, 2])), "not binary"),
        (lambda: metrics.auroc(torch.tensor([torch.nan, 1]), torch.tensor([0, 1])), "NaN"),
        (lambda: metrics.ood_auroc(torch.ones(0), torch.ones(2)), "score_in is empty"),
        (lambda: metrics.rmse(torch.ones(3), torch.ones(3, 1)), "broadcasting"),
        (lambda: metrics.rmse(torch.tensor([torch.inf]), torch.ones(1)), "not finite"),
        (lambda: metrics.coverage(torch.ones(1), torch.zeros(1), torch.ones(1)), "lower <= upper"),
        (lambda: metrics.regression_calibration(torch.ones(1), torch.zeros(1), torch.ones(1)), "std > 0"),
        (lambda: metrics.crps(torch.ones(2, 3), torch.ones(3), torch.ones(3)), "std and mean differ"),
        (lambda: metrics.crps(torch.ones(2), torch.ones(2), torch.ones(3)), "mean and targets differ"),
        (lambda: metrics.pit(torch.ones(2, 1), torch.ones(2, 1), torch.ones(1), weights=torch.ones(2)), "sum to 1"),
        (lambda: metrics.crps_of_samples(torch.ones(1, 3), torch.ones(3)), "S >= 2"),
        (lambda: metrics.pit_of_samples(torch.ones(3), torch.ones(3)), "first axis"),
        (lambda: metrics.interval_score(torch.ones(1), torch.zeros(1), torch.ones(1)), "lower <= upper"),
        (lambda: metrics.aupr(torch.ones(3), torch.zeros(3)), "0 positive, 3 negative"),
        (lambda: metrics.risk_coverage(torch.ones(3), torch.ones(2)), "differ in shape"),
    ],
)
def test_other_bad_input_is_refused(call: Callable[[], Tensor], message: str) -> None:
    with pytest.raises(DataError, match=message):
        call()


def test_bad_options_are_refused() -> None:
    with pytest.raises(OptionError, match="Bad bins"):
        metrics.ece(P, Y, bins=0)
    with pytest.raises(OptionError, match="Bad level"):
        metrics.regression_calibration(torch.ones(1), torch.ones(1), torch.ones(1), levels=[0.95, 1.0])
