"""Naive float64 references for every curvature: one example, one output, one position at a time.

Nothing here shares code with the library. Weights are flat in the order of `named_parameters()`, over those
that require gradients, tied ones once. The model is copied, so hooks and modes never reach the caller's.

    J_n = d f_n / d theta               (T C, P), raw outputs brought to (T, C), outputs one at a time
    H_n = d^2 nll(f_n, y_n) / d f^2     (T C, T C), double backward; closed form where it is a Fisher matrix
    GGN = sum_n J_n^T H_n J_n
    Kronecker block of a matrix layer: kron(G, A) over its (out, in [+ 1]) matrix, inputs a and gradients g
    of the seeds (the columns of S_n, S_n S_n^T = H_n) in its outputs:
        expand:  A = sum_{n,t} a a^T / sum_n T_n,         G = sum_{n,m,t} g g^T
        reduce:  A = mean_n (mean_t a)(mean_t a)^T,       G = sum_{n,m} (sum_t g)(sum_t g)^T
    Embeddings always expand (their mean inputs would fill a V x V matrix); a padding token is no position.
    EKFAC block: Q diag(Q^T B Q) Q^T, Q the eigenvectors of kron(G, A) and B the layer's block of the GGN
"""

from __future__ import annotations

import copy
import functools
import itertools
import math
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from cases import CASES, F64, LikelihoodSpec, call, take

DENSE_LIMIT = 512
Layers = tuple[str | tuple[str, ...], ...]
Use = tuple[Tensor, Tensor]


# --------------------------------------------------------------------------------------------------------
# Shapes


def parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The weights of the posterior, in order."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def offsets(model: nn.Module) -> dict[int, int]:
    """Where each weight starts in the flat vector, by the identity of the parameter."""
    starts, start = {}, 0
    for parameter in parameters(model).values():
        starts[id(parameter)] = start
        start += parameter.numel()
    return starts


def positions(f: Tensor, channels: str) -> Tensor:
    """Raw outputs (B,), (B, C), (B, ..., C) or (B, C, ...) as (B, T, C)."""
    if f.ndim == 1:
        return f[:, None, None]
    if channels == "first":
        f = f.movedim(1, -1)
    return f.reshape(len(f), -1, f.shape[-1])


def target_of(y: Tensor, n: int, spec: LikelihoodSpec, positions_n: int) -> Tensor:
    """The n-th example's target: (T,) classes, or (T, D) values."""
    y = y[n]
    classes = spec.name.startswith("categorical") and not y.is_floating_point()
    if classes:
        return y.reshape(positions_n)
    if spec.channels == "first":
        y = y.movedim(0, -1)
    return y.reshape(positions_n, -1)


def count(x: Any) -> int:
    first = next(iter(x.values())) if isinstance(x, dict) else x[0] if isinstance(x, tuple) else x
    return len(first)


def evaluated(model: nn.Module) -> nn.Module:
    return copy.deepcopy(model).eval()


# --------------------------------------------------------------------------------------------------------
# Jacobians and exact curvature


def flat_gradient(scalar: Tensor, model: nn.Module, create_graph: bool = False) -> Tensor:
    weights = list(parameters(model).values())
    options = {"retain_graph": True, "create_graph": create_graph, "allow_unused": True}
    gradients = torch.autograd.grad(scalar, weights, **options)
    filled = [torch.zeros_like(w) if g is None else g for w, g in zip(weights, gradients, strict=True)]
    return torch.cat([g.to_dense().reshape(-1) for g in filled])


def jacobians(model: nn.Module, x: Any, spec: LikelihoodSpec) -> list[Tensor]:
    """J_n (T C, P) of each example."""
    model = evaluated(model)
    result = []
    for n in range(count(x)):
        f = positions(call(model, take(x, slice(n, n + 1))), spec.channels).reshape(-1)
        result.append(torch.stack([flat_gradient(output, model) for output in f]))
    return result


def outputs(model: nn.Module, x: Any, spec: LikelihoodSpec) -> list[Tensor]:
    """f_n (T, C) of each example."""
    model = evaluated(model)
    with torch.no_grad():
        each = [call(model, take(x, slice(n, n + 1))) for n in range(count(x))]
    return [positions(f, spec.channels)[0] for f in each]


