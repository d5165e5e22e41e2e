"""A kit of damage: seeded edits of files, of every kind of posterior and of checkpoints.

Three levels: plain edits; edits with the digest in the header made anew; and edits by somebody who has the network and
makes the seal anew as well. Files of the first two must be refused, or load to equal results. Of the third, what cannot
be told from a file that Lapis wrote loads to other results, which are finite: it is another posterior of this network.

`python tests/tampering.py 1000` (`make tamper N=1000`) edits so many files, and prints what became of them.
"""

from __future__ import annotations

import copy
import hashlib
import hmac
import json
import random
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))

import lapis
import test_contract
from lapis import files

LEVELS = ("plain", "digest", "seal")
JUNK: list[Any] = [
    None, True, -1, 0, 1, 2**63, -(2**70), 10**15, 1e308, float("nan"), float("inf"), -0.5, "", "x", [], {}, [1, 2],
    {"a": 1},
]  # fmt: skip
"""What a place in JSON may be replaced by."""


@dataclass(frozen=True)
class Case:
    """A file, the key it is sealed with, and a function that uses it and returns numbers."""

    name: str
    path: Path
    key: str
    use: Callable[[Path], list[Tensor]]


# cases -------------------------------------------------------------------------------------------------


def posterior_case(name: str, folder: Path) -> Case:
    posterior, model, x = test_contract.fitted(name)
    path = folder / f"{name}.lapis"
    posterior.save(path)
    problem = test_contract.PROBLEMS["classification"]
    data = (problem.inputs(test_contract.EXAMPLES), problem.targets(test_contract.EXAMPLES))
    needed = data if type(posterior).needs_data else None

    def use(edited: Path) -> list[Tensor]:
        loaded = lapis.load(edited, copy.deepcopy(model), data=needed)
        found = loaded.predict(x)
        return [found.f_mean, found.f_variance, found.probs]

    holds = type(posterior).holds_networks
    return Case(name, path, "" if holds else posterior.network.key(), use)


def training_case(folder: Path) -> Case:
    path = folder / "training.lapis"
    x = torch.linspace(-1, 1, 12, dtype=torch.float64)[:, None]

    def train(where: Path) -> list[Tensor]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(1, 3), torch.nn.Tanh(), torch.nn.Linear(3, 1)).double()
        options: dict[str, Any] = {"epochs": 3, "burn_in": 2, "every": 1, "structure": "diagonal", "progress": False}
        found = lapis.train(model, (x, x), "regression", checkpoint=where, **options)
        return [found.mean, found.weight_prior.precision, found.log_evidence()]

    train(path)
    return Case("training run", path, f"{lapis.batches.digest(x, x):016x}", train)


def draw_case(solver: str, folder: Path) -> Case:
    path = folder / f"draw-{solver}.lapis"
    posterior, _, _ = test_contract.fitted("implicit", "regression")
    options: dict[str, Any] = {"solver": solver, "progress": False}
    if solver == "sgd":
        options |= {"epochs": 5, "batch_size": 4}

    def draw(where: Path) -> list[Tensor]:
        return [posterior.draw(3, checkpoint=where, **options).deviations]  # type: ignore[attr-defined]

    draw(path)
    return Case(f"draw by {solver}", path, posterior.network.key(), draw)


def cases(folder: Path) -> list[Case]:
    """Every kind of posterior in the contract's list, and every kind of checkpoint."""
    found = [posterior_case(name, folder) for name in test_contract.POSTERIORS]
    return [*found, training_case(folder), draw_case("cg", folder), draw_case("sgd", folder)]


# edits -------------------------------------------------------------------------------------------------


