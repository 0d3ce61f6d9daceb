"""Helpers for devices: the current device, the start lock of a GPU, out-of-memory errors and uploads."""

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

from common.errors import ConfigError, describe

log = logging.getLogger(__name__)
START_LOCK_S = 600.0  # Longest wait for other engines that start on the same GPU
LOCK_POLL_S = 0.1
ALIGNMENT = 16  # Bytes. Triton compiles a kernel again for pointers with a smaller alignment.
#: Texts of out-of-memory errors of the CUDA driver, cuBLAS and the CPU allocator, which have no class of their own.
OUT_OF_MEMORY_TEXTS = ("out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "can't allocate memory")


def make_current(device: torch.device) -> None:
    """Makes the device current on the calling thread; each thread that computes calls this once.

    Triton kernels, events and graphs go to the current device, by default the first GPU, not to their tensors' device.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)


def gpu_start_lock(device: torch.device, limit_s: float = START_LOCK_S) -> contextlib.AbstractContextManager[None]:
    """Lets only one process of this host per GPU run the block at a time.

    An engine measures the size of its graphs by the GPU's free memory, so no other process may allocate meanwhile.
    After limit_s the block runs without the lock, with a warning. Processes must share the host's temporary directory.
    """
    if device.type != "cuda":
        return contextlib.nullcontext()
    path = Path(tempfile.gettempdir()) / f"baton-{torch.cuda.get_device_properties(device).uuid}.turn"
    return file_lock(path, limit_s)


@contextmanager
def file_lock(path: Path, limit_s: float) -> Iterator[None]:
    """Holds a lock on a file, which also ends with the process. Runs without it after limit_s or an OSError."""
    until = time.monotonic() + limit_s
    with contextlib.ExitStack() as held:
        try:
            file = held.enter_context(path.open("a"))
            if not _locked(file):
                log.info("waiting for another process to start on this GPU")
            while not _locked(file):
                if time.monotonic() > until:
                    log.warning("another process kept this GPU's lock for %.0f s: starting without the lock", limit_s)
                    break
                time.sleep(LOCK_POLL_S)
        except OSError as error:  # another user's file, a missing directory, or a file system without locks
            log.warning("starting on this GPU without a lock: %s", describe(error))
        yield


def _locked(file: IO[str]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def out_of_memory_message(error: RuntimeError) -> str | None:
    """Returns the first line of an out-of-memory error; None for other errors."""
    message = str(error)
    if isinstance(error, torch.OutOfMemoryError) or any(text in message for text in OUT_OF_MEMORY_TEXTS):
        return message.strip().split("\n")[0]
    return None


@contextmanager
def require_memory(what: str, field: str, remedy: str = "") -> Iterator[None]:
    """Turns an out-of-memory error of the block into a ConfigError that says "no room for `what`" and `remedy`."""
    try:
        yield
    except RuntimeError as error:
        message = out_of_memory_message(error)
        if message is None:
            raise
        if remedy:
            message = f"{message.rstrip('.')}; {remedy}"
        raise ConfigError(f"no room for {what}: {message}", field=field) from error


def format_bytes(size: int) -> str:
    """Returns a number of bytes as text, in GiB or MiB."""
    return f"{size / (1 << 30):.2f} GiB" if size >= 10 << 20 else f"{size / (1 << 20):.3g} MiB"


def upload(arrays: Sequence[np.ndarray], device: torch.device) -> list[Tensor]:
    """Copies arrays of one dtype to contiguous tensors on the device, in the order of the current stream."""
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
    uploaded = packed.to(device, non_blocking=True)  # torch's allocator keeps `packed` until the transfer has ended
    return [uploaded[s : s + a.size].view(a.shape) for s, a in zip(starts, arrays, strict=True)]


def pinned_copy(array: np.ndarray, device: torch.device) -> Tensor:
    """Returns a copy in pinned memory (a plain copy on a CPU), for a transfer that runs while the array changes."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory() if device.type == "cuda" else tensor.clone()
