"""One decoder for the Llama family: Llama, SmolLM2, Mistral, Qwen2 and Qwen3 differ in the spec's flags only.

Tokens of all sequences of a step are one flat dimension T. q, k and v are one GEMM, so are gate and up; the LM head
only sees the rows that are asked for, and so does all of the last layer that no later token depends on: where few are
asked for, of all others it makes keys and values and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.attention.base import AttentionBackend
from engine.kv.layer_kv import LayerKV
from engine.models.base import LayerHook
from engine.models.ops import AttentionFn, DecoderOps, LinearSlice, TorchOps, WriteKVFn, rms_norm_torch
from engine.models.rope import rope_tables
from engine.models.spec import ModelSpec

MAX_SINGLE_ROWS = 8  # that the last layer attends for one by one
MIN_TOKENS_PER_ROW = 128  # tokens of a step for each of them, from which that is worth its launches


class Linear(nn.Linear):
    """Without random weights, which take two seconds to import and are overwritten."""

    def reset_parameters(self) -> None:
        """They are loaded."""


class Embedding(nn.Embedding):
    """Without random weights, as Linear."""

    def reset_parameters(self) -> None:
        """They are loaded."""


class RMSNorm(nn.Module):
    """Root mean square norm over the last dimension."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.eps = eps


class Attention(nn.Module):
    """Grouped-query attention with rotary positions; queries and keys are normed per head where the spec says so."""

    def __init__(self, spec: ModelSpec, window: int | None) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = spec.num_heads, spec.num_kv_heads, spec.head_dim
        self.window = window
        self.qkv = Linear(spec.hidden_size, spec.query_size + 2 * spec.kv_size, bias=spec.qkv_bias)
        self.out = Linear(spec.query_size, spec.hidden_size, bias=spec.out_bias)
        self.q_norm = RMSNorm(spec.head_dim, spec.norm_eps) if spec.qk_norm else None
        self.k_norm = RMSNorm(spec.head_dim, spec.norm_eps) if spec.qk_norm else None

    @property
    def kv_rows(self) -> slice:
        """Of qkv's outputs the keys and values."""
        return slice(self.heads * self.head_dim, None)

    @property
    def kv(self) -> LinearSlice:
        rows, bias = self.kv_rows, self.qkv.bias
        return LinearSlice(self.qkv.weight[rows], None if bias is None else bias[rows])


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.gate_up = Linear(spec.hidden_size, 2 * spec.intermediate_size, bias=spec.mlp_bias)
        self.down = Linear(spec.intermediate_size, spec.hidden_size, bias=spec.mlp_bias)


class Layer(nn.Module):
    """Pre-norm residual block."""

    def __init__(self, spec: ModelSpec, window: int | None) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(spec.hidden_size, spec.norm_eps)
        self.attention = Attention(spec, window)
        self.mlp_norm = RMSNorm(spec.hidden_size, spec.norm_eps)
        self.mlp = MLP(spec)

    def forward(self, x: Tensor, cache: LayerKV, ops: DecoderOps, attend: AttentionFn, rows: Tensor | None) -> Tensor:
        """The residual stream after this layer, of all tokens or of `rows`; x is overwritten."""
        qkv = ops.norm_linear(x, self.attention_norm, self.attention.qkv)
        attended = attend(qkv, self.attention, cache)
        if rows is not None:
            x, attended = x[rows], attended[rows]
        x = ops.add_linear(x, attended, self.attention.out)
        gated = ops.norm_swiglu(x, self.mlp_norm, self.mlp.gate_up)
        return ops.add_linear(x, gated, self.mlp.down)

    def write_kv(self, x: Tensor, cache: LayerKV, ops: DecoderOps, keep: WriteKVFn) -> None:
        """Keys and values of all tokens, and nothing else."""
        keep(ops.norm_linear(x, self.attention_norm, self.attention.kv), self.attention, cache)


