"""The division of a GPU's memory, warm-up steps, and errors when memory is short; no GPU is needed."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from common.errors import ConfigError
from common.kv_layout import KVLayout
from engine.config import EngineConfig
from engine.cuda_graphs import CudaGraphs
from engine.engine import Engine
from engine.step.warm_up import (
    EXTRA_BLOCKS,
    RESERVED_BYTES,
    MemoryUse,
    blocks_that_fit,
    cudnn_plan_steps,
    kernel_steps,
    largest_step,
    measure_memory,
)
from tests.rigs.engine.bare_model import bare_model

GIB = 1 << 30
LAYOUT = KVLayout("m", "r", 32, 8, 128, 16, "bfloat16")  # 2 MiB a block
H100 = MemoryUse(
    total=79 * GIB, other_processes=GIB, share=0.9, weights=15 * GIB, activations=GIB // 2, graphs=GIB // 4
)


def test_the_pool_gets_the_rest_of_the_share() -> None:
    blocks = blocks_that_fit(H100, LAYOUT)
    taken = (blocks + EXTRA_BLOCKS) * LAYOUT.block_bytes + H100.weights + H100.activations + H100.graphs
    assert 0 <= int(H100.total * 0.9) - taken < LAYOUT.block_bytes


def test_a_second_process_takes_only_the_memory_that_the_first_left() -> None:
    second = replace(H100, other_processes=50 * GIB)
    taken = (blocks_that_fit(second, LAYOUT) + EXTRA_BLOCKS) * LAYOUT.block_bytes + second.weights
    assert taken + second.activations + second.graphs <= 29 * GIB - RESERVED_BYTES
    each = replace(H100, share=0.45)
    assert blocks_that_fit(each, LAYOUT) == blocks_that_fit(replace(each, other_processes=36 * GIB), LAYOUT)


@pytest.mark.parametrize("change", [{"share": 0.1}, {"other_processes": 70 * GIB}, {"weights": 80 * GIB}])
def test_no_room_for_the_pool_is_an_error_that_lists_the_users_of_memory(change: dict[str, float]) -> None:
    with pytest.raises(ConfigError) as refused:
        blocks_that_fit(replace(H100, **change), LAYOUT)
    assert refused.value.field == "gpu_memory_utilization"
    for part in ("weights", "activations", "graphs", "other processes", "79.00 GiB"):
        assert part in refused.value.message


@given(budget=st.integers(1, 8192), seqs=st.integers(1, 512), length=st.integers(1, 1 << 17), drafts=st.integers(0, 7))
def test_warm_up_steps_are_within_the_limits(budget: int, seqs: int, length: int, drafts: int) -> None:
    largest = largest_step(budget, seqs, length, drafts, drafts * min(seqs, 128))
    assert len(largest) == min(seqs, budget)
    assert max(start + new for start, new in largest) == length
    for rows in (
        largest,
        *kernel_steps(budget, seqs, length, drafts),
        *cudnn_plan_steps(budget, max(1, budget // 2), seqs, length),
    ):
        assert len(rows) <= seqs
        assert sum(new for _, new in rows) <= budget
        assert all(start >= 0 and new >= 1 and start + new <= length for start, new in rows)


FULL = "CUDA out of memory. Tried to allocate 2.00 GiB."


@dataclass
class Card:
    """Replaces torch.cuda on a machine without a GPU."""

    #: A graph is being recorded.
    capturing: bool = False
    #: The driver has no memory for the graph at the end of a capture.
    refused: bool = False

    def patch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        card = self

        class Stream:
            def __init__(self, device: object = None) -> None: ...

            def wait_stream(self, other: object) -> None: ...

            def synchronize(self) -> None: ...

        class Graph:
            def capture_begin(self, **_how: object) -> None:
                card.capturing = True

            def capture_end(self) -> None:
                card.capturing = False
                if card.refused:
                    raise RuntimeError("CUDA error: out of memory\nCompile with TORCH_USE_CUDA_DSA")

        for name, fake in (
            ("graph_pool_handle", lambda: 0),
            ("Stream", Stream),
            ("current_stream", Stream),
            ("CUDAGraph", Graph),
            ("stream", contextlib.nullcontext),
            ("mem_get_info", lambda _device: (300 << 20, 80 * GIB)),
            ("synchronize", lambda _device: None),
            ("empty_cache", lambda: None),
            ("memory_allocated", lambda _device: 0),
            ("max_memory_allocated", lambda _device: 0),
            ("reset_peak_memory_stats", lambda _device: None),
            ("memory_reserved", lambda _device: 0),
        ):
            monkeypatch.setattr(torch.cuda, name, fake)


class Computation:
    """A computation by number of rows; with `failing` rows it raises `error` after `after` calls."""

    def __init__(self, error: Exception | None, *, failing: int = 8, after: int = 0) -> None:
        self._error, self._failing, self._left = error, failing, after
        self.graphs = CudaGraphs(
            "decode", torch.device("cpu"), self.compute, keep=lambda out: out, describe="{} rows".format
        )
        self.shapes = (32, 16, 8, 4)

    def compute(self, rows: int) -> int:
        if rows == self._failing and self._error is not None:
            if self._left == 0:
                raise self._error
            self._left -= 1
        return rows

    def capture(self, shapes: Sequence[int] | None = None) -> None:
        self.graphs.capture(shapes or self.shapes, lambda _rows: None)


@pytest.mark.parametrize("after", [0, 1], ids=["before it is recorded", "while it is recorded"])
@pytest.mark.parametrize("error", [torch.OutOfMemoryError(f"{FULL}\nMore"), RuntimeError(f"Triton Error: {FULL}")])
def test_out_of_memory_in_a_capture_names_the_graph(
    error: Exception, after: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    card = Card()
    card.patch(monkeypatch)
    with pytest.raises(torch.OutOfMemoryError) as raised:
        Computation(error, after=after).capture()
    assert str(raised.value) == (
        f"the decode graph of 8 rows (3 of 4) found 0.29 GiB of 80.00 GiB free: {str(error).splitlines()[0]}"
    )
    assert not card.capturing


def test_out_of_memory_in_the_driver_names_the_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    Card(refused=True).patch(monkeypatch)
    with pytest.raises(torch.OutOfMemoryError, match=r"graph of 32 rows \(1 of 4\) .*: CUDA error: out of memory$"):
        Computation(None).capture()


def test_other_errors_of_a_capture_are_not_taken_for_out_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    card = Card()
    card.patch(monkeypatch)
    with pytest.raises(RuntimeError, match="no kernel") as raised:
        Computation(RuntimeError("no kernel"), after=1).capture()
    assert not isinstance(raised.value, torch.OutOfMemoryError)
    assert not card.capturing


def test_graphs_that_do_not_fit_beside_the_weights_name_max_seqs(monkeypatch: pytest.MonkeyPatch) -> None:
    Card().patch(monkeypatch)

    class Runner:
        captured_steps = (Computation(torch.OutOfMemoryError(FULL), failing=16),)

        def warm_up(self, rows: object, block: int) -> None: ...

    class Pool:
        blocks = torch.zeros(1)

    build: Any = lambda _pool: Runner()  # noqa: E731
    one: Any = Pool
    remedy = EngineConfig(model_dir=Path(), speculation="ngram").cuda_graph_advice()
    with pytest.raises(ConfigError) as refused:
        measure_memory(build, one, torch.device("cpu"), share=0.9, graphs=remedy, step=[(0, 1)])
    assert refused.value.field == "max_seqs"
    assert refused.value.message == (
        "no room for CUDA graphs: the decode graph of 16 rows (1 of 1) found 0.29 GiB of 80.00 GiB free: "
        f"{FULL[:-1]}; lower max_seqs or speculation_tokens, or do without cuda_graphs"
    )


@pytest.mark.parametrize(
    ("config", "option"),
    [({"num_blocks": 16}, "num_blocks"), ({"kv_memory": 1 << 20}, "kv_memory"), ({}, "gpu_memory_utilization")],
)
def test_out_of_memory_beside_the_pool_names_the_option_of_its_size(
    config: dict[str, int], option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(
        EngineConfig(model_dir=bare_model(tmp_path), device="cpu", threads=1, load_format="dummy", **config)
    )

    def full(*_args: object) -> None:
        raise torch.OutOfMemoryError(FULL)

    Card().patch(monkeypatch)
    monkeypatch.setattr(engine.runner, "capture", full)
    with pytest.raises(ConfigError) as refused:
        engine._compile_kernels()
    assert refused.value.field == option
    assert refused.value.message.endswith(f"{FULL[:-1]}; lower {option} or max_seqs, or do without cuda_graphs")
    monkeypatch.setattr(engine.runner, "warm_up", full)
    with pytest.raises(ConfigError, match=f"no room for the first steps: .*; lower {option}$") as refused:
        engine._compile_kernels()
    assert refused.value.field == option