def parts(path: Path) -> tuple[dict[str, str], dict[str, Tensor]]:
    with safe_open(path, framework="pt") as file:
        return dict(file.metadata()), {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118


def rewrite(path: Path, header: dict[str, str], tensors: dict[str, Tensor], level: str, key: str) -> None:
    if level != "plain":
        header["digest"] = files.tensors_digest(tensors, f"{header.get('format')} {header.get('lapis')}")
    if level == "seal":
        header["seal"] = hmac.new(key.encode(), header["digest"].encode(), hashlib.sha256).hexdigest()
    with path.open("wb") as file:
        files._store(file, {name: tensor.contiguous() for name, tensor in tensors.items()}, header)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place in a JSON value."""
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path] * bool(path) + [place for key, part in inside for place in places(part, (*path, key))]


def edit_json(config: dict[str, Any], source: random.Random) -> str:
    place = source.choice(places(config))
    within = config
    for key in place[:-1]:
        within = within[key]
    old, last = within[place[-1]], place[-1]
    how = source.choice(["junk", "junk", "drop", "scale", "add"])
    if how == "drop":
        del within[last]
    elif how == "scale" and isinstance(old, (int, float)) and not isinstance(old, bool):
        within[last] = source.choice([-old, old * 2, old + 1, old * 1e9])
    elif how == "add" and isinstance(old, dict):
        old["unknown"] = 1
    else:
        within[last] = copy.deepcopy(source.choice(JUNK))
    return f"{how} {'.'.join(map(str, place))}: {str(old)[:30]}"


def edit_tensor(tensors: dict[str, Tensor], source: random.Random) -> str:
    name = source.choice(sorted(tensors))
    old = tensors[name]
    how = source.choice(["nan", "inf", "negative", "zero", "scale", "shape", "dtype", "drop", "rename", "bit", "huge"])
    if how == "drop":
        del tensors[name]
    elif how == "rename":
        tensors[name + "x"] = tensors.pop(name)
    elif how == "shape":
        tensors[name] = source.choice([old.flatten(), old[None], torch.cat([old.flatten(), old.flatten()])])
    elif how == "dtype":
        tensors[name] = old.to(source.choice([torch.float32, torch.int64, torch.float16, torch.bool]))
    elif old.numel():
        flat = old.reshape(-1)
        place = source.randrange(len(flat))
        if how == "bit":
            raw = flat.view(torch.uint8)
            raw[source.randrange(len(raw))] ^= 1 << source.randrange(8)
        elif old.is_floating_point():
            new = {"nan": torch.nan, "inf": torch.inf, "negative": -1.0, "zero": 0.0, "huge": 1e30}
            flat[place] = new[how] if how in new else 2 * float(flat[place]) + 0.1
        else:
            flat[place] = source.choice([-1, 0, 2**31 - 1]) if old.dtype != torch.bool else not bool(flat[place])
    return f"{how} {name}"


def edited(case: Case, target: Path, level: str, source: random.Random) -> str:
    """Write an edited copy of the case's file to the target; says what was done."""
    whole = case.path.read_bytes()
    if level == "plain" and source.random() < 0.6:
        length = 8 + int.from_bytes(whole[:8], "little")
        how = source.choice(["header bit", "any bit", "cut", "longer", "other bytes"])
        raw = bytearray(whole)
        if how in ("header bit", "any bit"):
            raw[source.randrange(length if how == "header bit" else len(raw))] ^= 1 << source.randrange(8)
        elif how == "cut":
            raw = raw[: source.randrange(len(raw))]
        elif how == "longer":
            raw += source.randbytes(source.randrange(1, 100))
        else:
            start = source.randrange(len(raw))
            raw[start : start + 20] = source.randbytes(len(raw[start : start + 20]))
        target.write_bytes(raw)
        return how
    header, tensors = parts(case.path)
    if not tensors or source.random() < 0.5:
        config = json.loads(header["lapis"])
        said = edit_json(config, source)
        header["lapis"] = json.dumps(config)
    else:
        said = edit_tensor(tensors, source)
    rewrite(target, header, tensors, level, case.key)
    return said


# judgement ---------------------------------------------------------------------------------------------


def judged(case: Case, target: Path, expected: list[Tensor]) -> str:
    """ "refused", "equal", "other" (finite results that differ), "not finite", or the name of a raw error."""
    before = target.read_bytes()
    try:
        found = case.use(target)
    except lapis.LapisError:
        assert target.read_bytes() == before, "a refused file was changed"
        return "refused"
    except Exception as error:  # noqa: BLE001  (whatever comes is judged)
        return f"raw {type(error).__name__}: {str(error)[:100]}"
    if not all(bool(torch.isfinite(part).all()) for part in found):
        return "not finite"
    same = all(one.shape == two.shape and torch.equal(one, two) for one, two in zip(found, expected, strict=True))
    return "equal" if same else "other"


def run(count: int, seed: int = 0, levels: tuple[str, ...] = LEVELS) -> dict[str, Counter[str]]:
    """Judgements by level, of `count` edited files; those that break the promise are printed."""
    source = random.Random(seed)
    found: dict[str, Counter[str]] = {level: Counter() for level in levels}
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        every = cases(Path(folder))
        expected = {case.name: case.use(_copy(case, Path(folder) / "copy")) for case in every}
        for number in range(count):
            case, level = every[number % len(every)], levels[(number // len(every)) % len(levels)]
            target = Path(folder) / "edited"
            said = edited(case, target, level, source)
            verdict = judged(case, target, expected[case.name])
            if level == "seal" and verdict == "not finite":
                verdict = "not finite, as edited"
            found[level][verdict] += 1
            if verdict not in ALLOWED[level]:
                print(f"{case.name}, {level}: {said} -> {verdict}")
    return found


def _copy(case: Case, target: Path) -> Path:
    target.write_bytes(case.path.read_bytes())
    return target


ALLOWED = {"plain": ("refused", "equal"), "digest": ("refused", "equal"), "seal": ("refused", "equal", "other")}

if __name__ == "__main__":
    torch.set_num_threads(1)
    results = run(int(sys.argv[1]) if len(sys.argv) > 1 else 1000)
    for level, verdicts in results.items():
        print(f"{level}: {sum(verdicts.values())} files, " + ", ".join(f"{n} {v}" for v, n in verdicts.most_common()))
    sys.exit(any(verdict not in ALLOWED[level] for level, verdicts in results.items() for verdict in verdicts))
