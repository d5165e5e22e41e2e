"""Links, from Gaussian logits to probabilities: against naive loops, brute-force integration, and each other."""

from __future__ import annotations

import importlib
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lapis.likelihoods import Bernoulli, Categorical, Likelihood
from lapis.metrics import ood_auroc
from lapis.predictions import ClassificationPrediction, LatentGaussian, LatentMixture, predict
from lapis.predictions.integrals import links, quasi

F64 = torch.float64
LINKS = ["quasi", "mean_field", "probit", "mc", "bridge"]
SHIFT_FREE = ["quasi", "mean_field"]


def rand(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=F64, generator=torch.Generator().manual_seed(seed))


def covariances(number: int, classes: int, scale: float = 1.0, rank: int | None = None, seed: int = 0) -> Tensor:
    root = rand(number, classes, rank or classes, seed=seed)
    return scale * root @ root.mT / root.shape[-1]


def latent(mean: Tensor, covariance: Tensor, *, full: bool = True) -> LatentGaussian:
    """(N, C) and (N, C, C) as a latent with one position."""
    variance = covariance.diagonal(dim1=-2, dim2=-1).unsqueeze(1)
    return LatentGaussian(mean.unsqueeze(1), variance, covariance.unsqueeze(1) if full else None)


def classes(
    distribution: LatentGaussian | LatentMixture, link: str | None = None, likelihood: Likelihood | None = None
) -> ClassificationPrediction:
    prediction = predict(likelihood or Categorical(), distribution, link=link)
    assert isinstance(prediction, ClassificationPrediction)
    return prediction


def close(a: Tensor, b: Tensor, tolerance: float = 1e-12) -> None:
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def naive_mean_field(mean: Tensor, covariance: Tensor) -> Tensor:
    """The formula, one class and one example at a time."""
    probs = torch.zeros_like(mean)
    for n in range(len(mean)):
        for c in range(mean.shape[1]):
            total = 0.0
            for k in range(mean.shape[1]):
                spread = covariance[n, c, c] + covariance[n, k, k] - 2 * covariance[n, c, k]
                total += math.exp(-(mean[n, c] - mean[n, k]) / math.sqrt(1 + math.pi / 8 * spread))
            probs[n, c] = 1 / total
    return probs / probs.sum(1, keepdim=True)


def integral_over_three(mean: Tensor, covariance: Tensor) -> Tensor:
    """E[softmax(f)] of three logits: an integral over the two differences from the last, by the trapezoidal rule."""
    contrast = torch.tensor([[1.0, 0.0, -1.0], [0.0, 1.0, -1.0]], dtype=F64)
    axis = torch.linspace(-8, 8, 241, dtype=F64)
    grid = torch.cartesian_prod(axis, axis)
    weights = (-0.5 * (grid**2).sum(1)).softmax(0)
    result = []
    for m, v in zip(mean, covariance, strict=True):
        f = m @ contrast.T + grid @ torch.linalg.cholesky(contrast @ v @ contrast.T).T
        result.append(weights @ torch.cat([f, torch.zeros(len(f), 1, dtype=F64)], 1).softmax(1))
    return torch.stack(result)


