"""Which solver draws at the least price, by the number of images and of draws: block CG or SGD.

A LeNet of 46,678 weights on N images of MNIST, prior precision 34 (--precision). Prices are passes over the data a
draw, where a pass is a product of the GGN of all data with a vector (about 1.5 training epochs of arithmetic); errors
are sum |v - v*| / sum v* over the outputs' variances at 20 test images (one draw alone has variances near zero, of
which a mean of ratios says nothing), v* from block CG with the same white noise run to an estimated error of 0.005.
Every setting that ran is kept in --folder.
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from common import images, report, table
from torch import Tensor, nn
from trust.networks import lenet

import lapis
from lapis.curvature.products.jacobian import Jacobian

DRAWS = (1, 4)


def fitted(n_data: int, precision: float, seed: int) -> tuple[Any, Tensor]:
    """The posterior of a trained LeNet, and its Jacobian's rows at test images."""
    torch.manual_seed(seed)
    model, (x, y, test, _) = lenet(), images("mnist", n_data, 20, seed)
    optimiser = torch.optim.Adam(model.parameters())
    for _ in range(max(3, 15_000 // n_data)):
        for part in torch.randperm(len(x)).split(128):
            optimiser.zero_grad()
            nn.functional.cross_entropy(model(x[part]), y[part]).backward()
            optimiser.step()
    made: Any = lapis.laplace(
        model.eval(), (x, y), "classification", structure="implicit", prior=precision, weights="all"
    )
    batch = lapis.batches.Batch(test, torch.zeros(len(test)), 0)
    rows = Jacobian(made.network, made.likelihood.canonical, [batch]).with_kept_rows().rows()[0].flatten(0, 2)
    return made.with_solver(space="weights"), rows


def run(n_data: int, draws: int, precision: float, seed: int) -> dict[str, Any]:
    """Both solvers with the same white noise."""
    made, rows = fitted(n_data, precision, seed)
    found: dict[str, Any] = {"N": n_data, "draws": draws, "precision": precision, "seed": seed}
    variances, ways = {}, {"exact": {"error": 0.005}, "block": {"solver": "block"}, "sgd": {"solver": "sgd"}}
    for name, how in ways.items():
        began = time.process_time()
        drawn = made.draw(draws, **how)
        variances[name] = (rows @ drawn.deviations.mT).square().mean(1)
        found[name] = {
            "passes": drawn.drawing.products / draws,
            "error": float((variances[name] - variances["exact"]).abs().sum() / variances["exact"].sum()),
            "residual": max(drawn.drawing.residuals),
            "seconds": time.process_time() - began,
        }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path("build/draws_choice"))
    parser.add_argument("--sizes", type=int, nargs="+", default=[250, 1000, 4000])
    parser.add_argument("--precision", type=float, default=34.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="less work, to see that it runs")
    chosen = parser.parse_args()
    chosen.started = time.perf_counter()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    chosen.folder.mkdir(parents=True, exist_ok=True)
    for n_data in [60] if chosen.quick else chosen.sizes:
        for draws in DRAWS:
            path = chosen.folder / f"{n_data}_{draws}_{chosen.precision:g}_{chosen.seed}.json"
            if not path.exists():
                path.write_text(json.dumps(run(n_data, draws, chosen.precision, chosen.seed)), encoding="utf-8")
    rows = [json.loads(path.read_text(encoding="utf-8")) for path in chosen.folder.glob("*.json")]
    lines = [
        [f"{row['N']:,}", row["draws"], row["precision"], row["seed"]]
        + [f"{row[way][what]:.3g}" for way in ("block", "sgd") for what in ("passes", "error", "residual", "seconds")]
        for row in sorted(rows, key=lambda row: (-row["precision"], row["N"], row["draws"], row["seed"]))
        if (row["N"] == 60) == chosen.quick
    ]
    heads = [f"{way}: {what}" for way in ("block", "SGD") for what in ("passes", "error", "residual", "s")]
    report("draws_choice", table(("images", "draws", "precision", "seed", *heads), lines), chosen)


if __name__ == "__main__":
    main()
