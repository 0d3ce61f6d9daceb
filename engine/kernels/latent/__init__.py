"""Kernels of multi-head latent attention: attention over paged latents, and the write of new ones."""
