"""Tomography and other linear inverse problems: operators, classical baselines, the probabilistic deep image prior."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import scipy.stats
import torch
from matplotlib.image import imsave
from torch import Tensor, nn
from typer.testing import CliRunner

import lapis
from lapis import imaging
from lapis.cli import app
from lapis.cli.tomography import load_image
from lapis.imaging.deep.training import Task, Trained, fit_image
from lapis.imaging.deep.unet import UNet
from lapis.imaging.tangent.complexity import VariationPrior, sampled_variances
from lapis.imaging.tangent.exact import ExactModel
from lapis.imaging.tangent.filters import FilterPrior, blocks_of
from lapis.imaging.tangent.iterative import IterativeModel
from lapis.imaging.tangent.linearised import TangentImage
from lapis.imaging.tangent.tuning import objective, tune, tune_by_probes
from lapis.imaging.variation import differences, differences_transposed, total_variation


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def noisy(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=seeded(seed), dtype=torch.float64)


# -- operators ----------------------------------------------------------------------------------------------


OPERATORS = {
    "rays": lambda: imaging.RayTransform(9, angles=5),
    "rays of a wide image": lambda: imaging.RayTransform((6, 9), angles=[0.1, 0.9, 2.0], detectors=7),
    "blur": lambda: imaging.blur(8, 0.8),
    "inpainting": lambda: imaging.inpainting(np.arange(30).reshape(5, 6) % 3 > 0),
    "downsampling": lambda: imaging.downsampling((6, 8), 2),
}


@pytest.mark.parametrize("name", OPERATORS)
def test_the_adjoint_is_the_adjoint_for_images_flat_arrays_and_batches(name: str) -> None:
    A = OPERATORS[name]()
    x, y = noisy(2, *A.image_shape), noisy(2, *A.data_shape, seed=1)
    assert (A @ x).shape == y.shape
    assert torch.allclose(((A @ x) * y).sum(), (x * (A.T @ y)).sum(), rtol=1e-12)
    assert torch.allclose(A @ x.flatten(1), (A @ x).flatten(1))
    assert torch.allclose((A @ x).flatten(1), x.flatten(1) @ A.dense().mT)
    assert np.allclose(A.T @ y.numpy(), (A.T @ y).numpy())
    assert A.T.T is A


def test_gradients_flow_through_an_operator() -> None:
    A = imaging.RayTransform(4, angles=3)
    assert torch.autograd.gradcheck(lambda x: A @ x, noisy(4, 4).requires_grad_())


def test_chords_of_one_ray_add_up_to_its_way_through_the_image() -> None:
    A = imaging.RayTransform(11, angles=[0.0, 0.3, math.pi / 4, math.pi / 2, 2.5])
    lengths = (A @ torch.ones(11, 11, dtype=torch.float64)).numpy()
    for row, angle in zip(lengths, A.angles, strict=True):
        cosine, sine = abs(math.cos(angle)), abs(math.sin(angle))
        for s, length in zip(np.abs(A.positions), row, strict=True):
            # a square's shadow is a trapezoid: full width up to |s| = 5.5 |cos - sin|, none beyond 5.5 (cos + sin)
            full, reach = 11 / max(cosine, sine), 5.5 * (cosine + sine)
            plateau = 5.5 * abs(cosine - sine)
            if min(cosine, sine) < 1e-9:
                expected = full if s < 5.5 - 1e-9 else 0.0 if s > 5.5 + 1e-9 else full / 2
            else:
                expected = full * np.clip((reach - s) / (reach - plateau), 0, 1)
            assert length == pytest.approx(expected, abs=1e-6)


def test_a_ray_along_a_line_of_the_grid_belongs_half_to_either_side() -> None:
    A = imaging.RayTransform(4, angles=[0.0], detectors=1)
    assert np.allclose(A.T @ np.ones((1, 1)), [[0, 0.5, 0.5, 0]] * 4)


@pytest.mark.parametrize("centre", [(0.0, 0.0), (6.0, -9.0)])
def test_projections_of_a_disc_are_its_chords(centre: tuple[float, float]) -> None:
    A = imaging.RayTransform(64, angles=12)
    projections = A @ imaging.disc(64, 20.0, centre)
    exact = imaging.disc_sinogram(A.angles, A.positions, 20.0, centre)
    assert (projections - exact).abs().mean() < 0.01 * exact.mean()
    inner = exact > 20  # not at the rim, where pixels are partly covered
    assert ((projections - exact).abs() / exact)[inner].max() < 0.04


def test_filtered_back_projection_recovers_a_disc() -> None:
    A = imaging.RayTransform(48, angles=90)
    disc = imaging.disc(48, 15.0, (3.0, -4.0))
    found = A.fbp(A @ disc)
    rows, columns = torch.meshgrid(torch.arange(48) - 23.5, torch.arange(48) - 23.5, indexing="ij")
    distance = ((rows - 3).square() + (columns + 4).square()).sqrt()
    assert found[distance < 12].mean() == pytest.approx(1, abs=0.01)
    assert found[(distance > 18) & (distance < 22)].mean() == pytest.approx(0, abs=0.02)
    assert imaging.psnr(found, disc) > 22
    assert torch.allclose(A.fbp((A @ disc).flatten()[None])[0], found.flatten())
    uneven = imaging.RayTransform(48, angles=np.concatenate([np.arange(60) * 0.02, np.linspace(1.22, 3.13, 60)]))
    assert uneven.fbp(uneven @ disc)[distance < 12].mean() == pytest.approx(1, abs=0.03)


def test_the_ray_transform_agrees_with_scikit_image() -> None:
    transform = pytest.importorskip("skimage.transform", reason="scikit-image is not installed")
    A = imaging.RayTransform(65, angles=7)
    phantom = imaging.shepp_logan(65)
    there = transform.radon(phantom.numpy(), theta=np.rad2deg(A.angles), circle=False).T
    ours = (A @ phantom).numpy()
    positions = np.arange(there.shape[1]) - there.shape[1] // 2
    both = np.isin(A.positions, positions)
    assert np.array_equal(A.positions[both], positions)
    assert np.abs(ours[:, both] - there).mean() < 0.04 * np.abs(ours).mean()
    filtered = transform.iradon(ours.T, theta=np.rad2deg(A.angles), circle=False, filter_name="ramp", output_size=65)
    assert np.allclose(A.fbp(ours), filtered, atol=1e-12)
    quality = pytest.importorskip("skimage.metrics", reason="scikit-image is not installed")
    other = phantom + 0.1 * noisy(65, 65)
    expected = quality.structural_similarity(phantom.numpy(), other.numpy(), data_range=1.0)
    assert imaging.ssim(other, phantom, span=1.0) == pytest.approx(expected, abs=1e-9)


def test_operators_refuse_what_does_not_fit() -> None:
    A = imaging.RayTransform(6, angles=4)
    for wrong in (
        torch.zeros(5, 5),
        torch.zeros(()),
        "image",
        torch.zeros(6, 6, dtype=torch.complex64),
        np.eye(6) * 1j,
    ):
        with pytest.raises(lapis.DataError):
            A @ wrong
    for options in ({"size": 1}, {"size": 6, "angles": []}, {"size": 6, "angles": "many"}, {"size": 6, "detectors": 0}):
        with pytest.raises(lapis.OptionError):
            imaging.RayTransform(**options)
    with pytest.raises(lapis.DataError):
        A.fbp(torch.zeros(3, 3))
    with pytest.raises(lapis.OptionError):
        imaging.downsampling(7, 2)
    with pytest.raises(lapis.OptionError):
        imaging.inpainting(np.zeros((3, 3)))


# -- total variation ----------------------------------------------------------------------------------------


def test_differences_have_their_adjoint() -> None:
    x = noisy(3, 4, 5)
    edges = noisy(3, 31, seed=1)
    assert torch.allclose((differences(x) * edges).sum(), (x * differences_transposed(edges, (4, 5))).sum())


def test_tv_reconstruction_is_within_its_gap_of_the_best_image() -> None:
    A = imaging.RayTransform(7, angles=4)
    truth = torch.zeros(7, 7, dtype=torch.float64)
    truth[2:5, 3:6] = 1
    data = A @ truth + 0.2 * noisy(*A.data_shape)

    def value(image: Tensor) -> Tensor:
        return (A @ image - data).square().sum() / 2 + 0.3 * total_variation(image)

    found = imaging.tv_reconstruction(A, data, 0.3, tolerance=1e-5, max_iterations=20_000)
    assert found.converged
    assert found.gap <= 1e-5 * found.objective
    assert found.objective == pytest.approx(float(value(found.image)))
    rough = imaging.tv_reconstruction(A, data, 0.3, max_iterations=50)
    assert 0 < rough.objective - found.objective <= rough.gap
    for seed in range(20):
        other = (found.image + 0.02 * noisy(7, 7, seed=seed)).clamp(0, 1)
        assert value(other) >= found.objective - found.gap


# -- the tangent model, against the dense answer in weight space --------------------------------------------


class Tiny(nn.Module):
    """Two blocks of 3 x 3 filters and one of 1 x 1."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(1, 2, 3, padding=1), nn.Tanh())
        self.second = nn.Sequential(nn.Conv2d(2, 2, 3, padding=1), nn.Tanh())
        self.last = nn.Sequential(nn.Conv2d(2, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        images: Tensor = self.last(self.second(self.first(x)))[:, 0].sigmoid()
        return images


class World:
    """A tiny problem and its answers by dense matrices over weights, in float64."""

    def __init__(self, angles: int) -> None:
        torch.manual_seed(0)
        self.network = Tiny().double()
        self.inputs = noisy(1, 1, 6, 6)
        self.A = imaging.RayTransform(6, angles=angles)
        self.noise_variance = 0.3
        self.data = (self.A @ torch.rand(36, generator=seeded(1), dtype=torch.float64)) + 0.5 * noisy(
            self.A.shape[0], seed=2
        )
        self.tangent = TangentImage(self.network, self.inputs)
        blocks = blocks_of(self.network)
        variances = torch.tensor([0.7, 2.0, 1.3], dtype=torch.float64)
        self.prior = FilterPrior(blocks, variances, torch.tensor([0.4, 1.5, 1.0], dtype=torch.float64))

        names = [name for block in blocks for name in block.weights]
        parameters = dict(self.network.named_parameters())
        self.t = torch.cat([parameters[name].detach().flatten() for name in names])

        def image(*weights: Tensor) -> Tensor:
            changed = dict(zip(names, weights, strict=True))
            return torch.func.functional_call(self.network, changed, (self.inputs,)).flatten()

        rows = torch.autograd.functional.jacobian(image, tuple(parameters[name] for name in names))
        self.J = torch.cat([part.flatten(1) for part in rows], 1)
        self.f = image(*(parameters[name] for name in names)).detach()
        self.Sigma = self.covariance()

    def covariance(self) -> Tensor:
        """exp(-distance / length) inside each filter, weight by weight."""
        entries = []
        for index, block in enumerate(self.prior.blocks):
            for i in range(block.size):
                entries.append((index, i // block.taps, *divmod(i % block.taps, block.side)))
        found = torch.zeros(len(entries), len(entries), dtype=torch.float64)
        for i, (block, number, row, column) in enumerate(entries):
            for j, (other, number_j, row_j, column_j) in enumerate(entries):
                if (block, number) == (other, number_j):
                    distance = math.hypot(row - row_j, column - column_j)
                    length = float(self.prior.lengths[block])
                    found[i, j] = float(self.prior.variances[block]) * math.exp(-distance / length)
        return found

    def weight_space(self) -> tuple[Tensor, Tensor, Tensor]:
        """Mean image, its covariance, and the log evidence, from the precision of the weights."""
        phi = self.A.dense() @ self.J
        residual = self.data - self.A @ (self.f - self.J @ self.t)
        precision = phi.mT @ phi / self.noise_variance + self.Sigma.inverse()
        mode = torch.linalg.solve(precision, phi.mT @ residual / self.noise_variance)
        d = len(self.data)
        evidence = (
            -(residual - phi @ mode).square().sum() / (2 * self.noise_variance)
            - d / 2 * math.log(2 * math.pi * self.noise_variance)
            - mode @ torch.linalg.solve(self.Sigma, mode) / 2
            - self.Sigma.logdet() / 2
            - precision.logdet() / 2
        )
        covariance = self.J @ torch.linalg.solve(precision, self.J.mT)
        return self.f - self.J @ self.t + self.J @ mode, covariance, evidence


@pytest.mark.parametrize("angles", [2, 8], ids=["fewer data than pixels", "more data than pixels"])
def test_exact_model_equals_the_dense_answer_in_weight_space(angles: int) -> None:
    world = World(angles)
    mean, covariance, evidence = world.weight_space()
    model = ExactModel(world.tangent, world.A, world.data)
    found = model.at(world.prior, world.noise_variance)
    phi = model.reduced @ world.J  # A J, in the coordinates of the matrices: A's own with fewer data than pixels
    K = phi @ world.Sigma @ phi.mT + world.noise_variance * torch.eye(len(phi), dtype=torch.float64)
    assert torch.allclose(model.reduced.mT @ model.reduced, world.A.dense().mT @ world.A.dense(), rtol=0, atol=1e-10)
    assert torch.allclose(model.covariance(world.prior.coefficients(), world.noise_variance), K, rtol=0, atol=1e-8)
    assert torch.allclose(found.tangent_mean, mean, rtol=0, atol=1e-8)
    assert torch.allclose(found.covariance, covariance, rtol=0, atol=1e-8)
    assert torch.allclose(found.variances, covariance.diagonal(), rtol=0, atol=1e-8)
    assert float(found.log_evidence()) == pytest.approx(float(evidence), abs=1e-8)


def test_iterative_model_equals_the_dense_answer_in_weight_space() -> None:
    world = World(3)
    mean, covariance, evidence = world.weight_space()
    model = IterativeModel(world.tangent, world.A, world.data, seeded())
    found = model.at(world.prior, world.noise_variance, tolerance=1e-12)
    phi = world.A.dense() @ world.J
    K = phi @ world.Sigma @ phi.mT + world.noise_variance * torch.eye(len(world.data), dtype=torch.float64)
    v = noisy(2, len(K))
    assert torch.allclose(model.covariance(world.prior, world.noise_variance)(v), v @ K, rtol=0, atol=1e-8)
    assert torch.allclose(found.tangent_mean, mean, rtol=0, atol=1e-8)
    pixels = torch.tensor([3, 10, 11])
    patch = covariance[pixels[:, None], pixels]
    assert torch.allclose(found.patch_covariance(pixels), patch, rtol=0, atol=1e-8)
    # the preconditioner is exact here, since there are fewer data than its rank: so is the log-determinant
    assert float(found.log_evidence()) == pytest.approx(float(evidence), abs=1e-6)


def test_products_of_the_prior_and_of_the_jacobian_are_those_of_their_matrices() -> None:
    world = World(2)
    v = noisy(3, len(world.t))
    assert torch.allclose(world.prior.times(v), v @ world.Sigma)
    assert torch.allclose(world.prior.energy(v[0]), v[0] @ torch.linalg.solve(world.Sigma, v[0]))
    root = world.prior.draws(torch.eye(len(world.t), dtype=torch.float64))
    assert torch.allclose(root.mT @ root, world.Sigma, atol=1e-12)
    assert torch.allclose(world.tangent.push(v), v @ world.J.mT)
    assert torch.allclose(world.tangent.pull(noisy(3, 36)), noisy(3, 36) @ world.J)
    assert torch.equal(world.tangent.weights, world.t)


@pytest.mark.parametrize("point", ["mode", "trained"])
def test_gradients_of_the_tuning_objective_are_those_of_differences(point: str) -> None:
    world = World(4)
    model = ExactModel(world.tangent, world.A, world.data)
    complexity = VariationPrior(world.prior.blocks, tuple(model.edges), 0.2)
    values = torch.cat(
        [world.prior.variances.log(), world.prior.lengths.log(), torch.tensor([0.1], dtype=torch.float64)]
    )

    def at(values: Tensor) -> float:
        return objective(model, values, world.prior, world.noise_variance, point, complexity)[0]  # type: ignore[arg-type]

    _, gradient = objective(model, values, world.prior, world.noise_variance, point, complexity)  # type: ignore[arg-type]
    for i in range(len(values)):
        step = torch.zeros_like(values)
        step[i] = 1e-5
        assert float(gradient[i]) == pytest.approx((at(values + step) - at(values - step)) / 2e-5, rel=1e-5, abs=1e-6)


def test_evidence_at_the_trained_weights_is_laplaces_formula() -> None:
    world = World(3)
    model = ExactModel(world.tangent, world.A, world.data)
    values = torch.cat([world.prior.variances.log(), world.prior.lengths.log(), torch.zeros(1, dtype=torch.float64)])
    found, _ = objective(model, values, world.prior, world.noise_variance, "trained", None)
    phi = world.A.dense() @ world.J
    precision = phi.mT @ phi / world.noise_variance + world.Sigma.inverse()
    expected = (
        -(world.data - world.A @ world.f).square().sum() / (2 * world.noise_variance)
        - len(world.data) / 2 * math.log(2 * math.pi * world.noise_variance)
        - world.t @ torch.linalg.solve(world.Sigma, world.t) / 2
        - (world.Sigma.logdet() + precision.logdet()) / 2
    )
    assert found == pytest.approx(float(expected), abs=1e-8)


def test_gradients_by_probes_are_the_evidences() -> None:
    world = World(2)
    exact = ExactModel(world.tangent, world.A, world.data)
    model = IterativeModel(world.tangent, world.A, world.data, seeded())
    _, by_coefficients, by_noise = exact.log_evidence(world.prior.coefficients(), world.noise_variance)
    every = torch.eye(len(world.data), dtype=torch.float64) * math.sqrt(
        len(world.data)
    )  # unit vectors: the exact trace
    preconditioner = model.preconditioner(world.prior, world.noise_variance, rank=5)
    found = model.gradients(world.prior, world.noise_variance, every, preconditioner, tolerance=1e-12)
    assert torch.allclose(found[0], by_coefficients, atol=1e-8)
    assert float(found[1]) == pytest.approx(float(by_noise), abs=1e-8)
    _, by_coefficients, by_noise = exact.log_evidence(world.prior.coefficients(), world.noise_variance, at_mode=False)
    found = model.gradients(world.prior, world.noise_variance, every, preconditioner, tolerance=1e-12, at_mode=False)
    assert torch.allclose(found[0], by_coefficients, atol=1e-8)
    assert float(found[1]) == pytest.approx(float(by_noise), abs=1e-8)


def test_tuning_raises_the_evidence_and_probes_find_about_the_same() -> None:
    world = World(4)
    exact = ExactModel(world.tangent, world.A, world.data)
    start = FilterPrior.standard(world.prior.blocks)
    tuned = tune(exact, start, world.noise_variance)
    before = float(exact.at(start, world.noise_variance).log_evidence())
    assert tuned.objective is not None
    assert tuned.objective > before + 1
    assert tuned.objective == pytest.approx(float(exact.at(tuned.prior, tuned.noise_variance).log_evidence()), abs=1e-8)
    probed = tune_by_probes(IterativeModel(world.tangent, world.A, world.data, seeded()), start, world.noise_variance)
    there = float(exact.at(probed.prior, probed.noise_variance).log_evidence())
    assert there > tuned.objective - 0.25 * (tuned.objective - before)


def test_expected_variation_is_that_of_samples() -> None:
    world = World(2)
    model = ExactModel(world.tangent, world.A, world.data)
    exact = VariationPrior(world.prior.blocks, tuple(model.edges), 1.0).expected_variation(world.prior)
    white = noisy(4000, len(world.t))
    first = 0
    for block, kappa in zip(world.prior.blocks, exact, strict=True):
        only = torch.zeros_like(white)
        only[:, first : first + block.size] = white[:, first : first + block.size]
        variation = total_variation(world.tangent.push(world.prior.draws(only)).reshape(-1, 6, 6))
        # a false alarm in 15,000 for each of three blocks
        assert abs(float(variation.mean() - kappa)) < 4 * float(variation.std()) / math.sqrt(len(white))
        first += block.size
    sampled = sampled_variances(world.tangent, (6, 6), 300, seeded(3))
    for estimate, v in zip(sampled, model.edges, strict=True):
        assert (estimate - v).norm() < 0.2 * v.norm()


def test_complexity_prior_is_the_density_of_its_formula() -> None:
    world = World(2)
    model = ExactModel(world.tangent, world.A, world.data)
    prior = VariationPrior(world.prior.blocks, tuple(model.edges), 0.7)
    expected = 0.0
    for i in range(2):  # the third block has no length scale

        def kappa(length: float, i: int = i) -> float:
            lengths = world.prior.lengths.clone()
            lengths[i] = length
            return float(prior.expected_variation(world.prior.of(world.prior.variances, lengths))[i])

        length = float(world.prior.lengths[i])
        slope = (kappa(length + 1e-5) - kappa(length - 1e-5)) / 2e-5
        expected += math.log(0.7) - 0.7 * kappa(length) + math.log(abs(slope))
    assert float(prior.log_prob(world.prior)) == pytest.approx(expected, abs=1e-6)


# -- training and reconstruction ----------------------------------------------------------------------------


def phantom(size: int = 12) -> Tensor:
    return imaging.disc(size, size / 3, (0.5, -1.0)) * 0.9


def small(norm: str = "none", dropout: float = 0.0) -> UNet:
    torch.manual_seed(0)
    return UNet((4, 4), norm=norm, dropout=dropout)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def problem() -> tuple[imaging.RayTransform, Tensor, float]:
    A = imaging.RayTransform(12, angles=8)
    clean = A @ phantom()
    noise = 0.05 * float(clean.abs().mean())
    return A, clean + noise * noisy(*clean.shape), noise


@pytest.fixture(scope="module")
def reconstruction(problem: tuple[imaging.RayTransform, Tensor, float]) -> imaging.Reconstruction:
    A, data, noise = problem
    return imaging.reconstruct(A, data, noise=noise, iterations=250, network=small(), rate=1e-2, complexity=True)


def test_reconstruction_beats_back_projection_and_its_errors_fit_the_error_map(
    problem: tuple[imaging.RayTransform, Tensor, float], reconstruction: imaging.Reconstruction
) -> None:
    A, data, noise = problem
    assert imaging.psnr(reconstruction.mean, phantom()) > imaging.psnr(A.fbp(data), phantom()) + 3
    assert reconstruction.mean.shape == reconstruction.std.shape == (12, 12)
    assert bool((reconstruction.std > 0).all())
    assert reconstruction.noise == pytest.approx(noise)
    assert math.isfinite(float(reconstruction.log_evidence()))
    assert reconstruction.log_prob(phantom()) > reconstruction.log_prob(torch.full((12, 12), 0.5)) + 100
    several = reconstruction.log_prob(torch.stack([phantom(), phantom().flip(0)]))
    assert torch.allclose(several[0], reconstruction.log_prob(phantom()))
    patch = reconstruction.covariance(slice(2, 5), slice(4, 6))
    assert torch.allclose(patch.diagonal(), reconstruction.std[2:5, 4:6].flatten().square())


def test_log_prob_is_the_gaussian_density_with_the_noise_that_reaches_the_image(
    problem: tuple[imaging.RayTransform, Tensor, float], reconstruction: imaging.Reconstruction
) -> None:
    A, _, noise = problem
    eigenvalues = torch.linalg.eigvalsh(A.dense().mT @ A.dense()).flip(0)
    eigenvalues = eigenvalues[: min(100, int((eigenvalues > 1e-8 * eigenvalues[0]).sum()))]
    assert reconstruction.image_noise == pytest.approx(noise**2 * float((1 / eigenvalues).sum()) / 144, rel=1e-6)
    covariance = reconstruction.covariance() + reconstruction.image_noise * torch.eye(144, dtype=torch.float64)
    gaussian = torch.distributions.MultivariateNormal(reconstruction.mean.flatten(), covariance)
    assert torch.allclose(reconstruction.log_prob(phantom()), gaussian.log_prob(phantom().flatten()))


def test_samples_by_matherons_rule_have_the_posteriors_distribution(reconstruction: imaging.Reconstruction) -> None:
    draws = reconstruction.sample(400, seeded(5)).flatten(1) - reconstruction.mean.flatten()
    values, vectors = torch.linalg.eigh(reconstruction.covariance())
    keep = values > values.max() * 1e-6
    white = draws @ vectors[:, keep] / values[keep].sqrt()
    # each draw's squared length is chi-square: their sum too; false alarms 1 in 1,000 each
    degrees = white.numel()
    assert scipy.stats.chi2.ppf(0.0005, degrees) < float(white.square().sum()) < scipy.stats.chi2.ppf(0.9995, degrees)
    lengths = white.square().sum(1).numpy()
    assert scipy.stats.kstest(lengths, scipy.stats.chi2(int(keep.sum())).cdf).pvalue > 1e-3
    assert scipy.stats.chi2.sf(float(white.mean(0).square().sum()) * 400, int(keep.sum())) > 1e-3


def test_large_problems_are_solved_by_products_and_agree_with_the_exact_method() -> None:
    A, image, noise = imaging.RayTransform(8, angles=4), phantom(8), 0.2
    data = A @ image
    data = data + noise * noisy(*data.shape)
    options = {"noise": noise, "iterations": 40, "rate": 1e-2, "tuning_steps": 3}
    found = imaging.reconstruct(A, data, network=small().double(), method="iterative", complexity=True, **options)
    exact = ExactModel(found.posterior.model.tangent, A, data.flatten()).at(found.prior, found.noise**2)
    assert torch.allclose(found.tangent_mean.flatten(), exact.tangent_mean, atol=1e-3)
    # 64 draws: the ratio of mean squares has a relative deviation of sqrt(2 / 64 / effective pixels) < 0.18
    assert float(found.std.square().mean() / exact.variances.mean()) == pytest.approx(1, abs=0.6)
    assert float(found.log_evidence()) == pytest.approx(float(exact.log_evidence()), rel=0.02, abs=3)
    assert math.isfinite(float(found.log_prob(image)))
    with pytest.raises(lapis.MemoryBudgetError):
        imaging.reconstruct(A, data, network=small(), method="exact", memory_budget=10_000, iterations=1)


def test_the_same_seed_gives_the_same_reconstruction_and_torchs_generator_is_left_alone() -> None:
    A = imaging.RayTransform(6, angles=3)
    data = A @ phantom(6)
    torch.manual_seed(3)
    before = torch.get_rng_state()
    options = {"iterations": 2, "tuning_steps": 2}
    one, two = (imaging.reconstruct(A, data, generator=seeded(4), **options) for _ in range(2))
    assert torch.equal(one.mean, two.mean)
    assert torch.equal(one.sample(2), two.sample(2))
    assert torch.equal(torch.get_rng_state(), before)


def task(problem: tuple[imaging.RayTransform, Tensor, float], iterations: int = 12) -> Task:
    A, data, noise = problem
    inputs = A.fbp(data)[None, None].float()
    return Task(A, data.flatten().float(), inputs, noise, 1.0, iterations, 1e-2, 0)


def test_an_interrupted_training_ends_as_if_it_had_not_been(
    problem: tuple[imaging.RayTransform, Tensor, float], tmp_path: Path
) -> None:
    whole = small(dropout=0.1)
    fit_image(whole, task(problem))

    class Interrupted(Exception):
        pass

    cut, calls = small(dropout=0.1), []

    def stop(module: nn.Module, args: object) -> None:
        calls.append(1)
        if len(calls) == 8:
            raise Interrupted

    handle = cut.register_forward_pre_hook(stop)
    path = tmp_path / "image.lapis"
    with pytest.raises(Interrupted):
        fit_image(cut, task(problem), checkpoint=path)
    handle.remove()
    resumed, calls = small(dropout=0.1), []
    resumed.register_forward_pre_hook(lambda module, args: calls.append(1))
    trained = fit_image(resumed, task(problem), checkpoint=path)
    assert len(trained.losses) == 12
    assert len(calls) == 12 - 7 + 1  # the steps that were left, and a last look at the image
    for (name, one), other in zip(whole.state_dict().items(), resumed.state_dict().values(), strict=True):
        assert torch.equal(one, other), name
    with pytest.raises(lapis.FileError):
        fit_image(small(dropout=0.1), task(problem, 13), checkpoint=path)


def test_a_dead_image_is_trained_again_with_smaller_steps(
    problem: tuple[imaging.RayTransform, Tensor, float],
) -> None:
    A, data, noise = problem
    network = small()
    inputs = A.fbp(data)[None, None].float()
    trained = fit_image(network, Task(A, data.flatten().float(), inputs, noise, 1.0, 90, 2.0, 0))
    assert max(trained.losses) > 2 * trained.losses[0]  # it did go wrong
    assert trained.losses[-1] < trained.losses[0]
    with pytest.raises(lapis.ModelError, match="constant image"):
        fit_image(small(), Task(A, data.flatten().float(), inputs, noise, 1.0, 90, 1e4, 0))


def test_the_evidence_is_looked_at_where_the_weights_average_also_after_an_interruption(
    problem: tuple[imaging.RayTransform, Tensor, float], tmp_path: Path
) -> None:
    plain, steps = small(), []
    plain.register_forward_pre_hook(lambda module, args: steps.append(module.state_dict()["inward.0.weight"].clone()))
    alone = fit_image(plain, task(problem, 40))
    average = steps[0]
    for value in steps[1:21]:  # what step i finds is what step i - 1 left
        average = 0.75 * average + 0.25 * value  # over a fifth of the 20 iterations between two looks

    class Interrupted(Exception):
        pass

    def trained(network: UNet, path: Path, values: list[float], stop: int = 99) -> tuple[Trained, list[Tensor]]:
        seen, count = [], iter(range(100))

        def watch() -> float:
            seen.append(network.state_dict()["inward.0.weight"].clone())
            return values[len(seen) - 1]

        def interrupt(module: nn.Module, args: object) -> None:
            if next(count) == stop:
                raise Interrupted

        network.register_forward_pre_hook(interrupt)
        return fit_image(network, task(problem, 40), watch=watch, looks=2, checkpoint=path), seen

    whole = small()
    outcome, seen = trained(whole, tmp_path / "whole.lapis", [2.0, 1.0])
    assert torch.allclose(seen[0], average, atol=1e-6)
    assert not torch.allclose(seen[0], steps[20], atol=1e-4)
    assert outcome.losses == alone.losses
    assert torch.equal(whole.state_dict()["inward.0.weight"], seen[0])
    with pytest.raises(Interrupted):
        trained(small(), tmp_path / "cut.lapis", [2.0], stop=30)
    resumed = small()
    later = trained(resumed, tmp_path / "cut.lapis", [1.0])[1]
    assert len(later) == 1
    assert torch.equal(later[0], seen[1])
    assert torch.equal(resumed.state_dict()["inward.0.weight"], seen[0])


def test_there_is_no_look_at_the_evidence_where_the_loss_has_jumped(
    problem: tuple[imaging.RayTransform, Tensor, float],
) -> None:
    network, steps = small(), iter(range(100))

    def jump(module: nn.Module, args: object) -> None:
        if module.training and next(steps) == 13:
            module.outward[0].bias.data += 3.0

    network.register_forward_pre_hook(jump)
    trained = fit_image(network, task(problem, 25), watch=lambda: 1.0, looks=5)
    assert trained.losses[14] > 2 * min(trained.losses[:13])  # it did jump
    assert [when for when, _ in trained.evidences] == [5, 10]


def test_an_image_that_dies_late_comes_back_from_the_lowest_loss(
    problem: tuple[imaging.RayTransform, Tensor, float],
) -> None:
    network, steps = small(), iter(range(100))

    def kill(module: nn.Module, args: object) -> None:
        if module.training and next(steps) == 40:  # an iteration at which dead images are looked for
            module.outward[0].bias.data -= 200.0

    network.register_forward_pre_hook(kill)
    losses = fit_image(network, task(problem, 60)).losses
    assert losses[40] > 10 * min(losses[:40])
    assert losses[41] == pytest.approx(min(losses[:40]), rel=1e-5)


def test_a_training_that_ends_in_a_jump_goes_back_to_its_lowest_loss(
    problem: tuple[imaging.RayTransform, Tensor, float],
) -> None:
    network, steps, here = small(), iter(range(100)), task(problem, 25)

    def jump(module: nn.Module, args: object) -> None:
        if module.training and next(steps) == 22:
            module.outward[0].bias.data += 3.0

    network.register_forward_pre_hook(jump)
    trained = fit_image(network, here)
    assert trained.losses[-1] > 2 * min(trained.losses)
    assert trained.losses[trained.stopped_at] == min(trained.losses)
    with torch.no_grad():
        assert float(here.loss(network(here.inputs)[0])) == pytest.approx(min(trained.losses), rel=1e-5)
    calm = fit_image(small(), here)
    assert calm.stopped_at == 25


@pytest.mark.filterwarnings("ignore:The trained network does not explain")
def test_training_stops_when_the_evidence_falls_and_keeps_its_best_weights(
    problem: tuple[imaging.RayTransform, Tensor, float],
) -> None:
    network, seen = small(), []

    def evidence() -> float:
        seen.append({name: value.clone() for name, value in network.state_dict().items()})
        return [1.0, 3.0, 2.0, 2.5, 9.0][len(seen) - 1]

    trained = fit_image(network, task(problem, 50), watch=evidence, looks=10)
    assert len(seen) == 4
    assert trained.stopped_at == 10
    assert all(torch.equal(value, seen[1][name]) for name, value in network.state_dict().items())
    A, data, noise = problem
    found = imaging.reconstruct(
        A, data, noise=noise, iterations=20, network=small(), stopping="evidence", tuning_steps=2
    )
    assert 3 <= len(found.trained.evidences) <= 10


def test_a_unet_has_the_published_number_of_weights_and_any_form() -> None:
    assert sum(block.size for block in blocks_of(UNet((32, 32, 32)))) == 76_608
    assert [block.name for block in blocks_of(UNet((4, 4)))] == ["inward", "down.0", "skip.0", "up.0", "outward"]
    free = UNet((4, 8, 8), (0, 2), norm="group", bounds=None)
    assert free(torch.randn(2, 1, 13, 10)).shape == (2, 13, 10)
    bounded = UNet((4,), bounds=(-1.0, 3.0))(torch.randn(1, 1, 8, 8)).detach()
    assert -1 < float(bounded.min()) < float(bounded.max()) < 3


def test_other_inverse_problems_are_reconstructed_by_the_same_code() -> None:
    image = phantom(8)
    for A in (imaging.blur(8, 0.7), imaging.downsampling(8, 2), imaging.inpainting(noisy(8, 8) > -0.5)):
        data = A @ image
        found = imaging.reconstruct(
            A, data + 0.01 * noisy(*data.shape), iterations=60, network=small(), rate=1e-2, tuning_steps=10
        )
        assert found.mean.shape == (8, 8)
        assert imaging.psnr(found.mean, image) > imaging.psnr(torch.full((8, 8), float(image.mean())).double(), image)


def test_reconstruct_refuses_what_makes_no_sense_before_any_work(
    problem: tuple[imaging.RayTransform, Tensor, float],
) -> None:
    A, data, _ = problem
    for wrong in ({"noise": 0.0}, {"iterations": 0}, {"bounds": (1.0, 0.0)}, {"method": "magic"}, {"noise": math.nan}):
        with pytest.raises(lapis.OptionError):
            imaging.reconstruct(A, data, **wrong)
    for network in (nn.Linear(2, 2), nn.Conv2d(1, 1, 3, padding=1), nn.Flatten()):
        with pytest.raises(lapis.ModelError):
            imaging.reconstruct(A, data, network=network)
    for wrong_data in (data[:2], data * math.nan, data * 255, data * 0, "data", None, data.to(torch.complex64)):
        with pytest.raises(lapis.DataError):
            imaging.reconstruct(A, wrong_data)


# -- the command --------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:The trained network does not explain")
def test_the_command_writes_pictures_and_a_report(tmp_path: Path) -> None:
    imsave(tmp_path / "image.png", imaging.shepp_logan(24).numpy()[:16], cmap="gray")
    numbers = {"angles": 4, "noise": 0.05, "iterations": 5, "channels": 2, "size": 12, "out": tmp_path / "out"}
    options = [str(part) for name, value in numbers.items() for part in (f"--{name}", value)]
    done = CliRunner().invoke(app, ["tomography", *options, str(tmp_path / "image.png")])
    assert done.exit_code == 0, done.output
    written = {path.name for path in (tmp_path / "out").iterdir()}
    assert written == {"mean.png", "error_map.png", "samples.png", "overview.png", "report.md"}
    report = (tmp_path / "out" / "report.md").read_text()
    for word in ("8 x 12 pixels", "4 angles", "Posterior mean", "Total variation", "up.1", "Log likelihood"):
        assert word in report
    assert "PSNR" in done.output


def test_the_command_takes_the_phantom_when_there_is_no_picture() -> None:
    assert torch.equal(load_image(None, 12), imaging.shepp_logan(12))


def test_the_command_says_what_is_wrong_with_a_picture(tmp_path: Path) -> None:
    (tmp_path / "no.png").write_bytes(b"not a picture")
    for path, words in (("no.png", "cannot be read"), ("missing.png", "no file")):
        done = CliRunner().invoke(app, ["tomography", str(tmp_path / path), "--out", str(tmp_path / "out")])
        assert done.exit_code != 0
        assert words in " ".join(done.output.replace("│", " ").split())
