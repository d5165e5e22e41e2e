"""Tomography with error maps one can check: the probabilistic deep image prior beside TV and dropout.

Images are measured by few noisy projections, and reconstructed by back-projection, total variation, a deep image prior,
its linearised posterior (tuned by the evidence, with and without the TV predictive complexity prior), and one that was
trained with dropout. Scores are PSNR, SSIM and the log likelihood of the true image. Every piece of work is kept in
docs/results/tomography.json, from which an interrupted run goes on; the report holds what is there.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from tempfile import gettempdir
from typing import Any

import torch
from common import FIGURES, arguments, save
from tomo import cells, figures, large, priors
from tomo.cells import grid, setting
from tomo.report import written
from tomo.store import Store

from lapis import imaging

COLUMN_IMAGES = 3
FIRST = 10
"""Of the ten images of the table: `point="trained"` was chosen while looking at earlier ones."""


def costs(store: Store, quick: bool) -> None:
    channels = (4, 4) if quick else (16, 16, 16)
    for size, angles in ((16, 5),) if quick else ((64, 20), (96, 20), (128, 20), (128, 10), (128, 40)):
        store.get(f"cost {size} {angles}", lambda: large.product_cost(size, angles, channels))  # noqa: B023
    published = (4, 4) if quick else (32, 32, 32)
    store.get("naive", lambda: large.naive_cost(12 if quick else 28, 20, published))


def example(store: Store, chosen: argparse.Namespace) -> None:
    """Maps of one image, pictures of priors, and the blocks' relevance."""

    def work() -> dict[str, Any]:
        truth = cells.kmnist(1)[0]
        _, pictures, deep = cells.cell(0, 20, 5, setting(chosen.quick), truth)
        save(figures.maps(pictures), "tomography_maps", chosen)
        generator = torch.Generator().manual_seed(0)
        tuned = {name: deep.retuned(tune_noise=True, **cells.VARIANTS[name]) for name in cells.VARIANTS}
        shape = (truth.shape[0], truth.shape[1])
        drawn = {
            "TV": priors.variation_samples(shape, 2.0, 4, 20 if chosen.quick else 300, generator),
            "TV-PredCP": priors.prior_samples(tuned["evidence + PredCP"], 4, generator, factorised=False),
            "factorised Gaussian": priors.prior_samples(tuned["evidence + PredCP"], 4, generator, factorised=True),
        }
        shares = {name: priors.relevance(one) for name, one in tuned.items()}
        save(figures.priors(drawn, shares), "tomography_priors", chosen)
        variation = {name: float(imaging.total_variation(images).mean()) for name, images in drawn.items()}
        return {"shares": shares, "variation": variation}

    store.get("example", work)


def table(store: Store, quick: bool) -> None:
    """Image by image, so that an interrupted run has whole images."""
    for index, truth in enumerate(cells.kmnist(FIRST + (2 if quick else 10))[FIRST:], FIRST):
        for angles, percent in grid(quick):
            name = f"cell {index} {angles} {percent}"
            store.get(name, lambda: cells.cell(index, angles, percent, setting(quick), truth)[0])  # noqa: B023


def column(store: Store, quick: bool) -> None:
    """The U-net with group norm: evidence at theta* and at t, for METHODS 12."""
    for index, truth in enumerate(cells.kmnist(1 if quick else COLUMN_IMAGES)):
        name = f"group norm {index}"
        store.get(name, lambda: cells.normalised(index, setting(quick), truth))  # noqa: B023


def slices(store: Store, chosen: argparse.Namespace) -> None:
    """The chest slice and the phantom, by products."""
    size, channels = (24, (4, 4)) if chosen.quick else (128, (16, 16, 16, 16))
    shown: dict[str, Any] = {}
    for name, truth in (("chest", large.chest(size)), ("phantom", imaging.shepp_logan(size))):

        def work() -> Any:
            kept = Path(gettempdir()) / f"lapis-tomography-{name}-{size}.lapis"  # noqa: B023
            iterations, steps = (20, 2) if chosen.quick else (1000, 15)
            scores, shown[name] = large.reconstructed(truth, 40, channels, iterations, steps, kept)  # noqa: B023
            return scores

        store.get(f"slice {name}", work)
        if name in shown:
            save(figures.large({name: shown[name]}), f"tomography_{name}", chosen)


if __name__ == "__main__":
    chosen = arguments(__doc__)
    torch.set_num_threads(1)
    FIGURES.mkdir(parents=True, exist_ok=True)
    store = Store(chosen.quick)
    for piece in (example, costs, table, column, slices):
        piece(store, chosen if piece in (example, slices) else chosen.quick)
        written(store, chosen, __doc__)
