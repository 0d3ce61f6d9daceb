"""Runs a command that dies with its parent process: `python -I -S tether.py PARENT_PID COMMAND ARGS...`.

The kernel kills this process when its parent ends, even by SIGKILL (PR_SET_PDEATHSIG, which exec keeps). The script
imports the standard library only, so that it starts in 10 ms.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Sequence

PR_SET_PDEATHSIG = 1


def tether_command(argv: Sequence[str]) -> list[str]:
    """Returns the command line that runs argv[0] (an absolute path) until this process ends."""
    return [sys.executable, "-I", "-S", __file__, str(os.getpid()), *argv]


def die_with_parent(parent: int | None = None) -> None:
    """Asks the kernel to SIGKILL this process when the *thread* that forked it ends. Linux only; else no effect.

    `parent` is the pid of the parent as the parent passed it on. If the parent died before this call, the kernel sends
    no signal, so the process exits at once with code 1.
    """
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if parent is not None and os.getppid() != parent:
        os._exit(1)


def main(argv: list[str]) -> None:
    """Ties this process to PARENT_PID and execs COMMAND; exit code 127 if the command does not exist."""
    parent, *command = argv
    die_with_parent(int(parent))
    try:
        os.execv(command[0], command)
    except OSError as error:
        sys.stderr.write(f"{command[0]}: {error.strerror}\n")
        os._exit(127)


if __name__ == "__main__":
    main(sys.argv[1:])
