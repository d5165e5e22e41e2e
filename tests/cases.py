"""The table of cases that every curvature test runs over: tiny networks x likelihoods, seeded.

A `Case` holds recipes only; nothing is built until `make_model` or `make_batch` is called. Weights and data
depend on the case's name alone, so adding a case changes no other. Everything is drawn in float64 and then
rounded, so that the float32 variant of a case is the same problem.

`Case.layers` names the matrix layers, those with a Kronecker block: a module; an inner tuple of modules that
share one weight; or a parameter used as a matrix without its module, by `F.linear` ("linear:a.weight", with
"+a.bias" if that is added) or as the right factor of a product ("matmul:matrix"). Every other parameter has a
dense (or, above 512 entries, a diagonal) block.
"""

from __future__ import annotations

import itertools
import math
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import checkpoint

F64 = torch.float64


# --------------------------------------------------------------------------------------------------------
# Likelihoods: the library's object, and the same density written naively with torch.distributions.


@dataclass(frozen=True)
class LikelihoodSpec:
    """A likelihood of the library (`build`) beside its naive definition.

    nll(f (T, C), y) -> 0-d: the negative log-likelihood of one example, y (T,) classes or (T, D) values.
    targets(generator, f) -> y: targets in the user's layout for raw outputs f.
    fisher(f (T, C)) -> (T C, T C): where the curvature in f is a Fisher matrix in closed form, not a Hessian.
    """

    name: str
    build: Callable[[], Any]
    nll: Callable[[Tensor, Tensor], Tensor]
    targets: Callable[[torch.Generator, Tensor], Tensor]
    fisher: Callable[[Tensor], Tensor] | None = None
    channels: str = "last"
    samples: bool = True


def gaussian(noise: float | list[float] = 0.7, *, flat: bool = False, channels: str = "last") -> LikelihoodSpec:
    sigma = torch.tensor(noise, dtype=F64)

    def build() -> Any:
        import lapis

        return lapis.Gaussian(noise=noise if isinstance(noise, float) else sigma, channels=channels)

    def targets(generator: torch.Generator, f: Tensor) -> Tensor:
        y = f + torch.randn(f.shape, generator=generator, dtype=F64)
        return y.flatten() if flat else y

    def nll(f: Tensor, y: Tensor) -> Tensor:
        return -torch.distributions.Normal(f, sigma.expand_as(f)).log_prob(y).sum()

    name = "gaussian" if isinstance(noise, float) else "gaussian-per-output"
    return LikelihoodSpec(name, build, nll, targets, channels=channels)


def categorical(*, soft: bool = False, ignore: bool = False, channels: str = "last") -> LikelihoodSpec:
    def build() -> Any:
        import lapis

        return lapis.Categorical(channels=channels)

    def targets(generator: torch.Generator, f: Tensor) -> Tensor:
        last = f.movedim(1, -1) if channels == "first" else f
        noisy = last + torch.randn(last.shape, generator=generator, dtype=F64)
        if soft:
            y = noisy.softmax(-1)
            return y.movedim(-1, 1) if channels == "first" else y
        y = noisy.argmax(-1)
        if ignore:
            y[torch.rand(y.shape, generator=generator) < 0.3] = -100
        return y

    def nll(f: Tensor, y: Tensor) -> Tensor:
        if soft:
            return -(y * f.log_softmax(-1)).sum()
        seen = zip(f, y, strict=True)
        return sum((F.cross_entropy(row, label) for row, label in seen if label != -100), 0 * f.sum())

    name = "categorical" + "-soft" * soft + "-ignore" * ignore
    return LikelihoodSpec(name, build, nll, targets, channels=channels)


def bernoulli(*, flat: bool = False, channels: str = "last", dtype: torch.dtype = torch.bool) -> LikelihoodSpec:
    def build() -> Any:
        import lapis

        return lapis.Bernoulli(channels=channels)

    def targets(generator: torch.Generator, f: Tensor) -> Tensor:
        y = torch.bernoulli(f.sigmoid(), generator=generator).to(dtype)
        return y.flatten() if flat else y

    def nll(f: Tensor, y: Tensor) -> Tensor:
        return -torch.distributions.Bernoulli(logits=f).log_prob(y.to(f.dtype)).sum()

    return LikelihoodSpec("bernoulli", build, nll, targets, channels=channels)


def poisson(*, channels: str = "last") -> LikelihoodSpec:
    def build() -> Any:
        import lapis

        return lapis.Poisson(channels=channels)

    def targets(generator: torch.Generator, f: Tensor) -> Tensor:
        return torch.poisson(f.exp(), generator=generator).long()

    def nll(f: Tensor, y: Tensor) -> Tensor:
        return -torch.distributions.Poisson(f.exp()).log_prob(y.to(f.dtype)).sum()

    return LikelihoodSpec("poisson", build, nll, targets, channels=channels)


def heteroscedastic() -> LikelihoodSpec:
    def build() -> Any:
        import lapis

        return lapis.HeteroscedasticGaussian()

    def targets(generator: torch.Generator, f: Tensor) -> Tensor:
        mean, log_variance = f.chunk(2, -1)
        return mean + (log_variance / 2).exp() * torch.randn(mean.shape, generator=generator, dtype=F64)

    def nll(f: Tensor, y: Tensor) -> Tensor:
        mean, log_variance = f.chunk(2, -1)
        return -torch.distributions.Normal(mean, (log_variance / 2).exp()).log_prob(y).sum()

    def fisher(f: Tensor) -> Tensor:
        _, log_variance = f.chunk(2, -1)
        diagonal = torch.cat([(-log_variance).exp(), torch.full_like(log_variance, 0.5)], -1)
        return torch.diag(diagonal.flatten())

    return LikelihoodSpec("heteroscedastic", build, nll, targets, fisher)


