"""A complete Baton stack of real processes on this machine, for tests that kill and restart them.

    with Cluster(model_dir, log_dir, prefill=2, decode=2) as cluster:
        OpenAI(base_url=cluster.base_url, api_key="none")...
        cluster.kill("decode-0")
        cluster.restart("decode-0")  # same name, same port; returns when it is ready
        cluster.check_idle()

Nothing restarts by itself. All methods block: from a coroutine use `await asyncio.to_thread(cluster.restart, name)`.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Self

import grpc

from cli.stack.stack import Stack
from cli.stack.supervisor import ServiceSpec
from common.pb import transfer_pb2, transfer_pb2_grpc
from common.settings.up import UpConfig
from common.tls import SERVER_NAME
from common.types import Role

#: Shape of the cluster that the fixture `cluster` starts; its pods write spans to SPANS in the log directory.
CHUNK, BLOCK, MAX_MODEL_LEN = 128, 16, 1024
SPANS = "spans.jsonl"

#: No request is refused because its first token would be late: a busy machine is slow, and that is no failure here.
LATE_IS_FINE = {"BATON_MAX_TTFT_S": "0"}
READY_S = 240.0
IDLE_S = 60.0
POLL_S = 0.05


class Cluster:
    """Owns the processes valkey, prefill-N, decode-N and gateway between __enter__ and __exit__."""

    def __init__(
        self,
        model_dir: Path,
        log_dir: Path,
        *,
        prefill: int = 1,
        decode: int = 1,
        pod_flags: Mapping[str, str] | None = None,
        env: Mapping[str, str] | None = None,
        ready_s: float = READY_S,
        **settings: object,
    ) -> None:
        """Plans the stack.

        Args:
            pod_flags: Further `baton serve` flags of every pod.
            env: Variables in addition to those of the test process.
            settings: Fields of UpConfig.
        """
        flags = {"model": str(model_dir), "prefill": prefill, "decode": decode, "port": 0, "threads": 1, **settings}
        config = UpConfig.load(file=None, env={}, flags=flags)
        log_dir.mkdir(parents=True, exist_ok=True)
        inherited = {k: v for k, v in os.environ.items() if not k.startswith("BATON_") or k == "BATON_CACHE"}
        env = {**inherited, **LATE_IS_FINE, **(env or {})}
        self.stack = Stack.plan(config, model_dir, log_dir, pod_flags=pod_flags, env=env)
        self._specs = {spec.name: spec for spec in self.stack.specs}
        self._ready_s = ready_s
        # A child with a parent-death signal ends with the thread that started it. One long-lived thread starts all.
        self._starter = ThreadPoolExecutor(1, thread_name_prefix="cluster")

    @property
    def base_url(self) -> str:
        """Base URL of the OpenAI API, with /v1."""
        return self.stack.base_url

    @property
    def model(self) -> str:
        return self.stack.model

    @property
    def pods(self) -> list[str]:
        return [name for name, spec in self._specs.items() if spec.role in (Role.PREFILL, Role.DECODE)]

    def address(self, name: str) -> str:
        return self._specs[name].address

    def pid(self, name: str) -> int | None:
        return self._specs[name].process.pid

    def alive(self, name: str) -> bool:
        return self._specs[name].process.alive

    def exit_code(self, name: str) -> int | None:
        """Returns the exit code of a process that has ended."""
        return self._specs[name].process.exit_code

    def log(self, name: str, lines: int = 40) -> str:
        """Returns the end of a process's log."""
        return "\n".join(self._specs[name].process.tail(lines))

    def __enter__(self) -> Self:
        try:
            for stage in sorted({spec.start_stage for spec in self._specs.values()}):
                names = [name for name, spec in self._specs.items() if spec.start_stage == stage]
                for name in names:
                    self.start(name)
                for name in names:
                    self.wait_ready(name)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def start(self, name: str) -> None:
        """Starts a stopped process. Does not wait for readiness."""
        self._starter.submit(self._specs[name].process.start).result()

    def wait_ready(self, name: str, timeout_s: float | None = None) -> None:
        """Waits until the probe succeeds. Raises AssertionError with the log if the process ends or takes too long."""
        timeout_s = timeout_s or self._ready_s
        deadline = time.monotonic() + timeout_s
        while not self._starter.submit(lambda: asyncio.run(_ask(self._specs[name]))).result():
            assert self.alive(name), f"{name} ended:\n{self.log(name)}"
            assert time.monotonic() < deadline, f"{name} is not ready after {timeout_s:.0f} s:\n{self.log(name)}"
            time.sleep(POLL_S)

    def kill(self, name: str) -> None:
        """Sends SIGKILL and returns when the process has ended."""
        self._specs[name].process.kill()

    def terminate(self, name: str, timeout_s: float = 40.0) -> int:
        """Sends SIGTERM and returns the exit code."""
        self._specs[name].process.send(signal.SIGTERM)
        return self._specs[name].process.wait(timeout_s)

    def restart(self, name: str) -> None:
        """Kills the process if it runs and starts it with the same name and port. Waits for it and the gateway."""
        self.kill(name)
        self.start(name)
        self.wait_ready(name)
        if self.alive("gateway"):
            self.wait_ready("gateway")

    def freeze(self, name: str) -> None:
        """Sends SIGSTOP. The process stands still until `thaw`."""
        self._specs[name].process.send(signal.SIGSTOP)

    def thaw(self, name: str) -> None:
        self._specs[name].process.send(signal.SIGCONT)

    def info(self, name: str) -> transfer_pb2.InfoResponse:
        """Returns the GetInfo answer of a pod."""
        pems = self.stack.tls.pems()
        credentials = grpc.ssl_channel_credentials(pems.ca, pems.key, pems.cert)
        options = [("grpc.ssl_target_name_override", SERVER_NAME)]
        with grpc.secure_channel(self.address(name), credentials, options) as channel:
            return transfer_pb2_grpc.TransferStub(channel).Info(transfer_pb2.InfoRequest(), timeout=60.0)

    def check_idle(self, timeout_s: float = IDLE_S) -> None:
        """Waits until each running pod is ready and has no leased or quarantined block, and its block counts add up."""
        for name in self.pods:
            if not self.alive(name):
                continue
            deadline = time.monotonic() + timeout_s
            while (info := self.info(name)).blocks.leased or info.blocks.quarantined:
                assert time.monotonic() < deadline, f"{name} does not come to rest: {info.blocks}\n{self.log(name)}"
                time.sleep(POLL_S)
            assert info.blocks.free + info.blocks.cached == info.num_blocks, f"{name}: {info.blocks}"
            assert info.ready, f"{name} is not ready:\n{self.log(name)}"

    def close(self) -> None:
        """Stops all processes stage by stage, with SIGKILL after a timeout. Idempotent."""
        for stage in sorted({spec.stop_stage for spec in self._specs.values()}):
            members = [spec.process for spec in self._specs.values() if spec.stop_stage == stage]
            for process in members:
                process.send(signal.SIGTERM)
            deadline = time.monotonic() + 10.0
            for process in members:
                if process.pid is not None:
                    try:
                        process.wait(max(deadline - time.monotonic(), 0.01))
                    except subprocess.TimeoutExpired:
                        process.kill()
        self.stack.close()
        self._starter.shutdown()


async def _ask(spec: ServiceSpec) -> bool:
    try:
        return await asyncio.wait_for(spec.probe(), 3.0)
    except TimeoutError:
        return False
