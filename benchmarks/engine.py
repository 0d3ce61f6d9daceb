"""Measures the engine against the limits of its GPU: decode steps, time to first token, offline throughput.

    python benchmarks/engine.py --out benchmarks/results/engine-h100.json

All requests go through the code that a pod runs: EngineLoop on its thread, scheduler and sampler. The model has the
shape of Llama-3.1-8B with random bf16 weights. An engine with a pod's default settings serves the decode and TTFT
metrics, an engine with the settings of `LLM` the offline metric. `--shape tiny` checks on a CPU that the script works.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import itertools
import json
import random
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from benchmarks.support import report
from benchmarks.support.limits import Ceilings, StepCost, ceilings
from benchmarks.support.shapes import GOALS, HOST_WAIT_BAR_MS, SAMPLING_BAR, SHAPES, BenchmarkShape, Goal
from common.errors import BatonError
from common.types import SamplingParams, ValidRequest
from engine.config import EngineConfig
from engine.engine import Engine
from engine.llm import for_throughput
from engine.loop import EngineLoop
from engine.schedule.outputs import StepResult

METRICS = """
Metrics, all medians unless stated otherwise:

- decode_ms_RxC: time between the results of successive steps that only decode R rows, with a mean context of C tokens
  over the rows and the measured steps. Limit: one read of all weights and this KV at copy speed.
- ttft_ms_N: from adding a request of N tokens to an idle engine until its token is on the host. No prompt occurs twice.
  Limit: the FLOP of a prefill at the measured rates of the model's largest matrix product and of cuDNN's attention.
- handed_ms_N: as ttft_ms_N for a prompt that a prefill pod hands off (its last chunk is short).
- busy_ms_N: mean time between the first tokens of several prompts that are queued together.
- launch_ms_N: time in which the engine's thread launches a step of these prompts; other threads wait for the
  interpreter in this time. The suffix _graphs means an engine with chunk_graphs.
- offline_out_tok_s: output tokens over the time until the last of the requests, all queued at the start, has ended.
- host_wait_ms: time of a step minus the time of its CUDA graph replayed back to back, worst decode point.
- sampling_ratio: time of steps with temperature, top-p and penalties over greedy steps, worst decode point.
- copy_gb_s: a copy of 4 GiB on the device, bytes read and written.
"""

WAIT_S = 120.0
#: Steps between a change (all rows decode, a replay) and the first step that counts.
SLACK = 8
#: Steps before and after the replays that are compared with them.
AROUND = 16
SAMPLED = SamplingParams(
    temperature=0.8, top_p=0.95, repetition_penalty=1.1, presence_penalty=0.5, frequency_penalty=0.2
)

Condition = Callable[[StepResult], bool]


def never(_result: StepResult) -> bool:
    return False


class Driver:
    """Runs requests through EngineLoop and records when the results of each step were on the host.

    It runs one batch at a time: `begin`, then `wait` any number of times, then `end`.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.loop = EngineLoop(engine, self._on_step)
        self.seen: list[tuple[float, StepResult]] = []
        self._ids = itertools.count()
        self._names: list[str] = []
        self._left = 0
        self._enough: Condition = never
        self._reached = threading.Event()
        self._idle = threading.Event()
        self._errors: list[BatonError] = []

    def _on_step(self, result: StepResult) -> None:
        self.seen.append((time.perf_counter(), result))
        for output in result.outputs:
            if output.finish_reason is not None:
                self._left -= 1
                if output.error is not None:
                    self._errors.append(output.error)
        if not self._left:
            self._idle.set()
        if self._enough(result):
            self._reached.set()

    def _refused(self, error: BatonError) -> None:
        self._errors.append(error)
        self._reached.set()
        self._idle.set()

    def begin(
        self, prompts: Sequence[Sequence[int]], sampling: Sequence[SamplingParams], *, hand_off: bool = False
    ) -> float:
        """Adds all requests. Returns the time before the first one."""
        self.seen.clear()
        self._idle.clear()
        self._left = len(prompts)
        self._names = [f"bench-{next(self._ids)}" for _ in prompts]
        began = time.perf_counter()
        for name, prompt, params in zip(self._names, prompts, sampling, strict=True):
            request = ValidRequest(name, self.engine.layout.model, tuple(prompt), params)
            self.loop.add(self.engine.new_sequence(request, hand_off=hand_off), self._refused)
        return began

    def wait(self, enough: Condition | None = None) -> None:
        """Waits until a step meets the condition, which all later steps must meet too. None: until all requests end."""
        if enough is None:
            self._wait(self._idle)
            return
        self._reached.clear()
        self._enough = enough
        self._wait(self._reached)
        self._enough = never

    def end(self) -> None:
        """Aborts running requests and waits for the step that is on the device."""
        for name in self._names:
            self.loop.abort(name)
        self._wait(self._idle)
        until = time.monotonic() + WAIT_S
        while self.loop.call(lambda: self.engine.has_work).result(WAIT_S):
            if time.monotonic() > until:
                raise SystemExit(f"the engine still has work {WAIT_S:.0f} s after its requests ended")
            time.sleep(0.001)

    def _wait(self, event: threading.Event) -> None:
        if not event.wait(WAIT_S):
            raise SystemExit(f"the requests did not reach the awaited state within {WAIT_S:.0f} s")
        if self._errors:
            raise SystemExit(f"the engine failed: {self._errors[0]}")