def output_hessian(f: Tensor, target: Tensor, spec: LikelihoodSpec) -> Tensor:
    """H (T C, T C) of one example."""
    if spec.fisher is not None:
        return spec.fisher(f)
    flat = f.reshape(-1)
    return torch.autograd.functional.hessian(lambda values: spec.nll(values.reshape(f.shape), target), flat)


def output_gradient(f: Tensor, target: Tensor, spec: LikelihoodSpec) -> Tensor:
    """Gradient (T C,) of one example's nll in its outputs."""
    f = f.detach().requires_grad_()
    return torch.autograd.grad(spec.nll(f, target), f)[0].reshape(-1)


def seeds(model: nn.Module, x: Any, y: Tensor, spec: LikelihoodSpec, curvature: str) -> list[Tensor]:
    """S_n (T C, M) of each example: a root of H_n, or the single column grad nll for the empirical Fisher."""
    result = []
    for n, f in enumerate(outputs(model, x, spec)):
        target = target_of(y, n, spec, len(f))
        if curvature == "empirical":
            result.append(output_gradient(f, target, spec)[:, None])
            continue
        values, vectors = torch.linalg.eigh(output_hessian(f, target, spec))
        result.append(vectors * values.clamp_min(0).sqrt())
    return result


def ggn(model: nn.Module, x: Any, y: Tensor, spec: LikelihoodSpec) -> Tensor:
    """sum_n J_n^T H_n J_n, (P, P)."""
    total = 0.0
    for n, (f, jacobian) in enumerate(zip(outputs(model, x, spec), jacobians(model, x, spec), strict=True)):
        total = total + jacobian.T @ output_hessian(f, target_of(y, n, spec, len(f)), spec) @ jacobian
    return total


def empirical_fisher(model: nn.Module, x: Any, y: Tensor, spec: LikelihoodSpec) -> Tensor:
    """sum_n g_n g_n^T with g_n the gradient of the n-th example's nll in the weights, (P, P)."""
    model = evaluated(model)
    total = 0.0
    for n in range(count(x)):
        f = positions(call(model, take(x, slice(n, n + 1))), spec.channels)[0]
        gradient = flat_gradient(spec.nll(f, target_of(y, n, spec, len(f))), model)
        total = total + torch.outer(gradient, gradient)
    return total


def hessian(model: nn.Module, x: Any, y: Tensor, spec: LikelihoodSpec) -> Tensor:
    """Second derivative of the summed nll in the weights, (P, P)."""
    model = evaluated(model)
    total = 0.0
    for n in range(count(x)):
        f = positions(call(model, take(x, slice(n, n + 1))), spec.channels)[0]
        gradient = flat_gradient(spec.nll(f, target_of(y, n, spec, len(f))), model, create_graph=True)
        total = total + torch.stack([flat_gradient(entry, model) for entry in gradient])
    return total


# --------------------------------------------------------------------------------------------------------
# What a matrix layer sees: for each use its inputs a (T, I) and its outputs (T, O), still in the graph


@dataclass
class Block:
    """A weight matrix: where its entries (out, in) and bias (out,) lie in the flat vector, and its uses."""

    matrix: Tensor
    bias: Tensor | None
    lookup: bool = False
    uses: list[Use] = field(default_factory=list)