class Decoder(nn.Module):
    """The whole model; parameters are made on the meta device, weights.load fills them.

    max_len: longest sequence that will be computed; the rope tables end there. fused: Triton kernels instead of plain
    torch; by default where the device is a GPU. They want the attention backend of the same kind. wrap: changes the
    operations, for one that is a part of a model.
    """

    def __init__(
        self,
        spec: ModelSpec,
        max_len: int,
        device: torch.device,
        dtype: torch.dtype,
        *,
        fused: bool | None = None,
        wrap_ops: Callable[[DecoderOps], DecoderOps] | None = None,
    ) -> None:
        super().__init__()
        self.spec = spec
        with torch.device("meta"):
            self.embedding = Embedding(spec.vocab_size, spec.hidden_size)
            self.layers = nn.ModuleList(Layer(spec, window) for window in spec.windows)
            self.norm = RMSNorm(spec.hidden_size, spec.norm_eps)
            self.head = (
                self.embedding if spec.tie_word_embeddings else Linear(spec.hidden_size, spec.vocab_size, bias=False)
            )
        # Not to_empty: what torch does for a copy of a meta tensor takes a second to import.
        made = self._apply(lambda p: torch.empty(p.shape, dtype=dtype, device=device))  # type: ignore[no-untyped-call]
        made.requires_grad_(False)
        cos, sin = rope_tables(spec.rope, spec.head_dim, max_len)
        self.capturable = device.type == "cuda" if fused is None else fused
        if self.capturable:
            from engine.models.fused import FusedOps

            self._ops: DecoderOps = FusedOps(cos.to(device), sin.to(device))
        else:
            self._ops = TorchOps(cos.to(device, dtype), sin.to(device, dtype))
        if wrap_ops is not None:
            self._ops = wrap_ops(self._ops)

    @property
    def layer_list(self) -> list[Layer]:
        return cast(list[Layer], list(self.layers))

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        cache: Sequence[LayerKV],
        backend: AttentionBackend[Any],
        metadata: Any,
        rows: Tensor | None = None,
        *,
        tap: LayerHook | None = None,
    ) -> Tensor:
        """Hidden states [R, hidden], before the final norm, of the tokens `rows` (int64[R]; None: all T).

        tokens[T] are at positions[T]; their keys and values are written to the layers' cache. What follows the last
        layer's attention is computed for `rows` only, and where these are few so is that attention. tap: sees the
        residual stream.
        """
        attend = self._ops.attention_for(positions, backend, metadata)
        x = F.embedding(tokens, self.embedding.weight)
        *body, last = self.layer_list
        for index, layer in enumerate(body):
            if tap is not None:
                tap(index, x)
            x = layer.forward(x, cache[index], self._ops, attend, None)
        if tap is not None:
            tap(len(body), x)
        if rows is not None and len(rows) <= MAX_SINGLE_ROWS and len(rows) * MIN_TOKENS_PER_ROW <= len(tokens):
            picked = backend.select_rows(metadata, rows, positions)
            last.write_kv(x, cache[len(body)], self._ops, self._ops.kv_write_for(positions, backend, metadata))
            x, attend, rows = x[rows], self._ops.attention_for(positions[rows], backend, picked), None
        x = last.forward(x, cache[len(body)], self._ops, attend, rows)
        if tap is not None:
            tap(len(self.layer_list), x)
        return x

    def write_kv(
        self,
        tokens: Tensor,
        positions: Tensor,
        cache: Sequence[LayerKV],
        backend: AttentionBackend[Any],
        metadata: Any,
    ) -> None:
        """`hidden` for the keys and values alone: the last layer ends with them."""
        attend = self._ops.attention_for(positions, backend, metadata)
        keep = self._ops.kv_write_for(positions, backend, metadata)
        *body, last = self.layer_list
        x = F.embedding(tokens, self.embedding.weight)
        for index, layer in enumerate(body):
            x = layer.forward(x, cache[index], self._ops, attend, None)
        last.write_kv(x, cache[len(body)], self._ops, keep)

    def final_norm(self, hidden: Tensor) -> Tensor:
        """[R, hidden] of hidden[R, hidden], what `hidden` returned: the states that the head is applied to."""
        return rms_norm_torch(hidden, self.norm)

    def logits(self, hidden: Tensor) -> Tensor:
        """float32[R, vocab] of hidden[R, hidden], what `hidden` returned."""
        return self._ops.logits(hidden, self.norm, self.head.weight)
