"""Parts of tensor parallelism: sharded weights, step messages, rank channels, and the sharded transfer backend."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cli.stack.certificates import Authority
from common.errors import TransferFailed, Unauthenticated, Unavailable
from common.kv_layout import KVLayout
from common.process import rank_channel
from common.process.rank_channel import RankChannel, RankMessage
from common.tls import TlsFiles
from engine.attention.base import StepShape
from engine.models.decoder import Decoder
from engine.models.loader import open_model
from engine.models.spec import ModelSpec, Shard
from engine.models.weights.load import load_weights
from engine.models.weights.random_weights import randomize
from engine.models.weights.shards import rank_part
from engine.parallel.collectives import pack_step, unpack_step
from kv_transfer.backend.interface import Notification, WriteState
from kv_transfer.backend.loopback import LoopbackBackend, LoopbackFabric, LoopbackFault
from kv_transfer.backend.sharded import RankBackendClient, RankBackendServer, ShardedBackend
from kv_transfer.memory import PeerMemory, PoolMemory, host_pool
from tests.rigs.waiting import Clock

CPU = torch.device("cpu")
SECRET = b"secret of a group"
SHAPE = {"num_layers": 1, "num_kv_heads": 4, "head_dim": 8, "block_size": 2}
LAYOUT = KVLayout(model="m", revision="r", dtype="float32", tensor_parallel=2, **SHAPE)
BLOCKS, BLOCK_BYTES = 6, LAYOUT.block_bytes


@pytest.mark.parametrize("size", [2, 4, 8])
@torch.inference_mode()
def test_shards_are_slices_of_the_whole_model(size: int, tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=8,
        head_dim=4,
        num_key_value_heads=4,
        max_position_embeddings=32,
        attention_bias=True,
        mlp_bias=True,
    )
    made = LlamaForCausalLM(config)
    for parameter in made.parameters():
        parameter.normal_()
    made.save_pretrained(tmp_path)
    spec = open_model(tmp_path).spec
    assert isinstance(spec, ModelSpec)
    for fill, fill_part in (
        (
            lambda m: load_weights(m, tmp_path, spec),
            lambda m, shard: load_weights(m, tmp_path, spec, shard),
        ),
        (lambda m: randomize(m, 7), lambda m, shard: randomize(m, 7, shard)),
    ):
        whole = Decoder(spec, 32, CPU, torch.float32)
        fill(whole)
        for rank in range(size):
            shard = Shard(rank, size)
            cut = shard.shard_spec(spec)
            assert isinstance(cut, ModelSpec)
            part = Decoder(cut, 32, CPU, torch.float32)
            fill_part(part, shard)
            assert ("head.weight" in dict(part.named_parameters())) == (rank == 0)
            for name, parameter in part.named_parameters():
                module, _, kind = name.rpartition(".")
                cut_of_whole = rank_part(part.get_submodule(module), kind, whole.get_parameter(name), shard)
                assert torch.equal(parameter, cut_of_whole), name
        qkv, own_qkv = whole.layer_list[0].attention.qkv, part.layer_list[0].attention.qkv
        rows = qkv.weight.split([32, 16, 16])
        parts = [rank_part(own_qkv, "weight", qkv.weight, Shard(r, size)) for r in range(size)]
        own, copies = [32 // size, max(4, 16 // size), max(4, 16 // size)], [1, *[max(1, size // 4)] * 2]
        for at, kind in enumerate(rows):  # query, key and value heads are in the order of the ranks
            assert torch.equal(torch.cat([part.split(own)[at] for part in parts[:: copies[at]]]), kind)
            assert all(
                torch.equal(parts[r].split(own)[at], parts[r - r % copies[at]].split(own)[at]) for r in range(size)
            )


@settings(max_examples=50)
@given(st.lists(st.tuples(st.integers(0, 40), st.integers(1, 20)), min_size=1, max_size=5), st.integers(1, 8))
def test_an_unpacked_step_equals_the_packed_one(rows: list[tuple[int, int]], block_size: int) -> None:
    needed = [-(-(start + new) // block_size) for start, new in rows]
    blocks = [np.arange(count + 3, dtype=np.int32) * 7 + i for i, count in enumerate(needed)]
    shape = StepShape([start for start, _ in rows], [new for _, new in rows], blocks)
    unpacked = unpack_step(pack_step(shape, block_size))
    assert (list(unpacked.starts), list(unpacked.num_new)) == (list(shape.starts), list(shape.num_new))
    assert [list(b) for b in unpacked.blocks] == [list(b[:n]) for b, n in zip(blocks, needed, strict=True)]


def pair(
    secret: bytes = SECRET, leader: TlsFiles | None = None, member: TlsFiles | None = None
) -> tuple[RankChannel, RankChannel]:
    """Both ends of a channel, the end of rank 0 first. The files are certificates of the ends."""
    accepted: list[tuple[RankChannel, RankMessage] | None] = []
    refused: list[Exception] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def accept() -> None:
            try:
                accepted.append(RankChannel.accept(listener, SECRET, 10.0, leader))
            except (Unauthenticated, Unavailable) as error:
                refused.append(error)

        thread = threading.Thread(target=accept)
        thread.start()
        try:
            port = listener.getsockname()[1]
            other = RankChannel.connect("127.0.0.1", port, secret, "rank 0", "hello", member, rank=1)
        except (Unauthenticated, Unavailable) as error:
            thread.join()
            raise min([error, *refused], key=lambda e: isinstance(e, Unavailable)) from None  # the end that knows why
        finally:
            thread.join()
    if refused:
        other.close()
        raise refused[0]
    assert accepted[0] is not None
    channel, hello = accepted[0]
    assert (hello.kind, dict(hello.fields)) == ("hello", {"rank": 1})
    return channel, other


def certificates(authority: Authority, directory: Path, role: str) -> TlsFiles | None:
    authority.issue(directory / role, role, role, days=1)
    return TlsFiles.of_directory(directory / role, role)


@pytest.mark.parametrize("tls", [False, True])
def test_a_channel_carries_messages_until_one_end_closes(tls: bool, tmp_path: Path) -> None:
    authority = Authority.create()
    left, right = pair(
        SECRET, *(certificates(authority, tmp_path, role) if tls else None for role in ("both", "worker"))
    )
    left.send("one", b"\x00" * 300_000, number=5)
    left.send("two")
    first = right.receive(10.0)
    assert (first.kind, first.fields, len(first.payload)) == ("one", {"number": 5}, 300_000)
    assert right.receive(10.0).kind == "two"
    assert not right.peer_closed()
    with pytest.raises(Unavailable, match="sent no message"):
        right.receive(0.01)
    left.send("last")
    left.close()
    assert right.peer_closed()  # although messages are unread
    assert right.receive(10.0).kind == "last"
    with pytest.raises(Unavailable, match="is gone"):
        right.receive(10.0)
    right.close()


def test_a_large_message_has_its_time_limit_for_each_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    """A part of an adapter may take longer than SEND_S on a slow link, whose peer is not gone."""
    monkeypatch.setattr(rank_channel, "PIECE_BYTES", 1000)
    left, right = pair()
    calls = list[int]()

    class Recorder:
        """Passes the pieces on."""

        def __init__(self, sock: socket.socket) -> None:
            self._sock, self.close = sock, sock.close

        def sendall(self, piece: memoryview) -> None:
            calls.append(len(piece))
            self._sock.sendall(piece)

    left._sock = Recorder(left._sock)  # type: ignore[assignment]
    payload = bytes(range(250)) * 21
    left.send("hold", payload, load=1)
    assert max(calls) == 1000
    assert len(calls) == 6
    message = right.receive(10.0)
    assert (message.kind, message.fields, message.payload) == ("hold", {"load": 1}, payload)
    for end in (left, right):
        end.close()


def test_certificates_of_both_ends_are_of_one_authority_and_of_a_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, other = Authority.create(), Authority.create()
    leader, worker = (certificates(ours, tmp_path, role) for role in ("prefill", "worker"))
    gateway, stranger = certificates(ours, tmp_path, "gateway"), certificates(other, tmp_path / "other", "worker")
    left, right = pair(SECRET, leader, worker)
    assert left.peer_closed() is right.peer_closed() is False
    left.close()
    right.close()
    monkeypatch.setattr(rank_channel, "HELLO_S", 1.0)
    for first, second, reason in (
        (leader, gateway, "has the role gateway; expected worker or prefill"),
        (gateway, worker, "has the role gateway; expected prefill or decode or both"),
        (leader, stranger, "did not complete the TLS handshake"),
        (leader, None, "did not complete the TLS handshake.*tls_dir"),
        (None, worker, "did not complete the TLS handshake.*tls_dir|invalid message"),
    ):
        with pytest.raises((Unauthenticated, Unavailable), match=reason):
            pair(SECRET, first, second)


def test_a_wrong_secret_is_refused() -> None:
    with pytest.raises((Unauthenticated, Unavailable)):
        pair(b"another secret")


@dataclass
class Group:
    """A pod with two ranks on a loopback fabric. A thread serves the backend of rank 1, like its process does."""

    fabric: LoopbackFabric
    name: str
    memories: list[PoolMemory] = field(default_factory=lambda: [host_pool(BLOCKS, BLOCK_BYTES) for _ in range(2)])

    def __post_init__(self) -> None:
        mine, theirs = pair()
        self._ends = mine, theirs
        self._thread = threading.Thread(target=self._serve, args=(theirs,))
        self._thread.start()
        self.backend = ShardedBackend(LoopbackBackend(self.fabric), [RankBackendClient(1, mine)], LAYOUT)
        self.backend.start(self.name, self.memories[0])

    def _serve(self, channel: RankChannel) -> None:
        try:
            RankBackendServer(channel, lambda: LoopbackBackend(self.fabric), lambda: self.memories[1]).run()
        except Unavailable:
            channel.close()

    @property
    def memory(self) -> PeerMemory:
        own = self.memories[0]
        return PeerMemory(own.base, own.block_bytes, own.total_blocks, own.device, own.kind)

    def lose_rank(self) -> None:
        self._ends[1].close()

    def end(self) -> None:
        self._ends[0].close()
        self._thread.join(60.0)
        assert not self._thread.is_alive()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def fabric(clock: Clock) -> LoopbackFabric:
    return LoopbackFabric(clock)


@pytest.fixture
def groups(fabric: LoopbackFabric) -> Iterator[tuple[Group, Group]]:
    """A sender connected to a receiver. Each byte of a sender block is 10 * rank + block."""
    sender, receiver = Group(fabric, "sender"), Group(fabric, "receiver")
    for rank, memory in enumerate(sender.memories):
        for block in range(BLOCKS):
            memory.write_block(block, bytes([10 * rank + block]) * BLOCK_BYTES)
    sender.backend.connect("receiver", receiver.backend.metadata(), receiver.memory)
    yield sender, receiver
    sender.end()
    receiver.end()


def wait(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + 60.0
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.001)


def settle(backend: ShardedBackend, handle: int) -> WriteState:
    wait(lambda: backend.poll(handle) is not WriteState.PENDING)
    return backend.poll(handle)


def test_a_write_is_done_and_notified_when_all_ranks_have_written(
    fabric: LoopbackFabric, clock: Clock, groups: tuple[Group, Group]
) -> None:
    sender, receiver = groups

    def on_write(source: str, _peer: str, _count: int) -> LoopbackFault:
        return LoopbackFault(delay_s=600.0 if source.endswith("rank1") and not clock.ahead_s else 0.0)

    fabric.on_write = on_write
    handle = sender.backend.write("receiver", [1, 2], [4, 5], b"here")
    wait(lambda: receiver.memories[0].read_block(4)[0] == 1)
    assert sender.backend.poll(handle) is WriteState.PENDING
    assert receiver.backend.notifications() == []
    clock.ahead_s = 600.0
    assert settle(sender.backend, handle) is WriteState.DONE
    assert [memory.read_block(5)[0] for memory in receiver.memories] == [2, 12]
    assert receiver.backend.notifications() == [Notification("sender", b"here")]
    sender.backend.release(handle)
    assert sender.backend.transport("receiver", same_host=True).name == "loopback"
    sender.backend.disconnect("receiver")
    handle = sender.backend.write("receiver", [1], [1], b"")
    assert settle(sender.backend, handle) is WriteState.FAILED
    assert "not connected" in sender.backend.error(handle)
    sender.backend.release(handle)
    sender.backend.close()


def test_a_write_that_fails_on_one_rank_is_not_notified(fabric: LoopbackFabric, groups: tuple[Group, Group]) -> None:
    sender, receiver = groups
    fabric.on_write = lambda source, _p, _n: LoopbackFault(fail="no" if source.endswith("rank1") else None)
    handle = sender.backend.write("receiver", [1], [1], b"here")
    assert settle(sender.backend, handle) is WriteState.FAILED
    assert sender.backend.error(handle) == "rank 1: no"
    assert receiver.backend.notifications() == []


def test_a_lost_rank_fails_pending_and_later_writes(fabric: LoopbackFabric, groups: tuple[Group, Group]) -> None:
    sender, receiver = groups
    fabric.on_write = lambda source, _p, _n: LoopbackFault(delay_s=60.0 if source.endswith("rank1") else 0.0)
    handles = [sender.backend.write("receiver", [1], [1], b"here")]
    sender.lose_rank()
    assert settle(sender.backend, handles[0]) is WriteState.FAILED
    assert "gone" in sender.backend.error(handles[0])
    handles.append(sender.backend.write("receiver", [1], [1], b"here"))
    assert settle(sender.backend, handles[1]) is WriteState.FAILED
    with pytest.raises(TransferFailed, match="gone"):
        sender.backend.metadata()
    assert receiver.backend.notifications() == []


def test_a_silent_rank_is_given_up_and_its_channel_closed(fabric: LoopbackFabric) -> None:
    """The closed channel ends the rank's process and its group: transfers of this pod could never work again."""
    mine, theirs = pair()
    rank = RankBackendClient(1, mine)
    backend = ShardedBackend(LoopbackBackend(fabric), [rank], LAYOUT)
    rank.send("metadata")
    with pytest.raises(TransferFailed, match=r"rank 1 did not answer within 0\.01 s"):
        rank.wait_response(0.01)
    assert mine.peer_closed()
    assert theirs.peer_closed()
    handle = backend.write("receiver", [1], [1], b"")
    assert settle(backend, handle) is WriteState.FAILED
    theirs.close()


def test_checksums_of_no_blocks(groups: tuple[Group, Group]) -> None:
    """All blocks of a push may be in the receiver's cache."""
    sender, _ = groups
    assert sender.backend.checksums([]) == []
    assert len(sender.backend.checksums([1, 2])) == 2


def test_a_group_whose_heads_are_not_slices_is_refused(fabric: LoopbackFabric, groups: tuple[Group, Group]) -> None:
    sender, receiver = groups
    with pytest.raises(TransferFailed, match=r"size 2 with kv_order layers .*size 1 with kv_order layers"):
        sender.backend.connect("alone", b"alone", receiver.memory)
    with pytest.raises(TransferFailed, match="not that of a tensor-parallel group"):
        sender.backend.connect("other", b"baton-ranks\0\x05\x00\x00\x00other", receiver.memory)
