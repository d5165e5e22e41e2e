"""A Lightning callback that leaves a posterior behind. Needs the extra "lightning"."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from torch import nn

from lapis.integrations.recipe import Recipe
from lapis.likelihoods import Likelihood
from lapis.posteriors.laplace.matrix_free.implicit import ImplicitPosterior
from lapis.posteriors.laplace.stored import LaplacePosterior


class LaplaceCallback(Callback):  # type: ignore[misc]  # untyped where Lightning is not installed
    """Fit a Laplace posterior when `trainer.fit` has ended, to be found in `posterior`.

    Options are checked when the callback is made, before any training. The posterior is about the weights as the last
    epoch left them.

    Args:
        likelihood: see `lapis.laplace`; outputs are those of the module's `forward`.
        data: the training data; by default the trainer's loader of them, which must not drop or augment examples.
        network: picks the network out of the Lightning module, as in `lambda module: module.encoder`; by default the
            module itself.
        tune: tune prior, noise and width by the training data.
        options: of `lapis.laplace`, such as weights="last_layer".
    """

    def __init__(
        self,
        likelihood: str | Likelihood,
        data: Any = None,
        *,
        network: Callable[[Any], nn.Module] | None = None,
        tune: bool = True,
        **options: Any,
    ) -> None:
        self.recipe = Recipe(likelihood, tune, options)
        self.data = data
        self.network = network
        self.posterior: LaplacePosterior | ImplicitPosterior | None = None

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Refuse what would fail after training."""
        self.recipe.check_processes(trainer.world_size)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Fit the posterior."""
        model = pl_module if self.network is None else self.network(pl_module)
        data = trainer.train_dataloader if self.data is None else self.data
        self.posterior = self.recipe.fit(model, data)
