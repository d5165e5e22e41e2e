"""Two objectives with the same minimiser, and the noise of their minibatch gradients.

The noisy objective carries a random target u_n for every example into the minibatches; the low-noise one moves all of
it into the regulariser. For minibatches of B of N examples the error of either gradient has the variance
N^2 / B (1 - B / N) s^2, s^2 the variance between examples' gradients, here at the minimiser, where it decides how close
SGD comes. Per example the noisy gradient is F_n^T (F_n y - u_n) and the low-noise one F_n^T F_n y, whose mean squares
are (1 - h) and h beside common factors, h being a row's leverage: their sum over all rows is gamma. So the low-noise
objective wins as far as gamma is below the number of data, and loses when a network interpolates its data.
"""

from __future__ import annotations

import warnings

import matplotlib.pyplot as plt
import torch
from common import COLOURS, arguments, report, save, table
from draws_for_tuning import digits, network
from torch import Tensor, nn

import lapis
from lapis.posteriors.laplace.matrix_free.descending import Descent

MEASURED = (16, 64, 256)
NAMES = {"noisy": "noisy", "low_noise": "low noise"}
DRAWS = 8


def jacobian(model: nn.Module, x: Tensor) -> Tensor:
    """(N, C, P), all in memory."""
    weights = {name: p.detach() for name, p in model.named_parameters()}
    found = torch.func.vmap(
        torch.func.jacrev(lambda p, one: torch.func.functional_call(model, p, (one[None],))[0]), (None, 0)
    )(weights, x)
    return torch.cat([part.flatten(2) for part in found.values()], 2)


class Problem:
    """A data set's size: the tuned posterior, draws, and the variance between examples of either gradient."""

    def __init__(self, x: Tensor, y: Tensor, width: int) -> None:
        model = network(x, y, width, 300)
        dense = lapis.laplace(model, (x, y), "classification", structure="dense").tune(method="fixed_point")
        self.alpha, self.count = float(dense.weight_prior.precision), len(x)
        self.gamma = float(dense.effective_parameters())
        self.posterior = lapis.laplace(
            model, (x, y), "classification", structure="implicit", prior=self.alpha, batch_size=256
        )
        probe = Descent(self.posterior, "noisy", self.count, 0, DRAWS)  # one minibatch: all data
        self.target = probe.target
        self.minimiser = dense.solve(self.target * probe.root) * probe.root
        (data,) = probe.parts
        factors = torch.cat([factor for _, factor in data.factors.pieces(0)])
        f = factors[:, 0].mT @ jacobian(model, data.batches[0].inputs) / probe.root
        pushed = torch.einsum("nrp,kp->knr", f, self.minimiser)
        assert probe.rows is not None
        rows = probe.rows[0].reshape(pushed.shape)
        self.variance = {
            objective: sum(self._variance(f, values[k]) for k in range(DRAWS)) / DRAWS
            for objective, values in (("noisy", pushed - rows), ("low_noise", pushed))
        }
        self.signal = float(self.target.square().sum(-1).mean())

    def _variance(self, f: Tensor, values: Tensor) -> float:
        """N^2 times the variance between the examples' F_n^T v_n."""
        each = torch.einsum("nrp,nr->np", f, values)
        return self.count**2 * float((each - each.mean(0)).square().sum(-1).mean())

    @property
    def factor(self) -> float:
        """How much larger the noisy objective's minibatch must be for equal noise."""
        return self.variance["noisy"] / self.variance["low_noise"]

    def error(self, objective: str, batch: Tensor) -> Tensor:
        """Root mean square error of the gradient over the right-hand side, by the formula."""
        return (self.variance[objective] / batch * (1 - batch / self.count) / self.signal).sqrt()

    def measured(self, objective: str, batch: int) -> float:
        """The same, from an epoch of minibatches."""
        descent = Descent(self.posterior, objective, batch, 0, DRAWS)
        full = [
            step
            for step in range(len(descent.parts))
            if len(descent.parts[descent.minibatch(step)].batches[0]) == batch
        ]
        exact = descent.product(descent.data, self.minimiser, 1.0) - descent.target
        errors = [descent.gradient(self.minimiser, step) - exact for step in full]
        return (float(torch.stack(errors).square().sum(-1).mean()) / self.signal) ** 0.5


def main() -> None:
    chosen = arguments(__doc__)
    warnings.simplefilter("ignore", lapis.LapisWarning)
    torch.manual_seed(chosen.seed)
    counts = (64, 256) if chosen.quick else (256, 1024, 4096)
    x, y = digits(counts[-1], chosen.seed)
    problems = [Problem(x[:count], y[:count], 5 if chosen.quick else 10) for count in counts]
    last = problems[-1]
    sizes = [batch for batch in MEASURED if batch < last.count / 2]
    points = {objective: [last.measured(objective, batch) for batch in sizes] for objective in NAMES}

    figure, (left, right) = plt.subplots(
        1, 2, figsize=(8.6, 3.4), gridspec_kw={"width_ratios": (1.5, 1), "wspace": 0.35}
    )
    fine = torch.logspace(0, float(torch.log10(torch.tensor(last.count * 0.9))), 100)
    for colour, (objective, name) in zip(COLOURS[1::-1], NAMES.items(), strict=True):
        left.loglog(fine, last.error(objective, fine), color=colour, lw=1.4, label=name)
        left.loglog(sizes, points[objective], "o", ms=4, color=colour)
    left.legend(frameon=False)
    left.set_xlabel(f"examples in a minibatch, of {last.count:,}")
    left.set_ylabel("gradient error / right-hand side")
    right.loglog(counts, [problem.factor for problem in problems], "o-", color=COLOURS[2], lw=1.4, ms=4)
    right.axhline(1, color="0.6", lw=0.8)
    right.set_xlabel("examples in the data set")
    right.set_ylabel("batch-size factor, equal noise")
    right.set_xticks(counts, [f"{count:,}" for count in counts])
    right.minorticks_off()
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    save(figure, "gradient_noise", chosen)
    rows = [
        (
            f"{p.count:,}",
            f"{p.alpha:.3g}",
            f"{p.gamma:.0f}",
            f"{p.gamma / p.posterior.curvature.rows:.3f}",
            *(f"{float(p.error(objective, torch.tensor(16.0))):.2f}" for objective in NAMES),
            f"{p.factor:.1f}",
        )
        for p in problems
    ]
    head = (
        "N",
        "prior precision",
        "gamma",
        "mean leverage",
        "noisy, B = 16",
        "low noise, B = 16",
        "factor in batch size",
    )
    checks = ", ".join(
        f"B = {batch}: {points['noisy'][i]:.3f} and {points['low_noise'][i]:.3f} (formula "
        f"{float(last.error('noisy', torch.tensor(float(batch)))):.3f} and "
        f"{float(last.error('low_noise', torch.tensor(float(batch)))):.3f})"
        for i, batch in enumerate(sizes)
    )
    text = (
        f"{last.posterior.n_weights:,} weights, digits in 7 x 7 pixels, prior tuned for each data set, {DRAWS} draws. "
        f"Root mean square error of the minibatch gradient at the minimiser, over the norm of the right-hand side:\n\n"
        f"{table(head, rows)}\n\nMeasured at N = {last.count:,}, noisy and low noise: {checks}."
    )
    report("gradient_noise", text, chosen)


if __name__ == "__main__":
    main()
