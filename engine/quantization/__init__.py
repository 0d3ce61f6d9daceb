"""Quantized weights: the formats of checkpoints, one canonical form of a weight, and its product in plain torch.

A checkpoint's `quantization_config` becomes a `Quantization` (formats.py), which says of every linear layer how it is
stored. The reader (checkpoint.py) makes a `QuantizedWeight` (weight.py) of it. `at_load.py` quantises the weights of an
unquantised checkpoint. `product.py` computes on a CPU, and is the reference of the kernels.
"""
