"""Loading of life-long learners from their files."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from torch import nn

from lapis.errors import FileError
from lapis.files import read
from lapis.lifelong.heads import Heads
from lapis.lifelong.learner import LEARNERS, Learned, Learner
from lapis.likelihoods import Likelihood
from lapis.network import held
from lapis.options import check_arguments
from lapis.posteriors.storage import saved_likelihood
from lapis.schema import count, entry, record, sound, under
from lapis.training.state import load_model
from lapis.training.step import MakeOptimiser


def load(
    path: str | os.PathLike[str],
    model: nn.Module,
    likelihood: Likelihood | None = None,
    *,
    optimiser: MakeOptimiser | None = None,
) -> Learner:
    """The learner saved at `path`, which goes on as the saved one would have.

    The model, of the same architecture, is given the weights and buffers that the learner's model had.

    Args:
        path: of a file that `learner.save` wrote.
        model: a network of the architecture that was saved; its weights are overwritten.
        likelihood: needed only if it is a `Custom` one, whose function no file can hold.
        optimiser: needed only if the learner was made with a function for it.
    """
    check_arguments(load, locals())
    contents = read(Path(path), "learner")
    contents.check_seal("")
    config = contents.config
    kind = LEARNERS.get(entry(config, "learner", str))
    if kind is None:
        raise FileError(
            f"{path} holds a learner of an unknown kind",
            expected=", ".join(sorted(LEARNERS)),
            got=repr(config["learner"]),
            do="import the package that defines it first",
        )
    named = entry(config, "optimiser", str | None)
    if (named is None) != (optimiser is not None):
        raise FileError(
            "The learner's optimiser is a function, which no file can hold" if named is None else "It has an optimiser",
            expected="lapis.lifelong.load(path, model, optimiser=...)" if named is None else "no optimiser",
            got="none" if named is None else "one",
            do="pass the function that the learner was made with" if named is None else "leave it out",
        )
    options: dict[str, Any] = entry(config, "options", dict)
    with sound("learner"), held(model):
        meaning = saved_likelihood(entry(config, "likelihood", dict), likelihood)
        heads = Heads.from_config(entry(config, "heads", list | int | None))
        learner = kind(model, meaning, heads=heads.heads, optimiser=named or optimiser, **options)  # type: ignore[arg-type]
        tasks = tuple(record(Learned, _with_tuples(task)) for task in entry(config, "tasks", list))
        load_model(model, under("model.", contents.tensors))
        learner.source.set_state(contents.tensors["generator"])
        learner.tasks, learner.outputs = tasks, count(config, "outputs", least=0)
        learner.network.signature = entry(config, "signature", str)
        learner.network.check_finite()
        own = {name: tensor.to(learner.network.device) for name, tensor in under("state.", contents.tensors).items()}
        learner._load(entry(config, "state", dict), own)
    return learner


def _with_tuples(task: Any) -> Any:
    """JSON turns tuples into lists."""
    return {key: tuple(value) if isinstance(value, list) else value for key, value in task.items()}
