"""Optimisers attached to a network: loops that know nothing of draws take the same steps as `sampled()`."""

from __future__ import annotations

import copy
import gc
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lapis.errors import LapisWarning, OptionError
from lapis.optim import IVON, VOGN, VON, BayesBiNN

N = 40


def problem() -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    x = torch.randn(N, 3)
    return nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 2)), x, (x[:, 0] > 0).long()


def optimiser_of(kind: str, model: nn.Module) -> Any:
    if kind == "VOGN":
        return VOGN(model, data_size=N)
    if kind == "IVON":
        return IVON(model.parameters(), data_size=N)
    return BayesBiNN(model.parameters(), data_size=N, start=1.0, temperature=0.5)


@pytest.mark.parametrize("kind", ["IVON", "VOGN", "BayesBiNN"])
def test_a_plain_loop_takes_the_steps_of_sampled(kind: str) -> None:
    """Two micro-batches a step, gradients clipped before it, an evaluation after it."""
    model, x, y = problem()
    twin = copy.deepcopy(model)
    optimiser, other = optimiser_of(kind, model), optimiser_of(kind, twin)
    handle = optimiser.attach(model)
    for _ in range(3):
        optimiser.zero_grad()
        other.zero_grad()
        for part in (slice(0, 20), slice(20, 40)):
            mean = [p.detach().clone() for p in model.parameters()]
            loss = F.cross_entropy(model(x[part]), y[part]) / 2
            assert not torch.equal(mean[0], model[0].weight)
            loss.backward()
            assert all(torch.equal(one, two) for one, two in zip(mean, model.parameters(), strict=True))
            with other.sampled():
                (F.cross_entropy(twin(x[part]), y[part]) / 2).backward()
        for each in (model, twin):
            nn.utils.clip_grad_norm_(each.parameters(), 0.1)
        optimiser.step()
        other.step()
        model.eval()
        with torch.no_grad():
            assert torch.equal(model(x), twin(x))
        model.train()
    handle.remove()
    F.cross_entropy(model(x), y).backward()
    with pytest.raises(OptionError, match="drawn weights"):
        optimiser.step()


@pytest.mark.parametrize("kind", ["IVON", "VOGN", "BayesBiNN"])
def test_a_loop_that_knows_nothing_of_draws_loses_its_first_step_only(kind: str) -> None:
    """`step()` alone, without `attach`: a warning, then the steps of an attached optimiser."""
    model, x, y = problem()
    twin = copy.deepcopy(model)
    optimiser, other = optimiser_of(kind, model), optimiser_of(kind, twin)
    other.attach(twin)

    def step(of: Any, network: nn.Module) -> None:
        of.zero_grad()
        F.cross_entropy(network(x), y).backward()
        of.step()

    before = model[0].weight.detach().clone()
    with pytest.warns(LapisWarning, match="attach"):
        step(optimiser, model)
    assert torch.equal(model[0].weight, before)
    for _ in range(3):
        step(optimiser, model)
        step(other, twin)
    for one, two in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(one, two)


@pytest.mark.parametrize("kind", ["IVON", "VOGN", "BayesBiNN"])
def test_micro_batches_before_a_closure_become_draws(kind: str) -> None:
    """A loop like Lightning's, that clears before the first micro-batch and steps with the last one as a closure."""
    model, x, y = problem()
    twin = copy.deepcopy(model)
    optimiser, other = optimiser_of(kind, model), optimiser_of(kind, twin)
    other.attach(twin)
    with other.sampled():  # the draw of the step that is left out
        pass

    def step(of: Any, network: nn.Module) -> Any:
        def backward(part: slice) -> Tensor:
            loss = F.cross_entropy(network(x[part]), y[part]) / 2
            loss.backward()
            return loss

        of.zero_grad()
        backward(slice(0, 20))
        return of.step(lambda: backward(slice(20, 40)))

    before = model[0].weight.detach().clone()
    with pytest.warns(LapisWarning, match="attach"):
        assert step(optimiser, model).item() > 0
    assert torch.equal(model[0].weight, before)
    for _ in range(3):
        step(optimiser, model)
        step(other, twin)
    for one, two in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(one, two)
    assert not torch.equal(model[0].weight, before)


