"""Callbacks of other trainers: the posterior is the one that a call of `lapis.laplace` after training would give."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lapis
from lapis.integrations.recipe import Recipe

REASON = "an extra that `make test` does not install; `make test-extras` does"


def test_a_recipe_refuses_bad_options_before_any_training() -> None:
    with pytest.raises(lapis.OptionError, match="structur"):
        Recipe("classification", True, {"structur": "dense"})
    with pytest.raises(lapis.LapisError):
        Recipe("clasification", True, {})
    with pytest.raises(lapis.OptionError, match="2 processes"):
        Recipe("classification", True, {}).check_processes(2)
    Recipe("classification", True, {"distributed": True}).check_processes(2)


def same(one: Any, other: Any, x: Any) -> None:
    torch.testing.assert_close(one.log_evidence(), other.log_evidence())
    torch.testing.assert_close(one.predict(x).probs, other.predict(x).probs)


@pytest.mark.filterwarnings("default")  # Lightning's own
def test_lightning_callback_leaves_the_posterior_of_the_trained_module(tmp_path: Path) -> None:
    lightning = pytest.importorskip("lightning.pytorch", reason=REASON)
    from lapis.integrations.lightning import LaplaceCallback

    class Module(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))

        def forward(self, x: Tensor) -> Tensor:
            return self.layers(x)

        def training_step(self, batch: tuple[Tensor, Tensor], _: int) -> Tensor:
            return nn.functional.cross_entropy(self(batch[0]), batch[1])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.Adam(self.parameters(), lr=0.05)

    torch.manual_seed(0)
    x = torch.randn(40, 3)
    y = (x.sum(-1) > 0).long()
    loader = DataLoader(TensorDataset(x, y), batch_size=16, shuffle=True)
    module, callback = Module(), LaplaceCallback("classification", structure="dense")
    inner = LaplaceCallback("classification", network=lambda m: m.layers, tune=False)
    trainer = lightning.Trainer(
        max_epochs=3, callbacks=[callback, inner], logger=False, enable_checkpointing=False, accelerator="cpu",
        enable_progress_bar=False, enable_model_summary=False, default_root_dir=tmp_path,
    )  # fmt: skip
    assert callback.posterior is None
    trainer.fit(module, loader)
    same(callback.posterior, lapis.laplace(module, (x, y), "classification", structure="dense").tune(), x)
    same(inner.posterior, lapis.laplace(module.layers, (x, y), "classification"), x)


def trained(model: nn.Module, data: Any, callback: Any, folder: Path) -> None:
    transformers = pytest.importorskip("transformers", reason=REASON)
    pytest.importorskip("accelerate", reason=REASON)
    arguments = transformers.TrainingArguments(
        output_dir=str(folder), num_train_epochs=2, per_device_train_batch_size=4, report_to=[], save_strategy="no",
        logging_strategy="no", use_cpu=True, disable_tqdm=True, learning_rate=0.01,
    )  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("default")  # theirs
        transformers.Trainer(model, arguments, train_dataset=data, callbacks=[callback]).train()


@pytest.mark.filterwarnings("default")
def test_transformers_callback_leaves_the_posterior_of_the_trained_classifier(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason=REASON)
    from lapis.integrations.transformers import LaplaceCallback

    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=20, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
        max_position_embeddings=8, num_labels=3,
    )  # fmt: skip
    model = transformers.BertForSequenceClassification(config)
    ids, labels = torch.randint(20, (16, 6)), torch.randint(3, (16,))
    data = [{"input_ids": i, "labels": y} for i, y in zip(ids, labels, strict=True)]
    callback = LaplaceCallback("classification", weights="last_layer")
    trained(model, data, callback, tmp_path)
    after = lapis.laplace(model, ({"input_ids": ids}, labels), "classification", weights="last_layer").tune()
    same(callback.posterior, after, {"input_ids": ids})


@pytest.mark.filterwarnings("default")
def test_labels_of_a_causal_language_model_are_those_of_the_next_token(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason=REASON)
    from lapis.integrations.transformers import LaplaceCallback

    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=11, n_positions=8, n_embd=8, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0,
        tie_word_embeddings=False,
    )  # fmt: skip
    model = transformers.GPT2LMHeadModel(config)
    ids = torch.randint(11, (12, 6))
    data = [{"input_ids": i, "labels": i} for i in ids]
    callback = LaplaceCallback("classification", weights="last_layer", tune=False)
    trained(model, data, callback, tmp_path)
    nothing = torch.full((12, 1), -100)
    pair = ({"input_ids": ids}, torch.cat([ids[:, 1:], nothing], 1))
    after = lapis.laplace(model, pair, "classification", weights="last_layer")
    same(callback.posterior, after, {"input_ids": ids})
    loss = model.eval()(input_ids=ids, labels=ids).loss.detach()  # the mean over the 12 x 5 tokens that are predicted
    log_likelihood = callback.posterior.likelihood.log_likelihood(callback.posterior.curvature.statistics)
    torch.testing.assert_close(float(-log_likelihood) / 60, float(loss), rtol=1e-4, atol=0)


@pytest.mark.filterwarnings("default")  # BoTorch's own
@pytest.mark.parametrize("structure", ["dense", "kronecker"])
def test_a_botorch_model_is_the_joint_prediction_with_gradients_in_the_points(structure: Any) -> None:
    pytest.importorskip("botorch", reason=REASON)
    from botorch.acquisition import UpperConfidenceBound
    from botorch.optim import optimize_acqf

    from lapis.integrations.botorch import LaplaceModel

    torch.manual_seed(0)
    x = torch.rand(20, 2, dtype=torch.float64)
    y = (x[:, :1] - 0.3).square() + x[:, 1:]
    network = nn.Sequential(nn.Linear(2, 6), nn.Tanh(), nn.Linear(6, 1)).double()
    laplace = lapis.laplace(network, (x, y), lapis.Gaussian(0.1), structure=structure, prior=0.5)
    laplace = laplace.at_tangent_mode((x, y)) if structure == "dense" else laplace
    model, points = LaplaceModel(laplace), torch.rand(3, 4, 2, dtype=torch.float64)
    found, noisy = model.posterior(points), model.posterior(points, observation_noise=True)
    for batch in range(3):
        latent: Any = laplace.predict(points[batch], joint=True).latent
        torch.testing.assert_close(found.mean[batch], latent.mean[:, 0])
        joint = found.distribution.covariance_matrix[batch]
        torch.testing.assert_close(joint, latent.joint, rtol=1e-7, atol=1e-10)
        more = noisy.distribution.covariance_matrix[batch] - joint
        torch.testing.assert_close(more, 0.01 * torch.eye(4, dtype=torch.float64))
    acquisition = UpperConfidenceBound(model, beta=2.0)
    assert torch.autograd.gradcheck(acquisition, points[0, :1, None].clone().requires_grad_())
    box = torch.tensor([[0.0, 0.0], [1.0, 1.0]], dtype=torch.float64)
    _, best = optimize_acqf(acquisition, box, q=1, num_restarts=2, raw_samples=8)
    grid = torch.cartesian_prod(*[torch.linspace(0, 1, 11, dtype=torch.float64)] * 2)
    assert float(best) >= float(acquisition(grid[:, None]).max()) - 1e-6
    with pytest.raises(lapis.LikelihoodError, match="single real number"):
        LaplaceModel(lapis.laplace(nn.Linear(2, 2), (x.float(), (x[:, 0] > 0.5).long()), "classification"))  # type: ignore[arg-type]
