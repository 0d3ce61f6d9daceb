"""Proves on a card that the kernels of --deterministic give the same bits in every shape, and times the shapes.

    python benchmarks/fixed_order.py --out benchmarks/results/fixed-order-h200.json

The products are those of a layer of Llama-3.1-8B. Each shape of tiles is compared bit by bit with one reference, at
many numbers of rows. Attention of prompts is compared with decode of the same tokens, over chunks and batches. Times
are medians of graph replays, beside the kernels of the normal mode. `equal` is 1 if all bits are equal.
"""

from __future__ import annotations

import itertools
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.kernels import seconds
from benchmarks.support import report
from common.kv_layout import KVLayout
from engine.kernels.dense_prefill import cudnn_prefill
from engine.kernels.fixed_order import attention as fixed
from engine.kernels.fixed_order.gemm import TileShape, WideShape, fixed_order_gemm
from engine.kernels.gemm import gemm_swiglu, gemv, skinny_gemm
from engine.kernels.norm import silu_mul
from engine.kernels.paged_decode import concurrent_programs, decode_workspace, paged_decode, plan_decode
from engine.kv.kv_pool import KVPool, LayerKV

DEVICE = torch.device("cuda")
BF16 = torch.bfloat16
#: Name, outputs, inputs and operation after the product. gate_up counts both halves.
PRODUCTS = (
    ("qkv", 6144, 4096, "plain"),
    ("out", 4096, 4096, "add"),
    ("gate_up", 28672, 4096, "gated"),
    ("down", 4096, 14336, "add"),
    ("head", 128256, 4096, "plain"),
)
SMALL = (
    TileShape(16, 32, 256, 4),
    TileShape(16, 32, 256, 6),
    TileShape(16, 32, 512, 3),
    TileShape(16, 64, 128, 5),
    TileShape(16, 64, 128, 7),
    TileShape(16, 128, 128, 3),
)
MIDDLE = (
    TileShape(64, 32, 128, 5, early=False),
    TileShape(64, 32, 128, 6, early=False),
    TileShape(64, 32, 128, 8, early=False),
    TileShape(64, 32, 256, 4, early=False),
    TileShape(64, 64, 64, 5, early=False),
    TileShape(64, 64, 128, 5, early=False),
    TileShape(64, 64, 128, 6, early=False),
    TileShape(64, 128, 64, 4, early=False),
    TileShape(64, 128, 64, 6, early=False),
)
LARGE = (
    TileShape(64, 64, 128, 3, early=False),
    TileShape(64, 64, 128, 6, early=False),
    TileShape(128, 32, 128, 5, 8, early=False),
    TileShape(128, 64, 64, 7, 8, early=False),
    TileShape(128, 64, 128, 4, 8, early=False),
    WideShape(),
    WideShape(columns=128),
)
WIDE = (WideShape(), WideShape(columns=128), WideShape(group=8))
GROUPS = {1: SMALL, 64: MIDDLE, 128: LARGE, 512: WIDE, 4096: WIDE}
WORKERS = 12
HEADS, KV_HEADS, DIM, BLOCK = 32, 8, 128, 16


def normal(*shape: int, scale: float = 1.0) -> Tensor:
    return (torch.randn(*shape, device=DEVICE) * scale).to(BF16)


def options(kind: str, x: Tensor, n: int, residual: Tensor | None = None) -> dict[str, Any]:
    if kind == "gated":
        return {"gated": True}
    return {"residual": normal(len(x), n) if residual is None else residual} if kind == "add" else {}


def product(x: Tensor, weight: Tensor, kind: str, residual: Tensor, shape: TileShape | WideShape | None) -> Tensor:
    more = options(kind, x, len(weight), residual[: len(x)])
    return fixed_order_gemm(x, weight, shape=shape, **more)


def usual(x: Tensor, weight: Tensor, kind: str, out: Tensor) -> Tensor:
    """Computes the product as the normal mode does."""
    if len(x) == 1:
        return gemv(x, weight, **options(kind, x, len(weight), out))
    if len(x) <= 16:
        return skinny_gemm(x, weight, **options(kind, x, len(weight), out))
    if kind == "gated":
        return gemm_swiglu(x, weight) if len(x) >= 2048 else silu_mul(F.linear(x, weight))
    return out.addmm_(x, weight.t()) if kind == "add" else F.linear(x, weight)


def compile_part(part: int) -> None:
    """Compiles every WORKERS-th shape. Other processes compile the others; all share Triton's cache."""
    torch.manual_seed(0)
    work = [(p, s) for p in PRODUCTS for s in dict.fromkeys(itertools.chain(*GROUPS.values()))]
    for (_, n, k, kind), shape in work[part::WORKERS]:
        x, weight = normal(1 if shape.rows == 16 else shape.rows, k), normal(n, k, scale=0.02)
        try:
            product(x, weight, kind, normal(len(x), n), shape)
        except Exception as error:  # a shape that does not fit the card is reported by the main process
            print(f"{shape} {kind}: {error}", file=sys.stderr)


