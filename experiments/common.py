"""What the experiments share: options, tables, figures, data."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import torch
from torch import Tensor

import lapis

ROOT = Path(__file__).parents[1]
FIGURES = ROOT / "docs" / "figures"
RESULTS = ROOT / "docs" / "results"
COLOURS = ("#1b6ca8", "#d1495b", "#2e8b57", "#edae49")


def arguments(description: str | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--quick", action="store_true", help="less work, to see that it runs")
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "2")))
    chosen.started = time.perf_counter()
    return chosen


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def report(name: str, text: str, chosen: argparse.Namespace) -> None:
    """Print, and keep in docs/results/ (quick runs beside the full ones)."""
    seconds = time.perf_counter() - chosen.started
    run = f"`python experiments/{name}.py{' --quick' if chosen.quick else ''}`"
    text = f"{text}\n\n{run}, seed {chosen.seed}, {seconds:.0f} s on {torch.get_num_threads()} thread(s).\n"
    print(text)  # noqa: T201
    RESULTS.mkdir(parents=True, exist_ok=True)
    (RESULTS / f"{name}{'_quick' if chosen.quick else ''}.md").write_text(text, encoding="utf-8")


def save(figure: matplotlib.figure.Figure, name: str, chosen: argparse.Namespace) -> None:
    FIGURES.mkdir(parents=True, exist_ok=True)
    figure.savefig(FIGURES / f"{name}{'_quick' if chosen.quick else ''}.png", dpi=130, bbox_inches="tight")


def images(name: str, train: int | None, test: int | None, seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Random subsets of MNIST or Fashion-MNIST as (N, 1, 28, 28) in 0..1, standardised by the training pixels."""
    generator = torch.Generator().manual_seed(seed)
    parts = []
    for split, count in (("train", train), ("test", test)):
        x, y = lapis.data.images(name, split)
        chosen = torch.randperm(len(y), generator=generator)[:count]
        parts.append((x[chosen], y[chosen]))
    (x, y), (x_test, y_test) = parts
    mean, std = x.mean(), x.std()
    return (x - mean) / std, y, (x_test - mean) / std, y_test
