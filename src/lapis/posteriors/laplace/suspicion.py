"""Outputs that look like something else than the likelihood takes: probabilities instead of logits, say."""

from __future__ import annotations

import torch
from torch import Tensor

from lapis.batches import Batch, take
from lapis.curvature.plan import PLANNING_EXAMPLES
from lapis.likelihoods import Likelihood
from lapis.network import Network

SUSPECTED_EXAMPLES = 512
"""Examples whose outputs are looked at where the first few could be probabilities."""


def suspicion(network: Network, likelihood: Likelihood, few: Tensor, first: Batch) -> str | None:
    """What the likelihood finds odd about outputs of the first batch; probabilities are looked for if `few` may be."""
    if bool((few < 0).any()) or bool((few > 1).any()):
        return likelihood.suspicion(few)
    seen = likelihood.suspicion(likelihood.canonical(network.call(take(first.inputs, 0, len(few)))))
    if seen is not None:
        return seen
    parts = [few]
    with torch.no_grad():
        for start in range(len(few), min(len(first), SUSPECTED_EXAMPLES), PLANNING_EXAMPLES):
            stop = min(start + PLANNING_EXAMPLES, len(first))
            parts.append(likelihood.canonical(network.call(take(first.inputs, start, stop))))
            if bool((parts[-1] < 0).any()) or bool((parts[-1] > 1).any()):
                break
    return likelihood.suspicion(torch.cat(parts))
