"""The decoder of the Llama family. Llama, SmolLM2, Mistral, Qwen2 and Qwen3 differ only in flags of their spec.

The tokens of all sequences of a step form one flat dimension T. q, k and v are one GEMM; gate and up are one GEMM.
The LM head, and the last layer after its attention, run only for the requested rows. If few rows are requested,
the last layer's attention also runs for these rows only, and the other tokens get keys and values there.
"""

from __future__ import annotations

from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.kv.kv_pool import LayerKV
from engine.models.base import ForwardContext
from engine.models.cpu_weights import can_pack, pack
from engine.models.layers import MLP, Attention, Embedding, Linear, RMSNorm, allocate
from engine.models.ops import AllReduce, AttentionFn, RowWiseOps, TorchOps, WriteKVFn, rms_norm_torch, rope_tables
from engine.models.spec import ModelSpec

#: The last layer attends for the requested rows alone if there are at most MAX_SINGLE_ROWS of them and the step has at
#: least MIN_TOKENS_PER_ROW tokens for each. With fewer tokens the extra kernel launches cost more than they save.
MAX_SINGLE_ROWS = 8
MIN_TOKENS_PER_ROW = 128


class Layer(nn.Module):
    """Decoder layer: attention and MLP, each with a norm before it and a residual add after it."""

    def __init__(self, spec: ModelSpec, window: int | None) -> None:
        super().__init__()
        self.attention_norm = RMSNorm("input_layernorm", spec.hidden_size, spec.norm_eps)
        self.attention = Attention(spec, window)
        self.mlp_norm = RMSNorm("post_attention_layernorm", spec.hidden_size, spec.norm_eps)
        self.mlp = MLP(spec)

    def forward(self, x: Tensor, cache: LayerKV, ops: TorchOps, attend: AttentionFn, rows: Tensor | None) -> Tensor:
        """Returns the residual stream after this layer, of all tokens or of `rows`. Overwrites x."""
        qkv = ops.norm_linear(x, self.attention_norm, self.attention.qkv)
        attended = attend(qkv, self.attention, cache)
        if rows is not None:
            x, attended = x[rows], attended[rows]
        x = ops.add_linear(x, attended, self.attention.out)
        gated = ops.norm_swiglu(x, self.mlp_norm, self.mlp.gate_up)
        return ops.add_linear(x, gated, self.mlp.down)

    def write_kv(self, x: Tensor, cache: LayerKV, ops: TorchOps, write: WriteKVFn) -> None:
        """Computes and writes the keys and values of all tokens, without attention and MLP."""
        write(ops.norm_linear(x, self.attention_norm, self.attention.kv), self.attention, cache)


class Decoder(nn.Module):
    """The whole model. Its parameters are uninitialised until `engine.models.weights` fills them.

    Args:
        max_len: longest sequence in tokens; sizes the rope tables.
        fused: use Triton kernels instead of plain torch; needs the Triton attention backend. None: True on a GPU.
        all_reduce: makes this a tensor-parallel shard; has the meaning of `all_reduce` in `TorchOps`.
        deterministic: compute every token in one order of sums. The attention backend must do so too.
    """

    def __init__(
        self,
        spec: ModelSpec,
        max_len: int,
        device: torch.device,
        dtype: torch.dtype,
        *,
        fused: bool | None = None,
        all_reduce: AllReduce | None = None,
        deterministic: bool = False,
    ) -> None:
        super().__init__()
        self.spec = spec
        with torch.device("meta"):
            self.embedding = Embedding("model.embed_tokens", spec.vocab_size, spec.hidden_size)
            self.layers = nn.ModuleList(Layer(spec, window) for window in spec.windows)
            self.norm = RMSNorm("model.norm", spec.hidden_size, spec.norm_eps)
            own_head = Linear(spec.hidden_size, {"lm_head": spec.vocab_size}, bias=False)
            self.head = self.embedding if spec.tie_word_embeddings else own_head
        allocate(self, device, dtype)
        self.capturable = device.type == "cuda" if fused is None else fused
        self._ops = make_ops(spec, max_len, device, dtype, self.capturable, all_reduce, deterministic=deterministic)

    @property
    def layer_list(self) -> list[Layer]:
        return cast(list[Layer], list(self.layers))

    def forward(self, tokens: Tensor, positions: Tensor, context: ForwardContext, rows: Tensor | None = None) -> Tensor:
        """Computes hidden states [R, hidden] before the final norm."""
        attend, hook, last = self._ops.attention_for(positions, context), context.layer_hook, self.layer_list[-1]
        x, cache = self._run_body(tokens, context, attend), context.cache[len(self.layers) - 1]
        if rows is not None and len(rows) <= MAX_SINGLE_ROWS and len(rows) * MIN_TOKENS_PER_ROW <= len(tokens):
            last.write_kv(x, cache, self._ops, self._ops.kv_write_for(positions, context))
            context = context._replace(metadata=context.backend.select_tokens(context.metadata, rows, positions))
            x, attend, rows = x[rows], self._ops.attention_for(positions[rows], context), None
        x = last.forward(x, cache, self._ops, attend, rows)
        if hook is not None:
            hook(len(self.layers), x)
        return x

    def write_kv(self, tokens: Tensor, positions: Tensor, context: ForwardContext) -> None:
        x = self._run_body(tokens, context, self._ops.attention_for(positions, context))
        write = self._ops.kv_write_for(positions, context)
        self.layer_list[-1].write_kv(x, context.cache[len(self.layers) - 1], self._ops, write)

    def _run_body(self, tokens: Tensor, context: ForwardContext, attend: AttentionFn) -> Tensor:
        """Returns the residual stream [T, hidden] before the last layer."""
        x = F.embedding(tokens, self.embedding.weight)
        for index, layer in enumerate(self.layer_list):
            if context.layer_hook is not None:
                context.layer_hook(index, x)
            if index + 1 < len(self.layers):
                x = layer.forward(x, context.cache[index], self._ops, attend, None)
        return x

    def final_norm(self, hidden: Tensor) -> Tensor:
        return rms_norm_torch(hidden, self.norm)

    def logits(self, hidden: Tensor) -> Tensor:
        return self._ops.logits(hidden, self.norm, self.head)

    def pack(self, *, keep_head: bool) -> None:
        """Packs the loaded weights if the device is a CPU that can use them, see `cpu_weights.pack`."""
        weight = self.embedding.weight
        if weight.device.type == "cpu" and can_pack(weight.dtype):
            pack(self.embedding, list(self.layers), self.head, keep_head=keep_head)


def make_ops(
    spec: ModelSpec,
    max_len: int,
    device: torch.device,
    dtype: torch.dtype,
    fused: bool,
    all_reduce: AllReduce | None,
    *,
    deterministic: bool = False,
) -> TorchOps:
    """Makes the operations of a decoder's layers; `fused` selects Triton kernels."""
    cos, sin = rope_tables(spec.rope, spec.head_dim, max_len)
    if fused:
        from engine.models.fixed_order import FixedOrderOps
        from engine.models.fused import FusedOps

        return (FixedOrderOps if deterministic else FusedOps)(cos.to(device), sin.to(device), all_reduce)
    cos, sin = torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)
    return (RowWiseOps if deterministic else TorchOps)(cos.to(device, dtype), sin.to(device, dtype), all_reduce)
