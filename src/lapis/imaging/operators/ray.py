"""The parallel-beam ray transform with exact chord lengths, and filtered back-projection."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property

import numpy as np
import scipy.sparse
import torch
from numpy.typing import NDArray
from torch import Tensor

from lapis.errors import OptionError
from lapis.imaging.operators.linear import Array, LinearOperator, checked_sides, numbers, plain
from lapis.options import UNREADABLE, check_arguments, check_count

ALIGNED = 1e-9
"""Rays this close to a line of the pixel grid run along it, and belong half to the pixels on either side."""


class RayTransform(LinearOperator):
    """Integrals of an image along parallel rays: the sinogram of computed tomography.

    The image is constant on pixels of width 1, and centred. With the column coordinate u to the right and the row
    coordinate v downwards, the ray of angle phi and detector position s is u cos(phi) - v sin(phi) = s: at angle 0 rays
    run along the columns, and angles turn as in scikit-image's `radon` (whose sinograms are transposed: detectors by
    angles, and centred on a pixel). Row i of the matrix holds the lengths of ray i's chords in the pixels, exactly.

    `A @ image` is the sinogram (angles, detectors), `A.T @ sinogram` the unfiltered back-projection, `A.fbp` the
    filtered one. Batches and flat arrays: see `LinearOperator`.

    Args:
        size: pixels along each side, or (height, width).
        angles: how many, equally spaced over [0, pi); or the angles themselves, in radians.
        detectors: bins of width 1, centred. When None, as many as the diagonal needs, one more where that makes
            the middle of a bin fall on the middle of a pixel.

    >>> A = RayTransform(4, angles=[0.0])
    >>> image = torch.zeros(4, 4)
    >>> image[:, 1] = 1.0
    >>> A @ image
    tensor([[0., 0., 4., 0., 0., 0.]])
    """

    def __init__(
        self, size: int | Sequence[int], angles: int | Sequence[float] | Tensor = 180, detectors: int | None = None
    ) -> None:
        angles, detectors = plain(angles), plain(detectors)
        check_arguments(RayTransform, locals(), apart=("angles", "size"))
        sides = checked_sides(size)
        self.angles = _checked_angles(angles)
        """Radians (angles,), float64."""
        count = _diagonal_bins(*sides) if detectors is None else detectors
        self.positions: NDArray[np.float64] = np.arange(count, dtype=np.float64) - (count - 1) / 2
        """Of the middles of the detector's bins (detectors,), in pixels from the centre."""
        matrix = scipy.sparse.vstack([_chords(angle, self.positions, *sides) for angle in self.angles], format="csr")
        super().__init__(matrix, sides, (len(self.angles), count))

    def __repr__(self) -> str:
        height, width = self.image_shape
        return f"RayTransform(({height}, {width}), angles={len(self.angles)}, detectors={len(self.positions)})"

    def fbp(self, sinogram: Array) -> Array:
        """Filtered back-projection: images (..., height, width) of sinograms (..., angles, detectors), or flat to flat.

        The ramp filter is the band-limited one of Ramachandran and Lakshminarayanan, h(0) = 1/4, h(odd n) =
        -1 / (pi n)^2, 0 else, and each pixel takes the linear interpolation of the filtered projections at its
        middle. Every angle counts by the arc that it stands for.
        """
        if isinstance(sinogram, np.ndarray):
            found: Array = self.fbp(numbers("sinogram", sinogram)).numpy()
            return found
        self.T @ sinogram  # raises for what does not fit
        sinogram = sinogram if sinogram.is_floating_point() else sinogram.to(torch.float64)
        flat = tuple(sinogram.shape[-2:]) != self.data_shape
        rows = sinogram.reshape(-1, *self.data_shape)
        filtered = rows @ torch.from_numpy(_ramp(len(self.positions))).to(rows)
        smeared = self._interpolation.T @ filtered
        batch = sinogram.shape[:-1] if flat else sinogram.shape[:-2]
        return smeared.reshape(*batch, *((self.shape[1],) if flat else self.image_shape))

    def guess(self, data: Tensor) -> Tensor:
        return self.fbp(self.flat(data).reshape(self.data_shape))

    @cached_property
    def _interpolation(self) -> LinearOperator:
        """Its adjoint sums, over angles, arc * linear interpolation of the projection at the pixel's middle."""
        v, u = _middles(*self.image_shape)
        arcs = _arcs(self.angles)
        count, pixels = len(self.positions), np.arange(len(u))
        rows, columns, weights = [], [], []
        for index, (angle, arc) in enumerate(zip(self.angles, arcs, strict=True)):
            place = u * math.cos(angle) - v * math.sin(angle) - self.positions[0]
            below = np.floor(place).astype(np.int64)
            for bin_, share in ((below, below + 1 - place), (below + 1, place - below)):
                inside = (bin_ >= 0) & (bin_ < count)
                rows.append(pixels[inside])
                columns.append(index * count + bin_[inside])
                weights.append(arc * share[inside])
        entries = (np.concatenate(weights), (np.concatenate(columns), np.concatenate(rows)))
        return LinearOperator(scipy.sparse.csr_matrix(entries, shape=self.shape), self.image_shape, self.data_shape)


