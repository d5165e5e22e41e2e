"""Life-long learning: tasks one after the other, without forgetting those before."""

from lapis.lifelong.learner import Learned, Learner
from lapis.lifelong.methods.ewc import EWC
from lapis.lifelong.methods.fine_tuning import FineTuning
from lapis.lifelong.methods.fromp import FROMP
from lapis.lifelong.methods.online_laplace import OnlineLaplace
from lapis.lifelong.methods.replay import Joint, Replay
from lapis.lifelong.methods.synaptic import SI
from lapis.lifelong.methods.vcl import VCL
from lapis.lifelong.scores import Accuracies, Lesson, accuracy_matrix
from lapis.lifelong.storage import load

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
