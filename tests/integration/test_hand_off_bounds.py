"""Blocks that a hand-off moves: after the last chunk at most its own, and only new ones of a conversation."""

from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from common.pb import decode_pb2
from engine.llm import LLM
from tests.rigs.pods.harness import BLOCK, CHUNK, Cluster, Pod, prompt_of, request, tiny_llama

LONG, LONG_CHUNK, LONG_BLOCK = 2048, 256, 16
QUEUE = decode_pb2.RemotePrefill(queue_s=60.0, compute_s=0.1, hand_off_s=0.1, tokens_per_s=1000.0)
AT_ONCE = decode_pb2.RemotePrefill(queue_s=0.0, compute_s=0.0, hand_off_s=0.0, tokens_per_s=1000.0)


def local_rest(prompt_len: int, held: int) -> int:
    """Tokens behind the last full cached block."""
    return prompt_len - held // BLOCK * BLOCK


def sent(pod: Pod) -> int:
    return sum(pair.blocks for pair in pod.runtime.transfer_node.pair_stats())


async def test_after_the_last_chunk_at_most_one_chunk_is_left_to_move(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """2,048 tokens in chunks of 256. The last chunk waits until the blocks of the earlier chunks are delivered.

    If they were not pushed while the prompt is computed, the test would wait until its limit.
    """
    wide = tiny_llama(tmp_path, max_len=LONG + 64)
    config = {
        "max_model_len": LONG + 64,
        "chunk_tokens": LONG_CHUNK,
        "block_size": LONG_BLOCK,
        "kv_memory": 32 << 20,
    }
    async with Cluster.start(wide, prefill_config=config, decode_config=config) as cluster:
        await cluster.generate(request(prompt_of(3)))  # connects the pods
        await cluster.decode.settled()
        before = sent(cluster.prefill)
        node, engine = cluster.prefill.runtime.transfer_node, cluster.prefill.runtime.engine
        launch, chunks, remaining = engine.runner.launch, 0, -1
        all_blocks, pause = LONG // LONG_BLOCK, threading.Event()

        def last_one_waits(*args: Any) -> object:
            nonlocal chunks
            chunks += 1
            for _ in range(12_000):
                if (
                    chunks < LONG // LONG_CHUNK
                    or sent(cluster.prefill) - before >= all_blocks - LONG_CHUNK // LONG_BLOCK
                ):
                    break
                pause.wait(0.005)
            return launch(*args)

        monkeypatch.setattr(engine.runner, "launch", last_one_waits)
        on_step = cluster.prefill.service.on_step

        def seen(result: object) -> None:
            nonlocal remaining
            if chunks == LONG // LONG_CHUNK:
                remaining = all_blocks - (sent(cluster.prefill) - before)
            on_step(result)

        monkeypatch.setattr(cluster.prefill.service, "on_step", seen)
        answer = await cluster.generate(request(prompt_of(LONG), 2), remote_only=True)
        assert chunks == LONG // LONG_CHUNK
        assert 0 <= remaining <= LONG_CHUNK // LONG_BLOCK
        assert answer.handed_off is not None
        assert answer.handed_off.blocks == all_blocks
        assert answer.handed_off.transport == "loopback"
        assert answer.events.count("progress") == chunks
        assert all_blocks - answer.handed_off.blocks_before_last_chunk <= LONG_CHUNK // LONG_BLOCK
        assert node.stats().sent_blocks - before == all_blocks  # each block once


async def test_a_turn_moves_only_its_new_blocks(model_dir: Path, llm: LLM) -> None:
    async with Cluster.start(model_dir) as cluster:
        history, held = prompt_of(3 * CHUNK + 5), 0
        for turn in range(3):
            r = request(history, 2 * BLOCK)
            before = sent(cluster.prefill)
            answer = await cluster.generate(r, remote_only=True)
            assert answer.ids == llm.generate([r.prompt_ids], r.sampling, ignore_eos=True)[0].ids
            await cluster.decode.settled()
            moved = sent(cluster.prefill) - before
            blocks = -(-len(history) // BLOCK)
            assert moved == blocks - held
            # Decode caches the full blocks of the prompt and the answer without its last token.
            held = (len(history) + len(answer.ids) - 1) // BLOCK
            history = [*history, *answer.ids, *prompt_of(BLOCK + 1, seed=20 + turn)]


class TestLocal:
    async def test_a_rest_is_computed_by_decode_when_that_is_cheaper_and_moves_nothing(
        self, model_dir: Path, llm: LLM
    ) -> None:
        async with Cluster.start(model_dir) as cluster:
            history = prompt_of(3 * CHUNK)
            first = request(history, 2 * BLOCK)
            answer = await cluster.generate(first, remote_cost=QUEUE)
            assert answer.events[0] != "local"  # no token is cached
            await cluster.decode.settled()
            before = sent(cluster.prefill)
            r = request([*history, *answer.ids, 5, 6, 7], 6)
            local = await cluster.generate(r, remote_cost=QUEUE)
            assert local.events[0] == "local"
            assert local.ids == llm.generate([r.prompt_ids], r.sampling, ignore_eos=True)[0].ids
            assert sent(cluster.prefill) == before
            computed = (await cluster.decode.info()).computed
            assert computed.local == local_rest(r.prompt_len, len(history) + len(answer.ids) - 1)
            far = request([*history, *answer.ids, 5, 6, 8], 6)
            assert (await cluster.generate(far, remote_cost=AT_ONCE)).events[0] != "local"
            assert cluster.decode.counted("local_prefill_decisions") == {
                ("remote", "nothing_cached"): 1,
                ("local", "cheaper"): 1,
                ("remote", "cheaper"): 1,
            }

    async def test_off_disables_local_prefill(self, model_dir: Path) -> None:
        async with Cluster.start(model_dir, decode_config={"local_prefill": "off"}) as cluster:
            for _ in range(2):
                answer = await cluster.generate(request(prompt_of(2 * CHUNK), 4), remote_cost=QUEUE)
                assert answer.events[0] != "local"
            assert cluster.decode.counted("local_prefill_decisions") == {("remote", "off"): 2}
            assert (await cluster.decode.info()).computed.local == 0

    async def test_cached_blocks_of_a_local_prompt_are_not_evicted_before_its_turn(
        self, model_dir: Path, llm: LLM
    ) -> None:
        """The engine stands still while another lease takes every block: the rest stays as short as it was decided."""
        async with Cluster.start(model_dir, decode_config={"num_blocks": 24, "local_prefill": "8"}) as cluster:
            prompt = prompt_of(2 * CHUNK)
            await cluster.generate(request(prompt, 2), remote_only=True)
            await cluster.decode.settled()
            runtime, gate = cluster.decode.runtime, threading.Event()
            held = runtime.engine_loop.call(lambda: gate.wait(60))
            running = asyncio.create_task(cluster.generate(request([*prompt, 9], 2)))
            async with asyncio.timeout(30):
                while not len(cluster.decode.service.requests):
                    await asyncio.sleep(0.005)
            pool = runtime.engine.pool
            others = pool.lease([], pool.num_available())  # evicts every block that it can
            assert others is not None
            others.finish("enough")
            gate.set()
            assert await asyncio.wrap_future(held)
            answer = await running
            assert answer.events[0] == "local"
            assert (await cluster.decode.info()).computed.local == 1
            r = request([*prompt, 9], 2)
            assert answer.ids == llm.generate([r.prompt_ids], r.sampling, ignore_eos=True)[0].ids

    async def test_a_local_rest_joins_decode_steps_in_small_chunks(
        self, model_dir: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        config = {"local_prefill": "40", "local_chunk_tokens": 8}
        async with Cluster.start(model_dir, decode_config=config) as cluster:
            prompt = prompt_of(2 * CHUNK)
            await cluster.generate(request(prompt, 2), remote_only=True)
            runner = cluster.decode.runtime.engine.runner
            launch, mixed = runner.launch, []

            def noted(items: list[Any], *more: Any) -> object:
                decodes = [i for i in items if i.is_decode]
                if decodes:
                    mixed.append(sum(i.num_new for i in items if not i.is_decode))
                    time.sleep(0 if any(mixed) else 0.2)  # slow steps, so that the rest arrives within the 90
                return launch(items, *more)

            monkeypatch.setattr(runner, "launch", noted)
            decoding = asyncio.Event()
            running = asyncio.create_task(
                cluster.generate(
                    request(prompt_of(20, seed=4), 90),
                    remote_only=True,
                    on_event=lambda kind: decoding.set() if kind == "tokens" else None,
                )
            )
            await asyncio.wait_for(decoding.wait(), 30)
            answer = await cluster.generate(request([*prompt, *prompt_of(30, seed=5)], 4))
            assert answer.events[0] == "local"
            await running
            assert max(mixed) <= 8
            assert sum(mixed) > 0
