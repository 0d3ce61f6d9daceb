"""Which steps with prompt tokens run as a captured graph."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from common.kv_layout import KVLayout
from engine.attention.base import StepShape
from engine.kv.kv_pool import KVPool
from engine.step.prompt_step import MAX_ROWS, TOKEN_BUCKETS, PromptBucket, PromptStep
from engine.step.warm_up import chunk_graph_shapes


def forward(tokens: Tensor, *_: Any, rows: Tensor) -> Tensor:
    """Hidden states that equal the tokens."""
    return tokens.float()[rows]


def step(most_tokens: int, chunks: Sequence[tuple[int, int]] = ()) -> PromptStep:
    kv = KVPool(KVLayout("m", "r", 1, 1, 16, 4, "float32"), 4, torch.device("cpu"))
    backend = SimpleNamespace(
        paged_metadata=lambda *_, **__: None,
        chunk_metadata=lambda *_, **__: None,
        has_cudnn_plan=lambda start, new: start % 1024 == 0 == new % 1024,
    )
    model = SimpleNamespace(forward=forward)
    return PromptStep(model, kv, backend, max_step_tokens=most_tokens, max_blocks=2000, chunk_graphs=chunks)  # type: ignore[arg-type]


def shape(*rows: tuple[int, int]) -> StepShape:
    return StepShape([start for start, _ in rows], [new for _, new in rows], [[0]] * len(rows))


def test_token_buckets_end_at_the_largest_step() -> None:
    assert step(5000).shapes == tuple(PromptBucket(size) for size in reversed(TOKEN_BUCKETS))
    assert step(100).shapes == tuple(map(PromptBucket, (100, 96, 64, 32)))
    assert step(12).shapes == (PromptBucket(12),)


def test_only_captured_chunks_fit_above_the_padded_sizes() -> None:
    some = step(4096, [(0, 2048), (2048, 2048), (2048, 1024), (100, 2048)])
    assert some.shapes[:3] == (PromptBucket(2048, 2048), PromptBucket(2048, 0), PromptBucket(1024, 2048))
    assert some.shapes[3:] == step(4096).shapes  # the chunk (100, 2048) has no plan
    assert some.fits(shape((2048, 2048)), 1)
    assert some.fits(shape((2048, 1024)), 1)
    assert not some.fits(shape((2048, 2047)), 1)
    assert not some.fits(shape((1024, 2048)), 1)
    assert not some.fits(shape((0, 2048), (5, 1)), 1)  # beside a row that decodes
    assert not some.fits(shape((100, 2048)), 1)
    assert not some.fits(shape((0, 2048)), MAX_ROWS + 1)
    for start, new, wanted in ((2048, 2048, 2047), (0, 20, 19), (2048, 1024, 1023)):
        hidden_of, _ = some.run(
            StepShape([start], [new], [list(range(1024))]),
            torch.arange(new) + 7,
            torch.arange(new) + start,
            torch.tensor([wanted]),
            [0],
        )
        assert hidden_of.tolist() == [wanted + 7]


def test_chunk_graph_shapes() -> None:
    assert chunk_graph_shapes(0, 2048) == chunk_graph_shapes(1023, 2048) == []
    assert chunk_graph_shapes(4096, 2048) == [
        *((start, 1024) for start in (0, 1024, 2048, 3072)),
        *((start, 2048) for start in (0, 1024, 2048)),
    ]
    assert chunk_graph_shapes(2048, 1024) == [(0, 1024), (1024, 1024)]
    assert chunk_graph_shapes(8192, 1000) == []  # no chunk of that length has a plan


def test_steps_with_many_tokens_rows_or_keys_are_not_padded() -> None:
    some = step(4096)
    assert some.fits(shape((0, 1024)), 1)
    assert not some.fits(shape((0, 1025)), 1)
    assert some.fits(shape(*[(0, 5)] * MAX_ROWS), MAX_ROWS)
    assert not some.fits(shape(*[(0, 5)] * (MAX_ROWS + 1)), 1)
    assert not some.fits(shape((0, 40)), MAX_ROWS + 1)
    assert some.fits(shape((1024, 1024)), 1)
    assert not some.fits(shape((1025, 1024)), 1)
    assert some.fits(shape((100_000, 1), (0, 30)), 2)


def test_a_small_step_after_a_large_one_has_its_own_rows() -> None:
    some = step(4096)
    for rows, wanted in (([(0, 500), (0, 400)], [499, 899]), ([(0, 20)], [19]), ([(0, 300)], [299])):
        count = sum(new for _, new in rows)
        tokens = torch.arange(count) + 7
        hidden_of, states = some.run(
            StepShape([start for start, _ in rows], [new for _, new in rows], [[0] * 200] * len(rows)),
            tokens,
            torch.arange(count),
            torch.tensor(wanted),
            list(range(len(rows))),
        )
        assert hidden_of.tolist() == [at + 7 for at in wanted]
        assert states is None
