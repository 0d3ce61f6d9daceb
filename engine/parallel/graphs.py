"""CUDA graphs of a tensor-parallel engine: all ranks record and replay graphs of the same names in the same order.

    rank 0   [ inputs | pack | broadcast | layers with sums over the ranks | LM head and sampling ]
    rank r                   [ broadcast | layers with sums over the ranks ]

    message of rank 0        rank r
    device_step, sizes       computes the layers kernel by kernel, which compiles the kernels
    capture, name, sizes     records its graph, then answers
    replay, name             replays its graph; the host of rank 0 waits for nothing

A *device step* has sizes that the host knows and numbers that only the device of rank 0 knows. One int32 buffer brings
the numbers to the other ranks, so a replay needs a name alone.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor

from common.errors import InternalError, describe
from common.process.rank_channel import RankMessage
from engine.adapters.rows import StepAdapters
from engine.attention.triton_backend import DecodeRows, TritonMetadata
from engine.cuda_graphs import Graph, GraphRecorder
from engine.device import ALIGNMENT, out_of_memory_message
from engine.models.base import ForwardContext
from engine.parallel.rank_group import RankGroup

if TYPE_CHECKING:
    from engine.adapters.triton_rows import TritonRows

CAPTURE_S = 120.0  # Longest wait for the graphs of the other ranks after rank 0 has recorded its own.
_WORDS = ALIGNMENT // 4  # Parts of a buffer begin at multiples of this: kernels are compiled for aligned addresses.


class DeviceStep(NamedTuple):
    """The sizes of a device step with T tokens and R rows."""

    tokens: int  # T
    results: int | None  # Number of tokens with requested hidden states. None: all tokens.
    rows: int  # R
    width: int  # Entries of a block table.
    max_new: int  # Max tokens of a row of the split-KV kernel; 0: the step has no such rows.
    tiles: int  # Numbers of the list of tiles of the prefill kernel; 0: the split-KV kernel has all rows.
    adapter_tiles: int = 0  # Numbers of the adapters' tiles over all tokens; 0: no row has an adapter.
    result_tiles: int = 0  # Numbers of the adapters' tiles over `results`; 0: those of the tokens.

    def part_sizes(self) -> list[int]:
        """Returns the sizes of the parts of the buffer, in numbers without padding. `DeviceNumbers` names the parts."""
        sizes = [self.tokens] * 3 + [self.rows + 1, self.rows, self.rows * self.width, self.results or 0, self.tiles]
        sizes += [self.rows + 1, self.rows] if self.tiles and self.max_new else [0, 0]
        sizes += [self.tokens if self.adapter_tiles else 0, self.adapter_tiles]
        sizes += [self.results or 0, self.result_tiles] if self.result_tiles else [0, 0]
        return sizes

    def empty_buffer(self, device: torch.device) -> Tensor:
        """Allocates a buffer for the numbers of the step, int32."""
        return torch.empty(sum(map(_padded, self.part_sizes())), dtype=torch.int32, device=device)

    def unpack(self, packed: Tensor) -> DeviceNumbers:
        """Returns the parts of a buffer, views of its memory."""
        sizes = self.part_sizes()
        starts = itertools.accumulate(map(_padded, sizes), initial=0)
        parts = [packed[start : start + size] for start, size in zip(starts, sizes, strict=False)]
        return DeviceNumbers(*parts)._replace(tables=parts[5].view(self.rows, self.width))


class DeviceNumbers(NamedTuple):
    """The numbers of a device step, int32. Their meaning is that in `TritonAttention.listed_metadata`."""

    tokens: Tensor  # [T]
    positions: Tensor  # [T]
    slot_mapping: Tensor  # [T]
    cu_q: Tensor  # [R + 1]
    seq_lens: Tensor  # [R]
    tables: Tensor  # [R, width]
    results: Tensor  # Tokens with requested hidden states
    tiles: Tensor
    decode_cu_q: Tensor  # [R + 1], for the split-KV kernel of a step with tiles
    decode_lens: Tensor  # [R]
    adapter_order: Tensor  # [T], as in `TritonRows`
    adapter_tiles: Tensor
    result_order: Tensor
    result_tiles: Tensor

    def metadata(self, step: DeviceStep, attention: Any) -> TritonMetadata:
        """Makes the attention's metadata of the step; a graph can record it. attention: a `TritonAttention`."""
        shape = self.slot_mapping, self.cu_q, self.seq_lens, self.tables
        made: TritonMetadata
        if not step.tiles:
            made = attention.decode_metadata(*shape, max_new=step.max_new)
        else:
            decode = DecodeRows(self.decode_cu_q, self.decode_lens, step.max_new) if step.max_new else None
            made = attention.listed_metadata(*shape, self.tiles, decode)
        return made


