"""Kernels of --deterministic: one order of sums for a token, whatever else is in the step."""
