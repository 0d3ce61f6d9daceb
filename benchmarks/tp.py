"""Measures tensor parallelism on two GPUs of one machine: decode steps, sums over ranks, and a hand-off to two ranks.

    python benchmarks/tp.py --out benchmarks/results/tp-h200x2.json
    python benchmarks/tp.py --only decode --graphs on --engine tensor_parallel_reduce=one_shot

The models have the shapes of Llama-3.1-8B (bf16) and Llama-3.1-70B (weights fp8) with random weights. `--shape tiny`
checks on a CPU that the script works; its ranks are processes.
"""

from __future__ import annotations

import asyncio
import itertools
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from benchmarks.engine import decode_run
from benchmarks.support import report
from benchmarks.support.engine_driver import Prompts, engine_settings, running
from benchmarks.support.limits import free_memory
from benchmarks.support.shapes import LLAMA_8B, LLAMA_70B, SHAPES, config_directory
from common.types import SamplingParams
from engine.config import EngineConfig

METRICS = """
Metrics:

- decode_ms_RxC: median time between the results of steps that decode R rows with a mean context of C tokens, 8B shape
  on two ranks, layer by layer. one_decode_ms_RxC: the same on one rank, from CUDA graphs.
- mixed_ms_RxN: median time of steps in which R rows decode beside a prompt of N tokens.
- fp8_70b_decode_ms_1x128: as decode_ms_1x128 for the 70B shape with fp8 weights.
- graph_...: the same from CUDA graphs of both ranks (tensor_parallel_graphs). ..._replay: time of a replay of the
  graph, without the work of the hosts between steps.
- sum_us_N: time of one sum of N bytes over two ranks, by NCCL; one_shot_us_N: by the kernel over peer memory, 100 sums
  in a row. A wrong sum ends the benchmark.
- exposed_ms_tpB: median exposed time of a hand-off of 4,096 tokens from one rank to B ranks. Prefill shares GPU 0 with
  rank 0 of decode.
- exposed_ratio_tp1_tp2: exposed_ms_tp2 over exposed_ms_tp1.
"""
PARTS = ("sums", "decode", "large", "hand_off")
POINTS = ((1, 128), (64, 1024))
SUM_BYTES = (8 << 10, 16 << 10, 64 << 10, 256 << 10, 512 << 10)
HAND_OFFS = 12
SUMS = 100
GRAPHS = {"off": (False,), "on": (True,), "both": (False, True)}
MIXED = (8, 200)  # Rows that decode, and tokens of each prompt beside them.
MIXED_PROMPTS = 24


def settings(model_dir: Path, size: int, extra: dict[str, Any], *, tiny: bool) -> EngineConfig:
    fields: dict[str, Any] = {"load_format": "dummy", "tensor_parallel_size": size, "max_model_len": 4096, **extra}
    fields |= {"device": "cpu", "threads": 1, "max_model_len": 1024, "num_blocks": 256} if tiny else {"max_seqs": 64}
    return EngineConfig(model_dir=model_dir, **fields)


