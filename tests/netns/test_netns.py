"""Gateway, two prefill and two decode pods and Valkey, each on a separate host, as in the overlay cpu-dev.

Commands, environments, ports, probes, grace periods, users and NetworkPolicies are those of the rendered overlay. The
tests use one cluster and run in their order.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio

from cli.stack.certificates import Authority
from tests.k8s.checks import NEEDED, OURS, kv_ports
from tests.k8s.manifests import K8S, ROOT, Peer, Policies, component, environment, main_container, named, render
from tests.k8s.settings import ENGINES
from tests.netns.hosts import NODE, Hosts, run
from tests.netns.kubelet import Kubelet
from tests.rigs.gateway.fake_kube import FakeKube, make_account

pytestmark = pytest.mark.asyncio(loop_scope="module")
MODEL_DIR = "/srv/models/smollm2"
STREAMS = 3
CUT_S = 20.0  #: Longer than the silence that a gateway bears, shorter than what liveness probes bear.


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def kubelet(tmp_path_factory: pytest.TempPathFactory, smollm2_dir: Path) -> AsyncIterator[Kubelet]:
    """All Deployments of the overlay with their replicas, and a client's host."""
    objects = render(K8S / "overlays" / "cpu-dev")
    tmp = tmp_path_factory.mktemp("netns")
    names = tmp / "hosts"
    names.touch()
    names.chmod(0o644)
    hosts = Hosts(names, Policies(objects))
    hosts.begin()
    namespace = named(objects, "Deployment", "baton-gateway")
    assert namespace is not None
    account = make_account(tmp / "account", NODE)
    (account / "namespace").write_text(namespace["metadata"]["namespace"])
    kube = FakeKube(account, host=NODE, port=6443)
    await kube.start()
    hosts.add("client", Peer({"app": "client"}, {"kubernetes.io/metadata.name": "elsewhere"}))
    authority, secrets = Authority.create(), {}
    for role in ("gateway", *ENGINES):
        secrets[f"baton-tls-{role}"] = tmp / "certificates" / role
        authority.issue(secrets[f"baton-tls-{role}"], role, role, days=1)
    running = Kubelet(objects, hosts, kube, tmp, {MODEL_DIR: smollm2_dir}, secrets)
    try:
        await running.run("redis")
        replicas = {c: running.deployment(c)["spec"]["replicas"] for c in ("prefill", "decode", "gateway")}
        assert replicas == {"prefill": 2, "decode": 2, "gateway": 1}
        await asyncio.gather(*(running.run(c) for c in ("prefill", "decode", "gateway") for _ in range(replicas[c])))
        yield running
    finally:
        await running.stop()
        await kube.stop()
        for log in sorted(tmp.glob("*.log")):
            print(f"--- {log.name}\n" + "\n".join(log.read_text(errors="replace").splitlines()[-12:]))


def in_host(name: str, kubelet: Kubelet, *argv: str) -> list[str]:
    """Returns a command line that runs in a host's network with the names of the cluster."""
    script = f'mount --bind {kubelet.hosts.names} /etc/hosts && exec "$@"'
    return ["ip", "netns", "exec", name, "unshare", "--mount", "sh", "-c", script, "sh", *argv]


async def reach(kubelet: Kubelet, source: str, addresses: list[str]) -> set[str]:
    argv = in_host(source, kubelet, sys.executable, "-P", str(ROOT / "tests/netns/reach.py"), *addresses)
    done = await asyncio.to_thread(subprocess.run, argv, capture_output=True, text=True, check=True)
    return set(json.loads(done.stdout))


def gateway_url(kubelet: Kubelet) -> str:
    service = named(kubelet.objects, "Service", "baton-gateway")
    assert service is not None
    return f"http://baton-gateway:{service['spec']['ports'][0]['port']}"


def served_name(kubelet: Kubelet) -> str:
    container = main_container(kubelet.deployment("gateway"))
    return environment(kubelet.objects, container, {})["BATON_SERVED_NAME"]


@asynccontextmanager
async def load(kubelet: Kubelet) -> AsyncIterator[asyncio.StreamReader]:
    """Sends streams from the client's host during the block. All of them must be complete."""
    program = str(ROOT / "tests/netns/load.py")
    argv = in_host(
        "client", kubelet, sys.executable, "-P", program, gateway_url(kubelet), served_name(kubelet), str(STREAMS)
    )
    process = await asyncio.create_subprocess_exec(*argv, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE)
    assert process.stdin is not None
    assert process.stdout is not None
    lines: list[bytes] = []
    reader = asyncio.StreamReader()

    async def count_streams(stdout: asyncio.StreamReader) -> None:
        async for line in stdout:
            lines.append(line)
            reader.feed_data(line)

    counting = asyncio.create_task(count_streams(process.stdout))
    try:
        yield reader
        process.stdin.close()
        await asyncio.wait_for(counting, 120)
        result = json.loads(lines[-1])
        print(f"{result['answers']} streams, {len(result['failures'])} failed")
        assert result["failures"] == []
        assert result["answers"] >= 2 * STREAMS
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
        counting.cancel()


async def whole_streams(reader: asyncio.StreamReader, count: int) -> None:
    """Waits until this many more streams are complete."""
    for _ in range(count):
        await asyncio.wait_for(reader.readline(), 120)


async def test_the_demo_answers(kubelet: Kubelet) -> None:
    async with load(kubelet) as streams:
        await whole_streams(streams, 6)
    for pod in kubelet.pods["prefill"]:
        assert "connected to" in pod.container.tail(1000)
        assert "over tcp" in pod.container.tail(1000)


