"""Every fast path is proven, or it is not taken.

Each shortcut is made wrong by one per cent, as a bug of ours or of torch's would do; the answers must still be those of
the naive float64 reference. With the proofs switched off the same answers are wrong, so that each test is known to be
able to fail. Shortcuts of Jacobian products are broken in test_jacobian.py,
those of the dense structure's products also in test_curvature.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lapis
import reference
from cases.likelihoods import categorical
from lapis.curvature.backward import gradients, per_example
from lapis.curvature.blocks.dense import gram
from lapis.curvature.blocks.kronecker.eigenbasis import EigenbasisGaussian
from lapis.curvature.recording import layers, patches, pooling
from lapis.posteriors.predicting import drawn_network, head
from lapis.proofs import Proofs

F64 = torch.float64
WRONG = 1.01
PRIOR = 1.3


def network() -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    """Convolutions whose patches share rows, max pooling, and a wide linear layer; ten images."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 3, 3, padding=1), nn.Tanh(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(48, 9), nn.Tanh(),
        nn.Linear(9, 5),
    ).double()  # fmt: skip
    x = torch.randn(10, 1, 8, 8, dtype=F64, generator=torch.Generator().manual_seed(1))
    return model, (x, torch.arange(10) % 5)


def perceptron() -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 20), nn.Tanh(), nn.PReLU(), nn.Linear(20, 5)).double()
    x = torch.randn(10, 6, dtype=F64, generator=torch.Generator().manual_seed(1))
    return model, (x, torch.arange(10) % 5)


