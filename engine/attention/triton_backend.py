"""Paged attention on the GPU. `TritonAttention` selects the kernel for each row of a step:

    up to 8 new tokens                 `paged_decode` (split KV), one launch for the first span of these rows
    new tokens x keys >= 2**20         `cudnn_prefill` for the first n // 1024 * 1024 tokens, if the prefix is a
                                       multiple of 1024 too; `dense_prefill` over gathered keys for the other tokens
    other rows, windows, head dims,    `paged_prefill`
    attention sinks

cuDNN builds a plan for every new shape. It gets only multiples of 1024, which are few shapes, so plans are reused.
`prepare` computes everything that does not depend on the layer, once per step. The kernels are imported with the first
backend, so importing this module does not need triton.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from engine.attention.base import StepShape, layout_step
from engine.device import upload
from engine.kv.kv_pool import LayerKV

if TYPE_CHECKING:
    from engine.kernels.paged_decode import DecodePlan, DecodeWorkspace

DECODE_TOKENS = 8  # Max new tokens of a row that the split-KV kernel serves.
CUDNN_QUANTUM = 1024  # cuDNN gets rows with multiples of this many cached and new tokens.
DENSE_MIN_SCORES = 1 << 20  # Rows with this many scores (new tokens x keys) gather their keys first, which is faster.
MAX_BATCHED = 8  # Max prompts of one length in one cuDNN call.


@dataclass(frozen=True, slots=True)
class RowSpan:
    """Consecutive rows of a step that share a kernel launch."""

    first_token: int
    num_tokens: int
    max_new: int  # Max new tokens of a row.
    cu_q: Tensor  # int32 [rows + 1], the first token of each row, counted from first_token.
    seq_lens: Tensor  # int32 [rows], the keys of each row, new tokens included.
    tables: Tensor  # int32 [rows, n], the physical blocks of each row.
    tiles: Tensor | None = None  # The list of tiles of the paged prefill kernel; None if the host knows the lengths.
    # The fields below are for rows over contiguous keys: one row, or several rows of one shape in one cuDNN call.
    start: int = 0  # Cached tokens before the new ones; 0 if count > 1.
    cudnn_tokens: int = 0  # Leading new tokens of a row that cuDNN computes; all if count > 1.
    count: int = 1  # Number of rows.

    @property
    def tokens(self) -> slice:
        """The slice of the step's tokens that these rows cover."""
        return slice(self.first_token, self.first_token + self.num_tokens)


class DecodeRows(NamedTuple):
    """The rows of a captured step that the split-KV kernel computes. Rows without tokens fill the rest."""

    cu_q: Tensor  # int32 [B + 1], the first token of each row.
    seq_lens: Tensor  # int32 [B], the keys of each row with the new tokens, 0 for a row without tokens.
    max_new: int  # Max new tokens of a row, at most DECODE_TOKENS.


@dataclass(frozen=True, slots=True)
class TritonMetadata:
    """The metadata of one step."""

    slot_mapping: Tensor  # int32 [T], block * block_size + offset of each new token's KV, or -1 for nowhere.
    cu_q: Tensor  # int32 [B + 1], the first token of each row.
    tables: Tensor  # int32 [B, n], the physical blocks of each row.
    decode: RowSpan | None  # Rows of the split-KV kernel.
    plans: dict[int | None, DecodePlan]  # Plan of the split-KV kernel for each window.
    paged: tuple[RowSpan, ...]  # Rows of the paged prefill kernel.
    dense_rows: tuple[RowSpan, ...]  # Rows over contiguous keys.
    step: StepShape | None = None  # The step, for other tensor-parallel ranks. None: known on the device only.


