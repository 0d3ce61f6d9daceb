"""Attention over the paged KV pool: the protocol (base), plain torch, and Triton kernels."""
