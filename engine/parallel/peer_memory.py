"""Symmetric buffers of the ranks of one machine: each rank maps the buffer of every other one (CUDA IPC).

The memory comes from the CUDA driver and not from torch, whose allocator may give memory that other processes cannot
map. NVLink multicast is not used.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch.distributed import Store  # type: ignore[attr-defined]

from common.errors import InternalError

HANDLE_BYTES = 64
_LAZY_PEER_ACCESS = 1
_NON_BLOCKING_STREAM = 1


class _Handle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_char * HANDLE_BYTES),)


class PeerBuffers:
    """A zeroed buffer of this rank, and the buffers of the other ranks of this machine, until the process ends.

    Attributes:
        addresses: int64 [ranks] on the device, where this process sees each buffer.
    """

    def __init__(self, store: Store, rank: int, size: int, device: torch.device, nbytes: int) -> None:
        """All ranks construct theirs at the same time. Raises InternalError if a buffer cannot be mapped."""
        self._cuda = ctypes.CDLL("libcuda.so.1")
        torch.cuda.synchronize(device)  # makes the primary context current
        self._context, self._stream = ctypes.c_void_p(), ctypes.c_void_p()
        self._call("cuCtxGetCurrent", ctypes.byref(self._context))
        self._call("cuStreamCreate", ctypes.byref(self._stream), ctypes.c_uint(_NON_BLOCKING_STREAM))
        own = ctypes.c_uint64()
        self._call("cuMemAlloc_v2", ctypes.byref(own), ctypes.c_size_t(nbytes))
        self._own = own.value
        self._call("cuMemsetD8_v2", own, ctypes.c_ubyte(0), ctypes.c_size_t(nbytes))
        self._call("cuCtxSynchronize")
        handle = _Handle()
        self._call("cuIpcGetMemHandle", ctypes.byref(handle), own)
        store.set(f"peer-buffer-{rank}", bytes(handle).hex())
        addresses = []
        for other in range(size):
            packed = bytes.fromhex(store.get(f"peer-buffer-{other}").decode())  # waits for the rank
            addresses.append(self._own if other == rank else self._map(packed))
        self.addresses = torch.tensor(addresses, dtype=torch.int64, device=device)

    def read(self, offset: int, nbytes: int) -> bytes:
        """Returns bytes of this rank's buffer without waiting for kernels. Any thread may call it."""
        content = ctypes.create_string_buffer(nbytes)
        place = content, ctypes.c_uint64(self._own + offset), ctypes.c_size_t(nbytes)
        self._copy("cuMemcpyDtoHAsync_v2", *place)
        return content.raw

    def write(self, offset: int, content: bytes) -> None:
        """Writes bytes to this rank's buffer without waiting for kernels. Any thread may call it."""
        place = ctypes.c_uint64(self._own + offset), content, ctypes.c_size_t(len(content))
        self._copy("cuMemcpyHtoDAsync_v2", *place)

    def _copy(self, name: str, *place: Any) -> None:
        self._call("cuCtxSetCurrent", self._context)
        self._call(name, *place, self._stream)
        self._call("cuStreamSynchronize", self._stream)

    def _map(self, packed: bytes) -> int:
        mapped = ctypes.c_uint64()
        handle = _Handle.from_buffer_copy(packed)
        self._call("cuIpcOpenMemHandle_v2", ctypes.byref(mapped), handle, ctypes.c_uint(_LAZY_PEER_ACCESS))
        return mapped.value

    def _call(self, name: str, *arguments: Any) -> None:
        if (result := getattr(self._cuda, name)(*arguments)) != 0:
            raise InternalError(f"{name} failed with CUDA error {result}: the ranks cannot share memory")
