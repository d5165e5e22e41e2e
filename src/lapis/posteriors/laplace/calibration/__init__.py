"""Calibration of prior and temperature by validation data."""