class Prompts:
    """Unique random prompts."""

    def __init__(self, vocab_size: int) -> None:
        self._rng = random.Random(0)
        self._vocab_size = vocab_size

    def make(self, count: int, length: int) -> list[list[int]]:
        return [self._rng.choices(range(self._vocab_size), k=length) for _ in range(count)]


@dataclass(frozen=True, slots=True)
class DecodeRun:
    """Measured decode steps."""

    #: Seconds of each step.
    times: list[float]
    #: Mean context of the rows over these steps.
    context: float
    #: Seconds of a replay of the step's graph. None: without graphs.
    replay_s: float | None
    #: Seconds of the steps just before and after the replays.
    around: list[float]

    @property
    def median_s(self) -> float:
        return statistics.median(self.times)

    @property
    def host_wait_s(self) -> float | None:
        return None if self.replay_s is None else statistics.median(self.around) - self.replay_s


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
    replay_s, replayed_after = driver.loop.call(
        lambda: (driver.engine.runner.time_replay(2 * AROUND), len(driver.seen))
    ).result(WAIT_S)
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


def ttft_s(driver: Driver, prompt: list[int], *, hand_off: bool = False) -> float:
    """Returns the seconds from adding the prompt until its token is on the host."""
    began = driver.begin([prompt], [SamplingParams(temperature=0.0, max_tokens=1)], hand_off=hand_off)
    driver.wait()
    elapsed = driver.seen[-1][0] - began
    driver.end()
    return elapsed


@contextmanager
def launches(driver: Driver) -> Iterator[list[float]]:
    """Collects the seconds in which the engine's thread launches each step inside the block."""
    runner, times = driver.engine.runner, list[float]()
    launch = runner.launch

    def timed(*args: Any) -> Any:
        began = time.perf_counter()
        try:
            return launch(*args)
        finally:
            times.append(time.perf_counter() - began)

    runner.launch = timed  # type: ignore[method-assign]
    try:
        yield times
    finally:
        del runner.launch  # restores the method of the class


def busy_s(driver: Driver, prompts: list[list[int]]) -> tuple[float, float]:
    """Runs prompts that are queued together.

    Returns the mean seconds between their first tokens, and the median seconds to launch one of their steps.
    """
    with launches(driver) as times:
        driver.begin(prompts, [SamplingParams(temperature=0.0, max_tokens=1)] * len(prompts), hand_off=True)
        driver.wait()
        at = [when for when, result in driver.seen for output in result.outputs if output.tokens]
        driver.end()
    return (at[-1] - at[0]) / (len(at) - 1), statistics.median(times)


