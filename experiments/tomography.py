"""Tomography with error maps one can check: the probabilistic deep image prior beside TV and dropout.

Images are measured by few noisy projections, and reconstructed by back-projection, total variation, a deep image prior,
its linearised posterior (tuned by the evidence, with and without the TV predictive complexity prior), and one that was
trained with dropout. Scores are PSNR, SSIM and the log likelihood of the true image. Every piece of work is kept in
docs/results/tomography.json, from which an interrupted run goes on; the report holds what is there. LAPIS_PIECES names
the pieces to run ("example surrogate costs table column stopping centre slices").
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from tempfile import gettempdir
from typing import Any

import torch
from common import FIGURES, arguments, save
from tomo import cells, centres, figures, large, priors
from tomo.cells import grid, setting
from tomo.report import written
from tomo.store import Store

from lapis import imaging

COLUMN_IMAGES = 6
STOPPING = ((20, 5), (10, 10))
"""Angles and per cent of noise."""
TV_RATE = 6.0
LARGE = (
    ("chest", 128, 40), ("phantom", 128, 40), ("phantom", 64, 40), ("phantom", 96, 40), ("phantom", 128, 20),
    ("phantom", 128, 10),
)  # fmt: skip

FIRST = 10
"""Of the ten images of the table: `point="trained"` was chosen while looking at earlier ones."""


def costs(store: Store, chosen: argparse.Namespace) -> None:
    channels = (4, 4) if chosen.quick else (16, 16, 16)
    for size, angles in ((16, 5),) if chosen.quick else ((64, 20), (96, 20), (128, 20), (128, 10), (128, 40)):
        store.get(f"cost {size} {angles}", lambda: large.product_cost(size, angles, channels))  # noqa: B023
    published = (4, 4) if chosen.quick else (32, 32, 32)
    store.get("naive", lambda: large.naive_cost(12 if chosen.quick else 28, 20, published))


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


def surrogate(store: Store, chosen: argparse.Namespace) -> None:
    """Priors over images side by side: TV, its Gaussian surrogate with the complexity prior, independent pixels."""

    def work() -> dict[str, Any]:
        shape, generator = (28, 28), torch.Generator().manual_seed(0)
        drawn = {"TV": priors.variation_samples(shape, TV_RATE, 6, 20 if chosen.quick else 1000, generator)}
        mean = float(imaging.total_variation(drawn["TV"]).mean())
        drawn["TV-PredCP"], lengths = priors.surrogate_samples(shape, mean, 6, generator)
        white = torch.randn(drawn["TV"].shape, generator=generator, dtype=torch.float64)
        drawn["factorised Gaussian"] = 0.5 + priors.SPREAD * white
        save(figures.surrogates(drawn), "tomography_surrogate", chosen)
        found = {name: imaging.total_variation(images).tolist() for name, images in drawn.items()}
        return found | {"lengths": lengths}

    store.get("surrogate", work)


def table(store: Store, chosen: argparse.Namespace) -> None:
    """Image by image, so that an interrupted run has whole images."""
    for index, truth in enumerate(cells.kmnist(FIRST + (2 if chosen.quick else 10))[FIRST:], FIRST):
        for angles, percent in grid(chosen.quick):
            name, how = f"cell {index} {angles} {percent}", setting(chosen.quick, angles, percent)
            store.get(name, lambda: cells.cell(index, angles, percent, how, truth)[0])  # noqa: B023


def column(store: Store, chosen: argparse.Namespace) -> None:
    """The U-net with group norm: evidence at theta* and at t, for METHODS 12."""
    for index, truth in enumerate(cells.kmnist(1 if chosen.quick else COLUMN_IMAGES)):
        name = f"group norm {index}"
        store.get(name, lambda: cells.normalised(index, setting(chosen.quick), truth))  # noqa: B023


def stopping(store: Store, chosen: argparse.Namespace) -> None:
    size, iterations = (10, 20) if chosen.quick else (24, 1500)
    drawn = {f"KMNIST {index}": cells.kmnist(FIRST + 2)[index] for index in (FIRST, FIRST + 1)}
    images = {"phantom": imaging.shepp_logan(size)} | ({} if chosen.quick else {"chest": large.chest(size)} | drawn)
    for name, truth in images.items():
        for angles, percent in STOPPING[:1] if chosen.quick else STOPPING:
            key = f"stopping {name}, {angles} angles, {percent} %"
            store.get(key, lambda: cells.stopping(truth, angles, percent, iterations, 0))  # noqa: B023


def centre(store: Store, chosen: argparse.Namespace) -> None:
    """The default of `reconstruct`: the three centres of one posterior."""
    for name, (truth, angles, percent, seed, options) in centres.settings(chosen.quick).items():
        store.get(f"centre {name}", lambda: centres.scores(truth, angles, percent, seed, options))  # noqa: B023


def slices(store: Store, chosen: argparse.Namespace) -> None:
    """The phantom as it grows, and the chest slice, by products."""
    channels, iterations, steps = ((4, 4), 20, 2) if chosen.quick else ((16, 16, 16, 16), 1000, 10)
    sizes = (("phantom", 24, 10),) if chosen.quick else LARGE
    for name, size, angles in sizes:
        truth = large.chest(size) if name == "chest" else imaging.shepp_logan(size)

        def work() -> Any:
            kept = Path(gettempdir()) / f"lapis-tomography-{name}-{size}-{angles}.lapis"  # noqa: B023
            scores, shown = large.reconstructed(truth, angles, channels, iterations, steps, kept)  # noqa: B023
            if (name, size, angles) == next(entry for entry in sizes if entry[0] == name):  # noqa: B023
                save(figures.large({name: shown}), f"tomography_{name}", chosen)  # noqa: B023
            return scores

        store.get(f"slice {name} {size} {angles}", work)


PIECES = {
    "example": example, "surrogate": surrogate, "costs": costs, "table": table, "column": column,
    "stopping": stopping, "centre": centre, "slices": slices,
}  # fmt: skip

if __name__ == "__main__":
    only = os.environ.get("LAPIS_PIECES", " ".join(PIECES)).split()
    chosen = arguments(__doc__)
    torch.set_num_threads(1)
    FIGURES.mkdir(parents=True, exist_ok=True)
    store = Store(chosen.quick)
    for name, piece in PIECES.items():
        if name in only:
            piece(store, chosen)
            written(store, chosen, __doc__)
    if not only:
        written(store, chosen, __doc__)
