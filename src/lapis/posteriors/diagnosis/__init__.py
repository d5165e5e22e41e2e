"""What a careful statistician would check of a posterior: `Posterior.diagnose`."""

from lapis.posteriors.diagnosis.report import Diagnosis, Notes

__all__ = ["Diagnosis", "Notes"]
