"""ResNet-18 with 11.2 million weights: the README's recipe keeps the confidence on training images, and white noise
loses it.

The network and data are those of resnet18.py, with more images. The table has the largest probability, averaged over
inputs, of the network alone and of the recipe; and its OOD-AUROC, by entropy, of white noise against other images.
"""

from __future__ import annotations

import time

import torch
from common import arguments, report, table
from resnet18 import CLASSES, data, resnet, train
from torch import nn

import lapis


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
    rows = []
    entropies = {}
    for name, images in (("training images", x), ("other images", others), ("white noise", noise)):
        with torch.no_grad():
            plain: torch.Tensor = nn.functional.softmax(model.eval()(images), -1)
        probs = posterior.predict(images, progress=False).probs
        entropies[name] = (torch.special.entr(plain).sum(-1), torch.special.entr(probs).sum(-1))
        largest = (plain.amax(-1).mean(), probs.amax(-1).mean())
        rows.append((name, *(f"{float(value):.2f}" for value in largest)))
    auroc = [
        float(lapis.metrics.ood_auroc(known, unknown))
        for known, unknown in zip(entropies["training images"], entropies["white noise"], strict=True)
    ]
    text = (
        f"{sum(p.numel() for p in model.parameters()):,} weights, {CLASSES} outputs, trained on {few} images to a loss "
        f"of {loss:.2f}. The recipe took {spent:.1f} s: {posterior.structure} over {posterior.n_weights:,} weights, "
        f"prior precision {float(posterior.weight_prior.precision[0]):.3g}, width {posterior.width:.3g}.\n\n"
        + table(("largest probability", "network alone", "README recipe"), rows)
        + f"\n\nWhite noise is told from training images by entropy with AUROC {auroc[0]:.3f} (network alone) and "
        f"{auroc[1]:.3f} (recipe)."
    )
    report("confidence", text, chosen)


if __name__ == "__main__":
    main()
