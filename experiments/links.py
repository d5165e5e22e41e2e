"""Which link is nearest to the integral? E[softmax(f)], f ~ N(m, V), by every link and by brute force.

Means of several sizes, and four kinds of covariance at several scales: independent logits ("diagonal"), independent
ones with a large common shift ("shift"), three directions ("low rank"), and that of a last layer's Laplace posterior
("last layer"), V = (c (diag(p) - p p^T) + d I)^-1, where rare classes and the common shift are the least certain. The
truth is the mean over many Sobol points, and for two classes a fine grid; a second set of Sobol points gives its error.
The digits of scikit-learn show what the links do on a real network.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import NamedTuple

import matplotlib.pyplot as plt
import torch
from common import COLOURS, arguments, report, save, table
from torch import Tensor, nn

import lapis
from lapis.likelihoods import Categorical
from lapis.metrics import ece, nll, ood_auroc
from lapis.predictions import ClassificationPrediction, LatentGaussian, predict
from lapis.predictions.integrals.links import mean_field

F64 = torch.float64
LINKS = ("quasi", "mean_field", "probit", "bridge", "mc")
POINTS = (32, 64, 128, 256, 512)
KINDS = ("diagonal", "shift", "low rank", "last layer")
CONSTANTS = (0.05, 0.1, 0.2, 0.3)
"""Other constants than pi/8 = 0.39 for the mean-field link: it is too cautious, so smaller ones."""


class Size(NamedTuple):
    """How much work a number of classes gets."""

    classes: int
    examples: int
    draws: int
    means: tuple[float, ...]
    scales: tuple[float, ...]


FULL = [
    Size(2, 64, 0, (0.5, 2.0, 6.0), (0.3, 3.0, 30.0)),
    Size(3, 64, 2**15, (0.5, 2.0, 6.0), (0.3, 3.0, 30.0)),
    Size(10, 48, 2**15, (0.5, 2.0, 6.0), (0.3, 3.0, 30.0)),
    Size(32, 16, 2**15, (0.5, 2.0, 6.0), (0.3, 3.0, 30.0)),
    Size(100, 8, 2**15, (0.5, 2.0, 6.0), (0.3, 3.0, 30.0)),
    Size(1000, 2, 2**14, (0.5, 4.0), (0.3, 3.0)),
]
QUICK = [Size(2, 8, 0, (2.0,), (3.0,)), Size(10, 8, 2**12, (2.0,), (3.0,)), Size(40, 2, 2**10, (2.0,), (3.0,))]


class Case(NamedTuple):
    mean_size: float
    scale: float
    kind: str
    mean: Tensor
    covariance: Tensor

    @property
    def latent(self) -> LatentGaussian:
        """With the covariance, but for independent logits, of which variances are all there is to know."""
        variance = self.covariance.diagonal(dim1=-2, dim2=-1)
        full = None if self.kind == "diagonal" else self.covariance.unsqueeze(1)
        return LatentGaussian(self.mean.unsqueeze(1), variance.unsqueeze(1), full)


def cases(size: Size, seed: int) -> Iterator[Case]:
    generator = torch.Generator().manual_seed(seed)
    number, classes = size.examples, size.classes

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=F64, generator=generator)

    one = torch.eye(classes, dtype=F64)
    for mean_size in size.means:
        mean = mean_size * normal(number, classes)
        for scale in size.scales:
            low_rank = normal(number, classes, 3)
            p = normal(number, classes).softmax(-1)
            fisher = torch.diag_embed(p) - p.unsqueeze(-1) * p.unsqueeze(-2)
            covariances = {
                "diagonal": torch.diag_embed(scale * normal(number, classes) ** 2),
                "shift": scale * torch.diag_embed(normal(number, classes) ** 2) + 10 * scale,
                "low rank": scale * low_rank @ low_rank.mT / 3,
                "last layer": scale * torch.linalg.inv(classes * fisher + 0.1 * one),
            }
            for kind in KINDS:
                yield Case(mean_size, scale, kind, mean, covariances[kind])


def truth(case: Case, draws: int, seed: int = 1) -> Tensor:
    """E[softmax(f)], (N, C). For two classes on a grid over f_1 - f_0, otherwise by so many Sobol points."""
    mean, covariance = case.mean, case.covariance
    classes = mean.shape[1]
    if classes == 2:
        variance = covariance[:, 0, 0] + covariance[:, 1, 1] - 2 * covariance[:, 0, 1]
        z = torch.linspace(-9, 9, 20_001 + 2 * seed, dtype=F64)
        logits = (mean[:, 1] - mean[:, 0])[:, None] + variance.sqrt()[:, None] * z
        yes = logits.sigmoid() @ (-0.5 * z**2).softmax(0)
        return torch.stack([1 - yes, yes], 1)
    centred = covariance - covariance.mean(-1, keepdim=True)
    values, vectors = torch.linalg.eigh(centred - centred.mean(-2, keepdim=True))
    root = (vectors * values.clamp_min(0).sqrt().unsqueeze(-2)).flip(-1)[..., :-1]
    engine = torch.quasirandom.SobolEngine(classes - 1, scramble=True, seed=1000 + seed)
    total, done = torch.zeros_like(mean), 0
    while done < draws:
        count = min(draws - done, 4096)
        z = torch.special.ndtri(engine.draw(count, dtype=F64).clamp(1e-12, 1 - 1e-12))
        total += torch.stack([(m + z @ r.T).softmax(-1).sum(0) for m, r in zip(mean, root, strict=True)])
        done += count
    return total / draws


class Error(NamedTuple):
    """Of probabilities (N, C): the largest, the total variation (half the sum over classes), KL(truth, found)."""

    largest: float
    variation: float
    divergence: float

    @classmethod
    def of(cls, found: Tensor, exact: Tensor) -> Error:
        gap = (found - exact).abs()
        tiny = 1e-300
        divergence = (exact * (exact.clamp_min(tiny).log() - found.clamp_min(tiny).log())).sum(1)
        return cls(float(gap.max()), float(gap.sum(1).mean() / 2), float(divergence.mean()))

    @classmethod
    def over(cls, errors: list[Error]) -> Error:
        """The worst, and the means, over cases."""
        columns = list(zip(*errors, strict=True))
        return cls(max(columns[0]), *(sum(column) / len(column) for column in columns[1:]))

    def cells(self) -> tuple[str, str, str]:
        return f"{self.largest:.4f}", f"{self.variation:.5f}", f"{self.divergence:.6f}"


def probabilities(latent: LatentGaussian, link: str, samples: int | None = None) -> Tensor:
    prediction = predict(Categorical(), latent, link=link, samples=samples)
    assert isinstance(prediction, ClassificationPrediction)
    return prediction.probs


def with_constant(case: Case, constant: float) -> Tensor:
    """The mean-field link with another constant than pi/8: the formula at rescaled covariances."""
    scaled = constant / (torch.pi / 8) * case.covariance
    return mean_field(case.mean, scaled.diagonal(dim1=-2, dim2=-1), scaled).exp()


def errors_of(case: Case, draws: int) -> dict[str, Error]:
    exact = truth(case, draws)
    found = {link: probabilities(case.latent, link) for link in LINKS}
    if case.mean.shape[1] > 2:
        found |= {f"quasi {points}": probabilities(case.latent, "quasi", points) for points in POINTS}
    found |= {f"constant {constant}": with_constant(case, constant) for constant in CONSTANTS}
    found["truth again"] = truth(case, draws, seed=2)
    return {name: Error.of(probs, exact) for name, probs in found.items()}


def microseconds(size: Size, link: str, repeats: int, samples: int | None = None) -> float:
    """Per example, in float32, with the covariances of a last layer: the least of several runs."""
    count = max(2, min(512, 2**18 // size.classes**2) // (8 if repeats == 1 else 1))
    case = next(it for it in cases(size._replace(examples=count), 0) if it.kind == "last layer")
    latent = case._replace(mean=case.mean.float(), covariance=case.covariance.float()).latent
    taken = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        probabilities(latent, link, samples)
        taken.append(time.perf_counter() - start)
    return 1e6 * min(taken[1:]) / count


def digits(quick: bool, seed: int) -> tuple[list[tuple[str, ...]], str]:
    """Rows of a table: the links on networks trained on scikit-learn's digits, and the time of a whole `predict`."""
    from sklearn.datasets import load_digits

    images, labels = (torch.tensor(it) for it in load_digits(return_X_y=True))
    images = (images / 16).float()
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed))
    train, test = order[:1000], order[1000:]
    torch.manual_seed(seed)
    network = nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10))
    optimiser = torch.optim.Adam(network.parameters(), 1e-2, weight_decay=1e-4)
    for _ in range(20 if quick else 200):
        optimiser.zero_grad()
        nn.functional.cross_entropy(network(images[train]), labels[train]).backward()
        optimiser.step()
    far = 3 * torch.rand(len(test), 64, generator=torch.Generator().manual_seed(seed))
    rows = []
    with torch.no_grad():
        plain = network(images[test]).softmax(-1)
    rows.append(("plain network", "", f"{nll(plain, labels[test]):.4f}", f"{ece(plain, labels[test]):.4f}", "", "", ""))
    for where, structure in (("last_layer", "dense"), ("all", "kronecker")):
        data = (images[train], labels[train])
        posterior = lapis.laplace(network, data, "categorical", weights=where, structure=structure, prior=1.0)
        base = _seconds(posterior, images[test], "probit", 1 if quick else 5)
        exact = posterior.predict(images[test], link="mc", samples=500 if quick else 20_000)
        for link in LINKS:
            inside, outside = posterior.predict(images[test], link=link), posterior.predict(far, link=link)
            ratio = _seconds(posterior, images[test], link, 1 if quick else 5) / base
            rows.append((
                f"{where}, {structure}", link, f"{nll(inside.probs, labels[test]):.4f}",
                f"{ece(inside.probs, labels[test]):.4f}", f"{(inside.probs - exact.probs).abs().max():.4f}",
                f"{ood_auroc(inside.mutual_information, outside.mutual_information):.3f}", f"{ratio:.1f}",
            ))  # fmt: skip
        score = nll(exact.probs, labels[test]), ece(exact.probs, labels[test])
        rows.append((f"{where}, {structure}", "20,000 draws", f"{score[0]:.4f}", f"{score[1]:.4f}", "0", "", ""))
    head = ("posterior", "link", "test NLL", "ECE", "largest error", "OOD-AUROC by information", "time of predict")
    return rows, table(head, rows)


