"""Paged attention on the GPU: which kernel serves which rows of a step.

Rows with up to 8 new tokens go to the split-KV kernel, all in one launch. Longer ones go to cuDNN where their shape
recurs (new tokens and prefix in multiples of 1024), else, when there is enough to compute, to the own kernel over
gathered keys, and else, with a window or an unusual head dim, to the paged kernel. Everything of a step that does not
depend on the layer is made once, in `prepare`. Kernels are loaded with the first backend, so this module imports
without triton.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from engine.attention.base import StepShape
from engine.layer_kv import LayerKV
from engine.upload import upload

if TYPE_CHECKING:
    from engine.kernels.paged_decode import DecodePlan, DecodeWorkspace

DECODE_TOKENS = 8  # rows up to this many new tokens take the split-KV kernel
CUDNN_QUANTUM = 1024
DENSE_MIN_SCORES = 1 << 20  # new tokens x keys from which gathering pays


@dataclass(frozen=True, slots=True)
class Span:
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
class LongRow:
    """One row that is attended alone, over contiguous keys: tokens first_token.. of the step, after `start` cached
    ones.

    cudnn: its shape is one that cuDNN may build a plan for.
    """

    first_token: int
    start: int
    num_new: int
    table: Tensor
    cu_q: Tensor
    seq_len: Tensor
    cudnn: bool


@dataclass(frozen=True, slots=True)
class TritonMetadata:
    """slots: int32 [T], where each new token's KV goes (-1: nowhere). plans: the decode work, one for each window."""

    slots: Tensor
    decode: Span | None
    plans: dict[int | None, DecodePlan]
    paged: tuple[Span, ...]
    long: tuple[LongRow, ...]


