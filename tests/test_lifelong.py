"""Life-long learning: each method's penalty against its formula written naively, and tasks that are not forgotten."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import lapis
from lapis import lifelong
from lapis.lifelong.heads import Heads, OnHead
from lapis.lifelong.learner import Learner, Task
from lapis.lifelong.memory import Memory, OnMemory
from untouched import portrait

F64 = torch.float64


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def network(outputs: int = 4, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, outputs)).double()


def blobs(centre: float, seed: int, number: int = 40) -> tuple[Tensor, Tensor]:
    """Two classes about (centre, 0): one above the other if the centre is negative, else side by side."""
    y = torch.arange(number) % 2
    x = 0.3 * torch.randn(number, 2, dtype=F64, generator=seeded(seed))
    x[:, 0] += centre
    x[:, 1 if centre < 0 else 0] += torch.where(y == 1, 0.8, -0.8)
    return x, y


TASKS = [blobs(-1.5, 1), blobs(1.5, 2)]
QUICK: dict[str, Any] = {"epochs": 60, "learning_rate": 0.02, "batch_size": 40}


def task_of(learner: Learner, data: Any, head: Any = None) -> Task:
    return learner._task(data, head)


def penalty_of(learner: Learner, data: Any, head: Any = None) -> tuple[Tensor, Tensor]:
    """The penalty at the model's weights, and its gradient (P,)."""
    penalty = learner._penalty(task_of(learner, data, head))
    assert penalty is not None
    value = penalty()
    gradients = torch.autograd.grad(value, list(learner.network.parameters.values()), allow_unused=True)
    return value.detach(), learner.network.gather(gradients)


def moved(learner: Learner, scale: float = 0.1) -> None:
    """Move the model's weights, as training on a next task would."""
    with torch.no_grad():
        for i, parameter in enumerate(learner.model.parameters()):
            parameter += scale * torch.randn(parameter.shape, dtype=F64, generator=seeded(i))


def naive_fisher(model: nn.Module, x: Tensor, columns: list[int]) -> Tensor:
    """sum_n sum_c p_c (d log p_c / d theta)^2, example by example and class by class."""
    parameters = list(model.parameters())
    total = torch.zeros(sum(p.numel() for p in parameters), dtype=F64)
    for row in x:
        log_p = model(row[None])[0, columns].log_softmax(-1)
        for value in log_p:
            gradients = torch.autograd.grad(value, parameters, retain_graph=True)
            total += value.detach().exp() * torch.cat([g.reshape(-1) for g in gradients]).square()
    return total


# methods against their formulas --------------------------------------------------------------------------


def test_ewc_sums_penalties_with_the_fisher_information_of_single_examples() -> None:
    learner = lifelong.EWC(network(), "classification", heads=2, strength=7.0, **QUICK)
    expected = torch.zeros((), dtype=F64)
    held = []
    for number, (x, y) in enumerate(TASKS):
        learner.learn((x, y), number)
        columns = [2 * number, 2 * number + 1]
        held.append((naive_fisher(learner.model, x, columns), learner.network.flat()))
    moved(learner)
    now = learner.network.flat()
    expected = sum(7.0 / 30 / 2 * (f * (now - t).square()).sum() for f, t in held)
    new = blobs(0.0, 3, 30)
    value, gradient = penalty_of(learner, new, 0)
    # penalties of several tasks differ by a constant from the single quadratic that is kept
    constant = sum(7.0 / 30 / 2 * (f * t.square()).sum() for f, t in held)
    total, pull = sum(f for f, _ in held), sum(f * t for f, t in held)
    constant -= 7.0 / 30 / 2 * torch.where(total > 0, pull.square() / total, 0.0).sum()
    torch.testing.assert_close(value, expected - constant, rtol=1e-9, atol=0)
    wanted = sum(7.0 / 30 * f * (now - t) for f, t in held)
    torch.testing.assert_close(gradient, wanted, rtol=1e-9, atol=1e-12)


