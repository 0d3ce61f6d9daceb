"""The transfer agents of a tensor-parallel group as one backend. Each rank writes its slices to the peer's ranks.

    rank 0: ShardedBackend, a RankBackendClient per rank <-- channel --> rank r: RankBackendServer, on its own thread

A write is DONE when it is done on every rank. It is FAILED when one rank failed and no rank has it in flight. Its
notification goes from rank 0 to rank 0 after the bytes of all ranks, so leases, quarantine and the state machines are
independent of ranks. The peer may have another number of ranks (common/kv_slices.py); impossible pairs are refused by
the layout at the handshake and by connect().

Writes are posted to a rank without an answer. The rank polls pending writes and reports the result of each once. A rank
that is gone posts nothing more: every write that it had in flight counts as failed.
"""

from __future__ import annotations

import itertools
import json
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from common.errors import LayoutMismatch, TransferFailed, Unavailable
from common.kv_layout import KVLayout
from common.kv_slices import BlockSpan, checked_parts, rank_slices
from common.process.rank_channel import RankChannel, RankMessage
from kv_transfer.backend.interface import TCP_OR_UNKNOWN, Backend, Notification, Transport, WriteState
from kv_transfer.backend.slice_checksums import join_checksums, part_checksums
from kv_transfer.memory import PeerMemory, PoolMemory, whole_checksums

_log = logging.getLogger(__name__)

CALL_S = 60.0  #: The first agent of a machine loads libraries.
CLOSE_S = 2.0
POLL_S = 0.001  #: Pause between polls while writes are pending.
IDLE_S = 0.02
_NOT_STARTED = "the agent of this rank is not started"
_NOT_STAGED = "KV of pods with several ranks cannot go through host memory"
_MAGIC = b"baton-ranks\0"  #: The metadata of a pod with several ranks begins with it.


class RankBackendClient:
    """Rank 0's end of one channel. The transfer thread owns it."""

    def __init__(self, rank: int, channel: RankChannel) -> None:
        self.rank = rank
        self._channel = channel
        self._ended: dict[int, str] = {}  #: Ended writes by number: "" or the reason of the failure.
        self._progress_requested = False
        self._gone: str | None = None  #: Why the rank cannot be used any more.

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
        """Gives the rank up. The closed channel ends its process and the group, because the rank may only be silent."""
        _log.error("%s", why)
        self._gone = why
        self._channel.close()


@dataclass(eq=False)
class RankBackendServer:
    """The rank's end of the channel: drives one backend until rank 0 is gone."""

    channel: RankChannel
    make: Callable[[], Backend]  #: Called, like `memory`, when rank 0 starts the backend.
    memory: Callable[[], PoolMemory]  #: This rank's pool.

    def __post_init__(self) -> None:
        self._backend: Backend | None = None
        self._pending: dict[int, int] = {}  #: Rank 0's number -> the backend's handle.
        self._done: dict[int, str] = {}  #: Results to send: "" or the reason of the failure.

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
            raise TransferFailed(_NOT_STARTED)
        match message.kind:
            case "metadata":
                return backend.metadata(), {}
            case "connect":
                span = None if fields["span"] is None else BlockSpan(**fields["span"])
                backend.connect(fields["peer"], message.payload, PeerMemory(**fields["memory"]), span)
            case "disconnect":
                backend.disconnect(fields["peer"])
            case "transport":
                return b"", asdict(backend.transport(fields["peer"], same_host=fields["same_host"]))
            case "checksums":
                blocks = np.frombuffer(message.payload, dtype=np.int32).tolist()
                return part_checksums(self.memory(), blocks, fields["ranges"]).tobytes(), {}
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
            self._done[number] = _NOT_STARTED
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
    return b"".join([_MAGIC, len(head).to_bytes(4, "little"), head, *(metadata for _, metadata, _, _ in agents)])


def unpack_group_metadata(packed: bytes) -> list[tuple[str, bytes, int, int]]:
    """Unpacks the bytes of `pack_group_metadata`; [] for the metadata of a pod with one rank. Raises TransferFailed."""
    if not packed.startswith(_MAGIC):
        return []
    try:
        packed = packed[len(_MAGIC) :]
        start = 4 + int.from_bytes(packed[:4], "little")
        agents: list[tuple[str, bytes, int, int]] = []
        for name, size, base, device in json.loads(packed[4:start]):
            agents.append((str(name), packed[start : start + size], int(base), int(device)))
            start += size
    except (ValueError, TypeError) as error:
        raise TransferFailed("the metadata is not that of a tensor-parallel group") from error
    return agents


class _PeerSlice(NamedTuple):
    """The slices that one rank of this pod writes to one rank of a peer."""

    rank: RankBackendClient | None  #: None: rank 0.
    agent: str


