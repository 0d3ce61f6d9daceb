"""Random parameters in place of a checkpoint, for measurements and tests."""

from __future__ import annotations

import hashlib
import math

import torch
from torch import Tensor, nn

from engine.models.decoder import Decoder
from engine.models.layers import Linear
from engine.models.moe import Experts
from engine.models.spec import UNSHARDED, Shard
from engine.models.spec.model import MXFP4_GROUP
from engine.models.weights.shards import part_of, rank_part, split_widths, whole_shape_of
from engine.quantization.at_load import quantize
from engine.quantization.weight import concatenate


def randomize(model: nn.Module, seed: int, shard: Shard = UNSHARDED) -> None:
    """Fills all parameters in place with random numbers: norms with 1, biases with 0, matrices with N(0, 1 / inputs).

    A seed gives the same numbers on all devices of one type: each parameter has its own stream, keyed by its name. A
    shard gets its part of the numbers of the whole model. Peak memory is the shard and one whole parameter. Weights
    of layers with a scheme are quantised.
    """
    for path, module in list(model.named_modules()):
        for kind, parameter in list(module.named_parameters(recurse=False)):
            if isinstance(module, Linear) and isinstance(model, Decoder) and parameter.numel() == 0:
                _randomize_quantized(f"{path}.{kind}", module, model, seed, shard)
                continue
            if isinstance(module, Experts) and module.scheme is not None:
                continue
            shape = whole_shape_of(module, kind, parameter, shard)
            if shape == list(parameter.shape):
                _randomize(f"{path}.{kind}", parameter, seed)
                continue
            whole = torch.empty(shape, dtype=parameter.dtype, device=parameter.device)
            _randomize(f"{path}.{kind}", whole, seed)
            parameter.copy_(rank_part(module, kind, whole, shard))
        if isinstance(module, Experts) and module.scheme is not None:
            _randomize_experts(path, module, seed, shard)


def _randomize_experts(path: str, experts: Experts, seed: int, shard: Shard) -> None:
    """Quantises random weights. Each projection of an expert has its own stream."""
    assert experts.scheme is not None
    for projection in experts.projections(shard):
        whole = torch.empty(projection.outputs, projection.inputs, device=experts.gate_up.device)
        _randomize(f"{path}.{projection.name}", whole, seed)
        experts.place(projection, quantize(whole, experts.scheme), whole.dtype)


def _randomize_quantized(name: str, linear: Linear, model: Decoder, seed: int, shard: Shard) -> None:
    assert linear.scheme is not None
    shape = [linear.out_features, linear.in_features]
    owners = [shard] * len(linear.parts)
    if linear.split is not None:
        widths = split_widths(linear, linear.split, shard)
        shape[linear.split] = sum(width * own.size for width, own in widths)
        owners = [own for _, own in widths] if linear.split == 0 else owners
    whole = torch.empty(shape, device=model.embedding.weight.device)
    _randomize(name, whole, seed)
    weight, parts, start = quantize(whole, linear.scheme), [], 0
    for outputs, own in zip(linear.parts.values(), owners, strict=True):
        rows = outputs * own.size if linear.split == 0 else outputs
        parts.append(part_of(weight.rows(slice(start, start + rows)), linear, outputs, own))
        start += rows
    model.place(linear, concatenate(parts))


def _randomize(name: str, parameter: Tensor, seed: int) -> None:
    if parameter.ndim == 1 or name.endswith("bias"):
        parameter.fill_(0.0 if name.endswith(("bias", "correction")) else 1.0)
        return
    stream = hashlib.blake2b(f"{seed} {name}".encode(), digest_size=4).digest()
    generator = torch.Generator(parameter.device).manual_seed(int.from_bytes(stream))
    inputs = parameter.shape[-1]
    if parameter.dtype == torch.uint8:
        if name.endswith("scales"):  # The numbers of 4 bits have a mean square of 8.6.
            parameter.fill_(127 - round(math.log2(8.6 * inputs * MXFP4_GROUP) / 2))
        else:
            parameter.random_(0, 256, generator=generator)
        return
    parameter.normal_(0.0, 1 / math.sqrt(inputs), generator=generator)
