"""Draft models on pods: the hand-off moves the draft KV too, so drafts after it equal those of one process."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.support.shapes import SMOLLM2_LAYERS, without_layers
from common.errors import BatonError, Overloaded
from common.grammar.compiler import from_regex
from common.types import ValidRequest
from engine.llm import LLM
from engine.speculation.controller import AlwaysDraft
from engine.speculation.speculator import SpeculationStats
from tests.rigs.engine.draft_models import BYTES, byte_tokenizer, disturbed, draft_settings, eagle_head, tiny_target
from tests.rigs.pods.harness import MAX_LEN, VOCAB, Answer, Cluster, Pod, oracle, prompt_of, request

DRAFTS = 4


def _long(kind: str) -> Any:
    """Returns the case as a long one: its proposer shares the code of another."""
    return pytest.param(kind, marks=pytest.mark.long)


def drafting(kind: str, model_dir: Path, root: Path) -> dict[str, Any]:
    """Settings of the proposer for a pod or an engine."""
    if kind == "draft_model":
        directory = disturbed(model_dir, root / "draft", 0.03)
    else:
        fuses = {"fuses": True, "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 0, 1]}}
        directory = eagle_head(root / "head", vocab=VOCAB, hidden=64, **(fuses if kind == "eagle3" else {}))
    name = kind.removesuffix("3")
    return {"speculation": name, "speculation_model": str(directory), "speculation_tokens": DRAFTS}


def always_draft(pod: Pod) -> None:
    engine = pod.runtime.engine
    engine.set_proposer(engine.configured_proposer(), AlwaysDraft(DRAFTS))


def in_one_process(llm: LLM, requests: Sequence[ValidRequest]) -> tuple[list[list[int]], SpeculationStats]:
    llm.engine.set_proposer(llm.engine.configured_proposer(), AlwaysDraft(DRAFTS))
    answers = [llm.generate([r.prompt_ids], r.sampling, ignore_eos=True, show_progress=False)[0] for r in requests]
    assert llm.engine.speculator is not None
    return [answer.ids for answer in answers], llm.engine.speculator.stats


@pytest.mark.parametrize("kind", ["draft_model", _long("eagle"), "eagle3"])
async def test_drafts_after_a_hand_off_are_those_of_one_process(kind: str, model_dir: Path, tmp_path: Path) -> None:
    settings = drafting(kind, model_dir, tmp_path)
    shared = prompt_of(12, seed=50)
    prompts = [[*shared, *prompt_of(1 + 5 * i, seed=i)] if i % 2 else prompt_of(1 + 4 * i, seed=i) for i in range(10)]
    kinds = [
        {"temperature": 0.0},
        {"temperature": 1.5, "frequency_penalty": 0.2},
        {"temperature": 2.0, "allowed_token_ids": (5, 6, 7, 8)},
    ]
    requests = [request(ids, max_tokens=16, seed=i, **kinds[i % 3]) for i, ids in enumerate(prompts)]
    model = Path(settings["speculation_model"])
    expected, stats = in_one_process(oracle(model_dir, **(settings | {"speculation_model": model})), requests)
    more = {"kv_memory": 1 << 20}
    async with Cluster.start(model_dir, prefill_config=settings | more, decode_config=settings | more) as cluster:
        always_draft(cluster.decode)
        answers = [
            await cluster.generate(r, remote_only=True) for r in requests
        ]  # one after the other, like in one process
        assert [answer.ids for answer in answers] == expected
        assert all(answer.handed_off is not None for answer in answers)
        speculator = cluster.decode.runtime.engine.speculator
        assert speculator is not None
        pod_stats = speculator.stats
        assert (pod_stats.proposed, pod_stats.accepted, pod_stats.accepted_at) == (
            stats.proposed,
            stats.accepted,
            stats.accepted_at,
        )
        assert 0 < pod_stats.accepted < pod_stats.proposed
        counted = {
            (s.labels["proposer"], s.labels["outcome"])
            for metric in cluster.decode.runtime.metrics.metrics.registry.collect()
            for s in metric.samples
            if s.name == "baton_speculation_tokens_total" and s.value
        }
        assert counted == {(settings["speculation"], "accepted"), (settings["speculation"], "rejected")}


@pytest.fixture(scope="module")
def byte_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A smaller model with a byte tokenizer."""
    directory = tiny_target(tmp_path_factory.mktemp("bytes"), vocab=BYTES, length=MAX_LEN)
    byte_tokenizer(directory)
    return directory


