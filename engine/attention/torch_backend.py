"""Paged attention in plain torch: the backend on CPUs, and the reference for all kernels.

Rows of similar size (new tokens and context, by powers of four) form a group, padded to its longest row. Per group a
layer is one gather, one scaled_dot_product_attention and one scatter, without a loop over sequences. Grouped query
heads are folded into the query dimension, so keys are not repeated. The unused slots after a row's last token are
masked, but must be finite: the runner zeroes a block when a sequence starts to fill it, and the padding block is zero.

A step with one new token in each row needs none of this on a CPU with numba: a compiled kernel reads the pool in place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from engine.attention.base import StepLayout, StepShape, layout_step
from engine.kernels.cpu.compiled import is_available
from engine.kv.kv_pool import LayerKV, dequantize_e4m3, quantize_e4m3

#: Bytes of a token's KV from which the compiled kernel gains more than the import of numba costs.
MIN_COMPILED_BYTES = 8 << 10
#: Bytes of KV of one layer from which a step gains by a second thread.
MIN_SPLIT_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class RowGroup:
    """A group of rows of similar size, padded to `width` new tokens and to a common context."""

    rows: int
    width: int
    gather: Tensor  # int64 indices of the blocks to read, in the form that `TorchAttention._gather` uses.
    #: int64 [rows * width], the token in T for each query place; padding repeats the row's last token. None: the group
    #: is the whole step, in order and without padding.
    tokens: Tensor | None
    valid: Tensor | None  # The query places that are not padding. None: all.
    masks: dict[int | None, Tensor]  # Additive mask for each window.


@dataclass(frozen=True, slots=True)
class TokenRows:
    """Rows with one new token each, for the compiled kernel."""

    tables: np.ndarray  # int64 [rows, n], the blocks of each row.
    positions: np.ndarray  # int64 [rows], the position of each row's token.
    parts: tuple[slice, ...]  # The rows that each thread computes.


@dataclass(frozen=True, slots=True)
class TorchMetadata:
    """The metadata of one step."""

    block: Tensor | None  # int64 [T], the physical block of each new token. None: nothing is written.
    offset: Tensor  # int64 [T], the offset of each new token in its block.
    #: int64 [T * 2 * kv_heads] ([T] of latents), places of the new vectors in layers with `geometry`, see `_matrix`.
    vectors: Tensor | None
    geometry: tuple[int, ...]  # See `_geometry`. The layers of a draft model may differ from those of the target.
    groups: tuple[RowGroup, ...]  # Empty if `tokens` is not None.
    tokens: TokenRows | None
    ends: np.ndarray  # int64 [B], the end of each row in T.
    table: np.ndarray  # int64 [B, n], the physical blocks of each row.
    step: StepShape  # The step, for the other ranks of a tensor-parallel engine.


class TorchAttention:
    """AttentionBackend in plain torch. Its arguments are those of `TritonAttention`."""

    reads_unwritten_slots = True

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
        kv = layers[0].kv
        # A token and head has a key and a value, or one latent vector, see `KVLayout.latent_dim`.
        _, self._vectors, self._kv_heads, self._block_size, self._head_dim = kv.shape
        self._value_dim = layers[0].value_dim
        self._heads_per_kv = num_heads // self._kv_heads
        self._windows = tuple(dict.fromkeys(windows))
        self._pad_block, self._first = pad_block, first_position
        self._scale = self._head_dim**-0.5 if scale is None else scale
        self._softcap = softcap
        quantised = layers[0].scales is not None
        self._device, self._mask_dtype = kv.device, torch.float32 if quantised else kv.dtype
        # A block of one layer is a run of rows, one per (K or V, head). If the block stride is a multiple of the row
        # size, the pool is a matrix of these rows, and one index_select reads blocks in the order that attention needs.
        row_size = self._block_size * self._head_dim
        is_matrix = not any(stride % row_size for stride in kv.stride()[:3]) and not quantised
        self._row_of_vector, self._row_of_head = kv.stride(1) // row_size, kv.stride(2) // row_size
        self._rows_per_block = kv.stride(0) // row_size if is_matrix else None
        # Each row has `block_size` vectors of head_dim numbers: one index_copy_ writes the keys and values of a step.
        self._vectors_per_block = kv.stride(0) // self._head_dim if is_matrix else None
        self._geometry = _geometry(kv)
        compact = is_matrix and self._value_dim == self._head_dim and self._block_size % 4 == 0
        token_bytes = len(layers) * self._vectors * self._kv_heads * self._head_dim * kv.element_size()
        self._attend_tokens: Callable[..., None] | None = None  #: The compiled kernel of steps with one token a row.
        if compact and softcap is None and kv.device.type == "cpu" and kv.dtype == torch.float32:
            self._attend_tokens = _compiled_kernel() if token_bytes >= MIN_COMPILED_BYTES else None
        self._layer_token_bytes = token_bytes // len(layers)
        self._executor = ThreadPoolExecutor(thread_name_prefix="attention")  #: Starts a thread when it is needed.

    def prepare(self, step: StepShape) -> TorchMetadata:
        layout = layout_step(step, self._block_size, self._pad_block)
        starts, num_new, table, row_of, position = layout
        groups: tuple[RowGroup, ...] = ()
        tokens: TokenRows | None = None
        if self._attend_tokens is not None and (num_new == 1).all():
            tokens = self._token_rows(starts, table)
        else:
            groups = self._groups(layout)
        block, offset = table[row_of, position // self._block_size], position % self._block_size
        vectors: Tensor | None = None
        if self._vectors_per_block is not None:
            heads = np.arange(self._kv_heads) * self._row_of_head
            rows = (np.arange(self._vectors)[:, None] * self._row_of_vector + heads).reshape(-1) * self._block_size
            vectors = self._tensor(((block * self._vectors_per_block + offset)[:, None] + rows).reshape(-1))
        places = self._tensor(block), self._tensor(offset), vectors, self._geometry
        return TorchMetadata(*places, groups, tokens, np.cumsum(num_new), table, step)

    def select_tokens(self, metadata: TorchMetadata, tokens: Tensor, positions: Tensor) -> TorchMetadata:
        row_of = np.searchsorted(metadata.ends, tokens.tolist(), side="right")
        blocks = [metadata.table[row] for row in row_of]
        selected = self.prepare(StepShape(positions[tokens].tolist(), [1] * len(blocks), blocks))
        return replace(selected, block=None)

    def write(self, kv: Tensor, cache: LayerKV, metadata: TorchMetadata) -> None:
        if metadata.block is None:
            return
        if metadata.vectors is not None and metadata.geometry == _geometry(cache.kv):
            dim = cache.head_dim
            _matrix(cache.kv, dim).index_copy_(0, metadata.vectors, kv.reshape(-1, dim))
        elif cache.scales is None:
            cache.kv[metadata.block, :, :, metadata.offset] = kv
        else:
            cache.kv[metadata.block, :, :, metadata.offset], scales = quantize_e4m3(kv)
            cache.scales[metadata.block, :, metadata.offset] = scales.transpose(1, 2)

    def attend(
        self,
        query: Tensor,
        kv: Tensor,
        cache: LayerKV,
        metadata: TorchMetadata,
        window: int | None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        self.write(kv, cache, metadata)
        if metadata.tokens is not None:
            return self._attend_in_place(query, cache, metadata.tokens, window, sinks)
        if len(metadata.groups) == 1 and metadata.groups[0].tokens is None:
            return self._attend_group(query, cache, metadata.groups[0], window, sinks)
        out = query.new_empty(*query.shape[:2], self._value_dim)
        for group in metadata.groups:
            assert group.tokens is not None
            result = self._attend_group(query[group.tokens], cache, group, window, sinks)
            if group.valid is None:
                out.index_copy_(0, group.tokens, result)
            else:
                out.index_copy_(0, group.tokens[group.valid], result[group.valid])
        return out

    def _attend_in_place(
        self, query: Tensor, cache: LayerKV, tokens: TokenRows, window: int | None, sinks: Tensor | None
    ) -> Tensor:
        """Attends with query [rows, heads, head_dim] by the compiled kernel, a thread for each part of the rows."""
        assert self._attend_tokens is not None
        out = torch.empty_like(query, memory_format=torch.contiguous_format)
        queries, results, dim = query.numpy(), out.numpy(), self._head_dim
        pool, strides = _matrix(cache.kv, dim).numpy(), tuple(stride // dim for stride in cache.kv.stride()[:3])
        scores = np.empty(0, np.float32) if sinks is None else sinks.detach().float().numpy()
        sees = (self._block_size, self._first, np.iinfo(np.int64).max if window is None else window)

        def attend(rows: slice) -> None:
            assert self._attend_tokens is not None
            places = (tokens.tables[rows], tokens.positions[rows])
            scaled = (self._scale, scores, results[rows])
            self._attend_tokens(queries[rows], pool, strides, self._kv_heads, *places, *sees, *scaled)

        first, *others = tokens.parts
        running = [self._executor.submit(attend, rows) for rows in others]
        attend(first)
        for future in running:
            future.result()
        return out

    def _attend_group(
        self, query: Tensor, cache: LayerKV, group: RowGroup, window: int | None, sinks: Tensor | None
    ) -> Tensor:
        """Attends with query [rows * width, heads, head_dim]. Returns [rows * width, heads, value_dim]."""
        rows, width, fold, dim = group.rows, group.width, self._heads_per_kv, self._head_dim
        keys, values = self._gather(cache, group, query.dtype)
        if width > 1:
            query = query.reshape(rows, width, self._kv_heads, fold, dim).permute(0, 2, 3, 1, 4)
        folded = query.reshape(rows, self._kv_heads, fold * width, dim)
        mask = group.masks[window].to(query.dtype)
        if self._softcap is None and sinks is None:
            out = F.scaled_dot_product_attention(folded, keys, values, attn_mask=mask, scale=self._scale)
        else:
            scores = folded @ keys.transpose(2, 3) * self._scale
            if self._softcap is not None:
                scores = torch.tanh(scores / self._softcap) * self._softcap
            scores = scores.float() + mask
            if sinks is not None:
                of_rows = sinks.float().view(self._kv_heads, fold, 1, 1).expand(rows, -1, -1, width, -1)
                scores = torch.cat((scores, of_rows.reshape(rows, self._kv_heads, fold * width, 1)), dim=-1)
            weights = scores.softmax(-1)[..., : keys.shape[2]]
            out = weights.to(values.dtype) @ values
        if width > 1:
            out = out.reshape(rows, self._kv_heads, fold, width, self._value_dim).permute(0, 3, 1, 2, 4)
        return out.reshape(rows * width, self._kv_heads * fold, self._value_dim)

    def _gather(self, cache: LayerKV, group: RowGroup, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Reads the keys [rows, kv_heads, context, head_dim] and the values [rows, kv_heads, context, value_dim]."""
        heads, size, dim, vectors = self._kv_heads, self._block_size, self._head_dim, self._vectors
        if self._rows_per_block is None:
            both = cache.kv[group.gather].permute(2, 0, 3, 1, 4, 5).reshape(vectors, group.rows, heads, -1, dim)
        else:
            rows = _matrix(cache.kv, size * dim).index_select(0, group.gather)
            both = rows.view(vectors, group.rows, heads, -1, dim)
        if cache.scales is not None:
            scales = cache.scales[group.gather].permute(4, 0, 2, 1, 3).reshape(vectors, group.rows, heads, -1)
            both = dequantize_e4m3(both, scales, dtype)
        return both[0], both[-1, ..., : self._value_dim]

    def _token_rows(self, positions: np.ndarray, table: np.ndarray) -> TokenRows:
        """Cuts rows with one new token into parts with about as many tokens of context each, one for each thread."""
        context = np.cumsum(positions + 1)
        threads = min(
            torch.get_num_threads(), len(positions), int(context[-1]) * self._layer_token_bytes // MIN_SPLIT_BYTES
        )
        shares = np.arange(1, max(threads, 1)) * (context[-1] / max(threads, 1))
        edges = [0, *np.searchsorted(context, shares).tolist(), len(positions)]
        parts = tuple(slice(start, end) for start, end in pairwise(edges) if end > start)
        return TokenRows(np.ascontiguousarray(table), np.ascontiguousarray(positions), parts)

    def _groups(self, layout: StepLayout) -> tuple[RowGroup, ...]:
        by_size: dict[tuple[int, int], list[int]] = {}
        ends = layout.starts + layout.num_new
        for row, (new, end) in enumerate(zip(layout.num_new.tolist(), ends.tolist(), strict=True)):
            by_size.setdefault((_bucket(new), _bucket(max(end, 256))), []).append(row)
        return tuple(self._group(np.array(rows), layout, alone=len(by_size) == 1) for rows in by_size.values())

    def _group(self, rows: np.ndarray, step: StepLayout, *, alone: bool) -> RowGroup:
        starts, num_new = step.starts[rows], step.num_new[rows]
        firsts, width = (np.cumsum(step.num_new) - step.num_new)[rows], int(num_new.max())
        blocks = step.tables[rows, : -(-int((starts + num_new).max()) // self._block_size)]
        offset = np.minimum(np.arange(width)[None, :], num_new[:, None] - 1)
        padded = bool((num_new != width).any())
        position = starts[:, None] + offset
        valid = np.flatnonzero(np.arange(width)[None, :] < num_new[:, None]) if padded else None
        return RowGroup(
            rows=len(rows),
            width=width,
            gather=self._tensor(self._gather_index(blocks)),
            tokens=None if alone and not padded else self._tensor((firsts[:, None] + offset).reshape(-1)),
            valid=None if valid is None else self._tensor(valid),
            masks={w: self._mask(position, blocks.shape[1] * self._block_size, w) for w in self._windows},
        )

    def _gather_index(self, blocks: np.ndarray) -> np.ndarray:
        """Returns `blocks` [rows, n] as indices for `_gather`: rows of the pool's matrix if it is one, else blocks."""
        if self._rows_per_block is None:
            return blocks
        kv = np.arange(self._vectors)[:, None, None, None] * self._row_of_vector
        head = np.arange(self._kv_heads)[None, None, :, None] * self._row_of_head
        return (blocks[None, :, None, :] * self._rows_per_block + kv + head).reshape(-1)

    def _mask(self, position: np.ndarray, context: int, window: int | None) -> Tensor:
        """Returns the additive mask for position[rows, width]: [rows, 1, heads per kv head * width or 1, context]."""
        query = self._tensor(position)[:, None, :, None]
        key = torch.arange(context, device=self._device)
        hidden = (key > query) | (key < self._first)
        if window is not None:
            hidden |= key <= query - window
        mask = torch.zeros_like(hidden, dtype=self._mask_dtype).masked_fill_(hidden, float("-inf"))
        return mask if position.shape[1] == 1 else mask.repeat(1, 1, self._heads_per_kv, 1)

    def _tensor(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self._device, non_blocking=True)


def _compiled_kernel() -> Callable[..., None] | None:
    if not is_available():
        return None
    from engine.kernels.cpu.attention import attend_tokens

    return attend_tokens


def _geometry(kv: Tensor) -> tuple[int, ...]:
    """Returns the numbers between two blocks, vectors and heads of a layer, kv_heads, block_size and head_dim."""
    return *kv.stride()[:3], *kv.shape[2:]


def _matrix(kv: Tensor, width: int) -> Tensor:
    """Returns a view of the pool from a layer's first block on, as a matrix with `width` numbers in a row."""
    numbers = 1 + sum((size - 1) * stride for size, stride in zip(kv.shape, kv.stride(), strict=True))
    return kv.as_strided((numbers // width, width), (width, 1))


def _bucket(size: int) -> int:
    """Returns the size class: 0 for 1, 1 for 2..8, 2 for 9..32, and one more for each factor of four."""
    return 0 if size == 1 else max(1, (size - 1).bit_length() // 2)
