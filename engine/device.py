"""What the engine asks of a device, beside computing on it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from common.errors import ConfigError


def make_current(device: torch.device) -> None:
    """For the calling thread, as every thread does that computes, once: Triton's kernels, events and graphs go to the
    thread's device, which is the first GPU until it is told, and not to that of their tensors.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)


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
