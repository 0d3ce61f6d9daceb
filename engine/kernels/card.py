"""What the tiles of kernels depend on: the shared memory of a program on this card."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

KIB = 1024
#: Compute capability -> bytes of shared memory that one program may have. An SM has 1 KiB more.
SHARED_BYTES = {80: 163 * KIB, 86: 99 * KIB, 89: 99 * KIB, 90: 227 * KIB, 100: 227 * KIB}


@cache
def has_wgmma(device: torch.device) -> bool:
    """Returns whether a group of four warps multiplies matrices in shared memory (Hopper). Without a GPU: True."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device)[0] == 9


@cache
def shared_bytes(device: torch.device) -> int:
    """Returns the bytes of shared memory that one program may have. Without a GPU: those of an H100.

    Cached, because a device does not change.
    """
    if device.type != "cuda":
        return SHARED_BYTES[90]
    properties: Any = torch.cuda.get_device_properties(device)  # torch's type stubs lack the attribute
    return int(properties.shared_memory_per_block_optin)
