"""Networks as Gaussian processes, and the data behind a posterior: which examples matter, and what each one changes."""

from lapis.function_space.gaussian_process import GaussianProcess
from lapis.function_space.process import Process

__all__ = ["GaussianProcess", "Process"]
