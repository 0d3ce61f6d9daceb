"""Two pods on two hosts: connections that a firewall drops in silence, and KV staged in host memory of one machine.

The processes are separate in network and process namespaces, like containers.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
import time
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from tests.k8s.manifests import ROOT, Peer, Policies
from tests.netns.hosts import Hosts, run

PROBE_S = 1.0
DROP = "table inet cut { chain input { type filter hook input priority -10; tcp dport != 22 drop; } }"


class Host:
    """A pod process on a host."""

    def __init__(self, name: str, address: str, process: asyncio.subprocess.Process) -> None:
        self.name, self.address, self.process = name, address, process
        self.pod_address = ""

    async def ask(self, op: str, **order: Any) -> dict[str, Any]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps({"op": op, **order}).encode() + b"\n")
        answer: dict[str, Any] = json.loads(await asyncio.wait_for(self.process.stdout.readline(), 60))
        return answer


class Machine:
    """Hosts with a pod each."""

    def __init__(self, tmp: Path) -> None:
        names = tmp / "hosts"
        names.touch()
        self.hosts = Hosts(names, Policies([]))
        self.hosts.begin()
        self.running: list[Host] = []

    async def start(self, role: str, name: str, env: Mapping[str, str], *, own_shm: bool = False) -> Host:
        address = self.hosts.add(name, Peer({"app": name}, {}))
        script = 'mount -t tmpfs tmpfs /dev/shm && exec "$@"' if own_shm else 'exec "$@"'
        argv = [
            *("ip", "netns", "exec", name, "unshare", "--mount", "--pid", "--ipc", "--fork", "--kill-child"),
            *("--mount-proc", "--propagation", "private", "sh", "-c", script, "sh"),
            *(sys.executable, "-m", "tests.rigs.transfer.transfer_child", role, name, "0"),
        ]
        process = await asyncio.create_subprocess_exec(
            *argv,
            cwd=ROOT,
            env={**os.environ, "TRANSFER_HOST": address, "UCX_NET_DEVICES": "eth0", "TRANSFER_SEED": role, **env},
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        host = Host(name, address, process)
        self.running.append(host)
        assert process.stdout is not None
        host.pod_address = json.loads(await asyncio.wait_for(process.stdout.readline(), 120))["address"]
        return host

    async def stop(self) -> None:
        for host in self.running:
            with contextlib.suppress(ProcessLookupError):
                host.process.kill()
            await host.process.wait()


@pytest_asyncio.fixture
async def machine(tmp_path: Path) -> AsyncIterator[Machine]:
    machine = Machine(tmp_path)
    yield machine
    await machine.stop()
    for name in list(machine.hosts.peers):
        machine.hosts.remove(name)
    run("umount", "/run/netns")
    run("ip", "link", "delete", "br0")


async def hand_over(prefill: Host, decode: Host, request_id: str, blocks: list[int]) -> None:
    """Sends blocks and compares them. The pods have different content before."""
    answer = await decode.ask("reserve", id=request_id, blocks=blocks, deadline_s=30.0)
    await prefill.ask("send", id=request_id, target=answer["target"], delay_s=0.0)
    for _ in range(1000):
        sent = (await prefill.ask("state"))["sent"]
        if request_id in sent:
            assert sent[request_id] == "done"
            break
        await asyncio.sleep(0.02)
    else:
        raise AssertionError("the hand-off did not end")
    theirs, mine = await decode.ask("digest", blocks=blocks), await prefill.ask("digest", blocks=blocks)
    assert theirs == mine


async def pair(prefill: Host) -> dict[str, Any]:
    (found,) = (await prefill.ask("pairs")).values()
    pair: dict[str, Any] = found
    return pair


async def pair_until(prefill: Host, reached: Any, timeout_s: float = 60.0) -> dict[str, Any]:
    end = time.monotonic() + timeout_s
    while not reached(found := await pair(prefill)):
        assert time.monotonic() < end, found
        await asyncio.sleep(0.1)
    return found


async def test_a_connection_that_a_firewall_drops_is_in_trouble_and_made_again(machine: Machine) -> None:
    env = {"TRANSFER_PROBE_S": str(PROBE_S), "UCX_TCP_USER_TIMEOUT": "4s"}
    decode = await machine.start("decode", "decode-0", env)
    prefill = await machine.start("prefill", "prefill-0", env)
    await hand_over(prefill, decode, "r1", [1, 2, 3])
    assert (await pair(prefill))["transport"] == "tcp"
    run("ip", "netns", "exec", "decode-0", "nft", "-f", "-", text=DROP)
    await pair_until(prefill, lambda found: found["trouble"])
    run("ip", "netns", "exec", "decode-0", "nft", "delete", "table", "inet", "cut")
    await pair_until(prefill, lambda found: not found["trouble"])
    for number in range(5):  # the burst
        await hand_over(prefill, decode, f"s{number}", [4 + number])


@pytest.mark.parametrize(("shared", "transport"), [(True, "staged_shm"), (False, "staged_tcp")])
async def test_kv_is_staged_between_containers(machine: Machine, shared: bool, transport: str) -> None:
    env = {"TRANSFER_STAGING_DIR": "/dev/shm"}
    decode = await machine.start("decode", "decode-0", env, own_shm=not shared)
    prefill = await machine.start("prefill", "prefill-0", env)
    await hand_over(prefill, decode, "r", list(range(100)))
    assert (await pair(prefill))["transport"] == transport
    for number in range(5):
        await hand_over(prefill, decode, f"s{number}", [4 + number])
