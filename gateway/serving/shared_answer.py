"""One answer for several readers. The answer keeps its items, and each reader gets all of them from the first on.

    handler -- add --> items 0, 1, 2, ... -- next  --> reader    wakes its task; gives all items since the last call
                                          -- relay --> reader    is called by `add` itself

An item is a message of the protocol, so a reader sends exactly the bytes that the handler wrote. The handler never
waits for a reader. The end of one reader does not concern the others. When the last reader ends, the answer is
abandoned.

Invariant: while `kept`, all items are in memory, so new readers may come. An answer that is let go keeps only items
that some reader has not got, at most MAX_LAG of them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Generic, TypeVar

from common.errors import BatonError, Overloaded

REPORT_BYTES = 1 << 16  #: `on_growth` is called each time that the answer has grown by this much.
ITEM_BYTES = 64  #: Counted memory of an item besides its content: a `bytes` object and its place in a list.
MAX_LAG = 8192  #: Items that a reader may be behind, once the answer is let go. As attempt.MAX_PENDING_TOKENS.
MAX_READERS = 16  #: Most readers of one answer.
_DROP_STEP = 256  #: At least this many items are dropped at once.

T = TypeVar("T")


def _ignore() -> None:
    """Does nothing."""


class SharedAnswer(Generic[T]):
    """The items of one answer, and its readers."""

    def __init__(self) -> None:
        self.size = 0  #: Counted bytes of all items, also of those that were dropped.
        self.kept = True  #: All items are in memory.
        self.complete = False  #: No more items come.
        self.error: BatonError | None = None  #: Why the answer failed. Readers get it after the last item.
        self.client_ids: list[str] = []  #: Request ids of the readers' clients, see AnswerReader.set_client_id.
        self.on_growth: Callable[[], None] = _ignore  #: See REPORT_BYTES.
        self.on_abandoned: Callable[[], None] = _ignore  #: Called when the last reader of a running answer ends.
        self._items: list[T] = []
        self._first = 0  #: Number of the first item in `_items`.
        self._next_report = REPORT_BYTES
        self._readers: set[AnswerReader[T]] = set()

    # -- the handler's side

    @property
    def begun(self) -> bool:
        """A part of the answer was sent, so its idempotency key stays taken if the answer fails."""
        return self.size > 0

    def add(self, item: T, size: int) -> None:
        """Adds the next item, which has `size` bytes. No effect if the answer has ended."""
        if self.complete:
            return
        self._items.append(item)
        self.size += size + ITEM_BYTES
        for reader in tuple(self._readers):
            reader.on_item(item)
        if not self.kept:
            self._drop_read_items()
        elif self.size >= self._next_report:
            self._next_report = self.size + REPORT_BYTES
            self.on_growth()

    def end(self, error: BatonError | None = None) -> None:
        """Ends the answer. Further calls have no effect."""
        if self.complete:
            return
        self.complete, self.error = True, error
        self.on_growth = self.on_abandoned = _ignore  # they refer to the answer, so they would keep it from being freed
        for reader in self._readers:
            reader.wake()

    def let_go(self) -> None:
        """From now on keeps only items that some reader has not got. No reader may be added any more."""
        self.kept = False
        self._drop_read_items()

    def _drop_read_items(self) -> None:
        end = self._first + len(self._items)
        for reader in self._readers:
            if end - reader.position > MAX_LAG:
                reader.fall_behind()
        read = min((reader.position for reader in self._readers if not reader.behind), default=end) - self._first
        if read >= _DROP_STEP or (read and self.complete):
            del self._items[:read]
            self._first += read

    # -- the readers' side

    @property
    def num_readers(self) -> int:
        """The number of readers that have not ended."""
        return len(self._readers)

    @contextmanager
    def reader(self) -> Iterator[AnswerReader[T]]:
        """Yields a reader that begins at the first item. Raises Overloaded if the answer has MAX_READERS already."""
        assert self.kept
        if len(self._readers) >= MAX_READERS:
            text = f"{MAX_READERS} requests with this idempotency key read the same answer; end some of them"
            raise Overloaded(text, retry_after_s=1.0)
        reader = AnswerReader(self)
        self._readers.add(reader)
        try:
            yield reader
        finally:
            self._readers.discard(reader)
            if reader.client_id is not None:  # a kept answer may be read for days, each time under another id
                self.client_ids.remove(reader.client_id)
            if not self.complete and not self._readers:
                self.on_abandoned()

    def items_from(self, position: int) -> Sequence[T]:
        """Returns the items from number `position` on, which must be in memory."""
        return self._items[position - self._first :]


class AnswerReader(Generic[T]):
    """One reader of a shared answer."""

    def __init__(self, answer: SharedAnswer[T]) -> None:
        self.position = 0  #: Number of the next item.
        self.behind = False  #: Items were dropped before the reader got them.
        self.client_id: str | None = None  #: The request id that the client sent; None for the first reader.
        self._answer = answer
        self._on_item: Callable[[T], bool] | None = None
        self._waiter: asyncio.Future[None] | None = None

    def set_client_id(self, client_id: str) -> None:
        """Lets a client abort the running answer by its own request id, as long as it reads the answer."""
        self.client_id = client_id
        self._answer.client_ids.append(client_id)

    async def next(self) -> Sequence[T]:
        """Waits for items. Returns all items since the last call, and nothing at the end of the answer.

        Raises the answer's error after its last item, and Overloaded if this reader is too far behind.
        """
        answer = self._answer
        while True:
            if self.behind:
                raise Overloaded("the client reads too slowly")
            if items := answer.items_from(self.position):
                self.position += len(items)
                return items
            if answer.complete:
                if answer.error is not None:
                    raise answer.error
                return ()
            await self._wait()

    async def relay(self, on_item: Callable[[T], bool]) -> None:
        """Calls `on_item` for each new item, in the same turn of the event loop in which the item is added.

        Returns when `on_item` has returned False; `next` then gives that item. Also returns when the answer ends, and
        at once if items wait already.
        """
        if self._answer.complete or self.behind or self._answer.items_from(self.position):
            return
        self._on_item = on_item
        try:
            await self._wait()
        finally:
            self._on_item = None

    def on_item(self, item: T) -> None:
        """Called by the answer for each new item."""
        if self._on_item is not None and self._on_item(item):
            self.position += 1
            return
        self._on_item = None
        self.wake()

    def fall_behind(self) -> None:
        """Called by the answer when it drops items that this reader has not got."""
        self.behind = True
        self.wake()

    def wake(self) -> None:
        """Wakes the reader if it waits."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def _wait(self) -> None:
        self._waiter = asyncio.get_running_loop().create_future()
        await self._waiter