def test_copies_and_later_optimisers_do_not_draw_twice(tmp_path: Path) -> None:
    """A second training of the network, a copy and a file of it: the first optimiser's hooks leave them alone."""
    model, x, y = problem()
    IVON(model.parameters(), data_size=N).attach(model)  # and dropped at once
    gc.collect()
    assert not model._forward_pre_hooks
    first = IVON(model.parameters(), data_size=N)
    first.attach(model)
    torch.save(model, tmp_path / "model")
    for other in (copy.deepcopy(model), torch.load(tmp_path / "model", weights_only=False)):
        before = other[0].weight.detach().clone()
        output = other(x)
        assert torch.equal(other[0].weight, before)
        assert not first.is_draw
        output.sum().backward()
    second, third = (
        IVON(model.parameters(), data_size=N),
        IVON((twin := copy.deepcopy(model)).parameters(), data_size=N),
    )
    for optimiser, network in ((second, model), (third, twin)):
        optimiser.attach(network)
        optimiser.zero_grad()
        F.cross_entropy(network(x), y).backward()
        optimiser.step()
    for one, two in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(one, two)


def test_a_network_that_is_not_found_is_said() -> None:
    """Parts that are called one by one hold too few of the weights; so does a search whose optimiser is gone."""
    model, x, y = problem()
    optimiser = IVON(model.parameters(), data_size=N)
    for message in (None, "drawn weights"):
        loss = F.cross_entropy(model[2](model[1](model[0](x))), y)
        loss.backward()
        with pytest.raises(OptionError, match=message) if message else pytest.warns(LapisWarning):
            optimiser.step()
    with pytest.raises(OptionError, match="cannot be attached"):
        VON(model.parameters(), data_size=N).attach(model)
    del optimiser
    gc.collect()
    model(x)
    assert not torch.nn.modules.module._global_forward_pre_hooks


def test_failures_leave_the_mean() -> None:
    model, x, _ = problem()
    mean = model[0].weight.detach().clone()
    optimiser = IVON(model.parameters(), data_size=N)
    optimiser.attach(model)
    with pytest.raises(RuntimeError):
        model(x[:, :2])
    assert torch.equal(model[0].weight, mean)
    model(x)  # a loss that fails, or is not differentiated, leaves a draw until the optimiser or the network is used
    model.eval()
    model(x)
    assert torch.equal(model[0].weight, mean)
    model.train()
    model(x)
    optimiser.state_dict()
    assert torch.equal(model[0].weight, mean)
    total = model(x).sum()
    model[0].weight.register_hook(_fail)
    with pytest.raises(RuntimeError, match="in the backward pass"):
        total.backward()
    optimiser.state_dict()
    assert torch.equal(model[0].weight, mean)


def _fail(gradient: Tensor) -> None:
    raise RuntimeError("in the backward pass")


def trainer(lightning: Any, folder: Path, **options: Any) -> Any:
    return lightning.Trainer(
        max_epochs=3, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, default_root_dir=folder, **options,
    )  # fmt: skip


@pytest.mark.filterwarnings("ignore")
def test_lightning_trains_unmodified(tmp_path: Path) -> None:
    """Its Trainer passes a closure to step: the same steps as a loop of one's own."""
    lightning = pytest.importorskip("lightning")
    from torch.utils.data import DataLoader, TensorDataset

    model, x, y = problem()
    twin = copy.deepcopy(model)

    class Module(lightning.LightningModule):  # type: ignore[name-defined,misc]
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def training_step(self, batch: Any, index: int) -> Tensor:
            return F.cross_entropy(self.model(batch[0]), batch[1])

        def configure_optimizers(self) -> Any:
            optimiser = IVON(self.model.parameters(), data_size=N)
            return [optimiser], [torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, 3)]

    trainer(lightning, tmp_path).fit(Module(), DataLoader(TensorDataset(x, y), 20))
    other = IVON(twin.parameters(), data_size=N)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(other, 3)
    for _ in range(3):
        for part in (slice(0, 20), slice(20, 40)):

            def closure(part: slice = part) -> Tensor:
                other.zero_grad()
                loss = F.cross_entropy(twin(x[part]), y[part])
                loss.backward()
                return loss

            other.step(closure)
        schedule.step()
    for one, two in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(one, two)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["IVON", "VOGN"])
