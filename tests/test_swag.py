"""SWAG: moments of the snapshots, draws from them, statistics of batch norm, files, and the call that trains."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from scipy.stats import chi2
from torch import Tensor, nn
from torch.optim.swa_utils import update_bn

import lapis
from lapis.files import read, write
from lapis.posteriors.swag import RenewedSWAGPosterior
from lapis.training import plain
from untouched import untouched

F64 = torch.float64


def linear() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(3, 2).double()


def flat(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def wander(collector: lapis.SWAG, model: nn.Module, steps: int, seed: int = 0) -> list[Tensor]:
    """Snapshots along a random walk far from the origin; returns the weights."""
    generator = torch.Generator().manual_seed(seed)
    seen = []
    for _ in range(steps):
        with torch.no_grad():
            for p in model.parameters():
                p.add_(torch.randn(p.shape, dtype=p.dtype, generator=generator))
        with untouched(model):
            collector.collect()
        seen.append(flat(model))
    return seen


# moments -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("steps", "rank"), [(9, 4), (3, 20), (9, 0)])
def test_running_moments_are_those_of_all_snapshots(steps: int, rank: int) -> None:
    model = linear()
    collector = lapis.SWAG(model, rank=rank)
    seen = torch.stack(wander(collector, model, steps))
    running = [seen[: i + 1].mean(0) for i in range(steps)]
    deviations = torch.stack([weights - mean for weights, mean in zip(seen, running, strict=True)])
    kept = deviations[steps - min(steps, rank) :]
    variance = seen.square().mean(0) - seen.mean(0).square()
    posterior = collector.posterior("regression")
    torch.testing.assert_close(posterior.mean, seen.mean(0))
    torch.testing.assert_close(posterior.variance, variance)
    torch.testing.assert_close(posterior.deviations, kept)
    whole = variance.diag()
    if rank:
        whole = (whole + kept.T @ kept / (len(kept) - 1)) / 2
    torch.testing.assert_close(posterior.marginal_variance(), whole.diagonal())
    torch.testing.assert_close(collector.marginal_variance(), whole.diagonal())
    assert (len(collector), posterior.collected, len(posterior.deviations)) == (steps, steps, min(steps, rank))


def test_small_steps_of_large_weights_do_not_cancel() -> None:
    """Mean squares minus squared means of weights of 1000 that move by 0.01 would be rounding errors in float32."""
    model = nn.Linear(1, 1, bias=False)
    collector = lapis.SWAG(model)
    for step in (-1, 0, 1):
        nn.init.constant_(model.weight, 1000 + 0.015625 * step)
        collector.collect()
    torch.testing.assert_close(collector.variance, torch.tensor([2 / 3 * 0.015625**2], dtype=F64))


@pytest.mark.parametrize("rank", [5, 0])
def test_draws_have_mean_and_covariance(rank: int) -> None:
    """Chi-square tests of 4,000 draws: mean, spread along and between eigenvectors; false alarms 1 in 2,500."""
    model = linear()
    collector = lapis.SWAG(model, rank=rank)
    wander(collector, model, 7)
    posterior = collector.posterior("regression")
    draws = posterior.sample(4000, generator=torch.Generator().manual_seed(2)) - posterior.mean
    covariance = posterior.variance.diag()
    if rank:
        covariance = (covariance + posterior.deviations.T @ posterior.deviations / (rank - 1)) / 2
    values, vectors = torch.linalg.eigh(covariance)
    white = draws @ vectors / values.sqrt()
    assert float(4000 * white.mean(0).square().sum()) < chi2.ppf(1 - 1e-4, 8)
    low, high = chi2.ppf([1e-4 / 16, 1 - 1e-4 / 16], 4000)
    spread = white.square().sum(0)
    assert bool(((spread > low) & (spread < high)).all())
    # off the diagonal: products of independent standard normals have variance one
    products = (white.T @ white / 4000**0.5)[torch.ones(8, 8).triu(1).bool()]
    assert float(products.square().sum()) < chi2.ppf(1 - 1e-4, 28)
    one_by_one = list(posterior.draws(3, torch.Generator().manual_seed(2)))
    torch.testing.assert_close(torch.stack(one_by_one) - posterior.mean, draws[:3])


def test_snapshots_survive_in_a_file(tmp_path: Path) -> None:
    model = linear()
    whole = lapis.SWAG(model, rank=4)
    wander(whole, model, 5)
    whole.save(tmp_path / "snapshots.lapis")
    other = copy.deepcopy(model)
    resumed = lapis.SWAG.load(tmp_path / "snapshots.lapis", other)
    wander(whole, model, 3, seed=1)
    wander(resumed, other, 3, seed=1)
    one, two = (collector.posterior("regression") for collector in (whole, resumed))
    for name in ("mean", "variance", "deviations"):
        assert torch.equal(getattr(one, name), getattr(two, name))
    assert one.collected == two.collected == 8
    lapis.SWAG(model, rank=0).save(tmp_path / "empty.lapis")
    assert len(lapis.SWAG.load(tmp_path / "empty.lapis", model)) == 0
    with pytest.raises(lapis.FileError, match="another network"):
        lapis.SWAG.load(tmp_path / "snapshots.lapis", nn.Linear(3, 3).double())
    contents = read(tmp_path / "snapshots.lapis", "SWAG collector")
    for change, message in (
        ({"mean": torch.zeros(3, dtype=F64)}, "mean does not fit"),
        ({"squares": -torch.ones(8, dtype=F64)}, "squares does not fit"),
        ({"deviations": torch.zeros(1, 8, dtype=F64)}, "deviations does not fit"),
    ):
        write(tmp_path / "odd.lapis", contents.config, {**contents.tensors, **change}, "SWAG collector")
        with pytest.raises(lapis.FileError, match=message):
            lapis.SWAG.load(tmp_path / "odd.lapis", model)
    with pytest.raises(lapis.FileError, match="not a Lapis posterior"):
        lapis.load(tmp_path / "snapshots.lapis", model)


def test_mistakes_are_named() -> None:
    model = linear()
    for rank, message in ((-1, "Bad rank"), (1, "One deviation"), (2.0, "Bad rank")):
        with pytest.raises(lapis.OptionError, match=message):
            lapis.SWAG(model, rank=rank)
    collector = lapis.SWAG(model)
    collector.collect()
    with pytest.raises(lapis.ModelError, match="too few snapshots"):
        collector.posterior("regression")
    collector.collect()
    model.bias.requires_grad_(False)
    with pytest.raises(lapis.ModelError, match="'bias' trainable"):
        collector.posterior("regression")
    nn.init.constant_(model.bias, torch.nan)
    with pytest.raises(lapis.ModelError, match="not finite"):
        collector.collect()
    assert len(collector) == 2


# predictions -------------------------------------------------------------------------------------------


def test_without_data_it_predicts_all_the_same_and_serves_subnetworks(tmp_path: Path) -> None:
    model = linear()
    collector = lapis.SWAG(model)
    wander(collector, model, 6)
    posterior = collector.posterior(lapis.Gaussian(0.3))
    x = torch.randn(5, 3, dtype=F64)
    prediction = posterior.predict(x, samples=50)
    outputs = torch.stack([x @ w[:6].reshape(2, 3).T + w[6:] for w in posterior.sample(50)])
    torch.testing.assert_close(prediction.mean, outputs.mean(0))
    assert posterior.n_data == 0
    posterior.save(tmp_path / "posterior.lapis")
    torch.testing.assert_close(
        lapis.load(tmp_path / "posterior.lapis", model).predict(x, samples=50).mean, prediction.mean
    )
    assert "plain_nll" in collector.posterior("regression", (x, x[:, :2])).diagnose((x, x[:, :2])).numbers
    best = sorted(collector.marginal_variance().topk(3).indices.tolist())
    for source in (collector, posterior):
        part = lapis.laplace(model, (x, x[:, :2]), "regression", weights=lapis.Subnetwork(3, from_=source))
        mask = {name: torch.zeros(p.shape).bool() for name, p in model.named_parameters()}
        for name, index in part.network.indices.items():
            mask[name].view(-1)[index] = True
        assert torch.cat([m.reshape(-1) for m in mask.values()]).nonzero()[:, 0].tolist() == best


def normalised() -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(3, 6),
        nn.BatchNorm1d(6),
        nn.Tanh(),
        nn.Dropout(0.5),
        nn.Linear(6, 5),
        nn.BatchNorm1d(5),
        nn.Linear(5, 2),
    ).double()
    generator = torch.Generator().manual_seed(3)
    x = 2 + torch.randn(24, 3, dtype=F64, generator=generator)
    return model, (x, torch.randn(24, 2, dtype=F64, generator=generator))


def test_batch_norm_is_renewed_for_every_draw(tmp_path: Path) -> None:
    """Statistics are those of torch's own recomputation, and predictions those of such networks."""
    model, (x, y) = normalised()
    collector = lapis.SWAG(model, rank=3)
    wander(collector, model, 4)
    model.eval()
    with pytest.raises(lapis.ModelError, match="has batch norm"):
        collector.posterior("regression")
    data = [(x[i : i + 8], y[i : i + 8]) for i in range(0, 24, 8)]
    new = torch.randn(5, 3, dtype=F64)
    with untouched(model):
        posterior = collector.posterior("regression", data)
        draws = posterior.sample(3)
        prediction = posterior.predict(new, samples=3)
    assert isinstance(posterior, RenewedSWAGPosterior)
    outputs = []
    for weights in draws:
        other = copy.deepcopy(model)
        other.load_state_dict({**other.state_dict(), **posterior.network.unflatten(weights)})
        other[3].p = 0.0
        update_bn([batch[0] for batch in data], other)
        for name, statistic in posterior.statistics(weights).items():
            torch.testing.assert_close(statistic, other.state_dict()[name])
        outputs.append(other.eval()(new))
    torch.testing.assert_close(prediction.mean, torch.stack(outputs).mean(0).detach())
    # inputs in parts see the same networks, without another pass over the data
    passes = []
    model.register_forward_pre_hook(lambda *_: passes.append(1))
    torch.testing.assert_close(posterior.predict(iter([new[:2], new[2:]]), samples=3).mean, prediction.mean)
    assert len(passes) < 12
    # files need the same data again
    posterior.save(tmp_path / "posterior.lapis")
    loaded = lapis.load(tmp_path / "posterior.lapis", copy.deepcopy(model), data=data)
    torch.testing.assert_close(loaded.predict(new, samples=3).mean, prediction.mean)
    with pytest.raises(lapis.DataError, match="not the data"):
        lapis.load(tmp_path / "posterior.lapis", model, data=data[:2])
    with pytest.raises(lapis.FileError, match="needs its data"):
        lapis.load(tmp_path / "posterior.lapis", model)


