"""Engines and pods with --disk-cache-codec int4: answers after a decoded prefix stay close, and all else works."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from common.errors import ConfigError
from common.types import SamplingParams, Token
from engine.kv.tiers.cold_codec import BlockCodec
from engine.kv.tiers.file_tier import FileTier
from engine.llm import LLM
from tests.rigs.pods.harness import MAX_LEN, VOCAB, Cluster, Pod, prompt_of, request

BLOCK, WAIT_S = 16, 20.0
BLOCK_BYTES = 2 * 2 * 2 * BLOCK * 16 * 4
PREFIX, ANSWER = 80, 12
TEXTS = [prompt_of(PREFIX + ANSWER, seed=number) for number in range(4)]
SCORED = SamplingParams(temperature=0.0, max_tokens=1, logprobs=20)
GREEDY = SamplingParams(temperature=0.0, max_tokens=8)


def make(model_dir: Path, disk: Path | None, **config: Any) -> LLM:
    torch.set_num_threads(1)
    settings: dict[str, Any] = {"block_size": BLOCK, "num_blocks": 12, "max_model_len": MAX_LEN, "threads": 1}
    if disk is not None:
        settings |= {"host_cache": 64 * BLOCK_BYTES, "disk_cache": str(disk), "disk_cache_size": 1 << 24}
    return LLM(model_dir, **settings, **config)


def settled(llm: LLM) -> FileTier:
    """Waits until the engine has found its files and done the work of its tiers."""
    tier = llm.engine.pool.disk_tier
    assert tier is not None
    until = time.monotonic() + WAIT_S
    while list(tier.store.directory.glob("*.kv")) and not tier.stats().restored and time.monotonic() < until:
        time.sleep(0.01)
    assert tier.wait_idle(WAIT_S)
    return tier


def distributions(llm: LLM) -> list[Token]:
    """Returns the token after each start of the texts that has the whole prefix, with its 20 alternatives."""
    starts = [text[:length] for text in TEXTS for length in range(PREFIX + 1, PREFIX + ANSWER)]
    return [llm.generate([start], SCORED, ignore_eos=True)[0].tokens[0] for start in starts]


def errors(exact: Sequence[Token], other: Sequence[Token]) -> tuple[list[float], list[float]]:
    """Returns the differences of the log-probabilities, and the KL divergence of each pair on the common tokens."""
    differences, divergences = list[float](), list[float]()
    for one, two in zip(exact, other, strict=True):
        theirs = {entry.token: entry.logprob for entry in two.top}
        pairs = [(entry.logprob, theirs[entry.token]) for entry in one.top if entry.token in theirs]
        differences += [abs(a - b) for a, b in pairs]
        a, b = (torch.tensor(column).log_softmax(0) for column in zip(*pairs, strict=True))
        divergences.append(float((a.exp() * (a - b)).sum()))
    return differences, divergences


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama with smaller weights than that of other tests, as its log-probabilities are compared."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=MAX_LEN,
        initializer_range=0.12,
        tie_word_embeddings=False,
        bos_token_id=0,
        eos_token_id=1,
    )
    directory = tmp_path_factory.mktemp("smooth")
    LlamaForCausalLM(config).save_pretrained(directory)
    (directory / "tokenizer.json").write_text("{}")
    return directory


@pytest.fixture(scope="module")
def filled(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory that an engine with the codec has filled."""
    directory = tmp_path_factory.mktemp("disk")
    llm = make(model_dir, directory, disk_cache_codec="int4")
    for text in TEXTS:
        llm.generate([text], GREEDY, ignore_eos=True)
    assert settled(llm).stats().failures == 0
    llm.engine.close()
    return directory


def test_log_probabilities_after_a_decoded_prefix_are_close_to_the_exact_ones(model_dir: Path, filled: Path) -> None:
    plain = make(model_dir, None)
    exact = distributions(plain)
    again = distributions(plain)
    assert max(errors(exact, again)[0]) < 1e-4, "without the codec a cached prefix changes nothing"
    plain.engine.close()
    llm = make(model_dir, filled, disk_cache_codec="int4", checksums=True)
    tier = settled(llm)
    got = distributions(llm)
    stats = tier.stats()
    assert stats.decoded == stats.loaded >= len(TEXTS) * PREFIX // BLOCK
    assert stats.damaged == stats.failures == 0
    assert tier.wait_idle(WAIT_S)
    llm.engine.pool.check_integrity()
    llm.engine.close()
    differences, divergences = errors(exact, got)
    assert max(differences) > 1e-4, "the prefix was decoded"
    # Measured: 0.368, 0.068 and 0.0041.
    shown = f"max {max(differences):.3f}, mean {statistics.fmean(differences):.3f}, KL {statistics.fmean(divergences)}"
    assert max(differences) < 1.0, shown
    assert statistics.fmean(differences) < 0.15, shown
    assert statistics.fmean(divergences) < 0.02, shown


