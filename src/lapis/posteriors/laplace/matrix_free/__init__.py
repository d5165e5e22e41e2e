"""Posteriors that never store a curvature matrix: products with it, solves, and draws by optimisation."""
