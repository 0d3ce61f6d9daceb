"""The decoder of the Llama family. Llama, SmolLM2, Mistral, Qwen2 and Qwen3 differ only in flags of their spec.

The tokens of all sequences of a step form one flat dimension T. q, k and v are one GEMM; gate and up are one GEMM.
The LM head, and the last layer after its attention, run only for the requested rows. If few rows are requested,
the last layer's attention also runs for these rows only, and the other tokens get keys and values there.
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
from engine.models.layers import MLP, Attention, Embedding, Linear, RMSNorm
from engine.models.ops import AttentionFn, DecoderOps, TorchOps, WriteKVFn, rms_norm_torch
from engine.models.rope import rope_tables
from engine.models.spec import ModelSpec

#: The last layer attends for the requested rows alone if there are at most MAX_SINGLE_ROWS of them and the step has at
#: least MIN_TOKENS_PER_ROW tokens for each. With fewer tokens the extra kernel launches cost more than they save.
MAX_SINGLE_ROWS = 8
MIN_TOKENS_PER_ROW = 128


class Layer(nn.Module):
    """Decoder layer: attention and MLP, each with a norm before it and a residual add after it."""

    def __init__(self, spec: ModelSpec, window: int | None) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(spec.hidden_size, spec.norm_eps)
        self.attention = Attention(spec, window)
        self.mlp_norm = RMSNorm(spec.hidden_size, spec.norm_eps)
        self.mlp = MLP(spec)

    def forward(self, x: Tensor, cache: LayerKV, ops: DecoderOps, attend: AttentionFn, rows: Tensor | None) -> Tensor:
        """Returns the residual stream after this layer, of all tokens or of `rows`. Overwrites x."""
        qkv = ops.norm_linear(x, self.attention_norm, self.attention.qkv)
        attended = attend(qkv, self.attention, cache)
        if rows is not None:
            x, attended = x[rows], attended[rows]
        x = ops.add_linear(x, attended, self.attention.out)
        gated = ops.norm_swiglu(x, self.mlp_norm, self.mlp.gate_up)
        return ops.add_linear(x, gated, self.mlp.down)

    def write_kv(self, x: Tensor, cache: LayerKV, ops: DecoderOps, write: WriteKVFn) -> None:
        """Computes and writes the keys and values of all tokens, without attention and MLP."""
        write(ops.norm_linear(x, self.attention_norm, self.attention.kv), self.attention, cache)


class Decoder(nn.Module):
    """The whole model. Its parameters are uninitialised until `engine.models.weights` fills them.

    Args:
        max_len: longest sequence in tokens; sizes the rope tables.
        fused: use Triton kernels instead of plain torch; needs the Triton attention backend. None: True on a GPU.
        wrap_ops: changes the operations. A tensor-parallel shard adds its collectives this way.
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
        # Not to_empty: torch's copy of a meta tensor imports modules for a second.
        empty = self._apply(lambda p: torch.empty(p.shape, dtype=dtype, device=device))  # type: ignore[no-untyped-call]
        empty.requires_grad_(False)
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
        layer_hook: LayerHook | None = None,
    ) -> Tensor:
        """Computes hidden states [R, hidden] before the final norm, and writes the tokens' keys and values.

        Args:
            tokens: [T].
            positions: [T].
            cache: the layers of the KV pool, in order.
            metadata: the result of `backend.prepare` for this step.
            rows: int64[R], the tokens that need a result. None: all T.
            layer_hook: called with the residual stream before each layer and after the last.
        """
        attend = self._ops.attention_for(positions, backend, metadata)
        x = F.embedding(tokens, self.embedding.weight)
        *body, last = self.layer_list
        for index, layer in enumerate(body):
            if layer_hook is not None:
                layer_hook(index, x)
            x = layer.forward(x, cache[index], self._ops, attend, None)
        if layer_hook is not None:
            layer_hook(len(body), x)
        if rows is not None and len(rows) <= MAX_SINGLE_ROWS and len(rows) * MIN_TOKENS_PER_ROW <= len(tokens):
            row_metadata = backend.select_rows(metadata, rows, positions)
            last.write_kv(x, cache[len(body)], self._ops, self._ops.kv_write_for(positions, backend, metadata))
            x, attend, rows = x[rows], self._ops.attention_for(positions[rows], backend, row_metadata), None
        x = last.forward(x, cache[len(body)], self._ops, attend, rows)
        if layer_hook is not None:
            layer_hook(len(self.layer_list), x)
        return x

    def write_kv(
        self,
        tokens: Tensor,
        positions: Tensor,
        cache: Sequence[LayerKV],
        backend: AttentionBackend[Any],
        metadata: Any,
    ) -> None:
        """Runs `forward` up to the keys and values of the last layer."""
        attend = self._ops.attention_for(positions, backend, metadata)
        write = self._ops.kv_write_for(positions, backend, metadata)
        *body, last = self.layer_list
        x = F.embedding(tokens, self.embedding.weight)
        for index, layer in enumerate(body):
            x = layer.forward(x, cache[index], self._ops, attend, None)
        last.write_kv(x, cache[len(body)], self._ops, write)

    def final_norm(self, hidden: Tensor) -> Tensor:
        """Applies the norm before the LM head to states of `forward`, [R, hidden] to [R, hidden]."""
        return rms_norm_torch(hidden, self.norm)

    def logits(self, hidden: Tensor) -> Tensor:
        """Returns the logits float32[R, vocab] of states [R, hidden] of `forward`."""
        return self._ops.logits(hidden, self.norm, self.head.weight)
