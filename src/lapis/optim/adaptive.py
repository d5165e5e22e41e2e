"""Adam and RMSprop as the learning rule has them: torch's own iterates, and the Gaussian that their scales imply.

Both follow from the rule for a diagonal Gaussian when the Hessian is replaced by squared gradients, with a square root
in the step. Their second moment v is an average of *squared means* over batches of B examples, which near a minimum are
B times smaller than the mean of squares of the examples' own gradients, the empirical Fisher. So the posterior's
precision is N B v + prior precision.
"""

from __future__ import annotations

import inspect
from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lapis.errors import OptionError
from lapis.likelihoods import Likelihood
from lapis.optim.checks import check_data_size, checked_parameters
from lapis.optim.gaussian import WithProcess, gaussian_posterior
from lapis.options import check_arguments, check_count, check_positive
from lapis.posteriors.factored import FactoredPosterior
from lapis.posteriors.posterior import MEMORY_BUDGET


class _WithPosterior(WithProcess, Optimizer):
    """Adds the posterior to one of torch's optimisers."""

    def _believe(self, **options: Any) -> None:
        """Keep what the posterior needs with every group."""
        self.defaults.update(options)
        for group in self.param_groups:
            for name, value in options.items():
                group.setdefault(name, value)
            check_data_size(group["data_size"])
            check_positive("prior_precision", group["prior_precision"])
            check_count("batch_size", group["batch_size"])

    @abstractmethod
    def _second_moment(self, p: Tensor, group: dict[str, Any]) -> Tensor:
        """The average v of squared gradients, free of the bias of its start."""

    def posterior(
        self, model: nn.Module, likelihood: str | Likelihood, data: Any = None, *, memory_budget: int = MEMORY_BUDGET
    ) -> FactoredPosterior:
        """N(weights, 1 / (N B v + prior precision)) over the optimiser's parameters.

        Parameters that never had a gradient keep the prior's precision. The model must keep its weights from now on.

        Args:
            model: the network that has been trained; weights that are not the optimiser's are constants.
            likelihood: see `lapis.laplace`; the one whose mean negative log likelihood was the loss.
            data: some of the training data, if predictions are to check that inputs are like those; optional.
            memory_budget: bytes of working memory for predictions.
        """
        check_arguments(_WithPosterior.posterior, locals(), apart=("likelihood",))
        precisions = {}
        for group in self.param_groups:
            for p in group["params"]:
                moment = self._second_moment(p, group) if self.state.get(p) else torch.zeros_like(p)
                precisions[p] = group["data_size"] * group["batch_size"] * moment.double() + group["prior_precision"]
        return gaussian_posterior(self, model, likelihood, precisions, data, memory_budget)


class Adam(_WithPosterior, torch.optim.Adam):
    """`torch.optim.Adam`, step for step, with the diagonal Gaussian posterior that its second moments imply.

    Args:
        params: parameters, or groups of them.
        lr: learning rate.
        data_size: number of training examples, N.
        prior_precision: of the Gaussian prior of each weight, for the posterior. The steps know only `weight_decay`;
            prior_precision / data_size, of a mean loss, is the decay that belongs to it.
        batch_size: examples B that a gradient is the mean of; 1 leaves the second moments as they are, which is the
            wider posterior.
        options: all other options of `torch.optim.Adam`.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        *,
        data_size: int | None = None,
        prior_precision: float = 1.0,
        batch_size: int = 1,
        **options: Any,
    ) -> None:
        check_arguments(Adam.__init__, locals(), apart=("lr", "data_size"))
        check_positive("lr", lr, or_zero=True)
        torch.optim.Adam.__init__(self, checked_parameters(params), lr, **_known(torch.optim.Adam, options))
        self._believe(data_size=data_size, prior_precision=prior_precision, batch_size=batch_size)

    def _second_moment(self, p: Tensor, group: dict[str, Any]) -> Tensor:
        state = self.state[p]
        moment: Tensor = state["exp_avg_sq"] / (1 - group["betas"][1] ** float(state["step"]))
        return moment


class RMSprop(_WithPosterior, torch.optim.RMSprop):
    """`torch.optim.RMSprop`, step for step, with the diagonal Gaussian posterior that its second moments imply.

    Args:
        params: parameters, or groups of them.
        lr: learning rate.
        data_size: number of training examples, N.
        prior_precision: see `Adam`.
        batch_size: see `Adam`.
        options: all other options of `torch.optim.RMSprop`.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-2,
        *,
        data_size: int | None = None,
        prior_precision: float = 1.0,
        batch_size: int = 1,
        **options: Any,
    ) -> None:
        check_arguments(RMSprop.__init__, locals(), apart=("lr", "data_size"))
        check_positive("lr", lr, or_zero=True)
        torch.optim.RMSprop.__init__(self, checked_parameters(params), lr, **_known(torch.optim.RMSprop, options))
        self._believe(data_size=data_size, prior_precision=prior_precision, batch_size=batch_size)

    def _second_moment(self, p: Tensor, group: dict[str, Any]) -> Tensor:
        state = self.state[p]
        moment: Tensor = state["square_avg"] / (1 - group["alpha"] ** float(state["step"]))
        return moment


def _known(kind: type[Optimizer], options: dict[str, Any]) -> dict[str, Any]:
    """The options, if torch's optimiser has them; OptionError otherwise."""
    names = [name for name in inspect.signature(kind.__init__).parameters if name not in ("self", "params", "lr")]
    strange = [name for name in options if name not in names]
    if strange:
        raise OptionError(
            f"torch.optim.{kind.__name__} has no option {strange[0]!r}",
            expected=" or ".join(names),
            got=repr(strange[0]),
            do="choose one of these",
        )
    return options
