"""Bad input of every kind: a `LapisError` whose message says what was expected, what came and what to do.

Whatever goes wrong, the model is left exactly as it was.

A case is a function: it gets a fresh model, may spoil it, and returns what must fail. `bad` files it in the table, with
the kind of error and words that the message must contain.
"""

from __future__ import annotations

import ast
import math
import re
import resource
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lapis
from lapis.curvature.recording.listener import MODULE_RULES
from lapis.curvature.working_memory import examples_at_once
from lapis.errors import (
    DataError,
    FileError,
    LapisError,
    LikelihoodError,
    MemoryBudgetError,
    ModelError,
    NotPositiveDefiniteError,
    OptionError,
    PriorError,
)
from lapis.network import Network
from untouched import untouched

F64 = torch.float64
X = torch.randn(6, 3, generator=torch.Generator().manual_seed(0), dtype=F64)
Y = torch.randn(6, 2, generator=torch.Generator().manual_seed(1), dtype=F64)
LABELS = torch.tensor([0, 1, 0, 1, 1, 0])


def make_model(*, last: nn.Module | None = None, head: int = 2) -> nn.Sequential:
    """In train mode, with batch norm, dropout, a frozen bias, gradients and a hook of its owner's."""
    body = [nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Tanh(), nn.Linear(4, head)]
    model = nn.Sequential(*body, *([] if last is None else [last])).to(F64)
    model[0].bias.requires_grad_(False)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.full_like(parameter, 3.0)
    model[1].running_mean.normal_()
    model.register_forward_hook(_no_change)
    return model.train()


def _no_change(module: nn.Module, inputs: Any, output: Any) -> None:
    """A hook of the model's owner."""