def _checked_angles(angles: int | Sequence[float] | Tensor) -> NDArray[np.float64]:
    if isinstance(angles, int):
        check_count("angles", angles)
        return np.arange(angles) * math.pi / angles
    try:
        found = np.asarray(angles, dtype=np.float64)
    except UNREADABLE:
        found = np.empty(0)
    if found.ndim != 1 or not len(found) or not np.isfinite(found).all():
        raise OptionError(
            "Bad angles",
            expected="a whole number, or a sequence of radians",
            got=repr(angles)[:80],
            do="pass such angles",
        )
    return found


def _diagonal_bins(height: int, width: int) -> int:
    bins = math.ceil(math.hypot(height, width))
    return bins + (bins - max(height, width)) % 2


def _middles(height: int, width: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Row and column coordinates of the pixels' middles from the centre, (pixels,) each."""
    v, u = np.mgrid[:height, :width].astype(np.float64)
    return v.ravel() - (height - 1) / 2, u.ravel() - (width - 1) / 2


def _chords(angle: float, positions: NDArray[np.float64], height: int, width: int) -> scipy.sparse.csr_matrix:
    """Chord lengths (rays, pixels) of all rays of one angle (Siddon).

    A point of the ray is s n + t d with n = (cos, -sin), d = (sin, cos) in (u, v). Sorted, the t at which the ray
    crosses the lines of the grid are the ends of its chords; the middle of a chord says in which pixel it lies.
    """
    cosine, sine = math.cos(angle), math.sin(angle)
    if min(abs(cosine), abs(sine)) < ALIGNED:
        cosine, sine = float(round(cosine)), float(round(sine))
        halves = [_chords_beside(cosine, sine, positions + shift, height, width) for shift in (-ALIGNED, ALIGNED)]
        return (halves[0] + halves[1]) / 2
    return _chords_beside(cosine, sine, positions, height, width)


def _chords_beside(
    cosine: float, sine: float, positions: NDArray[np.float64], height: int, width: int
) -> scipy.sparse.csr_matrix:
    s = positions[:, None]
    reach = math.hypot(height, width)
    crossings = [np.array([[-reach, reach]]).repeat(len(s), 0)]
    if sine:
        crossings.append((np.arange(width + 1) - width / 2 - s * cosine) / sine)
    if cosine:
        crossings.append((np.arange(height + 1) - height / 2 + s * sine) / cosine)
    t = np.sort(np.concatenate(crossings, axis=1).clip(-reach, reach), axis=1)
    middle, length = (t[:, 1:] + t[:, :-1]) / 2, t[:, 1:] - t[:, :-1]
    column = np.floor(s * cosine + middle * sine + width / 2).astype(np.int64)
    row = np.floor(-s * sine + middle * cosine + height / 2).astype(np.int64)
    inside = (column >= 0) & (column < width) & (row >= 0) & (row < height) & (length > 0)
    rays = np.broadcast_to(np.arange(len(s))[:, None], inside.shape)[inside]
    entries = (length[inside], (rays, (row * width + column)[inside]))
    return scipy.sparse.csr_matrix(entries, shape=(len(s), height * width))


def _arcs(angles: NDArray[np.float64]) -> NDArray[np.float64]:
    """The arc of [0, pi) nearest to each angle, (angles,): they add up to pi."""
    folded = angles % math.pi
    order = np.argsort(folded, kind="stable")
    ring = folded[order]
    gaps = np.diff(np.append(ring, ring[0] + math.pi))
    arcs = np.empty_like(folded)
    arcs[order] = (gaps + np.roll(gaps, 1)) / 2
    return arcs


def _ramp(count: int) -> NDArray[np.float64]:
    """The ramp filter as a symmetric matrix (bins, bins)."""
    lag = np.abs(np.arange(count)[:, None] - np.arange(count))
    with np.errstate(divide="ignore"):
        odd = np.where(lag % 2 == 1, -1 / (math.pi * np.maximum(lag, 1)) ** 2, 0.0)
    return np.where(lag == 0, 0.25, odd)
