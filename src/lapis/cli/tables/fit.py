"""`lapis fit`: a table, and a network with error bars in one file."""

from __future__ import annotations

import time
import warnings
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import typer
from torch import Tensor

from lapis.cli.shell import AsJson, as_json, counted, facts, one_thread, readable, say, shown
from lapis.cli.tables.columns import Columns, class_indices, class_values, real_targets, task_of
from lapis.cli.tables.files import Column, check_output, read_table
from lapis.cli.tables.networks import MLP, load_weights, make_network
from lapis.errors import DataError, LapisWarning, OptionError
from lapis.estimators import LaplaceClassifier, LaplaceRegressor, Predictor
from lapis.likelihoods import Gaussian
from lapis.likelihoods import resolve as resolve_likelihood
from lapis.options import check_choice
from lapis.posteriors.laplace.fit import laplace
from lapis.posteriors.laplace.stored import LaplacePosterior

LIKELIHOODS = ("auto", "regression", "classification", "binary", "heteroscedastic")

CLASSES_AT_MOST = 1000
"""More different values are hardly classes: an identifier, or real numbers."""

Data = Annotated[Path, typer.Argument(help="Table: csv, tsv, npz or parquet.", show_default=False)]


@readable
def fit(
    data: Data,
    target: Annotated[str, typer.Option(help="Name of the column (or array) to predict.", show_default=False)],
    out: Annotated[Path, typer.Option(help="File to write.")] = Path("model.lapis"),
    model: Annotated[
        str,
        typer.Option(help="package.module:callable that makes your network; mlp trains one by the evidence."),
    ] = MLP,
    weights: Annotated[
        Path | None, typer.Option(help="Its weights: safetensors, or a state dictionary by torch.save.")
    ] = None,
    likelihood: Annotated[
        str, typer.Option(help="regression, classification, binary (one logit), heteroscedastic; auto: by the target.")
    ] = "auto",
    structure: Annotated[str, typer.Option(help="dense, diagonal, kronecker, ekfac, lowrank, or auto.")] = "auto",
    leave_out: Annotated[
        list[str] | None, typer.Option(help="Column that is no input, such as an identifier; repeat for more.")
    ] = None,
    tune: Annotated[bool, typer.Option(help="Tune prior and noise of your own network by the evidence.")] = True,
    hidden: Annotated[str, typer.Option(help="Sizes of mlp's hidden layers, with commas.")] = "50",
    epochs: Annotated[int | None, typer.Option(min=1, help="Epochs of mlp; by default about 1000 steps.")] = None,
    seed: Annotated[int, typer.Option(min=0, max=2**31 - 1, help="Of mlp's first weights and shuffling.")] = 0,
    json: AsJson = False,
) -> None:
    """Give a network error bars: train one on a table, or take yours, and write it to a file.

    lapis fit train.csv --target y && lapis predict model.lapis test.csv && lapis evaluate model.lapis test.csv
    """
    started = time.perf_counter()
    check_choice("likelihood", likelihood, LIKELIHOODS)
    check_output(out, data, weights)
    own = model != MLP
    if not own and weights is not None:
        raise OptionError(
            "Weights belong to a network of yours", expected="--model package.module:callable", got="--model mlp",
            do="name the model, or leave --weights out",
        )  # fmt: skip
    table = read_table(data)
    columns = Columns.of(table, target, leave_out or (), whole=own)
    meaning = task_of(table[target]) if likelihood == "auto" else likelihood
    inputs = columns.inputs(table)
    with one_thread():
        if own:
            found = _of_network(model, weights, inputs, table[target], target, meaning, structure, tune)
        else:
            found = _of_perceptron(inputs, table[target], target, meaning, structure, _sizes(hidden), epochs, seed)
    predictor = found.with_table(columns.to_config())
    predictor.save(out)
    result = summary(predictor) | {"seconds": round(time.perf_counter() - started, 1), "file": str(out)}
    if json:
        as_json(result)
        return
    posterior = predictor.posterior
    guessed = "" if likelihood != "auto" else "  (by the target; --likelihood chooses another)"
    say(
        f"[bold]{target}[/] from {counted(len(columns.names), 'column')}, {counted(posterior.n_data, 'row')}: "
        f"{predictor.task}{guessed}\n"
    )
    facts({name.replace("_", " "): value for name, value in result.items() if name not in ("task", "target", "inputs")})
    say(f"\n[dim]Next: lapis predict {out} NEW_DATA; lapis evaluate or diagnose {out} TEST_DATA[/]")


