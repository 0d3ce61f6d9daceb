"""One decoder for the Llama family: Llama, SmolLM2, Mistral, Qwen2 and Qwen3 differ in the spec's flags only.

Tokens of all sequences of a step are one flat dimension T. q, k and v are one GEMM, so are gate and up; the LM head
only sees the rows that are asked for.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.attention.base import AttentionBackend
from engine.models.rope import rope_tables, rotate_
from engine.models.spec import ModelSpec


class Norm(nn.Module):
    """Root mean square norm over the last dimension, computed in float32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype == torch.float32:
            return F.rms_norm(x, self.weight.shape, self.weight, self.eps)
        return self.weight * F.rms_norm(x.float(), self.weight.shape, None, self.eps).to(x.dtype)


class Attention(nn.Module):
    """Grouped-query attention with rotary positions; queries and keys are normed per head where the spec says so."""

    def __init__(self, spec: ModelSpec, window: int | None) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = spec.num_heads, spec.num_kv_heads, spec.head_dim
        self.window = window
        self.qkv = nn.Linear(spec.hidden_size, spec.query_size + 2 * spec.kv_size, bias=spec.qkv_bias)
        self.out = nn.Linear(spec.query_size, spec.hidden_size, bias=spec.out_bias)
        self.q_norm = Norm(spec.head_dim, spec.norm_eps) if spec.qk_norm else None
        self.k_norm = Norm(spec.head_dim, spec.norm_eps) if spec.qk_norm else None

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, cache: Tensor, backend: AttentionBackend[Any], metadata: Any
    ) -> Tensor:
        heads = self.qkv(x).view(x.shape[0], self.heads + 2 * self.kv_heads, self.head_dim)
        query, kv = heads[:, : self.heads], heads[:, self.heads :]
        if self.q_norm is not None and self.k_norm is not None:
            query.copy_(self.q_norm(query))
            kv[:, : self.kv_heads].copy_(self.k_norm(kv[:, : self.kv_heads]))
        rotate_(heads[:, : self.heads + self.kv_heads], cos, sin)
        kv = kv.view(-1, 2, self.kv_heads, self.head_dim)
        attended = backend.attend(query, kv, cache, metadata, self.window)
        projected: Tensor = self.out(attended.reshape(x.shape[0], -1))
        return projected


class Mlp(nn.Module):
    """SwiGLU."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.gate_up = nn.Linear(spec.hidden_size, 2 * spec.intermediate_size, bias=spec.mlp_bias)
        self.down = nn.Linear(spec.intermediate_size, spec.hidden_size, bias=spec.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        projected: Tensor = self.down(F.silu(gate).mul_(up))
        return projected


class Layer(nn.Module):
    """Pre-norm residual block."""

    def __init__(self, spec: ModelSpec, window: int | None) -> None:
        super().__init__()
        self.attention_norm = Norm(spec.hidden_size, spec.norm_eps)
        self.attention = Attention(spec, window)
        self.mlp_norm = Norm(spec.hidden_size, spec.norm_eps)
        self.mlp = Mlp(spec)


class Decoder(nn.Module):
    """The whole model; parameters are made on the meta device, weights.load fills them.

    max_len: longest sequence that will be computed; the rope tables end there.
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, spec: ModelSpec, max_len: int, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self.spec = spec
        with torch.device("meta"):
            self.embedding = nn.Embedding(spec.vocab_size, spec.hidden_size)
            self.layers = nn.ModuleList(Layer(spec, window) for window in spec.windows)
            self.norm = Norm(spec.hidden_size, spec.norm_eps)
            self.head = self.embedding if spec.tied else nn.Linear(spec.hidden_size, spec.vocab_size, bias=False)
        self.to(dtype).to_empty(device=device).requires_grad_(False)
        cos, sin = rope_tables(spec.rope, spec.head_dim, max_len)
        self.register_buffer("cos", cos.to(device, dtype).unsqueeze(1), persistent=False)
        self.register_buffer("sin", sin.to(device, dtype).unsqueeze(1), persistent=False)

    @property
    def stack(self) -> list[Layer]:
        return cast(list[Layer], list(self.layers))

    def forward(
        self, tokens: Tensor, positions: Tensor, cache: Tensor, backend: AttentionBackend[Any], metadata: Any
    ) -> Tensor:
        """Normed hidden states [T, hidden] of tokens[T] at positions[T].

        cache: [num_blocks, layers, 2, kv_heads, block_size, head_dim]; the new keys and values are written to it.
        """
        cos, sin = self.cos[positions], self.sin[positions]
        x = self.embedding(tokens)
        for index, layer in enumerate(self.stack):
            x = x + layer.attention(layer.attention_norm(x), cos, sin, cache[:, index], backend, metadata)
            x = x + layer.mlp(layer.mlp_norm(x))
        normed: Tensor = self.norm(x)
        return normed

    def logits(self, hidden: Tensor) -> Tensor:
        """float32[R, vocab] of hidden[R, hidden]."""
        return F.linear(hidden, self.head.weight).float()
