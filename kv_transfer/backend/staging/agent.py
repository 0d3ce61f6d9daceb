"""The staging area of a pod and the agent that moves host memory and messages. Both ends of staged writes use it.

area:  | window 0 | window 1 | ... | slots of this pod's own writes |      each part but the last for one writer
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass

from common.errors import TransferFailed
from kv_transfer.backend.interface import Backend
from kv_transfer.backend.staging.area import StagingArea
from kv_transfer.backend.staging.copiers import BlockCopier
from kv_transfer.backend.staging.messages import AreaDescription, StagingMessage, unpack_message
from kv_transfer.memory import PoolMemory

_log = logging.getLogger(__name__)

WINDOW_BYTES = 32 << 20  #: Size of a window, if the area is at least four times as large.
WINDOW_PIECES = 4  #: Pieces that fill a window: two are copied, one moves, one lands.
MAX_WINDOW_SLOTS = 1024  #: A message names each slot and block of a piece.
_SUFFIX = "-host"  #: End of the name of each agent for host memory.


@dataclass(frozen=True)
class StagingOptions:
    """How a pod stages KV."""

    memory_bytes: int  #: Host memory for the area.
    directory: str | None  #: Directory in which the pods of a machine share areas; None: no area is shared.
    always: bool = False  #: Nothing is written directly. For tests, and to measure.


def host_agent(peer: str) -> str:
    """Returns the name of a pod's agent for host memory."""
    return f"{peer}{_SUFFIX}"


class StagingAgent:
    """The area of one pod, its backend for host memory (`inner`) and its copies. The transfer thread owns it."""

    def __init__(
        self, name: str, pool: PoolMemory, inner: Backend, copier: BlockCopier, options: StagingOptions
    ) -> None:
        """Allocates the area and starts the backend. Raises TransferFailed."""
        self.pool, self.inner, self.copier, self.directory = pool, inner, copier, options.directory
        size = pool.block_bytes
        slots = options.memory_bytes // size
        most = min(WINDOW_BYTES // size, slots // 4, MAX_WINDOW_SLOTS)
        self.window_slots = max(WINDOW_PIECES, most)
        self.num_windows = slots // self.window_slots - 1
        if self.num_windows < 1:
            need = 1 + (2 * self.window_slots * size >> 20)
            raise TransferFailed(f"staging_memory has room for {slots} blocks of {size} bytes: it needs {need} MiB")
        self.area = area = StagingArea.create(options.directory, slots, size)
        try:
            copier.attach(area)
            # After the copier: UCX page-locks memory that is not locked yet, and CUDA refuses to lock it twice.
            inner.start(host_agent(name), area.memory())
        except BaseException:
            copier.detach(area)
            area.close()
            raise
        shared = f", shared in {self.directory}" if area.file else ""
        _log.info("%d MiB of host memory for KV to and from pods without a direct way%s", slots * size >> 20, shared)

    @property
    def own_slots(self) -> list[int]:
        """The slots of this pod's own writes."""
        return list(range(self.num_windows * self.window_slots, self.area.slots))

    def first_slot(self, window: int) -> int:
        """Returns the first slot of a window."""
        return window * self.window_slots

    def metadata(self) -> bytes:
        """Returns the description of the area and the metadata of the backend that writes to it over the network."""
        area = self.area
        described = AreaDescription(
            area.base, area.slots, area.slot_bytes, self.window_slots, area.file, area.token.hex()
        )
        return described.pack(self.inner.metadata())

    def notify(self, peer: str, message: StagingMessage) -> bool:
        """Sends a message. Returns whether the backend accepted it; a lost message is sent again by its sender."""
        try:
            self.inner.notify(host_agent(peer), message.pack())
        except TransferFailed as e:
            _log.debug("%s cannot be notified: %s", peer, e.message)
            return False
        return True

    def messages(self) -> Iterator[tuple[str, StagingMessage]]:
        """Makes progress. Yields the messages that arrived, each with its peer."""
        for notification in self.inner.notifications():
            peer = notification.peer.removesuffix(_SUFFIX)
            try:
                message = unpack_message(notification.payload)
            except ValueError as e:
                _log.warning("a message of %s about staged KV is malformed: %s", peer, e)
            else:
                yield peer, message

    def close(self, *, free_area: bool) -> None:
        """Ends the backend. The area stays until the process ends if a copy or a network write may still use it."""
        self.inner.close()
        if free_area:
            self.copier.detach(self.area)
            self.area.close()
