"""The deep image prior: images as outputs of a U-net, found by gradient descent on the misfit."""
