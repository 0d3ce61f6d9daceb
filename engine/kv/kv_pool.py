"""The KV memory of one pod: uint8 [rows, block_bytes], zeroed once and never reallocated.

    | block 0 | block 1 | ... | block num_blocks - 1 | probe_block | dummy_block | slots of recurrent states ... |

Peers write to `probe_block` to test the transfer path. `dummy_block` pads block tables and takes writes of padded rows.
A slot of a recurrent state is `layout.state_pages` rows; models without such states have none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from common.errors import InternalError
from common.kv_layout import FP8_DTYPE, KVLayout
from engine.device import require_memory, upload
from engine.kv.lease import BlockCopy

#: e4m3 numbers are bytes: few operations of torch accept its 8-bit floats, and the kernels know the format.
TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, FP8_DTYPE: torch.uint8}
COPY_BATCH = 16  # Blocks that one launch copies; bounds the temporary memory
NAN_BITS = 0x7FC00000  # A float32 NaN


@dataclass(frozen=True, slots=True)
class LayerKV:
    """Views of one layer's keys and values in all blocks of the pool; strided over blocks.

    The 8-bit format is e4m3 (OCP, no infinities). One scale covers the head_dim numbers of one token, one kv head, and
    K or V. `engine/kernels/pool.py` computes the same bits on the GPU.

    - A token is quantized once, when it is written. The bytes of a block thus do not depend on the steps that wrote it.
    - The scale is the power of two that brings the largest number into [128, 256). It multiplies without rounding, so
      all readers see the same numbers. A finer scale would not be more accurate: e4m3 has an exponent of its own.
    - Scales are bfloat16. The scales of K and V are side by side, so one 32-bit load reads both.
    - A vector with a NaN, an infinity or a number past 2^127 has a NaN scale and reads as NaN.
    - A code and a scale of zero bytes read as 0.0, so a zeroed pool is valid.
    """

    #: [num_blocks, 2 (K, V), kv_heads, block_size, head_dim]; uint8 for e4m3. [num_blocks, 1, 1, ...] for latents.
    kv: Tensor
    scales: Tensor | None = None  # bfloat16 [num_blocks, kv_heads, block_size, 2 (K, V)] for e4m3, else None
    latent_dim: int = 0  # Above 0: the first numbers of a key are also its value, see `KVLayout.latent_dim`.
    group: int = 0  # KV group of the layer. Layers of other groups may have the same views, and use other pages.

    def __post_init__(self) -> None:
        assert (self.scales is not None) == (self.kv.dtype == torch.uint8)
        assert self.kv.stride(4) == 1
        assert self.scales is None or self.scales.stride(3) == 1

    @property
    def num_kv_heads(self) -> int:
        return self.kv.shape[2]

    @property
    def block_size(self) -> int:
        return self.kv.shape[3]

    @property
    def head_dim(self) -> int:
        return self.kv.shape[4]

    @property
    def value_dim(self) -> int:
        """Numbers of a value."""
        return self.latent_dim or self.head_dim


class KVPool:
    """Owns the memory; BlockPool decides which sequence uses which block."""

    def __init__(self, layout: KVLayout, num_blocks: int, device: torch.device, state_slots: int = 0) -> None:
        self.layout = layout
        self.num_blocks = num_blocks
        self.probe_block = num_blocks
        self.dummy_block = num_blocks + 1
        self.state_slots = state_slots
        size = (num_blocks + 2 + state_slots * layout.state_pages, layout.block_bytes)
        states = f" and {state_slots} recurrent states of {layout.state_bytes} bytes" if state_slots else ""
        with require_memory(f"{num_blocks} KV blocks of {layout.block_bytes} bytes{states}", "kv_memory"):
            self.data = torch.zeros(size, dtype=torch.uint8, device=device)
        # Other threads read and write single blocks on this stream: they must not wait for the engine's steps.
        self._side_stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    @property
    def data_ptr(self) -> int:
        return self.data.data_ptr()

    @property
    def block_bytes(self) -> int:
        return self.layout.block_bytes

    @property
    def blocks(self) -> Tensor:
        """The blocks without the slots of recurrent states, uint8 [num_blocks + 2, block_bytes]."""
        return self.data[: self.num_blocks + 2]

    @property
    def states(self) -> Tensor:
        """The slots of recurrent states, uint8 [state_slots, state_pages * block_bytes]."""
        return self.data[self.num_blocks + 2 :].view(self.state_slots, -1)

    def layers(self, prefix: str = "") -> tuple[LayerKV, ...]:
        """Returns views of the layers, in order; with the prefix "draft_" the layers of the draft model."""
        names = [segment.name for segment in self.layout.segments]
        kv = self.segment_view(prefix + "kv").unbind(1)
        scaled = prefix + "scales" in names
        scales = self.segment_view(prefix + "scales").unbind(1) if scaled else [None] * len(kv)
        latent_dim = 0 if prefix else self.layout.latent_dim
        layers = tuple(LayerKV(*layer, latent_dim) for layer in zip(kv, scales, strict=True))
        if prefix or not self.layout.groups:
            return layers
        places = {
            layer: replace(layers[place], group=number)
            for number, group in enumerate(self.layout.groups)
            for place, layer in enumerate(group.layers)
        }
        return tuple(places[layer] for layer in range(self.layout.num_layers))

    def segment_view(self, name: str) -> Tensor:
        """Returns a view of one segment of the KV layout, [num_blocks + 2, *shape]."""
        for segment in self.layout.segments:
            if segment.name == name:
                raw = self.blocks.view(TORCH_DTYPES[segment.dtype])
                itemsize, row = raw.element_size(), raw.stride(0)
                size = len(raw), *segment.shape
                return raw.as_strided(size, (row, *segment.strides), segment.offset // itemsize)
        raise InternalError(f"the KV layout has no segment {name!r}")

    def zero(self, blocks: Sequence[int]) -> None:
        """Zeroes blocks, so that tokens that are not written yet read as finite numbers."""
        if len(blocks) == 1:
            self.data[blocks[0]].zero_()
        elif blocks:
            (index,) = upload([np.array(blocks)], self.data.device)
            self.data.index_fill_(0, index, 0)

    def copy(self, copies: Sequence[BlockCopy]) -> None:
        """Queues copies of blocks, COPY_BATCH at a time. No target may be a source of another copy."""
        if self.data.device.type == "cpu":
            for source, target in copies:
                self.data[target].copy_(self.data[source])
            return
        moved = [copy for copy in copies if copy.source != copy.target]
        for start in range(0, len(moved), COPY_BATCH):
            sources, targets = zip(*moved[start : start + COPY_BATCH], strict=True)
            index = upload([np.array(sources), np.array(targets)], self.data.device)
            self.data.index_copy_(0, index[1], self.data.index_select(0, index[0]))

    def read_block(self, block: int) -> bytes:
        """Returns the bytes of one block. Any thread may call it."""
        with torch.cuda.stream(self._side_stream):
            return self.data[block].cpu().numpy().tobytes()

    def write_block(self, block: int, content: bytes) -> None:
        """Replaces one block by `content` of block_bytes bytes. Any thread may call it."""
        if len(content) != self.block_bytes:
            raise InternalError(f"cannot write {len(content)} bytes to a block of {self.block_bytes}")
        with torch.cuda.stream(self._side_stream):
            self.data[block].copy_(torch.frombuffer(bytearray(content), dtype=torch.uint8))


def quantize_e4m3(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantizes x [..., D] to e4m3 bytes, uint8 [..., D], and scales, bfloat16 [...]."""
    wide = x.float()
    exponent = wide.abs().amax(-1).view(torch.int32) >> 23
    # Exponents are biased by 127. The scale's exponent, e = exponent - 7, brings the largest number into [128, 256);
    # 254 - e is the exponent of the inverse power of two.
    bits = torch.where(exponent >= 254, NAN_BITS, (exponent - 7).clamp_(min=1) << 23)
    inverse = ((254 << 23) - bits).view(torch.float32)
    code = (wide * inverse[..., None]).to(torch.float8_e4m3fn).view(torch.uint8)
    return code, bits.view(torch.float32).to(torch.bfloat16)


def dequantize_e4m3(code: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns the numbers of e4m3 bytes [..., D] with scales [...]; exact in bfloat16 and float32.

    The bits of an e4m3 number, shifted, are a float16 that is 256 times smaller. torch's conversion is ten times slower
    on a CPU.
    """
    halves = (code.view(torch.int8).to(torch.int16) << 7).bitwise_and_(~0x4000).view(torch.float16)
    return halves.to(dtype).mul_((scales.to(dtype) * 256)[..., None])
