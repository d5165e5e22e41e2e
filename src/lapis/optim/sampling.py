"""The base of optimisers that differentiate the loss at weights drawn from their own posterior.

They keep torch's habits: parameter groups, schedulers, gradients that add up until `zero_grad`, a complete
`state_dict`. A class says how weights are drawn (`_perturb`), what a draw's gradients tell about the curvature
(`_statistics`), and how mean and curvature move (`_update`).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lapis.errors import DataError, OptionError
from lapis.network.untouched import keep_freed_memory
from lapis.optim.attached import AddedToMeanError, Attached, Sought, attached, attached_unasked
from lapis.optim.checks import check_data_size, checked_parameters
from lapis.optim.draws import Draws
from lapis.optim.marks import Mark, never
from lapis.options import check_arguments, check_positive, shown
from lapis.ranks import Ranks

Statistics = dict[Tensor, Tensor]
"""What draws tell about the curvature of each parameter, added up like gradients."""


class SamplingOptimizer(Optimizer):
    """Gradients at drawn weights; the weights are at the mean whenever no draw is under way.

    `step(closure)` draws by itself, `draws` times, and averages. In a loop without closures the loss is
    differentiated within `sampled()`. Gradients of several such contexts before a step add up, as in torch: divide the
    loss by their number. `zero_grad` discards them.

    Args:
        params: parameters, or groups of them with options of their own, as for any optimiser of torch.
        defaults: options of a group.
        draws: of the weights in each `step(closure)`; gradients and curvature are averaged over them.
        generator: source of the seed; 0 without one. Global random numbers are neither used nor changed.
        synchronise: average gradients and curvature over the ranks of torch.distributed, each with draws of its own.
    """

    pairs_noise_with_gradients: ClassVar[bool] = True
    """Whether the curvature comes from a draw's noise times its own gradient."""
    attaches: ClassVar[bool] = True
    """Whether `attach` can draw from a network's hooks."""

    def __init__(
        self,
        params: Any,
        defaults: dict[str, Any],
        *,
        draws: int = 1,
        generator: torch.Generator | None = None,
        synchronise: bool = False,
    ) -> None:
        keep_freed_memory()
        self.draws = draws
        self._ranks = Ranks.joined() if synchronise else None
        self._checked_ranks = False
        self._noise = Draws.of(generator)
        if self._ranks is not None:
            self._noise.rank, self._noise.ranks = self._ranks.rank, self._ranks.size
        self._seen: Statistics = {}
        self._examples = 0.0
        """Examples behind the statistics, where a class counts them."""
        self._contexts = 0
        """Draws that have been differentiated within `sampled()` since the last step."""
        self._spent: dict[Tensor, Mark] = {}
        """Gradients that the last step has used, or that are older than the optimiser."""
        self._cleared = False
        """Whether the present closure has called `zero_grad`."""
        self._means: dict[Tensor, Tensor] | None = None
        """The means, while the weights are a draw."""
        self._attached: list[Attached | Sought] = []
        super().__init__(checked_parameters(params), defaults)
        self._spent = {p: Mark(p.grad) for p in self._trainable() if p.grad is not None}

    # to be implemented by each class ---------------------------------------------------------------

    @abstractmethod
    def _perturb(self, params: list[Tensor]) -> None:
        """Replace the means, which `params` hold, by a draw from the posterior."""

    @abstractmethod
    def _statistics(self, gradients: Mapping[Tensor, Tensor]) -> tuple[Statistics, float]:
        """What the gradients at the present draw tell about the curvature, and the examples behind it (or 0)."""

    @abstractmethod
    def _update(self) -> None:
        """Move mean and curvature by the gradients and statistics."""

    def _check_group(self, group: Mapping[str, Any]) -> None:
        """Raise OptionError for options of a group that have no meaning."""
        check_positive("lr", group["lr"], or_zero=True)
        check_data_size(group["data_size"])
        for name in ("prior_precision", "temperature"):
            if name in group:
                check_positive(name, group[name])

    def _listening(self) -> AbstractContextManager[None]:
        """A context around every forward and backward pass at a draw."""
        return nullcontext()

    def _begun(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Told of the call of an attached module that a draw was made for."""

    def _differentiates(self) -> bool:
        """Whether the present backward pass is the optimiser's own."""
        return False

    def _network(self) -> nn.Module | None:
        """The network, where the optimiser was told."""
        return None

    # drawing ---------------------------------------------------------------------------------------

    @contextmanager
    def sampled(self) -> Iterator[None]:
        """Within the context the weights are a draw from the posterior; afterwards, also after an error, the mean.

        Gradients computed inside count for the next `step()`. Without any (an evaluation of a drawn network) the
        context leaves no trace.
        """
        marks = self._marks()
        earlier = {p: gradient.clone() for p, gradient in self._gradients()} if self._contexts else {}
        with self._drawn():
            yield
            changed = [p for p, gradient in self._gradients() if not marks.get(p, never)(gradient)]
            if not changed:
                return
            own = {p: p.grad for p in changed if p.grad is not None}
            if self._contexts:
                own = {p: g - earlier[p] if p in earlier and marks[p].same(g) else g for p, g in own.items()}
            statistics, examples = self._statistics(own)
        self._see(statistics, examples)

    def _see(self, statistics: Statistics, examples: float) -> None:
        """Count what draws have told."""
        for p, value in statistics.items():
            self._seen[p] = self._seen[p] + value if p in self._seen else value
        self._examples += examples
        self._contexts += 1

    def attach(self, model: nn.Module) -> Attached:
        """Draw in every training pass of the model, for loops that call `step()` alone, such as Hugging Face's Trainer.

        A forward pass in training mode with gradients enabled runs at drawn weights; when its loss has been
        backpropagated the weights are the mean again, and `step()` may follow. Passes before a step are draws of their
        own. Ends with `.remove()` of what is returned.
        """
        check_arguments(SamplingOptimizer.attach, locals())
        self._settle()
        found = attached(model, self)
        self._attached.append(found)
        return found

    @property
    def is_draw(self) -> bool:
        """Whether the weights are a draw now."""
        return self._means is not None

    def _settle(self) -> None:
        """Bring the mean back if an attached network has been left at a draw."""
        for each in self._attached:
            each.close()

    @contextmanager
    def _drawn(self) -> Iterator[None]:
        if self._means is not None:
            raise OptionError(
                "The weights are a draw already",
                expected="one context at a time, and step() outside of it",
                got="sampled() or step(closure) inside sampled()",
                do="leave the context first",
            )
        params = self._trainable()
        means = [p.detach().clone() for p in params]
        self._means = dict(zip(params, means, strict=True))
        try:
            with torch.no_grad():
                self._perturb(params)
            self._noise.count()
            with self._listening():
                yield
        finally:
            self._means = None
            with torch.no_grad():
                torch._foreach_copy_(params, means)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step; returns the closure's loss, averaged over the draws.

        Args:
            closure: clears the gradients, computes the mean loss of the batch, backpropagates and returns it. It runs
                `draws` times, each time at new weights. Without one, the gradients are those of `sampled()`.

        When gradients first come without a draw (alone, or from passes before a closure that does not clear them), the
        optimiser warns, leaves out the step, and attaches itself to the network.
        """
        loss = None
        self._settle()
        if closure is not None:
            try:
                loss = self._run(closure)
            except AddedToMeanError as error:
                if attached_unasked(self):
                    return error.loss
                raise
        elif not self._contexts:
            if self._strays() and attached_unasked(self):
                return None
            raise OptionError(
                "The loss has not been differentiated at drawn weights",
                expected="step(closure), or loss.backward() within `with optimiser.sampled():` before step()",
                got="step() alone",
                do="wrap the forward and backward pass in `with optimiser.sampled():`, or call optimiser.attach(model)",
            )
        with torch.no_grad():
            if self._ranks is not None:
                self._average_over_ranks(self._ranks)
            self._update()
        self._forget()
        self._spent = self._marks()
        return loss

    def _run(self, closure: Callable[[], Any]) -> Any:
        """Draw, call the closure and average, `draws` times; earlier contexts count too, unless the closure clears."""
        earlier = dict(self._gradients()) if self._contexts else {}
        for p in earlier:
            p.grad = None
        try:
            losses, statistics, examples = self._averaged(closure)
        finally:
            if self._contexts:  # not cleared: gradients add up
                for p, gradient in earlier.items():
                    p.grad = gradient if p.grad is None else p.grad + gradient
        self._see(statistics, examples)
        if self.draws == 1:
            return losses[0]
        if any(loss is None for loss in losses):
            return None
        return sum(loss.detach() if isinstance(loss, Tensor) else loss for loss in losses) / self.draws

    def _averaged(self, closure: Callable[[], Any]) -> tuple[list[Any], Statistics, float]:
        """Losses of all draws, means of their statistics and examples; the mean of their gradients stays in `.grad`."""
        losses, totals, gradients, examples = [], Statistics(), Statistics(), 0.0
        strays = self._strays()
        self._cleared = False
        for _ in range(self.draws):
            marks = self._marks()
            with self._drawn():
                with torch.enable_grad():
                    losses.append(closure())
                own = dict(self._gradients())
                if all(marks.get(p, never)(gradient) for p, gradient in own.items()):
                    raise OptionError(
                        "The closure computed no gradients",
                        expected="one that clears the gradients, computes the loss, backpropagates and returns it",
                        got="no new gradient in any parameter",
                        do="call loss.backward() in the closure",
                    )
                if not self._cleared and any(marks[p].same(own[p]) for p in strays & marks.keys() & own.keys()):
                    raise AddedToMeanError(losses[0])
                statistics, seen = self._statistics(own)
            examples += seen / self.draws
            if self.draws == 1:
                return losses, statistics, examples
            for p, gradient in own.items():
                gradients[p] = (
                    gradients[p].add_(gradient, alpha=1 / self.draws) if p in gradients else gradient / self.draws
                )
                p.grad = None
            for p, value in statistics.items():
                totals[p] = totals[p].add_(value, alpha=1 / self.draws) if p in totals else value / self.draws
        for p, gradient in gradients.items():
            p.grad = gradient
        return losses, totals, examples

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients, and what draws since the last step have told about the curvature."""
        super().zero_grad(set_to_none)
        self._cleared = True
        self._forget()

    def _forget(self) -> None:
        self._seen, self._examples, self._contexts = {}, 0.0, 0

    def _average_over_ranks(self, ranks: Ranks) -> None:
        params = self._trainable()
        if self.pairs_noise_with_gradients and not self._checked_ranks:
            self._check_ranks(ranks, params)
        gradients = ranks.averaged([p.grad for p in params], params, [p.dtype for p in params])
        seen = ranks.averaged([self._seen.get(p) for p in params], params, [state_dtype(p) for p in params])
        for p, gradient in zip(params, gradients, strict=True):
            p.grad = gradient
        self._seen = {p: value for p, value in zip(params, seen, strict=True) if value is not None}
        self._examples = ranks.mean(self._examples, params[0].device)

    def _check_ranks(self, ranks: Ranks, params: list[Tensor]) -> None:
        """Raise if gradients were averaged before: they would no longer belong to this rank's draw."""
        total = sum(float(p.grad.double().square().sum()) for p in params if p.grad is not None)
        if ranks.size > 1 and ranks.agree(total, params[0].device):
            raise OptionError(
                "Gradients have been averaged over the ranks already",
                expected="each rank's own gradients, at its own draw, with synchronise=True",
                got="the same gradients on all ranks, as from DistributedDataParallel",
                do="leave synchronise out, or train the plain module without DistributedDataParallel",
            )
        self._checked_ranks = True

    # parameters ------------------------------------------------------------------------------------

    def _trainable(self) -> list[Tensor]:
        return [p for group in self.param_groups for p in group["params"] if p.requires_grad]

    def _gradients(self) -> Iterator[tuple[Tensor, Tensor]]:
        for p in self._trainable():
            if p.grad is not None:
                if p.grad.layout != torch.strided:
                    raise DataError(
                        "A gradient is sparse",
                        expected="dense gradients",
                        got=f"a gradient of layout {p.grad.layout}",
                        do="build the embedding with sparse=False",
                    )
                yield p, p.grad

    def _strays(self) -> set[Tensor]:
        """Parameters whose gradients no step has used, and no draw has."""
        return {p for p, gradient in self._gradients() if not self._spent.get(p, never)(gradient)}

    def _marks(self) -> dict[Tensor, Mark]:
        return {p: Mark(gradient) for p, gradient in self._gradients()}

    def _ready(self, group: Mapping[str, Any]) -> list[Tensor]:
        """Parameters of a group that have a gradient and statistics; the others are skipped, as torch does."""
        return [p for p in group["params"] if p.grad is not None and p in self._seen]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, with options of its own or the defaults."""
        self._check_group({**self.defaults, **param_group})
        super().add_param_group(param_group)
        for p in self.param_groups[-1]["params"]:
            if not p.is_floating_point() or p.layout != torch.strided:
                raise OptionError(
                    "A parameter is no dense tensor of real numbers",
                    expected="floating-point parameters",
                    got=shown(p),
                    do="leave it out",
                )

    # files -----------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Everything that the next steps depend on: groups, moments, step counts, and the state of the draws."""
        self._settle()
        return {**super().state_dict(), "draws": {"seed": self._noise.seed, "made": self._noise.made}}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from a `state_dict`, bit for bit; moments keep the dtype in which they were saved."""
        noise = state_dict.get("draws")
        if not isinstance(noise, Mapping) or not {"seed", "made"} <= set(noise):
            raise OptionError(
                "This is no state of the optimiser",
                expected=f"what {type(self).__name__}.state_dict() returned, with its draws",
                got=f"entries {', '.join(map(repr, state_dict))}",
                do="load a state that this class has saved",
            )
        super().load_state_dict({name: value for name, value in state_dict.items() if name != "draws"})
        self._noise.seed, self._noise.made = int(noise["seed"]), int(noise["made"])
        saved = (index for group in state_dict["param_groups"] for index in group["params"])
        held = (p for group in self.param_groups for p in group["params"])
        for index, p in zip(saved, held, strict=True):  # torch casts moments to the parameter's dtype
            for name, value in state_dict["state"].get(index, {}).items():
                if isinstance(value, Tensor):
                    self.state[p][name] = value.to(p.device, copy=True)
        self._forget()

    def __getstate__(self) -> dict[str, Any]:
        own = {
            name: self.__dict__[name]
            for name in ("draws", "_ranks", "_checked_ranks", "_noise", "_seen", "_examples", "_contexts", "_means")
        }
        return {**super().__getstate__(), **own, "_attached": [], "_spent": {}, "_cleared": False}


def state_dtype(p: Tensor) -> torch.dtype:
    """The dtype of moments: half precision would lose averages over thousands of steps."""
    return p.dtype if p.dtype in (torch.float32, torch.float64) else torch.float32
