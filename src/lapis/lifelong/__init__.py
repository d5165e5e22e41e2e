"""Life-long learning: tasks one after the other, without forgetting those before."""

from lapis.lifelong.ewc import EWC
from lapis.lifelong.fine_tuning import FineTuning
from lapis.lifelong.fromp import FROMP
from lapis.lifelong.learner import Learned, Learner
from lapis.lifelong.online_laplace import OnlineLaplace
from lapis.lifelong.replay import Joint, Replay
from lapis.lifelong.scores import Accuracies, Lesson, accuracy_matrix
from lapis.lifelong.storage import load
from lapis.lifelong.synaptic import SI
from lapis.lifelong.vcl import VCL

__all__ = [
    "EWC",
    "FROMP",
    "SI",
    "VCL",
    "Accuracies",
    "FineTuning",
    "Joint",
    "Learned",
    "Learner",
    "Lesson",
    "OnlineLaplace",
    "Replay",
    "accuracy_matrix",
    "load",
]
