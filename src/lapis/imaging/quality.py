"""How near a reconstruction is to the truth: peak signal-to-noise ratio and structural similarity."""

from __future__ import annotations

import torch
from torch import Tensor

from lapis.errors import DataError
from lapis.options import check_arguments, check_count, checked_numbers


def psnr(image: Tensor, truth: Tensor, span: float | None = None) -> float:
    """Peak signal-to-noise ratio in decibels, 10 log10(span^2 / mean squared error); `span` is the truth's range.

    Infinite for an image that is the truth.
    """
    check_arguments(psnr, locals())
    image, truth = _pair(image, truth)
    span = _span(truth) if span is None else span
    return float(10 * torch.log10(span**2 / (image - truth).square().mean()))


def ssim(image: Tensor, truth: Tensor, span: float | None = None, window: int = 7) -> float:
    """Structural similarity, the mean over windows of window x window pixels inside the image (Wang et al. 2004).

    (2 m1 m2 + c1) (2 s12 + c2) / ((m1^2 + m2^2 + c1) (s1^2 + s2^2 + c2)) with unbiased (co)variances,
    c1 = (0.01 span)^2, c2 = (0.03 span)^2: the conventions of scikit-image.
    """
    check_arguments(ssim, locals())
    check_count("window", window, least=2)
    image, truth = _pair(image, truth)
    if min(image.shape) < window:
        raise DataError(
            "The images are smaller than the window", expected=f"{window} pixels or more", got=str(tuple(image.shape)),
            do="pass a smaller window",
        )  # fmt: skip
    span = _span(truth) if span is None else span
    first, second = (0.01 * span) ** 2, (0.03 * span) ** 2
    stack = torch.stack([image, truth, image * image, truth * truth, image * truth])
    m1, m2, square1, square2, product = torch.nn.functional.avg_pool2d(stack[:, None], window, 1)[:, 0]
    unbiased = window**2 / (window**2 - 1)
    s1, s2, s12 = unbiased * (square1 - m1 * m1), unbiased * (square2 - m2 * m2), unbiased * (product - m1 * m2)
    likeness = (2 * m1 * m2 + first) * (2 * s12 + second) / ((m1 * m1 + m2 * m2 + first) * (s1 + s2 + second))
    return float(likeness.mean())


def _pair(image: Tensor, truth: Tensor) -> tuple[Tensor, Tensor]:
    for name, given in (("image", image), ("truth", truth)):
        checked_numbers(name, given)
    if image.shape != truth.shape or image.dim() != 2:
        raise DataError(
            "The images cannot be compared",
            expected="two images (height, width) of the same size",
            got=f"{tuple(image.shape)} and {tuple(truth.shape)}",
            do="compare one pair at a time",
        )
    return image.detach().to(torch.float64), truth.detach().to(torch.float64)


def _span(truth: Tensor) -> float:
    span = float(truth.max() - truth.min())
    if not span > 0:
        raise DataError("The truth is constant", expected="some contrast", got=f"{span}", do="pass span")
    return span
