"""Variational inference for any network: a Gaussian over its weights, fitted by pathwise gradients of the ELBO."""
