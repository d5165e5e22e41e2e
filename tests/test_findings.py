"""What `make fuzz` found in the rooms around the posteriors: each call again, refused in our words, or right."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import lapis
from lapis import imaging, latent, lifelong
from lapis.export import predictive
from lapis.latent.variational.fit import VariationalFit
from lapis.linear_models import linear

F64 = torch.float64
X = torch.randn(24, 3, dtype=F64, generator=torch.Generator().manual_seed(0))
HUGE = 10**400
COMPLEX = torch.ones(1, dtype=torch.complex64)
META = torch.ones(3, device="meta")
LEAF = torch.ones(2, requires_grad=True)


def mixture() -> latent.GaussianMixture:
    return latent.GaussianMixture(2).fit(X)


def dynamics(**matrices: Any) -> Any:
    return latent.LinearDynamics(noise="diagonal", **matrices)


def hidden() -> latent.HiddenMarkov:
    return latent.HiddenMarkov(2, symbols=3).fit([torch.tensor([0, 1, 2, 0, 1])], tolerance=1e3, restarts=1)


def student() -> lifelong.Replay:
    return lifelong.Replay(nn.Linear(3, 2).double(), "regression", epochs=1)


def never(data: Any) -> Any:
    raise AssertionError("a check came too late")


def likely(data: Tensor, z: Tensor) -> Tensor:
    return -0.5 * (z.square().sum(-1) + (data[:, :1] - z).square().sum(-1))


def mixed(weights: Any) -> Any:
    torch.manual_seed(0)
    one = lapis.laplace(nn.Linear(3, 2).double(), (X, X[:, :2]), "regression")
    return lapis.mixture([one, one], weights=weights)


CALLS: dict[str, tuple[Callable[[], Any], type[Exception]]] = {
    "a linear prior of 10^400": (lambda: linear(X, X[:, 0], "regression", prior=HUGE), lapis.PriorError),
    "a complex linear prior": (lambda: linear(X, X[:, 0], "regression", prior=COMPLEX), lapis.PriorError),
    "complex features": (lambda: linear(COMPLEX, X[:1, 0], "regression"), lapis.DataError),
    "groups that are none": (
        lambda: linear(X, X[:, 0], "regression").tune(groups=lapis.Bernoulli()),
        lapis.OptionError,
    ),
    "an operator of 10^400": (lambda: imaging.LinearOperator(HUGE, (2, 2)), lapis.OptionError),
    "windows of one pixel": (lambda: imaging.ssim(X, X, window=1), lapis.OptionError),
    "EM of a name": (lambda: latent.em(mixture().model_, "a"), lapis.DataError),
    "EM of nothing": (lambda: latent.em(mixture().model_, ..., batch_size=2), lapis.DataError),
    "EM of other columns": (lambda: latent.em(mixture().model_, X[:, :2]), lapis.DataError),
    "a task that was not learnt": (lambda: lifelong.Accuracies(torch.ones(2, 2)).average(after=2), lapis.OptionError),
    "EM of a dictionary": (lambda: latent.em(mixture().model_, {"a": 1}, batch_size=2), lapis.DataError),
    "EM of complex numbers": (lambda: latent.em(mixture().model_, COMPLEX, batch_size=3), lapis.DataError),
    "a start that is a device": (lambda: latent.GaussianMixture(2, start=torch.ones(())).fit(X), lapis.DataError),
    "a strength of 10^400": (
        lambda: latent.BayesianGaussianMixture(2, mean_strength=HUGE).fit(X),
        lapis.OptionError,
    ),
    "one number for the noise's way into the states": (
        lambda: dynamics(n_latent=2, G=torch.tensor(1.0)),
        lapis.OptionError,
    ),
    "a sparse matrix of dynamics": (lambda: dynamics(C=torch.eye(2).to_sparse()), lapis.DataError),
    "symbols without values": (lambda: hidden().posterior(META), lapis.DataError),
    "a sequence of ragged rows": (lambda: hidden().viterbi(([[0, 1], [0]], [0, 1])), lapis.DataError),
    "epochs that are no number": (
        lambda: lapis.LaplaceClassifier(epochs=X).fit(X, (X[:, 0] > 0).long()),
        lapis.OptionError,
    ),
    "a vector of weights that is none": (
        lambda: lapis.network.Network(nn.Linear(3, 2)).unflatten(None),
        lapis.DataError,
    ),  # type: ignore[arg-type]
    "rows without values": (lambda: mixture().score_samples(META), lapis.DataError),
    "sparse rows": (lambda: mixture().predict(X.to_sparse()), lapis.DataError),
    "numbers of components of a number": (lambda: latent.choose_components(HUGE, (1, 2)), lapis.DataError),
    "floors that are NaN": (
        lambda: latent.GaussianEmissions(X[:2], X[:2].square() + 1, least=torch.full((3,), torch.nan)),
        lapis.DataError,
    ),
    "floors of other columns": (
        lambda: latent.GaussianEmissions(X[:2], X[:2].square() + 1, least=torch.ones(2)),
        lapis.DataError,
    ),
    "a head without values": (lambda: student().learn((X, X[:, :2]), META), lapis.OptionError),
    "a sparse head": (lambda: student().learn((X, X[:, :2]), torch.eye(2).to_sparse()), lapis.OptionError),
    "an option of no prediction": (
        lambda: lifelong.accuracy_matrix(student, [lifelong.Lesson((X, X), (X, X[:, 0]))], sample=3),
        lapis.OptionError,
    ),
    "a test set without targets": (
        lambda: lapis.active.learn(never, (X, X[:, 0]), 3, start=2, test=(X, None)),  # type: ignore[arg-type]
        lapis.DataError,
    ),
    "groups of an optimiser without parameters": (
        lambda: lapis.optim.IVON([{"params": [1]}], lr=0.1, data_size=3),
        lapis.OptionError,
    ),
    "parameters that are results": (lambda: lapis.optim.VON([2 * LEAF], lr=0.1, data_size=3), lapis.OptionError),
    "groups without patterns": (
        lambda: lapis.laplace(
            nn.Linear(3, 2).double(), (X, X[:, :2]), "regression", prior=lapis.Prior(groups={"a": 1})
        ),
        lapis.PriorError,
    ),
    "complex weights": (lambda: mixed(COMPLEX), lapis.OptionError),
    "weights of 10^400": (lambda: mixed([HUGE, 1]), lapis.OptionError),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_wrong_value_is_refused_without_a_warning_of_torch(name: str) -> None:
    call, error = CALLS[name]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(error):
            call()


def test_weights_of_samples_that_are_no_numbers_are_refused_in_the_manner_of_sklearn() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(ValueError, match="must count examples"):
            lapis.LaplaceRegressor(epochs=1).fit(X.numpy(), X[:, 0].numpy(), sample_weight=np.nan)


def test_targets_that_a_mixture_cannot_read_are_not_used() -> None:
    with pytest.warns(lapis.LapisWarning, match="y is not used"):
        latent.GaussianMixture(2).fit(X, ((1, 2), 3))


def test_fewer_different_rows_than_components_are_no_matter_for_a_warning_of_sklearn() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _, evidences = latent.choose_components(X[:2].repeat(6, 1).requires_grad_(), (1, 2, 3), restarts=1)
    assert len(evidences) == 3


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_a_mixture_reads_rows_of_any_floating_dtype(dtype: torch.dtype) -> None:
    rows = X.to(dtype)
    np.testing.assert_allclose(mixture().score_samples(rows), mixture().score_samples(rows.double().numpy()))


def test_em_takes_a_tensor_as_the_rows_of_a_mixture() -> None:
    fitted = latent.GaussianMixture(2, tolerance=1e-10).fit(X)
    again = latent.em(fitted.model_, X, tolerance=1e-10)
    np.testing.assert_allclose(again.model.means.numpy(), fitted.means_, atol=1e-4)


def test_the_error_of_an_elbo_takes_two_draws() -> None:
    with pytest.warns(lapis.LapisWarning, match="still climbing"):
        found: VariationalFit = latent.variational_em(likely, "mean_field", X[:4], n_latent=1, rounds=1, progress=False)
    with pytest.raises(lapis.OptionError, match="Bad draws"):
        found.elbo(1)


class Constant(nn.Module):
    """An intercept."""

    def __init__(self) -> None:
        super().__init__()
        self.intercept = nn.Parameter(torch.zeros(3, dtype=F64))

    def forward(self, x: Tensor) -> Tensor:
        return self.intercept.expand(len(x), 3)


def test_predictions_of_a_constant_network_hold_no_graph() -> None:
    posterior = lapis.laplace(Constant(), (X, torch.arange(24) % 3), "classification", structure="implicit")
    assert not posterior.predict(X).f_mean.requires_grad
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.simplefilter("ignore", lapis.LapisWarning)
        posterior.draw(3).calibrate((X, torch.arange(24) % 3))


# accuracies -------------------------------------------------------------------------------------------------


class Grid(nn.Module):
    """Three classes at each of four positions, classes first."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 12)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).reshape(-1, 3, 4)


