"""The ranks of a tensor-parallel engine other than rank 0: started, joined, messaged and watched by rank 0.

    start -> all ranks have joined -> send, call (engine thread) -> closed or failed

Ranks of this machine are child processes. Ranks of other machines connect to `tensor_parallel_master`. The group fails
when a rank is lost, or when a rank fails in the middle of a step, since the ranks may then be in different steps. A
failed group computes nothing more. Every wait has a limit, and a rank that ended is noticed within POLL_S.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from common.errors import ConfigError, InternalError, Unauthenticated, Unavailable, describe
from common.process.rank_channel import RankChannel, RankMessage
from common.process.tether import tether_command
from common.settings.kinds import host_port
from common.tls import TlsFiles
from engine.config import EngineConfig

_log = logging.getLogger(__name__)

JOIN_S = 120.0  # Longest wait for ranks of this machine, which import torch first.
JOIN_NODES_S = 1800.0  # Longest wait for ranks of other machines, which may be started later.
ANSWER_S = 1800.0  # Longest wait for an answer. A rank loads its weights before its first answer.
POLL_S = 0.2
RECEIVE_POLL_S = 0.01  # Wait for the answer of one rank before the next one is asked.
STOP_S = 5.0  # A rank that does not end within this time is killed.
FAILED_STOP_S = 0.5  # The same for the ranks of a group that has failed: they may wait for a lost rank.
SECRET_VARIABLE = "BATON_SECRET"
ENGINE_CHANNEL = "engine"  # Kind of the channel that carries steps.
HOST_CHANNEL = "host"  # Kind of the channel that carries copies of the host tier.
ADAPTER_CHANNEL = "adapters"  # Kind of the channel that carries adapters to host memory.
ENGINE_KINDS = (ENGINE_CHANNEL, HOST_CHANNEL, ADAPTER_CHANNEL)  # Kinds of the channels of every rank.

RankCommand = Callable[[int, str], list[str]]  # Maps (rank, address of rank 0) to the command line of a rank.


def rank_command(rank: int, master: str) -> list[str]:
    """Returns the command line of a rank of an engine without a pod. The secret is in the environment."""
    return [sys.executable, "-P", "-m", "engine.parallel.rank", str(rank), master]


class RankGroup:
    """The ranks 1, 2, ... of a group.

    Args:
        size: number of ranks, rank 0 included.
        kinds: kinds of channels; each rank opens one channel of every kind.
    """

    def __init__(self, size: int, kinds: Sequence[str]) -> None:
        self.size = size
        self.failure: str | None = None  # Why the group has failed; None while it works.
        self.step_bound_s = 0.0  # Seconds after which a rank that computes one step ends itself; 0 for no bound.
        #: Function that is called once, on the watching thread or the engine thread, when the group has failed.
        self.on_failure: Callable[[], object] = lambda: None
        self.num_sent = 0  # Messages of `send`. Only the engine thread sends; any thread may read it.
        self._channels: dict[str, dict[int, RankChannel]] = {kind: {} for kind in kinds}
        self._children: dict[int, subprocess.Popen[bytes]] = {}
        self._started, self._closing = threading.Event(), threading.Event()
        self._start_error: OSError | None = None
        self._lock = threading.Lock()
        self._watcher: threading.Thread | None = None

    @classmethod
    def start(
        cls,
        config: EngineConfig,
        *,
        secret: str | None = None,
        command: RankCommand = rank_command,
        kinds: Sequence[str] = ENGINE_KINDS,
        tls: TlsFiles | None = None,
    ) -> RankGroup:
        """Starts the ranks of this machine and waits until all ranks have joined.

        Args:
            secret: secret of the group. None: a new secret, which only the child processes get.
            command: command line of the ranks of this machine.
            tls: certificates of rank 0; then the other ranks need certificates too. None: plain connections.

        Raises:
            ConfigError: the configuration allows no group.
            InternalError: a rank did not start or did not join in time.
        """
        if config.tensor_parallel_nodes > 1 and secret is None:
            text = "tensor_parallel_nodes: an engine without a pod runs on one machine: only pods share a secret"
            raise ConfigError(text, field="tensor_parallel_nodes")
        host, port = split_address(config.tensor_parallel_master or "127.0.0.1:0")
        try:
            listener = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
        except OSError as error:
            text = (
                f"tensor_parallel_master: cannot listen on {host_port(host, port)} of this machine: {describe(error)}"
            )
            raise ConfigError(text, field="tensor_parallel_master") from error
        group = cls(config.tensor_parallel_size, kinds)
        group_secret = secret or secrets.token_hex(16)
        with listener:
            address = host_port(host, listener.getsockname()[1])
            commands = {rank: command(rank, address) for rank in range(1, config.local_ranks)}
            group._watch(commands, {SECRET_VARIABLE: group_secret})
            limit = JOIN_S if config.tensor_parallel_nodes == 1 else JOIN_NODES_S
            try:
                group._accept_ranks(listener, group_secret.encode(), time.monotonic() + limit, tls)
            except BaseException:
                group.close()
                raise
        return group

    def channels(self, kind: str = ENGINE_CHANNEL) -> list[RankChannel]:
        """Returns the channels of one kind, by rank from 1 on."""
        return [self._channels[kind][rank] for rank in range(1, self.size)]

    def _all_channels(self) -> list[tuple[str, int, RankChannel]]:
        """Returns kind, rank and channel of every rank that has joined."""
        return [(kind, rank, c) for kind, joined in self._channels.items() for rank, c in list(joined.items())]

    @property
    def pids(self) -> list[int]:
        """The process ids of the ranks of this machine."""
        return [child.pid for child in self._children.values()]

    @property
    def host(self) -> str:
        """An address of this machine that all other ranks reach."""
        return self.channels()[0].host

    def send(self, kind: str, payload: bytes | memoryview = b"", **fields: Any) -> None:
        """Sends a message to every rank. Raises InternalError if the group has failed."""
        self.check_alive()
        self.num_sent += 1
        try:
            for channel in self.channels():
                channel.send(kind, payload, **fields)
        except Unavailable as error:
            raise self.fail(error.message) from error

    def call(self, kind: str, **fields: Any) -> list[RankMessage]:
        """Sends a message to every rank and returns their answers. Raises InternalError like `receive`."""
        self.send(kind, **fields)
        return self.receive()

    def receive(self, check: Callable[[], object] = lambda: None, *, limit_s: float = ANSWER_S) -> list[RankMessage]:
        """Returns the next message of every rank. Raises InternalError if a rank fails or is silent for `limit_s`.

        `check` is called in between. A rank may wait for another one, so the first failure of any rank ends the wait.
        """
        messages: dict[int, RankMessage] = {}
        until = time.monotonic() + limit_s
        while missing := [rank for rank in range(1, self.size) if rank not in messages]:
            for rank in missing:
                channel = self.channels()[rank - 1]
                try:
                    if not channel.wait_readable(RECEIVE_POLL_S):
                        continue
                    message = channel.receive()
                except Unavailable as error:
                    raise self.fail(f"tensor-parallel rank {rank} is gone: {error.message}") from error
                if message.kind == "failed":
                    raise self.fail(f"tensor-parallel rank {rank} failed: {message.fields['error']}")
                messages[rank] = message
            self.check_alive()
            check()
            if time.monotonic() > until:
                raise self.fail(f"tensor-parallel ranks {missing} sent no answer within {limit_s:g} s")
        return [messages[rank] for rank in range(1, self.size)]

    def check_alive(self) -> None:
        """Raises InternalError if the group has failed."""
        if self.failure is not None:
            raise InternalError(self.failure)

    def fail(self, reason: str) -> InternalError:
        """Marks the group as failed and closes its channels, which ends the ranks. Returns the error to raise.

        The error names the lost rank; if no rank is lost, it has the text `reason`.
        """
        if self.failure is None:
            self._set_failed(self._find_failed(STOP_S / 10) or reason)
        for channel in self.channels():  # the ranks may be in different steps
            channel.close()
        return InternalError(self.failure or reason)

    def close(self) -> None:
        """Stops the ranks, and waits until the ranks of this machine have ended. Idempotent."""
        if self._closing.is_set():
            return
        self._closing.set()
        for _, _, channel in self._all_channels():
            with contextlib.suppress(Unavailable):
                channel.send("stop")
            channel.close()
        if self._watcher is not None and self._watcher is not threading.current_thread():
            self._watcher.join(2 * STOP_S)

    def _accept_ranks(self, listener: socket.socket, secret: bytes, until: float, tls: TlsFiles | None = None) -> None:
        """Accepts connections until every rank has opened every channel."""
        wanted = [(kind, rank) for kind in self._channels for rank in range(1, self.size)]
        while missing := sorted({rank for kind, rank in wanted if rank not in self._channels[kind]}):
            self.check_alive()
            if time.monotonic() > until:
                raise InternalError(f"tensor-parallel ranks {missing} did not join in time")
            try:
                accepted = RankChannel.accept(listener, secret, POLL_S, tls)
            except (Unavailable, Unauthenticated) as error:
                _log.warning("refused a connection that does not belong to the group: %s", error.message)
                continue
            if accepted is None:
                continue
            channel, hello = accepted
            rank, joined = hello.fields.get("rank"), self._channels.get(hello.kind)
            if joined is None or not isinstance(rank, int) or not 0 < rank < self.size or rank in joined:
                reason = "the group has no rank like this, or it has joined already"
                _log.warning("refused %s: %s: kind %s, rank %s", channel.name, reason, hello.kind, rank)
                channel.close()
                continue
            channel.name = f"tensor-parallel rank {rank}"
            joined[rank] = channel

    def _watch(self, commands: Mapping[int, Sequence[str]], env: Mapping[str, str]) -> None:
        """Starts the watching thread. It starts the child processes and is their parent, so they end with it."""

        def run() -> None:
            try:
                for rank, command in commands.items():
                    options: dict[str, Any] = {"stdin": subprocess.DEVNULL, "start_new_session": True}
                    self._children[rank] = subprocess.Popen(tether_command(command), env=os.environ | env, **options)
            except OSError as error:
                self._start_error = error
            self._started.set()
            while not self._closing.wait(POLL_S):
                if self.failure is None and (reason := self._find_failed(0.0)) is not None:
                    self._set_failed(reason)
            self._end_children()

        self._watcher = threading.Thread(target=run, name="tensor-parallel", daemon=True)
        self._watcher.start()
        self._started.wait(JOIN_S)
        if self._start_error is not None:
            self.close()
            raise InternalError(f"a tensor-parallel rank cannot be started: {describe(self._start_error)}")

    def _find_failed(self, wait_s: float) -> str | None:
        """Returns a text about a rank that has ended or ends within `wait_s`, or None if there is none."""
        until = time.monotonic() + wait_s
        while True:
            for rank, child in self._children.items():
                if (code := child.poll()) is not None:
                    return f"tensor-parallel rank {rank} has ended ({_exit_text(code)})"
            for kind, rank, channel in self._all_channels():
                if channel.peer_closed():
                    with contextlib.suppress(KeyError, subprocess.TimeoutExpired):
                        code = self._children[rank].wait(1.0)  # a process closes its sockets before it ends
                        return f"tensor-parallel rank {rank} has ended ({_exit_text(code)})"
                    return f"tensor-parallel rank {rank} is gone (its {kind} channel is closed)"
            if time.monotonic() >= until:
                return None
            time.sleep(POLL_S / 10)

    def _set_failed(self, reason: str) -> None:
        with self._lock:
            if self.failure is not None or self._closing.is_set():
                return
            self.failure = reason
        _log.error("the tensor-parallel group has failed: %s", reason)
        self.on_failure()

    def _end_children(self) -> None:
        until = time.monotonic() + (STOP_S if self.failure is None else FAILED_STOP_S)
        for child in self._children.values():
            try:
                child.wait(max(0.0, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()


def split_address(address: str) -> tuple[str, int]:
    """Returns host and port of "host:port"."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def _exit_text(code: int) -> str:
    return signal.Signals(-code).name if code < 0 else f"exit code {code}"
