"""Split conformal prediction: sets and intervals that hold the target with a stated probability, whatever the model.

Scores s(x, y) measure how badly a target fits its prediction. Of n calibration examples, exchangeable with the new one,
the quantile q is the k-th smallest score with k = ceil((n + 1) coverage), and {y : s(x, y) <= q} holds the new target
with probability at least `coverage`, over draws of the calibration data and the new example together (Vovk et al.
2005). The guarantee is marginal: an average over inputs, not one for each input. How the sets vary with x is the
posterior's doing, through the score; a better posterior gives smaller sets, not more coverage.
"""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from lapis.batches import batches, digest, naming
from lapis.errors import DataError, FileError, LikelihoodError, OptionError
from lapis.files import read, tensors_digest, write
from lapis.likelihoods import Categorical
from lapis.options import check_arguments, check_between, check_choice
from lapis.predictions import ClassificationPrediction, CountPrediction, NumericPrediction, Prediction
from lapis.progress import track
from lapis.schema import entry, sound, tensor, word, wrong

if TYPE_CHECKING:
    from lapis.posteriors.posterior import Posterior

Score = Literal["deviation", "probability", "cumulative"]
SCORES: dict[str, tuple[Score, ...]] = {
    "regression": ("deviation",),
    "count": ("deviation",),
    "classification": ("probability", "cumulative"),
}
"""Scores by the likelihood's kind, the default first."""

KIND = "conformal calibration"

IGNORED = math.nan
"""Score of a target that does not count (`ignore_index`)."""


@dataclass(frozen=True, eq=False)
class ConformalIntervals:
    """Intervals of real targets or counts, in the layout of the network's outputs."""

    lower: Tensor
    upper: Tensor
    coverage: float
    prediction: Prediction


@dataclass(frozen=True, eq=False)
class ConformalSets:
    """Sets of classes, never empty: the most probable class is always a member."""

    members: Tensor
    """Booleans laid out as `probs`; of yes-or-no labels with a last axis (no, yes)."""
    size: Tensor
    """Members of each set, (B, *positions), or in the layout of the labels."""
    coverage: float
    prediction: ClassificationPrediction


