"""Measures the KV memory of models with KV groups, and with --engine or --pods the speed of one of them.

    python benchmarks/kv_groups.py --out benchmarks/results/kv_groups.json                 # block pool only, no GPU
    python benchmarks/kv_groups.py --engine --out .../kv_groups-engine-h200.json           # decode steps
    python benchmarks/kv_groups.py --pods --out .../kv_groups-pods-h200.json               # prefill pod, decode pod

- MODEL_LENGTH_gib: leased bytes of a sequence after a prompt of LENGTH tokens, in chunks of 2,048, and 64 decodes.
  _bytes_ratio: over those without groups. _hand_off_ratio: the same for the bytes of the hand-off.
- MODEL_LENGTH_seqs: such sequences that run at once in 40 GiB of KV; _seqs_before: without groups.
- hybrid_recomputed_blocks, hybrid_edit_lost_blocks: a hybrid model with 4,000 tokens and a snapshot every 128 blocks:
  blocks that a second prompt computes beyond those of a model without a state; the most for 200 random edits.
- decode_ROWSxCONTEXT_ms, pods_LENGTH_hand_off_ratio, pods_LENGTH_handover_ms (first to second token): of 24 random
  layers, 12 of them with a window of 1,024; _before: without groups. The tokens must be equal.
"""

from __future__ import annotations

import asyncio
import dataclasses
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.lora import decode_ms
from benchmarks.support import pd_stack, report
from benchmarks.support.engine_driver import Prompts, running
from benchmarks.support.limits import free_memory
from benchmarks.support.pd_stack import FLAGS, prompts
from benchmarks.support.report import ms
from benchmarks.support.shapes import LLAMA_8B, WINDOWED, config_directory
from common.kv_groups import PageOrder, split_layers
from common.kv_layout import KVLayout
from common.types import SamplingParams
from engine.config import EngineConfig
from engine.kv.blocks import BlockPool
from engine.kv.groups.grouped_blocks import make_block_pool
from engine.kv.groups.state_blocks import StateBlockPool, StateLease
from engine.kv.lease import Lease

CARD_METRICS = ("mla_copy_share", "mla_128_heads_product_share", "gated_delta_limit_ratio")
BLOCK, CHUNK, DECODES, KV_BYTES = 16, 2048, 64, 40 << 30
#: Rows and context of the decode steps that --engine measures, each for STEPS steps.
POINTS, STEPS = ((1, 8192), (64, 4096)), 72
PROMPTS = 8  # Prompts of each length that --pods hands over; the first two warm up
LENGTHS = {"1k": 1 << 10, "8k": 8 << 10, "32k": 32 << 10, "128k": 128 << 10}


def layout(name: str, windows: Sequence[int | None], kv_heads: int, head_dim: int) -> KVLayout:
    groups = split_layers(windows)
    return KVLayout(name, "", len(windows), kv_heads, head_dim, BLOCK, "bfloat16", groups=groups)


#: The text models of these checkpoints, in bf16.
MODELS = [
    layout("gemma3_27b", [None if i % 6 == 5 else 1024 for i in range(62)], 16, 128),
    layout("gemma3_4b", [None if i % 6 == 5 else 1024 for i in range(34)], 4, 256),
    layout("gemma2_9b", [None if i % 2 else 4096 for i in range(42)], 8, 256),
    layout("gpt_oss_20b", [None if i % 2 else 128 for i in range(24)], 8, 64),
]