class Apply(nn.Module):
    def __init__(self, function: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.function(x)


Act = Callable[[], Any]
Prepare = Callable[[nn.Sequential], "Act | tuple[Act, nn.Module]"]


@dataclass(frozen=True)
class Bad:
    kind: type[LapisError]
    says: tuple[str, ...]
    prepare: Prepare


TABLE: dict[str, Bad] = {}


def bad(kind: type[LapisError], *says: str) -> Callable[[Prepare], Prepare]:
    def register(prepare: Prepare) -> Prepare:
        TABLE[prepare.__name__] = Bad(kind, says, prepare)  # type: ignore[attr-defined]
        return prepare

    return register


def fit(model: Any, data: Any = None, likelihood: Any = "gaussian", **options: Any) -> Any:
    return lapis.laplace(model, (X, Y) if data is None else data, likelihood, **options)


def spoiled(tensor: Tensor, index: Any, value: float) -> Tensor:
    changed = tensor.clone()
    changed[index] = value
    return changed


@pytest.mark.parametrize("name", TABLE)
def test_bad_input_is_explained_and_the_model_is_left_alone(name: str) -> None:
    case = TABLE[name]
    model = make_model()
    prepared = case.prepare(model)
    act, *others = prepared if isinstance(prepared, tuple) else (prepared,)
    with untouched(model, *others), pytest.raises(LapisError) as caught:
        act()
    message = str(caught.value)
    assert type(caught.value) is case.kind, message
    parts = re.fullmatch(r"(.+?)\. Expected: (.+)\. Got: (.+)\. Do: (.+)\.", message, re.DOTALL)
    assert parts, f"not all of what, expected, got and do: {message}"
    assert not message[0].islower(), message
    assert not re.search(r"(?<!\.)\.\.(?!\.)|  |<\w+ object|lambda", message), message
    for words in case.says:
        assert words in message, message


# ----------------------------------------------------------------------------------------------------------
# Data


@bad(DataError, "batch 1", "example 2", "NaN or infinity")
def nan_in_the_inputs(model: nn.Sequential) -> Act:
    return lambda: fit(model, [(X, Y), (spoiled(X, (2, 0), math.nan), Y)])


@bad(DataError, "batch 0", "example 5")
def infinity_in_the_inputs(model: nn.Sequential) -> Act:
    return lambda: fit(model, [(spoiled(X, (5, 1), -math.inf), Y)])


@bad(DataError, "batch 0", "example 4")
def nan_in_inputs_without_features(model: nn.Sequential) -> Act:
    network = nn.Sequential(Apply(lambda x: x[:, None]), nn.Linear(1, 2)).to(F64)
    return lambda: fit(network, (spoiled(X[:, 0], 4, math.nan), Y))


@bad(DataError, "batch 1", "nan at index (3, 1)", "not finite")
def nan_in_the_targets(model: nn.Sequential) -> Act:
    return lambda: fit(model, [(X, Y), (X, spoiled(Y, (3, 1), math.nan))])


@bad(DataError, "In examples ", " to 5 of batch 0", "inf at index")
def nan_in_the_targets_of_a_part_of_a_batch(model: nn.Sequential) -> Act:
    """With little memory a batch is worked through in parts."""
    network = nn.Sequential(nn.Linear(3, 40), nn.Tanh(), nn.Linear(40, 2)).to(F64)
    data = [(X, spoiled(Y, (5, 0), math.inf))]
    one = lapis.laplace(network, [(X, Y)], "gaussian", structure="diagonal")
    for_two = next(work for work in range(10**6) if examples_at_once(one.curvature, 1, work) == 2)
    return lambda: fit(network, data, structure="diagonal", memory_budget=for_two)


@bad(DataError, "batch 1", "7 at index 2", "classes 0 to 1")
def label_out_of_range(model: nn.Sequential) -> Act:
    data = [(X, LABELS), (X, torch.tensor([0, 1, 7, 1, 0, 0]))]
    return lambda: fit(model, data, "categorical")


@bad(DataError, "batch 0", "-1 at index 0")
def negative_label(model: nn.Sequential) -> Act:
    return lambda: fit(model, (X, LABELS - 1), "categorical")


@bad(DataError, "bool", ".long()")
def boolean_labels(model: nn.Sequential) -> Act:
    return lambda: fit(model, (X, LABELS.bool()), "categorical")


@bad(DataError, "Soft labels", "shape (6, 2)")
def labels_as_floating_numbers(model: nn.Sequential) -> Act:
    return lambda: fit(model, (X, LABELS.double()), "categorical")


@bad(DataError, "sum to one")
def probabilities_that_do_not_sum_to_one(model: nn.Sequential) -> Act:
    return lambda: fit(model, (X, torch.full((6, 2), 0.4, dtype=F64)), "categorical")


@bad(DataError, "[0, 1]", "relabel")
def binary_labels_of_minus_one(model: nn.Sequential) -> Act:
    network = make_model(head=1)
    return lambda: fit(network, (X, 2 * LABELS - 1), "bernoulli")


@bad(DataError, "whole numbers", "at index (0, 0)")
def counts_that_are_not_whole(model: nn.Sequential) -> Act:
    return lambda: fit(model, (X, Y.abs()), "poisson")


@bad(DataError, "wrong shape", "(6, 2)", "(6, 3)")
def wrong_width_of_targets(model: nn.Sequential) -> Act:
    return lambda: fit(model, (X, torch.zeros(6, 3, dtype=F64)))


@bad(DataError, "no batches", "at least one example")
def no_batches(model: nn.Sequential) -> Act:
    return lambda: fit(model, [])


@bad(DataError, "no data")
def tensors_without_examples(model: nn.Sequential) -> Act:
    return lambda: fit(model, (X[:0], Y[:0]))


@bad(DataError, "empty batches")
def batches_without_examples(model: nn.Sequential) -> Act:
    return lambda: fit(model, [(X[:0], Y[:0]), (X[:0], Y[:0])])


@bad(DataError, "no data")
def loader_without_examples(model: nn.Sequential) -> Act:
    loader = DataLoader(TensorDataset(X[:0], Y[:0]), generator=torch.Generator())
    return lambda: fit(model, loader)


@bad(DataError, "used-up iterator")
def iterator_that_is_used_up(model: nn.Sequential) -> Act:
    batches = iter([(X, Y)])
    list(batches)
    return lambda: fit(model, batches)


@bad(DataError, "6 targets", "(4, 2)")
def inputs_and_targets_of_different_lengths(model: nn.Sequential) -> Act:
    return lambda: fit(model, (X, Y[:4]))


@bad(DataError, "batch 1", "6 targets", "(5, 2)")
def batch_of_different_lengths(model: nn.Sequential) -> Act:
    return lambda: fit(model, [(X, Y), (X, Y[:5])])


@bad(DataError, "In batch 0", "batch axis", "(6, 3)", "(4, 3)")
def inputs_of_different_lengths(model: nn.Sequential) -> Act:
    return lambda: fit(model, [({"a": X, "b": X[:4]}, Y)])


@bad(DataError, "batch axis", "str")
def inputs_that_are_not_tensors(model: nn.Sequential) -> Act:
    return lambda: fit(model, [("words", Y)])


@bad(DataError, "inputs are not numbers", "ndarray")
def inputs_of_objects(model: nn.Sequential) -> Act:
    return lambda: fit(model, [(np.array([["a"] * 3] * 6), Y)])


@bad(DataError, "In batch 0: The targets are not numbers", "list")
def targets_that_are_not_numbers(model: nn.Sequential) -> Act:
    return lambda: fit(model, [(X, ["cat"] * 6)])


@bad(DataError, "Batch 0 is not a pair", "tuple of length 3")
def batches_of_three(model: nn.Sequential) -> Act:
    return lambda: fit(model, [(X, Y, Y)])


@bad(DataError, "Batch 0 is not a pair", "dict")
def batches_as_dictionaries(model: nn.Sequential) -> Act:
    return lambda: fit(model, [{"x": X, "y": Y}])


@bad(DataError, "This is no data set", "Tensor")
def data_without_targets(model: nn.Sequential) -> Act:
    return lambda: fit(model, X)


@bad(DataError, "This is no data set", "str")
def data_of_another_kind(model: nn.Sequential) -> Act:
    return lambda: fit(model, "train.csv")


@bad(DataError, "This is no data set", "dict")
def data_as_a_dictionary(model: nn.Sequential) -> Act:
    return lambda: fit(model, {"x": X, "y": Y})


@bad(DataError, "(6, 5) float64", "could not run", "float64")
def inputs_of_the_wrong_width(model: nn.Sequential) -> Act:
    return lambda: fit(model, (torch.zeros(6, 5, dtype=F64), Y))


@bad(DataError, "In batch 1", "inputs like (6, 3) float64", "(6, 5) float64")
def a_later_batch_of_the_wrong_width(model: nn.Sequential) -> Act:
    return lambda: fit(model, [(X, Y), (torch.zeros(6, 5, dtype=F64), Y)])


@bad(DataError, "torch.float64", "(6, 3) float32")
def inputs_of_the_wrong_dtype(model: nn.Sequential) -> Act:
    return lambda: fit(model, (X.float(), Y))


# ----------------------------------------------------------------------------------------------------------
# Models


@bad(ModelError, "'4.weight'", "NaN or infinity")
def nan_in_a_weight(model: nn.Sequential) -> Act:
    with torch.no_grad():
        model[4].weight[1, 2] = math.nan
    return lambda: fit(model)


@bad(ModelError, "'0.bias'")
def infinity_in_a_frozen_weight(model: nn.Sequential) -> Act:
    with torch.no_grad():
        model[0].bias[1] = math.inf
    return lambda: fit(model)


@bad(ModelError, "'1.running_var'")
def nan_in_a_buffer(model: nn.Sequential) -> Act:
    model[1].running_var[0] = math.nan
    return lambda: fit(model)


@bad(ModelError, "no trainable weights", "unfreeze")
def all_weights_frozen(model: nn.Sequential) -> Act:
    model.requires_grad_(False)
    return lambda: fit(model)


@bad(ModelError, "frozen do not count", "'0.bias'")
def chosen_weights_frozen(model: nn.Sequential) -> Act:
    return lambda: fit(model, weights="0.bias")


@bad(OptionError, "'head.*'", "4.weight")
def weights_that_do_not_exist(model: nn.Sequential) -> Act:
    return lambda: fit(model, weights=["4.*", "head.*"])


@bad(ModelError, "No weights were chosen", "a function that selects none")
def function_that_chooses_no_weights(model: nn.Sequential) -> Act:
    def none(name: str, parameter: Tensor) -> bool:
        return False

    return lambda: fit(model, weights=none)


@bad(OptionError, "name patterns", "3")
def weights_of_another_kind(model: nn.Sequential) -> Act:
    return lambda: fit(model, weights=3)


@bad(OptionError, "a module (Linear)")
def weights_as_a_module(model: nn.Sequential) -> Act:
    return lambda: fit(model, weights=model[4])


@bad(ModelError, "torch.nn.Module", "function")
def function_as_a_model(model: nn.Sequential) -> Act:
    return lambda: fit(torch.tanh)


@bad(ModelError, "one dtype and one device", "torch.float32, torch.float64")
def weights_of_two_dtypes(model: nn.Sequential) -> Act:
    model[4].float()
    return lambda: fit(model)


@bad(ModelError, "no shape yet", "lazy")
def weights_that_do_not_exist_yet(model: nn.Sequential) -> tuple[Act, nn.Module]:
    return lambda: fit(nn.Sequential(nn.LazyLinear(2))), model


@bad(ModelError, "does not depend on the chosen weights", ".detach()")
def output_detached(model: nn.Sequential) -> tuple[Act, nn.Module]:
    network = make_model(last=Apply(Tensor.detach))
    return lambda: fit(network), network


@bad(ModelError, "does not depend on the chosen weights")
def chosen_weights_without_influence(model: nn.Sequential) -> tuple[Act, nn.Module]:
    network = make_model(last=Apply(lambda f: f.detach() + 1))
    return lambda: fit(network, weights="last_layer"), network


@bad(ModelError, "one floating tensor", "(6, 2) float64, (6, 2) float64")
def output_as_a_tuple(model: nn.Sequential) -> tuple[Act, nn.Module]:
    network = make_model(last=Apply(lambda f: (f, f)))
    return lambda: fit(network), network


@bad(ModelError, "one floating tensor", "int64")
def output_of_integers(model: nn.Sequential) -> tuple[Act, nn.Module]:
    network = make_model(last=Apply(lambda f: f.argmax(1)))
    return lambda: fit(network, (X, LABELS), "categorical"), network


@bad(DataError, "batch axis", "(1, 2)")
def output_summed_over_the_batch(model: nn.Sequential) -> tuple[Act, nn.Module]:
    network = make_model(last=Apply(lambda f: f.sum(0, keepdim=True)))
    return lambda: fit(network), network


@bad(ModelError, "batch 0", "not finite", "example 0")
def outputs_that_are_not_finite(model: nn.Sequential) -> tuple[Act, nn.Module]:
    network = make_model(last=Apply(lambda f: (f * 0).log() * f))
    return lambda: fit(network), network


@bad(ModelError, "batch 1", "not finite", "example 3")
def outputs_of_a_later_batch_that_are_not_finite(model: nn.Sequential) -> Act:
    network = nn.Sequential(nn.Linear(3, 2), Apply(torch.exp)).to(F64)
    return lambda: fit(network, [(X, Y), (spoiled(X, 3, 1e6), Y)])


@bad(ModelError, "other examples in its batch", "running statistics")
def statistics_over_the_batch(model: nn.Sequential) -> Act:
    model[1] = nn.BatchNorm1d(4, track_running_stats=False).to(F64)
    return lambda: fit(model)


@bad(DataError, "could not run", "the network said: wrong weather")
def network_that_raises(model: nn.Sequential) -> tuple[Act, nn.Module]:
    def refuse(x: Tensor) -> Tensor:
        raise AssertionError("wrong weather\nand more")

    network = make_model(last=Apply(refuse))
    return lambda: fit(network), network


@bad(ModelError, "inference mode", "torch.no_grad()")
def differentiate_in_inference_mode(model: nn.Sequential) -> Act:
    return torch.inference_mode()(lambda: Network(model).prepared().__enter__())


# ----------------------------------------------------------------------------------------------------------
# Likelihoods


@bad(OptionError, "'tweedie'", "lapis.Custom")
def unknown_likelihood(model: nn.Sequential) -> Act:
    return lambda: fit(model, likelihood="tweedie")


@bad(LikelihoodError, "one output per class", "bernoulli")
def categorical_of_one_output(model: nn.Sequential) -> tuple[Act, nn.Module]:
    network = make_model(head=1)
    return lambda: fit(network, (X, LABELS), "categorical"), network


@bad(LikelihoodError, "two outputs per target", "C = 3")
def heteroscedastic_of_three_outputs(model: nn.Sequential) -> tuple[Act, nn.Module]:
    network = make_model(head=3)
    return lambda: fit(network, likelihood="heteroscedastic"), network


@bad(LikelihoodError, "one per output", "3")
def noise_for_another_number_of_outputs(model: nn.Sequential) -> Act:
    return lambda: fit(model, likelihood=lapis.Gaussian(torch.ones(3)))


@bad(OptionError, "positive", "-0.5")
def negative_noise(model: nn.Sequential) -> Act:
    return lambda: fit(model, likelihood=lapis.Gaussian(-0.5))


@bad(OptionError, "'middle'", "channels")
def unknown_layout(model: nn.Sequential) -> Act:
    return lambda: fit(model, likelihood=lapis.Categorical(channels="middle"))  # type: ignore[arg-type]


@bad(LikelihoodError, "not convex", 'curvature="empirical"')
def custom_likelihood_that_is_not_convex(model: nn.Sequential) -> Act:
    return lambda: fit(model, likelihood=lapis.Custom(lambda f, y: -(f - y).square().sum(-1)))


@bad(LikelihoodError, "mixes the examples")
def custom_likelihood_over_the_batch(model: nn.Sequential) -> Act:
    def mean_over_batch(f: Tensor, y: Tensor) -> Tensor:
        return (f - y).square().sum(-1) / f.shape[0] if f.dim() > 1 else f[:, None]

    return lambda: fit(model, likelihood=lapis.Custom(mean_over_batch, name="mean"))


@bad(LikelihoodError, "only its density is known")
def sampled_curvature_of_a_custom_likelihood(model: nn.Sequential) -> Act:
    return lambda: fit(model, likelihood=lapis.Custom(lambda f, y: (f - y).square().sum(-1)), curvature="sampled")


@bad(LikelihoodError, "In batch 1", "overflows", "800")
def a_rate_that_overflows_in_a_later_batch(model: nn.Sequential) -> Act:
    network = nn.Sequential(nn.Linear(3, 2)).to(F64)
    with torch.no_grad():
        network[0].weight.fill_(1.0)
        network[0].bias.zero_()
    counts = torch.ones(6, 2)
    return lambda: fit(network, [(X, counts), (torch.full((6, 3), 800 / 3, dtype=F64), counts)], "poisson")


# ----------------------------------------------------------------------------------------------------------
# Structures and memory


@bad(MemoryBudgetError, "bytes", "1,002,000", 'structure="kronecker"', "memory_budget")
def dense_posterior_that_does_not_fit(model: nn.Sequential) -> tuple[Act, nn.Module]:
    """A million weights: 8 terabytes, refused before a byte of them is asked for."""
    network = nn.Sequential(nn.Linear(1000, 1000), nn.Linear(1000, 1)).to(F64)
    data = (torch.zeros(2, 1000, dtype=F64), torch.zeros(2, dtype=F64))
    assert sum(p.numel() for p in network.parameters()) == 1_002_001
    for parameter in network[1].parameters():
        parameter.requires_grad_(parameter.dim() > 1)
    return lambda: fit(network, data, structure="dense"), network


@bad(MemoryBudgetError, "864 bytes", "'4.weight + 4.bias'", "diagonal")
def kronecker_factors_that_do_not_fit(model: nn.Sequential) -> Act:
    return lambda: fit(model, structure="kronecker", memory_budget=100)


@bad(MemoryBudgetError, "1,040 bytes", "'4.weight + 4.bias'", "diagonal")
def ekfac_blocks_that_do_not_fit(model: nn.Sequential) -> Act:
    """864 for factors and eigenvectors, as above, and 8 for each of the 22 weights that form matrices."""
    return lambda: fit(model, structure="ekfac", memory_budget=1000)


@bad(DataError, "only once", "two passes", "list_iterator", "list(iterator)")
def data_for_one_pass_where_two_are_needed(model: nn.Sequential) -> Act:
    return lambda: fit(model, iter([(X, Y)]), structure="ekfac")


@bad(MemoryBudgetError, "bytes", "marginal_variance()")
def precision_matrix_that_does_not_fit(model: nn.Sequential) -> Act:
    posterior = fit(model, structure="diagonal", memory_budget=3000)
    return posterior.precision


@bad(MemoryBudgetError, "bytes", "fewer examples")
def joint_prediction_that_does_not_fit(model: nn.Sequential) -> Act:
    posterior = fit(model, structure="diagonal", memory_budget=3000)
    return lambda: posterior.predict(torch.cat([X] * 5), joint=True)


@bad(OptionError, "'banded'", '"kronecker"')
def unknown_structure(model: nn.Sequential) -> Act:
    return lambda: fit(model, structure="banded")


@bad(OptionError, "dense structure only", "kronecker")
def hessian_of_a_kronecker_posterior(model: nn.Sequential) -> Act:
    return lambda: fit(model, structure="kronecker", curvature="hessian")


@bad(NotPositiveDefiniteError, "eigenvalue", 'curvature="ggn"')
def hessian_away_from_a_minimum(model: nn.Sequential) -> Act:
    network = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 2)).to(F64)
    posterior = fit(network, (X, 50 * Y), structure="dense", curvature="hessian")
    return posterior.log_evidence


