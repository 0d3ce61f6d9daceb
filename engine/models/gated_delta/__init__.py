"""Gated delta layers (Yang et al., 2024, arXiv 2412.06464): parameters, and the computation in plain torch."""
