"""The naive definition of EKFAC, in the bases that a posterior has chosen.

Factors with repeated eigenvalues have many bases, and each gives another curvature. So a posterior is held to the
definition in its own bases, and these must diagonalise the reference's Kronecker factors.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import reference
from cases import F64
from lapis.curvature.blocks.kronecker.ekfac import EKFACBlock


def relative_error(found: Tensor, expected: Tensor) -> float:
    assert found.shape == expected.shape
    return float((found.to(F64) - expected).norm() / expected.norm())


def curvature_in(posterior: Any) -> Tensor:
    return posterior.precision() - torch.diag(posterior.weight_prior.vector())


def bases_of(posterior: Any) -> list[tuple[Tensor, Tensor]]:
    """For each weight matrix: where its entries lie in the flat vector (O * I,), and kron(Q_G, Q_A)."""
    found = []
    for block in posterior.curvature.blocks:
        if isinstance(block, EKFACBlock):
            places = block.site.gather(torch.arange(posterior.n_weights), posterior.network)
            inputs = [None] * len(places) if block.inputs is None else block.inputs
            for place, q_g, q_a in zip(places, block.outputs, inputs, strict=True):
                unit = torch.eye(place.shape[1], dtype=F64)
                found.append((place.reshape(-1), torch.kron(q_g, unit if q_a is None else q_a)))
    return found


def by_definition(posterior: Any, exact: Tensor, kronecker: Tensor) -> Tensor:
    """Q diag(Q^T B Q) Q^T for each block B of the exact curvature; as in the Kronecker structure for other weights."""
    result = kronecker.clone()
    for where, basis in bases_of(posterior):
        moments = (basis.T @ exact[where[:, None], where] @ basis).diagonal()
        result[where[:, None], where] = basis @ torch.diag(moments) @ basis.T
    return result


def exact_of(name: str, curvature: str = "ggn") -> Tensor:
    return reference.case_empirical_fisher(name) if curvature == "empirical" else reference.case_ggn(name)


def assert_defined(posterior: Any, name: str, tolerance: float = 1e-9, **options: Any) -> None:
    """The curvature is that of the definition, and the basis diagonalises the reference's factors."""
    exact = exact_of(name, options.get("curvature", "ggn"))
    kronecker = reference.case_curvature(name, "kronecker", **options)
    assert relative_error(curvature_in(posterior), by_definition(posterior, exact, kronecker)) < tolerance
    for where, basis in bases_of(posterior):
        torch.testing.assert_close(basis.T @ basis, torch.eye(len(where), dtype=F64), rtol=0, atol=1e-10)
        factors = basis.T @ kronecker[where[:, None], where] @ basis
        assert float((factors - torch.diag(factors.diagonal())).norm()) <= tolerance * float(factors.norm())
