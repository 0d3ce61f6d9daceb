"""Model architectures: reading configurations (spec), loading weights, and the decoders that compute them.

To add an architecture of the Llama family: add its name to `ARCHITECTURES` in spec.py and read its fields in
`parse_spec`. Features that `Decoder` does not compute raise NotNative there. A new feature is a field of `ModelSpec`.
layers.py declares its parameters, ops.py (torch) and fused.py (Triton) compute it, decoder.py gives the order, and
weights.py maps checkpoint names to parameters; shard.py lists the matrices that are split between ranks.
Other architectures need no code here: hf/ runs the transformers code over our KV pool.
"""
