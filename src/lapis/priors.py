"""Gaussian priors over weights: a mean, and one precision for each group of weights.

A `Prior` is what users write; `Prior.resolve` checks it against a network and returns the `WeightPrior` that posteriors
compute with.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any, TypeAlias

import torch
from torch import Tensor

from lapis.batches import all_finite
from lapis.errors import DataError, PriorError
from lapis.network import Network
from lapis.normalised import find_normalised
from lapis.options import UNREADABLE, check_arguments, checked_tensor, shown
from lapis.schema import entry, tensor, wrong

Groups: TypeAlias = str | Mapping[str, str | Sequence[str]] | Callable[[str], str]
"""How weights share precisions: "one", "layer", "parameter", "weight"; "normalised" (each layer that a normalisation
makes scale-free has its own, all others share one); a mapping from group names to parameter name patterns; or a
function from a parameter's name to its group."""

_ALIASES = {"tensor": "parameter", "single": "one", "per_layer": "layer", "per_parameter": "parameter"}


@dataclass(frozen=True)
class Prior:
    """N(mean, diag(precision)^-1), not yet bound to a network.

    Args:
        precision: one number for all groups, a vector with one entry per group, or a mapping from group names. With
            groups="weight" a vector over all weights. May require grad: the evidence is differentiable in it.
        groups: see `Groups`. A group is named after its layer or parameter.
        mean: a number, a flat vector (P,), or a dictionary of parameters.
        scales: fixed positive factors (P,) that multiply the weights' precisions; tuning changes the groups'
            precisions only. `ImplicitPosterior.g_prior` returns such a prior.

    >>> Prior(0.1, groups="layer")
    Prior(precision=0.1, groups='layer', mean=0.0)
    """

    precision: float | Tensor | Sequence[float] | Mapping[str, float | Tensor] = 1.0
    groups: Groups = "one"
    mean: float | Tensor | Mapping[str, Tensor] = 0.0
    scales: Tensor | None = field(default=None, repr=False)

    def resolve(self, network: Network) -> WeightPrior:
        """The prior of this network's chosen weights, after every check."""
        check_arguments(Prior.resolve, locals())
        labels, group_of = _group(self.groups, network)
        count = network.size if group_of is None else len(labels)
        precision = _precisions(self.precision, labels, count)
        lowest, highest = map(float, torch.aminmax(precision.detach()))
        if not 0 < lowest <= highest < math.inf:
            raise PriorError(
                "A prior precision is out of range",
                expected="finite positive precisions",
                got=", ".join(f"{value:.3g}" for value in sorted(set(precision.detach().tolist()))[:5]),
                do="use a small positive number for a wide prior",
            )
        mean, scales = _mean(self.mean, network), _scales(self.scales, network)
        return WeightPrior(network, labels, group_of, precision.to(network.device), mean, scales)


