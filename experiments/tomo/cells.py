"""One image, number of angles and noise: every method's reconstruction, and how likely it finds the truth."""

from __future__ import annotations

import math
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import ROOT
from torch import Tensor, nn

from lapis import imaging
from lapis.imaging.deep.training import Task, fit_image
from lapis.imaging.tangent.tuning import evidence_at

LITERATURE = {
    (5, 5): (1e-5, 14_000), (10, 5): (3e-5, 29_000), (20, 5): (1e-4, 41_000), (30, 5): (1e-4, 50_000),
    (5, 10): (3e-5, 7_400), (10, 10): (1e-4, 13_000), (20, 10): (3e-4, 17_000), (30, 10): (3e-4, 22_000),
}  # fmt: skip
"""TV weights beside a mean squared misfit, and iterations, by angles and per cent of noise (authors' repository)."""
SHORTER = 0.03
"""Iterations here, relative to those, at a hundred times their step size."""
RATES = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0)
"""Of the TV baseline: the best for each image by its true PSNR, in the baseline's favour."""
DROPOUT, DROPOUT_SAMPLES, DROPOUT_ITERATIONS = 0.05, 1000, 1200
"""Share of channels left out; draws, more than pixels, so that their covariance is not singular; iterations at least:
gradients under random masks are noisy, and with as few as the plain network the masked one stays far from the data.
"""
VARIANTS: dict[str, dict[str, Any]] = {
    "evidence": {"point": "trained"}, "evidence + PredCP": {"point": "trained", "complexity": True},
    "evidence at theta*": {"point": "mode"},
}  # fmt: skip
COLUMNS: dict[str, dict[str, Any]] = {
    "theta*, groups": {"point": "mode", "groups": "blocks"}, "theta*, one": {"point": "mode", "groups": "one"},
    "t, groups": {"point": "trained", "groups": "blocks"}, "t, one": {"point": "trained", "groups": "one"},
}  # fmt: skip
BINS = np.linspace(-8, 8, 161)
"""Of normalised errors."""


@dataclass(frozen=True)
class Setting:
    channels: int
    scales: int
    iterations: int
    dropout_iterations: int
    rate: float = 1e-2


def setting(quick: bool, angles: int = 20, percent: int = 5) -> Setting:
    iterations = 60 if quick else round(SHORTER * LITERATURE[angles, percent][1])
    channels, scales, least = (4, 2, 60) if quick else (16, 3, DROPOUT_ITERATIONS)
    return Setting(channels, scales, iterations, max(least, iterations))


def variation_rate(angles: int, percent: int, measurements: int, noise: float) -> float:
    """The literature's TV weight, beside a mean of squares, as a rate beside |y - A f|^2 / (2 noise^2)."""
    return LITERATURE[angles, percent][0] * measurements / (2 * noise**2)


def grid(quick: bool) -> list[tuple[int, int]]:
    """Angles and per cent of noise."""
    return [(20, 5)] if quick else sorted(LITERATURE)


def kmnist(count: int) -> Tensor:
    folder = Path(os.environ.get("LAPIS_DATA", ROOT.parent / "shared" / "data"))
    with np.load(folder / "kmnist_ct.npz", allow_pickle=False) as file:
        return torch.from_numpy(file["images"][:count].astype(np.float64)) / 255


def measured(image: Tensor, angles: int, percent: int, seed: int) -> tuple[imaging.RayTransform, Tensor, float]:
    """The ray transform, a noisy sinogram, and its noise: per cent of the mean absolute value."""
    A = imaging.RayTransform(image.shape[-1], angles=angles)
    clean = A @ image
    noise = percent / 100 * float(clean.abs().mean())
    generator = torch.Generator().manual_seed(1000 * seed + 10 * angles + percent)
    return A, clean + noise * torch.randn(clean.shape, generator=generator, dtype=clean.dtype), noise


def network(setting: Setting, seed: int, level: float, **options: Any) -> imaging.UNet:
    torch.manual_seed(seed)
    return imaging.UNet((setting.channels,) * setting.scales, **options).start_at(level)


def picture_scores(image: Tensor, truth: Tensor) -> dict[str, float]:
    rmse = float((image - truth).square().mean().sqrt())
    return {"psnr": imaging.psnr(image, truth), "ssim": imaging.ssim(image, truth), "rmse": rmse}


def density_scores(mean: Tensor, covariance: Tensor, noise: float, truth: Tensor) -> dict[str, Any]:
    """Log likelihood per pixel, jointly and pixel by pixel, and a histogram of normalised errors."""
    error = (truth - mean).flatten()
    total = covariance + noise * torch.eye(len(covariance), dtype=covariance.dtype)
    joint = torch.distributions.MultivariateNormal(torch.zeros_like(error), total).log_prob(error)
    std = total.diagonal().sqrt()
    single = torch.distributions.Normal(0, std).log_prob(error)
    z = (error / std).clamp(-7.99, 7.99).numpy()
    return {
        "joint": float(joint) / len(error), "single": float(single.mean()), "mean_square": float((z**2).mean()),
        "histogram": np.histogram(z, BINS)[0].tolist(),
    }  # fmt: skip


