"""Calls to the Transfer service of other pods: one channel per address, every call but Info signed, errors as
BatonError.

gRPC keeps dialling an address where no pod answers, so channels without a call for UNUSED_S seconds are closed.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

import grpc
from google.protobuf.message import Message

from common.auth import Signer, sign_calls
from common.errors import BatonError, DeadlineExceeded
from common.pb import transfer_pb2
from common.rpc import open_channel, translate_rpc_errors
from common.tls import TlsFiles
from common.types import KvTarget, TransferId
from common.wire import finish_reason_to_pb, kv_target_to_pb, transfer_id_to_pb
from kv_transfer.messages import Commit, WantedBlocks, Writer

_log = logging.getLogger(__name__)

SERVICE = "baton.v1.Transfer"
UNUSED_S = 600.0  #: Longer than any call.

_Response = TypeVar("_Response", bound=Message)


@dataclass(eq=False)
class PeerRpcClient:
    """Every call raises BatonError and nothing else. Owned by the event loop, except run_on_loop()."""

    signer: Signer
    info_of_pod: Callable[[], transfer_pb2.InfoResponse]  #: Current description of this pod.
    address: Callable[[], str]  #: host:port of this pod's gRPC server, once it is bound.
    tls: TlsFiles | None = None  #: This pod's certificates. None: plain calls.

    def __post_init__(self) -> None:
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._used: dict[str, float] = {}  #: Time of the last call, by address.
        self._loop: asyncio.AbstractEventLoop | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self) -> None:
        """Enables run_on_loop(). Event loop."""
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

    async def info(self, address: str, timeout_s: float) -> transfer_pb2.InfoResponse:
        """Calls Info of the pod at `address`."""
        request, response = transfer_pb2.InfoRequest(), transfer_pb2.InfoResponse
        return await self.call(address, "", "Info", request, response, timeout_s)

    async def open(self, target: KvTarget, request_id: str, polled: bool, timeout_s: float) -> None:
        info = self.info_of_pod()
        request = transfer_pb2.OpenRequest(
            transfer_id=transfer_id_to_pb(target.transfer_id),
            request_id=request_id,
            pod=info.pod,
            generation=info.generation,
            address=self.address(),
            polled=polled,
            signature=target.signature,
        )
        await self.call(target.address, target.pod, "Open", request, transfer_pb2.OpenResponse, timeout_s)

    async def commit(self, target: KvTarget, commit: Commit, timeout_s: float) -> float:
        """Returns the seconds that the commit waited at the receiver for the last range."""
        request = transfer_pb2.CommitRequest(
            transfer_id=transfer_id_to_pb(target.transfer_id),
            generation=self.info_of_pod().generation,
            first_tokens=commit.first_tokens,
            finish_reasons=[finish_reason_to_pb(reason) for reason in commit.finish_reasons],
            checksums=commit.checksums,
            signature=target.signature,
        )
        response = transfer_pb2.CommitResponse
        answer = await self.call(target.address, target.pod, "Commit", request, response, timeout_s)
        return answer.awaited_s

    async def pull(self, address: str, pod: str, target: KvTarget, wanted: WantedBlocks) -> transfer_pb2.PullResponse:
        request = transfer_pb2.PullRequest(
            request_id=wanted.request_id,
            target=kv_target_to_pb(target),
            hashes=wanted.hashes,
            timeout_s=wanted.timeout_s,
        )
        return await self.call(address, pod, "Pull", request, transfer_pb2.PullResponse, wanted.timeout_s)

    async def drain(self, writer: Writer, transfer_id: TransferId, timeout_s: float) -> transfer_pb2.DrainResponse:
        request = transfer_pb2.DrainRequest(transfer_id=transfer_id_to_pb(transfer_id))
        return await self.call(writer.address, writer.pod, "Drain", request, transfer_pb2.DrainResponse, timeout_s)

    async def is_replaced(self, writer: Writer, timeout_s: float) -> bool:
        """Returns whether a newer generation of the same pod answers at the writer's address."""
        try:
            info = await self.info(writer.address, timeout_s)
        except BatonError:
            return False
        return info.pod == writer.pod and info.generation > writer.generation

    async def call(
        self, address: str, pod: str, name: str, request: Message, response: type[_Response], timeout_s: float
    ) -> _Response:
        """Makes a call, signed for `pod` unless the method is open. Raises BatonError of the peer or the channel."""
        if timeout_s <= 0:
            raise DeadlineExceeded(f"no time left for {name}")
        unused: list[grpc.aio.Channel] = []
        if address not in self._channels:
            unused, self._channels[address] = self._take_unused(), open_channel(address, self.tls)
        self._used[address] = time.monotonic()
        serialize, parse = type(request).SerializeToString, response.FromString
        channel = sign_calls(self._channels[address], self.signer, lambda: pod)
        call = channel.unary_unary(f"/{SERVICE}/{name}", serialize, parse)
        for one in unused:
            await one.close(None)
        with translate_rpc_errors():
            answer: _Response = await call(request, timeout=timeout_s)
        return answer

    def _take_unused(self) -> list[grpc.aio.Channel]:
        """Removes and returns the channels that were not used for UNUSED_S seconds."""
        since = time.monotonic() - UNUSED_S
        old = [address for address, used in self._used.items() if used < since]
        self._used = {address: used for address, used in self._used.items() if used >= since}
        return [self._channels.pop(address) for address in old]

    async def close(self) -> None:
        """Cancels what run_on_loop() started and closes the channels."""
        self._loop = None
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        channels, self._channels = list(self._channels.values()), {}
        await asyncio.gather(*(one.close(None) for one in channels))
