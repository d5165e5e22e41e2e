"""Trained networks in files, each with a description of all that decides its weights."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn
from trust.data import Labelled
from trust.networks import Training

import lapis


def description(model: nn.Module, training: Training | None, likelihood: str | lapis.Likelihood, part: Labelled) -> str:
    """What decides the trained weights, beside the seed; the inputs enter by their sum."""
    how = None if training is None else asdict(training)
    x, y = part
    sums = [len(y), float(x.double().sum()), float(y.double().sum())]
    name = lapis.likelihoods.resolve(likelihood).name
    return json.dumps({"network": str(model), "training": how, "data": sums, "likelihood": name})


def restore(model: nn.Module, path: Path, described: str) -> float | None:
    """Put the kept weights into the model; seconds of their training, or None where they are missing or others."""
    if not path.exists():
        return None
    with safe_open(path, "pt") as file:
        notes = file.metadata()
        if notes["described"] != described:
            return None
        model.load_state_dict({key: file.get_tensor(key) for key in file.keys()})  # noqa: SIM118 - not a dictionary
    return float(notes["seconds"])


def keep(model: nn.Module, path: Path, described: str, seconds: float) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(f".{os.getpid()}")
    save_file(dict(model.state_dict()), partial, {"described": described, "seconds": f"{seconds:.1f}"})
    partial.replace(path)  # two runs may train the same network; readers see one of them whole
