"""Layers of a draft model, whose keys and values lie in further segments of the target's own blocks.

Steps of the target compute them too, for the same tokens (`follow`). So at the end of a step all segments of a block
are equally complete: whatever moves, caches, copies, preempts or recomputes a block does so for the draft as well, and
a rejected draft is as much as never written. Between two steps a few more tokens are drawn one after the other (`step`,
see draft_loop.py), in slots past the sequence's end.

A whole model is no small part of a step, so it *lags*: only prompts are followed. It computes its drafts, and the last
of them too, before they are verified; what a sequence decoded without drafts is made up for (`fill`) when it drafts
again, and every LAG tokens, for a block is published only when it is complete (`Sequence.lagging`).

A head that goes on from the target's states (EAGLE) needs the one before the first token of a step. It lies in the
block of the token that made it: segment "draft_state" has the state of a block's last token that counts (`note`). A
full block thus has that of its last slot, wherever it went, and a sequence that goes on, the one it goes on from.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from engine.attention.base import AttentionBackend, StepShape
from engine.attention.torch_backend import TorchAttention
from engine.attention.triton_backend import TritonAttention
from engine.device import upload
from engine.kv.kv_pool import KVPool
from engine.kv.layer_kv import LayerKV
from engine.models.base import Model, ModelShape
from engine.models.decoder import Decoder
from engine.models.eagle import UNKNOWN_LOGIT, EagleHead
from engine.speculation.acceptance import accepted_mask

AttentionClass = type[TritonAttention] | type[TorchAttention]


class TargetModel(NamedTuple):
    """The model that is followed, its layers of the pool and its attention."""

    model: Model
    cache: Sequence[LayerKV]
    backend: AttentionBackend[Any]


@dataclass(frozen=True, slots=True)
class StateLinks:
    """How the rows of a step continue what was before. firsts: int64 [R], each row's first token of the step; before:
    int64 [R], block of the token before it, any one where there is none.
    """

    firsts: Tensor
    blocks_before: Tensor


class DraftModel(Protocol):
    """name: in metrics. capturable: see Model. backend: attention over its own layers. lags: those are computed by
    `fill`, of prompts in their steps and of a sequence that decodes once it drafts again; else by `follow`, in every
    step, and `note` ends each.
    """

    name: str
    capturable: bool
    lags: bool
    backend: AttentionBackend[Any]

    def write_kv(self, tokens: Tensor, positions: Tensor, metadata: Any) -> None:
        """Keys and values of its layers for tokens that the target has computed. metadata: of backend."""

    def forward_with_target(
        self,
        target: TargetModel,
        tokens: Tensor,
        positions: Tensor,
        metadata: Any,
        *,
        rows: Tensor | None,
        links: StateLinks,
    ) -> tuple[Tensor, Tensor]:
        """What target.model.hidden returns, and the states of all tokens [T, hidden]; its layers' keys and values for
        the same tokens are written.
        """

    def store_states(self, states: Tensor, at: Tensor, blocks: Tensor) -> None:
        """States of the tokens at[C] (int64) of a step go to these blocks, int64 [C]."""

    def initial_states(self, blocks: Tensor) -> Tensor | None:
        """What `step` begins with, for rows whose last token with KV is in these blocks, int64 [R]."""

    def draft_step(self, tokens: Tensor, before: Tensor | None, positions: Tensor, metadata: Any) -> tuple[Tensor, Any]:
        """float32 [R, vocab] logits after one more token of each row, and what the next step begins with."""


class SeparateDraftModel:
    """A whole model that reads the same tokens. vocab: of the target; the draft's may be padded to another size.
    attention: of the kind that the model was made for.
    """

    name = "draft_model"
    lags = True

    def __init__(self, model: Model, shape: ModelShape, vocab: int, kv: KVPool, attention: AttentionClass) -> None:
        self.capturable = model.capturable
        self._model, self._vocab, self._own_vocab = model, vocab, shape.vocab_size
        self._cache = kv.layers("draft_")
        self.backend: AttentionBackend[Any] = attention(
            self._cache, shape.num_heads, shape.windows, kv.dummy_block, scale=shape.scale, softcap=shape.softcap
        )

    def write_kv(self, tokens: Tensor, positions: Tensor, metadata: Any) -> None:
        self._model.write_kv(self._known(tokens), positions, self._cache, self.backend, metadata)

    def forward_with_target(
        self,
        target: TargetModel,
        tokens: Tensor,
        positions: Tensor,
        metadata: Any,
        *,
        rows: Tensor | None,
        links: StateLinks,
    ) -> tuple[Tensor, Tensor]:
        raise AssertionError("it lags")

    def store_states(self, states: Tensor, at: Tensor, blocks: Tensor) -> None:
        raise AssertionError("it has no states")

    def initial_states(self, blocks: Tensor) -> None:
        return None

    def draft_step(self, tokens: Tensor, before: Tensor | None, positions: Tensor, metadata: Any) -> tuple[Tensor, Any]:
        hidden = self._model.forward(self._known(tokens), positions, self._cache, self.backend, metadata)
        logits = self._model.logits(hidden)
        if self._own_vocab < self._vocab:
            logits = F.pad(logits, (0, self._vocab - self._own_vocab), value=UNKNOWN_LOGIT)
        return logits[:, : self._vocab], None

    def _known(self, tokens: Tensor) -> Tensor:
        return tokens if self._own_vocab >= self._vocab else tokens.clamp(max=self._own_vocab - 1)


class EagleDraftModel:
    """An EAGLE head of a target that is a Decoder."""

    name = "eagle"
    lags = False

    def __init__(self, head: EagleHead, target: Decoder, kv: KVPool, attention: AttentionClass) -> None:
        self.capturable = head.capturable
        layer = head.spec.layer
        self._head, self._aux_layers = head, head.spec.aux_layers_of(target.spec.num_layers)
        self._target_layers, self._width = target.spec.num_layers, head.spec.target_hidden
        (self._cache,) = kv.layers("draft_")
        self._state = kv.segment_view("draft_state")
        self._dtype = target.embedding.weight.dtype
        self.backend: AttentionBackend[Any] = attention(
            (self._cache,), layer.num_heads, layer.windows, kv.dummy_block, first_position=1
        )

    def write_kv(self, tokens: Tensor, positions: Tensor, metadata: Any) -> None:
        raise AssertionError("it follows")

    def forward_with_target(
        self,
        target: TargetModel,
        tokens: Tensor,
        positions: Tensor,
        metadata: Any,
        *,
        rows: Tensor | None,
        links: StateLinks,
    ) -> tuple[Tensor, Tensor]:
        hidden, states = self._forward_target(target, tokens, positions, metadata, rows)
        before = torch.cat([states[:1], states[:-1]])
        before.index_copy_(0, links.firsts, self.initial_states(links.blocks_before))
        self._head.write_kv(tokens, before, positions, self._cache, target.backend, metadata)
        return hidden, states

    def _forward_target(
        self, target: TargetModel, tokens: Tensor, positions: Tensor, metadata: Any, rows: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """The target's hidden states of `rows`, and the states of pairs of all tokens."""
        model = target.model
        assert isinstance(model, Decoder)
        if not self._aux_layers:
            hidden = model.forward(tokens, positions, target.cache, target.backend, metadata)
            return hidden if rows is None else hidden[rows], model.final_norm(hidden)
        width = self._width
        joined = torch.empty(len(tokens), len(self._aux_layers) * width, dtype=self._dtype, device=tokens.device)

        def tap(index: int, x: Tensor) -> None:
            for place, layer in enumerate(self._aux_layers):
                if layer == index:
                    joined[:, place * width : (place + 1) * width] = x

        late = self._target_layers in self._aux_layers  # then the last layer is wanted of all tokens
        hidden = model.forward(
            tokens, positions, target.cache, target.backend, metadata, None if late else rows, layer_hook=tap
        )
        return hidden[rows] if late and rows is not None else hidden, self._head.fuse(joined)

    def store_states(self, states: Tensor, at: Tensor, blocks: Tensor) -> None:
        self._state.index_copy_(0, blocks, states.index_select(0, at).to(self._state.dtype))

    def initial_states(self, blocks: Tensor) -> Tensor:
        return self._state.index_select(0, blocks).to(self._dtype)

    def draft_step(self, tokens: Tensor, before: Tensor | None, positions: Tensor, metadata: Any) -> tuple[Tensor, Any]:
        assert before is not None
        states = self._head.draft_step(tokens, before, positions, self._cache, self.backend, metadata)
        return self._head.logits(states), states