def test_replay_adds_the_loss_of_all_remembered_examples_under_their_heads() -> None:
    learner = lifelong.Replay(network(), "classification", heads=2, points=10, strength=2.0, **QUICK)
    for number, task in enumerate(TASKS):
        learner.learn(task, number)
    assert [len(episode) for episode in learner.memory.episodes] == [10, 10]
    assert all(int(episode.targets.sum()) == 5 for episode in learner.memory.episodes)
    moved(learner)
    learner.batch_size = 100  # all remembered examples at every step
    value, _ = penalty_of(learner, blobs(0.0, 3, 30), 0)
    losses = [
        nn.functional.cross_entropy(learner.model(each.inputs)[:, 2 * k : 2 * k + 2], each.targets, reduction="sum")
        for k, each in enumerate(learner.memory.episodes)
    ]
    torch.testing.assert_close(value, (2.0 * 80 / 30 * sum(losses) / 20).detach())


def test_memorable_examples_have_the_largest_curvature_of_their_class() -> None:
    learner = lifelong.Replay(network(2), "classification", points=6, choice="memorable", **QUICK)
    x, y = TASKS[0]
    learner.learn((x, y))
    p = learner.model(x).softmax(-1).detach()
    trace = (p * (1 - p)).sum(-1)
    wanted = torch.cat([x[y == c][trace[y == c].topk(3).indices] for c in (0, 1)])
    torch.testing.assert_close(learner.memory.inputs, wanted)


@pytest.mark.parametrize("structure", ["dense", "kronecker", "diagonal"])
def test_the_strength_of_online_laplace_is_that_of_past_data_and_not_of_the_prior(structure: Any) -> None:
    options: dict[str, Any] = {"structure": structure, "strength": 7.0, "prior": 2.0, **QUICK}
    learner = lifelong.OnlineLaplace(network(), "classification", heads=2, **options)
    learner.learn(TASKS[0], 0)
    held = learner.posterior
    prior = 2.0 * torch.eye(held.n_weights, dtype=F64)
    wanted = 7.0 * (held.precision() - prior) + prior
    moved(learner)
    away = learner.network.flat() - held.mean
    value, gradient = penalty_of(learner, blobs(0.0, 3, 30), 1)
    torch.testing.assert_close(value, away @ wanted @ away / 60)
    torch.testing.assert_close(gradient, wanted @ away / 30)


def linear_tasks() -> list[tuple[Tensor, Tensor]]:
    """Two regressions with the same weights, of different inputs and sizes."""
    truth = torch.tensor([[1.0, -2.0, 0.5], [0.0, 1.0, 1.0]], dtype=F64)
    tasks = []
    for seed, number in ((1, 25), (2, 15)):
        x = torch.randn(number, 3, dtype=F64, generator=seeded(seed)) + 0.5 * seed
        tasks.append((x, x @ truth.T + 0.3 * torch.randn(number, 2, dtype=F64, generator=seeded(seed + 5))))
    return tasks


def steepest(parameters: list[Tensor], rate: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=rate, momentum=0.7)


CONVEX: dict[str, Any] = {
    "epochs": 200, "learning_rate": 0.03, "batch_size": 100, "optimiser": steepest, "schedule": "constant",
}  # fmt: skip


@pytest.mark.parametrize("structure", ["dense", "kronecker", "diagonal"])
def test_online_laplace_of_a_linear_gaussian_model_is_the_posterior_of_all_data_at_once(structure: Any) -> None:
    """Of independent weights, the recursion of their own: precisions A_1 + diag, means of the quadratic with these."""
    tasks, noise = linear_tasks(), lapis.Gaussian(0.3)
    learner = lifelong.OnlineLaplace(nn.Linear(3, 2).double(), noise, structure=structure, prior=2.0, **CONVEX)
    for task in tasks:
        learner.learn(task)
    whole = [torch.cat(part) for part in zip(*tasks, strict=True)]
    design = torch.zeros(len(whole[0]), 2, 8, dtype=F64)
    for c in range(2):
        design[:, c, 3 * c : 3 * c + 3], design[:, c, 6 + c] = whole[0], 1.0
    rows = [part.reshape(-1, 8) for part in design.split([25, 15])]
    precision, mean = 2.0 * torch.eye(8, dtype=F64), torch.zeros(8, dtype=F64)
    for x, (_, y) in zip(rows, tasks, strict=True):
        known = precision if structure != "diagonal" else precision.diagonal().diag()
        exact = known + x.T @ x / 0.3**2
        mean = torch.linalg.solve(exact, known @ mean + x.T @ y.reshape(-1) / 0.3**2)
        precision = exact if structure != "diagonal" else exact.diagonal().diag()
    torch.testing.assert_close(learner.posterior.precision(), precision, rtol=1e-10, atol=1e-8)
    torch.testing.assert_close(learner.posterior.mean, mean, rtol=0, atol=1e-7)
    if structure == "dense":  # and so the predictions are those of a fit to all data
        model = nn.Linear(3, 2).double()
        with torch.no_grad():
            torch.nn.utils.vector_to_parameters(mean, model.parameters())
        fit = lapis.laplace(model, tuple(whole), noise, structure="dense", prior=2.0)
        x = whole[0][:5]
        torch.testing.assert_close(learner.predict(x).variance, fit.predict(x).variance, rtol=1e-8, atol=0)  # type: ignore[attr-defined]


