"""Products with the Jacobian and the GGN against explicit matrices."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from cases import CASES, F64
from lapis.batches import Batch, batches
from lapis.curvature.jacobian import Jacobian
from lapis.curvature.ways import FOR_ONE, FOR_SEVERAL, UNABLE, Pass, differentiable, proven
from lapis.likelihoods import Likelihood
from lapis.network import Network
from reference import case_data, case_ggn, case_jacobians
from untouched import untouched


def held(x: object, y: Tensor, size: int = 4) -> list[Batch]:
    return list(batches((x, y), dtype=F64, device=torch.device("cpu"), batch_size=size)[0])


pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")


def factors_of(jacobian: Jacobian, likelihood: Likelihood) -> list[Tensor]:
    targets = [
        likelihood.targets(batch.targets, f, shape)
        for batch, f, shape in zip(jacobian.batches, jacobian.outputs, jacobian.shapes, strict=True)
    ]
    return [likelihood.factor(f, t) for f, t in zip(jacobian.outputs, targets, strict=True)]


def check(jacobian: Jacobian, likelihood: Likelihood, name: str, count: int) -> None:
    explicit = torch.cat(case_jacobians(name))
    generator = torch.Generator().manual_seed(1)
    v = torch.randn(count, jacobian.size, generator=generator, dtype=F64)
    u = [torch.randn(count, *f.shape, generator=generator, dtype=F64) for f in jacobian.outputs]
    flat = torch.cat([part.flatten(1) for part in u], 1)
    pairs = [
        (torch.cat([part.flatten(1) for part in jacobian.forward(v)], 1), v @ explicit.T),
        (jacobian.backward(u), flat @ explicit),
        (jacobian.ggn(v, factors_of(jacobian, likelihood)), v @ case_ggn(name)),
    ]
    for found, exact in pairs:
        assert not found.requires_grad
        assert float((found - exact.detach()).abs().max()) <= 1e-10 * max(1.0, float(exact.abs().max()))


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("name", list(CASES))
def test_products_are_those_of_the_explicit_jacobian(name: str, count: int) -> None:
    model, x, y, spec = case_data(name)
    likelihood, network = spec.build(), Network(model)
    with untouched(model):
        kept = Jacobian(network, likelihood.canonical, held(x, y))
        assert kept.keeps
        check(kept, likelihood, name, count)
        check(Jacobian(network, likelihood.canonical, held(x, y), kept_bytes=0), likelihood, name, count)
        for way in FOR_SEVERAL if count > 1 else FOR_ONE:
            forced = Jacobian(network, likelihood.canonical, held(x, y), way=way)
            if able(forced, way, count):
                check(forced, likelihood, name, count)
            else:
                assert way != "rows"


def able(jacobian: Jacobian, way: str, count: int) -> bool:
    """What the library itself finds out before it trusts a way, on every batch."""
    v = torch.randn(count, jacobian.size, generator=torch.Generator().manual_seed(2), dtype=F64)
    try:
        with jacobian.network.prepared(), differentiable():
            passes = [Pass(jacobian.network, jacobian.canonical, batch.inputs) for batch in jacobian.batches]
            return all(proven(examples, way, v) for examples in passes)
    except UNABLE:
        return False
