"""Concatenation of the latents (distributions of outputs) of consecutive batches, also one after another."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor

from lapis.errors import DataError, ModelError
from lapis.predictions.latent import Latent, LatentGaussian, LatentMixture, LatentSamples
from lapis.ranks import Ranks


def join_latents(parts: Sequence[Latent]) -> Latent:
    """The latents of consecutive batches as the latent of all their examples, in the order given.

    All parts must be of one kind, with outputs of one shape. Sample s of every part must be the output of the same
    network s, so sampled parts have equally many samples; mixtures must have the same weights, and are joined component
    by component. Covariances between the outputs of a position are kept if all parts have them. Joint latents raise
    ModelError: they lack the covariances between examples of different batches.
    """
    if not parts:
        raise DataError("There are no latents to join", expected="at least one", got="none", do="pass some batches")
    gathered = GatheredLatent(sum(part.shape[0] for part in parts))
    for part in parts:
        if part.is_joint:
            _check_alike([part])
        gathered.add(part)
    return gathered.result()


class GatheredLatent:
    """`join_latents` of batches that come one by one, written into tensors that are made for all examples at once.

    So there is no second copy of the result, and no small tensors stay between large ones that are freed, which would
    keep the allocator from using that memory again.

    Args:
        expected: number of examples that will come, if known; memory that is not written to is not taken.
    """

    def __init__(self, expected: int = 0) -> None:
        self._expected, self._done = expected, 0
        self._like: Latent | None = None
        """What came so far: views of `_whole`."""
        self._whole: list[Tensor | None] = []

    def add(self, latent: Latent) -> None:
        """Append the next batch."""
        if self._like is None:
            self._like, self._whole = latent, [tensor for tensor, _ in _pieces(latent)]
            self._done = latent.shape[0]
            return
        _check_joinable(self._like, latent)
        start, self._done = self._done, self._done + latent.shape[0]
        pieces = _pieces(latent)
        for i, (tensor, axis) in enumerate(pieces):
            whole = self._whole[i]
            if whole is None or tensor is None:
                self._whole[i] = None
                continue
            if whole.shape[axis] < self._done:
                room = max(self._expected, self._done, 2 * start if start >= self._expected else 0)
                longer = whole.new_empty(*whole.shape[:axis], room, *whole.shape[axis + 1 :])
                longer.narrow(axis, 0, start).copy_(whole.narrow(axis, 0, start))
                self._whole[i] = whole = longer
            whole.narrow(axis, start, latent.shape[0]).copy_(tensor)
        views = (
            None if whole is None else whole.narrow(axis, 0, self._done)
            for whole, (_, axis) in zip(self._whole, pieces, strict=True)
        )
        self._like = _rebuilt(latent, views, self._done)

    def result(self) -> Latent:
        """The latent of all batches added."""
        assert self._like is not None
        return self._like


def over_ranks(latent: Latent, ranks: Ranks) -> Latent:
    """The latents of the examples of all ranks, one rank after the other."""
    pieces = [None if tensor is None else ranks.gathered(tensor, axis) for tensor, axis in _pieces(latent)]
    return _rebuilt(latent, iter(pieces), sum(ranks.numbers(latent.shape[0])))


def _pieces(latent: Latent) -> list[tuple[Tensor | None, int]]:
    """The tensors of a latent, each with its axis of examples."""
    if isinstance(latent, LatentMixture):
        return [piece for part in latent.parts for piece in _pieces(part)]
    if isinstance(latent, LatentSamples):
        return [(latent.values, 1)]
    return [(latent.mean, 0), (latent.variance, 0), (latent.blocks, 0)]


def _rebuilt(like: Latent, tensors: Iterator[Tensor | None], length: int) -> Latent:
    """A latent of `length` examples with these tensors, in the order of `_pieces`, otherwise like another."""
    if isinstance(like, LatentMixture):
        parts = [_rebuilt(part, tensors, length) for part in like.parts]
        return LatentMixture(tuple(part for part in parts if not isinstance(part, LatentMixture)), like.weights)
    raw_shape = (length, *like.raw_shape[1:])
    first = next(tensors)
    assert first is not None
    if isinstance(like, LatentSamples):
        return LatentSamples(first, raw_shape=raw_shape)
    variance, covariance = next(tensors), next(tensors)
    assert variance is not None
    return LatentGaussian(first, variance, covariance, raw_shape=raw_shape, degrees=like.degrees)


def _check_joinable(one: Latent, other: Latent) -> None:
    """Raise unless the second can be appended to the first."""
    _check_alike([one, other])
    if isinstance(one, LatentMixture) and isinstance(other, LatentMixture):
        _check_equal("weights of the mixtures", [one.weights.tolist(), other.weights.tolist()])
        for pair in zip(one.parts, other.parts, strict=True):
            _check_joinable(*pair)
    if isinstance(one, LatentSamples) and isinstance(other, LatentSamples):
        _check_equal("numbers of sampled networks", [len(one.values), len(other.values)])
    if isinstance(one, LatentGaussian) and isinstance(other, LatentGaussian):
        _check_equal("numbers of draws behind the variances", [one.degrees, other.degrees])


def _check_alike(parts: Sequence[Latent]) -> None:
    """Raise unless all parts are of the first one's kind and shape, and none is joint."""
    if any(part.is_joint for part in parts):
        raise ModelError(
            "Joint latents cannot be joined",
            expected="latents without covariances between examples",
            got="a joint one",
            do="predict all examples in one batch, or without joint",
        )
    kinds = [(type(part).__name__, part.shape[1:], part.raw_shape[1:]) for part in parts]
    message = "{}, (T, C) = {}, raw shape of one example {}"
    for kind in kinds:
        if kind != kinds[0]:
            raise ModelError(
                "Latents of different kinds or shapes cannot be joined",
                expected=message.format(*kinds[0]) + ", as the first",
                got=message.format(*kind),
                do="join the outputs of one network",
            )


def _check_equal(what: str, values: Sequence[object]) -> None:
    for value in values:
        if value != values[0]:
            raise ModelError(
                f"The {what} that are to be joined differ",
                expected=f"{values[0]}, as in the first batch",
                got=str(value),
                do="join the batches of one posterior",
            )
