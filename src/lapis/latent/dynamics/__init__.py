"""Linear-Gaussian dynamics: Kalman filter and smoother, EM, forecasts."""
