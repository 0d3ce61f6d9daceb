"""All-reduce and broadcast of short vectors over the peer memory of one machine's GPUs. It needs triton at import."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed import Store  # type: ignore[attr-defined]

from common.errors import ConfigError
from engine.kernels.peer_reduce import BUFFER_BYTES, MAX_RANKS, one_shot_all_reduce, one_shot_broadcast, supports
from engine.parallel.peer_memory import PeerBuffers


class OneShotReduce:
    """The buffers of a rank, and the kernel over them. Calls of all ranks come in the same order, one after another."""

    def __init__(self, store: Store, rank: int, size: int, device: torch.device) -> None:
        if size > MAX_RANKS:
            problem = f"one_shot supports {MAX_RANKS} ranks, not {size}: use nccl"
            raise ConfigError(f"tensor_parallel_reduce: {problem}", field="tensor_parallel_reduce")
        self._rank, self._size = rank, size
        self._buffers = PeerBuffers(store, rank, size, device, BUFFER_BYTES)

    def __call__(self, part: Tensor) -> bool:
        """Replaces `part` by the sum over all ranks and returns True; returns False for a tensor that is too long."""
        if not supports(part):
            return False
        one_shot_all_reduce(part, self._buffers.addresses, self._rank, self._size)
        return True

    def broadcast(self, tensor: Tensor) -> bool:
        """Copies the tensor of rank 0 and returns True; returns False for a tensor that is too long."""
        if not supports(tensor):
            return False
        one_shot_broadcast(tensor, self._buffers.addresses, self._rank, self._size)
        return True
