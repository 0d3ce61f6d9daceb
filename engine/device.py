"""What the engine asks of a device, beside computing on it."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import numpy as np
import torch
from torch import Tensor

from common.errors import ConfigError

log = logging.getLogger(__name__)

START_LOCK_S = 600.0  # how long one waits for others that start on the same card
LOCK_POLL_S = 0.1


def make_current(device: torch.device) -> None:
    """For the calling thread, as every thread does that computes, once: Triton's kernels, events and graphs go to the
    thread's device, which is the first GPU until it is told, and not to that of their tensors.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)


@contextmanager
def gpu_start_lock(device: torch.device, limit_s: float = START_LOCK_S) -> Iterator[None]:
    """What is inside happens in one process of this host at a time, for each GPU: an engine reads off the card's free
    memory what its graphs take, so nobody else's may grow meanwhile. Whoever waited too long goes on, with a warning.

    Processes that do not share the host's temporary directory do not see each other.
    """
    if device.type != "cuda":
        yield
        return
    path = Path(tempfile.gettempdir()) / f"baton-{torch.cuda.get_device_properties(device).uuid}.turn"
    with file_lock(path, limit_s):
        yield


@contextmanager
def file_lock(path: Path, limit_s: float) -> Iterator[None]:
    """The lock of `gpu_start_lock`; it ends with the process that has it."""
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
                time.sleep(LOCK_POLL_S)
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
OUT_OF_MEMORY_TEXTS = ("out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "can't allocate memory")


def out_of_memory_message(error: RuntimeError) -> str | None:
    """What it says, in a line, if it says that the device has no memory."""
    said = str(error)
    if isinstance(error, torch.OutOfMemoryError) or any(words in said for words in OUT_OF_MEMORY_TEXTS):
        return said.strip().split("\n")[0]
    return None


@contextmanager
def require_memory(what: str, field: str, remedy: str = "") -> Iterator[None]:
    """ConfigError, instead of torch's error, when the device has no memory for `what` is made inside. remedy: what to
    change then.
    """
    try:
        yield
    except RuntimeError as error:
        said = out_of_memory_message(error)
        if said is None:
            raise
        if remedy:
            said = f"{said.rstrip('.')}; {remedy}"
        raise ConfigError(f"no room for {what}: {said}", field=field) from error


def format_bytes(size: int) -> str:
    """Bytes for a person."""
    return f"{size / (1 << 30):.2f} GiB" if size >= 10 << 20 else f"{size / (1 << 20):.3g} MiB"


ALIGNMENT = 16  # bytes; kernels are compiled anew for pointers that are aligned less


def upload(arrays: Sequence[np.ndarray], device: torch.device) -> list[Tensor]:
    """The arrays, all of one dtype, as contiguous tensors on the device, in its current stream's order.

    The pinned copy goes back to torch's allocator, which keeps it until the transfer is over.
    """
    if device.type == "cpu":
        return [torch.from_numpy(np.ascontiguousarray(array)) for array in arrays]
    step = ALIGNMENT // arrays[0].itemsize
    starts: list[int] = []
    total = 0
    for array in arrays:
        assert array.dtype == arrays[0].dtype
        starts.append(total)
        total += -(-array.size // step) * step
    packed = torch.empty(total, dtype=torch.from_numpy(arrays[0]).dtype, pin_memory=True)
    host = packed.numpy()
    for start, array in zip(starts, arrays, strict=True):
        host[start : start + array.size] = array.reshape(-1)
    there = packed.to(device, non_blocking=True)
    return [there[s : s + a.size].view(a.shape) for s, a in zip(starts, arrays, strict=True)]


def pinned_copy(array: np.ndarray, device: torch.device) -> Tensor:
    """A copy of the array that a transfer to the device may read while the array changes."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory() if device.type == "cuda" else tensor.clone()
