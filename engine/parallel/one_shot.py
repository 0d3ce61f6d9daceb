"""All-reduce and broadcast of short vectors over the peer memory of one machine's GPUs. It needs triton at import."""

from __future__ import annotations

import threading
import time

import numpy as np
import torch
from torch import Tensor
from torch.distributed import Store  # type: ignore[attr-defined]

from common.errors import ConfigError
from engine.kernels.peer_reduce import (
    BUFFER_BYTES,
    EPOCHS_OFFSET,
    FLAGS_OFFSET,
    MAX_PROGRAMS,
    MAX_RANKS,
    one_shot_all_reduce,
    one_shot_broadcast,
    released_flags,
    supports,
)
from engine.parallel.peer_memory import PeerBuffers

ABORT_S = 10.0  # Other ranks may still overwrite flags for this time after the group has failed.
ABORT_POLL_S = 0.1


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

    def abort(self) -> None:
        """Ends kernels that wait for a lost rank, with wrong results. Any thread may call it; it does not wait."""

        def release() -> None:
            until = time.monotonic() + ABORT_S
            while time.monotonic() < until:
                epochs = np.frombuffer(self._buffers.read(EPOCHS_OFFSET, 4 * MAX_PROGRAMS), dtype=np.int32)
                self._buffers.write(FLAGS_OFFSET, released_flags(epochs).tobytes())
                time.sleep(ABORT_POLL_S)

        threading.Thread(target=release, name="end-sums", daemon=True).start()
