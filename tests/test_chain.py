"""Chains: many seeds sent back by products of our own against autograd, seed by seed, in float64 (1e-12, relative).

What is no chain has to be seen as such: a graph taken for a chain by mistake would give wrong gradients silently.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lapis
from lapis.curvature.chain import ELEMENTWISE, find_chain
from lapis.curvature.record import Record
from lapis.curvature.tape import Tape
from lapis.network import Network

SEEDS, EXAMPLES, INPUTS, WIDTH, OUTPUTS = 4, 6, 3, 5, 2

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "Celu": F.celu,
    "Elu": F.selu,
    "Gelu": F.gelu,
    "Hardsigmoid": F.hardsigmoid,
    "Hardswish": F.hardswish,
    "Hardtanh": F.relu6,
    "LeakyRelu": F.leaky_relu,
    "LogSigmoid": F.logsigmoid,
    "Mish": F.mish,
    "Relu": F.relu,
    "Sigmoid": torch.sigmoid,
    "Silu": F.silu,
    "Sin": torch.sin,
    "Softplus": F.softplus,
    "Tanh": torch.tanh,
}


class Layers(nn.Module):
    """Three layers; `between` says what happens from one to the next, `last` what is done with the outputs."""

    def __init__(
        self,
        between: Callable[[Layers, Tensor], Tensor] = lambda _, z: z.tanh(),
        last: Callable[[Tensor], Tensor] = lambda z: z,
        *,
        bias: bool = True,
    ) -> None:
        super().__init__()
        self.one = nn.Linear(INPUTS, WIDTH, bias=bias)
        self.two = nn.Linear(WIDTH, WIDTH, bias=bias)
        self.three = nn.Linear(WIDTH, OUTPUTS, bias=bias)
        self.norm = nn.LayerNorm(WIDTH)
        self.between, self.last = between, last

    def forward(self, x: Tensor) -> Tensor:
        z = self.two(self.between(self, self.one(x)))
        return self.last(self.three(self.between(self, z)))


class Skipping(Layers):
    def forward(self, x: Tensor) -> Tensor:
        z = self.one(x).tanh()
        return self.three(z + self.two(z).tanh())


class Hypernetwork(Layers):
    """A second way leads back to the first layer, through the last one's weights; outputs do not show it."""

    def forward(self, x: Tensor) -> Tensor:
        z = self.one(x).tanh()
        made = self.three.weight * (1 + z.sum() - z.sum().detach())
        return F.linear(self.two(z).tanh(), made)


class Scaled(Layers):
    def forward(self, x: Tensor) -> Tensor:
        z = self.two(self.one(x).tanh()).tanh()
        return torch.addmm(self.three.bias, z, self.three.weight.T, alpha=2.0)


class Unused(Layers):
    def forward(self, x: Tensor) -> Tensor:
        self.one(x)
        return self.three(self.two(x @ torch.ones(INPUTS, WIDTH, dtype=x.dtype)).tanh())


class Twice(Layers):
    """One layer with two uses."""

    def forward(self, x: Tensor) -> Tensor:
        return self.three(self.two(self.two(self.one(x).relu()).relu()).relu())


def recorded(model: nn.Module, names: list[str] | None = None, x: Tensor | None = None) -> Record:
    torch.manual_seed(0)
    model = model.double().eval()
    x = torch.randn(EXAMPLES, INPUTS) if x is None else x
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.7)
    named = dict(model.named_parameters())
    chosen = [name for name in named if not name.startswith("norm")] if names is None else names
    network = Network(model, chosen)
    tape = Tape(network, lambda raw: raw.reshape(len(raw), -1, raw.shape[-1]))
    with network.prepared():
        return tape.record(x.double())


def check_against_autograd(record: Record, *, chain: bool) -> None:
    seeds = torch.randn(SEEDS, *record.f.shape, dtype=torch.float64)
    edges = [call.edge for call in record.calls]
    steps = find_chain(record.f, record.calls)
    assert (steps is not None) == chain
    truth = [torch.autograd.grad(record.f, edges, seed, retain_graph=True, allow_unused=True) for seed in seeds]
    found = record.gradients(seeds)
    for place, call in enumerate(record.calls):
        zeros = torch.zeros(call.output_shape, dtype=torch.float64)
        expected = torch.stack([zeros if one[place] is None else one[place] for one in truth])
        assert found[id(call)].shape == expected.shape
        torch.testing.assert_close(found[id(call)], expected, rtol=1e-12, atol=1e-12)
        assert not found[id(call)].requires_grad
    if steps is not None:  # not what autograd gave under another name
        kept = seeds.clone()
        for g, call in zip(steps.send_back(seeds), record.calls, strict=True):
            torch.testing.assert_close(g.reshape(SEEDS, *call.output_shape), found[id(call)], rtol=0, atol=0)
        assert torch.equal(seeds, kept)