class TritonAttention:
    """AttentionBackend in Triton kernels and cuDNN.

    Args:
        layers: the layers of the KV pool.
        windows: the windows of the model's layers.
        pad_block: physical block that pads block tables.
        scale: factor on the scores. None: head_dim ** -0.5.
        softcap: bound of the scores. None: unbounded.
        first_position: queries do not see keys at positions below this one. Above 0, rows have at most DECODE_TOKENS
            new tokens.
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
        self._kv_write = kv_write
        self._first_layer = layer = layers[0]
        self._kv_heads, self._block_size, self._head_dim = layer.num_kv_heads, layer.block_size, layer.head_dim
        self._value_dim = layer.value_dim
        self._num_heads, self._pad_block, self._first = num_heads, pad_block, first_position
        self._group = num_heads // self._kv_heads
        self._windows = tuple(dict.fromkeys(windows))
        self._device, self._itemsize = layer.kv.device, layer.kv.element_size()
        scale = self._head_dim**-0.5 if scale is None else scale
        self._score: dict[str, Any] = {"scale": scale, "softcap": softcap or 0.0}
        self._programs = paged_decode.concurrent_programs(self._device)
        self._workspaces: dict[int, DecodeWorkspace] = {}
        hopper = self._device.type == "cuda" and torch.cuda.get_device_capability(self._device) >= (9, 0)
        self._dense_ok = layer.kv.dtype != torch.float32 and hopper and self._head_dim in dense_prefill.DENSE_DIMS

    def prepare(self, step: StepShape) -> TritonMetadata:
        starts, num_new, tables, row_of, position = layout_step(step, self._block_size, self._pad_block)
        ends = starts + num_new
        firsts = np.concatenate([[0], np.cumsum(num_new)])
        slots = tables[row_of, position // self._block_size] * self._block_size + position % self._block_size
        spans = self._split_rows(starts.tolist(), num_new.tolist())
        arrays = [slots]
        for low, high, _ in spans:
            width = -(-int(ends[low:high].max()) // self._block_size)
            arrays += [firsts[low : high + 1] - firsts[low], ends[low:high], tables[low:high, :width]]
        # The arrays of a single span are also the arrays of the whole step.
        if len(spans) > 1:
            arrays += [firsts, tables]
        slot_mapping, *uploaded = upload([array.astype(np.int32, copy=False) for array in arrays], self._device)
        *span_arrays, all_cu_q, all_tables = uploaded if len(spans) > 1 else [*uploaded, uploaded[0], uploaded[2]]

        decode: RowSpan | None = None
        paged: list[RowSpan] = []
        dense_rows: list[RowSpan] = []
        for (low, high, kind), cu_q, seq_lens, table in zip(
            spans, span_arrays[::3], span_arrays[1::3], span_arrays[2::3], strict=True
        ):
            first, most_new = int(firsts[low]), int(num_new[low:high].max())
            span = RowSpan(first, int(firsts[high]) - first, most_new, cu_q, seq_lens, table)
            if kind == "dense":
                start = int(starts[low])
                cudnn_tokens = self._cudnn_tokens(start, most_new)
                dense_rows.append(replace(span, start=start, cudnn_tokens=cudnn_tokens, count=high - low))
            elif kind == "decode" and decode is None:
                decode = span
            else:
                paged.append(span)
        plans = {window: self._plan(decode, window) for window in self._windows} if decode else {}
        return TritonMetadata(slot_mapping, all_cu_q, all_tables, decode, plans, tuple(paged), tuple(dense_rows), step)

    def select_tokens(self, metadata: TritonMetadata, tokens: Tensor, positions: Tensor) -> TritonMetadata:
        row_of = torch.searchsorted(metadata.cu_q[1:], tokens.int(), right=True)
        row_of.clamp_(max=len(metadata.tables) - 1)  # padding tokens of a captured step belong to no row
        slot_mapping = torch.full_like(tokens, -1, dtype=torch.int32)
        cu_q = torch.arange(len(tokens) + 1, dtype=torch.int32, device=tokens.device)
        seq_lens, tables = (positions.index_select(0, tokens) + 1).int(), metadata.tables.index_select(0, row_of)
        return self.decode_metadata(slot_mapping, cu_q, seq_lens, tables, max_new=1)

    def decode_metadata(
        self, slot_mapping: Tensor, cu_q: Tensor, seq_lens: Tensor, tables: Tensor, *, max_new: int
    ) -> TritonMetadata:
        """Makes metadata for rows of up to max_new <= DECODE_TOKENS tokens, with a shape that is on the device.

        A CUDA graph can capture this call and attention with its result.

        Args:
            slot_mapping: int [T], -1 for padding tokens.
            cu_q: int32 [B + 1]; cu_q[B] <= T.
            seq_lens: int32 [B], keys with the new tokens; 0 for a row without tokens.
            tables: int32 [B, n]; tables[r] starts with the blocks of row r.
        """
        span = RowSpan(0, slot_mapping.shape[0], max_new, cu_q, seq_lens, tables)
        plans = {window: self._plan(span, window) for window in self._windows}
        return TritonMetadata(slot_mapping, cu_q, tables, span, plans, (), ())

    def listed_metadata(
        self,
        slot_mapping: Tensor,
        cu_q: Tensor,
        seq_lens: Tensor,
        tables: Tensor,
        tiles: Tensor,
        decode: DecodeRows | None = None,
    ) -> TritonMetadata:
        """Makes metadata like `decode_metadata`, for rows of any length in the paged prefill kernel.

        Args:
            tiles: int32, the result of `list_tiles` for the rows of the prefill kernel.
            decode: the first rows of the step, for the split-KV kernel. None: `tiles` has all rows.
        """
        new = slot_mapping.shape[0]
        listed = RowSpan(0, new, new, cu_q, seq_lens, tables, tiles=tiles)
        if decode is None:
            return TritonMetadata(slot_mapping, cu_q, tables, None, {}, (listed,), ())
        span = RowSpan(0, new, decode.max_new, decode.cu_q, decode.seq_lens, tables)
        plans = {window: self._plan(span, window) for window in self._windows}
        return TritonMetadata(slot_mapping, cu_q, tables, span, plans, (listed,), ())

    def list_tiles(self, starts: np.ndarray, num_new: np.ndarray, first_row: int, max_tokens: int) -> np.ndarray:
        """Returns the tiles of rows in a captured step of up to `max_tokens` tokens; see `paged_prefill.list_tiles`."""
        return self._prefill.list_tiles(starts, num_new, first_row, self._group, self._listed_rows(max_tokens))

    def tile_list_size(self, max_tokens: int, max_rows: int) -> int:
        """Returns the largest size of the result of `list_tiles`."""
        return 1 + 2 * self._prefill.max_tiles(max_tokens, max_rows, self._group, self._listed_rows(max_tokens))

    def _listed_rows(self, max_tokens: int) -> int:
        """Returns the query rows of a listed tile."""
        return self._prefill.listed_rows(self._group, self._head_dim, max_tokens)

    def warm_up(self, step: StepShape) -> None:
        """Runs the attention of one step, once per window, so that cuDNN builds its plans."""
        metadata = self.prepare(step)
        dtype = torch.bfloat16 if self._first_layer.scales is not None else self._first_layer.kv.dtype
        size = (sum(step.num_new), self._num_heads + 2 * self._kv_heads, self._head_dim)
        qkv = torch.zeros(size, dtype=dtype, device=self._device)
        kv = qkv[:, self._num_heads :].view(-1, 2, self._kv_heads, self._head_dim)
        for window in self._windows:
            self.attend_written(qkv[:, : self._num_heads], kv, self._first_layer, metadata, window)

    def slot_mapping(self, metadata: TritonMetadata, cache: LayerKV) -> Tensor:
        """Returns the places of the step's new keys and values in a layer, see `TritonMetadata.slot_mapping`."""
        return metadata.slot_mapping

    def write(self, kv: Tensor, cache: LayerKV, metadata: TritonMetadata) -> None:
        self._kv_write.kv_write(kv, cache, metadata.slot_mapping)

    def attend(
        self,
        query: Tensor,
        kv: Tensor,
        cache: LayerKV,
        metadata: TritonMetadata,
        window: int | None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        self.write(kv, cache, metadata)
        return self.attend_written(query, kv, cache, metadata, window, sinks)

    def attend_written(
        self,
        query: Tensor,
        kv: Tensor,
        cache: LayerKV,
        metadata: TritonMetadata,
        window: int | None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Attends. `write` or `rope_kv_write` has already written the new keys and values to the cache."""
        if metadata.decode is None and not metadata.paged and len(metadata.dense_rows) == 1:
            return self._attend_dense(query, kv, cache, metadata.dense_rows[0], window, sinks)
        out = query.new_empty(*query.shape[:2], self._value_dim)
        if (span := metadata.decode) is not None:
            plan = metadata.plans[window]
            self._attend_decode(query[span.tokens], cache, span, plan, sinks, out[span.tokens])
        for span in metadata.paged:
            self._attend_paged(query[span.tokens], cache, span, window, sinks, out[span.tokens])
        for row in metadata.dense_rows:
            self._attend_dense(query[row.tokens], kv[row.tokens], cache, row, window, sinks, out[row.tokens])
        return out

    def _attend_decode(
        self, query: Tensor, cache: LayerKV, span: RowSpan, plan: DecodePlan, sinks: Tensor | None, out: Tensor
    ) -> None:
        rows = span.tables, span.cu_q, span.seq_lens, plan, self._workspace(span.max_new)
        options = {"max_query": span.max_new, "first": self._first, "sinks": sinks, **self._score}
        self._decode.paged_decode(query, cache, *rows, out=out, **options)

    def _attend_paged(
        self,
        query: Tensor,
        cache: LayerKV,
        span: RowSpan,
        window: int | None,
        sinks: Tensor | None,
        out: Tensor | None,
    ) -> Tensor:
        rows = span.tables, span.cu_q, span.seq_lens
        options: dict[str, Any] = {"window": window or 0, "sinks": sinks, **self._score}
        if span.tiles is not None:
            assert out is not None
            return self._prefill.listed_prefill(
                query, cache, *rows, span.tiles, max_tokens=span.num_tokens, out=out, **options
            )
        return self._prefill.paged_prefill(query, cache, *rows, max_query=span.max_new, out=out, **options)

    def _attend_dense(
        self,
        query: Tensor,
        kv: Tensor,
        cache: LayerKV,
        row: RowSpan,
        window: int | None,
        sinks: Tensor | None,
        out: Tensor | None = None,
    ) -> Tensor:
        length, first = row.start + row.max_new, row.cudnn_tokens
        if sinks is not None or (window is not None and window < length) or query.dtype == torch.float32:
            return self._attend_paged(query, cache, row, window, sinks, out)
        # cuDNN computes the first tokens of the row, the Triton kernel the remaining ones.
        # cuDNN reads new keys in the projection's output. With an 8-bit cache it reads the cache, which has rounded
        # numbers.
        remaining = row.max_new - first
        num_gathered = length if remaining or cache.scales is not None else row.start
        keys, values = kv[:, 0], kv[:, 1]
        prefix: tuple[Tensor, Tensor] | None = None
        if num_gathered:
            gathered = self._dense.gather_kv(cache, row.tables[0], num_gathered, dtype=query.dtype)
            if cache.scales is not None:
                keys, values = gathered[0][row.start :], gathered[1][row.start :]
            if row.start:
                prefix = gathered[0][: row.start], gathered[1][: row.start]
        attend = functools.partial(self._dense.cudnn_prefill, scale=self._score["scale"], count=row.count)
        if not remaining:
            return attend(query, keys, values, prefix, out=out)
        out = torch.empty_like(query, memory_format=torch.contiguous_format) if out is None else out
        if first:
            attend(query[:first], keys[:first], values[:first], prefix, out=out[:first])
        self._dense.dense_prefill(query[first:], *gathered, **self._score, out=out[first:])
        return out

    def _kind(self, start: int, num_new: int) -> str:
        """Returns the kernel of a row: "decode", "dense" or "paged"."""
        if num_new <= DECODE_TOKENS:
            return "decode"
        return "dense" if self._dense_ok and num_new * (start + num_new) >= DENSE_MIN_SCORES else "paged"

    def _cudnn_tokens(self, start: int, num_new: int) -> int:
        """Returns the number of leading new tokens of a dense row that cuDNN computes."""
        return 0 if start % CUDNN_QUANTUM or self._score["softcap"] else num_new // CUDNN_QUANTUM * CUDNN_QUANTUM

    def _split_rows(self, starts: Sequence[int], num_new: Sequence[int]) -> list[tuple[int, int, str]]:
        """Returns the rows that share a launch as (first, end, kind).

        Neighbouring rows of one kind share a launch. Dense rows share one only if they have no cached tokens, have one
        length, and cuDNN computes all of it. Their number is then a power of two, because cuDNN builds a plan for each
        number of rows.
        """
        rows = list(zip(starts, num_new, strict=True))
        kinds = [self._kind(*row) for row in rows]
        keys = [(kind, row if kind == "dense" else None) for kind, row in zip(kinds, rows, strict=True)]
        spans: list[tuple[int, int, str]] = []
        end = 0
        for (kind, shape), group in itertools.groupby(keys):
            first, end = end, end + len(list(group))
            size = end - first
            if shape is not None:
                start, new = shape
                batched = not start and self._itemsize > 1 and self._cudnn_tokens(start, new) == new
                size = MAX_BATCHED if batched else 1
            while first < end:
                # Of dense rows, the largest power of two that is not above the number of rows left.
                count = size if shape is None else min(size, 1 << ((end - first).bit_length() - 1))
                spans.append((first, first + count, kind))
                first += count
        return spans

    def _plan(self, span: RowSpan, window: int | None) -> DecodePlan:
        layer: dict[str, Any] = {"num_kv_heads": self._kv_heads, "head_dim": self._head_dim, "itemsize": self._itemsize}
        workspace = self._workspace(span.max_new)
        return self._decode.plan_decode(span.cu_q, span.seq_lens, workspace, window=window or 0, **layer)

    def _workspace(self, max_new: int) -> DecodeWorkspace:
        if max_new not in self._workspaces:
            sizes = self._programs, self._num_heads, self._kv_heads, max_new, self._head_dim
            self._workspaces[max_new] = self._decode.decode_workspace(*sizes, self._device)
        return self._workspaces[max_new]
