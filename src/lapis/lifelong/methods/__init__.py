"""Ways of learning tasks one after the other, one a file, and the Laplace posteriors that some of them carry along."""
