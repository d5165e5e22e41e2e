"""Large images: the chest slice and the phantom at 128 x 128, and what products with K_yy cost as images grow."""

from __future__ import annotations

import ctypes
import gc
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import ROOT
from torch import Tensor

from lapis import imaging
from lapis.imaging.tangent.exact import ExactModel
from lapis.imaging.tangent.filters import FilterPrior
from lapis.imaging.tangent.iterative import IterativeModel
from lapis.imaging.tangent.linearised import TangentImage
from tomo import cells

WINDOW = (-1000.0, 1000.0)
"""Hounsfield units shown as 0 and 1 in the chest slice."""
REPEATS = 3


class PeakMemory:
    """MiB that this process takes at most beyond what it had at the beginning, by the kernel's own high-water mark."""

    def __init__(self) -> None:
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)  # what was freed before must not serve now, unseen
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
        self._before = self._read("VmRSS")

    def beyond(self) -> float:
        return self._read("VmHWM") - self._before

    def _read(self, name: str) -> float:
        lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
        return next(float(line.split()[1]) / 1024 for line in lines if line.startswith(f"{name}:"))


class Clock:
    """Processor seconds between laps."""

    def __init__(self) -> None:
        self._last = time.process_time()

    def lap(self) -> float:
        before, self._last = self._last, time.process_time()
        return self._last - before


def chest(size: int) -> Tensor:
    """The real slice, 0 to 1, averaged down to `size` pixels."""
    folder = Path(os.environ.get("LAPIS_DATA", ROOT.parent / "shared" / "data"))
    with np.load(folder / "ct_small.npz", allow_pickle=False) as file:
        units = torch.from_numpy(file["ct_slice_hu"].astype(np.float64))
    grey = ((units - WINDOW[0]) / (WINDOW[1] - WINDOW[0])).clamp(0, 1)
    return torch.nn.functional.interpolate(grey[None, None], (size, size), mode="area")[0, 0]


def reconstructed(
    truth: Tensor, angles: int, channels: tuple[int, ...], iterations: int, steps: int, checkpoint: Path
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Scores, time and peak memory of a reconstruction by products, and its pictures."""
    A, data, noise = cells.measured(truth, angles, 5, 0)
    baseline = imaging.tv_reconstruction(A, data, noise**2, tolerance=1e-3, progress=False).image
    memory, clock = PeakMemory(), Clock()
    untuned = imaging.reconstruct(
        A, data, noise=noise, iterations=iterations, channels=channels, method="iterative", tuning_steps=1,
        checkpoint=checkpoint, progress=None,
    )  # fmt: skip
    seconds = {"processor seconds, training and first step": clock.lap()}
    found = untuned.retuned(steps=steps)
    seconds["processor seconds, tuning"] = clock.lap()
    spread = (found.std.square() + found.image_noise).sqrt()
    seconds["processor seconds, mean and 64 samples"] = clock.lap()
    covered = float(((found.mean - truth).abs() <= 2 * spread).double().mean())
    moved = truth + found.mean - found.tangent_mean  # as far from the mean as the truth is from the other
    scores = {
        "PSNR, back-projection": imaging.psnr(A.fbp(data), truth),
        "PSNR, total variation": imaging.psnr(baseline, truth),
        "PSNR, network": imaging.psnr(found.network_image, truth),
        "PSNR, linear model's own mean": imaging.psnr(found.tangent_mean, truth),
        "PSNR, mean": imaging.psnr(found.mean, truth), "SSIM, mean": imaging.ssim(found.mean, truth),
        "the way moved": found.moved, "misfit / noise": found.misfit,
        "log likelihood per pixel": float(found.log_prob(truth)) / truth.numel(),
        "around the linear model's own mean": float(found.log_prob(moved)) / truth.numel(),
        "within two deviations": covered, "measurements": A.shape[0],
        "weights": sum(block.size for block in found.prior.blocks), "iterations": iterations, "tuning steps": steps,
    } | seconds | {"peak MiB": memory.beyond()}  # fmt: skip
    return scores, {"truth": truth, "FBP": A.fbp(data), "TV": baseline, "mean": found.mean, "spread": spread}


def product_cost(size: int, angles: int, channels: tuple[int, ...]) -> dict[str, float]:
    """Of one product with K_yy, in float32: processor seconds for a block of eight vectors, each; and bytes of J.

    The network is not trained: that changes numbers, not costs.
    """
    torch.manual_seed(0)
    A = imaging.RayTransform(size, angles=angles)
    tangent = TangentImage(imaging.UNet(channels), torch.rand(1, 1, size, size), torch.float32)
    model = IterativeModel(tangent, A, torch.rand(A.shape[0]), torch.Generator().manual_seed(0))
    operator = model.covariance(FilterPrior.standard(tangent.blocks), 1.0)
    vectors = torch.randn(8, A.shape[0])
    operator(vectors[:1])
    memory, started = PeakMemory(), time.process_time()
    operator(vectors)
    return {
        "seconds": (time.process_time() - started) / len(vectors), "peak MiB": memory.beyond(),
        "measurements": A.shape[0], "pixels": A.shape[1],
        "weights": tangent.size, "J MiB": 4 * A.shape[1] * tangent.size / 2**20,
        "K_yy MiB": 4 * A.shape[0] ** 2 / 2**20,
    }  # fmt: skip


def naive_cost(size: int, angles: int, channels: tuple[int, ...]) -> dict[str, float]:
    """The same problem with the full Jacobian: seconds to make it, for a product with it, and for an evidence."""
    torch.manual_seed(0)
    A = imaging.RayTransform(size, angles=angles)
    tangent = TangentImage(imaging.UNet(channels), torch.rand(1, 1, size, size))
    started = time.process_time()
    exact = ExactModel(tangent, A, torch.rand(A.shape[0], dtype=torch.float64), progress=False)
    made = time.process_time() - started
    prior = FilterPrior.standard(tangent.blocks)
    vector = torch.randn(1, A.shape[0], dtype=torch.float64)
    started = time.process_time()
    for _ in range(REPEATS):
        A @ (prior.times((A.T @ vector) @ exact.jacobian) @ exact.jacobian.mT)
    product = (time.process_time() - started) / REPEATS
    started = time.process_time()
    for _ in range(REPEATS):
        exact.log_evidence(prior.coefficients(), 1.0)
    evidence = (time.process_time() - started) / REPEATS
    by_products = IterativeModel(tangent, A, exact.data, torch.Generator().manual_seed(0)).covariance(prior, 1.0)
    by_products(vector)
    started = time.process_time()
    for _ in range(REPEATS):
        by_products(vector)
    free = (time.process_time() - started) / REPEATS
    return {
        "Jacobian and Gram matrices": made, "product with J": product, "evidence and gradient": evidence,
        "product without J": free, "J MiB": exact.jacobian.nbytes / 2**20, "Gram MiB": exact.grams.nbytes / 2**20,
    }  # fmt: skip
