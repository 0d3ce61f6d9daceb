"""One computation as CUDA graphs: one for each shape that it is asked for, captured before the first request.

Graphs of one computation share a memory pool, the largest is captured first, and what one returns belongs to it: the
next replay of any of them overwrites it. A shape that was not captured is computed, launch by launch.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import time
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from engine.device import format_bytes, out_of_memory_message

log = logging.getLogger(__name__)

Shape = TypeVar("Shape", bound=Hashable)
Output = TypeVar("Output")

ARRAY_TYPES = {torch.float32: "<f4", torch.float16: "<f2", torch.bfloat16: "<i2"}  # NumPy has no name for the last


class CudaGraphs(Generic[Shape, Output]):
    """compute: queues the computation of a shape, from static buffers; keep: its output without the memory's ownership
    (see `unowned_view`), so that the next, smaller graph may use what this one needed; describe: a shape, for a person.

    compute is a method of our owner, which is not kept alive: in a cycle it would hold an engine's memory until garbage
    is collected, and an engine is frozen (`gc.freeze`).
    """

    def __init__(
        self,
        name: str,
        device: torch.device,
        compute: Callable[[Shape], Output],
        *,
        keep: Callable[[Output], Output],
        describe: Callable[[Shape], str],
    ) -> None:
        self._name, self._device, self._keep, self._describe = name, device, keep, describe
        self._method = weakref.WeakMethod(compute)
        self._pool: Any = None  # the graphs' memory and the stream they are captured on, once there is one
        self._stream: torch.cuda.Stream | None = None
        self._graphs: dict[Shape, tuple[torch.cuda.CUDAGraph, Output]] = {}

    def _compute(self, shape: Shape) -> Output:
        compute = self._method()
        assert compute is not None
        return compute(shape)

    def run(self, shape: Shape) -> Output:
        """Queues what the static buffers hold."""
        captured = self._graphs.get(shape)
        if captured is None:
            return self._compute(shape)
        graph, output = captured
        graph.replay()
        return output

    @torch.inference_mode()
    def capture(self, shapes: Sequence[Shape], stage: Callable[[Shape], None]) -> None:
        """Records these shapes, in the order given. stage: fills the buffers with a step that does no harm.

        torch.OutOfMemoryError, whoever had no memory, that says for which shape, and how much was free.
        """
        began = told = time.monotonic()
        if self._stream is None:
            self._pool = torch.cuda.graph_pool_handle()
            self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        stream = self._stream
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            for done, shape in enumerate(shapes, 1):
                try:
                    stage(shape)
                    self._compute(shape)  # compiles and loads what the capture must not
                    stream.synchronize()
                    self._record(shape)
                except RuntimeError as error:
                    said = out_of_memory_message(error)
                    if said is None:
                        raise
                    free, there = map(format_bytes, torch.cuda.mem_get_info(self._device))
                    raise torch.OutOfMemoryError(
                        f"the {self._name} graph of {self._describe(shape)} ({done} of {len(shapes)}) found {free} of "
                        f"{there} free: {said}"
                    ) from error
                if time.monotonic() - told > 2 or done == len(shapes):
                    told = time.monotonic()
                    log.info("captured %d of %d %s graphs in %.0f s", done, len(shapes), self._name, told - began)
        torch.cuda.current_stream(self._device).wait_stream(stream)

    def _record(self, shape: Shape) -> None:
        graph = torch.cuda.CUDAGraph()
        with _no_gc():
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                output = self._compute(shape)
            except BaseException:
                with contextlib.suppress(RuntimeError):  # of the two errors the first one tells what happened
                    graph.capture_end()  # else whatever this thread asks of the device next may fail too
                raise
            graph.capture_end()
            self._graphs[shape] = graph, self._keep(output)


@contextlib.contextmanager
def _no_gc() -> Iterator[None]:
    """No garbage is collected inside: graphs of an engine that is gone may be among it, and the end of one breaks a
    capture.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@dataclass(frozen=True)
class _UnownedMemory:
    """Device memory without its owner, in the way that torch.as_tensor takes it."""

    __cuda_array_interface__: dict[str, Any]


def unowned_view(tensor: Tensor) -> Tensor:
    """The same memory, which belongs to a graph's pool and stays there as long as the graph does."""
    assert tensor.is_contiguous()
    described = {
        "shape": tuple(tensor.shape),
        "typestr": ARRAY_TYPES[tensor.dtype],
        "data": (tensor.data_ptr(), False),
        "version": 3,
    }
    return torch.as_tensor(_UnownedMemory(described), device=tensor.device).view(tensor.dtype)
