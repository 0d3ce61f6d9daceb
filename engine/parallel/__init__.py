"""Tensor parallelism: one engine over several devices, as docs/design.md describes it."""
