"""Two reports, to look at: digits (two posteriors compared, digits 8 and 9 as the unknown), and a curve with a gap.

Writes report_digits.html and report_curve.html to the folder given, by default the current one.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from gallery import F64, digits, perceptron, wave
from torch import nn

import lapis


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, nargs="?", default=Path())
    parser.add_argument("--quick", action="store_true", help="less work, to see that it runs")
    chosen = parser.parse_args()
    source, steps = torch.Generator().manual_seed(0), 40 if chosen.quick else 300
    few, test, unknown = digits(source)
    model = perceptron(64, 8, 24)
    optimiser = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(steps):
        optimiser.zero_grad()
        nn.functional.cross_entropy(model(few[0]), few[1]).backward()
        optimiser.step()
    tuned = lapis.laplace(model, few, "classification", weights="all").tune()
    last = lapis.laplace(model, few, "classification", weights="last_layer").tune()
    lapis.report(
        {"all weights": tuned, "last layer": last},
        chosen.folder / "report_digits.html",
        data=few,
        test=test,
        out_of_distribution=unknown,
        title="Digits 0 to 7",
        image_shape=(8, 8),
    )
    curve = wave(source)
    order = torch.randperm(60, generator=source)
    some, others = ((curve[0][index], curve[1][index]) for index in (order[:40], order[40:]))
    posterior = lapis.train(perceptron(1, 1).to(F64), some, "regression", epochs=10 * steps, progress=False)
    lapis.report(posterior, chosen.folder / "report_curve.html", data=some, test=others, title="A curve with a gap")


if __name__ == "__main__":
    try:
        main()
    except lapis.LapisError as error:  # without the extra, for one
        raise SystemExit(f"Error: {error}") from None
