"""Linear models with up to two million weights and observations: time, memory and growth; EM; coverage; scikit-learn.

Phi has ten entries N(0, 1) a row, in columns of which some are frequent and some rare; weights N(0, 1), noise 0.5. Each
size runs in a process of its own. Seconds are of the processor, on one thread; memory is the most that the process held
during the fit, the data included, and beside them. EM starts from a precision of 10 and a noise of 1. Coverage: of 95%
intervals (`interval` and `f_interval`, which account for the number of draws by Student's t), over 20,000 new
observations, and over their functions' values f without noise. Sizes that have run are kept in build/linear, and not
run again.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import COLOURS, arguments, report, save, table
from matplotlib import pyplot as plt
from scipy import sparse
from sklearn.linear_model import ARDRegression, BayesianRidge

import lapis

ENTRIES, NOISE, NEW = 10, 0.5, 20_000


def problem(n: int, d: int, seed: int) -> tuple[Any, Any, Any, Any]:
    """Phi (n, d), targets, new rows, and the functions' values there."""
    source = np.random.default_rng(seed)
    columns = (source.random((n + NEW, ENTRIES)) ** 2 * d).astype(np.int64)
    rows = np.repeat(np.arange(n + NEW), ENTRIES)
    values = source.standard_normal(columns.size)
    phi = sparse.csr_array((values, (rows, columns.reshape(-1))), shape=(n + NEW, d))
    f = phi @ source.standard_normal(d)
    y = f + NOISE * source.standard_normal(n + NEW)
    return phi[:n], y[:n], (phi[n:], y[n:]), f[n:]


def measured(n: int, d: int, draws: int, seed: int, em: bool) -> dict[str, Any]:
    """One size, in this process."""
    torch.set_num_threads(1)
    phi, y, (new, targets), f = problem(n, d, seed)
    Path("/proc/self/clear_refs").write_text("5")  # the peak so far is that of making the data
    before = megabytes("VmRSS")
    began, clock = time.process_time(), time.perf_counter()
    posterior = lapis.linear(phi, y, lapis.Gaussian(NOISE), 1.0, samples=draws)
    found: dict[str, Any] = {"fit": time.process_time() - began, "clock": time.perf_counter() - clock}
    found |= {"memory": megabytes("VmHWM") - before, "peak": megabytes("VmHWM")}
    if em:
        start = lapis.linear(phi, y, lapis.Gaussian(1.0), 10.0, samples=draws)
        began = time.process_time()
        posterior = start.tune()
        found |= {"tune": time.process_time() - began, "path": posterior.tuning and posterior.tuning.path}
    predicted: Any = posterior.predict(new)
    for name, ends, truth in (
        ("coverage", predicted.interval(0.95), targets),
        ("coverage of f", predicted.f_interval(0.95), f),
    ):
        low, high = (each.numpy() for each in ends)
        found[name] = float(((low <= truth) & (truth <= high)).mean())
    white = (predicted.f_mean.numpy() - f) / predicted.f_variance.sqrt().numpy()
    found["Gaussian"] = float((np.abs(white) < 1.96).mean())
    return found


def megabytes(what: str) -> float:
    """Memory of this process by Linux: VmRSS now, VmHWM at most since the peak was forgotten."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(what)) / 1e3


def sklearns(n: int, d: int, seed: int) -> list[list[object]]:
    """Ours beside scikit-learn's, at a size where these run."""
    phi, y, (new, _), _ = problem(n, d, seed)
    dense, fresh = phi.toarray(), new[:200].toarray()
    rows: list[list[object]] = []
    began = time.process_time()
    ours = lapis.linear(phi, y, "regression", samples=64).tune()
    seconds = time.process_time() - began
    mean, deviation = (each.numpy() for each in (ours.predict(fresh).mean, ours.predict(fresh).std))
    rows.append(["lapis.linear, 64 draws", f"{seconds:.1f}", f"{float(ours.prior.precision):.3f}",
                 f"{float(ours.likelihood.noise or 0):.4f}", "", ""])  # fmt: skip
    for name, model in (
        ("BayesianRidge", BayesianRidge(fit_intercept=False)),
        ("ARD", ARDRegression(fit_intercept=False)),
    ):
        began = time.process_time()
        model.fit(dense, y)
        seconds = time.process_time() - began
        theirs, spread = model.predict(fresh, return_std=True)
        precision = f"{model.lambda_:.3f}" if name == "BayesianRidge" else "one a weight"
        rows.append([name, f"{seconds:.1f}", precision, f"{model.alpha_**-0.5:.4f}",
                     f"{np.abs(theirs - mean).max():.3f}", f"{np.abs(spread / deviation - 1).mean():.3f}"])  # fmt: skip
    return rows


