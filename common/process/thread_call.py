"""A function that one thread gives another one to run."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Generic, TypeVar

T = TypeVar("T")


class ThreadCall(Generic[T]):
    """A call of `function`: one thread calls `run` or `refuse`, and another one reads `future`."""

    def __init__(self, function: Callable[[], T]) -> None:
        self._function = function
        self.future: Future[T] = Future()  #: The result or the error. A cancelled call is not run.

    def run(self) -> None:
        """Calls the function. Raises nothing."""
        if not self.future.set_running_or_notify_cancel():
            return
        try:
            self.future.set_result(self._function())
        except BaseException as error:
            self.future.set_exception(error)

    def refuse(self, error: Exception) -> None:
        """Gives the future an error, in place of `run`."""
        if self.future.set_running_or_notify_cancel():
            self.future.set_exception(error)
