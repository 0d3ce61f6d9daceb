"""What the ranks of a group exchange: all-reduce and broadcast (gloo between CPUs, NCCL between GPUs), and step shapes.

The process group is a plain object and not the global one of torch.distributed, so one process may be in several
groups. On a GPU no call waits for the device. A collective fails if a peer has ended: at once with gloo; with NCCL
after `abort`, or when its watchdog ends it after TIMEOUT_S.
"""

from __future__ import annotations

import socket
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]

from engine.attention.base import StepShape
from engine.models.decoder import Decoder
from engine.models.loader import ModelSource
from engine.models.spec import Shard

if TYPE_CHECKING:
    from engine.parallel.one_shot import OneShotReduce

TIMEOUT_S = 300.0  # Longest wait of a collective for a rank that is late.


def open_store(host: str) -> tuple[TCPStore, int]:
    """Opens the store in which the ranks find each other's devices, at this address only. Returns store and port."""
    listener = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    port = listener.getsockname()[1]
    store = TCPStore(host, port, None, True, timedelta(seconds=TIMEOUT_S), False, master_listen_fd=listener.detach())
    return store, port


def join_store(host: str, port: int) -> TCPStore:
    """Connects to the store of rank 0."""
    return TCPStore(host, port, None, False, timedelta(seconds=TIMEOUT_S), False)


class Collectives:
    """The collectives of one of `size` ranks. The other ranks reach this machine at `host`.

    All ranks construct theirs at the same time, with `device` as the current device. one_shot: short vectors are summed
    and copied over peer memory; all ranks are GPUs of one machine. graphs: CUDA graphs capture the collectives.
    NCCL then computes on the current stream, because a change of streams costs every replay some microseconds.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        device: torch.device,
        host: str,
        *,
        one_shot: bool = False,
        graphs: bool = False,
    ) -> None:
        self._group: Any
        limit = timedelta(seconds=TIMEOUT_S)
        if device.type == "cuda":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = limit
            self._group = dist.ProcessGroupNCCL(store, rank, size, options)
        else:
            gloo = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
            gloo._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]
            gloo._timeout = limit
            self._group = dist.ProcessGroupGloo(store, rank, size, gloo)
        self._device = device
        self._reduce, self._copy = dist.AllreduceOptions(), dist.BroadcastOptions()
        self._reduce.asyncOp = self._copy.asyncOp = not graphs
        self._one_shot: OneShotReduce | None = None
        if one_shot and device.type == "cuda":
            from engine.parallel.one_shot import OneShotReduce

            self._one_shot = OneShotReduce(store, rank, size, device)

    def all_reduce(self, part: Tensor) -> None:
        """Replaces the tensor of every rank by the sum of all. The tensors have the same shape."""
        if self._one_shot is None or not self._one_shot(part):
            self._wait(self._group.allreduce([part], self._reduce))

    def broadcast(self, tensor: Tensor) -> None:
        """Copies the tensor of rank 0 into the tensors of the other ranks, which have the same shape and dtype."""
        if self._one_shot is None or not self._one_shot.broadcast(tensor):
            self._wait(self._group.broadcast([tensor], self._copy))

    @staticmethod
    def _wait(work: Any) -> None:
        if work is not None:  # NCCL on the current stream has no work to wait for
            work.wait()

    def abort(self) -> None:
        """Ends collectives that wait for a lost rank. Results that were under way are wrong. Any thread may call it."""
        if self._one_shot is not None:
            self._one_shot.abort()
        if self._device.type == "cuda":
            self._group.abort()


def load_shard(
    source: ModelSource, shard: Shard, collectives: Collectives, max_len: int, device: torch.device, dtype: torch.dtype
) -> Decoder:
    """Loads one rank's part of the model. Raises ConfigError if the model cannot be sharded this way."""
    model = source.load(max_len, device, dtype, shard, collectives.all_reduce)
    assert isinstance(model, Decoder)
    return model


def pack_step(shape: StepShape, block_size: int) -> bytes:
    """Packs a shape as int32: R | starts [R] | num_new [R] | numbers of blocks [R] | blocks of all rows."""
    starts, num_new = np.asarray(shape.starts, dtype=np.int32), np.asarray(shape.num_new, dtype=np.int32)
    counts = -(-(starts + num_new) // block_size)
    blocks = [np.asarray(row, dtype=np.int32)[:count] for row, count in zip(shape.blocks, counts, strict=True)]
    head = np.array([len(starts)], dtype=np.int32)
    return np.concatenate([head, starts, num_new, counts, *blocks]).tobytes()


def unpack_step(packed: bytes) -> StepShape:
    """Returns the shape that `pack_step` packed. It has only the blocks that its tokens need."""
    numbers = np.frombuffer(packed, dtype=np.int32)
    rows = int(numbers[0])
    starts, num_new, counts = numbers[1 : 1 + 3 * rows].reshape(3, rows)
    blocks = np.split(numbers[1 + 3 * rows :], np.cumsum(counts)[:-1])
    return StepShape(starts.tolist(), num_new.tolist(), blocks)
