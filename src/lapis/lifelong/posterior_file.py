"""A learner's posterior as part of its file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from lapis.likelihoods import Likelihood
from lapis.posteriors.posterior import Posterior
from lapis.posteriors.storage import pack, unpack
from lapis.schema import entry, under

PREFIX = "posterior."


def pack_posterior(posterior: Posterior | None) -> tuple[dict[str, Any] | None, dict[str, Tensor]]:
    """Entries for JSON, None without a posterior, and tensors."""
    if posterior is None:
        return None, {}
    config, tensors = pack(posterior)
    return config, {PREFIX + name: tensor for name, tensor in tensors.items()}


def unpack_posterior(
    config: Mapping[str, Any], tensors: Mapping[str, Tensor], model: nn.Module, likelihood: Likelihood
) -> Any:
    """The posterior, or None, from the entry "posterior" of a state; the model has its weights already."""
    saved = entry(config, "posterior", dict | None)
    if saved is None:
        return None
    return unpack(saved, under(PREFIX, tensors), model, "the learner's file", likelihood)
