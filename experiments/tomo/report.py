"""The report of the tomography experiment, from what has been computed so far."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from common import report, save, table

from tomo import cells, centres, figures
from tomo.store import Store

DENSITIES = {
    "evidence": "linearised, evidence", "evidence + PredCP": "linearised, + PredCP",
    "evidence at theta*": "linearised, evidence at theta*", "dropout": "dropout", "TV": "TV + Gaussian",
}  # fmt: skip
BLOCKS = ("inward", "down.0", "down.1", "skip.0", "skip.1", "up.0", "up.1", "outward")


SLICES = (
    "Neither J nor K_yy in memory; pixel-wise deviations from 64 samples, densities of patches of 4 x 4. The peak is "
    "what the reconstruction took beyond what the process had before."
)
COST_MEMORY = ("peak MiB", "J MiB", "K_yy MiB")


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
    for section in (_column, _stopping, _centre, _surrogate, _growth, _naive, _slices):
        parts += section(entries)
    report("tomography", "\n\n".join(parts), chosen)


def spread(values: Sequence[float], digits: int = 2) -> str:
    """Mean and standard error."""
    if not values:
        return "-"
    error = statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else None
    return f"{statistics.mean(values):.{digits}f}" + ("" if error is None else f" ± {error:.{digits}f}")


def _settings(done: int, quick: bool) -> str:
    how, every = cells.setting(quick, *cells.grid(quick)[0]), len(cells.grid(quick)) * (2 if quick else 10)
    counts = [cells.setting(quick, *one).iterations for one in cells.grid(quick)]
    return (
        f"KMNIST, 28 x 28 pixels; U-net of {how.scales} scales x {how.channels} channels, {min(counts)} to "
        f"{max(counts)} iterations at rate {how.rate:g}: 3 % of those published (7,400 to 50,000, by angles and noise, "
        "for 32 channels) at a hundred times their rate; TV weights of the literature; noise, variances and lengths "
        "tuned. TV takes the best of six weights by the true PSNR; its Gaussian has the other images' root mean "
        f"squared error. Dropout: .05, at least {how.dropout_iterations} iterations, 1,000 draws. Mean ± standard "
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
    lines = []
    for name in cells.COLUMNS:
        scores = [spread([-row[name][key] for row in groups]) for key in ("joint", "tangent", "single")]
        square = spread([row[name]["mean_square"] for row in groups])
        lines.append([name, *scores, square, spread([row[name]["evidence"] for row in groups], 0)])
    return [
        "## The U-net column\n\nGroup norm, 20 angles, 5 % noise; a variance and a length for every block (groups) or "
        f"one of each for all; negative log likelihood per pixel; {len(groups)} image(s). Published (METHODS 12, "
        "another network and noise model): -2.240 at theta* with groups, -1.703 at t.\n\n"
        + table(
            [
                "evidence at", "around the network's image", "around the tangent mean", "pixel by pixel",
                "mean squared normalised error", "log evidence of the linear model",
            ],
            lines,
        )
    ]  # fmt: skip


def _stopping(entries: Mapping[str, Any]) -> list[str]:
    runs = {name.removeprefix("stopping "): entries[name] for name in sorted(entries) if name.startswith("stopping ")}
    if not runs:
        return []
    keys = ("iterations", "misfit", "network PSNR", "mean PSNR", "log likelihood", "within two")
    lines = [[name, how, *(f"{run[how][key]:.4g}" for key in keys)] for name, run in runs.items() for how in run]
    looks = [
        f"{name}: " + ", ".join(f"{value:.0f} ({when})" for when, value in run["evidence"]["looks"])
        for name, run in runs.items()
    ]
    return [
        "## Stopping by the evidence\n\n8 channels, no total variation in training, phantom and chest at 24 x 24; at "
        "most ten looks, at averages of the weights. Log evidence at t at these looks (after iterations): "
        + "; ".join(looks)
        + ".\n\n"
        + table(
            ["image", "stopped by", "iterations", "misfit / noise", *keys[2:4], "log likelihood per pixel", keys[5]],
            lines,
        )
    ]  # fmt: skip


def _centre(entries: Mapping[str, Any]) -> list[str]:
    rows = {name.removeprefix("centre "): entries[name] for name in sorted(entries) if name.startswith("centre ")}
    if not rows:
        return []
    gathered: dict[str, list[Mapping[str, Any]]] = {}
    for name, row in rows.items():
        image, *rest = name.split(", ")
        gathered.setdefault(", ".join(["KMNIST" if image.startswith("KMNIST") else image, *rest]), []).append(row)
    lines = []
    for name, found in gathered.items():
        cells_of = [
            "/".join(f"{statistics.mean(row[c][key] for row in found):.{digits}f}" for c in centres.CENTRES)
            for key, digits in (("psnr", 1), ("ll", 2), ("within2", 2), ("z2", 2))
        ]
        means = [f"{statistics.mean(row[key] for row in found):.2f}" for key in ("misfit", "moved")]
        lines.append([name, len(found), *means, *cells_of])
    return [
        "## Where to centre the distribution\n\nThe defaults of `reconstruct` (1,000 iterations, noise stated) but "
        "where the name says otherwise; around the linear model's own mean / the network's image / between the two by "
        "the discrepancy (the default). Misfit of the network over the noise; share of the way moved.\n\n"
        + table(
            [
                "image", "images", "misfit", "moved", "PSNR", "log likelihood per pixel", "within two deviations",
                "mean squared normalised error",
            ],
            lines,
        )
    ]  # fmt: skip


def _surrogate(entries: Mapping[str, Any]) -> list[str]:
    if "surrogate" not in entries:
        return []
    found = dict(entries["surrogate"])
    lengths = ", ".join(f"{length:.2g}" for length in found.pop("lengths"))
    lines = [[name, spread(values, 0)] for name, values in found.items()]
    return [
        "## Priors over images\n\nTotal variation of six draws each (figures/tomography_surrogate.png); lengths "
        f"of TV-PredCP: {lengths} pixels.\n\n" + table(["prior", "total variation"], lines)
    ]


def _growth(entries: Mapping[str, Any]) -> list[str]:
    lines = []
    for name, value in entries.items():
        if name.startswith("cost "):
            numbers = [f"{1000 * value['seconds']:.0f}", *(f"{value[key]:.0f}" for key in COST_MEMORY)]
            lines.append([*name.split()[1:], value["measurements"], value["weights"], *numbers])
    head = ["size", "angles", "measurements", "weights", "ms a product with K_yy", *COST_MEMORY]
    words = (
        "## Growth\n\nfloat32, one thread, blocks of 8 vectors; processor time. Neither J nor K_yy is held in memory: "
        "the peak is what making the products took beyond what the process had before.\n\n"
    )
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
    return [
        "## Larger images by products, 5 % noise\n\nName, size, angles. " + SLICES + "\n\n" + table(["", *found], lines)
    ]
