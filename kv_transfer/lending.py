"""What this pod lends of its cache to pods that pull a prefix.

pushed: the blocks are held for reading until the transfer to the puller is over, by the sender's rules.
read:   they are held until the puller says PullEnd, and at most until its deadline. A read that comes later may meet
        other bytes, so what was read counts only if PullEnd found the loan alive. Therefore no silence of a puller can
        keep a block for ever, and no block has to be kept for a puller that may be dead: nobody writes here.

Invariant: every hold taken from `lend` is released exactly once. Runs on the event loop.
"""

from __future__ import annotations

import asyncio
import logging
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from common.block_hash import HASH_BYTES
from common.errors import BatonError, InvalidRequest, UnknownTransfer
from common.types import KvTarget, TransferId
from kv_transfer.memory import Hold, PoolMemory, let_go
from kv_transfer.outgoing import Outgoing

_log = logging.getLogger(__name__)

MAX_LOANS = 16
MAX_LOAN_S = 30.0  # of a read, whatever the puller wishes
TRAILING_S = 2.0  # that reads may go on after a loan which their puller did not end

Lend = Callable[[Sequence[bytes], int], Hold | None]


@dataclass(frozen=True, slots=True)
class Lent:
    """blocks: physical ones, from the first wanted on. reason: none, or why there are fewer than wanted."""

    blocks: tuple[int, ...]
    reason: str
    checksums: tuple[int, ...] = ()


@dataclass(slots=True, eq=False)
class _Loan:
    hold: Hold
    timer: asyncio.TimerHandle


class Lending:
    """lend(hashes, first) holds, for reading, the blocks of this chain from logical block `first` on, as many as this
    pod has from there; None for none.
    """

    def __init__(self, outgoing: Outgoing, memory: PoolMemory, lend: Lend, *, checksums: bool) -> None:
        self._outgoing = outgoing
        self._memory = memory
        self._lend = lend
        self._checksums = checksums
        self._loans: dict[tuple[str, TransferId], _Loan] = {}
        self._pushes: set[asyncio.Task[None]] = set()
        self._closed = False
        self._trailing_until = 0.0

    @property
    def read_from(self) -> bool:
        """Pullers read here, or may not have stopped: on some transports bytes leave only while this side polls, and
        what leaves slowly is in the way of others.
        """
        return bool(self._loans) or time.monotonic() < self._trailing_until

    @property
    def open(self) -> int:
        """Loans that are not over."""
        return len(self._loans) + len(self._pushes)

    def lend(self, request_id: str, target: KvTarget, hashes: Sequence[bytes], timeout_s: float, *, read: bool) -> Lent:
        """Answers a Pull at once. Raises InvalidRequest for one that makes no sense."""
        wanted = len(target.blocks)
        if not wanted or len(hashes) != target.first_block + wanted or any(len(h) != HASH_BYTES for h in hashes):
            raise InvalidRequest("hashes and target do not fit each other", field="hashes")
        key = (target.pod, target.transfer_id)
        if self._closed:
            return Lent((), "leaving")
        if self.open >= MAX_LOANS or key in self._loans:
            return Lent((), "busy")
        hold = self._lend(hashes, target.first_block)
        if hold is None:
            return Lent((), "absent")
        blocks = tuple(hold.blocks)
        reason = "none" if len(blocks) == wanted else "absent"
        if not read:
            self._push(request_id, replace(target, blocks=target.blocks[: len(blocks)]), blocks, hold, timeout_s)
            return Lent(blocks, reason)
        timer = asyncio.get_running_loop().call_later(min(timeout_s, MAX_LOAN_S), self._expire, key)
        self._loans[key] = _Loan(hold, timer)
        sums = tuple(zlib.crc32(self._memory.read_block(block)) for block in blocks) if self._checksums else ()
        return Lent(blocks, reason, sums)

    def end(self, pod: str, transfer_id: TransferId) -> None:
        """The puller is done with what it was lent. Raises UnknownTransfer: the loan was over before."""
        loan = self._loans.pop((pod, transfer_id), None)
        if loan is None:
            raise UnknownTransfer(f"loan {transfer_id} of {pod} is over")
        loan.timer.cancel()
        let_go(loan.hold)

    def _expire(self, key: tuple[str, TransferId]) -> None:
        loan = self._loans.pop(key, None)
        if loan is not None:
            _log.info("loan %s of %s was not ended in time", key[1], key[0])
            self._trailing_until = time.monotonic() + TRAILING_S
            let_go(loan.hold)

    def _push(self, request_id: str, target: KvTarget, blocks: tuple[int, ...], hold: Hold, timeout_s: float) -> None:
        end = target.first_block + len(blocks)
        transfer = self._outgoing.start(target, request_id, end, timeout_s, lends=True)
        transfer.push(target.first_block, blocks, hold)
        transfer.finish((), ())

        async def over() -> None:
            try:
                await transfer.done()
            except BatonError as e:
                _log.info("blocks lent to %s did not arrive: %s", target.pod, e, extra={"request_id": request_id})

        task = asyncio.get_running_loop().create_task(over())
        self._pushes.add(task)
        task.add_done_callback(self._pushes.discard)

    def close(self) -> None:
        """Lends nothing any more and ends what is read; pushes end with the outgoing transfers. Idempotent."""
        self._closed = True
        for key in list(self._loans):
            self._expire(key)
