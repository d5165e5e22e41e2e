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
from lapis.evidence import TangentMode, Training, Tuning
from lapis.likelihoods import Likelihood, from_config
from lapis.network import Network, split_vector
from lapis.posteriors.laplace import LaplacePosterior
from lapis.priors import WeightPrior

FORMAT = 1
"""Version of the layout below; readers refuse newer ones."""

TANGENT = ("converged", "remaining", "iterations", "products", "reason")
"""What is told about theta* beside its tensors."""


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
    if posterior.tangent is not None:
        tensors |= {"tangent.weights": posterior.tangent.weights, "tangent.statistics": posterior.tangent.statistics}
    tensors = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    config = {
        "structure": posterior.structure,
        "sharing": next((b.sharing for b in curvature.blocks if hasattr(b, "sharing")), "expand"),
        "likelihood": posterior.likelihood.to_config(),
        "fitted_likelihood": posterior.fitted_likelihood.to_config(),
        "labels": [str(label) for label in prior.labels],
        "group_of": prior.group_of,
        "curvature": curvature.kind,
        "fisher_samples": curvature.fisher_samples,
        "n_data": curvature.n_data,
        "digest": curvature.digest,
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
        "training": posterior.training and asdict(posterior.training),
        "tangent": posterior.tangent and {name: getattr(posterior.tangent, name) for name in TANGENT},
    }
    text = json.dumps(config)
    target = Path(path)
    partial = target.with_name(target.name + f".{os.getpid()}.partial")
    try:
        version = str(FORMAT)
        header = {"format": version, "lapis": text, "digest": _digest(version, text, tensors)}
        save_file(tensors, partial, metadata=header)
        os.replace(partial, target)
    except (OSError, SafetensorError) as error:
        raise FileError(
            f"Cannot write {target}",
            expected="a path in a folder that exists and can be written",
            got=str(error),
            do="choose another path",
        ) from error
    finally:
        with contextlib.suppress(OSError):
            partial.unlink()


def load(path: str | os.PathLike[str], model: nn.Module, likelihood: Likelihood | None = None) -> LaplacePosterior:
    """The posterior saved at `path`, for the same network with the same weights.

    `likelihood` is needed for `Custom` ones only, whose function no file can hold.
    """
    config, tensors = _read(Path(path))
    network = _network(model, config, tensors["mean"])
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
        config["fisher_samples"], config["signature"], config["outputs"], config["digest"],
    )  # fmt: skip
    prior = WeightPrior(
        network, tuple(config["labels"]), config["group_of"], tensors["prior.precision"].to(network.device),
        tensors["prior.mean"].to(network.device),
    )  # fmt: skip
    return LaplacePosterior(
        network=network,
        likelihood=current,
        fitted_likelihood=current if current.name == "custom" else from_config(config["fitted_likelihood"]),
        prior=prior.to_prior(),
        weight_prior=prior,
        curvature=curvature,
        structure=config["structure"],
        mean=tensors["mean"].to(network.device),
        fingerprint=config["fingerprint"],
        temperature=config["temperature"],
        memory_budget=config["memory_budget"],
        choices=tuple(config["choices"]),
        tuning=Tuning(**config["tuning"]) if config["tuning"] else None,
        training=Training(**config["training"]) if config["training"] else None,
        tangent=config["tangent"]
        and TangentMode(
            weights=tensors["tangent.weights"].to(network.device),
            statistics=tensors["tangent.statistics"].to(network.device),
            **config["tangent"],
        ),
    )


def _network(model: nn.Module, config: dict[str, Any], mean: Tensor) -> Network:
    """The model seen as the network that was fitted, once it is certain that it is."""
    parameters = dict(Network(model).module.named_parameters())
    shapes = {name: tuple(shape) for name, shape in config["shapes"].items()}
    for name, shape in shapes.items():
        if name not in parameters or tuple(parameters[name].shape) != shape:
            raise FileError(
                "The posterior belongs to another network",
                expected=f"a parameter {name!r} of shape {shape}",
                got=f"shape {tuple(parameters[name].shape)}" if name in parameters else "no such parameter",
                do="build the network that the posterior was fitted to",
            )
        dtype, trainable = parameters[name].dtype, parameters[name].requires_grad
        if dtype != mean.dtype or not trainable:
            raise FileError(
                f"The network's {name!r} is not as it was at the fit",
                expected=f"a trainable parameter of {mean.dtype}",
                got=f"a {'trainable' if trainable else 'frozen'} one of {dtype}",
                do="set requires_grad and dtype of the network as they were",
            )
    network = Network(model, lambda name, _: name in shapes)
    if tuple(network.names) != tuple(shapes) or network.fingerprint() != config["fingerprint"]:
        fitted = split_vector(mean.to(network.device), shapes)
        changed = next((name for name in shapes if not torch.equal(fitted[name], parameters[name])), None)
        raise FileError(
            "The network does not hold the weights that the posterior was fitted to",
            expected="every parameter and buffer as it was at the fit",
            got=f"other values in {changed or 'a parameter or buffer that is not uncertain'!r}",
            do="load the trained state (model.load_state_dict) first",
        )
    return network


def _read(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Header and tensors, after checking that the file is whole, unchanged and of a known format."""
    try:
        with safe_open(path, framework="pt") as file:
            header = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except FileNotFoundError as error:
        raise FileError(
            f"There is no file {path}",
            expected="a file written by posterior.save",
            got="nothing at that path",
            do="check the path",
        ) from error
    except (SafetensorError, OSError) as error:
        raise FileError(
            f"{path} is not a whole Lapis posterior",
            expected="a complete file written by posterior.save",
            got=str(error),
            do="save it again, or copy it again",
        ) from error
    text = header.get("lapis", "")
    version = header.get("format", "")
    if version.isdecimal() and int(version) > FORMAT:
        raise FileError(
            f"{path} was written by a newer Lapis",
            expected=f"format {FORMAT} or older",
            got=f"format {version}",
            do="upgrade Lapis",
        )
    if header.get("digest") != _digest(version, text, tensors):
        raise FileError(
            f"{path} is not an unchanged Lapis posterior",
            expected="contents that match the digest in the file",
            got="contents that do not" if text else "a file of another kind",
            do="use the original file",
        )
    config: dict[str, Any] = json.loads(text)
    return config, tensors


def _digest(version: str, text: str, tensors: dict[str, Tensor]) -> str:
    digest = hashlib.sha256(f"{version} {text}".encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"{name}{tuple(tensor.shape)}{tensor.dtype}".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _likelihood(config: dict[str, Any], given: Likelihood | None) -> Likelihood:
    if given is not None:
        if given.to_config() != config:
            raise FileError(
                "This is not the likelihood that the posterior was saved with",
                expected=str(config),
                got=str(given.to_config()),
                do="pass the same likelihood, or none unless it is a lapis.Custom",
            )
        return given
    if config["name"] == "custom":
        raise FileError(
            "The posterior has a custom likelihood, which no file can hold",
            expected="lapis.load(path, model, likelihood=...)",
            got="no likelihood",
            do="pass the lapis.Custom likelihood that it was fitted with",
        )
    return from_config(config)
