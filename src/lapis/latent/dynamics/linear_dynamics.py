"""Linear-Gaussian dynamics for people: filtering, smoothing, fitting, forecasting."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from lapis.errors import DataError, OptionError
from lapis.latent.driver import em
from lapis.latent.dynamics.kalman import NAMES, Filtered, Series, System, kalman_filter, predict, smoother
from lapis.latent.dynamics.model import DynamicsModel
from lapis.latent.dynamics.starts import FLOOR, of_data, of_known_dynamics, smallest_noise
from lapis.latent.sequences import as_sequences, of_moderate_size
from lapis.options import check_arguments, check_between, checked_tensor, shown

DOUBLE = torch.float64


@dataclass(frozen=True)
class States:
    """Gaussians of the states x_t of one sequence, or of several of one length."""

    means: Tensor
    """(T, L), or (B, T, L)."""
    covariances: Tensor
    """(T, L, L), or (B, T, L, L)."""
    log_likelihood: Tensor
    """log p(y), 0-d or (B,)."""


@dataclass(frozen=True)
class Forecast:
    """Gaussians of the observations y_T+1 to y_T+n, and of their states."""

    means: Tensor
    """(n, D), or (B, n, D)."""
    covariances: Tensor
    """(n, D, D): of each step, with the noise R."""
    states: Tensor
    """Means of x, (n, L)."""

    def interval(self, level: float = 0.95) -> tuple[Tensor, Tensor]:
        """Lower and upper ends that hold each observation with probability `level`, (n, D)."""
        check_arguments(Forecast.interval, locals())
        check_between("level", level, 0, 1)
        deviations = self.covariances.diagonal(dim1=-2, dim2=-1).sqrt()
        half = deviations * torch.special.ndtri(deviations.new_tensor(0.5 + level / 2))
        return self.means - half, self.means + half


class LinearDynamics:
    """x_1 ~ N(m, P), x_t = A x_{t-1} + G w_t with w_t ~ N(0, Q), y_t = C x_t + N(0, R).

    Args:
        n_latent: L, the size of x; read off the matrices if one is given.
        A, C, Q, R, m, P: tensors, to use as they are, to start from, or to hold (`fixed`); `fit` finds those not given.
            (L, L), (D, L), (W, W), (D, D), (L,) and (L, L).
        G: (L, W), where the noise of the states enters; the identity by default. With another, A must be held.
        fixed: names of matrices that `fit` does not change.
        state_noise, noise: whether Q and R are full or diagonal.
        dtype: of matrices and results; fits are in float64 whatever it is.

    Attributes:
        A_, C_, Q_, R_, m_, P_: given or fitted.
        bounds_: log likelihood at the start and after every round; it never falls. converged_.

    A sequence is an array (T,) or (T, D); several are a list of any lengths, or an array (B, T, D). NaN entries are
    missing. Matrices that require gradients keep their graph, as far as covariances are not singular.

    >>> one = torch.eye(1)
    >>> walk = LinearDynamics(A=one, C=one, Q=one, R=one, m=torch.zeros(1), P=one)
    >>> round(float(walk.filter([2.0]).means), 6)
    1.0
    """

    A_: Tensor | None
    C_: Tensor | None
    Q_: Tensor | None
    R_: Tensor | None
    m_: Tensor | None
    P_: Tensor | None
    bounds_: tuple[float, ...]
    converged_: bool

    def __init__(
        self,
        n_latent: int | None = None,
        *,
        A: Tensor | None = None,
        C: Tensor | None = None,
        Q: Tensor | None = None,
        R: Tensor | None = None,
        m: Tensor | None = None,
        P: Tensor | None = None,
        G: Tensor | None = None,
        fixed: Sequence[str] = (),
        state_noise: Literal["full", "diagonal"] = "full",
        noise: Literal["full", "diagonal"] = "full",
        dtype: torch.dtype = DOUBLE,
    ) -> None:
        check_arguments(LinearDynamics, locals())
        given = {"A": A, "C": C, "Q": Q, "R": R, "m": m, "P": P}
        if dtype not in (torch.float32, DOUBLE):
            raise OptionError("Bad dtype", expected="torch.float32 or torch.float64", got=str(dtype), do="pass one")
        if not set(fixed) <= set(NAMES):
            raise OptionError("Bad fixed", expected=f"names among {NAMES}", got=str(tuple(fixed)), do="choose of these")
        sizes = [t.shape[-1] for t in (A, C, m, P) if t is not None and t.dim()]
        if n_latent is None and not sizes:
            raise OptionError("Nothing says how many states", expected="n_latent, or A", got="none", do="pass n_latent")
        self.n_latent = n_latent or sizes[0]
        self._shapes(given, G)
        self.fixed, self.dtype = tuple(fixed), dtype
        self.diagonal = frozenset(n for n, kind in (("Q", state_noise), ("R", noise)) if kind == "diagonal")
        eye = torch.eye(self.n_latent, dtype=dtype)
        self.G = eye if G is None else G.to(dtype)
        if G is not None and not torch.equal(self.G.detach(), eye.to(self.G)) and "A" not in fixed:
            raise OptionError(
                "A cannot be fitted where noise enters through G", expected='fixed=("A", ...)', got=str(fixed),
                do="hold A, or leave G out",
            )  # fmt: skip
        self._given = {name: None if value is None else value.to(dtype) for name, value in given.items()}
        self._set(self._given)
        self._level = False
        self._last: Any = None

    def _set(self, matrices: dict[str, Tensor | None]) -> None:
        for name in NAMES:
            setattr(self, f"{name}_", matrices[name])

    def _shapes(self, given: dict[str, Tensor | None], G: Tensor | None) -> None:
        """Raise unless all matrices go together."""
        states = self.n_latent
        noises = states if G is None or not G.dim() else G.shape[-1]
        widths = [len(t) for t in (given["C"], given["R"]) if t is not None and t.dim()]
        width = widths[0] if widths else 1
        expected = {
            "A": (states, states), "C": (width, states), "Q": (noises, noises), "R": (width, width),
            "m": (states,), "P": (states, states), "G": (states, noises),
        }  # fmt: skip
        for name, value in {**given, "G": G}.items():
            if value is None:
                continue
            checked_tensor(name, value)
            if tuple(value.shape) != expected[name] or not value.is_floating_point():
                what = f"a tensor {expected[name]} of floating point"
                raise OptionError(f"Bad {name}", expected=what, got=shown(value), do="check the sizes of all matrices")
            if not bool(value.detach().isfinite().all()):
                raise OptionError(f"Bad {name}", expected="finite numbers", got="NaN or inf", do="check the values")
            if name in "QRP" and not torch.allclose(value, value.mT, rtol=1e-5, atol=1e-8):
                raise OptionError(f"Bad {name}", expected="a symmetric matrix", got="another", do="check the values")

    @classmethod
    def structural(
        cls, *, trend: bool = True, season: int | None = None, harmonics: int | None = None, dtype: torch.dtype = DOUBLE
    ) -> LinearDynamics:
        """A series as level, slope of the level (`trend`) and a season of this many steps, each with its own noise.

        level_t = level + slope + w,  slope_t = slope + w',  season_t = -(the season's last s - 1 values) + w''. With
        `harmonics` the season is a sum of so many waves, of frequencies 1 / s, 2 / s, ..., whose amplitudes and phases
        drift: it is smooth, and has fewer states. Only these variances and that of y are fitted; the states start
        widely around the mean of the data.
        """
        check_arguments(LinearDynamics.structural, locals())
        if season == 1:
            raise OptionError("Bad season", expected="at least 2 steps", got="1", do="leave it out, or pass more")
        if harmonics is not None and not (season and harmonics <= season // 2):
            raise OptionError(
                "Bad harmonics", expected=f"at most half of season={season}", got=str(harmonics),
                do="pass season, and no more waves than half its steps",
            )  # fmt: skip
        base = torch.tensor([[1.0, 1.0], [0.0, 1.0]], dtype=dtype) if trend else torch.ones(1, 1, dtype=dtype)
        blocks, entering = [base], [*range(len(base))]
        seen = [1.0, *[0.0] * (len(base) - 1)]
        if season and harmonics is None:
            last = torch.diag(torch.ones(season - 2, dtype=dtype), -1)
            last[0] = -1
            blocks, seen, entering = [base, last], [*seen, 1.0, *[0.0] * (season - 2)], [*entering, len(base)]
        elif season and harmonics:
            for wave in range(1, harmonics + 1):
                turn = torch.tensor(2 * math.pi * wave / season, dtype=dtype)
                one = torch.stack([turn.cos(), turn.sin(), -turn.sin(), turn.cos()]).reshape(2, 2)
                one = one[:1, :1] if 2 * wave == season else one  # it changes its sign at every step
                blocks, seen = [*blocks, one], [*seen, 1.0, *[0.0] * (len(one) - 1)]
            entering = [*range(len(seen))]
        a: Tensor = torch.block_diag(*blocks)  # type: ignore[no-untyped-call]
        c, g = torch.tensor([seen], dtype=dtype), torch.eye(len(a), dtype=dtype)[:, entering]
        model = cls(A=a, C=c, G=g, fixed=("A", "C", "m", "P"), state_noise="diagonal", dtype=dtype)
        model._level = True
        return model

    def fit(
        self,
        sequences: Any,
        *,
        rounds: int = 200,
        tolerance: float = 1e-6,
        accelerate: bool = True,
        progress: bool | None = None,
    ) -> LinearDynamics:
        """Fit by EM, from the matrices that were given and a start by the data for others.

        P is held if there is one sequence only: it would go to zero.

        Args:
            sequences: one, or several.
            rounds: at most this many rounds.
            tolerance: EM ends when a round raises the log likelihood by less than this many nats an observed number.
            accelerate: extrapolated steps (SQUAREM), taken only where the likelihood does not fall.
            progress: show a bar; by default on a terminal only.
        """
        check_arguments(LinearDynamics.fit, locals())
        series, alone, _ = self._series(sequences, DOUBLE)
        fixed = {*self.fixed, "P"} if alone or len(series.y) == 1 else set(self.fixed)
        with torch.no_grad():
            start = DynamicsModel(self._start(series), frozenset(fixed), self.diagonal)
            if fixed >= set(NAMES):
                raise OptionError("Nothing is left to fit", expected="a matrix not in fixed", got="none", do="free one")
            start = start.with_least(smallest_noise(series), FLOOR)
            found = em(start, series, rounds=rounds, tolerance=tolerance, accelerate=accelerate, progress=progress)
        self._set({name: getattr(found.model.system.to(self.dtype), name) for name in NAMES})
        self.bounds_, self.converged_, self._last = found.bounds, found.converged, sequences
        return self

    def log_likelihood(self, sequence: Any) -> Tensor:
        """log p(y), 0-d; for several sequences (B,)."""
        series, alone, _ = self._series(sequence, self.dtype)
        found = kalman_filter(self._system(), series).log_likelihoods
        return found[0] if alone else found

    def filter(self, sequence: Any) -> Any:
        """States given the observations up to each step; for a list of sequences a list of `States`."""
        series, alone, listed = self._series(sequence, self.dtype)
        found = kalman_filter(self._system(), series)
        return _states(torch.stack(found.means), torch.stack(found.factors), found, series, alone, listed)

    def smooth(self, sequence: Any) -> Any:
        """States given all observations; for a list of sequences a list of `States`."""
        series, alone, listed = self._series(sequence, self.dtype)
        found = kalman_filter(self._system(), series)
        return _states(*smoother(found, series), found, series, alone, listed)

    def forecast(self, n: int, sequence: Any = None) -> Forecast:
        """The n observations after the end of `sequence`, or of what `fit` was given."""
        check_arguments(LinearDynamics.forecast, locals())
        if sequence is None and self._last is None:
            raise OptionError("Nothing to go on from", expected="a sequence", got="none", do="pass one, or fit first")
        series, alone, _ = self._series(self._last if sequence is None else sequence, self.dtype)
        system = self._system()
        found = kalman_filter(system, series)
        ends = [length - 1 for length in series.lengths]
        mean = torch.stack([found.means[end][b] for b, end in enumerate(ends)])
        factor = torch.stack(
            [found.factors[end][b if len(found.factors[end]) > 1 else 0] for b, end in enumerate(ends)]
        )
        means, covariances, states = [], [], []
        for _ in range(n):
            factor, mean = predict(system, factor)[0], mean @ system.A.mT
            seen = system.C @ factor
            states.append(mean)
            means.append(mean @ system.C.mT)
            covariances.append(seen @ seen.mT + system.R)
        parts = [torch.stack(each, 1) for each in (means, covariances, states)]
        return Forecast(*(part[0] for part in parts)) if alone else Forecast(*parts)

    def _system(self) -> System:
        matrices = {name: getattr(self, f"{name}_") for name in NAMES}
        missing = [name for name, value in matrices.items() if value is None]
        if missing:
            raise OptionError(
                "The model has no parameters yet", expected=", ".join(missing), got="none", do="call fit, or pass them"
            )
        return System(**matrices, G=self.G)

    def _start(self, series: Series) -> System:
        """Matrices that were given, others by the data."""
        given = {name: value.to(DOUBLE) for name, value in self._given.items() if value is not None}
        g = self.G.to(DOUBLE)
        if not {"Q", "R", "m", "P"} & (set(NAMES) - set(given)) and {"A", "C"} <= set(given):
            return System(**given, G=g)
        if {"A", "C"} <= set(given):
            return System(**{**of_known_dynamics(series, given["C"], g.shape[1], self._level), **given}, G=g)
        if g.shape[0] != g.shape[1] or given.keys() & {"A", "C", "Q", "m", "P"}:
            raise OptionError(
                "A start cannot be found beside some of the matrices",
                expected="A and C (others are found), or neither of A, C, Q, m, P and no G",
                got=f"{', '.join(given)}",
                do="pass A and C to start from",
            )
        return System(**{**of_data(series, self.n_latent), **given}, G=g)

    def _series(self, sequences: Any, dtype: torch.dtype) -> tuple[Series, bool, bool]:
        """Padded observations, whether one sequence came alone, and whether a list came."""
        known = [t.shape[0] for t in (self._given["C"], self._given["R"], self.C_) if t is not None]
        parts, alone = as_sequences(sequences, known[0] if known else 1)
        rows = [(part if part.dim() == 2 else part[:, None]).to(dtype) for part in parts]
        widths = {row.shape[1] for row in rows}
        if len(widths) > 1 or (known and widths != {known[0]}):
            expected = f"{known[0]} columns" if known else "as many columns in all"
            raise DataError("Bad observations", expected=expected, got=str(sorted(widths)), do="check the sequences")
        if any(bool(row.isinf().any()) for row in rows):
            raise DataError("An observation is infinite", expected="numbers, or NaN", got="inf", do="check the data")
        if all(bool(row.isnan().all()) for row in rows):
            raise DataError("Nothing was observed", expected="numbers", got="NaN only", do="check the data")
        of_moderate_size(torch.cat(rows))
        lengths = tuple(len(row) for row in rows)
        y = rows[0].new_full((len(rows), max(lengths), rows[0].shape[1]), torch.nan)
        for b, row in enumerate(rows):
            y[b, : len(row)] = row
        return Series(y, lengths), alone, isinstance(sequences, (list, tuple)) and not alone


def _states(means: Tensor, factors: Tensor, found: Filtered, series: Series, alone: bool, listed: bool) -> Any:
    """From (T, B, ...) to what came: one sequence, an array of several, or a list."""
    means = means.transpose(0, 1)
    covariances = (factors @ factors.mT).transpose(0, 1).expand(*means.shape, means.shape[-1])
    if alone:
        return States(means[0], covariances[0], found.log_likelihoods[0])
    if not listed:
        return States(means, covariances, found.log_likelihoods)
    return [
        States(means[b, :length], covariances[b, :length], found.log_likelihoods[b])
        for b, length in enumerate(series.lengths)
    ]
