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
from dataclasses import dataclass
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
EXPECT_WRITES_S = 5.0  # Seconds after a handshake in which writes are expected
_CALL_S = 10.0  # Time limit of callers without a deadline

Context = grpc.aio.ServicerContext[Any, Any]
T = TypeVar("T")


@dataclass(eq=False)
class TransferServicer(transfer_pb2_grpc.TransferServicer):
    """Owned by the event loop. Calls: see transfer.proto."""

    thread: TransferThread
    incoming: TransferReceiver
    outgoing: TransferSender
    lender: PrefixLender
    pairs: PairTrafficTable
    memory: PoolMemory
    info: Callable[[], transfer_pb2.InfoResponse]
    signer: Signer
    dropped: DroppedMessages
    clock: Callable[[], float]

    def __post_init__(self) -> None:
        self._writers: dict[str, transfer_pb2.InfoResponse] = {}  # By pod; the writer with the newest call is the last
        self._expecting_until = 0.0

    @property
    def expects_writes(self) -> bool:
        """A peer that shook hands is about to write."""
        return self.clock() < self._expecting_until

    async def Info(self, request: transfer_pb2.InfoRequest, context: Context) -> transfer_pb2.InfoResponse:
        return self.info()

    async def Handshake(
        self, request: transfer_pb2.HandshakeRequest, context: Context
    ) -> transfer_pb2.HandshakeResponse:
        pod, generation = request.info.pod, request.info.generation
        self._verify("Handshake", request, context, pod, generation)
        mine = self.info()
        require_compatible(mine, request.info)
        known = self._writers.get(pod)
        if known is not None and known.generation > generation:
            self.dropped.count("old_generation")
            raise TransferFailed(f"{pod} shook hands with generation {known.generation}, newer than {generation}")
        gone = [] if known is None or known.generation == generation else [known]
        self._mark_recent(pod, request.info)
        while len(self._writers) > MAX_WRITERS:
            gone.append(self._writers.pop(next(iter(self._writers))))
        self._expecting_until = self.clock() + EXPECT_WRITES_S

        def add_peer() -> tuple[bytes, bool]:
            for writer in gone:
                self.incoming.forget_writer(agent_name(writer))
            added = self.incoming.add_peer(agent_name(request.info), request.agent_metadata)
            return self.thread.backend.metadata(), added

        metadata, accepts_notifications = await self._on_thread(add_peer, context)
        return transfer_pb2.HandshakeResponse(
            info=mine,
            agent_metadata=metadata,
            pool_base=self.memory.base,
            pool_device=self.memory.device,
            pool_memory=self.memory.kind,
            probe_block=self.memory.probe_block,
            notes=accepts_notifications,
        )

    async def Probe(self, request: transfer_pb2.ProbeRequest, context: Context) -> transfer_pb2.ProbeResponse:
        self._verify("Probe", request, context, request.pod, request.generation)
        self._expecting_until = self.clock() + EXPECT_WRITES_S
        block = await self._on_thread(lambda: self.memory.read_block(self.memory.probe_block), context)
        intact = block.startswith(request.nonce) and probe_digest(request.nonce, block) == request.digest
        return transfer_pb2.ProbeResponse(intact=intact)

    async def Open(self, request: transfer_pb2.OpenRequest, context: Context) -> transfer_pb2.OpenResponse:
        self._verify("Open", request, context, request.pod, request.generation)
        info = self._writer(request.pod, request.generation)
        agent = agent_name(info)
        writer = Writer(request.pod, request.generation, agent, request.address, request.polled)
        if not self.incoming.is_watched(agent):
            await asyncio.to_thread(self._watch, agent, info, request.address)
        transfer_id = transfer_id_from_pb(request.transfer_id)
        await self._on_thread(lambda: self.incoming.open_transfer(transfer_id, request.request_id, writer), context)
        return transfer_pb2.OpenResponse()

    def _watch(self, agent: str, info: transfer_pb2.InfoResponse, address: str) -> None:
        """Creates the watch in a worker thread.

        The transfer thread gets it before the open, also if the call is cancelled.
        """
        watch = watch_process(info.pid, info.boot_id, address)
        self.thread.submit(lambda: self.incoming.watch(agent, watch))

    async def Commit(self, request: transfer_pb2.CommitRequest, context: Context) -> transfer_pb2.CommitResponse:
        generation = request.generation
        self._writer(self._verify("Commit", request, context, None, generation), generation)
        transfer_id = transfer_id_from_pb(request.transfer_id)
        commit = Commit(
            tuple(request.first_tokens),
            tuple(finish_reason_from_pb(reason) for reason in request.finish_reasons),
            tuple(request.checksums),
        )
        answer: Future[float] = Future()
        self._require_running()
        self.thread.submit(lambda: self.incoming.commit(transfer_id, generation, commit, answer))
        return transfer_pb2.CommitResponse(awaited_s=await self._within(answer, context))

    async def Drain(self, request: transfer_pb2.DrainRequest, context: Context) -> transfer_pb2.DrainResponse:
        transfer_id = transfer_id_from_pb(request.transfer_id)
        pod = self._verify("Drain", request, context, None, transfer_id.generation)
        stopped = await self._on_thread(lambda: self.outgoing.drain(pod, transfer_id), context)
        clean = await self._within(stopped, context)
        return transfer_pb2.DrainResponse(generation=self.info().generation, clean=clean)

    async def Pull(self, request: transfer_pb2.PullRequest, context: Context) -> transfer_pb2.PullResponse:
        target = kv_target_from_pb(request.target)
        pod = self._verify("Pull", request, context, target.pod, target.transfer_id.generation)
        if target.fingerprint != self.info().fingerprint:
            raise LayoutMismatch(f"the KV layout of {pod} has another fingerprint", field="fingerprint")
        self._require_running()
        timeout_s = min(request.timeout_s, remaining_s(context, _CALL_S))
        lent = self.lender.lend(request.request_id, target, request.hashes, timeout_s)
        gb_s = self.pairs.get(pod).gb_s
        return transfer_pb2.PullResponse(blocks=lent.blocks, reason=lent.reason, gb_s=gb_s)

    def _verify(self, method: str, request: Message, context: Context, pod: str | None, generation: int) -> str:
        """Returns the caller's pod. Raises Unauthenticated unless the caller is this pod (None: any) and generation."""
        try:
            caller = self.signer.verify(method_path(method), request, context.invocation_metadata(), time.time())
            if caller != (caller[0] if pod is None else pod, generation):
                raise Unauthenticated(f"{method} is in the name of another pod or generation")
        except Unauthenticated:
            self.dropped.count("unauthenticated")
            raise
        return caller[0]

    def _writer(self, pod: str, generation: int) -> transfer_pb2.InfoResponse:
        """Returns the writer's handshake. Raises UnknownTransfer; its field is `pod` if a new handshake would help."""
        info = self._writers.get(pod)
        if info is None or info.generation < generation:
            self.dropped.count("unknown_pod")
            missing = f"generation {generation} of {pod} has not shaken hands, or was forgotten"
            raise UnknownTransfer(missing, field="pod")
        if info.generation > generation:
            self.dropped.count("old_generation")
            raise UnknownTransfer(f"a newer generation of {pod} than {generation} has shaken hands")
        self._mark_recent(pod, info)
        return info

    def _mark_recent(self, pod: str, info: transfer_pb2.InfoResponse) -> None:
        self._writers.pop(pod, None)
        self._writers[pod] = info

    def _require_running(self) -> None:
        if not self.thread.running:
            raise Unavailable("this pod is leaving")

    async def _on_thread(self, function: Callable[[], T], context: Context) -> T:
        self._require_running()
        return await self._within(self.thread.call(function), context)

    async def _within(self, future: Future[T], context: Context) -> T:
        try:
            return await asyncio.wait_for(asyncio.wrap_future(future), remaining_s(context, _CALL_S))
        except TimeoutError as e:
            raise DeadlineExceeded("the transfer thread of this pod did not answer in time") from e
