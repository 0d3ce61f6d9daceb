"""An EAGLE head: one decoder layer that predicts the target's next hidden state from its last state and token.

A *pair* at position p is token p and the state of position p - 1: the target's state if it is known, else the head's
own prediction. From a pair the layer computes its KV at p and the state of p, the input of the next pair and of the
logits. The first token has no previous state: the KV of position 0 stays empty and masked. The KV of one layer depends
on the pairs alone, so `write_kv` writes it for known tokens without attention. Public implementations number the pairs
from 0; the result is the same, because rotary embeddings depend on position differences only.

EAGLE (Li et al. 2024, Speculative sampling requires rethinking feature uncertainty): the state is the input of the
target's LM head. `fc` joins embedding and state. No norm precedes attention. The LM head is the target's.
EAGLE-3 (Li et al. 2025, Scaling up inference acceleration via training-time test): `fc` makes the state from three
residual streams of the target. Embedding and state have a norm each and enter attention side by side. The LM head is
the head's own, with a norm and a vocabulary of its own: its token i is the target's token i + d2t[i].
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.models.base import ForwardContext
from engine.models.decoder import Decoder, make_ops
from engine.models.eagle_spec import EagleSpec
from engine.models.layers import MLP, Attention, Embedding, Linear, RMSNorm, allocate
from engine.models.ops import float32_product, rms_norm_torch

#: Logit of a target token that is not in the head's vocabulary. Finite, because -inf in a row means a failed step.
UNKNOWN_LOGIT = -1e30


class EagleHead(nn.Module):
    """The head of a target model. Its parameters are uninitialised until `engine.models.eagle_weights` fills them.

    Args:
        target: the model that the head drafts for.
        max_len: longest sequence in tokens.
        own_embedding: the head has an embedding; otherwise it uses the target's.
        own_head: the head has an LM head; otherwise it uses the target's.
        fc_bias: `fc` has a bias.
        fused: use Triton kernels; has the meaning of `fused` in `Decoder`.
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
        num_aux_layers = len(spec.aux_layers_of(target.spec.num_layers))
        joined = 2 * hidden if spec.is_eagle3 else hidden
        fc_inputs = num_aux_layers * spec.target_hidden if spec.is_eagle3 else 2 * hidden
        head_vocab = spec.draft_vocab or layer.vocab_size

        def eagle3_norm(name: str) -> RMSNorm | None:
            return RMSNorm(name, hidden, layer.norm_eps) if spec.is_eagle3 else None

        with torch.device("meta"):
            self.fc = Linear(fc_inputs, {"fc": hidden}, bias=fc_bias)
            self.attention = Attention(layer, layer.windows[0], inputs=joined)
            self.mlp_norm = RMSNorm("post_attention_layernorm", hidden, layer.norm_eps)
            self.mlp = MLP(layer)
            self.token_norm, self.state_norm = eagle3_norm("input_layernorm"), eagle3_norm("hidden_norm")
            self.norm = eagle3_norm("norm")
            self.own_embedding = Embedding("embed_tokens", layer.vocab_size, hidden) if own_embedding else None
            self.own_head = Linear(hidden, {"lm_head": head_vocab}, bias=False) if own_head else None
        allocate(self, device, dtype)
        #: int64 [draft_vocab], the target's token id for each token of the head. None: the vocabularies are equal.
        self.token_ids: Tensor | None = None
        if spec.draft_vocab:
            self.token_ids = torch.arange(spec.draft_vocab, device=device)
        self._target_embedding, self._target_head = target.embedding.weight.detach(), target.head.weight.detach()
        self._vocab = target.spec.vocab_size
        self.capturable = device.type == "cuda" if fused is None else fused
        self._ops = make_ops(layer, max_len, device, dtype, self.capturable)

    def fuse(self, states: Tensor) -> Tensor:
        """Returns the states of EAGLE-3's pairs, [T, hidden], from the states of three target layers, side by side."""
        return F.linear(states, self.fc.weight, self.fc.bias)

    def write_kv(self, tokens: Tensor, prev_states: Tensor, positions: Tensor, context: ForwardContext) -> None:
        """Writes the keys and values of the pairs (tokens[T], prev_states[T, hidden]) to the one layer of `context`."""
        _, qkv = self._input_qkv(tokens, prev_states)
        write = self._ops.kv_write_for(positions, context)
        write(qkv[:, self.attention.kv_rows], self.attention, context.cache[0])

    def draft_step(self, tokens: Tensor, prev_states: Tensor, positions: Tensor, context: ForwardContext) -> Tensor:
        """Predicts the states [T, hidden] of the pairs and writes their keys and values. Overwrites prev_states."""
        x, qkv = self._input_qkv(tokens, prev_states)
        attended = self._ops.attention_for(positions, context)(qkv, self.attention, context.cache[0])
        x = self._ops.add_linear(x, attended, self.attention.out)
        return self._ops.add_linear(x, self._ops.norm_swiglu(x, self.mlp_norm, self.mlp.gate_up), self.mlp.down)

    def logits(self, states: Tensor) -> Tensor:
        """Returns logits float32 [T, target's vocab]. Tokens outside the head's vocabulary get UNKNOWN_LOGIT."""
        weight = self._target_head if self.own_head is None else self.own_head.weight
        if self.norm is not None:
            logits = self._ops.logits(states, self.norm, weight)
        else:
            logits = float32_product(states, weight)
        if self.token_ids is None:
            return logits
        return logits.new_full((len(logits), self._vocab), UNKNOWN_LOGIT).index_copy_(1, self.token_ids, logits)

    def _input_qkv(self, tokens: Tensor, prev_states: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the residual stream [T, hidden], which the caller may overwrite, and qkv."""
        weight = self._target_embedding if self.own_embedding is None else self.own_embedding.weight
        embedded = F.embedding(tokens, weight)
        if self.token_norm is None or self.state_norm is None:
            x = joined = F.linear(torch.cat([embedded, prev_states], dim=-1), self.fc.weight, self.fc.bias)
        else:
            normed = rms_norm_torch(prev_states, self.state_norm)
            joined = torch.cat([rms_norm_torch(embedded, self.token_norm), normed], dim=-1)
            x = normed if self.spec.norm_before_residual else prev_states
        return x, F.linear(joined, self.attention.qkv.weight, self.attention.qkv.bias)