# -- mean field ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [2, 3, 7])
def test_mean_field_is_its_formula(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in chunks of some classes, or some examples, and for variances only, as of a diagonal covariance."""
    mean, covariance = 2 * rand(5, number), covariances(5, number, 3.0)
    diagonal = torch.diag_embed(covariance.diagonal(dim1=-2, dim2=-1))
    for pairs in (2**20, 3 * number, 1):
        monkeypatch.setattr(links, "PAIRS", pairs)
        close(classes(latent(mean, covariance), "mean_field").probs, naive_mean_field(mean, covariance))
        close(classes(latent(mean, covariance, full=False), "mean_field").probs, naive_mean_field(mean, diagonal))


def test_mean_field_of_two_classes_and_of_labels_is_mackays() -> None:
    mean, covariance = 3 * rand(6, 2), covariances(6, 2, 4.0)
    z = mean[:, 1] - mean[:, 0]
    v = covariance[:, 0, 0] + covariance[:, 1, 1] - 2 * covariance[:, 0, 1]
    expected = (z / (1 + math.pi / 8 * v).sqrt()).sigmoid()
    close(classes(latent(mean, covariance), "mean_field").probs[:, 1], expected)
    labels = LatentGaussian(z[:, None, None], v[:, None, None])
    close(classes(labels, "mean_field", Bernoulli()).probs[:, 0], expected)


@pytest.mark.parametrize("link", SHIFT_FREE)
@pytest.mark.parametrize("number", [2, 3, 10])
def test_a_variance_common_to_all_logits_changes_nothing(link: str, number: int) -> None:
    """Nor does anything else of the form V + a 1^T + 1 a^T. The extended probit changes a lot."""
    mean, covariance, a = 2 * rand(6, number), covariances(6, number), rand(6, number, 1, seed=3)
    ones = torch.ones(6, number, 1, dtype=F64)
    for shift in (50 * ones @ ones.mT, 5 * (a @ ones.mT + ones @ a.mT) + 200 * ones @ ones.mT):
        before, after = (classes(latent(mean, it), link) for it in (covariance, covariance + shift))
        close(after.probs, before.probs, 1e-9)
        close(after.mutual_information, before.mutual_information, 1e-9)
        probit = [classes(latent(mean, it), "probit").probs for it in (covariance, covariance + shift)]
        assert float((probit[0] - probit[1]).abs().max()) > 0.2


# -- the integral -------------------------------------------------------------------------------------------


def test_the_default_is_nearest_to_the_integral_over_three_classes() -> None:
    """Errors of probabilities, at most and on average, by link; the integration grid halved changes them by < 1e-9."""
    worst, mean_error = dict.fromkeys(LINKS, 0.0), dict.fromkeys(LINKS, 0.0)
    for size, scale in ((0.5, 0.3), (2.0, 3.0), (4.0, 3.0), (4.0, 30.0)):
        mean, covariance = size * rand(12, 3), covariances(12, 3, scale)
        exact = integral_over_three(mean, covariance)
        for link in LINKS:
            error = (classes(latent(mean, covariance), link).probs - exact).abs()
            worst[link] = max(worst[link], float(error.max()))
            mean_error[link] += float(error.mean()) / 4
    assert worst["quasi"] < 0.015
    assert mean_error["quasi"] < 0.0015
    assert worst["mc"] < 5 * 0.5 / math.sqrt(256)  # five standard errors, at most
    for other in ("mean_field", "probit", "mc", "bridge"):
        assert mean_error["quasi"] < 0.2 * mean_error[other]
        assert worst["quasi"] < 0.5 * worst[other]


@pytest.mark.parametrize("number", [10, 200])
def test_more_points_converge_to_the_integral_over_many_classes(number: int) -> None:
    """Against 2^13 draws: five standard errors, and the error of the points. With 200 classes correlations of rank 3,
    well below `RANK`, are exact."""
    mean, covariance = 2 * rand(3, number), covariances(3, number, 2.0, rank=3)
    covariance = covariance + 0.1 * torch.eye(number, dtype=F64)
    probs = [(chunk[:, :, 0]).softmax(-1) for chunk in latent(mean, covariance).draws(2**13, 5)]
    drawn = torch.cat(probs)
    exact, error = drawn.mean(0), drawn.std(0) / 2**6.5
    for points, allowed in ((64, 0.03), (512, 0.008)):
        found = predict(Categorical(), latent(mean, covariance), samples=points)
        assert isinstance(found, ClassificationPrediction)
        assert bool(((found.probs - exact).abs() < allowed + 5 * error).all())
        expected = -(drawn * drawn.clamp_min(1e-300).log()).sum(-1)
        difference = (found.aleatoric_entropy - expected.mean(0)).abs()
        assert bool((difference < 2 * allowed + 5 * expected.std(0) / 2**6.5).all())


def test_two_classes_are_the_integral_over_their_difference() -> None:
    """Far tails, small and large variances: probabilities to 1e-8 of themselves, by a fine grid around the peak."""
    z = torch.tensor([0.0, 0.7, -3.0, 12.0, -40.0, -200.0], dtype=F64).repeat_interleave(6)
    v = torch.tensor([0.0, 0.3, 1.5, 20.0, 150.0, 1e4], dtype=F64).repeat(6)
    found = classes(latent(torch.stack([torch.zeros_like(z), z], 1), torch.diag_embed(torch.stack([v / 2, v / 2], 1))))
    one = torch.tensor([1] * len(z))
    for k in range(len(z)):
        lower = -z[k].abs()
        sd = float(v[k].sqrt())
        # log of the integrand sigmoid(t) N(t): its peak lies between m and m + v, below zero or within a few of it
        t = torch.linspace(float(lower) - 12 * sd - 1, max(float(lower + v[k]), 0.0) + 12 * sd + 1, 2**18, dtype=F64)
        log_density = torch.zeros(1, dtype=F64)
        if sd > 0:
            log_density = -0.5 * ((t - lower) / sd) ** 2 - math.log(sd * math.sqrt(2 * math.pi)) + (t[1] - t[0]).log()
        else:
            t = lower[None]
        smaller = (torch.nn.functional.logsigmoid(t) + log_density).logsumexp(0)
        log_prob = smaller if z[k] <= 0 else torch.log1p(-smaller.exp())
        assert float(found.log_prob(one)[k]) == pytest.approx(float(log_prob), rel=1e-8, abs=1e-8), (z[k], v[k])


# -- points and roots ---------------------------------------------------------------------------------------


def test_roots_give_the_covariance_of_all_differences() -> None:
    """Singular covariances too; beyond the rank, variances are exact and small correlations are left out."""
    number = 8
    contrast = torch.eye(number, dtype=F64) - 1 / number
    for rank in (1, 3, number):
        covariance = covariances(4, number, 2.0, rank=rank)
        root, left = quasi.shift_free_root(covariance, number - 1)
        close(root @ root.mT, contrast @ covariance @ contrast, 1e-10)
        close(left, torch.zeros_like(left), 1e-10)
    singular = covariances(200, 24, 60.0, rank=3)
    root, _ = quasi.shift_free_root(singular.float(), 23)
    contrast_of_24 = torch.eye(24, dtype=F64) - 1 / 24
    close(root @ root.mT, contrast_of_24 @ singular @ contrast_of_24, 2e-4)  # columns of mere rounding are left out
    covariance = covariances(4, number, 2.0)
    root, left = quasi.shift_free_root(covariance, 3)
    assert root.shape == (4, number, 3)
    approximate = root @ root.mT + torch.diag_embed(left)
    exact = contrast @ covariance @ contrast
    close(approximate.diagonal(dim1=-2, dim2=-1), exact.diagonal(dim1=-2, dim2=-1), 1e-10)
    assert float((approximate - exact).norm()) < 0.5 * float((exact - torch.diag_embed(exact.diagonal(0, 1, 2))).norm())


def test_points_are_fixed_standard_normal_and_leave_the_global_generator_alone() -> None:
    state = torch.get_rng_state()
    quasi.normal_points.cache_clear()
    points = quasi.normal_points(512, 20, 0)
    assert torch.equal(torch.get_rng_state(), state)
    assert points.shape == (20, 512)
    assert float(points.mean(1).abs().max()) < 0.01  # random points: 0.044 is one standard error
    correlations = points @ points.T / 512 - torch.eye(20, dtype=F64)
    assert float(correlations.square().mean().sqrt()) < 0.02  # random points: 0.044
    mean, covariance = rand(3, 5), covariances(3, 5)
    first = classes(latent(mean, covariance)).probs
    quasi.normal_points.cache_clear()
    assert torch.equal(classes(latent(mean, covariance)).probs, first)
    scrambled = predict(Categorical(), latent(mean, covariance), generator=torch.Generator().manual_seed(4))
    assert isinstance(scrambled, ClassificationPrediction)
    assert 0 < float((scrambled.probs - first).abs().max()) < 0.02


def test_further_dimensions_than_sobol_points_have_take_random_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quasi, "SOBOL_DIMENSIONS", 3)
    quasi.normal_points.cache_clear()
    points = quasi.normal_points(1024, 6, 0)
    quasi.normal_points.cache_clear()
    assert points.shape == (6, 1024)
    assert float((points @ points.T / 1024 - torch.eye(6, dtype=F64)).abs().max()) < 5 * math.sqrt(2 / 1024)


@pytest.mark.parametrize("full", [True, False])
def test_chunks_do_not_change_the_numbers(full: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    it = latent(rand(7, 4), covariances(7, 4), full=full)
    whole = classes(it)
    monkeypatch.setattr(quasi, "CHUNK", 2 * 4 * 128)
    monkeypatch.setattr(quasi, "COVARIANCES", 3 * 16)
    parts = classes(it)
    close(parts.probs, whole.probs)
    close(parts.mutual_information, whole.mutual_information)


class Largest(TorchDispatchMode):
    """Remembers the largest tensor that is made."""

    numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor):
            self.numbers = max(self.numbers, result.untyped_storage().nbytes() // result.element_size())
        return result


@pytest.mark.parametrize("link", SHIFT_FREE)
def test_a_thousand_classes_do_not_need_a_matrix_for_every_example(link: str) -> None:
    """Variances only: 40 examples would hold 4e7 pairs of classes, or 2e7 logits; a chunk has about 1e6."""
    mean = rand(40, 1, 1000).float()
    quasi.normal_points(512, 1000, 0)
    with Largest() as largest:
        probs = classes(LatentGaussian(mean, torch.ones_like(mean)), link).probs
    assert largest.numbers <= 1_100_000
    close(probs.sum(1), torch.ones(40), 1e-5)


# -- extremes -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("link", SHIFT_FREE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_extreme_logits_and_variances_keep_their_log_probabilities(link: str, dtype: torch.dtype) -> None:
    """At logits of 1e4 without variance: the log softmax. With variances up to 1e12: finite, and no zero."""
    mean = torch.tensor([[1e4, -1e4, 0.0], [1e4, 1e4, 1e4], [-1e4, 0.0, 2.0]], dtype=dtype)
    for scale in (0.0, 1e-12, 1.0, 1e6, 1e12):
        for full in (True, False):
            it = latent(mean, scale * torch.eye(3, dtype=dtype).expand(3, 3, 3), full=full)
            prediction = classes(it, link)
            logs = torch.stack([prediction.log_prob(torch.full((3,), c)) for c in range(3)], 1)
            assert logs.dtype == dtype
            assert bool(torch.isfinite(logs).all())
            close(logs.exp().sum(1), torch.ones(3, dtype=dtype), 1e-5)
            if scale <= 1e-12:
                torch.testing.assert_close(logs, mean.log_softmax(-1), rtol=1e-5, atol=1e-5)
            assert bool(torch.isfinite(prediction.mutual_information).all())
            assert bool((prediction.mutual_information <= prediction.entropy).all())


@pytest.mark.parametrize("link", LINKS)
def test_one_class_is_certain(link: str) -> None:
    it = LatentGaussian(rand(3, 1, 1), torch.ones(3, 1, 1, dtype=F64), torch.ones(3, 1, 1, 1, dtype=F64))
    if link == "bridge":
        pytest.skip("a Dirichlet distribution has two classes or more")
    prediction = classes(it, link)
    close(prediction.probs, torch.ones(3, 1, dtype=F64))
    close(prediction.mutual_information, torch.zeros(3, dtype=F64))


# -- joint latents and mixtures -----------------------------------------------------------------------------


@pytest.mark.parametrize("link", SHIFT_FREE)
def test_joint_latents_have_the_probabilities_of_each_example(link: str) -> None:
    joint = covariances(1, 12)[0]
    mean = rand(3, 1, 4)
    whole = LatentGaussian(mean, joint.diagonal().reshape(3, 1, 4), None, joint)
    blocks = whole.blocks
    assert blocks is not None
    alone = replace(classes(LatentGaussian(mean, whole.variance, blocks), link), samples=256)
    close(classes(whole, link).probs, alone.probs)
    close(classes(whole, link).mutual_information, alone.mutual_information)
    assert classes(whole, link).log_prob(torch.tensor([0, 1, 2])).dim() == 0


@pytest.mark.parametrize("link", LINKS)
def test_information_of_a_mixture_is_that_of_its_parts_and_their_disagreement(link: str) -> None:
    parts = tuple(latent(3 * rand(4, 5, seed=k), covariances(4, 5, seed=k)) for k in range(2))
    weights = torch.tensor([0.3, 0.7], dtype=F64)
    mixed = classes(LatentMixture(parts, weights), link)
    each = [classes(part, link) for part in parts]
    within = 0.3 * each[0].mutual_information + 0.7 * each[1].mutual_information
    between = mixed.entropy - 0.3 * each[0].entropy - 0.7 * each[1].entropy
    close(mixed.mutual_information, within + between)
    assert bool((between >= -1e-12).all())


# -- uncertainty that ranks ---------------------------------------------------------------------------------


@pytest.mark.parametrize("link", LINKS)
@pytest.mark.parametrize("number", [2, 10])
def test_mutual_information_finds_what_the_weights_disagree_on(link: str, number: int) -> None:
    """Inputs like the data are sure or torn between classes, with a variance common to all logits; others have much
    variance in the differences. Mutual information tells them apart by every link, as Monte Carlo does; that of the
    bridge, whose Dirichlet is far from the Gaussian where variances are large, tells them apart less well."""
    count = 150
    near = torch.cat([6 * rand(count, number), 0.3 * rand(count, number, seed=1)])
    near_v = covariances(2 * count, number, 0.05, seed=2) + 4.0
    far, far_v = 3 * rand(2 * count, number, seed=3), covariances(2 * count, number, 12.0, seed=4)
    scores = {}
    for name in (link, "mc"):
        scores[name] = [classes(latent(m, v), name).mutual_information for m, v in ((near, near_v), (far, far_v))]
        assert all(bool((score >= 0).all()) for score in scores[name])
    found, exact = (float(ood_auroc(*scores[name])) for name in (link, "mc"))
    assert exact > 0.95
    assert found > (0.6 if link == "bridge" else exact - 0.02)
    own, other = (torch.cat(scores[name]).argsort().argsort().double() for name in (link, "mc"))
    assert float(torch.corrcoef(torch.stack([own, other]))[0, 1]) > (0.4 if link == "bridge" else 0.97)


def test_float32_probabilities_are_those_of_float64() -> None:
    for number in (2, 3, 12):
        mean, covariance = 2 * rand(20, number), covariances(20, number, 2.0)
        for link in SHIFT_FREE:
            wide = classes(latent(mean, covariance), link).probs
            narrow = classes(latent(mean.float(), covariance.float()), link).probs
            torch.testing.assert_close(narrow.double(), wide, rtol=1e-4, atol=1e-5)


# -- the experiment -----------------------------------------------------------------------------------------


def test_the_experiment_finds_the_default_nearest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its quick run, `python experiments/links.py --quick`, writes the page and the figure."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "experiments"))
    common, experiment = importlib.import_module("common"), importlib.import_module("links")
    monkeypatch.setattr(common, "RESULTS", tmp_path)
    monkeypatch.setattr(common, "FIGURES", tmp_path)
    monkeypatch.setattr("sys.argv", ["links.py", "--quick"])
    threads = torch.get_num_threads()
    try:
        experiment.main()
    finally:
        torch.set_num_threads(threads)
    page = (tmp_path / "links_quick.md").read_text(encoding="utf-8")
    assert '"quasi" has the smallest KL of the five links in 12 of 12 cases' in page
    assert (tmp_path / "links_quick.png").read_bytes()[:4] == b"\x89PNG"
