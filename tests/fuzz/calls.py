"""What can be called: found in the public modules and on objects, with parameters to be filled in."""

from __future__ import annotations

import dataclasses
import inspect
import reprlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, partial
from random import Random
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import lapis
import lapis.distributed
import lapis.estimators
import lapis.linear_models
import lapis.playground
import lapis.plots
import lapis.solvers
from fuzz.own_data import THINGS
from fuzz.rooms import LEARNERS, learner
from fuzz.values import IN, refused, right, wrong
from fuzz.worlds import FITS, World
from lapis.evidence import Tuning
from lapis.learning_rule import Family
from lapis.posteriors import Posterior

MODULES: dict[str, Any] = {
    "lapis": lapis, "metrics": lapis.metrics, "solvers": lapis.solvers, "plots": lapis.plots,
    "decisions": lapis.decisions, "active": lapis.active, "learning_rule": lapis.learning_rule, "optim": lapis.optim,
    "latent": lapis.latent, "lifelong": lapis.lifelong, "imaging": lapis.imaging, "estimators": lapis.estimators,
    "export": lapis.export, "data": lapis.data, "linear_models": lapis.linear_models,
    "distributed": lapis.distributed, "playground": lapis.playground,
}  # fmt: skip


def words(text: str) -> frozenset[str]:
    return frozenset(text.split())


RESULTS = words("""
    BlockResult BlockState
    Comparison Reliability CGProgress CGResult CGState Eigenpairs Estimate LanczosResult QuadratureEstimate SGDResult
    SGDState SpectralQuadrature sgd style Bootstrap RiskCoverage Run Round History
    Derivation Derivations LinearPosterior Expected Fit Forecast States VariationalFit Learned Learner Accuracies Lesson
    Reconstruction VariationResult Predictor Predictive Statistics UCI Split
""")
"""Classes that functions return and nobody makes, and functions of such objects."""

HOOKS = words("""
    forward state evidence_point sample_of_data gamma_of_groups vectors_at_once tensors config clone canonical hessian
    position_nll nll gradient factor statistics sampled_gradient suspicion check_outputs targets to_config to_prior
    group_index sizes vector curvature_trace link link_slope
""")
"""Methods that posteriors, likelihoods and priors write for the library to call, with arguments that it has checked:
called here with right arguments only."""

UNMAKEABLE = words("""
    latent from_state quick_draws draws source outputs_of_data recurved with_own_noise solved load begin scaled_noise
    has_proportions_of layout spread positions expected_hessian curved log_likelihood with_precision squared_distance
    typical_of of span differs_in_precision_only average_weight check root root_transposed curvature_scale
    vectors mean_and_point tensor entry number count word of_diagonal
""")
"""Such methods whose arguments only the library can make."""

OF_EMISSIONS = words("expected maximised log_densities read with_least statistics to plus scaled")
"""The same of models with latent variables."""

OF_FAMILIES = words("""
    loss_gradient objective_gradient moved expected_value expected_gradient expected_derivatives nodes scores deviations
""")
"""The same of the learning rule's families."""

OF_OPTIMISERS = words("posterior")
"""What optimisers have beside torch's own methods."""

OWN_WORDS = words("latent lifelong imaging estimators export linear_models")
"""Rooms whose objects know arguments by names of their own, as their functions do."""

INTERNAL = (
    "lapis.curvature",
    "lapis.network",
    "lapis.evidence",
    "lapis.imaging.tangent",
    "lapis.imaging.deep.training",
)
"""Rooms whose objects are no part of the interface, though some methods return them."""

REAL = words("""
    rmse coverage regression_calibration auroc ood_auroc interval_score regression_calibration_error pit pit_of_samples
    crps crps_of_samples aupr
""")


ALWAYS = {
    ("lapis.train", "epochs"), ("lapis.swag", "epochs"), ("lapis.swag", "snapshots"), ("lapis.variational", "steps"),
    ("lapis.metrics.bootstrap", "repeats"), ("lapis.imaging.reconstruct", "iterations"),
    ("lapis.imaging.reconstruct", "tuning_steps"), ("lapis.imaging.reconstruct", "channels"),
    ("lapis.latent.variational_em", "rounds"), ("<reconstruction>.retuned", "steps"), ("lapis.lifelong.", "epochs"),
    ("lapis.estimators.Laplace", "epochs"), ("lapis.Laplace", "epochs"), ("lapis.imaging.UNet", "channels"),
    ("lapis.imaging.shepp_logan", "size"), ("lapis.imaging.RayTransform", "angles"),
    ("<dynamics>.fit", "rounds"), ("lapis.latent.LinearDynamics().fit", "rounds"), ("lapis.latent.choose", "restarts"),
    ("<rows>.fit", "rounds"), ("<symbols>.fit", "rounds"), ("lapis.latent.HiddenMarkov().fit", "rounds"),
}  # fmt: skip
"""Arguments that are always given, by the beginning of a function's name: without them the call takes long."""

