"""Commands about tables: what they print, write and refuse, and that nothing in a file is ever executed."""

from __future__ import annotations

import csv
import json
import pickle
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from typer.testing import CliRunner

import lapis
from lapis.cli import app
from lapis.cli.tables.files import read_table, write_table

runner = CliRunner()
CHEAP = ["--hidden", "4", "--epochs", "15", "--structure", "diagonal"]
RNG = np.random.default_rng(0)


def run(*arguments: object, code: int = 0) -> Any:
    result = runner.invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == code, result.output
    assert "Traceback" not in result.output
    return result


def answer(*arguments: object) -> Any:
    return json.loads(run(*arguments, "--json").stdout)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tables of the same rows: real and class targets, a category, an identifier."""
    place = tmp_path_factory.mktemp("tables")
    x, colour = RNG.normal(size=(40, 2)), RNG.choice(["blue", "red"], 40)
    value = 100 + 30 * x[:, 0] + 10 * (colour == "red")
    table = {
        "id": np.array([f"row{i}" for i in range(40)], dtype=object), "a": x[:, 0], "b": x[:, 1],
        "colour": colour.astype(object), "value": value,
        "kind": np.where(x[:, 1] > 0, "up", "down").astype(object),
    }  # fmt: skip
    write_table(place / "table.csv", table)
    write_table(place / "table.npz", {"x": x, "value": value, "digit": (x[:, 0] > 0).astype(int)})
    fitted = ["--leave-out", "id", *CHEAP]
    run("fit", place / "table.csv", "--target", "value", "--leave-out", "kind", *fitted, "--out", place / "value.lapis")
    run("fit", place / "table.csv", "--target", "kind", *fitted, "--out", place / "kind.lapis")
    return place


def test_columns_of_a_csv_come_back_as_they_were(folder: Path, tmp_path: Path) -> None:
    table = read_table(folder / "table.csv")
    write_table(tmp_path / "again.csv", table)
    write_table(tmp_path / "again.npz", table)
    for name in ("again.csv", "again.npz"):
        again = read_table(tmp_path / name)
        for column in table:
            np.testing.assert_array_equal(again[column], table[column])


def test_a_parquet_table_is_read_and_written_or_says_what_to_install(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "table.parquet"
    if "pyarrow" not in sys.modules:
        pytest.importorskip("pyarrow", reason="parquet files need pyarrow: make test-extras")
    table = read_table(folder / "table.csv")
    write_table(path, table)
    for column, values in read_table(path).items():
        np.testing.assert_array_equal(values, table[column])


def test_without_pyarrow_a_parquet_file_is_an_error_that_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    (tmp_path / "table.parquet").write_bytes(b"PAR1")
    assert "lapis-bayes[parquet]" in run("fit", tmp_path / "table.parquet", "--target", "y", code=1).stderr


def test_regression_adds_mean_deviation_and_interval_in_the_units_of_the_target(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "predicted.csv"
    run("predict", folder / "value.lapis", folder / "table.csv", "--out", out, "--level", 0.9)
    with out.open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0])[-5:] == ["value_mean", "value_std", "value_lower", "value_upper", "value_epistemic_std"]
    assert rows[0]["id"] == "row0"
    mean, std, lower = (np.array([float(row[f"value_{word}"]) for row in rows]) for word in ("mean", "std", "lower"))
    np.testing.assert_allclose((mean - lower) / std, 1.644854, rtol=1e-5)
    assert 60 < mean.mean() < 140
    scores = answer("evaluate", folder / "value.lapis", folder / "table.csv", "--level", 0.9)
    value = read_table(folder / "table.csv")["value"]
    assert scores["rows"] == 40
    assert scores["rmse"] == pytest.approx(np.sqrt(np.mean((mean - value) ** 2)))
    assert scores["nll"] == pytest.approx(np.mean(0.5 * ((value - mean) / std) ** 2 + np.log(std * np.sqrt(2 * np.pi))))
    assert scores["coverage"] == pytest.approx(np.mean(abs(value - mean) < 1.644854 * std))


def test_classification_adds_probabilities_of_each_class_and_doubt(folder: Path) -> None:
    found = answer("predict", folder / "kind.lapis", folder / "table.csv")
    assert list(found) == ["kind_predicted", "probability_down", "probability_up", "entropy", "mutual_information"]
    down, up = np.array(found["probability_down"]), np.array(found["probability_up"])
    np.testing.assert_allclose(down + up, 1, atol=1e-9)
    assert found["kind_predicted"] == ["up" if p > 0.5 else "down" for p in up]
    np.testing.assert_allclose(found["entropy"], -(down * np.log(down) + up * np.log(up)), rtol=1e-6)
    scores = answer("evaluate", folder / "kind.lapis", folder / "table.csv")
    kind = read_table(folder / "table.csv")["kind"]
    assert scores["accuracy"] == pytest.approx(np.mean(np.array(found["kind_predicted"]) == kind))
    assert scores["nll"] == pytest.approx(-np.log(np.where(kind == "up", up, down)).mean())


def test_predictions_that_cannot_be_written_are_refused_before_they_are_made(folder: Path, tmp_path: Path) -> None:
    for options, message in (
        (["--out", tmp_path / "no" / "folder.csv"], "Expected: a path in a folder that exists"),
        (["--out", "-", "--json"], "Two results for standard output"),
    ):
        result = run("predict", "no model", "no table", *options, code=1)
        assert message in result.stderr
        assert result.stdout == ""


def test_screens_fit_into_eighty_columns_and_say_what_was_done(folder: Path) -> None:
    for command in (
        ["predict", folder / "kind.lapis", folder / "table.csv"],
        ["evaluate", folder / "value.lapis", folder / "table.csv"],
        ["diagnose", folder / "kind.lapis", folder / "table.csv"],
        ["diagnose", folder / "value.lapis", folder / "table.csv"],
        ["info", folder / "kind.lapis"],
    ):
        shown = run(*command).stdout
        assert max(map(len, shown.splitlines()[1:])) <= 80
    assert "The first 10 of 40 rows" in run("predict", folder / "kind.lapis", folder / "table.csv").stdout
    assert "calibration error" in run("evaluate", folder / "kind.lapis", folder / "table.csv").stdout


def test_info_tells_what_a_file_holds(folder: Path, tmp_path: Path) -> None:
    found = answer("info", folder / "kind.lapis")
    assert found["kind"] == "predictor"
    assert found["network"] == "5-4-2 relu"  # three numbers, and an indicator for each colour
    assert found["classes"] == ["down", "up"]
    assert found["rows"] == 40
    model = nn.Linear(2, 1)
    lapis.laplace(model, (torch.randn(5, 2), torch.randn(5, 1)), "regression").save(tmp_path / "posterior.lapis")
    found = answer("info", tmp_path / "posterior.lapis")
    assert (found["kind"], found["rows"], found["likelihood"]) == ("posterior", 5, "gaussian")


def test_diagnosis_has_numbers_and_findings(folder: Path) -> None:
    for name in ("kind", "value"):
        found = answer("diagnose", folder / f"{name}.lapis", folder / "table.csv")
        assert isinstance(found["findings"], list)
        assert found["numbers"]
        spread = read_table(folder / "table.csv")["value"].std()
        assert found["target_units"] == (None if name == "kind" else pytest.approx([spread]))
    assert "in the units of the network" in run("diagnose", folder / "value.lapis").stdout


def test_comparison_orders_models_by_evidence_and_scores_them(folder: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.lapis"
    options = ["--target", "kind", "--leave-out", "id", *CHEAP[2:], "--hidden", "2", "--out", other]
    run("fit", folder / "table.csv", *options)
    found = answer("compare", folder / "kind.lapis", other, "--data", folder / "table.csv")
    assert sum(entry["probability"] for entry in found.values()) == pytest.approx(1)
    best = max(found, key=lambda name: found[name]["log_evidence"])
    assert found[best]["probability"] >= 0.5
    assert all("accuracy" in entry for entry in found.values())
    screen = run("compare", folder / "kind.lapis", other, "--data", folder / "table.csv").stdout
    assert screen.count("other.lapis") == 2  # beside its evidence, and beside its scores
    assert "nothing to compare" in run("compare", other, code=1).stderr
    assert run("compare", folder / "value.lapis", other, code=1).stderr.startswith("Error:")


class Net(nn.Sequential):
    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(nn.Flatten(), nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 2))


class Logit(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(2, 1))


@pytest.mark.parametrize("kind", ["safetensors", "torch", "wrapped"])
def test_a_network_of_yours_gets_the_posterior_that_the_library_gives_it(
    kind: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "their_nets", sys.modules[__name__])
    model = Net()
    for p in model.parameters():
        p.data.add_(0.1)
    weights = tmp_path / ("weights.safetensors" if kind == "safetensors" else "weights.pt")
    if kind == "safetensors":
        save_file(model.state_dict(), weights)
    else:
        state = nn.DataParallel(model).state_dict() if kind == "wrapped" else model.state_dict()
        torch.save({"state_dict": state, "epoch": 3} if kind == "wrapped" else state, weights)
    out = tmp_path / "own.lapis"
    common = ["--model", "their_nets:Net"]
    data = folder / "table.npz"
    run("fit", data, "--target", "digit", "--leave-out", "value", *common, "--weights", weights, "--out", out)
    found = answer("predict", out, data, *common)
    table = read_table(data)
    x = torch.from_numpy(table["x"]).float()
    posterior = lapis.laplace(model, (x, torch.from_numpy(table["digit"])), "classification").tune()
    np.testing.assert_allclose(found["probability_1"], posterior.predict(x).probs[:, 1], rtol=1e-4)  # type: ignore[attr-defined]
    assert "never code" in run("predict", out, data, code=1).stderr
    assert answer("info", out)["posterior"] == "laplace"


def test_one_logit_is_a_binary_classifier(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "their_nets", sys.modules[__name__])
    common = ["--model", "their_nets:Logit"]
    out, data = tmp_path / "logit.lapis", folder / "table.npz"
    run("fit", data, "--target", "digit", "--leave-out", "value", *common, "--likelihood", "binary", "--out", out)
    found = answer("predict", out, data, *common)
    np.testing.assert_allclose(np.add(found["probability_0"], found["probability_1"]), 1)
    assert 0 <= answer("evaluate", out, data, *common)["accuracy"] <= 1
    assert answer("diagnose", out, data, *common)["numbers"]


class Bomb:
    def __reduce__(self) -> Any:
        return (Path("exploded").touch, ())


def test_nothing_in_a_file_is_executed(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "their_nets", sys.modules[__name__])
    torch.save({"0": Bomb()}, tmp_path / "bomb.pt")
    (tmp_path / "bomb.pkl").write_bytes(pickle.dumps(Bomb()))
    np.savez(tmp_path / "bomb.npz", x=np.array([Bomb()], dtype=object), y=np.zeros(1))
    for arguments in (
        [folder / "table.npz", "--target", "digit", "--model", "their_nets:Net", "--weights", "bomb.pt"],
        [folder / "table.npz", "--target", "digit", "--model", "their_nets:Net", "--weights", "bomb.pkl"],
        ["bomb.npz", "--target", "y"],
    ):
        assert "Error:" in run("fit", *arguments, code=1).stderr
    for name in ("bomb.pt", "bomb.pkl"):
        assert "Error:" in run("predict", name, folder / "table.npz", code=1).stderr
        assert "Error:" in run("info", name, code=1).stderr
    assert not (tmp_path / "exploded").exists()


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        ("a,y\n1,2\n", ["--target", "z"], "There is no column 'z'"),
        ("a,y\n1,2\n3,\n", ["--target", "y"], "Column 'y' has no value that can be used in row 2"),
        ("a,y\n1,2\n,3\n", ["--target", "y"], "Column 'a' has no value that can be used in row 2"),
        ("a,y\n1,2\n3\n", ["--target", "y"], "line 3 has 1 cells"),
        ("a,a\n1,2\n", ["--target", "a"], "the same name twice"),
        ("a,y\n1,2\n", ["--target", "y"], "at least two rows"),
        ("y\n1\n2\n", ["--target", "y"], "There are no inputs"),
        ("", ["--target", "y"], "is empty"),
        ("a,y\n", ["--target", "y"], "is empty"),
        ("a;y\n" + "".join(f"0,{i};{i}\n" for i in range(60)), ["--target", "y"], "'a' has decimal commas"),
        ("a,y\n1,u\n2,u\n", ["--target", "y"], "no classes to tell apart"),
        ("a,y\n1,.5\n2,.7\n", ["--target", "y", "--likelihood", "classification"], "'y' holds real numbers"),
        ("a,y\n1,2\n2,3\n", ["--target", "y", "--hidden", "many"], "Bad hidden"),
        ("a,y\n1,2\n2,3\n", ["--target", "y", "--likelihood", "student"], "Unknown likelihood"),
        ("a,y\n1,2\n2,3\n", ["--target", "y", "--structure", "round"], "structure"),
        ("a,y\n1,2\n2,3\n", ["--target", "y", "--model", "nowhere:Net"], "gives no model"),
        ("a,y\n1,2\n2,3\n", ["--target", "y", "--model", "broken:make"], "RuntimeError: no GPU"),
        ("a,y\n1,2\n2,3\n", ["--target", "y", "--model", "unreadable:make"], "SyntaxError"),
        ("a,y\n1,2\n2,3\n", ["--target", "y", "--model", "fine:make", "--weights", "table.csv"], "holds no weights"),
        ("a,y\n1,2\n2,3\n", ["--target", "y", "--weights", "w.pt"], "Weights belong to a network of yours"),
        ("a,y\n1,2\n2,3\n", ["--target", "y", "--out", "no/such/place.lapis"], "Cannot write"),
        ("a,y\n1,2\n2,3\n", ["--target", "y", "--out", "../{}/table.csv"], "would be overwritten"),
    ],
)
def test_bad_input_is_one_readable_line_and_exit_code_1(
    text: str, options: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "table.csv").write_text(text, encoding="utf-8")
    (tmp_path / "broken.py").write_text("def make():\n    raise RuntimeError('no GPU\\nto be found')\n")
    (tmp_path / "unreadable.py").write_text("def make(:\n")
    (tmp_path / "fine.py").write_text("import torch\n\ndef make():\n    return torch.nn.Linear(1, 1)\n")
    result = run("fit", "table.csv", *(option.format(tmp_path.name) for option in options), code=1)
    assert message in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1
    assert result.stdout == ""


def test_a_folder_and_another_encoding_are_named(tmp_path: Path) -> None:
    (tmp_path / "folder.csv").mkdir()
    (tmp_path / "latin.csv").write_bytes("größe,y\n1,2\n".encode("latin1"))
    for name, message in (("folder.csv", "Got: a folder"), ("latin.csv", "Do: save it as UTF-8")):
        assert message in run("fit", tmp_path / name, "--target", "y", code=1).stderr


def test_npz_takes_any_name_and_csv_whole_numbers_of_any_size(tmp_path: Path) -> None:
    write_table(tmp_path / "table.npz", {"file": np.arange(3), "word": np.array(["a", None, "c"], dtype=object)})
    found = read_table(tmp_path / "table.npz")
    assert found["file"].tolist() == [0, 1, 2]
    assert found["word"].tolist() == ["a", "", "c"]
    (tmp_path / "large.csv").write_text("a\n1\n100000000000000000000\n")
    assert read_table(tmp_path / "large.csv")["a"].tolist() == [1.0, 1e20]


def test_words_that_were_not_in_the_fit_are_named(folder: Path, tmp_path: Path) -> None:
    table = read_table(folder / "table.csv")
    table["colour"][3] = "green"
    write_table(tmp_path / "green.csv", table)
    message = run("predict", folder / "value.lapis", tmp_path / "green.csv", code=1).stderr
    assert "Column 'colour' has an unknown value in row 4. Expected: blue, red. Got: 'green'" in message
    table["kind"][0] = "sideways"
    table["colour"][3] = "red"
    write_table(tmp_path / "kind.csv", table)
    assert "unknown class in row 1" in run("evaluate", folder / "kind.lapis", tmp_path / "kind.csv", code=1).stderr


def test_experiments_are_listed_and_run_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    listed = run("experiment").stdout
    assert "common" not in listed
    assert "while white noise loses it?" in " ".join(listed.split())  # a sentence that goes over a line's end
    sources = {path: path.read_text() for path in Path("experiments").glob("*.py") if path.stem in listed.split()}
    assert len(sources) > 40
    assert [path for path, text in sources.items() if "quick" not in text.lower()] == []
    (tmp_path / "experiments").mkdir()
    (tmp_path / "experiments" / "common.py").touch()
    code = "import sys, pathlib; pathlib.Path('ran').write_text(' '.join(sys.argv[1:])); sys.exit(3)"
    (tmp_path / "experiments" / "tiny.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    run("experiment", "tiny", "--quick", "--seed", 7, code=3)
    assert (tmp_path / "ran").read_text() == "--quick --seed 7"
    assert "There is no experiment 'none'" in run("experiment", "none", code=1).stderr
