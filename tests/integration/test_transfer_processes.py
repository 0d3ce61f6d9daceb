"""NIXL between real processes that are killed, frozen and restarted (test_transfer_tcp.py repeats this over TCP)."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from common.errors import BatonError, DeadlineExceeded, TransferFailed
from common.pb import types_pb2
from common.process.lifecycle import host_boot_id
from common.types import KvTarget, Role
from common.wire import kv_target_from_pb, kv_target_to_pb
from kv_transfer.peers.process_watch import watch_process
from kv_transfer.receiver import state_machine
from kv_transfer.sender.transfers import OutgoingTransfer
from tests.rigs.transfer.transfer_pods import Cluster, FakePin, Pod
from tests.rigs.waiting import until


class Child:
    """A pod process."""

    def __init__(self, process: asyncio.subprocess.Process, name: str, hello: dict[str, Any]) -> None:
        self.process = process
        self.name = name
        self.address: str = hello["address"]
        self.generation: int = hello["generation"]
        self.pid: int = hello["pid"]

    @classmethod
    async def start(cls, role: Role, name: str, port: int = 0) -> Child:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "tests.rigs.transfer.transfer_child",
            role.value,
            name,
            str(port),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        assert process.stdout is not None
        return cls(process, name, json.loads(await asyncio.wait_for(process.stdout.readline(), 120)))

    async def ask(self, op: str, **order: Any) -> dict[str, Any]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps({"op": op, **order}).encode() + b"\n")
        answer: dict[str, Any] = json.loads(await asyncio.wait_for(self.process.stdout.readline(), 60))
        return answer

    async def state_until(self, reached: Any, timeout_s: float = 30.0) -> dict[str, Any]:
        for _ in range(int(timeout_s / 0.02)):
            state = await self.ask("state")
            if reached(state):
                return state
            await asyncio.sleep(0.02)
        raise AssertionError(f"it did not happen in time: {state}")

    async def reserve(self, request_id: str, blocks: list[int], deadline_s: float = 30.0) -> KvTarget:
        answer = await self.ask("reserve", id=request_id, blocks=blocks, deadline_s=deadline_s)
        return kv_target_from_pb(types_pb2.KvTarget.FromString(base64.b64decode(answer["target"])))

    def send_signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    async def end(self) -> None:
        if self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):  # it has ended already
                self.send_signal(signal.SIGKILL)
        await asyncio.wait_for(self.process.wait(), 60)


class Hosts(Cluster):
    """Pods in this process and in child processes."""

    def __init__(self) -> None:
        super().__init__("nixl")
        self.children: list[Child] = []

    async def child(self, role: Role, name: str, port: int = 0) -> Child:
        self.children.append(await Child.start(role, name, port))
        return self.children[-1]


@pytest_asyncio.fixture
async def hosts() -> AsyncIterator[Hosts]:
    hosts = Hosts()
    yield hosts
    for child in hosts.children:
        await child.end()
    await hosts.stop()


async def send(prefill: Pod, target: KvTarget, request_id: str, deadline_s: float = 30.0) -> OutgoingTransfer:
    transfer = prefill.node.start_transfer(target, request_id, len(target.blocks), deadline_s)
    transfer.push(0, target.blocks, FakePin(list(target.blocks)))
    transfer.finish([1], [None])
    return transfer


async def outcome(transfer: OutgoingTransfer) -> BatonError | None:
    try:
        await transfer.done()
    except BatonError as e:
        return e
    return None


async def start_writer(decode: Pod, writer: Child, request_id: str, blocks: list[int], deadline_s: float) -> Any:
    """Makes the child open a transfer to decode and delay its writes forever."""
    incoming = decode.reserve(request_id, 0, blocks, deadline_s)
    await writer.ask(
        "send",
        id=request_id,
        target=base64.b64encode(kv_target_to_pb(incoming.target).SerializeToString()).decode(),
        delay_s=600.0,
    )
    await writer.state_until(lambda state: state["pending"] > 0)
    return incoming


async def test_transport_is_known(hosts: Hosts) -> None:
    decode = await hosts.child(Role.DECODE, "decode-0")
    prefill = await hosts.start("prefill-0", Role.PREFILL)
    peer = await prefill.node.connect(decode.address, decode.name)
    assert peer.transport == ("tcp" if os.environ.get("UCX_TLS") == "tcp" else "cma")
    assert peer.gb_s > 0
    assert await outcome(await send(prefill, await decode.reserve("r", [1, 2, 3]), "r")) is None
    await decode.state_until(lambda state: state["ready"] == ["r"])  # the acknowledgement goes first


async def test_decode_is_killed(hosts: Hosts, unused_tcp_port: int) -> None:
    decode = await hosts.child(Role.DECODE, "decode-0", unused_tcp_port)
    prefill = await hosts.start("prefill-0", Role.PREFILL)
    target = await decode.reserve("r", list(range(8)))
    transfer = prefill.node.start_transfer(target, "r", 8, 60.0)
    pins = [FakePin([block]) for block in range(8)]
    for block in range(4):
        transfer.push(block, [block], pins[block])
    await until(lambda: transfer.delivered_blocks == 4)
    await decode.end()
    for block in range(4, 8):
        transfer.push(block, [block], pins[block])
    transfer.finish([1], [None])
    assert isinstance(await outcome(transfer), TransferFailed)
    await until(lambda: all(pin.free for pin in pins))
    again = await hosts.child(Role.DECODE, "decode-0", unused_tcp_port)
    assert await outcome(await send(prefill, await again.reserve("s", [1, 2]), "s")) is None


async def test_decode_is_killed_before_the_commit(hosts: Hosts) -> None:
    """Every block is delivered and no write is pending: only the end of the process ends the transfer."""
    decode = await hosts.child(Role.DECODE, "decode-0")
    prefill = await hosts.start("prefill-0", Role.PREFILL)
    transfer = prefill.node.start_transfer(await decode.reserve("r", [1]), "r", 1, 60.0)
    transfer.push(0, [1], FakePin([1]))
    await until(lambda: transfer.delivered_blocks == 1)
    await decode.end()
    transfer.finish([1], [None])
    assert isinstance(await outcome(transfer), TransferFailed)


async def test_prefill_is_killed(hosts: Hosts) -> None:
    """The request fails at once. Its blocks are released after the proof and the grace, not before."""
    decode = await hosts.start("decode-0", Role.DECODE)
    writer = await hosts.child(Role.PREFILL, "prefill-0")
    incoming = await start_writer(decode, writer, "r", [1, 2, 3], 60.0)
    await writer.end()
    await until(lambda: incoming.over)
    assert isinstance(incoming.failed[0], TransferFailed)
    assert incoming.pin.left == {1, 2, 3}
    assert decode.node.stats().quarantined_blocks == 3
    await until(lambda: incoming.pin.free)
    assert decode.node.stats().quarantined_blocks == 0


async def test_prefill_is_frozen(hosts: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    """The blocks of a frozen writer stay in quarantine until it answers."""
    decode = await hosts.start("decode-0", Role.DECODE)
    writer = await hosts.child(Role.PREFILL, "prefill-0")
    incoming = await start_writer(decode, writer, "r", [1, 2, 3], 60.0)
    writer.send_signal(signal.SIGSTOP)
    decode.node.release(incoming.target.transfer_id)
    await until(lambda: incoming.over)
    monkeypatch.setattr(state_machine, "GRACE_S", 0.2)
    await asyncio.sleep(1.0)  # longer than the grace after a proof
    assert incoming.pin.left == {1, 2, 3}
    writer.send_signal(signal.SIGKILL)
    await until(lambda: incoming.pin.free)


async def test_decode_is_frozen(hosts: Hosts) -> None:
    decode = await hosts.child(Role.DECODE, "decode-0")
    prefill = await hosts.start("prefill-0", Role.PREFILL)
    await prefill.node.connect(decode.address, decode.name)
    target = await decode.reserve("r", [1, 2])
    transfer = prefill.node.start_transfer(target, "r", 2, 5.0)
    transfer.push(0, [1], FakePin([1]))
    await until(lambda: transfer.delivered_blocks == 1)
    decode.send_signal(signal.SIGSTOP)
    late = FakePin([2])
    transfer.push(1, [2], late)
    transfer.finish([1], [None])
    assert isinstance(await outcome(transfer), DeadlineExceeded)
    decode.send_signal(signal.SIGCONT)
    await until(lambda: late.free)
    await until(lambda: prefill.node.stats().open_outgoing == 0)
    assert await outcome(await send(prefill, await decode.reserve("s", [5, 6]), "s")) is None


async def test_a_process_is_watched_only_when_it_is_the_listener(hosts: Hosts) -> None:
    child = await hosts.child(Role.DECODE, "decode-0")
    other = await hosts.child(Role.DECODE, "decode-1")
    assert watch_process(other.pid, host_boot_id(), child.address) is None
    assert watch_process(child.pid, "another host", child.address) is None
    watch = watch_process(child.pid, host_boot_id(), child.address)
    assert watch is not None
    assert not watch.ended()
    await child.end()
    assert watch.ended()
    watch.close()
    assert watch_process(child.pid, host_boot_id(), child.address) is None
