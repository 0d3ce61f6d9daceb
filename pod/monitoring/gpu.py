"""GPU of a pod: checks of the process, and utilization and memory as the driver reports them."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from common.errors import ConfigError, describe
from common.process.lifecycle import host_boot_id
from common.settings.pod import PodConfig
from common.telemetry import Metrics, MetricSample
from common.types import Role

#: Longest time that a computing thread keeps the GIL from a waiting one. Python's default of 5 ms is most of a
#: decode step, and the engine's thread must launch the next step in time. The end of a hand-off passes through three
#: threads on each pod, and each may wait this long.
GIL_SWITCH_INTERVAL_S = 0.0001
READING_TTL_S = 1.0
_ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")

_log = logging.getLogger(__name__)


def require_mappable_kv(config: PodConfig, env: Mapping[str, str] = os.environ) -> None:
    """Raises ConfigError if torch puts the KV pool where others cannot map it: KV would travel over TCP unnoticed."""
    if config.role is Role.BOTH or config.allow_tcp:
        return
    for name in _ALLOCATOR:
        if "expandable_segments:true" in env.get(name, "").lower().replace(" ", ""):
            why = "other pods cannot map memory in expandable segments; unset the variable, or give --allow-tcp"
            raise ConfigError(f"{name}: {why}", field="allow_tcp")


@dataclass(frozen=True, slots=True)
class GpuReading:
    """One reading of the driver. Memory is in bytes; `memory_used` is of all processes."""

    memory_used: int
    memory_total: int
    utilization: float | None = None  # Busy share of about the last second, 0 to 1; None where the driver has no figure


class GpuMonitor:
    """Reads one GPU. Any thread. `read` may raise; then there is no reading for READING_TTL_S seconds."""

    def __init__(self, read: Callable[[], GpuReading], clock: Callable[[], float] = time.monotonic) -> None:
        self._read = read
        self._clock = clock
        self._lock = threading.Lock()
        self._kept: GpuReading | None = None
        self._at = float("-inf")
        self._failing = False

    def reading(self) -> GpuReading | None:
        """Returns a reading of the last READING_TTL_S seconds. None while the driver does not answer."""
        with self._lock:
            if self._clock() - self._at >= READING_TTL_S:
                try:
                    self._kept, self._failing = self._read(), False
                except Exception as error:
                    if not self._failing:
                        _log.warning("the GPU's driver does not answer: %s", describe(error))
                    self._kept, self._failing = None, True
                self._at = self._clock()
            return self._kept


def processor_id(device: torch.device) -> str:
    """Returns the identity of the processor behind a torch device, equal for all pods that share it."""
    return _gpu_uuid(device) if device.type == "cuda" else host_boot_id()


def card_name(device: torch.device) -> str:
    """Returns the kind of the processor behind a torch device: the name of the card, or cpu."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def _gpu_uuid(device: torch.device) -> str:
    return f"GPU-{torch.cuda.get_device_properties(device.index).uuid}"  # an index would count hidden devices too


def gpu_monitor(device: torch.device) -> GpuMonitor | None:
    """Returns the monitor of a torch device; None for a device that is not a GPU."""
    if device.type != "cuda":
        return None
    by_torch = GpuMonitor(lambda: _by_torch(device.index))
    try:
        import pynvml
    except ImportError:
        return by_torch
    try:
        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByUUID(_gpu_uuid(device))
    except pynvml.NVMLError as error:
        _log.info("NVML does not know the GPU; torch reports its memory only: %s", describe(error))
        return by_torch
    return GpuMonitor(lambda: _by_nvml(pynvml, handle))


def _by_torch(index: int) -> GpuReading:
    free, total = torch.cuda.mem_get_info(index)
    return GpuReading(total - free, total)


def _by_nvml(nvml: Any, handle: Any) -> GpuReading:
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    try:
        busy: float | None = nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100
    except nvml.NVMLError:  # a MIG slice has no utilization
        busy = None
    return GpuReading(memory.used, memory.total, busy)


def add_gpu_metrics(metrics: Metrics, gpu: GpuMonitor) -> None:
    """Declares the GPU metrics. They are read at each scrape, and left out while the driver does not answer."""

    def samples(value: Callable[[GpuReading], float | None]) -> list[MetricSample]:
        reading = gpu.reading()
        found = None if reading is None else value(reading)
        return [] if found is None else [((), found)]

    busy = "Share of the last second in which the GPU was busy, from 0 to 1."
    metrics.sampled_gauge("gpu_utilization_ratio", busy, lambda: samples(lambda gpu: gpu.utilization))
    used = "GPU memory in use, by all processes."
    metrics.sampled_gauge("gpu_memory_used_bytes", used, lambda: samples(lambda gpu: gpu.memory_used))
    total = "GPU memory that there is."
    metrics.sampled_gauge("gpu_memory_total_bytes", total, lambda: samples(lambda gpu: gpu.memory_total))
