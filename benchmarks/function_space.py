"""`python -m benchmarks.function_space`: the data view, kernels and FROMP beside per-example loops written naively.

LeNet-5 (61,706 weights, 10 outputs), images of random pixels. An epoch of Adam in batches of 128, `memorable` and
`sensitivity` over the same images; the kernel matrix of some images under a diagonal posterior, and that of 1,000 under
a Kronecker one. Naively, as the public code of DNN2GP does it: a backward pass for every output of every image, all of
J in memory, J Sigma J^T. FROMP: a step with 10 past tasks of 40 points each, 784-100-100-10, batches of 128; naively
with a pass for every task and a product for every class. Contenders have processes of their own on one thread and take
turns; times are the processor's, and the lower quartile of all turns counts.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

import lapis
from benchmarks.turns import Step, measure
from lapis import lifelong

PAGE = Path(__file__).parent.parent / "docs" / "results" / "function_space_speed.md"
IMAGES, FEW, MANY, TASKS, POINTS, STEPS = 3_000, 100, 1_000, 10, 40, 30


def lenet() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 6, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10),
    )  # fmt: skip


def images(count: int) -> tuple[Tensor, Tensor]:
    source = torch.Generator().manual_seed(0)
    return torch.rand(count, 1, 28, 28, generator=source), torch.randint(10, (count,), generator=source)


def epoch() -> Step:
    model, (x, y) = lenet(), images(IMAGES)
    optimiser = torch.optim.Adam(model.parameters(), 1e-4)

    def run() -> None:
        for some in torch.randperm(len(y)).split(128):
            optimiser.zero_grad()
            nn.functional.cross_entropy(model(x[some]), y[some]).backward()
            optimiser.step()

    return warm(run)


def posterior(structure: str) -> lapis.posteriors.LaplacePosterior:
    return lapis.laplace(lenet(), images(500), "classification", weights="all", structure=structure)


def data_view(work: str, structure: str) -> Step:
    held, data = posterior(structure), images(IMAGES)
    if work == "memorable":
        return warm(lambda: held.memorable(data, per_class=10))
    return warm(lambda: held.sensitivity(data))


def kernel(structure: str, count: int) -> Step:
    process, (x, _) = posterior(structure).gaussian_process(), images(count)
    if count == MANY:
        return lambda: process.kernel(x)
    return warm(lambda: process.kernel(x))


def jacobian(model: nn.Module, x: Tensor) -> Tensor:
    """J (n C, P), output after output."""
    rows = []
    for image in x:
        for output in model(image[None])[0]:
            found = torch.autograd.grad(output, list(model.parameters()), retain_graph=True)
            rows.append(torch.cat([each.reshape(-1) for each in found]))
    return torch.stack(rows)


def naive_kernel() -> Step:
    model, (x, _) = lenet(), images(FEW)
    variance = posterior("diagonal").marginal_variance()

    def run() -> Tensor:
        rows = jacobian(model, x)
        return (rows * variance) @ rows.mT

    return run


def naive_sensitivity() -> Step:
    model, (x, y) = lenet(), images(FEW)
    variance = posterior("diagonal").marginal_variance()

    def run() -> list[Tensor]:
        found = []
        for image, label in zip(x, y, strict=True):
            rows = jacobian(model, image[None])
            error = model(image[None])[0].softmax(-1) - nn.functional.one_hot(label, 10)
            found.append(((rows * variance) @ (rows.mT @ error)).norm())
        return found

    return run


# -- FROMP ---------------------------------------------------------------------------------------------------


def pixels(number: int) -> tuple[Tensor, Tensor]:
    source = torch.Generator().manual_seed(number)
    return torch.rand(1280, 784, generator=source), torch.randint(10, (1280,), generator=source)


def taught(tasks: int, at_once: int | None) -> lifelong.FROMP:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(784, 100), nn.ReLU(), nn.Linear(100, 100), nn.ReLU(), nn.Linear(100, 10))
    learner = lifelong.FROMP(
        model, "classification", points=POINTS, epochs=1, batch_size=128, learning_rate=1e-3, progress=False,
        tasks_at_a_step=at_once,
    )  # fmt: skip
    for number in range(tasks):
        learner.learn(pixels(number))
    return learner


def steps(tasks: int, at_once: int | None, penalty: Callable[[lifelong.FROMP], Callable[[], Tensor] | None]) -> Step:
    """STEPS steps of Adam; without tasks, of plain training."""
    learner = taught(tasks, at_once)
    x, y = pixels(99)
    extra = penalty(learner)
    optimiser = torch.optim.Adam(learner.model.parameters(), 1e-3)

    def run() -> None:
        for i in range(STEPS):
            some = slice(128 * (i % 10), 128 * (i % 10) + 128)
            optimiser.zero_grad()
            loss = nn.functional.cross_entropy(learner.model(x[some]), y[some])
            (loss if extra is None else loss + extra()).backward()
            optimiser.step()

    return warm(run)


def own(learner: lifelong.FROMP) -> Callable[[], Tensor] | None:
    return learner._penalty(learner._task(pixels(99), None))


def naive(learner: lifelong.FROMP) -> Callable[[], Tensor]:
    def penalty() -> Tensor:
        total = torch.zeros(())
        for episode, anchor in zip(learner.memory.episodes, learner.anchors, strict=True):
            p = learner.model(episode.inputs).softmax(-1)
            for c in range(10):
                gap = p[:, c] - anchor.means[:, 0, c]
                total = total + gap @ anchor.inverse[0, c] @ gap
        return 0.5 * learner.strength * total

    return penalty


def warm(step: Step) -> Step:
    step()
    return step


CONTENDERS: dict[str, Callable[[], Step]] = {
    f"epoch of {IMAGES:,} images": epoch,
    "memorable": partial(data_view, "memorable", "diagonal"),
    "sensitivity, diagonal": partial(data_view, "sensitivity", "diagonal"),
    "sensitivity, Kronecker": partial(data_view, "sensitivity", "kronecker"),
    f"sensitivity of {FEW}, naively": naive_sensitivity,
    f"kernel of {FEW}, diagonal": partial(kernel, "diagonal", FEW),
    f"kernel of {FEW}, naively": naive_kernel,
    f"{STEPS} plain steps": partial(steps, 0, None, own),
    f"{STEPS} steps of FROMP": partial(steps, TASKS, None, own),
    f"{STEPS} steps of FROMP, one task at a step": partial(steps, TASKS, 1, own),
    f"{STEPS} steps of FROMP, naively": partial(steps, TASKS, None, naive),
}
LONG = {f"kernel of {MANY:,}, Kronecker": partial(kernel, "kronecker", MANY)}


def page(found: dict[str, dict[str, float]]) -> str:
    time = {name: row["milliseconds"] for name, row in found.items()}
    one, plain = time[f"epoch of {IMAGES:,} images"], time[f"{STEPS} plain steps"]
    few = {name: time[f"{name}, naively"] for name in (f"sensitivity of {FEW}", f"kernel of {FEW}")}
    fromp = f"{STEPS} steps of FROMP"
    said = {
        "memorable": f"{time['memorable'] / one:.2f} epochs (at most 3 asked)",
        "sensitivity, diagonal": f"{time['sensitivity, diagonal'] / one:.2f} epochs (at most 3 asked)",
        "sensitivity, Kronecker": f"{time['sensitivity, Kronecker'] / one:.2f} epochs (at most 3 asked)",
        f"sensitivity of {FEW}, naively": "an image "
        f"{few[f'sensitivity of {FEW}'] / FEW / (time['sensitivity, diagonal'] / IMAGES):.0f} x as long as Lapis",
        f"kernel of {FEW}, naively": f"{few[f'kernel of {FEW}'] / time[f'kernel of {FEW}, diagonal']:.1f} x as long",
        fromp: f"{time[fromp] / plain:.2f} plain steps (at most 2 asked)",
        f"{fromp}, one task at a step": f"{time[f'{fromp}, one task at a step'] / plain:.2f} plain steps",
        f"{fromp}, naively": f"{time[f'{fromp}, naively'] / plain:.2f} plain steps",
    }
    lines = ["# Function space: time and memory", "", " ".join((__doc__ or "").split("\n\n", 1)[1].split()), ""]
    lines += ["| work | ms | MB | |", "|---|---:|---:|---|"]
    for name, row in found.items():
        lines.append(f"| {name} | {row['milliseconds']:.0f} | {row['megabytes']:.0f} | {said.get(name, '')} |")
    return "\n".join([*lines, "", "`python -m benchmarks.function_space`", ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--output", type=Path, default=PAGE)
    chosen = parser.parse_args()
    found = measure(CONTENDERS, chosen.turns) | measure(LONG, 1)
    chosen.output.with_suffix(".json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    chosen.output.write_text(page(found), encoding="utf-8")
    print(page(found))  # noqa: T201


if __name__ == "__main__":
    main()