def _work(arguments_: tuple[Any, ...]) -> dict[str, Any]:
    return measured(*arguments_)


def apart(*values: Any) -> dict[str, Any]:
    """`measured` in a new process, or as it was measured before."""
    path = Path("build/linear") / ("_".join(map(str, values)) + ".json")
    if not path.exists():
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            found = pool.map(_work, [values])[0]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(found))
    kept: dict[str, Any] = json.loads(path.read_text())
    return kept


def main(chosen: argparse.Namespace) -> None:
    largest = 20_000 if chosen.quick else 2_000_000
    steps = (0.1, 0.3, 1.0) if chosen.quick else (0.005, 0.05, 0.5, 1.0)
    sizes = [int(step * largest) for step in steps]
    draws = 2
    many = apart(sizes[0], sizes[0], 32, chosen.seed, False)
    runs = {("both", n): apart(n, n, draws, chosen.seed, n == sizes[1]) for n in sizes}
    runs |= {("n", n): apart(n, sizes[0], draws, chosen.seed, False) for n in sizes[1:]}
    runs |= {("d", d): apart(sizes[0], d, draws, chosen.seed, False) for d in sizes[1:]}
    rows = []
    for (what, size), found in runs.items():
        n, d = {"both": (size, size), "n": (size, sizes[0]), "d": (sizes[0], size)}[what]
        cover = [f"{found[name]:.3f}" for name in ("coverage", "coverage of f", "Gaussian")]
        rows.append(
            [
                f"{n:,}",
                f"{d:,}",
                f"{found['fit']:.1f}",
                f"{found['clock']:.1f}",
                f"{found['memory']:.0f}",
                f"{found['peak']:.0f}",
                *cover,
            ]
        )
    text = table(
        (
            "n",
            "d",
            "s",
            "on the clock",
            "MB beside the data",
            "MB in all",
            "coverage of y",
            "of f",
            "of f, were it Gaussian",
        ),
        rows,
    )
    text += f"\n\nWith 32 draws at n = d = {sizes[0]:,}: {many['fit']:.1f} s, coverage {many['coverage']:.3f} of y and "
    text += f"{many['coverage of f']:.3f} of f ({many['Gaussian']:.3f} by Gaussian intervals)."
    big = runs["both", sizes[1]]
    path = "; ".join(f"{alpha:.3f}, {noise:.4f}" for alpha, noise in big["path"])
    text += f"\n\nEM at n = d = {sizes[1]:,}: {big['tune']:.0f} s, precision and noise after each round: {path}"
    text += f" (true: 1, {NOISE})."
    small = (2000, 200) if chosen.quick else (5000, 500)
    head = (
        f"n = {small[0]:,}, d = {small[1]:,}",
        "s",
        "precision",
        "noise",
        "largest difference of means",
        "of deviations",
    )
    text += "\n\n" + table(head, sklearns(*small, chosen.seed))
    figure, axes = plt.subplots(figsize=(5.2, 3.6))
    labels = {"both": "n = d", "n": f"n, d = {sizes[0]:,}", "d": f"d, n = {sizes[0]:,}"}
    for colour, (what, label) in zip(COLOURS, labels.items(), strict=False):
        points = sorted(
            (size, found["fit"])
            for (kind, size), found in runs.items()
            if kind in (what, "both" if size == sizes[0] else what)
        )
        axes.loglog(*zip(*points, strict=True), marker="o", color=colour, label=label)
    axes.set_xlabel("observations, weights")
    axes.set_ylabel(f"seconds for the mean and {draws} draws")
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    save(figure, "linear", chosen)
    report("linear", text, chosen)


if __name__ == "__main__":
    main(arguments(__doc__))
