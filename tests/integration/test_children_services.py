"""n sequences of one prompt through prefill, transfer and decode: one prefill, one hand-off, independent children."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from common.errors import InvalidRequest
from common.pb import decode_pb2
from common.types import FinishReason, Role, ValidRequest
from engine.llm import LLM
from tests.rigs.pods.harness import BLOCK, CHUNK, MAX_LEN, TIMEOUT_S, Cluster, oracle, prompt_of, request
from tests.rigs.pods.samples import Samples

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def alone(model_dir: Path) -> LLM:
    return oracle(model_dir)


def expected(alone: LLM, valid: ValidRequest) -> list[list[int]]:
    return [c.ids for c in alone.generate([valid.prompt_ids], valid.sampling, ignore_eos=True)]


@pytest.mark.parametrize("length", [1, BLOCK - 1, BLOCK, BLOCK + 1, CHUNK, CHUNK + 1, 2 * CHUNK + 3])
async def test_one_prefill_and_one_transfer_for_all_children(model_dir: Path, alone: LLM, length: int) -> None:
    async with Cluster.start(model_dir) as cluster:
        sampled = request(prompt_of(length), 7, temperature=1.0, seed=3, n=3)
        got = await Samples().run(cluster, sampled)
        assert [got.ids(child) for child in range(3)] == expected(alone, sampled)
        assert got.firsts == [0, 1, 2]
        assert got.blocks == -(-length // BLOCK)
        assert cluster.prefill.runtime.computed_tokens["prefill"] == length
        assert cluster.prefill.runtime.transfer_node.stats().sent_transfers == 1
        greedy = await Samples().run(cluster, request(prompt_of(length), 5, n=4))
        assert len({tuple(greedy.ids(child)) for child in range(4)}) == 1
        for kind in ("local", "recompute"):
            assert cluster.decode.runtime.computed_tokens[kind] == 0


async def test_children_of_a_local_prompt_that_fills_most_of_the_context(model_dir: Path, alone: LLM) -> None:
    """With a spare block for each child the prompt's lease would be longer than a sequence can be."""
    valid = request(prompt_of(MAX_LEN - 8), 6, n=14, seed=3, temperature=0.9)
    expected = [output.ids for output in alone.generate([valid.prompt_ids], valid.sampling, ignore_eos=True)]
    async with Cluster.start(model_dir, decode_config={"local_prefill": "512", "num_blocks": 96}) as cluster:
        got = await Samples().run(cluster, valid, remote=False)
        assert got.local
        assert [got.ids(child) for child in range(14)] == expected


async def test_local_prefill_and_aggregated_pods(model_dir: Path, alone: LLM) -> None:
    for config in ({"decode_config": {"local_prefill": "64"}}, {"role": Role.BOTH, "prefill": 0}):
        async with Cluster.start(model_dir, **config) as cluster:  # type: ignore[arg-type]
            sampled = request(prompt_of(CHUNK + 2), 6, temperature=1.0, seed=9, n=3)
            got = await Samples().run(cluster, sampled, remote=False)
            assert got.local
            assert [got.ids(child) for child in range(3)] == expected(alone, sampled)


async def test_children_end_with_their_first_tokens(model_dir: Path, alone: LLM) -> None:
    async with Cluster.start(model_dir) as cluster:
        free = request(prompt_of(10), 6, temperature=1.0, seed=4, n=4)
        stop = expected(alone, free)[1][0]
        stopped = replace(free, sampling=replace(free.sampling, stop_token_ids=(stop,)))
        got = await Samples().run(cluster, stopped)
        assert [got.ids(child) for child in range(4)] == expected(alone, stopped)
        assert (got.ids(1), got.finish[1]) == ([stop], FinishReason.STOP)
        one = await Samples().run(cluster, request(prompt_of(9), 1, temperature=1.0, n=5))
        assert set(one.finish.values()) == {FinishReason.LENGTH}
        assert all(len(one.ids(child)) == 1 for child in range(5))


async def test_children_are_preempted_and_go_on(model_dir: Path, alone: LLM) -> None:
    async with Cluster.start(model_dir, decode_config={"num_blocks": 16}) as cluster:
        sampled = request(prompt_of(10), 30, temperature=1.0, seed=8, n=3)
        got = await Samples().run(cluster, sampled)
        assert [got.ids(child) for child in range(3)] == expected(alone, sampled)
        assert cluster.decode.runtime.engine.scheduler.stats().preemptions > 0


async def test_a_child_is_aborted_alone_and_all_are_with_the_request(model_dir: Path, alone: LLM) -> None:
    async with Cluster.start(model_dir) as cluster:
        sampled = request(prompt_of(10), 60, temperature=1.0, seed=8, n=3)

        async def stop(samples: Samples, child: int) -> None:
            if child == 1 and len(samples.tokens[1]) == 3:
                message = decode_pb2.DecodeAbortRequest(request_id=sampled.request_id, child=1)
                await cluster.decode.decode.Abort(message)

        got = await Samples(stop).run(cluster, sampled, without=1)
        wanted = expected(alone, sampled)
        assert (got.ids(0), got.ids(2)) == (wanted[0], wanted[2])
        assert 1 not in got.finish
        ended = asyncio.Event()

        async def leave(samples: Samples, child: int) -> None:
            if all(len(samples.tokens[c]) >= 2 for c in range(3)):
                ended.set()

        running = asyncio.create_task(Samples(leave).run(cluster, replace(sampled, request_id="leaves")))
        await asyncio.wait_for(ended.wait(), TIMEOUT_S)
        await cluster.abort("leaves")
        running.cancel()
        await asyncio.wait([running])


async def test_admission_counts_blocks_for_every_child(model_dir: Path) -> None:
    async with Cluster.start(model_dir, decode_config={"num_blocks": 20}) as cluster:
        with pytest.raises(InvalidRequest) as refused:
            await cluster.reserve(request(prompt_of(8), 6, n=19), remote_only=True)
        assert refused.value.field == "n"
        held = request(prompt_of(8), 6, n=12)
        assert (await cluster.reserve(held, remote_only=True)).HasField("target")
        assert cluster.decode.runtime.engine.pool.num_available() == 20 - 2 - 12
        assert (await cluster.reserve(request(prompt_of(8, 1), 6, n=5), remote_only=True)).HasField("rejected")
        await cluster.abort(held.request_id)
