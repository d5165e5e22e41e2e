"""Networks with very many outputs, such as language models: cheap where there is a way, else refused in advance."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import lapis
from lapis.errors import LapisWarning, MemoryBudgetError
from lapis.posteriors.predicting import linearised

WORDS, POSITIONS = 40, 6
BUDGET = 120_000
"""Bytes: room for the weights' sums, not for covariances (words x words) at every position."""


class Language(nn.Module):
    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.embedding, self.mix, self.head = nn.Embedding(WORDS, 4), nn.Linear(4, 4), nn.Linear(4, WORDS)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.mix(self.embedding(tokens).cumsum(1)).tanh())


def texts(n: int = 6) -> tuple[Tensor, Tensor]:
    return torch.randint(WORDS, (n, POSITIONS)), torch.randint(WORDS, (n, POSITIONS))


@pytest.mark.parametrize("structure", ["kronecker", "diagonal", "ekfac"])
@pytest.mark.parametrize("covariance", ["full", "diagonal"])
@pytest.mark.parametrize("groups", ["one", "parameter"])
def test_a_last_layers_covariances_from_its_inputs_are_those_of_its_jacobian(
    structure: str, covariance: str, groups: str
) -> None:
    model, (x, y) = Language().double(), texts()
    prior = lapis.Prior(torch.tensor([2.0, 0.3]) if groups == "parameter" else 1.0, groups)  # type: ignore[arg-type]
    posterior = lapis.laplace(
        model, (x, y), "classification", weights="last_layer", structure=structure, prior=prior, curvature="exact"
    )
    quick = posterior.predict(x, covariance=covariance).latent  # type: ignore[arg-type]
    assert linearised.HEAD_COVARIANCE in {name for name, _ in posterior.network.proofs._proven}
    posterior.network.proofs.refused.add(linearised.HEAD_COVARIANCE)
    plain = posterior.predict(x, covariance=covariance).latent  # type: ignore[arg-type]
    torch.testing.assert_close(quick.variance, plain.variance)
    torch.testing.assert_close(quick.covariance, plain.covariance)


@pytest.mark.parametrize("tied", [False, True])
def test_what_does_not_fit_is_refused_before_allocating(tied: bool) -> None:
    """Covariances of the outputs, and the likelihood's curvature; each message names bytes and a way out."""
    model, (x, y) = Language(tied), texts()
    options = {"weights": "last_layer", "memory_budget": BUDGET}
    with pytest.raises(MemoryBudgetError, match=r"bytes.*sampled"):
        lapis.laplace(model, (x, y), "classification", structure="diagonal", curvature="exact", **options)
    posterior = lapis.laplace(model, (x, y), "classification", structure="diagonal", curvature="sampled", **options)
    with pytest.raises(MemoryBudgetError, match=r"bytes.*covariance=\"diagonal\""):
        posterior.predict(x, covariance="full")
    prediction = posterior.predict(x)
    assert prediction.probs.shape == (6, POSITIONS, WORDS)
    wide = lapis.laplace(
        model, (x, y), "classification", structure="diagonal", curvature="sampled", weights="last_layer"
    )
    torch.testing.assert_close(prediction.latent.variance, wide.predict(x).latent.variance, rtol=1e-4, atol=1e-9)
    implicit = lapis.laplace(model, (x, y), "classification", structure="implicit", **options)
    with pytest.raises(MemoryBudgetError, match=r"bytes.*draw"):
        implicit.predict(x)
    with pytest.raises(MemoryBudgetError, match=r"bytes.*kronecker"):
        implicit.sample()


def test_exact_curvature_of_many_outputs_is_summed_in_parts_that_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """The factors of an example take 2 x 8 x 6 x 40 x 40 bytes; the sums do not depend on the parts."""
    model, (x, y) = Language().double(), texts()
    whole = lapis.laplace(
        model, (x, y), "classification", weights="last_layer", structure="diagonal", curvature="exact"
    )
    seen: list[int] = []
    factor = lapis.Categorical.factor
    monkeypatch.setattr(lapis.Categorical, "factor", lambda self, f, y: (seen.append(len(f)), factor(self, f, y))[1])
    monkeypatch.setattr("lapis.curvature.budget.WORK_BYTES", 2 * 153_600)
    parts = lapis.laplace(
        model, (x, y), "classification", weights="last_layer", structure="diagonal", curvature="exact"
    )
    assert max(seen) == 2
    torch.testing.assert_close(parts.marginal_variance(), whole.marginal_variance())


def test_predictions_that_take_very_many_passes_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    model, (x, y) = Language(tied=True), texts()
    posterior = lapis.laplace(model, (x, y), "classification", weights="last_layer", curvature="sampled")
    monkeypatch.setattr(linearised, "MANY_PASSES", WORDS * POSITIONS - 1)
    with pytest.warns(LapisWarning, match='240 backward passes.*method="sampled"'):
        posterior.predict(x)
