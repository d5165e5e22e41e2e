"""Degrees of homogeneity of tensors in the weights, propagated through every operation of one forward pass.

A tensor has degree d in a set of weights when multiplying these by k > 0 multiplies it by k^d. Products add degrees,
sums need equal ones, relu, pooling and views keep them, roots and powers multiply them, and a norm sets them to 0.
Weights in which the output has degree 0 are scale-free, for every k, up to the epsilon in norms.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

EPSILON = 1e-2
"""An added constant counts as a norm's epsilon when it is at most this fraction of the numbers it is added to."""


@dataclass(frozen=True)
class Broken:
    """The tensor has no degree."""

    why: str
    """The operation that broke homogeneity."""
    known: bool
    """True if that operation is known not to be homogeneous, False if it is merely not in this module's tables."""


Degree = Fraction | Broken
Degrees = dict[int, Degree]
"""Degree by index of the set of weights; missing sets have degree 0, as most tensors depend on few sets."""

ZERO = Fraction(0)


def _set(names: str) -> frozenset[str]:
    return frozenset(names.split())


# Operations of torch's aten library by what they do to degrees.

KEEP = _set(
    """view _unsafe_view _reshape_alias t transpose permute expand repeat squeeze unsqueeze slice select clone detach
    alias unbind split split_with_sizes as_strided unfold diagonal roll flip index index_select gather embedding im2col
    col2im pixel_shuffle reflection_pad1d reflection_pad2d replication_pad2d upsample_nearest1d upsample_nearest2d
    upsample_bilinear2d _to_copy lift_fresh sum mean cumsum amax amin max min median sort topk std linalg_vector_norm
    abs neg relu leaky_relu native_dropout avg_pool2d avg_pool3d _adaptive_avg_pool2d _adaptive_avg_pool3d
    adaptive_max_pool2d max_pool2d_with_indices max_pool3d_with_indices"""
)
POWERS = {"sqrt": Fraction(1, 2), "rsqrt": Fraction(-1, 2), "reciprocal": Fraction(-1), "square": Fraction(2)}
PRODUCTS = _set("mul mm bmm mv dot vdot")
SUMS = _set("add sub rsub cat stack maximum minimum clamp_min")
NORMS = {
    "native_batch_norm": (1, 2), "_native_batch_norm_legit": (1, 2), "_batch_norm_with_update": (1, 2),
    "_native_batch_norm_legit_no_training": (1, 2), "cudnn_batch_norm": (1, 2), "native_group_norm": (1, 2),
    "native_layer_norm": (2, 3), "_fused_rms_norm": (2, None),
}  # fmt: skip
"""Argument indices of a norm's weight and bias."""
CURVED = _set(
    """tanh sigmoid gelu silu exp log log1p expm1 softplus elu selu celu mish erf sin cos _softmax _log_softmax hardtanh
    hardswish hardsigmoid log_sigmoid_forward logsumexp"""
)
"""Functions that are not homogeneous: their result has a degree only if their argument has degree 0."""
MADE = _set(
    "zeros_like ones_like full_like empty_like new_zeros new_ones new_full argmax argmin eq ne gt ge lt le sign"
)
"""Functions whose result does not change with a scale k > 0 of their arguments."""