def _seconds(posterior: lapis.LaplacePosterior, x: Tensor, link: str, repeats: int) -> float:
    taken = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        posterior.predict(x, link=link).probs  # noqa: B018
        taken.append(time.perf_counter() - start)
    return min(taken[1:])


def draw(measured: dict[int, list[tuple[Case, dict[str, Error]]]], times: dict[int, dict[str, float]]) -> plt.Figure:
    """Divergence against time for ten classes, against the number of classes, and by kind of covariance."""
    figure, axes = plt.subplots(1, 3, figsize=(14, 4.2), layout="constrained")
    colours = dict(zip(LINKS, (*COLOURS, "0.4"), strict=True))
    ten = 10 if 10 in measured else max(measured)
    over = {
        n: {name: Error.over([errors[name] for _, errors in rows]) for name in rows[0][1]}
        for n, rows in measured.items()
    }
    for link in LINKS:
        axes[0].plot(times[ten][link], over[ten][link].divergence, "o", ms=8, color=colours[link], label=link)
    curve = [name for name in (f"quasi {points}" for points in POINTS) if name in times[ten]]
    axes[0].plot(
        [times[ten][name] for name in curve], [over[ten][name].divergence for name in curve], "-", color=COLOURS[0]
    )
    axes[0].set(xscale="log", yscale="log", xlabel="µs per example", title=f"{ten} classes: error and time")
    axes[0].set_ylabel("mean KL(integral, link), nats")
    axes[0].legend(fontsize=8)
    for link in LINKS:
        several = [n for n in measured if not (link == "quasi" and n == 2)]
        axes[1].plot(several, [over[n][link].divergence for n in several], "o-", ms=4, color=colours[link], label=link)
    axes[1].set(xscale="log", yscale="log", xlabel="classes", title="all covariances, by number of classes")
    width = 0.16
    for position, link in enumerate(LINKS):
        each = [
            Error.over([errors[link] for case, errors in measured[ten] if case.kind == kind]).divergence
            for kind in KINDS
        ]
        places = [at + (position - 2) * width for at in range(len(KINDS))]
        axes[2].bar(places, each, width, color=colours[link], label=link)
    axes[2].set_xticks(range(len(KINDS)), KINDS)
    axes[2].set(yscale="log", title=f"{ten} classes, by covariance")
    return figure


