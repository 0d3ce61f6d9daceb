"""Pulls of cached blocks from other pods into this one, by the holder's push or by reading them there.

    push: reserve -> Pull -> (Open, writes, Commit from the holder) -> complete       the receiver machine's rules
    read: connect -> Pull -> reads -> PullEnd acknowledged -> complete                the read machine's rules

Invariant: the caller's hold is released exactly once, when no byte can land in its blocks any more, whatever becomes of
the pull; that may be long after the pull has failed for the caller. Runs on the event loop.
"""

from __future__ import annotations

import asyncio
import logging
import time
import zlib
from collections.abc import Callable, Sequence
from functools import partial

from common.errors import BatonError, BlockDamaged, DeadlineExceeded, TransferFailed
from common.types import KvTarget, TransferId
from kv_transfer.connector import Connection, Connector
from kv_transfer.incoming import Incoming
from kv_transfer.lending import MAX_LOAN_S
from kv_transfer.memory import PoolMemory, let_go
from kv_transfer.messages import Commit, Holder, Pulled, PullWay, ReadWay, Wanted
from kv_transfer.pairs import Pairs
from kv_transfer.peer_calls import PeerCalls
from kv_transfer.read_probe import ReadProbe
from kv_transfer.reading import Read, Reading
from kv_transfer.transfer_thread import TransferThread

_log = logging.getLogger(__name__)

END_CALL_S = 2.0


class Pulling:
    """Pulls for one pod; target(first_block, blocks) makes a KvTarget with a new transfer id."""

    def __init__(
        self,
        thread: TransferThread,
        incoming: Incoming,
        reading: Reading,
        read_probe: ReadProbe,
        pairs: Pairs,
        connector: Connector,
        calls: PeerCalls,
        memory: PoolMemory,
        clock: Callable[[], float],
        target: Callable[[int, Sequence[int]], KvTarget],
    ) -> None:
        self._thread = thread
        self._incoming = incoming
        self._reading = reading
        self._read_probe = read_probe
        self._pairs = pairs
        self._connector = connector
        self._calls = calls
        self._memory = memory
        self._clock = clock
        self._target = target
        self.damaged = 0  # reads whose checksums were wrong

    async def way(self, holder: Holder, timeout_s: float) -> PullWay:
        """Of reads from there. Raises BatonError."""
        _, way = await self._connect(holder, timeout_s)
        return PullWay(False, instead=True) if way.refused else PullWay(True, self._read_gbps(holder.pod, way))

    async def _connect(self, holder: Holder, timeout_s: float) -> tuple[Connection, ReadWay]:
        began = time.monotonic()
        connection = await self._connector.connect(holder.address, timeout_s, holder.generation or None)
        left_s = max(0.0, timeout_s - (time.monotonic() - began))
        pod = connection.pod
        return connection, await self._read_probe.way(
            connection, left_s, lambda: self._read_gbps(pod, connection.reads)
        )

    def _read_gbps(self, pod: str, way: ReadWay | None) -> float:
        return self._pairs.of(pod).read_gbps(way)

    async def push(self, holder: Holder, wanted: Wanted) -> Pulled:
        """The holder writes them. Raises BatonError."""
        loop = asyncio.get_running_loop()
        over: asyncio.Future[None] = loop.create_future()
        over.add_done_callback(lambda f: f.cancelled() or f.exception())  # seen, even if nobody waits any more

        def tell(error: BatonError | None) -> None:
            if not over.done():
                over.set_exception(error) if error is not None else over.set_result(None)

        def ready(_: Commit) -> None:
            loop.call_soon_threadsafe(tell, None)

        def failed(error: BatonError) -> None:
            loop.call_soon_threadsafe(tell, error)

        target = self._target(wanted.first_block, wanted.blocks)
        transfer_id, deadline = target.transfer_id, self._clock() + wanted.timeout_s
        self._thread.submit(
            lambda: self._incoming.add(
                transfer_id, wanted.request_id, wanted.first_block, wanted.blocks, wanted.hold, deadline, ready, failed
            )
        )
        try:
            answer = await self._calls.pull(holder.address, target, wanted, read=False)
            if not answer.blocks:
                return Pulled(0, answer.reason, answer.gb_s)
            if answer.blocks < len(wanted.blocks):
                self._thread.submit(partial(self._incoming.narrow, transfer_id, answer.blocks))
            await over
            return Pulled(answer.blocks, answer.reason, answer.gb_s)
        finally:
            self._thread.submit(lambda: self._incoming.release(transfer_id))  # after READY it has no effect

    async def read(self, holder: Holder, wanted: Wanted) -> Pulled:
        """This pod reads them at the holder. Raises BatonError."""
        began = time.monotonic()
        lent = False
        target = self._target(wanted.first_block, wanted.blocks)
        try:
            connection, way = await self._connect(holder, wanted.timeout_s)
            if way.refused:
                raise TransferFailed(f"reads from {holder.pod} are refused as {way.refused} (--allow-tcp permits it)")
            answer = await self._calls.pull(holder.address, target, wanted, read=True)
            gbps = self._read_gbps(connection.pod, way)
            if not answer.blocks:
                return Pulled(0, answer.reason, gbps)
            lent = True
            remote = tuple(answer.lent)
            if len(remote) != answer.blocks or answer.blocks > len(wanted.blocks):
                raise TransferFailed(f"{holder.pod} lends {len(remote)} blocks and says {answer.blocks}")
            if any(block >= connection.num_blocks for block in remote):
                raise TransferFailed(f"{holder.pod} lends blocks that it has not got")
        except BaseException:
            if lent:
                self._end_later(holder.address, target.transfer_id)
                lent = False
            raise
        finally:
            if not lent:
                let_go(wanted.hold)  # nothing was posted
        let_go(wanted.hold, wanted.blocks[answer.blocks :])
        left_s = max(0.0, wanted.timeout_s - (time.monotonic() - began))
        local, deadline = wanted.blocks[: answer.blocks], self._clock() + left_s
        read = self._reading.start(connection, local, remote, wanted.hold, deadline, gbps)
        await self._await(read, holder, target)
        if answer.checksums and [zlib.crc32(self._memory.read_block(b)) for b in local] != list(answer.checksums):
            self.damaged += 1
            raise BlockDamaged(f"a block that was read from {holder.pod} is damaged")
        return Pulled(answer.blocks, answer.reason, self._read_gbps(connection.pod, way))

    async def _await(self, read: Read, holder: Holder, target: KvTarget) -> None:
        """Until all is read, and the holder confirms that it was still lent."""
        ended = False
        try:
            await asyncio.shield(asyncio.wrap_future(read.outcome))
            ended = True
            await self._calls.pull_end(holder.address, target.transfer_id, END_CALL_S)
        finally:
            if not ended:
                self._reading.give_up(read, DeadlineExceeded("nobody waits for what is read"))
                self._end_later(holder.address, target.transfer_id, read)

    def _end_later(self, address: str, transfer_id: TransferId, read: Read | None = None) -> None:
        """Tells the holder, so that it need not wait for the deadline: once nothing of the read is under way, for until
        then it has to poll.
        """

        async def end() -> None:
            if read is not None:
                await asyncio.wait({asyncio.wrap_future(read.over)}, timeout=MAX_LOAN_S)
            try:
                await self._calls.pull_end(address, transfer_id, END_CALL_S)
            except BatonError as e:
                _log.debug("the loan %s at %s ends by itself: %s", transfer_id, address, e)

        self._calls.spawn(end)