DEFERRED = ("lapis.Prior", "lapis.LaplaceClassifier", "lapis.LaplaceRegressor",
            *(f"lapis.estimators.{name}" for name in ("LaplaceClassifier", "LaplaceRegressor")),
            *(f"lapis.latent.{name}" for name in ("GaussianMixture", "BayesianGaussianMixture")))  # fmt: skip
"""Constructors whose arguments are checked when used: of a prior, as only there it is known which network it is for; of
estimators in scikit-learn's manner, as it demands."""


@dataclass(frozen=True)
class Target:
    """A callable, or a property, by its name."""

    name: str
    function: Callable[..., Any]
    place: tuple[str, ...]
    """Words by which `values.IN` knows it."""
    owner: Any = None
    is_hook: bool = False

    @cached_property
    def parameters(self) -> list[inspect.Parameter]:
        try:
            found = list(inspect.signature(self.function).parameters.values())
        except (TypeError, ValueError):
            return []
        return [p for p in found if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]

    @cached_property
    def hints(self) -> dict[str, Any]:
        return {p.name: annotation(p, self.function) for p in self.parameters}


def annotation(parameter: inspect.Parameter, function: Any) -> Any:
    """The evaluated annotation; None if there is none, or it cannot be evaluated at run time."""
    hint = parameter.annotation
    if hint is parameter.empty:
        return None
    if not isinstance(hint, str):
        return hint
    inner = inspect.unwrap(getattr(function, "__func__", function))
    known = getattr(inner, "__globals__", None) or vars(sys.modules[inner.__module__])
    try:
        return eval(hint, known)
    except (NameError, TypeError):
        return None


@cache
def roots() -> dict[str, list[Target]]:
    """Public functions and constructors of each module."""
    found: dict[str, list[Target]] = {}
    for room, module in MODULES.items():
        found[room] = []
        for name in module.__all__:
            thing = getattr(module, name)
            if not callable(thing) or name in RESULTS or inspect.isabstract(thing):
                continue
            if isinstance(thing, type) and issubclass(thing, (BaseException, Posterior)):
                continue
            place = (name, "metrics.real", "metrics") if name in REAL else (name, room)
            if f"{room}.{name}" in IN:
                place = (f"{room}.{name}", room)
            found[room].append(Target(f"{module.__name__}.{name}", thing, place))
    return found


def methods(thing: Any, called: str, w: World) -> list[Target]:
    """Public methods and properties of an object of this library."""
    found = []
    foreign = isinstance(thing, lapis.Likelihood) and thing.name != w.likelihood.name
    room = type(thing).__module__.split(".")[1]
    left_out = OF_EMISSIONS if room in OWN_WORDS else UNMAKEABLE
    for name in dir(type(thing)):
        if name.startswith("_") or name in left_out or (name in HOOKS and foreign):
            continue
        if isinstance(thing, Family) and name in OF_FAMILIES:
            continue
        if isinstance(thing, torch.optim.Optimizer) and name not in OF_OPTIMISERS:
            continue
        what = inspect.getattr_static(type(thing), name)
        function = getattr(what, "__func__", what)
        if inspect.isfunction(function) and not function.__module__.startswith("lapis"):
            continue  # inherited from Python or torch, whose errors are theirs
        kinds = {"likelihood": lapis.Likelihood, "family": Family}
        place = (name, type(thing).__name__, *(word for word, kind in kinds.items() if isinstance(thing, kind)))
        place = (*place, room) if room in OWN_WORDS else place
        if isinstance(what, (property, cached_property)):
            read = Reader(thing, name)
            found.append(Target(f"{called}.{name}", read, place, thing))
        elif (callable(what) or isinstance(what, (staticmethod, classmethod))) and not isinstance(what, type):
            is_hook = name in HOOKS or isinstance(thing, lapis.solvers.Preconditioner)
            found.append(Target(f"{called}.{name}", getattr(thing, name), place, thing, is_hook))
    return found


@dataclass(frozen=True)
class Reader:
    """Reading a property, as a call without arguments."""

    thing: Any
    name: str

    def __call__(self) -> Any:
        return getattr(self.thing, self.name)


@dataclass(frozen=True)
class Call:
    """A target with its arguments."""

    target: Target
    arguments: Mapping[str, Any]
    spoiled: tuple[str, ...]
    """Arguments that were given wrong values, on purpose."""
    forbidden: tuple[str, ...]
    """Those of them whose values must not be accepted."""

    def __str__(self) -> str:
        shown = ", ".join(f"{name}={brief(value)}" for name, value in self.arguments.items())
        return f"{self.target.name}({shown})"

    def binds(self) -> bool:
        """Whether the number and names of the arguments are right."""
        try:
            inspect.signature(self.target.function).bind(**self.arguments)
        except TypeError:
            return False
        return True