def main() -> None:
    chosen = arguments(__doc__)
    sizes = QUICK if chosen.quick else FULL
    measured: dict[int, list[tuple[Case, dict[str, Error]]]] = {}
    times: dict[int, dict[str, float]] = {}
    rows, kinds, points, constants = [], [], [], []
    for size in sizes:
        found = [(case, errors_of(case, size.draws)) for case in cases(size, chosen.seed)]
        measured[size.classes] = found
        repeats = 1 if chosen.quick else 5
        times[size.classes] = {link: microseconds(size, link, repeats) for link in LINKS}
        if size.classes > 2:
            times[size.classes] |= {f"quasi {n}": microseconds(size, "quasi", repeats, n) for n in POINTS}
        for name in (*LINKS, "truth again"):
            error = Error.over([errors[name] for _, errors in found])
            taken = f"{times[size.classes][name]:.1f}" if name in LINKS else ""
            rows.append((size.classes, name, *error.cells(), taken))
        for kind in KINDS:
            of_kind = [errors for case, errors in found if case.kind == kind]
            each = [f"{Error.over([errors[link] for errors in of_kind]).divergence:.6f}" for link in LINKS]
            kinds.append((size.classes, kind, *each))
        if size.classes > 2:
            each = [Error.over([errors[f"quasi {n}"] for _, errors in found]) for n in POINTS]
            cells = [
                f"{error.variation:.4f} / {error.divergence:.5f} / {times[size.classes][f'quasi {n}']:.0f}"
                for n, error in zip(POINTS, each, strict=True)
            ]
            points.append((size.classes, *cells))
        each = [Error.over([errors[f"constant {value}"] for _, errors in found]) for value in CONSTANTS]
        standard = Error.over([errors["mean_field"] for _, errors in found])
        constants.append((size.classes, *(f"{error.divergence:.5f}" for error in (*each, standard))))
    save(draw(measured, times), "links", chosen)
    _, real = digits(chosen.quick, chosen.seed)
    wins = sum(
        errors["quasi"].divergence <= min(errors[link].divergence for link in LINKS)
        for several in measured.values()
        for _, errors in several
    )
    total = sum(map(len, measured.values()))
    head = ("classes", "link", "largest error", "total variation", "KL", "µs")
    text = (
        "# Links against the integral\n\n" + " ".join((__doc__ or "").split()) + "\n\n"
        "Largest error: of a probability, over all examples and cases. Total variation (half the sum of a prediction's "
        "errors over classes) and KL(integral, link) in nats: means over examples and cases. Time: microseconds per "
        f"example in float32, with covariances.\n\n{table(head, rows)}\n\n"
        f'"quasi" has the smallest KL of the five links in {wins} of {total} cases (a case: size of the means, scale '
        "and kind of the covariance).\n\n![Errors of the links](../figures/links"
        f"{'_quick' if chosen.quick else ''}.png)\n\n"
        f"## By kind of covariance: KL\n\n{table(('classes', 'covariance', *LINKS), kinds)}\n\n"
        "## How many points\n\nTotal variation / KL / microseconds per example.\n\n"
        f"{table(('classes', *(f'{n} points' for n in POINTS)), points)}\n\n"
        "## Would another constant help the mean-field link?\n\nKL with other numbers in place of pi/8 = 0.39.\n\n"
        f"{table(('classes', *CONSTANTS, 'pi/8'), constants)}\n\n"
        "## Digits\n\nscikit-learn's digits, 1,000 for training, a network with 32 tanh units, prior precision 1. "
        "Largest error against 20,000 draws; OOD: uniform noise three times as bright, by mutual information; "
        f"time of `predict` relative to that with the probit link.\n\n{real}\n\n"
        "## The choice\n\n" + CHOICE
    )
    report("links", text, chosen)


