"""Each metric against scikit-learn or a naive loop, its invariances, and its refusals."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from sklearn.metrics import brier_score_loss, log_loss, roc_auc_score
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
    ],
)
def test_other_bad_input_is_refused(call: Callable[[], Tensor], message: str) -> None:
    with pytest.raises(DataError, match=message):
        call()


def test_bad_options_are_refused() -> None:
    with pytest.raises(OptionError, match="bins >= 1"):
        metrics.ece(P, Y, bins=0)
    with pytest.raises(OptionError, match=r"\(0, 1\)"):
        metrics.regression_calibration(torch.ones(1), torch.ones(1), torch.ones(1), levels=[0.95, 1.0])
