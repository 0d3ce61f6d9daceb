"""A gateway that cannot serve says why: in the log at once and again, in /ready and in 503 answers."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from cli.stack.supervisor import PortLease
from common.types import Role
from gateway.pods import table
from gateway.pods.table import _Report
from tests.rigs.gateway.gateway_rig import Rig, rig
from tests.rigs.pods.fake_pods import FakeCluster, fake_cluster
from tests.rigs.waiting import until


async def causes(gw: Rig) -> tuple[str, str]:
    """Returns the texts of /ready and of a refused request."""
    ready, answer = await gw.http.get("/ready"), await gw.complete()
    assert (ready.status_code, answer.status_code) == (503, 503)
    return ready.json()["error"]["message"], answer.json()["error"]["message"]


async def test_a_redis_that_does_not_answer(
    smollm2_dir: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(table, "REPORT_PERIOD_S", 1.0)
    monkeypatch.setattr(table, "REPORT_PAUSE_S", 0.5)
    with PortLease() as port, caplog.at_level(logging.INFO, logger="gateway.pods.table"):
        settings = {"pods": (), "redis": f"redis://:secret-word@127.0.0.1:{port.port}/0"}
        async with fake_cluster(0, 0) as cluster, rig(cluster, smollm2_dir, wait=False, **settings) as gw:
            await until(lambda: "prefix index: away" in caplog.text)
            await until(lambda: caplog.text.count("prefix index: away") >= 2)
            await until(lambda: caplog.text.count("cannot be served") >= 2)
            for text in await causes(gw):
                assert "the prefix index (Redis) does not answer" in text
    assert f"127.0.0.1:{port.port}" in caplog.text
    assert "secret-word" not in caplog.text


async def test_no_pods(smollm2_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="gateway.pods.table"):
        async with fake_cluster(0, 0) as cluster, rig(cluster, smollm2_dir, wait=False, pods=("127.0.0.1:1",)) as gw:
            await until(lambda: "cannot be served" in caplog.text)
            for text in await causes(gw):
                assert "other pods: 1 without an answer" in text
                assert "127.0.0.1" not in text
    assert "127.0.0.1:1 is gone" in caplog.text


async def test_a_missing_role_is_named_and_the_end_is_logged(
    smollm2_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="gateway.pods.table"):
        async with fake_cluster(prefill=2, decode=0) as cluster:
            decode = await cluster.add(Role.DECODE, "decode-0")
            decode.ready = False
            async with rig(cluster, smollm2_dir, wait=False) as gw:
                await until(lambda: "2 ready; decode: 1 starting" in gw.gateway.why_unready())
                await until(lambda: "decode: 1 starting" in caplog.text)
                assert "decode: 1 starting" in (await causes(gw))[0]
                decode.ready = True
                await until(lambda: gw.gateway.ready)
                await until(lambda: "can be served" in caplog.text)
                assert gw.gateway.why_unready() == ""


async def test_pods_of_another_model_say_so(smollm2_dir: Path, cluster: FakeCluster) -> None:
    for pod in (*cluster.prefills, *cluster.decodes):
        pod.served_name = "other"
    async with rig(cluster, smollm2_dir, wait=False) as gw:
        await until(lambda: "it serves 'other'" in gw.gateway.why_unready())
        assert "other pods: 2 refused" in (await causes(gw))[1]


def test_a_report_repeats_rarely(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(table.time, "monotonic", lambda: now)
    report = _Report()
    assert not report.due("")
    assert report.due("a")
    assert not report.due("b")  # a new cause waits a little
    now += table.REPORT_PAUSE_S
    assert not report.due("a")
    assert report.due("b")
    now += table.REPORT_PERIOD_S
    assert report.due("b")
    assert report.ended()
    assert not report.ended()
