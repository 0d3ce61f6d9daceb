"""Limits with a real Valkey: shared by gateways, shown in headers, enforced without Valkey; and the gate over REST."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from cli.stack.valkey import EmbeddedValkey
from common.redis.client import LuaScript, connect_redis
from common.types import Role
from gateway.admission.api_keys import Caller, KeyLimits, create_key
from gateway.admission.key_store import KeyFile
from gateway.admission.limiter import _LUA, DAY_MS, KeyBuckets, Limiter, _keys
from gateway.telemetry.metrics import GatewayMetrics
from tests.rigs.gateway.gateway_rig import MODEL, Rig, rig
from tests.rigs.pods.fake_pods import fake_cluster
from tests.rigs.pods.rated_pod import RatedPod
from tests.rigs.waiting import until


@asynccontextmanager
async def valkey_at(directory: Path) -> AsyncIterator[tuple[EmbeddedValkey, str]]:
    valkey = EmbeddedValkey(0, directory)
    url = await valkey.start()
    try:
        yield valkey, url
    finally:
        await valkey.stop()


def key_file(path: Path, **tenants: dict[str, Any]) -> dict[str, dict[str, str]]:
    """Creates a file with one key per tenant. Returns the headers of each."""
    headers = {}
    for tenant, fields in tenants.items():
        key, record = create_key(tenant, **fields)
        KeyFile(path).add(record)
        headers[tenant] = {"authorization": f"Bearer {key}"}
    return headers


async def ask(gw: Rig, headers: dict[str, str], **fields: Any) -> httpx.Response:
    body = {"model": MODEL, "prompt": "Hello", "max_tokens": 5, **fields}
    return await gw.http.post("/v1/completions", json=body, headers=headers)


async def test_two_gateways_share_the_limits_of_a_key(smollm2_dir: Path, tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    headers = key_file(path, a={"requests_per_minute": 4}, b={"tokens_per_minute": 100}, c={"tokens_per_day": 20})
    async with valkey_at(tmp_path) as (_, url), fake_cluster() as cluster:
        settings: dict[str, Any] = {"api_keys": (str(path),), "redis": url}
        async with rig(cluster, smollm2_dir, **settings) as one, rig(cluster, smollm2_dir, **settings) as two:
            statuses = [(await ask((one, two)[i % 2], headers["a"])).status_code for i in range(6)]
            assert statuses == [200] * 4 + [429] * 2
            refused = await ask(one, headers["a"])
            assert 1 <= int(refused.headers["retry-after"]) <= 16
            assert refused.json()["error"]["code"] == "rate_limit_exceeded"
            assert refused.headers["x-ratelimit-limit-requests"] == "4"
            assert refused.headers["x-ratelimit-remaining-requests"] == "0"
            # Reserved with max_tokens, settled with what was used: 1 + 5 of 1 + 50.
            first = await ask(one, headers["b"], max_tokens=50)
            assert first.headers["x-ratelimit-remaining-tokens"] == "49"
            assert first.headers["x-ratelimit-reset-tokens"].endswith("s")
            assert first.json()["usage"]["total_tokens"] == 51
            assert (await ask(two, headers["b"], max_tokens=99)).status_code == 429
            cluster.script = lambda _request: [66, 2]  # ends at once
            await until_asked(one, headers["b"], 200)
            never = await ask(two, headers["b"], max_tokens=100)
            assert (never.status_code, never.json()["error"]["param"]) == (400, "max_tokens")
            assert (await ask(one, headers["c"], max_tokens=15)).status_code == 200
            spent = await ask(two, headers["c"], max_tokens=19)
            assert (spent.status_code, spent.json()["error"]["code"]) == (429, "insufficient_quota")
            await one.settled()


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("completions", {"prompt": "Hello", "max_tokens": 50}, "max_tokens"),
        ("completions", {"prompt": [77] * 50, "max_tokens": 1}, "prompt"),
        ("chat/completions", {"messages": "Hello", "max_completion_tokens": 50}, "max_completion_tokens"),
        ("chat/completions", {"messages": "Hello", "max_tokens": 50}, "max_tokens"),
        ("chat/completions", {"messages": "Hello " * 100, "max_completion_tokens": 1}, "messages"),
        ("responses", {"input": "Hello", "max_output_tokens": 50}, "max_output_tokens"),
        ("responses", {"input": "Hello " * 100, "max_output_tokens": 16}, "input"),
        ("embeddings", {"input": [77] * 40}, "input"),
        ("embeddings", {"input": [77] * 41}, "input"),
    ],
)
async def test_a_request_above_a_limit_names_the_field_that_is_too_large(
    smollm2_dir: Path, tmp_path: Path, path: str, fields: dict[str, Any], param: str
) -> None:
    headers = key_file(tmp_path / "keys.toml", a={"tokens_per_minute": 40})
    if isinstance(text := fields.get("messages"), str):
        fields = {**fields, "messages": [{"role": "user", "content": text}]}
    async with fake_cluster() as c, rig(c, smollm2_dir, api_keys=(str(tmp_path / "keys.toml"),)) as gw:
        refused = await gw.http.post(f"/v1/{path}", json={"model": MODEL, **fields}, headers=headers["a"])
        error = refused.json()["error"]
        assert (refused.status_code, error["param"]) == (400, param)
        assert "this API key has 40 tokens a minute" in error["message"]
        assert ("max_tokens may help" in error["message"]) is (param == "max_tokens")


async def until_asked(gw: Rig, headers: dict[str, str], status: int) -> None:
    """Repeats a request until it gets this status, because settlements run in the background."""
    async with asyncio.timeout(30):
        while (await ask(gw, headers, max_tokens=20)).status_code != status:
            await asyncio.sleep(0.02)


async def test_concurrent_requests_are_counted_across_gateways_and_released(smollm2_dir: Path, tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    headers = key_file(path, a={"concurrent": 2})["a"]
    async with valkey_at(tmp_path) as (_, url), fake_cluster() as cluster:
        settings: dict[str, Any] = {"api_keys": (str(path),), "redis": url}
        async with rig(cluster, smollm2_dir, **settings) as one, rig(cluster, smollm2_dir, **settings) as two:
            cluster.decodes[0].faults.stall_after = 1
            tasks = [asyncio.create_task(ask(gw, headers)) for gw in (one, two)]
            await until(lambda: len(cluster.decodes[0].seen.reserved) == 2)
            assert (await ask(one, headers)).status_code == 429
            tasks[0].cancel()
            await asyncio.gather(tasks[0], return_exceptions=True)
            cluster.decodes[0].faults.stall_after = None
            async with asyncio.timeout(30):
                while (await ask(two, headers)).status_code != 200:
                    await asyncio.sleep(0.02)
            tasks[1].cancel()
            await asyncio.gather(tasks[1], return_exceptions=True)


async def test_without_valkey_the_same_limits_hold_and_no_client_gets_a_5xx(smollm2_dir: Path, tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    headers = key_file(path, a={"requests_per_minute": 10, "tokens_per_day": 1000})["a"]
    async with (
        valkey_at(tmp_path) as (valkey, url),
        fake_cluster() as cluster,
        rig(cluster, smollm2_dir, api_keys=(str(path),), redis=url, index_timeout_s=0.5) as gw,
    ):
        began = time.monotonic()
        assert [(await ask(gw, headers)).status_code for _ in range(3)] == [200] * 3
        burst = [asyncio.create_task(ask(gw, headers)) for _ in range(4)]
        await valkey.stop()  # in the middle of limiting
        statuses = [r.status_code for r in await asyncio.gather(*burst)]
        statuses += [(await ask(gw, headers)).status_code for _ in range(8)]
        assert set(statuses) == {200, 429}
        come_back = (time.monotonic() - began) / 6  # ten a minute
        assert 6 <= statuses.count(200) <= 7 + come_back  # those before it are remembered
        assert gw.gateway.metrics.limits_without_redis._value.get() > 0
        await gw.settled()


async def test_the_scripts_and_the_buckets_give_the_same_decisions(tmp_path: Path) -> None:
    """Makes the same requests at the same times in Lua and in Python."""
    limits = KeyLimits(requests_per_minute=3, tokens_per_minute=100, tokens_per_day=260, concurrent=2)
    caller, buckets, start = Caller(tenant="t", key_id="k", limits=limits), KeyBuckets(), 20_000 * DAY_MS + 1
    take, settle = LuaScript("take", directory=_LUA), LuaScript("settle", directory=_LUA)
    per = (limits.requests_per_minute, limits.tokens_per_minute, limits.tokens_per_day, limits.concurrent)
    async with valkey_at(tmp_path) as (_, url), connect_redis(url, timeout_s=5.0) as client:

        async def both_take(name: str, cost: int, at: int) -> str:
            raw = await take.run(client, _keys(caller), (at, name, *per, cost, 10**9, 0, 0))
            mine = buckets.reserve(limits, name, cost, at)
            lua = (raw[0].decode(), *map(int, raw[1:]))
            assert lua == (
                mine.refused,
                mine.wait_ms,
                mine.requests,
                mine.requests_full_ms,
                mine.tokens,
                mine.tokens_full_ms,
                mine.day,
            ), (name, at - start)
            return mine.refused

        async def both_settle(name: str, cost: int, used: int, day: int, at: int) -> None:
            args = (at, name, limits.tokens_per_minute, cost, used, day)
            assert await settle.run(client, _keys(caller), args) == buckets.settle(limits, name, cost, used, day, at)

        day = start // DAY_MS
        seen = [await both_take("a", 60, start), await both_take("a", 60, start + 5)]
        seen += [await both_take("b", 60, start + 10), await both_take("b", 30, start + 10)]
        seen += [await both_take("c", 5, start + 20)]
        await both_settle("a", 60, 20, day, start + 30_000)
        await both_settle("a", 60, 20, day, start + 30_000)
        seen += [await both_take("c", 90, start + 30_100)]
        await both_settle("b", 30, 80, day, start + 30_200)
        seen += [await both_take("d", 60, start + 30_300), await both_take("d", 1, start + 30_400)]
        seen += [await both_take("e", 80, start + 90_000)]
        await both_settle("c", 90, 1, day, start + DAY_MS)
        await both_settle("e", 80, 1, day, start + DAY_MS)
        seen += [await both_take("f", 100, start + DAY_MS), await both_take("g", 1, start + DAY_MS + 60_000)]
        assert set(seen) == {"", "tokens", "concurrent", "day"}


async def test_a_valkey_that_lost_its_data_gets_back_the_tokens_of_the_day(tmp_path: Path) -> None:
    caller = Caller(tenant="t", key_id="k", limits=KeyLimits(tokens_per_day=100))
    async with valkey_at(tmp_path) as (_, url), connect_redis(url, timeout_s=5.0) as raw:
        limiter = Limiter(url, GatewayMetrics(), timeout_s=5.0)
        await limiter.start()
        try:
            first = await limiter.reserve(caller, "a", 70, {})
            assert first is not None
            limiter.settle(first, 60)
            await raw.flushall()
            with pytest.raises(Exception, match="leaves too few"):
                await limiter.reserve(caller, "b", 50, {})
            assert await limiter.reserve(caller, "c", 40, {}) is not None
        finally:
            await limiter.stop()


async def test_a_grant_for_a_client_that_has_disconnected_is_returned(tmp_path: Path) -> None:
    caller = Caller(tenant="t", key_id="k", limits=KeyLimits(concurrent=1, tokens_per_day=100))
    async with valkey_at(tmp_path) as (valkey, url), connect_redis(url, timeout_s=30.0) as raw:
        limiter = Limiter(url, GatewayMetrics(), timeout_s=30.0)
        assert valkey.pid is not None
        try:
            first = await limiter.reserve(caller, "connects", 5, {})
            assert first is not None
            limiter.settle(first, 5)
            await until(lambda: not limiter._tasks)
            os.kill(valkey.pid, signal.SIGSTOP)
            try:
                left = asyncio.create_task(limiter.reserve(caller, "left", 60, {}))
                await asyncio.sleep(0.1)  # it is asked meanwhile, and not answered
                left.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await left
            finally:
                os.kill(valkey.pid, signal.SIGCONT)
            await until(lambda: not limiter._tasks)
            assert await raw.hget(_keys(caller)[0], "spent") == b"5"
            assert await limiter.reserve(caller, "next", 95, {}) is not None
        finally:
            await limiter.stop()


async def test_a_cancelled_reservation_is_settled_after_redis_has_made_it() -> None:
    limiter = Limiter("redis://127.0.0.1:1", GatewayMetrics(), timeout_s=30.0)
    ran: list[str] = []
    asked, go = asyncio.Event(), asyncio.Event()

    class Script:
        """A script on a connection of its own: the server runs it even if its caller was cancelled."""

        def __init__(self, name: str) -> None:
            self._name = name
            self._runs: list[asyncio.Task[None]] = []

        async def run(self, *_: object) -> list[Any]:
            async def on_server() -> None:
                if self._name == "take":
                    asked.set()
                    await go.wait()
                ran.append(self._name)

            self._runs.append(asyncio.create_task(on_server()))
            await asyncio.shield(self._runs[-1])
            return [b"", 0, 0, 0, 0, 0, 0]

    limiter._take, limiter._settle = Script("take"), Script("settle")  # type: ignore[assignment]
    caller = Caller(tenant="t", key_id="k", limits=KeyLimits(tokens_per_day=100))
    try:
        left = asyncio.create_task(limiter.reserve(caller, "left", 60, {}))
        await asked.wait()
        left.cancel()
        with pytest.raises(asyncio.CancelledError):
            await left
        for _ in range(20):  # turns in which `settle` could run
            await asyncio.sleep(0)
        go.set()
        await until(lambda: len(ran) == 2)
        assert ran == ["take", "settle"]
    finally:
        await limiter.stop()


async def test_a_burst_beyond_capacity_is_refused_at_arrival_and_the_small_tenant_served(
    smollm2_dir: Path, tmp_path: Path
) -> None:
    path = tmp_path / "keys.toml"
    headers = key_file(path, flood={}, small={})
    settings: dict[str, Any] = {"api_keys": (str(path),), "max_running": 2, "max_queue": 8, "max_ttft_s": 0}
    async with fake_cluster() as cluster, rig(cluster, smollm2_dir, **settings) as gw:
        cluster.decodes[0].faults.stall_after = 1
        running = [asyncio.create_task(ask(gw, headers["flood"])) for _ in range(2)]
        await until(lambda: len(cluster.decodes[0].seen.reserved) == 2)
        limits = httpx.Limits(max_connections=200)
        async with httpx.AsyncClient(base_url=gw.url, timeout=30, limits=limits) as http:
            body = {"model": MODEL, "prompt": "Hello", "max_tokens": 5}
            burst = [
                asyncio.create_task(http.post("/v1/completions", json=body, headers=headers["flood"]))
                for _ in range(100)
            ]
            await until(lambda: sum(task.done() for task in burst) == 92)
            assert not any(task.done() for task in running)
            refused = [task.result() for task in burst if task.done()]
            assert {r.status_code for r in refused} == {429}
            assert all(int(r.headers["retry-after"]) >= 1 for r in refused)
            small = asyncio.create_task(http.post("/v1/completions", json=body, headers=headers["small"]))
            await until(lambda: sum(task.done() for task in burst) == 93)  # the flood makes room for it
            assert not small.done()
            cluster.decodes[0].faults.stall_after = None
            for task in running:
                task.cancel()
            assert (await small).status_code == 200
            await asyncio.gather(*running, return_exceptions=True)
            assert {r.status_code for r in await asyncio.gather(*burst)} == {200, 429}
        text = (await gw.http.get("/metrics", headers=headers["small"])).text
        assert 'baton_rejections_total{by="queue"} 93.0' in text
        assert 'baton_admission_waiting{model="smol"} 0.0' in text
        assert 'baton_tenant_tokens_total{kind="output",tenant="small"} 5.0' in text
        assert gw.gateway.models.first.gate._running == 0
        await gw.settled()


async def test_an_unreachable_deadline_is_rejected_before_the_prefill(smollm2_dir: Path) -> None:
    async with fake_cluster(prefill=0) as cluster:
        pod = await cluster.add(Role.PREFILL, "prefill-0", RatedPod)
        async with rig(cluster, smollm2_dir) as gw:
            await gw.complete(max_tokens=1)
            views = [p.view for p in gw.gateway.pod_table.pods.values() if p.view is not None]
            await until(lambda: any(view.rate_known for view in views))
            prompts = [[i + 1] * 1500 for i in range(20)]  # 0.75 s each
            tasks = [asyncio.create_task(gw.complete(prompt=p, max_tokens=1)) for p in prompts]
            gate = gw.gateway.models.first.gate
            await until(lambda: gate.waiting > 10)
            body = {"model": MODEL, "prompt": [77] * 1500, "max_tokens": 1}
            late = await gw.http.post("/v1/completions", json=body, headers={"x-request-timeout": "4"})
            assert (late.status_code, late.json()["error"]["type"]) == (429, "rate_limit_error")
            assert not [r for r in (*pod.seen.prefilled, *cluster.decodes[0].seen.reserved) if r.prompt_ids[0] == 77]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await until(lambda: (gate.waiting, gate._running) == (0, 0))
            await gw.settled()


async def test_parameters_of_later_tokens_do_not_break_the_prefill(smollm2_dir: Path) -> None:
    """Both pods get the same request, also parameters of later tokens, with max_tokens 1 and more."""
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
    asks: list[dict[str, Any]] = [
        {"min_tokens": 2, "max_tokens": 2},
        {"stop": ["zzz"], "max_tokens": 3},
        {"stop_token_ids": [5], "min_tokens": 3, "max_tokens": 3},
        {"logprobs": True, "top_logprobs": 2, "max_tokens": 1},
        {"tools": [tool], "tool_choice": "required", "max_tokens": 4},
    ]
    async with fake_cluster() as cluster, rig(cluster, smollm2_dir) as gw:
        for fields in asks:
            answer = await gw.chat(**fields)
            assert answer.status_code == 200, answer.text
            assert cluster.prefills[0].seen.prefilled[-1] == cluster.decodes[0].seen.reserved[-1]
        await gw.settled()


async def test_answers_name_their_tier_and_an_overloaded_tier_gets_shorter_ones(
    smollm2_dir: Path, tmp_path: Path
) -> None:
    path = tmp_path / "keys.toml"
    headers = key_file(path, gold={"priority": 10}, batch={"priority": -10})
    settings: dict[str, Any] = {"api_keys": (str(path),), "tier": ("gold:10:0.5:3", "batch:-10:0.1:3")}
    async with fake_cluster() as cluster, rig(cluster, smollm2_dir, **settings) as gw:

        async def asked(who: str, **fields: Any) -> tuple[str | None, str | None, str, int]:
            answer = await ask(gw, headers[who], **fields)
            body, seen = answer.json(), answer.headers
            finish, tokens = body["choices"][0]["finish_reason"], body["usage"]["completion_tokens"]
            return seen["x-baton-tier"], seen.get("x-baton-max-tokens"), finish, tokens

        assert await asked("batch") == ("batch", None, "length", 5)
        assert await asked("gold", priority=-99) == ("batch", None, "length", 5)  # a request may ask for less
        assert await asked("batch", priority=99) == ("batch", None, "length", 5)  # and not for more
        gate = gw.gateway.models.first.gate
        gold, batch = gate._limits.tiers
        gate._short_answers[batch].update(60.0, time.monotonic())  # as after a forecast of a minute
        assert await asked("batch") == ("batch", "3", "length", 3)
        assert await asked("batch", max_tokens=2) == ("batch", None, "length", 2)
        assert await asked("batch", min_tokens=4) == ("batch", "4", "length", 4)
        assert await asked("gold") == ("gold", None, "length", 5)
        text = (await gw.http.get("/metrics", headers=headers["gold"])).text
        assert 'baton_tier_shortened_total{tier="batch"} 2.0' in text
        assert 'baton_tier_waiting{model="smol",tier="gold"} 0.0' in text
        assert gold.name == "gold"
        await gw.settled()
