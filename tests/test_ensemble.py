"""Deep ensembles: members of any kind, trained in turn, by processes or after an interruption, run together or not."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lapis
from lapis.posteriors.predicting import members as predicting
from lapis.training import members as training
from lapis.training.plain import fit_network
from untouched import untouched

F64 = torch.float64


def net(width: int = 6, outputs: int = 3, norm: bool = False) -> nn.Module:
    layers = [nn.Linear(4, width), *([nn.BatchNorm1d(width)] if norm else []), nn.Tanh(), nn.Linear(width, outputs)]
    model = nn.Sequential(*layers).double()
    for name, buffer in model.named_buffers():
        if "running" in name:
            buffer.uniform_(0.5, 1.5)
    return model


def make() -> nn.Module:
    """At the top level, for other processes."""
    return nn.Sequential(nn.Linear(1, 4), nn.Tanh(), nn.Dropout(0.1), nn.Linear(4, 1))


def nets(**options: Any) -> list[nn.Module]:
    torch.manual_seed(0)
    return [net(**options) for _ in range(4)]


def inputs() -> Tensor:
    return torch.randn(5, 4, dtype=F64, generator=torch.Generator().manual_seed(1))


def line() -> tuple[Tensor, Tensor]:
    x = torch.linspace(-1, 1, 24)[:, None]
    return x, (3 * x).sin()


def outputs(models: list[nn.Module], x: Tensor) -> Tensor:
    return torch.stack([copy.deepcopy(model).eval()(x).detach() for model in models])


@pytest.mark.parametrize("norm", [False, True])
def test_the_prediction_is_the_mixture_of_its_members(norm: bool) -> None:
    models, x = nets(norm=norm), inputs()
    with untouched(*models):
        prediction = lapis.ensemble(models, "classification").predict(x)
    expected = outputs(models, x)
    torch.testing.assert_close(prediction.latent.values[:, :, 0], expected)
    torch.testing.assert_close(prediction.probs, expected.softmax(-1).mean(0))
    torch.testing.assert_close(prediction.f_variance, expected.var(0, unbiased=False))


@pytest.mark.parametrize("norm", [False, True])
def test_members_run_together_give_the_outputs_of_each_alone(norm: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parameters and buffers differ between members; the path is taken, and proven."""
    models, x = nets(norm=norm), inputs()
    posterior = lapis.ensemble(models, "classification")
    assert posterior._stacked is not None
    found = predicting._together(posterior.members, posterior._stacked, posterior.likelihood, x)
    assert found is not None
    torch.testing.assert_close(found.values[:, :, 0], outputs(models, x), rtol=1e-12, atol=1e-12)
    some = posterior.predict(x, samples=2, generator=torch.Generator().manual_seed(3)).latent.values[:, :, 0]
    chosen = torch.randperm(4, generator=torch.Generator().manual_seed(3))[:2]
    torch.testing.assert_close(some, outputs(models, x)[chosen])
    vmap = torch.func.vmap
    monkeypatch.setattr(torch.func, "vmap", lambda function: lambda part: 1.01 * vmap(function)(part))
    wrong = lapis.ensemble(models, "classification")
    torch.testing.assert_close(wrong.predict(x).latent.values[:, :, 0], outputs(models, x), rtol=1e-12, atol=1e-12)
    assert predicting.TOGETHER in wrong.network.proofs.refused


def test_members_with_other_attributes_do_not_run_together() -> None:
    """The same layers and shapes, but another slope: seen by the comparison only."""
    torch.manual_seed(0)
    models = [nn.Sequential(nn.Linear(4, 6), nn.LeakyReLU(slope), nn.Linear(6, 3)).double() for slope in (0.1, 0.9)]
    posterior = lapis.ensemble(models, "classification")
    torch.testing.assert_close(posterior.predict(inputs()).latent.values[:, :, 0], outputs(models, inputs()))
    assert predicting.TOGETHER in posterior.network.proofs.refused


def test_outputs_that_are_not_one_an_example_are_refused() -> None:
    class Regrouped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 1)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.linear(x.reshape(-1, 3))
            return out

    members = lapis.ensemble([Regrouped(), Regrouped()], "bernoulli")
    with pytest.raises(lapis.ModelError, match="2 examples"):
        members.predict(torch.ones(2, 6))


