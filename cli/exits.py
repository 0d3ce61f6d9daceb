"""Exit codes: 0 fine, 1 something failed or is missing, 2 wrong usage or configuration (one readable line on stderr), 3
a pod's KV pool stays quarantined, 4 a pod lost one of its threads (pod/health.py); after 3 and 4 a restart helps.
"""

from __future__ import annotations

import os
from types import FrameType

FAILED, USAGE, INTERRUPTED = 1, 2, 130


def at_once(number: int, _frame: FrameType | None) -> None:
    """A signal's handler while there is nothing to tidy up."""
    os._exit(128 + number)
