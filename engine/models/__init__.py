"""Model architectures: reading configurations (spec), loading weights, and the decoders that compute them.

To add an architecture of the Llama family: add a `ModelFamily` to spec/families.py. Features that `Decoder` does not
compute raise NotNative there. A new feature is a field of `ModelSpec`. layers.py and moe.py (experts) declare its
parameters, with their names in the checkpoint and the dimension that ranks split. weights.py loads every parameter of
this form. ops.py (torch) and fused.py (Triton) compute it, decoder.py gives the order.
Other architectures need no code here: hf/ runs the transformers code over our KV pool.
"""
