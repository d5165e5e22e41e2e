"""Calibration on held-out data: the log likelihood of every candidate, the search among them, records and warnings."""

from __future__ import annotations

import warnings
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lapis
from lapis.batches import batches
from lapis.posteriors.laplace.calibration import held_out
from lapis.posteriors.laplace.calibration.held_out import Predicted, Setting, Swept
from untouched import untouched

F64 = torch.float64
STRUCTURES = ("dense", "diagonal", "kronecker", "ekfac", "lowrank")


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


class Images(nn.Module):
    """A convolution, an embedding of the position's parity and a linear layer: contributions of every kind."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.table = nn.Conv2d(1, 2, 3), nn.Embedding(2, 8)
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        parity = (x.flatten(1).sum(1) > 0).long()
        return self.head(self.norm(self.convolution(x).tanh().flatten(1) + self.table(parity)))


def problem(kind: str, n: int, seed: int) -> tuple[Any, Tensor]:
    """Inputs and noisy targets of a problem."""
    x = torch.randn(n, 1, 4, 4, dtype=F64, generator=generator(seed))
    signal = 1.5 * x[:, 0, :2, 0] + x[:, 0, 1:3, 1].square()
    noise = torch.randn(n, 2, dtype=F64, generator=generator(seed + 1))
    if kind == "classification":
        return x, (signal + noise).sum(1).div(2).clamp(0, 2).long()
    if kind == "poisson":
        return x, torch.poisson((0.3 * signal).clamp(max=3).exp(), generator(seed + 2))
    return x, signal + 0.3 * noise


def network(kind: str) -> nn.Module:
    """Trained for a while on the 40 examples of seed 0."""
    torch.manual_seed(0)
    model = Images().double()
    if kind != "classification":
        model.head = nn.Linear(8, 2).double()
    x, y = problem(kind, 40, 0)
    losses = {"classification": nn.functional.cross_entropy, "poisson": nn.functional.poisson_nll_loss}
    loss = losses.get(kind, nn.functional.mse_loss)
    optimiser = torch.optim.Adam(model.parameters(), 0.03)
    for _ in range(150 if kind == "regression" else 25):
        optimiser.zero_grad()
        loss(model(x), y).backward()
        optimiser.step()
    return model


@pytest.fixture(scope="module")
def networks() -> dict[str, nn.Module]:
    return {kind: network(kind) for kind in ("classification", "regression", "poisson")}


def fit(model: nn.Module, kind: str, structure: str, **options: Any) -> Any:
    likelihood: Any = lapis.Gaussian(0.4) if kind == "regression" else kind
    if structure == "lowrank":
        options["rank"] = 25
    return lapis.laplace(model, problem(kind, 40, 0), likelihood, structure=structure, **options)


def total(posterior: Any, data: tuple[Any, Tensor], **options: Any) -> float:
    return float(posterior.predict(data[0], **options).log_prob(data[1]).sum())


def plain(posterior: Any, data: tuple[Any, Tensor]) -> float:
    likelihood = posterior.likelihood
    raw = posterior.network.module.eval()(data[0]).detach()
    f = likelihood.canonical(raw)
    return -float(likelihood.nll(f, likelihood.targets(data[1], f, raw.shape)).sum())


CASES = [
    ("dense", "one", "classification"),
    ("dense", "parameter", "regression"),
    ("diagonal", "layer", "poisson"),
    ("diagonal", "parameter", "classification"),
    ("kronecker", "one", "regression"),
    ("kronecker", "layer", "classification"),
    ("kronecker", "parameter", "poisson"),
    ("ekfac", "layer", "regression"),
    ("ekfac", "parameter", "classification"),
    ("lowrank", "one", "poisson"),
    ("lowrank", "layer", "regression"),
]


@pytest.mark.parametrize(("structure", "groups", "kind"), CASES)
def test_every_candidate_has_the_log_likelihood_of_its_prediction(
    networks: dict[str, nn.Module], structure: str, groups: str, kind: str
) -> None:
    posterior = fit(networks[kind], kind, structure, prior=lapis.Prior(1.0, groups=groups))
    count = len(posterior.weight_prior.precision)
    precisions = 0.3 + torch.rand(count, dtype=F64, generator=generator(1))
    posterior = posterior.with_prior(lapis.Prior(precisions, groups=groups))
    data = problem(kind, 13, 7)
    held = list(batches(data, dtype=F64, device=torch.device("cpu"), batch_size=5)[0])
    swept, predicted = (
        kind(posterior, held, None, *more) for kind, *more in ((Swept, range(-8, 13), False), (Predicted,))
    )
    blocks_have_one_group = groups == "layer" and structure in ("diagonal", "kronecker", "ekfac")
    assert swept.axes == (count if blocks_have_one_group else 1)
    noise = 0.3 if kind == "regression" else 0.0
    places = generator(2)
    for temperature, moved in product((0.0, -1.2), (False, True)):
        u = torch.randint(-8, 13, (swept.axes if moved else 1,), generator=places) * held_out.STEP
        sharpness = 0.7 if moved and kind == "classification" else 0.0
        setting = Setting(tuple(u.expand(swept.axes).tolist()), temperature, noise if moved else 0.0, sharpness)
        expected = predicted.log_likelihood(setting)
        assert swept.log_likelihood(setting) == pytest.approx(expected, rel=1e-9)
        assert expected == pytest.approx(total(setting.applied(posterior), data), rel=1e-9)
    assert swept.log_likelihood(Setting((0.0,) * swept.axes)) == pytest.approx(total(posterior, data), rel=1e-9)
    assert swept.plain(0.0) == pytest.approx(plain(posterior, data), rel=1e-12)
    swept.extend(4, 4)
    end = Setting((held_out.STEP * swept.indices[0],) * swept.axes)
    assert swept.log_likelihood(end) == pytest.approx(predicted.log_likelihood(end), rel=1e-9)


def test_candidates_of_a_moved_mean_and_of_positions_of_any_number() -> None:
    """Tokens with a class each, in batches of different lengths; the mean is not the linearisation point."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 3)).double()
    data = [
        (torch.randint(7, (n, length), generator=generator(n)), torch.randint(3, (n, length), generator=generator(n)))
        for n, length in ((4, 3), (5, 2), (3, 3))
    ]
    for structure in STRUCTURES[:4]:
        posterior: Any = lapis.laplace(model, data, "classification", structure=structure)
        posterior = replace(posterior, mean=posterior.mean + 0.1, width=0.6)
        held = list(batches(data[:2], dtype=F64, device=torch.device("cpu"))[0])
        found = Swept(posterior, held, "probit", range(-2, 3), False).log_likelihood(Setting((1.0,), 0.5))
        changed = Setting((1.0,), 0.5).applied(posterior)
        assert float(changed.weight_prior.precision) == pytest.approx(2**0.5)
        assert changed.temperature == pytest.approx(2**0.5)
        expected = sum(total(changed, batch, link="probit") for batch in data[:2])
        assert found == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(("structure", "groups", "kind"), CASES)
