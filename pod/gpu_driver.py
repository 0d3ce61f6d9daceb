"""What the driver tells of a pod's GPU: memory in use, by all processes, and how busy it was.

NVML (the package nvidia-ml-py) tells both; without it torch tells the memory alone. On a CPU there is nothing to tell.
A reading is kept for a second, however many ask.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from common.telemetry import Metrics, Sample

_log = logging.getLogger(__name__)

KEPT_S = 1.0


@dataclass(frozen=True, slots=True)
class GpuReading:
    """utilization: 0 to 1, of the last second or so; None where nobody tells. Memory in bytes."""

    memory_used: int
    memory_total: int
    utilization: float | None = None


Read = Callable[[], GpuReading]


class Gpu:
    """One GPU; read may raise, then there is no reading for a while. Any thread."""

    def __init__(self, read: Read, clock: Callable[[], float] = time.monotonic) -> None:
        self._read = read
        self._clock = clock
        self._lock = threading.Lock()
        self._kept: GpuReading | None = None
        self._at = float("-inf")
        self._failing = False

    def reading(self) -> GpuReading | None:
        """Of the last second; None while the driver does not answer."""
        with self._lock:
            if self._clock() - self._at >= KEPT_S:
                self._kept, self._at = self._try(), self._clock()
            return self._kept

    def _try(self) -> GpuReading | None:
        try:
            found = self._read()
        except Exception as error:
            if not self._failing:
                _log.warning("the GPU's driver does not answer: %s", error)
            self._failing = True
            return None
        self._failing = False
        return found


def gpu_of(device: torch.device) -> Gpu | None:
    """The watch of a torch device; None for one that is no GPU."""
    if device.type != "cuda":
        return None
    index = device.index
    try:
        import pynvml
    except ImportError:
        return Gpu(lambda: _by_torch(index))
    try:
        pynvml.nvmlInit()
        uuid = f"GPU-{torch.cuda.get_device_properties(index).uuid}"  # an index would count hidden devices too
        handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)
    except pynvml.NVMLError as error:
        _log.info("NVML does not know the GPU, torch tells its memory alone: %s", error)
        return Gpu(lambda: _by_torch(index))
    return Gpu(lambda: _by_nvml(pynvml, handle))


def _by_torch(index: int) -> GpuReading:
    free, total = torch.cuda.mem_get_info(index)
    return GpuReading(total - free, total)


def _by_nvml(nvml: Any, handle: Any) -> GpuReading:
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    try:
        busy: float | None = nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100
    except nvml.NVMLError:  # a slice of a GPU (MIG) has no figure of its own
        busy = None
    return GpuReading(memory.used, memory.total, busy)


def add_gpu_metrics(metrics: Metrics, gpu: Gpu) -> None:
    """Declares what the driver tells; read when scraped, and left out where it says nothing."""

    def read(value: Callable[[GpuReading], float | None]) -> Callable[[], list[Sample]]:
        def samples() -> list[Sample]:
            reading = gpu.reading()
            found = None if reading is None else value(reading)
            return [] if found is None else [((), found)]

        return samples

    metrics.sampled_gauge(
        "gpu_utilization_ratio",
        "Share of the last second in which the GPU was busy, from 0 to 1.",
        read(lambda reading: reading.utilization),
    )
    metrics.sampled_gauge(
        "gpu_memory_used_bytes", "GPU memory in use, by all processes.", read(lambda reading: reading.memory_used)
    )
    metrics.sampled_gauge(
        "gpu_memory_total_bytes", "GPU memory that there is.", read(lambda reading: reading.memory_total)
    )
