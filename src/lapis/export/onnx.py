"""Exported predictions in files: ONNX, for any runtime, and torch's own format."""

from __future__ import annotations

import importlib.util
import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

from lapis.errors import DataError, OptionError
from lapis.export.erf import RULES
from lapis.export.module import OUTPUTS
from lapis.files import check_writable
from lapis.options import check_arguments

BATCH = "batch"


def to_torch(module: nn.Module, example: Tensor, path: str | os.PathLike[str]) -> None:
    """Write the module as a program of torch.export (.pt2), for batches of any size: `torch.export.load(path)`."""
    check_arguments(to_torch, locals())
    check_writable(path)
    with _quiet():
        torch.export.save(exported(module, example), path)


def to_onnx(module: nn.Module, example: Tensor, path: str | os.PathLike[str]) -> None:
    """Write the module as an ONNX file, for batches of any size; needs `pip install 'lapis-bayes[export]'`.

    Args:
        module: of `lapis.export.predictive`.
        example: inputs of the network, one example or more.
        path: ends in .onnx.
    """
    check_arguments(to_onnx, locals())
    check_writable(path)
    missing = [name for name in ("onnx", "onnxscript") if importlib.util.find_spec(name) is None]
    if missing:
        raise OptionError(
            "ONNX export needs packages that are not installed", expected="onnx and onnxscript",
            got="no " + " and no ".join(missing), do="pip install 'lapis-bayes[export]'",
        )  # fmt: skip
    names = OUTPUTS[str(getattr(module, "task", "regression"))]
    with _quiet():
        program = torch.onnx.export(
            exported(module, example).run_decompositions(RULES), (example,), dynamo=True, input_names=["x"],
            output_names=list(names), verbose=False,
        )  # fmt: skip
        assert program is not None
        program.save(str(path))
    data = Path(f"{path}.data")  # a model this small needs no file beside it
    if data.exists() and not data.stat().st_size:
        data.unlink()


def exported(module: nn.Module, example: Tensor) -> torch.export.ExportedProgram:
    """The program that torch.export makes of the module, for any number of examples."""
    check_arguments(exported, locals())
    if example.dim() < 1 or len(example) == 0:
        raise OptionError(
            "There is no example to trace the module with", expected="inputs of one example or more",
            got=f"shape {tuple(example.shape)}", do="pass some rows",
        )  # fmt: skip
    with _quiet(), torch.no_grad():
        try:
            module(example)
        except (RuntimeError, TypeError, ValueError, IndexError) as error:  # what torch's layers raise
            raise DataError(
                "The module cannot be run on the example", expected="inputs of the network",
                got=f"shape {tuple(example.shape)}, {str(error).splitlines()[0]}", do="pass other inputs",
            ) from error  # fmt: skip
        # torch takes equal sizes for the same one: the number of examples must differ from those beside it, and from 1
        rows = next(n for n in count(max(2, len(example))) if n not in example.shape[1:])
        example = example[torch.arange(rows) % len(example)]
        # traced first, so that the derivatives inside become plain operations
        graph = make_fx(module, tracing_mode="symbolic", _allow_non_fake_inputs=True)(example)
        size = torch.export.Dim(BATCH)
        return torch.export.export(graph, (example,), dynamic_shapes=({0: size},), strict=False)


@contextmanager
def _quiet() -> Iterator[None]:
    """The exporters' own warnings and log are about themselves."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
