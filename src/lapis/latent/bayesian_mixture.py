"""A Gaussian mixture by variational Bayes: Dirichlet weights, normal-Wishart components, ELBO with all constants.

    q(pi) = Dir(alpha),  q(mu_k, L_k) = N(mu_k | m_k, (beta_k L_k)^-1) Wishart(L_k | W_k, nu_k),  q(z_n) = r_n

    alpha_k = alpha_0 + N_k,  beta_k = beta_0 + N_k,  nu_k = nu_0 + N_k,  m_k = (beta_0 m_0 + sum_n r_nk x_n) / beta_k
    W_k^-1 = W_0^-1 + sum_n r_nk x_n x_n^T + beta_0 m_0 m_0^T - beta_k m_k m_k^T

"tied" has one Wishart for all components, with the sums over k in nu and W^-1. "diagonal" has a Wishart of one
dimension (a gamma distribution) for each dimension, "spherical" one for all D of them: nu_k = nu_0 + D N_k. The bound
is a lower bound of the evidence log p(x), which compares numbers of components; those that the data do not need fade.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from sklearn.utils.validation import check_is_fitted
from torch import Tensor

from lapis.errors import DataError, OptionError
from lapis.latent.driver import Expected, Fit, LatentModel
from lapis.latent.estimator import FLOOR, Array, MixtureEstimator, shape_of
from lapis.latent.floor import raised
from lapis.latent.mixture_model import CHUNK, Covariance, Rows, gathered, scatter
from lapis.options import check_arguments, check_count, check_positive


@dataclass(frozen=True)
class Wisharts:
    """Normal-Wishart distributions of K components. G, the number of Wisharts, is K, or 1 where they share one.

    Args:
        mean: m, (K, D).
        strength: beta, (K,).
        freedom: nu, (G,).
        inverse: W^-1, (G, D, D); or of Wisharts of one dimension (K, D), each for its own, or (K, 1), for all D.
    """

    mean: Tensor
    strength: Tensor
    freedom: Tensor
    inverse: Tensor

    @property
    def single(self) -> bool:
        """Whether Wisharts are of one dimension."""
        return self.inverse.dim() == 2

    @property
    def copies(self) -> int:
        """Dimensions that share a Wishart of one dimension."""
        return self.mean.shape[1] // self.inverse.shape[1]

    @property
    def kind(self) -> Covariance:
        """Which sums over the data these need (`gathered`)."""
        if self.single:
            return "diagonal"
        return "full" if len(self.inverse) == len(self.mean) else "tied"

    def roots(self) -> tuple[Tensor, Tensor]:
        """R with R R^T = W, and log |W|, (G,); of one dimension both are shaped as `inverse`."""
        if self.single:
            return self.inverse.rsqrt(), -self.inverse.log()
        lower = torch.linalg.cholesky(self.inverse)
        eye = torch.eye(lower.shape[-1], dtype=lower.dtype).expand_as(lower)
        root = torch.linalg.solve_triangular(lower, eye, upper=False).mT
        return root, -2 * lower.diagonal(dim1=-2, dim2=-1).log().sum(-1)

    def expected_logdet(self, logdet: Tensor) -> Tensor:
        """E[log |L|] of each Wishart, shaped as `logdet`."""
        size = 1 if self.single else self.mean.shape[1]
        steps = torch.arange(size, dtype=torch.float64)
        digammas = torch.digamma((self.freedom[:, None] - steps) / 2).sum(1) + size * math.log(2)
        return logdet + (digammas[:, None] if self.single else digammas)

    def log_normaliser(self, logdet: Tensor) -> Tensor:
        """log B(W, nu) of each Wishart, shaped as `logdet`."""
        size = 1 if self.single else self.mean.shape[1]
        steps = torch.arange(size, dtype=torch.float64)
        gammas = torch.lgamma((self.freedom[:, None] - steps) / 2).sum(1)
        rest = self.freedom * size / 2 * math.log(2) + size * (size - 1) / 4 * math.log(math.pi) + gammas
        nu = self.freedom[:, None] if self.single else self.freedom
        return -nu / 2 * logdet - (rest[:, None] if self.single else rest)

    def divergence(self, prior: Wisharts) -> Tensor:
        """KL(q(mu, L) || prior), 0-d."""
        root, logdet = self.roots()
        _, prior_logdet = prior.roots()
        size = self.mean.shape[1]
        gap = self.mean - prior.mean
        if self.single:
            turned = gap * root
            overlap = root.square() * prior.inverse  # tr(W_0^-1 W)
            nu, prior_nu = self.freedom[:, None], prior.freedom[:, None]
            inner = 1
        else:
            turned = torch.einsum("kd,kde->ke", gap, root)  # a single Wishart is broadcast
            overlap = torch.einsum("kde,kdf,kfe->k", root, prior.inverse, root)
            nu, prior_nu = self.freedom, prior.freedom
            inner = size
        ratio = prior.strength / self.strength
        means = 0.5 * (size * (ratio - 1 - ratio.log()) + prior.strength * self.freedom * turned.square().sum(1))
        spread = (
            self.log_normaliser(logdet)
            - prior.log_normaliser(prior_logdet)
            + (nu - prior_nu) / 2 * self.expected_logdet(logdet)
            - nu * inner / 2
            + nu / 2 * overlap
        )
        return means.sum() + spread.sum()


@dataclass(frozen=True)
class BayesianModel(LatentModel):
    """q(pi) q(mu, L), and the prior: what EM's M-step updates."""

    concentration: Tensor
    components: Wisharts
    prior_concentration: Tensor
    prior: Wisharts

    def _quadratic(self, x: Tensor) -> Tensor:
        """nu (x - m)^T W (x - m), (N, K), in chunks of rows."""
        q = self.components
        root, _ = q.roots()
        count, size = q.mean.shape
        result = x.new_empty(len(x), count)
        step = max(1, CHUNK // (count * size))
        for start in range(0, len(x), step):
            gap = x[start : start + step, None] - q.mean
            z = gap * root if q.single else torch.einsum("nkd,kde->nke", gap, root)
            result[start : start + step] = q.freedom * z.square().sum(2)
        return result

    def _constants(self) -> Tensor:
        """E[log pi_k] + E[log |L_k|] / 2 - D / 2 log 2 pi - D / (2 beta_k), (K,)."""
        q = self.components
        size = q.mean.shape[1]
        logdet = q.expected_logdet(q.roots()[1])
        logdet = q.copies * logdet.sum(1) if q.single else logdet
        weights = torch.digamma(self.concentration) - torch.digamma(self.concentration.sum())
        return weights + 0.5 * (logdet - size * math.log(2 * math.pi) - size / q.strength)

    def expectation(self, data: Rows) -> Expected:
        data = Rows.of(data, self.components.mean.shape[1])
        joint = self._constants() - 0.5 * self._quadratic(data.x)
        joint = joint if data.log_labels is None else joint + data.log_labels
        evidence = joint.logsumexp(1, keepdim=True)
        return gathered(data, (joint - evidence).exp(), joint, evidence, self.components.kind)

    def maximisation(self, expected: Expected) -> BayesianModel:
        sums, prior = expected.statistics, self.prior
        n = sums["n"]
        strength = prior.strength + n
        mean = (prior.strength[:, None] * prior.mean + sums["x"]) / strength[:, None]
        if prior.single:
            before = prior.strength[:, None] * prior.mean.square()
            gain = sums["xx"] + before - strength[:, None] * mean.square()
            gain = gain.reshape(*prior.inverse.shape, prior.copies).sum(2)
            seen = prior.copies * n
        else:
            before = prior.strength[:, None, None] * prior.mean[:, :, None] * prior.mean[:, None]
            gain = before - strength[:, None, None] * mean[:, :, None] * mean[:, None]
            tied = prior.kind == "tied"
            gain = sums["xx"] + (gain.sum(0) if tied else gain)
            seen = n.sum() if tied else n
        components = Wisharts(mean, strength, prior.freedom + seen, prior.inverse + gain)
        return BayesianModel(self.prior_concentration + n, components, self.prior_concentration, prior)

    def log_joint(self, expected: Expected) -> Tensor:
        sums, q = expected.statistics, self.components
        root, _ = q.roots()
        around = scatter(sums, q.mean, q.kind)
        if q.single:
            traces = (root.square() * around).sum(1)
        else:
            traces = torch.einsum("kde,kdf,kfe->k", root, around.reshape(q.inverse.shape), root)
        total = (sums["n"] * self._constants()).sum() - 0.5 * (q.freedom * traces).sum() + sums["labels"]
        return total - self._weights_divergence() - q.divergence(self.prior)

    def _weights_divergence(self) -> Tensor:
        """KL of the Dirichlet distributions."""
        a, b = self.concentration, self.prior_concentration
        slope = torch.digamma(a) - torch.digamma(a.sum())
        sizes = torch.lgamma(a.sum()) - torch.lgamma(b.sum()) - torch.lgamma(a).sum() + torch.lgamma(b).sum()
        return sizes + ((a - b) * slope).sum()

    def log_predictive(self, x: Tensor) -> Tensor:
        """log E[pi_k] + log of the Student t that component k predicts, (N, K)."""
        q = self.components
        size = q.mean.shape[1]
        _, logdet = q.roots()
        nu = q.freedom + 1 - (1 if q.single else size)  # degrees of freedom
        scale = nu * q.strength / (1 + q.strength)
        if q.single:
            copies = q.copies
            squares = (x[:, None] - q.mean).square().reshape(len(x), *q.inverse.shape, copies).sum(3) / q.inverse
            each = torch.lgamma((nu + copies) / 2) - torch.lgamma(nu / 2) + copies / 2 * (scale / (math.pi * nu)).log()
            tails = (nu[:, None] + copies) / 2 * torch.log1p(scale[:, None] * squares / nu[:, None])
            density = (each[:, None] + copies / 2 * logdet - tails).sum(2)
        else:
            squares = scale * self._quadratic(x) / q.freedom
            constant = torch.lgamma((nu + size) / 2) - torch.lgamma(nu / 2)
            constant = constant + 0.5 * (logdet + size * (scale / (math.pi * nu)).log())
            density = constant - (nu + size) / 2 * torch.log1p(squares / nu)
        return density + (self.concentration / self.concentration.sum()).log()


class BayesianGaussianMixture(MixtureEstimator):
    """A Gaussian mixture whose weights, means and covariances have distributions, by variational Bayes.

    Args:
        n_components: K, at most; with a small `concentration` components that are not needed get no rows.
        covariance: "full", "tied" (one for all), "diagonal" ("diag") or "spherical".
        concentration: of the Dirichlet prior of the weights; 1 / n_components when None.
        mean_strength: beta_0, rows that the prior mean, that of the data, counts for.
        freedom: nu_0, rows that the prior covariance, that of the data, counts for ("spherical": numbers, D a row); D
            ("diagonal": 1) when None. Its variances are at least a millionth of the mean variance of the columns, in
            every direction.
        rounds, tolerance, restarts, random_state, progress: as in `GaussianMixture`.

    Attributes:
        weights_, means_, covariances_: expected weights and means, and inverses of the expected precisions, in the
            shapes of `GaussianMixture`.
        bounds_: the ELBO after each round, with all constants: a lower bound of the log evidence. It never falls.
        evidence_: the last bound plus log K!, for the K! orders of the components: to compare numbers of them.
        effective_components_: those with more than half a row.
    """

    accelerate = False
    start = None
    floor = 0.0

    def __init__(
        self,
        n_components: int = 1,
        covariance: str = "full",
        *,
        concentration: float | None = None,
        mean_strength: float = 1.0,
        freedom: float | None = None,
        rounds: int = 500,
        tolerance: float = 1e-6,
        restarts: int = 1,
        random_state: Any = 0,
        progress: bool | None = None,
    ) -> None:
        self.n_components = n_components
        self.covariance = covariance
        self.concentration = concentration
        self.mean_strength = mean_strength
        self.freedom = freedom
        self.rounds = rounds
        self.tolerance = tolerance
        self.restarts = restarts
        self.random_state = random_state
        self.progress = progress

    def _check_options(self) -> None:
        super()._check_options()
        for name in ("concentration", "mean_strength", "freedom"):
            value = getattr(self, name)
            if value is not None or name == "mean_strength":
                check_positive(name, value)

    def _begin(self, rows: Rows, r: Tensor | None, floor: float, centre: Tensor) -> BayesianModel:
        assert r is not None, "it always starts from responsibilities"
        count, size = self.n_components, rows.x.shape[1]
        kind = self._kind
        matrices = kind in ("full", "tied")
        freedom = float((1 if kind == "diagonal" else size) if self.freedom is None else self.freedom)
        if matrices and freedom <= size - 1:
            raise OptionError(
                "Bad freedom", expected=f"more than {size - 1}", got=repr(self.freedom), do="raise it, or leave it out"
            )
        spread = rows.x.mT @ rows.x / len(rows) if matrices else rows.x.square().mean(0)
        mean_variance = float(rows.x.square().mean())
        least = FLOOR * (mean_variance if mean_variance > 0 else 1.0)  # constant columns, and more columns than rows
        spread = raised(spread.mean(0, keepdim=True) if kind == "spherical" else spread, spread.new_tensor(least),
                        full=matrices)  # fmt: skip

        def each(value: float, many: int = count) -> Tensor:
            return torch.full((many,), float(value), dtype=torch.float64)

        wisharts = 1 if kind == "tied" else count
        inverse = (freedom * spread).expand(wisharts, *spread.shape)
        means = torch.zeros(count, size, dtype=torch.float64)
        prior = Wisharts(means, each(self.mean_strength), each(freedom, wisharts), inverse)
        concentration = each(1 / count if self.concentration is None else self.concentration)
        start = BayesianModel(concentration, prior, concentration, prior)
        zeros = torch.zeros(len(r), 1, dtype=r.dtype)
        return start.maximisation(gathered(Rows(rows.x), r, r.log(), zeros, prior.kind))

    def _finish(self, fit: Fit[BayesianModel], centre: Tensor) -> None:
        self.model_, self._centre = fit.model, centre
        q = fit.model.components
        concentration = fit.model.concentration
        self.weights_ = (concentration / concentration.sum()).numpy()
        self.means_ = (q.mean + centre).numpy()
        shape = (-1, *([1] * (q.inverse.dim() - 1)))
        covariances = (q.inverse / q.freedom.reshape(shape)).numpy()
        self.covariances_ = covariances.reshape(shape_of(self._kind, *self.means_.shape))
        self.evidence_ = fit.bounds[-1] + math.lgamma(self.n_components + 1)
        rows = (concentration - fit.model.prior_concentration).numpy()
        self.effective_components_ = int((rows > 0.5).sum())

    def sample(self, n_samples: int = 1, random_state: int = 0) -> tuple[Array, Array]:
        """Rows drawn from the distribution that `score_samples` is the density of, (n, D), and their components, (n,).

        A component predicts a Student t: m_k + chi^-1/2 L z with L L^T = W_k^-1 (1 + beta_k) / beta_k.
        """
        check_is_fitted(self)
        check_count("n_samples", n_samples)
        check_count("random_state", random_state, least=0)
        q: Wisharts = self.model_.components
        source = np.random.default_rng(random_state)
        place = source.choice(len(q.mean), size=n_samples, p=self.weights_)
        shared = place if len(q.inverse) == len(q.mean) else np.zeros_like(place)  # the Wishart of each row
        noise = source.standard_normal((n_samples, q.mean.shape[1]))
        if q.single:
            noise = noise * q.inverse.sqrt().numpy()[shared].repeat(q.copies, 1)
            chi = source.chisquare(q.freedom.numpy()[shared, None], (n_samples, q.inverse.shape[1]))
            chi = chi.repeat(q.copies, 1)
        else:
            noise = np.einsum("nde,ne->nd", torch.linalg.cholesky(q.inverse).numpy()[shared], noise)
            chi = source.chisquare(q.freedom.numpy()[shared, None] + 1 - noise.shape[1])
        strength = q.strength.numpy()[place, None]
        return self.means_[place] + noise * np.sqrt((1 + strength) / (strength * chi)), place

    def _joints(self, x: Tensor) -> Tensor:
        joints: Tensor = self.model_.log_predictive(x - self._centre)
        return joints


def choose_components(
    X: Any,
    numbers: Sequence[int] = (1, 2, 3, 4, 5, 6),
    *,
    covariance: str = "full",
    restarts: int = 3,
    labels: Any = None,
    random_state: int = 0,
) -> tuple[BayesianGaussianMixture, dict[int, float]]:
    """The number of components with the highest evidence: the mixture, and the bound of the log evidence of each.

    Weights have Dirichlet(1, ..., 1), so that no component fades by the prior alone; log K! counts the orders.
    """
    check_arguments(choose_components, locals(), signed=("random_state",))
    if not numbers:
        raise OptionError("Bad numbers", expected="numbers of components", got="none", do="pass some")
    found: dict[int, BayesianGaussianMixture] = {}
    for number in numbers:
        mixture = BayesianGaussianMixture(
            number, covariance, concentration=1.0, restarts=restarts, random_state=random_state
        )
        try:
            found[number] = mixture.fit(X, labels=labels)
        except (TypeError, ValueError, OverflowError) as error:  # of scikit-learn's checks
            got, *rest = str(error).splitlines()
            do = rest[-1] if rest else "check X, and numbers"  # where scikit-learn knows a remedy, it says it last
            got = got.split(". Expected")[0].rstrip(":")
            raise DataError("X cannot be used", expected="finite numbers (N, D)", got=got, do=do) from error
    best = max(found, key=lambda number: found[number].evidence_)
    return found[best], {number: mixture.evidence_ for number, mixture in found.items()}
