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

from common.auth import Signer
from common.errors import BatonError, TransferFailed, Unavailable
from common.pb import transfer_pb2
from common.types import KvTarget, TransferId
from kv_transfer.backend.interface import Backend, Notification
from kv_transfer.memory import PinnedBlocks, PoolMemory, release_unless_handed_on
from kv_transfer.messages import Commit, DroppedMessages, PeerStats, PullResult, TransferStats, WantedBlocks
from kv_transfer.notifications import CommittedNotification, parse_notification
from kv_transfer.peers.connections import PeerConnector, agent_name
from kv_transfer.peers.rpc_client import PeerRpcClient
from kv_transfer.peers.traffic import PairTrafficTable
from kv_transfer.receiver.transfers import TransferReceiver
from kv_transfer.sender.lending import LendCallback, PrefixLender
from kv_transfer.sender.transfers import DEFAULT_WRITE_LIMITS, OutgoingTransfer, TransferSender, WriteLimits
from kv_transfer.servicer import TransferServicer
from kv_transfer.transfer_thread import TransferThread

_log = logging.getLogger(__name__)

START_S = 60.0  # The first agent of a machine loads libraries and initializes devices
JOIN_S = 5.0
STOP_POLL_S = 0.01


def _lend_nothing(hashes: Sequence[bytes], first: int) -> PinnedBlocks | None:
    """Lends no blocks: the pod has no prefix cache."""
    return None


