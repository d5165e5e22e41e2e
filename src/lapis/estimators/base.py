"""What regressor and classifier share: their parameters, training by the evidence, pickling."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from sklearn.base import BaseEstimator
from sklearn.utils import check_random_state
from sklearn.utils.validation import _check_sample_weight, check_is_fitted, validate_data
from torch import Tensor, nn

from lapis.curvature.blocks.partition import NAMES
from lapis.errors import OptionError
from lapis.estimators.cross_validation import Trainer, cross_validated
from lapis.estimators.perceptron import Perceptron, checked_hidden
from lapis.estimators.predictor import Predictor, unpacked
from lapis.estimators.scaling import Scaling
from lapis.options import LARGEST, check_choice, check_count
from lapis.posteriors import LaplacePosterior
from lapis.training import train
from lapis.training.budget import default_batch_size

STEPS = 1000
"""Of training, by default: a quarter of `lapis.train`'s, as columns of tables are seldom as wiggly as sounds or sines.
More did not predict better on splits that were not those of docs/results/estimators.md."""

ACTIVATION = {"regression": "gelu", "classification": "relu"}
"""By default; chosen on the same splits. In regression gelu beat tanh on diabetes, concrete, yacht, not boston."""

PRIOR = {"regression": None, "classification": 1.0}
"""Where its precisions start: one for each layer, or one for all. ReLU layers can exchange scale, and the evidence then
tightens the first layer's for as long as training lasts; chosen on the same splits."""

DENSE = 500
"""Up to this many weights the structure "auto" is dense: training decomposes its matrix a dozen times."""


class LaplaceEstimator(BaseEstimator):  # type: ignore[misc]
    """A network that is trained by the evidence on standardised columns, and its Laplace posterior."""

    task: ClassVar[Literal["regression", "classification"]]

    def __init__(
        self,
        hidden: int | Sequence[int] = (50,),
        activation: str = "auto",
        *,
        module: Callable[[int, int], nn.Module] | None = None,
        structure: str = "auto",
        epochs: int | None = None,
        every: int | None = None,
        learning_rate: float | None = None,
        random_state: Any = 0,
        progress: bool | None = False,
    ) -> None:
        self.hidden = hidden
        self.activation = activation
        self.module = module
        self.structure = structure
        self.epochs = epochs
        self.every = every
        self.learning_rate = learning_rate
        self.random_state = random_state
        self.progress = progress

    @property
    def posterior_(self) -> LaplacePosterior:
        """The posterior over the network's weights; it knows the standardised columns."""
        check_is_fitted(self)
        found: LaplacePosterior = self.predictor_.posterior  # type: ignore[assignment]
        return found

    def _counted(self, rows: Any, targets: Any, sample_weight: Any) -> tuple[Any, Any]:
        """Each row as often as its weight says: whole numbers, as the evidence is about examples that were seen."""
        if sample_weight is None:
            return rows, targets
        weights = _check_sample_weight(sample_weight, rows, dtype=np.float64, ensure_non_negative=True)
        if not np.isfinite(weights).all() or weights.max() > LARGEST:
            raise ValueError(f"sample_weight must count examples; got {weights.max():g}")
        counts = weights.round().astype(np.int64)
        if not np.array_equal(counts, weights):
            raise ValueError(
                f"sample_weight must count examples: whole numbers, so that a row of weight 2 is a row seen twice; got "
                f"{weights[counts != weights][0]:g}. The evidence of fractions of examples has no meaning; resample "
                "the rows in proportion to such weights."
            )
        if counts.sum() < 2:
            raise ValueError(f"The weights of all samples sum to {counts.sum()}; two examples are needed at least")
        return np.repeat(rows, counts, 0), np.repeat(targets, counts, 0)

    def _rows(self, x: Any) -> Any:
        """Checked inputs for a prediction."""
        check_is_fitted(self)
        return validate_data(self, x, reset=False, dtype="float64")

    def _train(
        self, x: Tensor, y: Tensor, outputs: int, classes: tuple[Any, ...] = (), targets: Scaling | None = None
    ) -> None:
        """Train a network on inputs (N, D) and on targets as the likelihood takes them."""
        if self.module is not None and (isinstance(self.module, nn.Module) or not callable(self.module)):
            raise _bad_module(f"a {type(self.module).__name__}")
        check_choice("structure", self.structure, ("auto", *NAMES))
        if self.epochs is not None:
            check_count("epochs", self.epochs)
        activation = ACTIVATION[self.task] if self.activation == "auto" else self.activation
        hidden, inputs = checked_hidden(self.hidden, activation), Scaling.of(x)
        seed = int(check_random_state(self.random_state).randint(2**31 - 1))
        architecture = None if self.module is not None else Perceptron(x.shape[1], hidden, outputs, activation)
        make = partial(self._made, x.shape[1], outputs) if architecture is None else architecture.build
        model = make(seed)
        dtype = next(model.parameters()).dtype
        scaled = inputs.apply(x).to(dtype)
        weights = sum(p.numel() for p in model.parameters() if p.requires_grad)
        structure = self.structure if self.structure != "auto" else "dense" if weights <= DENSE else "kronecker"
        batches = math.ceil(len(x) / default_batch_size(weights))
        epochs = math.ceil(STEPS / batches) if self.epochs is None else self.epochs
        posterior = train(
            model, (scaled, y.to(dtype) if y.is_floating_point() else y), self.task, epochs=epochs,
            prior=PRIOR[self.task], structure=structure, learning_rate=self.learning_rate, every=self.every,
            burn_in=None if self.every is None else self.every, seed=seed, progress=self.progress,
        )  # fmt: skip
        if self.task == "classification":
            trainer = Trainer(epochs * batches, self.learning_rate, seed)
            posterior = cross_validated(posterior, scaled, y, structure, make, trainer)
        self.predictor_ = Predictor(posterior, self.task, classes, inputs, targets, architecture)

    def _made(self, inputs: int, outputs: int, seed: int) -> nn.Module:
        """A network by the user's function."""
        assert self.module is not None
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = self.module(inputs, outputs)
        if not isinstance(model, nn.Module):
            raise _bad_module(f"one that makes {type(model).__name__}")
        return model

    def __getstate__(self) -> dict[str, Any]:
        """For pickling: the posterior as what a file would hold, with its module."""
        state: dict[str, Any] = dict(super().__getstate__())
        if "predictor_" in state:
            state["predictor_"] = (*self.predictor_.packed(), self.predictor_.posterior.network.module)
        return state

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        super().__setstate__(dict(state))
        if "predictor_" in state:
            config, tensors, model = state["predictor_"]
            self.predictor_ = unpacked(config, tensors, "the pickle", model)


def _bad_module(got: str) -> OptionError:
    return OptionError(
        "Bad module",
        expected="a function of (inputs, outputs) that makes a torch.nn.Module",
        got=got,
        do="pass such a function, or None for a perceptron",
    )
