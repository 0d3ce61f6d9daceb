"""Overload over REST: late requests are shed or refused early, and requests wait for room on full decode pods."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from common.types import Role
from gateway.text.tokenizer import TextTokenizer
from tests.rigs.gateway.gateway_rig import MODEL, Rig, rig
from tests.rigs.pods.fake_pods import fake_cluster
from tests.rigs.pods.rated_pod import RatedPod
from tests.rigs.waiting import until


@asynccontextmanager
async def rated(model_dir: Path, **settings: Any) -> AsyncIterator[tuple[Rig, RatedPod]]:
    """Yields a gateway and its prefill pod, which has measured its rate."""
    async with fake_cluster(prefill=0) as cluster:
        pod = await cluster.add(Role.PREFILL, "prefill-0", RatedPod)
        assert isinstance(pod, RatedPod)
        async with rig(cluster, model_dir, **settings) as gw:
            await gw.complete(max_tokens=1)
            await until(lambda: gw.gateway.models.first.gate._forecast.measured)
            yield gw, pod


def refusals(gw: Rig, stage: str) -> float:
    """Returns the number of refusals in a stage: "arrival", "waiting" or "pods"."""
    samples = next(iter(gw.gateway.metrics.refusal.collect())).samples
    counts = (s.value for s in samples if s.name.endswith("_count") and s.labels["stage"] == stage)
    return next(counts, 0.0)


async def test_requests_that_wait_too_long_at_the_pods_get_429_or_an_error_event(smollm2_dir: Path) -> None:
    async with rated(smollm2_dir, max_ttft_s=4.0) as (gw, pod):
        opened = asyncio.Event()

        async def wait(_request: object) -> None:
            await opened.wait()

        pod.faults.before_prefill = wait
        alone = asyncio.create_task(gw.complete(max_tokens=1))  # no other request is before it
        await until(lambda: len(pod.seen.prefilled) == 2)
        whole = asyncio.create_task(gw.complete(max_tokens=1))
        status, events = await gw.stream("completions", max_tokens=2)
        assert status == 200  # a decode pod had reserved, so the head was sent
        assert events[-2]["error"]["code"] == "rate_limit_exceeded"
        assert events[-1] == "[DONE]"
        refused = await whole
        assert (refused.status_code, refused.json()["error"]["type"]) == (429, "rate_limit_error")
        assert int(refused.headers["retry-after"]) >= 1
        assert refusals(gw, "pods") == 2
        assert not alone.done()
        opened.set()
        assert (await alone).status_code == 200
        await gw.settled()
        gate = gw.gateway.models.first.gate
        assert (gate._running, gate.waiting, gate._outstanding) == (0, 0, {})


async def test_a_waiting_request_is_shed_when_the_pods_become_slower(smollm2_dir: Path) -> None:
    async with rated(smollm2_dir, max_ttft_s=3.0) as (gw, pod):
        gate = gw.gateway.models.first.gate
        prompts = [[i + 1] * 800 for i in range(8)]  # 0.4 s each
        tasks = [asyncio.create_task(gw.complete(prompt=prompt, max_tokens=1)) for prompt in prompts]
        await until(lambda: gate.waiting >= 3)
        pod.rate /= 20
        answers = await asyncio.gather(*tasks)
        assert {answer.status_code for answer in answers} == {200, 429}
        assert refusals(gw, "waiting") > 0
        shed = [answer for answer in answers if answer.status_code == 429]
        assert all(int(answer.headers["retry-after"]) >= 1 for answer in shed)
        await gw.settled()


async def test_a_request_that_would_be_late_in_any_case_is_refused_before_its_text_is_read(
    smollm2_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with rated(smollm2_dir) as (gw, pod):
        pod.rate = 400.0
        views = [known.view for known in gw.gateway.pod_table.pods.values()]
        await until(lambda: any(v.load.prefill_rate == 400.0 for v in views if v and v.load))
        gate = gw.gateway.models.first.gate
        prompts = [[i + 1] * 400 for i in range(20)]  # 1 s each
        tasks = [asyncio.create_task(gw.complete(prompt=prompt, max_tokens=1)) for prompt in prompts]
        await until(lambda: gate.waiting >= 10)
        tokenized: list[str] = []
        encode = TextTokenizer.encode_chat

        async def recorded(self: TextTokenizer, prompt: Any) -> Any:
            tokenized.append(str(prompt))
            return await encode(self, prompt)

        monkeypatch.setattr(TextTokenizer, "encode_chat", recorded)
        body = {"model": MODEL, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2}
        late = await gw.http.post("/v1/chat/completions", json=body, headers={"x-request-timeout": "3"})
        assert late.status_code == 429, late.text
        assert not tokenized
        assert refusals(gw, "arrival") > 0
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await gw.settled()


async def test_requests_wait_for_room_on_full_decode_pods_while_others_end(smollm2_dir: Path) -> None:
    """Six clients share two places. The gate has measured how soon requests end, so it refuses no request."""
    async with fake_cluster() as cluster:
        decode = cluster.decodes[0]
        decode.capacity, decode.faults.token_delay_s = 2, 0.02
        async with rig(cluster, smollm2_dir) as gw:
            gate, ended = gw.gateway.models.first.gate, 0
            while ended < 30 or gate._ends.per_s(time.monotonic()) is None:  # it measures how soon requests end
                await asyncio.gather(*[gw.complete(max_tokens=5) for _ in range(2)])
                ended += 2
            limits = httpx.Limits(max_connections=20)
            async with httpx.AsyncClient(base_url=gw.url, timeout=30, limits=limits) as http:

                async def client() -> list[int]:
                    body = {"model": MODEL, "prompt": "Hello", "max_tokens": 5}
                    return [(await http.post("/v1/completions", json=body)).status_code for _ in range(4)]

                statuses = await asyncio.gather(*[client() for _ in range(6)])
            assert statuses == [[200] * 4] * 6
            assert gw.gateway.metrics.rejections.labels("decode")._value.get() > 0
            await gw.settled()
            assert (gate._running, gate._outstanding, gate._without_room) == (0, {}, {})
            assert any("no_room" in str(timeline.as_json()) for timeline in gw.gateway.timelines.newest())
