"""How late the kernel may wake this thread from a timed sleep: 50 us by default, more than the shortest polls wait."""

from __future__ import annotations

import ctypes

_PR_SET_TIMERSLACK = 29
_SLACK_NS = 1000


def sleep_exactly() -> None:
    """Of the calling thread; without effect where there is no prctl."""
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is not None:
        prctl(_PR_SET_TIMERSLACK, ctypes.c_ulong(_SLACK_NS), 0, 0, 0)
