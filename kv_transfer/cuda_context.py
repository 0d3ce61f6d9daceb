"""Makes a GPU's primary context the calling thread's own, by the driver's API: UCX copies between GPUs with the context
of whichever thread posts and polls, and without one it quietly takes another transport.

The primary context is the one that torch uses. It is retained and never released: the process that ends gives it back.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

from common.errors import TransferFailed


def make_current(device: int) -> None:
    """device: as CUDA numbers the visible ones. Raises TransferFailed."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError as e:
        raise TransferFailed(f"KV is on a GPU, but the driver does not load: {e}") from e
    number, context = ctypes.c_int(), ctypes.c_void_p()
    calls: tuple[tuple[str, Callable[[], int]], ...] = (
        ("cuInit", lambda: cuda.cuInit(0)),
        ("cuDeviceGet", lambda: cuda.cuDeviceGet(ctypes.byref(number), device)),
        ("cuDevicePrimaryCtxRetain", lambda: cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), number)),
        ("cuCtxSetCurrent", lambda: cuda.cuCtxSetCurrent(context)),
    )
    for name, call in calls:
        if (result := call()) != 0:
            raise TransferFailed(f"{name} of GPU {device} fails with {result}")
