"""Metrics of memory and GPUs: of the container if there is one, and none where the figure is unknown."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from common.telemetry import Metrics, memory_usage
from pod.monitoring.gpu import READING_TTL_S, GpuMonitor, GpuReading, add_gpu_metrics, gpu_monitor


def cgroup(directory: Path, limit: str, current: int = 900, inactive: int = 300) -> Path:
    (directory / "memory.max").write_text(f"{limit}\n")
    (directory / "memory.current").write_text(f"{current}\n")
    (directory / "memory.stat").write_text(f"anon 500\nfile 400\ninactive_file {inactive}\n")
    return directory


def test_a_container_counts_what_the_kernel_cannot_take_back(tmp_path: Path) -> None:
    memory = memory_usage(cgroup(tmp_path, "1000"))
    assert (memory.used, memory.limit, memory.free) == (600, 1000, 400)


def test_a_container_has_no_more_than_the_machine_has_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=2000, available=150))
    assert memory_usage(cgroup(tmp_path, "1000")).free == 150
    assert memory_usage(cgroup(tmp_path, "1000", current=1400)).free == 0
    assert memory_usage(tmp_path / "none").free == 150


@pytest.mark.parametrize("limit", ["max", str(1 << 62)])
def test_without_a_limit_the_machine_counts(tmp_path: Path, limit: str) -> None:
    memory = memory_usage(cgroup(tmp_path, limit))
    assert memory.limit == psutil.virtual_memory().total
    assert 0 < memory.used < memory.limit


def test_without_control_groups_the_machine_counts(tmp_path: Path) -> None:
    assert memory_usage(tmp_path / "none").limit == psutil.virtual_memory().total


class FailingDriver:
    """A GPU driver that may fail."""

    def __init__(self) -> None:
        self.asked = 0
        self.away = False

    def read(self) -> GpuReading:
        self.asked += 1
        if self.away:
            raise RuntimeError("driver lost")
        return GpuReading(40, 80, 0.5)


def test_a_reading_is_kept_for_a_second_and_a_driver_may_recover() -> None:
    driver, now = FailingDriver(), [100.0]
    gpu = GpuMonitor(driver.read, lambda: now[0])
    assert gpu.reading() == gpu.reading() == GpuReading(40, 80, 0.5)
    assert driver.asked == 1
    driver.away, now[0] = True, now[0] + READING_TTL_S
    assert gpu.reading() is None
    driver.away, now[0] = False, now[0] + READING_TTL_S
    assert gpu.reading() == GpuReading(40, 80, 0.5)


def test_a_cpu_device_has_no_gpu_monitor() -> None:
    assert gpu_monitor(torch.device("cpu")) is None


class FakeNvml:
    """The part of pynvml that the pod uses."""

    class NVMLError(Exception):
        pass

    def __init__(self, *, knows: bool = True, tells_utilization: bool = True) -> None:
        self.knows, self.tells_utilization = knows, tells_utilization

    def nvmlInit(self) -> None:
        pass

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        if not self.knows:
            raise self.NVMLError("not found")
        assert uuid == "GPU-1234"
        return "handle"

    def nvmlDeviceGetMemoryInfo(self, handle: str) -> Any:
        assert handle == "handle"
        return SimpleNamespace(used=10, total=20)

    def nvmlDeviceGetUtilizationRates(self, handle: str) -> Any:
        if not self.tells_utilization:
            raise self.NVMLError("not supported")
        return SimpleNamespace(gpu=75)


@pytest.mark.parametrize(
    ("nvml", "reading"),
    [
        (FakeNvml(), GpuReading(10, 20, 0.75)),
        (FakeNvml(tells_utilization=False), GpuReading(10, 20, None)),
        (FakeNvml(knows=False), GpuReading(30, 100, None)),
        (None, GpuReading(30, 100, None)),  # not installed: torch reports the memory
    ],
)
def test_nvml_reports_what_it_knows_and_torch_the_rest(
    monkeypatch: pytest.MonkeyPatch, nvml: FakeNvml | None, reading: GpuReading
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid="1234"))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (70, 100))
    gpu = gpu_monitor(torch.device("cuda:1"))
    assert gpu is not None
    assert gpu.reading() == reading


def test_gpu_metrics_are_left_out_while_the_driver_fails() -> None:
    driver, now = FailingDriver(), [0.0]
    metrics = Metrics()
    add_gpu_metrics(metrics, GpuMonitor(driver.read, lambda: now[0]))
    text = metrics.exposition().decode()
    assert "baton_gpu_utilization_ratio 0.5" in text
    assert "baton_gpu_memory_used_bytes 40.0" in text
    driver.away, now[0] = True, now[0] + READING_TTL_S
    assert "baton_gpu_memory_used_bytes 40.0" not in metrics.exposition().decode()
