"""A posterior as a model of BoTorch, for its acquisition functions. Needs the extra "botorch"."""

from __future__ import annotations

from typing import Any

import torch
from botorch.acquisition.objective import PosteriorTransform
from botorch.models.model import Model
from botorch.posteriors.gpytorch import GPyTorchPosterior
from gpytorch.distributions import MultivariateNormal
from torch import Tensor

from lapis.errors import LikelihoodError, OptionError
from lapis.likelihoods import Gaussian
from lapis.posteriors.laplace.stored import LaplacePosterior


class LaplaceModel(Model):  # type: ignore[misc]  # untyped where BoTorch is not installed
    """The linearised network as a Gaussian model of one output, differentiable in its inputs.

    `posterior(X)` for X (..., q, d) has the mean f(x) + J(x) (mean - t) and the covariance J(x) Sigma J(x')^T of the q
    points of each batch: what `laplace.predict(x, joint=True)` has. Gradients in X are those of autograd through f and
    J, so that `botorch.optim.optimize_acqf` can follow them.

    Args:
        laplace: a Laplace posterior with stored curvature, of a network with one output and Gaussian noise.
    """

    def __init__(self, laplace: LaplacePosterior) -> None:
        super().__init__()
        if not isinstance(laplace, LaplacePosterior):
            raise OptionError(
                "Only Laplace posteriors with stored curvature can be models of BoTorch",
                expected="LaplacePosterior",
                got=type(laplace).__name__,
                do="fit it by lapis.laplace(..., structure=...)",
            )
        if laplace.likelihood.name != "gaussian" or laplace.n_outputs != 1:
            raise LikelihoodError(
                "The outputs are no single real number",
                expected="one output with a gaussian likelihood",
                got=f"{laplace.n_outputs} outputs, {laplace.likelihood.name}",
                do="fit a network of one output to each objective",
            )
        self.laplace = laplace

    @property
    def num_outputs(self) -> int:
        """Always one."""
        return 1

    @property
    def batch_shape(self) -> torch.Size:
        """That of a single model."""
        return torch.Size()

    def posterior(
        self,
        X: Tensor,
        output_indices: list[int] | None = None,
        observation_noise: bool = False,
        posterior_transform: PosteriorTransform | None = None,
        **options: Any,
    ) -> Any:
        """The distribution of the outputs at X (..., q, d).

        Args:
            X: points; those of one batch are jointly Gaussian.
            output_indices: only [0], or None.
            observation_noise: add the variance of the noise.
            posterior_transform: of BoTorch, applied at the end.
            options: others are refused.
        """
        if options or output_indices not in (None, [0]):
            given = sorted(options) or output_indices
            raise OptionError("Not known to this model", expected="output_indices=[0]", got=str(given), do="drop it")
        mean, covariance = self._moments(X)
        if observation_noise:
            assert isinstance(self.laplace.likelihood, Gaussian)
            noise = self.laplace.likelihood.noise.detach().to(covariance) ** 2
            covariance = covariance + noise * torch.eye(X.shape[-2], dtype=X.dtype, device=X.device)
        found = GPyTorchPosterior(MultivariateNormal(mean, covariance))
        return found if posterior_transform is None else posterior_transform(found)

    def _moments(self, points: Tensor) -> tuple[Tensor, Tensor]:
        """Mean (..., q) and covariance (..., q, q), with gradients in the points."""
        network = self.laplace.network
        with network.held():
            self.laplace.check_network()
            weights = {name: value.detach() for name, value in network.parameters.items()}
            flat = points.reshape(-1, points.shape[-1]).to(network.dtype)

            def output(own: dict[str, Tensor], x: Tensor) -> Tensor:
                found: Tensor = torch.func.functional_call(network.module, own, (x[None],))
                return found.reshape(())

            f = torch.vmap(output, (None, 0))(weights, flat)
            parts = torch.vmap(torch.func.grad(output), (None, 0))(weights, flat)
            rows = torch.cat([parts[name].flatten(1) for name in network.names], 1)
            if self.laplace.mean is not self.laplace.point:
                f = f + rows @ (self.laplace.mean - self.laplace.point)
            spread = _Spread.apply(rows, self.laplace)  # type: ignore[no-untyped-call]
        shape = points.shape[:-1]
        rows, spread = (each.reshape(*shape, -1).to(points) for each in (rows, spread))
        covariance = rows @ spread.mT
        return f.reshape(shape).to(points), 0.5 * (covariance + covariance.mT)


class _Spread(torch.autograd.Function):
    """Sigma v for rows v (n, P); Sigma is symmetric, so that the gradient is Sigma times the one that comes."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, laplace: LaplacePosterior) -> Tensor:
        ctx.laplace = laplace
        return laplace.solve(rows).to(rows)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return ctx.laplace.solve(gradients[0]).to(gradients[0]), None
