"""The grouped products of adapters give the numbers of plain torch, and a decoder of kernels those of a plain one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.adapters.ops import AdapterOps
from engine.adapters.packed import Adapter, pack_adapter
from engine.adapters.peft import AdapterFile, LoraPair
from engine.adapters.rows import NO_ADAPTER, AdapterRows, SlotMemory, StepAdapters
from engine.adapters.sites import DecoderSites
from engine.adapters.slots import sites_of
from engine.adapters.torch_rows import TorchRows
from engine.adapters.triton_rows import RowBuffer
from engine.attention.base import StepShape
from engine.attention.torch_backend import TorchAttention
from engine.attention.triton_backend import TritonAttention
from engine.kernels.gemm import gemm_swiglu
from engine.kv.kv_pool import LayerKV
from engine.models.base import ForwardContext
from engine.models.decoder import Decoder
from engine.models.ops import rms_norm_torch
from engine.models.spec import Shard, parse_spec
from engine.models.weights.random_weights import randomize
from tests.rigs.engine.bare_model import LLAMA

CONFIG: dict[str, Any] = LLAMA | {"hidden_size": 48, "intermediate_size": 80, "head_dim": 16, "hidden_act": "silu"}
CPU = torch.device("cpu")
MAX_RANK, SLOTS = 48, 3
#: Rows of a step by adapter slot: the rows of an adapter need one or more tiles, lie apart, or there are none.
STEPS = {
    "one row": [1],
    "one row of the base": [NO_ADAPTER],
    "mixed": [2, 0, NO_ADAPTER, 0, 2, 1, NO_ADAPTER, 0],
    "several tiles": [1] * 20 + [NO_ADAPTER] * 3 + [0] * 17 + [1] * 5,
    "large tiles": [0] * 130 + [2] * 90 + [NO_ADAPTER] * 40,
}


class Rig:
    """A decoder in plain torch and one in kernels, both with the same weights, and adapters for both."""

    def __init__(
        self,
        device: torch.device,
        dtype: torch.dtype = torch.float32,
        ranks: tuple[int, int, int] = (5, 16, 40),
        max_rank: int = MAX_RANK,
        **fields: Any,  # Of config.json
    ) -> None:
        spec = parse_spec(CONFIG | fields, {})
        self.plain = Decoder(spec, 64, device, dtype, fused=False)
        self.fused = Decoder(spec, 64, device, dtype, fused=True)
        randomize(self.plain, 1)
        self.fused.load_state_dict(self.plain.state_dict())
        self.sites, self.device = sites_of(self.plain), device
        files = [self.file(seed, rank) for seed, rank in enumerate(ranks)]
        self.adapters = [pack_adapter(file, self.sites, dtype, pin=False) for file in files]
        # The capacity is that of the largest adapter; what lies behind a smaller one is NaN and must not be read.
        numbers = torch.full((SLOTS, max(len(a.numbers) for a in self.adapters)), float("nan"), dtype=dtype)
        for slot, adapter in enumerate(self.adapters):
            numbers[slot, : len(adapter.numbers)] = adapter.numbers
        table, scales = (
            torch.stack(parts) for parts in zip(*((a.table, a.scales) for a in self.adapters), strict=True)
        )
        on_device = (part.to(device) for part in (numbers, table, scales))
        self.memory = SlotMemory(sites_of(self.fused), max_rank, *on_device, fuses=True)

    def file(self, seed: int, rank: int) -> AdapterFile:
        """Makes an adapter of some modules, with another rank for some."""
        gen = torch.Generator().manual_seed(seed)
        pairs: dict[str, LoraPair] = {}
        for index, (name, (inputs, outputs)) in enumerate(self.sites.shapes.items()):
            if (index + seed) % 5 == 4:
                continue
            own = rank if index % 3 else max(1, rank - 4)
            a, b = (torch.randn(shape, generator=gen) * 0.3 for shape in ((own, inputs), (outputs, own)))
            pairs[name] = LoraPair(a, b, 0.5 + seed)
        return AdapterFile(str(seed), pairs)

    def rows(self, slots: list[int], *, kernels: bool, padding: int = 0) -> AdapterRows:
        if kernels:
            buffer = RowBuffer(self.memory, len(slots) + padding)
            buffer.stage(np.array(slots), len(slots) + padding)
            return buffer.rows(len(slots) + padding)
        adapters: list[Adapter | None] = list(self.adapters)
        if self.device.type == "cuda":
            pytest.skip("plain torch computes adapters on a CPU")
        return TorchRows(self.sites, adapters, np.array(slots))


@pytest.fixture(scope="module")
def rig() -> Rig:
    if torch.cuda.is_available():
        pytest.skip("benchmarks/lora.py --kernels compares with float64 on a GPU")
    return Rig(CPU)


@pytest.mark.parametrize("name", STEPS)
def test_kernels_equal_torch(name: str, rig: Rig, gen: torch.Generator) -> None:
    """qkv has a norm before it and three parts, out has neither."""
    slots = STEPS[name]
    pair = [rig.rows(slots, kernels=kernels) for kernels in (True, False)]
    layer = rig.plain.layer_list[0]
    for linear, norm in ((layer.attention.qkv, layer.attention_norm), (layer.attention.out, None)):
        site = rig.sites.of(linear)
        x = torch.randn(len(slots), site.inputs, generator=gen)
        outs = [torch.ones(len(slots), sum(site.outputs)) for _ in pair]
        for rows, out in zip(pair, outs, strict=True):
            rows.expand(rows.shrink(x, site, norm), out, factor=0.7)
        torch.testing.assert_close(outs[0], outs[1], atol=1e-4, rtol=1e-4)


def test_the_smallest_and_the_largest_rank(gen: torch.Generator) -> None:
    limits = Rig(CPU, ranks=(1, 256, 17), max_rank=256)
    pair = [limits.rows(STEPS["mixed"], kernels=kernels) for kernels in (True, False)]
    layer = limits.plain.layer_list[0]
    x = torch.randn(len(STEPS["mixed"]), 48, generator=gen)
    found = []
    for rows in pair:
        qkv = torch.zeros(len(x), layer.attention.qkv.weight.shape[0])
        rows.expand(rows.shrink(x, limits.sites.of(layer.attention.qkv), None), qkv)
        gate_up = torch.zeros(len(x), layer.mlp.gate_up.weight.shape[0])
        shrunk = rows.shrink(x, limits.sites.of(layer.mlp.gate_up), layer.mlp_norm)
        found.append([qkv, rows.expand_swiglu(shrunk, gate_up)])
    for got, want in zip(*found, strict=True):
        torch.testing.assert_close(got, want, atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize("name", ["one row", "mixed"])
def test_other_operations_equal_torch(name: str, rig: Rig, gen: torch.Generator) -> None:
    slots = STEPS[name]
    pair = [rig.rows(slots, kernels=kernels) for kernels in (True, False)]
    layer = rig.plain.layer_list[1]
    qkv, gate_up = rig.sites.of(layer.attention.qkv), rig.sites.of(layer.mlp.gate_up)
    x, tokens = torch.randn(len(slots), 48, generator=gen), torch.arange(len(slots)) % 96
    base = torch.randn(len(slots), 160, generator=gen)
    results: list[list[Tensor]] = []
    for rows in pair:
        kv, embedded = torch.zeros(len(slots), 64), torch.zeros(len(slots), 48)
        rows.expand(rows.shrink(x, qkv, layer.attention_norm), kv, first_part=1)
        rows.add_embedding(embedded, tokens)
        results.append([kv, embedded, rows.expand_swiglu(rows.shrink(x, gate_up, layer.mlp_norm), base.clone())])
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)


@torch.inference_mode()
def test_one_row_whose_outputs_do_not_fill_the_last_program(gen: torch.Generator) -> None:
    odd, x, found = Rig(CPU, intermediate_size=82), torch.randn(1, 48, generator=gen), list[Tensor]()
    for model, kernels in ((odd.fused, True), (odd.plain, False)):
        layer = model.layer_list[0]
        ops = AdapterOps(model._ops, StepAdapters(odd.rows([2], kernels=kernels)))
        gated = ops.norm_swiglu(x, layer.mlp_norm, layer.mlp.gate_up)
        found += [gated, ops.add_linear(x.clone(), gated, layer.mlp.down)]
    torch.testing.assert_close(found[:2], found[2:], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("slot", range(SLOTS))
def test_a_chunk_of_one_adapter_needs_no_expand(slot: int, rig: Rig, gen: torch.Generator) -> None:
    """The product of gate and up adds the change of both, and computes SiLU x mul."""
    layer, rows = rig.plain.layer_list[0], rig.rows([slot] * 20, kernels=True)
    gate_up, x = layer.mlp.gate_up, torch.randn(20, 48, generator=gen)
    normed = rms_norm_torch(x, layer.mlp_norm)
    shrunk = rows.shrink(normed, rig.sites.of(gate_up), None)
    rows.slots = np.array([slot] * 20)  # known in a step that no graph captures
    change = rows.chunk_change(shrunk)
    assert change is not None
    assert change.x is normed
    got = gemm_swiglu(normed, gate_up.weight, change=change, tile=(16, 16, 16), group=2)
    want = rows.expand_swiglu(shrunk, normed @ gate_up.weight.t())
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)
    rows.slots = np.array([slot] * 19 + [NO_ADAPTER])
    assert rows.chunk_change(shrunk) is None


@torch.inference_mode()
@pytest.mark.parametrize("owners", [[2, NO_ADAPTER, 0], [0], [1], [2], [NO_ADAPTER]])
def test_a_decoder_of_kernels_equals_a_plain_one(owners: list[int], rig: Rig) -> None:
    """Three prompts in one step, of which the last tokens are results, or one row."""
    counts = [5, 1, 9] if len(owners) > 1 else [1]
    slots = np.repeat(owners, counts).tolist()
    ends = np.cumsum(counts)
    spec, total = rig.plain.spec, sum(counts)
    tokens, positions = torch.arange(total) * 5 % 96, torch.cat([torch.arange(n) for n in counts])
    blocks = [np.array(numbers) for numbers in ([0, 1], [2], [3, 4, 5])]
    found = []
    for model, kind, kernels in ((rig.fused, TritonAttention, True), (rig.plain, TorchAttention, False)):
        pool = [LayerKV(torch.zeros(9, 2, spec.num_kv_heads, 4, spec.head_dim)) for _ in range(spec.num_layers)]
        backend: Any = kind(pool, spec.num_heads, spec.windows, 8)
        metadata = backend.prepare(StepShape([0] * len(counts), counts, blocks[: len(counts)]))
        results = rig.rows([slots[end - 1] for end in ends], kernels=kernels)
        step = StepAdapters(rig.rows(slots, kernels=kernels), results)
        context = ForwardContext(pool, backend, metadata, adapters=step)
        hidden = model.forward(tokens, positions, context, torch.from_numpy(ends - 1))
        found.append(model.logits(hidden, results))
    torch.testing.assert_close(found[0], found[1], atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("size", [2, 4])
def test_parts_of_ranks_make_up_the_whole(size: int, rig: Rig, gen: torch.Generator) -> None:
    """Ranks have outputs of qkv, gate and up, and a term of the sum of out and down. Four ranks share two KV heads."""
    slots, norm, whole = STEPS["mixed"], rig.plain.norm, rig.rows(STEPS["mixed"], kernels=False)
    files = [rig.file(seed, rank) for seed, rank in enumerate((5, 16, 40))]
    sums: dict[str, Tensor] = {}
    inputs = {
        name: torch.randn(len(slots), n, generator=gen) for name, n in (("states", 48), ("out", 64), ("down", 80))
    }
    for shard in (Shard(rank, size) for rank in range(size)):
        model = Decoder(shard.shard_spec(rig.plain.spec), 1, CPU, torch.float32, fused=False)
        sites = sites_of(model, shard)
        assert sites.shapes == rig.sites.shapes
        packed = [pack_adapter(file, sites, torch.float32, pin=False, shard=shard) for file in files]
        rows, layers = rows_in_slots(sites, packed), (model.layer_list[0], rig.plain.layer_list[0])
        for pair in ([layer.attention.qkv for layer in layers], [layer.mlp.gate_up for layer in layers]):
            own, site = sites.of(pair[0]), rig.sites.of(pair[1])
            out, expected = (torch.zeros(len(slots), sum(each.outputs)) for each in (own, site))
            rows.expand(rows.shrink(inputs["states"], own, norm), out)
            whole.expand(whole.shrink(inputs["states"], site, norm), expected)
            columns = zip(expected.split(site.outputs, dim=1), own.copies, own.outputs, strict=True)
            parts = [column[:, shard.among(copies).rank * n :][:, :n] for column, copies, n in columns]
            torch.testing.assert_close(out, torch.cat(parts, 1), atol=1e-4, rtol=1e-4)
        for name, linear in (("out", layers[0].attention.out), ("down", layers[0].mlp.down)):
            part = inputs[name].chunk(size, dim=1)[shard.rank]
            total = sums.setdefault(name, torch.zeros(len(slots), 48))
            rows.expand(rows.shrink(part, sites.of(linear), None), total)
    for name, linear in (("out", rig.plain.layer_list[0].attention.out), ("down", rig.plain.layer_list[0].mlp.down)):
        expected = torch.zeros(len(slots), 48)
        whole.expand(whole.shrink(inputs[name], rig.sites.of(linear), None), expected)
        torch.testing.assert_close(sums[name], expected, atol=1e-4, rtol=1e-4)


def rows_in_slots(sites: DecoderSites, adapters: list[Adapter]) -> AdapterRows:
    """Returns the rows of the step "mixed" with these adapters in the slots of a rank."""
    numbers = torch.zeros(SLOTS, sites.numbers(MAX_RANK))
    for slot, adapter in enumerate(adapters):
        numbers[slot, : len(adapter.numbers)] = adapter.numbers
    table, scales = (torch.stack(parts) for parts in zip(*((a.table, a.scales) for a in adapters), strict=True))
    buffer = RowBuffer(SlotMemory(sites, MAX_RANK, numbers, table, scales), len(STEPS["mixed"]))
    buffer.stage(np.array(STEPS["mixed"]), len(STEPS["mixed"]))
    return buffer.rows(len(STEPS["mixed"]))


def test_rows_without_a_sequence_are_finite(rig: Rig, gen: torch.Generator) -> None:
    """A graph has more rows than the step: these are rows of the base."""
    layer = rig.plain.layer_list[0]
    rows = rig.rows([0, 1], kernels=True, padding=6)
    shrunk = rows.shrink(torch.randn(8, 48, generator=gen), rig.sites.of(layer.mlp.gate_up), layer.mlp_norm)
    out = rows.expand_swiglu(shrunk, torch.ones(8, 160))
    torch.testing.assert_close(out[2:], torch.full((6, 80), float(torch.nn.functional.silu(torch.ones(())))))
