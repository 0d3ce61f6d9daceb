"""Transfer service of a pod: passes each call to the transfer thread. The server's CallGuard verified the caller.

A writer has to shake hands before it opens a transfer. Calls of a generation older than the newest that shook hands are
refused and counted. A writer that is not among the last MAX_WRITERS gets UnknownTransfer (field `pod`) and repeats it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import grpc

from common.auth import Signer, current_caller
from common.block_hash import HASH_BYTES
from common.errors import (
    DeadlineExceeded,
    InvalidRequest,
    LayoutMismatch,
    TransferFailed,
    Unauthenticated,
    Unavailable,
    UnknownTransfer,
    describe,
)
from common.pb import transfer_pb2, transfer_pb2_grpc
from common.rpc import remaining_s
from common.types import KvTarget
from common.wire import finish_reason_from_pb, kv_target_from_pb, transfer_id_from_pb
from kv_transfer.memory import PinnedBlocks, PoolMemory, release_unless_handed_on
from kv_transfer.messages import Commit, DroppedMessages, TransferReport, Writer
from kv_transfer.peers.connection import agent_name, probed_bytes, require_compatible
from kv_transfer.peers.connection_probe import probe_digest
from kv_transfer.peers.process_watch import watch_process
from kv_transfer.peers.traffic import PairTrafficTable
from kv_transfer.receiver.transfers import TransferReceiver
from kv_transfer.sender.transfers import OutgoingTransfer, TransferSender
from kv_transfer.transfer_thread import TransferThread

_log = logging.getLogger(__name__)

MAX_LOANS = 16
MAX_WRITERS = 1024  # Beyond it the writer with the oldest call is forgotten: a pod's end on another host is not visible
EXPECT_WRITES_S = 5.0  #: Seconds after a handshake in which writes are expected.
_CALL_S = 10.0  #: Time limit of callers without a deadline.

Context = grpc.aio.ServicerContext[Any, Any]
T = TypeVar("T")


#: Called with the block hashes from the start of a prompt and the first wanted logical block. Pins, for reading, the
#: leading ones of these blocks that this pod holds; None for none. With KV groups it gets the first wanted page, and
#: pins all pages or none.
LendCallback = Callable[[Sequence[bytes], int], PinnedBlocks | None]


@dataclass(eq=False)
class TransferServicer(transfer_pb2_grpc.TransferServicer):
    """Owned by the event loop. Calls: see transfer.proto."""

    thread: TransferThread
    incoming: TransferReceiver
    outgoing: TransferSender
    lend: LendCallback
    pairs: PairTrafficTable
    memory: PoolMemory
    info: Callable[[], transfer_pb2.InfoResponse]
    signer: Signer
    dropped: DroppedMessages
    clock: Callable[[], float]
    count_pages: Callable[[int], int] = lambda num_blocks: num_blocks  #: See TransferNode.
    count_held: Callable[[Sequence[bytes]], int] = lambda _hashes: 0  #: See TransferNode.

    def __post_init__(self) -> None:
        self._writers: dict[str, transfer_pb2.InfoResponse] = {}  #: By pod; the writer with the newest call is the last
        self._expecting_until = 0.0
        self.loans: set[OutgoingTransfer] = set()  #: Cached blocks that pods are pulling.
        self.leaving = False  #: No new loan is made. Open ones end with the outgoing transfers.

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
        self._require_own_name(pod, generation)
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

        def add_peer() -> tuple[bytes, bool, bytes]:
            for writer in gone:
                self.incoming.forget_writer(agent_name(writer))
            agent = agent_name(request.info)
            added = self.incoming.add_peer(agent, request.agent_metadata)
            staging = self.incoming.accept_staged(agent, request.staging) if added and request.staging else b""
            return self.thread.backend.metadata(), added, staging

        metadata, accepts_notifications, staging = await self._on_thread(add_peer, context)
        return transfer_pb2.HandshakeResponse(
            info=mine,
            agent_metadata=metadata,
            pool_base=self.memory.base,
            pool_device=self.memory.device,
            pool_memory=self.memory.kind,
            probe_block=self.memory.probe_block,
            total_blocks=self.memory.total_blocks,
            notes=accepts_notifications,
            staging=staging,
        )

    async def Probe(self, request: transfer_pb2.ProbeRequest, context: Context) -> transfer_pb2.ProbeResponse:
        self._require_own_name(request.pod, request.generation)
        if not request.keep_alive:
            self._expecting_until = self.clock() + EXPECT_WRITES_S
        block = await self._on_thread(lambda: self.memory.read_block(self.memory.probe_block), context)
        writer = self._writers.get(request.pod)
        probed = block if writer is None else block[: probed_bytes(self.info(), writer)]
        intact = block.startswith(request.nonce) and probe_digest(request.nonce, probed) == request.digest
        return transfer_pb2.ProbeResponse(intact=intact)

    async def Open(self, request: transfer_pb2.OpenRequest, context: Context) -> transfer_pb2.OpenResponse:
        self._require_own_name(request.pod, request.generation)
        info = self._writer(request.pod, request.generation)
        agent = agent_name(info)
        writer = Writer(request.pod, request.generation, agent, request.address, request.polled)
        if agent not in self.incoming.watches:
            await asyncio.to_thread(self._watch, agent, info, request.address)
        opened = (transfer_id_from_pb(request.transfer_id), request.request_id, request.signature, writer)
        await self._on_thread(lambda: self.incoming.open_transfer(*opened), context)
        return transfer_pb2.OpenResponse()

    def _watch(self, agent: str, info: transfer_pb2.InfoResponse, address: str) -> None:
        """Creates the watch in a worker thread. The transfer thread gets it before the open, also after a cancel."""
        watch = watch_process(info.pid, info.boot_id, address)
        self.thread.submit(lambda: self.incoming.watch(agent, watch))

    async def Commit(self, request: transfer_pb2.CommitRequest, context: Context) -> transfer_pb2.CommitResponse:
        pod, generation = current_caller().name, request.generation
        self._require_own_name(pod, generation)
        self._writer(pod, generation)
        transfer_id = transfer_id_from_pb(request.transfer_id)
        finishes = tuple(map(finish_reason_from_pb, request.finish_reasons))
        commit = Commit(tuple(request.first_tokens), finishes, tuple(request.checksums))
        answer: Future[float] = Future()
        self._require_running()
        signature = request.signature
        self.thread.submit(lambda: self.incoming.commit(transfer_id, generation, signature, commit, answer))
        return transfer_pb2.CommitResponse(awaited_s=await self._within(answer, context))

    async def Drain(self, request: transfer_pb2.DrainRequest, context: Context) -> transfer_pb2.DrainResponse:
        transfer_id = transfer_id_from_pb(request.transfer_id)
        pod = current_caller().name
        self._require_own_name(pod, transfer_id.generation)
        stopped = await self._on_thread(lambda: self.outgoing.drain(pod, transfer_id), context)
        clean = await self._within(stopped, context)
        return transfer_pb2.DrainResponse(generation=self.info().generation, clean=clean)

    async def Pull(self, request: transfer_pb2.PullRequest, context: Context) -> transfer_pb2.PullResponse:
        target = kv_target_from_pb(request.target)
        pod = target.pod
        self._require_own_name(pod, target.transfer_id.generation)
        self.signer.verify_target(target, request.request_id)
        if target.fingerprint != self.info().fingerprint:
            raise LayoutMismatch(f"the KV layout of {pod} has another fingerprint", field="fingerprint")
        self._require_running()
        timeout_s = min(request.timeout_s, remaining_s(context, _CALL_S))
        blocks, reason = self._lend(request.request_id, target, request.hashes, timeout_s)
        held = self.count_held(request.hashes) if reason == "absent" and not blocks else 0
        return transfer_pb2.PullResponse(blocks=blocks, reason=reason, gb_s=self.pairs.get(pod).gb_s, held=held)

    def _lend(self, request_id: str, target: KvTarget, hashes: Sequence[bytes], timeout_s: float) -> tuple[int, str]:
        """Pushes cached blocks. Returns their number and "none", or why some are missing: leaving, busy or absent.

        A loan is an outgoing transfer of pinned blocks. Its pin is released by the rules of the sender's state machine.
        Raises InvalidRequest if hashes and target do not match.
        """
        first, wanted = target.first_block, len(target.blocks)
        if any(len(h) != HASH_BYTES for h in hashes):
            raise InvalidRequest(f"a hash has not {HASH_BYTES} bytes", field="hashes")
        if not wanted or (pages := self.count_pages(len(hashes))) != first + wanted:
            target_end = f"the target has {wanted} blocks and ends at block {first + wanted}"
            raise InvalidRequest(f"{target_end}, but {len(hashes)} hashes need {pages} blocks", field="hashes")
        if self.leaving or len(self.loans) >= MAX_LOANS:
            return 0, "leaving" if self.leaving else "busy"
        pin = self.lend(hashes, first)
        if pin is None:
            return 0, "absent"
        with release_unless_handed_on(pin) as scope:
            blocks = tuple(pin.blocks)
            lent = replace(target, blocks=target.blocks[: len(blocks)])
            transfer = self.outgoing.start(lent, request_id, first + len(blocks), timeout_s, for_pull=True)
            scope.pop_all()
        transfer.push(first, blocks, pin)
        transfer.finish((), ())
        self.loans.add(transfer)
        transfer.outcome.add_done_callback(lambda outcome: self._on_loan_ended(transfer, outcome))
        return len(blocks), "none" if len(blocks) == wanted else "absent"

    def _on_loan_ended(self, loan: OutgoingTransfer, outcome: Future[TransferReport]) -> None:
        """Handles the end of a loan. Transfer thread."""
        self.loans.discard(loan)
        if error := outcome.exception():
            extra = {"request_id": loan.request_id}
            _log.info("the loan to %s failed: %s", loan.target.pod, describe(error), extra=extra)

    def _require_own_name(self, pod: str, generation: int) -> None:
        """Raises Unauthenticated unless the message names its caller."""
        caller = current_caller()
        if (caller.name, caller.generation) != (pod, generation):
            self.signer.refused += 1
            signed = f"signed by generation {caller.generation} of {caller.name}"
            raise Unauthenticated(f"the message is in the name of generation {generation} of {pod}, but {signed}")

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
