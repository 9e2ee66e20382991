"""Hyperparameters: a typed, nested mapping, and its locality-sensitive fingerprint. Free of torch."""
