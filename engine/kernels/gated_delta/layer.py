"""One gated delta layer in Triton kernels, from its projections to the input of its output projection.

A decode step launches three kernels: convolution, rule, gated norm. It reads all it needs of the step from tensors on
the device, so a CUDA graph can capture it. Prompts add the kernels of chunks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.kernels.gated_delta.chunks import delta_chunks
from engine.kernels.gated_delta.convolution import convolve
from engine.kernels.gated_delta.decode import delta_decode, gated_norm
from engine.kernels.gated_delta.rows import DeviceRows
from engine.kv.groups.state_pool import LayerState


def gated_delta(
    mixed: Tensor,
    gates: Tensor,
    state: LayerState,
    rows: DeviceRows,
    *,
    conv: Tensor,
    decay_log: Tensor,
    decay_bias: Tensor,
    norm: Tensor,
    eps: float,
    key_heads: int,
) -> Tensor:
    """Returns [T, heads * value_dim], and advances the states.

    Args:
        mixed: [T, channels + heads * value_dim]: queries, keys and values before the convolution, and z.
        gates: [T, 2 * heads], the logits of beta and the inputs of the decay.
        conv: [channels, taps], the weight of the convolution.
        decay_log, decay_bias: float32 [heads].
        norm, eps: weight [value_dim] and epsilon of the norm of the results.
    """
    channels = len(conv)
    _, heads, value_dim, _ = state.recurrent.shape
    qkv = convolve(mixed[:, :channels], conv, state.conv, rows)
    result = torch.empty(len(mixed), heads, value_dim, dtype=mixed.dtype, device=mixed.device)
    inputs = qkv, gates, decay_log, decay_bias, state.recurrent
    if len(rows.decode_slots):
        delta_decode(*inputs, rows.decode_slots, result, key_heads=key_heads)
    if rows.chunks is not None:
        delta_chunks(*inputs, rows.chunks, result, key_heads=key_heads)
    return gated_norm(result, mixed[:, channels:], norm, eps)