# ----------------------------------------------------------------------------------------------------------
# Priors


def prior_case(kind: type[LapisError], name: str, prior: Any, *says: str, **options: Any) -> None:
    """A prior that is refused by the fit, and by `with_prior` in the same words."""

    def at_the_fit(model: nn.Sequential) -> Act:
        return lambda: fit(model, prior=prior(), **options)

    def later(model: nn.Sequential) -> Act:
        posterior = fit(model, **options)
        return lambda: posterior.with_prior(prior())

    TABLE[f"{name}_at_the_fit"] = Bad(kind, says, at_the_fit)
    TABLE[f"{name}_later"] = Bad(kind, says, later)


prior_case(PriorError, "negative_precision", lambda: -1.0, "positive", "-1")
prior_case(PriorError, "zero_precision", lambda: 0, "positive", "wide prior")
prior_case(PriorError, "precision_not_finite", lambda: math.nan, "finite positive")
prior_case(PriorError, "precision_as_text", lambda: lapis.Prior("wide"), "'wide'")
prior_case(PriorError, "prior_as_text", lambda: "wide", "'wide'", "lapis.Prior")
prior_case(PriorError, "prior_as_a_flag", lambda: True, "lapis.Prior")
prior_case(PriorError, "too_many_precisions", lambda: lapis.Prior([1.0, 2.0]), "one number", "(2,)")
prior_case(PriorError, "unknown_groups", lambda: lapis.Prior(groups="blocks"), "'blocks'", '"layer"')
prior_case(PriorError, "groups_of_another_kind", lambda: lapis.Prior(groups=3), "3", "mapping")
prior_case(
    PriorError,
    "a_parameter_in_no_group",
    lambda: lapis.Prior(groups={"a": "0.*", "b": "1.*"}),
    "'4.weight' in 0 groups",
)
prior_case(
    PriorError,
    "a_parameter_in_two_groups",
    lambda: lapis.Prior(groups={"a": "*", "b": "4.*"}),
    "'4.weight' in 2 groups",
)
prior_case(
    PriorError, "a_group_of_nothing", lambda: lapis.Prior(groups={"a": "*", "b": "9.*"}), "group 'b' without parameters"
)
prior_case(
    PriorError,
    "precisions_of_other_groups",
    lambda: lapis.Prior({"0": 1.0, "9": 2.0}, groups="layer"),
    "0, 1, 4",
    "0, 9",
)
prior_case(
    PriorError,
    "two_precisions_in_a_group",
    lambda: lapis.Prior({"0": 1.0, "1": [1.0, 2.0], "4": 1.0}, groups="layer"),
    "'1'",
    "one number for each group",
)
prior_case(
    PriorError,
    "named_precisions_for_every_weight",
    lambda: lapis.Prior({"0": 1.0}, groups="weight"),
    "flat vector of 30",
)
prior_case(PriorError, "mean_of_another_length", lambda: lapis.Prior(mean=torch.zeros(7)), "(30,)", "(7,)")
prior_case(PriorError, "mean_not_finite", lambda: lapis.Prior(mean=math.inf), "not finite")
prior_case(PriorError, "mean_as_text", lambda: lapis.Prior(mean="zero"), "'zero'")
prior_case(
    PriorError,
    "mean_of_some_parameters",
    lambda: lapis.Prior(mean={"0.weight": torch.zeros(4, 3), "1.weight": torch.zeros(4)}),
    "'1.bias'",
    "no such entry",
)
prior_case(
    PriorError, "mean_of_another_shape", lambda: lapis.Prior(mean={"0.weight": torch.zeros(3, 4)}), "(4, 3)", "(3, 4)"
)
prior_case(
    PriorError,
    "a_prior_for_every_weight_of_a_kronecker_posterior",
    lambda: lapis.Prior(1.0, groups="weight"),
    'groups="parameter"',
    "diagonal",
    structure="kronecker",
)


