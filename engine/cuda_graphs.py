"""One computation as CUDA graphs, one for each of its shapes, captured before the first request.

The graphs of a computation share a memory pool, and the largest is captured first. The output of a graph lies in this
pool, so the next replay of any of them overwrites it. A shape without a graph is computed kernel by kernel. The other
ranks of a tensor-parallel engine have graphs of their parts, under the same names (`GraphMirror`).
"""

from __future__ import annotations

import contextlib
import gc
import logging
import time
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from engine.device import format_bytes, out_of_memory_message

log = logging.getLogger(__name__)
Shape = TypeVar("Shape", bound=Hashable)
Output = TypeVar("Output")
ARRAY_TYPES = {torch.float32: "<f4", torch.float16: "<f2", torch.bfloat16: "<i2"}  # NumPy has no bfloat16


class Graph(Protocol):
    """A recorded computation."""

    def replay(self) -> object:
        """Queues the computation on the current stream."""


class GraphMirror(Protocol):
    """The other ranks of a tensor-parallel engine, which record and replay their parts of a graph."""

    def capturing(self, name: str) -> contextlib.AbstractContextManager[None]:
        """Lets the other ranks record while the block records a graph. The block ends when all ranks have theirs."""

    def replaying(self, name: str) -> contextlib.AbstractContextManager[None]:
        """Lets the other ranks replay the graph that the block replays."""

    def check_alive(self) -> None:
        """Raises InternalError if a rank was lost: the results of steps that were under way then may be wrong."""


class GraphRecorder:
    """Records graphs on one stream of a CUDA device. The graphs share a memory pool."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool: Any = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    @contextlib.contextmanager
    def stream(self) -> Iterator[None]:
        """Makes the stream of the recordings current. It waits for the current stream, which then waits for it."""
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            yield
        current.wait_stream(self._stream)

    def record(self, compute: Callable[[], Output]) -> tuple[Graph, Output]:
        """Records `compute` inside `stream`. Kernels are compiled already. Returns the graph and its output."""
        self._stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with _no_gc():
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                output = compute()
            except BaseException:
                with contextlib.suppress(RuntimeError):  # the first of the two errors is the cause
                    graph.capture_end()  # without this, later CUDA calls of this thread may fail too
                raise
            graph.capture_end()
        return graph, output


class CudaGraphs(Generic[Shape, Output]):
    """The graphs of one computation."""

    def __init__(
        self,
        name: str,  # Name of the computation in messages
        device: torch.device,  # A CUDA device
        compute: Callable[[Shape], Output],
        *,
        keep: Callable[[Output], Output],  # Removes ownership of memory (`unowned_view`): smaller graphs then reuse it
        describe: Callable[[Shape], str],  # Returns a shape as text
        mirror: GraphMirror | None = None,  # None: no other rank takes part in the computation
    ) -> None:
        """Makes an object without graphs.

        `compute`, a bound method of the owner, queues the computation of a shape from static buffers. Only a weak
        reference is kept: a cycle would keep an engine's memory, because its objects are frozen (`gc.freeze`).
        """
        self._name, self._device, self._keep, self._describe = name, device, keep, describe
        self._method, self._mirror = weakref.WeakMethod(compute), mirror
        self._recorder: GraphRecorder | None = None  # None before the first capture
        self._graphs: dict[Shape, tuple[Graph, Output, str]] = {}

    def _compute(self, shape: Shape) -> Output:
        compute = self._method()
        assert compute is not None
        return compute(shape)

    def run(self, shape: Shape) -> Output:
        """Queues the computation of the static buffers, by a graph if the shape has one."""
        captured = self._graphs.get(shape)
        if captured is None:
            return self._compute(shape)
        graph, output, name = captured
        if self._mirror is None:
            graph.replay()
        else:
            with self._mirror.replaying(name):
                graph.replay()
        return output

    @torch.inference_mode()
    def capture(self, shapes: Sequence[Shape], stage: Callable[[Shape], object]) -> None:
        """Captures shapes in the given order; `stage` fills the buffers with a harmless step of a shape.

        Raises torch.OutOfMemoryError with the shape and the free memory, whichever library had no memory.
        """
        began = logged_at = time.monotonic()
        if self._recorder is None:
            self._recorder = GraphRecorder(self._device)
        with self._recorder.stream():
            for done, shape in enumerate(shapes, 1):
                try:
                    stage(shape)
                    self._compute(shape)  # compiles and loads kernels, which is not allowed in a capture
                    self._record(shape, self._recorder)
                except RuntimeError as error:
                    message = out_of_memory_message(error)
                    if message is None:
                        raise
                    free, total = map(format_bytes, torch.cuda.mem_get_info(self._device))
                    raise torch.OutOfMemoryError(
                        f"the {self._name} graph of {self._describe(shape)} ({done} of {len(shapes)}) found {free} of "
                        f"{total} free: {message}"
                    ) from error
                if time.monotonic() - logged_at > 2 or done == len(shapes):
                    logged_at = time.monotonic()
                    log.info("captured %d of %d %s graphs in %.0f s", done, len(shapes), self._name, logged_at - began)

    def _record(self, shape: Shape, recorder: GraphRecorder) -> None:
        name = f"{self._name}: {self._describe(shape)}"
        with contextlib.nullcontext() if self._mirror is None else self._mirror.capturing(name):
            graph, output = recorder.record(lambda: self._compute(shape))
            self._graphs[shape] = graph, self._keep(output), name


def batch_buckets(max_rows: int) -> tuple[int, ...]:
    """Returns batch sizes to capture graphs for, ascending; the last is max_rows."""
    steps = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, max_rows, 32)]
    return (*(size for size in steps if size < max_rows), max_rows)


@contextlib.contextmanager
def _no_gc() -> Iterator[None]:
    """Disables garbage collection: it could free a graph of an earlier engine, which breaks a capture."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def unowned_view(tensor: Tensor) -> Tensor:
    """Returns a view of the tensor's memory without ownership; valid as long as the graph that allocated the memory."""
    assert tensor.is_contiguous()
    data = (tensor.data_ptr(), False)
    interface = {"shape": tuple(tensor.shape), "typestr": ARRAY_TYPES[tensor.dtype], "data": data, "version": 3}
    memory = SimpleNamespace(__cuda_array_interface__=interface)  # has no owner
    return torch.as_tensor(memory, device=tensor.device).view(tensor.dtype)
