"""Measures the kernels of gated delta layers on a card.

    python benchmarks/gated_delta.py --out benchmarks/results/gated_delta-h200.json

The layer is that of Qwen3.5-35B-A3B: 32 value heads of 128 x 128 numbers in float32, 16 key heads, a convolution over 4
tokens of 8,192 channels in bf16. Times are medians of graph replays over layers that together miss the L2 cache. The
error is that of one step against the torch path in float32 with the same inputs.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.kernels import ceilings, error, seconds
from benchmarks.support import report
from engine.kernels.gated_delta.convolution import convolve
from engine.kernels.gated_delta.decode import delta_decode, gated_norm
from engine.kernels.gated_delta.layer import gated_delta
from engine.kernels.gated_delta.rows import device_rows
from engine.kv.groups.state_pool import StatePool, StateRow, StateShape
from engine.models.gated_delta.layer import DeltaProjections, GatedDelta
from engine.models.gated_delta.rule import gated_delta_torch
from engine.models.layers import allocate
from engine.models.spec import parse_spec

METRICS = """metrics:
- gated_delta_limit_ratio: time of the decode kernels of one layer (convolution, rule, norm) with 64 rows, over the time
  of a copy that reads and writes as many bytes as the states of the rows have.
- gated_delta_ROWSx1_us and _ratio: the same for other numbers of rows. *_rule_us: the kernel of the rule alone.
- gated_delta_prefill_TOKENS_us: all kernels of one layer for a prompt of this length.
- *_error: relative errors.
"""
DEVICE, BF16 = torch.device("cuda"), torch.bfloat16
HEADS, KEY_HEADS, DIM, TAPS, LAYERS = 32, 16, 128, 4, 8
ROWS, LENGTHS = (1, 8, 64, 256), (1024, 8192)
CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "hidden_size": 2048,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "vocab_size": 1024,
    "max_position_embeddings": 32768,
    "linear_num_value_heads": HEADS,
    "linear_num_key_heads": KEY_HEADS,
    "linear_key_head_dim": DIM,
    "linear_value_head_dim": DIM,
    "linear_conv_kernel_dim": TAPS,
}


class Rig(NamedTuple):
    """One layer's parameters, and states of LAYERS layers."""

    layer: GatedDelta
    states: StatePool

    def weights(self) -> dict[str, Any]:
        rule, norm = self.layer.rule, self.layer.norm
        made = {"conv": rule.conv, "decay_log": rule.decay_log, "decay_bias": rule.decay_bias}
        return made | {"norm": norm.weight, "eps": norm.eps, "key_heads": KEY_HEADS}


def make_rig(rows: int) -> Rig:
    spec: Any = parse_spec(CONFIG)
    with torch.device("meta"):
        layer = GatedDelta(spec)
    allocate(layer, DEVICE, BF16)
    generator = torch.Generator(DEVICE).manual_seed(5)
    for parameter in layer.parameters():
        parameter.data.normal_(0.0, 0.5, generator=generator)
    channels = layer.channels
    shape = StateShape(layers=LAYERS, heads=HEADS, value_dim=DIM, key_dim=DIM, channels=channels, taps=TAPS)
    states = StatePool(shape, rows, DEVICE, BF16)
    for state in states.layers:
        state.recurrent.normal_(0.0, 0.1, generator=generator)
        state.conv.normal_(0.0, 1.0, generator=generator)
    return Rig(layer, states)


def make_inputs(rig: Rig, tokens: int) -> DeltaProjections:
    generator = torch.Generator(DEVICE).manual_seed(tokens)
    widths = rig.layer.channels + HEADS * DIM, 2 * HEADS
    made = (torch.randn(tokens, width, generator=generator, device=DEVICE).to(BF16) for width in widths)
    return DeltaProjections(*made)


def step_error(rig: Rig, inputs: DeltaProjections, rows: list[StateRow]) -> float:
    """Returns the error of a step's result and states; the larger one."""
    before = rig.states.data.clone()
    got = gated_delta(*inputs, rig.states.layers[0], device_rows(rows, DEVICE), **rig.weights())
    got_states = rig.states.layers[0].recurrent.clone()
    rig.states.data.copy_(before)
    want = gated_delta_torch(inputs, rig.layer, rig.states.layers[0], rows)
    return max(error(got, want.double()), error(got_states, rig.states.layers[0].recurrent.double()))


def rule_alone(rig: Rig, inputs: DeltaProjections, slots: Tensor, qkv: Tensor, out: Tensor, i: int) -> None:
    rule, state = rig.layer.rule, rig.states.layers[i % LAYERS].recurrent
    delta_decode(qkv, inputs.gates, rule.decay_log, rule.decay_bias, state, slots, out, key_heads=KEY_HEADS)


def measure() -> dict[str, float]:
    """Returns the metrics."""
    table = ceilings()
    metrics = table.metrics
    for count in ROWS:
        rig = make_rig(count)
        rows = [StateRow(1, slot) for slot in range(count)]
        inputs, on_device = make_inputs(rig, count), device_rows(rows, DEVICE)
        name = f"gated_delta_{count}x1"
        metrics[f"{name}_error"] = round(step_error(rig, inputs, rows), 5)
        weights = rig.weights()

        def step(i: int, rig: Rig = rig, inputs: Any = inputs, rows: Any = on_device, more: Any = weights) -> object:
            return gated_delta(*inputs, rig.states.layers[i % LAYERS], rows, **more)

        measured = seconds(step)
        state = rig.states.layers[0]
        limit = 2 * count * (state.recurrent[0].nbytes + state.conv[0].nbytes) / (table.copy_gb_s * 1e9)
        metrics[f"{name}_us"] = round(measured * 1e6, 2)
        metrics[f"{name}_ratio"] = round(measured / limit, 3)
        qkv = convolve(inputs.mixed[:, : rig.layer.channels], rig.layer.rule.conv, state.conv, on_device)
        out = torch.empty(count, HEADS, DIM, dtype=BF16, device=DEVICE)
        alone = seconds(partial(rule_alone, rig, inputs, on_device.decode_slots, qkv, out))
        metrics[f"{name}_rule_us"] = round(alone * 1e6, 2)
        z = inputs.mixed[:, rig.layer.channels :]
        norm = seconds(lambda _, out=out, z=z, norm=rig.layer.norm: gated_norm(out, z, norm.weight, norm.eps))
        metrics[f"{name}_norm_us"] = round(norm * 1e6, 2)
    metrics["gated_delta_limit_ratio"] = metrics["gated_delta_64x1_ratio"]
    for length in LENGTHS:
        rig = make_rig(1)
        rows = [StateRow(length, 0)]
        inputs, on_device = make_inputs(rig, length), device_rows(rows, DEVICE)
        metrics[f"gated_delta_prefill_{length}_error"] = round(step_error(rig, inputs, rows), 5)
        weights = rig.weights()

        def prompt(i: int, rig: Rig = rig, inputs: Any = inputs, rows: Any = on_device, more: Any = weights) -> object:
            return gated_delta(*inputs, rig.states.layers[i % LAYERS], rows, **more)

        metrics[f"gated_delta_prefill_{length}_us"] = round(seconds(prompt) * 1e6, 1)
    return metrics


def main() -> None:
    args = report.arguments(f"{__doc__}\n{METRICS}").parse_args()
    metrics = measure()
    report.show(metrics)
    report.write(args.out, "gated_delta", metrics, "torch", "triton")


if __name__ == "__main__":
    main()
