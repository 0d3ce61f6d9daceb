"""Triton kernels. Modules here need triton at import; the rest of the engine loads them only when a CUDA device is
used.
"""
