"""Loans of cached blocks to pods that pull a prefix. Event loop.

A loan is an outgoing transfer of pinned blocks. Its pin is released by the rules of the sender's state machine.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace

from common.block_hash import HASH_BYTES
from common.errors import InvalidRequest
from common.types import KvTarget
from kv_transfer.memory import PinnedBlocks, release_unless_handed_on
from kv_transfer.messages import TransferReport
from kv_transfer.sender.transfers import OutgoingTransfer, TransferSender

_log = logging.getLogger(__name__)

MAX_LOANS = 16

#: Called with the block hashes from the start of a prompt and the first wanted logical block. Pins, for reading, the
#: leading ones of these blocks that this pod holds; None for none.
LendCallback = Callable[[Sequence[bytes], int], PinnedBlocks | None]


@dataclass(frozen=True, slots=True)
class LendResult:
    """Answer to a Pull."""

    blocks: int  # This many blocks, from the first wanted one on, will be pushed
    reason: str  # "none", or why some wanted blocks are missing: leaving, busy or absent


class PrefixLender:
    """Lends cached blocks of this pod."""

    def __init__(self, outgoing: TransferSender, lend: LendCallback) -> None:
        self._outgoing = outgoing
        self._lend = lend
        self._loans: set[OutgoingTransfer] = set()
        self.closed = False  # No new loan is made. Open ones end with the outgoing transfers.

    @property
    def num_loans(self) -> int:
        """Loans that have not ended."""
        return len(self._loans)

    def lend(self, request_id: str, target: KvTarget, hashes: Sequence[bytes], timeout_s: float) -> LendResult:
        """Answers a Pull at once and starts to push. Raises InvalidRequest if hashes and target do not match."""
        first, wanted = target.first_block, len(target.blocks)
        if not wanted or len(hashes) != first + wanted or any(len(h) != HASH_BYTES for h in hashes):
            expected = f"{first + wanted} hashes of {HASH_BYTES} bytes"
            raise InvalidRequest(f"{len(hashes)} hashes for {wanted} blocks: expected {expected}", field="hashes")
        if self.closed:
            return LendResult(0, "leaving")
        if self.num_loans >= MAX_LOANS:
            return LendResult(0, "busy")
        pin = self._lend(hashes, first)
        if pin is None:
            return LendResult(0, "absent")
        with release_unless_handed_on(pin) as scope:
            blocks = tuple(pin.blocks)
            lent = replace(target, blocks=target.blocks[: len(blocks)])
            transfer = self._outgoing.start(lent, request_id, first + len(blocks), timeout_s, for_pull=True)
            scope.pop_all()
        transfer.push(first, blocks, pin)
        transfer.finish((), ())
        self._loans.add(transfer)
        transfer.outcome.add_done_callback(lambda outcome: self._on_ended(transfer, outcome))
        return LendResult(len(blocks), "none" if len(blocks) == wanted else "absent")

    def _on_ended(self, loan: OutgoingTransfer, outcome: Future[TransferReport]) -> None:
        """Handles the end of a loan. Transfer thread."""
        self._loans.discard(loan)
        if error := outcome.exception():
            _log.info("the loan to %s failed: %s", loan.target.pod, error, extra={"request_id": loan.request_id})
