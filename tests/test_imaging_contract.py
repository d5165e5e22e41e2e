"""The public contract of `lapis.imaging`: numbers of any usual form, groups, warnings, resuming."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse.linalg
import torch
from torch import Tensor, nn

import lapis
from lapis import imaging
from lapis.imaging.deep.unet import UNet
from lapis.imaging.tangent.exact import ExactModel
from lapis.imaging.tangent.iterative import IterativeModel
from lapis.imaging.tangent.tuning import evidence_at, objective


def phantom(size: int) -> Tensor:
    return imaging.disc(size, size / 3, (0.5, -1.0)) * 0.9


def small() -> UNet:
    torch.manual_seed(0)
    return UNet((3, 3))


@pytest.fixture(scope="module")
def problem() -> tuple[imaging.RayTransform, Tensor, float]:
    A = imaging.RayTransform(8, angles=4)
    clean = A @ phantom(8)
    noise = 0.1 * float(clean.abs().mean())
    return A, clean + noise * torch.randn(clean.shape, generator=torch.Generator().manual_seed(0)), noise


SAME: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "numpy numbers": ((np.int64(6),), {"angles": np.int64(3), "detectors": np.int32(8)}),
    "0-d tensors": ((6,), {"angles": torch.tensor(3), "detectors": torch.tensor(8)}),
    "a list of sides": (([6, 6],), {"angles": 3, "detectors": 8}),
    "positions": ((6, 3, 8), {}),
    "a list of angles": ((6,), {"angles": [0, math.pi / 3, 2 * math.pi / 3], "detectors": 8}),
    "an array of angles": ((6,), {"angles": np.linspace(0, np.pi, 3, endpoint=False), "detectors": 8}),
    "a tensor of angles": ((6,), {"angles": torch.arange(3, dtype=torch.float64) * math.pi / 3, "detectors": 8}),
}


@pytest.mark.parametrize("name", SAME)
def test_a_ray_transform_takes_its_numbers_in_any_form(name: str) -> None:
    places, options = SAME[name]
    A = imaging.RayTransform(*places, **options)
    assert repr(A) == "RayTransform((6, 6), angles=3, detectors=8)"
    assert np.allclose(A.dense(), imaging.RayTransform(6, angles=3, detectors=8).dense(), atol=1e-12)


def test_sizes_that_are_none_are_refused() -> None:
    for size in (True, 6.0, (6,), (6, 6, 6), "66", None, (6, 1)):
        with pytest.raises(lapis.OptionError):
            imaging.RayTransform(size, angles=3)
        with pytest.raises(lapis.OptionError):
            imaging.blur(size)


def test_an_operator_is_any_linear_map() -> None:
    image = torch.rand(5, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    matrix = imaging.blur((5, 6), 0.8).dense()

    def window(image: Tensor) -> Tensor:  # the middle nine pixels of each place, as torch's convolution has them
        return nn.functional.conv2d(image[None, None].float(), torch.ones(1, 1, 3, 3) / 9)[0, 0]

    for form in (matrix, matrix.numpy(), matrix.to_sparse(), scipy.sparse.csc_array(matrix.numpy())):
        assert torch.allclose(imaging.LinearOperator(form, [5, 6]) @ image.flatten(), matrix @ image.flatten())
    there = scipy.sparse.linalg.aslinearoperator(matrix.numpy())
    assert torch.equal(imaging.LinearOperator(there, (5, 6)).dense(), matrix)
    A = imaging.LinearOperator(window, (np.int64(5), 6))  # type: ignore[list-item]
    assert A.data_shape == (3, 4)
    assert torch.allclose(A @ image, window(image).double(), atol=1e-6)
    assert imaging.LinearOperator(window, (5, 6), (12,)).data_shape == (12,)
    assert imaging.LinearOperator(lambda x: A @ x.numpy(), (5, 6)).data_shape == (3, 4)
    wrong: tuple[Any, ...] = (
        lambda x: x + 1, lambda x: x.clamp(0, 1), lambda x: x + torch.randn(5, 6), torch.fft.fft2, lambda x: None,
        "matrix", None, (1j * matrix).to_sparse(), matrix.to("meta"),
    )  # fmt: skip
    for form in wrong:
        with pytest.raises(lapis.OptionError):
            imaging.LinearOperator(form, (5, 6))
    for shape in ((5, 6, 1), (5.0, 6), "56", None, (5, 0), 30):
        with pytest.raises(lapis.OptionError):
            imaging.LinearOperator(matrix, shape)  # type: ignore[arg-type]
    with pytest.raises(lapis.OptionError, match="LinearOperator"):
        imaging.reconstruct(matrix, matrix @ image.flatten())  # type: ignore[arg-type]


@pytest.mark.filterwarnings("ignore:The trained network does not explain")
def test_noise_and_iterations_may_be_scalars_of_numpy_and_torch(
    problem: tuple[imaging.RayTransform, Tensor, float],
) -> None:
    A, data, noise = problem
    options: dict[str, Any] = {"tuning_steps": 2}
    one = imaging.reconstruct(A, data, noise=noise, iterations=3, network=small(), **options)
    two = imaging.reconstruct(A, data, noise=torch.tensor(noise), iterations=np.int64(3), network=small(), **options)
    three = imaging.reconstruct(A, data.numpy(), noise=np.float32(noise), iterations=3, network=small(), **options)
    assert torch.allclose(one.mean, two.mean, atol=1e-5)
    assert torch.allclose(one.mean, three.mean, atol=1e-5)
    assert one.sample(np.int64(2)).shape == (2, 8, 8)  # type: ignore[arg-type]
    with pytest.raises(lapis.DataError, match="finite pixels"):
        one.log_prob(torch.full((8, 8), torch.nan))
    for wrong in (torch.tensor([noise, noise]), torch.tensor(0.0), np.float64("nan"), torch.empty((), device="meta")):
        with pytest.raises(lapis.OptionError):
            imaging.reconstruct(A, data, noise=wrong)  # type: ignore[arg-type]


def test_a_network_that_cannot_explain_the_data_is_warned_of(
    problem: tuple[imaging.RayTransform, Tensor, float],
) -> None:
    A, data, noise = problem
    with pytest.warns(lapis.LapisWarning, match="noise and bounds"):  # pixels of 2.7, which the sigmoid cannot reach
        found = imaging.reconstruct(A, 3 * data, noise=noise, iterations=60, network=small(), tuning_steps=2)
    residual = 3 * data - A @ found.network_image
    assert found.misfit == pytest.approx(float(residual.square().mean().sqrt()) / noise, rel=1e-5)


@pytest.mark.filterwarnings("ignore:The trained network does not explain")
def test_training_without_total_variation(problem: tuple[imaging.RayTransform, Tensor, float]) -> None:
    A, data, noise = problem
    options: dict[str, Any] = {"noise": noise, "iterations": 3, "tuning_steps": 2, "variation": 0}
    found = imaging.reconstruct(A, data, network=small(), **options)
    residual = A @ small()(A.fbp(data)[None, None].float())[0].detach().double() - data
    assert found.trained.losses[0] == pytest.approx(float(residual.square().sum()) / (2 * noise**2), rel=1e-4)
    with pytest.raises(lapis.OptionError):
        imaging.reconstruct(A, data, complexity=True, **options)


@pytest.mark.filterwarnings("ignore:The trained network does not explain")
@pytest.mark.parametrize("method", ["exact", "iterative"])
def test_one_group_has_one_variance_and_one_length_for_all_blocks(
    method: str, problem: tuple[imaging.RayTransform, Tensor, float]
) -> None:
    A, data, noise = problem
    options: dict[str, Any] = {"noise": noise, "iterations": 30, "rate": 1e-2, "method": method, "point": "mode"}
    found = imaging.reconstruct(A, data, network=small(), groups="one", **options)
    assert len(found.prior.blocks) == 5
    assert bool((found.prior.variances == found.prior.variances[0]).all())
    assert bool((found.prior.lengths == found.prior.lengths[0]).all())
    if method == "iterative":
        return
    more = found.retuned(point="mode")
    assert float(more.log_evidence()) >= float(found.log_evidence()) - 1e-6
    # and it is the best of its kind: the objective falls in either direction of the common variance
    model = found.posterior.model
    assert isinstance(model, ExactModel)
    values = torch.cat([found.prior.variances.log(), found.prior.lengths.log(), torch.zeros(1, dtype=torch.float64)])
    best = objective(model, values, found.prior, noise**2, "mode", None)[0]
    assert best == pytest.approx(float(found.log_evidence()), abs=1e-8)
    for step in (0.2, -0.2):
        moved = values.clone()
        moved[:5] += step
        assert objective(model, moved, found.prior, noise**2, "mode", None)[0] < best


@pytest.mark.filterwarnings("ignore:The trained network does not explain")
def test_training_is_watched_by_the_evidence_that_tuning_maximises(
    problem: tuple[imaging.RayTransform, Tensor, float],
) -> None:
    A, data, noise = problem
    options: dict[str, Any] = {"noise": noise, "iterations": 3, "stopping": "evidence", "tuning_steps": 5}
    found = imaging.reconstruct(A, data, network=small(), **options)
    best = max(value for _, value in found.trained.evidences)
    assert best == pytest.approx(found.tuned.objective, abs=1e-8)
    assert best == pytest.approx(evidence_at(found.posterior, "trained"), abs=1e-8)
    assert evidence_at(found.posterior, "mode") == pytest.approx(float(found.log_evidence()))
    # by products: the preconditioner is exact with so few data, and so is the log-determinant
    tangent, source = found.posterior.model.tangent, torch.Generator().manual_seed(0)
    by_products = IterativeModel(tangent, A, data.flatten(), source).at(found.prior, noise**2)
    assert evidence_at(by_products, "trained") == pytest.approx(best, abs=1e-5)


@pytest.mark.filterwarnings("ignore:The trained network does not explain")
def test_stopping_by_the_evidence_goes_on_after_an_interruption_as_if_it_had_not_been(
    problem: tuple[imaging.RayTransform, Tensor, float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lapis.imaging.tangent.iterative.STEPS", 4)  # of Lanczos quadrature, to be quick
    A, data, noise = problem
    options: dict[str, Any] = {"noise": noise, "iterations": 4, "stopping": "evidence", "tuning_steps": 2}
    options |= {"method": "iterative", "rate": 1e-2}
    whole = imaging.reconstruct(A, data, network=small(), **options)

    class Interrupted(Exception):
        pass

    network, seen = small(), []

    def stop(module: nn.Module, args: object) -> None:
        seen.append(module.training)
        if sum(seen) == 4:  # steps of training; looks run in evaluation mode
            raise Interrupted

    handle = network.register_forward_pre_hook(stop)
    with pytest.raises(Interrupted):
        imaging.reconstruct(A, data, network=network, checkpoint=tmp_path / "image.lapis", **options)
    handle.remove()
    network, seen = small(), []
    network.register_forward_pre_hook(lambda module, args: seen.append(module.training))
    resumed = imaging.reconstruct(A, data, network=network, checkpoint=tmp_path / "image.lapis", **options)
    assert sum(seen) == 2  # one step was left, and a last look at the image
    assert resumed.trained == whole.trained
    assert len(whole.trained.evidences) >= 3
    assert torch.equal(resumed.mean, whole.mean)
