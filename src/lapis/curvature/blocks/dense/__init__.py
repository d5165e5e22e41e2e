"""The dense structure: one matrix for all weights of a block, or one triangle of it where it is large."""