class Listener(TorchFunctionMode):
    """Notes the calls F.linear(x, weight, ...) and x @ weight of chosen weights."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks: dict[int, Block] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        if func not in (F.linear, torch.matmul, Tensor.matmul) or id(args[1]) not in self.blocks:
            return output
        out = output.reshape(-1, output.shape[-1])
        self.blocks[id(args[1])].uses.append((args[0].detach().reshape(-1, args[0].shape[-1]), out))
        return out.reshape(output.shape).clone()


class Recorder:
    """A copy of a model whose matrix layers note their inputs and outputs, one example at a time."""

    def __init__(self, model: nn.Module, layers: Layers) -> None:
        self.model = evaluated(model)
        self.blocks: list[Block] = []
        self._starts = offsets(self.model)
        self._listener, self._recording = Listener(), False
        for entry in layers:
            if isinstance(entry, str) and ":" in entry:
                self._listen(*entry.split(":"))
                continue
            names = (entry,) if isinstance(entry, str) else entry
            modules = [self.model.get_submodule(name) for name in names]
            first = modules[0]
            if isinstance(first, nn.MultiheadAttention):
                self._explicit_attention(first)
            elif isinstance(first, nn.Linear):
                self._watch(modules, [self._linear_block(modules)], read_linear)
            elif isinstance(first, nn.Embedding):
                self._watch(modules, [Block(self._index(first.weight).T, None, lookup=True)], read_embedding)
            else:
                self._watch(modules, self._convolution_blocks(first), read_convolution)

    def run(self, example: Any) -> Tensor:
        for block in self.blocks:
            block.uses.clear()
        self._recording = True
        with self._listener:
            out = call(self.model, example)
        self._recording = False
        return out

    def _index(self, parameter: nn.Parameter | None) -> Tensor | None:
        """Places of a parameter's entries in the flat vector; None for an absent or frozen one."""
        if parameter is None or id(parameter) not in self._starts:
            return None
        return self._starts[id(parameter)] + torch.arange(parameter.numel()).reshape(parameter.shape)

    def _linear_block(self, modules: list[nn.Module]) -> Block:
        one_bias = len({id(module.bias) for module in modules}) == 1
        return Block(self._index(modules[0].weight), self._index(modules[0].bias) if one_bias else None)

    def _convolution_blocks(self, module: nn.Module) -> list[Block]:
        """One block a group. Weights are (out, in/groups, ...), or (in, out/groups, ...) when transposed."""
        index, groups = self._index(module.weight), module.groups
        biases = self._index(module.bias)
        blocks = []
        for k in range(groups):
            if module.transposed:
                matrix = index.chunk(groups, 0)[k].transpose(0, 1).flatten(1)
            else:
                matrix = index.chunk(groups, 0)[k].flatten(1)
            blocks.append(Block(matrix, None if biases is None else biases.chunk(groups)[k]))
        return blocks

    def _listen(self, function: str, names: str) -> None:
        """Watches a parameter that is used as a matrix without its module."""
        weight, *bias = (self.model.get_parameter(name) for name in names.split("+"))
        index = self._index(weight)
        block = Block(index if function == "linear" else index.T, self._index(bias[0]) if bias else None)
        self.blocks.append(block)
        self._listener.blocks[id(weight)] = block

    def _watch(self, modules: list[nn.Module], blocks: list[Block], read: Callable[..., list[Use]]) -> None:
        """Notes every call, and hands on an output rebuilt from the noted rows.

        The rebuilt output is a copy, so in-place operations on it leave the noted rows alone.
        """
        self.blocks += blocks

        def hook(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
            uses = read(module, inputs[0].detach(), output)
            if self._recording:  # a checkpointed layer runs again on the way back
                for block, use in zip(blocks, uses, strict=True):
                    block.uses.append(use)
            outs = torch.cat([out for _, out in uses], 1)
            if isinstance(module, nn.modules.conv._ConvNd):
                outs = outs.unflatten(0, (len(output), -1)).transpose(1, 2)
            return outs.reshape(output.shape).clone(memory_format=torch.contiguous_format)

        for module in modules:
            module.register_forward_hook(hook)

    def _explicit_attention(self, module: nn.MultiheadAttention) -> None:
        """Replaces the module's forward by attention written out, with each projection noted."""
        e = module.embed_dim
        if module.in_proj_weight is not None:
            rows = list(self._index(module.in_proj_weight).chunk(3, 0))
        else:
            weights = (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight)
            rows = [self._index(weight) for weight in weights]
        bias = self._index(module.in_proj_bias)
        biases = [None] * 3 if bias is None else list(bias.split(e))
        out = Block(self._index(module.out_proj.weight), self._index(module.out_proj.bias))
        self.blocks.append(out)
        inner: list[Block] = []

        def merged(first: int, last: int) -> Block:
            joined = None if bias is None else torch.cat(biases[first:last])
            return Block(torch.cat(rows[first:last]), joined)

        def noted(block: Block, a: Tensor, result: Tensor) -> list[Tensor]:
            block.uses.append((a.detach(), result))
            return list(result.split(e, -1))

        def forward(
            self_: nn.MultiheadAttention,
            query: Tensor,
            key: Tensor,
            value: Tensor,
            key_padding_mask: Tensor | None = None,
            need_weights: bool = True,
            attn_mask: Tensor | None = None,
            average_attn_weights: bool = True,
            is_causal: bool = False,
        ) -> tuple[Tensor, None]:
            kind = (0, 3) if query is key and key is value else (1, 3) if key is value else None
            if not inner:
                spans = [(0, 3)] if kind == (0, 3) else [(0, 1), (1, 3)] if kind else [(0, 1), (1, 2), (2, 3)]
                inner.extend(merged(*span) for span in spans)
                self.blocks.extend(inner)
            batch = 0 if self_.batch_first else 1
            q_in, k_in, v_in = (t.select(batch, 0) for t in (query, key, value))
            w_q, w_k, w_v = (
                self_.in_proj_weight.chunk(3)
                if self_.in_proj_weight is not None
                else (self_.q_proj_weight, self_.k_proj_weight, self_.v_proj_weight)
            )
            zero = query.new_zeros(e)
            b_q, b_k, b_v = (zero,) * 3 if self_.in_proj_bias is None else self_.in_proj_bias.split(e)
            if kind == (0, 3):
                result = q_in @ torch.cat([w_q, w_k, w_v]).T + torch.cat([b_q, b_k, b_v])
                q, k, v = noted(inner[0], q_in, result)
            elif kind == (1, 3):
                (q,) = noted(inner[0], q_in, q_in @ w_q.T + b_q)
                k, v = noted(inner[1], k_in, k_in @ torch.cat([w_k, w_v]).T + torch.cat([b_k, b_v]))
            else:
                (q,) = noted(inner[0], q_in, q_in @ w_q.T + b_q)
                (k,) = noted(inner[1], k_in, k_in @ w_k.T + b_k)
                (v,) = noted(inner[2], v_in, v_in @ w_v.T + b_v)
            forbidden = q.new_zeros(len(q), len(k))
            if attn_mask is not None:
                forbidden = forbidden + attn_mask
            if key_padding_mask is not None:
                padding = key_padding_mask[0]
                if padding.dtype == torch.bool:
                    padding = q.new_zeros(len(k)).masked_fill(padding, -math.inf)
                forbidden = forbidden + padding
            if self_.bias_k is not None:
                k, v = torch.cat([k, self_.bias_k[0]]), torch.cat([v, self_.bias_v[0]])
                forbidden = F.pad(forbidden, (0, 1))
            width = e // self_.num_heads
            heads = []
            for q_h, k_h, v_h in zip(q.split(width, 1), k.split(width, 1), v.split(width, 1), strict=True):
                heads.append((q_h @ k_h.T / math.sqrt(width) + forbidden).softmax(1) @ v_h)
            mixed = torch.cat(heads, 1)
            result = mixed @ self_.out_proj.weight.T
            if self_.out_proj.bias is not None:
                result = result + self_.out_proj.bias
            (result,) = noted(out, mixed, result)
            return result.unsqueeze(batch), None

        module.forward = types.MethodType(forward, module)


def read_linear(module: nn.Linear, a: Tensor, output: Tensor) -> list[Use]:
    return [(a.reshape(-1, module.in_features), output.reshape(-1, module.out_features))]


def read_embedding(module: nn.Embedding, index: Tensor, output: Tensor) -> list[Use]:
    """Inputs are one-hot rows; a padding token's is zero, as its weights receive no gradient."""
    a = F.one_hot(index.reshape(-1), module.num_embeddings).to(F64)
    if module.padding_idx is not None:
        a[:, module.padding_idx] = 0
    return [(a, output.reshape(-1, module.embedding_dim))]


def read_convolution(module: nn.Module, x: Tensor, output: Tensor) -> list[Use]:
    """Patches (T, in/groups * kernel) and outputs (T, out/groups) of each group, frame after frame."""
    patches_of = transposed_patches if module.transposed else patches
    uses = []
    for a, out in zip(x.chunk(module.groups, 1), output.chunk(module.groups, 1), strict=True):
        inputs = torch.cat([patches_of(module, frame, output.shape[2:]) for frame in a])
        uses.append((inputs, out.flatten(2).transpose(1, 2).flatten(0, 1)))
    return uses


def patches(module: nn.Module, x: Tensor, extent: torch.Size) -> Tensor:
    """a[t, (c, k)] = padded[c, stride t + dilation k]."""
    around: list[int] = []
    for axis in reversed(range(len(extent))):
        if module.padding == "same":
            total = module.dilation[axis] * (module.kernel_size[axis] - 1)
            around += [total // 2, total - total // 2]
        else:
            around += [module.padding[axis]] * 2
    mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
    padded = F.pad(x[None], around, mode=mode)[0]
    result = x.new_zeros(math.prod(extent), len(x), math.prod(module.kernel_size))
    for row, t in enumerate(itertools.product(*map(range, extent))):
        for column, k in enumerate(itertools.product(*map(range, module.kernel_size))):
            axes = zip(t, module.stride, k, module.dilation, strict=True)
            result[row, :, column] = padded[(slice(None), *(i * s + j * d for i, s, j, d in axes))]
    return result.flatten(1)


def transposed_patches(module: nn.Module, x: Tensor, extent: torch.Size) -> Tensor:
    """a[t, (c, k)] = x[c, u] where t = stride u + dilation k - padding for some u in range, else 0."""
    result = x.new_zeros(math.prod(extent), len(x), math.prod(module.kernel_size))
    for row, t in enumerate(itertools.product(*map(range, extent))):
        for column, k in enumerate(itertools.product(*map(range, module.kernel_size))):
            axes = list(zip(t, module.stride, k, module.dilation, module.padding, strict=True))
            if any((i + p - j * d) % s for i, s, j, d, p in axes):
                continue
            u = [(i + p - j * d) // s for i, s, j, d, p in axes]
            if all(0 <= i < size for i, size in zip(u, x.shape[1:], strict=True)):
                result[row, :, column] = x[(slice(None), *u)]
    return result.flatten(1)


# --------------------------------------------------------------------------------------------------------
# The Kronecker definition


@dataclass
class Capture:
    """What one block saw: for each example its inputs (T, I), and for each seed the gradients (T, O)."""

    block: Block
    inputs: list[Tensor] = field(default_factory=list)
    gradients: list[list[Tensor]] = field(default_factory=list)


def capture(
    model: nn.Module, x: Any, y: Tensor, spec: LikelihoodSpec, layers: Layers, curvature: str = "ggn"
) -> list[Capture]:
    """Every matrix layer's inputs and gradients; the positions of all its uses one after the other."""
    if not layers:
        return []
    recorder = Recorder(model, layers)
    captures: list[Capture] = []
    for n, root in enumerate(seeds(model, x, y, spec, curvature)):
        f = positions(recorder.run(take(x, slice(n, n + 1))), spec.channels).reshape(-1)
        captures = captures or [Capture(block) for block in recorder.blocks]
        outs = [out for block in recorder.blocks for _, out in block.uses]
        kept = []
        for each in captures:
            a = torch.cat([a for a, _ in each.block.uses])
            kept.append(a.abs().sum(1) > 0 if each.block.lookup else torch.ones(len(a), dtype=torch.bool))
            each.inputs.append(a[kept[-1]])
            each.gradients.append([])
        for column in root.T:
            found = torch.autograd.grad(f @ column, outs, retain_graph=True, allow_unused=True)
            filled = iter(torch.zeros_like(o) if g is None else g for o, g in zip(outs, found, strict=True))
            for each, rows in zip(captures, kept, strict=True):
                each.gradients[-1].append(torch.cat([next(filled) for _ in each.block.uses])[rows])
    return captures


def kronecker(
    model: nn.Module,
    exact: Tensor,
    captures: list[Capture],
    sharing: str = "expand",
    bias: str = "joint",
    corrected: bool = False,
) -> Tensor:
    """Block-diagonal (P, P): kron(G, A), or EKFAC if `corrected`, for matrix layers, parts of `exact` for others."""
    result = torch.zeros_like(exact)
    covered = torch.zeros(len(exact), dtype=torch.bool)
    for each in captures:
        for index, a_factor, g_factor in factors(each, sharing, bias):
            where = index.reshape(-1)
            assert not covered[where].any()
            covered[where] = True
            block = torch.kron(g_factor, a_factor)
            if corrected:
                basis = torch.kron(torch.linalg.eigh(g_factor)[1], torch.linalg.eigh(a_factor)[1])
                block = basis @ torch.diag((basis.T @ exact[where[:, None], where] @ basis).diagonal()) @ basis.T
            result[where[:, None], where] = block

    start = 0
    for parameter in parameters(model).values():
        where = torch.arange(start, start + parameter.numel())
        start += parameter.numel()
        where = where[~covered[where]]
        block = exact[where[:, None], where]
        result[where[:, None], where] = block if parameter.numel() <= DENSE_LIMIT else torch.diag(block.diagonal())
    return result


def factors(each: Capture, sharing: str, bias: str) -> list[tuple[Tensor, Tensor, Tensor]]:
    """(index (out, in), A, G) of a layer: one with the bias as last column, or weight and bias apart."""
    sharing = "expand" if each.block.lookup else sharing
    g_factor = torch.zeros(len(each.block.matrix), len(each.block.matrix), dtype=F64)
    for gradients in each.gradients:
        for g in gradients:
            g_factor += outer_products(g if sharing == "expand" else g.sum(0, keepdim=True))
    ones = [torch.ones(len(a), 1, dtype=F64) for a in each.inputs]
    matrix, bias_index = each.block.matrix, each.block.bias
    if bias_index is None:
        return [(matrix, input_factor(each.inputs, sharing), g_factor)]
    if bias == "joint":
        with_ones = [torch.cat([a, one], 1) for a, one in zip(each.inputs, ones, strict=True)]
        return [(torch.cat([matrix, bias_index[:, None]], 1), input_factor(with_ones, sharing), g_factor)]
    return [
        (matrix, input_factor(each.inputs, sharing), g_factor),
        (bias_index[:, None], input_factor(ones, sharing), g_factor),
    ]


def input_factor(inputs: list[Tensor], sharing: str) -> Tensor:
    if sharing == "expand":
        return sum(outer_products(a) for a in inputs) / sum(len(a) for a in inputs)
    return sum(outer_products(a.mean(0, keepdim=True)) for a in inputs) / len(inputs)


def outer_products(rows: Tensor) -> Tensor:
    """sum_t r_t r_t^T."""
    total = torch.zeros(rows.shape[1], rows.shape[1], dtype=F64)
    for row in rows:
        total += torch.outer(row, row)
    return total


# --------------------------------------------------------------------------------------------------------
# The same for the cases of the table, each computed once


@functools.cache
def case_data(name: str) -> tuple[nn.Module, Any, Tensor, LikelihoodSpec]:
    """A case's model (never to be changed), inputs, targets and likelihood."""
    case = CASES[name]
    return (case.make_model(), *case.make_batch(), case.likelihood)


@functools.cache
def case_jacobians(name: str) -> list[Tensor]:
    model, x, _, spec = case_data(name)
    return jacobians(model, x, spec)


@functools.cache
def case_ggn(name: str) -> Tensor:
    return ggn(*case_data(name))


@functools.cache
def case_empirical_fisher(name: str) -> Tensor:
    return empirical_fisher(*case_data(name))


@functools.cache
def case_captures(name: str, curvature: str = "ggn") -> list[Capture]:
    return capture(*case_data(name), CASES[name].layers, curvature)


@functools.cache
def case_curvature(
    name: str, structure: str, *, curvature: str = "ggn", sharing: str = "expand", bias: str = "joint"
) -> Tensor:
    """The (P, P) curvature by a structure's definition."""
    exact = case_empirical_fisher(name) if curvature == "empirical" else case_ggn(name)
    if structure in ("kronecker", "ekfac"):
        captures = case_captures(name, curvature)
        return kronecker(case_data(name)[0], exact, captures, sharing, bias, corrected=structure == "ekfac")
    return exact if structure == "dense" else torch.diag(exact.diagonal())