# ----------------------------------------------------------------------------------------------------------
# Options


def option_case(name: str, value: Any, *says: str) -> None:
    def prepare(model: nn.Sequential) -> Act:
        return lambda: fit(model, **{name: value})

    TABLE[f"{name}_of_{value}"] = Bad(OptionError, says, prepare)


option_case("curvature", "natural", "'natural'", '"empirical"')
option_case("sharing", "average", "'average'", '"reduce"')
option_case("bias", "none", "'none'", '"separate"')
option_case("temperature", 0.0, "positive")
option_case("temperature", -1, "positive")
option_case("temperature", math.nan, "positive")
option_case("temperature", "hot", "'hot'")
option_case("fisher_samples", 0, "at least 1")
option_case("fisher_samples", "many", "'many'")
option_case("batch_size", 0, "at least 1")
option_case("batch_size", 2.5, "2.5")
option_case("memory_budget", -1, "at least 1")


# ----------------------------------------------------------------------------------------------------------
# What posteriors are asked


def question(
    kind: type[LapisError],
    name: str,
    ask: Callable[[Any], Any],
    *says: str,
    likelihood: str = "gaussian",
    **options: Any,
) -> None:
    def prepare(model: nn.Sequential) -> Act:
        posterior = fit(model, (X, LABELS if likelihood == "categorical" else Y), likelihood, **options)
        return lambda: ask(posterior)

    TABLE[name] = Bad(kind, says, prepare)


