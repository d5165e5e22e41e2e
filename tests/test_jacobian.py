"""Products with the Jacobian and the GGN against explicit matrices."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from cases import CASES, F64
from lapis.batches import Batch, batches
from lapis.curvature.jacobian import Jacobian
from lapis.network import Network
from reference import case_data, case_ggn, case_jacobians


def held(x: object, y: Tensor, size: int = 2) -> list[Batch]:
    return list(batches((x, y), dtype=F64, device=torch.device("cpu"), batch_size=size)[0])


@pytest.mark.parametrize("name", list(CASES))
def test_products_are_those_of_the_explicit_jacobian(name: str) -> None:
    model, x, y, spec = case_data(name)
    likelihood = spec.build()
    data = held(x, y)
    jacobian = Jacobian(Network(model), likelihood.canonical, data)
    explicit = torch.cat(case_jacobians(name))
    generator = torch.Generator().manual_seed(1)
    v = torch.randn(3, jacobian.size, generator=generator, dtype=F64)
    pushed = torch.cat([part.flatten(1) for part in jacobian.forward(v)], 1)
    torch.testing.assert_close(pushed, v @ explicit.T, rtol=1e-10, atol=1e-10)
    u = [torch.randn(3, *f.shape, generator=generator, dtype=F64) for f in jacobian.outputs]
    flat = torch.cat([part.flatten(1) for part in u], 1)
    torch.testing.assert_close(jacobian.backward(u), flat @ explicit, rtol=1e-10, atol=1e-10)
    targets = [
        likelihood.targets(batch.targets, f, shape)
        for batch, f, shape in zip(data, jacobian.outputs, jacobian.shapes, strict=True)
    ]
    factors = [likelihood.factor(f, t) for f, t in zip(jacobian.outputs, targets, strict=True)]
    torch.testing.assert_close(jacobian.ggn(v, factors), v @ case_ggn(name), rtol=1e-10, atol=1e-10)
