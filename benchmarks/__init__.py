"""Benchmarks of Lapis against laplace-torch: `make bench`."""
