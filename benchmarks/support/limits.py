"""Measured limits of a device, and the least time that they allow for a step of a model."""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.support.report import timed
from benchmarks.support.shapes import BenchmarkShape

MXFP4_BYTES = 17 / 32  # Bytes of a weight: 4 bits, and a byte for 32 of them.


@dataclass(frozen=True, slots=True)
class Ceilings:
    copy_gb_s: float
    matmul_tflop_s: float
    attention_tflop_s: float  # Causal attention over one long prompt.


def device_seconds(run: Callable[[], object], device: torch.device) -> float:
    """Returns the seconds of one run, on a GPU by its own clock."""
    if device.type != "cuda":
        return timed(run)[0]
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    run()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) * 1e-3


def median_seconds(run: Callable[[], object], device: torch.device) -> float:
    """Returns the median time of a run. Some runs before it raise the clocks, which are low on an idle card."""
    for _ in range(10):
        run()
    return statistics.median(device_seconds(run, device) for _ in range(25))


def free_memory() -> None:
    """Frees what an engine that is no longer referenced holds on the device."""
    gc.unfreeze()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def copy_seconds(nbytes: int, device: torch.device) -> float:
    """Returns the time to copy nbytes, the faster of the driver's copy and a kernel."""
    source = torch.randint(0, 255, (nbytes // 4,), dtype=torch.int32, device=device)
    target = torch.empty_like(source)
    return min(
        median_seconds(lambda: target.copy_(source), device),
        median_seconds(lambda: torch.add(source, 1, out=target), device),
    )


@torch.inference_mode()
def ceilings(shape: BenchmarkShape, device: torch.device, dtype: torch.dtype) -> Ceilings:
    """Measures the limits. Call it before the engine allocates the device's memory."""
    config = shape.config
    copy_s = copy_seconds(shape.copy_bytes, device)
    rows, hidden, inner = shape.chunk_tokens, config["hidden_size"], 2 * config["intermediate_size"]
    a = torch.randn(rows, hidden, device=device, dtype=dtype)
    b = torch.randn(inner, hidden, device=device, dtype=dtype)
    matmul_s = median_seconds(lambda: torch.nn.functional.linear(a, b), device)
    heads, length = config["num_attention_heads"], max(shape.ttft)
    q = torch.randn(1, heads, length, config.get("head_dim", hidden // heads), device=device, dtype=dtype)
    cudnn = torch.nn.attention.SDPBackend.CUDNN_ATTENTION
    with torch.nn.attention.sdpa_kernel(cudnn) if device.type == "cuda" else nullcontext():
        attend = torch.nn.functional.scaled_dot_product_attention
        attention_s = median_seconds(lambda: attend(q, q, q, is_causal=True), device)
    return Ceilings(
        copy_gb_s=2 * shape.copy_bytes / copy_s / 1e9,
        matmul_tflop_s=2 * rows * hidden * inner / matmul_s / 1e12,
        attention_tflop_s=2 * heads * length * length * q.shape[-1] / attention_s / 1e12,
    )


@dataclass(frozen=True, slots=True)
class StepCost:
    """Bytes and FLOP of a model's steps. A step reads each weight once, and only a few rows of the embedding."""

    config: dict[str, Any]
    itemsize: float  # Bytes of a weight, the mean over layers and head.
    kv_bytes_per_token: int

    @property
    def _query_size(self) -> int:
        config = self.config
        heads: int = config["num_attention_heads"]
        return heads * int(config.get("head_dim", config["hidden_size"] // heads))

    @property
    def _attention_weights(self) -> int:
        """Weights of all layers without MLP and experts."""
        config, query = self.config, self._query_size
        kv = query * config["num_key_value_heads"] // config["num_attention_heads"]
        return int(config["num_hidden_layers"] * config["hidden_size"] * 2 * (query + kv))

    @property
    def _experts(self) -> tuple[int, int]:
        """Experts of a layer, and of a token. A model without experts has one, which is its MLP."""
        config = self.config
        return config.get("num_experts") or config.get("num_local_experts") or 1, config.get("num_experts_per_tok") or 1

    @property
    def _expert_weights(self) -> int:
        """Weights of one expert of every layer."""
        config = self.config
        size = config.get("moe_intermediate_size") or config["intermediate_size"]
        return int(3 * config["num_hidden_layers"] * config["hidden_size"] * size)

    @property
    def _layer_weights(self) -> int:
        """Weights of all layers that a token is multiplied with."""
        return self._attention_weights + self._experts[1] * self._expert_weights

    @property
    def _head_weights(self) -> int:
        return int(self.config["vocab_size"] * self.config["hidden_size"])

    def decode_s(self, tokens_in_cache: float, ceiling: Ceilings, rows: int = 1) -> float:
        """Returns the least time of a decode step of `rows` rows with tokens_in_cache cached tokens in total.

        The rows read the experts that independent uniform choices touch. Half of the layers of a model with
        alternating windows read the window only.
        """
        experts, top_k = self._experts
        touched = experts * (1 - (1 - top_k / experts) ** rows)
        expert_itemsize = MXFP4_BYTES if self.config.get("quantization_config") else self.itemsize
        weights = (self._attention_weights + self._head_weights) * self.itemsize
        weights += touched * self._expert_weights * expert_itemsize
        if "sliding_attention" in self.config.get("layer_types", ()):
            seen = min(tokens_in_cache, rows * self.config["sliding_window"])
            tokens_in_cache = (tokens_in_cache + seen) / 2
        return (weights + tokens_in_cache * self.kv_bytes_per_token) / (ceiling.copy_gb_s * 1e9)

    def prefill_s(self, length: int, ceiling: Ceilings) -> float:
        """Returns the least time to the first token of one prompt."""
        matmul = 2 * (length * self._layer_weights + self._head_weights)
        attention = 2 * int(self.config["num_hidden_layers"]) * self._query_size * length * length
        return matmul / (ceiling.matmul_tflop_s * 1e12) + attention / (ceiling.attention_tflop_s * 1e12)

    def offline_s(self, count: int, prompt: int, output: int, ceiling: Ceilings) -> float:
        """Returns the least time of `count` equal requests: all prompts, then decode steps with all rows."""
        decode = sum(self.decode_s(count * (prompt + i), ceiling, count) for i in range(1, output))
        return count * self.prefill_s(prompt, ceiling) + decode
