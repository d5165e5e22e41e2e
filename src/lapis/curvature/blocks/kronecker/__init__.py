"""Structures of a Kronecker product for each matrix of weights: its factors, their eigenbases, moments along these."""