class TransferNode:
    """This pod as a sender and receiver of KV.

    Args:
        info: current description of this pod (role, name, generation, layout, pid, ...).
        address: host:port of the gRPC server that serves `servicer`, once it is bound.
        lend: pins cached blocks for a pod that pulls them; see PrefixLender.
        checksums: the commit carries a CRC-32 of every block, and the receiver compares them.
        allow_tcp: KV in GPU memory may travel over TCP or an unknown transport.
        write_limits: sizes of writes. None: DEFAULT_WRITE_LIMITS of the memory.
        commit_notifications: commits go as notifications to receivers that poll often. False is for benchmarks.
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
        write_limits: WriteLimits | None = None,
        commit_notifications: bool = True,
    ) -> None:
        self._memory = memory
        self._info = info
        self._address = address
        self._clock = clock = time.monotonic
        self._generation = 0
        self._closing = False
        self._dropped = DroppedMessages()
        self._pairs = PairTrafficTable(clock)
        self._rpc = PeerRpcClient(signer, info, address)
        self._thread = TransferThread(backend, clock)
        self._connector = PeerConnector(self._thread, self._rpc, memory, info, clock, allow_tcp)
        self._incoming = TransferReceiver(self._thread, self._rpc, memory, clock, self._dropped)
        self._outgoing = TransferSender(
            self._thread,
            self._connector,
            self._rpc,
            memory,
            clock,
            self._pairs,
            fingerprint=lambda: info().fingerprint,
            with_checksums=checksums,
            write_limits=write_limits or DEFAULT_WRITE_LIMITS[memory.kind],
            commit_notifications=commit_notifications,
        )
        self._lender = PrefixLender(self._outgoing, lend)
        self.servicer = TransferServicer(
            self._thread,
            self._incoming,
            self._outgoing,
            self._lender,
            self._pairs,
            memory,
            info,
            signer,
            self._dropped,
            clock,
        )

    @property
    def alive(self) -> bool:
        """The transfer thread runs. Any thread."""
        return self._thread.running

    async def start(self) -> None:
        """Starts the transfer agent, named after the pod and its generation. Raises TransferFailed."""
        info = self._info()
        self._rpc.start()
        self._generation = info.generation
        started = self._thread.start(agent_name(info), self._memory, self)
        try:
            await asyncio.wait_for(asyncio.wrap_future(started), START_S)
        except TimeoutError as e:
            self._thread.stop()
            raise TransferFailed(f"the transfer agent did not start within {START_S:.0f} s") from e

    async def stop(self, grace_s: float = 5.0) -> None:
        """Refuses new transfers, waits at most grace_s seconds for outgoing ones, and fails the rest. Idempotent.

        Pins of writes in flight are not released: the end of the process is the fence.
        """
        if self._closing:
            return
        self._closing = True
        self._lender.closed = True
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
        self, target: KvTarget, request_id: str, num_prompt_blocks: int, deadline_s: float
    ) -> OutgoingTransfer:
        """Starts a transfer to `target` in the background. Event loop. Failures are raised by done().

        Args:
            num_prompt_blocks: blocks of the whole prompt, with the partial last one.
            deadline_s: seconds from now.

        Raises Unavailable before start() and after stop().
        """
        self._require_running()
        return self._outgoing.start(target, request_id, num_prompt_blocks, deadline_s)

    async def connect(self, address: str, timeout_s: float = 30.0, generation: int | None = None) -> PeerStats:
        """Connects to and probes the pod at `address` (None: any generation). Returns at once if connected."""
        connection = await self._connector.connect(address, timeout_s, generation)
        return connection.stats

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
    ) -> TransferId:
        """Makes room for a transfer of logical blocks first_block... into the physical `blocks`. Any thread.

        Exactly one callback runs, once, on the transfer thread. It must not block.
        - on_ready: the KV is complete and the pin was released.
        - on_failed: deadline, damage, the writer's end, or release() before READY.

        The node owns `pin` from this call on, also if it raises. It releases the pin once no write can land in its
        blocks. Raises Unavailable before start() and after stop().
        """
        with release_unless_handed_on(pin) as scope:
            self._require_running()
            transfer_id = self._incoming.new_transfer_id(self._generation)
            kept, deadline = tuple(blocks), self._clock() + deadline_s
            self._thread.submit(
                lambda: self._incoming.add(
                    transfer_id, request_id, first_block, kept, pin, deadline, on_ready, on_failed
                )
            )
            scope.pop_all()
        return transfer_id

    def release(self, transfer_id: TransferId) -> None:
        """Tells the node that the request has ended on this pod. Any thread; idempotent; ignores unknown ids.

        Before READY this aborts the transfer: on_failed gets Cancelled, and the blocks stay quarantined while they may
        be written.
        """
        self._thread.submit(lambda: self._incoming.release(transfer_id))

    # -- pulling ------------------------------------------------------------------------------------------------------
    def pull(self, address: str, wanted: WantedBlocks) -> asyncio.Task[PullResult]:
        """Pulls cached blocks from the pod at `address`, which pushes them. Event loop.

        The node owns wanted.pin from this call on, also if it raises. It releases the pin once no byte can land any
        more, also if the task is cancelled before its first step. The task raises BatonError; then no block of the pull
        is valid. Raises Unavailable before start() and after stop().
        """
        with release_unless_handed_on(wanted.pin) as scope:
            self._require_running()
            task = self._incoming.pull(address, self._target(wanted), wanted)
            scope.pop_all()
        return task

    def _target(self, wanted: WantedBlocks) -> KvTarget:
        """Returns the wanted blocks as the target of a transfer with a new id."""
        info, transfer_id = self._info(), self._incoming.new_transfer_id(self._generation)
        return KvTarget(
            transfer_id, info.pod, self._address(), wanted.first_block, tuple(wanted.blocks), info.fingerprint
        )

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
            loans=self._lender.num_loans,
            pending_writes=self._thread.num_pending,
            dropped=self._dropped.snapshot(),
            peers=self._connector.stats(),
        )

    def pair_stats(self) -> tuple[transfer_pb2.Pair, ...]:
        """Returns this pod's traffic with every other pod. Any thread; cheap."""
        return self._pairs.stats(self._connector.stats())

    def _require_running(self) -> None:
        if self._closing or not self._thread.running:
            raise Unavailable("this pod is starting or leaving")

    # -- TransferWork -------------------------------------------------------------------------------------------------
    def on_notification(self, notification: Notification) -> None:
        message = parse_notification(notification.payload)
        if message is None:
            self._dropped.count("notification_malformed")
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
        return (
            self._incoming.poll_fast
            or self._outgoing.poll_fast
            or self._connector.connecting
            or self.servicer.expects_writes
        )

    def poll_hot(self) -> bool:
        return self._incoming.poll_hot or self._outgoing.poll_hot
