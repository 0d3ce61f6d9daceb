"""Exit codes of `baton`.

0 success; 1 a failure, or something is missing; 2 wrong usage or configuration (one error line on stderr); 3 blocks of
a pod's KV pool stay quarantined; 4 a thread of a pod died (pod/health.py). After 3 and 4 a restart helps.
"""

from __future__ import annotations

import os
from types import FrameType

FAILED, USAGE, INTERRUPTED = 1, 2, 130


def at_once(number: int, _frame: FrameType | None) -> None:
    """Signal handler while the process owns nothing that needs cleaning up: exits at once."""
    os._exit(128 + number)
