"""Small image networks of five kinds: does it matter where the evidence is taken, and how the prior is grouped?

CNN, ResNet, Pre-ResNet (all with batch norm), Fixup (a residual network without norm) and a Transformer (layer norm),
each of about 46,000 weights, are trained on a subset of MNIST without a prior (SGD at 0.1; Adam at 0.003 for the
Transformer). Their Kronecker posteriors are tuned by the evidence at t or at theta*, with one prior precision or one
for each normalised group, and their probabilities (Monte Carlo link) are scored by the log likelihood of test images.
Published (METHODS.md, 12): theta* is never worse than t, and better by a lot where there are norms. Rows are kept as
they come, in docs/results/architectures.json: a run that was killed goes on from there.
"""

from __future__ import annotations

import itertools
import json
import time
import warnings
from typing import Any

import torch
from common import RESULTS, arguments, images, report, table
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import lapis

BATCH = 50
KINDS = {
    "cnn": "CNN", "fixup": "Fixup", "transformer": "Transformer", "post": "ResNet", "pre": "Pre-ResNet",
}  # fmt: skip
EFFORT = {"cnn": [50, 6], "fixup": [50, 6], "transformer": [25, 4], "post": [20, 3], "pre": [20, 3]}
"""Passes over the data for each theta*, and steps of the fixed point: what there was time for."""


def conv(inputs: int, outputs: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)


