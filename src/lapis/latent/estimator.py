"""What both mixture estimators share: scikit-learn's interface, labels that are known in part, starts."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.base import BaseEstimator, DensityMixin
from sklearn.cluster import KMeans
from sklearn.exceptions import ConvergenceWarning
from sklearn.utils.validation import check_is_fitted, validate_data
from torch import Tensor

from lapis.errors import DataError, LapisWarning, OptionError
from lapis.latent.driver import Fit, em
from lapis.latent.floor import constant_columns
from lapis.latent.mixture_model import Covariance, MixtureModel, Rows, floored, gathered
from lapis.latent.sequences import of_moderate_size
from lapis.options import UNREADABLE, check_positive, checked_tensor

Array = NDArray[Any]

KINDS: dict[str, Covariance] = {
    "full": "full",
    "tied": "tied",
    "diagonal": "diagonal",
    "diag": "diagonal",
    "spherical": "spherical",
}
"""Names of covariances; "diag" is scikit-learn's."""

FLOOR = 1e-6
"""The smallest variance of a component along any direction, relative to the mean variance of the features."""


class MixtureEstimator(DensityMixin, BaseEstimator, ABC):  # type: ignore[misc]
    """Checks, starts, and predictions; `_begin` and `_finish` are those of each estimator."""

    n_components: int
    covariance: str
    rounds: int
    tolerance: float
    restarts: int
    floor: float
    accelerate: bool
    start: Any
    random_state: Any
    progress: bool | None

    # to be provided ------------------------------------------------------------------------------------

    @abstractmethod
    def _begin(self, rows: Rows, r: Tensor | None, floor: float, centre: Tensor) -> Any:
        """The model to start from: responsibilities (N, K), or `start` where they are None.

        Rows have had `centre` subtracted.
        """

    @abstractmethod
    def _finish(self, fit: Fit[Any], centre: Tensor) -> None:
        """Set the fitted attributes."""

    @abstractmethod
    def _joints(self, x: Tensor) -> Tensor:
        """Log of the (expected) joint density of rows and components, (N, K)."""

    # scikit-learn's interface --------------------------------------------------------------------------

    def fit(self, X: Any, y: Any = None, *, labels: Any = None) -> Any:
        """Fit the mixture by EM.

        Args:
            X: data (N, D).
            y: `labels`, by position; what cannot be labels is not used, with a warning.
            labels: classes that are known: whole numbers (N,) from 0 to n_components - 1, and -1 (or NaN) where
                unknown; or soft labels (N, n_components), each row proportional to p(label | class), and NaN where
                unknown.
        """
        self._check_options()
        array = validate_data(self, _plain(X), dtype=np.float64, ensure_min_samples=2)
        if len(array) < self.n_components:
            raise ValueError(  # as scikit-learn's checks demand
                f"n_samples={len(array)} is too few for {self.n_components} components. Expected: at least one row "
                "each. Do: pass more rows, or ask for fewer components."
            )
        log_labels = _log_labels(labels, len(array), self.n_components)
        if y is not None and labels is None:
            log_labels = _by_position(y, len(array), self.n_components)
        x = of_moderate_size(torch.tensor(array))
        centre = x.mean(0)
        rows = Rows(x - centre, log_labels)
        spread = float((x - centre).square().mean())
        floor = self.floor * spread if spread > 0 else self.floor
        constant = constant_columns(x, "they say nothing about the components, and their variance is the floor")
        random = np.random.RandomState(None) if self.random_state is None else self.random_state
        source = torch.Generator().manual_seed(_seed(random))

        def begin(generator: torch.Generator) -> Any:
            r = None if self.start is not None else _first_responsibilities(rows, self.n_components, generator)
            return self._begin(rows, r, floor, centre)

        fit = em(
            begin,
            rows,
            rounds=self.rounds,
            tolerance=self.tolerance,
            restarts=self.restarts if self.start is None else 1,
            accelerate=self.accelerate,
            generator=source,
            progress=self.progress,
        )
        self.bounds_ = np.asarray(fit.bounds[1:])
        self.half_steps_ = np.asarray(fit.half_steps)
        self.converged_, self.n_iter_ = fit.converged, fit.rounds
        self.lower_bound_ = fit.bounds[-1]
        self._finish(fit, centre)
        if not constant:
            self._warn_of_collapse(fit.model)
        return self

    def fit_predict(self, X: Any, y: Any = None, *, labels: Any = None) -> Array:
        """Fit, and the most probable component of each row."""
        found: Array = self.fit(X, y, labels=labels).predict(X)
        return found

    def predict_proba(self, X: Any) -> Array:
        """p(component | row), (N, K)."""
        return self._joints_of(X).softmax(1).numpy()

    def predict(self, X: Any) -> Array:
        """The most probable component of each row, (N,)."""
        return self._joints_of(X).argmax(1).numpy()

    def score_samples(self, X: Any) -> Array:
        """log p(row), (N,)."""
        return self._joints_of(X).logsumexp(1).numpy()

    def score(self, X: Any, y: Any = None) -> float:
        """Mean log p(row)."""
        return float(self.score_samples(X).mean())

    def _joints_of(self, X: Any) -> Tensor:
        check_is_fitted(self)
        joints = self._joints(torch.tensor(validate_data(self, _plain(X), dtype=np.float64, reset=False)))
        far = (~joints.amax(1).isfinite()).nonzero()[:, 0].tolist()
        if far:
            raise DataError(
                "Rows are too far from every component",
                expected="rows whose squared distances are numbers",
                got=f"rows {far[:5]}, where they overflow",
                do="check these rows",
            )
        return joints

    # checks --------------------------------------------------------------------------------------------

    @property
    def _kind(self) -> Covariance:
        return KINDS[self.covariance]

    def _check_options(self) -> None:
        counts = {"n_components": self.n_components, "rounds": self.rounds, "restarts": self.restarts}
        for name, value in counts.items():
            if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 1:
                raise OptionError(f"Bad {name}", expected="a whole number, at least 1", got=repr(value), do="pass one")
        numbers = {"tolerance": self.tolerance, "floor": self.floor}
        for name, number in numbers.items():
            check_positive(name, number, or_zero=True)
        if not isinstance(self.covariance, str) or self.covariance not in KINDS:
            raise OptionError(
                "Unknown covariance",
                expected='"full", "tied", "diagonal" or "spherical"',
                got=repr(self.covariance),
                do="choose one of these",
            )

    def _warn_of_collapse(self, model: Any) -> None:
        """Say which components have shrunk as far as they may."""