@dataclass(slots=True)
class _ShardedWrite:
    peer: str
    notification: bytes
    own: list[int] = field(default_factory=list)  #: Handles of rank 0's backend.
    others: list[tuple[RankBackendClient, int]] = field(default_factory=list)  #: Ranks and numbers of their writes.
    state: WriteState = WriteState.PENDING
    error: str = ""


class ShardedBackend:
    """One backend over the agents of all ranks of a pod: rank 0's `own`, and the other `ranks` in order.

    A pod with one rank needs it too: its peer may have several.
    """

    def __init__(self, own: Backend, ranks: Sequence[RankBackendClient], layout: KVLayout) -> None:
        assert layout.tensor_parallel == 1 + len(ranks)
        self._own, self._ranks, self._layout = own, ranks, layout
        self._name = ""
        self._memory: PoolMemory | None = None
        self._places: list[tuple[int, int]] = []  #: Base address and device of each rank's pool.
        self._writes: dict[int, _ShardedWrite] = {}
        self._numbers = itertools.count(1)
        self._peers: dict[str, list[_PeerSlice]] = {}  #: By agent of the peer's rank 0; rank 0 is the last to post.

    def start(self, name: str, memory: PoolMemory) -> None:
        for rank in self._ranks:
            rank.send("start", name=_agent(name, rank))
        started = self._with_rank_0(self._ranks, lambda: self._own.start(name, memory))
        self._name, self._memory = name, memory
        self._places = [(memory.base, memory.device), *((s.fields["base"], s.fields["device"]) for s in started)]

    def metadata(self) -> bytes:
        for rank in self._ranks:
            rank.send("metadata")
        own: list[bytes] = []
        others = self._with_rank_0(self._ranks, lambda: own.append(self._own.metadata()))
        if not self._ranks:
            return own[0]
        names = [self._name, *(_agent(self._name, rank) for rank in self._ranks)]
        each = [*own, *(response.payload for response in others)]
        return pack_group_metadata([(n, m, *place) for n, m, place in zip(names, each, self._places, strict=True)])

    def connect(self, peer: str, metadata: bytes, memory: PeerMemory, span: BlockSpan | None = None) -> None:
        assert span is None, "the ranks decide the spans"
        agents = unpack_group_metadata(metadata) or [(peer, metadata, memory.base, memory.device)]
        size, theirs = len(agents), replace(self._layout, tensor_parallel=len(agents))
        try:
            self._layout.require_equal(theirs)
        except LayoutMismatch as error:
            raise TransferFailed(error.message) from error
        slices, asked, own = [], [], []
        for part in rank_slices(self._layout, size):
            agent, agent_metadata, base, device = agents[part.target_rank]
            nbytes = memory.block_bytes if part.target_rank == 0 else theirs.of_rank(part.target_rank).block_bytes
            of_rank = replace(memory, base=base, device=device, block_bytes=nbytes)
            range_ = None if size == self._layout.tensor_parallel else part.span
            if part.source_rank == 0:
                slices.append(_PeerSlice(None, agent))
                own.append(partial(self._own.connect, agent, agent_metadata, of_rank, range_))
                continue
            rank = self._ranks[part.source_rank - 1]
            slices.append(_PeerSlice(rank, agent))
            asked.append(rank)
            fields = {"memory": asdict(of_rank), "span": None if range_ is None else asdict(range_)}
            rank.send("connect", agent_metadata, peer=agent, **fields)
        self._peers[peer] = sorted(slices, key=lambda part: part.rank is None)  # all ranks post before rank 0 copies
        try:
            self._with_rank_0(asked, lambda: [connect() for connect in own])
        except TransferFailed:
            self.disconnect(peer)
            raise

    def disconnect(self, peer: str) -> None:
        slices = self._peers.pop(peer, ())
        asked = [part.rank for part in slices if part.rank is not None]
        for rank, agent in slices:
            if rank is not None:
                rank.send("disconnect", peer=agent)

        def disconnect_own() -> None:
            for rank, agent in slices:
                if rank is None:
                    self._own.disconnect(agent)

        self._with_rank_0(asked, disconnect_own)

    def add_peer(self, peer: str, metadata: bytes) -> None:
        agents = unpack_group_metadata(metadata)
        self._own.add_peer(peer, agents[0][1] if agents else metadata)

    def remove_peer(self, peer: str) -> None:
        self._own.remove_peer(peer)

    def staging_metadata(self) -> bytes:
        return b"" if self._ranks else self._own.staging_metadata()

    def connect_staged(self, peer: str, metadata: bytes) -> None:
        if self._ranks or len(self._peers.get(peer, ())) > 1:
            raise TransferFailed(_NOT_STAGED)
        self._own.connect_staged(peer, metadata)

    def accept_staged(self, peer: str, metadata: bytes) -> None:
        if self._ranks:
            raise TransferFailed(_NOT_STAGED)
        self._own.accept_staged(peer, metadata)

    def _with_rank_0(self, asked: Sequence[RankBackendClient], act: Callable[[], object]) -> list[RankMessage]:
        """Runs `act` for rank 0 and returns the responses to the requests sent before, one for each entry of `asked`.

        Raises the first TransferFailed after every rank has answered.
        """
        failed: list[TransferFailed] = []
        responses: list[RankMessage] = []
        try:
            act()
        except TransferFailed as error:
            failed.append(error)
        for rank in asked:
            try:
                responses.append(rank.wait_response())
            except TransferFailed as error:
                failed.append(error)
        if failed:
            raise failed[0]
        return responses

    def write(self, peer: str, local: Sequence[int], remote: Sequence[int], notification: bytes) -> int:
        number, write = next(self._numbers), _ShardedWrite(peer, notification)
        for rank, agent in self._peers.get(peer, [_PeerSlice(None, peer)]):
            if rank is None:
                write.own.append(self._own.write(agent, local, remote, b""))
            else:
                write.others.append((rank, next(self._numbers)))
                rank.post(write.others[-1][1], agent, local, remote)
        self._writes[number] = write
        return number

    def notify(self, peer: str, payload: bytes) -> None:
        self._own.notify(peer, payload)

    def poll(self, handle: int) -> WriteState:
        write = self._writes[handle]
        if write.state is not WriteState.PENDING:
            return write.state
        for rank in self._ranks:
            rank.receive_results()
        own_states = [self._own.poll(own) for own in write.own]
        results = [rank.result(number) for rank, number in write.others]
        if WriteState.PENDING in own_states or None in results:
            return WriteState.PENDING
        failed = [own for own, state in zip(write.own, own_states, strict=True) if state is WriteState.FAILED]
        errors = [self._own.error(own) for own in failed]
        errors += [f"rank {rank.rank}: {why}" for (rank, _), why in zip(write.others, results, strict=True) if why]
        if not errors and write.notification:
            try:
                self._own.notify(write.peer, write.notification)
            except TransferFailed as error:
                errors = [error.message]
        write.state, write.error = WriteState.FAILED if errors else WriteState.DONE, "; ".join(errors)
        return write.state

    def error(self, handle: int) -> str:
        return self._writes[handle].error

    def release(self, handle: int) -> None:
        write = self._writes.pop(handle)
        assert write.state is not WriteState.PENDING, "a pending write was released"
        for own in write.own:
            self._own.release(own)
        for rank, number in write.others:
            rank.forget(number)

    def notifications(self) -> list[Notification]:
        for rank in self._ranks:
            rank.receive_results()
            rank.request_progress()
        return self._own.notifications()

    def transport(self, peer: str, *, same_host: bool) -> Transport:
        """Returns rank 0's transport, unless another rank has one of TCP_OR_UNKNOWN."""
        slices = self._peers.get(peer, [_PeerSlice(None, peer)])
        asked = [part.rank for part in slices if part.rank is not None]
        for rank, agent in slices:
            if rank is not None:
                rank.send("transport", peer=agent, same_host=same_host)
        own, found = [agent for rank, agent in slices if rank is None], list[Transport]()
        others = self._with_rank_0(
            asked, lambda: found.extend(self._own.transport(agent, same_host=same_host) for agent in own)
        )
        found += [Transport(**response.fields) for response in others]
        return next((transport for transport in found if transport.name in TCP_OR_UNKNOWN), found[0])

    def checksums(self, blocks: Sequence[int]) -> list[int]:
        memory, layout = self._memory, self._layout
        assert memory is not None, "the backend is not started"
        parts = [checked_parts(layout, rank) for rank in range(layout.tensor_parallel)]
        if len(parts) == 1 and len(parts[0]) == 1:
            return whole_checksums(memory, blocks)
        ranges = [list(of_rank.values()) for of_rank in parts]
        for rank, of_rank in zip(self._ranks, ranges[1:], strict=True):
            rank.send("checksums", np.array(blocks, dtype=np.int32).tobytes(), ranges=of_rank)
        own: list[np.ndarray] = []
        others = self._with_rank_0(self._ranks, lambda: own.append(part_checksums(memory, blocks, ranges[0])))
        found = [*own, *(np.frombuffer(response.payload, dtype=np.uint32) for response in others)]
        shaped = [sums.reshape(len(blocks), len(of_rank)) for sums, of_rank in zip(found, parts, strict=True)]
        return join_checksums(parts, shaped)

    def close(self) -> None:
        for rank in self._ranks:
            rank.close()
        self._own.close()


def _agent(name: str, rank: RankBackendClient) -> str:
    return f"{name}-rank{rank.rank}"
