"""ResNet-18 with 11.2 million weights: does the README's recipe keep the confidence on training images, while white
noise loses it?

The network and data are those of resnet18.py, with more images. The table has the largest probability and the variance
of a logit, averaged over inputs, of the network alone, of the recipe, of the same posterior at its full width, and
refined; and how far the last layer can tell the inputs apart at all: the share of their features' norm that lies
outside the span of the training images' features.
"""

from __future__ import annotations

import time
from dataclasses import replace

import torch
from common import arguments, report, table
from resnet18 import CLASSES, data, resnet, train
from torch import Tensor, nn

import lapis

HEAD = (
    "largest probability (variance)", "network alone", "README recipe", "at full width", "refined",
    "features outside the span",
)  # fmt: skip


def last_layer(model: nn.Module) -> nn.Linear:
    return [module for module in model.modules() if isinstance(module, nn.Linear)][-1]


def features(model: nn.Module, images: Tensor) -> Tensor:
    """Inputs of the last layer, (N, D)."""
    seen: list[Tensor] = []
    handle = last_layer(model).register_forward_hook(lambda _, inputs, __: seen.append(inputs[0]))
    with torch.no_grad():
        model.eval()(images)
    handle.remove()
    return seen[0]


def with_one(inputs: Tensor) -> Tensor:
    """With a one for the bias, (N, D + 1)."""
    return torch.cat([inputs, torch.ones(len(inputs), 1)], 1)


def entropy(probs: Tensor) -> Tensor:
    return torch.special.entr(probs).sum(-1)


def main() -> None:
    chosen = arguments(__doc__)
    torch.manual_seed(chosen.seed)
    widths = (8, 16, 32, 64) if chosen.quick else (64, 128, 256, 512)
    few, steps = (32, 60) if chosen.quick else (64, 60)
    x, y = data(few + 64, chosen.seed)
    others, x, y = x[few:], x[:few], y[:few]
    model = resnet(widths, blocks=2, outputs=CLASSES)
    loss = train(model, x, y, 16, steps, 0.3)
    start = time.perf_counter()
    posterior = lapis.laplace(model, (x, y), "classification", progress=False).tune()
    spent = time.perf_counter() - start
    noise = torch.randn(others.shape, generator=torch.Generator().manual_seed(1))
    inputs = {"training images": x, "other images": others, "white noise": noise}
    head, seen = last_layer(model), {name: features(model, images) for name, images in inputs.items()}
    # the same posterior, on the inputs of the last layer: refining runs that layer alone
    of_features = lapis.laplace(head, (seen["training images"], y), "classification", structure=posterior.structure)
    refined = of_features.tune().refine((seen["training images"], y), progress=False)
    span = torch.linalg.qr(with_one(seen["training images"]).T).Q
    rows, entropies = [], {}
    for name, images in inputs.items():
        plain = head(seen[name]).detach().softmax(-1)
        found = [
            posterior.predict(images, progress=False),
            replace(posterior, width=1.0).predict(images, progress=False),
            refined.predict(seen[name], progress=False),
        ]
        entropies[name] = entropy(plain), entropy(found[0].probs)
        ones = with_one(seen[name])
        outside = (ones - ones @ span @ span.T).norm(dim=-1) / ones.norm(dim=-1)
        shown = (f"{float(p.probs.amax(-1).mean()):.2f} ({float(p.latent.variance.mean()):.3g})" for p in found)
        rows.append((name, f"{float(plain.amax(-1).mean()):.2f}", *shown, f"{float(outside.mean()):.2f}"))
    auroc = [
        float(lapis.metrics.ood_auroc(known, unknown))
        for known, unknown in zip(entropies["training images"], entropies["white noise"], strict=True)
    ]
    text = (
        f"{sum(p.numel() for p in model.parameters()):,} weights, {CLASSES} outputs, trained on {few} images to a loss "
        f"of {loss:.2f}. The recipe took {spent:.1f} s: {posterior.structure} over {posterior.n_weights:,} weights, "
        f"prior precision {float(posterior.weight_prior.precision[0]):.3g}, width {posterior.width:.3g}.\n\n"
        + table(HEAD, rows)
        + f"\n\nWhite noise is told from training images by entropy with AUROC {auroc[0]:.3f} (network alone) and "
        f"{auroc[1]:.3f} (recipe)."
    )
    report("confidence", text, chosen)


if __name__ == "__main__":
    main()
