"""Model architectures: what a config.json says (spec) and the decoder that computes it."""
