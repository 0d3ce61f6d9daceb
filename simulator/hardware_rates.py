"""A model of the step and transfer times of one pod, from first principles or fitted to measurements.

    prefill step = overhead + tokens / GEMM rate at that many tokens + attention FLOPs / attention rate
    decode step  = overhead + GEMM time of its rows (weights read once) + KV bytes of all contexts / read rate
    transfer     = latency + KV bytes / link rate

The rates of a preset are the rates of the best known kernels on one card (GEMMs, attention, copies); no server reaches
them. A file with measurements of this engine scales them to what it reaches.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from common.errors import ConfigError, describe

Points = tuple[tuple[float, float], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class HardwareRates:
    """Rates of one pod on one GPU. Linear between points, constant outside."""

    name: str
    source: str  # Where the figures come from.
    prefill_tok_s: Points  # (tokens of a step, GEMM tokens per second).
    prefill_overhead_s: float = 0.0  # Fixed seconds of a step.
    attention_flops: float = 0.0  # FLOPs for each pair of tokens that attend, in all layers.
    attention_flop_s: float = 1.0
    decode_row_s: Points = ((1, 0.0),)  # (sequences of a step, GEMM seconds).
    decode_overhead_s: float = 0.0
    kv_bytes: float = 0.0  # Of one token in all layers.
    kv_read_byte_s: float = 1.0  # Bytes per second at which decode attention reads KV.
    link_byte_s: float = 1.0  # Bytes per second and latency of KV transfers.
    link_latency_s: float = 0.0
    kv_pool_bytes: float = 0.0  # Memory for KV.

    def prefill_s(self, chunks: Sequence[tuple[int, int]]) -> float:
        """Returns the seconds of a step of (start, new tokens) chunks; each attends to itself and the tokens before."""
        tokens = sum(n for _, n in chunks)
        pairs = sum(n * (start + (n + 1) / 2) for start, n in chunks)
        gemm = tokens / _interpolate(self.prefill_tok_s, tokens)
        return self.prefill_overhead_s + gemm + pairs * self.attention_flops / self.attention_flop_s

    def slower(self, factor: float) -> HardwareRates:
        """Returns the rates of a pod whose steps take `factor` times as long; its link is as fast."""
        return replace(
            self,
            prefill_tok_s=tuple((n, rate / factor) for n, rate in self.prefill_tok_s),
            prefill_overhead_s=self.prefill_overhead_s * factor,
            attention_flop_s=self.attention_flop_s / factor,
            decode_row_s=tuple((n, seconds * factor) for n, seconds in self.decode_row_s),
            decode_overhead_s=self.decode_overhead_s * factor,
            kv_read_byte_s=self.kv_read_byte_s / factor,
        )

    def prompt_s(self, tokens: int, chunk: int) -> float:
        """Returns the seconds of a whole prompt in chunks, on an idle pod."""
        starts = range(0, tokens, chunk)
        return sum(self.prefill_s([(start, min(chunk, tokens - start))]) for start in starts)

    def decode_s(self, sequences: int, context_tokens: float) -> float:
        """Returns the seconds of a step that decodes one token of each sequence; `context_tokens` is their sum."""
        kv = context_tokens * self.kv_bytes / self.kv_read_byte_s
        return self.decode_overhead_s + _interpolate(self.decode_row_s, sequences) + kv

    def pool_blocks(self, block_size: int) -> int:
        """Returns the number of blocks that fit into the KV memory."""
        return max(1, int(self.kv_pool_bytes / (self.kv_bytes * block_size)))


H100_8B = HardwareRates(
    name="h100-8b",
    source=(
        "Llama-3.1-8B shapes in bf16 on one H100 80GB HBM3: cuBLAS GEMMs (707 TFLOP/s at 2048 tokens), cuDNN attention "
        "at 600 TFLOP/s, paged decode attention at 2850 GB/s, NIXL over NVLink at 237 GB/s with 2 MiB blocks"
    ),
    prefill_tok_s=((128, 24e3), (256, 38e3), (512, 46.2e3), (1024, 47.2e3), (2048, 50.7e3), (4096, 48.4e3)),
    prefill_overhead_s=0.002,
    attention_flops=4 * 32 * 4096,  # QK and PV, 2 FLOPs each, 32 layers of 32 heads of 128
    attention_flop_s=600e12,
    decode_row_s=((1, 5.57e-3), (32, 5.71e-3), (64, 5.78e-3), (128, 6.11e-3), (256, 7.27e-3), (512, 12e-3)),
    decode_overhead_s=0.0003,
    kv_bytes=2 * 32 * 8 * 128 * 2,  # K and V, 32 layers, 8 KV heads of 128, 2 bytes
    kv_read_byte_s=2850e9,
    link_byte_s=237e9,
    link_latency_s=0.003,
    kv_pool_bytes=54e9,  # 80 GB without weights, activations and graphs
)

FLAT_8K = HardwareRates(
    name="flat-8k",
    source="8,000 prompt tokens a second whatever their number, a pool of 4,000 blocks of 512; decode is not modelled",
    prefill_tok_s=((1, 8e3),),
    kv_bytes=1.0,
    kv_pool_bytes=4000 * 512.0,
)

#: Bytes of the weights of Llama-3.1-8B that a decode step reads, and that its layers take in memory.
BF16_BYTES, BF16_LAYER_BYTES = 15.0e9, 13.96e9


def quantised_rates(name: str, kind: str, read_bytes: float, layer_bytes: float, *, prefill: float) -> HardwareRates:
    """Returns H100_8B with quantised weights, from their bytes; no step was measured.

    A step of few rows takes the time of reading the weights, one of many rows the time of its products. prefill: rate
    of the products of a prompt, relative to bf16.
    """
    ratio, (_, base) = read_bytes / BF16_BYTES, H100_8B.decode_row_s[0]
    rows = tuple((n, base * ratio + (s - base) / prefill) for n, s in H100_8B.decode_row_s)
    return replace(
        H100_8B,
        name=name,
        source=f"{kind} weights of the layers, from their bytes (not measured), over: {H100_8B.source}",
        prefill_tok_s=tuple((n, rate * prefill) for n, rate in H100_8B.prefill_tok_s),
        decode_row_s=rows,
        kv_pool_bytes=H100_8B.kv_pool_bytes + BF16_LAYER_BYTES - layer_bytes,
    )


PRESETS = {
    "h100-8b": H100_8B,
    "h100-8b-fp8": quantised_rates("h100-8b-fp8", "FP8", 8.03e9, 6.98e9, prefill=1.4),
    "h100-8b-int4": quantised_rates("h100-8b-int4", "4-bit", 4.68e9, 3.63e9, prefill=1.0),
    "h100-8b-rdma": replace(
        H100_8B,
        name="h100-8b-rdma",
        source=H100_8B.source.rpartition(",")[0] + ", KV over one 400 Gb/s adapter at 45 GB/s",
        link_byte_s=45e9,
        link_latency_s=0.004,
    ),
    "flat-8k": FLAT_8K,
}


def load_rates(named: str) -> HardwareRates:
    """Returns a preset by its name, or the rates in a file. Raises ConfigError.

    The file is either a result of benchmarks/engine.py, to which the preset h100-8b is fitted, or a JSON object with
    fields of HardwareRates and `preset`, the name of the preset for all other fields.
    """
    if named in PRESETS:
        return PRESETS[named]
    path = Path(named)
    if not path.is_file():
        raise _error(f"{named!r} is neither a file nor one of {', '.join(PRESETS)}")
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as e:
        raise _error(f"{path} is not readable JSON: {describe(e)}") from e
    if not isinstance(raw, dict):
        raise _error(f"{path} must hold a JSON object")
    if isinstance(metrics := raw.get("metrics"), dict):
        return fit_rates(H100_8B, metrics, name=path.stem, card=str(raw.get("card", "an unnamed card")))
    return _overridden(raw, path)


def fit_rates(base: HardwareRates, metrics: Mapping[str, Any], *, name: str, card: str) -> HardwareRates:
    """Returns `base` with prefill and decode times scaled and shifted (least squares) to the measured points.

    Points are the metrics ttft_ms_TOKENS and decode_ms_SEQUENCESxCONTEXT. Raises ConfigError with fewer than two of
    either kind.
    """
    prompts = _points(metrics, r"ttft_ms_(\d+)")
    steps = _points(metrics, r"decode_ms_(\d+)x(\d+)")
    if len(prompts) < 2 or len(steps) < 2:
        raise _error("two ttft_ms_N and two decode_ms_BxN metrics are needed at least")
    chunk = 2048
    bare = replace(base, prefill_overhead_s=0.0, decode_overhead_s=0.0)
    # A prompt takes a multiple of the modelled time, and an overhead per chunk. Relative errors are minimised.
    scale, shift = _fit([(bare.prompt_s(n, chunk), -(-n // chunk), s) for (n,), s in prompts])
    factor, extra = _fit([(bare.decode_s(b, b * n), 1.0, s) for (b, n), s in steps])
    return replace(
        base,
        name=name,
        source=f"{len(prompts)} prompt times and {len(steps)} decode steps measured on {card}, over: {base.source}",
        prefill_tok_s=tuple((n, rate / scale) for n, rate in base.prefill_tok_s),
        attention_flop_s=base.attention_flop_s / scale,
        prefill_overhead_s=shift,
        decode_row_s=tuple((n, s * factor) for n, s in base.decode_row_s),
        kv_read_byte_s=base.kv_read_byte_s / factor,
        decode_overhead_s=extra,
    )


def _points(metrics: Mapping[str, Any], pattern: str) -> list[tuple[tuple[int, ...], float]]:
    return [
        (tuple(map(int, match.groups())), value / 1e3)
        for key, value in metrics.items()
        if (match := re.fullmatch(pattern, key)) and isinstance(value, int | float) and value > 0
    ]


def _fit(rows: Sequence[tuple[float, float, float]]) -> tuple[float, float]:
    """Returns a > 0 and b >= 0 that minimise the sum of ((a x + b c - y) / y)^2 over rows (x, c, y)."""
    xx = sum((x / y) ** 2 for x, _, y in rows)
    cc = sum((c / y) ** 2 for _, c, y in rows)
    xc = sum(x * c / y**2 for x, c, y in rows)
    xy, cy = sum(x / y for x, _, y in rows), sum(c / y for _, c, y in rows)
    determinant = xx * cc - xc * xc
    if determinant > 1e-12 * xx * cc:
        a, b = (xy * cc - cy * xc) / determinant, (cy * xx - xy * xc) / determinant
        if a > 0 and b >= 0:
            return a, b
    return xy / xx, 0.0


def _overridden(raw: Mapping[str, Any], path: Path) -> HardwareRates:
    base = raw.get("preset", H100_8B.name)
    if base not in PRESETS:
        raise _error(f"preset must be one of {', '.join(PRESETS)}, not {base!r}")
    values: dict[str, Any] = {"name": path.stem, "source": f"{path.name} over: {PRESETS[base].source}"}
    for key, value in raw.items():
        if key in ("prefill_tok_s", "decode_row_s"):
            values[key] = _checked_points(key, value, path)
        elif key == "source":
            values[key] = str(value)
        elif key == "preset":
            continue
        elif key not in HardwareRates.__dataclass_fields__ or key == "name":
            raise _error(f"{path.name} has an unknown field {key!r}")
        elif not _number(value) or value < 0 or (value == 0 and not key.endswith(("overhead_s", "latency_s"))):
            raise _error(f"{path.name}: {key} must be a positive number, not {value!r}")
        else:
            values[key] = float(value)
    return replace(PRESETS[base], **values)


def _checked_points(key: str, value: Any, path: Path) -> Points:
    rows = value if isinstance(value, list) else []
    points = tuple(
        (row[0], row[1]) for row in rows if isinstance(row, list) and len(row) == 2 and all(map(_number, row))
    )
    rising = all(a[0] < b[0] for a, b in pairwise(points))
    if not points or len(points) != len(rows) or not rising or min(y for _, y in points) <= 0:
        raise _error(f"{path.name}: {key} must be a list of rising [number, value] pairs")
    return points


def _error(fault: str) -> ConfigError:
    return ConfigError(f"--rates: {fault}", field="rates")


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _interpolate(points: Points, x: float) -> float:
    i = bisect_left(points, (x,))
    (x0, y0), (x1, y1) = points[max(0, i - 1)], points[min(i, len(points) - 1)]
    if x0 == x1:
        return y0
    return y0 + (y1 - y0) * (x - x0) / (x1 - x0)
