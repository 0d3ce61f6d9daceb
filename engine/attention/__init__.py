"""Attention over the paged KV pool, behind one small protocol (base)."""