async def test_kv_went_over_tcp_between_the_hosts(kubelet: Kubelet) -> None:
    hand_offs, received = 0.0, 0.0
    async with httpx.AsyncClient(trust_env=False) as http:
        for pod in [*kubelet.pods["prefill"], *kubelet.pods["decode"]]:
            text = (await http.get(f"http://{pod.address}:9400/metrics")).text  # from the node
            for line in text.splitlines():
                if line.startswith('baton_hand_offs_total{transport="tcp"}'):
                    hand_offs += float(line.split()[-1])
                elif line.startswith("baton_hand_offs_total"):
                    raise AssertionError(line)
                elif line.startswith("baton_transfers_received_total"):
                    received += float(line.split()[-1])
    assert received >= hand_offs >= 1  # the decode pod may compute a repeated prompt by itself


async def test_pods_listen_where_the_overlay_says(kubelet: Kubelet) -> None:
    for name in ENGINES:
        low, high = kv_ports(kubelet.objects, kubelet.deployment(name))
        declared = {port["containerPort"] for port in main_container(kubelet.deployment(name))["ports"]}
        for pod in kubelet.pods[name]:
            listening = set(listeners(pod.name))
            assert declared <= listening
            kv = {port for port in listening if low <= port <= high}
            assert kv
            assert listening == declared | kv


def listeners(host: str) -> Iterator[int]:
    for line in run("ip", "netns", "exec", host, "cat", "/proc/net/tcp", "/proc/net/tcp6").splitlines():
        words = line.split()
        if len(words) > 3 and words[3] == "0A":
            yield int(words[1].rpartition(":")[2], 16)


async def test_only_the_paths_that_are_needed_are_open(kubelet: Kubelet) -> None:
    pods = {pod.name: (name, pod) for name, found in kubelet.pods.items() for pod in found}
    ports: dict[str, dict[str, int]] = {}
    for name in OURS:
        container = main_container(kubelet.deployment(name))
        ports[name] = {port["name"]: port["containerPort"] for port in container["ports"]}
        ports[name] |= {"other": 9999}
        if name in ENGINES:
            ports[name]["kv"] = kv_ports(kubelet.objects, kubelet.deployment(name))[1]
    sources = {"client": "stranger", **{pod: name for pod, (name, _) in pods.items()}}
    wrong = []
    for source, role in sources.items():
        targets = {
            f"{pod.address}:{number}": (name, port)
            for other, (name, pod) in pods.items()
            if other != source
            for port, number in ports[name].items()
        }
        found = await reach(kubelet, source, list(targets))
        for address, (target, port) in targets.items():
            if (address in found) != ((role, target, port) in NEEDED):
                wrong.append(f"{source} -> {target} {port} is {'open' if address in found else 'closed'}")
    assert wrong == []


async def test_no_container_has_rights_that_it_does_not_need(kubelet: Kubelet) -> None:
    for pod in itertools.chain.from_iterable(kubelet.pods.values()):
        status = dict(line.split(":\t", 1) for line in pod.container.status().splitlines() if ":\t" in line)
        user = str(pod.container.pod["securityContext"]["runAsUser"])
        assert set(status["Uid"].split()) == {user}
        assert int(status["CapEff"], 16) == int(status["CapBnd"], 16) == 0
        assert status["NoNewPrivs"] == "1"
        assert status["NSpid"].split()[-1] == "1"


@pytest.mark.parametrize("name", ["prefill", "decode"])
async def test_a_host_whose_packets_are_lost_under_load_loses_no_answer(kubelet: Kubelet, name: str) -> None:
    """Connections stay open and nothing answers: calls, token streams, the KV over TCP and the prefix index."""
    victim = kubelet.pods[name][0]
    async with load(kubelet) as streams:
        await whole_streams(streams, STREAMS)
        with kubelet.hosts.cut_off(victim.name):
            await asyncio.sleep(CUT_S)
        await whole_streams(streams, 4 * STREAMS)
        while "baton_index_registered 1.0" not in await metrics_of(victim):
            await whole_streams(streams, 1)
    assert (victim.restarts, victim.killed) == (0, False), victim.container.tail()


async def metrics_of(pod: Any) -> str:
    async with httpx.AsyncClient(trust_env=False) as http:
        return (await http.get(f"http://{pod.address}:9400/metrics")).text  # from the node


@pytest.mark.parametrize("name", ["prefill", "decode", "gateway", "redis"])
async def test_a_rolling_restart_under_load_loses_nothing(kubelet: Kubelet, name: str) -> None:
    before = {pod.name for pod in kubelet.pods[name]}
    async with load(kubelet) as streams:
        await whole_streams(streams, STREAMS)
        await kubelet.roll(name)
        await whole_streams(streams, 2 * STREAMS)
    assert len(kubelet.pods[name]) == len(before)
    assert not before & {pod.name for pod in kubelet.pods[name]}
    for pod in [*kubelet.gone, *itertools.chain.from_iterable(kubelet.pods.values())]:
        assert (pod.restarts, pod.killed) == (0, False), pod.container.tail()
    assert component(kubelet.deployment(name)) == name


async def test_scaling_in_and_out_under_load_loses_nothing(kubelet: Kubelet) -> None:
    async with load(kubelet) as streams:
        await whole_streams(streams, STREAMS)
        await kubelet.delete(kubelet.pods["decode"][0])
        await whole_streams(streams, STREAMS)
        new = await kubelet.run("decode")
        await whole_streams(streams, 4 * STREAMS)
        async with httpx.AsyncClient(trust_env=False) as http:
            text = (await http.get(f"http://{new.address}:9400/metrics")).text
        assert any(
            line.startswith("baton_transfers_received_total") and float(line.split()[-1]) for line in text.splitlines()
        )
