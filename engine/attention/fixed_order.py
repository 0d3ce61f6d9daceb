"""Attention of --deterministic: the bits of a token do not depend on other tokens of the step.

`FixedOrderAttention` runs the kernels of `engine/kernels/fixed_order/attention.py` on a GPU. `RowWiseAttention` attends
in torch with one query token at a time.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from common.errors import ConfigError
from engine.attention.base import StepShape, layout_step
from engine.attention.torch_backend import TorchAttention, TorchMetadata
from engine.attention.triton_backend import RowSpan, TritonAttention
from engine.kv.kv_pool import LayerKV

HOPPER = 9  # Major compute capability of the cards on which the order of sums is proven.
MAX_HEAD_DIM = 128  # Of the kernels, see `engine.kernels.fixed_order.attention`.
VOCAB_MULTIPLE = 4  # torch's log-softmax sums in another order if a row of logits is not aligned to 16 bytes.


def check_deterministic(device: torch.device, dtype: str, *, head_dim: int, vocab_size: int) -> None:
    """Raises ConfigError if the deterministic mode is not proven for this model on this device."""
    if device.type != "cuda":
        return
    capability = torch.cuda.get_device_capability(device)
    for asked, problem in (
        (capability[0] != HOPPER, f"it is proven on Hopper GPUs only, this is {torch.cuda.get_device_name(device)}"),
        (dtype != "bfloat16", f"it is proven in bfloat16 only, dtype is {dtype}: use --dtype bfloat16"),
        (head_dim > MAX_HEAD_DIM, f"it needs a head dim of at most {MAX_HEAD_DIM}, this is {head_dim}"),
        (vocab_size % VOCAB_MULTIPLE, f"vocab_size {vocab_size} is not a multiple of {VOCAB_MULTIPLE}"),
    ):
        if asked:
            raise ConfigError(f"deterministic: {problem}", field="deterministic")


class FixedOrderAttention(TritonAttention):
    """`TritonAttention` with kernels that have one order of sums. No row takes the dense kernels or cuDNN."""

    def __init__(
        self, layers: Sequence[LayerKV], num_heads: int, windows: Iterable[int | None], pad_block: int, **score: Any
    ) -> None:
        super().__init__(layers, num_heads, windows, pad_block, **score)
        from engine.kernels.fixed_order import attention

        self._fixed = attention
        self._dense_ok = False
        self._prefill = cast(Any, attention)
        sms = torch.cuda.get_device_properties(self._device).multi_processor_count if self._device.type == "cuda" else 2
        self._num_programs = sms * attention.PROGRAMS_PER_SM

    def _plan(self, span: RowSpan, window: int | None) -> Any:
        sizes = {"num_programs": self._num_programs, "num_kv_heads": self._kv_heads}
        return self._fixed.plan_decode(span.cu_q, span.seq_lens, window=window or 0, **sizes)

    def _attend_decode(
        self, query: Tensor, cache: LayerKV, span: RowSpan, plan: Any, sinks: Tensor | None, out: Tensor
    ) -> None:
        assert sinks is None, "only mixtures of experts have sinks, and they are refused"
        rows = span.tables, span.cu_q, span.seq_lens, plan
        self._fixed.paged_decode(query, cache, *rows, max_query=span.max_new, first=self._first, out=out, **self._score)


class RowWiseAttention(TorchAttention):
    """`TorchAttention` that attends with each new token alone, over the blocks up to this token.

    It never uses the compiled kernel, whose order of sums is another: a token may be computed with others, too.
    """

    def prepare(self, step: StepShape) -> TorchMetadata:
        rows = [row for row, new in enumerate(step.num_new) for _ in range(new)]
        starts = [start + i for start, new in zip(step.starts, step.num_new, strict=True) for i in range(new)]
        single = layout_step(StepShape(starts, [1] * len(rows), [step.blocks[row] for row in rows]), *self._block_args)
        groups = tuple(self._group(np.array([i]), single, alone=False) for i in range(len(rows)))
        return replace(super().prepare(step), groups=groups, tokens=None)

    @property
    def _block_args(self) -> tuple[int, int]:
        """The block size, and the physical block that pads block tables."""
        return self._block_size, self._pad_block
