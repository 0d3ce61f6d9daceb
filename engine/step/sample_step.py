"""LM head and sampling in static buffers: from the hidden states of a step to its tokens in one launch of a CUDA graph.

`DecodeStep` has both in its own graphs. `PromptStep` uses this class, because its graphs are for a number of tokens and
these graphs are for a number of sampling rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from engine.adapters.slots import AdapterSlots
from engine.cuda_graphs import CudaGraphs, batch_buckets, unowned_view
from engine.models.base import Model

if TYPE_CHECKING:
    from engine.sampling.device_sampler import DeviceSampler


class SampleStep:
    """LM head and sampling of up to `len(slots)` rows. The sampled tokens go to `last_tokens` too."""

    def __init__(
        self,
        model: Model,
        sampler: DeviceSampler,
        last_tokens: Tensor,  # int64 [slots + 1], the token sampled last in each slot; shared with all other steps
        slots: Tensor,  # int32 [R], the slot of each row, a static buffer; the pad slot for a row that does not sample
        positions: Tensor,  # int32 [R], the position of each sampled token, a static buffer
        adapters: AdapterSlots | None = None,
    ) -> None:
        self._model, self._sampler, self._last_tokens = model, sampler, last_tokens
        self._slots, self._positions = slots, positions
        self._hidden: Tensor | None = None  # [R, hidden]; made by the first `keep`
        self._results = torch.zeros(len(slots), dtype=torch.int64, device=slots.device)
        self._adapters = None if adapters is None else adapters.buffer(len(slots))
        self._sizes = tuple(reversed(batch_buckets(len(slots))))
        kinds = (False,) if adapters is None else (True, False)
        #: Rows, and whether they may have adapters.
        self.shapes = tuple((rows, adapted) for rows in self._sizes for adapted in kinds)
        self._graphs = CudaGraphs("sampling", slots.device, self._compute, keep=_without_ownership, describe=_describe)

    def keep(self, hidden: Tensor) -> None:
        """Keeps hidden states, at most R, for `run`. A CUDA graph can capture this call, if another came before it."""
        if self._hidden is None:
            self._hidden = hidden.new_zeros(len(self._slots), hidden.shape[1])
        count = min(len(hidden), len(self._hidden))
        self._hidden[:count].copy_(hidden[:count])

    def run(self, rows: int, adapter_slots: np.ndarray | None = None) -> tuple[Tensor, Tensor]:
        """Samples from the first `rows` hidden states that `keep` has kept.

        adapter_slots: int64 [rows], None if no row has an adapter.

        Returns the tokens, int64 [rows], with -1 where logits were not finite, and the logits, float32 [rows, vocab].
        The next step overwrites both.
        """
        size = next(size for size in reversed(self._sizes) if size >= rows)
        if adapter_slots is not None:
            assert self._adapters is not None
            self._adapters.stage(adapter_slots, size)
        results, logits = self._graphs.run((size, adapter_slots is not None))
        return results[:rows], logits[:rows]

    def capture(self, shapes: Sequence[tuple[int, bool]] | None = None) -> None:
        """Captures the graphs of these shapes (None for all), the largest first. `keep` must have been called."""
        self._graphs.capture(shapes or self.shapes, self._stage_padding)

    def _stage_padding(self, shape: tuple[int, bool]) -> None:
        self._slots.fill_(self._sampler.pad_slot)
        if self._adapters is not None and shape[1]:
            self._adapters.stage(np.zeros(0, dtype=np.int64), shape[0])

    def _compute(self, shape: tuple[int, bool]) -> tuple[Tensor, Tensor]:
        rows, adapted = shape
        assert self._hidden is not None, "no hidden states are kept"
        adapters = self._adapters.rows(rows) if self._adapters is not None and adapted else None
        logits = self._model.logits(self._hidden[:rows], adapters)
        slots, results = self._slots[:rows], self._results[:rows]
        tokens, _ = self._sampler.sample(logits, slots, self._positions[:rows], results=results)
        self._last_tokens.index_copy_(0, slots.long(), tokens)
        return results, logits


def _describe(shape: tuple[int, bool]) -> str:
    return f"{shape[0]} rows{' with adapters' if shape[1] else ''}"


def _without_ownership(output: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Returns the output without ownership of the graph's memory; the results are in a buffer of SampleStep."""
    return output[0], unowned_view(output[1])
