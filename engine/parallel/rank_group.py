"""Rank 0's other ranks: started here or expected from elsewhere, told what to do, and watched.

start -> every rank has joined -> told and asked, on the engine's thread -> closed, or failed

Ranks of this machine are children of ours and end with us. Those of other machines come to `master`. A group that lost
a rank, or in which one failed halfway through a step, has `failure` from then on and computes nothing more: its parts
may be of different steps. Nothing waits without a limit, and a rank that ended is noticed within WATCH_S.
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

from common.errors import ConfigError, InternalError, Unauthenticated, Unavailable
from common.process.rank_channel import RankChannel, RankMessage
from common.process.tether import tether_command
from engine.config import EngineConfig

log = logging.getLogger(__name__)

JOIN_S = 120.0  # for ranks of this machine, which import torch
JOIN_NODES_S = 1800.0  # for those of other machines, which may have to be started first
ANSWER_S = 1800.0  # a rank reads its weights before its first answer
POLL_S = 0.2
STOP_S = 5.0
SECRET_VARIABLE = "BATON_SECRET"

ENGINE_CHANNEL = "engine"  # the kind of a rank's first channel

RankCommand = Callable[[int, str], list[str]]


def rank_command(rank: int, master: str) -> list[str]:
    """The command line of a rank of an engine without a pod; its secret is in the environment."""
    return [sys.executable, "-P", "-m", "engine.parallel.rank", str(rank), master]


class RankGroup:
    """The other ranks of a group, in order; each has one channel of every kind. `on_loss` is called once, on the
    watching thread, when the group has failed.
    """

    def __init__(self, size: int, kinds: Sequence[str]) -> None:
        self.size = size
        self.failure: str | None = None
        self.on_failure: Callable[[], object] = lambda: None
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
        kinds: Sequence[str] = (ENGINE_CHANNEL,),
    ) -> RankGroup:
        """Starts the ranks of this machine, and waits for all. command: what they run; kinds: of the channels that each
        opens. secret: of the group; None: one that only our children know.

        Raises ConfigError when there can be no such group, InternalError when a rank does not come.
        """
        if config.tensor_parallel_nodes > 1 and secret is None:
            raise ConfigError(
                "tensor_parallel_nodes: only pods know the secret by which several machines trust each other",
                field="tensor_parallel_nodes",
            )
        host, port = split_address(config.tensor_parallel_master or "127.0.0.1:0")
        try:
            listener = socket.create_server((host, port), family=socket.AF_INET)
        except OSError as error:
            raise ConfigError(
                f"tensor_parallel_master: {host}:{port} is not ours to listen on: {error}",
                field="tensor_parallel_master",
            ) from error
        members = cls(config.tensor_parallel_size, kinds)
        known = secret or secrets.token_hex(16)
        with listener:
            at = f"{host}:{listener.getsockname()[1]}"
            local = range(1, config.local_ranks)
            members._watch({rank: command(rank, at) for rank in local}, {SECRET_VARIABLE: known})
            limit = JOIN_S if config.tensor_parallel_nodes == 1 else JOIN_NODES_S
            try:
                members._accept_ranks(listener, known.encode(), time.monotonic() + limit)
            except BaseException:
                members.close()
                raise
        return members

    def channels(self, kind: str = ENGINE_CHANNEL) -> list[RankChannel]:
        """Those of one kind, by rank from 1 on."""
        return [self._channels[kind][rank] for rank in range(1, self.size)]

    @property
    def pids(self) -> list[int]:
        """Of the ranks of this machine."""
        return [child.pid for child in self._children.values()]

    @property
    def host(self) -> str:
        """An address of ours that all other ranks reach."""
        return self.channels()[0].host

    def send(self, kind: str, payload: bytes | memoryview = b"", **fields: Any) -> None:
        """To every rank, without an answer. Raises InternalError when the group has failed."""
        self.check_alive()
        try:
            for channel in self.channels():
                channel.send(kind, payload, **fields)
        except Unavailable as error:
            raise self.fail(error.message) from error

    def call(self, kind: str, **fields: Any) -> list[RankMessage]:
        """Every rank's answer. Raises InternalError when one fails, or says nothing in ANSWER_S."""
        self.send(kind, **fields)
        return self.receive()

    def receive(self) -> list[RankMessage]:
        """What every rank says next."""
        found: list[RankMessage] = []
        for rank, channel in enumerate(self.channels(), 1):
            try:
                message = channel.receive(ANSWER_S)
            except Unavailable as error:
                raise self.fail(f"tensor-parallel rank {rank} is gone: {error.message}") from error
            if message.kind == "failed":
                raise self.fail(f"tensor-parallel rank {rank} failed: {message.fields['error']}")
            found.append(message)
        return found

    def check_alive(self) -> None:
        """Raises InternalError when the group has failed."""
        if self.failure is not None:
            raise InternalError(self.failure)

    def fail(self, reason: str) -> InternalError:
        """The group computes nothing more, its ranks end. Returns the error to raise, which names the rank that is at
        fault where one is.
        """
        if self.failure is None:
            self._set_failed(self._find_failed(STOP_S / 10) or reason)
        for channel in self.channels():  # what the ranks computed may be of different steps
            channel.close()
        return InternalError(self.failure or reason)

    def close(self) -> None:
        """Ends the ranks; those of this machine are gone afterwards. Idempotent."""
        if self._closing.is_set():
            return
        self._closing.set()
        for channels in self._channels.values():
            for channel in channels.values():
                with contextlib.suppress(Unavailable):
                    channel.send("stop")
                channel.close()
        if self._watcher is not None and self._watcher is not threading.current_thread():
            self._watcher.join(2 * STOP_S)

    def _accept_ranks(self, listener: socket.socket, secret: bytes, until: float) -> None:
        """Accepts until every rank has opened every channel."""
        while missing := self._missing():
            if self.failure is not None:
                raise InternalError(self.failure)
            if time.monotonic() > until:
                raise InternalError(f"tensor-parallel ranks {missing} did not come")
            try:
                came = RankChannel.accept(listener, secret, POLL_S)
            except (Unavailable, Unauthenticated) as error:
                log.warning("somebody came and was not of the group: %s", error.message)
                continue
            if came is None:
                continue
            channel, hello = came
            rank, known = hello.fields.get("rank"), self._channels.get(hello.kind)
            if known is None or not isinstance(rank, int) or not 0 < rank < self.size or rank in known:
                log.warning("%s is no rank of this group, or is here already: %s %s", channel.name, hello.kind, rank)
                channel.close()
                continue
            channel.name = f"tensor-parallel rank {rank}"
            known[rank] = channel

    def _missing(self) -> list[int]:
        return sorted({rank for known in self._channels.values() for rank in range(1, self.size) if rank not in known})

    # The watching thread, which is the children's parent: they end with it.

    def _watch(self, commands: Mapping[int, Sequence[str]], env: Mapping[str, str]) -> None:
        def run() -> None:
            try:
                for rank, command in commands.items():
                    self._children[rank] = subprocess.Popen(
                        tether_command(command),
                        stdin=subprocess.DEVNULL,
                        env={**os.environ, **env},
                        start_new_session=True,
                    )
            except OSError as error:
                self._start_error = error
            self._started.set()
            while not self._closing.wait(POLL_S):
                if self.failure is None and (culprit := self._find_failed(0.0)) is not None:
                    self._set_failed(culprit)
            self._end_children()

        self._watcher = threading.Thread(target=run, name="tensor-parallel", daemon=True)
        self._watcher.start()
        self._started.wait(JOIN_S)
        if self._start_error is not None:
            self.close()
            raise InternalError(f"a tensor-parallel rank cannot be started: {self._start_error}")

    def _find_failed(self, wait_s: float) -> str | None:
        """The rank that ended or failed, and how, if one did or does within wait_s."""
        until = time.monotonic() + wait_s
        while True:
            for rank, child in self._children.items():
                if (code := child.poll()) is not None:
                    return f"tensor-parallel rank {rank} has ended ({_exit_text(code)})"
            gone = {
                rank: kind
                for kind, known in self._channels.items()
                for rank, c in list(known.items())
                if c.peer_closed()
            }
            for rank, kind in gone.items():
                with contextlib.suppress(subprocess.TimeoutExpired):  # its sockets are closed before it is over
                    if rank in self._children:
                        return f"tensor-parallel rank {rank} has ended ({_exit_text(self._children[rank].wait(1.0))})"
                return f"tensor-parallel rank {rank} is gone (its {kind} channel is closed)"
            if time.monotonic() >= until:
                return None
            time.sleep(POLL_S / 10)

    def _set_failed(self, reason: str) -> None:
        with self._lock:
            if self.failure is not None or self._closing.is_set():
                return
            self.failure = reason
        log.error("the tensor-parallel group has failed: %s", reason)
        self.on_failure()

    def _end_children(self) -> None:
        until = time.monotonic() + STOP_S
        for child in self._children.values():
            try:
                child.wait(max(0.0, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()


def split_address(address: str) -> tuple[str, int]:
    """host:port"""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def _exit_text(code: int) -> str:
    return signal.Signals(-code).name if code < 0 else f"exit code {code}"
