"""Networks of the cases that read sequences: attention, recurrences, and positions folded into the batch axis."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


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


class WeightedPositions(nn.Module):
    """Position-major rows through a layer, then a sum in which positions differ."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(2, 3), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        rows = torch.tanh(self.inner(x.transpose(0, 1).flatten(0, 1))).unflatten(0, (length, batch))
        return self.head(torch.einsum("tbo,t->bo", rows, torch.arange(1.0, length + 1, dtype=x.dtype)))
