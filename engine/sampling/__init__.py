"""Samples tokens from logits: on the device and in torch, with the same noise, and under grammars."""