def offline_s(driver: Driver, prompts: list[list[int]], output: int) -> float:
    """Returns the seconds until the last of the requests has ended."""
    began = driver.begin(prompts, [SamplingParams(temperature=0.0, max_tokens=output)] * len(prompts))
    driver.wait()
    elapsed = driver.seen[-1][0] - began
    driver.end()
    return elapsed


@dataclass(slots=True)
class GoalTable:
    """Prints each metric with its goal and its limit, and keeps them for the result file."""

    goals: dict[str, Goal]
    metrics: dict[str, float] = field(default_factory=dict)
    rows: list[dict[str, float | str]] = field(default_factory=list)

    def head(self) -> None:
        columns = ("bar", "aim", "vLLM", "limit", "share")
        print(f"{'':<22}{'measured':>10}" + "".join(f"{c:>9}" for c in columns), flush=True)

    def line(self, name: str, value: float, limit: float, note: str = "", **more: float) -> None:
        """Adds a metric. limit: the least time, or the highest rate, that the device allows."""
        share = value / limit if name.endswith("tok_s") else limit / value
        self.metrics[name] = round(value, 3)
        goal = self.goals.get(name)
        row: dict[str, float | str] = {"name": name, "value": round(value, 3), "limit": round(limit, 3)}
        if goal is not None:
            row |= {"bar": goal.bar, "aim": goal.aim, "vllm": goal.vllm}
        self.rows.append(row | {"share": round(share, 4)} | {k: round(v, 4) for k, v in more.items()})
        against = [goal.bar, goal.aim, goal.vllm] if goal is not None else ["-"] * 3
        missed = goal is not None and (value < goal.bar if name.endswith("tok_s") else value > goal.bar)
        print(
            f"{name:<22}{value:>10.2f}"
            + "".join(f"{g:>9}" for g in against)
            + f"{limit:>9.2f}{share:>9.1%}  {note}{'  BAR MISSED' if missed else ''}",
            flush=True,
        )

    def plain(self, name: str, value: float) -> None:
        """Adds a metric without bar and limit."""
        self.metrics[name] = round(value, 4)
        self.rows.append({"name": name, "value": round(value, 4)})
        print(f"{name:<22}{value:>10.3f}", flush=True)

    def worst(self, name: str, values: Sequence[float], bar: float) -> None:
        """Adds the worst of several values, with a bar and without a limit. The bar applies if there are goals."""
        value = max(values)
        self.metrics[name] = round(value, 4)
        self.rows.append({"name": name, "value": round(value, 4), "bar": bar})
        missed = self.goals and value > bar
        print(f"{name:<22}{value:>10.3f}{bar:>9}{'  BAR MISSED' if missed else ''}", flush=True)


