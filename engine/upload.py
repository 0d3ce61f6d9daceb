"""Host arrays to the device without waiting for it: one copy, from pinned memory."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

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


def pinned(array: np.ndarray, device: torch.device) -> Tensor:
    """A copy of the array that a transfer to the device may read while the array changes."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory() if device.type == "cuda" else tensor.clone()
