"""Agreement with laplace-torch's subnetworks, torch-uncertainty's SWAG, posteriors' VI and torchmetrics' metrics.

Optional, as tests/test_laplace_torch.py is: `make peer-test` installs the peers and runs these.
"""

from __future__ import annotations

import copy
import importlib.util
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lapis

if any(importlib.util.find_spec(name) is None for name in ("laplace", "torch_uncertainty", "posteriors")):
    pytest.skip("the peers are not installed; `make peer-test` compares with them", allow_module_level=True)

pytestmark = pytest.mark.filterwarnings("ignore")  # those of the peers and of their dependencies

F64 = torch.float64


def problem() -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 7), nn.Tanh(), nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 3)).to(F64)
    x = torch.randn(40, 3, dtype=F64, generator=torch.Generator().manual_seed(1))
    return model, x, torch.arange(40) % 3


def test_a_subnetwork_is_laplace_torch_s() -> None:
    from laplace import FullSubnetLaplace
    from laplace.curvature import BackPackGGN

    model, x, y = problem()
    size = sum(p.numel() for p in model.parameters())
    chosen = torch.randperm(size, generator=torch.Generator().manual_seed(2))[:30].sort().values
    mask = torch.zeros(size, dtype=torch.bool)
    mask[chosen] = True
    ours = lapis.laplace(model, (x, y), "classification", weights=lapis.Subnetwork(by=mask), prior=lapis.Prior(2.0))
    theirs: Any = FullSubnetLaplace(
        copy.deepcopy(model), "classification", chosen, prior_precision=2.0, backend=BackPackGGN
    )
    theirs.fit(DataLoader(TensorDataset(x, y), batch_size=16))
    torch.testing.assert_close(
        ours.marginal_variance(), theirs.posterior_covariance.diagonal().to(F64), rtol=1e-6, atol=0
    )
    new = torch.randn(9, 3, dtype=F64, generator=torch.Generator().manual_seed(3))
    mean, covariance = theirs._glm_predictive_distribution(new)
    prediction = ours.predict(new)
    torch.testing.assert_close(prediction.f_mean, mean.to(F64), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(prediction.f_variance, covariance.diagonal(dim1=1, dim2=2).to(F64), rtol=1e-6, atol=1e-9)


def test_snapshots_are_torch_uncertainty_s() -> None:
    """Its statistics, not its draws: these divide by the largest rank, and by no root of two."""
    from benchmarks.methods import their_swag_class

    model, _, _ = problem()
    ours = lapis.SWAG(model, rank=4)
    theirs = their_swag_class()(model, 0, 1, max_num_models=4, var_clamp=0.0, num_estimators=0)
    generator = torch.Generator().manual_seed(4)
    for number in range(9):
        with torch.no_grad():
            for p in model.parameters():
                p.add_(0.1 * torch.randn(p.shape, dtype=F64, generator=generator))
        ours.collect()
        theirs.update_wrapper(number + 1)

    def flat(kind: str) -> Tensor:
        names = [name for name, _ in model.named_parameters()]
        parts = [theirs.swag_stats[f"{theirs.prfx}{name}_{kind}"] for name in names]
        return torch.cat([part.reshape(4 if kind == "covariance_sqrt" else 1, -1) for part in parts], 1)

    mean = flat("mean")[0]
    torch.testing.assert_close(ours.mean, mean, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(ours.variance, flat("sq_mean")[0] - mean**2, rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(ours.deviations, flat("covariance_sqrt"), rtol=1e-12, atol=1e-12)


def test_the_elbo_is_that_of_posteriors() -> None:
    """Its estimate by 4,000 draws, of the same Gaussian, within four standard errors (false alarms: 6e-5)."""
    from posteriors.vi import diag

    model, x, y = problem()
    ours = lapis.variational(model, (x, y), "classification", prior=1.0, steps=300, progress=False)
    shapes = {name: p.shape for name, p in model.named_parameters()}

    def tree(vector: Tensor) -> dict[str, Tensor]:
        parts = vector.split([shape.numel() for shape in shapes.values()])
        return {name: part.view(shape) for part, (name, shape) in zip(parts, shapes.items(), strict=True)}

    def log_posterior(weights: dict[str, Tensor], batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        f = torch.func.functional_call(model, weights, (batch[0],))
        prior = sum((-0.5 * w.square() - 0.5 * math.log(2 * math.pi)).sum() for w in weights.values())
        return -F.cross_entropy(f, batch[1], reduction="sum") + prior, torch.zeros(())

    torch.manual_seed(5)
    mean, deviation = tree(ours.mean), tree(ours.marginal_variance().sqrt())
    parts = torch.stack(
        [-diag.nelbo(mean, deviation, (x, y), log_posterior, 1.0, 100, stl=False)[0].detach() for _ in range(40)]
    )
    error = float(parts.std() / math.sqrt(len(parts)))
    assert abs(float(parts.mean() - ours.elbo())) < 4 * math.hypot(error, ours.inference.elbo_error)


def test_metrics_are_those_of_torchmetrics() -> None:
    from torchmetrics import functional
    from torchmetrics.functional.regression import continuous_ranked_probability_score

    generator = torch.Generator().manual_seed(6)
    probs = (2 * torch.randn(500, 4, dtype=F64, generator=generator)).softmax(-1)
    classes = torch.randint(4, (500,), generator=generator)
    theirs = functional.calibration_error(probs, classes, task="multiclass", num_classes=4, n_bins=15, norm="l1")
    assert float(lapis.metrics.ece(probs, classes, bins=15)) == pytest.approx(float(theirs), rel=1e-6)
    scores, labels = torch.rand(300, dtype=F64, generator=generator), torch.arange(300) % 3 == 0
    for own, other in ((lapis.metrics.auroc, functional.auroc), (lapis.metrics.aupr, functional.average_precision)):
        assert float(own(scores, labels)) == pytest.approx(float(other(scores, labels.long(), task="binary")), rel=1e-6)
    draws, targets = (torch.randn(shape, dtype=F64, generator=generator) for shape in ((9, 50), (50,)))
    expected = continuous_ranked_probability_score(draws.T, targets)
    assert float(lapis.metrics.crps_of_samples(draws, targets, fair=False)) == pytest.approx(float(expected), rel=1e-6)