def pack_device_step(
    tokens: Tensor,
    positions: Tensor,
    results: Tensor | None,
    metadata: TritonMetadata,
    adapters: StepAdapters | None,
    filler: Tensor,
) -> tuple[DeviceStep, Tensor]:
    """Packs the inputs of `Model.forward` for the other ranks. A graph can record it.

    filler: int32 zeros, at least _WORDS - 1. Returns the sizes, and the buffer that `DeviceStep.unpack` reads.
    """
    listed, decode = (metadata.paged[0] if metadata.paged else None), metadata.decode
    rows = listed or decode
    assert rows is not None
    tiles = None if listed is None else listed.tiles
    adapted, adapted_results = _rows_of(adapters)
    step = DeviceStep(
        tokens=len(tokens),
        results=None if results is None else len(results),
        rows=len(rows.seq_lens),
        width=metadata.tables.shape[1],
        max_new=0 if decode is None else decode.max_new,
        tiles=0 if tiles is None else len(tiles),
        adapter_tiles=len(adapted[1]) if adapted else 0,
        result_tiles=len(adapted_results[1]) if adapted_results else 0,
    )
    decode_rows = (None, None) if tiles is None or decode is None else (decode.cu_q, decode.seq_lens)
    parts = tokens, positions, metadata.slot_mapping, metadata.cu_q, rows.seq_lens, metadata.tables, results, tiles
    pieces: list[Tensor] = []
    for part in (*parts, *decode_rows, *adapted, *adapted_results):
        if part is not None:
            pieces += [part.reshape(-1).int(), filler[: _padded(part.numel()) - part.numel()]]
    return step, torch.cat([piece for piece in pieces if len(piece)])


def _rows_of(adapters: StepAdapters | None) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Returns order and tiles of the tokens and of the results. Empty: there are no adapters, or they are the same."""
    if adapters is None:
        return (), ()
    tokens, results = cast("TritonRows", adapters.tokens), cast("TritonRows", adapters.results)
    return (tokens.order, tokens.tiles), () if results is tokens else (results.order, results.tiles)


class LeaderGraphs:
    """Rank 0's part: tells the other ranks which step comes next. Implements `GraphMirror`."""

    def __init__(self, rank_group: RankGroup, device: torch.device) -> None:
        self._rank_group = rank_group
        self._filler = torch.zeros(_WORDS, dtype=torch.int32, device=device)
        self._capturing: str | None = None  # Name of the graph that is recorded.
        self._asked = False  # The other ranks record that graph too.

    def pack(
        self, tokens: Tensor, positions: Tensor, context: ForwardContext, results: Tensor | None
    ) -> tuple[DeviceStep, Tensor]:
        """Packs the arguments of `Model.forward` with `pack_device_step`."""
        return pack_device_step(tokens, positions, results, context.metadata, context.adapters, self._filler)

    @contextmanager
    def running(self, step: DeviceStep) -> Iterator[None]:
        """Lets the other ranks compute or record the layers that the block computes or records."""
        with self._ending_group("a step"):
            self.announce(step)
            yield

    def announce(self, step: DeviceStep) -> None:
        """Sends the next step, or the graph that is recorded, to the other ranks."""
        if self._capturing is None:
            self._rank_group.send("device_step", sizes=step, bound_s=self._rank_group.step_bound_s)
        else:
            self._asked = True
            self._rank_group.send("capture", name=self._capturing, sizes=step)

    @contextmanager
    def capturing(self, name: str) -> Iterator[None]:
        with self._ending_group(f"the capture of the graph {name!r}"):
            self._capturing, self._asked = name, False
            try:
                yield
            finally:
                self._capturing = None
            if self._asked:
                self._rank_group.receive(limit_s=CAPTURE_S)

    @contextmanager
    def replaying(self, name: str) -> Iterator[None]:
        with self._ending_group(f"the replay of the graph {name!r}"):
            self._rank_group.send("replay", name=name, bound_s=self._rank_group.step_bound_s)
            yield

    def check_alive(self) -> None:
        self._rank_group.check_alive()

    @contextmanager
    def _ending_group(self, what: str) -> Iterator[None]:
        """Lets an error of the block end the group, because the ranks may be in different steps.

        Raises InternalError with the reason. An out-of-memory error is raised as it is, since its caller knows the
        remedy.
        """
        try:
            yield
        except Exception as error:
            failure = self._rank_group.fail(f"{what} failed on rank 0: {describe(error)}")
            if isinstance(error, RuntimeError) and out_of_memory_message(error) is not None:
                raise
            raise failure from error


class RankGraphs:
    """The graphs of another rank. They share one memory pool, because nothing reads their outputs.

    `compute` queues the layers of a device step. `wait` lets the stream wait for copies to adapter slots.
    """

    def __init__(self, device: torch.device, compute: Callable[[DeviceStep], None], wait: Callable[[], object]) -> None:
        self._device, self._compute, self._wait = device, compute, wait
        self._recorder: GraphRecorder | None = None  # None before the first capture.
        self._graphs: dict[str, tuple[Graph, DeviceStep]] = {}

    def run(self, message: RankMessage) -> None:
        """Computes a step kernel by kernel."""
        step = _step_of(message)
        if step.adapter_tiles:
            self._wait()
        self._compute(step)

    def capture(self, message: RankMessage) -> None:
        """Records a graph, in place of an earlier one of the same name."""
        if self._recorder is None:
            self._recorder = GraphRecorder(self._device)
        name, step = message.fields["name"], _step_of(message)
        self._graphs.pop(name, None)
        with self._recorder.stream():
            graph, _ = self._recorder.record(lambda: self._compute(step))
        self._graphs[name] = graph, step

    def replay(self, message: RankMessage) -> None:
        """Queues a graph. Raises InternalError if there is none of this name."""
        name = message.fields["name"]
        if name not in self._graphs:
            raise InternalError(f"this rank has no graph {name!r}: it has {sorted(self._graphs) or 'none'}")
        graph, step = self._graphs[name]
        if step.adapter_tiles:
            self._wait()
        graph.replay()


def _step_of(message: RankMessage) -> DeviceStep:
    return DeviceStep(*message.fields["sizes"])


def _padded(size: int) -> int:
    return -(-size // _WORDS) * _WORDS
