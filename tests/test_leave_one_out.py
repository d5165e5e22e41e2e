"""The width of a classifier's posterior by leave-one-out predictions, and what a width means."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import lapis
from lapis.batches import Batch
from lapis.posteriors.laplace.tuning.leave_one_out import _left_out, _losses, _without_itself, chosen_width
from lapis.predictions import LatentGaussian


def blobs(noise: float, n: int = 120) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    """A trained classifier of three well separated classes, some labels of which are drawn anew."""
    torch.manual_seed(0)
    y = torch.arange(n) % 3
    x = (torch.randn(n, 2) + 5 * torch.eye(3)[y][:, :2]).double()
    y = torch.where(torch.rand(n) < noise, torch.randint(3, (n,)), y)
    model = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 3)).double()
    optimiser = torch.optim.Adam(model.parameters(), lr=0.03, weight_decay=1e-3)
    for _ in range(300):
        optimiser.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimiser.step()
    return model, (x, y)


def test_leave_one_out_of_a_linear_gaussian_model_is_a_refit_without_the_example() -> None:
    torch.manual_seed(0)
    x, y = torch.randn(12, 2).double(), torch.randn(12, 1).double()
    model = nn.Linear(2, 1).double()
    posterior = lapis.laplace(model, (x, y), lapis.Gaussian(0.4), structure="dense").refine((x, y), tolerance=1e-12)
    with torch.no_grad():  # at its mode
        model.weight.copy_(posterior.mean[:2][None])
        model.bias.copy_(posterior.mean[2:])
    posterior = lapis.laplace(model, (x, y), lapis.Gaussian(0.4), structure="dense")
    latent = posterior.latent(x, "full", None, None)
    assert isinstance(latent, LatentGaussian)
    found = _without_itself(posterior, latent, y[:, None])
    assert found is not None
    mean, covariance = found
    for n in (0, 5, 11):
        rest = [i for i in range(12) if i != n]
        other = lapis.laplace(model, (x[rest], y[rest]), lapis.Gaussian(0.4), structure="dense")
        refit = other.refine((x[rest], y[rest]), tolerance=1e-12).predict(x[n : n + 1])
        torch.testing.assert_close(mean[n, 0], refit.f_mean[0], rtol=1e-6, atol=1e-8)
        torch.testing.assert_close(covariance[n, 0, 0], refit.f_variance[0], rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("structure", ["dense", "kronecker"])
def test_chosen_width_is_the_widest_that_loses_no_more_than_tolerated(structure: str) -> None:
    model, (x, y) = blobs(0.0)
    posterior = lapis.laplace(model, (x, y), "classification", structure=structure)
    sample = [Batch(x, y, 0)]
    width = chosen_width(posterior, sample, 0.01)
    assert 0 < width < 1
    parts = _left_out(posterior, sample)
    best = min((0.5**k * (k < 13) for k in range(14)), key=lambda w: float(_losses(posterior, parts, w).mean()))
    excess = [_losses(posterior, parts, w) - _losses(posterior, parts, best) for w in (width, 1.2 * width)]
    bounds = [float(each.mean() + each.std() / len(y) ** 0.5) for each in excess]
    assert bounds[0] <= 0.011
    assert bounds[1] > 0.009


def test_fewer_examples_of_one_kind_allow_less_width() -> None:
    """The mean loss of a sample is the same if it is taken twice over; its standard error is not."""
    model, (x, y) = blobs(0.1)
    posterior = lapis.laplace(model, (x, y), "classification")
    once, often = (chosen_width(posterior, [Batch(x, y, 0)] * times, 0.004) for times in (1, 9))
    assert once < 0.9 * often


def test_tuned_classifiers_are_not_too_cautious_at_their_data() -> None:
    model, (x, y) = blobs(0.0)
    tuned = lapis.laplace(model, (x, y), "classification").tune()
    wide = lapis.laplace(model, (x, y), "classification").tune(tolerated_loss=1e6)
    plain = nn.functional.cross_entropy(model(x), y).item()
    loss, other = (-float(p.predict(x).log_prob(y).mean()) for p in (tuned, wide))
    assert wide.width == 1
    assert tuned.width < 0.5
    assert loss < plain + 0.02
    assert other > loss + 0.02
    far = tuned.predict(torch.tensor([[30.0, -30.0]]).double()).entropy
    assert float(far) > float(tuned.predict(x).entropy.median())


def test_wrong_labels_allow_more_width() -> None:
    clean, noisy = (lapis.laplace(m, d, "classification").tune().width for m, d in (blobs(0.0), blobs(0.3)))
    assert noisy > 2 * clean


def test_a_width_scales_the_covariance_everywhere_and_leaves_the_evidence() -> None:
    model, (x, y) = blobs(0.0, 30)
    for structure in ("dense", "kronecker", "diagonal", "lowrank"):
        one = lapis.laplace(model, (x, y), "classification", structure=structure)
        some = replace(one, width=0.25)
        torch.testing.assert_close(some.marginal_variance(), 0.25 * one.marginal_variance())
        torch.testing.assert_close(some.functional_variance(x), 0.25 * one.functional_variance(x))
        torch.testing.assert_close(some.functional_covariance(x[:3]), 0.25 * one.functional_covariance(x[:3]))
        torch.testing.assert_close(some.precision(), 4 * one.precision())
        torch.testing.assert_close(some.sample(3) - some.mean, 0.5 * (one.sample(3) - one.mean))
        torch.testing.assert_close(some.solve(one.mean), 0.25 * one.solve(one.mean))
        torch.testing.assert_close(some.log_evidence(), one.log_evidence())
        torch.testing.assert_close(some.effective_parameters(), one.effective_parameters())
        theta = some.sample(2)
        reference = torch.distributions.MultivariateNormal(some.mean, precision_matrix=some.precision())
        torch.testing.assert_close(some.log_prob(theta), reference.log_prob(theta))
        quick = some.predict(x[:4], method="sampled", samples=4).probs
        slow = torch.stack([torch.func.functional_call(model, lapis.unflatten(t, some), x[:4]) for t in some.sample(4)])
        torch.testing.assert_close(quick, slow.softmax(-1).mean(0), rtol=1e-6, atol=1e-8)
        assert some.with_prior(2.0).width == 1


def test_files_hold_the_width(tmp_path: object) -> None:
    model, data = blobs(0.0)
    tuned = lapis.laplace(model, data, "classification").tune()
    tuned.save(f"{tmp_path}/tuned.lapis")
    again = lapis.load(f"{tmp_path}/tuned.lapis", model)
    assert again.width == tuned.width  # type: ignore[attr-defined]
    assert "leave-one-out" in tuned.summary()


def test_large_classifiers_get_their_last_layer_and_regressions_all_weights() -> None:
    model = nn.Sequential(nn.Linear(4, 60), nn.ReLU(), nn.Linear(60, 50), nn.ReLU(), nn.Linear(50, 3))
    x, y = torch.randn(30, 4), torch.arange(30) % 3
    last = lapis.laplace(model, (x, y), "classification")
    assert last.n_weights == 153
    assert last.structure == "dense"
    assert "last layer" in last.summary()
    assert lapis.laplace(model, (x, y), "classification", structure="kronecker").n_weights > 3000
    assert lapis.laplace(model, (x, y), "classification", weights="all").n_weights > 3000
    assert lapis.laplace(model, (x, torch.randn(30, 3)), "regression").n_weights > 3000


@pytest.mark.parametrize("examples", [120, 24], ids=["few weights", "few outputs"])
def test_matrix_free_posteriors_get_the_width_of_dense_ones(examples: int) -> None:
    """99 weights; 360 or 72 outputs of the data, all of which are in the sample."""
    model, data = blobs(0.0, examples)
    dense = lapis.laplace(model, data, "classification", structure="dense")
    implicit = lapis.laplace(model, [data], "classification", structure="implicit")
    tuned = implicit.tune()
    same = dense.with_prior(tuned.prior)
    expected = chosen_width(same, same.sample_of_data(), 0.004)
    assert expected < 0.9
    assert tuned.width == pytest.approx(expected, rel=1e-9)
    assert tuned.tune().width == pytest.approx(tuned.tune(tolerated_loss=0.004).width)
    torch.testing.assert_close(
        tuned.predict(data[0][:5]).probs, replace(same, width=expected).predict(data[0][:5]).probs
    )
    refined, wanted = (p.refine(data, tolerated_loss=0.02, tune=False) for p in (implicit, dense))
    assert refined.width == pytest.approx(wanted.width, rel=1e-5)


def test_width_of_a_matrix_free_posterior_with_channels_first_is_that_of_the_dense_one() -> None:
    torch.manual_seed(0)
    x = torch.randn(20, 1, 2, 3).double()
    y = (x[:, 0] > 0).long() + (x[:, 0] > 1).long()
    model = nn.Sequential(nn.Conv2d(1, 4, 1), nn.Tanh(), nn.Conv2d(4, 3, 1)).double()
    optimiser = torch.optim.Adam(model.parameters(), lr=0.05)
    for _ in range(200):
        optimiser.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimiser.step()
    likelihood = lapis.Categorical(channels="first")
    dense = lapis.laplace(model, (x, y), likelihood, structure="dense")
    tuned = lapis.laplace(model, (x, y), likelihood, structure="implicit").tune(max_iterations=50)
    same = dense.with_prior(tuned.prior)
    assert tuned.width == pytest.approx(chosen_width(same, same.sample_of_data(), 0.004), rel=1e-9)
    assert tuned.width < 1
