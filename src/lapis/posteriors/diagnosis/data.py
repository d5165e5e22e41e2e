"""One pass over data for a diagnosis: scores of the network alone and of the posterior, and the doubt at these data."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lapis.batches import Batch, batches, digest, naming
from lapis.likelihoods import Likelihood
from lapis.likelihoods.base import Separable
from lapis.posteriors.diagnosis.inputs import InputMoments
from lapis.posteriors.diagnosis.scores import Scores, plain_prediction
from lapis.predictions import Latent, LatentGaussian
from lapis.progress import track

if TYPE_CHECKING:
    from lapis.posteriors.posterior import Posterior

SUSPECTS = 256
"""Examples whose outputs are looked at for a softmax or sigmoid at the network's end."""


@dataclass
class Seen:
    """Sums over data, and what the first outputs look like."""

    plain: Scores = field(default_factory=Scores)
    posterior: Scores = field(default_factory=Scores)
    inputs: InputMoments = field(default_factory=InputMoments)
    n_data: int = 0
    outputs: int = 0
    """Outputs of one example, over all positions."""
    digest: int = 0
    """Fingerprint of the data, to compare with that of a fit."""
    suspicion: str | None = None
    trace: float | None = 0.0
    """sum_n tr(H_n V_n) with H at the network's own outputs; None where the covariances V are not known."""
    largest: float = 0.0
    """The largest eigenvalue of S^T V S, S S^T = H, over all examples and positions."""


def look(posterior: Posterior, data: Any, batch_size: int | None, progress: bool | None) -> Seen:
    """Predict the data part by part, and score the predictions."""
    network, seen = posterior.network, Seen()
    stream, total = batches(data, dtype=network.dtype, device=network.device, batch_size=batch_size)
    for batch in track(stream, "diagnosis", total, progress):
        with naming(batch.where):
            _add(posterior, batch, seen)
    return seen


def _add(posterior: Posterior, batch: Batch, seen: Seen) -> None:
    network, likelihood = posterior.network, posterior.likelihood
    if not seen.n_data:
        first = next(batch.split(SUSPECTS))
        with network.prepared():  # with its graph, whose end tells a softmax
            seen.suspicion = likelihood.suspicion(likelihood.canonical(network.call(first.inputs)))
    with network.prepared(), torch.no_grad():
        raw = network.call(batch.inputs)
        f = likelihood.canonical(raw).detach()  # it may be a parameter itself
    seen.plain.add(plain_prediction(likelihood, f, tuple(raw.shape)), batch.targets)
    prediction = posterior.predict(batch.inputs, progress=False)
    seen.posterior.add(prediction, batch.targets)
    seen.inputs.add(batch.inputs)
    seen.n_data, seen.outputs = seen.n_data + len(batch), f[0].numel()
    seen.digest = (seen.digest + digest(batch.inputs, batch.targets)) % 2**64
    latent = prediction.latent.scaled(1 / posterior._sharpness())
    values = _doubt(likelihood, f, likelihood.targets(batch.targets, f, raw.shape), latent)
    if values is None or seen.trace is None:
        seen.trace = None
    else:
        seen.trace += float(values.sum())
        seen.largest = max(seen.largest, float(values.max()))


def _doubt(likelihood: Likelihood, f: Tensor, targets: Tensor, latent: Latent) -> Tensor | None:
    """Eigenvalues of S^T V S at every position, (B, T, R) float64; None where V is not known well enough.

    Where only variances are known and S is diagonal, the diagonal: with the same sum, and none above the largest.
    """
    if not isinstance(latent, LatentGaussian):
        return None
    if latent.blocks is None:
        if not isinstance(likelihood, Separable):
            return None
        return likelihood.root(f.double()).square() * latent.variance.double()
    s = likelihood.factor(f.double(), targets.double() if targets.is_floating_point() else targets).detach()
    found: Tensor = torch.linalg.eigvalsh(s.mT @ latent.blocks.double() @ s)
    return found
