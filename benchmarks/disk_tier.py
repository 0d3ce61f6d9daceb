"""Restarts an engine with a disk tier, reads another engine's shared tier, damages their files. It needs no GPU.

python benchmarks/disk_tier.py --out benchmarks/results/disk_tier.json
"""

from __future__ import annotations

import itertools
import os
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.support import report
from benchmarks.support.shapes import config_directory
from common.types import SamplingParams
from engine.kv.tiers.file_tier import FileTier, saves_time
from engine.llm import LLM

METRICS = """
Metrics, of a tiny model with random weights in float32 on this machine:

- restored_share: blocks in the index of a restarted engine, over those before its end.
- killed_share: the same for an engine that was not closed; the newest file is as the system had it.
- wrong_tokens: tokens of answers from damaged files that differ from those of an engine without a cache. Files are cut
  or have wrong bytes, once before the start and once while the engine runs. damaged_answers: answers with damage.
- damage_found: blocks and ends of files that the engine has found damaged.
- answers_read: answers of the restarted engine that took blocks from the disk.
- read_mb_s: rate at which the restarted engine read them.
- shared_restored_share: blocks that an engine read from the shared tier, over those that another engine computed.
- shared_read_mb_s: the rate of these reads; the search for the files and their opening count. Blocks of this model have
  8 KiB, so the rate is that of small files.
- shared_wrong_tokens: as wrong_tokens, for one engine with whole files and four with damaged ones (a third of them).

Metrics of the decision for 2,048 tokens of an 8B model on an H200 (128 KiB per token in bf16, 64 KiB in e4m3), by the
prefill times of docs/tuning.md: h200_least_gb_s_bf16 and _e4m3, the slowest disk from which they are read.
Rows: the decision for further lengths and disks.
"""
SHAPE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5,
    "initializer_range": 0.3,
}
BLOCK, PROMPT_TOKENS, PROMPTS, WAIT_S = 16, 320, 24, 60.0
BLOCK_BYTES = SHAPE["num_hidden_layers"] * 2 * SHAPE["num_key_value_heads"] * BLOCK * 16 * 4
GREEDY = SamplingParams(temperature=0.0, max_tokens=16)
#: Measured seconds of a prompt, 8B in bf16 on an H200 (docs/tuning.md): tokens and seconds.
H200_PREFILL = ((0, 0.0), (1_024, 0.025), (4_096, 0.096), (15_000, 0.429))
H200_BYTES = {"bf16": 128 << 10, "e4m3": 64 << 10}  # Per token
DISKS_GB_S = (1.0, 3.0, 7.0, 14.0)


