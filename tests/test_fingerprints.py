"""Fingerprints read every number: of the data of a fit, and of the network's weights and buffers."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import lapis
from lapis.batches import digest
from lapis.hashing import FOLDS, GROUPS, PART, SMALL, flat_bytes, hash_rows, hash_tensors, mix

F64 = torch.float64


def data(n: int = 30, features: int = 100, seed: int = 0) -> tuple[Tensor, Tensor]:
    source = torch.Generator().manual_seed(seed)
    return torch.randn(n, features, generator=source, dtype=F64), torch.randn(n, 1, generator=source, dtype=F64)


@pytest.mark.parametrize("features", [1, 7, 2 * GROUPS, 2 * GROUPS + 1, 4 * GROUPS + 3, 785])
def test_a_change_of_any_one_number_changes_the_fingerprint(features: int) -> None:
    x, y = data(2, features)
    whole = digest(x, y)
    for column in range(features):
        for change in (x[1, column] + 1e-3, -x[1, column]):
            other = x.clone()
            other[1, column] = change
            assert digest(other, y) != whole


def test_two_changed_signs_never_cancel_in_short_rows() -> None:
    """The signs of every second number are the highest bits of words, which products alone would lose."""
    x, y = data(1, 20)
    found = {digest(x, y), digest(-x, y), digest(x * (-1) ** torch.arange(20), y)}
    for first in range(20):
        for second in range(first):
            other = x.clone()
            other[0, [first, second]] *= -1
            found.add(digest(other, y))
    assert len(found) == 3 + 20 * 19 // 2


@pytest.mark.parametrize("change", [lambda x: -x, lambda x: x.flip(1), lambda x: x.roll(1, 1), lambda x: 2 * x,
                                    lambda x: x.reshape(-1, 28, 28).mT.reshape(len(x), -1),
                                    lambda x: x.reshape(-1, 28, 28).flip(1).reshape(len(x), -1)])  # fmt: skip
def test_usual_changes_of_images_change_the_fingerprint(change: Any) -> None:
    x, y = data(4, 784)
    assert digest(change(x), y) != digest(x, y)


def test_hashes_of_random_rows_are_all_different_and_their_bits_are_even() -> None:
    """20,000 hashes of 64 bits: two alike by chance once in 10^11. Each bit is set 10,000 +- 71 times: 6 sigma."""
    rows = torch.randint(0, 4, (20_000, 400), generator=torch.Generator().manual_seed(0), dtype=torch.int32)
    hashes = mix(hash_rows([rows.float()]))
    assert len(np.unique(hashes)) == len(rows)
    bits = np.array([int((hashes >> np.uint64(shift) & np.uint64(1)).sum()) for shift in range(64)])
    assert abs(bits - 10_000).max() < 6 * 71


def test_whole_numbers_enter_exactly_and_their_type_does_not() -> None:
    y = torch.arange(5)
    assert digest(y[:, None], y) == digest(y[:, None].double(), y.int())
    large = y + 2**40
    assert digest(large[:, None], y) != digest(large[:, None] + (y == 2)[:, None], y)
    both = torch.cat([y, large])
    assert (digest(y[:, None], y) + digest(large[:, None], y)) % 2**64 == digest(both[:, None], torch.cat([y, y]))


@pytest.mark.parametrize("features", [2, 3, 400])
def test_numbers_at_any_place_in_memory_have_one_fingerprint(features: int) -> None:
    """Views that begin at an odd float32 number, or columns of a table, cannot be read as 64-bit words in place."""
    x, y = torch.randn(6, features), torch.randn(6)
    moved = torch.cat([torch.zeros(1), x.flatten()])[1:].view(6, features)
    column = torch.stack([y, y], 1)[:, 1]
    table = torch.cat([x, y[:, None]], 1)[:, :-1]
    assert digest(moved, column) == digest(table, y) == digest(x, y)
    weights = torch.cat([torch.zeros(1), torch.randn(SMALL)])
    assert hash_tensors([weights[1:]]) == hash_tensors([weights[1:].clone()])


def test_fingerprints_of_large_batches_are_those_of_their_parts() -> None:
    """Computed in parts, so that they take little memory."""
    x, y = data(3000, 200)
    assert digest(x, y) == sum(digest(x[i : i + 500], y[i : i + 500]) for i in range(0, 3000, 500)) % 2**64


def test_data_with_other_features_are_refused_wherever_data_come_again(tmp_path: Path) -> None:
    """75 of 100 features replaced, every fourth one kept."""
    x, y = data()
    other = torch.where(torch.arange(100) % 4 == 0, x, data(seed=1)[0])
    model = nn.Linear(100, 1).double()
    dense = lapis.laplace(model, (x, y), "regression", structure="diagonal")
    with pytest.raises(lapis.DataError, match="not the data"):
        dense.at_tangent_mode((other, y))
    with pytest.raises(lapis.DataError, match="different data"):
        lapis.compare([dense, lapis.laplace(model, (other, y), "regression", structure="diagonal")])
    implicit = lapis.laplace(model, (x, y), "regression", structure="implicit")
    implicit.save(tmp_path / "implicit")
    with pytest.raises(lapis.DataError, match="not the data"):
        lapis.load(tmp_path / "implicit", model, data=(other, y))


def test_weights_hash_by_value_place_and_length() -> None:
    shapes = ((3,), (SMALL // 16, 4), (5, 7), (SMALL // 8, 3), (SMALL, 3))  # the last two are summed
    tensors = [torch.randn(shape, generator=torch.Generator().manual_seed(3)) for shape in shapes]
    whole = hash_tensors(tensors)
    assert hash_tensors([tensor.clone() for tensor in tensors]) == whole
    found = {whole, hash_tensors(tensors[::-1]), hash_tensors(tensors[:2])}
    for number in range(5):
        for place in (0, -1):
            changed = [tensor.clone() for tensor in tensors]
            changed[number].view(-1)[place] *= -1
            found.add(hash_tensors(changed))
    for step in (1, *FOLDS, 5 * GROUPS, sum(FOLDS), PART - 1, PART):  # in words of two numbers
        for number in (1, 3, 4):
            swapped = tensors[number].clone()
            flat = swapped.view(-1).view(torch.int64)
            flat[[0, step]] = flat[[step, 0]]
            found.add(hash_tensors([*tensors[:number], swapped, *tensors[number + 1 :]]))
    assert len(found) == 34


@pytest.mark.parametrize("size", [40, SMALL // 2, SMALL])
def test_usual_changes_of_weights_change_their_hash(size: int) -> None:
    """Units exchanged, signs of a unit or of all, a row copied to another, zeros: all at once, not one number."""
    w = torch.randn(size // 8, 8, generator=torch.Generator().manual_seed(5))
    changes = [w, -w, w.flip(0), w.flip(1), w.roll(1, 0), w.roll(1, 1), 2 * w, 0 * w, w.mT.reshape(w.shape)]
    for i, j in ((0, 1), (0, len(w) - 1), (1, len(w) // 2)):
        changes += [w.clone(), w.clone(), w.clone()]
        changes[-3][[i, j]] = w[[j, i]]
        changes[-2][[i, j]] *= -1
        changes[-1][i] = w[j]
    assert len({hash_tensors([change]) for change in changes}) == len(changes)


@pytest.mark.parametrize("which", ["chosen", "frozen", "buffer"])
def test_writes_through_data_are_noticed(which: str) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)).double().eval()
    model[0].requires_grad_(False)
    x, y = data(10, 3)
    posterior = lapis.laplace(model, (x, y), "regression")
    tensor = {"chosen": model[2].weight, "frozen": model[0].weight, "buffer": model[1].running_mean}[which]
    assert isinstance(tensor, Tensor)
    before = posterior.predict(x).mean
    tensor.data[0] += 1e-9
    for use in (lambda: posterior.predict(x), posterior.tune):  # tuning looks at predictions too
        with pytest.raises(lapis.ModelError, match="has changed since the fit"):
            use()
    tensor.data[0] -= 1e-9
    tensor.data.copy_(tensor.data)
    if which == "buffer":  # zeros come back exactly
        assert torch.equal(posterior.predict(x).mean, before)


def test_a_fingerprint_costs_little_beside_a_forward_pass() -> None:
    """About 2 % of a small network's forward and backward pass (docs/reliability.md); 30 % for a busy machine."""
    x, y = torch.randn(4000, 784), torch.randint(10, (4000,))
    model = nn.Sequential(nn.Linear(784, 100), nn.ReLU(), nn.Linear(100, 10))

    def seconds(work: Any) -> float:
        taken = []
        for _ in range(5):
            start = time.perf_counter()
            work()
            taken.append(time.perf_counter() - start)
        return min(taken)

    epoch = seconds(lambda: nn.functional.cross_entropy(model(x), y).backward())
    assert seconds(lambda: digest(x, y)) < 0.3 * epoch


