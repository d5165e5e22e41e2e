"""Prediction over a data set that is divided among processes, gathered on all of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from lapis.batches import batch_length, take
from lapis.errors import OptionError
from lapis.network.inputs import check_inputs
from lapis.posteriors.predicting.parts import latent_of_parts
from lapis.predictions import Latent
from lapis.predictions.joining import over_ranks
from lapis.ranks import Ranks
from lapis.shards import divided, span

if TYPE_CHECKING:
    from lapis.posteriors.posterior import LatentKind, Posterior


def latent_of_ranks(
    posterior: Posterior,
    x: Any,
    kind: LatentKind,
    samples: int | None,
    generator: torch.Generator | None,
    progress: bool | None,
) -> Latent:
    """As `latent_of_parts`, of the same inputs on every rank: each works on some of them, and all get the whole."""
    ranks = Ranks.joined("distributed=True")
    if kind == "joint":
        raise OptionError(
            "A joint prediction cannot be divided",
            expected="joint=False with distributed=True",
            got="joint=True",
            do="leave one of them out",
        )
    if getattr(getattr(posterior, "curvature", None), "ranks", None) is not None:
        raise OptionError(
            "The processes of an implicit posterior solve together, for the same inputs",
            expected="distributed=False: its solves are divided already",
            got="distributed=True",
            do="leave distributed out, or predict with posterior.draw()",
        )
    with ranks.together("prediction"):
        own = divided(x, ranks)
        if own is None:
            inputs = check_inputs(x, posterior.network, posterior.facts.signature)
            start, stop = span(batch_length(inputs), ranks)
            own = take(inputs, start, stop) if batch_length(inputs) >= ranks.size else None
        latent = latent_of_parts(
            posterior, x if own is None else own, kind, samples, generator, False if ranks.rank else progress
        )
    return latent if own is None else over_ranks(latent, ranks)