def _seed(random: Any) -> int:
    if isinstance(random, np.random.RandomState):
        return int(random.randint(2**31 - 1))
    if isinstance(random, (int, np.integer)) and not isinstance(random, bool) and random >= 0:
        return int(random)
    raise OptionError(
        "Bad random_state", expected="None, a whole number or a RandomState", got=repr(random), do="pass one of these"
    )


def _plain(value: Any, name: str = "X") -> Any:
    """As numpy's, without a graph, where the value is a tensor."""
    if not isinstance(value, Tensor):
        return value
    found = value.detach()
    if not (found.is_complex() or found.numel() == 0):  # which scikit-learn refuses in its own words
        found = checked_tensor(name, found)
    return (found.double() if found.dtype == torch.bfloat16 else found).cpu().numpy()


def _by_position(y: Any, rows: int, components: int) -> Tensor | None:
    """Labels that came as y: as scikit-learn's estimators take them, or nothing where they can be none."""
    values = np.empty(0)
    try:
        values = np.asarray(_plain(y, "y"))
        found = _log_labels(values, rows, components)
    except (*UNREADABLE, DataError) as error:
        if values.dtype.kind in "iu" and bool((values == -1).any()):
            raise
        warnings.warn(f"y is not used. {error}", LapisWarning, stacklevel=3)
        return None
    if found is not None and bool((found.amin(1) < 0).all()):
        warnings.warn(
            "y is taken for the components of all rows, which leaves nothing to find: pass it as labels= if it is "
            "meant so, or leave it out.",
            LapisWarning,
            stacklevel=3,
        )
    return found


