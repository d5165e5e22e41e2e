"""Posteriors in files: safetensors for numbers, JSON in its header for the rest. Files are data, never code."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from lapis.curvature.fit import Curvature
from lapis.curvature.sites import Site
from lapis.curvature.structure import build_blocks, to_device
from lapis.curvature.tape import Tape
from lapis.errors import FileError
from lapis.evidence import Tuning
from lapis.likelihoods import Likelihood, from_config
from lapis.network import Network
from lapis.posteriors.laplace import LaplacePosterior
from lapis.priors import Prior, WeightPrior

FORMAT = 1
"""Version of the layout below; readers refuse newer ones."""


def save(posterior: LaplacePosterior, path: str | os.PathLike[str]) -> None:
    """Write beside the target, then rename: a file that exists is whole."""
    curvature, prior = posterior.curvature, posterior.weight_prior
    tensors = {f"block.{i}.{name}": t for i, block in enumerate(curvature.blocks) for name, t in block.state().items()}
    tensors |= {
        "statistics": curvature.statistics,
        "mean": posterior.mean,
        "prior.precision": prior.precision.detach(),
        "prior.mean": prior.mean,
    }
    tensors = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    config = {
        "format": FORMAT,
        "structure": posterior.structure,
        "sharing": next((b.sharing for b in curvature.blocks if hasattr(b, "sharing")), "expand"),
        "likelihood": posterior.likelihood.to_config(),
        "fitted_likelihood": posterior.fitted_likelihood.to_config(),
        "labels": prior.labels,
        "group_of": prior.group_of,
        "curvature": curvature.kind,
        "fisher_samples": curvature.fisher_samples,
        "n_data": curvature.n_data,
        "outputs": curvature.outputs,
        "signature": curvature.signature,
        "example_bytes": curvature.tape.example_bytes,
        "sites": [site.to_config() for site in curvature.tape.sites],
        "general": sorted(curvature.tape.general),
        "shapes": posterior.network.shapes,
        "fingerprint": posterior.fingerprint,
        "temperature": posterior.temperature,
        "memory_budget": posterior.memory_budget,
        "choices": posterior.choices,
        "tuning": posterior.tuning and asdict(posterior.tuning),
    }
    text = json.dumps(config)
    target = Path(path)
    partial = target.with_name(target.name + f".{os.getpid()}.partial")
    try:
        save_file(tensors, partial, metadata={"lapis": text, "digest": _digest(text, tensors)})
        os.replace(partial, target)
    except OSError as error:
        raise FileError(
            f"Cannot write {target}", got=str(error), do="choose a folder that exists and can be written"
        ) from error
    finally:
        with contextlib.suppress(FileNotFoundError):
            partial.unlink()


def load(path: str | os.PathLike[str], model: nn.Module, likelihood: Likelihood | None = None) -> LaplacePosterior:
    """The posterior saved at `path`, for the same network with the same weights.

    `likelihood` is needed for `Custom` ones only, whose function no file can hold.
    """
    config, tensors = _read(Path(path))
    trainable = dict(model.named_parameters())
    shapes = {name: tuple(shape) for name, shape in config["shapes"].items()}
    for name, shape in shapes.items():
        if name not in trainable or tuple(trainable[name].shape) != shape:
            raise FileError(
                "The posterior belongs to another network",
                expected=f"a parameter {name!r} of shape {shape}",
                got=f"shape {tuple(trainable[name].shape)}" if name in trainable else "no such parameter",
                do="build the network that the posterior was fitted to",
            )
    network = Network(model, lambda name, _: name in shapes)
    if tuple(network.names) != tuple(shapes) or network.fingerprint() != config["fingerprint"]:
        raise FileError(
            "The network does not hold the weights that the posterior was fitted to",
            expected=f"weights and buffers with fingerprint {config['fingerprint']}",
            got=f"{network.fingerprint()}",
            do="load the trained state (model.load_state_dict) first, with the same weights frozen",
        )
    network.signature = config["signature"]
    current = _likelihood(config["likelihood"], likelihood)
    tape = Tape(network, current.canonical)
    tape.sites = [Site.from_config(entry) for entry in config["sites"]]
    tape.general = frozenset(config["general"])
    tape.example_bytes = tuple(config["example_bytes"])
    blocks = build_blocks(config["structure"], tape.sites, config["sharing"], config["memory_budget"])
    for i, block in enumerate(blocks):
        block.load({name: tensors[f"block.{i}.{name}"] for name in block.state()})
    to_device(blocks, network.device)
    curvature = Curvature(
        config["curvature"], tape, blocks, tensors["statistics"].to(network.device), config["n_data"],
        config["fisher_samples"], config["signature"], config["outputs"],
    )  # fmt: skip
    prior = WeightPrior(
        network, tuple(config["labels"]), config["group_of"], tensors["prior.precision"].to(network.device),
        tensors["prior.mean"].to(network.device),
    )  # fmt: skip
    return LaplacePosterior(
        network=network,
        likelihood=current,
        fitted_likelihood=_likelihood(config["fitted_likelihood"], likelihood),
        prior=_prior(prior),
        weight_prior=prior,
        curvature=curvature,
        structure=config["structure"],
        mean=tensors["mean"].to(network.device),
        fingerprint=config["fingerprint"],
        temperature=config["temperature"],
        memory_budget=config["memory_budget"],
        choices=tuple(config["choices"]),
        tuning=Tuning(**config["tuning"]) if config["tuning"] else None,
    )


def _read(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Header and tensors, after checking that the file is whole, unchanged and of a known format."""
    try:
        with safe_open(path, framework="pt") as file:
            header = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except FileNotFoundError as error:
        raise FileError(f"There is no file {path}", do="check the path") from error
    except (SafetensorError, OSError) as error:
        raise FileError(
            f"{path} is not a whole Lapis posterior",
            expected="a complete file written by posterior.save",
            got=str(error),
            do="save it again, or copy it again",
        ) from error
    text = header.get("lapis")
    if text is None or header.get("digest") != _digest(text, tensors):
        raise FileError(
            f"{path} is not an unchanged Lapis posterior",
            expected="contents that match the digest in the file",
            got="no Lapis header" if text is None else "contents that do not",
            do="use the original file",
        )
    config: dict[str, Any] = json.loads(text)
    if config["format"] > FORMAT:
        raise FileError(
            f"{path} was written by a newer Lapis",
            expected=f"format {FORMAT} or older",
            got=f"format {config['format']}",
            do="upgrade Lapis",
        )
    return config, tensors


def _digest(text: str, tensors: dict[str, Tensor]) -> str:
    digest = hashlib.sha256(text.encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"{name}{tuple(tensor.shape)}{tensor.dtype}".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _likelihood(config: dict[str, Any], given: Likelihood | None) -> Likelihood:
    if config["name"] != "custom":
        return from_config(config)
    if given is None:
        raise FileError(
            "The posterior has a custom likelihood, which no file can hold",
            expected="lapis.load(path, model, likelihood=...)",
            got="no likelihood",
            do="pass the lapis.Custom likelihood that it was fitted with",
        )
    return given


def _prior(resolved: WeightPrior) -> Prior:
    """A prior that resolves to the same again."""
    if resolved.group_of is None:
        return Prior(resolved.precision, "weight", resolved.mean)
    members: dict[str, list[str]] = {label: [] for label in resolved.labels}
    for name, group in resolved.group_of.items():
        members[resolved.labels[group]].append(name)
    return Prior(resolved.precision, members, resolved.mean)
