"""SWAG: the collector of snapshots, and the posterior that it makes of them."""

from lapis.posteriors.swag.collector import SWAG
from lapis.posteriors.swag.posterior import RenewedSWAGPosterior, SWAGPosterior

__all__ = ["SWAG", "RenewedSWAGPosterior", "SWAGPosterior"]
