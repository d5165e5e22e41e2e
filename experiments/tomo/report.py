"""The report of the tomography experiment, from what has been computed so far."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from common import report, save, table

from tomo import cells, figures
from tomo.store import Store

DENSITIES = {
    "evidence": "linearised, evidence", "evidence + PredCP": "linearised, + PredCP",
    "evidence at theta*": "linearised, evidence at theta*", "dropout": "dropout", "TV": "TV + Gaussian",
}  # fmt: skip
BLOCKS = ("inward", "down.0", "down.1", "skip.0", "skip.1", "up.0", "up.1", "outward")


def written(store: Store, chosen: argparse.Namespace, introduction: str | None) -> None:
    """Write the report and the figure of calibration."""
    entries = store.entries
    parts = ["# Tomography", (introduction or "").split("\n\n", 1)[1].strip()]
    done = [entries[name] for name in sorted(entries) if name.startswith("cell ")]
    if done:
        parts += [_settings(len(done), chosen.quick), _scores(entries, chosen.quick)]
        parts += [] if chosen.quick else [_switched_off(done)]
        pooled = {
            m: [sum(bin_) for bin_ in zip(*(row[m]["histogram"] for row in done), strict=True)] for m in figures.METHODS
        }
        save(figures.calibration(pooled), "tomography_calibration", chosen)
    for section in (_column, _growth, _naive, _slices):
        parts += section(entries)
    report("tomography", "\n\n".join(parts), chosen)


def spread(values: Sequence[float], digits: int = 2) -> str:
    """Mean and standard error."""
    if not values:
        return "-"
    error = statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else None
    return f"{statistics.mean(values):.{digits}f}" + ("" if error is None else f" ± {error:.{digits}f}")


def _settings(done: int, quick: bool) -> str:
    how, every = cells.setting(quick), len(cells.grid(quick)) * (2 if quick else 10)
    return (
        f"KMNIST, 28 x 28 pixels; U-net of {how.scales} scales x {how.channels} channels, {how.iterations} iterations "
        f"at rate {how.rate:g} (published: 32 channels, 7,400 to 50,000 iterations at 1e-4), TV weights of the "
        "literature; noise, variances and lengths tuned. TV takes the best of five weights by the true PSNR; its "
        "Gaussian has the other images' root mean squared error. Dropout: share .05, 1,000 draws. Mean ± standard "
        f"error over images; {done} of {every} cells so far."
    )


def _scores(entries: Mapping[str, Any], quick: bool) -> str:
    quality, density = [], []
    for angles, percent in cells.grid(quick):
        names = [name for name in sorted(entries) if name.startswith("cell ") and name.endswith(f" {angles} {percent}")]
        rows = [entries[name] for name in names]
        if not rows:
            continue
        errors = [row["TV"]["rmse"] for row in rows]
        tv = [cells.tv_density(errors, i) for i in range(len(errors))] if len(errors) > 1 else []
        here = [angles, f"{percent} %", len(rows)]

        def both(method: str, rows: list[Any] = rows) -> str:
            values = {key: [row[method][key] for row in rows] for key in ("psnr", "ssim")}
            return f"{spread(values['psnr'], 1)} / {spread(values['ssim'], 3)}"

        tangent = spread([row["evidence"]["tangent"]["psnr"] for row in rows], 1)
        quality.append([*here, *map(both, ("FBP", "TV", "evidence", "dropout")), tangent])
        for key, words in (("joint", here), ("single", ["", "pixel by pixel", ""])):
            values = {m: [row[m][key] for row in rows] for m in DENSITIES if m != "TV"} | {"TV": tv}
            density.append([*words, *(spread(values[m]) for m in DENSITIES)])
    head = ["angles", "noise", "images"]
    return (
        "## PSNR / SSIM\n\n"
        + table([*head, "FBP", "TV", "DIP", "dropout DIP", "tangent mean (PSNR)"], quality)
        + "\n\n## Log likelihood per pixel\n\nAbove jointly over all pixels, below with the same variances pixel by "
        "pixel; around the network's image.\n\n" + table([*head, *DENSITIES.values()], density)
    )


def _switched_off(rows: Sequence[Mapping[str, Any]]) -> str:
    lines = []
    for method in cells.VARIANTS:
        share = [statistics.mean(row[method]["variances"][i] < 1.1e-3 for row in rows) for i in range(len(BLOCKS))]
        lines.append([DENSITIES[method], *(f"{100 * value:.0f} %" for value in share)])
    return "## Relevance: share of cells in which a block was switched off\n\n" + table(["", *BLOCKS], lines)


def _column(entries: Mapping[str, Any]) -> list[str]:
    groups = [entries[name] for name in sorted(entries) if name.startswith("group norm")]
    if not groups:
        return []
    lines = [
        [name, *(spread([-row[name][key] for row in groups]) for key in ("joint", "tangent", "single"))]
        for name in groups[0]
    ]
    return [
        "## The U-net column\n\nGroup norm, 20 angles, 5 % noise, every block its own variance; negative log "
        f"likelihood per pixel; {len(groups)} image(s). Published (METHODS 12): -2.240 at theta*, -1.703 at t.\n\n"
        + table(["evidence at", "around the network's image", "around the tangent mean", "pixel by pixel"], lines)
    ]


def _growth(entries: Mapping[str, Any]) -> list[str]:
    lines = []
    for name, value in entries.items():
        if name.startswith("cost "):
            numbers = [f"{1000 * value['seconds']:.0f}", f"{value['J MiB']:.0f}", f"{value['K_yy MiB']:.0f}"]
            lines.append([*name.split()[1:], value["measurements"], value["weights"], *numbers])
    head = ["size", "angles", "measurements", "weights", "ms a product with K_yy", "MiB of J", "MiB of K_yy"]
    words = "## Growth\n\nfloat32, one thread, blocks of 8 vectors; neither J nor K_yy is held in memory.\n\n"
    return [words + table(head, sorted(lines, key=lambda line: (int(line[0]), int(line[1]))))] if lines else []


def _naive(entries: Mapping[str, Any]) -> list[str]:
    if "naive" not in entries:
        return []
    lines = [[name, f"{value:.3g}"] for name, value in entries["naive"].items()]
    words = "## With J and without\n\n28 x 28, 20 angles, 32 channels, float64; processor seconds, and MiB.\n\n"
    return [words + table(["", ""], lines)]


def _slices(entries: Mapping[str, Any]) -> list[str]:
    found = {name.removeprefix("slice "): entries[name] for name in sorted(entries) if name.startswith("slice ")}
    if not found:
        return []
    keys = list(next(iter(found.values())))
    lines = [[key, *(f"{value[key]:.3g}" for value in found.values())] for key in keys]
    return ["## 128 x 128, 40 angles, 5 % noise, by products\n\n" + table(["", *found], lines)]
