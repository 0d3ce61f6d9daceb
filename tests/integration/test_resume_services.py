"""Resumed sequences: other pods continue after tokens that a lost pod generated, with the same tokens."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from common.errors import InvalidRequest
from common.pb import prefill_pb2
from common.rpc import translate_rpc_errors
from common.types import FinishReason, Role, Token, ValidRequest
from common.wire import request_to_pb
from tests.rigs.pods.harness import BLOCK, CHUNK, Cluster, oracle, prompt_of, request

torch.set_num_threads(1)

MAX_TOKENS = 14
AT = [1, 2, BLOCK, MAX_TOKENS - 1]  # tokens generated before
KINDS: list[dict[str, Any]] = [
    {},
    {"logprobs": 3},
    {"temperature": 1.0},
    {"temperature": 1.5, "top_k": 20, "top_p": 0.9, "logprobs": 0},
    {"temperature": 0.7, "repetition_penalty": 1.4, "presence_penalty": 0.5, "frequency_penalty": 0.8},
    {"temperature": 2.0, "min_tokens": 9, "stop_token_ids": tuple(range(0, 256, 2))},
    {"temperature": 1.0, "allowed_token_ids": tuple(range(2, 12)), "bad_words": ((5, 6), (7,), (3, 4, 2))},
    {"temperature": 1.0, "logit_bias": ((9, 3.0), (11, 3.0)), "frequency_penalty": 1.5},
]
ROOM = {"num_blocks": 256}
DRAFTS = {"speculation": "ngram", "speculation_tokens": 3}
TOPOLOGIES: dict[str, dict[str, Any]] = {
    "handed over": {"decode_config": {"local_prefill": "off", **ROOM}, "prefill_config": ROOM},
    "local": {"decode_config": {"local_prefill": "512", **ROOM}},
    "aggregated": {"role": Role.BOTH, "prefill": 0, "decode_config": ROOM},
    "drafted": {"decode_config": {"local_prefill": "off", **DRAFTS, **ROOM}, "prefill_config": {**DRAFTS, **ROOM}},
}


def requests() -> list[ValidRequest]:
    """One request of every kind, with prompts that end before, at and after a block and a chunk."""
    lengths = [1, BLOCK - 1, BLOCK, BLOCK + 1, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 3]
    return [
        request((prompt_of(5, seed=i) * 9)[:length], MAX_TOKENS, seed=40 + i, **kind)
        for i, (length, kind) in enumerate(zip(lengths, KINDS, strict=True))
    ]


def again(valid: ValidRequest, child: int, output: list[int]) -> ValidRequest:
    """A request for the rest of one sequence, with a new id."""
    return replace(valid.resumed(child, output), request_id=request([1]).request_id)


def same(got: list[Token], expected: list[Token]) -> None:
    assert [(t.index, t.id) for t in got] == [(t.index, t.id) for t in expected]
    for a, b in zip(got, expected, strict=True):
        assert a.logprob == (None if b.logprob is None else pytest.approx(b.logprob, abs=1e-4))
        assert [t.token for t in a.top] == [t.token for t in b.top]


@pytest.mark.parametrize("topology", TOPOLOGIES)
async def test_a_resumed_sequence_has_the_same_tokens(model_dir: Path, topology: str) -> None:
    kinds = requests()
    async with Cluster.start(model_dir, **TOPOLOGIES[topology]) as cluster:
        whole = await asyncio.gather(*map(cluster.generate, kinds))
        assert {answer.finish for answer in whole} == {FinishReason.LENGTH, FinishReason.STOP}
        where: set[bool] = set()
        for at in AT:
            begun = [(r, answer) for r, answer in zip(kinds, whole, strict=True) if at < len(answer.ids)]
            assert len(begun) >= len(kinds) - 1
            rests = await asyncio.gather(*(cluster.generate(again(r, 0, answer.ids[:at])) for r, answer in begun))
            for (_, answer), rest in zip(begun, rests, strict=True):
                same(rest.tokens, answer.tokens[at:])
                assert rest.finish == answer.finish
                where.add("local" in rest.events)
        assert where == {topology in ("local", "aggregated")}


async def test_a_sequence_resumes_on_pods_without_its_kv(model_dir: Path) -> None:
    kinds = requests()
    async with Cluster.start(model_dir, prefill=2, decode=2, **TOPOLOGIES["handed over"]) as cluster:
        whole = await asyncio.gather(*map(cluster.generate, kinds))
        others = {"prefill": cluster.prefills[1], "decode": cluster.decodes[1]}
        for valid, answer in zip(kinds, whole, strict=True):
            rest = await cluster.generate(again(valid, 0, answer.ids[:6]), **others)
            same(rest.tokens, answer.tokens[6:])
            assert rest.cached_tokens == 0
            assert rest.handed_off is not None
            assert rest.handed_off.blocks == -(-(valid.prompt_len + 6) // BLOCK)
        # Every token was computed once before on some pod, except the newest token of each sequence.
        computed = others["prefill"].runtime.computed_tokens
        lengths = sum(valid.prompt_len + 6 - 1 for valid in kinds)
        assert (computed["prefill"], computed["recompute"]) == (0, lengths)


@pytest.mark.parametrize("topology", ["handed over", "local", "aggregated"])
async def test_each_child_resumes_with_its_own_random_numbers(model_dir: Path, topology: str) -> None:
    alone = oracle(model_dir)
    valid = request(prompt_of(CHUNK + 2), MAX_TOKENS, temperature=1.0, seed=9, n=3)
    wanted = [c.ids for c in alone.generate([valid.prompt_ids], valid.sampling, ignore_eos=True)]
    assert wanted[0] != wanted[1] != wanted[2]
    async with Cluster.start(model_dir, **TOPOLOGIES[topology]) as cluster:
        rests = await asyncio.gather(
            *(cluster.generate(again(valid, child, ids[: 3 * child])) for child, ids in enumerate(wanted))
        )
        for child, (rest, ids) in enumerate(zip(rests, wanted, strict=True)):
            assert [(t.index, t.id, t.child) for t in rest.tokens] == [
                (i, ids[i], child) for i in range(3 * child, MAX_TOKENS)
            ]


async def test_a_request_that_cannot_resume_is_refused_with_the_field(model_dir: Path) -> None:
    valid = request([5, 6, 7], 4)
    async with Cluster.start(model_dir) as cluster:
        for wrong, field in (
            (again(valid, 0, [1, 2, 3, 4]), "output_ids"),
            (again(valid, 0, [256]), "output_ids"),
            (again(valid, 128, [1]), "child"),
            (replace(again(valid, 0, [1]), sampling=replace(valid.sampling, n=2)), "n"),
            (replace(again(valid, 1, []), sampling=replace(valid.sampling, n=2)), "n"),
            (replace(again(valid, 0, [1]), sampling=replace(valid.sampling, prompt_logprobs=0)), "prompt_logprobs"),
        ):
            with pytest.raises(InvalidRequest) as error:
                await cluster.reserve(wrong)
            assert error.value.field == field
            call = cluster.prefill.prefill.Prefill(prefill_pb2.PrefillRequest(request=request_to_pb(wrong)))
            with pytest.raises(InvalidRequest) as error, translate_rpc_errors():
                await call.read()
            assert error.value.field == field