def accuracy(model: nn.Module, likelihood: lapis.Likelihood, y: Tensor) -> float:
    lesson = lifelong.Lesson((X, y), (X, y))
    learner = lifelong.FineTuning(model, likelihood, epochs=1, learning_rate=1e-12)
    learner.learn(lesson.train)
    return lifelong.accuracy_matrix(lambda: learner, [lesson], method="network").average()


def test_accuracies_of_positions_soft_labels_and_ignored_ones() -> None:
    torch.manual_seed(0)
    grid, flat = Grid().double(), nn.Linear(3, 3).double()
    best = grid(X).argmax(1)
    assert accuracy(grid, lapis.Categorical(channels="first"), best) == 1
    other = best.clone()
    other[:, 0], other[:, 1] = (best[:, 0] + 1) % 3, -100
    assert accuracy(grid, lapis.Categorical(channels="first"), other) == pytest.approx(2 / 3)
    soft = torch.nn.functional.one_hot(flat(X).argmax(1), 3).double()
    assert accuracy(flat, lapis.Categorical(), soft) == 1


# exports ----------------------------------------------------------------------------------------------------


class Used(nn.Module):
    """Layers that are used in a way that the export does not follow."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.first, self.last, self.how = nn.Linear(3, 3, bias=False), nn.Linear(3, 2), how

    def forward(self, x: Tensor) -> Tensor:
        order = x[:, 0].argsort()
        a = torch.tanh(self.first(x[order] if self.how == "in another order" else x))
        if self.how == "twice":
            a = self.first(a)
        if self.how == "tied":
            a = a @ self.first.weight
        if self.how == "in another order":
            a = a[order.argsort()]
        return self.last(a)


@pytest.mark.parametrize("how", ["once", "twice", "tied", "in another order"])
def test_an_export_is_proven_or_refused(how: str) -> None:
    torch.manual_seed(0)
    model = Used(how).double()
    posterior = lapis.laplace(model, (X, torch.arange(24) % 2), "classification", structure="dense", weights="all")
    if how == "once":
        torch.testing.assert_close(predictive(posterior)(X)[0], posterior.predict(X).probs)  # type: ignore[union-attr]
        return
    with pytest.raises(lapis.ModelError, match="cannot be exported"):
        predictive(posterior)
    # the last layer alone is used once
    last = lapis.laplace(model, (X, torch.arange(24) % 2), "classification", weights="last_layer")
    torch.testing.assert_close(predictive(last)(X)[0], last.predict(X).probs)  # type: ignore[union-attr]


def test_wrong_arguments_of_the_usual_calls_are_refused() -> None:
    """What raised AttributeErrors, or was taken, before arguments were checked in one place."""
    network, data = nn.Linear(3, 2).double(), (X, X[:, :2])
    dense = lapis.laplace(network, data, "regression", structure="dense")
    implicit = lapis.laplace(network, data, "regression", structure="implicit")
    flat = linear(X, X[:, 0], lapis.Gaussian(0.3), samples=2)
    calls: dict[str, Callable[[], Any]] = {
        "generator": lambda: dense.sample(2, generator=3),  # type: ignore[arg-type]
        "generator of a fit": lambda: lapis.laplace(network, data, "regression", generator=3),  # type: ignore[call-overload]
        "solve, wrong size": lambda: implicit.solve(torch.ones(5, dtype=F64)),
        "log_prob, wrong size": lambda: dense.log_prob(torch.ones(5, dtype=F64)),
        "compare numbers": lambda: lapis.compare([1]),  # type: ignore[list-item]
        "save nowhere": lambda: dense.save(""),
        "words for numbers": lambda: lapis.laplace(network, data, "regression", temperature="1"),  # type: ignore[call-overload]
        "no rounds": lambda: dense.refine(data, max_rounds=-1),
        "products": lambda: dense.at_tangent_mode(data, max_products="a"),  # type: ignore[arg-type]
        "tolerance": lambda: dense.tune(tolerance=float("inf")),
        "tolerance of solves": lambda: implicit.with_solver(tolerance=float("inf")),
        "learning rate": lambda: lapis.train(network, data, "regression", epochs=1, learning_rate=0.0),
        "joint": lambda: dense.predict(X, joint="a"),  # type: ignore[arg-type]
        "draws": lambda: dense.sample("3"),  # type: ignore[arg-type]
        "scores that are NaN": lambda: lapis.Subnetwork(2, by=torch.tensor([1.0, float("nan"), 0.0])),
        "a flag for a prior": lambda: flat.with_prior(True),
        "a word for a noise": lambda: flat.with_noise("small"),  # type: ignore[arg-type]
    }
    taken = []
    for name, call in calls.items():
        try:
            call()
            taken.append(name)
        except lapis.LapisError:
            continue
    assert not taken