question(OptionError, "sample_none", lambda p: p.sample(0), "Bad samples", "0")
question(OptionError, "sample_a_fraction", lambda p: p.sample(2.5), "2.5")
question(DataError, "log_prob_of_other_weights", lambda p: p.log_prob(torch.zeros(7)), "30", "(7,)")
question(DataError, "unflatten_other_weights", lambda p: lapis.unflatten(torch.zeros(7), p), "(30,)", "(7,)")
question(OptionError, "noise_of_zero", lambda p: p.with_noise(0.0), "positive")
question(
    LikelihoodError,
    "noise_of_other_proportions",
    lambda p: p.with_noise(torch.tensor([1.0, 2.0])),
    "refit",
    "same factor",
    structure="lowrank",
)
question(LikelihoodError, "noise_of_classes", lambda p: p.with_noise(1.0), "no noise", likelihood="categorical")
question(OptionError, "later_temperature_of_zero", lambda p: p.with_temperature(0), "positive")
question(DataError, "update_with_nothing", lambda p: p.update([]), "no data")
question(DataError, "update_with_empty_batches", lambda p: p.update([(X[:0], Y[:0])]), "only empty batches")
question(DataError, "update_with_nan", lambda p: p.update((X * math.nan, Y)), "batch 0", "example 0")
question(DataError, "update_of_another_width", lambda p: p.update((X[:, :2], Y)), "inputs like (6, 3)", "(6, 2)")
question(DataError, "update_with_other_targets", lambda p: p.update((X, Y[:, :1])), "batch 0", "wrong shape")
question(
    DataError, "predict_another_width", lambda p: p.predict(X[:, :2]), "inputs like (6, 3) float64", "(6, 2) float64"
)
question(DataError, "predict_one_example_without_a_batch", lambda p: p.predict(X[0]), "(6, 3) float64", "(3,) float64")
question(DataError, "predict_another_dtype", lambda p: p.predict(X.float()), "torch.float64", "(6, 3) float32", ".to(")
question(DataError, "predict_integers", lambda p: p.predict(X.long()), "(6, 3) float64", "(6, 3) int64")
question(DataError, "predict_nothing", lambda p: p.predict(X[:0]), "some examples")
question(DataError, "predict_text", lambda p: p.predict("digits"), "str")
question(DataError, "predict_nan", lambda p: p.predict(spoiled(X, (1, 1), math.nan)), "example 1")
question(
    DataError, "sampled_prediction_of_another_width", lambda p: p.predict(X[:, :2], method="sampled"), "(6, 2) float64"
)
question(DataError, "variance_of_another_width", lambda p: p.functional_variance(X[:, :2]), "(6, 3) float64")
question(DataError, "predict_by_keyword", lambda p: p.predict({"x": X}), "(6, 3) float64", "{x: (6, 3) float64}")
question(OptionError, "unknown_method", lambda p: p.predict(X, method="ensemble"), "'ensemble'", '"sampled"')
question(OptionError, "unknown_covariance", lambda p: p.predict(X, covariance="block"), "'block'", '"full"')
question(OptionError, "link_for_regression", lambda p: p.predict(X, link="probit"), "'probit'", "gaussian")
question(
    OptionError, "unknown_link", lambda p: p.predict(X, link="logit"), "'logit'", '"bridge"', likelihood="categorical"
)
question(
    OptionError,
    "link_of_sampled_networks",
    lambda p: p.predict(X, method="sampled", link="mc"),
    "sampled networks",
    likelihood="categorical",
)
question(
    OptionError, "no_draws", lambda p: p.predict(X, link="mc", samples=0), "samples", "0", likelihood="categorical"
)
question(OptionError, "no_networks", lambda p: p.predict(X, method="sampled", samples=0), "0")
question(OptionError, "joint_draws", lambda p: p.predict(X, method="sampled", joint=True), "linearised")
question(DataError, "density_of_other_targets", lambda p: p.predict(X).log_prob(Y[:, :1]), "(6, 2)", "(6, 1)")
question(OptionError, "interval_of_95", lambda p: p.predict(X).interval(95), "95", "probability")


