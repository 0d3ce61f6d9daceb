"""A pool in the memory of a GPU: for machine checks and benchmarks; a pod's pool belongs to its engine."""

from __future__ import annotations

from kv_transfer.memory import PoolMemory


def device_memory(num_blocks: int, block_bytes: int) -> PoolMemory:
    """num_blocks + 1 zeroed blocks on the first visible GPU, the last one for probes. Raises RuntimeError."""
    import torch  # not with this package

    data = torch.zeros((num_blocks + 1, block_bytes), dtype=torch.uint8, device="cuda:0")
    torch.cuda.synchronize()

    def read_block(block: int) -> bytes:
        content: bytes = data[block].cpu().numpy().tobytes()
        return content

    def write_block(block: int, content: bytes) -> None:
        if len(content) != block_bytes:
            raise ValueError(f"a block has {block_bytes} bytes, got {len(content)}")
        data[block].copy_(torch.frombuffer(bytearray(content), dtype=torch.uint8))
        torch.cuda.synchronize()

    return PoolMemory(data.data_ptr(), block_bytes, num_blocks + 1, 0, "VRAM", num_blocks, read_block, write_block)
