"""Small image networks of five kinds: does it matter where the evidence is taken, and how the prior is grouped?

CNN, ResNet, Pre-ResNet (all with group norm), Fixup (a residual network without norm) and a Transformer (layer norm),
each of about 46,000 weights, are trained without a prior on MNIST images of 14 x 14 pixels, shifted at random. Their
Kronecker posteriors are tuned by the evidence at t or at theta*, with one prior precision or one for each normalised
group, and their probabilities (Monte Carlo link) are scored by the log likelihood of test images. Published
(METHODS.md, 12): theta* is never worse than t, and better by a lot where there are norms. Rows are kept as they come,
in docs/results/architectures.json: a run that was killed goes on from there.
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
    "cnn": "CNN", "post": "ResNet", "pre": "Pre-ResNet", "fixup": "Fixup", "transformer": "Transformer",
}  # fmt: skip
PASSES = 30
"""Over the data, at most, for each theta*; the next one begins where it ended."""
STEPS = 2
"""Of the fixed point at theta*, at most."""
WIDER = 5.0
"""The search for theta* begins at the precisions tuned at t, times this: it is quicker under a tighter prior."""


def norm(width: int) -> nn.GroupNorm:
    """Of each example by itself. What batch norm remembers is a constant to the Jacobian: no weight is scale-free."""
    return nn.GroupNorm(1, width)


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
            self.norms = nn.ModuleList([norm(width), norm(width)])

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
    """Patches of 4 x 4 pixels as 16 tokens, two encoder layers, the mean token classified."""

    def __init__(self, width: int = 52, hidden: int = 96) -> None:
        super().__init__()
        self.embed, self.place = nn.Linear(16, width), nn.Parameter(0.1 * torch.randn(16, width))
        layer = nn.TransformerEncoderLayer(width, 4, hidden, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        tokens = nn.functional.unfold(x, 4, padding=1, stride=4).transpose(1, 2)
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
            body += [conv(inputs, outputs, 2), norm(outputs), nn.ReLU()]
        return nn.Sequential(*body, *end(widths[-1]))
    width = 35
    first: list[nn.Module] = [] if kind == "fixup" else [norm(width)]
    stem: list[nn.Module] = [conv(1, width, 2), *first, nn.ReLU(), nn.MaxPool2d(2, ceil_mode=True)]
    last: list[nn.Module] = [norm(width), nn.ReLU()] if kind == "pre" else []
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
            across, down = torch.randint(-1, 2, (2,)).tolist()
            optimiser.zero_grad()
            nn.functional.cross_entropy(model(x[part].roll((across, down), (2, 3))), y[part]).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimiser.step()
            schedule.step()
    return model.eval()


def without_scale_free(posterior: lapis.LaplacePosterior) -> Tensor:
    """t with its scale-free weights at zero, where a network that norms each example has the same tangent outputs.

    f does not change when such a group is rescaled, so J_g t_g = 0.
    """
    network = posterior.network
    prior = lapis.Prior(1.0, "normalised").resolve(network)
    free = torch.tensor([label != "others" for label in prior.labels]) & (len(prior.labels) > 1)
    return torch.where(free[prior.group_index()], 0.0, posterior.mean.double())


def row(kind: str, data: tuple[Tensor, Tensor, Tensor, Tensor], epochs: int, seed: int) -> dict[str, Any]:
    """Test negative log likelihoods of one network, and how the searches for them ended."""
    x, y, x_test, y_test = data
    begun = time.process_time()
    torch.manual_seed(seed)
    model = trained(kind, x, y, epochs)
    posterior = lapis.laplace(model, (x, y), "classification", structure="kronecker")
    with torch.no_grad():
        plain = {
            name: float(nn.functional.cross_entropy(model(inputs), labels))
            for name, inputs, labels in (("MAP", x_test, y_test), ("training", x, y))
        }
    found: dict[str, Any] = {"weights": posterior.n_weights, "squared_length": float(posterior.mean.square().sum())}
    found |= plain
    print(kind, found, flush=True)  # noqa: T201
    for grouping, name in (("normalised", "groups"), ("one", "one")):
        at_t = posterior.tune(groups=grouping)
        if name == "one" and len(found["t, groups, details"]["precisions"]) == 1:
            for where in ("t", "theta*"):
                found[f"{where}, one"] = found[f"{where}, groups"]
            continue
        score(found, f"t, {name}", at_t, x_test, y_test)
        tighter = at_t.with_prior(lapis.Prior(WIDER * at_t.weight_prior.precision, groups=grouping))
        at_mode = tighter.at_tangent_mode(
            (x, y), tolerance=3e-3, max_products=PASSES, batch_size=500, start=without_scale_free(posterior)
        )
        tuned = at_mode.tune(method="fixed_point", tolerance=0.1, max_iterations=STEPS)
        score(found, f"theta*, {name}", tuned, x_test, y_test)
    found["cpu_seconds"] = round(time.process_time() - begun)
    return found


def score(found: dict[str, Any], name: str, tuned: lapis.LaplacePosterior, x: Tensor, y: Tensor) -> None:
    predicted = tuned.predict(x, link="mc")
    weights, _ = tuned.evidence_point()
    found[name] = -float(predicted.log_prob(y).mean())
    found[f"{name}, details"] = {
        "precisions": tuned.weight_prior.precision.tolist(),
        "gamma": float(tuned.effective_parameters()),
        "squared_length": float(weights.double().square().sum()),
        "logit_variance": float(predicted.f_variance.mean()),
        "log_evidence": float(tuned.log_evidence()),
        "tuning": str(tuned.tuning),
        "nats_left_in_mode": None if tuned.tangent is None else tuned.tangent.remaining,
    }
    print(name, found[name], found[f"{name}, details"], flush=True)  # noqa: T201


def details(held: dict[str, Any], name: str) -> dict[str, Any]:
    """How one search ended; with one group, "one" and "groups" are the same."""
    return held.get(f"{name}, details") or held[f"{name.split(',')[0]}, groups, details"]


def searches(held: dict[str, Any]) -> list[str]:
    """What was found with one precision, and how far both searches for theta* came."""
    cells = [f"{held['training']:.3f}"]
    for where in ("t, one", "theta*, one"):
        found = details(held, where)
        cells += [
            f"{found['squared_length']:.0f}", f"{found['gamma']:.0f}", f"{found['precisions'][0]:.3g}",
            f"{found['logit_variance']:.2f}",
        ]  # fmt: skip
    left = [details(held, f"theta*, {name}")["nats_left_in_mode"] for name in ("groups", "one")]
    return [*cells, " and ".join(f"{nats:.2g}" for nats in left)]


def main() -> None:
    chosen = arguments(__doc__)
    warnings.simplefilter("ignore", lapis.LapisWarning)
    n, n_test, epochs = (100, 200, 60) if chosen.quick else (5000, 1000, 12)
    pixels = images("mnist", n, n_test, chosen.seed)
    halved = [nn.functional.avg_pool2d(part, 2) if part.dim() == 4 else part for part in pixels]
    data = (halved[0], halved[1], halved[2], halved[3])
    settings = {
        "n": n, "n_test": n_test, "epochs": epochs, "passes": PASSES, "steps": STEPS, "seed": chosen.seed,
    }  # fmt: skip
    path = RESULTS / f"architectures{'_quick' if chosen.quick else ''}.json"
    held: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    if held.get("settings") != settings:
        held = {"settings": settings}
    for kind in KINDS:
        if kind not in held:
            with sdpa_kernel(SDPBackend.MATH):  # torch's fused attention cannot be differentiated twice
                held[kind] = row(kind, data, epochs, chosen.seed)
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
    text = f"Test negative log likelihood, {n:,} training images of MNIST, {n_test:,} test images, 14 x 14 pixels.\n\n"
    text += table(head, rows)
    text += (
        "\n\nWith one precision: squared length of the weights that the evidence is taken at, gamma, the precision, and"
    )
    text += " the mean variance of test logits; nats left above the minimum at theta*, with groups and one.\n\n"
    head = (
        "network", "training loss", "length^2, t", "gamma, t", "precision, t", "variance, t", "length^2, theta*",
        "gamma, theta*", "precision, theta*", "variance, theta*", "nats left",
    )  # fmt: skip
    text += table(head, [(name, *searches(held[kind])) for kind, name in KINDS.items()])
    report("architectures", text, chosen)


if __name__ == "__main__":
    main()