def test_members_may_be_of_different_architectures(tmp_path: Path) -> None:
    torch.manual_seed(0)
    models = [net(6), net(9), net(6, norm=True)]
    posterior = lapis.ensemble(nn.ModuleList(models), "classification")
    torch.testing.assert_close(posterior.predict(inputs()).latent.values[:, :, 0], outputs(models, inputs()))
    with pytest.raises(lapis.FileError, match="different architectures"):
        posterior.save(tmp_path / "ensemble.lapis")
    with pytest.raises(lapis.ModelError, match="another architecture"):
        posterior.sample()


def test_samples_are_members_each_as_often_as_any_other() -> None:
    models, x = nets(), inputs()
    posterior = lapis.ensemble(models, "classification")
    flat = torch.stack([nn.utils.parameters_to_vector(model.parameters()).detach() for model in models])
    draws = posterior.sample(4, generator=torch.Generator().manual_seed(3))
    assert sorted(map(tuple, draws.tolist())) == sorted(map(tuple, flat.tolist()))
    assert posterior.predict(x, samples=2).latent.values.shape[0] == 2
    more = posterior.sample(10, generator=torch.Generator().manual_seed(3))
    torch.testing.assert_close(more[:4], draws, rtol=0, atol=0)
    counts = sorted(int((more == row).all(1).sum()) for row in flat)
    assert counts == [2, 2, 3, 3]
    with pytest.raises(lapis.OptionError, match="fewer members"):
        posterior.predict(x, samples=5)
    with pytest.raises(lapis.ModelError, match=r"other values in .1.running_mean"):
        lapis.ensemble(nets(norm=True), "classification").sample()


def test_a_file_holds_all_members_and_any_network_of_the_architecture_loads_it(tmp_path: Path) -> None:
    models, x = nets(norm=True), inputs()
    posterior = lapis.ensemble(models, "classification")
    posterior.save(tmp_path / "ensemble.lapis")
    fresh = net(norm=True)
    with untouched(fresh):
        loaded = lapis.load(tmp_path / "ensemble.lapis", fresh)
        torch.testing.assert_close(loaded.predict(x).probs, posterior.predict(x).probs)
    assert len(loaded) == 4
    for other in (net(7, norm=True), net()):
        with pytest.raises(lapis.FileError, match="another network"):
            lapis.load(tmp_path / "ensemble.lapis", other)


def test_any_changed_member_is_noticed() -> None:
    models = nets(norm=True)
    posterior = lapis.ensemble(models, "classification")
    models[2][1].running_mean.add_(0.1)
    with pytest.raises(lapis.ModelError, match="has changed"):
        posterior.predict(inputs())


def test_mistakes_are_refused_before_any_training(tmp_path: Path) -> None:
    model, x, data = net(), inputs(), line()
    with pytest.raises(lapis.ModelError, match=r"different outputs.*\(5, 2\) of member 1"):
        lapis.ensemble([model, net(outputs=2)], "classification").predict(x)
    with pytest.raises(lapis.ModelError, match="different outputs"):
        lapis.ensemble([model, net(outputs=2)], (x, torch.zeros(5).long()), "classification")
    (tmp_path / "file").touch()
    refused: list[tuple[Any, dict[str, Any], str]] = [
        (([model, model], "classification"), {}, "the same module twice"),
        (([model, net().float()], "classification"), {}, "does not fit into the ensemble"),
        (([], "classification"), {}, "empty"),
        ((model, "classification"), {}, "several networks"),
        (([model],), {}, "no likelihood"),
        (([model], "classification"), {"size": 3}, "need no size"),
        (([model], "classification"), {"epochs": 3}, "need no epochs"),
        ((lambda: 3, data, "regression"), {}, "makes no networks"),
        ((make, iter([data]), "regression"), {}, "read only once"),
        ((make, None, "regression"), {}, "no data set"),
        ((make, data, "regression"), {"size": 0}, "Bad size"),
        ((make, data, "regression"), {"workers": 0}, "Bad workers"),
        ((make, data, "regression"), {"optimiser": "newton"}, "Unknown optimiser"),
        ((lambda: make(), data, "regression"), {"workers": 2}, "cannot make these networks"),
        ((make, data, "regression"), {"checkpoint": tmp_path / "file"}, "cannot be kept there"),
    ]
    for arguments, options, message in refused:
        with pytest.raises(lapis.LapisError, match=message):
            lapis.ensemble(*arguments, **options)


