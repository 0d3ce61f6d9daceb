"""Bugs that the explorer has to find. Each bug is a product file without one of its lines."""

from __future__ import annotations

from dataclasses import dataclass, replace

from tests.modelcheck.explorer import Result, explore
from tests.modelcheck.pods import Bounds
from tests.modelcheck.product import Removal, load
from tests.modelcheck.world import World

#: Bounds of most bugs: one request, and each pod sees the end of the other's process.
SMALL = Bounds(requests=1, message_faults=0, watched=True)
_NO_RESTART = replace(SMALL, sender_restarts=0, receiver_restarts=0)
_TWO_WRITERS = replace(SMALL, failed_writes=0, receiver_restarts=0, odd_prefills=True)


@dataclass(frozen=True, slots=True)
class SeededBug:
    """A removed line, and the violation that it causes."""

    removal: Removal
    expected: str  #: Part of the violation's text.
    bounds: Bounds = SMALL

    def explore(self) -> Result:
        """Explores the product without the line."""
        return explore(World(load(self.removal), self.bounds))

    def is_found(self, result: Result) -> bool:
        """Returns whether the violation is the expected one."""
        return result.violation is not None and self.expected in result.violation.what


_RECEIVER, _SENDER, _TABLE = (
    "kv_transfer.receiver.state_machine",
    "kv_transfer.sender.state_machine",
    "kv_transfer.sender.transfers",
)
_NOT_OWNED = "which this transfer does not own"
_REFUSAL = 'raise UnknownTransfer(f"a newer generation of {pod} than {generation} has shaken hands")'
_OPENED = "self.writer, self.state = writer, ReceiverState.OPEN"
_RELEASE = "release_and_log_errors(transfer.pins.pop(push))"

SEEDED_BUGS = {
    "a late write after Drain": SeededBug(
        Removal(_SENDER, "next_write", "self._posted[write.number] = write"), _NOT_OWNED
    ),
    "a stale generation accepted": SeededBug(
        Removal(_RECEIVER, "drained", "return self.drain_failed(now)"), "and the quarantine changes"
    ),
    "Commit before the last range": SeededBug(
        Removal(_RECEIVER, "_complete", "return []", nth=1), "is used, but block"
    ),
    "double free on abort and commit": SeededBug(
        Removal("engine.kv.ledger", "_release", "continue"), "pool is inconsistent"
    ),
    "quarantine skipped": SeededBug(Removal(_RECEIVER, "drained", "return self.writer_ended(now)"), _NOT_OWNED),
}

#: Further bugs: against the other guard of generations, against progress, and against ending a transfer once.
MORE_BUGS = {
    "a stale generation's Open accepted": SeededBug(
        Removal("kv_transfer.servicer", "_writer", _REFUSAL), "changes a transfer after 2 shook hands", _TWO_WRITERS
    ),
    "an acknowledged Open forgotten": SeededBug(Removal(_RECEIVER, "open", _OPENED), _NOT_OWNED),
    "an abort after the end": SeededBug(Removal(_SENDER, "fail", "return []"), "InvalidStateError"),
    "Drain without an answer": SeededBug(
        Removal(_TABLE, "drain", "transfer.drains.append(answer)"), "Drain has no answer", _NO_RESTART
    ),
    "a pin that leaks": SeededBug(Removal(_TABLE, "_apply", _RELEASE), "blocks of SenderPod are not free", _NO_RESTART),
}
