"""The kernels of gated delta layers, and the torch path, against the rule token by token in float64."""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton")

from engine.kernels.gated_delta.layer import gated_delta
from engine.kernels.gated_delta.rows import device_rows
from engine.kv.groups.state_blocks import Snapshot, StateBlockPool
from engine.kv.groups.state_pool import LayerState, StatePool, StateRow, StateShape
from engine.models.gated_delta.layer import DeltaProjections
from engine.models.gated_delta.rule import gated_delta_torch
from engine.step.states import StateTable

HEADS, KEY_HEADS, KEY, VALUE, TAPS, SLOTS, EPS = 4, 2, 16, 24, 4, 12, 1e-6
CHANNELS = 2 * KEY_HEADS * KEY + HEADS * VALUE
TOLERANCE = {torch.float32: 2e-4, torch.float16: 2e-2, torch.bfloat16: 8e-2}
#: The interpreter multiplies no matrices of bfloat16.
DTYPES = [torch.float32, torch.bfloat16 if torch.cuda.is_available() else torch.float16]
#: Rows of one token first, then rows in chunks. Snapshots are within rows, also before their first TAPS - 1 tokens.
STEPS: dict[str, list[StateRow]] = {
    "decodes": [StateRow(1, 3), StateRow(1, 0), StateRow(1, 7)],
    "mixed": [
        StateRow(1, 2),
        StateRow(1, 5),
        StateRow(2, 1, (Snapshot(1, 8),)),
        StateRow(131, 4, (Snapshot(2, 9), Snapshot(70, 10))),
        StateRow(1, 6),
        StateRow(64, 0),
    ],
    "chunks": [StateRow(65, 11, (Snapshot(64, 1),)), StateRow(3, 2)],
}


def make_layer(gen: torch.Generator, device: torch.device, dtype: torch.dtype) -> Any:
    """Returns the parameters of a layer, with the attributes of `GatedDelta`."""

    def normal(*size: int, scale: float = 1.0) -> torch.Tensor:
        return torch.randn(*size, generator=gen, device=device) * scale

    rule = SimpleNamespace(
        conv=normal(CHANNELS, TAPS, scale=0.5).to(dtype), decay_log=normal(HEADS), decay_bias=normal(HEADS)
    )
    norm = SimpleNamespace(weight=normal(VALUE).to(dtype), eps=EPS)
    sizes = {"key_heads": KEY_HEADS, "value_heads": HEADS, "key_dim": KEY, "value_dim": VALUE, "channels": CHANNELS}
    return SimpleNamespace(rule=rule, norm=norm, **sizes)


