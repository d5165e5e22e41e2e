"""What a fit is asked for about its curvature: checks against the structure chosen, and the empty sums to fill."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from lapis.curvature.blocks.partition import NAMES, Structure, build_blocks, to_device
from lapis.curvature.outputs import check_factors
from lapis.curvature.sample import Sample
from lapis.curvature.sums import Curvature
from lapis.curvature.tape import Tape
from lapis.errors import LapisWarning, ModelError, OptionError, users_level
from lapis.network import Network
from lapis.posteriors.laplace.arguments import refuse_options
from lapis.posteriors.laplace.stored import LaplacePosterior
from lapis.priors import WeightPrior

MANY_OUTPUTS = 256
"""Above this many outputs per example (positions included) curvature="ggn" samples the Fisher information instead."""

CURVATURES = {
    "ggn": "ggn",
    "exact": "ggn",
    "sampled": "sampled",
    "fisher": "sampled",
    "empirical": "empirical",
    "hessian": "hessian",
}

MATRIX_FREE = ("lowrank", "implicit")


@dataclass(frozen=True)
class FitOptions:
    """Arguments of `lapis.laplace`, as they were given; None where the structure's default is meant."""

    structure: str
    curvature: str
    sharing: Literal["expand", "reduce"] | None
    bias: Literal["joint", "separate"] | None
    fisher_samples: int | None
    rank: int | None
    basis: LaplacePosterior | None

    @property
    def reads_twice(self) -> bool:
        """Whether data must be read more than once, for all that is known before a structure is chosen."""
        return NAMES.get(self.structure) == "ekfac" and self.basis is None

    def check(self, chosen: Structure, network: Network) -> None:
        """Raise for options that have no meaning for the structure chosen, and for weights too inexact for it."""
        if CURVATURES[self.curvature] == "hessian" and chosen != "dense":
            raise OptionError(
                "The Hessian is available for the dense structure only",
                expected='structure="dense"',
                got=f"structure={self.structure!r}, which is {chosen}",
                do='use curvature="ggn", or structure="dense" on fewer weights',
            )
        if chosen in MATRIX_FREE and CURVATURES[self.curvature] != "ggn":
            raise OptionError(
                f"The {chosen} structure is made of exact products with the GGN",
                expected='curvature="ggn" or "exact"',
                got=repr(self.curvature),
                do='leave curvature out, or use structure="kronecker", "diagonal" or "dense"',
            )
        self._check_meant_for(("lowrank",), chosen, rank=self.rank)
        self._check_meant_for(("kronecker", "ekfac"), chosen, sharing=self.sharing, bias=self.bias)
        self._check_meant_for(("ekfac",), chosen, basis=self.basis)
        if chosen in MATRIX_FREE and network.dtype not in (torch.float32, torch.float64):
            raise ModelError(
                f"Products with vectors in {network.dtype} are too inexact to solve or decompose with",
                expected=f'float32 or float64 weights with structure="{chosen}"',
                got=str(network.dtype),
                do='convert the network: model.float(), or use structure="kronecker", "diagonal" or "dense"',
            )

    def _check_meant_for(self, structures: Sequence[str], chosen: Structure, **options: Any) -> None:
        for name, value in options.items():
            if value is not None and chosen not in structures:
                raise OptionError(
                    f"{name} has no meaning here",
                    expected=f"{name}=None, or structure=" + " or ".join(f'"{other}"' for other in structures),
                    got=f"{name}={value!r} with structure={self.structure!r}, which is {chosen}",
                    do=f"leave {name} out",
                )

    def kind(self, chosen: Structure, outputs: Tensor) -> tuple[str, list[str]]:
        """The kind of curvature to sum, for networks with such outputs (B, T, C), and the choices made with it."""
        kind, count, choices = CURVATURES[self.curvature], outputs[0].numel(), []
        if self.curvature == "ggn" and count > MANY_OUTPUTS and chosen not in MATRIX_FREE:
            kind = "sampled"
            choices = [
                f"Fisher information from {self.fisher_samples or 1} drawn target(s), for {count} outputs an example"
            ]
            warnings.warn(
                f'With {count} outputs an example the Fisher information is sampled; curvature="exact" forbids that.',
                LapisWarning,
                stacklevel=users_level(),
            )
        if kind != "sampled":
            refuse_options(f"The {kind} curvature draws no targets", fisher_samples=self.fisher_samples)
        return kind, choices

    def empty_sums(
        self, chosen: Structure, kind: str, tape: Tape, prior: WeightPrior, outputs: Tensor, memory_budget: int
    ) -> Curvature:
        """Sums without any data, for a structure that is stored and agrees with the prior."""
        network = tape.network
        sharing, bias = self.sharing or "expand", self.bias or "joint"
        blocks = build_blocks(chosen, tape.plan.sites, sharing, bias, memory_budget)
        to_device(blocks, network.device)
        for block in blocks:
            block.check(prior)
        sums = Curvature(
            kind=kind,
            tape=tape,
            blocks=blocks,
            statistics=torch.zeros((), dtype=torch.float64, device=network.device),
            fisher_samples=self.fisher_samples or 1,
            signature=network.signature or "",
            outputs=outputs.shape[-1],
            positions=outputs.shape[1],
            sample=Sample(outputs[0].numel()),
        )
        if kind == "ggn" and chosen != "lowrank":
            check_factors(outputs[:1], memory_budget, 'curvature="sampled"')
        if self.basis is not None:
            _check_basis(self.basis, sums)
        return sums


def _check_basis(basis: LaplacePosterior, sums: Curvature) -> None:
    """OptionError unless the posterior has eigenvectors for every matrix of weights in these sums."""

    def about(curvature: Curvature) -> dict[str, Any]:
        blocks = curvature.blocks
        return {
            "choice of weights": [site.label for block in blocks for site in block.sites],
            "division of the weights": [block.sites for block in blocks],
            "treatment of positions and biases": [block.options() for block in blocks],
        }

    with_eigenvectors = basis.structure in ("kronecker", "ekfac")
    meant = "kronecker or ekfac"
    wanted = {"structure": meant, "network": sums.tape.network.fingerprint(), **about(sums)}
    found = {
        "structure": meant if with_eigenvectors else basis.structure,
        "network": basis.facts.fingerprint,
        **about(basis.curvature),
    }
    for name, value in wanted.items():
        if found[name] != value:
            raise OptionError(
                f"The basis is of another {name}",
                expected=str(value)[:200],
                got=str(found[name])[:200],
                do='fit the basis to the same network with the same options, by structure="kronecker"',
            )
