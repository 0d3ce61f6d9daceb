"""Speculation on decode pods: tokens equal those of an engine without drafts, and metrics count the drafts."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from common.types import Role
from engine.speculation.controller import AlwaysDraft
from tests.rigs.engine.known_answer_proposer import Guesses
from tests.rigs.pods.harness import VOCAB, Cluster, Pod, oracle, prompt_of, request

DRAFTS = 4


def gauge(pod: Pod, name: str) -> float:
    """Value of the only sample with this name in the pod's metrics."""
    samples = [s for metric in pod.runtime.metrics.metrics.registry.collect() for s in metric.samples]
    (value,) = (sample.value for sample in samples if sample.name == name)
    return value


def counted(pod: Pod, outcome: str) -> list[float]:
    """Drafts with this outcome by their place, from the pod's metrics."""
    samples = [s for metric in pod.runtime.metrics.metrics.registry.collect() for s in metric.samples]
    places = {
        s.labels["place"]: s.value
        for s in samples
        if s.name == "baton_speculation_tokens_total" and s.labels["outcome"] == outcome
    }
    return [places.get(str(place), 0.0) for place in range(1, DRAFTS + 1)]


@pytest.mark.parametrize("role", [Role.DECODE, Role.BOTH])
async def test_tokens_of_a_hand_off_are_those_without_drafts(model_dir: Path, role: Role) -> None:
    prompts = [(prompt_of(3 + i % 4, seed=i) * 9)[: 8 + 3 * i] for i in range(8)]
    kinds = [{"temperature": 0.0}, {"temperature": 0.5, "frequency_penalty": 0.2}, {"temperature": 0.0, "logprobs": 1}]
    requests = [request(ids, max_tokens=20, seed=i, **kinds[i % 3]) for i, ids in enumerate(prompts)]
    alone = oracle(model_dir)
    expected = [
        alone.generate([r.prompt_ids], r.sampling, ignore_eos=True, show_progress=False)[0].ids for r in requests
    ]
    drafting = {"speculation": "ngram", "speculation_tokens": DRAFTS}
    async with Cluster.start(model_dir, role=role, decode_config=drafting, prefill_config=drafting) as cluster:
        engine = cluster.decode.runtime.engine
        engine.set_proposer(
            Guesses({r.request_id: ids for r, ids in zip(requests, expected, strict=True)}, vocab=VOCAB)
        )
        answers = await asyncio.gather(*(cluster.generate(r) for r in requests))
        assert [[t.id for t in answer.tokens] for answer in answers] == expected
        assert all([t.index for t in answer.tokens] == list(range(20)) for answer in answers)
        accepted, rejected = counted(cluster.decode, "accepted"), counted(cluster.decode, "rejected")
        assert engine.speculator is not None
        stats = engine.speculator.stats
        assert accepted == stats.accepted_at
        assert [a + r for a, r in zip(accepted, rejected, strict=True)] == stats.proposed_at
        assert 0 < stats.accepted < stats.proposed
        assert min(accepted) > 0, "at every place"
        # Each answer carries the counts of its own drafts, for its usage.
        counts = [drafts for answer in answers for drafts in answer.drafts]
        assert [sum(column) for column in zip(*counts, strict=True)] == [stats.proposed, stats.accepted]
        assert len(counts) == stats.chains


async def test_the_useless_gauge_is_set_while_no_draft_is_accepted(model_dir: Path) -> None:
    (answer,) = oracle(model_dir).generate(
        [[5, 6, 7]], request([5, 6, 7], max_tokens=60).sampling, ignore_eos=True, show_progress=False
    )
    drafting = {"speculation": "ngram", "speculation_tokens": 2}
    async with Cluster.start(model_dir, role=Role.BOTH, decode_config=drafting) as cluster:
        engine = cluster.decode.runtime.engine

        async def ask(wrong: int) -> None:
            asked = request([5, 6, 7], max_tokens=60)
            engine.set_proposer(Guesses({asked.request_id: answer.ids}, vocab=VOCAB, wrong=wrong), AlwaysDraft(2))
            assert [t.id for t in (await cluster.generate(asked)).tokens] == answer.ids

        await ask(wrong=1)
        assert gauge(cluster.decode, "baton_speculation_useless") == 1.0
        chains = gauge(cluster.decode, "baton_speculation_acceptance_length_count")
        assert gauge(cluster.decode, "baton_speculation_acceptance_length_sum") == chains > 50
        await ask(wrong=4)
        assert gauge(cluster.decode, "baton_speculation_useless") == 0.0
