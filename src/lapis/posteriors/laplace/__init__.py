"""The Laplace family: a Gaussian with curvature plus prior as its precision, stored, implicit or drawn."""