class TritonAttention:
    """`layers` are the pool's, windows those of the model; scale None: head_dim ** -0.5; softcap None: none."""

    reads_unwritten = False

    def __init__(
        self,
        layers: Sequence[LayerKV],
        num_heads: int,
        windows: Iterable[int | None],
        pad_block: int,
        *,
        scale: float | None = None,
        softcap: float | None = None,
    ) -> None:
        from engine.kernels import dense_prefill, kv_write, paged_decode, paged_prefill, prefix

        self._decode, self._prefill, self._dense = paged_decode, paged_prefill, dense_prefill
        self._prefix, self._kv_write = prefix, kv_write
        cache = layers[0]
        self._kv_heads, self._block_size, self._head_dim = cache.num_kv_heads, cache.block_size, cache.head_dim
        self._num_heads, self._pad_block = num_heads, pad_block
        self._windows = tuple(dict.fromkeys(windows))
        self._device, self._itemsize = cache.kv.device, cache.kv.element_size()
        self._scale = self._head_dim**-0.5 if scale is None else scale
        self._softcap = softcap or 0.0
        self._programs = paged_decode.num_shares(self._device)
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

        kinds = [self._kind(s, n) for s, n in zip(starts.tolist(), num_new.tolist(), strict=True)]
        runs = [
            (first, last, kind)
            for low, high, kind in _runs(kinds)
            for first, last in ([(row, row + 1) for row in range(low, high)] if kind == "long" else [(low, high)])
        ]
        arrays = [slots.astype(np.int32)]
        for low, high, _ in runs:
            width = int(counts[low:high].max())
            arrays += [firsts[low : high + 1] - firsts[low], ends[low:high], tables[low:high, :width]]
        slots_there, *there = upload([array.astype(np.int32, copy=False) for array in arrays], self._device)

        decode: Span | None = None
        paged: list[Span] = []
        long: list[LongRow] = []
        for (low, high, kind), cu_q, seq_lens, table in zip(runs, there[::3], there[1::3], there[2::3], strict=True):
            first, start, new = int(firsts[low]), int(starts[low]), int(num_new[low])
            if kind == "long":
                whole = new % CUDNN_QUANTUM == 0 and start % CUDNN_QUANTUM == 0 and not self._softcap
                long.append(LongRow(first, start, new, table[0], cu_q, seq_lens, cudnn=whole))
                continue
            span = Span(first, int(firsts[high]) - first, int(num_new[low:high].max()), cu_q, seq_lens, table)
            if kind == "decode" and decode is None:
                decode = span
            else:
                paged.append(span)
        plans = {window: self._plan(decode, window) for window in self._windows} if decode else {}
        return TritonMetadata(slots_there, decode, plans, tuple(paged), tuple(long))

    def decode_metadata(
        self, slots: Tensor, cu_q: Tensor, seq_lens: Tensor, tables: Tensor, *, max_new: int
    ) -> TritonMetadata:
        """`prepare` for rows with up to max_new tokens whose shape is on the device already; can be captured.

        slots: int [T], -1 for tokens that no row owns; cu_q: int32 [B + 1], cu_q[B] <= T; seq_lens: int32 [B], with the
        new tokens, 0 for a row without any; tables: int32 [B, n], which starts with the blocks of each row.
        """
        span = Span(0, slots.shape[0], max_new, cu_q, seq_lens, tables)
        return TritonMetadata(slots, span, {window: self._plan(span, window) for window in self._windows}, (), ())

    def attend(self, query: Tensor, kv: Tensor, cache: LayerKV, metadata: TritonMetadata, window: int | None) -> Tensor:
        self._kv_write.kv_write(kv, cache, metadata.slots)
        return self.attend_written(query, kv, cache, metadata, window)

    def attend_written(
        self, query: Tensor, kv: Tensor, cache: LayerKV, metadata: TritonMetadata, window: int | None
    ) -> Tensor:
        """`attend` when the new keys and values are in the cache already (rope_kv_write puts them there)."""
        if metadata.decode is None and not metadata.paged and len(metadata.long) == 1:
            return self._attend_long(query, kv, cache, metadata.long[0], window)
        out = torch.empty_like(query, memory_format=torch.contiguous_format)
        if metadata.decode is not None:
            span = metadata.decode
            rows = slice(span.first_token, span.first_token + span.num_tokens)
            self._decode.paged_decode(
                query[rows], cache, span.tables, span.cu_q, span.seq_lens, metadata.plans[window],
                self._workspace(span.max_new), max_query=span.max_new, scale=self._scale, softcap=self._softcap,
                out=out[rows],
            )  # fmt: skip
        for span in metadata.paged:
            rows = slice(span.first_token, span.first_token + span.num_tokens)
            self._prefill.paged_prefill(
                query[rows], cache, span.tables, span.cu_q, span.seq_lens,
                max_query=span.max_new, scale=self._scale, softcap=self._softcap, window=window or 0, out=out[rows],
            )  # fmt: skip
        for row in metadata.long:
            rows = slice(row.first_token, row.first_token + row.num_new)
            out[rows] = self._attend_long(query[rows], kv[rows], cache, row, window)
        return out

    def _attend_long(self, query: Tensor, kv: Tensor, cache: LayerKV, row: LongRow, window: int | None) -> Tensor:
        length = row.start + row.num_new
        if (window is not None and window < length) or query.dtype == torch.float32:
            return self._prefill.paged_prefill(
                query, cache, row.table[None], row.cu_q, row.seq_len,
                max_query=row.num_new, scale=self._scale, softcap=self._softcap, window=window or 0,
            )  # fmt: skip
        if row.cudnn:
            return self._attend_cudnn(query, kv, cache, row)
        keys, values = self._prefix.gather_kv(cache, row.table, length, dtype=query.dtype, multiple=self._dense.BLOCK_N)
        return self._dense.dense_prefill(query, keys, values, length=length, scale=self._scale, softcap=self._softcap)

    def _attend_cudnn(self, query: Tensor, kv: Tensor, cache: LayerKV, row: LongRow) -> Tensor:
        """New keys are read where the projection left them; an 8-bit cache has other numbers, so there from it."""
        keys, values = kv[:, 0], kv[:, 1]
        prefix: tuple[Tensor, Tensor] | None = None
        if cache.scales is not None:
            both = self._prefix.gather_kv(cache, row.table, row.start + row.num_new, dtype=query.dtype)
            keys, values = (x[:, row.start :].transpose(0, 1) for x in both)
            prefix = (both[0][:, : row.start], both[1][:, : row.start]) if row.start else None
        elif row.start:
            prefix = self._prefix.gather_kv(cache, row.table, row.start, dtype=query.dtype)
        return self._dense.cudnn_prefill(query, keys, values, prefix, scale=self._scale)

    def _kind(self, start: int, num_new: int) -> str:
        if num_new <= DECODE_TOKENS:
            return "decode"
        dense = self._dense_ok and num_new * (start + num_new) >= DENSE_MIN_SCORES
        return "long" if dense else "paged"

    def _plan(self, span: Span, window: int | None) -> DecodePlan:
        return self._decode.plan_decode(
            span.cu_q, span.seq_lens, self._workspace(span.max_new),
            num_kv_heads=self._kv_heads, head_dim=self._head_dim, itemsize=self._itemsize, window=window or 0,
        )  # fmt: skip

    def _workspace(self, max_new: int) -> DecodeWorkspace:
        if max_new not in self._workspaces:
            self._workspaces[max_new] = self._decode.decode_workspace(
                self._programs, self._num_heads, self._kv_heads, max_new, self._head_dim, self._device
            )
        return self._workspaces[max_new]


def _runs(kinds: Sequence[str]) -> list[tuple[int, int, str]]:
    """Maximal runs of equal kinds, as (first, end, kind)."""
    runs: list[tuple[int, int, str]] = []
    for i, kind in enumerate(kinds):
        if runs and runs[-1][2] == kind:
            runs[-1] = (runs[-1][0], i + 1, kind)
        else:
            runs.append((i, i + 1, kind))
    return runs
