"""Saving and loading of posteriors: safetensors files with JSON in the header. Files are data, never code."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from lapis.errors import FileError
from lapis.files import read, write
from lapis.likelihoods import Likelihood, from_config
from lapis.network import Network
from lapis.posteriors.posterior import KINDS, Facts, Posterior, State

CHOSEN = "network.chosen."
"""Prefix of tensors with the indices of a parameter's chosen entries."""


def save(posterior: Posterior, path: str | os.PathLike[str]) -> None:
    """Write a posterior of any kind to a file."""
    write(path, *pack(posterior))


def pack(posterior: Posterior) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """What a file holds of a posterior: a config that JSON can hold, and tensors."""
    kind = type(posterior).kind
    if KINDS.get(kind) is not type(posterior):
        raise FileError(
            f"Files know no posterior of the class {type(posterior).__name__}",
            expected="a class with a `kind` of its own",
            got=f"kind {kind!r}" if kind else "none",
            do="give the class a unique name: kind: ClassVar[str] = ...",
        )
    state, network = posterior.state(), posterior.network
    config = {
        "posterior": kind,
        "likelihood": posterior.likelihood.to_config(),
        "facts": asdict(posterior.facts),
        "shapes": network.shapes,
        "dtype": str(network.dtype),
        "digests": network.digests(),
        "state": state.config,
    }
    _check_state(state, type(posterior).__name__)
    chosen = {CHOSEN + name: index for name, index in network.indices.items()}
    return config, {f"state.{name}": tensor for name, tensor in state.tensors.items()} | chosen


def _check_state(state: State, name: str) -> None:
    """Refuse a state that no file can hold."""
    other = [key for key, value in state.tensors.items() if not isinstance(value, Tensor)]
    try:
        json.dumps(state.config)
    except (TypeError, ValueError) as error:
        other.append(str(error))
    if other:
        raise FileError(
            f"The state of {name} cannot be written",
            expected="tensors, and a config of numbers, strings, lists and dictionaries that JSON can hold",
            got=other[0],
            do="convert it in state(), and back in from_state()",
        )


def load(
    path: str | os.PathLike[str], model: nn.Module, likelihood: Likelihood | None = None, *, data: Any = None
) -> Posterior:
    """The posterior saved at `path`, for the same network with the same weights.

    Files of ensembles and mixtures hold their networks' weights: any network of the same architecture will do, and is
    copied. `likelihood` is needed only if it is a `Custom` one, whose function no file can hold; `data` only for
    implicit posteriors, which compute with them: the same examples as at the fit, in any order and batches.
    """
    return unpack(*read(Path(path)), model, str(path), likelihood, data)


def unpack(
    config: dict[str, Any],
    tensors: dict[str, Tensor],
    model: nn.Module,
    where: str,
    likelihood: Likelihood | None = None,
    data: Any = None,
) -> Posterior:
    """The inverse of `pack`; errors call the file `where`."""
    kind = KINDS.get(config["posterior"])
    if kind is None:
        raise FileError(
            f"{where} holds a posterior of an unknown kind",
            expected=", ".join(map(repr, sorted(KINDS))),
            got=repr(config["posterior"]),
            do="import the package that defines this kind first",
        )
    network = _network(model, config, tensors, checked=not kind.holds_networks)
    facts = Facts(**config["facts"])
    network.signature = facts.signature
    if (data is not None) != kind.needs_data:
        raise FileError(
            f"A {config['posterior']} posterior needs its data" if kind.needs_data else "The posterior is in its file",
            expected="lapis.load(path, model, data=...)" if kind.needs_data else "no data",
            got="no data" if kind.needs_data else "data",
            do="pass the data of the fit" if kind.needs_data else "leave data out",
        )
    held = {
        name.removeprefix("state."): tensor.to(network.device)
        for name, tensor in tensors.items()
        if name.startswith("state.")
    }
    state = State(config["state"], held, data)
    meaning = _likelihood(config["likelihood"], likelihood)
    try:
        return kind.from_state(state, network, meaning, facts)
    except KeyError as error:
        raise FileError(
            f"{where} does not hold all of a {config['posterior']} posterior",
            expected=f"an entry {error} in its state",
            got="none",
            do="save it again with the same version of its class",
        ) from error


def _network(model: nn.Module, config: dict[str, Any], tensors: dict[str, Tensor], *, checked: bool) -> Network:
    """The network with the chosen weights of the fit; FileError unless names, shapes and dtype are those of the fit.

    If `checked`, so must be all values.
    """
    parameters = dict(Network(model).module.named_parameters())
    for name, shape in ((name, tuple(shape)) for name, shape in config["shapes"].items()):
        if name not in parameters or tuple(parameters[name].shape) != shape:
            raise FileError(
                "The posterior belongs to another network",
                expected=f"a parameter {name!r} of shape {shape}",
                got=f"shape {tuple(parameters[name].shape)}" if name in parameters else "no such parameter",
                do="build the network that the posterior was fitted to",
            )
        dtype, trainable = parameters[name].dtype, parameters[name].requires_grad
        if str(dtype) != config["dtype"] or not trainable:
            raise FileError(
                f"The network's {name!r} is not as it was at the fit",
                expected=f"a trainable parameter of {config['dtype']}",
                got=f"a {'trainable' if trainable else 'frozen'} one of {dtype}",
                do="set requires_grad and dtype of the network as they were",
            )
    partly = {name: tensors[CHOSEN + name] for name in config["shapes"] if CHOSEN + name in tensors}
    if partly:
        whole = {name: parameters[name].new_ones(shape).bool() for name, shape in config["shapes"].items()}
        network = Network(model, whole | partly)
    else:
        network = Network(model, lambda name, _: name in config["shapes"])
    if checked and (
        tuple(network.names) != tuple(config["shapes"]) or network.fingerprint() != config["facts"]["fingerprint"]
    ):
        fitted, now = config["digests"], network.digests()
        changed = next((name for name in {**fitted, **now} if fitted.get(name) != now.get(name)), "the weights")
        raise FileError(
            "The network does not hold the weights that the posterior was fitted to",
            expected="every parameter and buffer as it was at the fit",
            got=f"other values in {changed!r}",
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
