"""Posteriors in files: safetensors for numbers, JSON in its header for the rest. Files are data, never code."""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lapis.batches import batches
from lapis.curvature.blocks.partition import build_blocks
from lapis.curvature.products.ggn import ImplicitCurvature
from lapis.curvature.recording.sites import Plan, Site
from lapis.curvature.sums import Curvature
from lapis.curvature.tape import ExampleBytes, Tape
from lapis.errors import FileError
from lapis.evidence import TangentMode, Training, Tuning
from lapis.likelihoods import Likelihood, from_config
from lapis.network import Network, split_vector
from lapis.posteriors.base import GaussianPosterior, Posterior
from lapis.posteriors.files import read, write
from lapis.posteriors.laplace.drawn import Drawing, DrawnPosterior
from lapis.posteriors.laplace.implicit import ImplicitPosterior, Solver
from lapis.posteriors.laplace.stored import LaplacePosterior
from lapis.priors import WeightPrior

TANGENT = ("converged", "remaining", "iterations", "products", "reason")
"""What is told about theta* beside its tensors."""


def save(posterior: Posterior, path: str | os.PathLike[str]) -> None:
    """Write the posterior to a file, whatever its kind."""
    prior = posterior.weight_prior
    tensors = {"mean": posterior.mean, "prior.precision": prior.precision, "prior.mean": prior.mean}
    if prior.scales is not None:
        tensors["prior.scales"] = prior.scales
    config: dict[str, Any] = {
        "structure": posterior.structure,
        "likelihood": posterior.likelihood.to_config(),
        "fitted_likelihood": posterior.fitted_likelihood.to_config(),
        "labels": [str(label) for label in prior.labels],
        "group_of": prior.group_of,
        "n_data": posterior.n_data,
        "outputs": posterior.n_outputs,
        "signature": posterior.signature,
        "shapes": posterior.network.shapes,
        "fingerprint": posterior.fingerprint,
        "temperature": posterior.temperature,
        "memory_budget": posterior.memory_budget,
    }
    if isinstance(posterior, DrawnPosterior):
        tensors["deviations"] = posterior.deviations
        config["drawing"] = asdict(posterior.drawing)
    if isinstance(posterior, GaussianPosterior):
        curvature, tangent = posterior.curvature, posterior.tangent
        tensors["statistics"] = curvature.statistics
        config |= {
            "digest": curvature.digest,
            "tuning": posterior.tuning and asdict(posterior.tuning),
            "tangent": tangent and {name: getattr(tangent, name) for name in TANGENT},
        }
        if tangent is not None:
            tensors |= {"tangent.weights": tangent.weights, "tangent.statistics": tangent.statistics}
    if isinstance(posterior, ImplicitPosterior):
        solver = posterior.solver
        config["solver"] = {"space": solver.space, "tolerance": solver.tolerance, "iterations": solver.max_iterations}
    if isinstance(posterior, LaplacePosterior):
        sums = posterior.curvature
        tensors |= {f"block.{i}.{name}": t for i, block in enumerate(sums.blocks) for name, t in block.state().items()}
        config |= {
            "sharing": "expand",
            "bias": "joint",
            **{name: choice for block in sums.blocks for name, choice in block.options().items()},
            "curvature": sums.kind,
            "fisher_samples": sums.fisher_samples,
            "example_bytes": sums.tape.example_bytes,
            "sites": [site.to_config() for site in sums.tape.plan.sites],
            "general": sorted(sums.tape.plan.general),
            "choices": posterior.choices,
            "training": posterior.training and asdict(posterior.training),
        }
    write(path, config, tensors)


