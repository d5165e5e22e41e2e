"""The evidence log p(D) as a function of prior and noise, and its maximisation."""

from lapis.evidence.point import Candidate, Evaluate, evaluate
from lapis.evidence.spectral import SpectralEvidence
from lapis.evidence.tangent import TangentMode, TangentProblem
from lapis.evidence.training import Training
from lapis.evidence.tuning import Tuning, tune

__all__ = [
    "Candidate",
    "Evaluate",
    "SpectralEvidence",
    "TangentMode",
    "TangentProblem",
    "Training",
    "Tuning",
    "evaluate",
    "tune",
]
