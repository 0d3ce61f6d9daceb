"""Transfer service of a pod: verifies the caller of each call and passes the call to the transfer thread.

A writer has to shake hands before it opens a transfer. Calls of a generation older than the newest that shook hands are
refused and counted. The service knows the most recent MAX_WRITERS writers. A forgotten writer gets UnknownTransfer with
the field `pod` and repeats the handshake.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

import grpc
from google.protobuf.message import Message

from common.auth import Signer
from common.errors import (
    DeadlineExceeded,
    LayoutMismatch,
    TransferFailed,
    Unauthenticated,
    Unavailable,
    UnknownTransfer,
)
from common.pb import transfer_pb2, transfer_pb2_grpc
from common.rpc import remaining_s
from common.wire import finish_reason_from_pb, kv_target_from_pb, transfer_id_from_pb
from kv_transfer.memory import PoolMemory
from kv_transfer.messages import Commit, DroppedMessages, Writer
from kv_transfer.peers.connections import agent_name, probe_digest, require_compatible
from kv_transfer.peers.process_watch import watch_process
from kv_transfer.peers.rpc_client import method_path
from kv_transfer.peers.traffic import PairTrafficTable
from kv_transfer.receiver.transfers import TransferReceiver
from kv_transfer.sender.lending import PrefixLender
from kv_transfer.sender.transfers import TransferSender
from kv_transfer.transfer_thread import TransferThread

#: Pods appear under new names, and the end of a pod on another host is not visible. Beyond this number the writer with
#: the oldest call is forgotten.
MAX_WRITERS = 1024
#: Seconds after a handshake in which writes are expected.
EXPECT_WRITES_S = 5.0
#: Time limit of callers without a deadline.
_CALL_S = 10.0

Context = grpc.aio.ServicerContext[Any, Any]
T = TypeVar("T")


class TransferServicer(transfer_pb2_grpc.TransferServicer):
    """Owned by the event loop. Calls: see transfer.proto."""

    def __init__(
        self,
        thread: TransferThread,
        incoming: TransferReceiver,
        outgoing: TransferSender,
        lending: PrefixLender,
        pairs: PairTrafficTable,
        memory: PoolMemory,
        info: Callable[[], transfer_pb2.InfoResponse],
        signer: Signer,
        dropped: DroppedMessages,
        clock: Callable[[], float],
    ) -> None:
        self._thread = thread
        self._incoming = incoming
        self._outgoing = outgoing
        self._lending = lending
        self._pairs = pairs
        self._memory = memory
        self._info = info
        self._signer = signer
        self._dropped = dropped
        self._clock = clock
        #: By pod; the writer with the newest call is the last.
        self._writers: dict[str, transfer_pb2.InfoResponse] = {}
        self._expecting_until = 0.0

    @property
    def expects_writes(self) -> bool:
        """A peer that shook hands is about to write."""
        return self._clock() < self._expecting_until

    async def Info(self, request: transfer_pb2.InfoRequest, context: Context) -> transfer_pb2.InfoResponse:
        return self._info()

    async def Handshake(
        self, request: transfer_pb2.HandshakeRequest, context: Context
    ) -> transfer_pb2.HandshakeResponse:
        caller = self._verify("Handshake", request, context)
        self._require(caller == (request.info.pod, request.info.generation), "Handshake is in another pod's name")
        mine = self._info()
        require_compatible(mine, request.info)
        pod = request.info.pod
        last_writer = self._writers.get(pod)
        if last_writer is not None and last_writer.generation > request.info.generation:
            self._dropped.count("old_generation")
            raise TransferFailed(
                f"{pod} shook hands with generation {last_writer.generation}, newer than {request.info.generation}"
            )
        gone = (
            []
            if last_writer is None or last_writer.generation == request.info.generation
            else [agent_name(last_writer)]
        )
        self._mark_recent(pod, request.info)
        while len(self._writers) > MAX_WRITERS:
            gone.append(agent_name(self._writers.pop(next(iter(self._writers)))))
        self._expecting_until = self._clock() + EXPECT_WRITES_S

        def add_peer() -> tuple[bytes, bool]:
            for agent in gone:
                self._incoming.forget_writer(agent)
            added = self._incoming.add_peer(agent_name(request.info), request.agent_metadata)
            return self._thread.backend.metadata(), added

        metadata, accepts_notifications = await self._on_thread(add_peer, context)
        return transfer_pb2.HandshakeResponse(
            info=mine,
            agent_metadata=metadata,
            pool_base=self._memory.base,
            pool_device=self._memory.device,
            pool_memory=self._memory.kind,
            probe_block=self._memory.probe_block,
            notes=accepts_notifications,
        )

    async def Probe(self, request: transfer_pb2.ProbeRequest, context: Context) -> transfer_pb2.ProbeResponse:
        caller = self._verify("Probe", request, context)
        self._require(caller == (request.pod, request.generation), "Probe is in another pod's name")
        self._expecting_until = self._clock() + EXPECT_WRITES_S
        block = await self._on_thread(lambda: self._memory.read_block(self._memory.probe_block), context)
        intact = block.startswith(request.nonce) and probe_digest(request.nonce, block) == request.digest
        return transfer_pb2.ProbeResponse(intact=intact)

    async def Open(self, request: transfer_pb2.OpenRequest, context: Context) -> transfer_pb2.OpenResponse:
        caller = self._verify("Open", request, context)
        self._require(caller == (request.pod, request.generation), "Open is in another pod's name")
        info = self._writer(*caller)
        agent = agent_name(info)
        writer = Writer(request.pod, request.generation, agent, request.address, request.polled)
        if not self._incoming.is_watched(agent):
            await asyncio.to_thread(self._watch, agent, info, request.address)
        transfer_id = transfer_id_from_pb(request.transfer_id)
        await self._on_thread(lambda: self._incoming.open_transfer(transfer_id, request.request_id, writer), context)
        return transfer_pb2.OpenResponse()

    def _watch(self, agent: str, info: transfer_pb2.InfoResponse, address: str) -> None:
        """Creates the watch in a worker thread.

        The transfer thread gets it before the open, also if the call is cancelled.
        """
        watch = watch_process(info.pid, info.boot_id, address)
        self._thread.submit(lambda: self._incoming.watch(agent, watch))

    async def Commit(self, request: transfer_pb2.CommitRequest, context: Context) -> transfer_pb2.CommitResponse:
        pod, generation = self._verify("Commit", request, context)
        self._require(generation == request.generation, "Commit is in another generation's name")
        self._writer(pod, generation)
        transfer_id = transfer_id_from_pb(request.transfer_id)
        commit = Commit(
            tuple(request.first_tokens),
            tuple(finish_reason_from_pb(reason) for reason in request.finish_reasons),
            tuple(request.checksums),
        )
        answer: Future[float] = Future()
        if not self._thread.running:
            raise Unavailable("this pod is leaving")
        self._thread.submit(lambda: self._incoming.commit(transfer_id, generation, commit, answer))
        return transfer_pb2.CommitResponse(awaited_s=await self._within(answer, context))

    async def Drain(self, request: transfer_pb2.DrainRequest, context: Context) -> transfer_pb2.DrainResponse:
        pod, generation = self._verify("Drain", request, context)
        transfer_id = transfer_id_from_pb(request.transfer_id)
        self._require(generation == transfer_id.generation, "Drain is for another pod's transfer")
        stopped = await self._on_thread(lambda: self._outgoing.drain(pod, transfer_id), context)
        clean = await self._within(stopped, context)
        return transfer_pb2.DrainResponse(generation=self._info().generation, clean=clean)

    async def Pull(self, request: transfer_pb2.PullRequest, context: Context) -> transfer_pb2.PullResponse:
        pod, generation = self._verify("Pull", request, context)
        target = kv_target_from_pb(request.target)
        mine = (target.pod, target.transfer_id.generation) == (pod, generation)
        self._require(mine, "Pull is in another pod's name")
        info = self._info()
        if target.fingerprint != info.fingerprint:
            raise LayoutMismatch(f"the KV layout of {pod} has another fingerprint", field="fingerprint")
        if not self._thread.running:
            raise Unavailable("this pod is leaving")
        timeout_s = min(request.timeout_s, remaining_s(context, _CALL_S))
        lent = self._lending.lend(request.request_id, target, request.hashes, timeout_s)
        gb_s = self._pairs.get(pod).gb_s
        return transfer_pb2.PullResponse(blocks=lent.blocks, reason=lent.reason, gb_s=gb_s)

    def _verify(self, name: str, request: Message, context: Context) -> tuple[str, int]:
        try:
            return self._signer.verify(method_path(name), request, context.invocation_metadata(), time.time())
        except Unauthenticated:
            self._dropped.count("unauthenticated")
            raise

    def _require(self, holds: bool, message: str) -> None:
        if not holds:
            self._dropped.count("unauthenticated")
            raise Unauthenticated(message)

    def _writer(self, pod: str, generation: int) -> transfer_pb2.InfoResponse:
        """Returns the writer's handshake. Raises UnknownTransfer; its field is `pod` if a new handshake would help."""
        info = self._writers.get(pod)
        if info is None or info.generation < generation:
            self._dropped.count("unknown_pod")
            missing = f"generation {generation} of {pod} has not shaken hands, or was forgotten"
            raise UnknownTransfer(missing, field="pod")
        if info.generation > generation:
            self._dropped.count("old_generation")
            raise UnknownTransfer(f"a newer generation of {pod} than {generation} has shaken hands")
        self._mark_recent(pod, info)
        return info

    def _mark_recent(self, pod: str, info: transfer_pb2.InfoResponse) -> None:
        self._writers.pop(pod, None)
        self._writers[pod] = info

    async def _on_thread(self, function: Callable[[], T], context: Context) -> T:
        if not self._thread.running:
            raise Unavailable("this pod is leaving")
        return await self._within(self._thread.call(function), context)

    async def _within(self, future: Future[T], context: Context) -> T:
        try:
            return await asyncio.wait_for(asyncio.wrap_future(future), remaining_s(context, _CALL_S))
        except TimeoutError as e:
            raise DeadlineExceeded("the transfer thread of this pod did not answer in time") from e