def make(model: Path, disk: Path | None, shared: Path | None = None) -> LLM:
    """Makes an engine whose pool holds two of the prompts."""
    cached: dict[str, Any] = {} if disk is None else {"disk_cache": str(disk)}
    cached |= {} if shared is None else {"shared_cache": str(shared)}
    cached |= {"host_cache": 256 * BLOCK_BYTES} if cached else {}
    return LLM(
        model,
        load_format="dummy",
        dtype="float32",
        device="cpu",
        threads=1,
        block_size=BLOCK,
        num_blocks=2 * (PROMPT_TOKENS // BLOCK + 2),
        disk_cache_size=1 << 28,
        shared_cache_size=1 << 28,
        **cached,
    )


def answers(llm: LLM, prompts: Sequence[list[int]]) -> tuple[list[list[int]], int]:
    """Returns the tokens of all answers, and how many took a cached prefix."""
    done = [llm.generate([prompt], GREEDY, ignore_eos=True)[0] for prompt in prompts]
    return [list(one.ids) for one in done], sum(one.cached_tokens > 0 for one in done)


def tier_of(llm: LLM) -> FileTier:
    """Returns the disk tier once it has nothing to do."""
    tier = llm.engine.pool.disk_tier
    assert tier is not None
    until = time.monotonic() + WAIT_S
    while not tier.stats().restored and list(tier.store.directory.glob("*.kv")) and time.monotonic() < until:
        time.sleep(0.01)
    assert tier.wait_idle(WAIT_S)
    return tier


def damage(path: Path, rng: random.Random) -> None:
    """Cuts a file, or flips bytes of about every fifth block."""
    size = path.stat().st_size
    if rng.random() < 0.5:
        os.truncate(path, rng.randrange(size // 2, size))
        return
    with path.open("r+b") as file:
        for _ in range(max(1, size // BLOCK_BYTES // 5)):
            at = rng.randrange(size)
            file.seek(at)
            byte = file.read(1)
            file.seek(at)
            file.write(bytes([byte[0] ^ rng.randrange(1, 256)]))


def restart(model: Path, directory: Path, table: report.MetricTable) -> None:
    """Fills a disk tier, restarts the engine on it, on a copy of a killed one, and on damaged copies."""
    rng = random.Random(28)
    prompts = [[rng.randrange(1, 500) for _ in range(PROMPT_TOKENS)] for _ in range(PROMPTS)]
    plain = make(model, None)
    expected, _ = answers(plain, prompts)
    plain.engine.close()

    first = make(model, directory / "disk")
    answers(first, prompts)
    killed_blocks = tier_of(first).stats().blocks
    shutil.copytree(directory / "disk", directory / "killed")
    first.engine.close()
    blocks = tier_of_closed(first)

    second = make(model, directory / "disk")
    restored = tier_of(second).stats().restored
    got, read = answers(second, prompts)
    rate = tier_of(second).read_rate
    wrong = count_wrong(got, expected)
    second.engine.close()

    killed = make(model, directory / "killed")
    killed_restored = tier_of(killed).stats().restored
    wrong += count_wrong(answers(killed, prompts)[0], expected)
    killed.engine.close()

    damaged_answers = found = 0
    for number, early in itertools.product(range(3), (True, False)):
        copy = directory / f"damaged-{number}-{early}"
        shutil.copytree(directory / "disk", copy)
        files = sorted(copy.glob("*/*/*.kv"))
        if early:
            for path in files:
                damage(path, rng)
        llm = make(model, copy)
        tier = tier_of(llm)
        if not early:
            for path in files:
                damage(path, rng)
        got, _ = answers(llm, prompts)
        wrong += count_wrong(got, expected)
        damaged_answers += len(got)
        found += tier.stats().damaged
        llm.engine.close()
    table.add("restored_share", restored / blocks, f"{restored} of {blocks} blocks")
    table.add("killed_share", killed_restored / killed_blocks, f"{killed_restored} of {killed_blocks} blocks")
    table.add("wrong_tokens", wrong)
    table.add("damaged_answers", damaged_answers)
    table.add("damage_found", found)
    table.add("answers_read", read, f"of {PROMPTS}")
    table.add("read_mb_s", rate / 1e6)


def share(model: Path, directory: Path, table: report.MetricTable) -> None:
    """Fills a shared tier by one engine, and reads it by others, whole and with damaged files."""
    rng = random.Random(29)
    prompts = [[rng.randrange(1, 500) for _ in range(PROMPT_TOKENS)] for _ in range(PROMPTS)]
    plain, writer = make(model, None), make(model, None, directory / "shared")
    expected, _ = answers(plain, prompts)
    plain.engine.close()
    answers(writer, prompts)
    shared_tier_of(writer)
    writer.engine.close()
    for number in range(4):
        shutil.copytree(directory / "shared", directory / f"shared-{number}")

    reader = make(model, None, directory / "shared")
    got, _ = answers(reader, prompts)
    tier, wrong = shared_tier_of(reader), count_wrong(got, expected)
    loaded, blocks = tier.stats().loaded, PROMPTS * ((PROMPT_TOKENS - 1) // BLOCK)
    table.add("shared_restored_share", loaded / blocks, f"{loaded} of {blocks} blocks")
    table.add("shared_read_mb_s", tier.read_rate / 1e6)
    reader.engine.close()
    for number in range(4):
        for path in sorted((directory / f"shared-{number}").glob("*/*/*.kv"))[::3]:
            damage(path, rng)
        llm = make(model, None, directory / f"shared-{number}")
        wrong += count_wrong(answers(llm, prompts)[0], expected)
        llm.engine.close()
    table.add("shared_wrong_tokens", wrong)


def shared_tier_of(llm: LLM) -> FileTier:
    """Returns the shared tier once it has nothing to do."""
    tier = llm.engine.pool.shared_tier
    assert tier is not None
    assert tier.wait_idle(WAIT_S)
    return tier


def tier_of_closed(llm: LLM) -> int:
    """Returns the blocks that the index of an ended engine had."""
    tier = llm.engine.pool.disk_tier
    assert tier is not None
    return tier.stats().blocks


def count_wrong(got: Sequence[Sequence[int]], expected: Sequence[Sequence[int]]) -> int:
    """Returns how many tokens differ."""
    pairs = zip(itertools.chain(*got), itertools.chain(*expected), strict=True)
    return sum(one != other for one, other in pairs)


def h200_prefill_s(tokens: int) -> float:
    """Returns the seconds of a prompt on an H200, between measured points on a straight line."""
    for (low, low_s), (high, high_s) in itertools.pairwise(H200_PREFILL):
        if tokens <= high:
            return low_s + (high_s - low_s) * (tokens - low) / (high - low)
    raise ValueError(f"{tokens} tokens are more than measured")


def decide(table: report.MetricTable) -> None:
    """Adds the decisions for an H200."""
    for name, size in H200_BYTES.items():
        least = 2_048 * size / h200_prefill_s(2_048) / 1e9
        table.add(f"h200_least_gb_s_{name}", least, "2,048 tokens")
        for tokens, disk in itertools.product((512, 2_048, 8_192), DISKS_GB_S):
            read_s, compute_s = tokens * size / (disk * 1e9), h200_prefill_s(tokens)
            row = {"read_ms": 1e3 * read_s, "compute_ms": 1e3 * compute_s}
            name_of_row = f"h200_{name}_{tokens}_at_{disk:g}gb_s_reads"
            table.rows.append(
                {"name": name_of_row, "value": int(saves_time(read_s, compute_s))}
                | {key: round(value, 2) for key, value in row.items()}
            )


def main() -> None:
    parser = report.arguments(__doc__, METRICS)
    args = parser.parse_args()
    table = report.MetricTable()
    with tempfile.TemporaryDirectory() as name, config_directory(SHAPE) as model:
        restart(model, Path(name), table)
        share(model, Path(name), table)
    decide(table)
    report.write(args.out, "disk_tier", table.metrics, "torch", rows=table.rows)


if __name__ == "__main__":
    main()
