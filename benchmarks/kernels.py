"""Measures the time and the error of every GPU kernel.

    python benchmarks/kernels.py --out benchmarks/results/kernels-h100.json

The limit of a kernel is bytes over copy bandwidth, or FLOP over the rate of a large matrix product. Shapes are those of
Llama-3.1-8B (32 query heads, 8 kv heads, head dim 128, hidden 4096) in bf16 with block size 16. A time is the median of
CUDA graph replays of several launches over different layers or weights, so it contains neither launch overhead nor hits
in the L2 cache. cuDNN and torch are timed in the same way. The error is ||out - ref|| / ||ref|| against float64 on
random inputs, with outputs that are NaN before the launch.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import math
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.support import decode_candidates
from benchmarks.support import report as report_file
from benchmarks.support.decode_candidates import TimedTile
from benchmarks.support.limits import copy_seconds, device_seconds, median_seconds
from common.kv_layout import FP8_DTYPE, KVLayout
from common.types import SamplingParams
from engine.kernels.dense_prefill import cudnn_prefill, dense_prefill, gather_kv
from engine.kernels.gemm import MIN_SWIGLU_ROWS, gemm_swiglu, gemv, skinny_gemm
from engine.kernels.kv_write import kv_write, rope_kv_write
from engine.kernels.norm import rms_norm, silu_mul
from engine.kernels.paged_decode import (
    DecodeTile,
    concurrent_programs,
    decode_workspace,
    paged_decode,
    plan_decode,
)
from engine.kernels.paged_prefill import paged_prefill
from engine.kv.kv_pool import KVPool, LayerKV, dequantize_e4m3, quantize_e4m3
from engine.sampling.device_sampler import DeviceSampler
from engine.sampling.sampler import SampleRow

HEADS, KV_HEADS, DIM, BLOCK, HIDDEN, INNER, VOCAB = 32, 8, 128, 16, 4096, 14336, 128256
LAYERS, POOL_TOKENS = 4, 131072 + BLOCK
SCALE = DIM**-0.5
DTYPE = torch.bfloat16
DEVICE = torch.device("cuda")


def seconds(launch: Callable[[int], object], launches: int = 16, repeats: int = 15) -> float:
    """Returns the median seconds of one launch(i), i = 0..launches - 1, in a replayed graph."""
    for i in range(2):
        launch(i)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(launches):
            launch(i)
    graph.replay()
    return statistics.median(device_seconds(graph.replay, DEVICE) for _ in range(repeats)) / launches


def error(out: Tensor, reference: Tensor) -> float:
    return float((out.double() - reference).norm() / reference.norm())


def poisoned(*shape: int) -> Tensor:
    return torch.full(shape, float("nan"), dtype=DTYPE, device=DEVICE)


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, device=DEVICE).to(DTYPE)


def weights_of(n: int, k: int) -> list[Tensor]:
    """Returns as many [n, k] weights as are needed to miss the L2 cache."""
    return [normal(n, k) for _ in range(max(2, int(1e9 // (n * k * 2))))]


def normed(x: Tensor, weight: Tensor) -> Tensor:
    """Returns the RMS norm of a float64 tensor."""
    return x * (x.pow(2).mean(-1, keepdim=True) + 1e-5).rsqrt() * weight.double()


def product(x: Tensor, weight: Tensor, *, gated: bool = False, residual: Tensor | None = None) -> Tensor:
    """Returns x @ weight.T in float64, then gated by SiLU or added to the residual."""
    out = torch.cat([x.double() @ part.double().T for part in weight.split(16384)], 1)
    if gated:
        gate, up = out.chunk(2, -1)
        out = torch.nn.functional.silu(gate) * up
    return out if residual is None else out + residual.double()


@dataclass
class Report:
    """Prints the rows of the table and collects the metrics, with limits that were measured on the same card."""

    copy_gb_s: float
    matmul_tflop_s: float
    metrics: dict[str, float] = field(default_factory=dict)

    def line(
        self, name: str, shape: str, time_s: float, limit_s: float, err: float | None, rate: str, key: str | None = None
    ) -> None:
        times = f"{time_s * 1e6:9.1f} us  limit {limit_s * 1e6:9.1f} us  {limit_s / time_s:6.1%}"
        print(f"{name:<18} {shape:<26} {times}  {rate:>12}  {'' if err is None else f'{err:.1e}'}", flush=True)
        if key is not None:
            self.metrics[f"{key}_us"] = round(time_s * 1e6, 2)
            self.metrics[f"{key}_share"] = round(limit_s / time_s, 4)
            if err is not None:
                self.metrics[f"{key}_error"] = float(f"{err:.2e}")

    def bytes(
        self, name: str, shape: str, time_s: float, moved: float, err: float | None, key: str | None = None
    ) -> None:
        self.line(name, shape, time_s, moved / self.copy_gb_s / 1e9, err, f"{moved / time_s / 1e9:.0f} GB/s", key)

    def flops(
        self, name: str, shape: str, time_s: float, flop: float, err: float | None, key: str | None = None
    ) -> None:
        rate = flop / time_s / 1e12
        self.line(name, shape, time_s, flop / self.matmul_tflop_s / 1e12, err, f"{rate:.0f} TFLOP/s", key)
        if key is not None:
            self.metrics[f"{key}_tflop_s"] = round(rate, 1)


def ceilings() -> Report:
    """Measures the limits: the better of two copies of 4 GiB (bytes read and written), and a product 8192^3 in bf16."""
    copy = copy_seconds(2**32, DEVICE)
    a, b = normal(8192, 8192), normal(8192, 8192)
    matmul = median_seconds(lambda: a @ b, DEVICE)
    report = Report(2 * 2**32 / copy / 1e9, 2 * 8192**3 / matmul / 1e12)
    print(f"copy {report.copy_gb_s:.0f} GB/s, matrix product {report.matmul_tflop_s:.0f} TFLOP/s", flush=True)
    report.metrics |= {"copy_gb_s": round(report.copy_gb_s, 1), "matmul_tflop_s": round(report.matmul_tflop_s, 1)}
    return report


class Pool:
    """A pool of random KV with blocks in random order. fp8: e4m3 with scales. Not random: zeros."""

    def __init__(self, *, fp8: bool = False, random: bool = True) -> None:
        blocks = POOL_TOKENS // BLOCK
        layout = KVLayout("", "", LAYERS, KV_HEADS, DIM, BLOCK, FP8_DTYPE if fp8 else "bfloat16")
        self._layers = KVPool(layout, blocks, DEVICE).layers()
        for layer in self._layers if random else ():
            for first in range(0, blocks, 1024):
                part = slice(first, first + 1024)
                kv = normal(*layer.kv[part].shape)
                if layer.scales is None:
                    layer.kv[part] = kv
                else:
                    layer.kv[part], scales = quantize_e4m3(kv)
                    layer.scales[part] = scales.permute(0, 2, 3, 1)
        self._order = torch.randperm(blocks, device=DEVICE).int()

    @property
    def itemsize(self) -> int:
        return self._layers[0].kv.element_size()

    @property
    def token_bytes(self) -> int:
        """Bytes of one token in one layer, with scales."""
        scales = self._layers[0].scales
        return 2 * KV_HEADS * (DIM * self.itemsize + (0 if scales is None else scales.element_size()))

    def layer(self, i: int) -> LayerKV:
        return self._layers[i % LAYERS]

    def numbers(self, table: Tensor) -> Tensor:
        """Returns the keys and values of blocks in layer 0, [2, kv_heads, tokens, D]."""
        layer, blocks = self.layer(0), table.long()
        both = layer.kv[blocks].permute(1, 2, 0, 3, 4).flatten(2, 3)
        if layer.scales is None:
            return both
        return dequantize_e4m3(both, layer.scales[blocks].permute(3, 1, 0, 2).flatten(2, 3), torch.float32)

    def tables(self, seqs: int, length: int) -> Tensor:
        count = -(-length // BLOCK)
        return self._order[: seqs * count].view(seqs, count).contiguous()

    def reference(self, q: Tensor, table: Tensor, length: int) -> Tensor:
        """Causal attention over layer 0 in float64. q: [T, heads, D], the last T of `length` tokens."""
        both = self.numbers(table)[:, :, :length].double()
        out = torch.empty(q.shape, dtype=torch.float64, device=DEVICE)
        key = torch.arange(length, device=DEVICE)
        hidden = key[None] > torch.arange(length - q.shape[0], length, device=DEVICE)[:, None]
        for head in range(HEADS):
            keys, values = both[:, head // (HEADS // KV_HEADS)]
            scores = (q[:, head].double() @ keys.T * SCALE).masked_fill_(hidden, float("-inf"))
            out[:, head] = scores.softmax(-1) @ values
        return out


class DecodeCase:
    """Split-KV attention of equally long sequences: buffers, references of three sequences, and the launch."""

    def __init__(self, pool: Pool, seqs: int, length: int, new: int) -> None:
        self.pool, self.seqs, self.length, self.new = pool, seqs, length, new
        self.tables = pool.tables(seqs, length)
        self.cu_q = torch.arange(seqs + 1, device=DEVICE, dtype=torch.int32) * new
        self.lens = torch.full((seqs,), length, device=DEVICE, dtype=torch.int32)
        self.q = normal(seqs * new, HEADS, DIM)
        self._references: dict[int, Tensor] = {}

    @property
    def moved(self) -> int:
        """Bytes of keys and values."""
        return self.seqs * self.length * self.pool.token_bytes

    def launch(self, tile: DecodeTile | None = None) -> tuple[Callable[[int], None], Tensor]:
        """Returns a function that attends over one layer, and its output, NaN before the first launch."""
        space = decode_workspace(concurrent_programs(DEVICE), HEADS, KV_HEADS, self.new, DIM, DEVICE)
        sizes = {"num_kv_heads": KV_HEADS, "head_dim": DIM, "itemsize": self.pool.itemsize}
        plan = plan_decode(self.cu_q, self.lens, space, tile=tile, **sizes)
        out = poisoned(self.seqs * self.new, HEADS, DIM)
        rows = self.tables, self.cu_q, self.lens, plan, space
        torch.cuda.synchronize()

        def attend(i: int) -> None:
            paged_decode(self.q, self.pool.layer(i), *rows, max_query=self.new, scale=SCALE, out=out)

        return attend, out

    def error(self, out: Tensor) -> float:
        """Returns the largest error of the first, a middle and the last sequence over layer 0."""
        errors: list[float] = []
        for b in (0, self.seqs // 2, self.seqs - 1):
            rows = slice(b * self.new, (b + 1) * self.new)
            if b not in self._references:
                self._references[b] = self.pool.reference(self.q[rows], self.tables[b], self.length)
            errors.append(error(out[rows], self._references[b]))
        return max(errors, key=lambda x: (math.isnan(x), x))


def decode_attention(report: Report, pool: Pool, seqs: int, length: int, new: int) -> None:
    case = DecodeCase(pool, seqs, length, new)
    launch, out = case.launch()
    launch(0)
    worst = case.error(out)
    name = "verify" if new > 1 else "decode"
    tokens, bits = (f", {new} tokens" if new > 1 else ""), (", e4m3" if pool.itemsize == 1 else "")
    key = f"{name}_{seqs}x{length}" + (f"_{new}" if new > 1 else "") + ("_fp8" if bits else "")
    report.bytes(f"{name} attention", f"{seqs}x{length}{tokens}{bits}", seconds(launch), case.moved, worst, key)


def tune_decode(report: Report) -> None:
    """Searches the tiles of split-KV attention."""
    for fp8 in (True, False):
        pool = Pool(fp8=fp8)
        for seqs, length, new in DECODES:
            case = DecodeCase(pool, seqs, length, new)

            def measure(tile: DecodeTile, case: DecodeCase = case) -> TimedTile:
                launch, out = case.launch(tile)
                launch(0)
                worst = case.error(out)
                return TimedTile(tile, seconds(launch, 16, 7), worst)

            name = f"{'e4m3' if fp8 else 'bf16'} {seqs}x{length}, {new} new"
            decode_candidates.search(name, measure, (fp8, new > 1), case.moved, report.copy_gb_s)


def compile_candidates(worker: int) -> None:
    """Compiles one worker's part of the candidates by launching each once over a pool of zeros."""
    for fp8 in (True, False):
        pool = Pool(fp8=fp8, random=False)
        jobs = [(new, tile) for new in (1, 5) for tile in decode_candidates.TILES[fp8, new > 1]]
        for new, tile in jobs[worker :: decode_candidates.WORKERS]:
            with contextlib.suppress(Exception):  # the search reports it
                DecodeCase(pool, 16, 8192, new).launch(tile)[0](0)
                torch.cuda.synchronize()


