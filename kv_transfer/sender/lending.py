"""Loans of cached blocks to pods that pull a prefix. Event loop.

A loan is an outgoing transfer of pinned blocks. Its pin is released by the rules of the sender's state machine.
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

#: Called with the block hashes from the start of a prompt and the first wanted logical block. Pins, for reading, the
#: leading ones of these blocks that this pod holds; None for none.
LendCallback = Callable[[Sequence[bytes], int], PinnedBlocks | None]


@dataclass(frozen=True, slots=True)
class LendResult:
    """Answer to a Pull."""

    #: This many blocks, from the first wanted one on, will be pushed.
    blocks: int
    #: "none", or why some wanted blocks are missing: leaving, busy or absent.
    reason: str


class PrefixLender:
    """Lends cached blocks of this pod."""

    def __init__(self, outgoing: TransferSender, lend: LendCallback) -> None:
        self._outgoing = outgoing
        self._lend = lend
        self._loans: set[asyncio.Task[None]] = set()
        self._closed = False

    @property
    def num_loans(self) -> int:
        """Loans that have not ended."""
        return len(self._loans)

    def lend(self, request_id: str, target: KvTarget, hashes: Sequence[bytes], timeout_s: float) -> LendResult:
        """Answers a Pull at once and starts to push. Raises InvalidRequest if hashes and target do not match."""
        num_blocks = len(target.blocks)
        if (
            not num_blocks
            or len(hashes) != target.first_block + num_blocks
            or any(len(h) != HASH_BYTES for h in hashes)
        ):
            expected = f"{target.first_block + num_blocks} hashes of {HASH_BYTES} bytes"
            raise InvalidRequest(f"{len(hashes)} hashes for {num_blocks} blocks: expected {expected}", field="hashes")
        if self._closed:
            return LendResult(0, "leaving")
        if self.num_loans >= MAX_LOANS:
            return LendResult(0, "busy")
        pin = self._lend(hashes, target.first_block)
        if pin is None:
            return LendResult(0, "absent")
        count = len(pin.blocks)
        self._push(request_id, replace(target, blocks=target.blocks[:count]), pin, timeout_s)
        return LendResult(count, "none" if count == num_blocks else "absent")

    def _push(self, request_id: str, target: KvTarget, pin: PinnedBlocks, timeout_s: float) -> None:
        blocks = tuple(pin.blocks)
        end = target.first_block + len(blocks)
        transfer = self._outgoing.start(target, request_id, end, timeout_s, for_pull=True)
        transfer.push(target.first_block, blocks, pin)
        transfer.finish((), ())

        async def wait_end() -> None:
            try:
                await transfer.done()
            except BatonError as e:
                _log.info("the loan to %s failed: %s", target.pod, e, extra={"request_id": request_id})

        task = asyncio.get_running_loop().create_task(wait_end())
        self._loans.add(task)
        task.add_done_callback(self._loans.discard)

    def close(self) -> None:
        """Refuses new loans. Open ones end with the outgoing transfers. Idempotent."""
        self._closed = True
