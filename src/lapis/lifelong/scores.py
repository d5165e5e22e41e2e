"""How well tasks are learnt, and how well they are remembered: matrices of accuracies, and what they say."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lapis.errors import DataError, OptionError
from lapis.lifelong.learner import Learner
from lapis.options import check_arguments, check_choice


@dataclass(frozen=True)
class Lesson:
    """A task: what it is learnt from, what it is tested on, and its head."""

    train: Any
    test: tuple[Any, Tensor]
    """Inputs and classes."""
    head: Any = None


@dataclass(frozen=True)
class Accuracies:
    """Accuracies a[i, j] on task j after task i was learnt, (T, T); NaN for tasks that had not come yet."""

    matrix: Tensor

    def average(self, after: int = -1) -> float:
        """The mean accuracy on all tasks learnt so far, after one of them: by default the last."""
        check_arguments(Accuracies.average, locals(), signed=("after",))
        tasks = len(self.matrix)
        if not -tasks <= after < tasks:
            raise OptionError(
                "There is no such task",
                expected=f"a number from 0 to {tasks - 1}, or from the end: -1 to {-tasks}",
                got=f"after={after}",
                do="count tasks from 0, or leave it out for the last",
            )
        return float(self.matrix[after].nanmean())

    def forgetting(self) -> float:
        """The mean over all tasks but the last of max_i a[i, j] - a[T, j], the best ever minus that at the end."""
        if len(self.matrix) < 2:
            return 0.0
        past = self.matrix[:, :-1].nan_to_num(-1.0)
        return float((past.max(0).values - past[-1]).mean())

    def learning(self) -> float:
        """The mean accuracy on each task right after it was learnt."""
        return float(self.matrix.diagonal().mean())


def accuracy(learner: Learner, lesson: Lesson, **options: Any) -> float:
    """The share of test examples whose most probable class, under the lesson's head, is the right one."""
    inputs, classes = lesson.test
    prediction: Any = learner.predict(inputs, lesson.head, **options)
    if not hasattr(prediction, "probs"):
        raise DataError(
            "Only classifiers have accuracies",
            expected="a categorical or bernoulli likelihood",
            got=learner.likelihood.name,
            do="score predict(x).log_prob(y) instead",
        )
    probs = learner.likelihood.canonical(prediction.probs)
    truth = learner.likelihood.targets(classes, probs)
    if learner.likelihood.name != "categorical":
        return float(((probs > 0.5) == (truth > 0.5)).double().mean())
    truth = truth.argmax(-1) if truth.is_floating_point() else truth  # soft labels
    counted = truth != getattr(learner.likelihood, "ignore_index", None)
    if not bool(counted.any()):
        raise DataError("No test example counts", expected="one at least", got="all ignored", do="pass others")
    return float((probs.argmax(-1) == truth)[counted].double().mean())


def accuracy_matrix(make: Callable[[], Learner], lessons: Sequence[Lesson], **options: Any) -> Accuracies:
    """Teach a new learner all tasks in order, and test it on all learnt so far after each.

    Args:
        make: a function that makes a learner, with a network of its own.
        lessons: the tasks.
        options: for `learner.predict`, such as method="network".
    """
    check_arguments(accuracy_matrix, locals())
    known = tuple(inspect.signature(Learner.predict).parameters)[3:]
    for name in options:
        check_choice("option", name, known)
    learner, size = make(), len(lessons)
    matrix = torch.full((size, size), torch.nan, dtype=torch.float64)
    for i, lesson in enumerate(lessons):
        learner.learn(lesson.train, lesson.head)
        for j in range(i + 1):
            matrix[i, j] = accuracy(learner, lessons[j], **options)
    return Accuracies(matrix)
