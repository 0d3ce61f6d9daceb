"""The progress line of a run: redrawn on a terminal, printed every 10 s elsewhere.

Drawing costs some tens of microseconds. Progress bars of libraries draw for milliseconds or from a thread, and every
stream would wait for them.
"""

from __future__ import annotations

import asyncio
import time
from typing import TextIO

from loadtest.run import LoadRun

REDRAW_S, REPRINT_S = 0.25, 10.0
WIDTH = 28


def line(run: LoadRun, now: float) -> str:
    """Returns the line: share of the run and counters."""
    config, elapsed = run.config, max(0.0, now - run.began)
    shares = []
    if config.duration_s is not None:
        shares.append(elapsed / config.duration_s)
    if run.planned:
        shares.append(run.done / run.planned)
    share = min(1.0, max(shares, default=0.0))
    filled = round(share * WIDTH)
    ending = config.duration_s is not None and elapsed > config.duration_s
    return (
        f"{'█' * filled}{'░' * (WIDTH - filled)} {share:4.0%}  {elapsed:.0f} s{' (ending)' if ending else ''}  "
        f"{run.sent} sent  {run.running} running  {run.done} done  {run.failed} failed"
    )


async def show(run: LoadRun, out: TextIO) -> None:
    """Writes the line until the task is cancelled."""
    terminal = out.isatty()
    try:
        while True:
            await asyncio.sleep(REDRAW_S if terminal else REPRINT_S)
            if run.began and time.perf_counter() >= run.began:
                out.write(
                    f"\r\x1b[2K{line(run, time.perf_counter())}" if terminal else f"{line(run, time.perf_counter())}\n"
                )
                out.flush()
    finally:
        if terminal:
            out.write("\r\x1b[2K")
            out.flush()