def measure_decode(
    shape: BenchmarkShape, driver: Driver, prompts: Prompts, cost: StepCost, ceiling: Ceilings, table: GoalTable
) -> None:
    budget = driver.engine.scheduler.config.chunk_tokens
    waits: list[float] = []
    ratios: list[float] = []
    for rows, context in shape.decode:
        # While the prompts of the other rows run, a row already decodes, on average in half of these steps.
        ahead = rows * context // budget // 2
        batch = prompts.make(rows, max(context - shape.steps // 2 - 2 * SLACK - ahead, 1))
        tokens = 2 * ahead + 2 * shape.steps + 8 * (SLACK + AROUND)
        greedy_params = [SamplingParams(temperature=0.0, max_tokens=tokens)] * rows
        sampled_params = [dataclasses.replace(SAMPLED, seed=i, max_tokens=tokens) for i in range(rows)]
        greedy = decode_run(driver, batch, greedy_params, context, shape.steps)
        sampled = decode_run(driver, batch, sampled_params, context, shape.steps)  # the prompts are in the prefix cache
        ratios.append(sampled.median_s / greedy.median_s)
        more = {
            "context": greedy.context,
            "mean": statistics.fmean(greedy.times) * 1e3,
            "worst": max(greedy.times) * 1e3,
            "sampling_ratio": ratios[-1],
        }
        note = f"context {greedy.context:.0f}, sampling x{ratios[-1]:.3f}"
        if greedy.host_wait_s is not None:
            waits.append(greedy.host_wait_s * 1e3)
            more |= {"host_wait_ms": waits[-1]}
            note += f", host {waits[-1]:.3f} ms"
        limit = cost.decode_s(rows * context, ceiling) * 1e3
        table.line(f"decode_ms_{rows}x{context}", greedy.median_s * 1e3, limit, note, **more)
    table.worst("sampling_ratio", ratios, SAMPLING_BAR)
    if waits:
        table.worst("host_wait_ms", waits, HOST_WAIT_BAR_MS)


def measure_ttft(
    shape: BenchmarkShape, driver: Driver, prompts: Prompts, cost: StepCost, ceiling: Ceilings, table: GoalTable
) -> None:
    for length in shape.ttft:
        batch = prompts.make(shape.repeats + 1, length)
        times = [ttft_s(driver, prompt) * 1e3 for prompt in batch][1:]
        limit = cost.prefill_s(length, ceiling) * 1e3
        note = f"{min(times):.2f}..{max(times):.2f}"
        table.line(f"ttft_ms_{length}", statistics.median(times), limit, note, best=min(times), worst=max(times))


def measure_handed(
    shape: BenchmarkShape, driver: Driver, prompts: Prompts, cost: StepCost, ceiling: Ceilings, table: GoalTable
) -> None:
    suffix = "_graphs" if driver.engine.config.chunk_graphs else ""
    for length in shape.handed:
        limit = cost.prefill_s(length, ceiling) * 1e3
        times = [ttft_s(driver, prompt, hand_off=True) * 1e3 for prompt in prompts.make(shape.repeats + 1, length)][1:]
        note = f"{min(times):.2f}..{max(times):.2f}"
        table.line(f"handed_ms_{length}{suffix}", statistics.median(times), limit, note)
        between, launch = busy_s(driver, prompts.make(2 * shape.repeats, length))
        table.line(f"busy_ms_{length}{suffix}", between * 1e3, limit)
        table.plain(f"launch_ms_{length}{suffix}", launch * 1e3)


def measure_offline(
    shape: BenchmarkShape, driver: Driver, prompts: Prompts, cost: StepCost, ceiling: Ceilings, table: GoalTable
) -> None:
    count, prompt, output = shape.offline
    elapsed = offline_s(driver, prompts.make(count, prompt), output)
    limit = count * output / cost.offline_s(count, prompt, output, ceiling)
    note = f"{count} x ({prompt} -> {output}), {elapsed:.1f} s"
    table.line("offline_out_tok_s", count * output / elapsed, limit, note)


PARTS = {"decode": measure_decode, "ttft": measure_ttft, "handed": measure_handed, "offline": measure_offline}


@contextmanager
def running(config: EngineConfig) -> Iterator[Driver]:
    """Runs an engine on its thread."""
    driver = Driver(Engine(config))
    driver.loop.start()
    try:
        driver.loop.call(driver.engine.warm_up).result(WAIT_S)
        driver.begin([[0, 0]], [SamplingParams(temperature=0.0, max_tokens=2)])  # a pod does so before it is ready
        driver.wait()
        driver.end()
        yield driver
    finally:
        driver.loop.stop(WAIT_S)


def engine_settings(pairs: list[str]) -> dict[str, Any]:
    """Parses fields of EngineConfig from NAME=VALUE. The engine checks the types of the values."""
    known = {f.name for f in fields(EngineConfig)}
    settings: dict[str, Any] = {}
    for pair in pairs:
        name, _, value = pair.partition("=")
        if name not in known:
            raise SystemExit(f"--engine {name} is not a field of EngineConfig; fields are {', '.join(sorted(known))}")
        try:
            settings[name] = json.loads(value)
        except ValueError:
            settings[name] = value
    return settings


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=METRICS, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="result file")
    parser.add_argument("--shape", choices=SHAPES, default="llama-3.1-8b")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--only", choices=PARTS, nargs="+", default=list(PARTS), help="parts to run")
    parser.add_argument("--engine", metavar="NAME=VALUE", nargs="+", default=[], help="fields of EngineConfig")
    args = parser.parse_args(argv)
    began = time.perf_counter()
    shape = SHAPES[args.shape]
    with tempfile.TemporaryDirectory() as directory:
        model_dir = Path(directory)
        (model_dir / "config.json").write_text(json.dumps(shape.config))
        settings = {
            "device": args.device,
            "load_format": "dummy",
            "block_size": shape.block_size,
            "max_seqs": max(shape.offline[0], *(rows for rows, _ in shape.decode)),
            "max_model_len": max(*shape.ttft, *(2 * context for _, context in shape.decode)) + 512,
        } | engine_settings(args.engine)
        config = EngineConfig(model_dir=model_dir, **settings)
        device = config.resolve_device()
        dtype = getattr(torch, config.resolve_dtype(device))
        ceiling = ceilings(shape, device, dtype)
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
        print(
            f"{args.shape} on {report.card()}: copy {ceiling.copy_gb_s:.0f} GB/s, matrix product"
            f" {ceiling.matmul_tflop_s:.0f} TFLOP/s, attention {ceiling.attention_tflop_s:.0f} TFLOP/s",
            flush=True,
        )
        table = GoalTable(GOALS if args.shape == "llama-3.1-8b" else {})
        prompts = Prompts(shape.config["vocab_size"])
        budgets: dict[str, int] = {}
        table.head()
        graphed = dataclasses.replace(config, chunk_graphs=max(shape.handed))
        for engine_config, parts in (
            (config, ("decode", "ttft", "handed")),
            (graphed, ("handed",)),
            (for_throughput(config), ("offline",)),
        ):
            chosen = [part for part in args.only if part in parts]
            if not chosen:
                continue
            starting = time.perf_counter()
            with running(engine_config) as driver:
                limits, layout = driver.engine.scheduler.config, driver.engine.layout
                ready_s = time.perf_counter() - starting
                budgets |= {f"{part}_token_budget": limits.chunk_tokens for part in chosen}
                budgets |= {f"{part}_most_tokens": limits.max_step_tokens for part in chosen}
                print(
                    f"ready after {ready_s:.1f} s, {limits.chunk_tokens} tokens per step beside decoding rows,"
                    f" at most {limits.max_step_tokens}"
                )
                cost = StepCost(shape.config, dtype.itemsize, layout.block_bytes // layout.block_size)
                for part in chosen:
                    PARTS[part](shape, driver, prompts, cost, ceiling, table)
            del driver, limits, layout
            gc.unfreeze()
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()
    took_s = time.perf_counter() - began
    print(f"{took_s:.0f} s in total")
    table.metrics["copy_gb_s"] = round(ceiling.copy_gb_s, 1)
    report.write(
        args.out,
        "engine",
        table.metrics,
        "torch",
        "triton",
        shape=args.shape,
        rows=table.rows,
        matmul_tflop_s=round(ceiling.matmul_tflop_s, 1),
        attention_tflop_s=round(ceiling.attention_tflop_s, 1),
        engine={k: v for k, v in settings.items() if k != "model_dir"} | budgets,
        ready_s=round(ready_s, 1),
        took_s=round(took_s, 1),
    )


if __name__ == "__main__":
    main()