@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_weights_of_any_strides_have_fingerprints_and_files(tmp_path: Path, dtype: torch.dtype) -> None:
    x, y = (part.to(dtype) for part in data(features=3))
    y = y.expand(-1, 2)
    plain, strided = nn.Linear(3, 2).to(dtype), nn.Linear(3, 2).to(dtype)
    for mine, other in zip(strided.parameters(), plain.parameters(), strict=True):
        apart = torch.empty(*other.shape, 4, dtype=dtype)[..., 0]
        mine.data = apart.copy_(other.data)
    found, expected = (lapis.laplace(each, (x, y), "regression") for each in (strided, plain))
    assert found.network.fingerprint() == expected.network.fingerprint()
    found.save(tmp_path / "strided")
    torch.testing.assert_close(lapis.load(tmp_path / "strided", strided).predict(x).mean, expected.predict(x).mean)


def test_a_single_number_of_any_stride_has_bytes() -> None:
    single = torch.arange(8, dtype=F64).reshape(2, 4)[:1, 2:3].T[0]
    assert single.stride() != (1,)
    assert torch.equal(flat_bytes(single), torch.tensor([2.0], dtype=F64).view(torch.uint8))
    assert hash_tensors([single]) == hash_tensors([torch.tensor([2.0], dtype=F64)])
