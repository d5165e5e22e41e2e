"""The Laplace posterior: a Gaussian over weights, centred on the trained ones, with curvature + prior as precision."""

from __future__ import annotations

import logging
import math
import os
import warnings
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lapis.batches import Inputs, batches, describe, take
from lapis.curvature.block import BlockGaussian
from lapis.curvature.dense import DenseBlock
from lapis.curvature.fit import Curvature, accumulate, check_outputs
from lapis.curvature.plan import plan
from lapis.curvature.structure import Structure, build_blocks, resolve_structure, to_device
from lapis.errors import DataError, LapisWarning, MemoryBudgetError, ModelError, OptionError
from lapis.evidence import Tuning, maximise
from lapis.likelihoods import Likelihood
from lapis.likelihoods import resolve as resolve_likelihood
from lapis.network import Network, Weights
from lapis.posteriors import functional
from lapis.predictions import LatentGaussian, LatentSamples, Prediction
from lapis.predictions import predict as predict_outputs
from lapis.priors import Prior, WeightPrior, as_prior

log = logging.getLogger("lapis")

MANY_OUTPUTS = 256
"""Above this many outputs an example (positions included) curvature="ggn" samples the Fisher information instead."""

FULL_COVARIANCE = 32
"""Up to this many outputs, predictions hold the full covariance between outputs unless told otherwise."""

PLANNING_EXAMPLES = 8
"""Examples on which the network's layers are identified and the tape is proven against autograd."""

CURVATURES = {"ggn": "ggn", "exact": "ggn", "sampled": "sampled", "fisher": "sampled", "empirical": "empirical", "hessian": "hessian"}  # fmt: skip


def laplace(
    model: nn.Module,
    data: Any,
    likelihood: str | Likelihood,
    *,
    structure: str = "auto",
    weights: Weights = "all",
    prior: Prior | float | Tensor = 1.0,
    curvature: str = "ggn",
    temperature: float = 1.0,
    sharing: Literal["expand", "reduce"] = "expand",
    bias: Literal["joint", "separate"] = "joint",
    fisher_samples: int = 1,
    generator: torch.Generator | None = None,
    batch_size: int | None = None,
    memory_budget: int = 4 * 2**30,
    progress: bool | None = None,
) -> LaplacePosterior:
    r"""Fit a Laplace posterior to a trained network in one pass over its training data.

    q(theta) = N(t, A^-1), A = sum_n J_n^T H_n J_n / temperature + Lambda, at the trained weights t.

    Args:
        model: any module; it comes back exactly as it was. Curvature is taken in evaluation mode.
        data: a DataLoader, a Dataset, a pair (inputs, targets), or an iterable of such batches. Inputs may be a tensor, a
            tuple (positional arguments) or a dictionary (keywords).
        likelihood: "regression", "classification", "binary", "poisson", "heteroscedastic", or a `Likelihood`.
        structure: "dense", "diagonal", "kronecker", or "auto" (dense for small networks, else kronecker).
        weights: "all", "last_layer", name patterns or module names, or a function of (name, parameter).
        prior: a precision, or a `Prior`.
        curvature: "ggn" (exact; sampled, with a warning, when an example has very many outputs), "exact", "sampled"
            (Fisher information from `fisher_samples` drawn targets), "empirical", or "hessian" (dense only).
        temperature: the likelihood enters as p(D | theta)^(1 / temperature).
        sharing: how Kronecker factors treat positions that share weights: each an example, or merged first.
        bias: whether a bias shares its weight's Kronecker block or has its own.
        generator: source of randomness for sampled curvature; seeded with 0 when not given.
        batch_size: for data that are not batched yet.
        memory_budget: bytes; work is cut to fit, and refused before it starts when it cannot.
        progress: show a progress bar; by default on a terminal only.

    >>> import torch, lapis
    >>> x = torch.linspace(-1, 1, 20)[:, None]
    >>> model = torch.nn.Linear(1, 1)
    >>> posterior = lapis.laplace(model, (x, 2 * x), "regression")
    >>> posterior.predict(x).mean.shape
    torch.Size([20, 1])
    """
    likelihood = resolve_likelihood(likelihood)
    _check_options(curvature, temperature, sharing, bias, fisher_samples, batch_size, memory_budget)
    chosen_prior = as_prior(prior)
    probe = Network(model)
    stream, total = batches(data, dtype=probe.dtype, device=probe.device, batch_size=batch_size)
    first = next(stream, None)
    if first is None:
        raise DataError("There is no data", expected="at least one example", got="empty batches", do="check the loader")
    few = take(first.inputs, 0, min(len(first), PLANNING_EXAMPLES))
    network = Network(model, weights, example=few)
    network.signature = describe(first.inputs)
    chosen, note = resolve_structure(structure, network.size, memory_budget)
    if CURVATURES[curvature] == "hessian" and chosen != "dense":
        raise OptionError(
            "The Hessian is available for the dense structure only",
            expected='structure="dense"',
            got=f"structure={structure!r}, which is {chosen}",
            do='use curvature="ggn", or structure="dense" on fewer weights',
        )
    weight_prior = chosen_prior.resolve(network)
    with network.prepared():
        with torch.no_grad():
            outputs = likelihood.canonical(network.call(few))
        check_outputs(outputs, 0, f"batch {first.index}")
        likelihood.check_outputs(outputs)
        tape = plan(network, likelihood.canonical, few, separate_bias=bias == "separate")
    kind, choices = CURVATURES[curvature], [note]
    if curvature == "ggn" and outputs[0].numel() > MANY_OUTPUTS:
        kind = "sampled"
        choices.append(
            f"Fisher information from {fisher_samples} drawn target(s), for {outputs[0].numel()} outputs an example"
        )
        warnings.warn(
            f'{outputs[0].numel()} outputs an example: the Fisher information is sampled; curvature="exact" forbids that.',
            LapisWarning,
            stacklevel=2,
        )
    if tape.general:
        choices.append(f"general per-example rule for {', '.join(sorted(tape.general))}")
    blocks = build_blocks(chosen, tape.sites, sharing, memory_budget)
    to_device(blocks, network.device)
    for choice in choices:
        log.info("%s", choice)
    sums = Curvature(
        kind, tape, blocks, torch.zeros((), dtype=torch.float64, device=network.device), 0, fisher_samples, network.signature,
        outputs.shape[-1],
    )  # fmt: skip
    for block in blocks:
        block.check(weight_prior)
    accumulate(
        sums,
        network,
        likelihood,
        chain([first], stream),
        total=total,
        generator=generator or torch.Generator(network.device).manual_seed(0),
        memory_budget=memory_budget,
        progress=progress,
    )
    return LaplacePosterior(
        network=network,
        likelihood=likelihood,
        fitted_likelihood=likelihood,
        prior=chosen_prior,
        weight_prior=weight_prior,
        curvature=sums,
        structure=chosen,
        mean=network.flat(),
        fingerprint=network.fingerprint(),
        temperature=temperature,
        memory_budget=memory_budget,
        choices=tuple(choices),
    )


