"""Which steps with prompt tokens are padded to a captured size."""

from __future__ import annotations

import torch

from common.kv_layout import KVLayout
from engine.attention.base import StepShape
from engine.kv_pool import KVPool
from engine.prompt_step import MOST_ROWS, SIZES, PromptStep


def step(most_tokens: int) -> PromptStep:
    kv = KVPool(KVLayout("m", "r", 1, 1, 16, 4, "float32"), 4, torch.device("cpu"))
    return PromptStep(None, kv.layers(), None, most_tokens=most_tokens, max_blocks=9)  # type: ignore[arg-type]


def shape(*rows: tuple[int, int]) -> StepShape:
    return StepShape([start for start, _ in rows], [new for _, new in rows], [[0]] * len(rows))


def test_sizes_end_where_steps_do() -> None:
    assert step(5000).shapes == tuple(reversed(SIZES))
    assert step(100).shapes == (100, 96, 64, 32)
    assert step(12).shapes == (12,)


def test_long_wide_and_far_steps_keep_their_own_size() -> None:
    some = step(4096)
    assert some.fits(shape((0, 1024)), 1)
    assert not some.fits(shape((0, 1025)), 1)
    assert some.fits(shape(*[(0, 5)] * MOST_ROWS), MOST_ROWS)
    assert not some.fits(shape(*[(0, 5)] * (MOST_ROWS + 1)), 1)
    assert not some.fits(shape((0, 40)), MOST_ROWS + 1)
    assert some.fits(shape((1024, 1024)), 1)
    assert not some.fits(shape((1025, 1024)), 1)
    assert some.fits(shape((100_000, 1), (0, 30)), 2)