def load(
    path: str | os.PathLike[str], model: nn.Module, likelihood: Likelihood | None = None, *, data: Any = None
) -> Posterior:
    """The posterior saved at `path`, for the same network with the same weights.

    `likelihood` is needed for `Custom` ones only, whose function no file can hold; `data` for implicit posteriors only,
    which are their data: the same examples as at the fit, in any order and batches.
    """
    config, tensors = read(Path(path))
    network = _network(model, config, tensors["mean"])
    network.signature = config["signature"]
    tensors = {name: tensor.to(network.device) for name, tensor in tensors.items()}
    current = _likelihood(config["likelihood"], likelihood)
    implicit = config["structure"] == "implicit"
    if (data is None) == implicit:
        raise FileError(
            "An implicit posterior needs its data" if implicit else "The posterior is in its file",
            expected="lapis.load(path, model, data=...)" if implicit else "no data",
            got="no data" if implicit else "data",
            do="pass the data of the fit" if implicit else "leave data out",
        )
    prior = WeightPrior(
        network, tuple(config["labels"]), config["group_of"], tensors["prior.precision"], tensors["prior.mean"],
        tensors.get("prior.scales"),
    )  # fmt: skip
    common: dict[str, Any] = {
        "network": network,
        "likelihood": current,
        "fitted_likelihood": current if current.name == "custom" else from_config(config["fitted_likelihood"]),
        "prior": prior.to_prior(),
        "weight_prior": prior,
        "mean": tensors["mean"],
        "structure": config["structure"],
        **{name: config[name] for name in ("fingerprint", "temperature", "memory_budget")},
    }
    if config["structure"] == "drawn":
        return DrawnPosterior(
            deviations=tensors["deviations"],
            drawing=Drawing(**config["drawing"]),
            examples=config["n_data"],
            width=config["outputs"],
            seen=config["signature"],
            **common,
        )
    common["tuning"] = Tuning(**config["tuning"]) if config["tuning"] else None
    common["tangent"] = config["tangent"] and TangentMode(
        weights=tensors["tangent.weights"], statistics=tensors["tangent.statistics"], **config["tangent"]
    )
    if implicit:
        solver = Solver(config["solver"]["space"], config["solver"]["tolerance"], config["solver"]["iterations"])
        return ImplicitPosterior(curvature=_data(config, common, data), solver=solver, **common)
    return LaplacePosterior(
        curvature=_sums(config, tensors, network, current),
        choices=tuple(config["choices"]),
        training=Training(**config["training"]) if config["training"] else None,
        **common,
    )


def _sums(config: dict[str, Any], tensors: dict[str, Tensor], network: Network, likelihood: Likelihood) -> Curvature:
    """Curvature blocks, and the tape that they belong to."""
    tape = Tape(network, likelihood.canonical)
    sites = tuple(Site.from_config(entry) for entry in config["sites"])
    tape.plan = Plan(sites, frozenset(config["general"]))
    tape.example_bytes = ExampleBytes(*config["example_bytes"])
    # files without an entry for the bias list a bias of its own as a site of its own
    bias = config.get("bias", "joint")
    blocks = build_blocks(config["structure"], sites, config["sharing"], bias, config["memory_budget"])
    for i, block in enumerate(blocks):
        block.load({name: tensors[f"block.{i}.{name}"] for name in block.state()})
    return Curvature(
        config["curvature"], tape, blocks, tensors["statistics"], config["n_data"], config["fisher_samples"],
        config["signature"], config["outputs"], config["digest"],
    )  # fmt: skip


def _data(config: dict[str, Any], common: dict[str, Any], data: Any) -> ImplicitCurvature:
    """The GGN of the data given, once it is certain that they are those of the fit."""
    network = common["network"]
    stream, _ = batches(data, dtype=network.dtype, device=network.device)
    found = ImplicitCurvature(
        network, common["fitted_likelihood"], list(stream), config["signature"], config["memory_budget"]
    )
    if found.digest != config["digest"]:
        raise FileError(
            "These are not the data that the posterior was fitted to",
            expected=f"{config['n_data']} examples with fingerprint {config['digest']:016x}",
            got=f"{found.n_data} with {found.digest:016x}",
            do="pass the training data of the fit (without random augmentation)",
        )
    return found


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
