"""Sampling on the device, also inside CUDA graphs, with the semantics of engine/sampling/sampler.py.

A running request has a slot from `stage` to `clear_slot`. `flush` uploads its sampling state once, for the runs after
it; a step uploads nothing. Each row of a step names its slot and the position of its token. The kernels count sampled
tokens for penalties. Slot `pad_slot` is greedy and has no state; padding rows of graphs use it.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from common.errors import InvalidRequest
from common.types import SamplingParams
from engine.device import pinned_copy
from engine.kernels import sampling
from engine.kernels.sampling import MAX_ENTRIES, NUM_FLOATS, SLOT_WORDS, SamplingKernels, SamplingTensors
from engine.sampling.sampler import Sampled, SampleRow, has_penalties

_MAX_BIAS = 3e38  # Biases of clients stay finite: -inf marks a stop token that is banned before min_tokens


class DeviceSampler:
    """Samples on one device and stream, in slots 0 ... max_rows - 1, at most max_rows + max_drafts tokens in a run."""

    def __init__(self, max_rows: int, vocab: int, device: torch.device, *, max_drafts: int = 0) -> None:
        slots = max_rows + 1
        self.pad_slot, self._device = max_rows, device
        self._words = np.zeros((slots, SLOT_WORDS), dtype=np.int64)
        self._floats = self._words.view(np.float32)[:, :NUM_FLOATS]
        self._ints = self._words[:, NUM_FLOATS // 2 :]
        self._changed = False
        self._entries: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        self._history: dict[int, np.ndarray] = {}
        self._tensors = SamplingTensors(
            words=torch.zeros(slots, SLOT_WORDS, dtype=torch.int64, device=device),
            entries=torch.zeros(slots, 2, MAX_ENTRIES, dtype=torch.int32, device=device),
            counts=torch.zeros(slots, vocab, dtype=torch.int32, device=device),
        )
        self._kernels = SamplingKernels(max_rows + max_drafts, vocab, device)

    @staticmethod
    def validate(params: SamplingParams) -> None:
        """Raises InvalidRequest if a request names more tokens than a slot holds."""
        if len(params.logit_bias) + len(params.stop_token_ids) > MAX_ENTRIES:
            text = f"logit_bias and stop_token_ids may have {MAX_ENTRIES} entries together"
            raise InvalidRequest(text, field="logit_bias")

    def stage(self, slot: int, row: SampleRow) -> None:
        """Gives the slot to a request with its tokens so far. Raises InvalidRequest like `validate`."""
        params = row.params
        self.validate(params)
        self.clear_slot(slot)
        self._floats[slot] = (
            params.temperature,
            params.top_p,
            params.min_p,
            params.repetition_penalty,
            params.presence_penalty,
            params.frequency_penalty,
        )
        ints = self._ints[slot]
        ints[sampling.TOP_K] = params.top_k
        ints[sampling.SEED] = np.uint64(params.seed % (1 << 64)).astype(np.int64)
        ints[sampling.CHILD] = row.child
        ints[sampling.BAN_UNTIL] = row.prompt_len + params.min_tokens
        banned = params.stop_token_ids if len(row.tokens) < row.prompt_len + params.min_tokens else ()
        biases = [(t, max(-_MAX_BIAS, min(_MAX_BIAS, b))) for t, b in params.logit_bias]
        entries = sorted(biases + [(t, -np.inf) for t in banned])
        ints[sampling.NUM_ENTRIES] = len(entries)
        if entries:
            tokens, values = zip(*entries, strict=True)
            self._entries[slot] = np.array(tokens, dtype=np.int32), np.array(values, dtype=np.float32)
        ints[sampling.PENALISED] = has_penalties(params)
        if has_penalties(params):
            history = np.array(row.tokens, dtype=np.int32)
            history[: row.prompt_len] = ~history[: row.prompt_len]
            self._history[slot] = history

    def clear_slot(self, slot: int) -> None:
        """Removes the state of the slot."""
        self._words[slot] = 0
        self._entries.pop(slot, None)
        self._history.pop(slot, None)
        self._changed = True

    @torch.inference_mode()
    def flush(self) -> None:
        """Uploads all changes since the last flush. Does nothing without a change. Never inside a graph."""
        if not self._changed:
            return
        self._tensors.words.copy_(pinned_copy(self._words, self._device), non_blocking=True)
        if self._entries:
            packed = np.zeros((len(self._entries), 2, max(len(t) for t, _ in self._entries.values())), dtype=np.int32)
            for line, (tokens, biases) in zip(packed, self._entries.values(), strict=True):
                line[0, : len(tokens)], line[1, : len(tokens)] = tokens, biases.view(np.int32)
            entry_slots = self._upload(np.fromiter(self._entries, dtype=np.int64))
            self._tensors.entries[:, :, : packed.shape[2]].index_copy_(0, entry_slots, self._upload(packed))
        if self._history:
            slots = np.fromiter(self._history, dtype=np.int64)
            self._tensors.counts.index_fill_(0, self._upload(slots), 0)
            tokens = np.concatenate(list(self._history.values()))
            slot_of = np.repeat(slots, [len(h) for h in self._history.values()]).astype(np.int32)
            sampling.count_tokens(self._tensors.counts, *self._upload(np.stack([slot_of, tokens])).unbind(0))
        self._entries.clear()
        self._history.clear()
        self._changed = False

    def sample(
        self,
        logits: Tensor,
        slots: Tensor,
        positions: Tensor,
        allowed: Tensor | None = None,
        drafts: tuple[Tensor, Tensor] | None = None,
        results: Tensor | None = None,
    ) -> Sampled:
        """Samples one token per row; SamplingKernels.sample documents the arguments.

        Can be captured in a graph, and waits for nothing. A row that is not finite has no token and changes no state.
        `accept_drafts` must follow a call with drafts.
        """
        return Sampled(*self._kernels.sample(logits, slots, positions, self._tensors, allowed, drafts, results))

    def accept_drafts(
        self,
        sampled: Tensor,
        finite: Tensor,
        inputs: Tensor,
        cu_q: Tensor,
        row_slots: Tensor,
        last_tokens: Tensor,
        *,
        query: int,
    ) -> None:
        """See engine.kernels.sampling.accept_drafts."""
        sampling.accept_drafts(sampled, finite, inputs, cu_q, row_slots, self._tensors, last_tokens, query=query)

    def uncount_tokens(self, slots: Tensor, tokens: Tensor) -> None:
        """Removes tokens that `sample` counted; both are int64 [B], with token -1 where none was sampled."""
        penalised = self._tensors.words[slots, NUM_FLOATS // 2 + sampling.PENALISED] > 0
        gone = (penalised & (tokens >= 0)).to(torch.int32)
        self._tensors.counts.index_put_((slots, tokens.clamp(min=0)), -gone, accumulate=True)

    def _upload(self, array: np.ndarray) -> Tensor:
        return pinned_copy(array, self._device).to(self._device, non_blocking=True)
