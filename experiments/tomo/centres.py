"""Where to centre the distribution: at the network, at the linear model's own mean, or between the two."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lapis import imaging
from tomo import cells, large

GRID = ((20, 5), (5, 5), (10, 10), (30, 10))
"""Angles and per cent of noise."""
IMAGES = (10, 11, 12, 13)
CENTRES = ("tangent", "network", "discrepancy")


def settings(quick: bool) -> dict[str, tuple[Tensor, int, int, int, dict[str, Any]]]:
    """Image, angles, per cent of noise, seed, and what differs from the defaults of `reconstruct`, by name."""
    if quick:
        return {"phantom 12, 8 angles, 5 %": (imaging.shepp_logan(12), 8, 5, 0, {"iterations": 20, "channels": (4, 4)})}
    drawn, found = cells.kmnist(max(IMAGES) + 1), {}
    for index in IMAGES:
        for angles, percent in GRID:
            found[f"KMNIST {index}, {angles} angles, {percent} %"] = (drawn[index], angles, percent, index, {})
    for name, size, angles, percent in (
        ("chest", 40, 20, 5), ("chest", 48, 30, 5), ("chest", 40, 10, 10),
        ("phantom", 32, 20, 5), ("phantom", 48, 30, 5), ("phantom", 40, 10, 10),
    ):  # fmt: skip
        found[f"{name} {size}, {angles} angles, {percent} %"] = (_picture(name, size), angles, percent, 0, {})
    for about, options in (("250 iterations", {"iterations": 250}), ("noise unknown", {"noise": None})):
        for index in IMAGES[:2]:
            found[f"KMNIST {index}, 20 angles, 5 %, {about}"] = (drawn[index], 20, 5, index, options)
        for name, size in (("chest", 40), ("phantom", 32)):
            found[f"{name} {size}, 20 angles, 5 %, {about}"] = (_picture(name, size), 20, 5, 0, options)
    return found


def scores(truth: Tensor, angles: int, percent: int, seed: int, options: dict[str, Any]) -> dict[str, Any]:
    """Of one reconstruction around each centre."""
    A, data, noise = cells.measured(truth, angles, percent, seed)
    found = imaging.reconstruct(A, data, progress=False, **{"noise": noise} | options)
    row: dict[str, Any] = {"misfit": found.misfit, "noise": found.noise / noise, "moved": found.moved}
    variance = found.std.square() + found.image_noise
    for centre, mean in zip(CENTRES, (found.tangent_mean, found.network_image, found.mean), strict=True):
        error = truth - mean
        joint = found.log_prob(found.mean + error)  # as far from the mean as the truth is from this centre
        row[centre] = {
            "psnr": imaging.psnr(mean, truth), "ll": float(joint) / truth.numel(),
            "within2": float((error.square() <= 4 * variance).double().mean()),
            "z2": float((error.square() / variance).mean()),
        }  # fmt: skip
    return row


def _picture(name: str, size: int) -> torch.Tensor:
    return large.chest(size) if name == "chest" else imaging.shepp_logan(size)
