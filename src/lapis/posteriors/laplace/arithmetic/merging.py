"""Posteriors of one architecture from different data, added up: task arithmetic, weighted by precision.

Each posterior is its data's likelihood times the prior, N(m_k, (C_k + Lambda)^-1). All likelihoods, with the prior
counted once, have the precision A = sum_k C_k + Lambda and the mean

    m + A^-1 sum_k (C_k + Lambda) (m_k - m),

m the prior's mean: exactly the posterior of all data where each is exact, for linear models with Gaussian noise.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from functools import reduce

import torch
from torch import Tensor, nn

from lapis.curvature.sums import Curvature
from lapis.curvature.tape import Tape
from lapis.errors import DataError, OptionError
from lapis.network import Network, outside_inference_mode
from lapis.options import check_arguments
from lapis.posteriors.laplace.stored import LaplacePosterior
from lapis.posteriors.posterior import Posterior
from lapis.posteriors.predicting.members import check_same_beside_weights
from lapis.solvers import CallablePreconditioner, Operator, conjugate_gradients

TOLERANCE = 1e-12


@outside_inference_mode
def merge(posteriors: Sequence[Posterior]) -> LaplacePosterior:
    """One posterior from posteriors of one architecture, fitted to different data: their data count together.

    The precisions' data parts add up, the prior counts once, and the mean is weighted by precision. For linear models
    with Gaussian noise, each at its own mode, that is exactly the posterior of all data at once. The factors of
    Kronecker posteriors are summed as in a fit to all data; their mean solves the sum of the Kronecker products.

    Where networks were trained to different weights, the result belongs to a new network, `result.network.module`: a
    copy of the first one's at the merged mean, where it is linearised. Posteriors at the same weights are parts of one
    fit: the result belongs to the first one's network, and a mean at its weights stays there, as by `update`.

    Args:
        posteriors: Laplace posteriors with stored sums (dense, diagonal or kronecker), of one structure, prior,
            likelihood and temperature, and of networks that differ in their chosen weights only.

    >>> import torch, lapis
    >>> x = torch.linspace(-1, 1, 20, dtype=torch.float64)[:, None]
    >>> model = torch.nn.Linear(1, 1).double()
    >>> halves = [lapis.laplace(model, (half, 2 * half), "regression") for half in (x[:10], x[10:])]
    >>> lapis.merge(halves)
    <dense LaplacePosterior, 2 weights, 20 examples, gaussian>
    """
    check_arguments(merge, locals())
    fits = _checked(posteriors)
    first = fits[0]
    for fit in fits:
        fit.check_network()
    shared = all(fit.network.equals(first.point) for fit in fits)
    # reference: weights at which the posteriors agree that nothing pulls on them
    reference = first.point.double() if shared else first.weight_prior.mean + torch.zeros_like(first.point.double())
    sums = reduce(lambda one, two: one.plus(two, 1.0), (fit.curvature for fit in fits[1:]), first.curvature)
    merged = first._with_sums(sums)
    pull = torch.stack([_times(fit, fit.mean.double() - reference) for fit in fits]).sum(0)
    if shared and not bool(pull.any()):
        return replace(merged, mean=first.point)
    mean = (reference + _solved(fits, merged, pull)).to(first.mean.dtype)
    return replace(merged, mean=mean) if shared else _elsewhere(merged, mean)


def _times(fit: LaplacePosterior, vector: Tensor) -> Tensor:
    """(C_k + Lambda) v, (P,)."""
    parts = zip(fit.gaussians, fit.curvature.to_blocks(vector[None]), strict=True)
    return fit.curvature.to_flat([gaussian.multiply(part) for gaussian, part in parts])[0]


def _solved(fits: Sequence[LaplacePosterior], merged: LaplacePosterior, pull: Tensor) -> Tensor:
    """(sum_k C_k + Lambda)^-1 v: at once where the merged structure is that sum, as for dense and diagonal ones."""
    prior = (len(fits) - 1) * merged.weight_prior.vector().detach()

    def product(vectors: Tensor) -> Tensor:
        return torch.stack([sum(_times(fit, v) for fit in fits) - prior * v for v in vectors])

    operator = Operator(product, merged.n_weights, torch.float64, merged.network.device)
    found = conjugate_gradients(
        operator, pull[None], preconditioner=CallablePreconditioner(merged.solve), tolerance=TOLERANCE
    )
    return found.solution[0]


def _elsewhere(merged: LaplacePosterior, mean: Tensor) -> LaplacePosterior:
    """The posterior of a copy of the network that holds the merged mean, with the same sums."""
    old = merged.network
    module: nn.Module = copy.deepcopy(old.module)
    if old.indices:
        whole = {name: torch.ones(shape, dtype=torch.bool) for name, shape in old.shapes.items()}
        network = Network(module, whole | old.indices, example=old.example)
    else:
        network = Network(module, lambda name, _: name in old.names, example=old.example)
    network.signature = old.signature
    with torch.no_grad():
        for name, values in network.unflatten(mean).items():
            network.parameters[name].copy_(values)
    sums, tape = merged.curvature, Tape(network, merged.likelihood.canonical)
    tape.plan, tape.example_bytes = sums.tape.plan, sums.tape.example_bytes
    moved: Curvature = replace(sums, tape=tape)
    facts = replace(merged.facts, fingerprint=network.fingerprint())
    prior = replace(merged.weight_prior, network=network, _latest=[])
    return replace(merged, network=network, facts=facts, curvature=moved, weight_prior=prior, mean=mean, point=mean)


def _checked(posteriors: Sequence[Posterior]) -> list[LaplacePosterior]:
    """Laplace posteriors that can be added up; errors say what differs."""
    fits = [each for each in posteriors if isinstance(each, LaplacePosterior)]
    if len(fits) < 2 or len(fits) < len(posteriors):
        raise OptionError(
            "Only Laplace posteriors with stored curvature can be merged",
            expected="two or more, of structure dense, diagonal or kronecker",
            got=", ".join(type(each).__name__ for each in posteriors) or "none",
            do="fit them by lapis.laplace(..., structure=...)",
        )
    first = fits[0]
    for fit in fits:
        fit._refuse_if_refined("be merged: its curvature is no longer a sum", "merge before refining")
        for block in fit.curvature.blocks:
            block.check_additive(others=True)
    for number, fit in enumerate(fits[1:], 1):
        mine, theirs = agreement(first), agreement(fit)
        for name, value in mine.items():
            if theirs[name] != value:
                raise OptionError(
                    f"Posterior {number} has another {name} than the first",
                    expected=str(value)[:200],
                    got=str(theirs[name])[:200],
                    do="fit them alike; with_prior and with_noise change a posterior",
                )
        priors = first.weight_prior, fit.weight_prior
        if not torch.equal(priors[0].vector(), priors[1].vector()) or not torch.equal(priors[0].mean, priors[1].mean):
            raise OptionError(
                f"Posterior {number} has another prior than the first",
                expected="one prior, which counts once",
                got=f"precisions {priors[1].precision.tolist()[:4]}, not {priors[0].precision.tolist()[:4]}",
                do="use with_prior",
            )
    digests = [fit.curvature.digest for fit in fits]
    if len(set(digests)) < len(fits):
        raise DataError(
            "Two of the posteriors are from the same data",
            expected="different data: each example would count twice",
            got=f"fingerprints {', '.join(f'{each:016x}' for each in digests)}",
            do="leave one of them out",
        )
    check_same_beside_weights(
        [fit.network for fit in fits],
        "Networks that differ in more than their chosen weights cannot be merged",
        "choose all weights, freeze none, and give batch norm the same running statistics",
    )
    return fits


def agreement(fit: LaplacePosterior) -> dict[str, object]:
    """What posteriors must agree on, in the words of error messages."""
    sums = fit.curvature
    return {
        "structure": fit.structure,
        "kind of curvature": sums.kind,
        "likelihood": fit.likelihood.to_config(),
        "noise at the fit": fit.fitted_likelihood.to_config(),
        "temperature": fit.temperature,
        "chosen weights": ", ".join(fit.network.names),
        "choice of single weights": {name: index.tolist() for name, index in fit.network.indices.items()},
        "division of its weights": [[site.to_config() for site in block.sites] for block in sums.blocks],
        "treatment of outputs": len(sums.apart or ()),
    }