@pytest.fixture(scope="module")
def byte_drafting(byte_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    return draft_settings(byte_dir, tmp_path_factory.mktemp("byte-drafts"), vocab=BYTES)


def mixed() -> list[ValidRequest]:
    """Fifty requests with repetitive prompts and all kinds of sampling, some with a grammar."""
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.7, "top_p": 0.8},
        {"temperature": 0.9, "top_k": 4, "min_p": 0.05, "repetition_penalty": 1.1},
        {"temperature": 0.0, "frequency_penalty": 0.3, "logprobs": 1},
        {"temperature": 0.8, "allowed_token_ids": (5, 6, 7, 8, 9)},
        {"temperature": 0.5, "logit_bias": ((5, 2.0),), "min_tokens": 5, "stop_token_ids": tuple(range(120, BYTES))},
    ]
    grammar = from_regex('\\{"a": (true|false), "b": "[a-d]{9,30}"\\}', field="response_format")
    made = []
    for i in range(50):
        motif = prompt_of(2 + i % 5, seed=i)
        asked = request((motif * 9)[: 1 + 7 * i % 40], max_tokens=8 + 3 * i % 23, seed=i, **kinds[i % len(kinds)])
        made.append(replace(asked, grammar=grammar) if i % 4 == 1 else asked)
    return made


@pytest.fixture(scope="module")
def fifty(byte_dir: Path) -> tuple[list[ValidRequest], list[list[int]]]:
    """Fifty requests and their answers from one engine without speculation."""
    requests = mixed()
    grammars = [r.grammar for r in requests]
    answers = oracle(byte_dir).generate(
        [r.prompt_ids for r in requests],
        [r.sampling for r in requests],
        grammar=grammars,
        ignore_eos=True,
        show_progress=False,
    )
    assert len({tuple(answer.ids) for answer in answers}) > 40
    return requests, [answer.ids for answer in answers]


async def ask_all(cluster: Cluster, requests: Sequence[ValidRequest]) -> list[Answer]:
    """Answers of all requests, up to 14 at a time. An overloaded request is sent again."""
    turn = asyncio.Semaphore(14)

    async def ask(asked: ValidRequest) -> Answer:
        async with turn:
            while True:
                try:
                    return await cluster.generate(asked, remote_only=True)
                except Overloaded:
                    await asyncio.sleep(0.01)

    return await asyncio.gather(*map(ask, requests))


@pytest.mark.parametrize("kind", ["ngram", _long("suffix"), _long("draft_model"), _long("eagle"), "eagle3"])
async def test_fifty_requests_are_the_same_after_a_hand_off(
    kind: str,
    byte_dir: Path,
    byte_drafting: dict[str, dict[str, Any]],
    fifty: tuple[list[ValidRequest], list[list[int]]],
) -> None:
    """Concurrent requests on a decode pod that has to preempt."""
    requests, expected = fifty
    settings = {name: str(value) for name, value in byte_drafting[kind].items()} | {"speculation_tokens": DRAFTS}
    blocks = oracle(byte_dir, **byte_drafting[kind]).engine.layout.block_bytes
    pods = [settings | {"kv_memory": count * blocks} for count in (200, 34)]
    async with Cluster.start(byte_dir, prefill_config=pods[0], decode_config=pods[1]) as cluster:
        always_draft(cluster.decode)
        answers = await ask_all(cluster, requests)
        assert [answer.ids for answer in answers] == expected
        assert all(answer.handed_off is not None or len(answer.ids) == 1 for answer in answers)
        engine = cluster.decode.runtime.engine
        assert engine.scheduler.stats().preemptions > 0
        assert engine.speculator is not None
        stats = engine.speculator.stats
        assert 0 < stats.accepted < stats.proposed
        assert stats.failures == 0