def run_sequence(pool: BlockPool, length: int, number: int) -> Lease | None:
    """Computes a prompt, and some tokens after it; returns its lease, None if the pool has too few pages."""
    hashes = [number.to_bytes(8, "little") + i.to_bytes(8, "little") for i in range((length + DECODES) // BLOCK)]
    lease = pool.lease(hashes[: (length - 1) // BLOCK], -(-length // BLOCK))
    if lease is None:
        return None
    steps = [(start, min(start + CHUNK, length)) for start in range(0, length, CHUNK)]
    steps += [(start, start + 1) for start in range(length, length + DECODES)]
    for start, end in steps:
        grown = end <= len(lease.blocks) * BLOCK or lease.grow()
        if not grown or not lease.cover(start, end):
            lease.finish("no pages")
            return None
        lease.publish(hashes[: end // BLOCK])
    return lease


def leased_bytes(made: KVLayout, length: int) -> int:
    """Returns the bytes of the leased pages after one sequence has run, in a pool without cached pages of others."""
    pool = make_block_pool(made, 4 * made.blocks_for(length) * max(1, len(made.groups)), host_cache=0)
    lease = run_sequence(pool, length, 0)
    assert lease is not None
    return len(lease.all_pages()) * made.block_bytes


def sequences_at_once(made: KVLayout, length: int) -> int:
    pool = make_block_pool(made, KV_BYTES // made.block_bytes, host_cache=0)
    count = 0
    while run_sequence(pool, length, count) is not None:
        count += 1
    return count


def hybrid_metrics() -> dict[str, float]:
    """Leases a prompt and edits of it again, in a pool with states and in one without."""
    length, random = 4000, Random(3)
    hashes = [i.to_bytes(16, "little") for i in range(length // BLOCK)]
    others = [(1 << 64 | i).to_bytes(16, "little") for i in range(length // BLOCK)]
    options: dict[str, Any] = {"num_states": 64, "spacing": EngineConfig(model_dir=Path()).snapshot_blocks}
    pools = StateBlockPool(600, BLOCK, **options), BlockPool(600, BLOCK)

    def hits(match: list[bytes]) -> list[int]:
        found: list[int] = []
        for pool in pools:
            lease = pool.lease(match, -(-length // BLOCK))
            assert lease is not None
            found.append(lease.cached_blocks)
            lease.finish("measured")
        return found

    for pool in pools:
        lease = pool.lease([], -(-length // BLOCK))
        assert lease is not None
        for start in range(0, length, CHUNK):
            end = min(start + CHUNK, length)
            if isinstance(lease, StateLease):
                lease.plan_snapshots(start, end, length)
            lease.publish(hashes[: end // BLOCK])
        lease.finish("stop")
    matchable = hashes[: (length - 1) // BLOCK]
    state, plain = hits(matchable)
    edits = [hits(matchable[:at] + others[at : len(matchable)]) for at in random.choices(range(length // BLOCK), k=200)]
    lost = max(without - with_states for with_states, without in edits)
    return {"hybrid_recomputed_blocks": plain - state, "hybrid_edit_lost_blocks": lost}


def measure_engine() -> dict[str, float]:
    """Decodes with and without groups. SystemExit if a token differs."""
    metrics: dict[str, float] = {}
    for rows, context in POINTS:
        batch = Prompts(WINDOWED["vocab_size"]).make(rows, context)
        answers: list[list[list[int]]] = []
        for groups in (True, False):
            milliseconds, tokens = decode(batch, max_model_len=context + 1024, max_seqs=rows, kv_groups=groups)
            free_memory()
            metrics[f"decode_{rows}x{context}_ms" + ("" if groups else "_before")] = milliseconds
            answers.append(tokens)
        if answers[0] != answers[1]:
            differ = sum(a != b for a, b in zip(*answers, strict=True))
            raise SystemExit(f"{differ} of {rows} sequences of {context} tokens have other tokens with groups")
    return metrics


def decode(batch: list[list[int]], **settings: Any) -> tuple[float, list[list[int]]]:
    """Returns the median of a decode step in ms, and the tokens of each prompt. The engine is gone after the return."""
    with (
        config_directory(WINDOWED) as path,
        running(EngineConfig(model_dir=path, load_format="dummy", **settings)) as driver,
    ):
        prompt_steps = (
            sum(map(len, batch)) // driver.engine.scheduler.config.chunk_tokens
        )  # the first rows decode meanwhile
        params = SamplingParams(temperature=0.0, max_tokens=STEPS + 2 * prompt_steps)
        steps = driver.run(batch, [params] * len(batch))
        driver.engine.pool.check_integrity()
    decodes = [result.seconds for _, result in steps if result.num_decode_tokens == len(batch)]
    tokens: dict[str, list[int]] = {}
    for _, result in steps:
        for output in result.outputs:
            tokens.setdefault(output.seq.request_id, []).extend(token.id for token in output.tokens)
    return report.ms(statistics.median(decodes[8:])), list(tokens.values())


def measure_card() -> dict[str, float]:
    """Measures the kernels of other groups, and a decode step of a model without groups, whose time must stay."""
    from benchmarks import gated_delta, mla  # they need triton

    metrics = {name: value for name, value in mla.measure().items() if name in CARD_METRICS}
    free_memory()
    metrics |= {name: value for name, value in gated_delta.measure().items() if name in CARD_METRICS}
    free_memory()
    with config_directory(LLAMA_8B) as path:
        settings: dict[str, Any] = {"load_format": "dummy", "max_seqs": 64, "max_model_len": 4096}
        with running(EngineConfig(model_dir=path, **settings)) as driver:
            metrics["llama_decode_64x1024_ms"] = decode_ms(driver, Prompts(LLAMA_8B["vocab_size"]), 64, 1024)
    return metrics


async def measure_pods(device: str) -> dict[str, float]:
    """Hands prompts over with and without groups. SystemExit if a token differs."""
    shape, lengths = ("windowed-tiny", (40, 250)) if device == "cpu" else ("windowed", (2000, 12000))
    metrics: dict[str, float] = {}
    answers: dict[int, list[list[int]]] = {}
    moved: dict[int, int] = {}
    for groups in (True, False):
        flags = (
            FLAGS | {"kv-memory": "64MiB" if device == "cpu" else "8GiB"} | ({"kv-groups": "true"} if groups else {})
        )
        async with pd_stack.running(shape, device, flags=flags) as (_, client):
            for length in lengths:
                done = [await client.ask(prompt, 24) for prompt in prompts(shape, PROMPTS, length, seed=1)]
                await asyncio.sleep(0.1)  # the report of the hand-off may arrive after the last token
                handed = (await client.timeline(done[-1]))["handed_off"]
                name = f"pods_{length}_handover_ms" + ("" if groups else "_before")
                metrics[name] = ms(statistics.median(answer.gap12_s for answer in done[2:]))
                ids = [answer.ids for answer in done]
                if groups:
                    answers[length], moved[length] = ids, handed["bytes"]
                    continue
                metrics[f"pods_{length}_hand_off_ratio"] = round(moved[length] / handed["bytes"], 4)
                if ids != answers[length]:
                    differ = sum(a != b for a, b in zip(ids, answers[length], strict=True))
                    raise SystemExit(f"{differ} of {PROMPTS} prompts of {length} tokens have other tokens with groups")
    return metrics


def main() -> None:
    parser = report.arguments(__doc__)
    parser.add_argument("--engine", action="store_true", help="measure decode steps of the engine, on a GPU")
    parser.add_argument("--card", action="store_true", help="measure kernels and a decode step on a GPU")
    parser.add_argument("--pods", action="store_true", help="measure hand-offs between two pods")
    parser.add_argument("--device", choices=("auto", "cpu"), default="auto", help="device of --pods")
    options = parser.parse_args()
    metrics: dict[str, float] = {}
    if options.pods:
        metrics = asyncio.run(measure_pods(options.device))
        report.show(metrics)
        report.write(options.out, "kv_groups_pods", metrics, *pd_stack.PACKAGES)
        return
    if options.card:
        metrics = measure_card()
        report.show(metrics)
        report.write(options.out, "kv_groups", metrics, "torch", "triton")
        return
    if options.engine:
        metrics = measure_engine()
        report.show(metrics)
        report.write(options.out, "kv_groups_engine", metrics, "torch", "triton")
        return
    for made in MODELS:
        before = dataclasses.replace(made, groups=())
        for name, length in LENGTHS.items():
            size, old = leased_bytes(made, length), leased_bytes(before, length)
            metrics[f"{made.model}_{name}_bytes_ratio"] = round(size / old, 4)
            metrics[f"{made.model}_{name}_gib"] = round(size / (1 << 30), 3)
            moved, whole = (PageOrder.of_prompt(m, length).num_pages * m.block_bytes for m in (made, before))
            metrics[f"{made.model}_{name}_hand_off_ratio"] = round(moved / whole, 4)
        for name in ("8k", "128k"):
            metrics[f"{made.model}_{name}_seqs"] = sequences_at_once(made, LENGTHS[name])
            metrics[f"{made.model}_{name}_seqs_before"] = sequences_at_once(before, LENGTHS[name])
    metrics |= hybrid_metrics()
    report.show(metrics)
    report.write(options.out, "kv_groups", metrics)


if __name__ == "__main__":
    main()
