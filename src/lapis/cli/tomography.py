"""The tomography command: simulate projections of an image, reconstruct it, and write pictures and a report."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from matplotlib.figure import Figure
from matplotlib.image import imread, imsave
from torch import Tensor

from lapis import imaging, plots
from lapis.errors import DataError

SAMPLES = 4


@dataclass(frozen=True)
class Result:
    """What was measured and found; images are (height, width)."""

    truth: Tensor
    operator: imaging.RayTransform
    noise: float
    back_projection: Tensor
    variation: Tensor
    reconstruction: imaging.Reconstruction
    samples: Tensor

    def scores(self) -> dict[str, tuple[float, float]]:
        """PSNR and SSIM of each method."""
        images = {
            "Filtered back-projection": self.back_projection,
            "Total variation": self.variation,
            "Deep image prior": self.reconstruction.network_image,
            "Linear model's own mean": self.reconstruction.tangent_mean,
            "Posterior mean": self.reconstruction.mean,
        }
        return {name: (imaging.psnr(i, self.truth), imaging.ssim(i, self.truth)) for name, i in images.items()}

    def spread(self) -> Tensor:
        """Standard deviation of pixels with the noise that reaches the image, which the density counts too."""
        return (self.reconstruction.std.square() + self.reconstruction.image_noise).sqrt()

    def coverage(self) -> float:
        """Share of pixels whose truth lies within two standard deviations; 0.95 for a calibrated Gaussian."""
        return float(((self.truth - self.reconstruction.mean).abs() <= 2 * self.spread()).double().mean())


def load_image(path: Path | None, size: int) -> Tensor:
    """A picture in shades of grey, 0 to 1, at most `size` pixels along a side; the Shepp-Logan phantom for None."""
    if path is None:
        return imaging.shepp_logan(size)
    try:
        pixels = np.asarray(imread(path))
    except (OSError, ValueError, SyntaxError) as error:
        raise DataError(
            f"{path} cannot be read", expected="a picture (PNG, JPEG, ...)", got=str(error), do="convert it"
        ) from error
    scale = 255 if pixels.dtype == np.uint8 else 65535 if pixels.dtype == np.uint16 else 1
    grey = torch.from_numpy(pixels.astype(np.float64) / scale)
    if grey.dim() == 3:
        grey = grey[..., :3].mean(-1) if grey.shape[-1] >= 3 else grey[..., 0]
    if max(grey.shape) > size:
        shape = [max(8, round(side * size / max(grey.shape))) for side in grey.shape]
        grey = torch.nn.functional.interpolate(grey[None, None], shape, mode="area")[0, 0]
    if min(grey.shape) < 8 or float(grey.max() - grey.min()) == 0:
        raise DataError(
            f"{path} shows too little", expected="8 x 8 pixels or more, not all alike", got=str(tuple(grey.shape)),
            do="use another picture",
        )  # fmt: skip
    return grey.clamp(0, 1)


def run(
    truth: Tensor, angles: int, noise: float, iterations: int, channels: int, seed: int, progress: bool | None = None
) -> Result:
    """Simulate a sinogram with noise of `noise` times its mean absolute value, and reconstruct the image from it."""
    generator = torch.Generator().manual_seed(seed)
    operator = imaging.RayTransform((truth.shape[0], truth.shape[1]), angles=angles)
    clean = operator @ truth
    level = noise * float(clean.abs().mean())
    data = clean + level * torch.randn(clean.shape, generator=generator, dtype=clean.dtype)
    reconstruction = imaging.reconstruct(
        operator, data, noise=level, iterations=iterations, channels=(channels,) * 3, generator=generator,
        progress=progress,
    )  # fmt: skip
    variation = imaging.tv_reconstruction(operator, data, level**2, progress=progress).image
    samples = reconstruction.sample(SAMPLES, generator)
    return Result(truth, operator, level, operator.fbp(data), variation, reconstruction, samples)


def write(result: Result, folder: Path) -> list[Path]:
    """The mean, the error map and samples as pictures, a figure of all, and a report in Markdown."""
    found = result.reconstruction
    top = float(result.spread().max())
    pictures: Mapping[str, tuple[Tensor, str, float]] = {
        "mean.png": (found.mean, "gray", 1.0),
        "error_map.png": (result.spread(), "inferno", top),
        "samples.png": (torch.cat(list(result.samples), 1), "gray", 1.0),
    }
    for name, (image, colours, high) in pictures.items():
        imsave(folder / name, image.numpy(), cmap=colours, vmin=0, vmax=high)
    _draw(result, folder / "overview.png")
    (folder / "report.md").write_text(report(result), encoding="utf-8")
    return [folder / name for name in (*pictures, "overview.png", "report.md")]


def report(result: Result) -> str:
    """Scores and what was tuned, in Markdown."""
    found, pixels = result.reconstruction, result.truth.numel()
    angles, detectors = len(result.operator.angles), len(result.operator.positions)
    lines = [
        "# Tomography",
        "",
        f"{result.truth.shape[0]} x {result.truth.shape[1]} pixels from {angles} angles x {detectors} detectors, noise "
        f"{result.noise:.3g}.",
        "",
        "| method | PSNR | SSIM |",
        "| --- | --- | --- |",
        *(f"| {name} | {psnr:.2f} | {ssim:.3f} |" for name, (psnr, ssim) in result.scores().items()),
        "",
        f"- Log likelihood of the true image: {float(found.log_prob(result.truth)) / pixels:.3f} per pixel.",
        f"- True pixels within two standard deviations: {100 * result.coverage():.1f} % (95.4 % when calibrated).",
        f"- Log evidence of the measurements: {float(found.log_evidence()):.1f}.",
        f"- Training took {found.trained.stopped_at} iterations; the network's root mean squared misfit is "
        f"{found.misfit:.2f} x the noise.",
        f"- The posterior's mean lies {found.moved:.2f} of the way from the network's image (0) to the linear model's "
        "own mean (1): as far as the measurements ask for.",
        "",
        "| block | weights | variance | length scale |",
        "| --- | --- | --- | --- |",
    ]
    for block, variance, length in zip(found.prior.blocks, found.prior.variances, found.prior.lengths, strict=True):
        across = f"{float(length):.3g}" if block.taps > 1 else "-"
        lines.append(f"| {block.name} | {block.size} | {float(variance):.3g} | {across} |")
    return "\n".join(
        [*lines, "", "A variance of 0.001, the least allowed, is a block that the evidence switched off.", ""]
    )


def _draw(result: Result, path: Path) -> None:
    found = result.reconstruction
    error, spread = (result.truth - found.mean).abs(), result.spread()
    top = float(torch.maximum(error.max(), spread.max()))
    first = (
        ("Truth", result.truth, "gray", 1.0),
        ("Back-projection", result.back_projection, "gray", 1.0),
        ("Total variation", result.variation, "gray", 1.0),
        ("Posterior mean", found.mean, "gray", 1.0),
        ("|error|", error, "inferno", top),
        ("Error map (1 sd)", spread, "inferno", top),
    )
    second = [(f"Sample {i + 1}", image, "gray", 1.0) for i, image in enumerate(result.samples)]
    with plots.style():
        figure = Figure(figsize=(11.5, 4.2), layout="constrained")
        grid = figure.add_gridspec(2, 6)
        places = [figure.add_subplot(grid[0, column]) for column in range(6)]
        places += [figure.add_subplot(grid[1, column]) for column in range(SAMPLES)]
        for place, (title, image, colours, high) in zip(places, [*first, *second], strict=True):
            place.set_axis_off()
            shown = place.imshow(image.numpy(), cmap=colours, vmin=0, vmax=high, interpolation="nearest")
            place.set_title(title, fontsize=9)
            if title == first[-1][0]:  # the scale of the error's picture too
                figure.colorbar(shown, ax=place, shrink=0.75, pad=0.02)
        normal, quantiles = _quantiles(((result.truth - found.mean) / spread).flatten())
        place = figure.add_subplot(grid[1, SAMPLES:])
        place.plot(normal, normal, color=plots.GREY, linewidth=0.8)
        place.plot(normal, quantiles, ".", markersize=3)
        place.set_title("Errors over sd (QQ)", fontsize=9)
        place.set(xlabel="normal quantile", ylabel="error / sd")
        figure.savefig(path)


def _quantiles(values: Tensor) -> tuple[list[float], list[float]]:
    levels = (torch.arange(60, dtype=torch.float64) + 0.5) / 60
    normal = torch.special.ndtri(levels)
    return normal.tolist(), torch.quantile(values, levels).tolist()