def test_batches_of_batch_norm_count_by_their_examples() -> None:
    model, (x, y) = normalised()
    collector = lapis.SWAG(model, rank=0)
    wander(collector, model, 3)
    posterior = collector.posterior("regression", [(x[:16], y[:16]), (x[16:23], y[16:23]), (x[23:], y[23:])])
    assert isinstance(posterior, RenewedSWAGPosterior)
    (weights,) = posterior.sample(1)
    parameters = posterior.network.unflatten(weights)
    hidden = x @ parameters["0.weight"].T + parameters["0.bias"]
    expected = (16 * hidden[:16].mean(0) + 7 * hidden[16:23].mean(0)) / 23
    torch.testing.assert_close(posterior.statistics(weights)["1.running_mean"], expected)
    variance = (16 * hidden[:16].var(0) + 7 * hidden[16:23].var(0)) / 23
    torch.testing.assert_close(posterior.statistics(weights)["1.running_var"], variance)


# the call that trains ----------------------------------------------------------------------------------


def test_one_call_trains_collects_and_leaves_the_mean() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(120, 1, dtype=F64, generator=generator) * 4 - 2
    y = (2 * x).sin() + 0.1 * torch.randn(120, 1, dtype=F64, generator=generator)

    def run(**options: Any) -> tuple[Any, nn.Module]:
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(1, 20), nn.Tanh(), nn.Linear(20, 1)).double()
        options = {"epochs": 80, "snapshots": 8, "rank": 4, "batch_size": 30, **options}
        return lapis.swag(model, (x, y), "regression", learning_rate=0.03, **options), model

    posterior, model = run()
    torch.testing.assert_close(posterior.mean, flat(model))
    assert (posterior.collected, len(posterior.deviations), posterior.n_data) == (8, 4, 120)
    residual = float((model(x) - y).detach().square().mean().sqrt())
    assert float(posterior.likelihood.noise) == pytest.approx(residual)
    assert 0.05 < residual < 0.2
    prediction = posterior.predict(x)
    assert float((prediction.mean - y).square().mean().sqrt()) < 0.2
    assert bool((prediction.f_variance > 0).all())
    again, _ = run()
    assert torch.equal(again.deviations, posterior.deviations)
    other, _ = run(generator=torch.Generator().manual_seed(5))
    assert not torch.equal(other.deviations, posterior.deviations)
    for options, message in (
        ({"snapshots": 1}, "Bad snapshots"),
        ({"epochs": -1}, "Bad epochs"),
        ({"collecting_rate": 0.0}, "Bad collecting_rate"),
        ({"rank": 1}, "One deviation"),
        ({"generator": 3}, "Bad generator"),
    ):
        with pytest.raises(lapis.OptionError, match=message):
            run(**options)


