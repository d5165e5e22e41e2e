"""`python -m benchmarks.methods`: subnetworks, SWAG and variational inference beside other libraries.

Contenders have processes of their own on one thread and take turns; times are the processor's, since the machine may be
busy, and the lower quartile of all turns counts. Memory is the peak above where a process stood before it was made
ready, its first run included. All have the same network and data. `tests/test_method_peers.py` compares the answers.
laplace-torch has its BackPACK backend: with its default (curvlinops) a fit of the LeNet had not ended after a minute.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import sys
import types
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import lapis
from benchmarks.cases import CASES, Problem, problem
from benchmarks.turns import Step, measure

PAGE = Path(__file__).parent.parent / "docs" / "results" / "methods_speed.md"
TURNS = 7
SNAPSHOTS, NETWORKS, POINTS = 20, 20, 256
STEPS = (100, 1000)
"""Of variational inference; ours also evaluates the ELBO, in eight passes over the data, which counts in short fits."""
COUNT = 1000
"""Weights of a subnetwork."""

# -- subnetworks --------------------------------------------------------------------------------------------


def chosen_weights(made: Problem, count: int = COUNT) -> Tensor:
    """Flat indices, in order."""
    size = sum(p.numel() for p in made.model.parameters())
    return torch.randperm(size, generator=torch.Generator().manual_seed(5))[:count].sort().values


def our_subnetwork(made: Problem) -> Any:
    size = sum(p.numel() for p in made.model.parameters())
    mask = torch.zeros(size, dtype=torch.bool)
    mask[chosen_weights(made)] = True
    return lapis.laplace(made.model, made.batches, made.case.likelihood, weights=lapis.Subnetwork(by=mask))


def their_subnetwork(made: Problem) -> Any:
    from laplace import FullSubnetLaplace
    from laplace.curvature import BackPackGGN

    fitted = FullSubnetLaplace(made.model, made.case.likelihood, chosen_weights(made), backend=BackPackGGN)
    fitted.fit(made.batches)
    return fitted


def our_fit(case: str) -> Step:
    made = problem(CASES[case])
    return _warm(lambda: our_subnetwork(made).log_evidence())


def their_fit(case: str) -> Step:
    made = problem(CASES[case])
    return _warm(lambda: their_subnetwork(made).log_marginal_likelihood())


def our_prediction(case: str) -> Step:
    made = problem(CASES[case])
    posterior, x = our_subnetwork(made), made.points(POINTS)
    return _warm(lambda: posterior.predict(x, link="probit", progress=False).probs)


def their_prediction(case: str) -> Step:
    made = problem(CASES[case])
    fitted, x = their_subnetwork(made), made.points(POINTS)
    return _warm(lambda: fitted(x, pred_type="glm", link_approx="probit"))


# -- SWAG ---------------------------------------------------------------------------------------------------


def their_swag_class() -> Any:
    """torch-uncertainty's SWAG, without the rest of the package, which would want lightning and torchvision."""
    name = "torch_uncertainty"
    spec = importlib.util.find_spec(name)
    assert spec is not None
    (root,) = spec.submodule_search_locations or ()
    for package, path in ((name, root), (f"{name}.methods", f"{root}/methods")):
        if package not in sys.modules:
            held = types.ModuleType(package)
            held.__path__ = [path]
            sys.modules[package] = held
    return importlib.import_module(f"{name}.methods.swag").SWAG


def moved(made: Problem, collect: Callable[[int], Any]) -> None:
    """Weights that move a little before every snapshot; all contenders see the same."""
    generator = torch.Generator().manual_seed(6)
    for number in range(SNAPSHOTS + 5):
        with torch.no_grad():
            for p in made.model.parameters():
                p.add_(1e-3 * torch.randn(p.shape, generator=generator))
        collect(number)


def our_swag(made: Problem) -> Any:
    collector = lapis.SWAG(made.model, rank=SNAPSHOTS)
    moved(made, lambda _: collector.collect())
    return collector


def their_swag(made: Problem) -> Any:
    collector = their_swag_class()(made.model, 0, 1, max_num_models=SNAPSHOTS, var_clamp=0.0, num_estimators=0)
    moved(made, lambda number: collector.update_wrapper(number + 1))
    return collector


def our_snapshot(case: str) -> Step:
    return _warm(our_swag(problem(CASES[case])).collect)


def their_snapshot(case: str) -> Step:
    collector = their_swag(problem(CASES[case]))
    return _warm(lambda: collector.update_wrapper(1))


def our_networks(case: str) -> Step:
    made = problem(CASES[case])
    posterior, x = our_swag(made).posterior("classification"), made.points(POINTS)
    return _warm(lambda: posterior.predict(x, samples=NETWORKS, progress=False).probs)


