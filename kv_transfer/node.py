"""A pod's transfers: one object that wires the transfer thread, both tables, the peers and the Transfer service.

Lifecycle: construct -> start() on the event loop (makes the agent) -> serve `servicer` over gRPC -> transfers in both
directions -> stop(). The transfer thread owns the backend and all state machines; the event loop owns the calls
between pods.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence

from common.auth import Signer
from common.errors import BatonError, TransferFailed, Unavailable
from common.pb import transfer_pb2
from common.types import KvTarget, TransferId
from kv_transfer.backend.interface import Backend, Notification
from kv_transfer.memory import PinnedBlocks, PoolMemory, release_pin
from kv_transfer.messages import (
    Commit,
    DroppedMessages,
    PairStats,
    PeerStats,
    PrefixHolder,
    PullResult,
    TransferStats,
    WantedBlocks,
    Writer,
)
from kv_transfer.notifications import CommittedNotification, parse_notification
from kv_transfer.peers.connections import PeerConnection, PeerConnector, agent_name
from kv_transfer.peers.rpc_client import PeerRpcClient
from kv_transfer.peers.traffic import PairTrafficTable
from kv_transfer.peers.transfer_calls import TransferCalls
from kv_transfer.receiver.pulling import PullReceiver
from kv_transfer.receiver.transfers import TransferReceiver
from kv_transfer.sender.lending import LendCallback, PrefixLender
from kv_transfer.sender.transfers import OutgoingTransfer, TransferSender, WriteLimits
from kv_transfer.servicer import TransferServicer
from kv_transfer.transfer_thread import TransferThread

_log = logging.getLogger(__name__)

START_S = 60.0  # the first agent of a machine loads libraries and may initialise devices
DRAIN_CALL_S = 2.0
JOIN_S = 5.0
STOP_POLL_S = 0.01


def _lend_nothing(hashes: Sequence[bytes], first: int) -> PinnedBlocks | None:
    """This pod has no cache."""
    return None


class TransferNode:
    """This pod as a sender and receiver of KV.

    info: who this pod is, now (role, name, generation, layout, pid...). address: host:port of the gRPC server that
    serves `servicer`, once it is bound. lend: what other pods may have of this one's cache, see Lending. checksums:
    compare a CRC-32 of every block at commit. allow_tcp: device memory may travel over TCP or by unknown means. pieces:
    how writes are cut; None: as suits the memory. notes: commits go as notes where the receiver polls often;
    for a comparison. clock: seconds, monotonic.
    """

    def __init__(
        self,
        *,
        backend: Backend,
        memory: PoolMemory,
        info: Callable[[], transfer_pb2.InfoResponse],
        signer: Signer,
        address: Callable[[], str],
        lend: LendCallback = _lend_nothing,
        checksums: bool = False,
        allow_tcp: bool = False,
        pieces: WriteLimits | None = None,
        notes: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._memory = memory
        self._info = info
        self._clock = clock
        self._generation = 0
        self._closing = False
        self._drops = DroppedMessages()
        self._pairs = PairTrafficTable(clock)
        self._rpc = PeerRpcClient(signer)
        self._incoming = TransferReceiver(memory, self._drops, clock, self._ask_drain, lambda: backend)
        self._thread = TransferThread(
            backend,
            clock,
            on_notification=self._on_notification,
            on_tick=self._tick,
            post=self._post,
            attentive=self._poll_fast,
            awaited=lambda: self._incoming.poll_hot or self._outgoing.poll_hot,
        )
        self._connector = PeerConnector(
            self._thread, self._rpc, memory, info, clock, self._peer_ended, allow_tcp=allow_tcp
        )
        self._calls = TransferCalls(self._rpc, self._connector, info, address)
        self._outgoing = TransferSender(
            self._thread,
            self._calls,
            memory,
            clock,
            self._pairs,
            checksums=checksums,
            fingerprint=lambda: info().fingerprint,
            pieces=pieces,
            notes=notes,
        )
        self._lending = PrefixLender(self._outgoing, lend)
        self._pulling = PullReceiver(
            self._thread,
            self._incoming,
            self._calls,
            clock,
            lambda first, blocks: self._target(address(), first, blocks),
        )
        self.servicer = TransferServicer(
            self._thread,
            self._incoming,
            self._outgoing,
            self._lending,
            self._pairs,
            memory,
            info,
            signer,
            self._drops,
            clock,
        )

    @property
    def alive(self) -> bool:
        """The transfer thread runs; any thread."""
        return self._thread.running

    async def start(self) -> None:
        """Makes the agent, named after the pod and its generation. Raises TransferFailed."""
        info = self._info()
        self._calls.start()
        self._generation = info.generation
        started = self._thread.start(agent_name(info), self._memory)
        try:
            await asyncio.wait_for(asyncio.wrap_future(started), START_S)
        except TimeoutError as e:
            self._thread.stop()
            raise TransferFailed(f"the transfer agent did not start within {START_S:.0f} s") from e

    async def stop(self, grace_s: float = 5.0) -> None:
        """Refuses new transfers, lets outgoing ones end for at most grace_s s, fails what is left. Idempotent.

        Holds of writes that are still under way are not released: the process that ends is the fence.
        """
        if self._closing:
            return
        self._closing = True
        self._lending.close()
        until = self._clock() + grace_s
        if self._thread.running:  # what was begun before is in the table after this
            await asyncio.wait({asyncio.wrap_future(self._thread.call(lambda: None))}, timeout=grace_s)
        await self._outgoing_over(until)
        leaving = Unavailable("this pod is leaving")
        self._thread.submit(lambda: self._outgoing.close(leaving))
        await self._outgoing_over(until)
        self._thread.submit(self._incoming.close)
        await self._connector.close()
        self._thread.stop()
        if not await asyncio.to_thread(self._thread.join, JOIN_S):
            _log.error("the transfer thread did not end within %s s", JOIN_S)
        await self._calls.close()
        await self._rpc.close()

    async def _outgoing_over(self, until: float) -> None:
        for _ in range(max(1, int((until - self._clock()) / STOP_POLL_S))):
            if not self._outgoing.num_open or not self._thread.running:
                return
            await asyncio.sleep(STOP_POLL_S)

    # Sending.

    def start_transfer(
        self, target: KvTarget, request_id: str, num_prompt_blocks: int, deadline_s: float
    ) -> OutgoingTransfer:
        """Begins a transfer to `target`, in the background; on the event loop. Failures come out of done().

        num_prompt_blocks: blocks of the whole prompt, the partial last one included. deadline_s: seconds from now.
        """
        self._require_running()
        return self._outgoing.start(target, request_id, num_prompt_blocks, deadline_s)

    async def connect(self, address: str, timeout_s: float = 30.0, generation: int | None = None) -> PeerStats:
        """Handshake and probe with the pod at `address` (this `generation` of it), at once if that was done before."""
        connection = await self._connector.connect(address, timeout_s, generation)
        return connection.stats

    # Receiving.

    def expect_transfer(
        self,
        *,
        request_id: str,
        first_block: int,
        blocks: Sequence[int],
        hold: PinnedBlocks,
        deadline_s: float,
        on_ready: Callable[[Commit], None],
        on_failed: Callable[[BatonError], None],
    ) -> TransferId:
        """Makes room for a transfer of logical blocks first_block... into the physical `blocks`. Any thread.

        Exactly one of on_ready (the KV is complete, the hold was released) and on_failed (deadline, damage, a dead
        writer, or release() before READY) is called, once, on the transfer thread; they must not block. `hold` is
        released when no write can land any more. Raises Unavailable before start and after stop.
        """
        self._require_running()
        transfer_id = self._incoming.new_transfer_id(self._generation)
        deadline = self._clock() + deadline_s
        kept = tuple(blocks)
        self._thread.submit(
            lambda: self._incoming.add(transfer_id, request_id, first_block, kept, hold, deadline, on_ready, on_failed)
        )
        return transfer_id

    def release(self, transfer_id: TransferId) -> None:
        """The request is over for this pod. Before READY that is an abort: on_failed gets Cancelled and the hold goes
        by the quarantine rule. Any thread; idempotent; unknown ids are fine.
        """
        self._thread.submit(lambda: self._incoming.release(transfer_id))

    # Pulling.

    def pull(self, holder: PrefixHolder, wanted: WantedBlocks) -> asyncio.Task[PullResult]:
        """Gets cached blocks from another pod, which pushes them. On the event loop.

        The node owns wanted.hold from this call on and releases it once no byte can land any more, also if the task is
        cancelled before its first step. The task raises BatonError; then nothing of the pull counts. Raises Unavailable
        before start and after stop.
        """
        try:
            self._require_running()
            return self._pulling.pull(holder, wanted)
        except BaseException:
            release_pin(wanted.hold)
            raise

    def _target(self, address: str, first_block: int, blocks: Sequence[int]) -> KvTarget:
        info = self._info()
        transfer_id = self._incoming.new_transfer_id(self._generation)
        return KvTarget(transfer_id, info.pod, address, first_block, tuple(blocks), info.fingerprint)

    def stats(self) -> TransferStats:
        """Counters and gauges; any thread, cheap."""
        return TransferStats(
            sent_blocks=self._outgoing.sent_blocks,
            sent_bytes=self._outgoing.sent_bytes,
            sent_transfers=self._outgoing.sent_transfers,
            failed_transfers=self._outgoing.failed_transfers,
            received_transfers=self._incoming.received_transfers,
            received_blocks=self._incoming.received_blocks,
            damaged_transfers=self._incoming.damaged_transfers,
            open_incoming=self._incoming.num_open,
            quarantined_blocks=self._incoming.quarantined_blocks,
            open_outgoing=self._outgoing.num_open,
            loans=self._lending.num_loans,
            pending_writes=self._thread.num_pending(),
            iterations=self._thread.iterations,
            dropped=self._drops.snapshot(),
            peers=self._connector.stats(),
        )

    def pair_stats(self) -> tuple[PairStats, ...]:
        """This pod's traffic with every other one; any thread, cheap."""
        return self._pairs.stats(self._connector.stats())

    def _require_running(self) -> None:
        if self._closing or not self._thread.running:
            raise Unavailable("this pod is starting or leaving")

    # The transfer thread's hooks.

    def _on_notification(self, notification: Notification) -> None:
        message = parse_notification(notification.payload)
        if message is None:
            self._drops.count("notification_malformed")
        elif isinstance(message, CommittedNotification):
            self._outgoing.on_committed(notification.peer, message)
        else:
            self._incoming.on_notification(notification.peer, message)

    def _post(self) -> bool:
        return self._outgoing.post_writes()

    def _tick(self, now: float) -> None:
        self._incoming.tick(now)
        self._outgoing.tick(now)
        self._connector.tick(now)

    def _poll_fast(self) -> bool:
        return (
            self._incoming.poll_fast
            or self._outgoing.poll_fast
            or self._connector.connecting
            or self.servicer.expects_writes
        )

    def _peer_ended(self, connection: PeerConnection) -> None:
        self._outgoing.peer_ended(connection)

    def _ask_drain(self, transfer_id: TransferId, writer: Writer) -> None:
        async def ask() -> None:
            try:
                drained = await self._calls.drain(writer, transfer_id, DRAIN_CALL_S)
                if drained.generation == writer.generation:
                    generation, clean = drained.generation, drained.clean
                    self._thread.submit(lambda: self._incoming.drained(transfer_id, generation, clean))
                    return
            except BatonError as e:
                _log.info("no answer to drain of %s from %s: %s", transfer_id, writer.pod, e)
            if await self._calls.is_replaced(writer, DRAIN_CALL_S):
                self._thread.submit(lambda: self._incoming.writer_replaced(transfer_id, writer))
            else:
                self._thread.submit(lambda: self._incoming.drain_failed(transfer_id))

        self._calls.run_on_loop(ask)
