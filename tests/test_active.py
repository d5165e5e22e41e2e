"""Active learning and decisions: scores against their definitions, joint choices against brute force, resumed loops."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lapis
from lapis.decisions.active.joint import greedy_classes, greedy_gaussian

DOUBLE = torch.float64


def classifier(classes: int = 3, seed: int = 0) -> tuple[nn.Module, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(2, 6), nn.Tanh(), nn.Linear(6, classes)).to(DOUBLE)
    x = torch.randn(40, 2, dtype=DOUBLE, generator=generator)
    y = (x[:, 0] > 0).long() + (x[:, 1] > 0.5).long() * (classes > 2)
    return model, x, y


@pytest.fixture
def posterior() -> lapis.Posterior:
    model, x, y = classifier()
    return lapis.laplace(model, (x, y), "categorical", structure="dense", weights="all")


POOL = torch.randn(30, 2, dtype=DOUBLE, generator=torch.Generator().manual_seed(5)) * 2


def test_scores_are_their_definitions(posterior: lapis.Posterior) -> None:
    prediction = posterior.predict(POOL)
    p = prediction.probs
    expected = {
        "entropy": -(p * p.log()).sum(-1),
        "bald": prediction.mutual_information,
        "variation_ratios": 1 - p.amax(-1),
    }
    q = prediction.f_mean.softmax(-1)
    hessian = torch.diag_embed(q) - q[:, :, None] * q[:, None]
    covariance = prediction.f_covariance
    gain = torch.eye(3, dtype=DOUBLE) + hessian @ covariance
    expected["memorable"] = (q * (1 - q)).sum(-1)
    expected["variance"] = (hessian @ covariance @ hessian).diagonal(dim1=1, dim2=2).sum(-1)
    expected["information_gain"] = 0.5 * torch.linalg.det(gain).log()
    for by, values in expected.items():
        torch.testing.assert_close(lapis.active.scores(posterior, POOL, by), values, rtol=1e-8, atol=1e-10)
        chosen = lapis.active.acquire(posterior, POOL, 4, by)
        assert chosen.tolist() == values.argsort(descending=True)[:4].tolist()


def test_pools_in_any_form_and_in_parts_give_the_same_choice(
    posterior: lapis.Posterior, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = {by: lapis.active.acquire(posterior, POOL, 5, by).tolist() for by in ("bald", "batch", "diverse")}
    monkeypatch.setattr("lapis.decisions.active.pool.PART", 7)
    data = TensorDataset(POOL, torch.zeros(len(POOL)))
    for pool in (POOL, POOL.numpy(), data, DataLoader(data, batch_size=4)):
        for by, chosen in whole.items():
            assert lapis.active.acquire(posterior, pool, 5, by).tolist() == chosen


def test_excluded_examples_are_never_chosen_and_random_is_random(posterior: lapis.Posterior) -> None:
    taken = lapis.active.acquire(posterior, POOL, 10)
    for by in ("bald", "batch", "random"):
        again = lapis.active.acquire(posterior, POOL, 20, by, exclude=taken)
        assert sorted(again.tolist() + taken.tolist()) == list(range(30))
    one, two = (
        lapis.active.acquire(posterior, POOL, 10, "random", generator=torch.Generator().manual_seed(s)) for s in (1, 2)
    )
    assert one.tolist() != two.tolist()


def test_joint_information_is_the_growth_of_the_precision() -> None:
    """Linear Gaussian model: the greedy set has the largest log-determinant that greedy choice can reach."""
    torch.manual_seed(0)
    model = nn.Linear(3, 2).to(DOUBLE)
    x = torch.randn(6, 3, dtype=DOUBLE)
    likelihood = lapis.Gaussian(noise=0.5)
    posterior = lapis.laplace(model, (x, torch.randn(6, 2, dtype=DOUBLE)), likelihood, structure="dense")
    pool = torch.randn(12, 3, dtype=DOUBLE, generator=torch.Generator().manual_seed(1)) * 2

    def jacobian(rows: Tensor) -> Tensor:
        """J of both outputs at inputs (n, 3): (2 n, 8), weights then biases."""
        eye = torch.eye(2, dtype=DOUBLE)
        weights = torch.einsum("ni,cd->ncdi", rows, eye).reshape(len(rows) * 2, 6)
        return torch.cat([weights, eye.repeat(len(rows), 1)], 1)

    precision = jacobian(x).T @ jacobian(x) / 0.25 + torch.eye(8, dtype=DOUBLE)
    chosen: list[int] = []
    for _ in range(4):
        gains = []
        for i in range(12):
            rows = jacobian(pool[[*chosen, i]])
            gains.append(-math.inf if i in chosen else torch.logdet(precision + rows.T @ rows / 0.25).item())
        chosen.append(max(range(12), key=gains.__getitem__))
    assert lapis.active.acquire(posterior, pool, 4, "batch", candidates=12).tolist() == chosen
    # the gain of one example alone is its mutual information
    start = torch.logdet(precision)
    rows = [jacobian(pool[[i]]) for i in range(12)]
    alone = torch.stack([0.5 * (torch.logdet(precision + j.T @ j / 0.25) - start) for j in rows])
    torch.testing.assert_close(lapis.active.scores(posterior, pool), alone, rtol=1e-9, atol=1e-10)


def test_diverse_choices_avoid_copies(posterior: lapis.Posterior) -> None:
    far = torch.tensor([[9.0, 9.0], [9.0, 9.0], [9.0, 9.0], [-9.0, 4.0], [4.0, -9.0]], dtype=DOUBLE)
    values = lapis.active.scores(posterior, far)
    for by in ("batch", "diverse"):
        chosen = lapis.active.acquire(posterior, far, 3, by).tolist()
        assert len({0, 1, 2} & set(chosen)) == 1, (by, chosen, values)


def test_joint_entropy_of_classes_equals_enumeration() -> None:
    """Until the outcomes are too many they are all enumerated, and the greedy choice is that of brute force."""
    generator = torch.Generator().manual_seed(3)
    probs = (torch.randn(5, 6, 3, dtype=DOUBLE, generator=generator) * 2).softmax(-1)

    def information(chosen: list[int]) -> float:
        joint = 0.0
        for outcome in itertools.product(range(3), repeat=len(chosen)):
            p = torch.stack([probs[:, i, c] for i, c in zip(chosen, outcome, strict=True)]).prod(0).mean()
            joint -= float(p * p.log())
        return joint + sum(float((probs[:, i] * probs[:, i].log()).sum(-1).mean()) for i in chosen)

    expected: list[int] = []
    for _ in range(4):
        rest = [i for i in range(6) if i not in expected]
        expected.append(max(rest, key=lambda i: information([*expected, i])))
    assert greedy_classes(probs, 4, generator) == expected


def test_joint_entropy_by_drawn_outcomes_is_near_enumeration(monkeypatch: pytest.MonkeyPatch) -> None:
    """With 2,000 drawn outcomes of 4,096 the choice is the same: seeded, so there are no false alarms."""
    generator = torch.Generator().manual_seed(4)
    probs = (torch.randn(8, 9, 4, dtype=DOUBLE, generator=generator) * 2).softmax(-1)
    monkeypatch.setattr("lapis.decisions.active.joint.CONFIGURATIONS", 10**6)
    exact = greedy_classes(probs, 6, generator)
    monkeypatch.setattr("lapis.decisions.active.joint.CONFIGURATIONS", 2_000)
    assert greedy_classes(probs, 6, generator)[:5] == exact[:5]


def test_conditioning_keeps_the_covariance_of_what_is_left() -> None:
    generator = torch.Generator().manual_seed(0)
    root = torch.randn(8, 8, dtype=DOUBLE, generator=generator)
    joint = root @ root.T
    factors = torch.randn(4, 1, 2, 2, dtype=DOUBLE, generator=generator)
    work = joint.clone()
    first = greedy_gaussian(work, factors, 1, by_variance=False)[0]
    rows = slice(2 * first, 2 * first + 2)
    hessian = factors[first, 0] @ factors[first, 0].T
    precision = torch.linalg.inv(joint)
    precision[rows, rows] += hessian
    torch.testing.assert_close(work, torch.linalg.inv(precision), rtol=1e-8, atol=1e-9)


def test_every_kind_of_posterior_can_choose() -> None:
    dropped = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 3)).to(DOUBLE)
    members = lapis.ensemble([classifier(seed=s)[0] for s in range(3)], "categorical")
    for posterior in (lapis.dropout(dropped, "categorical"), members):
        for by in ("entropy", "bald", "variance", "information_gain", "batch", "diverse"):
            assert len(set(lapis.active.acquire(posterior, POOL, 4, by).tolist())) == 4


def fit(data: tuple[Tensor, Tensor]) -> lapis.Posterior:
    model = classifier()[0]
    optimiser = torch.optim.Adam(model.parameters(), lr=0.05)
    for _ in range(30):
        optimiser.zero_grad()
        nn.functional.cross_entropy(model(data[0]), data[1]).backward()
        optimiser.step()
    return lapis.laplace(model, data, "categorical", structure="dense", weights="all")


def test_a_killed_loop_goes_on_as_if_nothing_had_happened(tmp_path: Path) -> None:
    _, x, y = classifier()
    settings = {"start": 6, "each": 4, "by": "random", "test": (x, y)}
    plain = lapis.active.learn(fit, (x, y), 18, **settings)
    assert [r.labels for r in plain.rounds] == [6, 10, 14, 18]
    assert all(set(r.scores) == {"nll", "error"} for r in plain.rounds)
    calls = 0

    def dying(data: tuple[Tensor, Tensor]) -> lapis.Posterior:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise KeyboardInterrupt
        return fit(data)

    path = tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):
        lapis.active.learn(dying, (x, y), 18, **settings, checkpoint=path)
    resumed = lapis.active.learn(fit, (x, y), 18, **settings, checkpoint=path)
    assert resumed.indices.tolist() == plain.indices.tolist()
    assert [r.scores for r in resumed.rounds] == [r.scores for r in plain.rounds]
    again = lapis.active.learn(fit, (x, y), 18, **settings, checkpoint=path)
    assert again.rounds == resumed.rounds
    longer = lapis.active.learn(fit, (x, y), 22, **settings, checkpoint=path)
    assert [r.labels for r in longer.rounds] == [6, 10, 14, 18, 22]
    shorter = lapis.active.learn(fit, (x, y), 12, **settings, checkpoint=path)
    assert shorter.indices.tolist() == plain.indices.tolist()[:12]
    assert [r.labels for r in shorter.rounds] == [6, 10, 12]
    kept = lapis.active.learn(fit, (x, y), 22, **settings, checkpoint=path)
    assert kept.rounds == longer.rounds  # a shorter run forgets nothing
    assert plain.labels_to(1.0) == 6
    assert plain.labels_to(-1.0) is None
    with pytest.raises(lapis.FileError, match="another"):
        lapis.active.learn(fit, (x, y), 18, **{**settings, "each": 3}, checkpoint=path)


def test_what_cannot_be_done_is_said(posterior: lapis.Posterior) -> None:
    _, x, y = classifier()
    with pytest.raises(lapis.DataError, match="too few"):
        lapis.active.acquire(posterior, POOL, 31)
    with pytest.raises(lapis.OptionError, match="exclude"):
        lapis.active.acquire(posterior, POOL, 3, exclude=[30])
    with pytest.raises(lapis.OptionError, match="Unknown by"):
        lapis.active.acquire(posterior, POOL, 3, by="luck")  # type: ignore[arg-type]
    with pytest.raises(lapis.DataError, match="shuffle"):
        lapis.active.acquire(posterior, DataLoader(TensorDataset(POOL), shuffle=True), 3)
    with pytest.raises(lapis.OptionError, match="budget"):
        lapis.active.learn(fit, (x, y), 3)
    with pytest.raises(lapis.DataError, match="pair"):
        lapis.active.learn(fit, x, 30)
    with pytest.raises(lapis.LikelihoodError, match="rewards"):
        lapis.decisions.thompson(posterior, POOL)
    real = lapis.laplace(nn.Linear(2, 1).to(DOUBLE), (x, x[:, :1]), "gaussian")
    with pytest.raises(lapis.LikelihoodError, match="memorable"):
        lapis.active.acquire(real, POOL, 3, "memorable")
    with pytest.raises(lapis.OptionError, match="over"):
        lapis.decisions.thompson(real, POOL, over="outputs")
    with pytest.raises(lapis.OptionError, match="Bad n"):
        lapis.decisions.upper_confidence(real, POOL, 31)


def test_thompson_takes_each_choice_as_often_as_it_is_the_best() -> None:
    """Frequencies against the posterior's own probabilities; chi-square at a false-alarm rate of 1e-4, seeded."""
    model, x = nn.Linear(1, 1, bias=False).to(DOUBLE), torch.tensor([[1.0], [2.0]], dtype=DOUBLE)
    with torch.no_grad():
        model.weight.fill_(0.3)
    posterior = lapis.laplace(model, (x, 0.3 * x), lapis.Gaussian(noise=1.0), structure="dense")
    candidates = torch.tensor([[-1.0], [0.0], [1.0]], dtype=DOUBLE)
    deviation = (1 / (1 + 5.0)) ** 0.5  # the slope is N(.3, 1/6): the best candidate is its sign's
    positive = 0.5 * (1 + math.erf(0.3 / deviation / 2**0.5))
    picks = lapis.decisions.thompson(posterior, candidates, 4_000, generator=torch.Generator().manual_seed(1))
    counts = torch.bincount(picks, minlength=3)
    assert counts[1] == 0
    expected = 4_000 * positive
    chi_square = (counts[2] - expected) ** 2 / expected + (counts[0] - 4_000 + expected) ** 2 / (4_000 - expected)
    assert chi_square < 15.14  # the 1 - 1e-4 quantile with one degree of freedom
    assert lapis.decisions.upper_confidence(posterior, candidates).tolist() == [2]
    assert lapis.decisions.upper_confidence(posterior, candidates, 3).tolist() == [2, 0, 1]


def test_actions_of_contexts_are_chosen_from_their_own_outputs() -> None:
    torch.manual_seed(0)
    x = torch.randn(50, 2, dtype=DOUBLE)
    model = nn.Linear(2, 3).to(DOUBLE)
    posterior = lapis.laplace(model, (x, model(x).detach()), lapis.Gaussian(noise=1e-3), structure="dense")
    best = posterior.predict(x).mean.argmax(-1)  # hardly any doubt: everybody takes the best action
    assert lapis.decisions.thompson(posterior, x, over="outputs").tolist() == best.tolist()
    assert lapis.decisions.upper_confidence(posterior, x, over="outputs").tolist() == best.tolist()
    several = lapis.decisions.thompson(posterior, x, 4, over="outputs")
    assert several.shape == (4, 50)
    members = lapis.ensemble([nn.Linear(2, 3).to(DOUBLE) for _ in range(3)], lapis.Gaussian(noise=1.0))
    assert lapis.decisions.thompson(members, x, 2, over="outputs").shape == (2, 50)
