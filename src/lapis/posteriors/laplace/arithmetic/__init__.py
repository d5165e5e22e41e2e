"""Arithmetic of posteriors, as curvature is a sum over data: taking data out, and adding posteriors up."""
