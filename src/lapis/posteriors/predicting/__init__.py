"""Distribution of the outputs under a posterior over weights: by the linearised network, or by drawn networks."""
