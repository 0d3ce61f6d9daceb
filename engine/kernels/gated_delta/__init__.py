"""Kernels of gated delta layers (arXiv 2412.06464): convolution, chunks of prompts, decode, and the gated norm."""
