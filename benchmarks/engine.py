"""Measures the engine against the limits of its GPU: decode steps, time to first token, offline throughput.

    python benchmarks/engine.py --out benchmarks/results/engine-h100.json

All requests go through the code that a pod runs: EngineLoop on its thread, scheduler and sampler. The model has the
shape of Llama-3.1-8B (--shape) with random bf16 weights. An engine with a pod's default settings serves the decode
and TTFT metrics, an engine with the settings of `LLM` the offline metric. `--shape tiny` checks on a CPU that the
script works.
"""

from __future__ import annotations

import itertools
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from benchmarks.support import report
from benchmarks.support.engine_driver import Condition, Driver, Prompts, engine_settings, running
from benchmarks.support.limits import Ceilings, StepCost, ceilings, free_memory
from benchmarks.support.report import timed
from benchmarks.support.shapes import QUANTIZATIONS, SHAPES, BenchmarkShape, config_directory
from common.types import SamplingParams
from engine.config import EngineConfig
from engine.llm import for_throughput
from engine.schedule.outputs import StepResult

METRICS = """
Metrics, all medians unless stated otherwise:

- decode_ms_RxC: time between the results of successive steps that only decode R rows, with a mean context of C tokens
  over the rows and the measured steps. Limit: one read of all weights and this KV at copy speed.
- ttft_ms_N: from adding a request of N tokens to an idle engine until its token is on the host. No prompt occurs twice.
  Limit: the FLOP of a prefill at the measured rates of the model's largest matrix product and of cuDNN's attention.
- ttft_N_over_limit: the time of the longest of these prompts over its limit.
- handed_ms_N: as ttft_ms_N for a prompt that a prefill pod hands off (its last chunk is short).
- busy_ms_N: mean time between the first tokens of several prompts that are queued together.
- launch_ms_N: time in which the engine's thread launches a step of these prompts; other threads wait for the
  interpreter in this time.
- offline_out_tok_s: output tokens over the time until the last of the requests, all queued at the start, has ended.
- host_wait_ms: time of a step minus the time of its CUDA graph replayed back to back, worst decode point.
- sampling_ratio: time of steps with temperature, top-p and penalties over greedy steps, worst decode point.
- copy_gb_s: a copy of 4 GiB on the device, bytes read and written.
"""

PARTS = ("decode", "ttft", "handed", "offline")  # Methods of EngineBench.
SLACK = 8  # Steps between a change (all rows decode, a replay) and the first step that counts.
AROUND = 16  # Steps before and after the replays that are compared with them.
PENALTIES = {"repetition_penalty": 1.1, "presence_penalty": 0.5, "frequency_penalty": 0.2}
SAMPLED = SamplingParams(temperature=0.8, top_p=0.95, **PENALTIES)
ONE_TOKEN = SamplingParams(temperature=0.0, max_tokens=1)


@dataclass(frozen=True, slots=True)
class DecodeRun:
    times: list[float]  # Seconds of each step.
    context: float  # Mean context of the rows over these steps.
    replay_s: float | None  # Seconds of a replay of the step's graph. None: without graphs.
    around: list[float]  # Seconds of the steps just before and after the replays.


def context_of(result: StepResult) -> float:
    """Returns the mean number of tokens that the rows of a decode step read."""
    return sum(output.computed for output in result.outputs) / len(result.outputs)