def test_members_are_trained_from_starts_and_orders_of_their_own() -> None:
    """Each is what `fit_network` makes of its own first weights; torch's random numbers are left as they were."""
    data, state = line(), torch.get_rng_state()
    posterior = lapis.ensemble(make, data, "regression", size=3, epochs=3, batch_size=8, learning_rate=0.01)
    assert torch.equal(torch.get_rng_state(), state)
    assert (len(posterior), posterior.n_data) == (3, 24)
    seeds = torch.randint(2**62, (3,), generator=torch.Generator().manual_seed(0)).tolist()
    squares = []
    for member, seed in zip(posterior.members, seeds, strict=True):
        torch.manual_seed(seed)
        expected = make()
        source = torch.Generator().manual_seed(seed)
        fit_network(expected, data, "regression", epochs=3, batch_size=8, learning_rate=0.01, generator=source)
        assert torch.equal(member.flat(), nn.utils.parameters_to_vector(expected.parameters()))
        squares.append((expected.eval()(data[0]) - data[1]).square().mean())
    torch.testing.assert_close(posterior.likelihood.noise.float(), torch.stack(squares).mean().sqrt())
    weights = posterior.sample(3)
    assert float(torch.pdist(weights).min()) > 0.1
    again = lapis.ensemble(make, data, "regression", size=3, epochs=3, generator=torch.Generator().manual_seed(1))
    assert not torch.equal(again.sample(3), weights)


def test_an_interrupted_ensemble_goes_on_with_the_members_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, options = line(), {"size": 3, "epochs": 2, "batch_size": 8}
    whole = lapis.ensemble(make, data, "regression", **options)
    trained: list[int] = []

    def stop_at(last: int) -> Any:
        def fit(*args: Any, **kwargs: Any) -> Any:
            trained.append(len(trained))
            if len(trained) == last:
                raise KeyboardInterrupt
            return fit_network(*args, **kwargs)

        return fit

    monkeypatch.setattr(training, "fit_network", stop_at(2))
    with pytest.raises(KeyboardInterrupt):
        lapis.ensemble(make, data, "regression", checkpoint=tmp_path / "members", **options)
    assert [path.name for path in (tmp_path / "members").iterdir()] == ["member-0.lapis"]
    monkeypatch.setattr(training, "fit_network", stop_at(-1))
    trained.clear()
    found = lapis.ensemble(make, data, "regression", checkpoint=tmp_path / "members", **options)
    assert len(trained) == 2
    assert torch.equal(found.sample(3), whole.sample(3))
    larger = lapis.ensemble(make, data, "regression", checkpoint=tmp_path / "members", **(options | {"size": 4}))
    assert len(trained) == 3
    assert all(torch.equal(one.flat(), two.flat()) for one, two in zip(larger.members, whole.members, strict=False))
    for changed, message in (({"epochs": 4}, "epochs"), ({"weight_decay": 0.1}, "weight_decay")):
        with pytest.raises(lapis.FileError, match=f"another member of an ensemble.*{message}"):
            lapis.ensemble(make, data, "regression", checkpoint=tmp_path / "members", **(options | changed))
    with pytest.raises(lapis.FileError, match="targets"):
        lapis.ensemble(make, (data[0], 2 * data[1]), "regression", checkpoint=tmp_path / "members", **options)


def test_processes_train_the_same_members(tmp_path: Path) -> None:
    data, options = line(), {"size": 2, "epochs": 2, "batch_size": 8}
    alone = lapis.ensemble(make, data, "regression", **options)
    pooled = lapis.ensemble(make, data, "regression", workers=2, checkpoint=tmp_path, **options)
    torch.testing.assert_close(pooled.sample(2), alone.sample(2))
    assert len(list(tmp_path.iterdir())) == 2


def test_ensembles_beat_their_members_on_new_data() -> None:
    """The mean log score of a mixture is at least that of its members' mean, by Jensen; here it is clearly larger."""
    torch.manual_seed(0)
    x = torch.randn(200, 4)
    y = (x[:, :2].prod(1) + 0.3 * torch.randn(200) > 0).long()
    posterior = lapis.ensemble(
        lambda: nn.Sequential(nn.Linear(4, 20), nn.Tanh(), nn.Linear(20, 2)), (x[:100], y[:100]), "classification",
        size=5, epochs=80, learning_rate=0.1,
    )  # fmt: skip
    members = torch.stack([member.module(x[100:]).log_softmax(-1).detach() for member in posterior.members])
    alone = members.gather(-1, y[100:].expand(5, 100)[..., None]).mean()
    assert float(posterior.predict(x[100:]).log_prob(y[100:]).mean()) > float(alone) + 0.05
    report = posterior.diagnose((x[100:], y[100:]))
    assert report.numbers["nll"] < report.numbers["plain_nll"]
