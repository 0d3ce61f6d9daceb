"""Triton kernels. These modules need triton at import, so the engine imports them only if it uses a CUDA device."""
