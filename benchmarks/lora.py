"""Measures LoRA adapters over one base: the cost of a step with adapters on a GPU, exactness under hot swap on a CPU.

    python benchmarks/lora.py --device cuda --out benchmarks/results/lora-h200.json
    python benchmarks/lora.py --device cuda --kernels
    python benchmarks/lora.py --device cuda --ranks 2 --out benchmarks/results/lora-h200x2.json
    python benchmarks/lora.py --device cpu --out benchmarks/results/lora-cpu.json

On a GPU the model has the shape of Llama-3.1-8B with random bf16 weights, and adapters of rank 16 on all seven
matrices of each layer. --kernels compares the kernels with float64 and times tiles instead. --ranks splits the model
over GPUs, with and without adapters.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from benchmarks.engine import ONE_TOKEN, decode_run
from benchmarks.support import report
from benchmarks.support.adapter_kernels import check_and_time
from benchmarks.support.adapter_swaps import swap_under_load
from benchmarks.support.engine_driver import Driver, Prompts, running
from benchmarks.support.limits import free_memory
from benchmarks.support.relay_swaps import swap_over_hand_off
from benchmarks.support.shapes import SHAPES, config_directory, llama
from cli.demo.adapter import write_random_adapter
from common.types import SamplingParams, ValidRequest
from engine.adapters.peft import AdapterFile, LoraPair
from engine.config import EngineConfig
from engine.llm import LLM
from tests.lora.adapter_cluster import make_files

METRICS = """
Metrics on a GPU; a ratio is the time with adapters over the time of an engine without them:

- ratio_64x1024_16_adapters: a decode step of 64 rows with a context of 1,024 tokens, each with one of 16 adapters.
- ratio_1x128: a decode step of one row with an adapter.
- ratio_no_adapter: the worst decode step of rows without adapters, on an engine that has adapters.
- ratio_prefill_2048: the time to the first token of 2,048 tokens with an adapter.
- cold_first_token_ms: how much later a first token comes if its adapter is on the host only: the worst of 20 of 100
  adapters over 16 slots.
- gap_steps: the longest time between two steps of 63 rows while 8 cold adapters load, over the median step.

Metrics on a CPU:

