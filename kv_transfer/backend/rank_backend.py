"""Transfer agents of the other ranks of a tensor-parallel group. Rank 0 drives each over a channel.

    rank 0: RankBackendClient <-- channel --> rank r: RankBackendServer, on a thread of its own

Writes are posted without an answer. The rank polls pending writes and reports the result of each once. A rank that is
gone posts nothing more: every write that it had in flight counts as failed.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from common.errors import TransferFailed, Unavailable
from common.process.rank_channel import RankChannel, RankMessage
from kv_transfer.backend.interface import Backend, WriteState
from kv_transfer.memory import PeerMemory, PoolMemory

_log = logging.getLogger(__name__)

CALL_S = 60.0  # The first agent of a machine loads libraries
CLOSE_S = 2.0
POLL_S = 0.001  # Pause between polls while writes are pending
IDLE_S = 0.02


class RankBackendClient:
    """Rank 0's end of one channel. The transfer thread owns it."""

    def __init__(self, rank: int, channel: RankChannel) -> None:
        self.rank = rank
        self._channel = channel
        self._ended: dict[int, str] = {}  # Ended writes by number: "" or the reason of the failure
        self._progress_requested = False
        self._gone: str | None = None  # Why the rank cannot be used any more

    def send(self, kind: str, payload: bytes = b"", **fields: Any) -> None:
        """Sends a message. `wait_response` must follow a request. Requests to several ranks run at the same time."""
        if self._gone is None:
            try:
                self._channel.send(kind, payload, **fields)
            except Unavailable as error:
                self._mark_gone(error.message)

    def wait_response(self, timeout_s: float = CALL_S) -> RankMessage:
        """Returns the response to the last request. Raises TransferFailed if the rank refuses, ended or is silent."""
        until = time.monotonic() + timeout_s
        while (message := self._receive(max(0.0, until - time.monotonic()))) is not None:
            if message.kind == "refused":
                raise TransferFailed(f"tensor-parallel rank {self.rank}: {message.fields['error']}")
            if message.kind == "done":
                return message
        if self._gone is None:
            self._mark_gone(f"tensor-parallel rank {self.rank} did not answer within {timeout_s:g} s")
        raise TransferFailed(self._gone or "")

    def post(self, number: int, peer: str, local: Sequence[int], remote: Sequence[int]) -> None:
        """Posts a write. `number` must be new."""
        blocks = np.array([local, remote], dtype=np.int32).tobytes()
        self.send("write", blocks, number=number, peer=peer)

    def result(self, number: int) -> str | None:
        """Returns None while the write is pending, "" if it is done, else the reason of its failure."""
        return self._ended.get(number, self._gone)

    def forget(self, number: int) -> None:
        """Forgets an ended write."""
        self._ended.pop(number, None)

    def receive_results(self) -> None:
        """Receives the results that the rank has sent."""
        while self._receive(0.0) is not None:
            pass

    def request_progress(self) -> None:
        """Wakes the rank to make progress. At most one of these requests is in flight."""
        if not self._progress_requested:
            self._progress_requested = True
            self.send("nudge")

    def close(self) -> None:
        """Ends the rank's agent."""
        try:
            self.send("close")
            self.wait_response(CLOSE_S)
        except TransferFailed as error:
            _log.warning("%s", error.message)

    def _receive(self, timeout_s: float) -> RankMessage | None:
        """Takes the next message; None if there is none within timeout_s or the rank is gone."""
        if self._gone is not None:
            return None
        try:
            message = self._channel.receive() if self._channel.wait_readable(timeout_s) else None
        except Unavailable as error:
            self._mark_gone(error.message)
            return None
        if message is not None and message.kind == "ended":
            self._ended |= {int(number): why for number, why in message.fields["writes"].items()}
        elif message is not None and message.kind == "nudged":
            self._progress_requested = False
        return message

    def _mark_gone(self, why: str) -> None:
        _log.error("%s", why)
        self._gone = why