def test_the_result_is_the_best_candidate_and_never_worse_than_the_network(
    networks: dict[str, nn.Module], structure: str, groups: str, kind: str
) -> None:
    posterior = fit(networks[kind], kind, structure, prior=lapis.Prior(0.5, groups=groups))
    data = problem(kind, 60, 7)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = posterior.calibrate(data, temperature=groups == "layer")
    record = result.calibration
    assert [each.category for each in caught] == [lapis.LapisWarning] * record.prefers_plain
    assert record.plain * 60 == pytest.approx(plain(posterior, data))
    assert record.before * 60 == pytest.approx(total(posterior, data))
    assert record.after * 60 == pytest.approx(total(result, data))
    assert record.after >= record.plain
    for octave in range(-4, 16, 3):
        assert record.after >= total(Setting((octave,)).applied(posterior), data) / 60 - 1e-9
    factors = result.weight_prior.precision / posterior.weight_prior.precision
    assert factors.tolist() == pytest.approx(list(record.precision) * (len(factors) // len(record.precision)))
    assert result.temperature == pytest.approx(posterior.temperature * record.temperature)
    if kind == "regression":
        assert float(result.likelihood.noise) == pytest.approx(0.4 * record.noise)
    assert (record.temperature == 1) == (groups != "layer" or record.prefers_plain)


def test_a_wrong_noise_and_a_wrong_prior_are_mended_from_far_away() -> None:
    model = nn.Linear(5, 5, bias=False).double()
    weight = torch.randn(5, 5, dtype=F64, generator=generator(1))
    inputs = torch.randn(300, 5, dtype=F64, generator=generator(2))
    targets = inputs @ weight.T + 0.2 * torch.randn(300, 5, dtype=F64, generator=generator(3))
    with torch.no_grad():
        model.weight.copy_((torch.linalg.pinv(inputs[:20]) @ targets[:20]).T)
    near = lapis.laplace(model, (inputs[:20], targets[:20]), lapis.Gaussian(0.3), prior=1.0)
    best = near.calibrate((inputs[20:], targets[20:]))
    assert float(best.likelihood.noise) == pytest.approx(0.2, rel=0.1)
    far = near.with_prior(1e6).with_noise(4.0).calibrate((inputs[20:], targets[20:]))
    assert far.calibration.after == pytest.approx(best.calibration.after, abs=2e-3)
    assert float(far.likelihood.noise) == pytest.approx(float(best.likelihood.noise), rel=0.05)


def test_a_refined_posterior_is_calibrated_around_its_own_mean(networks: dict[str, nn.Module]) -> None:
    posterior = fit(networks["poisson"], "poisson", "kronecker").refine(problem("poisson", 40, 0))
    data = problem("poisson", 30, 7)
    result = posterior.calibrate(data)
    assert not torch.equal(result.mean, result.point)
    assert result.calibration.before * 30 == pytest.approx(total(posterior, data))
    assert result.calibration.after * 30 == pytest.approx(total(result, data))
    assert result.calibration.after > max(result.calibration.before, result.calibration.plain)


def agreeing(model: nn.Module) -> tuple[Tensor, Tensor]:
    """Inputs with the network's own choices as classes: on them nothing beats the network alone."""
    x = problem("classification", 30, 7)[0]
    return x, model(x).argmax(1)


@pytest.mark.parametrize("shrunk", [1.0, 0.9])
def test_where_the_network_alone_wins_the_result_predicts_as_it_does(
    networks: dict[str, nn.Module], shrunk: float
) -> None:
    model = networks["classification"]
    posterior = fit(model, "classification", "kronecker")
    posterior = replace(posterior, mean=posterior.mean * shrunk) if shrunk < 1 else posterior
    x, y = agreeing(model)
    with untouched(model), pytest.warns(lapis.LapisWarning, match="better than the network alone"):
        result = posterior.calibrate((x, y))
    assert result.calibration.prefers_plain
    assert result.calibration.after == result.calibration.plain == pytest.approx(plain(posterior, (x, y)) / 30)
    torch.testing.assert_close(result.predict(x).probs, model(x).softmax(-1).detach(), rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("structure", ["dense", "kronecker"])
def test_temperature_makes_a_cautious_network_surer_and_is_at_least_as_good_as_temperature_scaling(
    networks: dict[str, nn.Module], structure: str, tmp_path: Path
) -> None:
    model = networks["classification"]
    posterior = fit(model, "classification", structure)
    x, _ = problem("classification", 200, 7)
    logits = model(x).detach()
    truth = replace(posterior.with_prior(30.0), sharpness=4.0).predict(x).probs  # surer than the network, and in doubt
    y = torch.multinomial(truth, 1, generator=generator(5))[:, 0]
    data = (x, y)
    result = posterior.calibrate(data, temperature=True)
    record = result.calibration
    assert result.sharpness == record.sharpness > 1.5
    scaled = max(-float(nn.functional.cross_entropy(2 ** (k / 50) * logits, y)) for k in range(-200, 200))
    assert record.after >= scaled - 1e-3
    assert record.after * 200 == pytest.approx(total(result, data))
    sampled = result.predict(x, method="sampled", samples=5).probs  # of logits that are sharpened, too
    plain_draws = replace(result, sharpness=1.0).predict(x, method="sampled", samples=5).latent.values
    torch.testing.assert_close(sampled, (result.sharpness * plain_draws).softmax(-1).mean(0)[:, 0])
    result.save(tmp_path / "posterior")
    training = problem("classification", 40, 0)
    loaded = lapis.load(tmp_path / "posterior", model)
    assert total(loaded, data) == pytest.approx(total(result, data), rel=1e-9)
    assert result.calibrate(data).sharpness == result.sharpness
    for changed in (result.with_prior(2.0), result.refine(training), result.tune()):
        assert changed.sharpness == 1


def test_with_temperature_a_bad_mean_is_no_worse_than_temperature_scaling(networks: dict[str, nn.Module]) -> None:
    """The network alone, with its logits scaled, is a candidate: here the posterior's own mean is wrong."""
    model = networks["classification"]
    posterior = fit(model, "classification", "kronecker")
    posterior = replace(posterior, mean=-posterior.mean)
    x, _ = problem("classification", 200, 7)
    logits = model(x).detach()
    y = torch.multinomial((3 * logits).softmax(-1), 1, generator=generator(5))[:, 0]
    with pytest.warns(lapis.LapisWarning, match="with its logits times"):
        result = posterior.calibrate((x, y), temperature=True)
    scaled = max(-float(nn.functional.cross_entropy(2 ** (k / 50) * logits, y)) for k in range(-200, 200))
    assert result.calibration.prefers_plain
    assert result.calibration.after >= scaled - 1e-3
    torch.testing.assert_close(result.predict(x).probs, (result.sharpness * logits).softmax(-1), rtol=1e-6, atol=1e-8)


def test_a_few_examples_that_are_all_right_do_not_make_it_infinitely_sure(networks: dict[str, nn.Module]) -> None:
    model = networks["classification"]
    posterior = fit(model, "classification", "dense")
    x, y = agreeing(model)
    with pytest.warns(lapis.LapisWarning, match="better than the network alone"):
        record = posterior.calibrate((x, y), temperature=True).calibration
    assert 1 < record.sharpness < 10  # without a prior on it, the likelihood grows for ever
    assert record.after > record.plain


def test_validation_data_that_are_the_training_data_cause_a_warning(networks: dict[str, nn.Module]) -> None:
    posterior = fit(networks["regression"], "regression", "diagonal")
    with (
        pytest.warns(lapis.LapisWarning, match="are the data of the fit"),
        pytest.warns(lapis.LapisWarning, match="network alone"),
    ):
        posterior.calibrate(problem("regression", 40, 0), batch_size=7)


def test_structures_without_a_grid_are_calibrated_by_predictions(
    networks: dict[str, nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The implicit structure, and a grid that does not fit in memory; both find what the grid finds, nearly."""
    data = problem("regression", 12, 7)
    stored = fit(networks["regression"], "regression", "dense", weights="last_layer")
    best = stored.calibrate(data).calibration
    implicit = fit(networks["regression"], "regression", "implicit", weights="last_layer").calibrate(data)
    monkeypatch.setattr(held_out, "SHARE", 2**60)
    large = stored.calibrate(data)
    for found in (implicit, large):
        assert found.calibration.after == pytest.approx(best.after, abs=0.02)
        assert found.calibration.after * 12 == pytest.approx(total(found, data))
    assert large.calibration.after == pytest.approx(implicit.calibration.after, rel=1e-6)
    assert implicit.view is None


def test_the_record_is_saved_and_belongs_to_its_prior(networks: dict[str, nn.Module], tmp_path: Path) -> None:
    model = networks["regression"]
    posterior = fit(model, "regression", "kronecker", prior=lapis.Prior(1.0, groups="layer"))
    data = problem("regression", 30, 7)
    result = posterior.calibrate(data, temperature=True)
    result.save(tmp_path / "posterior")
    loaded = lapis.load(tmp_path / "posterior", model)
    assert loaded.calibration == result.calibration
    assert str(loaded.calibration).startswith("validation: log likelihood of 30 examples")
    assert total(loaded, data) == total(result, data)
    for changed in (result.with_prior(2.0), result.with_noise(0.1), result.with_temperature(2.0), result.tune()):
        assert changed.calibration is None


def test_draws_are_narrowed_or_widened_by_one_factor(networks: dict[str, nn.Module], tmp_path: Path) -> None:
    model, data = networks["regression"], problem("regression", 30, 7)
    draws = fit(model, "regression", "implicit").draw(6)
    result = draws.calibrate(data)
    record = result.calibration
    assert record.after * 30 == pytest.approx(total(result, data))
    assert record.before * 30 == pytest.approx(total(draws, data))
    assert record.plain * 30 == pytest.approx(plain(draws, data))
    torch.testing.assert_close(result.marginal_variance(), record.temperature * draws.marginal_variance())
    for octave in range(-6, 7):
        other = replace(draws, likelihood=result.likelihood, deviations=draws.deviations * 2 ** (octave / 2))
        assert record.after >= max(total(other, data) / 30 - 1e-9, record.plain)
    result.save(tmp_path / "draws")
    assert lapis.load(tmp_path / "draws", model).calibration == record
    with pytest.raises(lapis.OptionError, match="temperature already"):
        draws.calibrate(data, temperature=True)


def test_options_without_a_meaning_are_refused(networks: dict[str, nn.Module]) -> None:
    posterior = fit(networks["poisson"], "poisson", "diagonal")
    with pytest.raises(lapis.OptionError, match="Bad temperature"):
        posterior.calibrate(problem("poisson", 5, 7), temperature=2.0)
    with pytest.raises(lapis.OptionError, match="link has no meaning"):
        posterior.calibrate(problem("poisson", 5, 7), link="probit")
