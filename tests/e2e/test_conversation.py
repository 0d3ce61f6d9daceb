"""A conversation through the gateway, of ten turns where there are two pods of each role: KV travels once."""

from __future__ import annotations

import asyncio
from pathlib import Path

import grpc

from common.pb import inference_pb2, inference_pb2_grpc
from tests.e2e.cluster import Cluster
from tests.e2e.oracle import Oracle, assert_same
from tests.e2e.prompts import prompt_of
from tests.e2e.shape import BLOCK

TURNS, SAID, ANSWER = 10, 19, BLOCK + 4  # an answer fills the block in which its prompt ended
SETTLED_S = 0.5  # a person reads the answer; by then the index knows what pods hold


def moved(cluster: Cluster) -> tuple[int, int]:
    """Blocks handed off, and blocks pulled, by any pod since its start."""
    pairs = [pair for name in cluster.pods for pair in cluster.info(name).pairs]
    pulled = sum(pair.pulled_blocks for pair in pairs)
    return sum(pair.blocks for pair in pairs) - pulled, pulled


async def test_turns_move_each_block_once_at_most(cluster: Cluster, smollm2_dir: Path, oracle: Oracle) -> None:
    turns = TURNS if len(cluster.pods) > 2 else 2
    words = prompt_of(smollm2_dir, TURNS * SAID, 77)
    history: list[int] = []
    handed_before, pulled_before = await asyncio.to_thread(moved, cluster)
    async with grpc.aio.insecure_channel(cluster.stack.grpc_address) as channel:
        stub: inference_pb2_grpc.InferenceAsyncStub = inference_pb2_grpc.InferenceStub(channel)
        for turn in range(turns):
            history += words[turn * SAID : (turn + 1) * SAID]
            request = inference_pb2.GenerateRequest(
                model=cluster.model,
                tokens=inference_pb2.TokenPrompt(ids=history),
                max_tokens=ANSWER,
                temperature=0.0,
                ignore_eos=True,
                cache_salt="conversation",
            )
            answer = [token.id async for part in stub.Generate(request, timeout=120) for token in part.tokens]
            assert len(answer) == ANSWER
            if turn == turns - 1:
                expected = oracle.references(history, [len(history)], ANSWER)[len(history)]
                assert_same(answer, expected, "the last turn")
            history += answer
            await asyncio.to_thread(cluster.check_idle)
            handed_off, pulled = await asyncio.to_thread(moved, cluster)
            prompt_len = len(history) - ANSWER
            # To decode each block goes once, the partial last one of a prompt included. Back to prefill go, once, those
            # that decode has completed.
            assert handed_off - handed_before <= -(-prompt_len // BLOCK), f"turn {turn}"
            assert pulled - pulled_before <= turn * (ANSWER // BLOCK + 1), f"turn {turn}"
            await asyncio.sleep(SETTLED_S)
    assert handed_off > handed_before
