"""Checks of what optimisers are given."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from lapis.errors import OptionError
from lapis.options import check_between, check_count, shown


def check_data_size(size: Any) -> None:
    """Raise unless this is a number of examples."""
    if size is None:
        raise OptionError(
            "The number of training examples is missing",
            expected="data_size, which says how much data the posterior rests on",
            got="none",
            do="pass data_size=len(dataset)",
        )
    check_count("data_size", size)


def check_betas(betas: Any, count: int = 2) -> None:
    """Raise unless these are decay rates from [0, 1)."""
    if not isinstance(betas, (tuple, list)) or len(betas) != count:
        raise OptionError("Bad betas", expected=f"{count} decay rates", got=shown(betas), do="pass such a tuple")
    for beta in betas:
        if beta != 0:
            check_between("betas", beta, 0, 1)


def checked_parameters(params: Any) -> list[Any]:
    """Parameters or groups as a list; OptionError if these are none."""
    if isinstance(params, (nn.Module, Tensor)) or not isinstance(params, Iterable):
        raise OptionError(
            "These are no parameters",
            expected="an iterable of parameters, or of dictionaries with a group of them",
            got=type(params).__name__,
            do="pass model.parameters()",
        )
    found = [{**each, "params": _listed(each.get("params"))} if isinstance(each, dict) else each for each in params]
    if not found:
        raise OptionError("There are no parameters", expected="at least one", got="none", do="pass model.parameters()")
    for each in found:
        for one in each["params"] if isinstance(each, dict) else [each]:
            parameter = one[-1] if isinstance(one, tuple) and one else one  # (name, parameter)
            if not isinstance(parameter, Tensor) or not parameter.is_leaf:
                raise OptionError(
                    "These are no parameters",
                    expected='leaf tensors, or groups of them: {"params": tensors, ...}',
                    got="a result of computations" if isinstance(parameter, Tensor) else shown(one),
                    do="pass model.parameters()",
                )
    return found


def _listed(params: Any) -> list[Any]:
    """The parameters of a group."""
    return list(params) if isinstance(params, Iterable) and not isinstance(params, Tensor) else [params]
