"""The layers of a draft model or an EAGLE head. Their KV lies in further segments of the target's own blocks.

A step of the target writes the KV of these layers for the same tokens. All segments of a block are then equally
complete: a block that is cached, copied, moved or recomputed carries the draft's KV with it, and rejected drafts leave
nothing behind. Between two steps `draft_step` draws tokens one after the other (draft_loop.py) in slots past the end.

A whole model would slow down every step, so it *lags*: steps compute its layers for prompts only. It computes its own
drafts as it draws them, the last one too. Tokens decoded without drafts are computed when the sequence drafts again, or
once MAX_DRAFT_LAG of them are missing; their blocks are not published before (`Sequence.draft_lag`).

An EAGLE head continues from the target's state at the token before. The segment "draft_state" of each block stores the
state of the block's last accepted token:

    block      [ t0 t1 t2 t3 ] [ t4 t5 .. .. ]      the next step begins with t6
    state             of t3           of t5  <----- and continues from this state
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from engine.adapters.rows import StepAdapters
from engine.attention.base import AttentionBackend, StepShape
from engine.attention.torch_backend import TorchAttention
from engine.attention.triton_backend import TritonAttention
from engine.device import upload
from engine.kv.kv_pool import KVPool, LayerKV
from engine.models.base import ForwardContext, Model, ModelShape
from engine.models.decoder import Decoder
from engine.models.eagle import UNKNOWN_LOGIT, EagleHead
from engine.speculation.acceptance import accepted_mask

AttentionClass = type[TritonAttention] | type[TorchAttention]


class TargetModel(NamedTuple):
    """The served model with its layers of the KV pool and its attention."""

    model: Model
    cache: Sequence[LayerKV]
    backend: AttentionBackend[Any]


@dataclass(frozen=True, slots=True)
class StateLinks:
    """How the rows of a step continue from earlier steps."""

    firsts: Tensor  # int64 [R], index of the first token of each row in the step.
    blocks_before: Tensor  # int64 [R], block of the token before it; any block for a row that begins its sequence.


class SeparateDraftModel:
    """A whole second model with the tokenizer of the target, of shape `shape`.

    `vocab` is the vocabulary size of the target; the vocabulary of the second model may be padded to another size.
    """

    name = "draft_model"  # Name in metric labels.
    lags: Literal[True] = True  # `write_kv` computes prompts in their steps, decoded tokens at the next draft.

    def __init__(self, model: Model, shape: ModelShape, vocab: int, kv: KVPool, attention: AttentionClass) -> None:
        self.capturable = model.capturable
        self._model, self._vocab, self._own_vocab = model, vocab, shape.vocab_size
        self._cache = kv.layers("draft_")
        self.backend: AttentionBackend[Any] = attention(
            self._cache, shape.num_heads, shape.windows, kv.dummy_block, scale=shape.scale, softcap=shape.softcap
        )

    def write_kv(self, tokens: Tensor, positions: Tensor, metadata: Any) -> None:
        """Writes the KV of tokens that the target has computed. `metadata` is the step's, from `backend`."""
        context = ForwardContext(self._cache, self.backend, metadata)
        self._model.write_kv(self._clamp_to_vocab(tokens), positions, context)

    def initial_states(self, blocks: Tensor) -> Tensor | None:
        """Returns None: `draft_step` continues from the KV alone."""
        return None

    def draft_step(
        self, tokens: Tensor, prev_states: Tensor | None, positions: Tensor, metadata: Any
    ) -> tuple[Tensor, None]:
        """Computes one more token of each row. Returns its logits, float32 [R, vocab]."""
        context = ForwardContext(self._cache, self.backend, metadata)
        hidden = self._model.forward(self._clamp_to_vocab(tokens), positions, context)
        logits = self._model.logits(hidden)
        if self._own_vocab < self._vocab:
            logits = F.pad(logits, (0, self._vocab - self._own_vocab), value=UNKNOWN_LOGIT)
        return logits[:, : self._vocab], None

    def _clamp_to_vocab(self, tokens: Tensor) -> Tensor:
        """Returns the tokens; the last token of the vocabulary replaces every token outside this model's vocabulary."""
        return tokens if self._own_vocab >= self._vocab else tokens.clamp(max=self._own_vocab - 1)