@dataclass(frozen=True, eq=False, repr=False)
class Conformal:
    """A posterior with the scores of its calibration examples: see `Posterior.conformal`."""

    posterior: Posterior
    score: Score
    scores: Tensor
    """Sorted along the first axis, float64: (n, T, L) for T positions with L targets, or (n, 1, 1) if simultaneous."""
    counts: Tensor
    """Scores that count, (T, L) or (1, 1): ignored ones, last in `scores`, do not."""
    simultaneous: bool
    options: dict[str, Any]
    """How the posterior predicts."""

    @property
    def n_data(self) -> int:
        """Calibration examples."""
        return len(self.scores)

    def __repr__(self) -> str:
        together = ", simultaneous" if self.simultaneous else ""
        return f"<Conformal, {self.n_data:,} calibration examples, score {self.score!r}{together}>"

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the scores to a file, for `Conformal.load`; the posterior has its own (`posterior.save`)."""
        check_arguments(Conformal.save, locals())
        config = {
            "score": self.score, "simultaneous": self.simultaneous, "options": self.options,
            "posterior": _fingerprint(self.posterior),
        }  # fmt: skip
        tensors = {"scores": self.scores.nan_to_num(), "counts": self.counts}
        write(path, config, tensors, kind=KIND, key=self.posterior.network.key())

    @staticmethod
    def load(path: str | os.PathLike[str], posterior: Posterior) -> Conformal:
        """The calibration saved at `path`, of the same posterior: another one has other scores."""
        check_arguments(Conformal.load, locals(), apart=("posterior",))
        contents = read(Path(path), KIND)
        if entry(contents.config, "posterior", str) != _fingerprint(posterior):
            raise FileError(
                f"{path} is the calibration of another posterior",
                expected="the posterior that was calibrated, tuned as it was then",
                got="other numbers",
                do="load the posterior that was saved with it, or calibrate this one",
            )
        contents.check_seal(posterior.network.key())
        with sound(KIND):
            config = contents.config
            score: Any = word(config, "score", SCORES[posterior.likelihood.kind])
            options = entry(config, "options", dict[str, str | int | None])
            if set(options) != {"method", "link", "samples"}:
                raise wrong("options", "method, link and samples", ", ".join(options))
            held = tensor(contents.tensors, "scores", (-1, -1, -1), least=0)
            counts = tensor(contents.tensors, "counts", held.shape[1:], torch.int64)
            places = torch.arange(len(held)).reshape(-1, 1, 1)
            scores = torch.where(places < counts, held, IGNORED)
            if not torch.equal(scores.sort(0).values.nan_to_num(), scores.nan_to_num()):
                raise wrong("scores", "scores in order", "others")
            counts = (~scores.isnan()).sum(0)
            return Conformal(posterior, score, scores, counts, entry(config, "simultaneous", bool), options)

    def quantile(self, coverage: float = 0.9) -> Tensor:
        """The k-th smallest of n scores, k = ceil((n + 1) coverage): (T, L), or (1, 1) if simultaneous."""
        check_between("coverage", coverage, 0, 1)
        wanted = Fraction(str(coverage))  # as written: 0.55 is not the float above it
        needed, least = math.ceil(wanted / (1 - wanted)), int(self.counts.min())
        if least < needed:
            raise DataError(
                f"There are too few calibration examples for a coverage of {coverage:g}",
                expected=f"{needed} at least, n >= coverage / (1 - coverage)",
                got=f"{least}",
                do=f"pass more calibration data, or ask for a coverage of {least / (least + 1):.4g} at most",
            )
        places = [math.ceil((count + 1) * wanted) - 1 for count in self.counts.flatten().tolist()]
        index = torch.tensor(places).reshape(1, *self.counts.shape)
        return self.scores.gather(0, index)[0]

    def predict(
        self, x: Any, coverage: float = 0.9, *, progress: bool | None = None
    ) -> ConformalIntervals | ConformalSets:
        """Intervals or sets that hold the targets at `x` with probability `coverage` at least.

        Args:
            x: inputs in any form that `Posterior.predict` takes, exchangeable with the calibration data.
            coverage: of each target by itself or, if calibrated so, of all targets of an example at once.
            progress: as in `Posterior.predict`.

        Returns:
            `ConformalIntervals` for real targets and counts, `ConformalSets` for classes.
        """
        limit = self.quantile(coverage)
        prediction = self.posterior.predict(x, progress=progress, **self.options)
        likelihood, shape = prediction.likelihood, prediction.raw_shape
        if not self.simultaneous and prediction.latent.shape[1] != limit.shape[0]:
            raise _other_positions(str(limit.shape[0]), str(prediction.latent.shape[1]))
        if isinstance(prediction, ClassificationPrediction):
            scores = _class_scores(prediction, self.score)
            top = torch.nn.functional.one_hot(scores.argmin(-1), scores.shape[-1]).bool()
            members = (scores <= limit.to(scores.device).unsqueeze(-1)) | top
            if isinstance(likelihood, Categorical):
                size = likelihood.spread(members[:, :, 0].sum(-1), shape)
                return ConformalSets(likelihood.layout(members[:, :, 0], shape), size, coverage, prediction)
            both = torch.stack([likelihood.layout(members[..., k], shape) for k in range(2)], -1)
            return ConformalSets(both, both.sum(-1), coverage, prediction)
        mean, std = _moments(prediction)
        reach = limit.to(std.device) * std
        lower = mean - reach
        if isinstance(prediction, CountPrediction):
            lower = lower.clamp_min(0)
        dtype = prediction.latent.mean.dtype
        low, high = (likelihood.layout(end.to(dtype), shape) for end in (lower, mean + reach))
        return ConformalIntervals(low, high, coverage, prediction)


def conformal(
    posterior: Posterior,
    data: Any,
    score: Score | None,
    simultaneous: bool,
    options: dict[str, Any],
    batch_size: int | None,
    progress: bool | None,
) -> Conformal:
    """See `Posterior.conformal`."""
    chosen = _checked_score(posterior, score)
    network, found, total = posterior.network, [], 0
    stream, length = batches(data, dtype=network.dtype, device=network.device, batch_size=batch_size)
    for batch in track(stream, "calibration", length, progress):
        with naming(batch.where):
            prediction = posterior.predict(batch.inputs, progress=False, **options)
            found.append(_target_scores(prediction, batch.targets, chosen).cpu())
        total = (total + digest(batch.inputs, batch.targets)) % 2**64
    if posterior._fitted_to(total):
        raise DataError(
            "The calibration data are those of the fit",
            expected="examples that neither the network nor the posterior has seen",
            got="the training data, on which predictions are too good",
            do="hold some examples out before training, and pass these",
        )
    if simultaneous:
        found = [scores.nan_to_num(-math.inf).flatten(1).amax(1)[:, None, None] for scores in found]
        found = [torch.where(scores == -math.inf, IGNORED, scores) for scores in found]
    lengths = {tuple(scores.shape[1:]) for scores in found}
    if len(lengths) > 1:
        raise _other_positions("one number of positions", " and ".join(sorted(str(shape[0]) for shape in lengths)))
    scores = torch.cat(found).sort(0).values  # NaN last
    return Conformal(posterior, chosen, scores, (~scores.isnan()).sum(0), simultaneous, options)


def _fingerprint(posterior: Posterior) -> str:
    """Of all that decides a posterior's predictions, but for its network, which seals the file."""
    state = posterior.state()
    return tensors_digest(state.tensors, json.dumps([posterior.likelihood.to_config(), state.config], sort_keys=True))


