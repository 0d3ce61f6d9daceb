"""The order of calls to NIXL: an agent is loaded once, and metadata of a dead peer is never loaded again."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from common.errors import TransferFailed
from kv_transfer.backend.nixl import NixlBackend, _NixlAgent
from kv_transfer.memory import PeerMemory, host_pool

MEMORY = PeerMemory(4096, 64, 0, 4, "DRAM")


class Blocks:
    """A prepared list of blocks."""

    def release(self) -> None:
        pass


class FakeNixl:
    """A double of NIXL. It adds an agent once, removes only added agents, and refuses the metadata of a dead agent."""

    def __init__(self) -> None:
        self.known: set[str] = set()
        self.dead: set[str] = set()
        self.calls: list[str] = []

    def add_remote_agent(self, metadata: bytes) -> bytes:
        name = metadata.decode().partition(" ")[0]
        self.calls.append(f"add {name}")
        assert name not in self.known, "NIXL_ERR_NOT_ALLOWED"
        if name in self.dead:
            raise RuntimeError("NIXL_ERR_BACKEND")
        self.known.add(name)
        return name.encode()

    def remove_remote_agent(self, name: str) -> None:
        self.calls.append(f"remove {name}")
        self.known.remove(name)

    def prep_xfer_dlist(self, peer: str, _row: object, _kind: str) -> Blocks:
        assert peer in self.known
        return Blocks()

    def send_notif(self, peer: str, _payload: bytes) -> None:
        if peer not in self.known or peer in self.dead:
            raise RuntimeError("NIXL_ERR_REMOTE_DISCONNECT")

    def get_new_notifs(self) -> dict[str, list[bytes]]:
        return {}

    def deregister_memory(self, _registered: object) -> None:
        pass


@pytest.fixture
def nixl() -> FakeNixl:
    return FakeNixl()


@pytest.fixture
def backend(nixl: FakeNixl) -> NixlBackend:
    made = NixlBackend()
    made._agent = _NixlAgent(nixl, host_pool(4, 64), None, Blocks())
    return made


FORGET: list[list[Callable[[NixlBackend], None]]] = [
    [lambda b: b.disconnect("peer"), lambda b: b.remove_peer("peer")],
    [lambda b: b.remove_peer("peer"), lambda b: b.disconnect("peer")],
]


@pytest.mark.parametrize("notified_first", [True, False])
@pytest.mark.parametrize("forget", FORGET)
def test_a_dead_peer_is_forgotten_without_loading_its_metadata(
    backend: NixlBackend,
    nixl: FakeNixl,
    caplog: pytest.LogCaptureFixture,
    forget: list[Callable[[NixlBackend], None]],
    notified_first: bool,
) -> None:
    connect: list[Callable[[], None]] = [
        lambda: backend.add_peer("peer", b"peer 1"),
        lambda: backend.connect("peer", b"peer 1", MEMORY),
    ]
    for act in connect if notified_first else connect[::-1]:
        act()
    nixl.dead.add("peer")
    for step in forget:
        step(backend)
    assert nixl.calls == ["add peer", "remove peer"]
    assert not caplog.records


def test_after_a_broken_connection_notifications_use_a_new_one(backend: NixlBackend, nixl: FakeNixl) -> None:
    backend.add_peer("peer", b"peer 1")
    backend.connect("peer", b"peer 1", MEMORY)
    backend.disconnect("peer")
    assert nixl.known == set()
    backend.notify("peer", b"x")
    backend.notify("peer", b"x")
    assert nixl.calls == ["add peer", "remove peer", "add peer"]
    backend.connect("peer", b"peer 2", MEMORY)
    assert nixl.calls[3:] == ["remove peer", "add peer"], "NIXL accepts other metadata only after the removal"
    backend.remove_peer("peer")
    backend.notify("peer", b"x")  # the connection carries it
    backend.close()
    assert nixl.known == set()


def test_a_dead_peer_that_is_notified_is_named_in_words(backend: NixlBackend, nixl: FakeNixl) -> None:
    backend.add_peer("peer", b"peer 1")
    nixl.dead.add("peer")
    with pytest.raises(TransferFailed, match=r"^the peer ended the connection \(NIXL_ERR_REMOTE_DISCONNECT\)$"):
        backend.notify("peer", b"x")
    backend.connect("peer", b"peer 1", MEMORY)
    backend.disconnect("peer")
    with pytest.raises(TransferFailed, match=r"^NIXL refused the metadata of peer: the transport failed"):
        backend.notify("peer", b"x")
    with pytest.raises(TransferFailed, match="agent other is not connected"):
        backend.notify("other", b"x")


def test_metadata_of_another_agent_is_refused_and_unloaded(backend: NixlBackend, nixl: FakeNixl) -> None:
    with pytest.raises(TransferFailed, match="belongs to other, not to peer"):
        backend.connect("peer", b"other 1", MEMORY)
    assert nixl.known == set()
