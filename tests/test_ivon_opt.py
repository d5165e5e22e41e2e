"""Agreement with ivon-opt 0.1.3 given the same noise: the same iterates for 50 steps.

Optional, as the comparison with laplace-torch: `make peer-test`. Without the package the tests are skipped.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch
from torch import Tensor

from lapis.optim import IVON
from lapis.optim.draws import Draws
from test_optim import N, batch, loss_of, network, weights

if importlib.util.find_spec("ivon") is None:
    pytest.skip("ivon-opt is not installed; `make peer-test` compares with it", allow_module_level=True)


@pytest.mark.parametrize("clip", [float("inf"), 0.05])
@pytest.mark.parametrize("rescale", [True, False])
@pytest.mark.parametrize("draws", [1, 3])
def test_iterates_are_those_of_ivon_opt(
    clip: float, rescale: bool, draws: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    import ivon

    options: dict[str, Any] = {"lr": 0.05, "hess_init": 0.5, "clip_radius": clip, "rescale_lr": rescale}
    ours = network()
    optimiser = IVON(
        ours.parameters(), data_size=N, prior_precision=0.02 * N, betas=(0.8, 0.97), draws=draws, **options
    )
    for step in range(50):

        def closure(step: int = step) -> Tensor:
            optimiser.zero_grad()
            loss = loss_of(ours, *batch(step))
            loss.backward()
            return loss

        optimiser.step(closure)

    noise = Draws(0)

    theirs = network()
    like = weights(theirs)
    peer = ivon.IVON(theirs.parameters(), ess=N, beta1=0.8, beta2=0.97, weight_decay=0.02, mc_samples=draws, **options)
    real = torch.randn
    for step in range(50):
        for _ in range(draws):
            (drawn,) = noise.normal([like])
            monkeypatch.setattr(torch, "randn", lambda *_, drawn=drawn, **__: drawn)
            with peer.sampled_params(train=True):
                monkeypatch.setattr(torch, "randn", real)
                peer.zero_grad()
                loss_of(theirs, *batch(step)).backward()
            noise.count()
        peer.step()
    assert torch.allclose(weights(ours), weights(theirs), rtol=1e-9, atol=1e-12)
    found = torch.cat([optimiser.state[p]["hessian"].reshape(-1) for p in ours.parameters()])
    assert torch.allclose(found, peer.param_groups[0]["hess"], rtol=1e-9)