# A drafter over a pool, for an engine's pools: the trial one that memory is measured with, and its own.
BuildDraftModel = Callable[[KVPool, AttentionClass], DraftModel]


def state_links_of(shape: StepShape, kv: KVPool) -> StateLinks:
    """Of a step's rows; a sequence that begins has the dummy block behind it."""
    size, ends = kv.layout.block_size, np.cumsum(shape.num_new)
    before = [
        int(blocks[(start - 1) // size]) if start else kv.dummy_block
        for start, blocks in zip(shape.starts, shape.blocks, strict=True)
    ]
    return StateLinks(*upload([ends - np.array(shape.num_new), np.array(before)], kv.data.device))


def store_step_states(
    draft: DraftModel,
    states: Tensor,
    shape: StepShape,
    sampled: Tensor,
    ids: Tensor,
    last_of: np.ndarray,
    counts: np.ndarray,
    *,
    kv: KVPool,
    query: int,
) -> None:
    """Leaves the states of tokens that count in their blocks: of a row's last one, and of every full block's.

    states: [T, hidden] of the step's tokens; ids: int64 [T], these. last_of: int64 [rows], those after which something
    is sampled, and the last one of a row that samples nothing; sampled: int64 [rows], what follows each; counts: such
    tokens of each row of the step, at most `query`.
    """
    size, ends = kv.layout.block_size, np.cumsum(shape.num_new)
    positions = np.arange(int(ends[-1])) + np.repeat(np.array(shape.starts) - (ends - shape.num_new), shape.num_new)
    full = (positions + 1) % size == 0
    ended = full[last_of].astype(np.int64)
    full[last_of] = False
    written = np.concatenate([last_of, np.flatnonzero(full)])
    rows = np.searchsorted(ends, written, side="right")
    places = zip(rows.tolist(), (positions[written] // size).tolist(), strict=True)
    blocks = np.array([int(shape.blocks[row][place]) for row, place in places])
    offsets = np.arange(len(last_of)) - np.repeat(np.cumsum(counts) - counts, counts)
    at, into, there, full_there = upload([written, blocks, offsets, ended], kv.data.device)
    if len(last_of) > len(counts):
        counted, final = accepted_mask(sampled, ids.index_select(0, at[: len(last_of)]), there, query)
        here = into[: len(last_of)].masked_fill(~(final | (counted & (full_there > 0))), kv.dummy_block)
        into = torch.cat([here, into[len(last_of) :]])
    draft.store_states(states, at, into)
