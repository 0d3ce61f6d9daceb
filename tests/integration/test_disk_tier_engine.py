"""The disk tier of a real engine on a CPU: a restarted engine has its blocks, and damage costs only computing."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from common.errors import ConfigError
from common.types import SamplingParams
from engine.kv.tiers.file_copier import take_slot
from engine.kv.tiers.file_tier import FileTier
from engine.llm import LLM
from tests.rigs.pods.harness import BLOCK, CHUNK, MAX_LEN, prompt_of

GREEDY = SamplingParams(temperature=0.0, max_tokens=8)
WAIT_S = 20.0
PROMPTS = [prompt_of(60, seed=number) for number in range(4)]
BLOCK_BYTES = 2 * 2 * 2 * BLOCK * 16 * 4


def make(model_dir: Path, disk: Path | None, *, num_blocks: int = 24, **config: Any) -> LLM:
    torch.set_num_threads(1)
    return LLM(
        model_dir,
        block_size=BLOCK,
        num_blocks=num_blocks,
        max_model_len=MAX_LEN,
        chunk_tokens=CHUNK,
        threads=1,
        host_cache=0 if disk is None else 128 * BLOCK_BYTES,
        disk_cache=None if disk is None else str(disk),
        disk_cache_size=1 << 24,
        **config,
    )


def tier_of(llm: LLM) -> FileTier:
    tier = llm.engine.pool.disk_tier
    assert tier is not None
    return tier


def answers(llm: LLM) -> list[list[int]]:
    return [list(llm.generate([prompt], GREEDY, ignore_eos=True)[0].ids) for prompt in PROMPTS]


@pytest.fixture
def expected(model_dir: Path) -> list[list[int]]:
    return answers(make(model_dir, None, num_blocks=256))


@pytest.fixture
def filled(model_dir: Path, tmp_path: Path, expected: list[list[int]]) -> Path:
    """A directory that an engine has filled before its end."""
    llm = make(model_dir, tmp_path)
    assert answers(llm) == expected
    llm.engine.pool.check_integrity()
    llm.engine.close()
    return tmp_path


def settled(llm: LLM) -> FileTier:
    """Waits for the blocks that are found at the start, and for the work of both tiers."""
    tier = tier_of(llm)
    deadline = threading.Event()
    for _ in range(int(WAIT_S * 100)):
        if tier.stats().restored or not list(tier.store.directory.glob("*.kv")):
            break
        deadline.wait(0.01)
    assert tier.wait_idle(WAIT_S)
    return tier


def test_a_restart_brings_the_blocks_back(model_dir: Path, filled: Path, expected: list[list[int]]) -> None:
    llm = make(model_dir, filled, checksums=True)
    tier = settled(llm)
    assert tier.stats().restored >= 0.9 * len(PROMPTS) * 16, "the idle blocks of the pool are written at the end"
    before = llm.engine.counters.prompt_tokens
    assert answers(llm) == expected
    computed = llm.engine.counters.prompt_tokens - before
    assert computed <= len(PROMPTS) * 2 * BLOCK, "only the ends of the prompts are computed"
    stats = tier.stats()
    assert stats.loaded >= len(PROMPTS) * 14
    assert stats.damaged == stats.failures == 0
    assert tier.wait_idle(WAIT_S)
    llm.engine.pool.check_integrity()
    llm.engine.close()


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size * 2 // 3)


def corrupt(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    for at in range(1000, len(raw), 3 * BLOCK_BYTES):
        raw[at] ^= 0xFF
    path.write_bytes(raw)


@pytest.mark.parametrize("harm", [cut, corrupt, Path.unlink])
def test_damaged_files_cost_computing_and_change_no_token(
    model_dir: Path,
    filled: Path,
    expected: list[list[int]],
    harm: Callable[[Path], None],
    caplog: pytest.LogCaptureFixture,
) -> None:
    files = sorted(filled.glob("*/0/*.kv"))
    assert files
    if harm is not Path.unlink:
        for path in files:
            harm(path)
    llm = make(model_dir, filled)
    tier = settled(llm)
    if harm is Path.unlink:  # while the pod runs
        for path in files:
            harm(path)
    with caplog.at_level(logging.WARNING):
        assert answers(llm) == expected
    assert tier.stats().damaged > 0
    assert harm is cut or "computed again" in caplog.text
    assert tier.wait_idle(WAIT_S)
    llm.engine.pool.check_integrity()
    llm.engine.close()


def test_blocks_of_another_model_are_not_found(model_dir: Path, filled: Path, expected: list[list[int]]) -> None:
    other = make(model_dir, filled, kv_dtype="fp8_e4m3")
    tier = settled(other)
    assert tier.stats().restored == 0
    assert tier.store.directory.parent.parent == filled
    assert len(list(filled.iterdir())) == 2, "each KV layout has its own folder"
    other.engine.close()


def test_two_engines_share_a_directory_in_folders_of_their_own(
    model_dir: Path, filled: Path, expected: list[list[int]]
) -> None:
    first, second = make(model_dir, filled), make(model_dir, filled)
    assert settled(first).store.directory != settled(second).store.directory
    assert answers(first) == answers(second) == expected
    first.engine.close()
    third, _lock = take_slot(tier_of(first).store.directory.parent)
    assert third == tier_of(first).store.directory, "the lock ends with its engine"
    os.close(_lock)
    second.engine.close()


def test_a_prompt_waits_for_its_load_while_others_run(
    model_dir: Path, filled: Path, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = make(model_dir, filled)
    tier = settled(llm)
    monkeypatch.setattr("engine.kv.tiers.file_tier.MIN_WAIT_S", WAIT_S)
    monkeypatch.setattr("engine.kv.tiers.file_tier.MAX_WAIT_S", WAIT_S)
    may_read, real = threading.Event(), tier.store.read

    def late(keys: list[bytes], targets: list[memoryview]) -> int:
        assert may_read.wait(WAIT_S)
        return real(keys, targets)

    monkeypatch.setattr(tier.store, "read", late)
    engine = llm.engine
    waiting = llm.engine.new_sequence(llm_request(llm, "waits", PROMPTS[0]))
    other = llm.engine.new_sequence(llm_request(llm, "runs", prompt_of(20, seed=99)))
    engine.add(waiting)
    engine.add(other)
    while other.finish_reason is None:
        engine.step()
    assert waiting.loads_from_files
    assert waiting.lease is None
    may_read.set()
    while waiting.finish_reason is None:
        engine.step()
    assert list(waiting.output) == expected[0]
    assert waiting.cached_tokens >= 14 * BLOCK
    engine.close()


def llm_request(llm: LLM, name: str, prompt: tuple[int, ...]) -> Any:
    from common.types import ValidRequest

    return ValidRequest(name, "model", tuple(prompt), GREEDY)


def test_a_prompt_is_computed_if_the_disk_is_slower(model_dir: Path, filled: Path, expected: list[list[int]]) -> None:
    llm = make(model_dir, filled)
    tier = settled(llm)
    tier.compute_s = lambda tokens: 1e-6 * tokens
    tier.rate.observe(1000, 1.0)
    assert answers(llm) == expected
    stats = tier.stats()
    assert stats.loaded == 0
    assert stats.computed >= len(PROMPTS)
    llm.engine.close()


def test_a_directory_that_cannot_be_used_leaves_the_engine_without_a_disk_tier(
    model_dir: Path, tmp_path: Path, expected: list[list[int]], caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "file"
    file.touch()
    llm = make(model_dir, file / "below")
    assert llm.engine.pool.disk_tier is None
    assert "cannot be used" in caplog.text
    assert answers(llm) == expected
    llm.engine.close()


def test_a_full_disk_stops_the_writes_and_not_the_reads(
    model_dir: Path, filled: Path, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = make(model_dir, filled)
    tier = settled(llm)

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tier.store, "append", full)
    llm.generate([prompt_of(80, seed=50 + number) for number in range(4)], GREEDY, ignore_eos=True)
    assert answers(llm) == expected
    assert tier.stats().failures > 0
    assert not tier.working
    assert not tier.closed
    assert tier.stats().loaded > 0
    llm.engine.pool.check_integrity()
    llm.engine.close()


def test_a_reset_empties_the_disk_too(model_dir: Path, filled: Path) -> None:
    llm = make(model_dir, filled)
    tier = settled(llm)
    llm.engine.pool.reset_prefix_cache()
    assert tier.stats().blocks == 0
    deadline = time.monotonic() + WAIT_S
    while list(filled.glob("*/*/*.kv")):  # although no block is written: a crash must not bring them back
        assert time.monotonic() < deadline
        time.sleep(0.01)
    llm.engine.close()


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"host_cache": 0}, "disk_cache"),
        ({"host_cache": 4 * BLOCK_BYTES}, "host_cache"),
        ({"host_cache": 128 * BLOCK_BYTES, "disk_cache_size": BLOCK_BYTES}, "disk_cache_size"),
        ({"host_cache": 128 * BLOCK_BYTES, "tensor_parallel_size": 2}, "disk_cache"),
    ],
)
def test_settings_that_do_not_fit_are_refused(
    model_dir: Path, tmp_path: Path, settings: dict[str, Any], field: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        LLM(model_dir, block_size=BLOCK, num_blocks=24, disk_cache=str(tmp_path), **settings)
    assert refused.value.field == field
