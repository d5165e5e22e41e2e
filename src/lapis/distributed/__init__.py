"""Fits over many processes and machines: curvature statistics are sums over data."""

from lapis.distributed.sums import Statistics, load_statistics, statistics

__all__ = ["Statistics", "load_statistics", "statistics"]
