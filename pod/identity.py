"""Whether a pod may go by its name: two living pods of one name would push each other out of the index."""

from __future__ import annotations

import logging

import grpc

from common.errors import ConfigError
from common.index_identity import read_holder
from common.pb import transfer_pb2, transfer_pb2_grpc
from common.rpc import channel

INFO_TIMEOUT_S = 2.0

_log = logging.getLogger(__name__)


async def require_free_name(redis: str, scope: str, name: str, address: str) -> None:
    """Raises ConfigError when a pod of that name lives at another address than `address`, the caller's own.

    The lease of a dead pod is no obstacle: whoever holds it must answer as that pod and generation. Two pods that
    start at the same moment both pass; the index then keeps the younger one and the other logs it.
    """
    holder = await read_holder(redis, scope, name)
    if holder is None or holder.address == address:
        return
    try:
        async with channel(holder.address) as peer:
            stub = transfer_pb2_grpc.TransferStub(peer)
            info = await stub.Info(transfer_pb2.InfoRequest(), timeout=INFO_TIMEOUT_S)
    except grpc.aio.AioRpcError as e:
        _log.info("taking over the name %s: %s does not answer (%s)", name, holder.address, e.code().name)
        return
    if (info.pod, info.generation) == (name, holder.generation):
        raise ConfigError(f"name: {name} is held by {holder.address}; give --name", field="name")