@dataclass(eq=False)
class RankBackendServer:
    """The rank's end of the channel: drives one backend until rank 0 is gone."""

    channel: RankChannel
    make: Callable[[], Backend]  # Called, like `memory`, when rank 0 starts the backend
    memory: Callable[[], PoolMemory]  # This rank's pool

    def __post_init__(self) -> None:
        self._backend: Backend | None = None
        self._pending: dict[int, int] = {}  # Rank 0's number -> the backend's handle
        self._done: dict[int, str] = {}  # Results to send: "" or the reason of the failure

    def run(self) -> None:
        """Returns when rank 0 sends stop. Raises Unavailable when rank 0 is gone."""
        while True:
            if self.channel.wait_readable(POLL_S if self._pending else IDLE_S):
                message = self.channel.receive()
                if message.kind == "stop":
                    return
                self._handle(message)
            if self._backend is not None:
                self._backend.notifications()  # makes progress; only rank 0 gets notifications
                self._poll(self._backend)
            if self._done:
                self.channel.send("ended", writes=self._done)
                self._done = {}

    def _handle(self, message: RankMessage) -> None:
        if message.kind == "write":
            self._post(message)
        elif message.kind == "nudge":
            self.channel.send("nudged")
        else:
            try:
                payload, fields = self._answer(message)
            except TransferFailed as error:
                self.channel.send("refused", error=error.message)
            else:
                self.channel.send("done", payload, **fields)

    def _answer(self, message: RankMessage) -> tuple[bytes, dict[str, Any]]:
        fields = message.fields
        if message.kind == "start":
            memory, self._backend = self.memory(), self.make()
            self._backend.start(fields["name"], memory)
            return b"", {"base": memory.base, "device": memory.device}
        backend = self._backend
        if backend is None:
            raise TransferFailed("the agent of this rank is not started")
        match message.kind:
            case "metadata":
                return backend.metadata(), {}
            case "connect":
                backend.connect(fields["peer"], message.payload, PeerMemory(**fields["memory"]))
            case "disconnect":
                backend.disconnect(fields["peer"])
            case "transport":
                return b"", asdict(backend.transport(fields["peer"], same_host=fields["same_host"]))
            case "close":
                backend.close()
                self._backend = None
            case _:
                raise TransferFailed(f"unknown request {message.kind!r}")
        return b"", {}

    def _post(self, message: RankMessage) -> None:
        local, remote = np.frombuffer(message.payload, dtype=np.int32).reshape(2, -1).tolist()
        number, peer = message.fields["number"], message.fields["peer"]
        if self._backend is None:
            self._done[number] = "the agent of this rank is not started"
        else:
            self._pending[number] = self._backend.write(peer, local, remote, b"")

    def _poll(self, backend: Backend) -> None:
        for number, handle in list(self._pending.items()):
            state = backend.poll(handle)
            if state is not WriteState.PENDING:
                self._done[number] = backend.error(handle) or "failed" if state is WriteState.FAILED else ""
                backend.release(handle)
                del self._pending[number]


def pack_group_metadata(agents: Sequence[tuple[str, bytes, int, int]]) -> bytes:
    """Packs (agent, metadata, pool base, device) of every rank into one metadata."""
    head = json.dumps([[name, len(metadata), base, device] for name, metadata, base, device in agents]).encode()
    return b"".join([len(head).to_bytes(4, "little"), head, *(metadata for _, metadata, _, _ in agents)])


def unpack_group_metadata(packed: bytes) -> list[tuple[str, bytes, int, int]]:
    """Unpacks the bytes of `pack_group_metadata`. Raises TransferFailed for other bytes."""
    try:
        start = 4 + int.from_bytes(packed[:4], "little")
        agents: list[tuple[str, bytes, int, int]] = []
        for name, size, base, device in json.loads(packed[4:start]):
            agents.append((str(name), packed[start : start + size], int(base), int(device)))
            start += size
    except (ValueError, TypeError) as error:
        raise TransferFailed("the metadata is not that of a tensor-parallel group") from error
    return agents
