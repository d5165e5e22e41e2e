"""The contract that every posterior keeps, whatever method of the field it is.

A new posterior joins by one line in `POSTERIORS`: a function from (model, data, likelihood) to a posterior. Every test
below then runs over it, for every problem that it supports.
"""

from __future__ import annotations

import copy
import gc
import subprocess
import sys
import warnings
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import lapis
from lapis.batches import map_tensors, take, tensors_in
from lapis.network import Network
from lapis.posteriors import GaussianPosterior, Posterior, WeightPosterior
from lapis.posteriors.conformal import ConformalIntervals, ConformalSets
from lapis.posteriors.predicting import drawn_network, sampled
from lapis.posteriors.predicting import parts as prediction_parts
from lapis.predictions import LatentGaussian, LatentMixture
from toy_ensemble import ToyEnsemble, toy_ensemble
from untouched import untouched

F64 = torch.float64


# problems: what a network takes and gives --------------------------------------------------------------


# All networks have dropout; only MC dropout switches it on.


class Pixels(nn.Module):
    """One class for each of 4 x 4 pixels: outputs (B, C, H, W)."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.dropout = nn.Conv2d(1, 3, 3, padding=1), nn.Conv2d(3, 3, 1), nn.Dropout2d(0.3)

    def forward(self, x: Tensor) -> Tensor:
        return self.two(self.dropout(self.one(x).tanh()))


class Named(nn.Module):
    """Two inputs by name."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(3, 5), nn.Linear(5, 2)

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        return self.two(nn.functional.dropout((self.one(left) + right).tanh(), 0.3, self.training))


def mlp(outputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Dropout(0.3), nn.Linear(6, outputs))


@dataclass(frozen=True)
class Problem:
    model: Callable[[], nn.Module]
    likelihood: Any
    inputs: Callable[[int], Any]
    targets: Callable[[int], Tensor]
    answer: str
    """The attribute of a prediction that has the shape of one answer an example."""
    shape: tuple[int, ...]


def normal(*shape: int) -> Callable[[int], Tensor]:
    return lambda n: torch.randn(n, *shape, dtype=F64, generator=torch.Generator().manual_seed(n))


def classes(count: int, *shape: int) -> Callable[[int], Tensor]:
    return lambda n: torch.randint(count, (n, *shape), generator=torch.Generator().manual_seed(n))


PROBLEMS = {
    "regression": Problem(lambda: mlp(2), lapis.Gaussian(0.5), normal(3), normal(2), "mean", (2,)),
    "classification": Problem(lambda: mlp(4), "classification", normal(3), classes(4), "probs", (4,)),
    "binary": Problem(lambda: mlp(1), "binary", normal(3), lambda n: classes(2, 1)(n).double(), "probs", (1,)),
    "counts": Problem(lambda: mlp(1), "poisson", normal(3), lambda n: classes(5, 1)(n).double(), "mean", (1,)),
    "positions": Problem(
        Pixels, lapis.Categorical(channels="first"), normal(1, 4, 4), classes(3, 4, 4), "probs", (3, 4, 4)
    ),
    "dictionary": Problem(
        Named,
        lapis.Gaussian(0.5),
        lambda n: {"left": normal(3)(n), "right": normal(5)(n + 1)[:n]},
        normal(2),
        "mean",
        (2,),
    ),
}
EXAMPLES = 12


# posteriors: one line each -----------------------------------------------------------------------------

Fit = Callable[[nn.Module, Any, Any], Posterior]


def structure(name: str, **options: Any) -> Fit:
    return lambda model, data, likelihood: lapis.laplace(model, data, likelihood, structure=name, **options)


def drawn(model: nn.Module, data: Any, likelihood: Any) -> Posterior:
    return lapis.laplace(model, data, likelihood, structure="implicit").draw(5)


def moved(model: nn.Module, data: Any, likelihood: Any) -> Posterior:
    """A Gaussian whose mean is not the module's weights."""
    posterior = lapis.laplace(model, data, likelihood, structure="dense")
    from dataclasses import replace

    return replace(posterior, mean=posterior.mean + 0.05)


def subset(model: nn.Module, data: Any, likelihood: Any) -> Posterior:
    """Single weights: every third."""
    chosen = torch.arange(sum(p.numel() for p in model.parameters())) % 3 == 0
    return lapis.laplace(model, data, likelihood, structure="dense", weights=chosen)