def test_importances_of_synaptic_intelligence_are_path_integrals_without_the_penalty() -> None:
    """On a quadratic loss, with steps made by hand; the loss falls by what all weights together contribute."""
    x, y = (part[:20] for part in linear_tasks()[0])
    options = {**CONVEX, "epochs": 30, "learning_rate": 0.05}
    learner = lifelong.SI(nn.Linear(3, 2).double(), lapis.Gaussian(1.0), strength=0.4, damping=0.02, **options)
    twin = nn.Linear(3, 2).double()
    twin.load_state_dict(learner.model.state_dict())
    importance, centre = torch.zeros(8, dtype=F64), torch.zeros(8, dtype=F64)
    for number, target in enumerate((y, -y)):
        learner.learn((x, target))
        parameters, momentum = list(twin.parameters()), torch.zeros(8, dtype=F64)
        start = torch.cat([p.detach().reshape(-1) for p in parameters])
        path, where = torch.zeros(8, dtype=F64), start
        for _ in range(30):
            loss = 0.5 * (twin(x) - target).square().sum(1).mean()
            g = torch.cat([each.reshape(-1) for each in torch.autograd.grad(loss, parameters)])
            total = g + (2 * 0.4 * importance * (where - centre) if number else 0.0)
            momentum = 0.7 * momentum + total
            path -= g * (-0.05 * momentum)
            where = where - 0.05 * momentum
            with torch.no_grad():
                torch.nn.utils.vector_to_parameters(where, parameters)
        importance = importance + path.clamp(min=0) / ((where - start).square() + 0.02)
        centre = where
    torch.testing.assert_close(learner.importance, importance, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(learner.centre, centre, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", ["categorical", "gaussian"])
def test_the_regulariser_of_fromp_is_a_gaussian_process_of_the_predictions(name: str) -> None:
    """Value and gradient against Jacobians, kernels and inverses written naively, after two tasks with heads."""
    likelihood = lapis.Categorical() if name == "categorical" else lapis.Gaussian(0.3)
    learner = lifelong.FROMP(network(), likelihood, heads=2, points=6, strength=3.0, prior=0.1, jitter=1e-4, **QUICK)
    for number, (x, y) in enumerate(TASKS):
        learner.learn((x, y if name == "categorical" else torch.stack([y, 1 - y], 1).double()), number)
    model, parameters = learner.model, list(learner.model.parameters())

    def link(rows: Tensor, k: int) -> Tensor:
        f = model(rows)[:, 2 * k : 2 * k + 2]
        return f.softmax(-1) if name == "categorical" else f

    def jacobian(values: Tensor) -> Tensor:
        grads = [torch.autograd.grad(v, parameters, retain_graph=True, allow_unused=True) for v in values]
        return torch.stack([learner.network.gather(each) for each in grads])

    def of_posterior() -> Tensor:
        precision = torch.full((learner.network.size,), 0.1, dtype=F64)
        weights = torch.nn.utils.parameters_to_vector(parameters).detach().clone()
        torch.nn.utils.vector_to_parameters(first, parameters)
        for k, (x, _) in enumerate(TASKS):
            torch.nn.utils.vector_to_parameters(first if k == 0 else weights, parameters)
            if name == "categorical":
                precision += naive_fisher(model, x, [2 * k, 2 * k + 1])
            else:
                precision += sum(jacobian(link(x, k)[:, c]).square().sum(0) / 0.3**2 for c in range(2))
        return precision

    torch.manual_seed(0)
    twin = lifelong.FROMP(network(), likelihood, heads=2, points=6, strength=3.0, prior=0.1, jitter=1e-4, **QUICK)
    x, y = TASKS[0]
    twin.learn((x, y if name == "categorical" else torch.stack([y, 1 - y], 1).double()), 0)
    first = twin.network.flat()  # the weights at which the first task's curvature was taken
    covariance = 1 / of_posterior()
    held = []
    for k, episode in enumerate(learner.memory.episodes):
        past = link(episode.inputs, k)
        for c in range(2):
            j = jacobian(past[:, c])
            held.append(
                (k, c, past[:, c].detach(), torch.linalg.inv(j @ (covariance * j).T + 1e-4 * torch.eye(len(j))))
            )
    moved(learner)
    value, gradient = penalty_of(learner, blobs(0.0, 3, 30) if name == "categorical" else (x, x), 0)
    expected = torch.zeros((), dtype=F64)
    for k, c, past, inverse in held:
        gap = link(learner.memory.episodes[k].inputs, k)[:, c] - past
        expected = expected + 1.5 * gap @ inverse @ gap
    torch.testing.assert_close(value, expected.detach(), rtol=1e-6, atol=0)
    wanted = learner.network.gather(torch.autograd.grad(expected, parameters))
    torch.testing.assert_close(gradient, wanted, rtol=1e-6, atol=1e-8 * float(wanted.abs().max()))


def test_fromp_with_some_tasks_at_a_step_is_fromp_on_average() -> None:
    learner = lifelong.FROMP(network(), "classification", heads=2, points=4, tasks_at_a_step=1, jitter=1e-4, **QUICK)
    learner.learn(TASKS[0], 0)
    learner.learn(TASKS[1], 1)
    learner.learn(blobs(1.0, 5, 30), 0)
    moved(learner)
    penalty = learner._penalty(task_of(learner, TASKS[0], 0))
    assert penalty is not None
    torch.manual_seed(0)
    drawn = {round(float(penalty().detach()), 9) for _ in range(40)}
    assert len(drawn) == 3  # one value for each task
    learner.tasks_at_a_step = None
    value, _ = penalty_of(learner, TASKS[0], 0)
    torch.testing.assert_close(sum(drawn) / 3, float(value), rtol=1e-6, atol=0)


def test_variational_continual_learning_tracks_the_mean_field_optimum() -> None:
    """Of a linear Gaussian model: precisions A_1 + diag of each task, means of the quadratics with these priors."""
    tasks = linear_tasks()
    options: dict[str, Any] = {"epochs": 350, "learning_rate": 0.03, "batch_size": 100}
    learner = lifelong.VCL(nn.Linear(3, 2).double(), lapis.Gaussian(0.3), prior=2.0, **options)
    precision, mean = torch.full((8,), 2.0, dtype=F64), torch.zeros(8, dtype=F64)
    for x, y in tasks:
        learner.learn((x, y))
        design = torch.zeros(len(x), 2, 8, dtype=F64)
        for c in range(2):
            design[:, c, 3 * c : 3 * c + 3], design[:, c, 6 + c] = x, 1.0
        rows = design.reshape(-1, 8)
        exact = precision.diag() + rows.T @ rows / 0.3**2
        mean = torch.linalg.solve(exact, precision * mean + rows.T @ y.reshape(-1) / 0.3**2)
        precision = exact.diagonal()
        torch.testing.assert_close(learner.posterior.mean, mean, rtol=0, atol=1e-4)
        torch.testing.assert_close(learner.posterior.marginal_variance(), 1 / precision, rtol=1e-3, atol=0)
        assert torch.equal(learner.network.flat(), learner.posterior.mean)


def test_weights_of_other_heads_keep_their_prior_under_variational_learning() -> None:
    """They have no part in the likelihood: the best q is the prior, also after a few steps."""
    learner = lifelong.VCL(network(), "classification", heads=2, prior=4.0, **{**QUICK, "epochs": 3})
    learner.learn(TASKS[0], 0)
    other = [*range(48 + 32, 48 + 64), 48 + 64 + 2, 48 + 64 + 3]  # rows 2 and 3 of the last layer, and their biases
    assert torch.equal(learner.posterior.mean[other], torch.zeros(34, dtype=F64))
    torch.testing.assert_close(learner.posterior.deviation[other], torch.full((34,), 0.5, dtype=F64))
    used = torch.ones(116, dtype=torch.bool)
    used[other] = False
    assert bool((learner.posterior.deviation[used] < 0.45).all())


def test_variational_learning_widens_weights_at_the_rate_of_the_means_unless_told() -> None:
    widths = {}
    for rate in (None, 0.02, 1e-6):
        learner = lifelong.VCL(network(), "classification", heads=2, deviation_rate=rate, **{**QUICK, "epochs": 5})
        learner.learn(TASKS[0], 0)
        widths[rate] = learner.posterior.deviation
    assert torch.equal(widths[None], widths[0.02])
    assert float(widths[None][:48].mean()) > 1.05 * float(widths[1e-6][:48].mean())


def test_a_coreset_is_set_aside_and_seen_before_predictions_only() -> None:
    learner = lifelong.VCL(network(), "classification", heads=2, coreset=6, **{**QUICK, "epochs": 10})
    for number, task in enumerate(TASKS):
        learner.learn(task, number)
    assert [len(episode) for episode in learner.memory.episodes] == [6, 6]
    assert learner.tasks[0].n_data == 40
    assert learner._posterior is not None
    assert learner._posterior.n_data == 34
    assert learner.posterior.n_data == 12
    assert torch.equal(learner.network.flat(), learner._posterior.mean)
    torch.testing.assert_close(learner.posterior.weight_prior.mean, learner._posterior.mean)
    assert learner.predict(TASKS[0][0], 0).probs.shape == (40, 2)  # type: ignore[attr-defined]


# what all methods share ------------------------------------------------------------------------------------

LEARNERS: dict[str, Callable[..., Learner]] = {
    "EWC": lambda model, **o: lifelong.EWC(model, "classification", strength=100.0, **o),
    "OnlineLaplace": lambda model, **o: lifelong.OnlineLaplace(model, "classification", strength=3.0, prior=0.1, **o),
    "SI": lambda model, **o: lifelong.SI(model, "classification", strength=6.0, **o),
    "FROMP": lambda model, **o: lifelong.FROMP(model, "classification", points=10, strength=1.0, clip=None, **o),
    "VCL": lambda model, **o: lifelong.VCL(model, "classification", prior=0.1, coreset=10, **o),
    "Replay": lambda model, **o: lifelong.Replay(model, "classification", points=10, **o),
    "Joint": lambda model, **o: lifelong.Joint(model, "classification", **o),
    "FineTuning": lambda model, **o: lifelong.FineTuning(model, "classification", **o),
}
LESSONS = [lifelong.Lesson(train, blobs(centre, 5, 200)) for train, centre in zip(TASKS, (-1.5, 1.5), strict=True)]


@pytest.mark.parametrize("name", [name for name in LEARNERS if name != "FineTuning"])
def test_every_method_forgets_less_than_fine_tuning(name: str) -> None:
    """One head for both tasks: classes above each other in one place, side by side in another."""
    found = {
        key: lifelong.accuracy_matrix(lambda key=key: LEARNERS[key](network(2), **QUICK), LESSONS)
        for key in (name, "FineTuning")
    }
    assert found["FineTuning"].learning() > 0.95
    assert found[name].average() > found["FineTuning"].average() + 0.05
    assert found[name].forgetting() < found["FineTuning"].forgetting() - 0.1


@pytest.mark.parametrize("name", LEARNERS)
def test_a_loaded_learner_goes_on_as_the_saved_one(name: str, tmp_path: Path) -> None:
    options = {**QUICK, "epochs": 5, "heads": {"a": slice(0, 2), "b": [2, 3]}, "generator": seeded(4)}
    learner = LEARNERS[name](network(), **options)
    learner.learn(TASKS[0], "a")
    learner.save(tmp_path / "learner")
    other = lifelong.load(tmp_path / "learner", network(seed=7))
    assert type(other) is type(learner)
    for each in (learner, other):
        each.learn(TASKS[1], "b")
    assert torch.equal(learner.network.flat(), other.network.flat())
    assert other.tasks == learner.tasks
    x = TASKS[0][0]
    assert torch.equal(learner.predict(x, "a").probs, other.predict(x, "a").probs)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("name", "within"), [("EWC", 1e-5), ("OnlineLaplace", 1e-5), ("SI", 1e-5), ("Replay", 1e-5), ("FROMP", 3e-3)]
)
def test_single_precision_learns_what_double_precision_does(name: str, within: float) -> None:
    """FROMP inverts kernels with eigenvalues down to its jitter, below the rounding of Jacobians in float32."""
    found = []
    for dtype in (F64, torch.float32):
        learner = LEARNERS[name](network(2).to(dtype), **{**QUICK, "epochs": 20})
        for x, y in [*TASKS, blobs(0.0, 3)]:
            learner.learn((x.to(dtype), y))
        inputs = torch.cat([x for x, _ in TASKS]).to(dtype)
        assert learner.predict(inputs).probs.dtype == dtype  # type: ignore[attr-defined]
        found.append(learner.predict(inputs, method="network").probs.double())  # type: ignore[attr-defined]
    assert (found[0] - found[1]).abs().max() < within


@pytest.mark.parametrize("name", LEARNERS)
def test_after_a_failure_model_and_learner_are_as_before(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    learner = LEARNERS[name](network(2), **{**QUICK, "epochs": 2})
    learner.learn(TASKS[0])
    before, random = portrait(learner.model), learner.source.get_state()
    state = {key: value.clone() for key, value in learner._state()[1].items()}

    def interrupt(task: Task) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(learner, "_consolidate", interrupt)
    with pytest.raises(KeyboardInterrupt):
        learner.learn(TASKS[1])
    after = portrait(learner.model)
    assert {key for key in after if after[key] != before[key]} == set()
    assert torch.equal(learner.source.get_state(), random)
    assert len(learner.tasks) == 1
    now = learner._state()[1]
    assert all(torch.equal(now[key], value) for key, value in state.items())


# heads -----------------------------------------------------------------------------------------------------


def test_outputs_of_other_heads_are_left_alone() -> None:
    learner = lifelong.FineTuning(network(), "classification", heads=2, **QUICK)
    head = learner.model[2]
    before = head.weight.detach().clone()
    learner.learn(TASKS[0], 1)
    assert torch.equal(head.weight[:2], before[:2])
    assert not torch.equal(head.weight[2:], before[2:])


def test_a_head_can_be_named_in_several_ways() -> None:
    learner = lifelong.FineTuning(network(), "classification", heads={"a": slice(0, 2), "b": [3, 2]}, **QUICK)
    learner.learn(TASKS[0], "b")
    x = TASKS[0][0]
    logits = learner.model(x).detach()
    for head, columns in (("b", [3, 2]), ([3, 2], [3, 2]), (slice(1, 4), [1, 2, 3]), (None, [0, 1, 2, 3])):
        probs = learner.predict(x, head).probs  # type: ignore[attr-defined]
        torch.testing.assert_close(probs, logits[:, columns].softmax(-1))


@pytest.mark.parametrize("likelihood", [lapis.Categorical(), lapis.Gaussian(0.5), lapis.Bernoulli()])
def test_the_likelihood_of_a_head_is_that_of_its_outputs(likelihood: lapis.Likelihood) -> None:
    """Values, gradients, and curvature: that of the other outputs is zero."""
    f = torch.randn(6, 1, 5, dtype=F64, generator=seeded(0))
    y = torch.randint(2, (6, 1), generator=seeded(1))
    if likelihood.name != "categorical":
        y = torch.randint(2, (6, 1, 2), generator=seeded(1)).double()
    head, columns = OnHead(likelihood, (3, 1)), [3, 1]
    own = f[..., columns]
    torch.testing.assert_close(head.nll(f, y), likelihood.nll(own, y))
    expected = torch.zeros(6, 1, 5, 5, dtype=F64)
    s = likelihood.factor(own, y)
    expected[..., torch.tensor(columns)[:, None], torch.tensor(columns)] = s @ s.mT
    found = head.factor(f, y)
    torch.testing.assert_close(found @ found.mT, expected)
    where = f.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(head.nll(where, y).sum(), where)
    torch.testing.assert_close(head.gradient(f, y), gradient)
    assert torch.isclose(head.log_likelihood(head.statistics(f, y)), -likelihood.nll(own, y).sum()) or (
        likelihood.name == "gaussian"  # whose sums count the other outputs as without examples
        and torch.isclose(likelihood.log_likelihood(head.statistics(f, y)), -likelihood.nll(own, y).sum())
    )


def test_the_likelihood_of_a_memory_has_each_example_under_its_own_head() -> None:
    memory = Memory()
    for k, (x, y) in enumerate(TASKS):
        memory = memory.with_episode(lapis.batches.Batch(x[:3], y[:3], 0), (2 * k, 2 * k + 1))
    f = torch.randn(4, 1, 4, dtype=F64, generator=seeded(0)).requires_grad_()
    numbers = torch.tensor([4, 0, 5, 2])
    likelihood = OnMemory(memory, lapis.Categorical())
    expected = [
        nn.functional.cross_entropy(f[i, 0, 2 * (n // 3) : 2 * (n // 3) + 2], TASKS[n // 3][1][n % 3])
        for i, n in enumerate(numbers.tolist())
    ]
    value = likelihood.nll(f, numbers)
    torch.testing.assert_close(value, torch.stack(expected))
    (gradient_of,) = torch.autograd.grad(value.sum(), f, create_graph=True)
    torch.testing.assert_close(likelihood.gradient(f.detach(), numbers), gradient_of.detach())
    columns = [torch.autograd.grad(gradient_of[:, 0, c].sum(), f, retain_graph=True)[0][:, 0] for c in range(4)]
    hessian = torch.stack(columns, -1)[:, None]
    s = likelihood.factor(f.detach(), numbers)
    torch.testing.assert_close(s @ s.mT, hessian)


# scores and errors -----------------------------------------------------------------------------------------


def test_scores_of_an_accuracy_matrix() -> None:
    nan = torch.nan
    found = lifelong.Accuracies(torch.tensor([[0.9, nan, nan], [0.7, 0.8, nan], [0.8, 0.5, 1.0]], dtype=F64))
    assert found.average() == pytest.approx((0.8 + 0.5 + 1.0) / 3)
    assert found.average(1) == pytest.approx(0.75)
    assert found.forgetting() == pytest.approx((0.1 + 0.3) / 2)
    assert found.learning() == pytest.approx(0.9)


@pytest.mark.parametrize(
    ("work", "error", "words"),
    [
        (lambda: lifelong.EWC(network(), "classification", strength=-1.0), lapis.OptionError, "strength"),
        (lambda: lifelong.EWC(network(), "classification", epochs=0), lapis.OptionError, "epochs"),
        (lambda: lifelong.EWC(network(), "classification", optimiser="lion"), lapis.OptionError, "optimiser"),
        (lambda: lifelong.Replay(network(), "classification", choice="best"), lapis.OptionError, "choice"),
        (lambda: lifelong.FineTuning(network(), "classification", heads=0), lapis.OptionError, "heads"),
        (lambda: lifelong.FineTuning(3, "classification"), lapis.ModelError, "network"),
        (lambda: lifelong.FineTuning(network(), "classification").learn(TASKS[0], "a"), lapis.OptionError, "head"),
        (lambda: lifelong.FineTuning(network(), "classification").learn(TASKS[0], [0, 0]), lapis.OptionError, "head"),
        (lambda: lifelong.FineTuning(network(), "classification").learn(TASKS[0], [0, 9]), lapis.OptionError, "9"),
        (lambda: lifelong.FineTuning(network(), "classification").posterior, lapis.ModelError, "posterior"),
        (lambda: lifelong.FineTuning(network(1), "classification").learn(TASKS[0]), lapis.LikelihoodError, "class"),
        (lambda: lifelong.FineTuning(network(), "classification").learn(iter([TASKS[0]])), lapis.DataError, "once|one"),
        (lambda: lifelong.load("nowhere", network()), lapis.FileError, "nowhere"),
        (lambda: lifelong.VCL(network(), "classification", coreset=40).learn(TASKS[0]), lapis.OptionError, "coreset"),
    ],
)  # fmt: skip
def test_bad_input_is_refused_before_any_work(work: Callable[[], Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        work()


def test_heads_are_known_by_name_number_or_outputs() -> None:
    assert Heads({3: [1, 0]}).columns(3) == (1, 0)
    assert Heads(2).columns(np.int64(1)) == (2, 3)
    assert Heads(None).columns(torch.tensor([1, 2])) == (1, 2)
    assert Heads.from_config(Heads({"a": slice(1, 3)}).config()).columns("a") == (1, 2)