- swap_requests, swaps: requests for one name, 24 at once, and how often two adapters took turns under the name.
- mixed_or_stale: answers that differ from the answer of the adapter that had the name when the request was sent.
- relay_swap_requests, relay_swaps, relay_mixed_or_stale: the same over a gateway, a prefill pod and a decode pod.
"""
RANK, SLOTS, ADAPTERS, COLD = 16, 16, 100, 20
POINTS = ((64, 1024), (1, 128))
STEPS, REPEATS = 32, 5
SWAP_REQUESTS = 1000
TINY = llama(64, 32, 64, layers=2, heads=4, kv_heads=2, context=128)


def random_adapter(shapes: dict[str, tuple[int, int]], number: int, pairs: dict[str, LoraPair]) -> AdapterFile:
    """Makes an adapter of all matrices of the layers. All adapters share the numbers of `pairs`; scales differ."""
    for name, (inputs, outputs) in shapes.items():
        if name not in pairs and ".layers." in name:
            a, b = torch.randn(RANK, inputs), torch.randn(outputs, RANK)
            pairs[name] = LoraPair(a.bfloat16() / inputs**0.5, b.bfloat16() / RANK**0.5, 1.0)
    scaled = {name: LoraPair(pair.a, pair.b, 0.01 + number / 1000) for name, pair in pairs.items()}
    return AdapterFile(f"bench-{number}", scaled)


def decode_ms(driver: Driver, prompts: Prompts, rows: int, context: int) -> float:
    """Returns the median of a decode step."""
    ahead = rows * context // driver.engine.scheduler.config.chunk_tokens // 2
    batch = prompts.make(rows, max(context - STEPS // 2 - 16 - ahead, 1))
    params = SamplingParams(temperature=0.0, max_tokens=2 * ahead + 2 * STEPS + 200)
    return statistics.median(decode_run(driver, batch, [params] * rows, context, STEPS).times) * 1e3


def first_token_ms(driver: Driver, prompts: Prompts, length: int) -> float:
    return driver.run(prompts.make(1, length), [ONE_TOKEN])[-1][0] * 1e3


def points(driver: Driver, prompts: Prompts) -> dict[str, float]:
    """Returns the times of decode steps and of the first token, in ms."""
    found = {f"{rows}x{context}": decode_ms(driver, prompts, rows, context) for rows, context in POINTS}
    first_token_ms(driver, prompts, 2048)
    found["prefill"] = statistics.median(first_token_ms(driver, prompts, 2048) for _ in range(REPEATS))
    return found


def gap_steps(driver: Driver, prompts: Prompts, digests: Iterable[str]) -> float:
    """Returns the longest time between steps while rows decode and cold adapters load, in median steps."""
    rows = driver.engine.scheduler.config.max_seqs - 1
    driver.adapters = ("",)
    driver.begin(prompts.make(rows, 500), [SamplingParams(temperature=0.0, max_tokens=800)] * rows)
    driver.wait(lambda result: result.num_decode_tokens >= rows and not result.num_prompt_tokens)
    first = len(driver.seen)
    for digest in digests:
        (prompt,) = prompts.make(1, 8)
        request = ValidRequest(f"cold-{digest}", driver.engine.layout.model, tuple(prompt), ONE_TOKEN, adapter=digest)
        driver.loop.add(driver.engine.new_sequence(request), lambda error: print(error, flush=True))
        time.sleep(0.15)
    times = [at for at, _ in list(driver.seen)[first:]]
    driver.end()
    gaps = [b - a for a, b in itertools.pairwise(times)]
    return max(gaps) / statistics.median(gaps)


def measure_base(config: EngineConfig, prompts: Prompts) -> dict[str, float]:
    """Returns the times of an engine without adapters. Its memory is free after the return."""
    with running(config) as driver:
        base = points(driver, prompts)
        print(f"base: {base}", flush=True)
        driver.engine.close()
    return base


def measure_adapters(config: EngineConfig, prompts: Prompts) -> tuple[dict[str, float], dict[str, float], float, float]:
    """Returns the times of rows without and with adapters, the delay of a cold adapter in ms, and `gap_steps`."""
    with running(config) as driver:
        names, pairs = driver.engine.adapters, dict[str, LoraPair]()
        began = time.perf_counter()
        files = [random_adapter(names.shapes, number, pairs) for number in range(ADAPTERS)]
        digests = [names.keep(file, file.digest).digest for file in files]
        print(f"{ADAPTERS} adapters on the host after {time.perf_counter() - began:.1f} s", flush=True)
        plain = points(driver, prompts)
        print(f"no adapter: {plain}", flush=True)
        driver.adapters = digests[:SLOTS]
        adapted = points(driver, prompts)
        print(f"adapters: {adapted}", flush=True)
        cold, warm = list[float](), list[float]()
        for digest in digests[SLOTS : SLOTS + COLD]:
            driver.adapters = (digest,)
            cold.append(first_token_ms(driver, prompts, 128))
            warm.append(first_token_ms(driver, prompts, 128))
        gap = gap_steps(driver, prompts, digests[SLOTS + COLD : SLOTS + COLD + 8])
        driver.engine.close()
    return plain, adapted, max(cold) - statistics.median(warm), gap


def measure_gpu(device: str, ranks: int) -> tuple[dict[str, float], dict[str, float]]:
    """Returns the metrics and the times behind them."""
    shape = SHAPES["llama-3.1-8b"]
    prompts, table, times = Prompts(shape.config["vocab_size"]), report.MetricTable(), dict[str, float]()
    settings: dict[str, Any] = {"device": device, "load_format": "dummy", "max_seqs": 64, "max_model_len": 4096}
    settings["tensor_parallel_size"] = ranks
    with config_directory(shape.config) as model_dir:
        settings["model_dir"] = model_dir
        base = measure_base(EngineConfig(**settings), prompts)
        free_memory()
        plain, adapted, late_ms, gap = measure_adapters(EngineConfig(max_adapters=SLOTS, **settings), prompts)
        free_memory()
    table.add("ratio_64x1024_16_adapters", adapted["64x1024"] / base["64x1024"])
    table.add("ratio_1x128", adapted["1x128"] / base["1x128"])
    table.add("ratio_no_adapter", max(plain[f"{r}x{c}"] / base[f"{r}x{c}"] for r, c in POINTS))
    table.add("ratio_prefill_2048", adapted["prefill"] / base["prefill"])
    table.add("cold_first_token_ms", late_ms)
    table.add("gap_steps", gap)
    for kind, found in (("base", base), ("no_adapter", plain), ("adapters", adapted)):
        times |= {f"{kind}_{name}_ms": round(value, 4) for name, value in found.items()}
    return table.metrics, times


def measure_swaps() -> dict[str, float]:
    """Exchanges two adapters under one name while requests run, in one engine and over the hand-off."""
    with tempfile.TemporaryDirectory() as directory:
        relay = asyncio.run(swap_over_hand_off(make_files(Path(directory)), SWAP_REQUESTS))
    with tempfile.TemporaryDirectory() as directory:
        model = Path(directory) / "model"
        model.mkdir()
        (model / "config.json").write_text(json.dumps(TINY))
        paths = [Path(directory) / name for name in ("first", "second")]
        for seed, path in enumerate(paths):
            write_random_adapter(model, path, rank=8, seed=seed)
        llm = LLM(model, load_format="dummy", device="cpu", num_blocks=512, block_size=4, threads=1, max_adapters=2)
        wrong, swaps = swap_under_load(llm.engine, paths, SWAP_REQUESTS)
        llm.engine.close()
    return {
        "swap_requests": SWAP_REQUESTS,
        "swaps": swaps,
        "mixed_or_stale": wrong,
        "relay_swap_requests": relay.requests,
        "relay_swaps": relay.swaps,
        "relay_mixed_or_stale": relay.wrong,
    }


def main(argv: Sequence[str] | None = None) -> None:
    parser = report.arguments(__doc__, METRICS)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--ranks", type=int, default=1, help="GPUs of the model")
    parser.add_argument("--kernels", action="store_true", help="check and time the kernels; writes no result")
    args = parser.parse_args(argv)
    if args.kernels:
        check_and_time(torch.device(args.device))
        return
    began = time.perf_counter()
    if torch.device(args.device).type == "cuda":
        metrics, times = measure_gpu(args.device, args.ranks)
    else:
        metrics, times = measure_swaps(), {}
        report.show(metrics)
    took_s = round(time.perf_counter() - began, 1)
    report.write(args.out, "lora", metrics, "torch", "triton", times=times, took_s=took_s, ranks=args.ranks)


if __name__ == "__main__":
    main()
