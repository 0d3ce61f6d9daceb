"""Model architectures: reading configurations (spec), loading weights, and the decoders that compute them."""