def _log_labels(labels: Any, rows: int, components: int) -> Tensor | None:
    """log l (N, K) from hard or soft labels; None where no class is known."""
    if labels is None:
        return None
    try:
        values = torch.as_tensor(np.asarray(_plain(labels, "labels")))
    except UNREADABLE as error:
        raise _bad_labels(rows, components, type(labels).__name__) from error
    real = not values.is_complex()
    if values.shape == (rows,) and real and values.dtype != torch.bool:
        values = torch.where(values.isnan(), -1, values)
        whole = values.long()
        if values.is_floating_point() and not bool((whole == values).all()):
            raise _bad_labels(rows, components, "numbers that are not whole")
        if int(whole.min()) < -1 or int(whole.max()) >= components:
            raise _bad_labels(rows, components, f"{int(whole.min())} to {int(whole.max())}")
        known = torch.nn.functional.one_hot(whole.clamp_min(0), components).double()
        values = torch.where(whole[:, None] < 0, 1.0, known)
    elif values.shape == (rows, components) and real:
        values = values.double()
        unknown = values.isnan().all(1, keepdim=True)
        values = torch.where(unknown, 1.0, values)
        if not bool((values >= 0).all()) or not bool((values.sum(1) > 0).all()) or bool(values.isinf().any()):
            raise _bad_labels(rows, components, "rows with negative numbers, with zeros only, or with some NaN")
        values = values / values.amax(1, keepdim=True)
    else:
        raise _bad_labels(rows, components, f"{tuple(values.shape)} {values.dtype}")
    return None if bool((values == 1).all()) else values.log()


def _bad_labels(rows: int, components: int, got: str) -> DataError:
    return DataError(
        "These are no labels",
        expected=f"({rows},) whole numbers from 0 to {components - 1}, -1 where unknown; or ({rows}, {components}) "
        "non-negative numbers, NaN where unknown",
        got=got,
        do="pass one of these",
    )


def _first_responsibilities(rows: Rows, components: int, generator: torch.Generator) -> Tensor:
    """One component a row: known classes as they are, the rest by the nearest of k-means' centres.

    Centres of components that some labels name start at the mean of those rows; others are spread by k-means++.
    """
    x = rows.x
    seed = int(torch.randint(2**31 - 1, (), generator=generator))
    if rows.log_labels is None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)  # fewer different rows than components
            found = KMeans(components, n_init=1, random_state=seed).fit(x.numpy())
        place = torch.from_numpy(found.labels_.astype(np.int64))
        return torch.nn.functional.one_hot(place, components).double()
    factors = rows.log_labels.exp()
    informed = factors.amin(1) < 1
    weight = factors[informed]
    share = weight.sum(0)
    named = share > 0
    centres = torch.zeros(components, x.shape[1], dtype=x.dtype)
    centres[named] = (weight.mT @ x[informed])[named] / share[named, None]
    for k in (~named).nonzero()[:, 0].tolist():  # k-means++: far from the centres there are
        have = centres[named]
        distance = torch.cdist(x, have).amin(1).square() if len(have) else torch.ones(len(x), dtype=x.dtype)
        pick = int(torch.multinomial(distance.clamp_min(1e-300), 1, generator=generator))
        centres[k] = x[pick]
        named[k] = True
    near = torch.nn.functional.one_hot(torch.cdist(x, centres).argmin(1), components).double()
    r = near * factors
    empty = r.sum(1, keepdim=True) == 0
    r = torch.where(empty, factors, r)
    return r / r.sum(1, keepdim=True)


def shape_of(kind: Covariance, components: int, dimensions: int) -> tuple[int, ...]:
    """Of the covariances."""
    shapes = {
        "full": (components, dimensions, dimensions),
        "tied": (dimensions, dimensions),
        "diagonal": (components, dimensions),
    }
    return shapes.get(kind, (components,))


def first_mixture(rows: Rows, r: Tensor, kind: Covariance, floor: float) -> MixtureModel:
    """The mixture that an M-step makes of responsibilities (N, K)."""
    components, dimensions = r.shape[1], rows.x.shape[1]
    spread = max(float(rows.x.square().mean()), floor, 1e-300)
    like = torch.eye(dimensions, dtype=torch.float64) if kind in ("full", "tied") else torch.ones(())
    empty = (spread * like).double().expand(shape_of(kind, components, dimensions))
    blank = MixtureModel(
        torch.full((components,), 1 / components, dtype=torch.float64),
        torch.zeros(components, dimensions, dtype=torch.float64),
        floored(empty, kind, floor),
        kind,
        max(floor, 1e-300),
    )
    joint = r.log()
    return blank.maximisation(gathered(Rows(rows.x), r, joint, torch.zeros(len(r), 1, dtype=r.dtype), kind))
