"""Which steps with prompt tokens are padded to a captured size."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from common.kv_layout import KVLayout
from engine.attention.base import StepShape
from engine.kv_pool import KVPool
from engine.prompt_step import MOST_ROWS, SIZES, PromptStep


def hidden(tokens: Tensor, *_: Any, rows: Tensor) -> Tensor:
    """A model whose states are the tokens."""
    return tokens.float()[rows]


def step(most_tokens: int) -> PromptStep:
    kv = KVPool(KVLayout("m", "r", 1, 1, 16, 4, "float32"), 4, torch.device("cpu"))
    model, backend = SimpleNamespace(hidden=hidden), SimpleNamespace(paged_metadata=lambda *_, **__: None)
    return PromptStep(model, kv, backend, most_tokens=most_tokens, max_blocks=300)  # type: ignore[arg-type]


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


def test_a_small_step_after_a_large_one_has_no_rows_of_that() -> None:
    some = step(4096)
    for rows, wanted in (([(0, 500), (0, 400)], [499, 899]), ([(0, 20)], [19]), ([(0, 300)], [299])):
        count = sum(new for _, new in rows)
        tokens = torch.arange(count) + 7
        hidden_of, states = some.run(
            StepShape([start for start, _ in rows], [new for _, new in rows], [[0] * 200] * len(rows)),
            tokens, torch.arange(count), torch.tensor(wanted), list(range(len(rows))),
        )  # fmt: skip
        assert hidden_of.tolist() == [at + 7 for at in wanted]
        assert states is None