def log_cosh(f: Tensor, y: Tensor) -> Tensor:
    """-log of the density sech(f - y) / pi for each row: convex, with heavier tails than a Gaussian."""
    z = f - y
    return (z + F.softplus(-2 * z) - math.log(2.0) + math.log(math.pi)).flatten(1).sum(1)


def custom() -> LikelihoodSpec:
    def build() -> Any:
        import lapis

        return lapis.Custom(log_cosh)

    def targets(generator: torch.Generator, f: Tensor) -> Tensor:
        return f + torch.randn(f.shape, generator=generator, dtype=F64)

    def nll(f: Tensor, y: Tensor) -> Tensor:
        return (torch.cosh(f - y) * math.pi).log().sum()

    return LikelihoodSpec("custom", build, nll, targets, samples=False)


# --------------------------------------------------------------------------------------------------------
# Cases


@dataclass(frozen=True)
class Case:
    """One network with one likelihood. `inputs(generator, n)` draws n examples.

    `data_dependent`: which layers an example passes depends on its values. Such a network has no Kronecker
    structure that is the same for all batches; that must be refused, not guessed.
    """

    name: str
    architecture: Callable[[], nn.Module]
    inputs: Callable[[torch.Generator, int], Any]
    likelihood: LikelihoodSpec
    layers: tuple[str | tuple[str, ...], ...] = ()
    n: int = 6
    data_dependent: bool = False

    def make_model(self, dtype: torch.dtype = F64) -> nn.Module:
        """The network with seeded weights, moved away from the special values (0 and 1) of norm layers."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self._seed())
            model = self.architecture().to(F64)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(0.2 * torch.randn_like(parameter))
                for module in model.modules():
                    if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.track_running_stats:
                        module.running_mean.normal_(std=0.3)
                        module.running_var.uniform_(0.5, 1.5)
        return model.to(dtype)

    def make_inputs(self, n: int, dtype: torch.dtype = F64, seed: int = 1) -> Any:
        """n examples, other ones for each seed."""
        generator = torch.Generator().manual_seed(self._seed() + seed)
        return to_dtype(self.inputs(generator, n), dtype)

    def make_batch(self, dtype: torch.dtype = F64) -> tuple[Any, Tensor]:
        """The whole data set (x, y) of the case in one batch."""
        x = self.make_inputs(self.n)
        with torch.no_grad():
            f = call(self.make_model().eval(), x)
        y = self.likelihood.targets(torch.Generator().manual_seed(self._seed() + 2), f)
        return to_dtype(x, dtype), to_dtype(y, dtype)

    def _seed(self) -> int:
        return zlib.crc32(self.name.encode())


def to_dtype(x: Any, dtype: torch.dtype) -> Any:
    return over(x, lambda t: t.to(dtype) if t.is_floating_point() else t)


def take(x: Any, index: Any) -> Any:
    """The examples at `index` of a tensor, tuple or dictionary."""
    return over(x, lambda t: t[index])


def over(x: Any, function: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(x, tuple):
        return tuple(function(t) for t in x)
    if isinstance(x, dict):
        return {key: function(t) for key, t in x.items()}
    return function(x)


def call(model: nn.Module, x: Any) -> Tensor:
    out = model(*x) if isinstance(x, tuple) else model(**x) if isinstance(x, dict) else model(x)
    return getattr(out, "logits", out)


def randn(*shape: int) -> Callable[[torch.Generator, int], Tensor]:
    return lambda generator, n: torch.randn(n, *shape, generator=generator, dtype=F64)


def tokens(length: int, vocabulary: int) -> Callable[[torch.Generator, int], Tensor]:
    return lambda generator, n: torch.randint(vocabulary, (n, length), generator=generator)


# --------------------------------------------------------------------------------------------------------
# Networks


class Apply(nn.Module):
    """A function as a module."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


class Residual(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)


class InPlace(nn.Module):
    """In-place operations straight on layer outputs, in each of their spellings."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = F.silu(self.a(x), inplace=True)
        x = self.b(x).tanh_()
        x = self.c(x)
        x *= 2.0
        x += 1.0
        return x


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


class FlattenedTokens(nn.Module):
    """(B, T, I) reshaped to rows before a linear layer: example by example, or position by position."""

    def __init__(self, position_major: bool) -> None:
        super().__init__()
        self.position_major = position_major
        self.inner, self.head = nn.Linear(2, 3), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        rows = (x.transpose(0, 1) if self.position_major else x).reshape(batch * length, width)
        rows = torch.tanh(self.inner(rows))
        shape = (length, batch, -1) if self.position_major else (batch, length, -1)
        return self.head(rows.reshape(shape).mean(0 if self.position_major else 1))


class Siamese(nn.Module):
    """Both inputs of a pair through one network, stacked along the batch axis."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        left, right = torch.tanh(self.inner(torch.cat([left, right]))).chunk(2)
        return self.head(left * right)


