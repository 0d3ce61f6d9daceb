"""A pod's place in the prefix index: cache events and the check that its name is free."""

from __future__ import annotations

import logging

import grpc

from common.errors import ConfigError
from common.pb import transfer_pb2, transfer_pb2_grpc
from common.rpc import open_channel
from prefix_index.generation import read_name_owner
from prefix_index.publisher import IndexPublisher
from prefix_index.records import CacheTier

_log = logging.getLogger(__name__)

INFO_TIMEOUT_S = 2.0


class CacheEventRelay:
    """Forwards stored and evicted block hashes to the index publisher, once there is one.

    The engine is built before the pod can join the index. Called under the pool's lock.
    """

    def __init__(self) -> None:
        self.index: IndexPublisher | None = None

    def stored(self, hashes: list[bytes], tier: CacheTier = CacheTier.DEVICE) -> None:
        if self.index is not None:
            self.index.stored(hashes, tier)

    def evicted(self, hashes: list[bytes], tier: CacheTier = CacheTier.DEVICE) -> None:
        if self.index is not None:
            self.index.evicted(hashes, tier)


async def require_free_name(redis: str, scope: str, name: str, address: str) -> None:
    """Raises ConfigError if a live pod with this name answers at another address than `address`, the caller's own.

    The index entry of a dead pod is no obstacle: the address must answer as that pod and generation. If two pods start
    at the same moment, both pass; the index keeps the younger one, and the other logs that.
    """
    holder = await read_name_owner(redis, scope, name)
    if holder is None or holder.address == address:
        return
    try:
        async with open_channel(holder.address) as peer:
            stub = transfer_pb2_grpc.TransferStub(peer)
            info = await stub.Info(transfer_pb2.InfoRequest(), timeout=INFO_TIMEOUT_S)
    except grpc.aio.AioRpcError as e:
        _log.info("taking over the name %s: %s does not answer (%s)", name, holder.address, e.code().name)
        return
    if (info.pod, info.generation) == (name, holder.generation):
        raise ConfigError(f"name: {name} is held by {holder.address}; give --name", field="name")
