"""The invariants after a load with faults: all resources are free again, and `/ready` of the gateways was true."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import httpx
from redis.exceptions import RedisError

from prefix_index.reader import BOOKING_TTL_S
from tests.rigs.chaos.catalogue import Case
from tests.rigs.chaos.client import ChaosClients, Gateway, Verdict
from tests.rigs.chaos.stack import GATEWAYS, PODS, TENANTS, ChaosStack

SETTLE_S = 30.0  #: Longest time in which resources become free after the load.
POLL_S = 0.2  #: Pause between two looks.
#: Allowed descriptors and threads beyond those at the start. gRPC and UCX keep some after the restart of a peer.
FD_SLACK, THREAD_SLACK = 8, 6
#: Keys in Redis that never expire.
LASTING_KEYS = ("kv:scopes",)
READY_POLL_S = 0.25  #: Pause between two questions for readiness.
READY_MARGIN_S = 0.6  #: Readiness this long before and after a refused request counts for it.


@dataclass(frozen=True, slots=True)
class Held:
    """Resources that a process holds."""

    fds: int  #: Open descriptors.
    threads: int
    rss: int  #: Resident memory in bytes.

    @classmethod
    def of(cls, pid: int) -> Held:
        """Reads the resources of a process. Raises OSError if it has ended."""
        status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
        if "VmRSS" not in status:  # ended, and its parent has not asked for the exit code
            raise ProcessLookupError(f"process {pid} has ended")
        rss = int(status["VmRSS"].split()[0]) << 10
        return cls(len(os.listdir(f"/proc/{pid}/fd")), int(status["Threads"]), rss)


Baseline = Mapping[str, Held]  #: By role or by process.


def _role(name: str) -> str:
    return name.partition("-")[0]


def held(stack: ChaosStack) -> Baseline:
    """Returns the resources of each pod and gateway, by process."""
    return {name: Held.of(stack.pid(name)) for name in (*PODS, *GATEWAYS)}


async def baseline(stack: ChaosStack) -> Baseline:
    """Looks for a second at a stack without requests. Returns the largest values of each role."""
    largest: dict[str, Held] = {}
    for _ in range(5):
        for name, now in held(stack).items():
            most = largest.get(_role(name), now)
            largest[_role(name)] = Held(*(max(a, b) for a, b in zip(_row(most), _row(now), strict=True)))
        await asyncio.sleep(POLL_S)
    return largest


def _row(value: Held) -> tuple[int, int, int]:
    return value.fds, value.threads, value.rss


async def leaks(stack: ChaosStack, start: Baseline) -> list[str]:
    """Waits until all resources are free. Returns one line for each that is not free after SETTLE_S."""
    end = time.monotonic() + SETTLE_S
    while True:
        found = await _held_now(stack, start)
        if not found or time.monotonic() > end:
            return found
        await asyncio.sleep(POLL_S)


async def _held_now(stack: ChaosStack, start: Baseline) -> list[str]:
    found = [text for name in PODS for text in await _of_pod(stack, name)]
    found += [text for gateway in stack.gateways for text in await _of_gateway(stack, gateway)]
    return [*found, *of_processes(stack, start), *await _of_redis(stack)]


def of_processes(stack: ChaosStack, start: Baseline) -> list[str]:
    """Returns one line for each process with too many descriptors or threads, or that has ended."""
    found = []
    for name in (*PODS, *GATEWAYS):
        most = start[_role(name)]
        try:
            now = Held.of(stack.pid(name))
        except OSError:
            found.append(f"{name} has ended")
            continue
        if now.fds > most.fds + FD_SLACK:
            found.append(f"{name} has {now.fds} descriptors, {most.fds} at the start: {_descriptors(stack.pid(name))}")
        if now.threads > most.threads + THREAD_SLACK:
            found.append(f"{name} has {now.threads} threads, {most.threads} at the start")
    return found


def _descriptors(pid: int) -> dict[str, int]:
    """Returns the number of open descriptors by kind."""
    kinds: dict[str, int] = {}
    with contextlib.suppress(OSError):  # the process has ended
        for fd in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):  # the descriptor is closed
                kind = os.readlink(f"/proc/{pid}/fd/{fd}").partition(":[")[0]
                kinds[kind] = kinds.get(kind, 0) + 1
    return kinds


async def _of_pod(stack: ChaosStack, name: str) -> list[str]:
    try:
        info = await stack.info(name)
    except grpc.aio.AioRpcError as error:
        return [f"{name} does not answer Info: {error.details()}"]
    blocks, load, found = info.blocks, info.load, []
    if blocks.leased or blocks.quarantined or blocks.free + blocks.cached != info.num_blocks:
        found.append(f"{name} holds blocks: {_short(blocks)} of {info.num_blocks}")
    if info.states.leased or info.states.quarantined:
        found.append(f"{name} holds recurrent states: {_short(info.states)}")
    if load.running or load.waiting or load.reserved or load.queued_tokens:
        found.append(f"{name} holds requests: {_short(load)}")
    if not info.ready:
        found.append(f"{name} is not ready")
    return found


def _short(message: Any) -> str:
    return " ".join(str(message).split())


async def _of_gateway(stack: ChaosStack, gateway: Gateway) -> list[str]:
    try:
        headers = {"authorization": f"Bearer {stack.keys[TENANTS[0]]}"}
        state = (await gateway.http.get("/dashboard/state", headers=headers)).raise_for_status().json()
    except httpx.HTTPError as error:
        return [f"{gateway.name} gives no state: {error!r}"]
    own, found = state["gateway"], []
    if own["running"] or own["waiting"]:
        found.append(f"{gateway.name} holds {own['running']} running and {own['waiting']} waiting requests")
    if not own["ready"]:
        found.append(f"{gateway.name} is not ready")
    for pod in state["pods"]:
        if pod["bookings"]:
            found.append(f"{gateway.name} holds {pod['bookings']} bookings on {pod['name']}")
        if pod["state"] != "ready":
            found.append(f"{gateway.name} sees {pod['name']} as {pod['state']}: {pod['reason']}")
    missing = set(PODS) - {pod["name"] for pod in state["pods"]}
    return found + [f"{gateway.name} does not know {name}" for name in sorted(missing)]


async def _of_redis(stack: ChaosStack) -> list[str]:
    """Returns the keys that never expire, except LASTING_KEYS, and the bookings beyond BOOKING_TTL_S."""
    found = []
    try:
        async with stack.redis() as client:
            async for key in client.scan_iter(count=500):
                if await client.ttl(key) == -1 and key not in LASTING_KEYS:
                    found.append(f"the key {key} in Redis does not expire")
                if ":resv:" in key:
                    latest = await client.zrange(key, -1, -1, withscores=True)
                    left_s = latest[0][1] / 1000 - time.time() if latest else 0.0
                    if left_s > BOOKING_TTL_S + 1:
                        found.append(f"a booking in {key} lives for {left_s:.0f} s more")
    except RedisError as error:
        found.append(f"Valkey does not answer: {error!r}")
    return found


async def canaries(clients: ChaosClients, gateways: Sequence[Gateway], cases: Sequence[Case]) -> list[str]:
    """Sends one request through each gateway. Returns one line for each gateway that does not answer it."""
    found, rng = [], random.Random(1)
    for gateway in gateways:
        others = [other for other in gateways if other is not gateway and other.in_rotation]
        for other in others:
            other.in_rotation = False
        try:
            if await clients.one(cases[0], {**cases[0].body, "stream": True}, rng) is not Verdict.COMPLETED:
                found.append(f"{gateway.name} is ready and does not answer")
        finally:
            for other in others:
                other.in_rotation = True
    return found


class ReadinessWatch:
    """Records the readiness of each gateway. A gateway lies if it refuses a request while it says that it is ready."""

    def __init__(self, gateways: Sequence[Gateway]) -> None:
        self._gateways = gateways
        #: By gateway: when it was asked, when it answered, and whether it was ready.
        self._seen: dict[str, list[tuple[float, float, bool]]] = {gateway.name: [] for gateway in gateways}
        self._clients = {gateway.name: httpx.AsyncClient(base_url=gateway.url, timeout=2.0) for gateway in gateways}

    async def run(self) -> None:
        """Asks all gateways again and again, until it is cancelled."""
        try:
            async with asyncio.TaskGroup() as group:
                for gateway in self._gateways:
                    group.create_task(self._watch(gateway))
        finally:
            for client in self._clients.values():
                await client.aclose()

    async def _watch(self, gateway: Gateway) -> None:
        while True:
            began = time.monotonic()
            with contextlib.suppress(httpx.HTTPError):
                ready = (await self._clients[gateway.name].get("/ready")).status_code == 200
                self._seen[gateway.name].append((began, time.monotonic(), ready))
            await asyncio.sleep(READY_POLL_S)

    def lies(self, refusals: Sequence[tuple[str, float, float]]) -> list[str]:
        """Returns a line for each refusal (gateway, begin, end) around which the gateway was always ready."""
        found = []
        for name, began, ended in refusals:
            first, last = began - READY_MARGIN_S, ended + READY_MARGIN_S
            around = [ready for asked, answered, ready in self._seen[name] if answered > first and asked < last]
            if around and all(around):
                found.append(f"{name} answered 503 although it was ready from before to after the request")
        return found