class Frames(nn.Module):
    """A convolution of every frame of (B, T, C, H, W), with frames folded into the batch axis."""

    def __init__(self, frame_major: bool) -> None:
        super().__init__()
        self.frame_major = frame_major
        self.convolution, self.head = nn.Conv2d(1, 2, 2), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        batch, length = x.shape[:2]
        lead = (length, batch) if self.frame_major else (batch, length)
        frames = (x.transpose(0, 1) if self.frame_major else x).flatten(0, 1)
        out = torch.tanh(self.convolution(frames)).unflatten(0, lead).mean((-1, -2))
        weights = torch.arange(1.0, length + 1, dtype=x.dtype)
        return self.head(torch.einsum("tbc,t->bc" if self.frame_major else "btc,t->bc", out, weights))


class Windows(nn.Module):
    """Attention inside windows of a sequence, with windows folded into the batch axis (as Swin does)."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out, self.head = nn.Linear(3, 9), nn.Linear(3, 3), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        windows = x.unflatten(1, (-1, 2)).flatten(0, 1)
        q, k, v = self.qkv(windows).chunk(3, -1)
        mixed = self.out(F.scaled_dot_product_attention(q, k, v)).unflatten(0, (len(x), -1)).flatten(1, 2)
        return self.head(torch.tanh(x + mixed).cumsum(1).mean(1))


class SqueezeExcitation(nn.Module):
    """Channels scaled by a network of their means."""

    def __init__(self) -> None:
        super().__init__()
        self.entry, self.exit = nn.Conv1d(1, 3, 2), nn.Linear(3, 2)
        self.gate = nn.Sequential(nn.Linear(3, 2), nn.ReLU(inplace=True), nn.Linear(2, 3), nn.Sigmoid())

    def forward(self, x: Tensor) -> Tensor:
        x = self.entry(x)
        return self.exit(torch.tanh(x * self.gate(x.mean(2))[..., None]).mean(2))


class FixupBlock(nn.Module):
    """A residual block without norm layers: scalar shifts and a scalar scale."""

    def __init__(self) -> None:
        super().__init__()
        self.shift1, self.shift2 = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(()))
        self.scale = nn.Parameter(torch.ones(1))
        self.conv, self.head = nn.Conv2d(2, 2, 3, padding=1, bias=False), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.scale * self.conv(x + self.shift1) + self.shift2
        return self.head(F.relu(x).mean((2, 3)))


class TransposedTie(nn.Module):
    """An autoencoder whose decoder is its encoder's transpose."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.shift = nn.Linear(3, 4), nn.Parameter(torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(torch.tanh(self.encoder(x)), self.encoder.weight.t(), self.shift)


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


class CellByHand(nn.Module):
    """A recurrence written out over a cell, from a learned initial state."""

    def __init__(self) -> None:
        super().__init__()
        self.initial, self.cell = nn.Parameter(torch.zeros(1, 3)), nn.GRUCell(2, 3)
        self.inner, self.head = nn.Linear(3, 3), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        state = self.initial.expand(len(x), -1)
        for step in x.unbind(1):
            state = self.cell(step, torch.tanh(self.inner(state)))
        return self.head(state)


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


class Attention(nn.Module):
    """Self-attention over (B, T, E), pooled; batch_first=False transposes inside. A mask may hide some."""

    def __init__(self, batch_first: bool = True, **options: Any) -> None:
        super().__init__()
        self.batch_first = batch_first
        self.attention = nn.MultiheadAttention(4, 2, batch_first=batch_first, **options)
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor, padded: Tensor | None = None) -> Tensor:
        if not self.batch_first:
            x = x.transpose(0, 1)
        out, _ = self.attention(x, x, x, key_padding_mask=padded)
        return self.head(torch.tanh(out).mean(1 if self.batch_first else 0))


class CrossAttention(nn.Module):
    """Attention from one sequence to another of another length; keys are the values."""

    def __init__(self, batch_first: bool = True) -> None:
        super().__init__()
        self.batch_first = batch_first
        self.attention = nn.MultiheadAttention(4, 2, batch_first=batch_first)
        self.head = nn.Linear(4, 2)

    def forward(self, target: Tensor, source: Tensor) -> Tensor:
        if not self.batch_first:
            target, source = target.transpose(0, 1), source.transpose(0, 1)
        out, _ = self.attention(target, source, source, need_weights=False)
        return self.head(torch.tanh(out).mean(1 if self.batch_first else 0))


class SeparateAttention(nn.Module):
    """Three different sequences, with a width each."""

    def __init__(self, kdim: int | None = None, vdim: int | None = None, add_bias_kv: bool = False) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, kdim=kdim, vdim=vdim, add_bias_kv=add_bias_kv, batch_first=True)
        self.head = nn.Linear(4, 2)

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        out, _ = self.attention(query, key, value)
        return self.head(torch.tanh(out).mean(1))


class Encoder(nn.Module):
    """torch's encoder layer (with its fused path in eval mode), pooled; optional mask of padded positions."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.encoder = nn.TransformerEncoderLayer(4, 2, 5, batch_first=True, **options)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor, padded: Tensor | None = None) -> Tensor:
        return self.head(self.encoder(x, src_key_padding_mask=padded).mean(1))


class Decoder(nn.Module):
    """torch's decoder layer, causal over the target, attending to a source."""

    def __init__(self) -> None:
        super().__init__()
        self.decoder = nn.TransformerDecoderLayer(4, 2, 3, batch_first=True)
        self.head = nn.Linear(4, 2)

    def forward(self, target: Tensor, source: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1], dtype=target.dtype)
        return self.head(self.decoder(target, source, tgt_mask=mask, tgt_is_causal=True))


