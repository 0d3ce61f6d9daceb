"""Exit codes of `baton`.

0 success; 1 a failure, or something is missing; 2 wrong usage or configuration (one error line on stderr); 3 blocks of
a pod's KV pool stay quarantined; 4 a thread of a pod died (pod/health.py); 6 a loop of the process is stuck
(common/process/watchdog.py). After 3, 4 and 6 a restart helps.
"""

from __future__ import annotations

import os
from types import FrameType

FAILED, USAGE, INTERRUPTED = 1, 2, 130


def at_once(number: int, _frame: FrameType | None) -> None:
    """Signal handler while the process owns nothing that needs cleaning up: exits at once."""
    os._exit(128 + number)
