"""A network that the user names: the function that makes it, and a file of its weights, which is only ever data."""

from __future__ import annotations

import importlib
import pickle
import re
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from lapis.errors import FileError, OptionError

MLP = "mlp"
PREFIXES = ("_orig_mod.", "module.")
"""Of names in state dictionaries that torch.compile and DataParallel leave behind."""
NESTED = ("state_dict", "model_state_dict", "model")
"""Names of the state dictionary in a checkpoint."""


def make_network(name: str) -> nn.Module:
    """The module that `package.module:callable` returns; modules are also looked for in the current folder."""
    module_name, _, attribute = name.partition(":")
    if not module_name or not attribute:
        raise _bad(name, "no colon", "--model package.module:callable, or --model mlp")
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise _bad(name, str(error), "a module that Python finds from here") from error
    except Exception as error:  # the user's own code, which may raise anything
        raise _bad(name, _words(error), "a module that can be imported") from error
    try:
        made = getattr(module, attribute)()
    except (AttributeError, TypeError) as error:
        raise _bad(name, str(error), "a function or class that takes no arguments") from error
    except Exception as error:  # the user's own code again
        raise _bad(name, _words(error), "a function that returns a torch.nn.Module") from error
    if not isinstance(made, nn.Module):
        raise _bad(name, type(made).__name__, "a function that returns a torch.nn.Module")
    return made


def _bad(name: str, got: str, expected: str) -> OptionError:
    return OptionError(f"{name!r} gives no model", expected=expected, got=got, do="check the name and the code")


def _words(error: BaseException) -> str:
    """An error's kind and the first line of its message, without the colours of a terminal."""
    first = re.sub(r"\x1b\[[0-9;]*m", "", str(error)).strip().splitlines()
    return f"{type(error).__name__}: {first[0]}" if first else type(error).__name__


def load_weights(model: nn.Module, path: Path) -> None:
    """Load a state dictionary: safetensors, or torch's own format with weights_only. No code in a file is run."""
    state = _read(path)
    for prefix in PREFIXES:
        if state and all(name.startswith(prefix) for name in state):
            state = {name[len(prefix) :]: held for name, held in state.items()}
    own = model.state_dict()
    for name in {**own, **state}:
        one, two = own.get(name), state.get(name)
        if one is None or two is None or tuple(one.shape) != tuple(two.shape):
            raise FileError(
                f"{path} holds the weights of another network",
                expected=f"no entry {name!r}" if one is None else f"{name!r} of shape {tuple(one.shape)}",
                got="none" if two is None else f"shape {tuple(two.shape)}",
                do="build the network that was trained",
            )
    model.load_state_dict(state)


def _read(path: Path) -> dict[str, Tensor]:
    if not path.is_file():
        raise FileError(f"There is no file {path}", expected="weights", got="nothing there", do="check the path")
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found: Any = torch.load(path, map_location="cpu", weights_only=True)
    except (SafetensorError, pickle.UnpicklingError, RuntimeError, LookupError, ValueError, EOFError, OSError) as error:
        # torch reads bytes that are no file of its own as instructions, and fails in many ways; none are run.
        pickled = isinstance(error, pickle.UnpicklingError)
        raise FileError(
            f"{path} holds no weights that can be read safely",
            expected="a state dictionary of tensors: safetensors, or torch.save(model.state_dict(), ...)",
            got="a pickle of something other than tensors, or a damaged file" if pickled else _words(error),
            do="save the state dictionary, not the whole model",
        ) from error
    for name in NESTED:
        if isinstance(found, Mapping) and isinstance(found.get(name), Mapping):
            found = found[name]
    if not isinstance(found, Mapping) or not all(isinstance(held, Tensor) for held in found.values()):
        raise FileError(
            f"{path} holds no state dictionary",
            expected="names and tensors",
            got=type(found).__name__,
            do="save model.state_dict()",
        )
    return dict(found)