def test_damaged_files_cost_computing_and_change_no_token(model_dir: Path, filled: Path, tmp_path: Path) -> None:
    (source,) = filled.glob("*/0/*.kv")
    target = tmp_path / source.relative_to(filled)
    target.parent.mkdir(parents=True)
    raw = bytearray(source.read_bytes())
    for at in range(300, len(raw), 700):
        raw[at] ^= 0xFF
    target.write_bytes(raw)
    plain = make(model_dir, None)
    expected = [plain.generate([text], GREEDY, ignore_eos=True)[0].ids for text in TEXTS]
    plain.engine.close()
    llm = make(model_dir, tmp_path, disk_cache_codec="int4")
    assert [llm.generate([text], GREEDY, ignore_eos=True)[0].ids for text in TEXTS] == expected
    assert settled(llm).stats().decoded == 0, "every block is damaged"
    llm.engine.close()


def test_the_files_of_an_engine_without_the_codec_are_in_another_folder(model_dir: Path, filled: Path) -> None:
    files = sorted(filled.glob("*/0/*.kv"))
    llm = make(model_dir, filled)
    assert settled(llm).stats().restored == 0
    assert llm.engine.layout.scope not in {path.parent.parent.name for path in files}
    llm.engine.close()
    assert all(path.exists() for path in files)


def test_the_time_of_decoding_counts_when_the_tier_chooses(
    model_dir: Path, filled: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = BlockCodec.decode

    def slow(self: BlockCodec, encoded: memoryview, block: memoryview) -> None:
        time.sleep(0.02)
        real(self, encoded, block)

    monkeypatch.setattr(BlockCodec, "decode", slow)
    llm = make(model_dir, filled, disk_cache_codec="int4")
    tier = settled(llm)
    llm.generate([TEXTS[0]], GREEDY, ignore_eos=True)
    loaded = settled(llm).stats().loaded
    assert loaded
    assert tier.read_rate <= loaded * BLOCK_BYTES / 0.02
    tier.compute_s = lambda tokens: 0.001 * tokens / BLOCK  # a block is computed in 1 ms, and decoded in more than 2
    llm.generate([TEXTS[1]], GREEDY, ignore_eos=True)
    assert tier.stats().loaded == loaded
    assert tier.stats().computed >= 1
    llm.engine.close()


@pytest.mark.parametrize("changes", [{"kv_dtype": "fp8_e4m3"}, {"block_size": 4}])
def test_blocks_that_the_codec_does_not_fit_are_refused(model_dir: Path, changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="disk_cache_codec int4 is not supported here") as refused:
        LLM(model_dir, **{"block_size": BLOCK, "num_blocks": 12, "disk_cache_codec": "int4", **changes})
    assert refused.value.field == "disk_cache_codec"


def metric(pod: Pod, line: str) -> float:
    text = pod.runtime.metrics.metrics.exposition().decode()
    return next(float(row.rsplit(" ", 1)[1]) for row in text.splitlines() if row.startswith(line + " "))


async def test_pods_hand_decoded_blocks_on_and_count_them(model_dir: Path, tmp_path: Path) -> None:
    config: dict[str, Any] = {"block_size": BLOCK, "num_blocks": 64, "disk_cache_codec": "int4"}
    disk = {"host_cache": 40 * BLOCK_BYTES, "disk_cache": str(tmp_path), "disk_cache_size": 1 << 24}
    async with Cluster.start(model_dir, prefill_config=config | disk, decode_config=config) as cluster:
        (prefill,) = cluster.prefills
        tier = prefill.runtime.engine.pool.disk_tier
        assert tier is not None
        tier.compute_s = lambda _: 0.0  # computing seems to take unknown time, so every load is made
        for number in range(12):
            await cluster.generate(request(prompt_of(100, seed=number)))
            await prefill.settled()
            assert await asyncio.to_thread(tier.wait_idle, WAIT_S)
        answer = await cluster.generate(request(prompt_of(100, seed=0)))
        assert len(answer.ids) == 8
        assert answer.cached_tokens == 96
        decoded = metric(prefill, 'baton_decoded_blocks_total{codec="int4",tier="disk"}')
        assert decoded == tier.stats().loaded > 0
        assert metric(prefill, 'baton_disk_moved_bytes_total{direction="to_host"}') == decoded * BLOCK_BYTES
        written = metric(prefill, 'baton_disk_moved_bytes_total{direction="to_disk"}')
        assert written == tier.stats().written * tier.store.content_bytes
