"""Agreement with laplace-torch 0.3 where it is right: fully connected networks, float64, its BackPACK backend.

Optional. laplace-torch is no dependency of Lapis, and asks for torchvision, which Lapis never installs. So one command
puts it, with only those of its dependencies that its import needs, into a folder of its own, and runs these tests:

    make peer-test

Without that folder on the path they are skipped.
"""

from __future__ import annotations

import copy
import importlib.util
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lapis

if importlib.util.find_spec("laplace") is None:
    pytest.skip("laplace-torch is not installed; `make peer-test` compares with it", allow_module_level=True)

pytestmark = pytest.mark.filterwarnings("ignore")  # those of the peer's own dependencies

F64 = torch.float64
TOLERANCE = 1e-10
"""Relative; the agreement asked for is 1e-6."""
STRUCTURES = {"dense": "full", "kronecker": "kron", "diagonal": "diag"}
every_structure = pytest.mark.parametrize("structure", STRUCTURES)
every_likelihood = pytest.mark.parametrize("likelihood", ["regression", "classification"])
NOISE = 0.6


def draw(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


def problem(likelihood: str) -> tuple[nn.Module, DataLoader[Any]]:
    """A network of three layers, and 40 examples in batches of 16, 16 and 8."""
    outputs = 2 if likelihood == "regression" else 3
    layers = (nn.Linear(3, 7), nn.Tanh(), nn.Linear(7, 5), nn.Sigmoid(), nn.Linear(5, outputs))
    y = draw(1, 40, 2) if likelihood == "regression" else torch.arange(40) % 3
    return nn.Sequential(*layers).to(F64), DataLoader(TensorDataset(draw(0, 40, 3), y), batch_size=16)


def peer(model: nn.Module, loader: Any, likelihood: str, structure: str, precision: Any, mean: float = 0.0) -> Any:
    """The same posterior by laplace-torch, on a copy: BackPACK leaves its hooks in the model."""
    from laplace import Laplace
    from laplace.curvature import BackPackGGN

    noise = {"sigma_noise": NOISE} if likelihood == "regression" else {}
    posterior = Laplace(
        copy.deepcopy(model),
        likelihood,
        subset_of_weights="all",
        hessian_structure=STRUCTURES[structure],
        prior_precision=precision,
        prior_mean=mean,
        backend=BackPackGGN,
        **noise,
    )
    posterior.fit(loader)
    return posterior


def ours(model: nn.Module, loader: Any, likelihood: str, structure: str, prior: Any) -> Any:
    chosen = lapis.Gaussian(NOISE) if likelihood == "regression" else lapis.Categorical()
    bias = "separate" if structure == "kronecker" else None
    return lapis.laplace(model, loader, chosen, structure=structure, prior=prior, bias=bias)


def close(found: Tensor, expected: Tensor) -> bool:
    found, expected = found.detach().to(F64), expected.detach().to(F64)
    assert found.shape == expected.shape
    error = float((found - expected).abs().max() / expected.abs().max())
    print(f"relative difference {error:.1e}")
    return error < TOLERANCE


@every_likelihood
@every_structure
def test_log_evidence_agrees(structure: str, likelihood: str) -> None:
    model, loader = problem(likelihood)
    expected = peer(model, loader, likelihood, structure, 0.37)
    found = ours(model, loader, likelihood, structure, 0.37)
    assert close(found.log_likelihood(), expected.log_likelihood)
    print(f"log evidence {float(found.log_evidence()):.12f}, theirs {float(expected.log_marginal_likelihood()):.12f}")
    assert close(found.log_evidence(), expected.log_marginal_likelihood())


@every_likelihood
@every_structure
def test_log_evidence_with_a_prior_for_each_parameter_agrees(structure: str, likelihood: str) -> None:
    model, loader = problem(likelihood)
    precision = torch.tensor([0.2, 0.5, 1.0, 2.0, 0.1, 3.0], dtype=F64)
    expected = peer(model, loader, likelihood, structure, precision, mean=0.1)
    prior = lapis.Prior(precision, groups="parameter", mean=0.1)
    found = ours(model, loader, likelihood, structure, prior)
    assert close(found.log_evidence(), expected.log_marginal_likelihood())


@every_likelihood
@every_structure
def test_functional_variance_agrees(structure: str, likelihood: str) -> None:
    model, loader = problem(likelihood)
    x = draw(2, 5, 3)
    mean, variance = peer(model, loader, likelihood, structure, 0.37)._glm_predictive_distribution(x)
    prediction = ours(model, loader, likelihood, structure, 0.37).predict(x)
    assert close(prediction.f_mean, mean)
    assert close(prediction.f_covariance, variance)