def test_every_elementwise_function_is_tried() -> None:
    assert {f"{name}Backward{in_place}" for name in ACTIVATIONS for in_place in (0, 1)} == ELEMENTWISE


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_elementwise_functions(name: str) -> None:
    activation = ACTIVATIONS[name]
    assert activation(torch.ones(2, requires_grad=True)).grad_fn.name() == f"{name}Backward0"
    check_against_autograd(recorded(Layers(lambda _, z: activation(z))), chain=True)


@pytest.mark.parametrize(
    "model",
    [
        Layers(lambda _, z: z),
        Layers(lambda _, z: z.relu_()),
        Layers(lambda _, z: z.sigmoid().tanh()),
        Layers(lambda _, z: F.dropout(z.relu(), 0.5, training=False)),
        Layers(bias=False),
        Layers(last=lambda z: z.unsqueeze(1)),
        Layers(last=lambda z: z.reshape(len(z), OUTPUTS, 1)),
        Layers(last=lambda z: z.sigmoid()),
        Layers(lambda _, z: F.pad(z[:, None], (1, -1)).squeeze(1).relu()),
        Twice(),
    ],
    ids=[
        "linear", "in place", "two functions", "dropout", "no bias", "unsqueezed", "outputs as positions",
        "function of outputs", "shifted", "twice",
    ],
)  # fmt: skip
def test_chains(model: nn.Module) -> None:
    check_against_autograd(recorded(model), chain=True)


IMAGES = torch.randn(EXAMPLES, 2, 9, 8, generator=torch.Generator().manual_seed(1))
SIGNALS, VOLUMES = IMAGES.flatten(2), IMAGES.unflatten(2, (3, 3))


def convolving(*layers: nn.Module, inputs: Tensor = IMAGES) -> nn.Module:
    """Layers on images, and a linear one after them."""
    trunk = nn.Sequential(*layers, nn.Flatten())
    features = trunk.eval()(inputs).shape[1]
    return nn.Sequential(*trunk, nn.Linear(features, OUTPUTS))


