"""An EAGLE head: one decoder layer that guesses the target's next state from its last one and the token that came then.

A *pair* is a token and a state before it: of the target where it is known, else of the head itself, a step earlier.
From a pair at position p the layer makes its key and value at p, and the state for the pair at p + 1; logits are made
of that state. The first token of a sequence has no state before it, so position 0 holds nothing, and nobody sees it.

Keys and values of the head depend on pairs alone (there is one layer), so for tokens that are known `fill` writes them
without attention. Public implementations count positions of pairs from 0; rotary embeddings know differences only.

- EAGLE (Li et al. 2024, EAGLE: Speculative sampling requires rethinking feature uncertainty): the state is what the
  target's head is applied to. Embedding and state pass through `fc`, the layer has no norm before attention, and the
  target's head is applied to what it returns.
- EAGLE-3 (Li et al. 2025, Scaling up inference acceleration via training-time test): the state is made by `fc` of three
  residual streams of the target. Embedding and state are normed apart and enter attention side by side; a norm and a
  head of its own follow, over a vocabulary of its own whose token i is the target's i + d2t[i].
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.attention.base import AttentionBackend
from engine.kv.layer_kv import LayerKV
from engine.models.decoder import MLP, Attention, Decoder, Embedding, Linear, RMSNorm
from engine.models.eagle_spec import EagleSpec
from engine.models.ops import DecoderOps, TorchOps, rms_norm_torch
from engine.models.rope import rope_tables

UNKNOWN_LOGIT = -1e30  # logit of a token that the head does not know; finite, so that a row is not taken for a failure


class EagleHead(nn.Module):
    """Parameters are made on the meta device, eagle_weights fills them.

    target: whose states it continues; what the head has no parameters of its own for is the target's. own_embedding,
    own_head, fc_bias: which of these it has. max_len: longest sequence. fused: as of a Decoder.
    """

    def __init__(
        self,
        spec: EagleSpec,
        target: Decoder,
        max_len: int,
        device: torch.device,
        dtype: torch.dtype,
        *,
        own_embedding: bool,
        own_head: bool,
        fc_bias: bool,
        fused: bool | None = None,
    ) -> None:
        super().__init__()
        self.spec = spec
        layer, hidden = spec.layer, spec.layer.hidden_size
        self.num_aux_layers = len(spec.aux_layers_of(target.spec.num_layers))
        joined = 2 * hidden if spec.is_eagle3 else hidden
        with torch.device("meta"):
            self.fc = Linear(
                self.num_aux_layers * spec.target_hidden if spec.is_eagle3 else joined * 2, hidden, bias=fc_bias
            )
            self.attention = Attention(layer, layer.windows[0])
            self.attention.qkv = Linear(joined, layer.query_size + 2 * layer.kv_size, bias=layer.qkv_bias)
            self.mlp_norm = RMSNorm(hidden, layer.norm_eps)
            self.mlp = MLP(layer)
            self.token_norm = RMSNorm(hidden, layer.norm_eps) if spec.is_eagle3 else None
            self.state_norm = RMSNorm(hidden, layer.norm_eps) if spec.is_eagle3 else None
            self.norm = RMSNorm(hidden, layer.norm_eps) if spec.is_eagle3 else None
            self.own_embedding = Embedding(layer.vocab_size, hidden) if own_embedding else None
            self.own_head = Linear(hidden, spec.draft_vocab or layer.vocab_size, bias=False) if own_head else None
        # Not to_empty: see Decoder.
        made = self._apply(lambda p: torch.empty(p.shape, dtype=dtype, device=device))  # type: ignore[no-untyped-call]
        made.requires_grad_(False)
        self.token_ids: Tensor | None = None  # int64 [draft_vocab], the target's id of each of the head's tokens
        if spec.draft_vocab:
            self.token_ids = torch.arange(spec.draft_vocab, device=device)
        self._target_embedding, self._target_head = target.embedding.weight.detach(), target.head.weight.detach()
        self._vocab = target.spec.vocab_size
        cos, sin = rope_tables(layer.rope, layer.head_dim, max_len)
        self.capturable = device.type == "cuda" if fused is None else fused
        if self.capturable:
            from engine.models.fused import FusedOps

            self._ops: DecoderOps = FusedOps(cos.to(device), sin.to(device))
        else:
            self._ops = TorchOps(cos.to(device, dtype), sin.to(device, dtype))

    def fuse(self, states: Tensor) -> Tensor:
        """[T, hidden], the states of pairs, of what was tapped: [T, taps * target_hidden], or EAGLE's [T, hidden]."""
        return F.linear(states, self.fc.weight, self.fc.bias) if self.spec.is_eagle3 else states

    def write_kv(
        self,
        tokens: Tensor,
        before: Tensor,
        positions: Tensor,
        cache: LayerKV,
        backend: AttentionBackend[Any],
        metadata: Any,
    ) -> None:
        """Keys and values of the pairs (tokens[T], before[T, hidden]). metadata: says where, see `write`."""
        _, qkv = self._input_qkv(tokens, before)
        self._ops.kv_write_for(positions, backend, metadata)(qkv[:, self.attention.kv_rows], self.attention, cache)

    def draft_step(
        self,
        tokens: Tensor,
        before: Tensor,
        positions: Tensor,
        cache: LayerKV,
        backend: AttentionBackend[Any],
        metadata: Any,
    ) -> Tensor:
        """States [T, hidden] that follow the pairs, whose keys and values are written; `before` is overwritten."""
        x, qkv = self._input_qkv(tokens, before)
        attended = self._ops.attention_for(positions, backend, metadata)(qkv, self.attention, cache)
        x = self._ops.add_linear(x, attended, self.attention.out)
        return self._ops.add_linear(x, self._ops.norm_swiglu(x, self.mlp_norm, self.mlp.gate_up), self.mlp.down)

    def logits(self, states: Tensor) -> Tensor:
        """float32 [T, vocab of the target]; tokens that the head does not know have NEVER."""
        weight = self._target_head if self.own_head is None else self.own_head.weight
        if self.norm is not None:
            own = self._ops.logits(states, self.norm, weight)
        elif states.dtype == torch.float32 or states.device.type == "cpu":
            own = F.linear(states, weight).float()
        else:
            own = torch.mm(states, weight.t(), out_dtype=torch.float32)
        if self.token_ids is None:
            return own
        return own.new_full((len(own), self._vocab), UNKNOWN_LOGIT).index_copy_(1, self.token_ids, own)

    def _input_qkv(self, tokens: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
        """The residual stream [T, hidden], which may be overwritten, and qkv."""
        weight = self._target_embedding if self.own_embedding is None else self.own_embedding.weight
        embedded = F.embedding(tokens, weight)
        if self.token_norm is None or self.state_norm is None:
            x = joined = F.linear(torch.cat([embedded, before], dim=-1), self.fc.weight, self.fc.bias)
        else:
            normed = rms_norm_torch(before, self.state_norm)
            joined = torch.cat([rms_norm_torch(embedded, self.token_norm), normed], dim=-1)
            x = normed if self.spec.norm_before_residual else before
        return x, F.linear(joined, self.attention.qkv.weight, self.attention.qkv.bias)