@bad(ModelError, "changed since the fit", "fit again")
def predict_with_changed_weights(model: nn.Sequential) -> Act:
    posterior = fit(model)
    with torch.no_grad():
        model[4].weight += 1
    return lambda: posterior.predict(X)


@bad(ModelError, "changed since the fit", "frozen ones too")
def predict_from_changed_features(model: nn.Sequential) -> Act:
    posterior = fit(model, weights="last_layer")
    with torch.no_grad():
        model[0].bias += 1e-9
    return lambda: posterior.predict(X)


@bad(ModelError, "changed since the fit", "every buffer")
def predict_after_batch_norm_has_moved(model: nn.Sequential) -> Act:
    posterior = fit(model)
    posterior.predict(X)
    model(X + 1)
    return lambda: posterior.predict(X)


@bad(ModelError, "changed since the fit")
def update_with_changed_weights(model: nn.Sequential) -> Act:
    posterior = fit(model)
    with torch.no_grad():
        model[4].weight += 1
    return lambda: posterior.update((X, Y))


@bad(ModelError, "not finite")
def predict_what_overflows(model: nn.Sequential) -> Act:
    network = nn.Sequential(nn.Linear(3, 2), Apply(torch.exp)).to(F64)
    posterior = fit(network)
    return lambda: posterior.predict(1e6 * X)