@pytest.mark.parametrize("kind", [_long("ngram"), _long("draft_model"), "eagle3"])
async def test_fifty_requests_resume_after_any_of_their_tokens(
    kind: str,
    byte_dir: Path,
    byte_drafting: dict[str, dict[str, Any]],
    fifty: tuple[list[ValidRequest], list[list[int]]],
) -> None:
    """Like after the loss of a decode pod: with drafts, grammars, penalties and preemptions."""
    settings = {name: str(value) for name, value in byte_drafting[kind].items()} | {"speculation_tokens": DRAFTS}
    blocks = oracle(byte_dir, **byte_drafting[kind]).engine.layout.block_bytes
    pods = [settings | {"kv_memory": count * blocks} for count in (200, 34)]
    cut = [(r, ids, 1 + 5 * i % (len(ids) - 1)) for i, (r, ids) in enumerate(zip(*fifty, strict=True)) if len(ids) > 1]
    assert len(cut) > 40
    async with Cluster.start(byte_dir, prefill_config=pods[0], decode_config=pods[1]) as cluster:
        always_draft(cluster.decode)
        answers = await ask_all(cluster, [r.resumed(0, ids[:at]) for r, ids, at in cut])
        for answer, (_, ids, at) in zip(answers, cut, strict=True):
            assert [(t.index, t.id) for t in answer.tokens] == [*enumerate(ids)][at:]


async def test_pods_with_different_drafts_refuse_each_other(model_dir: Path, tmp_path: Path) -> None:
    settings = drafting("draft_model", model_dir, tmp_path)
    async with Cluster.start(model_dir, decode_config=settings | {"kv_memory": 1 << 20}) as cluster:
        with pytest.raises(BatonError, match="draft_layers"):
            await cluster.prefill.runtime.transfer_node.connect(
                cluster.decode.runtime.address, cluster.decode.runtime.name
            )


@pytest.mark.long
async def test_smollm2_drafts_are_as_good_after_a_hand_off(smollm2_dir: Path, tmp_path: Path) -> None:
    draft_dir = without_layers(smollm2_dir, tmp_path / "draft", SMOLLM2_LAYERS)
    settings: dict[str, Any] = {"speculation": "draft_model", "speculation_model": draft_dir, "speculation_tokens": 4}
    sizes = {"block_size": 16, "max_model_len": 128}
    llm = LLM(smollm2_dir, kv_memory=48 << 20, chunk_tokens=64, threads=1, **settings, **sizes)
    texts = ["The capital of France is", "Once upon a time, there was a small"]
    requests = [request(llm.encode(text), max_tokens=14, seed=i) for i, text in enumerate(texts)]
    expected, alone = in_one_process(llm, requests)
    pod = settings | sizes | {"speculation_model": str(draft_dir), "kv_memory": 48 << 20, "chunk_tokens": 64}
    async with Cluster.start(smollm2_dir, prefill_config=pod, decode_config=pod) as cluster:
        always_draft(cluster.decode)
        answers = [await cluster.generate(r, timeout_s=120.0) for r in requests]
        assert [answer.ids for answer in answers] == expected
        speculator = cluster.decode.runtime.engine.speculator
        assert speculator is not None
        pod_stats = speculator.stats
        assert pod_stats.proposed > 25
        assert pod_stats.accepted / pod_stats.proposed == pytest.approx(alone.accepted / alone.proposed, abs=0.02)
        assert 0.3 < pod_stats.accepted / pod_stats.proposed < 0.95