class Residual(nn.Module):
    """Two convolutions beside a skip connection: norm after each (post), before each (pre), or none (Fixup)."""

    def __init__(self, width: int, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.one, self.two = conv(width, width), conv(width, width)
        if kind == "fixup":
            nn.init.zeros_(self.two.weight)
            self.scale = nn.Parameter(torch.ones(1))
            self.biases = nn.Parameter(torch.zeros(4))
        else:
            self.norms = nn.ModuleList([nn.BatchNorm2d(width), nn.BatchNorm2d(width)])

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "fixup":
            b = self.biases
            inner = torch.relu(self.one(x + b[0]) + b[1])
            return torch.relu(x + self.scale * self.two(inner + b[2]) + b[3])
        if self.kind == "pre":
            inner = self.one(torch.relu(self.norms[0](x)))
            return x + self.two(torch.relu(self.norms[1](inner)))
        inner = torch.relu(self.norms[0](self.one(x)))
        return torch.relu(x + self.norms[1](self.two(inner)))


class Transformer(nn.Module):
    """Patches of 7 x 7 pixels as 16 tokens, two encoder layers, the mean token classified."""

    def __init__(self, width: int = 52, hidden: int = 96) -> None:
        super().__init__()
        self.embed, self.place = nn.Linear(49, width), nn.Parameter(0.1 * torch.randn(16, width))
        layer = nn.TransformerEncoderLayer(width, 4, hidden, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        tokens = nn.functional.unfold(x, 7, stride=7).transpose(1, 2)
        return self.head(self.norm(self.layers(self.embed(tokens) + self.place).mean(1)))


def network(kind: str) -> nn.Module:
    def end(width: int) -> list[nn.Module]:
        return [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 10)]

    if kind == "transformer":
        return Transformer()
    if kind == "cnn":
        widths = (1, 16, 32, 64, 38)
        body: list[nn.Module] = []
        for inputs, outputs in itertools.pairwise(widths):
            body += [conv(inputs, outputs, 2), nn.BatchNorm2d(outputs), nn.ReLU()]
        return nn.Sequential(*body, *end(widths[-1]))
    width = 35
    norm: list[nn.Module] = [] if kind == "fixup" else [nn.BatchNorm2d(width)]
    stem: list[nn.Module] = [conv(1, width, 2), *norm, nn.ReLU(), nn.MaxPool2d(2)]
    last: list[nn.Module] = [nn.BatchNorm2d(width), nn.ReLU()] if kind == "pre" else []
    return nn.Sequential(*stem, Residual(width, kind), Residual(width, kind), *last, *end(width))


def trained(kind: str, x: Tensor, y: Tensor, epochs: int) -> nn.Module:
    model = network(kind)
    rate = 3e-3 if kind == "transformer" else 0.1
    parameters = list(model.parameters())
    optimiser: torch.optim.Optimizer = (
        torch.optim.Adam(parameters, rate) if kind == "transformer" else torch.optim.SGD(parameters, rate, momentum=0.9)
    )
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, rate, total_steps=epochs * -(-len(x) // BATCH))
    for _ in range(epochs):
        for part in torch.randperm(len(x)).split(BATCH):
            optimiser.zero_grad()
            nn.functional.cross_entropy(model(x[part]), y[part]).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimiser.step()
            schedule.step()
    return model.eval()


def row(
    kind: str, data: tuple[Tensor, Tensor, Tensor, Tensor], epochs: int, effort: list[int], seed: int
) -> dict[str, Any]:
    """Test negative log likelihoods of one network, and how the searches for them ended."""
    x, y, x_test, y_test = data
    passes, steps = effort
    begun = time.process_time()
    torch.manual_seed(seed)
    model = trained(kind, x, y, epochs)
    posterior = lapis.laplace(model, (x, y), "classification", structure="kronecker")
    with torch.no_grad():
        plain = {
            name: float(nn.functional.cross_entropy(model(inputs), labels))
            for name, inputs, labels in (("MAP", x_test, y_test), ("training", x, y))
        }
    found: dict[str, Any] = {"weights": posterior.n_weights, **plain}
    for where in ("t", "theta*"):
        base = posterior
        if where == "theta*":
            base = posterior.tune(groups="normalised").at_tangent_mode((x, y), tolerance=1e-3, max_products=passes)
        for grouping, name in (("one", "one"), ("normalised", "groups")):
            tuned = base.tune(groups=grouping, method="fixed_point", tolerance=0.05, max_iterations=steps)
            probabilities = tuned.predict(x_test, link="mc").log_prob(y_test)
            found[f"{where}, {name}"] = -float(probabilities.mean())
            found[f"{where}, {name}, details"] = {
                "precisions": tuned.weight_prior.precision.tolist(),
                "gamma": float(tuned.effective_parameters()),
                "log_evidence": float(tuned.log_evidence()),
                "tuning": str(tuned.tuning),
                "nats_left_in_mode": None if tuned.tangent is None else tuned.tangent.remaining,
            }
            print(kind, where, grouping, found[f"{where}, {name}"], tuned.tuning, flush=True)  # noqa: T201
    found["cpu_seconds"] = round(time.process_time() - begun)
    return found


def main() -> None:
    chosen = arguments(__doc__)
    warnings.simplefilter("ignore", lapis.LapisWarning)
    n, n_test, epochs = (100, 200, 60) if chosen.quick else (300, 500, 60)
    effort = {kind: [20, 3] for kind in KINDS} if chosen.quick else EFFORT
    data = images("mnist", n, n_test, chosen.seed)
    settings = {"n": n, "n_test": n_test, "epochs": epochs, "effort": effort, "seed": chosen.seed}
    path = RESULTS / f"architectures{'_quick' if chosen.quick else ''}.json"
    held: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    if held.get("settings") != settings:
        held = {"settings": settings}
    for kind in KINDS:
        if kind not in held:
            with sdpa_kernel(SDPBackend.MATH):  # torch's fused attention cannot be differentiated twice
                held[kind] = row(kind, data, epochs, effort[kind], chosen.seed)
            path.write_text(json.dumps(held, indent=1), encoding="utf-8")
    order = ("theta*, groups", "theta*, one", "t, groups", "t, one")
    rows = [
        (
            name, f"{held[kind]['weights']:,}", len(held[kind]["t, groups, details"]["precisions"]),
            *(f"{held[kind][key]:.3f}" for key in ("MAP", *order)), f"{held[kind]['cpu_seconds']} s",
        )
        for kind, name in KINDS.items()
    ]  # fmt: skip
    head = ("network", "weights", "groups", "MAP", *order, "CPU")
    text = f"Test negative log likelihood, {n} training images of MNIST, {n_test} test images.\n\n{table(head, rows)}"
    report("architectures", text, chosen)


if __name__ == "__main__":
    main()
