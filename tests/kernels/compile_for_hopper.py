"""Compiles every kernel for an H100 without a GPU, with the arguments of a large model's step.

The program runs without TRITON_INTERPRET. Kernels are compiled to machine code and not launched. This finds errors that
the interpreter does not, because it runs Python: for example, a variable that changes its type.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget

from common.types import SamplingParams
from engine.kernels import (
    decode_inputs,
    dense_prefill,
    fixed_order_attention,
    fixed_order_gemm,
    gemm,
    kv_write,
    norm,
    paged_decode,
    paged_prefill,
    pdl,
)
from engine.kv.kv_pool import LayerKV
from engine.sampling.device_sampler import DeviceSampler
from engine.sampling.sampler import SampleRow

HEADS, KV_HEADS, DIM, BLOCK, HIDDEN, INNER, VOCAB = 32, 8, 128, 16, 4096, 14336, 128256
CPU = torch.device("cpu")


class Hopper:
    """The part of a Triton driver that compilation needs."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


def compile_only(run: Any) -> Any:
    """Wraps JITFunction.run so that it compiles without launching, and checks the shared memory."""

    def compiled(self: Any, *args: Any, **kwargs: Any) -> Any:
        kernel = run(self, *args, **(kwargs | {"warmup": True}))
        assert kernel.metadata.shared <= 227 * 1024, (
            f"{kernel.name} needs {kernel.metadata.shared} bytes of shared memory"
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
    kind: dict[str, Any] = {"max_query": new, "scale": 0.1, "softcap": softcap}
    paged_decode.paged_decode(q, layer(fp8), tables, cu_q, lens, plan, space, **kind)
    paged_decode.paged_decode(q, layer(fp8), tables, cu_q, lens, plan, space, first=1, **kind)
    if fp8:
        paged_prefill.paged_prefill(q, layer(fp8), tables, cu_q, lens, window=window, **kind)
        tiles, options = torch.zeros(99, dtype=small), {"scale": 0.1, "softcap": softcap}
        for tokens in (64, 1024):
            paged_prefill.listed_prefill(
                q, layer(fp8), tables, cu_q, lens, tiles, max_tokens=tokens, window=window, out=q, **options
            )


def fixed_order() -> None:
    for rows in (1, 64, 128, 4096):
        x = half(rows, HIDDEN)
        fixed_order_gemm.fixed_order_gemm(x, half(6144, HIDDEN), bias=half(6144))
        fixed_order_gemm.fixed_order_gemm(x, half(HIDDEN, HIDDEN), residual=x, out=x)
        fixed_order_gemm.fixed_order_gemm(x, half(2 * INNER, HIDDEN), gated=True)
    out = torch.zeros(1, VOCAB)
    fixed_order_gemm.fixed_order_gemm(half(1, HIDDEN), half(VOCAB, HIDDEN), out=out)
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


def main() -> None:
    triton.runtime.driver.set_active(Hopper())
    triton.runtime.jit.JITFunction.run = compile_only(triton.runtime.jit.JITFunction.run)
    pdl.supports_pdl = lambda device: True
    products()
    fixed_order()
    inputs()
    samples()
    part = torch.zeros(64, HEADS, DIM)
    dense_prefill.merge_attention(part, part[..., 0], part, part[..., 0], part)
    for fp8 in (False, True):
        cache(fp8)
    attention(False, 1, 0, 0.0)
    attention(True, 5, 64, 30.0)


if __name__ == "__main__":
    main()
