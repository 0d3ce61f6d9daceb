"""A Batch becomes tensors, tensors become tokens.

`launch` queues the whole step on the device and returns without waiting for it; `collect` waits and brings the results
to the host. Between the two the sampled tokens exist on the device only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from common.types import Token, TokenLogprob
from engine.attention.base import AttentionBackend, StepShape
from engine.kv_pool import KVPool
from engine.models.decoder import Decoder
from engine.sampler import Sampled, SampleRow, sample
from engine.scheduler import Item


@dataclass(frozen=True, slots=True)
class Launched:
    """A step on the device. finite: bool per item; sampled: for the items that sample, in their order."""

    items: Sequence[Item]
    finite: Tensor
    sampled: Sampled | None


@dataclass(frozen=True, slots=True)
class ItemResult:
    """finite: the model's output was a number. token: the sampled token, where one was asked for and is meaningful."""

    finite: bool
    token: Token | None


class Runner:
    """Owns the model; writes KV only to the blocks of the items' leases."""

    def __init__(self, model: Decoder, kv: KVPool, backend: AttentionBackend[Any]) -> None:
        self._model = model
        self._kv = kv
        self._cache = kv.layers()
        self._backend = backend
        self._device = kv.data.device

    @torch.inference_mode()
    def launch(self, items: Sequence[Item]) -> Launched:
        """Queues forward pass and sampling of all items; every item's lease covers its tokens."""
        shape = StepShape(
            starts=[item.start for item in items],
            num_new=[item.num_new for item in items],
            blocks=[_blocks(item) for item in items],
        )
        self._kv.zero(_begun_blocks(items, self._kv.layout.block_size))
        metadata = self._backend.prepare(shape)
        tokens: list[int] = []
        for item in items:
            tokens += item.seq.tokens[item.start : item.start + item.num_new]
        num_new = np.asarray(shape.num_new)
        ends = np.cumsum(num_new)
        positions = np.arange(int(ends[-1])) + np.repeat(np.asarray(shape.starts) - (ends - num_new), num_new)
        hidden = self._model.hidden(
            torch.tensor(tokens, device=self._device),
            torch.from_numpy(positions).to(self._device),
            self._cache,
            self._backend,
            metadata,
        )
        last = hidden[torch.from_numpy(ends - 1).to(self._device)]
        finite = torch.isfinite(last.float().sum(dim=-1))
        sampling = [row for row, item in enumerate(items) if item.sample]
        if not sampling:
            return Launched(items, finite, None)
        logits = self._model.logits(last if len(sampling) == len(items) else last[sampling])
        rows = [SampleRow(seq.request.sampling, seq.tokens, seq.prompt_len) for seq, *_ in (items[r] for r in sampling)]
        return Launched(items, finite, sample(logits, rows))

    def collect(self, launched: Launched) -> list[ItemResult]:
        """One result per item, in order; waits for the device."""
        finite = launched.finite.tolist()
        tokens = iter(()) if launched.sampled is None else _tokens(launched.items, launched.sampled)
        results: list[ItemResult] = []
        for item, ok in zip(launched.items, finite, strict=True):
            if item.sample:
                token, sane = next(tokens)
                results.append(ItemResult(ok and sane, token if ok and sane else None))
            else:
                results.append(ItemResult(ok, None))
        return results


def _blocks(item: Item) -> list[int]:
    lease = item.seq.lease
    assert lease is not None
    return lease.blocks


def _begun_blocks(items: Sequence[Item], block_size: int) -> list[int]:
    """Blocks that this step starts to fill and leaves partly unwritten."""
    begun: list[int] = []
    for item in items:
        end = item.start + item.num_new
        if end % block_size and end - end % block_size >= item.start:
            begun.append(_blocks(item)[end // block_size])
    return begun


def _tokens(items: Sequence[Item], sampled: Sampled) -> Any:
    """Pairs (Token, its logits were finite) of the sampled items."""
    seqs = [item.seq for item in items if item.sample]
    ids, finite = sampled.tokens.tolist(), sampled.finite.tolist()
    if sampled.logprobs is None:
        for seq, token, ok in zip(seqs, ids, finite, strict=True):
            yield Token(seq.num_output, token), ok
        return
    chosen = sampled.logprobs.tolist()
    none: list[list[Any]] = [[]] * len(seqs)
    values = none if sampled.top_logprobs is None else sampled.top_logprobs.tolist()
    indices = none if sampled.top_ids is None else sampled.top_ids.tolist()
    for r, (seq, token, ok) in enumerate(zip(seqs, ids, finite, strict=True)):
        count = seq.request.sampling.logprobs
        if count is None:
            yield Token(seq.num_output, token), ok
        else:
            top = zip(indices[r][:count], values[r][:count], strict=True)
            yield Token(seq.num_output, token, chosen[r], tuple(TokenLogprob(i, v) for i, v in top)), ok
