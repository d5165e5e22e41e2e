"""Networks of the cases that use their weights in unusual ways: reused, tied, sliced, bypassed, made by others."""

from __future__ import annotations

from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from cases.networks import mlp


class Reused(nn.Module):
    """One linear layer called three times, as in a recurrence or a deep equilibrium."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(3, 3), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = torch.tanh(self.inner(x))
        return self.head(x)


class ReusedConvolution(nn.Module):
    """One convolution at two resolutions, so that its two uses have different numbers of positions."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.head = nn.Conv2d(2, 2, 3, padding=1), nn.Linear(2, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.avg_pool2d(torch.tanh(self.convolution(x)), 2)
        x = torch.tanh(self.convolution(x))
        return self.head(x.mean((2, 3)))


class TiedLinears(nn.Module):
    """Two linear layers with one weight and a bias each."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.head = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 2)
        self.b.weight = self.a.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.b(torch.tanh(self.a(x)))))


class TiedWithoutBias(nn.Module):
    """Two linear layers without bias that share their weight, at different numbers of positions."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.head = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False), nn.Linear(3, 2)
        self.b.weight = self.a.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.b(torch.tanh(self.a(x)).mean(1))))


class TiedLanguageModel(nn.Module):
    """An embedding whose matrix is also the output layer's."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.hidden = nn.Embedding(5, 3), nn.Linear(3, 3)
        self.output = nn.Linear(3, 5, bias=False)
        self.output.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.output(torch.tanh(self.hidden(self.embedding(x))))


class TransposedTie(nn.Module):
    """An autoencoder whose decoder is its encoder's transpose."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.shift = nn.Linear(3, 4), nn.Parameter(torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(torch.tanh(self.encoder(x)), self.encoder.weight.t(), self.shift)


class GatedTie(nn.Module):
    """A weight with a second, functional use that only counts where the first input is positive."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        second = torch.einsum("bi,oi->bo", x, self.inner.weight)
        return self.head(torch.tanh(self.inner(x)) + second * (x[:, :1] > 0))


class RawParameters(nn.Module):
    """Parameters without a module: a matrix, a shift, a scale, a scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix, self.shift = nn.Parameter(torch.randn(3, 4)), nn.Parameter(torch.randn(4))
        self.scale, self.temperature = nn.Parameter(torch.ones(4)), nn.Parameter(torch.tensor(1.0))
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(x @ self.matrix + self.shift) * self.scale) * self.temperature


class LargeRaw(nn.Module):
    """A raw matrix of 520 entries: too many for a dense block of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix, self.head = nn.Parameter(torch.randn(26, 20) / 5), nn.Linear(20, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(torch.einsum("bi,ij->bj", x, self.matrix)))


class Unused(nn.Module):
    """A layer that is never called, and one whose output is thrown away."""

    def __init__(self) -> None:
        super().__init__()
        self.never, self.dropped, self.head = nn.Linear(3, 2), nn.Linear(3, 2), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        self.dropped(x)
        return self.head(x)


class Bypassed(nn.Module):
    """A layer's weight used functionally, without its forward; another used both ways."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.head = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(F.linear(x, self.a.weight, self.a.bias))
        x = torch.tanh(self.b(x)) + F.linear(x, self.b.weight)
        return self.head(x)


class OverlappingSlices(nn.Module):
    """Parts of one matrix used apart, some rows in both."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix, self.head = nn.Parameter(torch.randn(4, 3)), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        parts = F.linear(x, self.matrix[:3]), F.linear(x.square(), self.matrix[1:])
        return self.head(torch.tanh(torch.cat(parts, 1)))


class HyperNetwork(nn.Module):
    """A layer that makes another layer's weights from a learned code."""

    def __init__(self) -> None:
        super().__init__()
        self.code, self.maker, self.head = nn.Parameter(torch.randn(2)), nn.Linear(2, 9), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(x @ self.maker(self.code).reshape(3, 3)))


class StackedEnsemble(nn.Module):
    """Three small networks in one parameter each for weights and biases, run by vmap."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(3, 2, 3)), nn.Parameter(torch.randn(3, 2))

    def forward(self, x: Tensor) -> Tensor:
        members = torch.func.vmap(F.linear, (None, 0, 0))(x, self.weight, self.bias)
        return torch.tanh(members).mean(0)


class IndexedTable(nn.Module):
    """A raw table indexed by tokens, beside one indexed by position for all examples alike."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.position = nn.Parameter(torch.randn(4, 3)), nn.Parameter(torch.randn(6, 3))
        self.head = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        steps = torch.arange(x.shape[1])
        return self.head(torch.tanh(self.table[x] + self.position[steps]).mean(1))


class ConstantOutput(nn.Module):
    """An intercept: the same learned output for every example."""

    def __init__(self) -> None:
        super().__init__()
        self.intercept = nn.Parameter(torch.randn(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.intercept.expand(len(x), 3)


class NoGradBackbone(nn.Module):
    """Layers below a no_grad block: trainable by their flags, without influence by their use."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone, self.head = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            x = torch.tanh(self.backbone(x))
        return self.head(x)


class Checkpointed(nn.Module):
    """Activations thrown away and computed again on the way back."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 4))
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(checkpoint(self.inner, x, use_reentrant=False)))


class NamedOutput(nn.Module):
    """Logits inside an object, as Hugging Face models return them."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp(3, 4, 3)()

    def forward(self, x: Tensor) -> SimpleNamespace:
        return SimpleNamespace(logits=self.inner(x), loss=None)


class Routed(nn.Module):
    """Two experts that each see only some of the examples (boolean indexing)."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.head = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        first = x[:, 0] > 0
        out = x.new_zeros(len(x), 3)
        out[first] = torch.tanh(self.a(x[first]))
        out[~first] = torch.sigmoid(self.b(x[~first]))
        return self.head(out)
