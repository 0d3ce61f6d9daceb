"""All-reduce and broadcast between the devices of a group: gloo between CPUs, NCCL between GPUs.

The process group is a plain object and not the global one of torch.distributed, so one process may be in several
groups. On a GPU no call waits for the device. A collective fails if a peer has ended: at once with gloo; with NCCL
after `abort`, or when its watchdog ends it after TIMEOUT_S.
"""

from __future__ import annotations

import socket
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]

from engine.models.decoder import Decoder
from engine.models.loader import ModelSource
from engine.models.shard import Shard

TIMEOUT_S = 300.0  # Longest wait of a collective for a rank that is late.


def open_store(host: str) -> tuple[TCPStore, int]:
    """Opens the store in which the ranks find each other's devices, at this address only. Returns store and port."""
    listener = socket.create_server((host, 0))
    port = listener.getsockname()[1]
    store = TCPStore(host, port, None, True, timedelta(seconds=TIMEOUT_S), False, master_listen_fd=listener.detach())
    return store, port


def join_store(host: str, port: int) -> TCPStore:
    """Connects to the store of rank 0."""
    return TCPStore(host, port, None, False, timedelta(seconds=TIMEOUT_S), False)


class Collectives:
    """The collectives of one rank. All ranks construct theirs at the same time, with `device` as the current device.

    Args:
        size: number of ranks.
        host: an address of this machine that the other ranks can reach.
    """

    def __init__(self, store: Store, rank: int, size: int, device: torch.device, host: str) -> None:
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

    def all_reduce(self, part: Tensor) -> None:
        """Replaces the tensor of every rank by the sum of all. The tensors have the same shape."""
        self._group.allreduce([part]).wait()

    def broadcast(self, tensor: Tensor) -> None:
        """Copies the tensor of rank 0 into the tensors of the other ranks, which have the same shape and dtype."""
        self._group.broadcast([tensor], dist.BroadcastOptions()).wait()

    def abort(self) -> None:
        """Ends collectives that wait for a lost rank with an error. Any thread may call it."""
        if self._device.type == "cuda":
            self._group.abort()


def load_shard(
    source: ModelSource,
    shard: Shard,
    collectives: Collectives,
    max_len: int,
    device: torch.device,
    dtype: torch.dtype,
) -> Decoder:
    """Loads one rank's part of the model. Raises ConfigError if the model cannot be sharded this way."""
    model = source.load(max_len, device, dtype, shard, collectives.all_reduce)
    assert isinstance(model, Decoder)
    return model