# ----------------------------------------------------------------------------------------------------------
# Files (more in test_storage.py)


@bad(FileError, "another network", "'4.weight' of shape (2, 4)", "(3, 4)")
def load_into_another_model(model: nn.Sequential) -> tuple[Act, nn.Module]:
    path = saved(model)
    other = make_model(head=3)
    return lambda: lapis.load(path, other), other


@bad(FileError, "not a whole Lapis posterior")
def load_a_truncated_file(model: nn.Sequential) -> Act:
    path = saved(model)
    path.write_bytes(path.read_bytes()[:-1])
    return lambda: lapis.load(path, model)


@bad(FileError, "not an unchanged Lapis posterior")
def load_a_tampered_file(model: nn.Sequential) -> Act:
    path = saved(model)
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)
    return lambda: lapis.load(path, model)


def saved(model: nn.Sequential) -> Path:
    import tempfile

    path = Path(tempfile.mkdtemp()) / "posterior.lapis"
    fit(model).save(path)
    return path


# ----------------------------------------------------------------------------------------------------------
# About the errors themselves


@bad(OptionError, "Bad scores", "Got: NaN in a tensor (30,) of float64")
def scores_with_nan(model: nn.Sequential) -> Act:
    return lambda: fit(model, weights=lapis.Subnetwork(2, by=torch.full((30,), math.nan, dtype=F64)))


