"""Findings of `baton doctor`, with fake child processes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from cli import doctor
from cli.doctor import Level
from cli.gpus import Gpu
from common.telemetry import MemoryUsage

GPUS = (Gpu("GPU-a"), Gpu("GPU-b"))


class Children:
    """Fake children that answer by their last two arguments; keeps all calls."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, answers: dict[tuple[str, ...], dict[str, Any] | str]) -> None:
        self.asked: list[tuple[str, ...]] = []
        self._answers = answers
        monkeypatch.setattr(doctor, "_json_of_child", self)

    async def __call__(self, argv: Sequence[str], _env: dict[str, str]) -> dict[str, Any] | str:
        self.asked.append(tuple(argv[-2:]))
        return self._answers[self.asked[-1]]


def moved(transport: str, rate: float = 40.0) -> dict[str, Any]:
    return {"mebibytes": 64, "gigabytes_per_s": rate, "transport": transport, "source": "reported"}


def test_the_report_ends_with_one_sentence() -> None:
    assert doctor.verdict([], []) == "Baton can run here."
    assert doctor.verdict([], ["memory"]) == "Baton can run here; 1 warning: memory."
    both = doctor.verdict(["torch"], ["memory", "Redis"])
    assert both == "Baton cannot run here before this is mended: torch; 2 warnings: memory, Redis."


async def test_each_pair_of_gpus_is_reported_with_transport_and_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    there, back = ("GPU-a", "GPU-b"), ("GPU-b", "GPU-a")
    children = Children(monkeypatch, {there: moved("cuda_ipc", 244.0), back: moved("tcp", 0.5)})
    found = [finding async for finding in doctor._check_pairs(GPUS)]
    assert children.asked == [there, back]
    assert [(f.what, f.level, f.detail) for f in found] == [
        ("NIXL, GPU 0 -> GPU 1", Level.OK, "244.0 GB/s, by cuda_ipc (reported)"),
        ("NIXL, GPU 1 -> GPU 0", Level.WARN, "0.5 GB/s, by tcp (reported)"),
    ]
    assert "--allow-tcp" in found[1].fix


async def test_a_single_gpu_is_paired_with_itself_and_a_failure_is_reported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    Children(monkeypatch, {("GPU-a", "GPU-a"): "a write did not end within 60 s"})
    (finding,) = [finding async for finding in doctor._check_pairs(GPUS[:1])]
    assert (finding.level, finding.detail) == (Level.MISSING, "a write did not end within 60 s")


@pytest.mark.parametrize(
    ("transport", "env", "level"),
    [
        ("cma", {}, Level.OK),
        ("tcp", {}, Level.WARN),
        ("unknown", {}, Level.WARN),
        ("tcp", {"UCX_TLS": "tcp"}, Level.OK),
    ],
)
async def test_tcp_between_processes_of_one_host_is_a_warning_unless_it_was_requested(
    transport: str, env: dict[str, str], level: Level, monkeypatch: pytest.MonkeyPatch
) -> None:
    Children(monkeypatch, {("-m", "kv_transfer.probe"): moved(transport, 1.5)})
    finding = await doctor._check_nixl("NIXL", env)
    assert (finding.level, f"1.5 GB/s, by {transport} (reported)" in finding.detail) == (level, True)


async def test_memory_is_that_of_the_container(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "memory_usage", lambda: MemoryUsage(used=0, limit=4 << 30, free=1 << 30))
    finding = doctor._check_memory()
    assert (finding.level, finding.detail.partition(",")[0]) == (Level.WARN, "1.0 of 4.0 GiB memory free")
