"""Paged attention over latents on the GPU (MLA): `TritonAttention` with the kernels of `engine/kernels/latent`.

Rows of up to 8 new tokens take the kernel with split keys, all other rows the kernel for prompts. Both attend in the
absorbed form, so a prompt needs no memory for expanded keys and values. Expanded, a long prompt of V2-Lite would take
a third of the products of attention.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from engine.attention.base import StepShape
from engine.attention.triton_backend import RowSpan, TritonAttention
from engine.kv.kv_pool import LayerKV

if TYPE_CHECKING:
    from engine.kernels.paged_decode import DecodePlan, DecodeWorkspace


class LatentAttentionBackend(TritonAttention):
    """`TritonAttention` over latents. Its models have no windows, no softcap and no sinks."""

    def __init__(
        self, layers: Sequence[LayerKV], num_heads: int, windows: Iterable[int | None], pad_block: int, **score: Any
    ) -> None:
        super().__init__(layers, num_heads, windows, pad_block, **score)
        from engine.kernels.latent import attention

        assert self._windows == (None,)
        assert not self._score["softcap"]
        assert not self._first
        self._latent, self._scale = attention, self._score["scale"]
        self._dense_ok = False

    def warm_up(self, step: StepShape) -> None:
        """Does nothing: cuDNN computes no latent attention, so there are no plans to build."""

    def _plan(self, span: RowSpan, window: int | None) -> DecodePlan:
        sizes = {"num_kv_heads": 1, "head_dim": self._head_dim, "itemsize": self._itemsize}
        tile = self._latent.decode_tile(self._tile(span.max_new))
        rows = span.cu_q, span.seq_lens, self._workspace(span.max_new)
        plan: DecodePlan = self._decode.plan_decode(*rows, tile=tile, **sizes)
        return plan

    def _workspace(self, max_new: int) -> DecodeWorkspace:
        if max_new not in self._workspaces:
            sizes = self._num_heads, max_new, self._value_dim
            self._workspaces[max_new] = self._latent.latent_workspace(self._tile(max_new), *sizes, self._device)
        return self._workspaces[max_new]

    def _tile(self, new_tokens: int) -> Any:
        return self._latent.latent_tile(self._num_heads * new_tokens, self._first_layer)

    def _listed_rows(self, max_tokens: int) -> int:
        rows: int = self._tile(max_tokens).rows
        return rows

    def _attend_decode(
        self, query: Tensor, cache: LayerKV, span: RowSpan, plan: DecodePlan, sinks: Tensor | None, out: Tensor
    ) -> None:
        rows = span.tables, span.cu_q, span.seq_lens, plan, self._workspace(span.max_new)
        self._latent.latent_decode(query, cache, *rows, max_query=span.max_new, scale=self._scale, out=out)

    def _attend_paged(
        self,
        query: Tensor,
        cache: LayerKV,
        span: RowSpan,
        window: int | None,
        sinks: Tensor | None,
        out: Tensor | None,
    ) -> Tensor:
        if out is None:
            out = query.new_empty(*query.shape[:2], self._value_dim)
        rows = span.tables, span.cu_q, span.seq_lens
        options: dict[str, Any] = {"scale": self._scale, "out": out}
        if span.tiles is not None:
            return self._latent.listed_prefill(query, cache, *rows, span.tiles, max_tokens=span.num_tokens, **options)
        return self._latent.latent_prefill(query, cache, *rows, max_query=span.max_new, **options)