@dataclass(frozen=True)
class WeightPrior:
    """A prior over the weights of one network.

    `precision` has one float64 entry per group; `group_of` maps parameter names to groups, and is None when every
    weight is its own group. `mean` is 0-d or (P,), float64. A weight's precision is its group's, times its entry of
    `scales` (P,) unless that is None.
    """

    network: Network
    labels: tuple[str, ...]
    group_of: Mapping[str, int] | None
    precision: Tensor
    mean: Tensor
    scales: Tensor | None = None
    _latest: list[tuple[Tensor, Tensor]] = field(default_factory=list, repr=False, compare=False)
    """Cache of `squared_distance`: weights and result. Shared by priors that differ in precision only."""

    def of(self, name: str) -> Tensor:
        """Precision of a parameter: 0-d, or one entry per weight (flat)."""
        precision = self.precision[self.span(name) if self.group_of is None else self.group_of[name]]
        return precision if self.scales is None else precision * self.scales[self.span(name)]

    def vector(self) -> Tensor:
        """Precision of every weight, (P,)."""
        vector = self.precision
        if self.group_of is not None:
            names, sizes = self.network.names, self.network.sizes
            vector = torch.cat([vector[self.group_of[name]].expand(sizes[name]) for name in names])
        return vector if self.scales is None else vector * self.scales

    def group_index(self) -> Tensor:
        """Group of every weight, (P,)."""
        if self.group_of is None:
            return torch.arange(self.network.size, device=self.precision.device)
        sizes = torch.tensor([self.network.sizes[name] for name in self.network.names])
        groups = torch.tensor([self.group_of[name] for name in self.network.names])
        return torch.repeat_interleave(groups, sizes).to(self.precision.device)

    def sizes(self) -> Tensor:
        """Number of weights in each group."""
        if self.group_of is None:
            return torch.ones_like(self.precision)
        sizes = [0] * len(self.labels)
        for name, group in self.group_of.items():
            sizes[group] += self.network.sizes[name]
        return torch.tensor(sizes, dtype=torch.float64, device=self.precision.device)

    def squared_distance(self, weights: Tensor) -> Tensor:
        """|t - mean|^2 within each group for weights t (P,), weighted by `scales`.

        The latest result is cached: tuning evaluates the same weights under many precisions.
        """
        for known, found in self._latest:  # one pair at most, which other threads may replace
            if known is weights:
                return found
        squares = (weights.double() - self.mean).square()
        if self.scales is not None:
            squares = squares * self.scales
        if len(self.labels) == 1 and self.group_of is not None:
            squares = squares.sum().reshape(1)
        elif self.group_of is not None:
            squares = torch.stack(
                [
                    sum((squares[self.span(name)].sum() for name in self._members(group)), squares.new_zeros(()))
                    for group in range(len(self.labels))
                ]
            )
        self._latest[:] = [(weights, squares)]
        return squares

    def logdet(self) -> Tensor:
        """log |Lambda|, with Lambda = diag(precision of every weight)."""
        logdet = (self.sizes() * self.precision.log()).sum()
        return logdet if self.scales is None else logdet + self.scales.log().sum()

    def with_precision(self, precision: Tensor) -> WeightPrior:
        return replace(self, precision=precision)

    def typical_of(self, weights: Tensor) -> WeightPrior:
        """The prior with precisions P_g / |t_g - m_g|^2, under which t (P,) is a typical draw; 1 where t_g is m_g.

        A start for tuning that follows the weights' scale.
        """
        ratio = self.sizes() / self.squared_distance(weights)
        return self.with_precision(torch.where(torch.isfinite(ratio), ratio, torch.ones_like(ratio)))

    def differs_in_precision_only(self, other: WeightPrior) -> bool:
        same = self.labels == other.labels and self.group_of == other.group_of
        if not same or not torch.equal(self.mean, other.mean):
            return False
        if self.scales is None or other.scales is None:
            return self.scales is other.scales
        return torch.equal(self.scales, other.scales)

    def to_prior(self) -> Prior:
        """A `Prior` that resolves to this one, with each group's parameters listed by name."""
        if self.group_of is None:
            return Prior(self.precision, "weight", self.mean, self.scales)
        groups = {label: self._members(i) for i, label in enumerate(self.labels)}
        return Prior(self.precision, groups, self.mean, self.scales)

    def tensors(self) -> dict[str, Tensor]:
        """Its tensors, for a file."""
        scales = {} if self.scales is None else {"prior.scales": self.scales}
        return {"prior.precision": self.precision, "prior.mean": self.mean, **scales}

    def config(self) -> dict[str, Any]:
        """What else a file holds of it."""
        return {"labels": [str(label) for label in self.labels], "group_of": self.group_of}

    @staticmethod
    def from_file(config: Mapping[str, Any], tensors: Mapping[str, Tensor], network: Network) -> WeightPrior:
        """The prior with these `config` and `tensors`; FileError unless it is one of this network's weights."""
        labels = tuple(entry(config, "labels", tuple[str, ...]))
        group_of = entry(config, "group_of", dict[str, int] | None)
        if group_of is not None:
            known = tuple(group_of) == network.names and all(0 <= group < len(labels) for group in group_of.values())
            if not known or set(group_of.values()) != set(range(len(labels))):
                raise wrong("group_of", "one of the groups for each parameter", str(group_of)[:80])
        count = network.size if group_of is None else len(labels)
        precision = tensor(tensors, "prior.precision", (count,), least=0, above=True)
        vector = "prior.mean" in tensors and tensors["prior.mean"].dim() > 0
        mean, scales = tensor(tensors, "prior.mean", (network.size,) if vector else ()), None
        if "prior.scales" in tensors:
            scales = tensor(tensors, "prior.scales", (network.size,), least=0, above=True)
        return WeightPrior(network, labels, group_of, precision, mean, scales)

    def _members(self, group: int) -> list[str]:
        assert self.group_of is not None
        return [name for name, index in self.group_of.items() if index == group]

    def span(self, name: str) -> slice:
        """Slice of a parameter in the flat vector of weights."""
        return self.network.span(name)


