"""The way from the prefix cache to the index: the engine is made before the pod can enter the index."""

from __future__ import annotations

import logging

import grpc

from common.errors import ConfigError
from common.pb import transfer_pb2, transfer_pb2_grpc
from common.rpc import open_channel
from prefix_index.generation import read_name_owner
from prefix_index.publisher import IndexPublisher
from prefix_index.records import CacheTier


class CacheEventRelay:
    """Passes what the prefix cache gained and lost to the index, once there is one. Called under the pool's lock."""

    def __init__(self) -> None:
        self.index: IndexPublisher | None = None

    def stored(self, hashes: list[bytes]) -> None:
        if self.index is not None:
            self.index.stored(hashes)

    def evicted(self, hashes: list[bytes]) -> None:
        if self.index is not None:
            self.index.evicted(hashes)

    def host_stored(self, hashes: list[bytes]) -> None:
        if self.index is not None:
            self.index.stored(hashes, CacheTier.HOST)

    def host_evicted(self, hashes: list[bytes]) -> None:
        if self.index is not None:
            self.index.evicted(hashes, CacheTier.HOST)


INFO_TIMEOUT_S = 2.0

_log = logging.getLogger(__name__)


async def require_free_name(redis: str, scope: str, name: str, address: str) -> None:
    """Raises ConfigError when a pod of that name lives at another address than `address`, the caller's own.

    The lease of a dead pod is no obstacle: whoever holds it must answer as that pod and generation. Two pods that
    start at the same moment both pass; the index then keeps the younger one and the other logs it.
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
