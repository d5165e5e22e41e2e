"""Backpropagation of seeds at the outputs: gradients at the layers, and each site's Jacobian in factored form."""