def check_products(table: report.MetricTable) -> None:
    equal_all = 1
    for name, n, k, kind in PRODUCTS:
        weights = [normal(n, k, scale=0.02) for _ in range(max(2, int(6e8 // (n * k * 2))))]
        most = 128 if name == "head" else 4096
        x, residual = normal(most, k), normal(most, n)
        reference = product(x, weights[0], kind, residual, TileShape(128, 64, 64, 4))
        exact = F.linear(x[:128].float(), weights[0].float())
        if kind == "gated":
            exact = F.silu(exact[:, : n // 2]) * exact[:, n // 2 :]
        if kind == "add":
            exact += residual[:128].float()
        error = float((reference[:128].float() - exact).norm() / exact.norm())
        wrong = [r for r in range(1, 129) if not product(x[:r], weights[0], kind, residual, None).equal(reference[:r])]
        print(f"{name}: error {error:.1e}, default shapes differ at rows {wrong[:8]} ({len(wrong)} of 128)", flush=True)
        equal_all &= not wrong
        for rows, shapes in GROUPS.items():
            if name == "head" and rows > 128:
                continue
            base = residual[:rows].clone()
            normal_s = seconds(lambda i: usual(x[:rows], weights[i % len(weights)], kind, base))  # noqa: B023
            floor = max(n * k * 2 / 4.2e12, 2 * rows * n * k / 7.4e14)
            print(f"{name} {rows} rows: floor {1e6 * floor:.1f} us, normal {1e6 * normal_s:.1f} us", flush=True)
            for shape in shapes:
                try:
                    counts = (rows, 1, 3) if rows <= 16 else (rows, rows - 1, rows // 2 + 3)
                    equal = all(product(x[:r], weights[0], kind, residual, shape).equal(reference[:r]) for r in counts)
                    took = seconds(
                        lambda i: product(x[:rows], weights[i % len(weights)], kind, residual, shape)  # noqa: B023
                    )
                except Exception as error:  # Triton and ptxas raise many classes; the candidate is reported
                    print(f"    {shape}: {str(error)[:90]}", flush=True)
                    continue
                table.rows.append(
                    {"product": name, "rows": rows, "shape": str(shape), "us": 1e6 * took, "equal": equal}
                )
                print(
                    f"    {1e6 * took:8.1f} us {took / normal_s:5.2f} {'' if equal else 'DIFFERS'} {shape}", flush=True
                )
    table.add("products_equal", equal_all)


def pool(tokens: int) -> LayerKV:
    layout = KVLayout(
        model="m", revision="", num_layers=1, num_kv_heads=KV_HEADS, head_dim=DIM, block_size=BLOCK, dtype="bfloat16"
    )
    kv = KVPool(layout, tokens // BLOCK, DEVICE)
    layer = kv.layers()[0]
    layer.kv.copy_(torch.randn_like(layer.kv.float()))
    return layer


def rows_of(lengths: list[int], queries: list[int], layer: LayerKV) -> tuple[Tensor, Tensor, Tensor]:
    """Returns block tables (all the same blocks), cu_q and lengths."""
    small = torch.int32
    blocks = torch.arange(layer.kv.shape[0] - 1, dtype=small, device=DEVICE)
    width = -(-max(lengths) // BLOCK)
    cu_q = torch.tensor([0, *itertools.accumulate(queries)], dtype=small, device=DEVICE)
    return blocks[:width].expand(len(lengths), -1).contiguous(), cu_q, torch.tensor(lengths, dtype=small, device=DEVICE)


def decode(q: Tensor, layer: LayerKV, lengths: list[int], queries: list[int], **more: Any) -> Tensor:
    tables, cu_q, lens = rows_of(lengths, queries, layer)
    plan = fixed.plan_decode(cu_q, lens, num_programs=264, num_kv_heads=KV_HEADS)
    kind = {"max_query": max(queries), "scale": DIM**-0.5, "out": torch.full_like(q, float("nan"))} | more
    return fixed.paged_decode(q, layer, tables, cu_q, lens, plan, **kind)


def prompt(q: Tensor, layer: LayerKV, length: int, **more: Any) -> Tensor:
    tables, cu_q, lens = rows_of([length], [len(q)], layer)
    return fixed.paged_prefill(q, layer, tables, cu_q, lens, max_query=len(q), scale=DIM**-0.5, **more)


def check_attention(table: report.MetricTable) -> None:
    layer, length = pool(8192), 3000
    q = normal(length, HEADS, DIM)
    reference = prompt(q, layer, length, block_m=64)
    keys = layer.kv[: -(-length // BLOCK), 0].transpose(1, 2).reshape(-1, KV_HEADS, DIM)[:length]
    values = layer.kv[: -(-length // BLOCK), 1].transpose(1, 2).reshape(-1, KV_HEADS, DIM)[:length]
    exact = F.scaled_dot_product_attention(
        *(x.float().transpose(0, 1)[None] for x in (q, keys, values)), is_causal=True, enable_gqa=True
    )[0].transpose(0, 1)
    print(f"attention: error {float((reference.float() - exact).norm() / exact.norm()):.1e}")
    found = {"prompt 128 rows": prompt(q, layer, length, block_m=128).equal(reference)}
    for first in (1, 63, 512, 1000, 2047):
        found[f"chunk from {first}"] = all(
            prompt(q[first:], layer, length, block_m=m).equal(reference[first:]) for m in (64, 128)
        )
    places = [0, 1, 15, 63, 64, 127, 500, 511, 512, 513, 1023, 1024, 1500, 2048, 2559, 2560, 2999]
    for stages in (2, 3, 4):
        one = decode(q[places], layer, [p + 1 for p in places], [1] * len(places), stages=stages)
        found[f"decode {stages} stages"] = one.equal(reference[places])
    many = [int(i) for i in torch.randint(0, length, (128,))]
    found["decode 128 rows"] = decode(q[many], layer, [p + 1 for p in many], [1] * 128).equal(reference[many])
    for query in (2, 5, 8):
        starts = [3, 60, 509, 1020, 2555]
        index = [s + i for s in starts for i in range(query)]
        ends = [s + query for s in starts]
        found[f"decode of {query}"] = decode(q[index], layer, ends, [query] * len(starts)).equal(reference[index])
    for name, equal in found.items():
        print(f"    {name}: {'equal' if equal else 'DIFFERS'}")
    table.add("attention_equal", all(found.values()))


def time_attention(table: report.MetricTable) -> None:
    for batch, length in ((1, 128), (64, 1024), (128, 1024), (1, 4096), (1, 32768)):
        layers = [pool(batch * (length + BLOCK)) for _ in range(4)]
        each = -(-length // BLOCK)
        tables = torch.arange(batch * each, dtype=torch.int32, device=DEVICE).view(batch, each)
        cu_q = torch.arange(batch + 1, dtype=torch.int32, device=DEVICE)
        lens = torch.full((batch,), length, dtype=torch.int32, device=DEVICE)
        q, scale = normal(batch, HEADS, DIM), DIM**-0.5
        space = decode_workspace(concurrent_programs(DEVICE), HEADS, KV_HEADS, 1, DIM, DEVICE)
        plan = plan_decode(cu_q, lens, space, num_kv_heads=KV_HEADS, head_dim=DIM, itemsize=2)
        rows = tables, cu_q, lens
        usual_s = seconds(lambda i: paged_decode(q, layers[i % 4], *rows, plan, space, max_query=1, scale=scale))  # noqa: B023
        floor = batch * length * KV_HEADS * DIM * 4 / 4.2e12
        print(f"decode {batch}x{length}: floor {1e6 * floor:.1f} us, normal {1e6 * usual_s:.1f} us", flush=True)
        out = torch.empty_like(q)
        for programs, stages in itertools.product((264,), (3, 5, 7)):
            own = fixed.plan_decode(cu_q, lens, num_programs=programs, num_kv_heads=KV_HEADS)
            kind = {"max_query": 1, "scale": scale, "out": out, "stages": stages}
            took = seconds(lambda i: fixed.paged_decode(q, layers[i % 4], *rows, own, **kind))  # noqa: B023
            table.rows.append({"decode": f"{batch}x{length}", "programs": programs, "stages": stages, "us": 1e6 * took})
            print(f"    {1e6 * took:8.1f} us {took / usual_s:5.2f} programs {programs} stages {stages}", flush=True)
    length = 4096
    layer, q = pool(length + BLOCK), normal(length, HEADS, DIM)
    keys, values = normal(length, KV_HEADS, DIM), normal(length, KV_HEADS, DIM)
    usual_s = seconds(lambda _: cudnn_prefill(q, keys, values, None, scale=DIM**-0.5))
    print(f"prompt of {length}: cuDNN {1e6 * usual_s:.1f} us", flush=True)
    rows = rows_of([length], [length], layer)
    for block_m, stages in itertools.product((64, 128), (2, 3, 4)):
        kind = {"max_query": length, "scale": DIM**-0.5, "block_m": block_m, "stages": stages}
        took = seconds(lambda _: fixed.paged_prefill(q, layer, *rows, **kind))  # noqa: B023
        table.rows.append({"prompt": length, "block_m": block_m, "stages": stages, "us": 1e6 * took})
        print(f"    {1e6 * took:8.1f} us {took / usual_s:5.2f} rows {block_m} stages {stages}", flush=True)


def main() -> None:
    parser = report.arguments(__doc__)
    parser.add_argument("--compile", type=int, help="internal: compile this part of the shapes, and end")
    args = parser.parse_args()
    if args.compile is not None:
        return compile_part(args.compile)
    torch.manual_seed(0)
    command = [sys.executable, __file__, "--compile"]
    workers = [subprocess.Popen([*command, str(i)]) for i in range(WORKERS)]
    table = report.MetricTable()
    check_attention(table)
    for worker in workers:
        worker.wait(200)
    check_products(table)
    time_attention(table)
    report.write(args.out, "fixed_order", table.metrics, "torch", "triton", rows=table.rows)
    return None


if __name__ == "__main__":
    with torch.inference_mode():
        main()