def as_prior(prior: Any) -> Prior:
    """A `Prior` from what users pass: a number is one precision for all weights."""
    if isinstance(prior, Prior):
        return prior
    if isinstance(prior, (int, float, Tensor)) and not isinstance(prior, bool):
        return Prior(prior)
    raise PriorError(
        "This is no prior",
        expected="a lapis.Prior or a precision",
        got=repr(prior),
        do="pass a number, as in prior=1.0, or lapis.Prior(precision, groups=..., mean=...)",
    )


def _group(groups: Groups, network: Network) -> tuple[tuple[str, ...], dict[str, int] | None]:
    """Group labels, and the group index of each parameter (None when every weight is its own group)."""
    if isinstance(groups, str):
        groups = _ALIASES.get(groups, groups)
        if groups == "weight":
            return ("weight",), None
        if groups == "normalised":
            return _group(find_normalised(network, network.example), network)
        names: dict[str, Callable[[str], str]] = {
            "one": lambda _: "all",
            "layer": layer_of,
            "parameter": lambda name: name,
        }
        if groups not in names:
            raise PriorError(
                "Unknown grouping of the prior",
                expected='"one", "layer", "parameter", "weight", "normalised", a mapping of patterns, or a function',
                got=repr(groups),
                do="choose one of these",
            )
        label_of = names[groups]
    elif isinstance(groups, Mapping):
        label_of = _pattern_labels(groups, network)
    elif callable(groups):
        label_of = groups
    else:
        raise PriorError(
            "This is no grouping of the prior",
            expected="a name, a mapping from group names to patterns, or a function from a parameter's name to a group",
            got=repr(groups),
            do='pass groups="layer", or groups={"head": "head.*", "rest": ["0.*", "2.*"]}',
        )
    assigned = {name: label_of(name) for name in network.names}
    labels = tuple(dict.fromkeys(groups)) if isinstance(groups, Mapping) else tuple(dict.fromkeys(assigned.values()))
    return labels, {name: labels.index(label) for name, label in assigned.items()}


def _pattern_labels(groups: Mapping[str, str | Sequence[str]], network: Network) -> Callable[[str], str]:
    """A function from a parameter's name to the one group whose patterns match it."""
    labels_of: dict[str, list[str]] = {name: [] for name in network.names}
    for label, patterns in groups.items():
        if not isinstance(patterns, str) and not (
            isinstance(patterns, Sequence) and all(isinstance(each, str) for each in patterns)
        ):
            raise PriorError(
                f"The group {label!r} has no patterns",
                expected="a pattern of names, or a sequence of patterns",
                got=repr(patterns),
                do='pass, for example, groups={"head": "head.*", "rest": ["0.*", "2.*"]}',
            )
        for name in network.names:
            listed = [patterns] if isinstance(patterns, str) else patterns
            if any(fnmatchcase(name, pattern) or name.startswith(pattern + ".") for pattern in listed):
                labels_of[name].append(label)
    wrong = [name for name, labels in labels_of.items() if len(labels) != 1]
    empty = [label for label in groups if not any(label in labels for labels in labels_of.values())]
    if wrong or empty:
        raise PriorError(
            "The groups do not partition the weights",
            expected="every parameter in exactly one group, every group with a parameter",
            got=f"{wrong[0]!r} in {len(labels_of[wrong[0]])} groups"
            if wrong
            else f"group {empty[0]!r} without parameters",
            do="mend the patterns",
        )
    return lambda name: labels_of[name][0]