def decode(table: report.MetricTable, config: EngineConfig, vocab: int, name: str, points: Sequence[Any]) -> None:
    """Adds `name` for each (rows, context, steps)."""
    prompts = Prompts(vocab)
    with running(config) as driver:
        for rows, context, steps in points:
            batch = prompts.make(rows, max(1, context - steps // 2 - 16))
            params = [SamplingParams(temperature=0.0, max_tokens=2 * steps + 256)] * rows
            found = decode_run(driver, batch, params, context, steps)
            table.add(f"{name}_{rows}x{context}", statistics.median(found.times) * 1e3, worst=max(found.times) * 1e3)
            if found.replay_s is not None:
                table.add(f"{name}_{rows}x{context}_replay", found.replay_s * 1e3)
        driver.engine.close()
    free_memory()


def mixed(table: report.MetricTable, config: EngineConfig, vocab: int, name: str, *, tiny: bool) -> None:
    """Adds `name`: prompts come one after another while rows decode."""
    rows, tokens = (2, 24) if tiny else MIXED
    prompts, one_token = Prompts(vocab), SamplingParams(temperature=0.0, max_tokens=1)
    with running(config) as driver:
        long = SamplingParams(temperature=0.0, max_tokens=min(2048, config.max_model_len - 128))
        driver.begin(prompts.make(rows, 64), [long] * rows)
        driver.wait(lambda result: result.num_decode_tokens == rows)
        for prompt in prompts.make(MIXED_PROMPTS, tokens):
            driver.add(prompt, one_token)
            driver.wait(lambda result: result.num_prompt_tokens > 0)
        steps = list(driver.seen)
        driver.end()
        times = [
            ended - began
            for (began, _), (ended, step) in itertools.pairwise(steps)
            if step.num_prompt_tokens and step.num_decode_tokens == rows
        ]
        table.add(f"{name}_{rows}x{tokens}", statistics.median(times) * 1e3, worst=max(times) * 1e3)
        driver.engine.close()
    free_memory()


def sums(table: report.MetricTable) -> None:
    """Starts rank 1 as a child and sums vectors with it."""
    from engine.parallel.collectives import open_store

    store, port = open_store("127.0.0.1")
    command = [sys.executable, __file__, "--sum-rank", str(port)]
    with subprocess.Popen(command) as child:
        try:
            for name, nbytes, seconds in sum_vectors(store, 0):
                table.add(f"{name}_{nbytes}", seconds * 1e6)
        finally:
            child.wait(60)


def sum_vectors(store: Any, rank: int) -> list[tuple[str, int, float]]:
    """Checks and times sums with both kinds of collectives. Returns (name, bytes, seconds)."""
    from engine.parallel.collectives import Collectives

    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    found: list[tuple[str, int, float]] = []
    collectives = Collectives(store, rank, 2, device, "127.0.0.1", one_shot=True)
    plain = collectives._one_shot
    for name, nbytes in itertools.product(("sum_us", "one_shot_us"), SUM_BYTES):
        collectives._one_shot = plain if name == "one_shot_us" else None
        for seed in range(20):
            parts = [_part(nbytes, seed, source, device) for source in range(2)]
            mine = parts[rank].clone()
            collectives.all_reduce(mine)
            expected = (parts[0].double() + parts[1].double()).to(mine.dtype)
            if not torch.equal(mine, expected):
                raise SystemExit(f"{name}_{nbytes}: a sum of rank {rank} is wrong")
        vector = torch.zeros(nbytes // 2, dtype=torch.bfloat16, device=device)
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(SUMS):
            collectives.all_reduce(vector)
        torch.cuda.synchronize()
        found.append((name, nbytes, (time.perf_counter() - began) / SUMS))
    return found


def _part(nbytes: int, seed: int, rank: int, device: torch.device) -> torch.Tensor:
    random = torch.Generator().manual_seed(2 * seed + rank)
    return torch.randn(nbytes // 2, generator=random).to(torch.bfloat16).to(device)


async def exposed_ms(model_dir: Path, size: int, *, tiny: bool) -> float:
    """Returns the median exposed time of hand-offs from a pod with one rank to a pod with `size` ranks."""
    from tests.rigs.pods.harness import Cluster, request

    tokens = 96 if tiny else 4096
    common: dict[str, Any] = {"load_format": "dummy", "kv_order": "heads", "checksums": False, "staging": "off"}
    if not tiny:
        common |= {"device": "cuda:0", "dtype": "bfloat16", "block_size": 16, "chunk_tokens": 2048, "threads": 0}
        common |= {"max_model_len": 8192, "kv_memory": 4 << 30, "max_seqs": 16}
    decode_config = {**common, "tensor_parallel_size": size, "local_prefill": "off"}
    prompts = Prompts(200).make(HAND_OFFS, tokens)
    async with Cluster.start(
        model_dir, own_backend=True, prefill_config=common, decode_config=decode_config, check=False
    ) as cluster:
        times: list[float] = []
        for prompt in prompts:
            before = _exposed_s(cluster)
            await cluster.generate(request(prompt, 4), remote_only=True)
            times.append(_exposed_s(cluster) - before)
    return statistics.median(times[2:]) * 1e3


def _exposed_s(cluster: Any) -> float:
    return sum(pair.exposed_s for pair in cluster.prefill.runtime.transfer_node.pair_stats())


def main(argv: Sequence[str] | None = None) -> None:
    parser = report.arguments(__doc__, METRICS)
    parser.add_argument("--shape", choices=("llama", "tiny"), default="llama")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--engine", nargs="+", default=[], metavar="NAME=VALUE", help="settings of the engines")
    parser.add_argument("--graphs", choices=GRAPHS, default="both", help="steps of two ranks from CUDA graphs")
    parser.add_argument("--sum-rank", type=int, help="run as rank 1 of the sums, with the store at this port")
    args = parser.parse_args(argv)
    if args.sum_rank is not None:
        from engine.parallel.collectives import join_store

        sum_vectors(join_store("127.0.0.1", args.sum_rank), 1)
        return
    tiny, table, extra = args.shape == "tiny", report.MetricTable(), engine_settings(args.engine)
    small = SHAPES["tiny"].config | {"num_key_value_heads": 2, "num_attention_heads": 4}
    config = small if tiny else LLAMA_8B
    with_graphs = (False,) if tiny else GRAPHS[args.graphs]
    points = [(2, 64, 8)] if tiny else [(*point, 64) for point in POINTS]
    if "sums" in args.only and not tiny:
        sums(table)
    with config_directory(config) as model_dir:
        if "decode" in args.only:
            for graphs in with_graphs:
                two = settings(model_dir, 2, extra | {"tensor_parallel_graphs": graphs}, tiny=tiny)
                kind = "graph_" if graphs else ""
                decode(table, two, config["vocab_size"], f"{kind}decode_ms", points)
                mixed(table, two, config["vocab_size"], f"{kind}mixed_ms", tiny=tiny)
            one = {key: value for key, value in extra.items() if not key.startswith("tensor_parallel")}
            decode(table, settings(model_dir, 1, one, tiny=tiny), config["vocab_size"], "one_decode_ms", points)
        if "hand_off" in args.only:
            for size in (1, 2):
                table.add(f"exposed_ms_tp{size}", asyncio.run(exposed_ms(model_dir, size, tiny=tiny)))
            metrics = table.metrics
            table.add("exposed_ratio_tp1_tp2", metrics["exposed_ms_tp2"] / metrics["exposed_ms_tp1"])
    if "large" in args.only and not tiny:
        with config_directory(LLAMA_70B) as model_dir:
            for graphs in with_graphs:
                more = {"weights": "fp8", "tensor_parallel_graphs": graphs}
                name = f"{'graph_' if graphs else ''}fp8_70b_decode_ms"
                large = settings(model_dir, 2, extra | more, tiny=False)
                decode(table, large, LLAMA_70B["vocab_size"], name, [(1, 128, 64)])
    report.write(args.out, "tp", table.metrics, "torch", "triton", "nixl-cu13", shape=args.shape, rows=table.rows)


if __name__ == "__main__":
    main()
