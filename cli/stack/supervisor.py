"""Child processes of a stack: their ports and logs, and the supervisor that starts, restarts and stops them.

    stopped --> starting --> ready <--> unready (the probe fails)
                    ^          |           |
                    |          v           v
                    +------ waiting (the process has ended; back-off)

A restart uses the same command, name and port. The supervisor gives up in three cases: stop() is called, a child exits
with code 2 (wrong configuration), or a child ends several times in a row without having been ready.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import errno
import json
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from common.errors import BatonError, ConfigError, InternalError, Unavailable, describe
from common.process.lifecycle import PHASE
from common.process.tether import tether_command

Probe = Callable[[], Awaitable[bool]]

TICK_S = 0.05
PROBE_TIMEOUT_S = 3.0
PROBE_EVERY_S = {False: 0.2, True: 2.0}  # By readiness.
BACKOFF_S = (0.5, 10.0)  # First and longest.
STABLE_AFTER_S = 30.0  # A process that ran this long gets the first back-off again.
MAX_FAILED_STARTS = 3
CONFIG_EXIT_CODE = 2
_PHASE_KEY = f'"{PHASE}":'.encode()


class PortLease:
    """A loopback TCP port reserved for children of this process, until close().

    The port is bound here without listening. The kernel then never assigns it as a free port, but a server that sets
    SO_REUSEADDR (gRPC, uvicorn, Valkey) can bind and listen on it repeatedly. Another lease of the same fixed port
    could bind it too. An abstract socket name per port excludes that; the kernel frees it with its process.
    """

    def __init__(self, port: int = 0, *, field: str = "port") -> None:
        """Port 0 is any free one. Raises ConfigError (for the setting `field`) if the port is in use."""
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        self._name: socket.socket | None = None
        self.port = port
        try:
            # Connections of a former server in TIME_WAIT must not block a fixed port; only a listener does.
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, int(port != 0))
            self._socket.bind(("127.0.0.1", port))
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self.port = self._socket.getsockname()[1]
            if sys.platform == "linux":  # abstract socket names are per network namespace, like ports
                self._name = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                self._name.bind(f"\0baton-port-{self.port}")
        except OSError as error:
            self.close()
            why = "is in use" if error.errno == errno.EADDRINUSE else f"cannot be used: {error.strerror}"
            raise ConfigError(f"{field}: {self.port} {why}", field=field) from error

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def close(self) -> None:
        """Frees the port. Idempotent."""
        if self._name is not None:
            self._name.close()
        self._socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def require_free_port(host: str, port: int, field: str) -> None:
    """Raises ConfigError for the setting `field` if a server listens on the port; port 0 is any free one."""
    if port == 0:
        return
    family, kind, protocol, _, address = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, kind, protocol) as tried:
        tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a PortLease may hold the port
        try:
            tried.bind(address)
        except OSError as error:
            why = "is in use" if error.errno == errno.EADDRINUSE else f"cannot be used: {error.strerror}"
            raise ConfigError(f"{field}: {port} {why}", field=field) from error


class ChildProcess:
    """A command with a stable name. It has a session of its own, so a terminal's Ctrl-C reaches only the parent.

    The child dies with the thread that started it (prctl(2), PR_SET_PDEATHSIG): start it from a long-lived thread.
    """

    def __init__(self, name: str, argv: Sequence[str], *, log: Path, env: Mapping[str, str] | None = None) -> None:
        """argv[0] is an absolute path; env is the whole environment (None: inherited); log gets stdout and stderr."""
        self.name = name
        self.argv = tuple(argv)
        self.log = log
        self.env = None if env is None else dict(env)
        self._popen: subprocess.Popen[bytes] | None = None
        self._phases_read = 0  # Bytes of the log that new_phases() has read.

    def start(self) -> None:
        """Starts the process; it must not be running."""
        assert not self.alive, f"{self.name} is running"
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as out:
            self._phases_read = out.tell()
            self._popen = subprocess.Popen(
                tether_command(self.argv),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                env=self.env,
                start_new_session=True,
            )

    @property
    def pid(self) -> int | None:
        return self._popen.pid if self._popen else None

    @property
    def alive(self) -> bool:
        return self._popen is not None and self._popen.poll() is None

    @property
    def exit_code(self) -> int | None:
        """None before the first start and while the process runs; -9 after SIGKILL."""
        return self._popen.poll() if self._popen else None

    def send(self, number: signal.Signals) -> None:
        """Sends a signal; has no effect if the process is not running."""
        if self._popen is not None:
            self._popen.send_signal(number)

    def wait(self, timeout_s: float) -> int:
        """Waits for the exit code. Raises subprocess.TimeoutExpired after timeout_s."""
        assert self._popen is not None
        return self._popen.wait(timeout_s)

    def kill(self, timeout_s: float = 10.0) -> None:
        """Sends SIGKILL and waits for the end."""
        self.send(signal.SIGKILL)
        if self._popen is not None:
            self._popen.wait(timeout_s)

    def new_phases(self) -> list[tuple[str, bool]]:
        """The phases of its start that it has logged since the last call: their texts, and whether they are done."""
        try:
            with self.log.open("rb") as file:
                file.seek(self._phases_read)
                *lines, _partial = file.read().split(b"\n")
        except FileNotFoundError:
            return []
        self._phases_read += sum(len(line) + 1 for line in lines)
        phases = []
        for line in lines:
            if line.startswith(b"{") and _PHASE_KEY in line:
                with contextlib.suppress(ValueError):
                    entry = json.loads(line)
                    phases.append((str(entry["event"]), entry.get(PHASE) == "done"))
        return phases

    def tail(self, lines: int = 12) -> list[str]:
        """The last lines of the log."""
        try:
            with self.log.open("rb") as file:
                file.seek(max(0, self.log.stat().st_size - 65536))
                return [line.decode(errors="replace").rstrip() for line in deque(file, maxlen=lines)]
        except FileNotFoundError:
            return []


class State(enum.StrEnum):
    """State of one service."""

    STOPPED = "stopped"
    STARTING = "starting"
    READY = "ready"
    UNREADY = "unready"
    WAITING = "waiting"


@dataclass(frozen=True)
class ServiceSpec:
    """One child.

    Start stages run in rising order, each after the services of the previous one are ready. Stop stages run in rising
    order, each after the services of the previous one have ended.
    """

    process: ChildProcess
    role: str
    address: str
    probe: Probe
    start_stage: int = 0
    stop_stage: int = 0

    @property
    def name(self) -> str:
        return self.process.name


@dataclass
class Service:
    """A spec and its current state, written by the supervisor only."""

    spec: ServiceSpec
    state: State = State.STOPPED
    started_at: float = 0.0  # monotonic; of the current process
    unready_since: float = 0.0  # monotonic; set when the state becomes UNREADY
    ready_after_s: float | None = None  # of the current process
    phase: str = ""  # Its current phase before it is ready.
    ever_ready: bool = False
    restarts: int = 0


class Supervisor:
    """Owns the processes of `specs` from start() to stop(). All methods run on one event loop.

    `on_event` gets one line of text for each event that a user should know, `on_phase` each finished phase of a start.
    """

    def __init__(
        self,
        specs: Sequence[ServiceSpec],
        *,
        on_event: Callable[[str], None],
        on_phase: Callable[[Service, str], None] = lambda service, text: None,
    ) -> None:
        self.services = [Service(spec) for spec in specs]
        self._on_event, self._on_phase = on_event, on_phase
        self._tasks: list[asyncio.Task[None]] = []
        self._fatal: asyncio.Future[None] | None = None
        self._stopping = False

    async def start(self, timeout_s: float) -> None:
        """Starts all services and returns when they are ready.

        Raises ConfigError if a child refuses its configuration, and Unavailable, with the last lines of its log, if a
        child does not become ready. The caller must call stop() in all cases.
        """
        self._fatal = asyncio.get_running_loop().create_future()
        deadline = time.monotonic() + timeout_s
        for stage in sorted({s.spec.start_stage for s in self.services}):
            members = [s for s in self.services if s.spec.start_stage == stage]
            for service in members:
                task = asyncio.create_task(self._keep(service), name=service.spec.name)
                task.add_done_callback(self._on_task_end)
                self._tasks.append(task)
            while not all(s.state is State.READY for s in members):
                if self._fatal.done():
                    await self._fatal
                if time.monotonic() > deadline:
                    late = next(s for s in members if s.state is not State.READY)
                    raise Unavailable(f"{late.spec.name} is not ready after {timeout_s:.0f} s{_quote(late)}")
                await asyncio.sleep(TICK_S)

    async def failure(self) -> None:
        """Waits for an error that a restart cannot fix, and raises it."""
        assert self._fatal is not None, "not started"
        await asyncio.shield(self._fatal)

    async def stop(self, grace_s: float) -> None:
        """Sends SIGTERM stage by stage, and SIGKILL to processes that still run after grace_s per stage. Idempotent."""
        self._stopping = True
        for stage in sorted({s.spec.stop_stage for s in self.services}):
            members = [s for s in self.services if s.spec.stop_stage == stage]
            for service in members:
                service.spec.process.send(signal.SIGTERM)
            deadline = time.monotonic() + grace_s
            while any(s.spec.process.alive for s in members) and time.monotonic() < deadline:  # noqa: ASYNC110
                await asyncio.sleep(TICK_S / 2)
            for service in members:
                if service.spec.process.alive:
                    self._on_event(f"{service.spec.name} did not stop within {grace_s:.0f} s and was killed")
                service.spec.process.kill()
                service.state = State.STOPPED
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._fatal is not None and self._fatal.done() and not self._fatal.cancelled():
            self._fatal.exception()  # marks the error as retrieved

    def kill(self) -> None:
        """Kills all processes at once."""
        self._stopping = True
        for service in self.services:
            service.spec.process.send(signal.SIGKILL)

    async def _keep(self, service: Service) -> None:
        failed_starts, backoff = 0, BACKOFF_S[0]
        name, process = service.spec.name, service.spec.process
        while not self._stopping:
            service.state, service.started_at, service.ready_after_s = State.STARTING, time.monotonic(), None
            service.phase = ""
            process.start()
            await self._watch(service)
            if self._stopping:
                return
            code = process.exit_code
            if code == CONFIG_EXIT_CODE and not service.ever_ready:
                lines = [line for line in process.tail() if line.strip()] or ["wrong configuration"]
                self._fail(ConfigError(f"{name}: {lines[-1].removeprefix('baton: ')}"))
                return
            failed_starts = 0 if service.ready_after_s is not None else failed_starts + 1
            if failed_starts >= MAX_FAILED_STARTS and not service.ever_ready:
                self._fail(Unavailable(f"{name} ended {failed_starts} times before it was ready{_quote(service)}"))
                return
            if time.monotonic() - service.started_at > STABLE_AFTER_S:
                backoff = BACKOFF_S[0]
            service.state = State.WAITING
            how = signal.Signals(-code).name if code is not None and code < 0 else f"exit code {code}"
            ran = f"pid {process.pid} ran for {time.monotonic() - service.started_at:.1f} s"
            self._on_event(f"{name} ended ({how}), restarting in {backoff:.1f} s ({ran}){_quote(service)}")
            await asyncio.sleep(backoff)
            backoff = min(2 * backoff, BACKOFF_S[1])
            service.restarts += 1

    async def _watch(self, service: Service) -> None:
        """Probes the service until its process ends."""
        next_probe = 0.0
        while service.spec.process.alive and not self._stopping:
            if time.monotonic() >= next_probe:
                ready = await _ask(service.spec.probe)
                if not service.spec.process.alive or self._stopping:
                    return
                if service.state is State.STARTING:
                    self._read_phases(service)
                if ready and service.state is not State.READY:
                    again = service.state is State.UNREADY
                    service.ready_after_s = service.ready_after_s or time.monotonic() - service.started_at
                    if again or service.restarts:
                        after = f", {service.ready_after_s:.1f} s after its restart"
                        if again:
                            after = f" after {time.monotonic() - service.unready_since:.1f} s"
                        self._on_event(f"{service.spec.name} is ready again{after} (pid {service.spec.process.pid})")
                    service.state, service.ever_ready = State.READY, True
                elif not ready and service.state is State.READY:
                    service.state, service.unready_since = State.UNREADY, time.monotonic()
                    self._on_event(f"{service.spec.name} is not ready (pid {service.spec.process.pid})")
                next_probe = time.monotonic() + PROBE_EVERY_S[ready]
            if service.state is State.STARTING:
                self._read_phases(service)
            await asyncio.sleep(TICK_S)

    def _read_phases(self, service: Service) -> None:
        for text, done in service.spec.process.new_phases():
            service.phase = text
            if done:
                self._on_phase(service, text)

    def _on_task_end(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fail(InternalError(f"supervising {task.get_name()} failed: {describe(error)}"))

    def _fail(self, error: BatonError) -> None:
        if self._fatal is not None and not self._fatal.done():
            self._fatal.set_exception(error)


async def _ask(probe: Probe) -> bool:
    """The probe's answer; False without an answer in time."""
    with contextlib.suppress(TimeoutError):
        return await asyncio.wait_for(probe(), PROBE_TIMEOUT_S)
    return False


def _quote(service: Service) -> str:
    log, lines = service.spec.process.log, service.spec.process.tail()
    if not lines:
        return f"; its log {log} is empty"
    return f"; last lines of {log}:\n" + "\n".join(f"  | {line}" for line in lines)