@dataclass(frozen=True, eq=False)
class LaplacePosterior:
    """N(mean, (scale * curvature + prior)^-1) over the chosen weights; a value: methods return new posteriors.

    Made by `lapis.laplace`. `choices` says what was decided on the user's behalf, `tuning` how the last `tune` went.
    """

    network: Network
    likelihood: Likelihood
    fitted_likelihood: Likelihood
    prior: Prior
    weight_prior: WeightPrior
    curvature: Curvature
    structure: Structure
    mean: Tensor
    fingerprint: str
    temperature: float
    memory_budget: int
    choices: tuple[str, ...] = ()
    tuning: Tuning | None = None

    # what it is ------------------------------------------------------------------------------------------------------

    @property
    def n_weights(self) -> int:
        return self.network.size

    @property
    def n_data(self) -> int:
        return self.curvature.n_data

    @cached_property
    def scale(self) -> Tensor:
        """What the stored curvature is multiplied by: changed noise, and temperature."""
        scale = torch.as_tensor(self.likelihood.curvature_scale(self.fitted_likelihood), device=self.network.device)
        return scale.double() / self.temperature

    @cached_property
    def gaussians(self) -> list[BlockGaussian]:
        """The posterior of each block of weights."""
        return [block.gaussian(self.weight_prior, self.scale) for block in self.curvature.blocks]

    def summary(self) -> str:
        """A few lines: size, structure, prior, evidence, and choices made."""
        precision = self.weight_prior.precision.detach()
        spread = f"{float(precision.min()):.4g}" + (f" .. {float(precision.max()):.4g}" if len(precision) > 1 else "")
        lines = [
            f"{self.structure} Laplace posterior over {self.n_weights:,} weights from {self.n_data:,} examples",
            f"likelihood            {self.likelihood!r}",
            f"prior precision       {spread} ({len(precision)} group{'s' if len(precision) > 1 else ''})",
            f"log evidence          {float(self.log_evidence()):.4f}",
            f"effective parameters  {float(self.effective_parameters()):.2f}",
            *(f"note                  {choice}" for choice in self.choices),
        ]
        return "\n".join(lines)

    def __repr__(self) -> str:
        return f"<{self.structure} LaplacePosterior, {self.n_weights:,} weights, {self.n_data:,} examples, {self.likelihood.name}>"

    # over weights ----------------------------------------------------------------------------------------------------

    def _to_flat(self, parts: list[Tensor]) -> Tensor:
        """Vectors (..., size) of each block -> (..., P)."""
        flat = parts[0].new_empty(*parts[0].shape[:-1], self.n_weights)
        for block, part in zip(self.curvature.blocks, parts, strict=True):
            for site, piece in zip(block.sites, part.split([site.size for site in block.sites], -1), strict=True):
                site.scatter(piece.unflatten(-1, site.shape), flat, self.network)
        return flat

    def _to_blocks(self, vectors: Tensor) -> list[Tensor]:
        """(..., P) -> (..., size) for each block."""
        return [
            torch.cat([site.gather(vectors, self.network).flatten(vectors.dim() - 1) for site in block.sites], -1)
            for block in self.curvature.blocks
        ]

    def sample(self, n: int = 1, *, generator: torch.Generator | None = None) -> Tensor:
        """Draws of the weights, (n, P); `lapis.unflatten` turns them into parameter dictionaries.

        Without a generator the draws are those of seed 0.
        """
        if n < 1:
            raise OptionError("Nothing to sample", expected="n >= 1", got=str(n), do="ask for at least one draw")
        device = self.network.device
        generator = generator or torch.Generator(device).manual_seed(0)
        noise = torch.randn(n, self.n_weights, dtype=torch.float64, generator=generator, device=generator.device).to(
            device
        )
        parts = noise.split([block.size for block in self.curvature.blocks], -1)
        draws = self._to_flat([gaussian.color(part) for gaussian, part in zip(self.gaussians, parts, strict=True)])
        return (self.mean.double() + draws).to(self.mean.dtype)

    def log_prob(self, theta: Tensor) -> Tensor:
        """log q(theta) for weights (P,) or (n, P)."""
        if theta.shape[-1] != self.n_weights or theta.dim() > 2:
            raise DataError(
                "These are no weight vectors",
                expected=f"(..., {self.n_weights})",
                got=str(tuple(theta.shape)),
                do="pass flat weights",
            )
        deviations = self._to_blocks(theta.reshape(-1, self.n_weights).double() - self.mean.double())
        quadratic = sum((g.multiply(part) * part).sum(-1) for g, part in zip(self.gaussians, deviations, strict=True))
        constant = self._logdet() - self.n_weights * math.log(2 * math.pi)
        return (0.5 * (constant - quadratic)).reshape(theta.shape[:-1])

    def marginal_variance(self) -> Tensor:
        """Variance of each weight, (P,)."""
        return self._to_flat([gaussian.variance() for gaussian in self.gaussians]).to(self.mean.dtype)

    def precision(self) -> Tensor:
        """The whole precision matrix (P, P), float64: for checking, on small networks."""
        needed = 8 * self.n_weights**2
        if needed > self.memory_budget:
            raise MemoryBudgetError(
                "The precision matrix does not fit",
                expected=f"at most {self.memory_budget:,} bytes (memory_budget)",
                got=f"{needed:,} bytes",
                do="use marginal_variance(), sample() or log_prob()",
            )
        matrix = self.mean.new_zeros(self.n_weights, self.n_weights, dtype=torch.float64)
        places = self._to_blocks(torch.arange(self.n_weights, device=self.network.device))
        for gaussian, place in zip(self.gaussians, places, strict=True):
            matrix[place[:, None], place] = gaussian.matrix()
        return matrix

    # evidence --------------------------------------------------------------------------------------------------------

    def _logdet(self) -> Tensor:
        return torch.stack([gaussian.logdet() for gaussian in self.gaussians]).sum()

    def log_likelihood(self) -> Tensor:
        """log p(D | t), with all constants."""
        return self.likelihood.log_likelihood(self.curvature.statistics)

    def log_evidence(self) -> Tensor:
        """log p(D) ~ log p(D | t) - 1/2 |t - m|^2_Lambda + 1/2 log |Lambda| - 1/2 log |A|, 0-d float64.

        Exact for linear Gaussian models. Differentiable in the prior precision and the noise, when these require grad.
        """
        prior = self.weight_prior
        distance = (prior.precision * prior.squared_distance(self.mean)).sum()
        return self.log_likelihood() / self.temperature + 0.5 * (prior.logdet() - distance - self._logdet())

    def effective_parameters(self, *, per_group: bool = False) -> Tensor:
        """gamma = tr(A^-1 (A - Lambda)): how many weights the data determine; in all, or for each prior group."""
        prior = self.weight_prior
        kept = 1 - prior.vector() * self._to_flat([gaussian.variance() for gaussian in self.gaussians])
        if not per_group:
            return kept.sum()
        return torch.zeros_like(prior.precision).index_add(0, prior.group_index(), kept)

    def tune(self, *, noise: bool = True, max_evaluations: int = 200) -> LaplacePosterior:
        """The posterior whose prior precisions, and Gaussian noise, maximise the evidence. No pass over data.

        A noise for each output keeps its proportions: one factor is tuned. `tuning` on the result tells how it went.
        """
        groups = len(self.weight_prior.precision)
        base = self.likelihood.noise if noise else None
        for block in self.curvature.blocks:
            if isinstance(block, DenseBlock) and groups == 1:
                block.eigenvalues()

        def candidate(values: Tensor) -> LaplacePosterior:
            tuned = self._with_precision(values[:groups])
            return tuned if base is None else tuned.with_noise(base.detach() * values[groups])

        start = self.weight_prior.precision.detach()
        if base is not None:
            start = torch.cat([start, start.new_ones(1)])
        best, tuning = maximise(lambda values: candidate(values).log_evidence(), start, max_evaluations=max_evaluations)
        if tuning.at_bound:
            warnings.warn(
                "The evidence has no interior maximum: a prior precision or the noise ran to its bound. "
                "The data leave it undetermined; fix it, or share it between more weights.",
                LapisWarning,
                stacklevel=2,
            )
        return replace(candidate(best), tuning=tuning)

    # changes ---------------------------------------------------------------------------------------------------------

    def with_prior(self, prior: Prior | float | Tensor) -> LaplacePosterior:
        """The posterior under another prior; no pass over data."""
        chosen = as_prior(prior)
        resolved = chosen.resolve(self.network)
        for block in self.curvature.blocks:
            block.check(resolved)
        return replace(self, prior=chosen, weight_prior=resolved, tuning=None)

    def _with_precision(self, precision: Tensor) -> LaplacePosterior:
        """The same groups and mean with other precisions."""
        prior = replace(self.prior, precision=precision)
        return replace(self, prior=prior, weight_prior=self.weight_prior.with_precision(precision), tuning=None)

    def with_noise(self, noise: float | Tensor) -> LaplacePosterior:
        """The posterior under another Gaussian noise (standard deviation); no pass over data."""
        changed = replace(self, likelihood=self.likelihood.with_noise(noise), tuning=None)
        changed.scale  # noqa: B018  (noise of other proportions is refused here, not at the first use)
        return changed

    def with_temperature(self, temperature: float) -> LaplacePosterior:
        """The posterior at another temperature; no pass over data."""
        _check_temperature(temperature)
        return replace(self, temperature=temperature, tuning=None)

    def update(
        self,
        data: Any,
        *,
        batch_size: int | None = None,
        generator: torch.Generator | None = None,
        progress: bool | None = None,
    ) -> LaplacePosterior:
        """The posterior that has seen `data` as well: curvature is a sum over data."""
        self._check_model()
        sums = self.curvature.clone()
        stream, total = batches(data, dtype=self.network.dtype, device=self.network.device, batch_size=batch_size)
        accumulate(
            sums,
            self.network,
            self.fitted_likelihood,
            stream,
            total=total,
            generator=generator or torch.Generator(self.network.device).manual_seed(self.n_data),
            memory_budget=self.memory_budget,
            progress=progress,
        )
        return replace(self, curvature=sums, tuning=None)

    # predictions -----------------------------------------------------------------------------------------------------

    def functional_variance(self, x: Inputs, diagonal: bool = False) -> Tensor:
        """J Sigma J^T of the outputs at each example: (B, C, C), or its diagonal (B, C) laid out as the outputs are.

        Outputs with positions give one matrix a position, (B, *positions, C, C).
        """
        latent, shape = self._linearised(x, "diagonal" if diagonal else "full")
        if latent.covariance is not None:
            return self.likelihood.spread(latent.covariance, shape)
        return self.likelihood.layout(latent.variance, shape if len(shape) > 1 else (*shape, 1))

    def functional_covariance(self, x: Inputs) -> Tensor:
        """Covariance of all outputs of all examples with each other: (B, C, B, C), positions behind each B."""
        latent, shape = self._linearised(x, "joint")
        assert latent.joint is not None
        one = (latent.mean.shape[0], *self.likelihood.positions(shape), latent.mean.shape[-1])
        return latent.joint.reshape(*one, *one)

    def predict(
        self,
        x: Inputs,
        method: Literal["linearised", "sampled"] = "linearised",
        link: Literal["probit", "mc", "bridge"] | None = None,
        samples: int | None = None,
        generator: torch.Generator | None = None,
        covariance: Literal["full", "diagonal"] | None = None,
        joint: bool = False,
    ) -> Prediction:
        """The predictive distribution at `x`.

        Args:
            method: "linearised" (the network's tangent at t, exact Gaussian outputs) or "sampled" (drawn networks).
            link: for classification, how Gaussian logits become probabilities: "probit" (default), "mc", "bridge".
            samples: drawn networks (default 20), or Monte Carlo draws of the link (default 256).
            generator: source of randomness; seeded with 0 when not given.
            covariance: between an example's outputs, or variances alone; full by default up to 32 outputs.
            joint: covariance between examples too; `log_prob` is then that of the whole batch.
        """
        if method == "sampled":
            if covariance is not None or joint:
                raise OptionError(
                    "Sampled predictions hold draws, not covariances",
                    expected="covariance and joint left out",
                    got=f"covariance={covariance!r}, joint={joint}",
                    do='use method="linearised"',
                )
            values, shape = self._sampled(x, 20 if samples is None else samples, generator)
            return predict_outputs(self.likelihood, LatentSamples(values), raw_shape=shape, link=link)
        if method != "linearised":
            raise OptionError("Unknown method", expected='"linearised" or "sampled"', got=repr(method), do="choose one")
        if covariance not in (None, "full", "diagonal"):
            raise OptionError(
                "Unknown covariance", expected='"full" or "diagonal"', got=repr(covariance), do="choose one"
            )
        full = covariance == "full" or (covariance is None and self.curvature.outputs <= FULL_COVARIANCE)
        latent, shape = self._linearised(x, "joint" if joint else "full" if full else "diagonal")
        return predict_outputs(
            self.likelihood, latent, raw_shape=shape, link=link, samples=samples, generator=generator
        )

    def _linearised(self, x: Inputs, kind: functional.Kind) -> tuple[LatentGaussian, torch.Size]:
        self._check_model()
        inputs = functional.check_inputs(x, self.network, self.curvature.signature)
        return functional.linearised(self.network, self.curvature, self.gaussians, inputs, kind, self.memory_budget)

    def _sampled(self, x: Inputs, samples: int, generator: torch.Generator | None) -> tuple[Tensor, torch.Size]:
        """Outputs (S, B, T, C) of drawn networks."""
        self._check_model()
        inputs = functional.check_inputs(x, self.network, self.curvature.signature)
        outputs = []
        with self.network.prepared(), torch.no_grad():
            for theta in self.sample(samples, generator=generator):
                raw = self.network.call(inputs, self.network.unflatten(theta))
                outputs.append(self.likelihood.canonical(raw))
                check_outputs(outputs[-1], self.curvature.outputs, "this batch")
        return torch.stack(outputs), raw.shape

    def _check_model(self) -> None:
        """Refuse to go on with a network that is not the one fitted."""
        if not torch.equal(self.network.flat(), self.mean):
            raise ModelError(
                "The network's weights have changed since the fit",
                expected="the weights that the posterior is centred on",
                got="others",
                do="fit again, or load the weights back",
            )

    # files -----------------------------------------------------------------------------------------------------------

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the posterior to one file of numbers and JSON, for `lapis.load(path, model)`. Never half a file."""
        from lapis.posteriors.storage import save

        save(self, path)


def _check_temperature(temperature: float) -> None:
    if not (isinstance(temperature, (int, float)) and math.isfinite(temperature) and temperature > 0):
        raise OptionError(
            "Bad temperature", expected="a positive number", got=repr(temperature), do="use 1 for Bayes' rule"
        )


def _check_options(
    curvature: str,
    temperature: float,
    sharing: str,
    bias: str,
    fisher_samples: int,
    batch_size: int | None,
    budget: int,
) -> None:
    _check_temperature(temperature)
    for name, value, allowed in (
        ("curvature", curvature, tuple(CURVATURES)),
        ("sharing", sharing, ("expand", "reduce")),
        ("bias", bias, ("joint", "separate")),
    ):
        if value not in allowed:
            raise OptionError(
                f"Unknown {name}",
                expected=", ".join(map(repr, allowed)),
                got=repr(value),
                do="choose one of these",
            )
    for name, number in (
        ("fisher_samples", fisher_samples),
        ("batch_size", 1 if batch_size is None else batch_size),
        ("memory_budget", budget),
    ):
        if number < 1:
            raise OptionError(f"Bad {name}", expected="at least 1", got=str(number), do="pass a positive number")
