"""`python -m benchmarks.optimisers`: a training step of each optimiser beside Adam's, in time and memory.

A step is everything: gradients cleared, forward and backward pass on one batch, and the update; one draw. Contenders
have processes of their own on one thread and take turns; times are the processor's, since the machine may be busy, and
the lower quartile of all turns counts. Memory is the peak above where a process stood before its network was made.
`vmap` is what VOGN would be with per-example gradients by torch.func; batch norm is in evaluation mode there, as vmap
cannot run it otherwise, and so it is in "VOGN, fixed norms". ivon-opt is measured where it is installed (.venv-bench).
"""

from __future__ import annotations

import argparse
import importlib.util
import json
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from benchmarks.cases import CASES
from benchmarks.turns import Step, measure
from lapis.optim import IVON, VOGN

PAGE = Path(__file__).parent.parent / "docs" / "results" / "optimisers.md"
TARGETS = {"IVON": 1.25, "VOGN": 2.5}
"""Most time of a step, in multiples of Adam's."""
FIXED = "VOGN, fixed norms"
TURNS = 12
WARM = 3
"""Steps before time counts: the first ones find and prove the plan of VOGN."""


def adam(model: nn.Module, x: Tensor, y: Tensor) -> Step:
    return _closed(torch.optim.Adam(model.parameters(), foreach=True), model, x, y)


def ivon(model: nn.Module, x: Tensor, y: Tensor) -> Step:
    return _closed(IVON(model.parameters(), data_size=1000), model, x, y)


def vogn(model: nn.Module, x: Tensor, y: Tensor) -> Step:
    return _closed(VOGN(model, data_size=1000), model, x, y)


def vogn_with_fixed_norms(model: nn.Module, x: Tensor, y: Tensor) -> Step:
    return vogn(model.eval(), x, y)


def peer(model: nn.Module, x: Tensor, y: Tensor) -> Step:
    import ivon as theirs

    optimiser = theirs.IVON(model.parameters(), lr=0.1, ess=1000)

    def step() -> None:
        with optimiser.sampled_params(train=True):
            optimiser.zero_grad()
            F.cross_entropy(model(x), y).backward()
        optimiser.step()

    return step


def vmapped(model: nn.Module, x: Tensor, y: Tensor) -> Step:
    """Gradients of all examples, their mean and mean square, and Adam's step with these."""
    model.eval()
    names = [name for name, _ in model.named_parameters()]
    optimiser = torch.optim.Adam(model.parameters(), foreach=True)

    def loss(parameters: dict[str, Tensor], one: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(torch.func.functional_call(model, parameters, (one[None],)), target[None])

    each = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0, 0))
    squares: dict[str, Tensor] = {}

    def step() -> None:
        parameters = {name: p.detach() for name, p in model.named_parameters()}
        gradients = each(parameters, x, y)
        for name, p in zip(names, model.parameters(), strict=True):
            p.grad = gradients[name].mean(0)
            squares[name] = gradients[name].square().mean(0)
        optimiser.step()

    return step


def _closed(optimiser: Any, model: nn.Module, x: Tensor, y: Tensor) -> Step:
    def closure() -> Tensor:
        optimiser.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        return loss

    return lambda: optimiser.step(closure)


CONTENDERS = {"Adam": adam, "IVON": ivon, "ivon-opt": peer, "VOGN": vogn, FIXED: vogn_with_fixed_norms, "vmap": vmapped}


def ready(case: str, name: str) -> Step:
    """A step of a contender, warm."""
    chosen = CASES[case]
    model, x = chosen.network(), chosen.inputs(chosen.batch_size, seed=1)
    step = CONTENDERS[name](model, x, chosen.targets(x))
    for _ in range(WARM):
        step()
    return step


def page(results: dict[str, dict[str, dict[str, float]]]) -> str:
    lines = [
        "# A training step of every optimiser",
        "",
        " ".join((__doc__ or "").split("\n\n", 1)[1].split()),
        "",
        "| network | optimiser | ms a step | x Adam | target | MB |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for case, found in results.items():
        base = found["Adam"]["milliseconds"]
        for name, row in found.items():
            ratio = row["milliseconds"] / base
            target = f"{TARGETS[name]}: {'met' if ratio <= TARGETS[name] else 'missed'}" if name in TARGETS else ""
            title = f"({case}) {CASES[case].title}"
            cells = (title, name, f"{row['milliseconds']:.1f}", f"{ratio:.2f}", target, f"{row['megabytes']:.0f}")
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join([*lines, "", "`python -m benchmarks.optimisers`", ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", default="abc", help="letters of benchmarks/cases.py")
    parser.add_argument("--turns", type=int, default=TURNS)
    parser.add_argument("--output", type=Path, default=PAGE)
    chosen = parser.parse_args()
    names = [name for name in CONTENDERS if name != "ivon-opt" or importlib.util.find_spec("ivon")]
    results = {}
    for case in chosen.cases:
        normed = any(isinstance(layer, _BatchNorm) for layer in CASES[case].network().modules())
        there = [name for name in names if normed or name != FIXED]
        results[case] = measure({name: partial(ready, case, name) for name in there}, chosen.turns)
    chosen.output.with_suffix(".json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    chosen.output.write_text(page(results), encoding="utf-8")
    print(page(results))  # noqa: T201


if __name__ == "__main__":
    main()
