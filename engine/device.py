"""What the engine asks of a device, beside computing on it."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import torch

from common.errors import ConfigError

log = logging.getLogger(__name__)

TURN_S = 600.0  # how long one waits for others that start on the same card
LOOK_S = 0.1


def make_current(device: torch.device) -> None:
    """For the calling thread, as every thread does that computes, once: Triton's kernels, events and graphs go to the
    thread's device, which is the first GPU until it is told, and not to that of their tensors.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)


@contextmanager
def card_turn(device: torch.device, limit_s: float = TURN_S) -> Iterator[None]:
    """What is inside happens in one process of this host at a time, for each GPU: an engine reads off the card's free
    memory what its graphs take, so nobody else's may grow meanwhile. Whoever waited too long goes on, with a warning.

    Processes that do not share the host's temporary directory do not see each other.
    """
    if device.type != "cuda":
        yield
        return
    path = Path(tempfile.gettempdir()) / f"baton-{torch.cuda.get_device_properties(device).uuid}.turn"
    with file_turn(path, limit_s):
        yield


@contextmanager
def file_turn(path: Path, limit_s: float) -> Iterator[None]:
    """The lock of `card_turn`; it ends with the process that has it."""
    until = time.monotonic() + limit_s
    told = False
    with contextlib.ExitStack() as held:
        try:
            file = held.enter_context(path.open("a"))
            while not _locked(file):
                if time.monotonic() > until:
                    log.warning("another process has been starting on this GPU for %.0f s: not waiting longer", limit_s)
                    break
                if not told:
                    log.info("waiting for another process that starts on this GPU")
                    told = True
                time.sleep(LOOK_S)
        except OSError as error:  # another user's file, no such directory, a file system without locks
            log.warning("this process does not wait for others that start on its GPU: %s", error)
        yield


def _locked(file: IO[str]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


# Said where no class of error tells: by CUDA (a graph is the driver's), by cuBLAS, by a CPU's allocator.
NO_MEMORY = ("out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "can't allocate memory")


def lacked_memory(error: RuntimeError) -> str | None:
    """What it says, in a line, if it says that the device has no memory."""
    said = str(error)
    if isinstance(error, torch.OutOfMemoryError) or any(words in said for words in NO_MEMORY):
        return said.strip().split("\n")[0]
    return None


@contextmanager
def room_for(what: str, field: str, remedy: str = "") -> Iterator[None]:
    """ConfigError, instead of torch's error, when the device has no memory for `what` is made inside. remedy: what to
    change then.
    """
    try:
        yield
    except RuntimeError as error:
        said = lacked_memory(error)
        if said is None:
            raise
        if remedy:
            said = f"{said.rstrip('.')}; {remedy}"
        raise ConfigError(f"no room for {what}: {said}", field=field) from error


def gib(size: int) -> str:
    """Bytes for a person."""
    return f"{size / (1 << 30):.2f} GiB" if size >= 10 << 20 else f"{size / (1 << 20):.3g} MiB"
