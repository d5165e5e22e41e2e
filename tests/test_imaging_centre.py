"""Where the distribution of an image is centred: at the network's image, or moved as far as the data ask for."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from lapis import imaging
from lapis.imaging.tangent.exact import ExactModel
from lapis.imaging.tangent.filters import FilterPrior
from lapis.imaging.tangent.iterative import IterativeModel

A = imaging.RayTransform(10, angles=8)
TRUTH = 0.9 * imaging.disc(10, 3.0, (0.5, -1.0))
NOISE = 0.05 * float((A @ TRUTH).mean())
DATA = A @ TRUTH + NOISE * torch.randn(A.data_shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def reconstructed(iterations: int, noise: float | None = NOISE, **options: Any) -> imaging.Reconstruction:
    options = {"channels": (4, 4), "tuning_steps": 30} | options
    return imaging.reconstruct(A, DATA, noise=noise, iterations=iterations, **options)


def misfit(found: imaging.Reconstruction, image: Tensor) -> float:
    """Root mean square of y - A x over the stated noise."""
    return float((DATA - A @ image).square().mean().sqrt()) / NOISE


@pytest.fixture(scope="module")
def short() -> imaging.Reconstruction:
    """Of a network that was not trained to the end."""
    return reconstructed(200)


def test_a_network_that_explains_the_data_is_the_centre_and_one_that_does_not_is_moved(
    short: imaging.Reconstruction,
) -> None:
    assert misfit(short, short.tangent_mean) < 1 < misfit(short, short.network_image)
    assert 0 < short.moved < 1
    assert misfit(short, short.mean) == pytest.approx(1, abs=1e-5)
    way = short.tangent_mean - short.network_image
    assert torch.allclose(short.mean, short.network_image + short.moved * way)
    assert imaging.psnr(short.mean, TRUTH) > imaging.psnr(short.network_image, TRUTH) + 1
    louder = reconstructed(200, 2 * NOISE * misfit(short, short.network_image))
    assert louder.misfit < 1
    assert louder.moved == 0
    assert torch.equal(louder.mean, louder.network_image)


def test_the_centre_is_that_of_samples_and_density_alike(short: imaging.Reconstruction) -> None:
    covariance = short.covariance() + short.image_noise * torch.eye(100, dtype=torch.float64)
    first = short.sample(1) - short.mean
    for centre, mean in (("network", short.network_image), ("tangent", short.tangent_mean)):
        other = replace(short, centre=centre)
        assert torch.equal(other.mean, mean)
        assert torch.equal(other.std, short.std)
        assert torch.allclose(other.sample(1) - mean, first)
        gaussian = torch.distributions.MultivariateNormal(mean.flatten(), covariance)
        assert float(other.log_prob(TRUTH)) == pytest.approx(float(gaussian.log_prob(TRUTH.flatten())))


def test_where_no_image_on_the_way_explains_the_data_the_nearest_does(short: imaging.Reconstruction) -> None:
    tight = replace(short, posterior=replace(short.posterior, noise_variance=1e-12))
    assert 0 < tight.moved <= 1
    for moved in (tight.moved - 0.02, tight.moved + 0.02):
        other = tight.network_image + moved * (tight.tangent_mean - tight.network_image)
        assert moved > 1 or misfit(tight, other) >= misfit(tight, tight.mean)


@pytest.mark.filterwarnings("ignore:The trained network does not explain")
def test_an_unknown_noise_is_judged_by_what_the_linear_model_leaves() -> None:
    found = reconstructed(200, None)
    assert not found.tuned.fixed_noise
    assert found.noise > 1.2 * NOISE  # it has swallowed some of the network's misfit
    assert found.posterior.noise_left() ** 0.5 == pytest.approx(NOISE, rel=0.25)
    assert found.moved > 0
    assert imaging.psnr(found.mean, TRUTH) > imaging.psnr(found.network_image, TRUTH)


def test_what_the_linear_model_leaves_agrees_with_dense_matrices(short: imaging.Reconstruction) -> None:
    model = short.posterior.model
    assert isinstance(model, ExactModel)
    prior, variance = FilterPrior.standard(model.tangent.blocks, 0.3), 0.2
    phi = A.dense() @ model.jacobian
    K = phi @ prior.times(phi).mT + variance * torch.eye(len(phi), dtype=torch.float64)
    exact = model.at(prior, variance)
    left = DATA.flatten() - A.dense() @ exact.tangent_mean
    expected = float(left.square().sum() / (variance * K.inverse().trace()))
    assert exact.noise_left() == pytest.approx(expected, rel=1e-8)
    by_products = IterativeModel(model.tangent, A, DATA.flatten(), torch.Generator().manual_seed(0))
    assert by_products.at(prior, variance).noise_left() == pytest.approx(expected, rel=0.1)  # a trace by eight probes