@pytest.mark.parametrize("batches", [7, 28, 45])  # of 4 an epoch: in training (6 epochs), and while collecting (8)
def test_an_interrupted_call_goes_on_as_if_nothing_had_happened(
    batches: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = torch.linspace(-2, 2, 40, dtype=F64)[:, None]
    y, path = (2 * x).sin(), tmp_path / "run.lapis"

    def run(seed: int = 1, **options: Any) -> tuple[Any, nn.Module]:
        torch.manual_seed(seed)
        layers = (nn.Linear(1, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Dropout(0.2), nn.Linear(6, 1))
        model = nn.Sequential(*layers).double()
        options = {"epochs": 6, "snapshots": 8, "rank": 4, "batch_size": 10, **options}
        return lapis.swag(model, (x, y), "regression", **options), model

    posterior, model = run()
    step, left = plain.take_step, iter(range(batches))

    def interrupted(*rest: Any) -> Any:
        if next(left, None) is None:
            raise KeyboardInterrupt
        return step(*rest)

    with monkeypatch.context() as patched:
        patched.setattr(plain, "take_step", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run(checkpoint=path)
    taken: list[int] = []
    monkeypatch.setattr(plain, "take_step", lambda *rest: taken.append(1) or step(*rest))
    resumed, other = run(seed=2, checkpoint=path)  # other weights at the start do not matter
    assert len(taken) == 56 - 4 * (batches // 4)
    for name in ("mean", "variance", "deviations"):
        assert torch.equal(getattr(resumed, name), getattr(posterior, name))
    assert all(torch.equal(one, two) for one, two in zip(model.buffers(), other.buffers(), strict=True))
    assert resumed.likelihood.noise == posterior.likelihood.noise
    done, _ = run(checkpoint=path)
    assert len(taken) == 56 - 4 * (batches // 4)
    assert torch.equal(done.deviations, posterior.deviations)
    for options in ({"rank": 3}, {"collecting_rate": 0.5}, {"generator": torch.Generator().manual_seed(3)}):
        with pytest.raises(lapis.FileError, match="belongs to another SWAG run"):
            run(checkpoint=path, **options)


def test_one_call_renews_batch_norm_of_the_mean() -> None:
    model, (x, y) = normalised()
    data = [(x[i : i + 8], y[i : i + 8]) for i in range(0, 24, 8)]
    before = flat(model)
    posterior = lapis.swag(model, data, lapis.Gaussian(0.5), epochs=0, snapshots=3, rank=2)
    assert isinstance(posterior, RenewedSWAGPosterior)
    assert not torch.equal(before, flat(model))
    torch.testing.assert_close(posterior.mean, flat(model))
    assert float(posterior.likelihood.noise) == 0.5
    for name, statistic in posterior.statistics(posterior.mean).items():
        torch.testing.assert_close(statistic, model.state_dict()[name])
