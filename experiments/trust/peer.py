"""laplace-torch's two recipes, run by the interpreter of .venv-bench; probabilities go to an .npz file.

    .venv-bench/bin/python experiments/trust/peer.py <setting> <seed> <all|last_layer> <marglik|gridsearch> <file.npz>

Everything else is laplace-torch's default: Kronecker factors, linearised predictions, probit link (but see `GRID` and
`loss`). Of its backends BackPACK is by far the quickest at Jacobians (LeNet: 1.7 s for 100 images, curvlinops 15 s) and
is taken where it has rules for all layers. For norms, embeddings and fused attention no backend has; there it is given
the linear and convolution layers alone, as its documentation advises, the other parameters being held fixed.
"""

from __future__ import annotations

import os
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from laplace import Laplace
from laplace.curvature import BackPackGGN, CurvlinopsGGN
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

sys.path.insert(0, str(Path(__file__).parents[1]))
from trust.settings import Loaded, load_setting

BATCH = 100
GRID = 11
"""Prior precisions tried between 1e-4 and 1e4; laplace-torch's own 100 would take nine times as long."""


def loss(probs: Tensor, targets: Tensor) -> Tensor:
    """The default metric of its grid search is never reset: every candidate is judged by the mean over all before it.

    A loss of our own makes it the search that it means to be.
    """
    return nn.functional.nll_loss(probs.log(), targets)


def fit(loaded: Loaded, weights: str, method: str, backend: Any) -> Any:
    train = DataLoader(TensorDataset(*loaded.train), batch_size=BATCH)
    posterior = Laplace(
        loaded.model, "classification", subset_of_weights=weights, hessian_structure="kron", backend=backend
    )
    posterior.fit(train)
    if method == "marglik":
        posterior.optimize_prior_precision(method="marglik", pred_type="glm")
    else:
        validation = DataLoader(TensorDataset(*loaded.validation), batch_size=BATCH)
        posterior.optimize_prior_precision(
            method="gridsearch", pred_type="glm", link_approx="probit", val_loader=validation, grid_size=GRID, loss=loss
        )
    return posterior


def hold_what_has_no_rule(model: nn.Module) -> None:
    """Take gradients of linear and convolution layers that are called as modules only."""
    ruled = {
        id(parameter)
        for module in model.modules()
        if isinstance(module, (nn.Linear, nn.Conv2d)) and type(module).__name__ in ("Linear", "Conv2d")
        for parameter in module.parameters(recurse=False)
    }
    for parameter in model.parameters():
        parameter.requires_grad_(id(parameter) in ruled)


def probabilities(posterior: Any, x: Tensor) -> Tensor:
    parts = [posterior(part, pred_type="glm", link_approx="probit").detach() for part in x.split(BATCH)]
    return torch.cat(parts)


def main() -> None:
    name, seed, weights, method, output = sys.argv[1:]
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    torch.backends.mha.set_fastpath_enabled(False)
    warnings.simplefilter("ignore")
    loaded = load_setting(name, int(seed))
    started = time.process_time()
    note = "" if weights == "last_layer" else "BackPACK"
    try:
        posterior = fit(loaded, weights, method, CurvlinopsGGN if weights == "last_layer" else BackPackGGN)
    except Exception as refused:  # noqa: BLE001 - whatever it stumbles over, the layers it knows are tried next
        loaded = load_setting(name, int(seed))
        hold_what_has_no_rule(loaded.model)
        note = f"linear and convolution layers only, after {type(refused).__name__}"
        posterior = fit(loaded, weights, method, CurvlinopsGGN)
    assert loaded.ood is not None
    sets = {"test": loaded.test[0], "shifted": loaded.shifted[0], "ood": loaded.ood}
    found = {part: probabilities(posterior, x).numpy() for part, x in sets.items()}
    np.savez(output, seconds=time.process_time() - started, note=note, **found)


if __name__ == "__main__":
    main()
