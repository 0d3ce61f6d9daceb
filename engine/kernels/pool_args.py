"""One layer of the KV pool as an argument of kernels. Strides are in elements of `kv` and `scales`."""

from __future__ import annotations

from typing import NamedTuple

import torch

from engine.kv.layer_kv import LayerKV


class PoolArgs(NamedTuple):
    """The tensors of a layer and their strides."""

    kv: torch.Tensor  # [num_blocks, 2 (K, V), kv_heads, block_size, head_dim].
    #: 8-bit cache: the bfloat16 scales of K and V of a token, as int32 pairs or as int16 bits. Else a placeholder.
    scales: torch.Tensor
    kv_block: int
    kv_which: int
    kv_head: int
    kv_token: int
    scale_block: int
    scale_head: int
    scale_token: int


def pool_args(layer: LayerKV, scale_dtype: torch.dtype, kv_dtype: torch.dtype | None = None) -> PoolArgs:
    """Returns the layer as a kernel's argument.

    Args:
        scale_dtype: int32 to read both scales of a token at once, int16 to write them one by one.
        kv_dtype: views an 8-bit cache as this dtype.
    """
    if layer.scales is None:
        return PoolArgs._make((layer.kv, layer.kv, *layer.kv.stride()[:4], 0, 0, 0))
    kv = layer.kv if kv_dtype is None else layer.kv.view(kv_dtype)
    scales = layer.scales.view(scale_dtype)
    return PoolArgs._make((kv, scales, *kv.stride()[:4], *scales.stride()[:3]))