def scaled(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same function with everything that it returns one per cent too large."""

    def wrong(*args: Any, **kwargs: Any) -> Any:
        return _scaled(function(*args, **kwargs))

    return wrong


def _scaled(value: Any) -> Any:
    if isinstance(value, Tensor):
        return WRONG * value
    if isinstance(value, dict):
        return {key: _scaled(part) for key, part in value.items()}
    return [_scaled(part) for part in value] if isinstance(value, (list, tuple)) else value


def ggn_diagonal(model: nn.Module, data: tuple[Tensor, Tensor]) -> Tensor:
    return PRIOR + reference.ggn(model, *data, categorical()).diagonal()


def fit(model: nn.Module, data: Any, structure: str, **options: Any) -> lapis.LaplacePosterior:
    posterior = lapis.laplace(model, data, "classification", structure=structure, prior=PRIOR, **options)
    assert isinstance(posterior, lapis.LaplacePosterior)
    return posterior


def close(one: Tensor, two: Tensor) -> bool:
    return bool(torch.allclose(one, two, rtol=1e-7, atol=1e-9))


# how each path is broken: what to patch, and with what -------------------------------------------------


def break_batched_seeds(patch: pytest.MonkeyPatch) -> None:
    grad = gradients.Gradients._grad

    def wrong(self: Any, seeds: Tensor, **options: Any) -> Any:
        found = grad(self, seeds, **options)
        return _scaled(found) if options else found

    patch.setattr(gradients.Gradients, "_grad", wrong)


def break_one_batched_seed(patch: pytest.MonkeyPatch) -> None:
    grad = gradients.Gradients._grad

    def wrong(self: Any, seeds: Tensor, **options: Any) -> Any:
        found = grad(self, seeds, **options)
        return [torch.cat([WRONG * g[:1], g[1:]]) for g in found] if options else found

    patch.setattr(gradients.Gradients, "_grad", wrong)


def break_vmapped_examples(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(per_example.PerExample, "_mapped", scaled(per_example.PerExample._mapped))


def break_patches(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(layers, "patches", scaled(patches.patches))


def break_patch_moments(patch: pytest.MonkeyPatch) -> None:
    add = patches.add_patch_moment

    def wrong(total: Tensor, *rest: Any) -> None:
        more = torch.zeros_like(total)
        add(more, *rest)
        total += WRONG * more

    patch.setattr(patches, "add_patch_moment", wrong)


def break_grouped_gradients(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(patches.KernelGradients, "of", scaled(patches.KernelGradients.of))


def break_pooling(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(pooling, "shifted_maxima", scaled(pooling.shifted_maxima))


def break_head_covariances(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(EigenbasisGaussian, "of_features", scaled(EigenbasisGaussian.of_features))


def break_gram_factors(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(gram._Factors, "rows", scaled(gram._Factors.rows))


def break_drawn_matrices(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(drawn_network.Matrix, "linear", scaled(drawn_network.Matrix.linear))
    patch.setattr(drawn_network.Matrix, "formed", scaled(drawn_network.Matrix.formed))


def break_head(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(head.Head, "call", scaled(head.Head.call))


def break_networks_together(patch: pytest.MonkeyPatch) -> None:
    vmap = torch.func.vmap
    patch.setattr(torch.func, "vmap", lambda *args, **kwargs: scaled(vmap(*args, **kwargs)))


# what each path answers, and what is right -------------------------------------------------------------

Answers = tuple[Tensor, Tensor]


def diagonal_of_perceptron() -> Answers:
    model, data = perceptron()
    return fit(model, data, "diagonal").precision().diagonal(), ggn_diagonal(model, data)


def diagonal_of_recurrent_weights() -> Answers:
    """Weights that no rule explains take per-example gradients."""

    class Raw(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.matrix = nn.Parameter(torch.randn(6, 5))

        def forward(self, x: Tensor) -> Tensor:
            return torch.einsum("bi,io->bo", x, self.matrix.tanh())

    torch.manual_seed(0)
    model, (_, data) = Raw().double(), perceptron()
    return fit(model, data, "diagonal").precision().diagonal(), ggn_diagonal(model, data)


def diagonal_of_images() -> Answers:
    model, data = network()
    return fit(model, data, "diagonal").precision().diagonal(), ggn_diagonal(model, data)


def kronecker_inputs_of_images() -> Answers:
    model, (x, y) = network()
    block = fit(model, (x, y), "kronecker").curvature.blocks[0]
    a = nn.functional.unfold(x, 3, padding=1).transpose(1, 2).reshape(-1, 9)
    a = torch.cat([a, torch.ones_like(a[:, :1])], 1)
    return block.state()["inputs"][0].tril(), (a.T @ a).tril()


def last_layer_of_images() -> Answers:
    """Features are made without gradients, with pooling by shifted views."""
    model, data = network()
    expected = ggn_diagonal(model, data)[-50:]
    return fit(model, data, "diagonal", weights="last_layer").precision().diagonal(), expected


def dense_of_perceptron() -> Answers:
    model, _ = perceptron()
    x = torch.randn(80, 6, dtype=F64, generator=torch.Generator().manual_seed(2))
    data = (x, torch.arange(80) % 5)
    expected = reference.ggn(model, *data, categorical())
    expected.diagonal().add_(PRIOR)
    return fit(model, data, "dense").precision(), expected


def sampled_outputs(**options: Any) -> Answers:
    model, data = network()
    posterior = fit(model, data, "kronecker", **options)
    found = posterior.predict(data[0], method="sampled", samples=3)
    outputs = [posterior.network.call(data[0], posterior.network.unflatten(w)) for w in posterior.sample(3)]
    return found.f_mean, torch.stack(outputs).mean(0)


def last_layer_sampled() -> Answers:
    return sampled_outputs(weights="last_layer")


def last_layer_variances() -> Answers:
    model, data = network()
    posterior = fit(model, data, "kronecker", weights="last_layer")
    rows = torch.stack(reference.jacobians(model, data[0], categorical()))[..., -posterior.n_weights :]
    expected = torch.einsum("ncp,pq,ncq->nc", rows, posterior.precision().inverse(), rows)
    return posterior.predict(data[0], covariance="diagonal").latent.variance[:, 0], expected


def small_networks_sampled() -> Answers:
    model, data = perceptron()
    posterior = fit(model, data, "dense")
    found = posterior.predict(data[0], method="sampled", samples=3)
    outputs = [posterior.network.call(data[0], posterior.network.unflatten(w)) for w in posterior.sample(3)]
    return found.f_mean, torch.stack(outputs).mean(0)


PATHS: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], Callable[[], Answers]]] = {
    "several seeds in one backward pass": (break_batched_seeds, diagonal_of_perceptron),
    "one of several seeds": (break_one_batched_seed, diagonal_of_perceptron),
    "all examples under vmap": (break_vmapped_examples, diagonal_of_recurrent_weights),
    "patches of images": (break_patches, diagonal_of_images),
    "moments of patches": (break_patch_moments, kronecker_inputs_of_images),
    "kernels' gradients by groups": (break_grouped_gradients, diagonal_of_images),
    "pooling in a fit": (break_pooling, last_layer_of_images),
    "pooling of drawn networks": (break_pooling, last_layer_sampled),
    "products by factors": (break_gram_factors, dense_of_perceptron),
    "covariances of a last layer's outputs": (break_head_covariances, last_layer_variances),
    "drawn matrices that are not formed": (break_drawn_matrices, sampled_outputs),
    "only the head runs again": (break_head, last_layer_sampled),
    "small networks run together": (break_networks_together, small_networks_sampled),
}

OWN_PROOF = ("all examples under vmap", "patches of images", "small networks run together")
"""Paths whose proof is not one of `Proofs`: against autograd's gradient, or against one network run alone."""


@pytest.mark.parametrize("path", PATHS)
def test_a_path_that_is_wrong_by_a_percent_is_not_taken(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    broken, answers = PATHS[path]
    found, expected = answers()
    assert close(found, expected)
    broken(monkeypatch)
    found, expected = answers()
    assert close(found, expected)


@pytest.mark.parametrize("path", [path for path in PATHS if path not in OWN_PROOF])
def test_without_its_proof_the_broken_path_would_be_taken(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """So the test above can fail: it does touch the path, and a per cent is seen in the answer."""
    broken, answers = PATHS[path]
    broken(monkeypatch)
    monkeypatch.setattr(Proofs, "holds", lambda *_: True)
    found, expected = answers()
    assert not close(found, expected)


def test_a_refused_path_is_said_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    break_patch_moments(monkeypatch)
    model, (x, y) = network()
    posterior = fit(model, [(x[:5], y[:5]), (x[5:], y[5:])], "kronecker")
    assert posterior.network.proofs.refused == {patches.PATCH_MOMENTS}
    assert len([r for r in caplog.records if patches.PATCH_MOMENTS in r.message]) == 1


# hooks on gradients --------------------------------------------------------------------------------------


class Hooked(nn.Module):
    """Its forward pass registers a hook that halves a gradient: the function, and so its Jacobian, is not changed."""

    def __init__(self, hooked: bool, convolves: bool) -> None:
        super().__init__()
        self.hooked = hooked
        self.first = nn.Conv2d(1, 4, 3) if convolves else nn.Linear(9, 4)
        self.second, self.third = nn.Linear(4, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x if isinstance(self.first, nn.Conv2d) else x.flatten(1)).flatten(1).tanh()
        h = self.second(h)
        if self.hooked and h.requires_grad:
            h.register_hook(lambda g: g / 2)
        return self.third(h.tanh())


def hooked_pair(convolves: bool) -> tuple[nn.Module, nn.Module, tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    plain = Hooked(False, convolves).double()
    hooked = Hooked(True, convolves).double()
    hooked.load_state_dict(plain.state_dict())
    x = torch.randn(12, 1, 3, 3, dtype=F64, generator=torch.Generator().manual_seed(1))
    return plain, hooked, (x, torch.arange(12) % 3)


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")  # on the user's own backward pass
@pytest.mark.parametrize("convolves", [False, True])
@pytest.mark.parametrize("kind", ["of tensors", "of parameters", "of modules", "of all modules"])
@pytest.mark.parametrize("structure", ["dense", "diagonal", "kronecker", "ekfac", "lowrank", "implicit"])
def test_hooks_on_gradients_do_not_change_the_function(
    structure: str, kind: str, convolves: bool, request: pytest.FixtureRequest
) -> None:
    """Whatever path computes them, evidence and variances are about the function's Jacobian; hooks come back."""
    plain, model, data = hooked_pair(convolves)
    calls: list[int] = []
    if kind != "of tensors":
        model.hooked = False  # type: ignore[assignment]
    if kind == "of parameters":
        model.second.weight.register_hook(lambda g: calls.append(1) or 3 * g)  # type: ignore[union-attr, operator]
    if kind == "of modules":
        model.second.register_full_backward_hook(  # type: ignore[union-attr, operator]
            lambda module, inputs, outputs: calls.append(1) or (inputs[0] * 3,)
        )
    if kind == "of all modules":
        handle = nn.modules.module.register_module_full_backward_hook(
            lambda module, inputs, outputs: calls.append(1) or tuple(g if g is None else 3 * g for g in inputs)
        )
        request.addfinalizer(handle.remove)
    options: dict[str, Any] = {"structure": structure, "prior": PRIOR}
    one, two = (lapis.laplace(m, data, "classification", **options) for m in (plain, model))
    torch.testing.assert_close(two.log_evidence(), one.log_evidence(), rtol=1e-9, atol=1e-9)
    x = data[0][:4]
    torch.testing.assert_close(two.functional_variance(x), one.functional_variance(x), rtol=1e-7, atol=1e-9)
    if structure == "implicit":  # products in every mode
        vectors = torch.randn(3, one.n_weights, dtype=F64, generator=torch.Generator().manual_seed(2))
        torch.testing.assert_close(two.solve(vectors), one.solve(vectors), rtol=1e-7, atol=1e-9)
    assert calls == []
    model(data[0]).sum().backward()  # the user's own backward pass still calls them
    assert bool(calls) == (kind != "of tensors")


def test_hooks_of_tensors_work_as_ever_outside_of_lapis() -> None:
    plain, model, data = hooked_pair(False)
    lapis.laplace(model, data, "classification")
    for m in (plain, model):
        m(data[0]).sum().backward()
    torch.testing.assert_close(model.first.weight.grad, plain.first.weight.grad / 2)  # type: ignore[union-attr, operator]


def test_hooks_that_are_registered_later_are_ignored_too() -> None:
    _, model, data = hooked_pair(False)
    model.hooked = False  # type: ignore[assignment]
    posterior = lapis.laplace(model, data, "classification")
    expected = posterior.functional_variance(data[0])
    model.hooked = True  # type: ignore[assignment]
    torch.testing.assert_close(posterior.functional_variance(data[0]), expected)


@pytest.mark.parametrize("structure", ["dense", "implicit"])
def test_a_network_that_autograd_cannot_differentiate_is_refused(structure: str) -> None:
    class Reentrant(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            found: Tensor = torch.utils.checkpoint.checkpoint(super().forward, x.requires_grad_(), use_reentrant=True)
            return found

    model, data = Reentrant(nn.Linear(6, 5)).double(), perceptron()[1]
    with pytest.raises(lapis.ModelError, match="use_reentrant=False"):
        lapis.laplace(model, data, "classification", structure=structure)