def their_networks(case: str) -> Step:
    made = problem(CASES[case])
    collector, x = their_swag(made), made.points(POINTS)

    def predict() -> Tensor:
        with torch.no_grad():
            outputs = [collector.sample(1.0)(x).softmax(-1) for _ in range(NETWORKS)]
        return torch.stack(outputs).mean(0)

    return _warm(predict)


# -- variational inference ----------------------------------------------------------------------------------


def our_steps(case: str, steps: int, reparameterisation: Any = "local") -> Step:
    made = problem(CASES[case])

    def fit() -> Any:
        return lapis.variational(
            made.model, made.batches, "classification", steps=steps, reparameterisation=reparameterisation,
            progress=False,
        )  # fmt: skip

    return _warm(fit)


def their_log_posterior(made: Problem) -> Callable[[Any, tuple[Tensor, Tensor]], tuple[Tensor, Tensor]]:
    """log p(D | theta) + log p(theta), up to the prior's constant, from a batch; prior precision one."""
    total = len(made.batches.dataset)

    def log_posterior(weights: Any, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        x, y = batch
        f = torch.func.functional_call(made.model, weights, (x,))
        square = sum(w.square().sum() for w in weights.values())
        return -F.cross_entropy(f, y, reduction="sum") * (total / len(y)) - 0.5 * square, torch.zeros(())

    return log_posterior


def their_steps(case: str, steps: int) -> Step:
    import posteriors
    import torchopt

    made = problem(CASES[case])
    transform = posteriors.vi.diag.build(their_log_posterior(made), torchopt.adam(lr=1e-3), init_log_sds=-4.0)

    def fit() -> Any:
        state = transform.init({name: p.detach().clone() for name, p in made.model.named_parameters()})
        for step in range(steps):
            state, _ = transform.update(state, made.batches[step % len(made.batches)])
        return state

    return _warm(fit)


def _warm(step: Step) -> Step:
    step()
    return step


# -- the table ----------------------------------------------------------------------------------------------

JOBS: dict[str, tuple[str, str, dict[str, Callable[[str], Step]]]] = {
    f"subnetwork of {COUNT:,}, fit and log evidence": ("b", "laplace", {
        "Lapis": our_fit,
        "laplace-torch": their_fit,
    }),
    f"subnetwork of {COUNT:,}, prediction of {POINTS} points": ("b", "laplace", {
        "Lapis": our_prediction,
        "laplace-torch": their_prediction,
    }),
    "SWAG, one snapshot": ("b", "torch_uncertainty", {"Lapis": our_snapshot, "torch-uncertainty": their_snapshot}),
    f"SWAG, {NETWORKS} networks predict {POINTS} points": ("b", "torch_uncertainty", {
        "Lapis": our_networks, "torch-uncertainty": their_networks,
    }),
    **{f"variational inference, {steps:,} steps": ("a", "posteriors", {
        "Lapis": partial(our_steps, steps=steps),
        "Lapis, weights drawn for a batch": partial(our_steps, steps=steps, reparameterisation="weights"),
        "posteriors": partial(their_steps, steps=steps),
    }) for steps in STEPS},
}  # fmt: skip
"""By title: letters of cases, the module of the peer, contenders."""


def page(results: dict[str, dict[str, dict[str, dict[str, float]]]]) -> str:
    lines = [
        "# Subnetworks, SWAG and variational inference beside other libraries",
        "",
        " ".join((__doc__ or "").split("\n\n", 1)[1].split()),
        "",
        "| job | network | contender | ms | x Lapis | MB |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for job, cases in results.items():
        for case, found in cases.items():
            for name, row in found.items():
                ratio = row["milliseconds"] / found["Lapis"]["milliseconds"]
                cells = (job, CASES[case].title, name, f"{row['milliseconds']:.1f}", f"{ratio:.2f}")
                lines.append("| " + " | ".join((*cells, f"{row['megabytes']:.0f}")) + " |")
    return "\n".join([*lines, "", "`python -m benchmarks.methods`", ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", default="", help="only those whose title holds this word")
    parser.add_argument("--turns", type=int, default=TURNS)
    parser.add_argument("--output", type=Path, default=PAGE)
    chosen = parser.parse_args()
    kept = chosen.output.with_suffix(".json")
    results = json.loads(kept.read_text(encoding="utf-8")) if kept.exists() else {}
    for job, (cases, module, contenders) in JOBS.items():
        if chosen.jobs not in job or importlib.util.find_spec(module) is None:
            continue
        for case in cases:
            found = measure({name: partial(ready, case) for name, ready in contenders.items()}, chosen.turns)
            results.setdefault(job, {})[case] = found
            kept.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
            print(job, case, found, flush=True)  # noqa: T201
    chosen.output.write_text(page(results), encoding="utf-8")


if __name__ == "__main__":
    main()
