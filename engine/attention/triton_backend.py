"""Paged attention on the GPU: which kernel serves which rows of a step.

Rows with up to 8 new tokens go to the split-KV kernel, all in one launch. Of longer ones with enough to compute, the
multiple of 1024 tokens that they begin with goes to cuDNN, if their prefix is such a multiple too (shapes that recur),
and the rest to the own kernel over gathered keys. Short ones, windows and unusual head dims take the paged kernel.
Everything of a step that does not depend on the layer is made once, in `prepare`. Kernels are loaded with the first
backend, so this module imports without triton.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import torch
from torch import Tensor

from engine.attention.base import StepShape
from engine.device import upload
from engine.kv.layer_kv import LayerKV

if TYPE_CHECKING:
    from engine.kernels.paged_decode import DecodePlan, DecodeWorkspace

DECODE_TOKENS = 8  # rows up to this many new tokens take the split-KV kernel
CUDNN_QUANTUM = 1024
DENSE_MIN_SCORES = 1 << 20  # new tokens x keys from which gathering pays
MAX_BATCHED = 8  # whole prompts of one length in one call of cuDNN

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class RowSpan:
    """Consecutive rows of a step that share a kernel. cu_q counts from the span's first token; tables: int32 [rows,
    n].
    """

    first_token: int
    num_tokens: int
    max_new: int
    cu_q: Tensor
    seq_lens: Tensor
    tables: Tensor


@dataclass(frozen=True, slots=True)
class DensePrefillRow:
    """A row that is attended alone, over contiguous keys: tokens first_token.. of the step, after `start` cached ones.

    whole: of its new tokens those, from the first, that cuDNN takes. count: so many rows of that shape behind each
    other, whole and without cached tokens; tables: int32 [count, n].
    """

    first_token: int
    start: int
    num_new: int
    cudnn_tokens: int
    count: int
    tables: Tensor
    cu_q: Tensor
    seq_lens: Tensor

    @property
    def tokens(self) -> slice:
        return slice(self.first_token, self.first_token + self.count * self.num_new)


@dataclass(frozen=True, slots=True)
class TritonMetadata:
    """slots: int32 [T], where each new token's KV goes (-1: nowhere). plans: the decode work, one for each window.

    cu_q: int32 [B + 1], where each row's tokens begin; tables: int32 [B, n], its blocks.
    """

    slot_mapping: Tensor
    cu_q: Tensor
    tables: Tensor
    decode: RowSpan | None
    plans: dict[int | None, DecodePlan]
    paged: tuple[RowSpan, ...]
    dense_rows: tuple[DensePrefillRow, ...]


class TritonAttention:
    """`layers` are the pool's, windows those of the model; scale None: head_dim ** -0.5; softcap None: none; first: the
    first token that is seen, which only rows of up to DECODE_TOKENS new tokens regard.
    """

    reads_unwritten_slots = False

    def __init__(
        self,
        layers: Sequence[LayerKV],
        num_heads: int,
        windows: Iterable[int | None],
        pad_block: int,
        *,
        scale: float | None = None,
        softcap: float | None = None,
        first_position: int = 0,
    ) -> None:
        from engine.kernels import dense_prefill, kv_write, paged_decode, paged_prefill

        self._decode, self._prefill, self._dense = paged_decode, paged_prefill, dense_prefill
        self._prefix, self._kv_write = dense_prefill, kv_write
        self._cache = cache = layers[0]
        self._kv_heads, self._block_size, self._head_dim = cache.num_kv_heads, cache.block_size, cache.head_dim
        self._num_heads, self._pad_block, self._first = num_heads, pad_block, first_position
        self._windows = tuple(dict.fromkeys(windows))
        self._device, self._itemsize = cache.kv.device, cache.kv.element_size()
        self._scale = self._head_dim**-0.5 if scale is None else scale
        self._softcap = softcap or 0.0
        self._programs = paged_decode.concurrent_programs(self._device)
        self._workspaces: dict[int, DecodeWorkspace] = {}
        hopper = self._device.type == "cuda" and torch.cuda.get_device_capability(self._device) >= (9, 0)
        self._dense_ok = cache.kv.dtype != torch.float32 and hopper and self._head_dim in dense_prefill.DENSE_DIMS

    def prepare(self, step: StepShape) -> TritonMetadata:
        starts = np.asarray(step.starts, dtype=np.int64)
        num_new = np.asarray(step.num_new, dtype=np.int64)
        firsts = np.concatenate([[0], np.cumsum(num_new)])
        ends = starts + num_new
        counts = -(-ends // self._block_size)
        tables = np.full((len(starts), int(counts.max())), self._pad_block, dtype=np.int32)
        for row, (blocks, count) in enumerate(zip(step.blocks, counts.tolist(), strict=True)):
            tables[row, :count] = blocks[:count]
        row_of = np.repeat(np.arange(len(starts)), num_new)
        position = np.arange(len(row_of)) - firsts[row_of] + starts[row_of]
        slots = tables[row_of, position // self._block_size] * self._block_size + position % self._block_size

        runs = self._runs(starts.tolist(), num_new.tolist())
        arrays = [slots.astype(np.int32)]
        for low, high, _ in runs:
            width = int(counts[low:high].max())
            arrays += [firsts[low : high + 1] - firsts[low], ends[low:high], tables[low:high, :width]]
        if len(runs) > 1:
            arrays += [firsts, tables]
        slots_there, *there = upload([array.astype(np.int32, copy=False) for array in arrays], self._device)
        *there, cu_q_there, tables_there = there if len(runs) > 1 else [*there, there[0], there[2]]

        decode: RowSpan | None = None
        paged: list[RowSpan] = []
        long: list[DensePrefillRow] = []
        for (low, high, kind), cu_q, seq_lens, table in zip(runs, there[::3], there[1::3], there[2::3], strict=True):
            first, start, new = int(firsts[low]), int(starts[low]), int(num_new[low])
            if kind == "long":
                whole = self._cudnn_tokens(start, new)
                long.append(DensePrefillRow(first, start, new, whole, high - low, table, cu_q, seq_lens))
                continue
            span = RowSpan(first, int(firsts[high]) - first, int(num_new[low:high].max()), cu_q, seq_lens, table)
            if kind == "decode" and decode is None:
                decode = span
            else:
                paged.append(span)
        plans = {window: self._plan(decode, window) for window in self._windows} if decode else {}
        return TritonMetadata(slots_there, cu_q_there, tables_there, decode, plans, tuple(paged), tuple(long))

    def select_rows(self, metadata: TritonMetadata, rows: Tensor, positions: Tensor) -> TritonMetadata:
        row_of = torch.searchsorted(metadata.cu_q[1:], rows.int(), right=True)
        row_of.clamp_(max=len(metadata.tables) - 1)  # of a captured step's padding, which no row owns
        return self.decode_metadata(
            torch.full_like(rows, -1, dtype=torch.int32),
            torch.arange(len(rows) + 1, dtype=torch.int32, device=rows.device),
            (positions.index_select(0, rows) + 1).int(),
            metadata.tables.index_select(0, row_of),
            max_new=1,
        )

    def decode_metadata(
        self, slots: Tensor, cu_q: Tensor, seq_lens: Tensor, tables: Tensor, *, max_new: int
    ) -> TritonMetadata:
        """`prepare` for rows with up to max_new tokens whose shape is on the device already; can be captured.

        slots: int [T], -1 for tokens that no row owns; cu_q: int32 [B + 1], cu_q[B] <= T; seq_lens: int32 [B], with the
        new tokens, 0 for a row without any; tables: int32 [B, n], which starts with the blocks of each row.
        """
        span = RowSpan(0, slots.shape[0], max_new, cu_q, seq_lens, tables)
        plans = {window: self._plan(span, window) for window in self._windows}
        return TritonMetadata(slots, cu_q, tables, span, plans, (), ())

    def paged_metadata(
        self, slots: Tensor, cu_q: Tensor, seq_lens: Tensor, tables: Tensor, *, max_new: int
    ) -> TritonMetadata:
        """`decode_metadata` for rows of any length up to max_new, all by the paged kernel."""
        span = RowSpan(0, slots.shape[0], max_new, cu_q, seq_lens, tables)
        return TritonMetadata(slots, cu_q, tables, None, {}, (span,), ())

    def has_cudnn_plan(self, start: int, num_new: int) -> bool:
        """A row of this shape is attended alone, and cuDNN takes all of it."""
        return self._kind(start, num_new) == "long" and self._cudnn_tokens(start, num_new) == num_new

    def chunk_metadata(
        self, slots: Tensor, cu_q: Tensor, seq_lens: Tensor, tables: Tensor, *, start: int
    ) -> TritonMetadata:
        """`decode_metadata` for one row that is `planned`, of a new token for each slot after `start` cached ones, by
        the kernels that `prepare` would choose.
        """
        new = slots.shape[0]
        row = DensePrefillRow(0, start, new, self._cudnn_tokens(start, new), 1, tables, cu_q, seq_lens)
        return TritonMetadata(slots, cu_q, tables, None, {}, (), (row,))

    def warm_up(self, step: StepShape) -> None:
        """The attention of one step of a Decoder, of one layer for each window, for the plans that it builds."""
        metadata = self.prepare(step)
        dtype = torch.bfloat16 if self._cache.scales is not None else self._cache.kv.dtype
        size = (sum(step.num_new), self._num_heads + 2 * self._kv_heads, self._head_dim)
        qkv = torch.zeros(size, dtype=dtype, device=self._device)
        kv = qkv[:, self._num_heads :].view(-1, 2, self._kv_heads, self._head_dim)
        for window in self._windows:
            self.attend_written(qkv[:, : self._num_heads], kv, self._cache, metadata, window)

    def write(self, kv: Tensor, cache: LayerKV, metadata: TritonMetadata) -> None:
        self._kv_write.kv_write(kv, cache, metadata.slot_mapping)

    def attend(self, query: Tensor, kv: Tensor, cache: LayerKV, metadata: TritonMetadata, window: int | None) -> Tensor:
        self.write(kv, cache, metadata)
        return self.attend_written(query, kv, cache, metadata, window)

    def attend_written(
        self, query: Tensor, kv: Tensor, cache: LayerKV, metadata: TritonMetadata, window: int | None
    ) -> Tensor:
        """`attend` when the new keys and values are in the cache already (rope_kv_write puts them there)."""
        if metadata.decode is None and not metadata.paged and len(metadata.dense_rows) == 1:
            return self._attend_dense(query, kv, cache, metadata.dense_rows[0], window)
        out = torch.empty_like(query, memory_format=torch.contiguous_format)
        if metadata.decode is not None:
            span = metadata.decode
            rows = slice(span.first_token, span.first_token + span.num_tokens)
            self._decode.paged_decode(
                query[rows],
                cache,
                span.tables,
                span.cu_q,
                span.seq_lens,
                metadata.plans[window],
                self._workspace(span.max_new),
                max_query=span.max_new,
                scale=self._scale,
                softcap=self._softcap,
                first=self._first,
                out=out[rows],
            )
        for span in metadata.paged:
            rows = slice(span.first_token, span.first_token + span.num_tokens)
            self._prefill.paged_prefill(
                query[rows],
                cache,
                span.tables,
                span.cu_q,
                span.seq_lens,
                max_query=span.max_new,
                scale=self._scale,
                softcap=self._softcap,
                window=window or 0,
                out=out[rows],
            )
        for row in metadata.dense_rows:
            rows = row.tokens
            self._attend_dense(query[rows], kv[rows], cache, row, window, out[rows])
        return out

    def _attend_dense(
        self,
        query: Tensor,
        kv: Tensor,
        cache: LayerKV,
        row: DensePrefillRow,
        window: int | None,
        out: Tensor | None = None,
    ) -> Tensor:
        length = row.start + row.num_new
        if (window is not None and window < length) or query.dtype == torch.float32:
            return self._prefill.paged_prefill(
                query,
                cache,
                row.tables,
                row.cu_q,
                row.seq_lens,
                max_query=row.num_new,
                scale=self._scale,
                softcap=self._softcap,
                window=window or 0,
                out=out,
            )
        whole, rest = row.cudnn_tokens, row.num_new - row.cudnn_tokens
        # New keys are read where the projection left them; an 8-bit cache has other numbers, so there from it.
        gathered = length if rest or cache.scales is not None else row.start
        keys, values = kv[:, 0], kv[:, 1]
        there: tuple[Tensor, Tensor] | None = None
        if gathered:
            there = self._prefix.gather_kv(cache, row.tables[0], gathered, dtype=query.dtype)
            if cache.scales is not None:
                keys, values = there[0][row.start :], there[1][row.start :]
        if not rest:
            return self._attend_cudnn(query, keys, values, there, row, out)
        assert there is not None
        out = torch.empty_like(query, memory_format=torch.contiguous_format) if out is None else out
        if whole:
            self._attend_cudnn(query[:whole], keys[:whole], values[:whole], there, row, out[:whole])
        self._dense.dense_prefill(query[whole:], *there, scale=self._scale, softcap=self._softcap, out=out[whole:])
        return out

    def _attend_cudnn(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        there: tuple[Tensor, Tensor] | None,
        row: DensePrefillRow,
        out: Tensor | None,
    ) -> Tensor:
        dense_prefill = (there[0][: row.start], there[1][: row.start]) if there is not None and row.start else None
        return self._dense.cudnn_prefill(
            query, keys, values, dense_prefill, scale=self._scale, count=row.count, out=out
        )

    def _kind(self, start: int, num_new: int) -> str:
        if num_new <= DECODE_TOKENS:
            return "decode"
        dense = self._dense_ok and num_new * (start + num_new) >= DENSE_MIN_SCORES
        return "long" if dense else "paged"

    def _cudnn_tokens(self, start: int, num_new: int) -> int:
        """Of a long row's new tokens those that cuDNN takes."""
        return 0 if start % CUDNN_QUANTUM or self._softcap else num_new // CUDNN_QUANTUM * CUDNN_QUANTUM

    def _runs(self, starts: Sequence[int], num_new: Sequence[int]) -> list[tuple[int, int, str]]:
        """Rows that share a launch, as (first, end, kind): neighbours of one kind, but long rows only if they are new,
        of one length and whole, and a power of two of them: each number of them is a plan of cuDNN.
        """
        runs: list[tuple[int, int, str]] = []
        for low, high, kind in _equal_runs([self._kind(s, n) for s, n in zip(starts, num_new, strict=True)]):
            if kind != "long":
                runs.append((low, high, kind))
                continue
            shapes = list(zip(starts[low:high], num_new[low:high], strict=True))
            for first, end, (start, new) in _equal_runs(shapes):
                at, stop = low + first, low + end
                batched = not start and self._itemsize > 1 and self._cudnn_tokens(start, new) == new
                while at < stop:
                    count = min(MAX_BATCHED, 1 << (stop - at).bit_length() - 1) if batched else 1
                    runs.append((at, at + count, kind))
                    at += count
        return runs

    def _plan(self, span: RowSpan, window: int | None) -> DecodePlan:
        return self._decode.plan_decode(
            span.cu_q,
            span.seq_lens,
            self._workspace(span.max_new),
            num_kv_heads=self._kv_heads,
            head_dim=self._head_dim,
            itemsize=self._itemsize,
            window=window or 0,
        )

    def _workspace(self, max_new: int) -> DecodeWorkspace:
        if max_new not in self._workspaces:
            self._workspaces[max_new] = self._decode.decode_workspace(
                self._programs, self._num_heads, self._kv_heads, max_new, self._head_dim, self._device
            )
        return self._workspaces[max_new]


def _equal_runs(values: Sequence[T]) -> list[tuple[int, int, T]]:
    """Maximal runs of equal values, as (first, end, value)."""
    runs: list[tuple[int, int, T]] = []
    for i, value in enumerate(values):
        if runs and runs[-1][2] == value:
            runs[-1] = (runs[-1][0], i + 1, value)
        else:
            runs.append((i, i + 1, value))
    return runs
