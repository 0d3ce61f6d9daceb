"""What this pod lends of its cache to pods that pull a prefix.

The blocks are held for reading until the transfer to the puller is over, by the sender's rules. Runs on the event loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from common.block_hash import HASH_BYTES
from common.errors import BatonError, InvalidRequest
from common.types import KvTarget
from kv_transfer.memory import PinnedBlocks
from kv_transfer.sender.transfers import TransferSender

_log = logging.getLogger(__name__)

MAX_LOANS = 16

LendCallback = Callable[[Sequence[bytes], int], PinnedBlocks | None]


@dataclass(frozen=True, slots=True)
class LendResult:
    """blocks: how many, from the first wanted on. reason: none, or why there are fewer than wanted."""

    blocks: int
    reason: str


class PrefixLender:
    """lend(hashes, first) holds, for reading, the blocks of this chain from logical block `first` on, as many as this
    pod has from there; None for none.
    """

    def __init__(self, outgoing: TransferSender, lend: LendCallback) -> None:
        self._outgoing = outgoing
        self._lend = lend
        self._loans: set[asyncio.Task[None]] = set()
        self._closed = False

    @property
    def num_loans(self) -> int:
        """Loans that are not over."""
        return len(self._loans)

    def lend(self, request_id: str, target: KvTarget, hashes: Sequence[bytes], timeout_s: float) -> LendResult:
        """Answers a Pull at once and begins to push. Raises InvalidRequest for one that makes no sense."""
        wanted = len(target.blocks)
        if not wanted or len(hashes) != target.first_block + wanted or any(len(h) != HASH_BYTES for h in hashes):
            raise InvalidRequest("hashes and target do not fit each other", field="hashes")
        if self._closed:
            return LendResult(0, "leaving")
        if self.num_loans >= MAX_LOANS:
            return LendResult(0, "busy")
        hold = self._lend(hashes, target.first_block)
        if hold is None:
            return LendResult(0, "absent")
        count = len(hold.blocks)
        self._push(request_id, replace(target, blocks=target.blocks[:count]), hold, timeout_s)
        return LendResult(count, "none" if count == wanted else "absent")

    def _push(self, request_id: str, target: KvTarget, hold: PinnedBlocks, timeout_s: float) -> None:
        blocks = tuple(hold.blocks)
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
        self._loans.add(task)
        task.add_done_callback(self._loans.discard)

    def close(self) -> None:
        """Lends nothing any more; what is lent ends with the outgoing transfers. Idempotent."""
        self._closed = True
