"""EndpointSliceWatcher: list, watch and faults of the API server; and a gateway that finds its pods by it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from common.errors import ConfigError
from common.types import Role
from gateway.pods.endpoint_slices import EndpointSliceWatcher, KubernetesApi
from gateway.pods.pod import INFO_PERIOD_S
from tests.rigs.gateway.fake_kube import FakeKube, fake_kube, make_account
from tests.rigs.gateway.gateway_rig import Rig, rig
from tests.rigs.pods.fake_pods import FakeCluster, FakePod, fake_cluster
from tests.rigs.waiting import until

SERVICES = ("baton-prefill", "baton-decode")


class Seen:
    """Records the calls of on_change."""

    def __init__(self) -> None:
        self.reported: list[dict[str, bool]] = []

    def __call__(self, endpoints: Any) -> None:
        self.reported.append(dict(endpoints))

    @property
    def last(self) -> dict[str, bool] | None:
        return self.reported[-1] if self.reported else None


@asynccontextmanager
async def watching(kube: FakeKube, **options: Any) -> AsyncIterator[tuple[EndpointSliceWatcher, Seen]]:
    seen = Seen()
    watch = EndpointSliceWatcher(kube.api, SERVICES, seen, **{"backoff_s": (0.05, 0.2), **options})
    await watch.start()
    try:
        yield watch, seen
    finally:
        await watch.stop()


@pytest.fixture
async def kube(tmp_path: Path) -> AsyncIterator[FakeKube]:
    async with fake_kube(tmp_path) as running:
        yield running


async def test_listed_and_changed_slices_are_reported(kube: FakeKube) -> None:
    await kube.put("baton-prefill", {"10.0.0.1": False})
    await kube.put("other-service", {"10.9.9.9": False})
    async with watching(kube) as (watch, seen):
        await until(lambda: seen.last == {"10.0.0.1:7000": False})
        assert watch.up
        await kube.put("baton-decode", {"10.0.0.2": False, "10.0.0.3": False})
        await until(lambda: seen.last is not None and len(seen.last) == 3)
        await kube.put("baton-decode", {"10.0.0.2": True, "10.0.0.3": False})
        await until(lambda: seen.last is not None and seen.last["10.0.0.2:7000"])
        await kube.remove("baton-prefill-abcde")
        await until(lambda: seen.last == {"10.0.0.2:7000": True, "10.0.0.3:7000": False})
        await kube.put("baton-decode", {})
        await until(lambda: seen.last == {})
        assert kube.lists == 1


async def test_a_pod_that_moves_between_slices_stays_and_other_slices_are_ignored(kube: FakeKube) -> None:
    await kube.put("baton-decode", {"10.0.0.1": True}, name="old")
    await kube.put("baton-decode", {"10.0.0.1": False}, name="new")
    await kube.put("baton-decode", {"fd00::7": False}, name="six", addressType="IPv6")
    await kube.put("baton-decode", {"pod.example": False}, name="names", addressType="FQDN")
    await kube.put("baton-decode", {"10.0.0.5": False}, name="no-port", ports=[{"name": "http", "port": 80}])
    await kube.put("baton-decode", {}, name="empty", ports=None)
    async with watching(kube) as (_, seen):
        await until(lambda: seen.last == {"10.0.0.1:7000": False, "[fd00::7]:7000": False})


async def test_a_watch_that_ends_is_continued_from_its_last_version(kube: FakeKube) -> None:
    await kube.put("baton-decode", {"10.0.0.1": False})
    async with watching(kube) as (watch, seen):
        await until(lambda: len(kube.watches) == 1)
        await kube.bookmark()
        await kube.put("baton-decode", {"10.0.0.2": False})
        await until(lambda: seen.last == {"10.0.0.2:7000": False})
        await kube.bookmark()
        at = kube.version
        await until(lambda: watch._version == str(at))
        await kube.end_watches()
        await until(lambda: len(kube.watches) >= 2)
        assert (kube.watches[1], kube.lists) == (at, 1)
        await kube.put("baton-decode", {"10.0.0.3": False})
        await until(lambda: seen.last == {"10.0.0.3:7000": False})


@pytest.mark.parametrize("how", ["status", "event"])
async def test_after_a_forgotten_version_the_slices_are_listed_again(kube: FakeKube, how: str) -> None:
    await kube.put("baton-decode", {"10.0.0.1": False})
    async with watching(kube) as (_, seen):
        await until(lambda: len(kube.watches) == 1)
        kube.slices.clear()  # a change without an event
        if how == "status":
            kube.history, kube.version = 0, kube.version + 5
            await kube.end_watches()
        else:
            await kube.end_watches({"type": "ERROR", "object": {"kind": "Status", "code": 410, "message": "too old"}})
        await until(lambda: seen.last == {})
        assert kube.lists == 2


@pytest.mark.parametrize("status", [401, 403, 429, 500, 503])
async def test_known_addresses_stay_while_the_server_refuses(kube: FakeKube, status: int) -> None:
    await kube.put("baton-decode", {"10.0.0.1": False})
    async with watching(kube) as (watch, seen):
        await until(lambda: len(kube.watches) == 1)
        kube.refuse = status
        await kube.break_connections()
        await until(lambda: not watch.up)
        assert seen.reported == [{"10.0.0.1:7000": False}]
        await kube.put("baton-decode", {"10.0.0.2": False})
        kube.refuse = 0
        await until(lambda: seen.last == {"10.0.0.2:7000": False})
        assert watch.up


async def test_a_server_that_was_away_is_found_again(kube: FakeKube) -> None:
    async with watching(kube) as (watch, seen):
        await until(lambda: watch.up)
        await kube.stop()
        await until(lambda: not watch.up)
        await kube.put("baton-decode", {"10.0.0.4": False})
        await kube.start()
        await until(lambda: seen.last == {"10.0.0.4:7000": False})


async def test_a_connection_that_died_silently_is_given_up(kube: FakeKube, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.pods.endpoint_slices.SILENCE_S", 0.0)
    await kube.put("baton-decode", {"10.0.0.1": False})
    async with watching(kube, watch_s=1) as (_, seen):
        await until(lambda: len(kube.watches) >= 2)
        assert seen.reported == [{"10.0.0.1:7000": False}]


async def test_a_renewed_token_is_read(kube: FakeKube) -> None:
    async with watching(kube) as (watch, _):
        await until(lambda: watch.up and len(kube.watches) == 1)
        kube.token = "token-2"
        (kube.account / "token").write_text("token-2\n")
        await kube.end_watches()
        await until(lambda: len(kube.watches) >= 2)
        assert watch.up


async def test_a_server_with_an_untrusted_certificate_gets_no_request(kube: FakeKube, tmp_path: Path) -> None:
    make_account(tmp_path / "other")
    seen = Seen()
    watch = EndpointSliceWatcher(KubernetesApi(kube.api.url, tmp_path / "other"), SERVICES, seen, backoff_s=(0.05, 0.1))
    await watch.start()
    await asyncio.sleep(0.5)
    await watch.stop()
    assert (kube.lists, seen.reported, watch.up) == (0, [], False)


@pytest.mark.parametrize("raw", ["{}", "[]", '{"type": "ADDED", "object": {"metadata": {}}}', "no JSON"])
async def test_invalid_events_do_not_end_the_watch(kube: FakeKube, raw: str) -> None:
    kube.garble = raw
    async with watching(kube) as (_, seen):
        await until(lambda: len(kube.watches) == 1)
        await kube.put("baton-decode", {"10.0.0.1": False})
        await until(lambda: kube.lists >= 2)  # which has it
        await until(lambda: seen.last == {"10.0.0.1:7000": False})


def test_outside_a_cluster_discovery_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="inside a cluster"):
        KubernetesApi.in_cluster({})
    with pytest.raises(ConfigError, match="service account"):
        KubernetesApi.in_cluster({"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, tmp_path)
    (tmp_path / "token").write_text("t")
    env = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "KUBERNETES_SERVICE_PORT": "6443"}
    assert KubernetesApi.in_cluster(env, tmp_path).url == "https://10.0.0.1:6443"
    assert KubernetesApi.in_cluster({"KUBERNETES_SERVICE_HOST": "fd00::1"}, tmp_path).url == "https://[fd00::1]:443"


# -- the gateway ------------------------------------------------------------------------------------------------------


async def place(kube: FakeKube, pod: FakePod, *, leaving: bool = False) -> None:
    """Sets a slice for one pod, since fake pods share a host and differ in the port."""
    service = "baton-prefill" if pod.role is Role.PREFILL else "baton-decode"
    await kube.put(service, {"127.0.0.1": leaving}, name=pod.name, port=pod.port)


@pytest.fixture
async def cluster(kube: FakeKube) -> AsyncIterator[FakeCluster]:
    async with fake_cluster(2, 2) as running:
        for pod in running.pods.values():
            await place(kube, pod)
        yield running


@pytest.fixture
async def gw(kube: FakeKube, cluster: FakeCluster, smollm2_dir: Path) -> AsyncIterator[Rig]:
    """Runs a gateway that finds its pods only by EndpointSlices."""
    async with rig(cluster, smollm2_dir, pods=(), discovery="k8s", api=kube.api) as running:
        yield running


class SteadyClients:
    """Sends requests, a few at a time, until the context ends. Each must get its whole answer."""

    def __init__(self, gw: Rig, at_once: int = 4) -> None:
        self._gw = gw
        self._stopping = False
        self.answers = 0
        self._tasks = [asyncio.create_task(self._run()) for _ in range(at_once)]

    async def _run(self) -> None:
        while not self._stopping:
            status, events = await self._gw.stream("completions", max_tokens=6)
            assert status == 200, events
            assert events[-1] == "[DONE]"
            self.answers += 1

    async def __aenter__(self) -> SteadyClients:
        return self

    async def __aexit__(self, *_: object) -> None:
        self._stopping = True
        await asyncio.gather(*self._tasks)

    async def more(self, count: int = 20) -> None:
        goal = self.answers + count
        await until(lambda: self.answers >= goal or any(task.done() for task in self._tasks))


@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
async def test_a_new_pod_takes_traffic_within_three_seconds_of_ready(
    gw: Rig, kube: FakeKube, cluster: FakeCluster, role: Role
) -> None:
    async with SteadyClients(gw):
        pod = FakePod(cluster, "new", role)
        pod.ready = False
        await pod.start()
        await place(kube, pod)
        asked = pod.seen.prefilled if role is Role.PREFILL else pod.seen.reserved
        await until(lambda: pod.seen.infos >= 2)
        assert not asked
        pod.ready, looks = True, pod.seen.infos
        await until(lambda: bool(asked))
        assert (pod.seen.infos - looks) * INFO_PERIOD_S < 3.0


async def test_a_terminating_pod_gets_no_new_request_and_finishes_the_running_ones(
    gw: Rig, kube: FakeKube, cluster: FakeCluster
) -> None:
    leaver, stays = cluster.decodes
    leaver.faults.token_delay_s = 0.05
    running = [asyncio.create_task(gw.stream("completions", max_tokens=40)) for _ in range(8)]
    await until(lambda: len(leaver.seen.reserved) + len(stays.seen.reserved) == 8)
    assert leaver.seen.reserved
    async with SteadyClients(gw) as load:
        await place(kube, leaver, leaving=True)
        await until(lambda: gw.gateway.pod_table.pods[leaver.address].terminating)
        reserved = len(leaver.seen.reserved)
        await load.more()
        assert len(leaver.seen.reserved) == reserved
        for status, events in await asyncio.gather(*running):
            assert status == 200
            assert events[-1] == "[DONE]"
        await kube.remove(leaver.name)
        await leaver.stop()
        await load.more()
    assert gw.gateway.ready


@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
async def test_a_rolling_upgrade_loses_no_request(gw: Rig, kube: FakeKube, cluster: FakeCluster, role: Role) -> None:
    async with SteadyClients(gw) as load:
        for old in list(cluster.prefills if role is Role.PREFILL else cluster.decodes):
            new = await cluster.add(role, f"{old.name}-new")
            await place(kube, new)
            await until(
                lambda new=new: (
                    new.address in gw.gateway.pod_table.pods and gw.gateway.pod_table.pods[new.address].serving
                )
            )
            await place(kube, old, leaving=True)
            old.draining = True
            await until(lambda old=old: not gw.gateway.pod_table.pods[old.address].serving)
            await until(lambda old=old: old.idle)
            await kube.remove(old.name)
            await old.stop()
            await load.more()


async def test_pods_stay_while_the_api_server_is_away(gw: Rig, kube: FakeKube, cluster: FakeCluster) -> None:
    await kube.stop()
    for _ in range(10):
        assert (await gw.complete(max_tokens=3)).status_code == 200
    gone, stays = cluster.decodes
    await gone.stop()
    await until(lambda: not gw.gateway.pod_table.pods[gone.address].alive)
    assert (await gw.complete(max_tokens=3)).status_code == 200
    await kube.remove(gone.name)
    await kube.start()
    await until(lambda: gw.gateway.pod_table.pods[gone.address].terminating)
    assert gw.gateway.pod_table.decode_pods()[0].address == stays.address


async def test_a_pod_that_no_source_names_is_forgotten(
    gw: Rig, kube: FakeKube, cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.pods.table.FORGET_S", 0.5)
    gone = cluster.decodes[0]
    await kube.remove(gone.name)
    await gone.stop()
    await until(lambda: gone.address not in gw.gateway.pod_table.pods)
    await place(kube, cluster.decodes[1], leaving=True)
    await until(lambda: not gw.gateway.ready)
    await place(kube, cluster.decodes[1])
    await until(lambda: gw.gateway.ready)
