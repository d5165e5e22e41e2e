"""A Gaussian mixture by maximum likelihood, with any labels known: an estimator in scikit-learn's manner."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import torch
from sklearn.utils.validation import check_is_fitted
from torch import Tensor

from lapis.errors import DataError, LapisWarning
from lapis.latent.driver import Fit
from lapis.latent.estimator import FLOOR, Array, MixtureEstimator, first_mixture, shape_of
from lapis.latent.floor import NOBODY
from lapis.latent.mixture_model import MixtureModel, Rows, floored
from lapis.options import UNREADABLE, check_count, shown


class GaussianMixture(MixtureEstimator):
    """p(x) = sum_k pi_k N(x | mu_k, Sigma_k), fitted by EM.

    Args:
        n_components: K.
        covariance: "full", "tied" (one for all), "diagonal" ("diag") or "spherical".
        rounds: at most this many rounds of EM.
        tolerance: EM ends when a round raises the log likelihood by less than this many nats a row.
        restarts: starts (k-means from different seeds), of which the best is kept.
        floor: smallest variance of a component in any direction, relative to the mean variance of the columns; it keeps
            a component from collapsing onto single rows. A warning says where it was needed.
        accelerate: extrapolated steps (SQUAREM), taken only where the likelihood does not fall.
        start: (weights, means, covariances) to start from, instead of k-means.
        random_state: seed of the starts.
        progress: show a bar; by default on a terminal only.

    Attributes:
        weights_, means_, covariances_: (K,), (K, D), and (K, D, D), (D, D), (K, D) or (K,).
        bounds_: the log likelihood after each round, in nats; it never falls.
        half_steps_: the bound after every E- and M-step. lower_bound_ is the last.
        converged_, n_iter_.

    >>> import numpy as np
    >>> x = np.array([[4.3], [4.0], [6.0], [7.2], [6.4]])
    >>> mixture = GaussianMixture(2).fit(x, labels=[0, -1, 1, -1, -1])
    >>> mixture.predict(x).tolist()
    [0, 0, 1, 1, 1]
    """

    def __init__(
        self,
        n_components: int = 1,
        covariance: str = "full",
        *,
        rounds: int = 200,
        tolerance: float = 1e-6,
        restarts: int = 1,
        floor: float = FLOOR,
        accelerate: bool = False,
        start: Any = None,
        random_state: Any = 0,
        progress: bool | None = None,
    ) -> None:
        self.n_components = n_components
        self.covariance = covariance
        self.rounds = rounds
        self.tolerance = tolerance
        self.restarts = restarts
        self.floor = floor
        self.accelerate = accelerate
        self.start = start
        self.random_state = random_state
        self.progress = progress

    def _begin(self, rows: Rows, r: Tensor | None, floor: float, centre: Tensor) -> MixtureModel:
        if r is not None:
            return first_mixture(rows, r, self._kind, floor)
        weights, means, covariances = self._start()
        components, dimensions = self.n_components, rows.x.shape[1]
        for name, got, shape in (
            ("weights", weights, (components,)),
            ("means", means, (components, dimensions)),
            ("covariances", covariances, shape_of(self._kind, components, dimensions)),
        ):
            if tuple(got.shape) != shape or not bool(got.isfinite().all()):
                raise DataError(
                    f"The {name} of the start do not fit",
                    expected=f"finite numbers of shape {shape}",
                    got=str(tuple(got.shape)),
                    do="pass start=(weights, means, covariances)",
                )
        matrices = self._kind in ("full", "tied")
        proper = torch.linalg.eigvalsh(covariances) >= -1e-9 * covariances.abs().max() if matrices else covariances >= 0
        symmetric = not matrices or torch.allclose(covariances, covariances.mT, rtol=1e-5, atol=1e-8)
        if not symmetric or not bool(proper.all() & (weights >= 0).all() & (weights.sum() > 0)):
            raise DataError(
                "The start is no mixture", expected="weights and variances that are not negative, symmetric matrices",
                got="others", do="check the values",
            )  # fmt: skip
        raised = floored(covariances, self._kind, floor)
        return MixtureModel(weights / weights.sum(), means - centre, raised, self._kind, floor)

    def _start(self) -> list[Tensor]:
        try:
            found = [torch.as_tensor(np.asarray(part, dtype=np.float64)) for part in self.start]
        except UNREADABLE:
            found = []
        if len(found) != 3:
            raise DataError(
                "This is no start", expected="weights, means and covariances", got=shown(self.start),
                do="pass start=(weights, means, covariances)",
            )  # fmt: skip
        return found

    def _finish(self, fit: Fit[MixtureModel], centre: Tensor) -> None:
        model = fit.model
        self.model_ = MixtureModel(model.weights, model.means + centre, model.covariances, model.kind, model.floor)
        self.weights_, self.means_ = self.model_.weights.numpy(), self.model_.means.numpy()
        self.covariances_ = self.model_.covariances.numpy()
        empty = (model.weights < NOBODY).nonzero()[:, 0].tolist()
        if empty:
            warnings.warn(
                f"Components {empty} have no rows: nothing is known about them. Use fewer components, or other starts.",
                LapisWarning,
                stacklevel=3,
            )

    def _warn_of_collapse(self, model: MixtureModel) -> None:
        collapsed = _at_floor(model)
        if collapsed:
            warnings.warn(
                f"Components {collapsed} have a direction of variance at the floor: they lie on a few rows, or in "
                "a plane. Use fewer components, another covariance, or BayesianGaussianMixture.",
                LapisWarning,
                stacklevel=3,
            )

    def _joints(self, x: Tensor) -> Tensor:
        return self.model_.log_joints(Rows(x))

    def sample(self, n_samples: int = 1, random_state: int = 0) -> tuple[Array, Array]:
        """Rows drawn from the mixture, (n, D), and their components, (n,)."""
        check_is_fitted(self)
        check_count("n_samples", n_samples)
        check_count("random_state", random_state, least=0)
        model: MixtureModel = self.model_
        generator = torch.Generator().manual_seed(random_state)
        place = torch.multinomial(model.weights, n_samples, replacement=True, generator=generator)
        noise = torch.randn(n_samples, model.means.shape[1], dtype=torch.float64, generator=generator)
        if model.kind in ("full", "tied"):
            root = torch.linalg.cholesky(model.covariances)
            root = root[place] if model.kind == "full" else root.expand(n_samples, *root.shape)
            change = torch.einsum("nde,ne->nd", root, noise)
        else:
            deviation = model.covariances.sqrt()
            change = noise * (deviation[place] if model.kind == "diagonal" else deviation[place, None])
        return (model.means[place] + change).numpy(), place.numpy()

    def n_parameters(self) -> int:
        """Free parameters of the fitted mixture."""
        check_is_fitted(self)
        components, dimensions = self.means_.shape
        square = dimensions * (dimensions + 1) // 2
        spread = {"full": components * square, "tied": square, "diagonal": components * dimensions}
        return int(components - 1 + components * dimensions + spread.get(self._kind, components))

    def bic(self, X: Any) -> float:
        """-2 log likelihood + parameters log N; lower is better."""
        return float(-2 * self.score_samples(X).sum() + self.n_parameters() * np.log(len(X)))


def _at_floor(model: MixtureModel) -> list[int]:
    """Components whose smallest variance is the floor."""
    if model.kind in ("full", "tied"):
        smallest = torch.linalg.eigvalsh(model.covariances)[..., 0]
    else:
        smallest = model.covariances if model.kind == "spherical" else model.covariances.amin(1)
    at = (smallest <= model.floor * (1 + 1e-6)).reshape(-1)
    return [k for k, low in enumerate(at.tolist()) if low and (model.kind == "tied" or float(model.weights[k]) > 0)]
