"""Kernels of a mixture of experts: routing, few rows, many rows."""