class EagleDraftModel:
    """An EAGLE head of a target that is a Decoder."""

    name = "eagle"
    lags: Literal[False] = False  # `forward_with_target` computes the layers in every step, `store_states` ends it.

    def __init__(self, head: EagleHead, target: Decoder, kv: KVPool, attention: AttentionClass) -> None:
        self.capturable = head.capturable
        layer = head.spec.layer
        self._head, self._aux_layers = head, head.spec.aux_layers_of(target.spec.num_layers)
        self._target_layers, self._width = target.spec.num_layers, head.spec.target_hidden
        self._cache = kv.layers("draft_")
        self._state = kv.segment_view("draft_state")
        self._dtype = target.embedding.weight.dtype
        self.backend: AttentionBackend[Any] = attention(
            self._cache, layer.num_heads, layer.windows, kv.dummy_block, first_position=1
        )

    def forward_with_target(
        self,
        target: TargetModel,
        tokens: Tensor,
        positions: Tensor,
        metadata: Any,
        *,
        rows: Tensor | None,
        links: StateLinks,
        adapters: StepAdapters | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Runs the target and the head, and writes the KV of both.

        Returns the target's hidden states of the tokens `rows` (None: all), and the states of all tokens [T, hidden].
        """
        model, width = target.model, self._width
        aux_states = torch.empty(len(tokens), len(self._aux_layers) * width, dtype=self._dtype, device=tokens.device)

        def hook(layer_index: int, x: Tensor) -> None:
            for place, layer in enumerate(self._aux_layers):
                if layer == layer_index:
                    aux_states[:, place * width : (place + 1) * width] = x

        # EAGLE reads the state after the last layer, of all tokens. EAGLE-3 may read it too.
        needs_all_tokens = not self._aux_layers or self._target_layers in self._aux_layers
        context = ForwardContext(target.cache, target.backend, metadata, hook, adapters)
        if needs_all_tokens and adapters is not None:
            context = context._replace(adapters=StepAdapters(adapters.tokens))
        hidden = model.forward(tokens, positions, context, None if needs_all_tokens else rows)
        states = self._head.fuse(aux_states) if self._aux_layers else model.final_norm(hidden)
        if needs_all_tokens and rows is not None:
            hidden = hidden[rows]
        prev_states = torch.cat([states[:1], states[:-1]])
        prev_states.index_copy_(0, links.firsts, self.initial_states(links.blocks_before))
        own = ForwardContext(self._cache, target.backend, metadata)  # the head drafts for all adapters
        self._head.write_kv(tokens, prev_states, positions, own)
        return hidden, states

    def store_states(self, states: Tensor, indices: Tensor, blocks: Tensor) -> None:
        """Stores the states of the tokens `indices`, int64 [C], out of states [T, hidden], in blocks int64 [C]."""
        self._state.index_copy_(0, blocks, states.index_select(0, indices).to(self._state.dtype))

    def initial_states(self, blocks: Tensor) -> Tensor:
        """Returns the states of the last tokens with KV, [R, hidden], from their blocks int64 [R]."""
        return self._state.index_select(0, blocks).to(self._dtype)

    def draft_step(
        self, tokens: Tensor, prev_states: Tensor | None, positions: Tensor, metadata: Any
    ) -> tuple[Tensor, Tensor]:
        """Computes one more token of each row. Returns its logits, float32 [R, vocab], and the next `prev_states`."""
        assert prev_states is not None
        context = ForwardContext(self._cache, self.backend, metadata)
        states = self._head.draft_step(tokens, prev_states, positions, context)
        return self._head.logits(states), states


DraftModel = SeparateDraftModel | EagleDraftModel
#: Builds the draft model over a KV pool: over the trial pool for measuring memory, and then over the engine's pool.
BuildDraftModel = Callable[[KVPool, AttentionClass], DraftModel]


def state_links_of(shape: StepShape, kv: KVPool) -> StateLinks:
    """Returns the state links of the rows of a step. A row that begins its sequence links to the dummy block."""
    size, ends = kv.layout.block_size, np.cumsum(shape.num_new)
    rows = zip(shape.starts, shape.blocks, strict=True)
    blocks_before = [int(blocks[(start - 1) // size]) if start else kv.dummy_block for start, blocks in rows]
    return StateLinks(*upload([ends - np.array(shape.num_new), np.array(blocks_before)], kv.data.device))


def store_step_states(
    draft: EagleDraftModel,
    states: Tensor,
    shape: StepShape,
    sampled: Tensor,
    ids: Tensor,
    logits_indices: np.ndarray,
    num_results: np.ndarray,
    *,
    kv: KVPool,
    query: int,
) -> None:
    """Stores the states of the last accepted token of each row, and of the last slot of each block that it filled.

    Args:
        states: [T, hidden], the states of the step's tokens.
        sampled: int64 [results], the token sampled after each token of `logits_indices`.
        ids: int64 [T], the tokens.
        logits_indices: int64 [results], tokens after which a token is sampled, and the last token of each other row.
        num_results: number of results of each row, at most `query`.
    """
    size, ends = kv.layout.block_size, np.cumsum(shape.num_new)
    positions = np.arange(int(ends[-1])) + np.repeat(np.array(shape.starts) - (ends - shape.num_new), shape.num_new)
    fills_block = (positions + 1) % size == 0
    ends_block = fills_block[logits_indices].astype(np.int64)
    fills_block[logits_indices] = False
    stored = np.concatenate([logits_indices, np.flatnonzero(fills_block)])
    rows = np.searchsorted(ends, stored, side="right")
    places = zip(rows.tolist(), (positions[stored] // size).tolist(), strict=True)
    blocks = np.array([int(shape.blocks[row][place]) for row, place in places])
    offsets = np.arange(len(logits_indices)) - np.repeat(np.cumsum(num_results) - num_results, num_results)
    arrays, results = [stored, blocks, offsets, ends_block], len(logits_indices)
    indices, target_blocks, device_offsets, device_ends_block = upload(arrays, kv.data.device)
    if results > len(num_results):
        inputs = ids.index_select(0, indices[:results])
        accepted, is_last = accepted_mask(sampled, inputs, device_offsets, query)
        keeps = is_last | (accepted & (device_ends_block > 0))
        checked = target_blocks[:results].masked_fill(~keeps, kv.dummy_block)
        target_blocks = torch.cat([checked, target_blocks[results:]])
    draft.store_states(states, indices, target_blocks)
