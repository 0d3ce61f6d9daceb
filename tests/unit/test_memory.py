"""How a GPU's memory is divided, and what runs before the first request; no GPU is needed for the arithmetic."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import ConfigError
from common.kv_layout import KVLayout
from engine.memory import EXTRA_BLOCKS, SLACK, MemoryUse, blocks_that_fit
from engine.warm_up import compiled_steps, largest_step, planned_steps

GIB = 1 << 30
LAYOUT = KVLayout("m", "r", 32, 8, 128, 16, "bfloat16")  # 2 MiB a block
H100 = MemoryUse(total=79 * GIB, others=GIB, share=0.9, weights=15 * GIB, activations=GIB // 2, graphs=GIB // 4)


def test_the_pool_gets_what_is_left_of_the_share() -> None:
    blocks = blocks_that_fit(H100, LAYOUT)
    taken = (blocks + EXTRA_BLOCKS) * LAYOUT.block_bytes + H100.weights + H100.activations + H100.graphs
    assert 0 <= int(H100.total * 0.9) - taken < LAYOUT.block_bytes


def test_a_second_process_takes_only_what_the_first_left() -> None:
    second = replace(H100, others=50 * GIB)
    taken = (blocks_that_fit(second, LAYOUT) + EXTRA_BLOCKS) * LAYOUT.block_bytes + second.weights
    assert taken + second.activations + second.graphs <= 29 * GIB - SLACK
    each = replace(H100, share=0.45)
    assert blocks_that_fit(each, LAYOUT) == blocks_that_fit(replace(each, others=36 * GIB), LAYOUT)


@pytest.mark.parametrize("change", [{"share": 0.1}, {"others": 70 * GIB}, {"weights": 80 * GIB}])
def test_no_room_is_an_error_that_says_who_has_it(change: dict[str, float]) -> None:
    with pytest.raises(ConfigError) as refused:
        blocks_that_fit(replace(H100, **change), LAYOUT)
    assert refused.value.field == "gpu_memory_utilization"
    for part in ("weights", "activations", "graphs", "other processes", "79.00 GiB"):
        assert part in refused.value.message


@given(budget=st.integers(1, 8192), seqs=st.integers(1, 512), length=st.integers(1, 1 << 17), drafts=st.integers(0, 7))
def test_rehearsed_steps_keep_to_the_limits(budget: int, seqs: int, length: int, drafts: int) -> None:
    largest = largest_step(budget, seqs, length, drafts, drafts * min(seqs, 128))
    assert len(largest) == min(seqs, budget)
    assert max(start + new for start, new in largest) == length
    for rows in (
        largest,
        *compiled_steps(budget, seqs, length, drafts),
        *planned_steps(budget, max(1, budget // 2), seqs, length),
    ):
        assert len(rows) <= seqs
        assert sum(new for _, new in rows) <= budget
        assert all(start >= 0 and new >= 1 and start + new <= length for start, new in rows)
