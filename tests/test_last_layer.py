"""The last layer is what the network uses last, whoever owns it."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lapis
from lapis.network import Network

WORDS, WIDTH = 7, 4


class Language(nn.Module):
    """A small language model whose head is its embedding, tied in one of several ways."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.embedding, self.mix, self.norm = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)
        if how == "module":
            self.head = nn.Linear(WIDTH, WORDS, bias=False)
            self.head.weight = self.embedding.weight
        if "bias" in how:
            self.offset = nn.Parameter(torch.randn(WORDS))
        if how == "own matrix":
            self.matrix = nn.Parameter(torch.randn(WIDTH, WORDS))

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.embedding(tokens)
        h = self.norm(h + self.mix(h.cumsum(1)).tanh())
        weight = self.embedding.weight
        outputs = {
            "module": lambda: self.head(h),
            "linear": lambda: F.linear(h, weight),
            "product": lambda: h @ weight.T,
            "linear with bias": lambda: F.linear(h, weight, self.offset),
            "product and bias": lambda: h @ weight.t() + self.offset,
            "own matrix": lambda: h @ self.matrix,
            "scaled": lambda: self.norm(h) * 2.0,
        }
        return outputs[self.how]()


HEADS = {
    "module": {"embedding.weight"},
    "linear": {"embedding.weight"},
    "product": {"embedding.weight"},
    "linear with bias": {"embedding.weight", "offset"},
    "product and bias": {"embedding.weight", "offset"},
    "own matrix": {"matrix"},
    "scaled": {"norm.weight", "norm.bias"},
}


@pytest.mark.parametrize("how", HEADS)
def test_the_weights_used_last_are_chosen(how: str) -> None:
    assert set(Network(Language(how), "last_layer", example=torch.zeros(2, 3, dtype=torch.long)).names) == HEADS[how]


def test_a_layer_that_uses_its_children_without_calling_them_is_chosen_whole() -> None:
    attention = nn.Sequential(nn.Linear(3, 4), nn.TransformerEncoderLayer(4, 2, 5))
    assert set(Network(attention, "last_layer", example=torch.zeros(2, 6, 3)).names) == {
        "1.norm2.weight",
        "1.norm2.bias",
    }

    class Attended(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.attention = nn.Linear(3, 4), nn.MultiheadAttention(4, 2, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            h = self.first(x)
            return self.attention(h, h, h)[0]

    found = Network(Attended(), "last_layer", example=torch.zeros(2, 6, 3)).names
    assert found == tuple(f"attention.{name}" for name, _ in nn.MultiheadAttention(4, 2).named_parameters())


@pytest.mark.parametrize("how", ["module", "product and bias"])
def test_a_tied_head_is_exact(how: str) -> None:
    """J^T H J over both uses of the weight, by autograd, example by example."""
    model = Language(how).double()
    tokens, targets = torch.randint(WORDS, (5, 3)), torch.randint(WORDS, (5, 3))
    posterior = lapis.laplace(
        model, (tokens, targets), "classification", weights="last_layer", structure="dense", curvature="exact"
    )
    parameters = {name: dict(model.named_parameters())[name].detach() for name in posterior.network.names}
    expected = torch.eye(posterior.n_weights, dtype=torch.float64)
    for row in tokens:
        outputs = torch.func.functional_call(model, parameters, (row[None],))[0]
        jacobian = torch.autograd.functional.jacobian(
            lambda vector, row=row: torch.func.functional_call(  # type: ignore[misc]
                model, posterior.network.unflatten(vector), (row[None],)
            )[0],
            posterior.mean,
        )
        p = outputs.softmax(-1)
        hessian = torch.diag_embed(p) - p[:, :, None] * p[:, None]
        expected += torch.einsum("tcp,tcd,tdq->pq", jacobian, hessian, jacobian)
    torch.testing.assert_close(posterior.precision(), expected)
