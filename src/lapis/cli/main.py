"""Commands and their options; modules that only one command needs are imported when it runs."""

from __future__ import annotations

import os
import platform
import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console

import lapis
from lapis.cli.experiments import experiment as run_experiment
from lapis.cli.info import info
from lapis.cli.playing import playground
from lapis.cli.shell import AsJson, as_json, grid, readable, say
from lapis.cli.tables.compare import compare
from lapis.cli.tables.diagnose import diagnose
from lapis.cli.tables.evaluate import evaluate
from lapis.cli.tables.export import export
from lapis.cli.tables.fit import fit
from lapis.cli.tables.predict import predict
from lapis.cli.tables.report import report
from lapis.progress import track

app = typer.Typer(
    name="lapis",
    help="Lapis: error bars for trained PyTorch networks.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

for command in (fit, predict, evaluate, diagnose, compare, info, export, report, playground):
    app.command()(command)
app.command("experiment")(run_experiment)

FORMATS = (".png", ".pdf", ".svg")


@app.command()
@readable
def version(json: AsJson = False) -> None:
    """Print the versions that a bug report needs."""
    if json:
        as_json({"lapis": lapis.__version__, "torch": torch.__version__, "python": platform.python_version()})
        return
    typer.echo(f"lapis {lapis.__version__} (torch {torch.__version__}, Python {platform.python_version()})")


def _figure_path(value: Path) -> Path:
    """Check the path of the figure before any work is done."""
    if value.suffix.lower() not in FORMATS:
        raise typer.BadParameter(f"{value} should end in {', '.join(FORMATS)}.")
    if value.is_dir():
        raise typer.BadParameter(f"{value} is a directory; give a file name in it.")
    if not value.parent.is_dir():
        raise typer.BadParameter(f"the directory {value.parent} does not exist.")
    if not os.access(value if value.exists() else value.parent, os.W_OK):
        raise typer.BadParameter(f"{value} cannot be written.")
    return value


@app.command("learning-rule")
@readable
def learning_rule(json: AsJson = False) -> None:
    """Derive optimisers and inference from the Bayesian learning rule: run each beside it, and print the differences.

    The exit code is 1 if a difference is above 1e-6.
    """
    table = lapis.learning_rule.derivations()
    if json:
        as_json([asdict(row) for row in table])
    else:
        rows = [(row.algorithm, row.family, row.expectation, f"{row.difference:.1e}", row.limit) for row in table]
        grid(("algorithm", "distribution q", "expectation", "difference", "limit"), rows)
        say("\nDifference: the largest between iterates of the rule and the algorithm, in float64.")
    if not table.hold:
        raise typer.Exit(1)


@app.command()
@readable
def demo(
    seed: Annotated[
        int, typer.Option(min=0, max=2**31 - 1, help="Seed of the first split; the next seeds follow.")
    ] = 0,
    label_noise: Annotated[float, typer.Option(min=0, max=0.9, help="Share of labels drawn anew at random.")] = 0.0,
    out: Annotated[Path, typer.Option(callback=_figure_path, help="Figure to write.")] = Path("lapis-demo.png"),
    repeats: Annotated[int, typer.Option(min=1, max=100, help="Splits and trainings to average over.")] = 3,
    quick: Annotated[bool, typer.Option("--quick", help="Less data, less training: a look, no results.")] = False,
    json: AsJson = False,
) -> None:
    """Train on scikit-learn's digits, put a Laplace posterior on the weights, and see what it is good for."""
    from lapis.cli import experiment, figure, report

    started = time.perf_counter()
    make = experiment.Setting.quick if quick else experiment.Setting
    settings = [make(seed=seed + repeat, label_noise=label_noise) for repeat in range(repeats)]
    console = Console(highlight=False)
    results = [experiment.run(setting) for setting in track(settings, "Training and predicting", repeats)]
    figure.draw(results[0], out)
    if json:
        as_json({"scores": report.scores(results), "file": str(out)})
        return
    report.show(console, settings[0], results)
    console.print(
        f"Figure of the first split: {out}   ({time.perf_counter() - started:.1f} s)", style="dim", soft_wrap=True
    )


def _image_path(value: Path | None) -> Path | None:
    if value is not None and not value.is_file():
        raise typer.BadParameter(f"{value} is no file.")
    return value


@app.command()
@readable
def tomography(
    image: Annotated[
        Path | None, typer.Argument(callback=_image_path, help="Picture to measure; the Shepp-Logan phantom without.")
    ] = None,
    angles: Annotated[int, typer.Option(min=1, max=1000, help="Number of projections.")] = 20,
    noise: Annotated[float, typer.Option(min=1e-4, max=1, help="Relative to the mean projection.")] = 0.05,
    size: Annotated[int, typer.Option(min=8, max=512, help="Pixels along the longer side, at most.")] = 48,
    iterations: Annotated[int, typer.Option(min=1, help="Of training.")] = 1500,
    channels: Annotated[int, typer.Option(min=1, max=256, help="Of the U-net.")] = 16,
    seed: Annotated[int, typer.Option(min=0, max=2**31 - 1)] = 0,
    out: Annotated[Path, typer.Option(file_okay=False, help="Folder to write to.")] = Path("lapis-tomography"),
    json: AsJson = False,
) -> None:
    """Reconstruct an image from few noisy X-ray projections, with an error map: mean, samples, report."""
    from lapis.cli import tomography as command

    started = time.perf_counter()
    console = Console(highlight=False)
    truth = command.load_image(image, size)
    out.mkdir(parents=True, exist_ok=True)
    result = command.run(truth, angles, noise, iterations, channels, seed)
    written = command.write(result, out)
    per_pixel = float(result.reconstruction.log_prob(truth)) / truth.numel()
    if json:
        scores = {name: {"psnr": psnr, "ssim": ssim} for name, (psnr, ssim) in result.scores().items()}
        found = {"log_likelihood_per_pixel": per_pixel, "within_two_deviations": result.coverage()}
        as_json({"scores": scores, **found, "files": [str(path) for path in written]})
        return
    for name, (psnr, ssim) in result.scores().items():
        console.print(f"{name:26} PSNR {psnr:5.2f}   SSIM {ssim:.3f}")
    console.print(f"Log likelihood per pixel: {per_pixel:.3f}. Within two deviations: {100 * result.coverage():.1f} %.")
    files = ", ".join(path.name for path in written)
    console.print(f"{out}: {files}   ({time.perf_counter() - started:.1f} s)", style="dim", soft_wrap=True)