def reference(projected: DeltaProjections, layer: Any, state: LayerState, rows: Sequence[StateRow]) -> torch.Tensor:
    """The layer token by token in float64; writes the states after the rows and at the snapshots."""
    mixed, gates = (x.double() for x in projected)
    results, first = [], 0
    for row in rows:
        matrix, kept = state.recurrent[row.slot].double(), state.conv[row.slot].double()
        slots = dict(row.snapshots)
        for token in range(first, first + row.num_new):
            window = torch.cat((kept, mixed[token, None, :CHANNELS]))
            kept = window[1:]
            convolved = F.silu((window * layer.rule.conv.double().t()).sum(0))
            query, key, value = convolved.split((KEY_HEADS * KEY, KEY_HEADS * KEY, HEADS * VALUE))
            query, key = (
                (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()).repeat_interleave(HEADS // KEY_HEADS, 0)
                for x in (query.view(-1, KEY), key.view(-1, KEY))
            )
            beta = gates[token, :HEADS].sigmoid()
            bias, log = layer.rule.decay_bias.double(), layer.rule.decay_log.double()
            matrix = matrix * (-log.exp() * F.softplus(gates[token, HEADS:] + bias)).exp()[:, None, None]
            old = torch.einsum("hvk,hk->hv", matrix, key)
            new = (value.view(HEADS, VALUE) - old) * beta[:, None]
            matrix = matrix + new[:, :, None] * key[:, None]
            result = torch.einsum("hvk,hk->hv", matrix, query) / math.sqrt(KEY)
            normed = result / (result.square().mean(-1, keepdim=True) + EPS).sqrt() * layer.norm.weight.double()
            results.append((normed * F.silu(mixed[token, CHANNELS:].view(HEADS, VALUE))).flatten())
            slot = slots.get(token + 1 - first)
            if slot is not None:
                state.recurrent[slot], state.conv[slot] = matrix.float(), kept.to(state.conv.dtype)
        state.recurrent[row.slot], state.conv[row.slot] = matrix.float(), kept.to(state.conv.dtype)
        first += row.num_new
    return torch.stack(results)


def make_states(gen: torch.Generator, device: torch.device, dtype: torch.dtype) -> LayerState:
    shape = StateShape(layers=2, heads=HEADS, value_dim=VALUE, key_dim=KEY, channels=CHANNELS, taps=TAPS)
    layer = StatePool(shape, SLOTS, device, dtype).layers[1]
    for tensor in layer:
        tensor.copy_(torch.randn(tensor.shape, generator=gen, device=device))
    return layer


def compute(kind: str, projected: DeltaProjections, layer: Any, state: LayerState, rows: list[StateRow]) -> Any:
    if kind == "torch":
        return gated_delta_torch(projected, layer, state, rows)
    rule = {"conv": layer.rule.conv, "decay_log": layer.rule.decay_log, "decay_bias": layer.rule.decay_bias}
    norm = {"norm": layer.norm.weight, "eps": layer.norm.eps}
    return gated_delta(
        *projected, state, device_rows(rows, projected.mixed.device), **rule, **norm, key_heads=KEY_HEADS
    )


@pytest.mark.parametrize("kind", ["triton", "torch"])
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_step_equals_the_rule_token_by_token(
    kind: str, step: str, dtype: torch.dtype, device: torch.device, gen: torch.Generator
) -> None:
    rows, layer = STEPS[step], make_layer(gen, device, dtype)
    tokens = sum(row.num_new for row in rows)
    mixed = torch.randn(tokens, CHANNELS + HEADS * VALUE, generator=gen, device=device).to(dtype)
    gates = torch.randn(tokens, 2 * HEADS, generator=gen, device=device).to(dtype)
    if kind == "triton" and dtype == torch.float32:  # equal tokens: the inverse of a chunk must not lose all digits
        mixed[tokens // 4 :] = mixed[0]
        gates[tokens // 4 :, :HEADS] = 8.0
    projected, state = DeltaProjections(mixed, gates), make_states(gen, device, dtype)
    expected = LayerState(*(tensor.clone() for tensor in state))
    want = reference(projected, layer, expected, rows)
    got = compute(kind, projected, layer, state, rows)
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(got.double(), want, atol=tolerance * float(want.abs().max()), rtol=tolerance)
    assert torch.equal(state.conv, expected.conv)
    spread = float(expected.recurrent.abs().max())
    torch.testing.assert_close(state.recurrent, expected.recurrent, atol=tolerance * spread, rtol=tolerance)


def test_a_graph_finds_the_states_by_the_slots_of_the_scheduler(device: torch.device) -> None:
    shape = StateShape(layers=1, heads=1, value_dim=4, key_dim=4, channels=12, taps=2)
    states = StatePool(shape, 5, device, torch.float32)
    table = StateTable(states, 3, fused=True)
    pool = StateBlockPool(8, 4, num_states=5, spacing=2)
    leases = [pool.lease([], 1) for _ in range(3)]
    for order in ([0, 1, 2], [2, 0, 1]):  # another lease may take a slot
        entries = [SimpleNamespace(seq=SimpleNamespace(slot=slot, lease=leases[i])) for slot, i in enumerate(order)]
        table.stage(entries)  # type: ignore[arg-type]
        rows = table.of_graph(torch.tensor([2, 0, 3], device=device)).device
        live = [lease.slot for lease in leases if lease is not None]
        assert rows.decode_slots.tolist() == [live[order[2]], live[order[0]], states.dummy_slot]
        assert rows.chunks is None
