"""What regressor and classifier share: their parameters, training by the evidence, pickling."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Literal

import torch
from sklearn.base import BaseEstimator
from sklearn.utils import check_random_state
from sklearn.utils.validation import check_is_fitted, validate_data
from torch import Tensor, nn

from lapis.curvature.blocks.partition import NAMES
from lapis.errors import OptionError
from lapis.estimators.perceptron import Perceptron, checked_hidden
from lapis.estimators.predictor import Predictor, unpacked
from lapis.estimators.scaling import Scaling
from lapis.options import check_choice
from lapis.posteriors import LaplacePosterior
from lapis.training import train

DENSE = 500
"""Up to this many weights the structure "auto" is dense: training decomposes its matrix a dozen times."""


class LaplaceEstimator(BaseEstimator):  # type: ignore[misc]
    """A network that is trained by the evidence on standardised columns, and its Laplace posterior."""

    task: ClassVar[Literal["regression", "classification"]]

    def __init__(
        self,
        hidden: int | Sequence[int] = (50,),
        activation: str = "tanh",
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
        hidden, inputs = checked_hidden(self.hidden, self.activation), Scaling.of(x)
        seed = int(check_random_state(self.random_state).randint(2**31 - 1))
        architecture = None if self.module is not None else Perceptron(x.shape[1], hidden, outputs, self.activation)
        model = self._made(x.shape[1], outputs, seed) if architecture is None else architecture.build(seed)
        dtype = next(model.parameters()).dtype
        scaled = inputs.apply(x).to(dtype)
        weights = sum(p.numel() for p in model.parameters() if p.requires_grad)
        structure = self.structure if self.structure != "auto" else "dense" if weights <= DENSE else "kronecker"
        posterior = train(
            model, (scaled, y.to(dtype) if y.is_floating_point() else y), self.task, epochs=self.epochs,
            structure=structure, learning_rate=self.learning_rate, every=self.every,
            burn_in=None if self.every is None else self.every, seed=seed, progress=self.progress,
        )  # fmt: skip
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
