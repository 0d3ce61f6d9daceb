"""Tensor parallelism: one engine over several devices, with one process for each rank."""