def _other_positions(expected: str, got: str) -> DataError:
    return DataError(
        "Each position has a quantile of its own, and the examples differ in their number of positions",
        expected=expected,
        got=got,
        do="calibrate with simultaneous=True, which takes examples of any length",
    )


def _checked_score(posterior: Posterior, score: Score | None) -> Score:
    kind = posterior.likelihood.kind
    if kind not in SCORES:
        raise LikelihoodError(
            f"Conformal prediction has no score for the {posterior.likelihood.name} likelihood",
            expected="a likelihood of classes, real targets or counts",
            got=posterior.likelihood.name,
            do="use one of Lapis' own likelihoods",
        )
    if score is None:
        return SCORES[kind][0]
    check_choice("score", score, [name for names in SCORES.values() for name in names])
    if score not in SCORES[kind]:
        raise OptionError(
            f"The score {score!r} has no meaning for {kind}",
            expected=" or ".join(f'"{name}"' for name in SCORES[kind]),
            got=repr(score),
            do="leave score out",
        )
    return score


def _target_scores(prediction: Prediction, y: Any, score: Score) -> Tensor:
    """s(x, y) of every target, (B, T, L) float64; NaN where ignored."""
    likelihood = prediction.likelihood
    target = likelihood.targets(y, prediction.latent.mean, prediction.raw_shape)
    if not isinstance(prediction, ClassificationPrediction):
        mean, std = _moments(prediction)
        return (target.double() - mean).abs() / std
    if isinstance(likelihood, Categorical):
        hard = not target.is_floating_point()
    else:
        hard = bool(((target == 0) | (target == 1)).all())
    if not hard:
        raise DataError(
            "Conformal sets are about classes",
            expected="one class for each target",
            got="probabilities of classes",
            do="pass class indices, or labels that are 0 or 1",
        )
    labels = (target.unsqueeze(-1) if isinstance(likelihood, Categorical) else target).long()
    ignored = torch.zeros_like(labels, dtype=torch.bool)
    if isinstance(likelihood, Categorical) and likelihood.ignore_index is not None:
        ignored = labels == likelihood.ignore_index
    scores = _class_scores(prediction, score)
    return scores.gather(-1, labels.masked_fill(ignored, 0).unsqueeze(-1))[..., 0].masked_fill(ignored, IGNORED)


def _class_scores(prediction: ClassificationPrediction, score: Score) -> Tensor:
    """s(x, c) of every class c, (B, T, 1, C); of labels (B, T, C, 2). Float64.

    "probability": 1 - p_c. "cumulative": the probability of all classes from the most probable down to c.
    """
    probs = prediction.likelihood.canonical(prediction.probs).double()
    p = probs.unsqueeze(2) if isinstance(prediction.likelihood, Categorical) else torch.stack([1 - probs, probs], -1)
    if score == "probability":
        return 1 - p
    order = torch.sort(p, dim=-1, descending=True, stable=True)
    return torch.zeros_like(p).scatter(-1, order.indices, order.values.cumsum(-1))


def _moments(prediction: Prediction) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of the targets, (B, T, L) float64."""
    assert isinstance(prediction, NumericPrediction)
    mean, std = (prediction.likelihood.canonical(value).double() for value in (prediction.mean, prediction.std))
    return mean, std.clamp_min(torch.finfo(std.dtype).tiny)
