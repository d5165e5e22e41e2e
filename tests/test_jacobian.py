"""Products with the Jacobian and the GGN against explicit matrices."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from cases import CASES, F64
from lapis.batches import Batch, batches
from lapis.curvature.products.differentiation import (
    FOR_ONE,
    FOR_SEVERAL,
    UNABLE,
    Pass,
    differentiable,
    proven,
    unpack_dual,
)
from lapis.curvature.products.jacobian import LARGE_PARTS, Jacobian
from lapis.errors import DataError, OptionError
from lapis.likelihoods import Likelihood
from lapis.network import Network
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
        assert kept.keeps
        check(kept, likelihood, name, count)
        check(Jacobian(network, likelihood.canonical, held(x, y), kept_bytes=0), likelihood, name, count)
        for way in FOR_SEVERAL if count > 1 else FOR_ONE:
            forced = Jacobian(network, likelihood.canonical, held(x, y), way=way)
            if able(forced, way, count):
                check(forced, likelihood, name, count)
            else:
                assert way != "rows"


def able(jacobian: Jacobian, way: str, count: int) -> bool:
    """What the library itself finds out before it trusts a way, on every batch."""
    v = torch.randn(count, jacobian.size, generator=torch.Generator().manual_seed(2), dtype=F64)
    try:
        with jacobian.network.prepared(), differentiable():
            passes = [Pass(jacobian.network, jacobian.canonical, batch.inputs) for batch in jacobian.batches]
            return all(proven(examples, way, v) for examples in passes)
    except UNABLE:
        return False


def problem(**options: Any) -> tuple[Jacobian, Likelihood, list[Tensor]]:
    model, x, y, spec = case_data("mlp_gaussian")
    likelihood = spec.build()
    jacobian = Jacobian(Network(model), likelihood.canonical, held(x, y), **options)
    return jacobian, likelihood, targets_of(jacobian, likelihood)


def test_parts_of_the_data_add_up() -> None:
    for kept in (0, 2**20):
        jacobian, likelihood, targets = problem(kept_bytes=kept)
        v = torch.randn(3, jacobian.size, generator=torch.Generator().manual_seed(0), dtype=F64)
        parts = [jacobian.at(i).ggn(v, likelihood, [targets[i]]) for i in range(len(targets))]
        assert len(parts) > 1
        torch.testing.assert_close(torch.stack(parts).sum(0), jacobian.ggn(v, likelihood, targets))


def test_a_small_memory_changes_nothing() -> None:
    """One byte: one example and one vector at a time."""
    (tight, likelihood, targets), (wide, _, _) = problem(memory_budget=1), problem(kept_bytes=0)
    v = torch.randn(3, wide.size, generator=torch.Generator().manual_seed(0), dtype=F64)
    torch.testing.assert_close(tight.ggn(v, likelihood, targets), wide.ggn(v, likelihood, targets))
    assert not tight.keeps
    assert tight._examples(1, 8) == 1
    for one, two in zip(tight.forward(v), wide.forward(v), strict=True):
        torch.testing.assert_close(one, two)


def test_large_graphs_are_worked_on_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the tangents' graph lies beside the network's, a third of the examples at once: the same products."""
    jacobian, likelihood, targets = problem(way="one_pass")
    v = torch.randn(1, jacobian.size, generator=torch.Generator().manual_seed(0), dtype=F64)
    whole, ahead = jacobian.ggn(v, likelihood, targets), jacobian.forward(v)
    count = len(jacobian.batches[0])
    assert jacobian._examples(1, count) == count
    monkeypatch.setattr("lapis.curvature.products.jacobian.LARGE_BYTES", 0)
    assert jacobian._examples(1, count) == -(-count // LARGE_PARTS) < count
    torch.testing.assert_close(jacobian.ggn(v, likelihood, targets), whole)
    for one, two in zip(jacobian.forward(v), ahead, strict=True):
        torch.testing.assert_close(one, two)


def test_no_graph_lies_beside_the_tangents_of_several_vectors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once a way is known and proven, J v comes first, and then the run that makes the graph."""
    jacobian, likelihood, targets = problem(kept_bytes=0)
    jacobian._known.way[True] = "batched"
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


@pytest.mark.parametrize("kind", ["weight", "bias"])
@pytest.mark.parametrize("way", ["one_pass", "forward"])
def test_dual_numbers_where_only_weights_or_biases_are_chosen(kind: str, way: str) -> None:
    for name in ("mlp_gaussian", "conv2d_strided_padded"):
        model, x, y, spec = case_data(name)
        canonical, names = spec.build().canonical, list(dict(model.named_parameters()))
        chosen = [n for n in names if n.endswith(kind)]
        part = Jacobian(Network(model, chosen), canonical, held(x, y), way=way)
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
    """The proof refuses a way whose tangents, or whose gradients, are wrong for one vector of several."""
    jacobian, _, _ = problem()
    v = torch.randn(3, jacobian.size, generator=torch.Generator().manual_seed(0), dtype=F64)

    class WrongAhead(Pass):
        def push(self, vectors: Tensor, way: str, *, tracked: bool = False) -> Tensor:
            found = super().push(vectors, way, tracked=tracked)
            return torch.cat([found[:1], found[:1], found[2:]])

    class WrongBack(Pass):
        def pull(self, seeds: Tensor, way: str) -> Tensor:
            found = super().pull(seeds, way)
            return found.roll(1, 0) if way == "batched_both" else found

    with jacobian.network.prepared(), differentiable():
        for kind, good in ((Pass, True), (WrongAhead, False), (WrongBack, False)):
            examples = kind(jacobian.network, jacobian.canonical, jacobian.batches[0].inputs)
            assert proven(examples, "batched_both", v) == good


def test_a_block_of_another_form_is_refused() -> None:
    jacobian, likelihood, targets = problem()
    for vectors in (torch.zeros(jacobian.size), torch.zeros(2, jacobian.size + 1), torch.zeros(0, jacobian.size)):
        with pytest.raises(DataError, match="do not fit the weights"):
            jacobian.ggn(vectors, likelihood, targets)
    with pytest.raises(OptionError, match="Unknown way"):
        problem(way="sideways")


def test_the_way_is_remembered_for_parts() -> None:
    jacobian, likelihood, targets = problem(kept_bytes=0)
    v = torch.ones(1, jacobian.size, dtype=F64)
    jacobian.at(0).ggn(v, likelihood, targets[:1])
    assert jacobian.way(1) in FOR_ONE