class VisionTransformer(nn.Module):
    """Patches by a strided convolution, a raw class token, a raw positional parameter, one block."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv2d(1, 4, 2, stride=2)
        self.token, self.position = nn.Parameter(torch.randn(1, 1, 4)), nn.Parameter(torch.randn(1, 5, 4))
        self.norm, self.attention = nn.LayerNorm(4), nn.MultiheadAttention(4, 2, batch_first=True)
        self.mlp = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 5), nn.GELU(), nn.Linear(5, 4))
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.position
        normed = self.norm(x)
        x = x + self.attention(normed, normed, normed, need_weights=False)[0]
        return self.head((x + self.mlp(x))[:, 0])


class CausalLanguageModel(nn.Module):
    """A GPT block: fused query-key-value linear layer and torch's scaled dot-product attention.

    The positional embedding is looked up once for all examples (`unbatched`), or once for each.
    """

    def __init__(self, length: int, unbatched: bool) -> None:
        super().__init__()
        self.unbatched = unbatched
        self.token, self.position = nn.Embedding(5, 4), nn.Embedding(length, 4)
        self.qkv, self.out, self.head = nn.Linear(4, 12), nn.Linear(4, 4), nn.Linear(4, 5, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        steps = torch.arange(x.shape[1])
        x = self.token(x) + self.position(steps if self.unbatched else steps.expand_as(x))
        q, k, v = (t.unflatten(-1, (2, 2)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.head(torch.tanh(x + self.out(mixed.transpose(1, 2).flatten(2))))


class Recurrent(nn.Module):
    def __init__(self, cell: nn.Module, width: int, every_step: bool = False) -> None:
        super().__init__()
        self.cell, self.head, self.every_step = cell, nn.Linear(width, 2), every_step

    def forward(self, x: Tensor) -> Tensor:
        out, _ = self.cell(x)
        return self.head(out if self.every_step else out[:, -1])


class PixelNetwork(nn.Module):
    """A U-Net in miniature: down, up by a transposed convolution, a skip connection, an output a pixel."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.entry, self.down = nn.Conv2d(1, 2, 3, padding=1), nn.Conv2d(2, 2, 2, stride=2)
        self.up, self.exit = nn.ConvTranspose2d(2, 2, 2, stride=2), nn.Conv2d(4, outputs, 1)

    def forward(self, x: Tensor) -> Tensor:
        skip = torch.tanh(self.entry(x))
        x = torch.tanh(self.up(torch.tanh(self.down(skip))))
        return self.exit(torch.cat([skip, x], 1))


class PreActivationBlock(nn.Module):
    """BN - ReLU - convolution twice, with a strided 1x1 shortcut taken after the first activation."""

    def __init__(self) -> None:
        super().__init__()
        self.bn1, self.conv1 = nn.BatchNorm2d(2), nn.Conv2d(2, 3, 3, stride=2, padding=1, bias=False)
        self.bn2, self.conv2 = nn.BatchNorm2d(3), nn.Conv2d(3, 3, 3, padding=1, bias=False)
        self.shortcut, self.relu = nn.Conv2d(2, 3, 1, stride=2, bias=False), nn.ReLU(inplace=True)
        self.head = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.bn1(x))
        x = self.conv2(self.relu(self.bn2(self.conv1(x)))) + self.shortcut(x)
        return self.head(x.mean((2, 3)))


class DictionaryInput(nn.Module):
    """Tokens with a mask and a table of numbers, passed by keyword."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.numbers, self.head = nn.Embedding(6, 3), nn.Linear(2, 3), nn.Linear(3, 2)

    def forward(self, *, words: Tensor, mask: Tensor, table: Tensor) -> Tensor:
        mean = (self.embedding(words) * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
        return self.head(torch.tanh(mean + self.numbers(table)))


class BilinearPair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bilinear, self.head = nn.Bilinear(2, 3, 4), nn.Linear(4, 2)

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        return self.head(torch.tanh(self.bilinear(left, right)))


class Standardise(nn.Module):
    """Weight standardisation as a parametrisation: zero mean and unit norm for each output."""

    def forward(self, weight: Tensor) -> Tensor:
        centred = weight - weight.mean((1, 2), keepdim=True)
        return centred / centred.square().sum((1, 2), keepdim=True).add(1e-3).sqrt()


class LowRankAdapter(nn.Module):
    """A frozen layer with a trainable low-rank correction (LoRA), and a trainable head with a frozen bias."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.head = nn.Linear(3, 4), nn.Linear(4, 2)
        self.down, self.up = nn.Linear(3, 1, bias=False), nn.Linear(1, 4, bias=False)
        self.base.requires_grad_(False)
        self.head.bias.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.base(x) + self.up(self.down(x))).mean(1))


class MaskedTokens(nn.Module):
    """A layer that sees only the tokens above zero: how many of them an example has depends on its values.

    With `twice` the layer also sees all tokens.
    """

    def __init__(self, twice: bool) -> None:
        super().__init__()
        self.twice, self.inner, self.head = twice, nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        chosen = x[..., 0] > 0
        out = torch.tanh(self.inner(x)) if self.twice else torch.zeros_like(x)
        out = out.masked_scatter(chosen[..., None], torch.tanh(self.inner(x[chosen].square())))
        return self.head(out.cumsum(1).mean(1))


