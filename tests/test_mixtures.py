"""Gaussian mixtures: against scikit-learn step by step, with labels known in part, and against the exact evidence."""

from __future__ import annotations

import math
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from scipy.special import gammaln, multigammaln
from scipy.stats import norm
from sklearn.mixture import GaussianMixture as Peer
from sklearn.utils.estimator_checks import check_estimator

import lapis
from lapis.latent import BayesianGaussianMixture, GaussianMixture, choose_components
from lapis.latent.bayesian_mixture import BayesianModel
from lapis.latent.estimator import first_mixture
from lapis.latent.floor import raised
from lapis.latent.mixture_model import Rows, gathered

KINDS = {"full": "full", "tied": "tied", "diagonal": "diag", "spherical": "spherical"}


def clusters(seed: int = 0, each: int = 40, dimensions: int = 3) -> tuple[Any, Any]:
    random = np.random.RandomState(seed)
    centres = 4 * random.randn(3, dimensions)
    parts = []
    for centre in centres:
        shape = 0.4 * random.randn(dimensions, dimensions) + np.eye(dimensions)
        parts.append(random.randn(each, dimensions) @ shape + centre)
    x = np.concatenate(parts)
    return x, np.repeat(np.arange(3), each)


def quietly(mixture: Any, *arguments: Any, **options: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", lapis.LapisWarning)
        return mixture.fit(*arguments, **options)


@pytest.mark.parametrize("kind", KINDS)
def test_without_labels_every_step_is_that_of_scikit_learn(kind: Any) -> None:
    x, _ = clusters()
    begin = quietly(GaussianMixture(3, kind, rounds=1, floor=0.0, tolerance=0.0), x)
    precisions = np.linalg.inv(begin.covariances_) if kind in ("full", "tied") else 1 / begin.covariances_
    for rounds in (1, 2, 5):
        start = (begin.weights_, begin.means_, begin.covariances_)
        ours = quietly(GaussianMixture(3, kind, rounds=rounds, floor=0.0, tolerance=0.0, start=start), x)
        peer = Peer(
            3, covariance_type=KINDS[kind], reg_covar=0, tol=0, max_iter=rounds, weights_init=begin.weights_,
            means_init=begin.means_, precisions_init=precisions,
        )  # fmt: skip
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            peer.fit(x)
        np.testing.assert_allclose(ours.means_, peer.means_, atol=1e-8)
        np.testing.assert_allclose(ours.covariances_, peer.covariances_, atol=1e-8)
        np.testing.assert_allclose(ours.score_samples(x), peer.score_samples(x), atol=1e-8)
        np.testing.assert_allclose(ours.predict_proba(x), peer.predict_proba(x), atol=1e-8)
        assert ours.bounds_[-1] == pytest.approx(ours.score_samples(x).sum(), abs=1e-8)


def test_the_bound_never_falls_on_a_thousand_problems() -> None:
    """Rows, dimensions, components, structures, labels and floors drawn at random; both kinds of mixtures."""
    random = np.random.RandomState(0)
    for _ in range(1000):
        dimensions, components = random.randint(1, 4), random.randint(1, 5)
        x = torch.from_numpy(random.randn(random.randint(components + 1, 25), dimensions) ** random.randint(1, 3))
        labels = None
        if random.rand() < 0.5:
            known = np.where(random.rand(len(x)) < 0.4, random.randint(components, size=len(x)), -1)
            allowed = (known[:, None] < 0) | (known[:, None] == np.arange(components))
            labels = torch.tensor(np.where(allowed, 0.0, -np.inf))
        rows = Rows(x - x.mean(0), labels)
        r = torch.from_numpy(random.dirichlet(np.ones(components), len(x)))
        r = r if labels is None else (r.log() + labels).softmax(1)
        kind: Any = list(KINDS)[random.randint(4)]
        model: Any
        if random.rand() < 0.4:
            model = BayesianGaussianMixture(components, kind)._begin(rows, r, 0.0, x.mean(0))
        else:
            model = first_mixture(rows, r, kind, 10.0 ** random.randint(-6, 0))
        bound = -math.inf
        for _ in range(2):
            expected = model.expectation(rows)
            after = model.bound(expected)
            assert after >= bound - 1e-9 * max(1, abs(after))
            model = model.maximisation(expected)
            bound = model.bound(expected)
            assert bound >= after - 1e-9 * max(1, abs(after))


@pytest.mark.parametrize("least", [torch.tensor(0.5), torch.tensor([0.3, 2.0, 1.0])])
def test_covariances_raised_to_the_floor_are_the_maximum_under_it(least: torch.Tensor) -> None:
    """-log |Sigma| - tr Sigma^-1 S under Sigma >= diag(least): no feasible neighbour is better."""
    source = torch.Generator().manual_seed(0)
    root, least = torch.randn(3, 3, generator=source, dtype=torch.float64), least.double()
    free, limit = root @ root.mT, torch.diag(least.expand(3))

    def value(sigma: torch.Tensor) -> float:
        return float(-torch.logdet(sigma) - torch.linalg.solve(sigma, free).trace())

    found = raised(free, least, full=True)
    assert float(torch.linalg.eigvalsh(found - limit)[0]) > -1e-12
    assert float(torch.linalg.eigvalsh(free - limit)[0]) < 0
    for _ in range(200):
        draw = torch.randn(3, 3, generator=source, dtype=torch.float64)
        other = limit + draw @ draw.mT
        for share in (1.0, 0.1, 1e-3):  # the feasible set is convex
            assert value(found + share * (other - found)) <= value(found) + 1e-12
    assert torch.equal(raised(free + 9 * limit, least, full=True), free + 9 * limit)
    assert torch.equal(raised(free.diagonal(), least, full=False), torch.maximum(free.diagonal(), least))


def test_all_labels_known_is_maximum_likelihood_in_one_step() -> None:
    x, y = clusters()
    mixture = GaussianMixture(3).fit(x, labels=y)
    assert mixture.n_iter_ == 1
    for k in range(3):
        np.testing.assert_allclose(mixture.means_[k], x[y == k].mean(0))
        np.testing.assert_allclose(mixture.covariances_[k], np.cov(x[y == k].T, bias=True), atol=1e-12)


def test_labels_known_in_part_match_a_naive_reference() -> None:
    x, y = clusters(1, each=15)
    labels = np.where(np.arange(len(y)) % 3 == 0, y, -1)
    soft = np.where(labels[:, None] < 0, np.nan, (labels[:, None] == np.arange(3)) * 1.0)
    soft[1] = (0.2, 0.5, 0.3)
    hard = quietly(GaussianMixture(3, rounds=3, tolerance=0.0), x, labels=labels)
    begin = quietly(GaussianMixture(3, rounds=1, tolerance=0.0), x, labels=labels)
    start = (begin.weights_, begin.means_, begin.covariances_)
    given = quietly(GaussianMixture(3, rounds=2, tolerance=0.0, start=start), x, labels=soft)
    factors = np.where(np.isnan(soft), 1.0, soft)
    weights, means, covariances = start
    for _ in range(2):
        columns = []
        for m, c in zip(means, covariances, strict=True):
            squares = np.einsum("nd,de,ne->n", x - m, np.linalg.inv(c), x - m)
            columns.append(np.exp(-0.5 * squares) / np.sqrt(np.linalg.det(2 * np.pi * c)))
        densities = np.stack(columns, 1)
        r = factors * weights * densities
        r /= r.sum(1, keepdims=True)
        bound = np.log((factors / factors.max(1, keepdims=True) * weights * densities).sum(1)).sum()
        weights = r.mean(0)
        means = (r.T @ x) / r.sum(0)[:, None]
        covariances = np.stack([((x - m).T * r[:, k]) @ (x - m) / r[:, k].sum() for k, m in enumerate(means)])
    np.testing.assert_allclose(given.means_, means, atol=1e-9)
    np.testing.assert_allclose(given.covariances_, covariances, atol=1e-9)
    assert given.bounds_[0] == pytest.approx(bound, abs=1e-9)
    assert (hard.predict(x)[labels >= 0] == labels[labels >= 0]).mean() > 0.8


def test_labels_may_come_in_any_usual_form() -> None:
    x, y = clusters(1, each=15)
    labels = np.where(np.arange(len(y)) % 3 == 0, y, -1)
    known = np.eye(3)[y]
    known[labels < 0] = np.nan
    expected = GaussianMixture(3).fit(x, labels=labels).means_
    for other in (labels.tolist(), torch.tensor(labels), np.where(labels < 0, np.nan, labels), known, 5 * known):
        np.testing.assert_allclose(GaussianMixture(3).fit(x, labels=other).means_, expected)
    np.testing.assert_allclose(GaussianMixture(3).fit(x, labels).means_, expected)  # by position
    np.testing.assert_allclose(GaussianMixture(3).fit(torch.tensor(x, requires_grad=True), labels).means_, expected)
    every = GaussianMixture(3).fit(x, labels=y).means_
    for other in (np.eye(3, dtype=int)[y], np.eye(3, dtype=bool)[y], y.astype(np.float32)):
        np.testing.assert_allclose(GaussianMixture(3).fit(x, labels=other).means_, every)
    with pytest.warns(lapis.LapisWarning, match="labels="):
        np.testing.assert_allclose(GaussianMixture(3).fit(x, y).means_, every)


@pytest.mark.parametrize("kind", KINDS)
def test_the_bayesian_mixture_takes_singular_data(kind: Any) -> None:
    """More columns than rows, rows that repeat, constant columns: the prior is raised, the bound does not fall."""
    x, _ = clusters(0, each=8, dimensions=30)
    repeated = np.repeat(x[:2, :3], 20, 0) + np.array([0.0, 0.0, 1.0])
    for data in (x[:10], repeated):
        mixture = quietly(BayesianGaussianMixture(2, kind), data)
        assert (np.diff(mixture.bounds_) > -1e-8 * abs(mixture.bounds_[-1])).all()
        assert len(mixture.bounds_) == mixture.n_iter_
        assert np.isfinite(mixture.score_samples(data)).all()


def test_the_estimators_keep_scikit_learns_rules() -> None:
    for estimator in (GaussianMixture(), BayesianGaussianMixture(), GaussianMixture(3)):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of checks that are skipped, and of constant data
            check_estimator(estimator, on_fail="raise")


@pytest.mark.parametrize("kind", KINDS)
def test_the_elbo_of_one_component_is_the_exact_evidence(kind: Any) -> None:
    """log p(x) = sum_n log p(x_n | x_1, ..., x_n-1), by Student t's and conjugate updates, one row after the other."""
    x, _ = clusters(2, each=6)
    mixture = BayesianGaussianMixture(1, kind).fit(x)
    model, centred = mixture.model_, torch.from_numpy(x) - mixture._centre
    components, one, zero = model.prior, torch.ones(1, 1).double(), torch.zeros(1, 1).double()
    total = 0.0
    for row in centred:
        now = BayesianModel(model.prior_concentration, components, model.prior_concentration, components)
        total += float(now.log_predictive(row[None]))
        components = now.maximisation(gathered(Rows(row[None]), one, zero, zero, kind)).components
    assert mixture.bounds_[-1] == pytest.approx(total, abs=1e-8)
    assert mixture.evidence_ == pytest.approx(total, abs=1e-8)


def log_evidence(x: Any, y: Any, kind: str, strength: float, freedom: float) -> float:
    """log p(x, y) with all classes known: Dirichlet(1, 1, 1) and conjugate integrals, about the mean of x."""
    x, groups, (rows, columns) = x - x.mean(0), [x[y == k] - x.mean(0) for k in range(3)], x.shape
    total = gammaln(3) - gammaln(rows + 3) + sum(gammaln(len(group) + 1) for group in groups)
    total -= rows * columns / 2 * np.log(np.pi)
    squares = []
    for group in groups:
        n, mean = len(group), group.mean(0)
        total += columns / 2 * np.log(strength / (strength + n))
        squares.append((group - mean).T @ (group - mean) + strength * n / (strength + n) * np.outer(mean, mean))
    spread = freedom * x.T @ x / rows
    counts = [len(group) for group in groups]
    if kind == "tied":
        squares, counts = [sum(squares)], [rows]
    for square, n in zip(squares, counts, strict=True):
        if kind in ("full", "tied"):
            total += multigammaln((freedom + n) / 2, columns) - multigammaln(freedom / 2, columns)
            total += freedom / 2 * np.linalg.slogdet(spread)[1]
            total -= (freedom + n) / 2 * np.linalg.slogdet(spread + square)[1]
            continue
        prior, found, share = np.diag(spread), np.diag(square), 1
        if kind == "spherical":
            prior, found, share = prior.mean(keepdims=True), found.sum(keepdims=True), columns
        for before, more in zip(prior, found, strict=True):
            total += gammaln((freedom + share * n) / 2) - gammaln(freedom / 2)
            total += freedom / 2 * np.log(before) - (freedom + share * n) / 2 * np.log(before + more)
    return float(total)


@pytest.mark.parametrize("kind", KINDS)
def test_with_all_labels_known_the_elbo_is_the_exact_evidence(kind: Any) -> None:
    x, y = clusters(5, each=7)
    x, y = x[3:], y[3:]  # classes of 4, 7 and 7 rows
    mixture = BayesianGaussianMixture(3, kind, concentration=1.0, mean_strength=0.7, freedom=3.5).fit(x, labels=y)
    assert mixture.bounds_[-1] == pytest.approx(log_evidence(x, y, kind, 0.7, 3.5), abs=1e-9)
    peer = quietly(GaussianMixture(3, kind), x, labels=y)
    assert mixture.covariances_.shape == peer.covariances_.shape
    many = np.repeat(x, 2000, 0) + 0.3 * np.random.RandomState(0).randn(2000 * len(x), 3)
    fitted = BayesianGaussianMixture(3, kind).fit(many, labels=np.repeat(y, 2000))
    likely = quietly(GaussianMixture(3, kind), many, labels=np.repeat(y, 2000))  # what many rows come to
    np.testing.assert_allclose(fitted.covariances_, likely.covariances_, rtol=0.02, atol=0.02)
    np.testing.assert_allclose(fitted.score_samples(x), likely.score_samples(x), atol=0.05)


def test_components_that_are_not_needed_fade_and_the_evidence_finds_their_number() -> None:
    x, y = clusters(4, each=60)
    mixture = BayesianGaussianMixture(8, restarts=2).fit(x)
    assert mixture.effective_components_ == 3
    best, evidences = choose_components(x, (1, 2, 3, 4, 5), restarts=2)
    assert best.n_components == 3
    assert max(evidences, key=evidences.__getitem__) == 3
    found = best.predict(x)
    assert all(len(set(found[y == k].tolist())) == 1 or np.bincount(found[y == k]).max() > 55 for k in range(3))


def test_samples_have_the_mixtures_moments() -> None:
    """Means of 20,000 draws within 5 standard errors: a false alarm in 6e-7 of each of 12 numbers, and seeded."""
    x, _ = clusters()
    for kind in ("full", "tied", "diagonal", "spherical"):
        mixture = quietly(GaussianMixture(2, kind), x)
        drawn, place = mixture.sample(20_000)
        mean = mixture.weights_ @ mixture.means_
        assert (np.abs(drawn.mean(0) - mean) < 5 * drawn.std(0) / 20_000**0.5).all()
        share = (place == 0).mean()
        assert abs(share - mixture.weights_[0]) < 5 * (0.25 / 20_000) ** 0.5


@pytest.mark.parametrize("kind", list(KINDS))
def test_samples_of_a_bayesian_mixture_have_the_density_that_scores_them(kind: Any) -> None:
    """E[g(x) / p(x)] = 1 for draws from p and a density g: within 5 standard errors, for 4 g; false alarms 2e-6."""
    x, _ = clusters(each=4)
    mixture = quietly(BayesianGaussianMixture(3, kind, concentration=1.0), x)
    drawn, place = mixture.sample(40_000)
    assert abs((place == 0).mean() - mixture.weights_[0]) < 5 * (0.25 / 40_000) ** 0.5
    densities = np.exp(mixture.score_samples(drawn))
    for middle, width in (
        (mixture.means_[0], 0.5),
        (mixture.means_[1], 1.0),
        (mixture.means_[2] + 1, 0.7),
        (x[0], 0.3),
    ):
        ratios = norm.pdf(drawn, middle, width).prod(1) / densities
        assert abs(ratios.mean() - 1) < 5 * ratios.std() / 40_000**0.5


def test_bad_input_is_said_and_degenerate_components_too() -> None:
    x, y = clusters()
    for labels, words in (
        (np.full(len(x), 3), "labels"),
        (np.full((len(x), 3), -1.0), "labels"),
        (y[:5], "labels"),
        (["a"] * len(x), "labels"),
    ):
        with pytest.raises(lapis.DataError, match=words):
            GaussianMixture(3).fit(x, labels=labels)
    with pytest.raises(lapis.DataError, match="labels"):
        GaussianMixture(2).fit(x, np.where(y == 0, -1, y))
    with pytest.warns(lapis.LapisWarning, match="y is not used"):
        GaussianMixture(2).fit(x, np.linspace(0, 1, len(x)))
    with pytest.raises(ValueError, match="too few"):
        GaussianMixture(5).fit(x[:3])
    with pytest.raises(ValueError, match="NaN"):
        GaussianMixture(2).fit(np.where(x > 5, np.nan, x))
    for options in ({"n_components": 0}, {"covariance": "round"}, {"tolerance": -1}, {"random_state": "a"}):
        with pytest.raises(lapis.OptionError):
            GaussianMixture(**options).fit(x)  # type: ignore[arg-type]
    with pytest.raises(lapis.DataError, match="start"):
        GaussianMixture(2, start=(np.ones(3), x[:3], np.ones(3))).fit(x)
    weights, means, spread = np.full(2, 0.5), x[:2], np.stack([np.eye(3)] * 2)
    for start in ((weights - 1, means, spread), (weights, means, -spread), (weights, means, np.triu(spread + 1))):
        with pytest.raises(lapis.DataError, match="start is no mixture"):
            GaussianMixture(2, start=start).fit(x)
    with pytest.raises(lapis.DataError, match="overflow"):
        GaussianMixture(2).fit(1e200 * x)
    with pytest.raises(lapis.DataError, match=r"too far.* rows \[1\]"):
        GaussianMixture(2).fit(x).predict_proba([[0, 0, 0], [1e200, 0, 0]])
    with pytest.raises(lapis.DataError, match=r"reshape\(-1, 1\)"):
        choose_components(x[:, 0])
    with pytest.warns(lapis.LapisWarning, match=r"Columns \[0, 1\] are constant"):
        BayesianGaussianMixture(2).fit(np.full((9, 2), 0.1))
    with pytest.warns(lapis.LapisWarning, match="constant"):
        GaussianMixture(2, "diagonal").fit(np.column_stack([x, np.ones(len(x))]))
    with pytest.warns(lapis.LapisWarning, match=r"Components \[3\] have no rows"):
        assert GaussianMixture(4).fit(x, labels=y).weights_[3] == 0
    copies = np.concatenate([x, np.repeat([[30.0, 30.0, 30.0]], 5, 0)])
    with pytest.warns(lapis.LapisWarning, match="floor"):
        mixture = GaussianMixture(4, restarts=3).fit(copies)
    assert np.isfinite(mixture.score_samples(copies)).all()


@pytest.mark.parametrize("mixture", [GaussianMixture, BayesianGaussianMixture])
def test_diag_is_scikit_learns_name_of_diagonal(mixture: Any) -> None:
    x = np.random.default_rng(0).normal(size=(30, 2))
    one, other = (mixture(2, name, random_state=0).fit(x) for name in ("diag", "diagonal"))
    np.testing.assert_array_equal(one.covariances_, other.covariances_)
    assert one.get_params()["covariance"] == "diag"