def prefill(report: Report, pool: Pool, new: int, length: int) -> None:
    start = length - new
    table = pool.tables(1, length)
    cu_q = torch.tensor([0, new], device=DEVICE, dtype=torch.int32)
    lens = torch.tensor([length], device=DEVICE, dtype=torch.int32)
    qkv = normal(new, HEADS + 2 * KV_HEADS, DIM)
    q, kv = qkv[:, :HEADS], qkv[:, HEADS:].unflatten(1, (2, KV_HEADS))
    position = torch.arange(start, length, device=DEVICE)
    kv_write(kv, pool.layer(0), table[0][position // BLOCK].long() * BLOCK + position % BLOCK)
    flop = 4 * HEADS * DIM * (new * start + new * new / 2)
    head, tail = pool.reference(q[:64], table[0], start + 64), pool.reference(q[-64:], table[0], length)

    def backend(i: int) -> Tensor:
        prefix = gather_kv(pool.layer(i), table[0], start, dtype=DTYPE) if start else None
        return cudnn_prefill(q, kv[:, 0], kv[:, 1], prefix, scale=SCALE)

    def own(i: int) -> Tensor:
        keys, values = gather_kv(pool.layer(i), table[0], length, dtype=DTYPE)
        return dense_prefill(q, keys, values, scale=SCALE)

    def paged(i: int) -> Tensor:
        return paged_prefill(q, pool.layer(i), table, cu_q, lens, max_query=new, scale=SCALE)

    shape = f"{new} new of {length}"
    ways = {"cuDNN": (backend, "prefill"), "own": (own, "prefill_own"), "paged": (paged, "prefill_paged")}
    for name, (launch, key) in ways.items():
        out = launch(0)
        worst = max(error(out[:64], head), error(out[-64:], tail))
        report.flops(f"prefill {name}", shape, seconds(launch, 4, 9), flop, worst, f"{key}_{new}_of_{length}")


def small(report: Report, pool: Pool, rows: int) -> None:
    positions = torch.arange(8192, device=DEVICE)
    slots = torch.randperm(8192, device=DEVICE)
    cos, sin = (f(torch.rand(8192, DIM // 2, device=DEVICE) * 6) for f in (torch.cos, torch.sin))
    weight = normal(HIDDEN)
    x, residual, out = normal(rows, HIDDEN), normal(rows, HIDDEN), poisoned(rows, HIDDEN)
    total = x.double() + residual.double()
    rms_norm(x, weight, 1e-5, residual=residual, out=out)
    worst = max(error(out, normed(residual.double(), weight)), error(residual, total))
    time_s = seconds(lambda i: rms_norm(x, weight, 1e-5, residual=residual, out=out))
    report.bytes("norm + residual", f"{rows} rows", time_s, rows * HIDDEN * 8, worst, f"norm_{rows}")

    gate_up, out = normal(rows, 2 * INNER), poisoned(rows, INNER)
    silu_mul(gate_up, out)
    gate, up = gate_up[:256].double().chunk(2, -1)
    worst = error(out[:256], torch.nn.functional.silu(gate) * up)
    time_s = seconds(lambda i: silu_mul(gate_up, out))
    report.bytes("SiLU x mul", f"{rows} rows", time_s, rows * INNER * 6, worst, f"silu_{rows}")

    if rows >= MIN_SWIGLU_ROWS:
        x, weight = normal(rows, HIDDEN), normal(2 * INNER, HIDDEN) / 64
        worst = error(gemm_swiglu(x, weight)[-256:], product(x[-256:], weight, gated=True))
        flop, shape = 4 * rows * HIDDEN * INNER, f"{rows} rows"
        apart = seconds(lambda i: silu_mul(torch.nn.functional.linear(x, weight)), 4)
        report.flops("cuBLAS, SiLU x mul", shape, apart, flop, None, f"swiglu_apart_{rows}")
        time_s = seconds(lambda i: gemm_swiglu(x, weight), 4)
        report.flops("SwiGLU product", shape, time_s, flop, worst, f"swiglu_{rows}")

    qkv = normal(rows, (HEADS + 2 * KV_HEADS) * DIM)
    keys = qkv.view(rows, -1, DIM)[:, HEADS : HEADS + KV_HEADS].double()
    a, b = keys.chunk(2, -1)
    c, s = cos[:rows, None].double(), sin[:rows, None].double()
    rope_kv_write(qkv, pool.layer(0), positions[:rows], slots[:rows], cos, sin, num_heads=HEADS)
    written = pool.layer(0).kv[slots[:rows] // BLOCK, 0, :, slots[:rows] % BLOCK]
    worst = error(written, torch.cat([a * c - b * s, b * c + a * s], -1))
    args = (positions[:rows], slots[:rows], cos, sin)
    time_s = seconds(lambda i: rope_kv_write(qkv, pool.layer(i), *args, num_heads=HEADS))
    moved = rows * DIM * 2 * (2 * HEADS + 5 * KV_HEADS)
    report.bytes("RoPE + KV write", f"{rows} rows", time_s, moved, worst, f"rope_{rows}")


def one_row(report: Report, n: int, k: int, ops: str) -> None:
    """Measures the GEMV of a decode step with one sequence, and cuBLAS for comparison."""
    weights = weights_of(n, k)
    x, norm, residual = normal(1, k), normal(k), normal(1, n)
    plain = seconds(lambda i: torch.nn.functional.linear(x, weights[i % len(weights)]))
    report.bytes("linear, cuBLAS", f"{n}x{k}", plain, n * k * 2, None)
    options = {"residual": residual if ops == "residual" else None, "gated": "gated" in ops}

    def launch(i: int) -> Tensor:
        return gemv(x, weights[i % len(weights)], norm=norm if "norm" in ops else None, eps=1e-5, **options)

    want = product(normed(x.double(), norm) if "norm" in ops else x, weights[0], **options)
    report.bytes(f"GEMV, {ops}", f"{n}x{k}", seconds(launch), n * k * 2, error(launch(0), want), f"gemv_{n}x{k}")


TILES = [None, (16, 128, 8), (32, 128, 4), (32, 256, 4), (64, 64, 5), (64, 128, 3), (64, 128, 4), (128, 64, 4)]


def few_rows(report: Report, rows: int, n: int, k: int, ops: str) -> None:
    """Measures the skinny GEMM in every tile shape that fits, and cuBLAS with the extra kernels that it needs."""
    weights = weights_of(n, k)
    x, residual = normal(rows, k), normal(rows, n)
    options = {"residual": residual if ops == "residual" else None, "gated": ops == "gated"}

    def cublas(i: int) -> Tensor:
        if ops == "residual":
            return residual.addmm_(x, weights[i % len(weights)].t())
        out = torch.nn.functional.linear(x, weights[i % len(weights)])
        return silu_mul(out) if ops == "gated" else out

    name = f"{rows} rows, {n}x{k}"
    report.bytes(f"{ops}, cuBLAS", name, seconds(cublas), n * k * 2, None, f"cublas_{rows}_{n}x{k}")
    residual.normal_()
    want = product(x, weights[0], **options)
    for shape in TILES:

        def launch(i: int, shape: tuple[int, int, int] | None = shape) -> Tensor:
            return skinny_gemm(x, weights[i % len(weights)], shape=shape, **options)

        worst = error(launch(0), want)
        key = f"skinny_{rows}_{n}x{k}" if shape is None else None
        report.bytes(f"{ops}, {shape or 'default'}", name, seconds(launch), n * k * 2, worst, key)


def residual_add(report: Report, rows: int, k: int) -> None:
    """Measures a product, its residual add and the next norm, with the add in cuBLAS and in the norm."""
    x, weight, residual, scale = normal(rows, k), normal(HIDDEN, k), normal(rows, HIDDEN), normal(HIDDEN)
    flop = 2 * rows * k * HIDDEN

    def by_cublas(i: int) -> Tensor:
        return rms_norm(residual.addmm_(x, weight.t()), scale, 1e-5)

    def by_norm(i: int) -> Tensor:
        return rms_norm(torch.nn.functional.linear(x, weight), scale, 1e-5, residual=residual)

    shape = f"{rows} rows, {HIDDEN}x{k}"
    for name, launch in [("addmm, norm", by_cublas), ("mm, norm + add", by_norm)]:
        residual.normal_()
        report.flops(name, shape, seconds(launch), flop, None, f"{name.split(',')[0]}_{rows}_{k}")


PENALTIES = {"repetition_penalty": 1.1, "presence_penalty": 0.1, "frequency_penalty": 0.1}
SAMPLING = {
    "greedy": SamplingParams(temperature=0.0),
    "temperature": SamplingParams(),
    "top_p": SamplingParams(temperature=0.8, top_p=0.9),
    "top_p_penalties": SamplingParams(temperature=0.8, top_p=0.9, **PENALTIES),
    "top_k": SamplingParams(temperature=0.8, top_k=50),
    "top_k_top_p": SamplingParams(temperature=0.8, top_k=50, top_p=0.9),
}


def sampling(report: Report, rows: int, kind: str) -> None:
    sampler, logits = DeviceSampler(rows, VOCAB, DEVICE), torch.randn(rows, VOCAB, device=DEVICE) * 2
    for slot in range(rows):
        sampler.stage(slot, SampleRow(replace(SAMPLING[kind], seed=1000 + slot), range(1024), 1000))
    sampler.flush()
    slots = torch.arange(rows, device=DEVICE)
    positions = torch.full((rows,), 1024, device=DEVICE)
    time_s = seconds(lambda i: sampler.sample(logits, slots, positions), 4)
    report.bytes("sample", f"{rows} rows, {kind}", time_s, rows * VOCAB * 4, None, f"sample_{rows}_{kind}")


LINEARS = [  # outputs, inputs, fused operations with one row, fused operations with a few rows
    (6144, HIDDEN, "norm", "plain"),
    (HIDDEN, HIDDEN, "residual", "residual"),
    (2 * INNER, HIDDEN, "norm, gated", "gated"),
    (HIDDEN, INNER, "residual", "residual"),
    (VOCAB, HIDDEN, "norm", "plain"),
]


def each(
    measure: Callable[..., None], *points: tuple[object, ...], pool: Callable[[], Pool] | None = None
) -> Callable[[Report], None]:
    """Returns a part of the benchmark: `measure` at each point, with the pool if there is one."""

    def part(report: Report) -> None:
        shared = (report,) if pool is None else (report, pool())
        for point in points:
            measure(*shared, *point)

    return part


DECODES = ((64, 2048, 1), (16, 8192, 1), (1, 32768, 1), (16, 8192, 5), (128, 1024, 1))  # sequences, length, new tokens
PARTS: dict[str, Callable[[Report], None]] = {
    "decode": each(decode_attention, *DECODES, pool=Pool),
    "decode_fp8": each(decode_attention, *DECODES, pool=partial(Pool, fp8=True)),
    "prefill": each(prefill, (8192, 8192), (2048, 8192), (2048, 16384), (512, 8192), pool=Pool),
    "small": each(small, (1,), (64,), (2048,), (8192,), pool=Pool),
    "one_row": each(one_row, *((n, k, ops) for n, k, ops, _ in LINEARS)),
    "few_rows": each(few_rows, *((rows, n, k, ops) for rows in (2, 16) for n, k, _, ops in LINEARS)),
    "residual": each(residual_add, *itertools.product((64, 2048), (HIDDEN, INNER))),
    "sampling": each(sampling, *itertools.product((1, 64, 128), SAMPLING)),
}


def main() -> None:
    parser = report_file.arguments(__doc__)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), help="parts to run")
    parser.add_argument("--tune", action="store_true", help="search the tiles of split-KV attention instead")
    parser.add_argument("--compile", type=int, help=argparse.SUPPRESS)  # a worker of --tune
    args = parser.parse_args()
    torch.manual_seed(0)
    if args.compile is not None:
        compile_candidates(args.compile)
        return
    if args.tune:
        decode_candidates.compile_in_parallel(__file__)
    report = ceilings()
    if args.tune:
        tune_decode(report)
        return
    for part in args.only:
        PARTS[part](report)
    report_file.write(args.out, "kernels", report.metrics, "torch", "triton", cudnn=torch.backends.cudnn.version())


if __name__ == "__main__":
    main()
