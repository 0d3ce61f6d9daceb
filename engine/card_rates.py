"""Measures the rates of this machine's first GPU, or of its CPUs: `python -m engine.card_rates` prints them as JSON.

A child process of `baton doctor --measure` runs it, because torch may fail at import. It takes about ten seconds.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from common.telemetry import memory_usage

REPEATS = 7
#: Bytes of the copy; rows, inputs and outputs of the product; heads, tokens and head size of the attention.
GPU_SIZES = (2 << 30, (4096, 4096, 14336), (32, 8192, 128))
CPU_SIZES = (256 << 20, (512, 1024, 4096), (8, 1024, 64))


@torch.inference_mode()
def measure(device: torch.device) -> dict[str, Any]:
    """Returns the measured rates of a device: the fields of `cli.fit.cards.Card`."""
    on_gpu = device.type == "cuda"
    nbytes, (rows, inputs, outputs), (heads, length, size) = GPU_SIZES if on_gpu else CPU_SIZES
    dtype = torch.bfloat16 if on_gpu else torch.float32
    copy_s = _copy_s(nbytes, device)
    a = torch.randn(rows, inputs, device=device).to(dtype)
    b = torch.randn(outputs, inputs, device=device).to(dtype)
    product_s = _seconds(lambda: torch.nn.functional.linear(a, b), device)
    fp8_flop_s = 0.0
    if on_gpu and torch.cuda.get_device_capability(device) >= (8, 9):
        one = torch.ones((), device=device)
        left, right = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn).t()
        fp8_s = _seconds(lambda: torch._scaled_mm(left, right, one, one, out_dtype=dtype), device)
        fp8_flop_s = 2 * rows * inputs * outputs / fp8_s
    q = torch.randn(1, heads, length, size, device=device).to(dtype)
    attend = torch.nn.functional.scaled_dot_product_attention
    attention_s = _seconds(lambda: attend(q, q, q, is_causal=True), device)
    return {
        "name": torch.cuda.get_device_name(device) if on_gpu else f"CPU, {torch.get_num_threads()} threads",
        "source": "measured by baton doctor",
        "memory_bytes": torch.cuda.mem_get_info(device)[1] if on_gpu else memory_usage().limit,
        "copy_byte_s": 2 * nbytes / copy_s,
        "product_flop_s": 2 * rows * inputs * outputs / product_s,
        "attention_flop_s": 2 * heads * length * length * size / attention_s,
        "fp8_flop_s": fp8_flop_s,
        "device": device.type,
    }


def _copy_s(nbytes: int, device: torch.device) -> float:
    """Returns the seconds to copy nbytes, the faster of the driver's copy and a kernel."""
    source = torch.ones(nbytes // 4, dtype=torch.int32, device=device)
    target = torch.empty_like(source)
    driver_s = _seconds(lambda: target.copy_(source), device)
    return min(driver_s, _seconds(lambda: torch.add(source, 1, out=target), device))


def _seconds(run: Callable[[], object], device: torch.device) -> float:
    """Returns the median seconds of a run, after some that raise the clocks."""
    times = []
    for number in range(3 + REPEATS):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        began = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        if number >= 3:
            times.append(time.perf_counter() - began)
    return statistics.median(times)


if __name__ == "__main__":
    found = measure(torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu"))
    sys.stdout.write(json.dumps(found) + "\n")
