"""Two prefill pods, two decode pods, two gateways and a Valkey as processes, with proxies between them.

    clients --> gateway-N --[proxy of pod]--> prefill-N, decode-N --[proxy of pod]--> other pods
                gateway-N, pods --[proxy of process]--> valkey

Calls between services use mutual TLS and signatures, and clients need API keys. Pods advertise the port of their proxy.
The KV itself goes over NIXL, past the proxies. Fork servers start the processes. Only the harness starts a process
again. Names and ports stay the same after a restart, as in a StatefulSet of Kubernetes.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import os
import resource
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
from redis.asyncio import Redis
from redis.exceptions import RedisError

from cli import probes
from cli.stack.stack import Stack
from cli.stack.supervisor import PortLease, ServiceSpec
from common.pb import transfer_pb2, transfer_pb2_grpc
from common.rpc import open_channel
from common.settings.up import UpConfig
from gateway.admission.api_keys import create_key
from gateway.admission.key_store import KeyFile
from tests.rigs.chaos.catalogue import BLOCK, CHUNK, MAX_LEN, MODEL, ModelKind, write_model
from tests.rigs.chaos.client import Gateway
from tests.rigs.chaos.fork_server import ForkedProcess, ForkServer
from tests.rigs.chaos.schedule import FaultKind, ScheduledFault
from tests.rigs.index.tcp_proxy import TcpProxy

PODS = ("prefill-0", "prefill-1", "decode-0", "decode-1")
GATEWAYS = ("gateway-0", "gateway-1")
TENANTS = ("alice", "bob")
READY_S = 60.0  #: Longest time until a started process is ready.
USED_S = 10.0  #: Longest wait until a gateway uses a pod again.
POLL_S = 0.1  #: Pause between two looks.
KEPT_S = 60.0  #: Gateways keep answers with keys so long, so that their memory is level after the first minute.
DUTY_S = (0.08, 0.02)  #: A slow process stands still for the first time and runs for the second, in turn.
CALL_S = 5.0  #: Time limit of the harness's own calls.
_POD_CODE = ("cli.app", "cli.commands.services", "prefill_service.servicer", "decode_service.servicer", "uvloop")
_GATEWAY_CODE = ("cli.app", "cli.commands.services", "cli.demo.model", "gateway.server", "uvloop")


class ChaosStack:
    """The processes, their proxies and their faults. `running` makes it."""

    def __init__(self, directory: Path, kind: ModelKind) -> None:
        """Plans the stack; `directory` gets the model, the keys and the logs."""
        self.directory, self.model_dir = directory, directory / "model"
        self.model_dir.mkdir(parents=True)
        write_model(self.model_dir, kind)
        self._kind = kind
        self.keys: dict[str, str] = {}  #: API key of each tenant.
        file = KeyFile(directory / "keys.toml")
        for tenant in TENANTS:
            self.keys[tenant], record = create_key(tenant)
            file.add(record)
        self.gateways: list[Gateway] = []
        self.crashes: list[str] = []  #: Ends of processes that no fault caused.
        self.deaths: dict[str, int] = {}  #: Kills by process.
        self._expected_ends: set[str] = set()  #: Processes whose end is no crash, or is recorded already.
        #: The proxy of a pod, by its name, and the proxy of a process to Valkey, by "index NAME".
        self._proxies: dict[str, TcpProxy] = {}
        self._open = contextlib.AsyncExitStack()
        self._specs: dict[str, ServiceSpec] = {}

    @classmethod
    @contextlib.asynccontextmanager
    async def running(cls, directory: Path, kind: ModelKind = ModelKind.PLAIN) -> AsyncIterator[ChaosStack]:
        """Yields a stack that is ready, with a model of this kind, and stops it at the end."""
        stack = cls(directory, kind)
        try:
            await stack._start()
            yield stack
        finally:
            await stack._stop()

    # -- start and stop

    async def _start(self) -> None:
        await self._plan()
        await asyncio.gather(*(asyncio.to_thread(spec.process.start) for spec in self._specs.values()))
        await asyncio.gather(*(self.wait_ready(name) for name in self._specs))

    async def _plan(self) -> None:
        config = UpConfig(
            model=str(self.model_dir),
            served_name=MODEL,
            prefill=2,
            decode=2,
            port=0,
            device="cpu",
            dtype="float32",
            load_format="dummy",
            threads=1,
            block_size=BLOCK,
            chunk_tokens=CHUNK,
            max_model_len=MAX_LEN,
            kv_memory=2 << 20,
            kv_groups=self._kind is not ModelKind.PLAIN,
            snapshot_blocks=2,
            max_seqs=16,
            api_keys=(str(self.directory / "keys.toml"),),
            log_level="info",
            log_format="text",
            drain_s=2.0,
        )
        env = {name: value for name, value in os.environ.items() if not name.startswith("BATON_")}
        logs = self.directory / "logs"
        logs.mkdir()
        # Decode pods compute no prompts: these stacks test the hand-off.
        planned = Stack.plan(
            config, self.model_dir, logs, pod_flags={"local-prefill": "off", "checksums": "true"}, env=env
        )
        self._open.callback(planned.close)
        self._tls, self._redis_url = planned.tls, planned.redis
        pod_server = ForkServer(_POD_CODE)
        self._open.callback(pod_server.close)
        gateway_server = ForkServer(_GATEWAY_CODE)
        self._open.callback(gateway_server.close)
        for spec in planned.specs:
            if spec.name == "gateway":
                await self._add_gateway(gateway_server, dataclasses.replace(spec), "gateway-0")
                http, grpc = (self._open.enter_context(PortLease()) for _ in range(2))
                await self._add_gateway(gateway_server, spec, "gateway-1", port=http.port, grpc_port=grpc.port)
            elif spec.name in PODS:
                proxy = await self._proxy(spec.name, int(spec.address.rpartition(":")[2]))
                more = [f"--advertise=127.0.0.1:{proxy.port}"]
                await self._add(pod_server, spec, spec.name, [*spec.process.argv, *more])
            else:
                self._specs[spec.name] = spec

    async def _add_gateway(self, server: ForkServer, spec: ServiceSpec, name: str, **ports: int) -> None:
        argv = [*spec.process.argv, f"--idempotency-ttl-s={KEPT_S:g}"]
        argv += [f"--{key.replace('_', '-')}={port}" for key, port in ports.items()]
        address = f"127.0.0.1:{ports['port']}" if ports else spec.address
        port = int(address.rpartition(":")[2])
        spec = dataclasses.replace(spec, address=address, probe=functools.partial(probes.http_ready, "127.0.0.1", port))
        await self._add(server, spec, name, argv)
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=8)
        client = httpx.AsyncClient(base_url=f"http://{address}", limits=limits, timeout=CALL_S)
        self._open.push_async_callback(client.aclose)
        self.gateways.append(Gateway(name, f"http://{address}", client, in_rotation=False))

    async def _add(self, server: ForkServer, spec: ServiceSpec, name: str, argv: list[str]) -> None:
        """Adds a process. `server` forks it, and it reaches Valkey through a proxy of its own."""
        proxy = await self._proxy(f"index {name}", int(self._redis_url.rpartition(":")[2].partition("/")[0]))
        before, _, _ = self._redis_url.rpartition(":")
        env = {**(spec.process.env or {}), "BATON_REDIS": f"{before}:{proxy.port}/0"}
        log = self.directory / "logs" / f"{name}.log"
        self._specs[name] = dataclasses.replace(spec, process=ForkedProcess(server, name, argv, log=log, env=env))

    async def _proxy(self, name: str, target: int) -> TcpProxy:
        proxy = self._proxies[name] = TcpProxy(target)
        await proxy.start()
        self._open.push_async_callback(proxy.stop)
        return proxy

    async def _stop(self) -> None:
        """Stops the gateways, then the pods, then Valkey. Kills a process that has not ended after 5 s."""
        try:
            for stage in sorted({spec.stop_stage for spec in self._specs.values()}):
                members = [spec.process for spec in self._specs.values() if spec.stop_stage == stage]
                for process in members:
                    process.send(signal.SIGCONT)
                    process.send(signal.SIGTERM)
                end = time.monotonic() + 5.0
                while any(process.alive for process in members) and time.monotonic() < end:
                    await asyncio.sleep(0.05)
                for process in members:
                    await asyncio.to_thread(process.kill)
        finally:  # a fork server that has ended answers nothing
            await self._open.aclose()

    # -- state

    def pid(self, name: str) -> int:
        pid = self._specs[name].process.pid
        assert pid is not None
        return pid

    def alive(self, name: str) -> bool:
        return self._specs[name].process.alive

    def log(self, name: str, lines: int = 30) -> str:
        """Returns the end of a process's log."""
        return "\n".join(self._specs[name].process.tail(lines))

    def log_sizes(self) -> dict[str, int]:
        """Returns the size of each log, to find what was logged later."""
        logs = {name: spec.process.log for name, spec in self._specs.items()}
        return {name: log.stat().st_size for name, log in logs.items() if log.exists()}

    def log_since(self, name: str, size: int) -> list[str]:
        """Returns the lines that a log got after it had this size."""
        log = self._specs[name].process.log
        if not log.exists():
            return []
        with log.open("rb") as file:
            file.seek(size)
            return file.read().decode(errors="replace").splitlines()

    async def wait_ready(self, name: str, timeout_s: float = READY_S) -> None:
        """Waits until the probe of a process succeeds. Clients may then choose it, if it is a gateway."""
        end, spec = time.monotonic() + timeout_s, self._specs[name]
        while True:
            with contextlib.suppress(TimeoutError):
                if await asyncio.wait_for(spec.probe(), 3.0):
                    break
            assert spec.process.alive, f"{name} ended with {spec.process.exit_code}:\n{self.log(name)}"
            assert time.monotonic() < end, f"{name} is not ready after {timeout_s:.0f} s:\n{self.log(name)}"
            await asyncio.sleep(POLL_S)
        for gateway in self.gateways:
            if gateway.name == name:
                gateway.in_rotation = True

    async def info(self, pod: str) -> transfer_pb2.InfoResponse:
        """Returns the Info answer of a pod."""
        async with open_channel(self._specs[pod].address, self._tls) as channel:
            stub: Any = transfer_pb2_grpc.TransferStub(channel)
            return await stub.Info(transfer_pb2.InfoRequest(), timeout=CALL_S)

    @contextlib.asynccontextmanager
    async def redis(self) -> AsyncIterator[Any]:
        """Yields a client of Valkey without a proxy."""
        client: Any = Redis.from_url(self._redis_url, socket_timeout=CALL_S, decode_responses=True)
        async with client:
            yield client

    def note_crashes(self) -> None:
        """Records the processes that ended although no fault killed them."""
        for name, spec in self._specs.items():
            if not spec.process.alive and name not in self._expected_ends:
                self._expected_ends.add(name)
                self.crashes.append(f"{name} ended with {spec.process.exit_code}:\n{self.log(name)}")

    async def revive(self) -> None:
        """Starts every process again that has ended."""
        self.note_crashes()
        for name in [name for name, spec in self._specs.items() if not spec.process.alive]:
            await self.restart(name)

    # -- faults

    async def restart(self, name: str) -> None:
        """Starts a process that has ended, and waits until it is ready."""
        await asyncio.to_thread(self._specs[name].process.start)
        self._expected_ends.discard(name)
        await self.wait_ready(name)

    async def apply(self, fault: ScheduledFault) -> None:
        """Causes a fault and ends it. Returns when the process is ready again, and when gateways use a pod again."""
        name = fault.victim
        match fault.kind:
            case FaultKind.KILL:
                await self._kill(name, fault.lasts_s)
            case FaultKind.FREEZE:
                await self._frozen(name, fault.lasts_s)
            case FaultKind.SLOW:
                end = time.monotonic() + fault.lasts_s
                while time.monotonic() < end:
                    await self._frozen(name, DUTY_S[0])
                    await asyncio.sleep(DUTY_S[1])
            case FaultKind.FULL_DISK:
                # With this limit of the file size each write fails, as on a full disk (EFBIG in place of ENOSPC). The
                # signal SIGXFSZ has no effect, because Python ignores it.
                pid = self.pid(name)
                with contextlib.suppress(ProcessLookupError):
                    soft, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)
                    resource.prlimit(pid, resource.RLIMIT_FSIZE, (0, hard))
                    try:
                        await asyncio.sleep(fault.lasts_s)
                    finally:
                        resource.prlimit(pid, resource.RLIMIT_FSIZE, (soft, hard))
            case FaultKind.FLUSH:
                with contextlib.suppress(RedisError):
                    async with self.redis() as client:
                        await client.flushall()
            case FaultKind.RESET:
                for proxy in self._links(name, control=True):
                    proxy.hang_up()
            case FaultKind.CUT | FaultKind.CUT_INDEX:
                cut = self._links(name, control=fault.kind is FaultKind.CUT)
                for proxy in cut:
                    proxy.silence()
                try:
                    await asyncio.sleep(fault.lasts_s)
                finally:
                    for proxy in cut:
                        proxy.heal()
        self.note_crashes()
        if self.alive(name):
            await self.wait_ready(name)
        else:
            await self.restart(name)
        if name in PODS:
            await asyncio.gather(*(self._wait_used(gateway, name) for gateway in self.gateways))

    async def _wait_used(self, gateway: Gateway, pod: str) -> None:
        """Waits until the gateway uses the pod, at most USED_S: the gateway may have a fault of its own."""
        headers = {"authorization": f"Bearer {self.keys[TENANTS[0]]}"}
        end = time.monotonic() + USED_S
        while time.monotonic() < end:
            with contextlib.suppress(httpx.HTTPError):
                state = (await gateway.http.get("/dashboard/state", headers=headers)).raise_for_status().json()
                if any(seen["name"] == pod and seen["state"] == "ready" for seen in state["pods"]):
                    return
            await asyncio.sleep(POLL_S)

    def _links(self, name: str, *, control: bool) -> list[TcpProxy]:
        """Returns the proxies of a process: with `control` of all its connections, else only of those to Valkey."""
        if name == "valkey":
            return [proxy for link, proxy in self._proxies.items() if link.startswith("index ")]
        own = [self._proxies[name]] if control and name in self._proxies else []
        return [*own, self._proxies[f"index {name}"]]

    async def _kill(self, name: str, pause_s: float) -> None:
        self.deaths[name] = self.deaths.get(name, 0) + 1
        self._expected_ends.add(name)
        for gateway in self.gateways:
            if gateway.name == name:
                gateway.in_rotation = False
                gateway.deaths += 1
        await asyncio.to_thread(self._specs[name].process.kill)
        await asyncio.sleep(pause_s)

    async def _frozen(self, name: str, seconds: float) -> None:
        process = self._specs[name].process
        process.send(signal.SIGSTOP)
        try:
            await asyncio.sleep(seconds)
        finally:
            process.send(signal.SIGCONT)