class Trace(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records degrees while it is active; read them with `of` afterwards.

    Args:
        sets: tensors that are scaled together. A tensor may be in several sets.
    """

    def __init__(self, sets: Sequence[Iterable[Tensor]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        # by id; the tensor is stored too, since an id is unique only while its object is alive
        self.held: dict[int, tuple[Tensor, Degrees]] = {}
        for index, tensors in enumerate(sets):
            for tensor in tensors:
                _, degrees = self.held.setdefault(id(tensor), (tensor, {}))
                degrees[index] = Fraction(1)

    def of(self, tensor: Tensor) -> Degrees:
        """Degrees of a tensor that took part in the pass."""
        entry = self.held.get(id(tensor))
        return {} if entry is None else entry[1]

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = function(*args, **kwargs)
        name = function._schema.name.removeprefix("aten::").removesuffix("_")
        touched = {index for tensor in _tensors([*args, *kwargs.values()]) for index in self.of(tensor)}
        if not touched:
            return result
        degrees = {index: self._degree(name, args, index) for index in touched}
        for position, tensor in enumerate(_tensors([result])):
            own = degrees
            if name == "var" or (name == "var_mean" and position == 0):
                own = {i: d if isinstance(d, Broken) else 2 * d for i, d in degrees.items()}
            self.held[id(tensor)] = (tensor, {i: d for i, d in own.items() if d != 0 or isinstance(d, Broken)})
        return result

    def _degree(self, name: str, args: Sequence[Any], index: int) -> Degree:
        """The degree, in weight set `index`, of the result of operation `name`."""

        def degree(value: Any) -> Degree:
            return self.of(value).get(index, ZERO) if isinstance(value, Tensor) else ZERO

        present = [degree(tensor) for tensor in _tensors(args)]
        for one in present:
            if isinstance(one, Broken):
                return one
        if all(one == 0 for one in present) or name in MADE:
            return ZERO
        if name in KEEP or name in ("var", "var_mean"):
            return degree(next(iter(_tensors(args))))
        if name in POWERS:
            return _times(POWERS[name], degree(args[0]))
        if name == "pow" and isinstance(args[1], (int, float)):
            return _times(Fraction(args[1]).limit_denominator(64), degree(args[0]))
        if name in PRODUCTS:
            return _plus(degree(args[0]), degree(args[1]))
        if name == "div":
            return _plus(degree(args[0]), _times(Fraction(-1), degree(args[1])))
        if name in SUMS:
            return self._sum(_terms(args), index)
        if name in ("addmm", "baddbmm"):
            return _equal([degree(args[0]), _plus(degree(args[1]), degree(args[2]))])
        if name == "convolution":
            product = _plus(degree(args[0]), degree(args[1]))
            return product if args[2] is None else _equal([product, degree(args[2])])
        if name == "_weight_norm_interface":
            return degree(args[1])
        if name == "_prelu_kernel":
            return degree(args[0]) if degree(args[1]) == 0 else Broken("prelu's slope", True)
        if name == "where":
            return self._sum(args[1:], index)
        if name in NORMS:
            weight, bias = NORMS[name]
            scale = degree(args[weight]) if len(args) > weight else ZERO
            shift = args[bias] if bias is not None and len(args) > bias else None
            return scale if shift is None else _equal([scale, degree(shift)])
        return Broken(name, name in CURVED)

    def _sum(self, terms: Sequence[Any], index: int) -> Degree:
        """The common degree of the terms; constants small enough to be an epsilon are left out."""
        tensors = [term for term in terms if isinstance(term, Tensor)]
        found = [self.of(tensor).get(index, ZERO) for tensor in tensors]
        size = min((float(t.detach().abs().double().mean()) for t in tensors if t.is_floating_point()), default=0.0)
        constants = [t for t in terms if isinstance(t, (int, float)) and abs(t) > EPSILON * size]
        return _equal([*found, *([ZERO] if constants else [])])


def _terms(args: Sequence[Any]) -> list[Any]:
    """The terms of a sum: the entries of a list (cat, stack), or the first two arguments."""
    return list(args[0]) if isinstance(args[0], (list, tuple)) else list(args[:2])


def _times(factor: Fraction, degree: Degree) -> Degree:
    return degree if isinstance(degree, Broken) else factor * degree


def _plus(one: Degree, two: Degree) -> Degree:
    if isinstance(one, Broken):
        return one
    return two if isinstance(two, Broken) else one + two


def _equal(degrees: Sequence[Degree]) -> Degree:
    for degree in degrees:
        if isinstance(degree, Broken):
            return degree
    return degrees[0] if len(set(degrees)) == 1 else Broken("a sum with terms that scale otherwise", True)


def _tensors(values: Iterable[Any]) -> Iterable[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)