def test_lightning_accumulates_draws_of_an_attached_network(tmp_path: Path, kind: str) -> None:
    """Micro-batches before the closure are draws of their own; without `attach` the first step is left out."""
    lightning = pytest.importorskip("lightning")
    from torch.utils.data import DataLoader, TensorDataset

    model, x, y = problem()
    twin = copy.deepcopy(model)

    class Module(lightning.LightningModule):  # type: ignore[name-defined,misc]
        def __init__(self, attached: bool) -> None:
            super().__init__()
            self.model, self.attached = model, attached

        def training_step(self, batch: Any, index: int) -> Tensor:
            return F.cross_entropy(self.model(batch[0]), batch[1])

        def configure_optimizers(self) -> Any:
            optimiser = optimiser_of(kind, self.model)
            if self.attached:
                optimiser.attach(self.model)
            return optimiser

    loader = DataLoader(TensorDataset(x, y), 10)
    with pytest.warns(LapisWarning, match="attach"):
        trainer(lightning, tmp_path, accumulate_grad_batches=2).fit(Module(False), loader)
    assert not torch.equal(model[0].weight, twin[0].weight)
    model.load_state_dict(twin.state_dict())
    model.zero_grad()
    trainer(lightning, tmp_path, accumulate_grad_batches=2).fit(Module(True), loader)
    other = optimiser_of(kind, twin)
    for _ in range(3):
        for start in (0, 20):
            other.zero_grad()
            for part in (slice(start, start + 10), slice(start + 10, start + 20)):
                with other.sampled():
                    (F.cross_entropy(twin(x[part]), y[part]) / 2).backward()
            other.step()
    for one, two in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-5, atol=1e-7)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("accumulated", "attached"), [(1, True), (2, True), (1, False), (2, False)])
def test_hugging_face_trains_unmodified(tmp_path: Path, accumulated: int, attached: bool) -> None:
    """Its Trainer calls step() alone, after clipping: the steps are those of `sampled()`, less the first unattached."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    torch.manual_seed(0)
    options = transformers.BertConfig(
        vocab_size=20, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, num_labels=2,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    model = transformers.BertForSequenceClassification(options)
    twin = copy.deepcopy(model)
    tokens = torch.randint(1, 20, (16, 5))
    labels = (tokens[:, 0] > 10).long()
    data = [{"input_ids": t, "labels": y} for t, y in zip(tokens, labels, strict=True)]
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path), per_device_train_batch_size=4, num_train_epochs=2, report_to=[], use_cpu=True,
        gradient_accumulation_steps=accumulated, save_strategy="no", disable_tqdm=True, logging_strategy="no",
    )  # fmt: skip

    class Sampled(transformers.Trainer):  # type: ignore[name-defined,misc]
        def training_step(self, *args: Any, **kwargs: Any) -> Any:
            if not attached and self.state.global_step == 0:  # weights at the mean, and no step from there
                return super().training_step(*args, **kwargs)
            with other.sampled():
                return super().training_step(*args, **kwargs)

    optimiser, other = (IVON(each.parameters(), data_size=16) for each in (model, twin))
    if attached:
        optimiser.attach(model)
    before = model.classifier.weight.detach().clone()
    for trainer, network, its in ((transformers.Trainer, model, optimiser), (Sampled, twin, other)):
        schedule = torch.optim.lr_scheduler.LambdaLR(its, lambda _: 1.0)
        trainer(network, arguments, train_dataset=data, optimizers=(its, schedule)).train()
    assert not torch.equal(model.classifier.weight, before)
    for one, two in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(one, two)
