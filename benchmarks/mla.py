"""Measures the kernels of multi-head latent attention on a card.

    python benchmarks/mla.py --out benchmarks/results/mla-h200.json

Heads are those of DeepSeek-V2-Lite (16) and V3 (128), with latents of 512 + 64 numbers in bf16 and blocks of 16
tokens. Times are medians of graph replays over two layers. The error is that of two sequences against float64.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.kernels import ceilings, error, seconds
from benchmarks.support import report
from common.kv_layout import KVLayout
from engine.kernels.latent.attention import (
    LatentTile,
    decode_tile,
    latent_decode,
    latent_prefill,
    latent_tile,
)
from engine.kernels.latent.attention import latent_workspace as make_workspace
from engine.kernels.paged_decode import plan_decode
from engine.kv.kv_pool import KVPool, LayerKV

METRICS = """metrics:
- mla_copy_share: bytes of the latents over the time of a decode step with 16 heads, 64 sequences of 4096 tokens, as a
  share of the rate of a copy.
- mla_128_heads_product_share: products of the same step with 128 heads, as a share of the rate of a product 8192^3.
- *_us: times. *_error: relative errors.
"""
RANK, ROPE, BLOCK, POOL_TOKENS = 512, 64, 16, 64 * 4096
SCALE, DEVICE, BF16 = 0.1, torch.device("cuda"), torch.bfloat16


@dataclass(frozen=True)
class Batch:
    """Sequences of one length over a shared pool."""

    pool: KVPool
    tables: Tensor
    heads: int
    count: int
    length: int

    def layer(self, i: int) -> LayerKV:
        return self.pool.layers()[i % 2]

    def rows(self, new: int) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the block tables, cu_q and the lengths with `new` tokens of each sequence."""
        cu_q = torch.arange(self.count + 1, dtype=torch.int32, device=DEVICE) * new
        lens = torch.full((self.count,), self.length, dtype=torch.int32, device=DEVICE)
        return self.tables[: self.count * self.length // BLOCK].view(self.count, -1), cu_q, lens

    def query(self, new: int) -> tuple[Tensor, Tensor]:
        """Returns random queries and an output of NaN."""
        generator = torch.Generator(DEVICE).manual_seed(3)
        shape = self.count * new, self.heads, RANK
        q = torch.randn(*shape[:2], RANK + ROPE, generator=generator, device=DEVICE).to(BF16)
        return q, torch.full(shape, float("nan"), dtype=BF16, device=DEVICE)

    def decode(self, tile: LatentTile, new: int = 1) -> tuple[Callable[[int], object], Callable[[], float]]:
        """Returns the launch of a decode step, and a function that computes its error."""
        tables, cu_q, lens = self.rows(new)
        q, out = self.query(new)
        space = make_workspace(tile, self.heads, new, RANK, DEVICE)
        sizes = {"num_kv_heads": 1, "head_dim": RANK + ROPE, "itemsize": 2}
        plan = plan_decode(cu_q, lens, space, tile=decode_tile(tile), **sizes)

        def launch(i: int) -> object:
            return latent_decode(q, self.layer(i), tables, cu_q, lens, plan, space, max_query=new, scale=SCALE, out=out)

        return launch, partial(self.error, launch, q, out, new)

    def prefill(self, tile: LatentTile, new: int) -> tuple[Callable[[int], object], Callable[[], float]]:
        """Does what `decode` does, for prompts."""
        tables, cu_q, lens = self.rows(new)
        q, out = self.query(new)

        def launch(i: int) -> object:
            return latent_prefill(q, self.layer(i), tables, cu_q, lens, max_query=new, scale=SCALE, out=out, tile=tile)

        return launch, partial(self.error, launch, q, out, new)

    def error(self, launch: Callable[[int], object], q: Tensor, out: Tensor, new: int) -> float:
        launch(0)
        tables, worst = self.rows(new)[0], 0.0
        for b in {0, self.count - 1}:
            keys = self.layer(0).kv[tables[b].long(), 0, 0].flatten(0, 1).double()
            tokens = torch.arange(max(0, new - 4), new, device=DEVICE)
            scores = q[b * new + tokens].double() @ keys.T * SCALE
            seen = torch.arange(self.length, device=DEVICE) <= (self.length - new + tokens)[:, None, None]
            want = scores.masked_fill(~seen, float("-inf")).softmax(-1) @ keys[:, :RANK]
            worst = max(worst, error(out[b * new + tokens], want))
        return worst


def make_pool() -> tuple[KVPool, Tensor]:
    """Returns a pool of two layers of random latents, and its blocks in random order."""
    sizes = {"num_layers": 2, "num_kv_heads": 1, "head_dim": RANK + ROPE, "block_size": BLOCK}
    layout = KVLayout(model="m", revision="", dtype="bfloat16", latent_dim=RANK, **sizes)  # type: ignore[arg-type]
    pool = KVPool(layout, POOL_TOKENS // BLOCK, DEVICE)
    pool.segment_view("kv").normal_(generator=torch.Generator(DEVICE).manual_seed(1))
    order = torch.randperm(POOL_TOKENS // BLOCK, generator=torch.Generator(DEVICE).manual_seed(2), device=DEVICE)
    return pool, order.int()


def measure() -> dict[str, float]:
    """Returns the metrics, and prints a table."""
    table = ceilings()
    pool, tables = make_pool()

    def limits(batch: Batch, new: int = 1) -> tuple[float, float]:
        """Returns the seconds to read the latents once, and those of the products."""
        keys = batch.count * batch.length
        seen = batch.count * (batch.length * new - new * (new - 1) // 2)
        moved, flop = 2 * keys * (RANK + ROPE), 2 * seen * batch.heads * (2 * RANK + ROPE)
        return moved / table.copy_gb_s / 1e9, flop / table.matmul_tflop_s / 1e12

    few, many = Batch(pool, tables, 16, 64, 4096), Batch(pool, tables, 128, 64, 4096)
    for key, batch, new in (
        ("mla_16x64x4096", few, 1),
        ("mla_128x64x4096", many, 1),
        ("mla_16x1x32768", Batch(pool, tables, 16, 1, 32768), 1),
        ("mla_16x16x8192", Batch(pool, tables, 16, 16, 8192), 1),
        ("mla_16x64x4096_verify4", few, 4),
        ("mla_16x4096_prompt", Batch(pool, tables, 16, 1, 4096), 4096),
        ("mla_128x2048_prompt", Batch(pool, tables, 128, 1, 2048), 2048),
    ):
        tile = latent_tile(batch.heads * new, batch.layer(0))
        launch, err = batch.decode(tile, new) if new <= 8 else batch.prefill(tile, new)
        measured, wrong = seconds(launch, 8, 9), err()
        copy_s, product_s = limits(batch, new)
        table.line(key, str(tile), measured, max(copy_s, product_s), wrong, "", key)
        if key == "mla_16x64x4096":
            table.metrics["mla_copy_share"] = round(copy_s / measured, 4)
        elif key == "mla_128x64x4096":
            table.metrics["mla_128_heads_product_share"] = round(product_s / measured, 4)
    return table.metrics


def main() -> None:
    args = report.arguments(__doc__, METRICS).parse_args()
    report.write(args.out, "mla", measure(), "torch", "triton")


if __name__ == "__main__":
    main()
