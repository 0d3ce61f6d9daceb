"""A pod and the prefix index: cache events, the check that the name is free, connections to the listed decode pods."""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import grpc

from common.errors import BatonError, ConfigError, describe
from common.pb import transfer_pb2, transfer_pb2_grpc
from common.rpc import open_channel
from common.tls import TlsFiles
from common.types import Role
from engine.kv.ledger import CacheCallbacks
from prefix_index.publisher import IndexPublisher, read_name_owner
from prefix_index.reader import IndexReader
from prefix_index.store import CacheTier, PodRecord

_log = logging.getLogger(__name__)

INFO_TIMEOUT_S = 2.0
POLL_S = 1.0
RETRY_S = 0.1  # Between queries in start(), while the index does not answer
FIRST_ROUND_S = 15.0  # Time limit of start(), for the index and the connections together


class CacheEventRelay:
    """Forwards stored and evicted block hashes to the index publisher, once there is one.

    The engine is built before the pod can join the index. Called under the pool's lock.
    """

    def __init__(self) -> None:
        self.index: IndexPublisher | None = None

    def callbacks(self) -> CacheCallbacks:
        """Returns the callbacks of a block pool."""
        host, disk = CacheTier.HOST, CacheTier.DISK
        return CacheCallbacks(
            on_stored=self.stored,
            on_evicted=self.evicted,
            on_host_stored=functools.partial(self.stored, tier=host),
            on_host_evicted=functools.partial(self.evicted, tier=host),
            on_disk_stored=functools.partial(self.stored, tier=disk),
            on_disk_evicted=functools.partial(self.evicted, tier=disk),
        )

    def stored(self, hashes: list[bytes], tier: CacheTier = CacheTier.DEVICE) -> None:
        if self.index is not None:
            self.index.stored(hashes, tier)

    def evicted(self, hashes: list[bytes], tier: CacheTier = CacheTier.DEVICE) -> None:
        if self.index is not None:
            self.index.evicted(hashes, tier)


async def require_free_name(redis: str, scope: str, name: str, address: str, tls: TlsFiles | None = None) -> None:
    """Raises ConfigError if a live pod with this name answers at another address than `address`, the caller's own.

    The index entry of a dead pod does not matter: the address must answer as that pod and generation. If two pods start
    at the same moment, both pass; the index keeps the younger one, and the other logs that.
    """
    holder = await read_name_owner(redis, scope, name)
    if holder is None or holder.address == address:
        return
    try:
        async with open_channel(holder.address, tls) as peer:
            stub = transfer_pb2_grpc.TransferStub(peer)
            info = await stub.Info(transfer_pb2.InfoRequest(), timeout=INFO_TIMEOUT_S)
    except grpc.aio.AioRpcError as e:
        _log.info(
            "taking over the name %s: %s does not answer (%s)",
            name,
            holder.address,
            describe(e, limit_s=INFO_TIMEOUT_S),
        )
        return
    if (info.pod, info.generation) == (name, holder.generation):
        raise ConfigError(f"name: {name} is held by {holder.address}; give --name", field="name")


@dataclass(eq=False)
class PeerDiscovery:
    """Connects a prefill pod to every decode pod of `scope` in the index, before the first request needs them.

    The probe proves a connection with one real block, so no request pays for the transport's lazy set-up. Pods that
    join later are connected when they appear in the index. Broken connections are made again. No pod waits for another
    pod's timeout. A pod that the index does not list is connected by its first request.
    """

    reader: IndexReader
    scope: str
    #: Makes and proves the connection to (address, pod, generation). It is cheap for a pod that is connected.
    connect: Callable[[str, str, int], Awaitable[object]]

    @classmethod
    def of(cls, redis: str, scope: str, connect: Callable[[str, str, int], Awaitable[object]]) -> PeerDiscovery:
        """Returns the discovery of a pod with the prefix index at `redis`."""
        return cls(IndexReader(redis, books=False), scope, connect)

    def __post_init__(self) -> None:
        self._attempts: dict[tuple[str, int], asyncio.Task[None]] = {}  # By pod and generation
        self._task: asyncio.Task[None] | None = None

    async def start(self, wait_s: float = FIRST_ROUND_S) -> None:
        """Connects the listed decode pods, for at most wait_s, then continues in the background.

        One late answer of the index on a busy machine does not mean that it is empty, so the index is asked again.
        """
        deadline = time.monotonic() + wait_s
        answered = bool(wait_s) and await self._round()
        while not answered and time.monotonic() < deadline:
            await asyncio.sleep(RETRY_S)
            answered = await self._round()
        if wait_s and not answered:
            _log.warning(
                "the prefix index did not answer within %.0f s: this pod starts without a connection to any decode pod "
                "and connects once the index answers",
                wait_s,
            )
        elif self._attempts:
            _, late = await asyncio.wait(self._attempts.values(), timeout=max(0.0, deadline - time.monotonic()))
            if late:
                _log.warning("%d decode pods could not be connected within %.0f s", len(late), wait_s)
        self._task = asyncio.get_running_loop().create_task(self._forever())

    async def stop(self) -> None:
        """Stops the discovery. Connections stay. Idempotent."""
        tasks = [*self._attempts.values(), *([self._task] if self._task is not None else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.reader.close()

    async def _forever(self) -> None:
        while True:
            await self._round()
            await asyncio.sleep(POLL_S)

    async def _round(self) -> bool:
        """Connects to new pods. Returns whether the index answered."""
        try:
            pods = await self.reader.pods()
        except BatonError:
            return False  # the index is optional
        except Exception:
            _log.exception("the index could not be read")
            return False
        for record in (pod.record for pod in pods):
            key = (record.pod, record.generation)
            if record.scope == self.scope and record.role is not Role.PREFILL and key not in self._attempts:
                self._attempts[key] = asyncio.get_running_loop().create_task(self._connect_to(record))
        return True

    async def _connect_to(self, record: PodRecord) -> None:
        try:
            await self.connect(record.address, record.pod, record.generation)
        except BatonError as error:
            _log.info("decode pod %s at %s is not connected yet: %s", record.pod, record.address, error.message)
        except Exception:
            _log.exception("connecting to decode pod %s failed", record.pod)
        finally:
            del self._attempts[record.pod, record.generation]
