"""Load tests against a gateway over fake pods, by both protocols, and the command from end to end."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from common.errors import ConfigError, Overloaded, Unavailable
from common.types import ValidRequest
from gateway.admission.api_keys import create_key
from gateway.admission.key_store import KeyFile
from loadtest.client.grpc_client import GrpcClient
from loadtest.client.rest_client import RestClient
from loadtest.config import LoadConfig
from loadtest.report import figures
from loadtest.report.figures import build_document
from loadtest.run import LoadRun
from loadtest.runner import LoadRunner
from tests.rigs.gateway.gateway_rig import MODEL, Rig, rig
from tests.rigs.pods.fake_pods import FakeCluster
from tests.rigs.waiting import until

PROTOCOLS = ("rest", "grpc")


@pytest_asyncio.fixture
async def gw(cluster: FakeCluster, smollm2_dir: Path, unused_tcp_port: int) -> AsyncIterator[Rig]:
    """A gateway with REST and gRPC. Fails the test if requests remain afterwards."""
    async with rig(cluster, smollm2_dir, grpc_port=unused_tcp_port) as r:
        yield r
        await r.settled()


def config(gw: Rig, protocol: str, **flags: Any) -> LoadConfig:
    url = gw.url if protocol == "rest" else f"127.0.0.1:{gw.server.grpc_port}"
    return LoadConfig.of({"url": url, "protocol": protocol, "output_tokens": "8", "input_tokens": "20", **flags})


async def run(gw: Rig, protocol: str, **flags: Any) -> LoadRun:
    asked = config(gw, protocol, **flags)
    client = RestClient(asked) if protocol == "rest" else GrpcClient(asked)
    try:
        return await asyncio.wait_for(LoadRunner(asked, client).execute(), 120)
    finally:
        await client.close()


def prompts(cluster: FakeCluster) -> list[ValidRequest]:
    return cluster.decodes[0].seen.reserved


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("endpoint", ["chat", "completions"])
async def test_an_open_loop_measures_every_token(gw: Rig, cluster: FakeCluster, protocol: str, endpoint: str) -> None:
    cluster.decodes[0].faults.token_delay_s = 0.01
    done = await run(gw, protocol, endpoint=endpoint, rate="60", requests="12", slo="ttft=20s,itl=20s", warmup="2")
    document = build_document(done, "1")
    assert document["model"] == MODEL
    assert document["requests"] | {"sent": 12, "answered": 12, "failed": 0} == document["requests"], document["errors"]
    assert document["tokens"]["finish"] == {"length": 12}
    assert document["tokens"]["output"] == 12 * 8
    assert 0 < document["latencies_ms"]["itl"]["count"] <= 12 * 7  # a slow gateway sends several tokens in one event
    assert document["latencies_ms"]["tpot"]["max"] >= 9
    assert document["goodput"]["share"] == 1.0
    assert len(prompts(cluster)) == 14
    assert all(r.sampling.max_tokens == 8 and r.sampling.temperature == 0 for r in prompts(cluster))
    if endpoint == "completions":
        assert document["tokens"]["prompt"] == 12 * 20


@pytest.mark.parametrize("protocol", PROTOCOLS)
async def test_prompts_share_their_system_prompt_as_the_pods_see_them(
    gw: Rig, cluster: FakeCluster, protocol: str
) -> None:
    await run(gw, protocol, endpoint="completions", users="2", requests="6", prefix_tokens="40", prefixes="1")
    seen = [r.prompt_ids for r in prompts(cluster)]
    assert len({tuple(ids[:40]) for ids in seen}) == 1
    assert len({tuple(ids[40:]) for ids in seen}) == 6
    assert {len(ids) for ids in seen} == {60}


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("endpoint", ["chat", "completions"])
async def test_conversations_go_on_from_what_was_answered(
    gw: Rig, cluster: FakeCluster, protocol: str, endpoint: str
) -> None:
    done = await run(
        gw,
        protocol,
        endpoint=endpoint,
        prompts="text" if endpoint == "chat" else "ids",
        users="1",
        requests="3",
        turns="3",
    )
    assert [r.turn for r in done.records] == [0, 1, 2]
    first, second, third = (r.prompt_ids for r in prompts(cluster))
    assert len(first) < len(second) < len(third)
    if endpoint == "completions":
        assert second[: len(first)] == first
        assert third[: len(second)] == second
    if protocol == "grpc" and endpoint == "completions":  # the only API that returns token ids
        answer = [66 + (sum(first) + 5 * i) % 26 for i in range(8)]
        assert list(second[20:28]) == answer


@pytest.mark.parametrize("protocol", PROTOCOLS)
async def test_refusals_are_counted_by_kind(gw: Rig, cluster: FakeCluster, protocol: str) -> None:
    cluster.decodes[0].faults.reserve_error = Overloaded("full", retry_after_s=1.0)
    document = build_document(await run(gw, protocol, rate="100", requests="4"), "1")
    assert document["requests"]["failed"] == 4
    (error,) = document["errors"]
    assert error["count"] == 4
    assert error["kind"] == (
        "grpc RESOURCE_EXHAUSTED Overloaded" if protocol == "grpc" else "http 429 rate_limit_exceeded"
    )
    assert "full" in error["messages"][0]


@pytest.mark.parametrize("protocol", PROTOCOLS)
async def test_deadlines_end_requests(gw: Rig, cluster: FakeCluster, protocol: str) -> None:
    cluster.decodes[0].faults.stall_after = 2
    document = build_document(await run(gw, protocol, rate="100", requests="2", deadline_s="2"), "1")
    assert document["requests"]["failed"] == 2
    assert document["errors"][0]["kind"].startswith("grpc DEADLINE_EXCEEDED" if protocol == "grpc" else "stream ")


@pytest.mark.parametrize("protocol", PROTOCOLS)
async def test_aborted_requests_leave_nothing_on_the_pods(gw: Rig, cluster: FakeCluster, protocol: str) -> None:
    cluster.decodes[0].faults.token_delay_s = 0.02
    document = build_document(
        await run(gw, protocol, rate="100", requests="10", abort_share="1", output_tokens="50"), "1"
    )
    assert document["requests"] | {"aborted": 10, "failed": 0, "answered": 0} == document["requests"]
    await gw.settled()


@pytest.mark.parametrize("protocol", PROTOCOLS)
async def test_the_api_key_is_sent(
    cluster: FakeCluster, smollm2_dir: Path, unused_tcp_port: int, tmp_path: Path, protocol: str
) -> None:
    key, record = create_key("team")
    keys = tmp_path / "keys.toml"
    KeyFile(keys).add(record)
    async with rig(cluster, smollm2_dir, api_keys=(str(keys),), grpc_port=unused_tcp_port) as gw:
        done = await run(gw, protocol, rate="100", requests="3", api_key=[key])
        assert [r.error for r in done.records] == [""] * 3
        with pytest.raises(Unavailable):
            await run(gw, protocol, rate="100", requests="3")


async def command(*argv: str) -> tuple[int, str, str]:
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "loadtest", *argv, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    out, err = await asyncio.wait_for(child.communicate(), 200)
    assert child.returncode is not None
    return child.returncode, out.decode(), err.decode()


async def test_the_command_runs_reports_and_compares(gw: Rig, tmp_path: Path) -> None:
    a, b, html = (tmp_path / name for name in ("a.json", "b.json", "report.html"))
    shared = ("--url", gw.url, "--requests", "10", "--output-tokens", "4", "--slo", "ttft=20s", "--quiet")
    code, out, err = await command(*shared, "--rate", "50", "--out", str(a), "--html", str(html), "--attainment", "0.9")
    assert (code, err) == (0, "")
    assert "10 requests" in out
    assert html.read_text().startswith("<!doctype html>")
    code, out, _ = await command(*shared, "--users", "2", "--out", str(b), "--json")
    assert code == 0
    assert json.loads(out)["requests"]["answered"] == 10
    code, out, _ = await command("--compare", str(a), str(b), "--html", str(html))
    assert code == 0
    assert "ttft p50" in out
    assert "users" in out
    assert "Compared" in html.read_text()


async def test_rates_rise_until_the_objective_is_missed(gw: Rig, cluster: FakeCluster, tmp_path: Path) -> None:
    shared = ("--url", gw.url, "--requests", "5", "--output-tokens", "4", "--quiet", "--slo", "ttft=20s,e2e=1s")
    cluster.decodes[0].faults.token_delay_s = 0.1
    limits = ("--max-concurrency", "1", "--arrivals", "constant")  # fewer than three requests per second
    code, out, err = await command(*shared, *limits, "--rates", "2,200,400", "--out", str(tmp_path / "s.json"))
    assert (code, err) == (0, "")
    assert "Highest rate that met the objectives: 2 requests/s" in out
    kept, missed, never = (tmp_path / f"s-{rate}.json" for rate in (2, 200, 400))
    assert [figures.read(path)["config"]["seed"] for path in (kept, missed)] == [0, 1]
    with pytest.raises(ConfigError, match="cannot be read"):
        figures.read(never)
    code, out, _ = await command(*shared, *limits, "--rates", "300,400")
    assert code == 1
    assert "The first rate already missed" in out


async def test_the_command_fails_where_the_server_does(gw: Rig, cluster: FakeCluster, tmp_path: Path) -> None:
    cluster.decodes[0].faults.token_delay_s = 0.05
    shared = ("--url", gw.url, "--rate", "50", "--requests", "3", "--output-tokens", "4", "--quiet")
    assert (await command(*shared, "--slo", "e2e=1ms", "--attainment", "0.5"))[0] == 1
    cluster.decodes[0].faults.reserve_error = Overloaded("full", retry_after_s=1.0)
    code, out, _ = await command(*shared)
    assert code == 1
    assert "3 x http 429" in out
    code, _, err = await command("--url", "http://127.0.0.1:1", "--rate", "1")
    assert code == 1
    assert err.startswith("baton: no server answers at http://127.0.0.1:1 ")


async def test_an_interrupted_command_reports_the_finished_requests(gw: Rig, cluster: FakeCluster) -> None:
    cluster.decodes[0].faults.stall_after = 1
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "loadtest", "--url", gw.url, "--users", "2", "--duration-s", "60", "--quiet"),
        stdout=asyncio.subprocess.PIPE,
    )
    await until(lambda: len(prompts(cluster)) == 2)
    child.send_signal(signal.SIGINT)
    out, _ = await asyncio.wait_for(child.communicate(), 120)
    assert child.returncode == 130
    assert b"Stopped early: 2 requests were in flight" in out
