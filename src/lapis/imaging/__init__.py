"""Images from incomplete measurements, with error maps: tomography and other linear inverse problems.

A = lapis.imaging.RayTransform(28, angles=20)
reconstruction = lapis.imaging.reconstruct(A, sinogram, noise=0.2)
reconstruction.mean, reconstruction.std, reconstruction.sample(3)
"""

from __future__ import annotations

from lapis.imaging.deep.unet import UNet
from lapis.imaging.fit import reconstruct
from lapis.imaging.operators.linear import LinearOperator
from lapis.imaging.operators.problems import blur, downsampling, inpainting
from lapis.imaging.operators.ray import RayTransform
from lapis.imaging.phantoms import disc, disc_sinogram, shepp_logan
from lapis.imaging.quality import psnr, ssim
from lapis.imaging.reconstruction import Reconstruction
from lapis.imaging.variation import VariationResult, total_variation, tv_reconstruction

__all__ = [
    "LinearOperator",
    "RayTransform",
    "Reconstruction",
    "UNet",
    "VariationResult",
    "blur",
    "disc",
    "disc_sinogram",
    "downsampling",
    "inpainting",
    "psnr",
    "reconstruct",
    "shepp_logan",
    "ssim",
    "total_variation",
    "tv_reconstruction",
]
