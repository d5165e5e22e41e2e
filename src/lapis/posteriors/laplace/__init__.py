"""The Laplace family: Gaussians with curvature plus prior as precision, in stored, implicit and drawn form."""