CHOICE = """The default is "quasi": for two classes and labels the integral itself by quadrature, for more classes the
mean over fixed Sobol points, 128 up to 16 classes and 512 beyond. It is deterministic, uses the covariance that is
there and asks for no more, and a shift common to all logits drops out exactly. Nothing in closed form comes near it:
the pairwise mean-field link removes the shift, the worst fault of the extended probit, but takes the comparisons of a
class with each of the others for independent, and stays too cautious by as much as a third in probability; no other
constant cures that. The cost is O(C min(C, 128) (C + points)) an example; correlations beyond the 128 most uncertain
directions are treated as independent. For ten classes it takes some microseconds an example more than the mean-field
link: nothing beside the Jacobians of a convolution network, two to three times the whole prediction of a network with
two small layers. From about 100 classes on it is the root of the full covariance that takes the time; `predict` has
variances only beyond 32 outputs, where none is needed. "mean_field" stays for those who want a closed form: it is the
nearest of these.

On the digits the probit link has the lower NLL though it is far from the integral: the posterior at the mode is too
wide, and the two errors happen to cancel. The cure for the posterior is `refine` ([the long chain](truth.md)), not a
link. The mutual information of the bridge is that of its Dirichlet distribution, which is too narrow where variances
are large: it ranks worse than that of the other links, which take the integral's or their draws'."""


if __name__ == "__main__":
    main()
