"""Posteriors that leave the library: predictions as modules, programs and ONNX files."""

from __future__ import annotations

from lapis.export.module import Predictive, predictive
from lapis.export.onnx import exported, to_onnx, to_torch
from lapis.export.scaled import of_predictor

__all__ = ["Predictive", "exported", "of_predictor", "predictive", "to_onnx", "to_torch"]
