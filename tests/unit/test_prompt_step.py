"""Which steps with prompt tokens run in static buffers, and what these hold. The graphs are the torch path here."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from common.kv_layout import KVLayout
from engine.attention.base import StepShape
from engine.attention.triton_backend import DecodeRows
from engine.kv.kv_pool import KVPool
from engine.models.base import ForwardContext
from engine.schedule.sequence import BlockTables
from engine.step.prompt_step import FEW_ROWS, MAX_NEW_ENTRIES, TOKEN_BUCKETS, PromptBucket, PromptStep
from engine.step.step_tensors import SlotTables, StepPlan, token_positions

BLOCK, SLOTS, WIDTH, VOCAB = 4, 20, 3000, 50


class Backend:
    """Keeps the metadata of the last step."""

    def list_tiles(self, starts: np.ndarray, num_new: np.ndarray, first_row: int, max_tokens: int) -> np.ndarray:
        return np.array([len(starts), *(number for row in range(len(starts)) for number in (first_row + row, 0))])

    def tile_list_size(self, max_tokens: int, max_rows: int) -> int:
        return 1 + 2 * max_rows

    def listed_metadata(self, *metadata: Any) -> Any:
        self.seen = metadata
        return metadata


class Model:
    """Hidden states are tokens and positions. The logits name the token itself, and are NaN for token 49."""

    def forward(self, tokens: Tensor, positions: Tensor, context: ForwardContext, rows: Tensor) -> Tensor:
        return torch.stack([tokens, positions], dim=1).float()[rows]

    def logits(self, hidden: Tensor, adapters: None) -> Tensor:
        logits = torch.nn.functional.one_hot(hidden[:, 0].long(), VOCAB).float()
        return torch.where(hidden[:, :1] == 49, float("nan"), logits)


class Sampler:
    """Takes the likeliest token; keeps slots and positions."""

    pad_slot = SLOTS

    def sample(self, logits: Tensor, slots: Tensor, positions: Tensor, *, results: Tensor) -> tuple[Tensor, Tensor]:
        self.seen = slots.tolist(), positions.tolist()
        tokens, finite = logits.argmax(-1), logits.isfinite().all(-1)
        results.copy_(torch.where(finite, tokens, -1))
        return tokens, finite


class Rig:
    def __init__(self, most_tokens: int = 4096, max_drafts: int = 0) -> None:
        kv = KVPool(KVLayout("m", "r", 1, 1, 16, BLOCK, "float32"), 4, torch.device("cpu"))
        self.backend, self.sampler, self.tables = Backend(), Sampler(), BlockTables(SLOTS, WIDTH)
        self.tables.blocks[:] = np.arange(SLOTS * WIDTH).reshape(SLOTS, WIDTH) + 7
        self.slot_tables = SlotTables(self.tables, torch.device("cpu"))
        self.last_tokens = torch.arange(SLOTS + 1) + 20
        parts: Any = Model(), kv, self.backend, self.sampler, self.slot_tables, self.last_tokens
        options = {"max_rows": SLOTS, "max_step_tokens": most_tokens, "max_seq_drafts": 3, "max_drafts": max_drafts}
        self.step = PromptStep(*parts, **options)

    def bucket(self, *rows: tuple[int, int], decodes: int = 0, more_hidden: int = 0) -> PromptBucket | None:
        scheduled, plan = planned(rows, decodes=decodes, more_hidden=more_hidden)
        return self.step.bucket(scheduled, plan)


def planned(
    rows: Sequence[tuple[int, int]], *, decodes: int = 0, more_hidden: int = 0, samples: Sequence[bool] | None = None
) -> tuple[Any, StepPlan]:
    """Returns a step: row i, in slot i + 2, has the tokens 10 * i, ... A decoding row's token is only on the device."""
    shape = StepShape([start for start, _ in rows], [new for _, new in rows], [[]] * len(rows))
    tokens = [[-3 - i] if i < decodes else [10 * i + j % 9 for j in range(new)] for i, (_, new) in enumerate(rows)]
    last = np.cumsum(shape.num_new) - 1
    scheduled = [
        SimpleNamespace(start=start, num_new=new, is_decode=i < decodes) for i, (start, new) in enumerate(rows)
    ]
    plan = StepPlan(
        shape=shape,
        slots=np.arange(len(rows)) + 2,
        tokens=np.array([token for row in tokens for token in row]),
        positions=token_positions(shape),
        num_results=np.ones(len(rows), dtype=np.int64),
        logits_indices=last,
        samples=np.array([True] * len(rows) if samples is None else samples),
        hidden_indices=np.concatenate([last, np.zeros(more_hidden, dtype=np.int64)]),
        prefill_rows=list(range(decodes, len(rows))),
        logprob_ranges=[],
        pooled_ranges=[],
    )
    return scheduled, plan


def test_token_buckets_end_at_the_largest_step() -> None:
    sizes = [bucket.tokens for bucket in Rig(5000).step.shapes]
    assert sizes == [size for size in reversed(TOKEN_BUCKETS) for _ in range(2)]
    assert [bucket.tokens for bucket in Rig(100).step.shapes][::2] == [100, 96, 64, 32]
    assert Rig(12).step.shapes == (PromptBucket(12, True), PromptBucket(12, False))