def decode_run(
    driver: Driver, prompts: list[list[int]], sampling: Sequence[SamplingParams], context: int, steps: int
) -> DecodeRun:
    """Decodes until the mean context is well past `context`, and returns the `steps` steps around that context.

    Contexts are averaged over the rows, because rows with earlier prompts are ahead. The graph is replayed later and
    compared with the steps around the replays, because its time grows with the context.
    """
    rows = len(prompts)

    def full(result: StepResult) -> bool:
        return result.num_decode_tokens == rows and not result.num_prompt_tokens

    def past(goal: float) -> Condition:
        return lambda result: full(result) and context_of(result) >= goal

    driver.begin(prompts, sampling)
    driver.wait(past(context + steps // 2 + SLACK + AROUND))
    replay_s, replayed_after = driver.call(lambda: (driver.engine.runner.time_replay(2 * AROUND), len(driver.seen)))
    driver.wait(past(context_of(driver.seen[-1][1]) + AROUND + SLACK))
    seen = list(driver.seen)
    driver.end()

    # A step counts when it and the one before it decoded all rows.
    counted = [
        (context_of(b), ended - began, i)
        for i, ((began, a), (ended, b)) in enumerate(itertools.pairwise(seen))
        if full(a) and full(b)
    ]
    assert len(counted) >= steps, f"the {rows} rows decoded together for {len(counted)} steps only"
    nearest = min(range(len(counted)), key=lambda i: abs(counted[i][0] - context))
    first = min(max(nearest - steps // 2, SLACK), len(counted) - steps)
    window = counted[first : first + steps]
    around = [seconds for _, seconds, i in counted if SLACK // 4 < abs(i - replayed_after) <= AROUND]
    return DecodeRun([s for _, s, _ in window], statistics.fmean(c for c, _, _ in window), replay_s, around)


@contextmanager
def launches(driver: Driver) -> Iterator[list[float]]:
    """Collects the seconds in which the engine's thread launches each step inside the block."""
    runner, times = driver.engine.runner, list[float]()
    launch = runner.launch

    def timed_launch(*args: Any) -> Any:
        seconds, launched = timed(lambda: launch(*args))
        times.append(seconds)
        return launched

    runner.launch = timed_launch  # type: ignore[method-assign]
    try:
        yield times
    finally:
        del runner.launch  # restores the method of the class


@dataclass(frozen=True, slots=True)
class EngineBench:
    """Measures the parts of the benchmark, each on a running engine."""

    shape: BenchmarkShape
    ceiling: Ceilings
    table: report.MetricTable
    prompts: Prompts
    sampled: bool = True  # The decode points are measured with sampling too.

    def decode(self, driver: Driver, cost: StepCost) -> None:
        shape, waits, ratios = self.shape, list[float](), list[float]()
        for rows, context in shape.decode:
            # While the prompts of the other rows run, a row already decodes, on average in half of these steps.
            ahead = rows * context // driver.engine.scheduler.config.chunk_tokens // 2
            batch = self.prompts.make(rows, max(context - shape.steps // 2 - 2 * SLACK - ahead, 1))
            tokens = 2 * ahead + 2 * shape.steps + 8 * (SLACK + AROUND)
            greedy_params = [SamplingParams(temperature=0.0, max_tokens=tokens)] * rows
            greedy = decode_run(driver, batch, greedy_params, context, shape.steps)
            median_s = statistics.median(greedy.times)
            more = {"mean": statistics.fmean(greedy.times) * 1e3, "worst": max(greedy.times) * 1e3}
            more["context"] = greedy.context
            if self.sampled:
                sampled_params = [replace(SAMPLED, seed=i, max_tokens=tokens) for i in range(rows)]
                sampled = decode_run(driver, batch, sampled_params, context, shape.steps)  # prompts are in the cache
                ratios.append(statistics.median(sampled.times) / median_s)
                more["sampling_ratio"] = ratios[-1]
            if greedy.replay_s is not None:
                waits.append((statistics.median(greedy.around) - greedy.replay_s) * 1e3)
                more["host_wait_ms"] = waits[-1]
            limit = cost.decode_s(rows * context, self.ceiling, rows) * 1e3
            self.table.add(f"decode_ms_{rows}x{context}", median_s * 1e3, limit=limit, **more)
        if ratios:
            self.table.add("sampling_ratio", max(ratios))
        if waits:
            self.table.add("host_wait_ms", max(waits))

    def ttft(self, driver: Driver, cost: StepCost) -> None:
        for length in self.shape.ttft:
            limit = self._first_tokens(f"ttft_ms_{length}", driver, length, cost, hand_off=False)
        self.table.add(f"ttft_{length}_over_limit", self.table.metrics[f"ttft_ms_{length}"] / limit)

    def handed(self, driver: Driver, cost: StepCost) -> None:
        for length in self.shape.handed:
            limit = self._first_tokens(f"handed_ms_{length}", driver, length, cost, hand_off=True)
            batch = self.prompts.make(2 * self.shape.repeats, length)
            with launches(driver) as times:
                seen = driver.run(batch, [ONE_TOKEN] * len(batch), hand_off=True)
            at = [when for when, result in seen for output in result.outputs if output.tokens]
            self.table.add(f"busy_ms_{length}", (at[-1] - at[0]) / (len(at) - 1) * 1e3, limit=limit)
            self.table.add(f"launch_ms_{length}", statistics.median(times) * 1e3)

    def _first_tokens(self, name: str, driver: Driver, length: int, cost: StepCost, *, hand_off: bool) -> float:
        """Adds the median time to first token; the first prompt does not count. Returns the limit."""
        limit = cost.prefill_s(length, self.ceiling) * 1e3
        batch = self.prompts.make(self.shape.repeats + 1, length)
        times = [driver.run([prompt], [ONE_TOKEN], hand_off=hand_off)[-1][0] * 1e3 for prompt in batch][1:]
        self.table.add(name, statistics.median(times), limit=limit, best=min(times), worst=max(times))
        return limit

    def offline(self, driver: Driver, cost: StepCost) -> None:
        count, prompt, output = self.shape.offline
        params = [SamplingParams(temperature=0.0, max_tokens=output)] * count
        elapsed = driver.run(self.prompts.make(count, prompt), params)[-1][0]
        limit = count * output / cost.offline_s(count, prompt, output, self.ceiling)
        note = f"{count} x ({prompt} -> {output}), {elapsed:.1f} s"
        self.table.add("offline_out_tok_s", count * output / elapsed, note, limit=limit)

    def measure(self, config: EngineConfig, parts: Sequence[str], itemsize: float) -> dict[str, Any]:
        """Measures parts on one engine. Returns the seconds until it was ready, and the token budgets of the parts."""
        starting = time.perf_counter()
        with running(config) as driver:
            ready_s = round(time.perf_counter() - starting, 1)
            limits, layout = driver.engine.scheduler.config, driver.engine.layout
            print(f"ready after {ready_s} s, {limits.chunk_tokens} tokens per step beside decoding rows", flush=True)
            cost = StepCost(self.shape.config, itemsize, layout.block_bytes // layout.block_size)
            for part in parts:
                getattr(self, part)(driver, cost)
        budgets = {f"{part}_token_budget": limits.chunk_tokens for part in parts}
        return {"ready_s": ready_s} | budgets | {f"{part}_most_tokens": limits.max_step_tokens for part in parts}


def main(argv: Sequence[str] | None = None) -> None:
    parser = report.arguments(__doc__, METRICS)
    parser.add_argument("--shape", choices=SHAPES, default="llama-3.1-8b")
    parser.add_argument(
        "--quantization", choices=QUANTIZATIONS, help="format of the weights (also --engine weights=fp8)"
    )
    parser.add_argument("--device", default="auto")
    parser.add_argument("--only", choices=PARTS, nargs="+", default=list(PARTS), help="parts to run")
    parser.add_argument("--engine", metavar="NAME=VALUE", nargs="+", default=[], help="fields of EngineConfig")
    args = parser.parse_args(argv)
    began = time.perf_counter()
    shape = SHAPES[args.shape]
    settings = {
        "device": args.device,
        "load_format": "dummy",
        "block_size": shape.block_size,
        "max_seqs": max(shape.offline[0], *(rows for rows, _ in shape.decode)),
        "max_model_len": max(*shape.ttft, *(2 * context for _, context in shape.decode)) + 512,
    } | engine_settings(args.engine)
    quantized = {} if args.quantization is None else {"quantization_config": QUANTIZATIONS[args.quantization]}
    with config_directory(shape.config | quantized) as model_dir:
        config = EngineConfig(model_dir=model_dir, **settings)
        device = config.resolve_device()
        dtype = getattr(torch, config.resolve_dtype(device))
        ceiling = ceilings(shape, device, dtype)
        free_memory()
        print(f"{args.shape} on {report.card()}: {ceiling}", flush=True)
        table = report.MetricTable()
        bench = EngineBench(shape, ceiling, table, Prompts(shape.config["vocab_size"]))
        engine: dict[str, Any] = dict(settings)
        for engine_config, parts in (
            (config, ("decode", "ttft", "handed")),
            (for_throughput(config), ("offline",)),
        ):
            if chosen := [part for part in args.only if part in parts]:
                engine |= bench.measure(engine_config, chosen, dtype.itemsize)
                free_memory()
    took_s = round(time.perf_counter() - began, 1)
    print(f"{took_s:.0f} s in total")
    table.metrics["copy_gb_s"] = round(ceiling.copy_gb_s, 1)
    more = {name: round(getattr(ceiling, name), 1) for name in ("matmul_tflop_s", "attention_tflop_s")}
    more |= {"ready_s": engine.pop("ready_s"), "engine": engine, "took_s": took_s}
    report.write(args.out, "engine", table.metrics, "torch", "triton", shape=args.shape, rows=table.rows, **more)


if __name__ == "__main__":
    main()
