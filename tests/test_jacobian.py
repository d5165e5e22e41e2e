"""Products with the Jacobian and the GGN against explicit matrices."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from cases import CASES, F64
from lapis.batches import Batch, batches
from lapis.curvature.backward.per_example import PerExample
from lapis.curvature.products.differentiation import LeanDuals, Pass, agrees_with_backward, differentiable, unpack_dual
from lapis.curvature.products.ggn import ImplicitCurvature
from lapis.curvature.products.jacobian import Jacobian, shortcut_name
from lapis.curvature.products.modes import (
    BATCHED_MODES,
    LARGE_GRAPH_BYTES,
    MODES_BY_MEMORY,
    ONE_VECTOR_MODES,
    SEVERAL_VECTORS_MODES,
    SMALL_GRAPH_BYTES,
    SPLIT_PARTS,
    default_mode,
)
from lapis.errors import DataError, OptionError
from lapis.likelihoods import Likelihood
from lapis.network import Network
from lapis.proofs import Proofs
from reference import case_data, case_ggn, case_jacobians
from untouched import untouched


def held(x: object, y: Tensor, size: int = 4) -> list[Batch]:
    return list(batches((x, y), dtype=F64, device=torch.device("cpu"), batch_size=size)[0])


pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")


def targets_of(jacobian: Jacobian, likelihood: Likelihood) -> list[Tensor]:
    return [
        likelihood.targets(batch.targets, f, shape)
        for batch, f, shape in zip(jacobian.batches, jacobian.outputs, jacobian.shapes, strict=True)
    ]


def check(jacobian: Jacobian, likelihood: Likelihood, name: str, count: int) -> None:
    explicit = torch.cat(case_jacobians(name))
    generator = torch.Generator().manual_seed(1)
    v = torch.randn(count, jacobian.size, generator=generator, dtype=F64)
    u = [torch.randn(count, *f.shape, generator=generator, dtype=F64) for f in jacobian.outputs]
    flat = torch.cat([part.flatten(1) for part in u], 1)
    pairs = [
        (torch.cat([part.flatten(1) for part in jacobian.forward(v)], 1), v @ explicit.T),
        (jacobian.backward(u), flat @ explicit),
        (jacobian.ggn(v, likelihood, targets_of(jacobian, likelihood)), v @ case_ggn(name)),
    ]
    for found, exact in pairs:
        assert not found.requires_grad
        assert float((found - exact.detach()).abs().max()) <= 1e-10 * max(1.0, float(exact.abs().max()))


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("name", list(CASES))
def test_products_are_those_of_the_explicit_jacobian(name: str, count: int) -> None:
    model, x, y, spec = case_data(name)
    likelihood, network = spec.build(), Network(model)
    with untouched(model):
        kept = Jacobian(network, likelihood.canonical, held(x, y))
        assert kept.keeps_rows
        check(kept, likelihood, name, count)
        check(Jacobian(network, likelihood.canonical, held(x, y), kept_bytes=0), likelihood, name, count)
        for mode in SEVERAL_VECTORS_MODES if count > 1 else ONE_VECTOR_MODES:
            forced = Jacobian(network, likelihood.canonical, held(x, y), mode=mode)
            try:
                check(forced, likelihood, name, count)
            except OptionError:  # an operator has no such derivative, or a wrong one, and that is said
                assert mode != "rows"
                assert name not in ("mlp_gaussian", "conv2d_strided_padded", "self_attention")


def problem(**options: Any) -> tuple[Jacobian, Likelihood, list[Tensor]]:
    model, x, y, spec = case_data("mlp_gaussian")
    likelihood = spec.build()
    jacobian = Jacobian(Network(model), likelihood.canonical, held(x, y), **options)
    return jacobian, likelihood, targets_of(jacobian, likelihood)


def test_parts_of_the_data_add_up() -> None:
    for kept in (0, 2**20):
        jacobian, likelihood, targets = problem(kept_bytes=kept)
        v = torch.randn(3, jacobian.size, generator=torch.Generator().manual_seed(0), dtype=F64)
        parts = [jacobian.of_batches(i).ggn(v, likelihood, [targets[i]]) for i in range(len(targets))]
        assert len(parts) > 1
        torch.testing.assert_close(torch.stack(parts).sum(0), jacobian.ggn(v, likelihood, targets))


def test_a_small_memory_changes_nothing() -> None:
    """One byte: one example and one vector at a time."""
    (tight, likelihood, targets), (wide, _, _) = problem(memory_budget=1), problem(kept_bytes=0)
    v = torch.randn(3, wide.size, generator=torch.Generator().manual_seed(0), dtype=F64)
    torch.testing.assert_close(tight.ggn(v, likelihood, targets), wide.ggn(v, likelihood, targets))
    assert not tight.keeps_rows
    assert tight._examples(1, 8) == 1
    for one, two in zip(tight.forward(v), wide.forward(v), strict=True):
        torch.testing.assert_close(one, two)


def test_large_graphs_are_worked_on_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the tangents' graph lies beside the network's, a third of the examples at once: the same products."""
    jacobian, likelihood, targets = problem(mode="one_pass")
    v = torch.randn(1, jacobian.size, generator=torch.Generator().manual_seed(0), dtype=F64)
    whole, ahead = jacobian.ggn(v, likelihood, targets), jacobian.forward(v)
    count = len(jacobian.batches[0])
    assert jacobian._examples(1, count) == count
    monkeypatch.setattr("lapis.curvature.products.modes.SPLIT_GRAPH_BYTES", 0)
    assert jacobian._examples(1, count) == -(-count // SPLIT_PARTS) < count
    torch.testing.assert_close(jacobian.ggn(v, likelihood, targets), whole)
    for one, two in zip(jacobian.forward(v), ahead, strict=True):
        torch.testing.assert_close(one, two)


@pytest.mark.parametrize("mode", sorted(BATCHED_MODES))
def test_wide_tangents_are_worked_on_in_parts(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest layer's tangents of all vectors stay within a limit: the same products."""
    jacobian, likelihood, targets = problem(mode=mode)
    v = torch.randn(3, jacobian.size, generator=torch.Generator().manual_seed(0), dtype=F64)
    whole, ahead = jacobian.ggn(v, likelihood, targets), jacobian.forward(v)
    count, largest = len(jacobian.batches[0]), jacobian._graph_bytes()[1]
    assert jacobian._examples(3, count) == count
    monkeypatch.setattr("lapis.curvature.products.modes.TANGENT_BYTES", 3 * largest * 2)
    assert jacobian._examples(3, count) == 2 < count
    assert jacobian._examples(1, count) == count
    torch.testing.assert_close(jacobian.ggn(v, likelihood, targets), whole)
    for one, two in zip(jacobian.forward(v), ahead, strict=True):
        torch.testing.assert_close(one, two)


def test_no_graph_lies_beside_the_tangents_of_several_vectors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once a mode is proven, J v comes first, and then the run that makes the graph."""
    jacobian, likelihood, targets = problem(mode="batched")
    v = torch.randn(3, jacobian.size, generator=torch.Generator().manual_seed(0), dtype=F64)
    jacobian.ggn(v, likelihood, targets)
    free: list[bool] = []
    push = Pass.push

    def watched(examples: Pass, *args: Any, **options: Any) -> Tensor:
        free.append(examples._f is None)
        return push(examples, *args, **options)

    monkeypatch.setattr(Pass, "push", watched)
    jacobian.ggn(v, likelihood, targets)
    assert free == [True] * len(targets)


def test_chosen_weights_are_the_columns() -> None:
    model, x, y, spec = case_data("mlp_gaussian")
    canonical = spec.build().canonical
    last = list(dict(model.named_parameters()))[-1]
    part = Jacobian(Network(model, [last]), canonical, held(x, y), kept_bytes=0)
    whole = Jacobian(Network(model), canonical, held(x, y), kept_bytes=0)
    v = torch.randn(2, part.size, generator=torch.Generator().manual_seed(0), dtype=F64)
    padded = torch.cat([v.new_zeros(2, whole.size - part.size), v], 1)
    for one, two in zip(part.forward(v), whole.forward(padded), strict=True):
        torch.testing.assert_close(one, two)


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("mode", [None, *MODES_BY_MEMORY])
def test_single_weights_are_the_columns_in_every_mode(mode: str | None, count: int) -> None:
    if mode in BATCHED_MODES and count == 1:
        return
    model, x, y, spec = case_data("mlp_gaussian")
    canonical = spec.build().canonical
    size = Network(model).size
    mask = torch.rand(size, generator=torch.Generator().manual_seed(3)) < 0.5
    part = Jacobian(Network(model, mask), canonical, held(x, y), kept_bytes=0, mode=mode)
    whole = Jacobian(Network(model), canonical, held(x, y), kept_bytes=0)
    v = torch.randn(count, part.size, generator=torch.Generator().manual_seed(0), dtype=F64)
    padded = v.new_zeros(count, size)
    padded[:, mask] = v
    pushed = part.forward(v)
    for one, two in zip(pushed, whole.forward(padded), strict=True):
        torch.testing.assert_close(one, two)
    torch.testing.assert_close(part.backward(pushed), whole.backward(pushed)[:, mask])


@pytest.mark.parametrize("kind", ["weight", "bias"])
@pytest.mark.parametrize("mode", ["one_pass", "forward"])
def test_dual_numbers_where_only_weights_or_biases_are_chosen(kind: str, mode: str) -> None:
    for name in ("mlp_gaussian", "conv2d_strided_padded"):
        model, x, y, spec = case_data(name)
        canonical, names = spec.build().canonical, list(dict(model.named_parameters()))
        chosen = [n for n in names if n.endswith(kind)]
        part = Jacobian(Network(model, chosen), canonical, held(x, y), mode=mode)
        columns = torch.cat([torch.full((p.numel(),), n in chosen) for n, p in model.named_parameters()])
        v = torch.randn(1, part.size, generator=torch.Generator().manual_seed(0), dtype=F64)
        exact = v @ torch.cat(case_jacobians(name))[:, columns].detach().T
        torch.testing.assert_close(torch.cat([u.flatten(1) for u in part.forward(v)], 1), exact)


def test_dual_numbers_copy_no_vector_and_leave_no_tangents() -> None:
    """Tangents of weights lie in the vector's memory, and the graph holds as many tensors as a plain run's."""
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2)).double()
    network, x = Network(model), torch.randn(5, 3, dtype=F64)
    vector = torch.randn(1, network.size, dtype=F64)
    starts: list[int] = []
    saved: list[Tensor] = []

    def start(layer: torch.nn.Module, _: Any) -> None:
        starts.append(unpack_dual(layer.weight).tangent.data_ptr())

    def note(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        model(x)
        plain = len(saved)
        for layer in (model[0], model[2]):
            layer.register_forward_pre_hook(start)
        pushed = Pass(network, lambda f: f[:, None], x).push(vector, "one_pass", tracked=True)
    assert starts == [vector.data_ptr() + 8 * network.offsets[name] for name in ("0.weight", "2.weight")]
    assert not pushed.requires_grad
    held_by_plain, held_by_dual = ({t.data_ptr() for t in part} for part in (saved[:plain], saved[plain:]))
    assert len(held_by_dual) == len(held_by_plain) > 0


def test_a_wrong_batching_rule_is_found_out() -> None:
    """The proof refuses a mode whose tangents, or whose gradients, are wrong for one vector of several."""
    jacobian, _, _ = problem()
    v = torch.randn(3, jacobian.size, generator=torch.Generator().manual_seed(0), dtype=F64)

    class WrongAhead(Pass):
        def push(self, vectors: Tensor, mode: str, *, tracked: bool = False) -> Tensor:
            found = super().push(vectors, mode, tracked=tracked)
            return torch.cat([found[:1], found[:1], found[2:]])

    class WrongBack(Pass):
        def pull(self, seeds: Tensor, mode: str) -> Tensor:
            found = super().pull(seeds, mode)
            return found.roll(1, 0) if mode == "batched_both" else found

    with jacobian.network.prepared(), differentiable():
        for kind, good in ((Pass, True), (WrongAhead, False), (WrongBack, False)):
            examples = kind(jacobian.network, jacobian.canonical, jacobian.batches[0].inputs)
            assert agrees_with_backward(examples, "batched_both", v) == good


def test_a_block_of_another_form_is_refused() -> None:
    jacobian, likelihood, targets = problem()
    for vectors in (torch.zeros(jacobian.size), torch.zeros(2, jacobian.size + 1), torch.zeros(0, jacobian.size)):
        with pytest.raises(DataError, match="do not fit the weights"):
            jacobian.ggn(vectors, likelihood, targets)
    with pytest.raises(OptionError, match="Unknown mode"):
        problem(mode="sideways")


def test_the_default_mode_follows_from_the_network_alone() -> None:
    convolution, linear = Network(torch.nn.Conv2d(1, 1, 3)), Network(torch.nn.Linear(2, 1))
    for network in (convolution, linear):
        assert default_mode(network, False, LARGE_GRAPH_BYTES + 1) == "one_pass"
        assert default_mode(network, True, LARGE_GRAPH_BYTES + 1) == "forward"
        assert default_mode(network, True, SMALL_GRAPH_BYTES + 1) == "batched"
    assert default_mode(convolution, True, SMALL_GRAPH_BYTES) == "batched"
    assert default_mode(linear, True, SMALL_GRAPH_BYTES) == "batched_double"


@pytest.mark.parametrize("name", ["mlp_gaussian", "conv2d_strided_padded"])
@pytest.mark.parametrize("count", [1, 3])
def test_the_clock_decides_nothing(name: str, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Products of equal networks are bitwise equal, also when repeated, whatever time it is."""
    model, x, y, spec = case_data(name)
    found, modes = [], set()
    for seed in range(3):
        clock = random.Random(seed)
        monkeypatch.setattr(time, "perf_counter", lambda clock=clock: clock.random())
        likelihood = spec.build()
        jacobian = Jacobian(Network(model), likelihood.canonical, held(x, y), kept_bytes=0)
        v = torch.randn(count, jacobian.size, generator=torch.Generator().manual_seed(0), dtype=F64)
        found += [jacobian.ggn(v, likelihood, targets_of(jacobian, likelihood)) for _ in range(2)]
        modes.add(jacobian.mode_for(count))
    assert len(modes) == 1
    assert all(torch.equal(found[0], other) for other in found)


@pytest.mark.parametrize("count", [1, 3])
def test_the_fastest_mode_is_timed_where_asked_for(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock stands still but in one mode: of those that take no time, the one with the least memory is chosen."""
    model, x, y, spec = case_data("mlp_gaussian")
    likelihood, now = spec.build(), 0.0
    slow, expected = ("one_pass", "double") if count == 1 else ("forward", "double")
    push = Pass.push

    def delayed(examples: Pass, vectors: Tensor, mode: str, **options: Any) -> Tensor:
        nonlocal now
        now += mode == slow
        return push(examples, vectors, mode, **options)

    monkeypatch.setattr(Pass, "push", delayed)
    monkeypatch.setattr(time, "perf_counter", lambda: now)
    jacobian = Jacobian(Network(model), likelihood.canonical, held(x, y), kept_bytes=0, mode="fastest")
    check(jacobian, likelihood, "mlp_gaussian", count)
    assert jacobian.mode_for(count) == expected
    assert jacobian.of_batches(0).mode_for(count) == expected


def test_the_mode_is_kept_by_parts_and_other_batches() -> None:
    model, x, y, spec = case_data("mlp_gaussian")
    curvature = ImplicitCurvature(Network(model), spec.build(), held(x, y), "", 2**30, mode="double")
    v = torch.randn(2, curvature.network.size, generator=torch.Generator().manual_seed(0), dtype=F64)
    assert curvature.part(0).jacobian.mode == "double"
    assert curvature.rebatched(3, torch.Generator().manual_seed(0)).jacobian.mode == "double"
    other = curvature.with_mode("forward")
    assert (curvature.jacobian.mode, other.jacobian.mode) == ("double", "forward")
    torch.testing.assert_close(other.product(v), curvature.product(v))


def percent_off(found: Any) -> Any:
    """Tensors, pairs of dual numbers included, that are wrong by a percent."""
    if isinstance(found, dict):
        return {name: 1.01 * part for name, part in found.items()}
    if isinstance(found, Tensor):
        return 1.01 * found
    return [None if part is None else 1.01 * part for part in found]


def broken(whole: Callable[..., Any], when: Callable[[dict[str, Any]], bool] = lambda _: True) -> Callable[..., Any]:
    def wrong(*args: Any, **options: Any) -> Any:
        found = whole(*args, **options)
        return percent_off(found) if when(options) else found

    return wrong


BREAKABLE = {
    "one_pass": ("_dual", "_bilinear"),
    "forward": ("_dual", "_bilinear"),
    "double": ("_double",),
    "batched": ("_batched",),
    "batched_both": ("_batched", "_gradients"),
    "batched_double": ("_double", "_gradients"),
    "rows": ("_mapped",),
}
"""What each mode is made of, by the names of methods."""


@pytest.mark.parametrize(
    ("mode", "method", "kept"),
    [(mode, part, False) for mode, parts in BREAKABLE.items() for part in parts] + [("rows", "_mapped", True)],
)
def test_a_mode_that_is_wrong_by_a_percent_is_not_used(
    mode: str, method: str, kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each mode in turn is the only one left beside the rows of J, and is broken. Products are still exact.

    Seen red: with `Proofs.holds` (for rows `PerExample._holds`) always true the same products are wrong, which the end
    of this test asserts.
    """
    name = "mlp_gaussian"
    model, x, y, spec = case_data(name)
    likelihood = spec.build()
    owner: Any = {"_bilinear": LeanDuals, "_mapped": PerExample}.get(method, Pass)
    batched_only = (lambda options: options.get("batched", False)) if method == "_gradients" else (lambda _: True)
    monkeypatch.setattr(owner, method, broken(getattr(owner, method), batched_only))
    count = 1 if mode in ONE_VECTOR_MODES[:2] else 3

    def products_are_exact() -> None:
        network = Network(model)
        network.proofs.refused |= {shortcut_name(other) for other in MODES_BY_MEMORY if other not in (mode, "rows")}
        jacobian = Jacobian(network, likelihood.canonical, held(x, y), kept_bytes=2**24 if kept else 0)
        assert mode == jacobian.mode_for(count)
        check(jacobian, likelihood, name, count)
        assert mode == "rows" or jacobian.mode_for(count) == "rows"

    products_are_exact()
    monkeypatch.setattr(Proofs, "holds", lambda *_: True)
    monkeypatch.setattr(PerExample, "_holds", lambda *_: True)
    with pytest.raises(AssertionError):
        products_are_exact()


@pytest.mark.parametrize("mode", SEVERAL_VECTORS_MODES[:-1])
def test_the_proof_sees_a_percent_in_single_precision(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also over many outputs, where u . J v for a u without relation to J v would be a sum of terms that cancel."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(20, 30), torch.nn.Tanh(), torch.nn.Linear(30, 10))
    network, x = Network(model), torch.randn(200, 20)
    vectors = torch.randn(3, network.size)
    for scale in (1.0, 1.01):
        push = Pass.push
        with monkeypatch.context() as patch, network.prepared(), differentiable():
            patch.setattr(Pass, "push", lambda *args, push=push, scale=scale, **how: scale * push(*args, **how))
            examples = Pass(network, lambda f: f[:, None], x)
            assert agrees_with_backward(examples, mode, vectors) == (scale == 1.0)


def test_a_forced_mode_that_is_wrong_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Pass, "_double", broken(Pass._double))
    jacobian, likelihood, targets = problem(mode="double")
    with pytest.raises(OptionError, match="cannot be multiplied in mode 'double'"):
        jacobian.ggn(torch.ones(1, jacobian.size, dtype=F64), likelihood, targets)
