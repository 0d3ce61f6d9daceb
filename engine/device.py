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


@contextmanager
def room_for(what: str, field: str) -> Iterator[None]:
    """ConfigError, instead of torch's error, when the device has no memory for `what` is made inside."""
    try:
        yield
    except RuntimeError as error:  # OutOfMemoryError is one, and a CPU's allocator has no class of its own
        said = str(error)
        if not isinstance(error, torch.OutOfMemoryError) and "can't allocate memory" not in said:
            raise
        raise ConfigError(f"no room for {what}: {said.strip().split(chr(10))[0]}", field=field) from error