def test_steps_of_up_to_1024_tokens_fit_with_any_rows() -> None:
    rig = Rig()
    assert rig.bucket((0, 1024)) == PromptBucket(1024, False)
    assert rig.bucket((0, 1025)) is None
    assert rig.bucket(*[(0, 5)] * FEW_ROWS) == PromptBucket(64, False)
    assert rig.bucket(*[(0, 5)] * (FEW_ROWS + 1)) == PromptBucket(64, True)
    assert rig.bucket(*[(0, 5)] * SLOTS) == PromptBucket(128, True)
    assert rig.bucket(*[(0, 5)] * (SLOTS + 1)) is None
    assert rig.bucket((700, 1), (0, 31), decodes=1) == PromptBucket(32, True)
    assert rig.bucket((11_000, 1), (0, 31), decodes=1) == PromptBucket(32, True)  # only chunks count as scores
    assert rig.bucket((3072, 1024)) == PromptBucket(1024, False)
    assert rig.bucket((3073, 1024)) is None  # the dense kernels are faster
    assert rig.bucket((0, 40), more_hidden=FEW_ROWS) == PromptBucket(64, True)
    assert rig.bucket((0, 40), more_hidden=SLOTS) is None
    assert Rig(max_drafts=6).bucket((0, 40), more_hidden=SLOTS) == PromptBucket(64, True)


def test_decoding_rows_must_come_first() -> None:
    rig = Rig()
    scheduled, plan = planned([(4, 1), (0, 9)], decodes=1)
    assert rig.step.bucket(scheduled[::-1], plan) is None


def test_results_and_tokens_that_only_the_device_knows() -> None:
    rig = Rig()
    samples = [True, True, False, True]
    scheduled, plan = planned([(6, 1), (9, 1), (8, 5), (0, 2)], decodes=2, samples=samples)
    bucket = rig.step.bucket(scheduled, plan)
    assert bucket == PromptBucket(32, True)
    rig.step.stage(plan, bucket)
    hidden, states = rig.step.run(bucket)
    assert states is None
    assert hidden[:4].tolist() == [[22, 6], [23, 9], [24, 12], [31, 1]]
    results, logits = rig.step.sample(plan)
    assert results.tolist() == [22, 23, 24, 31]
    assert logits.argmax(-1).tolist() == [22, 23, 24, 31]
    assert rig.sampler.seen == ([2, 3, SLOTS, 5], [7, 10, 13, 2])  # the inner chunk does not sample
    assert rig.last_tokens[2:6].tolist() == [22, 23, 24, 31]


def test_logits_that_are_not_finite_have_no_token() -> None:
    rig = Rig()
    scheduled, plan = planned([(0, 9), (0, 2), (0, 2), (0, 2), (0, 9)])
    plan.tokens[-1] = 49
    bucket = rig.step.bucket(scheduled, plan)
    assert bucket is not None
    rig.step.stage(plan, bucket)
    rig.step.run(bucket)
    assert rig.step.sample(plan)[0].tolist() == [8, 11, 21, 31, -1]


def test_metadata_of_decoding_rows_chunks_and_padding() -> None:
    rig = Rig()
    scheduled, plan = planned([(6, 1), (9, 1), (8, 5), (0, 2)], decodes=2)
    bucket = rig.step.bucket(scheduled, plan)
    assert bucket is not None
    rig.step.stage(plan, bucket)
    rig.step.run(bucket)
    slot_mapping, cu_q, seq_lens, tables, tiles, decode = rig.backend.seen
    first = [(slot * WIDTH + 7) * BLOCK for slot in (2, 3, 4, 5)]
    expected = [first[0] + 6, first[1] + 9, *range(first[2] + 8, first[2] + 13), first[3], first[3] + 1]
    assert slot_mapping.tolist() == expected + [-1] * 23
    assert cu_q.tolist() == [0, 1, 2, 7, *[9] * (SLOTS - 3)]
    assert seq_lens.tolist() == [7, 10, 13, 2, *[0] * (SLOTS - 4)]
    assert tiles[:5].tolist() == [2, 2, 0, 3, 0]
    assert isinstance(decode, DecodeRows)
    assert decode.max_new == 4
    assert decode.cu_q.tolist() == [0, 1, *[2] * (SLOTS - 1)]
    assert decode.seq_lens.tolist() == [7, 10, *[0] * (SLOTS - 2)]
    for row, blocks in enumerate((2, 3, 4, 1)):
        assert tables[row, :blocks].tolist() == list(range((row + 2) * WIDTH + 7, (row + 2) * WIDTH + 7 + blocks))


@pytest.mark.parametrize("tokens", [30, BLOCK * MAX_NEW_ENTRIES + 30])
def test_block_tables_reach_the_device_once(tokens: int) -> None:
    """A long prefix is copied before the step. After that only the blocks of new tokens travel."""
    rig = Rig()
    for start, new in ((tokens - 20, 20), (tokens, 3), (tokens + 3, 9)):
        _, plan = planned([(start, new)])
        rig.step.stage(plan, PromptBucket(32, False))
        rig.step.run(PromptBucket(32, False))
        blocks = -(-(start + new) // BLOCK)
        assert rig.backend.seen[3][0, :blocks].tolist() == rig.tables.blocks[2, :blocks].tolist()
        assert rig.tables.num_on_device[2] == blocks
        rig.tables.blocks[2, : start // BLOCK] = 0  # the device has these entries
        rig.slot_tables.device_tables[2, : start // BLOCK] = 0
    padding = rig.slot_tables.device_tables[SLOTS]
    assert not padding.any()


def test_a_small_step_after_a_large_one_has_its_own_rows() -> None:
    rig = Rig()
    for rows in ([(0, 500), (0, 400)], [(0, 20)], [(5, 1), (0, 300)]):
        scheduled, plan = planned(rows, decodes=len(rows) - 1 if rows[0][1] == 1 else 0)
        bucket = rig.step.bucket(scheduled, plan)
        assert bucket is not None
        rig.step.stage(plan, bucket)
        hidden, _ = rig.step.run(bucket)
        assert hidden[: len(rows), 1].tolist() == [start + new - 1 for start, new in rows]
