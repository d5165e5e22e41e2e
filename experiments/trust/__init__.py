"""Does a posterior help, out of the box? Settings, networks, columns, scores and tables of `experiments/trust.py`."""
