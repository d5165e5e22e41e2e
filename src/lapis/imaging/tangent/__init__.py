"""The trained network as a linear model of images: a Gaussian prior on its filters, and what data say about it."""
