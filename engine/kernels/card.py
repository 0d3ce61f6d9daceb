"""What the tiles of kernels depend on: the shared memory of a program on this card."""

from __future__ import annotations

from functools import cache

import torch

KIB = 1024
#: Compute capability -> bytes of shared memory that one program may have. An SM has 1 KiB more.
SHARED_BYTES = {80: 163 * KIB, 86: 99 * KIB, 89: 99 * KIB, 90: 227 * KIB, 100: 227 * KIB}


@cache
def shared_bytes(device: torch.device) -> int:
    """Returns the bytes of shared memory that one program may have. Without a GPU: those of an H100.

    Cached, because a device does not change.
    """
    if device.type != "cuda":
        return SHARED_BYTES[90]
    return int(torch.cuda.get_device_properties(device).shared_memory_per_block_optin)
