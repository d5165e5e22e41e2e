"""Agreement with hmmlearn: likelihoods, probabilities of states, paths, and every round of Baum-Welch.

Optional, as the comparison with laplace-torch: `make peer-test`. Without the package the tests are skipped.
"""

from __future__ import annotations

import importlib.util
import warnings

import numpy as np
import pytest
import torch

from lapis.latent import HiddenMarkov
from lapis.latent.markov.gaussian import GaussianEmissions

if importlib.util.find_spec("hmmlearn") is None:
    pytest.skip("hmmlearn is not installed; `make peer-test` compares with it", allow_module_level=True)

STATES, LENGTHS = 3, [40, 7, 25]


def test_sums_over_paths_and_rounds_of_em_are_those_of_hmmlearn() -> None:
    from hmmlearn.hmm import GaussianHMM

    source = np.random.default_rng(0)
    initial, transitions = source.dirichlet(np.ones(STATES)), source.dirichlet(np.ones(STATES), STATES)
    means, covariances = source.standard_normal((STATES, 2)), np.tile(np.eye(2), (STATES, 1, 1))
    rows = source.standard_normal((sum(LENGTHS), 2)) + np.repeat(means, 24, 0)
    sequences = list(torch.as_tensor(rows).split(LENGTHS))

    def theirs(rounds: int) -> GaussianHMM:
        """No priors, which are its default, so that both maximise the likelihood."""
        model = GaussianHMM(STATES, "full", init_params="", n_iter=rounds, tol=0, covars_prior=0, covars_weight=-3)
        model.startprob_, model.transmat_, model.means_, model.covars_ = initial, transitions, means, covariances
        return model

    def ours() -> HiddenMarkov:
        tensors = [torch.as_tensor(each) for each in (means, covariances)]
        start = {"initial": torch.as_tensor(initial), "transitions": torch.as_tensor(transitions)}
        return HiddenMarkov(STATES, GaussianEmissions(*tensors), **start)

    peer, model = theirs(1), ours()
    log_p, states = peer.score_samples(rows, LENGTHS)
    assert float(model.log_likelihood(sequences).sum()) == pytest.approx(log_p, rel=1e-10)
    np.testing.assert_allclose(torch.cat(model.posterior(sequences)).numpy(), states, atol=1e-9)
    np.testing.assert_array_equal(torch.cat(model.viterbi(sequences)).numpy(), peer.predict(rows, LENGTHS))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        peer.fit(rows, LENGTHS)
        model.fit(sequences, rounds=1)
    np.testing.assert_allclose(model.transitions_, peer.transmat_, rtol=1e-8)
    np.testing.assert_allclose(model.initial_, peer.startprob_, rtol=1e-8)
    assert isinstance(model.emissions_, GaussianEmissions)
    np.testing.assert_allclose(model.emissions_.means, peer.means_, rtol=1e-8)
    np.testing.assert_allclose(model.emissions_.covariances, peer.covars_, rtol=1e-6)
