"""How posteriors over weights reach the outputs: by the linearised network, or by drawn networks."""
