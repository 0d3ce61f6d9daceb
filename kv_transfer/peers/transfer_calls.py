"""Calls that the transfer tables make to other pods: coroutines on the event loop, started from the transfer thread."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from common.errors import BatonError
from common.pb import transfer_pb2
from common.types import KvTarget, TransferId
from common.wire import finish_reason_to_pb, kv_target_to_pb, transfer_id_to_pb
from kv_transfer.messages import Commit, WantedBlocks, Writer
from kv_transfer.peers.connections import PeerConnection, PeerConnector
from kv_transfer.peers.rpc_client import PeerRpcClient

_log = logging.getLogger(__name__)


class TransferCalls:
    """Every call raises BatonError and nothing else. Owned by the event loop, except run_on_loop()."""

    def __init__(
        self,
        rpc: PeerRpcClient,
        connector: PeerConnector,
        info: Callable[[], transfer_pb2.InfoResponse],
        address: Callable[[], str],
    ) -> None:
        self._rpc = rpc
        self._connector = connector
        self._info = info
        self._address = address
        self._loop: asyncio.AbstractEventLoop | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self) -> None:
        """Enables calls. Event loop."""
        self._loop = asyncio.get_running_loop()

    def run_on_loop(self, work: Callable[[], Awaitable[None]]) -> None:
        """Runs a coroutine on the event loop. Any thread; no effect after close()."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._begin, work)

    def _begin(self, work: Callable[[], Awaitable[None]]) -> None:
        if self._loop is None:
            return

        async def run() -> None:
            try:
                await work()
            except Exception:
                _log.exception("unexpected error in a call to a peer")

        task = self._loop.create_task(run())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def connect(self, target: KvTarget, timeout_s: float) -> PeerConnection:
        """Returns a connection to the generation of the pod that made the target."""
        return await self._connector.connect(target.address, timeout_s, target.transfer_id.generation)

    async def open(self, target: KvTarget, request_id: str, polled: bool, timeout_s: float) -> None:
        info = self._info()
        request = transfer_pb2.OpenRequest(
            transfer_id=transfer_id_to_pb(target.transfer_id),
            request_id=request_id,
            pod=info.pod,
            generation=info.generation,
            address=self._address(),
            polled=polled,
        )
        await self._rpc.call(target.address, "Open", request, transfer_pb2.OpenResponse, timeout_s)

    async def commit(self, target: KvTarget, commit: Commit, timeout_s: float) -> float:
        """Returns the seconds that the commit waited on the receiver for the last range."""
        request = transfer_pb2.CommitRequest(
            transfer_id=transfer_id_to_pb(target.transfer_id),
            generation=self._info().generation,
            first_tokens=commit.first_tokens,
            finish_reasons=[finish_reason_to_pb(reason) for reason in commit.finish_reasons],
            checksums=commit.checksums,
        )
        answer = await self._rpc.call(target.address, "Commit", request, transfer_pb2.CommitResponse, timeout_s)
        return answer.awaited_s

    async def pull(self, address: str, target: KvTarget, wanted: WantedBlocks) -> transfer_pb2.PullResponse:
        request = transfer_pb2.PullRequest(
            request_id=wanted.request_id,
            target=kv_target_to_pb(target),
            hashes=wanted.hashes,
            timeout_s=wanted.timeout_s,
        )
        return await self._rpc.call(address, "Pull", request, transfer_pb2.PullResponse, wanted.timeout_s)

    async def drain(self, writer: Writer, transfer_id: TransferId, timeout_s: float) -> transfer_pb2.DrainResponse:
        request = transfer_pb2.DrainRequest(transfer_id=transfer_id_to_pb(transfer_id))
        return await self._rpc.call(writer.address, "Drain", request, transfer_pb2.DrainResponse, timeout_s)

    async def is_replaced(self, writer: Writer, timeout_s: float) -> bool:
        """Returns whether a newer generation of the same pod answers at the writer's address."""
        try:
            info = await self._rpc.info(writer.address, timeout_s)
        except BatonError:
            return False
        return info.pod == writer.pod and info.generation > writer.generation

    async def close(self) -> None:
        self._loop = None
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
