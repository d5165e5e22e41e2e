"""Saving and loading of posteriors: safetensors files with JSON in the header. Files are data, never code."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lapis.batches import all_finite
from lapis.errors import FileError, OptionError
from lapis.files import DTYPES, read, write
from lapis.likelihoods import Likelihood, from_config
from lapis.network import Network
from lapis.options import check_arguments
from lapis.posteriors.posterior import KINDS, Facts, Posterior, State
from lapis.schema import count, entry, record, sound, wrong

CHOSEN = "network.chosen."
"""Prefix of tensors with the indices of a parameter's chosen entries."""


def save(posterior: Posterior, path: str | os.PathLike[str]) -> None:
    """Write a posterior of any kind to a file."""
    write(path, *pack(posterior), key=_key(type(posterior), posterior.network))


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
    other = [key for key, value in state.tensors.items() if not isinstance(value, Tensor) or value.dtype not in DTYPES]
    try:
        json.dumps(state.config)
    except (TypeError, ValueError) as error:
        other.append(str(error))
    if other:
        raise FileError(
            f"The state of {name} cannot be written",
            expected="tensors of real numbers, and a config of numbers, strings, lists and dictionaries",
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
    check_arguments(load, locals(), apart=("path", "model"))
    contents = read(_path(path))

    def check(kind: type[Posterior], network: Network) -> None:
        contents.check_seal(_key(kind, network))

    return unpack(contents.config, contents.tensors, model, str(path), likelihood, data, check)


def _key(kind: type[Posterior], network: Network) -> str:
    """What a file is sealed with: what only those know who hold the network's weights, unless the file holds them."""
    return "" if kind.holds_networks else network.key()


def _path(path: Any) -> Path:
    try:
        return Path(path)
    except TypeError as error:
        raise FileError("This is no path", expected="a string or a Path", got=repr(path), do="pass one") from error


def unpack(
    config: dict[str, Any],
    tensors: dict[str, Tensor],
    model: nn.Module,
    where: str,
    likelihood: Likelihood | None = None,
    data: Any = None,
    check: Callable[[type[Posterior], Network], None] | None = None,
) -> Posterior:
    """The inverse of `pack`; errors call the file `where`. `check` sees the kind and the network before all else."""
    kind = KINDS.get(entry(config, "posterior", str))
    if kind is None:
        raise FileError(
            f"{where} holds a posterior of an unknown kind",
            expected=", ".join(map(repr, sorted(KINDS))),
            got=repr(config["posterior"]),
            do="import the package that defines this kind first",
        )
    network = _network(model, config, tensors, checked=not kind.holds_networks)
    if check is not None:
        check(kind, network)
    facts = _facts(config)
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
    for name, tensor in held.items():
        if not all_finite(tensor):
            raise wrong(name, "finite numbers", "NaN or infinity")
    state = State(entry(config, "state", dict), held, data)
    with sound(f"{config['posterior']} posterior"):
        meaning = saved_likelihood(entry(config, "likelihood", dict), likelihood)
        if meaning.noise is not None and facts.n_outputs:
            meaning.check_outputs(torch.empty(1, 1, 1).expand(1, 1, facts.n_outputs))
        found = kind.from_state(state, network, meaning, facts)
    unknown = (
        set(tensors) - {f"state.{name}" for name in found.state().tensors} - {CHOSEN + name for name in network.indices}
    )
    if unknown:
        raise wrong(min(unknown), "tensors that such a posterior has", "one that it has not")
    return found


def _facts(config: dict[str, Any]) -> Facts:
    facts = record(Facts, entry(config, "facts", dict))
    for name, least in (("n_data", 0), ("n_outputs", 0), ("memory_budget", 1)):
        count(config["facts"], name, least=least)
    return facts


def _network(model: nn.Module, config: dict[str, Any], tensors: dict[str, Tensor], *, checked: bool) -> Network:
    """The network with the chosen weights of the fit; FileError unless names, shapes and dtype are those of the fit.

    If `checked`, so must be all values.
    """
    shapes, fingerprint = entry(config, "shapes", dict[str, list[int]]), entry(config, "facts", dict).get("fingerprint")
    parameters = dict(Network(model).module.named_parameters())
    for name, shape in ((name, tuple(shape)) for name, shape in shapes.items()):
        if name not in parameters or tuple(parameters[name].shape) != shape:
            raise FileError(
                "The posterior belongs to another network",
                expected=f"a parameter {name!r} of shape {shape}",
                got=f"shape {tuple(parameters[name].shape)}" if name in parameters else "no such parameter",
                do="build the network that the posterior was fitted to",
            )
        dtype, trainable = parameters[name].dtype, parameters[name].requires_grad
        if str(dtype) != entry(config, "dtype", str) or not trainable:
            raise FileError(
                f"The network's {name!r} is not as it was at the fit",
                expected=f"a trainable parameter of {config['dtype']}",
                got=f"a {'trainable' if trainable else 'frozen'} one of {dtype}",
                do="set requires_grad and dtype of the network as they were",
            )
    partly = {name: tensors[CHOSEN + name] for name in shapes if CHOSEN + name in tensors}
    try:
        if partly:
            whole = {name: parameters[name].new_ones(shape).bool() for name, shape in shapes.items()}
            network = Network(model, whole | partly)
        else:
            network = Network(model, lambda name, _: name in shapes)
    except OptionError as error:  # indices that do not fit
        raise wrong("choice of weights", "indices within the parameters", str(error)) from error
    if tuple(network.names) != tuple(shapes):
        raise wrong("shapes", "parameters in the network's order", ", ".join(shapes)[:80])
    if checked and network.fingerprint() != fingerprint:
        fitted, now = entry(config, "digests", dict[str, str]), network.digests()
        changed = next((name for name in {**fitted, **now} if fitted.get(name) != now.get(name)), "the weights")
        raise FileError(
            "The network does not hold the weights that the posterior was fitted to",
            expected="every parameter and buffer as it was at the fit",
            got=f"other values in {changed!r}",
            do="load the trained state (model.load_state_dict) first",
        )
    return network


def moved(posterior: Posterior, device: torch.device, data: Any = None) -> Posterior:
    """The posterior on another device, with a copy of its network, by what a file would hold."""
    config, tensors = pack(posterior)
    config = json.loads(json.dumps(config))
    given = posterior.likelihood if config["likelihood"].get("name") == "custom" else None
    module = copy.deepcopy(posterior.network.module).to(device)
    return unpack(config, tensors, module, "the posterior", given, data)


def copied_module(network: Network, tensors: Mapping[str, Tensor]) -> nn.Module:
    """A copy of the network's module with these parameters and buffers; FileError unless they are those it has."""
    module = copy.deepcopy(network.module)
    own = Network(module).tensors()
    for name in {**own, **tensors}:
        one, two = own.get(name), tensors.get(name)
        if one is None or two is None or one.shape != two.shape or one.dtype != two.dtype:
            raise FileError(
                "The posterior belongs to another network",
                expected=f"no entry {name!r}" if two is None else f"{name!r}: {tuple(two.shape)} of {two.dtype}",
                got="none" if one is None else f"{tuple(one.shape)} of {one.dtype}",
                do="build a network of the architecture that was saved",
            )
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(tensors[name])
    return module


def saved_likelihood(config: dict[str, Any], given: Likelihood | None) -> Likelihood:
    """The likelihood of a file; FileError unless it is the one given, or can be rebuilt."""
    if given is not None:
        if given.to_config() != config:
            raise FileError(
                "This is not the likelihood that the posterior was saved with",
                expected=str(config),
                got=str(given.to_config()),
                do="pass the same likelihood, or none unless it is a lapis.Custom",
            )
        return given
    if config.get("name") == "custom":
        raise FileError(
            "The posterior has a custom likelihood, which no file can hold",
            expected="lapis.load(path, model, likelihood=...)",
            got="no likelihood",
            do="pass the lapis.Custom likelihood that it was fitted with",
        )
    return from_config(config)