class GatedTie(nn.Module):
    """A weight with a second, functional use that only counts where the first input is positive."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        second = torch.einsum("bi,oi->bo", x, self.inner.weight)
        return self.head(torch.tanh(self.inner(x)) + second * (x[:, :1] > 0))


class WeightedPositions(nn.Module):
    """Position-major rows through a layer, then a sum in which positions differ."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(2, 3), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        rows = torch.tanh(self.inner(x.transpose(0, 1).flatten(0, 1))).unflatten(0, (length, batch))
        return self.head(torch.einsum("tbo,t->bo", rows, torch.arange(1.0, length + 1, dtype=x.dtype)))


def frozen_middle() -> nn.Module:
    """The first weight and the whole second layer frozen: gradients must still flow through them."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    model[0].weight.requires_grad_(False)
    model[2].requires_grad_(False)
    return model


def mixed_modes() -> nn.Module:
    """Dropout in train mode, a batch norm that its owner has put into eval mode."""
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Tanh(), nn.Linear(4, 2))
    model[1].eval()
    return model


def weight_norm() -> nn.Module:
    return nn.Sequential(parametrizations.weight_norm(nn.Linear(3, 4)), nn.Tanh(), nn.Linear(4, 2))


def standardised_convolution() -> nn.Module:
    convolution = nn.Conv1d(2, 3, 3, bias=False)
    parametrize.register_parametrization(convolution, "weight", Standardise())
    return nn.Sequential(convolution, nn.Tanh(), nn.Flatten(), nn.Linear(9, 2))


def mlp(*widths: int, activation: Callable[[], nn.Module] = nn.Tanh) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        layers: list[nn.Module] = [nn.Linear(widths[0], widths[1])]
        for a, b in itertools.pairwise(widths[1:]):
            layers += [activation(), nn.Linear(a, b)]
        return nn.Sequential(*layers)

    return build


def stack(*makers: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """A Sequential of fresh modules, made when called."""
    return lambda: nn.Sequential(*(make() for make in makers))


def pooled_tanh() -> nn.Module:
    """tanh and then the mean over all positions of (B, C, ...)."""
    return Apply(lambda x: torch.tanh(x).flatten(2).mean(2))


def two_sequences(*shapes: tuple[int, int]) -> Callable[[torch.Generator, int], tuple[Tensor, ...]]:
    return lambda g, n: tuple(torch.randn(n, *shape, generator=g, dtype=F64) for shape in shapes)


def padded_sequences(length: int, width: int) -> Callable[[torch.Generator, int], dict[str, Tensor]]:
    """Examples of different lengths; the first position is never padded."""

    def draw(generator: torch.Generator, n: int) -> dict[str, Tensor]:
        lengths = torch.randint(1, length + 1, (n, 1), generator=generator)
        x = torch.randn(n, length, width, generator=generator, dtype=F64)
        return {"x": x, "padded": torch.arange(length) >= lengths}

    return draw


def words_and_table(generator: torch.Generator, n: int) -> dict[str, Tensor]:
    lengths = torch.randint(1, 5, (n, 1), generator=generator)
    return {
        "words": torch.randint(6, (n, 4), generator=generator),
        "mask": (torch.arange(4) < lengths).to(F64),
        "table": torch.randn(n, 2, generator=generator, dtype=F64),
    }


def table() -> list[Case]:
    """Every case, as recipes."""
    linear, conv1, conv2 = nn.Linear, nn.Conv1d, nn.Conv2d
    attention, ends = ("attention", "head"), ("0", "2")
    # fmt: off
    return [
        # Dense layers, one for every likelihood
        Case("mlp_gaussian", mlp(3, 5, 2), randn(3), gaussian(0.7), ends),
        Case("mlp_gaussian_per_output", mlp(3, 4, 3), randn(3), gaussian([0.5, 0.75, 1.25]), ends),
        Case("mlp_gaussian_flat_target", mlp(3, 5, 1), randn(3), gaussian(0.5, flat=True), ends),
        Case("mlp_categorical", mlp(4, 5, 3), randn(4), categorical(), ends),
        Case("mlp_soft_labels", mlp(4, 5, 3), randn(4), categorical(soft=True), ends),
        Case("mlp_ignored_examples", mlp(4, 5, 3), randn(4), categorical(ignore=True), ends, n=8),
        Case("mlp_bernoulli", mlp(3, 5, 1), randn(3), bernoulli(flat=True), ends),
        Case("mlp_multi_label", mlp(3, 4, 3), randn(3), bernoulli(dtype=torch.int64), ends),
        Case("mlp_poisson", mlp(3, 4, 2), randn(3), poisson(), ends),
        Case("mlp_heteroscedastic", mlp(3, 4, 4), randn(3), heteroscedastic(), ends),
        Case("mlp_custom", mlp(3, 4, 2), randn(3), custom(), ends),
        Case("deep_linear", stack(lambda: linear(3, 4), lambda: linear(4, 3), lambda: linear(3, 2)), randn(3),
             gaussian([0.5, 2.0]), ("0", "1", "2")),
        Case("linear_leading_dimensions",
             stack(lambda: linear(3, 4), nn.Tanh, nn.Flatten, lambda: linear(24, 2)), randn(2, 3, 3),
             gaussian(), ("0", "3")),
        Case("output_without_channel", stack(mlp(3, 4, 1), lambda: Apply(lambda x: x.squeeze(1))), randn(3),
             gaussian(0.6), ("0.0", "0.2")),
        Case("gelu_prelu", stack(lambda: linear(3, 4), lambda: nn.PReLU(4), lambda: linear(4, 4), nn.GELU,
                                 lambda: linear(4, 2)), randn(3), custom(), ("0", "2", "4")),
        # Convolutions
        Case("conv1d_strided_dilated",
             stack(lambda: conv1(2, 3, 3, stride=2, padding=2, dilation=2), pooled_tanh,
                   lambda: linear(3, 2)),
             randn(2, 8), poisson(), ends),
        Case("conv1d_circular",
             stack(lambda: conv1(2, 3, 3, padding=2, padding_mode="circular"), pooled_tanh,
                   lambda: linear(3, 3)),
             randn(2, 6), categorical(), ends),
        Case("conv2d_strided_padded",
             stack(lambda: conv2(2, 3, (3, 2), stride=(2, 1), padding=(1, 0)), nn.ReLU, nn.Flatten,
                   lambda: linear(27, 2)), randn(2, 5, 4), bernoulli(dtype=torch.float32), ("0", "3")),
        Case("conv2d_same_even_kernel",
             stack(lambda: conv2(1, 3, (2, 4), padding="same"), pooled_tanh, lambda: linear(3, 2)),
             randn(1, 4, 5), gaussian(), ends),
        Case("conv2d_reflect",
             stack(lambda: conv2(1, 3, 3, stride=2, padding=(1, 2), padding_mode="reflect", bias=False),
                   pooled_tanh, lambda: linear(3, 3)), randn(1, 5, 4), categorical(soft=True), ends),
        Case("conv2d_replicate_same_dilated",
             stack(lambda: conv2(1, 2, 3, padding="same", dilation=2, padding_mode="replicate"), pooled_tanh,
                   lambda: linear(2, 2)), randn(1, 5, 4), custom(), ends),
        Case("conv2d_grouped",
             stack(lambda: conv2(4, 6, 2, groups=2), pooled_tanh, lambda: linear(6, 2)), randn(4, 4, 3),
             categorical(), ends),
        Case("conv2d_depthwise_separable",
             stack(lambda: conv2(3, 6, 3, padding=1, groups=3, bias=False), nn.ReLU, lambda: conv2(6, 4, 1),
                   pooled_tanh, lambda: linear(4, 1)), randn(3, 3, 4), bernoulli(flat=True), ("0", "2", "4")),
        Case("conv3d", stack(lambda: nn.Conv3d(1, 2, (2, 3, 2), stride=(1, 2, 1), padding=1), pooled_tanh,
                             lambda: linear(2, 2)), randn(1, 3, 4, 3), gaussian([0.5, 1.5]), ends),
        Case("deep_linear_pooled",
             stack(lambda: conv1(2, 3, 3, padding=1, padding_mode="circular"),
                   lambda: conv1(3, 2, 3, padding=1, padding_mode="circular"),
                   lambda: Apply(lambda x: x.mean(2))),
             randn(2, 6), gaussian(0.8), ("0", "1")),
        Case("conv_transpose1d",
             stack(lambda: nn.ConvTranspose1d(2, 3, 3, stride=2, padding=1, output_padding=1), pooled_tanh,
                   lambda: linear(3, 2)), randn(2, 4), poisson(), ends),
        Case("conv_transpose2d_grouped",
             stack(lambda: nn.ConvTranspose2d(4, 6, (2, 3), stride=(2, 1), padding=(0, 1), groups=2,
                                              dilation=(1, 2)),
                   pooled_tanh, lambda: linear(6, 2)), randn(4, 3, 3), categorical(), ends),
        Case("conv_transpose2d_output_padding",
             stack(lambda: nn.ConvTranspose2d(2, 1, 3, stride=3, padding=2, output_padding=2, bias=False),
                   nn.Tanh, nn.Flatten, lambda: linear(49, 2)),
             randn(2, 3, 3), heteroscedastic(), ("0", "3")),
        Case("conv_transpose3d",
             stack(lambda: nn.ConvTranspose3d(1, 2, 2, stride=(1, 2, 1)), pooled_tanh, lambda: linear(2, 2)),
             randn(1, 2, 2, 2), gaussian(), ends),
        # Embeddings
        Case("embedding_padding", stack(lambda: nn.Embedding(5, 3, padding_idx=0), nn.Tanh,
                                        lambda: Apply(lambda x: x.mean(1)), lambda: linear(3, 3)),
             tokens(5, 5), categorical(), ("0", "3"), n=8),
        Case("embedding_repeated", stack(lambda: nn.Embedding(3, 4), nn.Tanh,
                                         lambda: Apply(lambda x: x.sum(1)), lambda: linear(4, 2)),
             tokens(6, 3), poisson(), ("0", "3")),
        Case("embedding_sparse", stack(lambda: nn.Embedding(5, 3, sparse=True), nn.Tanh,
                                       lambda: Apply(lambda x: x.mean(1)), lambda: linear(3, 2)),
             tokens(4, 5), gaussian(), ("0", "3")),
        Case("embedding_bag", stack(lambda: nn.EmbeddingBag(6, 3), nn.Tanh, lambda: linear(3, 2)),
             tokens(4, 6), gaussian(), ("2",)),
        # Norm layers
        Case("batch_norm1d", stack(lambda: linear(3, 4), lambda: nn.BatchNorm1d(4), nn.ReLU,
                                   lambda: linear(4, 3)), randn(3), categorical(), ("0", "3")),
        Case("batch_norm2d", stack(lambda: conv2(1, 3, 3), lambda: nn.BatchNorm2d(3), pooled_tanh,
                                   lambda: linear(3, 2)), randn(1, 5, 4), gaussian(), ("0", "3")),
        Case("layer_norm", stack(lambda: linear(3, 4), lambda: nn.LayerNorm((2, 4)), nn.Tanh, nn.Flatten,
                                 lambda: linear(8, 2)), randn(2, 3), heteroscedastic(), ("0", "4")),
        Case("group_norm", stack(lambda: conv2(1, 4, 2), lambda: nn.GroupNorm(2, 4), pooled_tanh,
                                 lambda: linear(4, 3)), randn(1, 4, 3), categorical(), ("0", "3")),
        Case("instance_norm1d", stack(lambda: conv1(2, 3, 2), lambda: nn.InstanceNorm1d(3, affine=True),
                                      pooled_tanh, lambda: linear(3, 2)),
             randn(2, 6), gaussian(), ("0", "3")),
        Case("instance_norm2d_running",
             stack(lambda: conv2(1, 3, 2),
                   lambda: nn.InstanceNorm2d(3, affine=True, track_running_stats=True),
                   pooled_tanh, lambda: linear(3, 2)), randn(1, 4, 3), bernoulli(), ("0", "3")),
        Case("rms_norm", stack(lambda: linear(3, 4), lambda: nn.RMSNorm(4), nn.Tanh, lambda: linear(4, 2)),
             randn(3), custom(), ("0", "3")),
        Case("pre_activation_resnet", PreActivationBlock, randn(2, 4, 4), categorical(),
             ("conv1", "conv2", "shortcut", "head")),
        # Attention
        Case("self_attention", Attention, randn(3, 4), gaussian(), attention),
        Case("self_attention_sequence_first", lambda: Attention(batch_first=False), randn(6, 4),
             categorical(), attention),
        Case("self_attention_without_bias", lambda: Attention(bias=False), randn(3, 4), poisson(), attention),
        Case("self_attention_padded", Attention, padded_sequences(4, 4), categorical(), attention),
        Case("cross_attention", CrossAttention, two_sequences((3, 4), (5, 4)), gaussian([0.5, 1.5]),
             attention),
        Case("cross_attention_sequence_first", lambda: CrossAttention(batch_first=False),
             two_sequences((6, 4), (2, 4)), heteroscedastic(), attention),
        Case("attention_separate", SeparateAttention, two_sequences((2, 4), (3, 4), (3, 4)), categorical(),
             attention),
        Case("attention_separate_widths", lambda: SeparateAttention(kdim=3, vdim=5),
             two_sequences((2, 4), (3, 3), (3, 5)), bernoulli(), attention),
        Case("attention_extra_key", lambda: SeparateAttention(add_bias_kv=True),
             two_sequences((2, 4), (3, 4), (3, 4)), gaussian(), attention),
        Case("transformer_encoder_layer", Encoder, randn(3, 4), categorical(),
             ("encoder.self_attn", "encoder.linear1", "encoder.linear2", "head")),
        Case("transformer_encoder_layer_padded", lambda: Encoder(norm_first=True, activation="gelu"),
             padded_sequences(4, 4), categorical(soft=True),
             ("encoder.self_attn", "encoder.linear1", "encoder.linear2", "head")),
        Case("transformer_decoder_layer", Decoder, two_sequences((3, 4), (2, 4)), categorical(ignore=True),
             ("decoder.self_attn", "decoder.multihead_attn", "decoder.linear1", "decoder.linear2", "head")),
        Case("vision_transformer", VisionTransformer, randn(1, 4, 4), categorical(),
             ("patch", "attention", "mlp.1", "mlp.3", "head")),
        Case("causal_language_model", lambda: CausalLanguageModel(3, unbatched=False), tokens(3, 5),
             categorical(ignore=True), ("token", "position", "qkv", "out", "head")),
        Case("causal_language_model_unbatched_positions", lambda: CausalLanguageModel(6, unbatched=True),
             tokens(6, 5), categorical(), ("token", "qkv", "out", "head")),
        # Recurrent networks
        Case("lstm", lambda: Recurrent(nn.LSTM(2, 3, batch_first=True), 3), randn(4, 2), gaussian(),
             ("head",)),
        Case("gru_every_step", lambda: Recurrent(nn.GRU(2, 3, batch_first=True), 3, every_step=True),
             randn(3, 2), categorical(), ("head",)),
        Case("rnn_bidirectional", lambda: Recurrent(nn.RNN(2, 2, batch_first=True, bidirectional=True), 4),
             randn(3, 2), bernoulli(), ("head",)),
        # Sharing
        Case("reused_linear", Reused, randn(3), gaussian(), ("inner", "head")),
        Case("reused_convolution", ReusedConvolution, randn(2, 4, 4), categorical(), ("convolution", "head")),
        Case("tied_linears", TiedLinears, randn(3), gaussian(), (("a", "b"), "head")),
        Case("tied_without_bias", TiedWithoutBias, randn(2, 3), poisson(), (("a", "b"), "head")),
        Case("tied_language_model", TiedLanguageModel, tokens(3, 5), categorical(ignore=True), ("hidden",)),
        # Control flow and unusual use of weights
        Case("relu_in_place", mlp(3, 5, 4, 2, activation=lambda: nn.ReLU(inplace=True)), randn(3), gaussian(),
             ("0", "2", "4")),
        Case("in_place_everywhere", InPlace, randn(3), custom(), ("a", "b", "c")),
        Case("residual", stack(lambda: linear(3, 4), lambda: Residual(mlp(4, 3, 4)()), lambda: linear(4, 2)),
             randn(3), heteroscedastic(), ("0", "1.inner.0", "1.inner.2", "2")),
        Case("raw_parameters", RawParameters, randn(3), gaussian(), ("matmul:matrix", "head")),
        Case("raw_matrix_of_520", LargeRaw, randn(26), categorical(), ("head",)),
        Case("unused_layers", Unused, randn(3), categorical(), ("head",)),
        Case("weight_norm", weight_norm, randn(3), gaussian(), ("2",)),
        Case("standardised_convolution", standardised_convolution, randn(2, 5), categorical(), ("3",)),
        Case("frozen_weights", frozen_middle, randn(3), categorical(), ("4",)),
        Case("low_rank_adapter", LowRankAdapter, randn(2, 3), gaussian(), ("down", "up", "head")),
        Case("functional_bypass", Bypassed, randn(3), gaussian(),
             ("linear:a.weight+a.bias", "linear:b.weight", "head")),
        Case("flattened_example_major", lambda: FlattenedTokens(False), randn(6, 2), gaussian(),
             ("inner", "head")),
        Case("flattened_position_major", lambda: FlattenedTokens(True), randn(6, 2), categorical(),
             ("inner", "head")),
        Case("siamese_stacked", Siamese, lambda g, n: (randn(3)(g, n), randn(3)(g, n)), bernoulli(),
             ("inner", "head")),
        Case("frames_example_major", lambda: Frames(False), randn(3, 1, 3, 3), gaussian(),
             ("convolution", "head")),
        Case("frames_frame_major", lambda: Frames(True), randn(6, 1, 3, 3), categorical(),
             ("convolution", "head")),
        Case("windows", Windows, randn(6, 3), poisson(), ("qkv", "out", "head")),
        Case("squeeze_excitation", SqueezeExcitation, randn(1, 5), gaussian(),
             ("entry", "gate.0", "gate.2", "exit")),
        Case("fixup_block", FixupBlock, randn(2, 4, 3), categorical(), ("conv", "head")),
        Case("transposed_tie", TransposedTie, randn(3), gaussian()),
        Case("overlapping_slices", OverlappingSlices, randn(3), gaussian(), ("head",)),
        Case("hyper_network", HyperNetwork, randn(3), categorical(), ("head",)),
        Case("stacked_ensemble", StackedEnsemble, randn(3), gaussian()),
        Case("indexed_table", IndexedTable, tokens(6, 4), poisson(), ("head",)),
        Case("constant_output", ConstantOutput, randn(2), categorical()),
        Case("recurrence_by_hand", CellByHand, randn(3, 2), gaussian(), ("inner", "head")),
        Case("no_grad_backbone", NoGradBackbone, randn(3), categorical(), ("head",)),
        Case("checkpointed", Checkpointed, randn(3), gaussian(), ("inner.0", "inner.2", "head")),
        Case("named_output", NamedOutput, randn(3), categorical(), ("inner.0", "inner.2")),
        Case("routed_experts", Routed, randn(3), gaussian(), ("head",), n=7, data_dependent=True),
        Case("bilinear", BilinearPair, lambda g, n: (randn(2)(g, n), randn(3)(g, n)), poisson(), ("head",)),
        Case("dropout_in_train_mode", mixed_modes, randn(3), categorical(), ("0", "4")),
        # Inputs and outputs of other shapes
        Case("dictionary_input", DictionaryInput, words_and_table, bernoulli(),
             ("embedding", "numbers", "head")),
        Case("per_token_gaussian", mlp(2, 4, 2), randn(3, 2), gaussian([0.5, 1.5]), ends),
        Case("per_token_heteroscedastic", mlp(2, 3, 2), randn(3, 2), heteroscedastic(), ends),
        Case("per_token_custom", mlp(2, 3, 2), randn(3, 2), custom(), ends),
        Case("pixels_categorical", lambda: PixelNetwork(3), randn(1, 4, 4),
             categorical(ignore=True, channels="first"), ("entry", "down", "up", "exit")),
        Case("pixels_gaussian", lambda: PixelNetwork(2), randn(1, 4, 4), gaussian(0.9, channels="first"),
             ("entry", "down", "up", "exit")),
        Case("pixels_bernoulli", lambda: PixelNetwork(1), randn(1, 2, 4), bernoulli(channels="first"),
             ("entry", "down", "up", "exit")),
        Case("pixels_poisson", lambda: PixelNetwork(1), randn(1, 2, 4), poisson(channels="first"),
             ("entry", "down", "up", "exit")),
    ]
    # fmt: on


CASES: dict[str, Case] = {case.name: case for case in table()}
