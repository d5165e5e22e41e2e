"""Tuning prior and noise: by the evidence or by draws, each output's noise, a classifier's width, a warning."""