def layer_of(name: str) -> str:
    """The layer that a parameter belongs to: its module's name."""
    return name.split(".parametrizations.")[0] if ".parametrizations." in name else name.rpartition(".")[0] or name


def _numbers(value: Any, what: str) -> Tensor:
    try:
        tensor = checked_tensor(what, torch.as_tensor(value))
        return tensor if tensor.dtype == torch.float64 else torch.as_tensor(value, dtype=torch.float64)
    except (*UNREADABLE, DataError) as error:
        raise PriorError(
            f"The {what} is no number",
            expected="a number, or a tensor or list of numbers",
            got=shown(value),
            do="pass numbers",
        ) from error


def _precisions(value: Any, labels: tuple[str, ...], count: int) -> Tensor:
    if isinstance(value, Mapping):
        if len(labels) != count:
            raise PriorError(
                "A prior precision for every weight has no group names",
                expected=f"one number, or a flat vector of {count}",
                got="a mapping with " + ", ".join(map(repr, value)),
                do='order the precisions as the network\'s named_parameters(), or use groups="parameter"',
            )
        if set(value) != set(labels):
            raise PriorError(
                "The precisions do not name the groups",
                expected=", ".join(map(str, labels)),
                got=", ".join(map(str, value)),
                do="give one precision for each group",
            )
        values = [_numbers(value[label], f"prior precision of {label!r}") for label in labels]
        wrong = [label for label, precision in zip(labels, values, strict=True) if precision.numel() != 1]
        if wrong:
            raise PriorError(
                f"The group {wrong[0]!r} has more than one prior precision",
                expected="one number for each group",
                got=f"shape {tuple(values[labels.index(wrong[0])].shape)}",
                do='make smaller groups, or use groups="weight" with a flat vector',
            )
        return torch.stack([precision.reshape(()) for precision in values])
    tensor = _numbers(value, "prior precision")
    if tensor.dim() == 0 or (tensor.dim() == 1 and tensor.numel() == 1):
        return tensor.reshape(1).expand(count)
    if tuple(tensor.shape) != (count,):
        raise PriorError(
            "The precisions do not fit the groups",
            expected="one number" + (f", or {count} of them" if count > 1 else ""),
            got=f"shape {tuple(tensor.shape)}",
            do="give one precision for each group",
        )
    return tensor


def _scales(value: Any, network: Network) -> Tensor | None:
    if value is None:
        return None
    scales = _numbers(value, "scales of the prior").to(network.device)
    if tuple(scales.shape) != (network.size,) or not bool((torch.isfinite(scales) & (scales > 0)).all()):
        raise PriorError(
            "The prior's scales do not fit the weights",
            expected=f"a vector ({network.size},) of finite positive numbers",
            got=f"shape {tuple(scales.shape)}, from {float(scales.min()):.3g}" if scales.numel() else "nothing",
            do="order them as the network's named_parameters()",
        )
    return scales


def _mean(value: Any, network: Network) -> Tensor:
    if isinstance(value, Mapping):
        parts = {name: _numbers(part, f"prior mean of {name!r}") for name, part in value.items()}
        for name, shape in network.shapes.items():
            if name not in parts or tuple(parts[name].shape) != shape:
                raise PriorError(
                    "The prior mean does not fit the weights",
                    expected=f"{name!r} of shape {shape}",
                    got=f"shape {tuple(parts[name].shape)}" if name in parts else "no such entry",
                    do="pass a dictionary with every chosen parameter",
                )
        value = torch.cat([network.pick(name, parts[name].reshape(-1)) for name in network.names])
    mean = _numbers(value, "prior mean").to(network.device)
    fits = mean.dim() == 0 or tuple(mean.shape) == (network.size,)
    if not fits or not all_finite(mean):
        raise PriorError(
            "The prior mean does not fit the weights",
            expected=f"a finite number, or a finite vector ({network.size},)",
            got="a value that is not finite" if fits else f"shape {tuple(mean.shape)}",
            do="order it as the network's named_parameters()",
        )
    return mean
