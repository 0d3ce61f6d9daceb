"""Models that run the transformers code, with attention over our KV pool."""
