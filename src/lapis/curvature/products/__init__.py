"""The Jacobian and the GGN over a data set, known by their products with vectors."""
