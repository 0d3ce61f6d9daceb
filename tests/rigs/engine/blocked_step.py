"""An engine with a step that does not end, as if the device hung."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from engine.engine import Engine

LIMIT_S = 60.0  #: Longest block, so that a failing test leaves no blocked thread.


class BlockedStep:
    """Lets `after` more steps of an engine run, and blocks all later ones until `release`, each at most LIMIT_S."""

    def __init__(self, engine: Engine, after: int = 0) -> None:
        self.entered = threading.Event()  #: Set when a step is blocked.
        self._left = after
        self._released = threading.Event()
        self._runner: Any = engine.runner
        self._launch = engine.runner.launch
        self._runner.launch = self._blocking_launch

    def _blocking_launch(self, *args: Any) -> Any:
        self._left -= 1
        if self._left >= 0:
            return self._launch(*args)
        self.entered.set()
        self._released.wait(LIMIT_S)
        return self._launch(*args)

    def release(self) -> None:
        """Lets the blocked step and all later ones run."""
        self._runner.launch = self._launch
        self._released.set()


@contextmanager
def blocked_steps(engine: Engine, after: int = 0) -> Iterator[BlockedStep]:
    """Lets `after` more steps of an engine run, and blocks later ones until `release` or the end of the scope."""
    blocked = BlockedStep(engine, after)
    try:
        yield blocked
    finally:
        blocked.release()