def members(model: nn.Module) -> list[nn.Module]:
    """The model, and two others like it."""
    others = [copy.deepcopy(model) for _ in range(2)]
    for i, other in enumerate(others):
        for p in other.parameters():
            p.data.add_(0.1 * (i + 1))
    return [model, *others]


def swag(model: nn.Module, data: Any, likelihood: Any) -> Posterior:
    return lapis.swag(model, data, likelihood, epochs=2, snapshots=4, rank=3)


def by_elbo(model: nn.Module, data: Any, likelihood: Any) -> Posterior:
    """A short fit, which rightly says that it is one."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", lapis.LapisWarning)
        return lapis.variational(model, data, likelihood, steps=20, rank=2)


def mixed(model: nn.Module, data: Any, likelihood: Any) -> Posterior:
    """Laplace posteriors of three networks."""
    posteriors = [lapis.laplace(each, data, likelihood, structure="diagonal") for each in members(model)]
    return lapis.mixture(posteriors, weights="evidence")


def ivon(model: nn.Module, data: Any, likelihood: Any) -> Posterior:
    """The diagonal Gaussian that an optimiser starts from."""
    return lapis.optim.IVON(model.parameters(), data_size=EXAMPLES).posterior(model, likelihood, data)


def binary(model: nn.Module, data: Any, likelihood: Any) -> Posterior:
    """Signs of every weight, rather uncertain ones."""
    return lapis.optim.BayesBiNN(model.parameters(), data_size=EXAMPLES, start=0.5).posterior(model, likelihood, data)


POSTERIORS: dict[str, Fit] = {
    "dense": structure("dense"),
    "diagonal": structure("diagonal"),
    "kronecker": structure("kronecker"),
    "ekfac": structure("ekfac"),
    "last layer": structure("kronecker", weights="last_layer"),
    "lowrank": structure("lowrank", rank=10),
    "implicit": structure("implicit"),
    "drawn": drawn,
    "moved mean": moved,
    "single weights": subset,
    "subnetwork": structure("auto", weights=lapis.Subnetwork(9)),
    "toy ensemble": lambda model, data, likelihood: toy_ensemble(members(model), data, likelihood),
    "mixture": mixed,
    "ensemble": lambda model, data, likelihood: lapis.ensemble(members(model), data, likelihood),
    "swag": swag,
    "dropout": lambda model, data, likelihood: lapis.dropout(model, likelihood, data),
    "variational": by_elbo,
    "ivon": ivon,
    "binary": binary,
}

FINITE = ("drawn", "toy ensemble", "ensemble")
"""Posteriors that are a few networks, of which a sampled prediction takes all."""

every_posterior = pytest.mark.parametrize("name", POSTERIORS)
every_problem = pytest.mark.parametrize("problem", PROBLEMS)


def fitted(name: str, problem: str = "classification") -> tuple[Posterior, nn.Module, Any]:
    """The posterior, its model, and inputs that it has not seen."""
    torch.manual_seed(0)
    chosen = PROBLEMS[problem]
    model = chosen.model().double()
    data = (chosen.inputs(EXAMPLES), chosen.targets(EXAMPLES))
    return POSTERIORS[name](model, data, chosen.likelihood), model, chosen.inputs(5)


def answer(posterior: Posterior, x: Any, problem: str, **options: Any) -> Tensor:
    found: Tensor = getattr(posterior.predict(x, **options), PROBLEMS[problem].answer)
    return found


# the tests ---------------------------------------------------------------------------------------------


@every_posterior
@every_problem
def test_predictions_have_the_layout_of_the_outputs(name: str, problem: str) -> None:
    posterior, model, x = fitted(name, problem)
    with untouched(model):
        for method in posterior.methods:
            samples = 4 if method == "sampled" and name not in FINITE else None
            prediction = posterior.predict(x, method=method, samples=samples)
            found = getattr(prediction, PROBLEMS[problem].answer)
            assert found.shape == (5, *PROBLEMS[problem].shape)
            assert prediction.log_prob(PROBLEMS[problem].targets(5)).shape == (5,)
            assert bool(torch.isfinite(prediction.log_prob(PROBLEMS[problem].targets(5))).all())
            assert bool((prediction.f_variance >= 0).all())
            assert prediction.method == ("mixture" if name == "mixture" else method)
    assert posterior.n_data == EXAMPLES
    assert posterior.n_outputs == (PROBLEMS[problem].shape[0])
    assert str(EXAMPLES) in repr(posterior)


@every_posterior
def test_probabilities_sum_to_one(name: str) -> None:
    posterior, _, x = fitted(name)
    for method in posterior.methods:
        torch.testing.assert_close(
            answer(posterior, x, "classification", method=method).sum(-1), torch.ones(5).double()
        )


@every_posterior
@pytest.mark.parametrize("problem", ["regression", "classification", "positions", "dictionary"])
def test_predictions_of_batches_are_those_of_one(name: str, problem: str) -> None:
    """Two parts of the inputs, and a loader of them, give what all at once give."""
    posterior, _, x = fitted(name, problem)
    for method in posterior.methods:
        whole = answer(posterior, x, problem, method=method)
        some = torch.cat([answer(posterior, take(x, i, j), problem, method=method) for i, j in ((0, 2), (2, 5))])
        torch.testing.assert_close(some, whole, rtol=1e-8, atol=1e-10)
        batches = iter([take(x, 0, 2), take(x, 2, 5)])
        torch.testing.assert_close(answer(posterior, batches, problem, method=method), whole, rtol=1e-8, atol=1e-10)


class Items(Dataset):  # type: ignore[type-arg]
    """A data set without targets, whose items are tensors or dictionaries of them."""

    def __init__(self, x: Any) -> None:
        self.x = x

    def __len__(self) -> int:
        return len(tensors_in(self.x)[0])

    def __getitem__(self, index: int) -> Any:
        return map_tensors(lambda tensor: tensor[index], self.x)


@every_posterior
@pytest.mark.parametrize("problem", ["classification", "dictionary"])
def test_data_of_any_form_and_size_are_predicted_in_parts(
    name: str, problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    posterior, _, _ = fitted(name, problem)
    x = PROBLEMS[problem].inputs(23)
    whole = answer(posterior, x, problem)
    seen: list[int] = []
    latent = type(posterior).latent

    def noted(self: Posterior, inputs: Any, *rest: Any) -> Any:
        seen.append(len(tensors_in(inputs)[0]))
        return latent(self, inputs, *rest)

    monkeypatch.setattr(type(posterior), "latent", noted)
    monkeypatch.setattr(prediction_parts, "COPIES", posterior.facts.memory_budget // 400)
    pairs = TensorDataset(x, torch.zeros(23)) if isinstance(x, Tensor) else Items(x)
    for data in (x, Items(x), DataLoader(Items(x), batch_size=10), DataLoader(pairs, batch_size=7), iter([x])):
        seen.clear()
        torch.testing.assert_close(answer(posterior, data, problem), whole, rtol=1e-8, atol=1e-10)
        assert sum(seen) == 23
        assert len(seen) > 2
    # drawn networks are the same for every part
    for method in posterior.methods:
        source = [torch.Generator().manual_seed(3) for _ in range(2)]
        monkeypatch.setattr(prediction_parts, "COPIES", posterior.facts.memory_budget // 400)
        one = answer(posterior, x, problem, method=method, generator=source[0])
        monkeypatch.setattr(prediction_parts, "COPIES", 1)
        torch.testing.assert_close(
            one, answer(posterior, x, problem, method=method, generator=source[1]), rtol=1e-8, atol=1e-10
        )


@every_posterior
def test_seeds_decide_what_is_drawn(name: str) -> None:
    posterior, _, x = fitted(name)

    def probabilities(seed: int | None) -> Tensor:
        source = None if seed is None else torch.Generator().manual_seed(seed)
        count = None if name in FINITE else 3
        return answer(posterior, x, "classification", method="sampled", samples=count, generator=source)

    assert torch.equal(probabilities(None), probabilities(None))
    assert torch.equal(probabilities(None), probabilities(0))
    torch.testing.assert_close(probabilities(1), probabilities(1), rtol=0, atol=0)
    fixed = name in FINITE  # the same networks, perhaps in another order
    assert torch.allclose(probabilities(1), probabilities(2), rtol=0, atol=1e-12) == fixed


@every_posterior
def test_draws_are_weights_of_the_network(name: str) -> None:
    posterior, model, x = fitted(name)
    if not isinstance(posterior, WeightPosterior):
        return
    with untouched(model):
        draws = posterior.sample(3, generator=torch.Generator().manual_seed(1))
    assert draws.shape == (3, posterior.n_weights)
    assert torch.equal(draws, posterior.sample(3, generator=torch.Generator().manual_seed(1)))
    model.eval()
    outputs = torch.stack([posterior.network.call(x, posterior.network.unflatten(w)) for w in draws])
    source = torch.Generator().manual_seed(1)
    sampled = posterior.predict(x, method="sampled", samples=3, generator=source).f_mean
    torch.testing.assert_close(sampled, outputs.mean(0))
    with pytest.raises(lapis.OptionError, match="Bad samples"):
        posterior.sample(0)


@every_posterior
def test_gaussian_posteriors_have_a_density_and_linearised_outputs(name: str) -> None:
    posterior, module, x = fitted(name, "regression")
    if not isinstance(posterior, GaussianPosterior):
        return
    module.eval()
    mean = posterior.mean
    moved_away = posterior.log_prob(torch.stack([mean, mean + 0.1, mean - 0.1]))
    assert moved_away[0] > moved_away[1]
    torch.testing.assert_close(moved_away[1], moved_away[2])
    model, start = posterior.network, posterior.point

    def outputs(weights: Tensor) -> Tensor:
        return model.call(x, model.unflatten(weights))

    jacobian = torch.autograd.functional.jacobian(outputs, start)
    expected = outputs(start) + jacobian @ (mean - start)
    found = posterior.predict(x, method="linearised").mean
    torch.testing.assert_close(found, expected.detach(), rtol=1e-7, atol=1e-9)
    variance = posterior.functional_variance(x, diagonal=True)
    assert variance.shape == (5, 2)
    torch.testing.assert_close(variance, posterior.functional_variance(x).diagonal(dim1=-2, dim2=-1))


@every_posterior
def test_conformal_intervals_and_sets_have_the_layout_of_the_outputs(name: str) -> None:
    """20 new examples allow coverages up to 20 / 21; at 0.95 the largest score decides."""
    for problem in ("regression", "positions")[: 1 + (name == "diagonal")]:
        posterior, model, x = fitted(name, problem)
        new = (PROBLEMS[problem].inputs(20), PROBLEMS[problem].targets(20))
        with untouched(model):
            calibrated = posterior.conformal(new)
            found = calibrated.predict(x, coverage=0.95)
            again = calibrated.predict(new[0], coverage=0.95)
        shape = (5, *PROBLEMS[problem].shape)
        if isinstance(found, ConformalIntervals) and isinstance(again, ConformalIntervals):
            assert found.lower.shape == found.upper.shape == shape
            slack = 1e-9 * (again.upper - again.lower)
            assert bool(((again.lower - slack <= new[1]) & (new[1] <= again.upper + slack)).all())
        else:
            assert isinstance(again, ConformalSets)
            assert isinstance(found, ConformalSets)
            assert found.members.shape == shape
            assert found.size.shape == (5, 4, 4)
            assert float(again.members.gather(1, new[1][:, None]).double().mean()) > 0.99


LOAD = """
import sys, torch
sys.path.insert(0, {tests!r})
import lapis, toy_ensemble, test_contract
posterior, model, x = None, test_contract.PROBLEMS[{problem!r}].model().double(), None
model.load_state_dict(torch.load({weights!r}))
problem = test_contract.PROBLEMS[{problem!r}]
data = (problem.inputs(test_contract.EXAMPLES), problem.targets(test_contract.EXAMPLES))
kind = lapis.posteriors.posterior.KINDS[lapis.files.read(test_contract.Path({path!r})).config["posterior"]]
posterior = lapis.load({path!r}, model, data=data if kind.needs_data else None)
torch.save(test_contract.answer(posterior, problem.inputs(5), {problem!r}), {out!r})
"""


@every_posterior
@pytest.mark.parametrize("problem", ["classification", "dictionary"])
def test_a_file_brings_it_back(name: str, problem: str, tmp_path: Path) -> None:
    posterior, model, x = fitted(name, problem)
    with untouched(model):
        posterior.save(tmp_path / "posterior.lapis")
    chosen = PROBLEMS[problem]
    data = (chosen.inputs(EXAMPLES), chosen.targets(EXAMPLES)) if type(posterior).needs_data else None
    loaded = lapis.load(tmp_path / "posterior.lapis", copy.deepcopy(model), data=data)
    assert type(loaded) is type(posterior)
    assert loaded.facts == posterior.facts
    for method in posterior.methods:
        torch.testing.assert_close(
            answer(loaded, x, problem, method=method), answer(posterior, x, problem, method=method)
        )
    other = copy.deepcopy(model)
    next(other.parameters()).data.add_(1)
    if type(posterior).holds_networks:
        with untouched(other):
            loaded = lapis.load(tmp_path / "posterior.lapis", other)
            torch.testing.assert_close(answer(loaded, x, problem), answer(posterior, x, problem))
        return
    with pytest.raises(lapis.FileError, match="other values in"):
        lapis.load(tmp_path / "posterior.lapis", other, data=data)


def test_files_are_read_in_another_process(tmp_path: Path) -> None:
    """One process for all posteriors: importing torch takes seconds."""
    script, expected = [], {}
    for i, name in enumerate(POSTERIORS):
        posterior, model, x = fitted(name)
        paths = {key: str(tmp_path / f"{i}.{key}") for key in ("path", "weights", "out")}
        posterior.save(paths["path"])
        torch.save(model.state_dict(), paths["weights"])
        script.append(LOAD.format(tests=str(Path(__file__).parent), problem="classification", **paths))
        expected[paths["out"]] = answer(posterior, x, "classification")
    subprocess.run([sys.executable, "-c", "\n".join(script)], check=True, timeout=300)
    for path, probabilities in expected.items():
        torch.testing.assert_close(torch.load(path), probabilities)


@every_posterior
def test_bad_input_is_refused_before_any_work(name: str) -> None:
    posterior, model, x = fitted(name)
    refused: list[tuple[Any, dict[str, Any], type[Exception], str]] = [
        (x[:0], {}, lapis.DataError, "nothing to predict"),
        (x * torch.nan, {}, lapis.DataError, "not finite"),
        (x.float(), {}, lapis.DataError, "dtype"),
        (x[:, :2], {}, lapis.DataError, "could not run"),
        (iter([]), {}, lapis.DataError, "nothing to predict"),
        (x, {"method": "guess"}, lapis.OptionError, "Unknown method"),
        (x, {"samples": 0}, lapis.OptionError, "samples"),
        (x, {"method": "sampled", "joint": True}, lapis.OptionError, "draws, not covariances"),
        (x, {"covariance": "all"}, lapis.OptionError, "Unknown covariance"),
    ]
    if "linearised" not in posterior.methods:
        refused.append((x, {"method": "linearised"}, lapis.OptionError, "no linearised predictions"))
    if name == "toy ensemble":  # what it does with a number of samples is its own affair
        refused = [entry for entry in refused if "samples" not in entry[1]]
    with untouched(model):
        for inputs, options, error, message in refused:
            with pytest.raises(error, match=message):
                posterior.predict(inputs, **options)


@every_posterior
def test_a_changed_network_is_refused(name: str) -> None:
    posterior, model, x = fitted(name)
    with torch.no_grad():
        next(model.parameters()).add_(0.1)
    with pytest.raises(lapis.ModelError, match="has changed since the fit"):
        posterior.predict(x)


def test_a_toy_ensemble_is_the_mixture_of_its_members() -> None:
    posterior, model, x = fitted("toy ensemble")
    assert isinstance(posterior, ToyEnsemble)
    model.eval()
    probabilities = [model(x).softmax(-1)]
    for weights in posterior.members[1:]:
        other = copy.deepcopy(model)
        other.load_state_dict(posterior.network.unflatten(weights))
        probabilities.append(other(x).softmax(-1))
    torch.testing.assert_close(answer(posterior, x, "classification"), torch.stack(probabilities).mean(0).detach())


def test_a_posterior_may_give_a_mixture_of_gaussians() -> None:
    """What mixtures of Laplace posteriors will be: the contract takes any latent distribution."""

    @dataclass(frozen=True, eq=False, repr=False)
    class Two(Posterior):
        methods: ClassVar[tuple[str, ...]] = ("linearised",)
        parts: tuple[Posterior, ...]

        def latent(self, inputs: Any, kind: Any, samples: Any, generator: Any) -> LatentMixture:
            found = [part.latent(inputs, kind, samples, generator) for part in self.parts]
            assert all(isinstance(each, LatentGaussian) for each in found)
            return LatentMixture(tuple(found), torch.tensor([0.25, 0.75], dtype=F64))  # type: ignore[arg-type]

        def state(self) -> Any:
            raise AssertionError

        @classmethod
        def from_state(cls, *_: Any) -> Any:
            raise AssertionError

    one, model, x = fitted("dense", "regression")
    chosen = PROBLEMS["regression"]
    data = (chosen.inputs(EXAMPLES), chosen.targets(EXAMPLES))
    two = lapis.laplace(model, data, chosen.likelihood, structure="diagonal")
    both = Two(one.network, one.likelihood, one.facts, (one, two)).predict(x)
    separate = [part.predict(x).log_prob(chosen.targets(5)) for part in (one, two)]
    weights = torch.tensor([[0.25], [0.75]], dtype=F64).log()
    torch.testing.assert_close(both.log_prob(chosen.targets(5)), (torch.stack(separate) + weights).logsumexp(0))
    assert both.method == "mixture"
    with pytest.raises(lapis.FileError, match="Files know no posterior"):
        Two(one.network, one.likelihood, one.facts, (one, two)).save("never.lapis")


def test_a_file_of_an_unknown_kind_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    posterior, model, _ = fitted("toy ensemble")
    posterior.save(tmp_path / "posterior.lapis")
    monkeypatch.delitem(lapis.posteriors.posterior.KINDS, "toy ensemble")
    with pytest.raises(lapis.FileError, match="unknown kind"):
        lapis.load(tmp_path / "posterior.lapis", model)


def test_single_weights_are_a_network_of_their_own() -> None:
    """Masks and indices, by parameter or over the flat vector; everything else stays as it is."""
    torch.manual_seed(0)
    model = mlp(2).double()
    total = sum(p.numel() for p in model.parameters())
    mask = torch.rand(total, generator=torch.Generator().manual_seed(1)) < 0.4
    flat = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    by_name, start = {}, 0
    for name, p in model.named_parameters():
        by_name[name] = mask[start : start + p.numel()].reshape(p.shape)
        start += p.numel()
    for choice in (mask, mask.nonzero()[:, 0], by_name):
        network = Network(model, choice)
        assert torch.equal(network.flat(), flat[mask])
        assert network.size == int(mask.sum())
        whole = dict(model.named_parameters())
        assert all(bool(by_name[name].any()) for name in network.names)
        for name, changed in network.unflatten(2 * flat[mask]).items():
            assert torch.equal(changed, torch.where(by_name[name], 2 * whole[name], whole[name]))
        for name, tangent in network.tangents(flat[mask]).items():
            assert torch.equal(tangent, torch.where(by_name[name], whole[name], 0.0))
        assert torch.equal(network.gather([p.detach() for p in network.parameters.values()]), flat[mask])
    assert Network(model, torch.ones(total, dtype=torch.bool)).indices == {}
    for bad, message in (
        (mask[1:], "does not fit"),
        (torch.tensor([0, 0]), "repeated"),
        (torch.tensor([total]), "do not fit"),
        (torch.ones(total), "not clear"),
        ({"nobody": mask}, "nobody"),
        (torch.zeros(total, dtype=torch.bool), "empty index set"),
    ):
        with pytest.raises(lapis.LapisError, match=message):
            Network(model, bad)


@pytest.mark.parametrize("structure", ["dense", "diagonal", "implicit", "lowrank"])
def test_curvature_of_single_weights_is_its_block_of_the_whole(structure: str) -> None:
    torch.manual_seed(0)
    model = mlp(2).double()
    data = (normal(3)(9), normal(2)(9))
    total = sum(p.numel() for p in model.parameters())
    mask = torch.rand(total, generator=torch.Generator().manual_seed(1)) < 0.4
    mask[:18] = False
    mask[:3] = True  # a parameter chosen in part, one not at all, one wholly
    mask[18:24] = False
    mask[-2:] = True
    whole = lapis.laplace(model, data, lapis.Gaussian(0.5), structure="dense")
    options: dict[str, Any] = {"rank": int(mask.sum())} if structure == "lowrank" else {}
    part = lapis.laplace(model, data, lapis.Gaussian(0.5), structure=structure, weights=mask, **options)
    expected = whole.precision()[mask][:, mask]
    if structure == "diagonal":
        expected = expected.diagonal().diag()
    if structure == "implicit":
        vectors = torch.randn(3, len(expected), dtype=F64)
        torch.testing.assert_close(part.solve(vectors), torch.linalg.solve(expected, vectors.T).T)
    else:
        torch.testing.assert_close(part.precision(), expected, rtol=1e-7, atol=1e-9)
    x = normal(3)(4)
    model.eval()
    jacobian = torch.autograd.functional.jacobian(
        lambda w: part.network.call(x, part.network.unflatten(w)), part.network.flat()
    )
    variance = torch.einsum("bcp,pq,bcq->bc", jacobian, torch.linalg.inv(expected), jacobian)
    torch.testing.assert_close(part.functional_variance(x, diagonal=True), variance, rtol=1e-7, atol=1e-9)


def test_plans_of_other_single_weights_are_not_reused() -> None:
    """The proof is remembered with the module; it holds for the same entries of the same parameters only."""
    torch.manual_seed(0)
    model = mlp(2).double()
    data = (normal(3)(9), normal(2)(9))
    whole = lapis.laplace(model, data, lapis.Gaussian(0.5), structure="dense").precision()
    for chosen in (torch.tensor([0, 1]), torch.tensor([2, 3, 5]), torch.tensor([7, 9])):
        part = lapis.laplace(model, data, lapis.Gaussian(0.5), structure="dense", weights={"0.weight": chosen})
        torch.testing.assert_close(part.precision(), whole[chosen][:, chosen])
        assert part.sample(2).shape == (2, len(chosen))


def test_an_error_in_the_middle_of_the_data_names_its_batch() -> None:
    posterior, _, x = fitted("dense")
    bad = x.clone()
    bad[1] = torch.nan
    for batches in ([x, bad], [x, x[:, :2]]):
        with pytest.raises(lapis.DataError, match="In batch 1"):
            posterior.predict(iter(batches))


def test_the_evidence_is_about_the_tangent_at_t_wherever_the_mean_is() -> None:
    """theta*, the evidence and tuning do not move when the mean of the weights does."""
    from dataclasses import replace

    for structure in ("dense", "kronecker", "implicit"):
        torch.manual_seed(0)
        model, data = mlp(2).double(), (normal(3)(9), normal(2)(9))
        plain = lapis.laplace(model, data, lapis.Gaussian(0.5), structure=structure)
        other = replace(plain, mean=plain.mean + 0.3)
        torch.testing.assert_close(other.log_evidence(), plain.log_evidence())
        one, two = plain.at_tangent_mode(data), other.at_tangent_mode(data)
        torch.testing.assert_close(one.mode, two.mode)
        torch.testing.assert_close(one.log_evidence(), two.log_evidence())
        torch.testing.assert_close(plain.tune().weight_prior.precision, other.tune().weight_prior.precision)


@pytest.mark.parametrize("structure", ["dense", "diagonal", "kronecker", "ekfac", "lowrank", "implicit"])
def test_the_family_takes_the_same_arguments_and_refuses_the_same_mistakes(structure: str) -> None:
    torch.manual_seed(0)
    model, data = mlp(2).double(), (normal(3)(9), normal(2)(9))
    posterior = lapis.laplace(model, data, lapis.Gaussian(0.5), structure=structure)
    size = posterior.n_weights
    mistakes: list[tuple[Callable[[], Any], str]] = [
        (lambda: posterior.tune(max_iterations=0), "Bad max_iterations"),
        (lambda: posterior.tune(tolerance=-1), "Bad tolerance"),
        (lambda: posterior.tune(method="guess"), "Unknown method"),
        (lambda: posterior.tune(batch_size=4), "batch_size"),
        (lambda: posterior.update(data, batch_size=0), "batch_size"),
        (lambda: posterior.at_tangent_mode(data, tolerance="a"), "Bad tolerance"),
        (lambda: posterior.at_tangent_mode(data, max_products=-1), "Bad max_products"),
        (lambda: posterior.at_tangent_mode(data, start="a"), "Bad start"),
        (lambda: posterior.at_tangent_mode((data[0][:3], data[1][:3])), "not the data"),
        (lambda: posterior.solve(torch.randn(size, 3, dtype=F64)), "no weight vectors"),
        (lambda: posterior.log_prob(torch.tensor(1.0)), "no weight vectors"),
        (lambda: posterior.sample(2, generator=3), "Bad generator"),
        (lambda: posterior.predict(data[0], generator=3), "Bad generator"),
        (lambda: posterior.predict(data[0], joint=True, covariance="diagonal"), "joint prediction"),
        (lambda: posterior.with_prior(2.0).with_temperature(0.0), "temperature"),
    ]
    if structure != "lowrank":  # whose eigenpairs do not add up
        posterior.update((data[0][:3], data[1][:3]), batch_size=2, progress=False)
    for mistake, message in mistakes:
        with pytest.raises(lapis.LapisError, match=message):
            mistake()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", lapis.LapisWarning)  # a few draws of few data
        posterior.at_tangent_mode(data, batch_size=4).tune(groups="layer", noise=True, max_iterations=15, tolerance=0.2)


def test_what_an_outside_class_gives_is_checked() -> None:
    """A latent of other examples, none at all, or a kind that was not asked for; kinds in use; states for no file."""
    from dataclasses import replace

    posterior, _, x = fitted("toy ensemble")

    class Short(ToyEnsemble):
        def latent(self, inputs: Any, *rest: Any) -> Any:
            return super().latent(take(inputs, 0, 2), *rest)

    class Nothing(ToyEnsemble):
        def latent(self, *_: Any) -> Any:
            return None

    class Deaf(ToyEnsemble):
        methods: ClassVar[tuple[str, ...]] = ("linearised",)

    for kind, options in ((Short, {}), (Nothing, {}), (Deaf, {"joint": True})):
        wrong = kind(posterior.network, posterior.likelihood, posterior.facts, posterior.members)
        with pytest.raises(lapis.ModelError, match="does not give what it was asked for"):
            wrong.predict(x, **options)
    with pytest.raises(lapis.OptionError, match="another posterior by the kind"):

        class Taken(ToyEnsemble):
            kind: ClassVar[str] = "laplace"

    assert lapis.posteriors.posterior.KINDS["laplace"] is lapis.LaplacePosterior
    with pytest.raises(lapis.FileError, match="cannot be written"):
        replace(posterior, members=[1.0]).save("never.lapis")
    with pytest.raises(lapis.OptionError, match="Bad samples"):
        posterior.predict(x, samples=-1)
    with pytest.raises(lapis.DataError, match="does not fit the weights"):
        replace(fitted("dense")[0], mean=torch.zeros(3))


def test_drawn_networks_are_freed_with_their_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of a part outlives it but its results: no reference cycle waits for the garbage collector."""
    posterior, _, x = fitted("kronecker")
    made: list[Any] = []
    start = drawn_network.Matrix.__init__
    monkeypatch.setattr(sampled, "SMALL_NETWORK", 0)
    monkeypatch.setattr(
        drawn_network.Matrix, "__init__", lambda self, *args: made.append(weakref.ref(self)) or start(self, *args)
    )
    gc.disable()
    try:
        posterior.predict(x, method="sampled", samples=3)
        assert made
        assert all(matrix() is None for matrix in made)
    finally:
        gc.enable()


def test_results_of_parts_are_joined_as_they_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 37 parts at most log2(37) + 2 results are alive at a time: small ones that stay would fragment the memory."""
    posterior, _, _ = fitted("diagonal")
    x = PROBLEMS["classification"].inputs(37)
    whole, alive, most = answer(posterior, x, "classification"), [], []
    latent = type(posterior).latent

    def noted(self: Posterior, *args: Any) -> Any:
        found = latent(self, *args)
        most.append(sum(each() is not None for each in alive))
        alive.append(weakref.ref(found))
        return found

    monkeypatch.setattr(type(posterior), "latent", noted)
    monkeypatch.setattr(prediction_parts, "COPIES", posterior.facts.memory_budget)
    torch.testing.assert_close(answer(posterior, x, "classification"), whole)
    assert len(alive) == 37
    assert max(most) <= 7