@bad(DataError, "Expected: shape (6, 5)", "Got: (6, 2, 4)")
def custom_targets_of_other_positions(model: nn.Sequential) -> Act:
    """The shape in the message is the user's, not that with the channels moved."""
    likelihood = lapis.Custom(lambda f, y: (f - y).square().sum(), channels="first")
    return lambda: likelihood.targets(torch.ones(6, 2, 4), torch.ones(6, 5, 2), (6, 2, 5))


def test_a_dense_posterior_is_refused_before_allocating() -> None:
    network = nn.Linear(3000, 100)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(MemoryBudgetError, match="722,782,789,888 bytes"):
        fit(network, (torch.zeros(2, 3000), torch.zeros(2, 100)), structure="dense")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 * 1024


@pytest.mark.parametrize("structure", ["dense", "diagonal", "kronecker", "ekfac"])
def test_a_failure_in_the_middle_of_the_data_leaves_the_posterior_alone(structure: str) -> None:
    """An update that fails at its second batch has changed nothing."""
    model = make_model()
    posterior = fit(model, structure=structure)
    before = posterior.precision(), posterior.log_evidence(), posterior.n_data
    with pytest.raises(DataError):
        posterior.update([(X, Y), (X, Y * math.nan)])
    assert torch.equal(posterior.precision(), before[0])
    assert torch.equal(posterior.log_evidence(), before[1])
    assert posterior.n_data == before[2] == 6


def test_errors_of_the_data_source_pass_through() -> None:
    """What a loader raises is not Lapis's to reword."""

    def broken() -> Any:
        yield X, Y
        raise OSError("disk on fire")

    model = make_model()
    with untouched(model), pytest.raises(OSError, match="disk on fire"):
        fit(model, broken())


def test_every_error_of_the_core_says_expected_got_and_do() -> None:
    """Read from the source, so that errors nobody has met yet are held to it as well."""
    kinds = {name for name, value in vars(lapis).items() if isinstance(value, type) and issubclass(value, LapisError)}
    source = Path(lapis.__file__).parent
    rooms = ["batches.py", "network.py", "priors.py", "likelihoods", "predictions", "curvature", "posteriors"]
    files = [file for room in rooms for file in sorted(source.glob(f"{room}/**/*.py")) + sorted(source.glob(room))]
    silent, met = [], 0
    for file in files:
        if file.suffix != ".py":
            continue
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in kinds:
                met += 1
                missing = {"expected", "got", "do"} - {keyword.arg for keyword in node.keywords}
                if missing and "{error}" not in ast.unparse(node):  # an error passed on has its parts already
                    silent.append(f"{file.relative_to(source)}:{node.lineno} does not say {sorted(missing)}")
    assert met > 60
    assert silent == []


def test_every_kind_of_error_is_met_above() -> None:
    kinds = {case.kind for case in TABLE.values()}
    public = {value for value in vars(lapis).values() if isinstance(value, type) and issubclass(value, LapisError)}
    assert kinds == public - {LapisError, lapis.StructureError, lapis.RankError}  # ranks: test_distributed


@pytest.mark.parametrize("wrong", [lambda m, i, g: {}, lambda m, i, g: {"log_scale": g.sum(0)}], ids=["none", "shape"])
def test_a_registered_rule_of_another_form_is_refused(wrong: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.log_scale = nn.Parameter(torch.zeros(2, dtype=torch.float64))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.log_scale.exp()

    monkeypatch.setitem(MODULE_RULES, Scale, wrong)
    x = torch.ones(4, 2, dtype=torch.float64)
    with pytest.raises(ModelError, match=r"registered rule for Scale.*Expected.*Got.*Do"):
        lapis.laplace(Scale(), (x, x), "regression")
