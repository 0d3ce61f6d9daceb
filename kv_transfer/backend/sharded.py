"""The transfer agents of a tensor-parallel group as one backend. Rank r writes to the peer's rank r, the same blocks.

A write is DONE when it is done on every rank. It is FAILED when one rank failed and no rank has it in flight. Its
notification goes from rank 0 to rank 0 after the bytes of all ranks, so leases, quarantine and the state machines are
independent of ranks. Groups of different sizes are refused, by the layout at the handshake and by connect().
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace

from common.errors import TransferFailed
from common.process.rank_channel import RankMessage
from kv_transfer.backend.interface import REFUSABLE_TRANSPORTS, Backend, Notification, Transport, WriteState
from kv_transfer.backend.rank_backend import RankBackendClient, pack_group_metadata, unpack_group_metadata
from kv_transfer.memory import PeerMemory, PoolMemory


@dataclass(slots=True)
class _ShardedWrite:
    peer: str
    handle: int  # Handle of rank 0's backend
    notification: bytes
    state: WriteState = WriteState.PENDING
    error: str = ""


class ShardedBackend:
    """One backend over the agents of all ranks of a pod.

    Args:
        own: rank 0's backend.
        ranks: the other ranks' agents, in order.
    """

    def __init__(self, own: Backend, ranks: Sequence[RankBackendClient]) -> None:
        self._own, self._ranks = own, ranks
        self._name = ""
        self._places: list[tuple[int, int]] = []  # Base address and device of each rank's pool
        self._writes: dict[int, _ShardedWrite] = {}
        self._numbers = itertools.count(1)
        self._peers: dict[str, list[str]] = {}  # Agent of the peer's rank 0 -> agents of its other ranks

    def start(self, name: str, memory: PoolMemory) -> None:
        for rank in self._ranks:
            rank.send("start", name=_agent(name, rank))
        started = self._on_all_ranks(lambda: self._own.start(name, memory))
        self._name = name
        self._places = [(memory.base, memory.device), *((s.fields["base"], s.fields["device"]) for s in started)]

    def metadata(self) -> bytes:
        for rank in self._ranks:
            rank.send("metadata")
        own: list[bytes] = []
        others = self._on_all_ranks(lambda: own.append(self._own.metadata()))
        names = [self._name, *(_agent(self._name, rank) for rank in self._ranks)]
        each = [*own, *(response.payload for response in others)]
        return pack_group_metadata([(n, m, *place) for n, m, place in zip(names, each, self._places, strict=True)])

    def connect(self, peer: str, metadata: bytes, memory: PeerMemory) -> None:
        agents = unpack_group_metadata(metadata)
        if len(agents) != 1 + len(self._ranks):
            raise TransferFailed(f"{peer} has {len(agents)} tensor-parallel ranks, this pod {1 + len(self._ranks)}")
        for rank, (name, rank_metadata, base, device) in zip(self._ranks, agents[1:], strict=True):
            rank.send("connect", rank_metadata, peer=name, memory=asdict(replace(memory, base=base, device=device)))
        self._peers[peer] = [name for name, *_ in agents[1:]]
        try:
            self._on_all_ranks(lambda: self._own.connect(peer, agents[0][1], memory))
        except TransferFailed:
            self.disconnect(peer)
            raise

    def disconnect(self, peer: str) -> None:
        names = self._peers.pop(peer, None)
        if names is not None:
            for rank, name in zip(self._ranks, names, strict=True):
                rank.send("disconnect", peer=name)
            self._on_all_ranks(lambda: self._own.disconnect(peer))

    def add_peer(self, peer: str, metadata: bytes) -> None:
        self._own.add_peer(peer, unpack_group_metadata(metadata)[0][1])

    def remove_peer(self, peer: str) -> None:
        self._own.remove_peer(peer)

    def _on_all_ranks(self, act: Callable[[], None]) -> list[RankMessage]:
        """Runs `act` for rank 0 and returns the responses of the other ranks to the request sent before.

        Raises the first TransferFailed after every rank has answered.
        """
        failed: list[TransferFailed] = []
        responses: list[RankMessage] = []
        try:
            act()
        except TransferFailed as error:
            failed.append(error)
        for rank in self._ranks:
            try:
                responses.append(rank.wait_response())
            except TransferFailed as error:
                failed.append(error)
        if failed:
            raise failed[0]
        return responses

    def write(self, peer: str, local: Sequence[int], remote: Sequence[int], notification: bytes) -> int:
        number = next(self._numbers)
        names = self._peers.get(peer, [f"{peer} (not connected)"] * len(self._ranks))
        for rank, name in zip(self._ranks, names, strict=True):  # before rank 0, so that all ranks post at once
            rank.post(number, name, local, remote)
        self._writes[number] = _ShardedWrite(peer, self._own.write(peer, local, remote, b""), notification)
        return number

    def notify(self, peer: str, payload: bytes) -> None:
        self._own.notify(peer, payload)

    def poll(self, handle: int) -> WriteState:
        write = self._writes[handle]
        if write.state is not WriteState.PENDING:
            return write.state
        for rank in self._ranks:
            rank.receive_results()
        own_state, rank_results = self._own.poll(write.handle), [rank.result(handle) for rank in self._ranks]
        if own_state is WriteState.PENDING or None in rank_results:
            return WriteState.PENDING
        errors = [f"rank {rank.rank}: {why}" for rank, why in zip(self._ranks, rank_results, strict=True) if why]
        if own_state is WriteState.FAILED:
            errors.insert(0, self._own.error(write.handle))
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
        self._own.release(write.handle)
        for rank in self._ranks:
            rank.forget(handle)

    def notifications(self) -> list[Notification]:
        for rank in self._ranks:
            rank.receive_results()
            rank.request_progress()
        return self._own.notifications()

    def transport(self, peer: str, *, same_host: bool) -> Transport:
        """Returns rank 0's transport, unless another rank has one of REFUSABLE_TRANSPORTS."""
        if peer not in self._peers:
            return self._own.transport(peer, same_host=same_host)
        for rank, name in zip(self._ranks, self._peers[peer], strict=True):
            rank.send("transport", peer=name, same_host=same_host)
        found: list[Transport] = []
        others = self._on_all_ranks(lambda: found.append(self._own.transport(peer, same_host=same_host)))
        found += [Transport(**response.fields) for response in others]
        return next((transport for transport in found if transport.name in REFUSABLE_TRANSPORTS), found[0])

    def close(self) -> None:
        for rank in self._ranks:
            rank.close()
        self._own.close()


def _agent(name: str, rank: RankBackendClient) -> str:
    return f"{name}-rank{rank.rank}"