def brief(value: Any) -> str:
    """A value in a line of text."""
    if isinstance(value, Tensor):
        return f"tensor{tuple(value.shape)} {str(value.dtype).removeprefix('torch.')}"
    if isinstance(value, nn.Module):
        return type(value).__name__
    if isinstance(value, (list, tuple)) and any(isinstance(entry, (Tensor, list, tuple)) for entry in value):
        return f"{type(value).__name__} of {len(value)}"
    text = reprlib.repr(value)
    return f"<{type(value).__name__}>" if " at 0x" in text or "...x" in text else text


CHANCES = {
    "posterior": 10, "thing": 3, "lapis": 5, "metrics": 1, "solvers": 2, "plots": 0.5, "decisions": 0.5, "active": 0.5,
    "learning_rule": 1, "optim": 0.5, "latent": 1.5, "lifelong": 1, "imaging": 1.5, "estimators": 0.7, "export": 0.7,
    "data": 1, "linear_models": 0.5, "distributed": 0.3, "playground": 0.1,
}  # fmt: skip
"""How often a sequence begins with a method of a posterior or of another fitted object, or in a room."""


def first_target(w: World, r: Random) -> Target | None:
    """Where a sequence begins: a method of a fitted posterior, or a public function."""
    room = r.choices(list(CHANCES), list(CHANCES.values()))[0]
    if room == "thing":
        name = r.choice([*THINGS, "learner"])
        if name == "learner":
            return Target("lapis.lifelong.learn", partial(learner, w, r.choice(LEARNERS)), ())
        return pick(methods(THINGS[name](w, r), f"<{name}>", w), r)
    if room != "posterior":
        return r.choice(roots()[room])
    name = r.choice(list(FITS))
    posterior = w.posterior(name)
    if name in w.raw:
        return Target(name, FITS[name], ())
    return None if posterior is None else pick(methods(posterior, f"<{name}>", w), r)


def next_target(result: Any, called: str, w: World, r: Random) -> Target | None:
    """A method of what a call returned; None if it is no object of the library."""
    room = type(result).__module__
    if isinstance(result, type) or not room.startswith("lapis.") or room.startswith(INTERNAL):
        return None
    choices = methods(result, called, w)
    return pick(choices, r) if choices else None


def pick(targets: Sequence[Target], r: Random) -> Target:
    """Mostly one with parameters."""
    return r.choices(targets, [6 if target.parameters else 1 for target in targets])[0]


def needed(target: Target, argument: str) -> bool:
    return any(argument == name and target.name.startswith(start) for start, name in ALWAYS)


def make_call(target: Target, w: World, r: Random) -> Call:
    """Right arguments for most parameters, wrong ones for some."""
    arguments: dict[str, Any] = {}
    for p in target.parameters:
        if p.default is p.empty or r.random() < 0.3 or needed(target, p.name):
            arguments[p.name] = right(p.name, target.hints[p.name], p.default, w, r, target.owner, target.place)
    spoiled: list[str] = []
    if target.parameters and not target.is_hook:
        for _ in range(r.choices([0, 1, 2], [0.35, 0.5, 0.15])[0]):
            p = r.choice(target.parameters)
            value = wrong(w, r)
            if callable(value) and not refused(target.hints[p.name], value, p.name):
                continue  # errors of a user's own function are the user's
            arguments[p.name] = value
            spoiled.append(p.name)
        if r.random() < 0.02:
            arguments["nonsense"] = 1
        elif r.random() < 0.02:
            arguments.pop(r.choice(target.parameters).name, None)
    forbidden = [] if target.name in DEFERRED else [
        name for name in dict.fromkeys(spoiled)
        if name in arguments and refused(target.hints[name], arguments[name], name, target.place)
    ]  # fmt: skip
    return Call(target, arguments, tuple(spoiled), tuple(forbidden))


def tensors_of(result: Any, depth: int = 3) -> Iterator[Tensor]:
    """Tensors and numbers of a result that should be finite; of a posterior, its mean only."""
    if isinstance(result, Tensor):
        yield result
    elif isinstance(result, float):
        yield torch.tensor(result)
    elif isinstance(result, np.ndarray) and result.dtype.kind == "f":
        yield torch.from_numpy(result)
    elif isinstance(result, Posterior):
        if isinstance(getattr(result, "mean", None), Tensor):
            yield result.mean
    elif depth and isinstance(result, (list, tuple)):
        for entry in result:
            yield from tensors_of(entry, depth - 1)
    elif depth and isinstance(result, Mapping):
        yield from tensors_of(list(result.values()), depth)
    elif isinstance(result, Tuning) and result.method == "draws":
        yield torch.tensor(result.gamma)  # its evidence is out of reach: NaN
    elif depth and dataclasses.is_dataclass(result) and not isinstance(result, (type, lapis.metrics.Reliability)):
        yield from tensors_of([getattr(result, field.name) for field in dataclasses.fields(result)], depth)
