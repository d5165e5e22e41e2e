"""A callback for Hugging Face's `Trainer` that leaves a posterior behind. Needs the extra "transformers"."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from lapis.integrations.recipe import Recipe
from lapis.likelihoods import Likelihood
from lapis.posteriors.laplace.matrix_free.implicit import ImplicitPosterior
from lapis.posteriors.laplace.stored import LaplacePosterior

IGNORED = -100
"""Label of tokens that are not predicted."""


class LaplaceCallback(TrainerCallback):  # type: ignore[misc]  # untyped where transformers are not installed
    """Fit a Laplace posterior when `trainer.train()` has ended, to be found in `posterior`.

    Options are checked when the callback is made, before any training. With `load_best_model_at_end` the posterior is
    about the best weights, else about the last.

    Labels of causal language models are moved by one token, as their own loss does inside: outputs at a token are
    about the next one.

    Args:
        likelihood: see `lapis.laplace`; outputs are the model's logits.
        data: the training data as batches, dictionaries with "labels"; by default the trainer's own loader.
        causal: whether outputs at a token are about the next one; by default told by the class of the model.
        tune: tune prior, noise and width by the training data.
        options: of `lapis.laplace`, such as weights="last_layer".
    """

    def __init__(
        self,
        likelihood: str | Likelihood,
        data: Any = None,
        *,
        causal: bool | None = None,
        tune: bool = True,
        **options: Any,
    ) -> None:
        self.recipe = Recipe(likelihood, tune, options)
        self.data = data
        self.causal = causal
        self.posterior: LaplacePosterior | ImplicitPosterior | None = None

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Refuse what would fail after training."""
        self.recipe.check_processes(args.world_size)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Fit the posterior."""
        model = kwargs["model"]
        data = kwargs["train_dataloader"] if self.data is None else self.data
        causal = is_causal(model) if self.causal is None else self.causal
        self.posterior = self.recipe.fit(model, NextTokens(data) if causal else data)


class NextTokens:
    """Batches of a causal language model with the labels of the next token at every token; the last has none."""

    def __init__(self, batches: Any) -> None:
        self.batches = batches

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for batch in self.batches:
            labels = torch.full_like(batch["labels"], IGNORED)
            labels[:, :-1] = batch["labels"][:, 1:]
            yield {**batch, "labels": labels}


def is_causal(model: nn.Module) -> bool:
    """Whether the model, or one inside it (adapters wrap models), is one of transformers' causal language models."""
    names = set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values())
    return any(type(module).__name__ in names for module in model.modules())
