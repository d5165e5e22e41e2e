"""The table of cases that every curvature test runs over: tiny networks x likelihoods, seeded.

A new case is a line of `table`. Its parts are in the modules beside this one: `likelihoods`, `inputs`, and the networks
by kind in `networks`, `sequences` and `unusual`.

A `Case` holds recipes only; nothing is built until `make_model` or `make_batch` is called. Weights and data
depend on the case's name alone, so adding a case changes no other. Everything is drawn in float64 and then
rounded, so that the float32 variant of a case is the same problem.

`Case.layers` names the matrix layers, those with a Kronecker block: a module; an inner tuple of modules that
share one weight; or a parameter used as a matrix without its module, by `F.linear` ("linear:a.weight", with
"+a.bias" if that is added) or as the right factor of a product ("matmul:matrix"). Every other parameter has a
dense (or, above 512 entries, a diagonal) block.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from cases.inputs import call, padded_sequences, randn, take, to_dtype, tokens, two_sequences, words_and_table
from cases.likelihoods import F64, LikelihoodSpec, bernoulli, categorical, custom, gaussian, heteroscedastic, poisson
from cases.networks import (
    Apply,
    BilinearPair,
    DictionaryInput,
    FixupBlock,
    InPlace,
    LowRankAdapter,
    PixelNetwork,
    PreActivationBlock,
    Residual,
    SqueezeExcitation,
    frozen_middle,
    mixed_modes,
    mlp,
    pooled_tanh,
    stack,
    standardised_convolution,
    weight_norm,
)
from cases.sequences import (
    Attention,
    CausalLanguageModel,
    CellByHand,
    CrossAttention,
    Decoder,
    Encoder,
    FlattenedTokens,
    Frames,
    MaskedTokens,
    Recurrent,
    SeparateAttention,
    Siamese,
    VisionTransformer,
    WeightedPositions,
    Windows,
)
from cases.unusual import (
    Bypassed,
    Checkpointed,
    ConstantOutput,
    GatedTie,
    HyperNetwork,
    IndexedTable,
    LargeRaw,
    NamedOutput,
    NoGradBackbone,
    OverlappingSlices,
    RawParameters,
    Reused,
    ReusedConvolution,
    Routed,
    StackedEnsemble,
    TiedLanguageModel,
    TiedLinears,
    TiedWithoutBias,
    TransposedTie,
    Unused,
)

__all__ = [
    "CASES",
    "F64",
    "Case",
    "GatedTie",
    "LikelihoodSpec",
    "MaskedTokens",
    "WeightedPositions",
    "bernoulli",
    "call",
    "categorical",
    "gaussian",
    "heteroscedastic",
    "poisson",
    "take",
]


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
