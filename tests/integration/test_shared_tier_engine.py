"""The shared tier of real engines on a CPU: one computes, others read; nothing that fails there changes a token."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from common.errors import ConfigError
from common.types import SamplingParams
from engine import loop
from engine.kv.tiers import file_copier, shared_store
from engine.kv.tiers.file_tier import FileTier
from engine.kv.tiers.shared_store import SharedStore
from engine.llm import LLM
from tests.rigs.pods.harness import BLOCK, CHUNK, MAX_LEN, prompt_of

GREEDY = SamplingParams(temperature=0.0, max_tokens=8)
WAIT_S = 20.0
PROMPTS = [prompt_of(60, seed=number) for number in range(3)]
BLOCK_BYTES = 2 * 2 * 2 * BLOCK * 16 * 4
Make = Callable[..., LLM]


@pytest.fixture
def make(model_dir: Path, tmp_path: Path) -> Iterator[Make]:
    """Makes engines with a large pool and a shared tier. All end with the test."""
    engines: list[LLM] = []

    def one(shared: Path | None = tmp_path, **config: Any) -> LLM:
        torch.set_num_threads(1)
        settings: dict[str, Any] = {"block_size": BLOCK, "num_blocks": 256, "max_model_len": MAX_LEN}
        settings |= {"chunk_tokens": CHUNK, "threads": 1}
        if shared is not None:
            settings |= {"host_cache": 128 * BLOCK_BYTES, "shared_cache": str(shared), "shared_cache_size": 1 << 24}
        engines.append(LLM(model_dir, **settings | config))
        return engines[-1]

    yield one
    for llm in engines:
        llm.engine.pool.check_integrity()
        llm.engine.close()


def tier_of(llm: LLM) -> FileTier:
    tier = llm.engine.pool.shared_tier
    assert tier is not None
    return tier


def answers(llm: LLM) -> list[list[int]]:
    return [list(llm.generate([prompt], GREEDY, ignore_eos=True)[0].ids) for prompt in PROMPTS]


@pytest.fixture
def expected(make: Make) -> list[list[int]]:
    return answers(make(None))


@pytest.fixture
def writer(make: Make, expected: list[list[int]]) -> LLM:
    """An engine that has computed the prompts. Its pool has room for them, and still they are written."""
    llm = make()
    assert answers(llm) == expected
    assert tier_of(llm).wait_idle(WAIT_S)
    assert tier_of(llm).stats().written >= len(PROMPTS) * 14
    return llm


def test_an_engine_that_never_computed_the_prompts_reads_them(
    make: Make, writer: LLM, expected: list[list[int]]
) -> None:
    reader = make(checksums=True)
    assert answers(reader) == expected
    stats = tier_of(reader).stats()
    assert stats.loaded >= len(PROMPTS) * 14
    assert stats.damaged == stats.failures == 0
    assert reader.engine.counters.prompt_tokens <= len(PROMPTS) * 2 * BLOCK, "only the ends are computed"
    assert tier_of(reader).read_rate > 0


def test_the_engine_goes_on_as_soon_as_a_search_a_read_or_a_copy_has_ended(
    make: Make, writer: LLM, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "NO_BLOCKS_SLEEP_S", 3_600.0)
    reader = make()
    assert answers(reader) == expected
    assert tier_of(reader).stats().loaded >= len(PROMPTS) * 14
    reader.generate([prompt_of(60, seed=99)], GREEDY, ignore_eos=True)
    assert tier_of(reader).stats().absent == 1


def test_a_reader_with_a_disk_tier_goes_on_where_its_disk_ends(
    make: Make, writer: LLM, expected: list[list[int]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    disk = {"disk_cache": str(tmp_path_factory.mktemp("disk")), "disk_cache_size": 1 << 24}
    first = make(None, host_cache=128 * BLOCK_BYTES, **disk)
    first.generate([PROMPTS[0][:32]], GREEDY, ignore_eos=True)
    first.engine.close()
    reader = make(**disk)
    on_disk = reader.engine.pool.disk_tier
    assert on_disk is not None
    until = time.monotonic() + WAIT_S
    while not on_disk.stats().restored:
        assert time.monotonic() < until
        time.sleep(0.01)
    assert answers(reader) == expected
    assert on_disk.stats().loaded >= 7
    assert tier_of(reader).stats().loaded >= len(PROMPTS) * 14 - on_disk.stats().loaded


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def corrupt(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 0xFF
    path.write_bytes(raw)


@pytest.mark.parametrize("harm", [cut, corrupt, Path.unlink])
def test_damaged_files_cost_computing_and_change_no_token(
    make: Make, writer: LLM, expected: list[list[int]], harm: Callable[[Path], None]
) -> None:
    files = sorted(tier_of(writer).store.directory.glob("*/*.kv"))
    for path in files[::3]:
        harm(path)
    reader = make()
    assert answers(reader) == expected
    assert tier_of(reader).stats().loaded < len(PROMPTS) * 14
    assert (tier_of(reader).stats().damaged > 0) == (harm is corrupt), "a cut file is not even read"


def test_a_mount_that_hangs_delays_one_prompt_a_little_and_then_none(
    make: Make,
    writer: LLM,
    expected: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(shared_store, "FIND_TIMEOUT_S", 0.2)
    monkeypatch.setattr(shared_store, "WRITE_TIMEOUT_S", 0.2)
    monkeypatch.setattr(file_copier, "RETRY_S", 0.01)
    reader, over = make(), threading.Event()
    assert tier_of(reader).wait_idle(WAIT_S)
    real = SharedStore._exists

    def hang(store: SharedStore, key: bytes, folder: int | None = None) -> bool:
        assert over.wait(60.0)
        return real(store, key, folder)

    monkeypatch.setattr(SharedStore, "_exists", hang)
    try:
        assert answers(reader) == expected
        tier = tier_of(reader)
        until = time.monotonic() + WAIT_S
        while tier.stats().failures < 2:
            assert time.monotonic() < until
            answers(reader)
            time.sleep(0.05)
        assert not tier.working
        assert caplog.text.count("KV blocks for 30 s: timed out") == 1
        assert tier.load([b"x" * 16]).done, "no prompt waits any more"
        assert tier.stats().loaded == 0
        reader.engine.close()  # does not wait for the calls that hang
        assert tier.closed
    finally:
        over.set()


def test_a_stop_waits_for_both_threads_together(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    now, waits = time.monotonic(), list[float]()

    class HungThread:
        def join(self, timeout_s: float) -> None:
            nonlocal now
            waits.append(timeout_s)
            now += timeout_s

        def is_alive(self) -> bool:
            return True

    tier = tier_of(make())
    copier = object.__new__(file_copier.FileCopier)
    copier.__dict__.update(_host=SimpleNamespace(tier=tier._host), _tier=tier, _stopped=False)
    copier.__dict__["_threads"] = [HungThread(), HungThread()]
    monkeypatch.setattr(file_copier, "time", SimpleNamespace(monotonic=lambda: now))
    copier.stop()
    assert sum(waits) == pytest.approx(file_copier.FLUSH_S + file_copier.STOP_S)
    assert tier.closed


def test_a_directory_that_cannot_be_used_costs_the_shared_tier_only(
    make: Make, expected: list[list[int]], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "file"
    file.touch()
    llm = make(file)
    assert "make host_cache the larger one" in caplog.text
    assert answers(llm) == expected
    until = time.monotonic() + WAIT_S
    while tier_of(llm).working:
        assert time.monotonic() < until
        time.sleep(0.01)
    assert "cannot be used for 30 s" in caplog.text


def test_a_reset_removes_the_files_of_all_pods(make: Make, writer: LLM, tmp_path: Path) -> None:
    reader = make()
    reader.engine.pool.reset_prefix_cache()
    until = time.monotonic() + WAIT_S
    while list(tmp_path.glob("*/*/*.kv")):
        assert time.monotonic() < until
        time.sleep(0.01)
    answers(reader)
    assert tier_of(reader).stats().loaded == 0


def test_four_bit_blocks_are_shared_among_pods_with_the_codec_only(make: Make, tmp_path: Path) -> None:
    sizes = {"num_blocks": 64, "host_cache": 64 * 4 * BLOCK_BYTES, "block_size": 4 * BLOCK}
    coded = [make(disk_cache_codec="int4", **sizes) for _ in range(2)]
    exact = make(**sizes)
    answers(coded[0])
    assert tier_of(coded[0]).wait_idle(WAIT_S)
    answers(coded[1])
    answers(exact)
    assert tier_of(coded[1]).stats().decoded == tier_of(coded[1]).stats().loaded > 0
    assert tier_of(exact).stats().loaded == 0
    content = tier_of(coded[1]).store.content_bytes
    assert content < tier_of(exact).store.content_bytes / 4
    assert len(list(tmp_path.iterdir())) == 2, "each KV layout has its own folder"


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"host_cache": 0}, "shared_cache"),
        ({"host_cache": 4 * BLOCK_BYTES}, "host_cache"),
        ({"host_cache": 128 * BLOCK_BYTES, "shared_cache_size": 100 * BLOCK_BYTES}, "shared_cache_size"),
        ({"host_cache": 128 * BLOCK_BYTES, "tensor_parallel_size": 2}, "shared_cache"),
        ({"host_cache": 128 * BLOCK_BYTES, "disk_cache": "same"}, "shared_cache"),
    ],
)
def test_settings_that_do_not_fit_are_refused(
    model_dir: Path, tmp_path: Path, settings: dict[str, Any], field: str
) -> None:
    if "disk_cache" in settings:
        settings = settings | {"disk_cache": str(tmp_path)}
    with pytest.raises(ConfigError) as refused:
        LLM(model_dir, block_size=BLOCK, num_blocks=24, shared_cache=str(tmp_path), **settings)
    assert refused.value.field == field
