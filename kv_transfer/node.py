"""A pod's transfers in both directions: wires the transfer thread, both tables, the peers and the Transfer service.

Time line of one hand-off from a prefill pod to a decode pod:

    prefill  compute  |---- chunk 1 ----|---- chunk 2 ----|---- chunk 3 ----|
             calls    Open              push              push              push, finish, Commit     done
             writes                     |== blocks 1 ==|  |== blocks 2 ==|  |== blocks 3 ==|          ^
    decode   state    RESERVED, OPEN                                            commit stored       READY
                                                                            |<---- exposed time ---->|

Life: construct -> start() on the event loop -> serve `servicer` over gRPC -> transfers -> stop(). The transfer thread
owns the backend and every state machine. The event loop owns the calls between pods.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from common.auth import Signer
from common.errors import BatonError, TransferFailed, Unavailable
from common.pb import transfer_pb2
from common.process.watchdog import Heartbeat
from common.tls import TlsFiles
from common.types import KvTarget, TransferId
from kv_transfer.backend.interface import Backend, Notification
from kv_transfer.memory import PinnedBlocks, PoolMemory, release_unless_handed_on
from kv_transfer.messages import (
    Commit,
    CommittedNotification,
    DroppedMessages,
    PeerStats,
    PullResult,
    TransferStats,
    WantedBlocks,
    is_sealed,
    parse_notification,
)
from kv_transfer.peers.connection import agent_name
from kv_transfer.peers.connection_probe import ConnectionProbe
from kv_transfer.peers.connector import PeerConnector
from kv_transfer.peers.pair_prober import PAIR_PROBE_S, PairProber
from kv_transfer.peers.rpc_client import PeerRpcClient
from kv_transfer.peers.traffic import PairTrafficTable
from kv_transfer.receiver.state_machine import ReceiverMachine
from kv_transfer.receiver.transfers import IncomingTransfer, TransferReceiver
from kv_transfer.sender.transfers import OutgoingTransfer, TransferSender
from kv_transfer.sender.write_limits import DEFAULT_WRITE_LIMITS, WriteLimits
from kv_transfer.servicer import LendCallback, TransferServicer
from kv_transfer.transfer_thread import TransferThread

_log = logging.getLogger(__name__)

START_S = 60.0  #: The first agent of a machine loads libraries and initializes devices.
JOIN_S = 5.0
STOP_POLL_S = 0.01


@dataclass(eq=False, kw_only=True)
class TransferNode:
    """This pod as a sender and receiver of KV."""

    backend: Backend
    memory: PoolMemory
    info: Callable[[], transfer_pb2.InfoResponse]  #: Current description of this pod (role, name, generation, ...).
    signer: Signer
    address: Callable[[], str]  #: host:port of the gRPC server that serves `servicer`, once it is bound.
    lend: LendCallback = lambda _hashes, _first: None  #: Pins cached blocks for a pod that pulls them.
    #: Returns the pages in which a prefix of so many blocks is lent: more with KV groups.
    count_pages: Callable[[int], int] = lambda num_blocks: num_blocks
    #: Returns the blocks of the longest prefix of these hashes that `lend` pins as a whole.
    count_held: Callable[[Sequence[bytes]], int] = lambda _hashes: 0
    checksums: bool = False  #: The commit carries a CRC-32 of every block, and the receiver compares them.
    allow_tcp: bool = False  #: KV in GPU memory may travel over TCP or an unknown transport.
    write_limits: WriteLimits | None = None  #: Sizes of writes. None: DEFAULT_WRITE_LIMITS of the memory.
    #: Commits go as notifications to receivers that poll often. False is for benchmarks.
    commit_notifications: bool = True
    tls: TlsFiles | None = None  #: This pod's certificates for calls to other pods. None: plain calls.
    pair_probe_s: float = PAIR_PROBE_S  #: A connection without traffic for this long is probed.

    def __post_init__(self) -> None:
        memory, info, clock = self.memory, self.info, time.monotonic
        self._clock = clock
        self._generation, self._fingerprint = 0, ""
        self._closing = False
        self._dropped = DroppedMessages()
        self._pairs = PairTrafficTable(clock)
        self._rpc = PeerRpcClient(self.signer, info, self.address, self.tls)
        self._thread = thread = TransferThread(self.backend, clock)
        probe = ConnectionProbe(thread, self._rpc, memory, info, clock, self.allow_tcp)
        self._connector = PeerConnector(thread, self._rpc, info, clock, probe)
        self._prober = PairProber(self._connector, clock, self.pair_probe_s)
        self._incoming = TransferReceiver(thread, self._rpc, clock, self._dropped)
        self._outgoing = TransferSender(
            *(thread, self._connector, self._rpc, memory, clock, self._pairs),
            fingerprint=lambda: info().fingerprint,
            with_checksums=self.checksums,
            write_limits=self.write_limits or DEFAULT_WRITE_LIMITS[memory.kind],
            commit_notifications=self.commit_notifications,
        )
        sides = (self._incoming, self._outgoing, self.lend)
        self.servicer = TransferServicer(
            *(thread, *sides, self._pairs, memory, info, self.signer, self._dropped, clock),
            count_pages=self.count_pages,
            count_held=self.count_held,
        )

    @property
    def heartbeat(self) -> Heartbeat:
        """The sign of life of the transfer thread."""
        return self._thread.heartbeat

    @property
    def alive(self) -> bool:
        """The transfer thread runs. Any thread."""
        return self._thread.running

    async def start(self) -> None:
        """Starts the transfer agent, named after the pod and its generation. Raises TransferFailed."""
        info = self.info()
        self._rpc.start()
        self._generation, self._fingerprint = info.generation, info.fingerprint
        started = self._thread.start(agent_name(info), self.memory, self)
        try:
            await asyncio.wait_for(asyncio.wrap_future(started), START_S)
        except TimeoutError as e:
            self._thread.stop()
            raise TransferFailed(f"the transfer agent did not start within {START_S:.0f} s") from e
        self._prober.start()

    async def stop(self, grace_s: float = 5.0) -> None:
        """Refuses new transfers, waits at most grace_s seconds for outgoing ones, and fails the rest. Idempotent.

        Pins of writes in flight are not released: the end of the process is the fence.
        """
        if self._closing:
            return
        self._closing = True
        self.servicer.leaving = True
        await self._prober.stop()
        until = self._clock() + grace_s
        if self._thread.running:  # after this every transfer that was started is in the table
            await asyncio.wait({asyncio.wrap_future(self._thread.call(lambda: None))}, timeout=grace_s)
        await self._wait_outgoing(until)
        leaving = Unavailable("this pod is leaving")
        self._thread.submit(lambda: self._outgoing.close(leaving))
        await self._wait_outgoing(until)
        self._thread.submit(self._incoming.close)
        await self._connector.close()
        self._thread.stop()
        if not await asyncio.to_thread(self._thread.join, JOIN_S):
            _log.error("the transfer thread did not end within %s s", JOIN_S)
        await self._rpc.close()

    async def _wait_outgoing(self, until: float) -> None:
        for _ in range(max(1, int((until - self._clock()) / STOP_POLL_S))):
            if not self._outgoing.num_open or not self._thread.running:
                return
            await asyncio.sleep(STOP_POLL_S)

    # -- sending ------------------------------------------------------------------------------------------------------
    def start_transfer(
        self, target: KvTarget, request_id: str, num_prompt_blocks: int, deadline_s: float, adapter: str = ""
    ) -> OutgoingTransfer:
        """Starts a transfer to `target` in the background. Event loop. Later failures are raised by done().

        num_prompt_blocks: blocks of the whole prompt, with the partial last one. adapter: digest of its LoRA adapter.
        Raises Unavailable before start() and after stop(); Unauthenticated or UnknownTransfer for a target without a
        right signature for this request and adapter.
        """
        self._require_running()
        self.signer.verify_target(target, request_id, adapter)
        return self._outgoing.start(target, request_id, num_prompt_blocks, deadline_s)

    async def connect(
        self, address: str, pod: str, generation: int | None = None, timeout_s: float = 30.0
    ) -> PeerStats:
        """Connects to and probes `pod` at `address` (None: any generation). Returns at once if connected."""
        self._connector.want(pod)
        return (await self._connector.connect(address, pod, timeout_s, generation)).stats(self._clock())

    # -- receiving ----------------------------------------------------------------------------------------------------
    def expect_transfer(
        self,
        *,
        request_id: str,
        first_block: int,
        blocks: Sequence[int],
        pin: PinnedBlocks,
        deadline_s: float,
        on_ready: Callable[[Commit], None],
        on_failed: Callable[[BatonError], None],
        adapter: str = "",
    ) -> KvTarget:
        """Makes room for a transfer of logical blocks first_block... into the physical `blocks`. Any thread.

        Returns the signed target, which expires with the deadline. adapter: digest of the LoRA adapter that the KV must
        be of. Exactly one callback runs, once, on the transfer
        thread. It must not block.
        - on_ready: the KV is complete and the pin was released.
        - on_failed: deadline, damage, the writer's end, or release() before READY.

        The node owns `pin` from this call on, also if it raises. It releases the pin once no write can land in its
        blocks. Raises Unavailable before start() and after stop().
        """
        with release_unless_handed_on(pin) as scope:
            self._require_running()
            target = self._signed_target(request_id, first_block, blocks, deadline_s, adapter)
            transfer_id, deadline = target.transfer_id, self._clock() + deadline_s
            machine = ReceiverMachine(transfer_id, first_block=first_block, num_blocks=len(blocks), deadline=deadline)
            entry = IncomingTransfer(machine, request_id, target, pin, on_ready, on_failed)
            self._thread.submit(partial(self._incoming.add, entry))
            scope.pop_all()
        return target

    def _signed_target(
        self, request_id: str, first_block: int, blocks: Sequence[int], valid_s: float, adapter: str = ""
    ) -> KvTarget:
        """Returns the capability to write these blocks of this pod for a request."""
        transfer_id = self._incoming.new_transfer_id(self._generation)
        where = (self.signer.name, self.address(), first_block, tuple(blocks))
        return self.signer.sign_target(KvTarget(transfer_id, *where, self._fingerprint), request_id, valid_s, adapter)

    def release(self, transfer_id: TransferId) -> None:
        """Records that the request has ended on this pod. Any thread; idempotent; ignores unknown ids.

        Before READY this aborts the transfer: on_failed gets Cancelled, and the blocks stay quarantined while they may
        be written.
        """
        self._thread.submit(lambda: self._incoming.release(transfer_id))

    # -- pulling ------------------------------------------------------------------------------------------------------
    def pull(self, address: str, pod: str, wanted: WantedBlocks) -> asyncio.Task[PullResult]:
        """Pulls cached blocks from `pod` at `address`, which pushes them. Event loop.

        The node owns wanted.pin from this call on, also if it raises. It releases the pin once no byte can land any
        more, also if the task is cancelled before its first step. The task raises BatonError; then no block of the pull
        is valid. Raises Unavailable before start() and after stop().
        """
        with release_unless_handed_on(wanted.pin) as scope:
            self._require_running()
            target = self._signed_target(wanted.request_id, wanted.first_block, wanted.blocks, wanted.timeout_s)
            task = self._incoming.pull(address, pod, target, wanted)
            scope.pop_all()
        return task

    # -- both ---------------------------------------------------------------------------------------------------------
    def stats(self) -> TransferStats:
        """Returns counters and gauges. Any thread; cheap."""
        return TransferStats(
            sent_blocks=self._outgoing.sent_blocks,
            sent_transfers=self._outgoing.sent_transfers,
            failed_transfers=self._outgoing.failed_transfers,
            received_transfers=self._incoming.received_transfers,
            damaged_transfers=self._incoming.damaged_transfers,
            open_incoming=self._incoming.num_open,
            quarantined_blocks=self._incoming.quarantined_blocks,
            open_outgoing=self._outgoing.num_open,
            loans=len(self.servicer.loans),
            pending_writes=self._thread.num_pending,
            dropped=self._dropped.snapshot() | ({"unauthenticated": n} if (n := self.signer.refused) else {}),
            peers=self._connector.stats(),
        )

    def pair_stats(self) -> tuple[transfer_pb2.Pair, ...]:
        """Returns traffic, connection and trouble of each pair of this pod with another one. Any thread; cheap."""
        return self._pairs.stats(self._connector.pair_stats())

    def _require_running(self) -> None:
        if self._closing or not self._thread.running:
            raise Unavailable("this pod is starting or leaving")

    # -- TransferWork -------------------------------------------------------------------------------------------------
    def on_notification(self, notification: Notification) -> None:
        message = parse_notification(notification.payload)
        if message is None:
            self._dropped.count("notification_malformed")
            return
        side = self._outgoing if isinstance(message, CommittedNotification) else self._incoming
        signature = side.signature_of(notification.peer, message.transfer_id)
        if signature is not None and not is_sealed(notification.payload, signature):
            self._dropped.count("notification_forged")
        elif isinstance(message, CommittedNotification):
            self._outgoing.on_committed(notification.peer, message)
        else:
            self._incoming.on_notification(notification.peer, message)

    def post_writes(self) -> bool:
        return self._outgoing.post_writes()

    def tick(self, now: float) -> None:
        self._incoming.tick(now)
        self._outgoing.tick(now)
        self._connector.tick(now)

    def poll_fast(self) -> bool:
        transfers = self._incoming.poll_fast or self._outgoing.poll_fast
        return transfers or self._connector.connecting or self.servicer.expects_writes

    def poll_hot(self) -> bool:
        return self._incoming.poll_hot or self._outgoing.poll_hot
