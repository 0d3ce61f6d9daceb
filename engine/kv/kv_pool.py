"""The KV memory of one pod: uint8 [num_blocks + 2, block_bytes], zeroed once and never reallocated.

    | block 0 | block 1 | ... | block num_blocks - 1 | probe_block | dummy_block |

Peers write to `probe_block` to test the transfer path. `dummy_block` pads block tables and takes writes of padded rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from common.errors import InternalError
from common.kv_layout import FP8_DTYPE, KVLayout
from engine.device import require_memory, upload
from engine.kv.blocks import BlockCopy
from engine.kv.layer_kv import LayerKV

#: e4m3 numbers are bytes: few operations of torch accept its 8-bit floats, and the kernels know the format.
TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, FP8_DTYPE: torch.uint8}

#: Blocks that one launch copies; bounds the temporary memory.
COPY_BATCH = 16


class KVPool:
    """Owns the memory; BlockPool decides which sequence uses which block."""

    def __init__(self, layout: KVLayout, num_blocks: int, device: torch.device) -> None:
        self.layout = layout
        self.num_blocks = num_blocks
        self.probe_block = num_blocks
        self.dummy_block = num_blocks + 1
        size = (num_blocks + 2, layout.block_bytes)
        with require_memory(f"{num_blocks} KV blocks of {layout.block_bytes} bytes", "kv_memory"):
            self.data = torch.zeros(size, dtype=torch.uint8, device=device)
        # Other threads read and write single blocks on this stream: they must not wait for the engine's steps.
        self._side_stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    @property
    def data_ptr(self) -> int:
        return self.data.data_ptr()

    @property
    def block_bytes(self) -> int:
        return self.layout.block_bytes

    def layers(self, prefix: str = "") -> tuple[LayerKV, ...]:
        """Returns views of the layers, in order; with the prefix "draft_" the layers of the draft model."""
        names = [segment.name for segment in self.layout.segments]
        kv = self.segment_view(prefix + "kv").unbind(1)
        scaled = prefix + "scales" in names
        scales = self.segment_view(prefix + "scales").unbind(1) if scaled else [None] * len(kv)
        return tuple(LayerKV(*layer) for layer in zip(kv, scales, strict=True))

    def segment_view(self, name: str) -> Tensor:
        """Returns a view of one segment of the KV layout, [num_blocks + 2, *shape]."""
        for segment in self.layout.segments:
            if segment.name == name:
                raw = self.data[:, segment.offset : segment.offset + segment.nbytes]
                return raw.view(TORCH_DTYPES[segment.dtype]).view(-1, *segment.shape)
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
