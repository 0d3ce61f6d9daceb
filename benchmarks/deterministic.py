"""Proves that --deterministic leaves the bits of every token and log-probability as they are, and measures its cost.

    python benchmarks/deterministic.py --out benchmarks/results/deterministic-h200.json

Two engines with random weights compute the same prompts in many ways, see `benchmarks/support/bit_proof.py`. The
reference runs each prompt alone. Both engines run on one device, so a hand-off copies blocks between their pools.
`--shape tiny --device cpu` checks that the script works.
"""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from benchmarks.engine import EngineBench
from benchmarks.support import report
from benchmarks.support.bit_proof import Proof, make_jobs
from benchmarks.support.engine_driver import Prompts
from benchmarks.support.limits import ceilings, free_memory
from benchmarks.support.shapes import SHAPES, BenchmarkShape, config_directory
from engine.config import EngineConfig
from engine.engine import Engine

METRICS = """
Metrics:

- prompts: prompts of the proof. compared: answers that were compared with their reference.
- mismatches: answers of which a token or the bits of a log-probability differ from the reference.
- causes (in the file): for each cause, the answers in which it happened: more than one row in a step, a prompt in
  several steps, cached tokens, a preemption, a hand-off, a migration, verified drafts.
- ratio_RxC: a decode step of R rows with a context of C tokens over the step without --deterministic.
- ratio_prefill_N: the time to the first token of N tokens over that time without --deterministic.
"""

WIDTH = 128  # Sequences of a batch.
KV_MEMORY = 16 << 30  # Bytes of each engine's KV pool on a GPU.


def ratios(table: report.MetricTable, shape: BenchmarkShape, config: EngineConfig) -> None:
    """Measures both modes, one engine after the other, and adds their ratios."""
    device = config.resolve_device()
    dtype = getattr(torch, config.resolve_dtype(device))
    ceiling = ceilings(shape, device, dtype)
    free_memory()
    times: list[dict[str, float]] = []
    for deterministic in (False, True):
        bench = EngineBench(shape, ceiling, report.MetricTable(), Prompts(shape.config["vocab_size"]))
        bench.measure(replace(config, deterministic=deterministic), ("decode", "ttft"), dtype.itemsize)
        times.append(bench.table.metrics)
        free_memory()
    usual, fixed = times
    for rows, context in shape.decode:
        name = f"decode_ms_{rows}x{context}"
        table.add(f"ratio_{rows}x{context}", fixed[name] / usual[name], usual_ms=usual[name], ms=fixed[name])
    for length in shape.ttft:
        name = f"ttft_ms_{length}"
        table.add(f"ratio_prefill_{length}", fixed[name] / usual[name], usual_ms=usual[name], ms=fixed[name])


def prove(config: EngineConfig, prompts: int, each: int, lengths: Sequence[int], outputs: Sequence[int]) -> Proof:
    """Runs the proof: all prompts in random batches, and `each` prompts with each other cause."""
    small_chunks = 4 * config.block_size if config.resolve_device().type == "cpu" else 256
    began = time.perf_counter()
    first = Engine(config)
    second = Engine(
        replace(config, chunk_tokens=small_chunks, speculation="ngram", speculation_tokens=4, overlap=False)
    )
    print(f"two engines after {time.perf_counter() - began:.0f} s", flush=True)
    width = min(WIDTH, first.scheduler.config.max_seqs)
    proof = Proof(first, second, make_jobs(prompts, first.vocab_size, lengths, outputs), width)
    names = list(proof.jobs)
    long = sorted(names, key=lambda name: -len(proof.jobs[name].prompt))[: each + each // 4]
    for title, work in (
        ("reference", proof.run_reference),
        ("batch", proof.run_batch),
        ("hit", lambda: proof.run_hits(names[-each:])),
        ("chunk", lambda: proof.run_chunks(long)),
        ("preemption", lambda: proof.run_preemptions(names[: each + each // 2])),
        ("hand_off", lambda: proof.run_hand_offs(names[each : 2 * each])),
        ("migration", lambda: proof.run_migrations(names[: each + each // 4])),
        ("drafts", lambda: proof.run_drafts(names[: each + each // 4])),
    ):
        started = time.perf_counter()
        work()
        count, wrong = proof.causes.get(title, 0), sum(cause == title for cause, _ in proof.mismatches)
        print(f"{title}: {count} counted, {wrong} differ, {time.perf_counter() - started:.0f} s", flush=True)
    first.close()
    second.close()
    return proof


def main(argv: Sequence[str] | None = None) -> None:
    parser = report.arguments(__doc__, METRICS)
    parser.add_argument("--shape", choices=SHAPES, default="llama-3.1-8b")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--prompts", type=int, default=512)
    parser.add_argument("--each", type=int, default=96, help="prompts of each cause but batch")
    parser.add_argument("--no-times", action="store_true", help="leave out the ratios")
    args = parser.parse_args(argv)
    tiny = args.shape == "tiny"
    shape = SHAPES[args.shape]
    if not tiny:
        shape = replace(shape, decode=((1, 128), (64, 1024)), ttft=(4096,))
    table = report.MetricTable()
    with config_directory(shape.config) as model_dir:
        config = EngineConfig(
            model_dir=model_dir,
            device=args.device,
            dtype="bfloat16",
            load_format="dummy",
            block_size=shape.block_size,
            max_seqs=8 if tiny else WIDTH,
            max_model_len=512 if tiny else 6144,
        )
        if not args.no_times:
            ratios(table, shape, config)
        lengths, outputs = ((3, 17, 40), (5, 9)) if tiny else ((5, 60, 130, 300, 700, 1500, 2600), (8, 12, 24))
        config = replace(config, deterministic=True, kv_memory=(8 << 20) if tiny else KV_MEMORY)
        proof = prove(config, args.prompts, args.each, lengths, outputs)
        gc.collect()
    table.metrics["prompts"] = len(proof.jobs)
    table.metrics["compared"] = sum(proof.compared.values())
    table.add("mismatches", len(proof.mismatches))
    report.show(proof.causes)
    more = {"causes": proof.causes, "compared_by_cause": proof.compared, "mismatching": proof.mismatches[:50]}
    report.write(
        args.out, "deterministic", table.metrics | {"causes": proof.causes}, "torch", "triton",
        shape=args.shape, rows=table.rows, **more,
    )  # fmt: skip
    if proof.mismatches:
        sys.exit(1)


if __name__ == "__main__":
    main()