CONVOLUTION_NETS: dict[str, tuple[nn.Module, Tensor]] = {
    name: (convolving(*layers, inputs=inputs), inputs)
    for name, inputs, layers in (
        ("pooled", IMAGES, [nn.Conv2d(2, 3, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(3, 4, 2), nn.ReLU()]),
        ("pooled before the function", IMAGES, [nn.Conv2d(2, 3, 3), nn.MaxPool2d(2), nn.Tanh(), nn.Conv2d(3, 4, 2)]),
        ("pooled twice", IMAGES, [nn.Conv2d(2, 3, 3), nn.ReLU(), nn.MaxPool2d(2), nn.MaxPool2d(2), nn.Sigmoid()]),
        ("two functions", IMAGES, [nn.Conv2d(2, 3, 3), nn.SiLU(), nn.Tanh(), nn.MaxPool2d(2), nn.Conv2d(3, 4, 2)]),
        ("overlapping windows", IMAGES, [nn.Conv2d(2, 3, 3), nn.ReLU(), nn.MaxPool2d(3, 2, 1), nn.Conv2d(3, 4, 2)]),
        ("stretched windows", IMAGES, [nn.Conv2d(2, 3, 3), nn.MaxPool2d(2, 2, dilation=2, ceil_mode=True)]),
        ("windows apart", IMAGES, [nn.Conv2d(2, 3, 3), nn.MaxPool2d(2, 3), nn.Conv2d(3, 4, 1)]),
        ("strides", IMAGES, [nn.Conv2d(2, 4, 3, 2, 1), nn.ELU(), nn.Conv2d(4, 4, 2, (1, 2), dilation=2, groups=2)]),
        ("padded alike", IMAGES, [nn.Conv2d(2, 4, (3, 5), padding="same"), nn.ReLU(), nn.Conv2d(4, 3, 2)]),
        ("transposed", IMAGES, [nn.Conv2d(2, 4, 3), nn.ReLU(), nn.ConvTranspose2d(4, 2, 3, 2, 1, 1, 2), nn.ReLU()]),
        ("in place", IMAGES, [nn.Conv2d(2, 3, 3), nn.ReLU(True), nn.Conv2d(3, 4, 3), nn.LeakyReLU(0.1, True)]),
        ("normalised", IMAGES, [nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(3, 4, 2)]),
        ("normalised first", IMAGES, [nn.BatchNorm2d(2), nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.Conv2d(3, 4, 2)]),
        ("averaged", IMAGES, [nn.Conv2d(2, 3, 3), nn.ReLU(), nn.AvgPool2d(2), nn.Conv2d(3, 4, 2), nn.ReLU()]),
        ("averaged over all", IMAGES, [nn.Conv2d(2, 3, 3), nn.ReLU(), nn.Conv2d(3, 4, 2), nn.AdaptiveAvgPool2d(1)]),
        ("averaged to few", IMAGES, [nn.Conv2d(2, 3, 3), nn.ReLU(), nn.AdaptiveAvgPool2d((3, 2)), nn.Conv2d(3, 4, 1)]),
        ("padded", IMAGES, [nn.Conv2d(2, 3, 3), nn.ZeroPad2d((1, 0, 2, 1)), nn.Conv2d(3, 4, 3)]),
        ("one convolution", IMAGES, [nn.Conv2d(2, 3, 3), nn.ReLU()]),
        ("in place otherwise", IMAGES, [nn.Conv2d(2, 3, 3), nn.ELU(1.5, True), nn.Conv2d(3, 4, 3)]),
        ("signals", SIGNALS, [nn.Conv1d(2, 3, 3), nn.ReLU(), nn.MaxPool1d(2), nn.Conv1d(3, 4, 2), nn.AvgPool1d(3)]),
        ("volumes", VOLUMES, [nn.Conv3d(2, 3, 2), nn.ReLU(), nn.MaxPool3d((1, 1, 2)), nn.Conv3d(3, 2, 2)]),
        ("volumes averaged", VOLUMES, [nn.Conv3d(2, 3, 2), nn.AvgPool3d((1, 2, 1)), nn.AdaptiveAvgPool3d((2, 1, 3))]),
    )
}  # fmt: skip


@pytest.mark.parametrize("name", CONVOLUTION_NETS)
def test_chains_of_convolutions(name: str) -> None:
    check_against_autograd(recorded(CONVOLUTION_NETS[name][0], None, CONVOLUTION_NETS[name][1]), chain=True)


def test_images_with_channels_last() -> None:
    model, x = CONVOLUTION_NETS["pooled"]
    model = copy.deepcopy(model).to(memory_format=torch.channels_last)
    check_against_autograd(recorded(model, None, x.to(memory_format=torch.channels_last)), chain=True)


def test_batch_norm_between_matrices() -> None:
    model = nn.Sequential(nn.Linear(INPUTS, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.BatchNorm1d(4), nn.Linear(4, OUTPUTS))
    for norm in (model[1], model[3]):
        norm.running_mean, norm.running_var = torch.randn(4), torch.rand(4) + 0.5
    check_against_autograd(recorded(model), chain=True)
    check_against_autograd(recorded(model, ["0.weight", "3.bias"]), chain=True)


@pytest.mark.parametrize("names", [["0.weight"], ["3.bias"], ["0.bias", "6.weight"]])
def test_some_convolutions_only(names: list[str]) -> None:
    model, x = CONVOLUTION_NETS["pooled"]
    check_against_autograd(recorded(model, names, x), chain=True)


@pytest.mark.parametrize(
    "layers",
    [
        [nn.Conv2d(2, 3, 3), nn.ReLU(), nn.Conv2d(3, 4, 2, padding=1, padding_mode="circular")],
        [nn.Conv2d(2, 3, 3), nn.GroupNorm(1, 3), nn.Conv2d(3, 4, 2)],
        [nn.Conv2d(2, 3, 3), nn.AdaptiveMaxPool2d(2), nn.Conv2d(3, 4, 2)],
        [nn.Conv2d(2, 3, 3), nn.utils.parametrizations.weight_norm(nn.Conv2d(3, 4, 2))],
        [nn.Conv2d(2, 4, 3), nn.PixelShuffle(2), nn.Conv2d(1, 4, 2)],
    ],
    ids=["circular", "group norm", "other pooling", "weights of weights", "shuffled"],
)
def test_convolution_networks_that_are_no_chains(layers: list[nn.Module]) -> None:
    check_against_autograd(recorded(convolving(*layers), None, IMAGES), chain=False)


@pytest.mark.parametrize("names", [["three.weight"], ["one.weight", "three.bias"], ["two.bias"]])
def test_some_layers_only(names: list[str]) -> None:
    check_against_autograd(recorded(Layers(), names), chain=True)


@pytest.mark.parametrize(
    "model",
    [
        Layers(lambda self, z: self.norm(z)),
        Layers(lambda _, z: z * z.sigmoid()),
        Layers(lambda _, z: z.softmax(-1)),
        Layers(lambda _, z: z.cumsum(-1)),
        Layers(lambda _, z: z[:, torch.arange(WIDTH - 1, -1, -1)]),
        Layers(lambda _, z: z.flip(-1)),
        Layers(last=lambda z: z.log_softmax(-1)),
        Layers(last=lambda z: torch.cat([z[:, :1], z[:, :1]], 1)),
        Skipping(),
        Hypernetwork(),
        Scaled(),
        Unused(),
    ],
    ids=[
        "normalised", "gate", "softmax", "sums", "turned round", "flipped", "log softmax", "copied outputs",
        "skipping", "hypernetwork", "scaled", "unused layer",
    ],
)  # fmt: skip
def test_what_is_no_chain_is_seen(model: nn.Module) -> None:
    check_against_autograd(recorded(model), chain=False)


def test_a_scaled_product_behind_the_chosen_weights_is_seen() -> None:
    check_against_autograd(recorded(Scaled(), ["one.weight"]), chain=False)


def test_seeds_on_a_chain_need_one_tensor_a_layer() -> None:
    """Autograd holds every gradient before and after the function between two layers."""
    record = recorded(Layers())
    seeds = torch.randn(SEEDS, *record.f.shape, dtype=torch.float64)
    steps = find_chain(record.f, record.calls)
    assert steps is not None
    with _Made() as made:
        found = steps.send_back(seeds)
    live = {g.untyped_storage().data_ptr() for g in found}
    assert made.large == len(live) - 1  # the last layer's gradients are the seeds themselves


class _Made(torch.utils._python_dispatch.TorchDispatchMode):
    """Counts new tensors with a row for every seed and example."""

    large = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        output = func(*args, **(kwargs or {}))
        old = {tensor.untyped_storage().data_ptr() for tensor in args if isinstance(tensor, Tensor)}
        if isinstance(output, Tensor) and output.untyped_storage().data_ptr() not in old:
            self.large += output.numel() >= SEEDS * EXAMPLES
        return output


@pytest.mark.parametrize("structure", ["diagonal", "kronecker", "dense"])
def test_fits_of_chains_are_those_of_autograd(structure: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = Layers().double()
    x, y = torch.randn(20, INPUTS, dtype=torch.float64), torch.randint(0, 5, (20,))
    model.three = nn.Linear(WIDTH, 5).double()
    evidence = lapis.laplace(model, (x, y), "classification", structure=structure).log_evidence()
    monkeypatch.setattr("lapis.curvature.record.find_chain", lambda f, calls: None)
    other = lapis.laplace(model, (x, y), "classification", structure=structure).log_evidence()
    torch.testing.assert_close(evidence, other, rtol=1e-12, atol=0)


@pytest.mark.parametrize("outputs", [2, 5])
@pytest.mark.parametrize("structure", ["diagonal", "kronecker", "dense"])
@pytest.mark.parametrize("name", ["pooled", "normalised", "strides", "volumes"])
def test_fits_and_predictions_of_convolution_chains(
    name: str, structure: str, outputs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x = CONVOLUTION_NETS[name]
    torch.manual_seed(0)
    model = nn.Sequential(*list(model)[:-1], nn.Linear(model[-1].in_features, outputs)).double()
    y = torch.randint(0, outputs, (len(x),))

    def fitted() -> tuple[Tensor, Tensor]:
        posterior = lapis.laplace(model, (x.double(), y), "classification", structure=structure)
        return posterior.log_evidence(), posterior.predict(x.double(), covariance="full").f_covariance

    found = fitted()
    monkeypatch.setattr("lapis.curvature.record.find_chain", lambda f, calls: None)
    for one, other in zip(found, fitted(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)