def cell(
    image: int, angles: int, percent: int, setting: Setting, truth: Tensor
) -> tuple[dict[str, Any], dict[str, Tensor], imaging.Reconstruction]:
    """Scores of all methods, the pictures they were taken from, and the linearised reconstruction before tuning."""
    started = time.perf_counter()
    A, data, noise = measured(truth, angles, percent, image)
    rate = variation_rate(angles, percent, A.shape[0], noise)
    found: dict[str, Any] = {"FBP": picture_scores(A.fbp(data), truth)}
    baseline = max(
        (imaging.tv_reconstruction(A, data, rate * noise**2, progress=False) for rate in RATES),
        key=lambda result: imaging.psnr(result.image, truth),
    )
    found["TV"] = picture_scores(baseline.image, truth)
    generator, level = torch.Generator().manual_seed(image), float(A.fbp(data).mean())
    deep = imaging.reconstruct(
        A, data, noise=noise, iterations=setting.iterations, network=network(setting, image, level), rate=setting.rate,
        variation=rate, generator=generator, centre="network", tuning_steps=1, progress=False,
    )  # fmt: skip
    pictures = {"truth": truth, "data": data, "FBP": A.fbp(data), "TV": baseline.image, "DIP": deep.network_image}
    for name, options in VARIANTS.items():
        tuned = deep.retuned(tune_noise=True, progress=False, **options)
        covariance, term = tuned.covariance(), tuned.image_noise
        found[name] = density_scores(tuned.mean, covariance, term, truth) | picture_scores(tuned.mean, truth)
        found[name]["noise"] = tuned.noise / noise
        found[name]["variances"] = tuned.prior.variances.tolist()
        found[name]["lengths"] = tuned.prior.lengths.tolist()
        tangent = tuned.posterior.tangent_mean.reshape(truth.shape)
        around = density_scores(tangent, covariance, term, truth)["joint"]
        found[name]["tangent"] = {"joint": around} | picture_scores(tangent, truth)
        pictures[name] = (covariance.diagonal() + term).sqrt().reshape(truth.shape)
    found["seconds, linearised"] = time.perf_counter() - started
    masked = network(setting, image, level, dropout=DROPOUT)
    draws = dropout_draws(masked, A, data, noise, rate, setting, image)
    mean, deviations = draws.mean(0), (draws - draws.mean(0)).flatten(1)
    term = deep.image_noise  # of the noise as it is
    spread = deviations.mT @ deviations / (len(draws) - 1)
    found["dropout"] = density_scores(mean, spread, term, truth) | picture_scores(mean, truth)
    pictures["dropout mean"] = mean
    pictures["dropout"] = (deviations.square().mean(0) + term).sqrt().reshape(truth.shape)
    found["seconds"] = time.perf_counter() - started
    return found, pictures, deep


def normalised(image: int, setting: Setting, truth: Tensor) -> dict[str, dict[str, float]]:
    """A U-net with group norm, tuned by the evidence at its linear model's mode theta* and at the trained weights t,
    with a prior variance for every block and with one for all."""
    A, data, noise = measured(truth, 20, 5, image)
    model = network(setting, image, float(A.fbp(data).mean()), norm="group")
    deep = imaging.reconstruct(
        A, data, noise=noise, iterations=setting.iterations, network=model, rate=setting.rate, centre="network",
        variation=variation_rate(20, 5, A.shape[0], noise), tuning_steps=1, progress=False,
    )  # fmt: skip
    found = {}
    for name, options in COLUMNS.items():
        tuned = deep.retuned(tune_noise=True, progress=False, **options)
        covariance, term = tuned.covariance(), tuned.image_noise
        here = density_scores(tuned.mean, covariance, term, truth)
        tangent = density_scores(tuned.posterior.tangent_mean.reshape(truth.shape), covariance, term, truth)
        found[name] = {"joint": here["joint"], "tangent": tangent["joint"], "single": here["single"]}
        found[name] |= {"evidence": float(tuned.log_evidence()), "mean_square": here["mean_square"]}
    return found


def stopping(truth: Tensor, angles: int, percent: int, iterations: int, seed: int) -> dict[str, Any]:
    """Without total variation in training: stopped by the evidence, and after all iterations."""
    A, data, noise = measured(truth, angles, percent, seed)
    found: dict[str, Any] = {}
    for how in ("evidence", "iterations"):
        one = imaging.reconstruct(
            A, data, noise=noise, iterations=iterations, channels=(8, 8, 8), stopping=how,  # type: ignore[arg-type]
            variation=0, tuning_steps=30, progress=False, generator=torch.Generator().manual_seed(seed),
        )  # fmt: skip
        covered = ((truth - one.mean).abs() <= 2 * (one.std.square() + one.image_noise).sqrt()).double().mean()
        found[how] = {
            "iterations": one.trained.stopped_at, "looks": one.trained.evidences, "misfit": one.misfit,
            "network PSNR": imaging.psnr(one.network_image, truth), "mean PSNR": imaging.psnr(one.mean, truth),
            "log likelihood": float(one.log_prob(truth)) / truth.numel(), "within two": float(covered),
            "evidence": evidence_at(one.posterior, "trained"),
        }  # fmt: skip
    return found


def dropout_draws(
    model: nn.Module, A: imaging.RayTransform, data: Tensor, noise: float, rate: float, setting: Setting, seed: int
) -> Tensor:
    """Images (draws, height, width) of a deep image prior trained and drawn with dropout."""
    inputs = A.fbp(data)[None, None].float()
    task = Task(A, data.flatten().float(), inputs, noise, rate, setting.dropout_iterations, setting.rate, seed)
    fit_image(model, task, progress=False)
    model.train()
    torch.manual_seed(seed)
    with torch.no_grad():
        return torch.cat([model(inputs.expand(250, -1, -1, -1)).double() for _ in range(DROPOUT_SAMPLES // 250)])


def tv_density(errors: list[float], index: int) -> float:
    """Log likelihood per pixel of TV with a Gaussian whose width is the other images' root mean squared error."""
    others = [error for i, error in enumerate(errors) if i != index]
    variance = float(np.mean(np.square(others)))
    return -0.5 * math.log(2 * math.pi * variance) - errors[index] ** 2 / (2 * variance)
