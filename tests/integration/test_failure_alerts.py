"""Alerts on the metrics of real gateways and pods: an alert of docs/failures.md fires after its failure, not before.

A test causes its failure once and reads the metrics before and after it. `fired` makes series of half an hour of them,
in which the failure repeats every minute: each counter grows by the same amount again. With `once` it does not repeat.
Failures that take too long for a test here have made-up series in tests/unit/test_alerts.py.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest
from prometheus_client.parser import text_string_to_metric_families

from cli.stack.certificates import Authority
from cli.stack.valkey import EmbeddedValkey
from common.errors import BatonError, InternalError, TransferFailed, Unavailable
from common.pb import decode_pb2
from common.tls import CERT_FILE, KEY_FILE, TlsFiles
from common.types import Role
from common.wire import request_to_pb
from gateway.telemetry.metrics import GatewayMetrics
from kv_transfer.backend.loopback import LoopbackFault
from tests.rigs.alert_rules import Rule
from tests.rigs.gateway.gateway_rig import Rig, rig
from tests.rigs.index.index_entry import IndexEntry
from tests.rigs.pods.fake_pods import FakeCluster, fake_cluster
from tests.rigs.pods.harness import BLOCK, Cluster, PodClient, gateway_channel, prompt_of, request
from tests.rigs.promql import Series, evaluate
from tests.rigs.waiting import until

BASE, BAD = 15, 15  #: Minutes before and after the failure.
#: Alerts about the machine that runs the test. They do not count.
OF_THE_MACHINE = {"BatonHostMemoryHigh", "BatonFilesHigh", "BatonGatewayCpuHigh"}
#: Alerts that compare with yesterday, or that need a scrape of the whole installation. They do not count.
OF_THE_INSTALLATION = {"BatonThroughputLow", "BatonPodsAbsent", "BatonGatewayAbsent"}

Sample = tuple[str, frozenset[tuple[str, str]]]  #: Name and labels.
Scrape = Mapping[Sample, float]
COUNTERS = ("_total", "_count", "_bucket", "_sum")  #: Names of counters end with one of these.


def scrape(**instances: bytes) -> Scrape:
    """Returns the samples of expositions. The names of the arguments become the label `instance`."""
    found = {}
    for instance, text in instances.items():
        for family in text_string_to_metric_families(text.decode()):
            for sample in family.samples:
                labels = frozenset({**sample.labels, "instance": instance}.items())
                found[sample.name, labels] = sample.value
    return found


def fired(before: Scrape, after: Scrape, *, once: bool = False, only: str | None = None) -> set[str]:
    """Returns the alerts that fire within BASE + BAD minutes, if the failure happens after BASE minutes.

    Args:
        before, after: metrics before and after the failure.
        once: the failure does not repeat.
        only: the only alert that is evaluated; None for all.
    """
    stored, since, firing = Series(), {}, set()
    rules = [rule for rule in Rule.all() if rule.records or only in (None, rule.name)]
    wanted = {rule.name: rule for rule in rules}
    for minute in range(BASE + BAD + 1):
        at, bad = 60.0 * minute, minute - BASE
        for name, labels in before.keys() | after.keys():
            first, last = before.get((name, labels)), after.get((name, labels))
            value = first if bad <= 0 else last
            if value is not None and name.endswith(COUNTERS):
                start = first or 0.0
                value = start + ((last or start) - start) * (0 if bad <= 0 else 1 if once else bad)
            if value is not None:
                stored.add(name, labels, at, value)
        for rule in wanted.values():
            found = evaluate(rule.expr, stored, at)
            assert isinstance(found, dict)
            if rule.records:
                for kept, number in found.items():
                    stored.add(rule.name, kept, at, number)
                continue
            for gone in [key for key in since if key[0] == rule.name and key[1] not in found]:
                del since[gone]
            for kept in found:
                if at - since.setdefault((rule.name, kept), at) >= rule.for_s:
                    firing.add(rule.name)
    return firing - OF_THE_MACHINE - OF_THE_INSTALLATION


def check(alert: str, before: Scrape, after: Scrape, *, once: bool = False) -> None:
    """Asserts that the alert fires after the failure and not before it."""
    assert fired(before, before, only=alert) == set()
    assert fired(before, after, once=once, only=alert) == {alert}


# -- gateways


async def metrics_of(gw: Rig) -> Scrape:
    return scrape(gateway=(await gw.http.get("/metrics")).content)


@asynccontextmanager
async def served(model_dir: Path, **settings: Any) -> AsyncIterator[tuple[Rig, FakeCluster, Scrape]]:
    """Yields a gateway over fake pods that has answered some requests, the pods, and the metrics at that time."""
    async with fake_cluster() as cluster, rig(cluster, model_dir, **settings) as gw:
        for _ in range(3):
            assert (await gw.complete(max_tokens=8)).status_code == 200
        await gw.settled()
        yield gw, cluster, await metrics_of(gw)


async def test_a_healthy_gateway_and_healthy_pods_fire_no_alert(smollm2_dir: Path, model_dir: Path) -> None:
    async with served(smollm2_dir) as (gw, _, first), Cluster.start(model_dir) as pods:
        before = {**first, **pod_metrics(pods)}
        for i in range(3):
            assert (await gw.complete(max_tokens=8)).status_code == 200
            await pods.generate(request(prompt_of(20, seed=i)))
        for pod in pods.pods:
            await pod.settled()
        after = {**await metrics_of(gw), **pod_metrics(pods)}
    # These alerts are about speed, and the CPUs of tests are slow.
    assert fired(before, after) - {"BatonTtftHigh", "BatonItlHigh", "BatonHandOffExposed"} == set()


async def test_no_pods(smollm2_dir: Path) -> None:
    async with served(smollm2_dir) as (gw, cluster, before):
        cluster.decodes[0].ready = False
        await until(lambda: not gw.gateway.ready)
        check("BatonNoPods", before, await metrics_of(gw))


async def test_a_pod_that_does_not_fit(smollm2_dir: Path) -> None:
    async with served(smollm2_dir) as (gw, cluster, before):
        cluster.decodes[0].served_name = "other"
        await until(lambda: any(pod.state == "refused" for pod in gw.gateway.pod_table.pods.values()))
        after = await metrics_of(gw)
    check("BatonPodsRefused", before, after)
    assert fired(before, after, only="BatonPodsGone") == set()


async def test_a_pod_that_does_not_answer(smollm2_dir: Path) -> None:
    async with served(smollm2_dir) as (gw, cluster, before):
        await cluster.decodes[0].stop()
        await until(lambda: any(pod.state == "gone" for pod in gw.gateway.pod_table.pods.values()))
        check("BatonPodsGone", before, await metrics_of(gw))


async def test_second_attempts(smollm2_dir: Path) -> None:
    async with served(smollm2_dir) as (gw, cluster, before):
        faults = cluster.prefills[0].faults
        faults.prefill_error, faults.prefill_errors = Unavailable("the pod is leaving"), 1
        assert (await gw.complete(max_tokens=4)).status_code == 200
        check("BatonRetries", before, await metrics_of(gw))


async def test_answers_that_no_pod_continues(smollm2_dir: Path) -> None:
    async with served(smollm2_dir) as (gw, cluster, before):
        cluster.decodes[0].faults.decode_error = Unavailable("the pod lost its sequences")
        cluster.decodes[0].faults.token_delay_s = 1.0  # the error comes after the prefill pod's first token
        status, events = await gw.stream("completions", max_tokens=8)
        assert status == 200
        assert "error" in events[-2]
        await gw.settled()
        check("BatonResumesFail", before, await metrics_of(gw), once=True)


async def test_faults_of_the_server(smollm2_dir: Path) -> None:
    async with served(smollm2_dir) as (gw, cluster, before):
        cluster.prefills[0].faults.prefill_error = TransferFailed("the link is broken")
        assert (await gw.complete(max_tokens=4)).status_code >= 500
        check("BatonErrors", before, await metrics_of(gw))


async def test_refused_requests(smollm2_dir: Path) -> None:
    async with served(smollm2_dir, max_inflight=1) as (gw, cluster, before):
        cluster.prefills[0].faults.prefill_delay_s = 0.5
        answers = await asyncio.gather(*(gw.complete(max_tokens=4) for _ in range(4)))
        assert 429 in {answer.status_code for answer in answers}
        await gw.settled()
        check("BatonRejections", before, await metrics_of(gw))


async def test_clients_that_leave(smollm2_dir: Path) -> None:
    async with served(smollm2_dir) as (gw, cluster, before):
        cluster.decodes[0].faults.stall_after = 2
        body = {"model": "smol", "prompt": "Hello", "stream": True, "max_tokens": 8}
        async with gw.http.stream("POST", "/v1/completions", json=body) as response:
            async for line in response.aiter_lines():
                if line.startswith("data: "):
                    break
        await gw.settled()
        check("BatonClientsLeave", before, await metrics_of(gw))


async def test_an_index_that_is_away(smollm2_dir: Path, tmp_path: Path) -> None:
    valkey = EmbeddedValkey(0, tmp_path, password="")
    url = await valkey.start()
    async with fake_cluster() as cluster:
        entries = [IndexEntry(url, pod) for pod in cluster.pods.values()]
        try:
            for entry in entries:
                await entry.index.start()
            async with rig(cluster, smollm2_dir, redis=url) as gw:
                await until(lambda: gw.gateway.pod_table.index_up)
                await gw.complete(max_tokens=4)
                before = await metrics_of(gw)
                await valkey.stop()
                await until(lambda: not gw.gateway.pod_table.index_up)
                assert (await gw.complete(max_tokens=4)).status_code == 200
                check("BatonIndexAway", before, await metrics_of(gw))
        finally:
            for entry in entries:
                await entry.index.stop()
            await valkey.stop()


def seconds_left(files: TlsFiles) -> float:
    """Returns when the certificate expires, in the time of `fired`: there the present is 0."""
    return files.expires_at() - time.time()


def test_a_certificate_that_expires(tmp_path: Path) -> None:
    metrics, scrapes = GatewayMetrics(), []
    for days in (90, 3):
        directory = tmp_path / str(days)
        Authority.create().issue(directory, "gateway", "gateway", days)
        certificate = TlsFiles(directory / CERT_FILE, directory / KEY_FILE)
        metrics.base.certificates["cluster"] = partial(seconds_left, certificate)
        scrapes.append(scrape(gateway=metrics.base.exposition()))
    check("BatonCertificateExpires", *scrapes)


# -- pods


def pod_metrics(pods: Cluster) -> Scrape:
    texts = {pod.runtime.config.role.value: pod.runtime.metrics.metrics.exposition() for pod in pods.pods}
    return scrape(**texts)


async def test_calls_with_another_secret(model_dir: Path) -> None:
    async with Cluster.start(model_dir, prefill=0) as pods:
        before, pod = pod_metrics(pods), pods.decode.runtime
        stranger = PodClient(gateway_channel(pod.address, pod.name, secret="another secret"))
        message = decode_pb2.ReserveRequest(request=request_to_pb(request(prompt_of(5))), gateway_id="stranger")
        for _ in range(4):
            with pytest.raises(grpc.aio.AioRpcError, match="signature"):
                await stranger.decode.Reserve(message)
        await stranger.channel.close()
        check("BatonUnauthenticated", before, pod_metrics(pods))


async def test_hand_offs_that_fail(model_dir: Path) -> None:
    async with Cluster.start(model_dir, check=False) as pods:
        await pods.generate(request(prompt_of(20)))
        before = pod_metrics(pods)
        pods.fabric.on_write = lambda _source, _peer, _count: LoopbackFault(fail="the link is broken")
        for i in range(4):
            with pytest.raises(BatonError):
                await pods.generate(request(prompt_of(40, seed=i + 1)), remote_only=True)
        check("BatonTransfersFail", before, pod_metrics(pods))


async def test_an_inconsistent_pool(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pod.health.CHECK_PERIOD_S", 0.02)
    async with Cluster.start(model_dir, prefill=0, check=False) as pods:
        before, runtime = pod_metrics(pods), pods.decode.runtime
        runtime.engine.pool._free.append(0)
        await until(lambda: not runtime.info().ready)
        check("BatonPoolBroken", before, pod_metrics(pods))


async def test_a_host_tier_that_failed(model_dir: Path) -> None:
    block_bytes = 2 * 2 * 2 * BLOCK * 16 * 4
    async with Cluster.start(
        model_dir, prefill=0, role=Role.BOTH, decode_config={"host_cache": 50 * block_bytes}
    ) as pods:
        before, tier = pod_metrics(pods), pods.decode.runtime.engine.pool.host_tier
        assert tier is not None
        tier.close(InternalError("page-locked memory is gone"))
        check("BatonHostTierBroken", before, pod_metrics(pods))


@pytest.mark.usefixtures("quick_index")
async def test_a_pod_that_the_index_does_not_have(model_dir: Path, tmp_path: Path) -> None:
    valkey = EmbeddedValkey(0, tmp_path, password="")
    url = await valkey.start()
    try:
        async with Cluster.start(model_dir, prefill=0, role=Role.BOTH, decode_config={"redis": url}) as pods:
            index = pods.decode.runtime._index
            assert index is not None
            await until(lambda: index.registered)
            before = pod_metrics(pods)
            await valkey.stop()
            await until(lambda: not index.registered)
            check("BatonPodNotInIndex", before, pod_metrics(pods))
    finally:
        await valkey.stop()


async def test_steps_without_memory(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with Cluster.start(model_dir, prefill=0, role=Role.BOTH) as pods:
        before, runner = pod_metrics(pods), pods.decode.runtime.engine.runner

        def fail(*_: object, **__: object) -> None:
            raise MemoryError

        monkeypatch.setattr(runner, "launch", fail)
        with pytest.raises(InternalError, match="out of memory"):
            await pods.generate(request(prompt_of(9)))
        check("BatonOutOfMemory", before, pod_metrics(pods), once=True)
