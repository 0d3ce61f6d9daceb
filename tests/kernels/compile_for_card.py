"""Compiles every kernel for one card without a GPU, with the arguments of a large model's step.

    python tests/kernels/compile_for_card.py 89

The argument is a compute capability of `card.SHARED_BYTES`. The program runs without TRITON_INTERPRET. Kernels are
compiled to machine code and not launched. This finds errors that the interpreter does not, because it runs Python: for
example, a variable that changes its type, or a tile that is too large for the card's shared memory.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget

from common.types import SamplingParams
from engine.kernels import (
    card,
    decode_inputs,
    dense_prefill,
    gemm,
    kv_write,
    norm,
    paged_decode,
    paged_prefill,
    pdl,
    peer_reduce,
)
from engine.kernels.adapters import changes
from engine.kernels.adapters import products as adapters
from engine.kernels.experts import grouped as experts_grouped
from engine.kernels.experts import routing as experts_routing
from engine.kernels.experts import vector as experts_vector
from engine.kernels.experts import weight as experts_weight
from engine.kernels.fixed_order import attention as fixed_order_attention
from engine.kernels.fixed_order.gemm import fixed_order_gemm
from engine.kernels.gated_delta.layer import gated_delta
from engine.kernels.gated_delta.rows import DeviceRows, device_rows
from engine.kernels.latent import attention as latent_attention
from engine.kernels.latent.write import latent_write
from engine.kernels.quantized import activations, choice, dequantize, linear
from engine.kernels.quantized.device_weight import DeviceWeight, prepare
from engine.kernels.quantized.product import Tile
from engine.kv.groups.state_blocks import Snapshot
from engine.kv.groups.state_pool import LayerState, StateRow
from engine.kv.kv_pool import LayerKV
from engine.quantization.weight import QuantizedWeight
from engine.sampling.device_sampler import DeviceSampler
from engine.sampling.sampler import SampleRow

HEADS, KV_HEADS, DIM, BLOCK, HIDDEN, INNER, VOCAB = 32, 8, 128, 16, 4096, 14336, 128256
CPU = torch.device("cpu")


@dataclass(frozen=True)
class CompileOnlyDriver:
    """The part of a Triton driver that compilation needs."""

    capability: int

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)


def compile_only(run: Any, shared_bytes: int) -> Any:
    """Wraps JITFunction.run so that it compiles without launching, and checks the shared memory."""

    def compiled(self: Any, *args: Any, **kwargs: Any) -> Any:
        kernel = run(self, *args, **(kwargs | {"warmup": True}))
        assert kernel.metadata.shared <= shared_bytes, (
            f"{kernel.name} needs {kernel.metadata.shared} bytes of shared memory, the card has {shared_bytes}"
        )
        return kernel

    return compiled


def layer(fp8: bool) -> LayerKV:
    kv = torch.zeros(64, 2, KV_HEADS, BLOCK, DIM, dtype=torch.uint8 if fp8 else torch.bfloat16)
    return LayerKV(kv, torch.zeros(64, KV_HEADS, BLOCK, 2, dtype=torch.bfloat16) if fp8 else None)


def half(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.bfloat16)


def products() -> None:
    x, scale = half(1, HIDDEN), half(HIDDEN)
    gemm.gemv(x, half(6144, HIDDEN), norm=scale)
    gemm.gemv(x, half(HIDDEN, HIDDEN), residual=x, bias=half(HIDDEN))
    gemm.gemv(x, half(2 * INNER, HIDDEN), norm=scale, gated=True)
    rows = half(16, HIDDEN)
    gemm.skinny_gemm(rows, half(6144, HIDDEN), bias=half(6144))
    gemm.skinny_gemm(rows, half(HIDDEN, HIDDEN), residual=rows, out=rows)
    gemm.skinny_gemm(rows, half(2 * INNER, HIDDEN), gated=True)
    norm.rms_norm(rows, scale, 1e-5)
    norm.rms_norm(rows, scale, 1e-5, residual=rows)
    norm.silu_mul(half(16, 2 * INNER))


def sums_over_ranks() -> None:
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        addresses = torch.zeros(2, dtype=torch.int64)
        peer_reduce.one_shot_all_reduce(torch.zeros(64, HIDDEN, dtype=dtype)[:32], addresses, 1, 2)
    peer_reduce.one_shot_all_reduce(half(1, HIDDEN), torch.zeros(8, dtype=torch.int64), 7, 8)
    for rank in (peer_reduce.SOURCE, 1):  # the numbers of a step from a graph, and ids
        for dtype in (torch.int32, torch.int64):
            peer_reduce.one_shot_broadcast(torch.zeros(99, dtype=dtype), torch.zeros(2, dtype=torch.int64), rank, 2)


def cache(fp8: bool) -> None:
    qkv, slots, table = (
        half(24, (HEADS + 2 * KV_HEADS) * DIM),
        torch.zeros(24, dtype=torch.int64),
        torch.zeros(1024, 64),
    )
    for weight in (None, half(DIM)):
        kv_write.rope_kv_write(
            qkv, layer(fp8), slots, slots, table, table, num_heads=HEADS, q_norm=weight, k_norm=weight
        )
    kv_write.rope_kv_write(
        qkv[:1], layer(fp8), slots[:1], slots[:1], table, table, num_heads=HEADS, soon=half(HIDDEN, HIDDEN)
    )
    kv_write.kv_write(half(24, 2, KV_HEADS, DIM), layer(fp8), slots)
    dense_prefill.gather_kv(layer(fp8), torch.zeros(64, dtype=torch.int32), 100, dtype=torch.bfloat16)


def attention(fp8: bool, new: int, window: int, softcap: float) -> None:
    seqs, small = 4, torch.int32
    cu_q, lens = torch.arange(seqs + 1, dtype=small) * new, torch.full((seqs,), 200, dtype=small)
    tables, q = torch.zeros(seqs, 16, dtype=small), half(seqs * new, HEADS, DIM)
    space = paged_decode.decode_workspace(264, HEADS, KV_HEADS, new, DIM, CPU)
    plan = paged_decode.plan_decode(
        cu_q, lens, space, num_kv_heads=KV_HEADS, head_dim=DIM, itemsize=1 if fp8 else 2, window=window
    )
    kind: dict[str, Any] = {"max_query": new, "scale": 0.1, "softcap": softcap, "sinks": half(HEADS)}
    paged_decode.paged_decode(q, layer(fp8), tables, cu_q, lens, plan, space, **kind)
    paged_decode.paged_decode(q, layer(fp8), tables, cu_q, lens, plan, space, first=1, **kind)
    if new > 1:
        paged_prefill.paged_prefill(q, layer(fp8), tables, cu_q, lens, window=window, **kind)
        tiles, options = torch.zeros(99, dtype=small), {"scale": 0.1, "softcap": softcap, "sinks": half(HEADS)}
        for tokens in (64, 1024):
            paged_prefill.listed_prefill(
                q, layer(fp8), tables, cu_q, lens, tiles, max_tokens=tokens, window=window, out=q, **options
            )


def latents() -> None:
    """Latent attention of DeepSeek-V2-Lite (16 heads) and V3 (128 heads)."""
    rank, rope, seqs, small = 512, 64, 4, torch.int32
    cached = LayerKV(torch.zeros(64, 1, 1, BLOCK, rank + rope, dtype=torch.bfloat16), None, rank)
    for heads, new in ((16, 1), (128, 1), (16, 300)):
        q, out = half(seqs * new, heads, rank + rope), half(seqs * new, heads, rank)
        cu_q, lens = torch.arange(seqs + 1, dtype=small) * new, torch.full((seqs,), 400, dtype=small)
        rows = torch.zeros(seqs, 32, dtype=small), cu_q, lens
        if new == 1:
            tile = latent_attention.latent_tile(heads, cached)
            space = latent_attention.latent_workspace(tile, heads, new, rank, CPU)
            sizes = {"num_kv_heads": 1, "head_dim": rank + rope, "itemsize": 2}
            plan = paged_decode.plan_decode(cu_q, lens, space, tile=latent_attention.decode_tile(tile), **sizes)
            latent_attention.latent_decode(q, cached, *rows, plan, space, max_query=1, scale=0.1, out=out)
        else:
            latent_attention.latent_prefill(q, cached, *rows, max_query=new, scale=0.1, out=out)
            tiles = torch.zeros(99, dtype=small)
            latent_attention.listed_prefill(q, cached, *rows, tiles, max_tokens=512, scale=0.1, out=out)
    slots, table = torch.zeros(4, dtype=torch.int64), torch.zeros(1024, rope // 2)
    query = {"query": q[:4, :, rank:], "rotated": q[4:8, :, rank:]}
    for interleaved, more in ((True, query), (False, {})):
        places = cached, slots, slots, table, table
        latent_write(half(4, rank + rope), half(rank), 1e-6, *places, interleaved=interleaved, **more)


def experts(native: bool) -> None:
    """Mixtures of experts in the forms of Qwen3-30B-A3B and gpt-oss-20b, for few rows, a batch and a prompt."""
    for kind in ("plain", "fp8", "fp8_block", "mxfp4", "int4"):
        gpt_oss = kind == "mxfp4"
        hidden, inner, count, top_k = (2880, 2880, 32, 4) if gpt_oss else (2048, 768, 128, 8)
        rule = experts_routing.RoutingRule(top_k)
        gate_up, down = (expert_weight(kind, *size) for size in ((2 * inner, hidden), (hidden, inner)))
        biases = {"gate_up_bias": half(2, 2 * inner), "down_bias": half(2, hidden)} if gpt_oss else {}
        options: dict[str, Any] = {"gpt_oss": gpt_oss, "native": native, **biases}
        routed = torch.zeros(1, top_k), torch.zeros(1, top_k, dtype=torch.int32)
        x = half(1, hidden)
        experts_routing.norm_and_route(x, x[0], 1e-6, half(count, hidden), rule, bias=half(count))
        experts_vector.vector_rows(x, *routed, gate_up, down, residual=x, **options)
        for rows in (16, 128, 1024):
            x = half(rows, hidden)
            weights, chosen = experts_routing.route(torch.zeros(rows, count), rule)
            copies = experts_routing.sort_copies(
                chosen, 2, experts_grouped.block_rows(rows * top_k, count, gate_up.kind)
            )
            experts_grouped.many_rows(x, weights, chosen, copies, gate_up, down, residual=x, **options)
    rule = experts_routing.RoutingRule(8, sigmoid=True, groups=8, top_groups=4)
    experts_routing.route(torch.zeros(2, 256), rule, torch.zeros(256))


def expert_weight(kind: str, outputs: int, inputs: int) -> experts_weight.ExpertWeight:
    if kind == "plain":
        return experts_weight.plain_weight(half(2, outputs, inputs))
    if kind == "mxfp4":
        scales = torch.zeros(2, outputs, inputs // 32, dtype=torch.uint8)
        return experts_weight.mxfp4_weight(torch.zeros(2, outputs, inputs // 2, dtype=torch.uint8), scales)
    if kind == "int4":
        groups = torch.zeros(2, outputs, inputs // 128)
        return experts_weight.int4_weight(torch.zeros(2, outputs, inputs // 2).byte(), groups, groups.byte())
    blocks = (-(-outputs // 128), -(-inputs // 128)) if kind == "fp8_block" else (outputs, 1)
    return experts_weight.fp8_weight(torch.zeros(2, outputs, inputs).to(torch.float8_e4m3fn), torch.zeros(2, *blocks))


def quantized_weights(dtype: torch.dtype) -> list[DeviceWeight]:
    """Returns weights [1024, 1024] of each form: 4 bits without and with zeros, int8, e4m3 per output and in blocks."""
    size, ones = 1024, torch.ones
    nibbles, small = torch.zeros(size, size // 2, dtype=torch.uint8), torch.zeros(size, size, dtype=torch.int8)
    zeros, codes = torch.zeros(size, 8, dtype=torch.uint8), small.to(torch.float8_e4m3fn)
    weights = [
        QuantizedWeight("int4", nibbles, ones(size, 8), group_size=128),
        QuantizedWeight("int4", nibbles, ones(size, 8), zeros, group_size=128),
        QuantizedWeight("int8", small, ones(size, 1), group_size=size),
        QuantizedWeight("fp8", codes, ones(size, 1), group_size=size),
        QuantizedWeight("fp8", codes, ones(8, 8), block=True, group_size=128),
    ]
    return [prepare(weight, dtype) for weight in weights]


def quantized_products(dtype: torch.dtype, *, native_e4m3: bool, every: int) -> None:
    """Compiles products with quantised weights.

    Args:
        native_e4m3: the card converts to e4m3 (compute capability 8.9).
        every: compile each tile of the tables whose index this number divides. All tiles take minutes.
    """
    norm = torch.zeros(1024, dtype=dtype)
    for weight in quantized_weights(dtype)[1:]:
        table = choice.table_of(weight)  # no card, so BYTES_ONLY for bytes
        methods = dict.fromkeys(method for entry in table for method in entry[1:] if isinstance(method, Tile))
        for i, tile in enumerate(list(methods)[::every]):
            x = torch.zeros(min(tile.rows, 200), 1024, dtype=dtype)
            if i % 2:
                linear.quantized_linear(x, weight, norm=norm, gated=True, method=tile)
            else:
                linear.quantized_linear(x, weight, residual=x, out=x, method=tile)
        dequantize.dequantize(weight)
    for kind in (torch.float8_e4m3fn, torch.int8) if native_e4m3 else (torch.int8,):
        activations.quantize(torch.zeros(4, 1024, dtype=dtype), kind, norm=norm)
        activations.quantize(torch.zeros(4, 1024, dtype=dtype), kind, group=True)


def fixed_order() -> None:
    for rows in (1, 64, 128, 4096):
        x = half(rows, HIDDEN)
        fixed_order_gemm(x, half(6144, HIDDEN), bias=half(6144))
        fixed_order_gemm(x, half(HIDDEN, HIDDEN), residual=x, out=x)
        fixed_order_gemm(x, half(2 * INNER, HIDDEN), gated=True)
    out = torch.zeros(1, VOCAB)
    fixed_order_gemm(half(1, HIDDEN), half(VOCAB, HIDDEN), out=out)
    seqs, small = 4, torch.int32
    for new in (1, 5, 300):
        cu_q, lens = torch.arange(seqs + 1, dtype=small) * new, torch.full((seqs,), 2000, dtype=small)
        tables, q = torch.zeros(seqs, 128, dtype=small), half(seqs * new, HEADS, DIM)
        rows_of = tables, cu_q, lens
        if new <= paged_decode.MAX_QUERY:
            plan = fixed_order_attention.plan_decode(cu_q, lens, num_programs=264, num_kv_heads=KV_HEADS)
            kind: dict[str, Any] = {"max_query": new, "scale": 0.1, "out": q}
            fixed_order_attention.paged_decode(q, layer(False), *rows_of, plan, **kind)
            continue
        fixed_order_attention.paged_prefill(q, layer(False), *rows_of, max_query=new, scale=0.1)
        tiles = torch.zeros(99, dtype=small)
        for tokens in (64, 1024):
            fixed_order_attention.listed_prefill(q, layer(False), *rows_of, tiles, max_tokens=tokens, scale=0.1, out=q)


def inputs() -> None:
    for query in (1, 5):
        words = decode_inputs.packed_width(query, BLOCK)
        out = decode_inputs.DecodeInputs.empty(8, 8 * query, 64, CPU)
        tables = torch.zeros(9, 64, dtype=torch.int32)
        last = torch.zeros(9, dtype=torch.int64)
        packed = torch.zeros(8, words, dtype=torch.int32)
        decode_inputs.decode_inputs(packed, tables, last, out, query=query, block_size=BLOCK)


def samples() -> None:
    sampler = DeviceSampler(4, VOCAB, CPU)
    sampler.stage(0, SampleRow(SamplingParams(top_p=0.9, presence_penalty=1.0), [1, 2], 1))
    sampler.flush()
    index = torch.zeros(4, dtype=torch.int32)
    for allowed in (None, torch.zeros(4, VOCAB // 32, dtype=torch.int32)):
        sampler.sample(torch.zeros(4, VOCAB), index, index, allowed)
    long, finite = index.long(), torch.ones(4, dtype=torch.bool)
    for drafts in (None, (long, index)):
        sampler.sample(torch.zeros(4, VOCAB), long, index, drafts=drafts, results=long.clone())
    sampler.accept_drafts(
        long, finite, long, torch.zeros(2, dtype=torch.int32), long[:1], torch.zeros(5).long(), query=5
    )


def adapter_products() -> None:
    """Adapters of queries, keys and values, of gate and up, and of the output, for few rows and for a prompt."""
    norms, outputs = half(HIDDEN), (HIDDEN, 1024, 1024)
    for rows, tile, max_rank, gated in ((1, 16, 16, False), (64, 16, 256, True), (512, 64, 16, False)):
        table = torch.zeros(8, 130, 8, dtype=torch.int64)
        weights = adapters.SlotWeights(half(8, 1 << 16), table, torch.zeros(8, 130, 3), max_rank)
        order, tiles = torch.zeros(rows, dtype=torch.int32), torch.zeros(3 * 9, dtype=torch.int32)
        sizes = (INNER, INNER) if gated else outputs if tile == 16 else (HIDDEN,)
        base = half(rows, sum(sizes))
        place: dict[str, Any] = {"site": 3, "tile": tile}
        norm_weight = norms if tile == 16 else None
        states, squares = adapters.shrink(
            half(rows, HIDDEN), weights, order, tiles, norm=norm_weight, parts=len(sizes), **place
        )
        place |= {"squares": squares, "eps": 1e-5, "inputs": HIDDEN, "outputs": sizes, "gated": gated}
        adapters.expand(states, weights, base, half(rows, INNER) if gated else base, order, tiles, **place)
        adapters.gather_states(torch.zeros(rows, dtype=torch.int64), weights, 3, order, tiles, tile=tile)
        if rows == 1:
            change = changes.RowChange(states, weights, tiles, 3, sizes, normed=False)
            gemm.gemv(half(1, HIDDEN), half(sum(sizes), HIDDEN), norm=norms, change=change)


def chunk_with_adapter() -> None:
    """The product of gate and up of a prompt that has one adapter, of the largest rank."""
    rows, rank, table = 256, changes.MAX_CHUNK_RANK, torch.zeros(8, 130, 8, dtype=torch.int64)
    weights, tiles = adapters.SlotWeights(half(8, 1 << 16), table, torch.zeros(8, 130, 3), rank), table.new_zeros(3)
    x = half(rows, HIDDEN)
    change = changes.ChunkChange(x, torch.zeros(8, rows, 2 * rank), weights, tiles.int(), 3)
    gemm.gemm_swiglu(x, half(2 * INNER, HIDDEN), change=change)


def gated_delta_layers(capability: int) -> None:
    """A layer of Qwen3.5-35B-A3B: rows of one token, and rows in chunks with a snapshot."""
    heads, key_heads, dim, taps = 32, 16, 128, 4
    channels = 2 * key_heads * dim + heads * dim
    rows = [StateRow(1, 0), StateRow(1, 1), StateRow(100, 2, (Snapshot(64, 3),))]
    # Each number format compiles for a minute or more. 80 has the least shared memory in which float32 fits; 86 has the
    # least of all.
    dtypes = {80: [torch.float32], 86: [torch.bfloat16], 90: [torch.bfloat16]}.get(capability, [])
    for dtype in dtypes:
        state = LayerState(torch.zeros(4, heads, dim, dim), torch.zeros(4, taps - 1, channels, dtype=dtype))
        inputs = half(102, channels + heads * dim).to(dtype), half(102, 2 * heads).to(dtype)
        rule: dict[str, Any] = {"decay_log": torch.zeros(heads), "decay_bias": torch.zeros(heads)}
        rule |= {"conv": half(channels, taps).to(dtype), "norm": half(dim).to(dtype), "eps": 1e-6}
        gated_delta(*inputs, state, device_rows(rows, CPU), **rule, key_heads=key_heads)
        # In a CUDA graph the slots are 64-bit numbers.
        graph = DeviceRows(torch.zeros(102, dtype=torch.int64))
        gated_delta(*inputs, state, graph, **rule, key_heads=key_heads)


def tiles_by_descriptor() -> None:
    """Compiles the kernels that read tiles by TMA descriptors."""
    q, keys = half(256, HEADS, DIM), half(512, KV_HEADS, DIM)
    dense_prefill.dense_prefill(q, keys, keys, scale=0.1)


def main() -> None:
    capability = int(sys.argv[1])
    shared_bytes = card.SHARED_BYTES[capability]
    triton.runtime.driver.set_active(CompileOnlyDriver(capability))
    triton.runtime.jit.JITFunction.run = compile_only(triton.runtime.jit.JITFunction.run, shared_bytes)
    card.shared_bytes = lambda device: shared_bytes
    card.has_wgmma = lambda device: capability == 90
    pdl.supports_pdl = kv_write.supports_pdl = lambda device: capability >= 90
    products()
    sums_over_ranks()
    inputs()
    samples()
    latents()
    gated_delta_layers(capability)
    experts(native=capability >= 89)
    adapter_products()
    part = torch.zeros(64, HEADS, DIM)
    dense_prefill.merge_attention(part, part[..., 0], part, part[..., 0], part)
    if capability >= 90:
        tiles_by_descriptor()
    if capability == 90:
        gemm.gemm_swiglu(half(256, HIDDEN), half(2 * INNER, HIDDEN))
        chunk_with_adapter()
        fixed_order()
    for fp8 in (False, True) if capability >= 89 else (False,):  # e4m3 needs 8.9, see engine/config.py
        cache(fp8)
        attention(fp8, 1, 0, 0.0)
        attention(fp8, 5, 64, 30.0)
    # All tiles of all cards would take several minutes.
    for dtype, every in ((torch.bfloat16, 3), (torch.float16, 9)):
        every *= 1 if capability == 90 else 3
        quantized_products(dtype, native_e4m3=capability >= 89, every=every)


if __name__ == "__main__":
    main()
