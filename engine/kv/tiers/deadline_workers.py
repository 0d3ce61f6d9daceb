"""Threads for calls that may hang, as they do on a network file system whose server is away.

A caller waits until a deadline and goes on. The thread of a call that hangs is lost until the call returns. So a call
may only use memory of its own: it can write to it at any later time.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

A = TypeVar("A")
R = TypeVar("R")


class DeadlineWorkers:
    """A fixed number of daemon threads, which neither a drain nor the end of the process waits for."""

    def __init__(self, count: int, name: str) -> None:
        """Starts no thread yet: the first `map` does."""
        self._count, self._name = count, name
        self._jobs: queue.SimpleQueue[tuple[_Batch[Any, Any], int] | None] = queue.SimpleQueue()
        self._started = False

    def map(self, function: Callable[[A], R], items: Sequence[A], timeout_s: float) -> list[R]:
        """Returns function(item) for each item, in order. One thread at a time may call this.

        Raises TimeoutError after `timeout_s`, and the first error of `function`. Calls that have not begun by then are
        left out.
        """
        if not self._started:
            self._started = True
            for _ in range(self._count):
                threading.Thread(target=self._run, name=self._name, daemon=True).start()
        batch = _Batch(function, items)
        for number in range(len(items)):
            self._jobs.put((batch, number))
        return batch.wait(timeout_s)

    def close(self) -> None:
        """Ends the threads once their calls have returned."""
        if self._started:
            for _ in range(self._count):
                self._jobs.put(None)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            batch, number = job
            batch.run(number)
            del batch, job  # else an idle thread keeps the last results


class _Batch(Generic[A, R]):
    """The calls of one `map`."""

    def __init__(self, function: Callable[[A], R], items: Sequence[A]) -> None:
        self._function = function
        self._items: Sequence[A] | None = items  # None once no call may begin any more
        self._results: dict[int, R] = {}
        self._error: Exception | None = None
        self._count = len(items)
        self._changed = threading.Condition()

    def run(self, number: int) -> None:
        """Makes one call, unless the caller has gone on."""
        with self._changed:
            if self._items is None:
                return
            item = self._items[number]
        try:
            result, error = self._function(item), None
        except Exception as caught:
            result, error = None, caught
        with self._changed:
            if self._items is None:
                return
            if error is None:
                self._results[number] = result  # type: ignore[assignment]
            elif self._error is None:
                self._error = error
            if self._error is not None or len(self._results) == self._count:
                self._changed.notify_all()

    def wait(self, timeout_s: float) -> list[R]:
        """Returns the results, or raises the first error; then no further call begins."""
        until = time.monotonic() + timeout_s
        with self._changed:
            while self._error is None and len(self._results) < self._count:
                left_s = until - time.monotonic()
                if left_s <= 0:
                    self._error = TimeoutError(f"{len(self._results)} of {self._count} calls ended in {timeout_s:g} s")
                    break
                self._changed.wait(left_s)
            self._items = None
            results, self._results = self._results, {}
            if self._error is not None:
                raise self._error
        return [results[number] for number in range(self._count)]