def summary(predictor: Predictor) -> dict[str, Any]:
    """What there is to know about a fitted file, for JSON and for people."""
    posterior, architecture = predictor.posterior, predictor.architecture
    result: dict[str, Any] = {"task": predictor.task, "target": predictor.table.get("target")}
    if "names" in predictor.table:
        result["inputs"] = list(predictor.table["names"])
    if predictor.classes:
        result["classes"] = list(predictor.classes)
    sizes = () if architecture is None else (architecture.inputs, *architecture.hidden, architecture.outputs)
    result["network"] = "-".join(map(str, sizes)) + f" {architecture.activation}" if architecture else "your own"
    result |= {"weights": posterior.n_weights, "rows": posterior.n_data}
    if isinstance(posterior, LaplacePosterior):
        result |= {"structure": posterior.structure, "log_evidence": float(posterior.log_evidence().detach())}
        result["effective_parameters"] = float(posterior.effective_parameters().detach())
        result["posterior_width"] = float(posterior.width)
        if posterior.sharpness != 1:
            result["logits_times"] = float(posterior.sharpness)
    noise = posterior.likelihood.noise if isinstance(posterior.likelihood, Gaussian) else None
    if noise is not None:
        scale = torch.ones(1) if predictor.targets is None else predictor.targets.scale
        values = (noise.detach().double().cpu() * scale).reshape(-1).tolist()
        result["noise"] = values[0] if len(values) == 1 else ", ".join(map(shown, values))
    return result


def _sizes(hidden: str) -> tuple[int, ...]:
    try:
        return tuple(int(size) for size in hidden.split(","))
    except ValueError as error:
        raise OptionError("Bad hidden", expected="sizes such as 50 or 50,50", got=hidden, do="pass numbers") from error


def _of_perceptron(
    inputs: Tensor,
    column: Column,
    target: str,
    meaning: str,
    structure: str,
    hidden: tuple[int, ...],
    epochs: int | None,
    seed: int,
) -> Predictor:
    if meaning not in ("regression", "classification"):
        raise OptionError(
            f"mlp has no {meaning} outputs", expected="regression or classification", got=meaning,
            do="name a network of yours with --model",
        )  # fmt: skip
    kind = LaplaceRegressor if meaning == "regression" else LaplaceClassifier
    options: dict[str, Any] = {"structure": structure, "epochs": epochs, "random_state": seed, "progress": None}
    estimator = kind(hidden, **options)
    if meaning == "regression":
        values = real_targets(target, column)
        estimator.fit(_several(inputs), values[:, 0] if values.shape[1] == 1 else values)
    else:
        estimator.fit(_several(inputs), _classes(target, column)[0])
    found: Predictor = estimator.predictor_
    return found


def _classes(target: str, column: Column) -> tuple[list[Any], list[Any]]:
    """The class of each row, and all classes in order; a DataError where there are not two."""
    values = class_values(target, column)
    classes = sorted(set(values), key=lambda value: (isinstance(value, str), value))
    if not 2 <= len(classes) <= CLASSES_AT_MOST:
        raise DataError(
            f"Column {target!r} has no classes to tell apart",
            expected=f"2 to {CLASSES_AT_MOST} classes",
            got=f"{classes[0]!r} in every row" if len(classes) == 1 else f"{len(classes):,} different values",
            do="name another target, or --likelihood regression",
        )
    if any(isinstance(value, float) and not value.is_integer() for value in classes):
        raise DataError(
            f"Column {target!r} holds real numbers", expected="classes: words or whole numbers",
            got=", ".join(map(str, values[:3])) + ", ...", do="use --likelihood regression, or name another target",
        )  # fmt: skip
    return values, classes


def _several(inputs: Tensor) -> Tensor:
    if len(inputs) < 2:
        raise DataError("One row is no data", expected="at least two rows", got="one", do="add some")
    return inputs


def _of_network(
    name: str,
    weights: Path | None,
    inputs: Tensor,
    column: Column,
    target: str,
    meaning: str,
    structure: str,
    tune: bool,
) -> Predictor:
    model = make_network(name)
    if weights is not None:
        load_weights(model, weights)
    else:
        warnings.warn(
            f"No --weights: the network is used as {name} returns it; it is not trained here.",
            LapisWarning,
            stacklevel=2,
        )
    task: Literal["regression", "classification"] = "regression"
    classes: tuple[Any, ...] = ()
    dtype = next(model.parameters()).dtype
    if meaning in ("classification", "binary"):
        task = "classification"
        values, listed = _classes(target, column)
        classes, targets = tuple(listed), class_indices(target, values, listed)
        targets = targets.to(dtype) if meaning == "binary" else targets
    else:
        targets = real_targets(target, column).to(dtype)
    x = inputs.to(dtype) if inputs.is_floating_point() else inputs
    posterior = laplace(model, (x, targets), resolve_likelihood(meaning), structure=structure)
    return Predictor(posterior.tune() if tune else posterior, task, classes)
