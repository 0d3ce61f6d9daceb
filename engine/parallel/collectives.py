"""Sums and copies between the devices of a group: gloo between CPUs, NCCL between GPUs.

The process group is an object of ours: nothing of torch.distributed is global, so one process may be in several groups.
On a GPU nothing here waits for the device. A collective whose peer is gone fails: at once with gloo; NCCL needs
`abort`, or its own watchdog after TIMEOUT_S.
"""

from __future__ import annotations

import socket
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]

from engine.models.ops import DecoderOps

TIMEOUT_S = 300.0  # of one collective: how much later than this one another rank may come to it


def open_store(host: str) -> tuple[TCPStore, int]:
    """Where the ranks find each other's devices, kept by this process at that address alone; and its port."""
    listener = socket.create_server((host, 0))
    port = listener.getsockname()[1]
    store = TCPStore(host, port, None, True, timedelta(seconds=TIMEOUT_S), False, master_listen_fd=listener.detach())
    return store, port


def join_store(host: str, port: int) -> TCPStore:
    """The store of another process."""
    return TCPStore(host, port, None, False, timedelta(seconds=TIMEOUT_S), False)


class Collectives:
    """The group as seen by `rank`. host: an own address that the others can reach. All ranks make theirs at once, on
    threads whose device it is.
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
        """Every rank's tensor becomes the sum of all; they have one shape."""
        self._group.allreduce([part]).wait()

    def broadcast(self, tensor: Tensor) -> None:
        """Rank 0's tensor goes to all others, which give one of the same shape and dtype."""
        self._group.broadcast([tensor], dist.BroadcastOptions()).wait()

    def abort(self) -> None:
        """What waits for a rank that is gone ends, with an error; any thread."""
        if self._device.type == "cuda":
            self._group.abort()


class AllReduceOps:
    """A rank's operations: `own` on its part of the weights, with the sum over all ranks in each row-cut product."""

    def __init__(self, own: DecoderOps, collectives: Collectives) -> None:
        self._collectives = collectives
        self.attention_for, self.kv_write_for = own.attention_for, own.kv_write_for
        self.norm_linear, self.norm_swiglu, self.logits = own.norm_linear, own.norm_swiglu, own.logits

    def add_linear(self, x: Tensor, y: Tensor, linear: torch.nn.Linear) -> Tensor:
        part = torch.nn.functional.linear(y, linear.weight)
        self._collectives.all_reduce(part)
        x.add_(part)
        return x if linear.bias is None else x.add_(linear.bias)
