"""Commit notifications and their acknowledgements. The Commit call follows a lost one.

Over loopback and over NIXL inside one process. Both report a transport on which bytes move only by polls.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence

import pytest
import pytest_asyncio

from common.errors import TransferFailed
from common.types import FinishReason, KvTarget, Role
from kv_transfer.backend.interface import Backend, Notification, Transport
from kv_transfer.backend.nixl import NixlBackend
from kv_transfer.messages import Commit, CommitNotification, CommittedNotification, RangeWritten, parse_notification
from kv_transfer.sender import transfers
from tests.rigs.transfer.faulty_backend import WriteFaultPlan
from tests.rigs.transfer.transfer_pods import Cluster, FakePin, Incoming, Pod, hand_over
from tests.rigs.waiting import until


class PolledNixl(NixlBackend):
    def transport(self, peer: str, *, same_host: bool) -> Transport:
        return Transport("tcp", "reported")


class PolledCluster(Cluster):
    def backend(self) -> Backend:
        self.fabric.transport = "tcp"
        return super().backend() if self.kind == "loopback" else PolledNixl()


@pytest_asyncio.fixture(params=["loopback", "nixl"])
async def cluster(request: pytest.FixtureRequest) -> AsyncIterator[PolledCluster]:
    cluster = PolledCluster(request.param)
    yield cluster
    await cluster.stop()


class Calls:
    """Records the Commit calls of a pod, and makes them."""

    def __init__(self, pod: Pod, monkeypatch: pytest.MonkeyPatch) -> None:
        self.made: list[Commit] = []
        make = pod.node._rpc.commit

        async def commit(target: KvTarget, commit: Commit, timeout_s: float) -> float:
            self.made.append(commit)
            return await make(target, commit, timeout_s)

        monkeypatch.setattr(pod.node._rpc, "commit", commit)


def lose(pod: Pod, kind: type, *, copies: Sequence[float] = ()) -> list[Notification]:
    """Drops notifications of this kind that arrive at the pod, or delays their copies. Returns those that arrived."""
    lost: list[Notification] = []

    def plan(notification: Notification) -> Sequence[float]:
        if isinstance(parse_notification(notification.payload), kind):
            lost.append(notification)
            return copies
        return (0.0,)

    pod.backend.on_notification = plan
    return lost


async def pair(cluster: Cluster, **options: bool) -> tuple[Pod, Pod]:
    prefill, decode = await cluster.pair(checksums=False, **options)
    await prefill.node.connect(decode.address, decode.name)
    return prefill, decode


async def send(
    prefill: Pod, decode: Pod, request_id: str = "r", tokens: Sequence[int] = (7,), blocks: int = 8
) -> Incoming:
    incoming = decode.reserve(request_id, 0, range(blocks))
    transfer = prefill.node.start_transfer(incoming.target, request_id, blocks, 30.0)
    pin = FakePin(list(range(blocks)))
    transfer.push(0, range(blocks), pin)
    transfer.finish(tokens, [None] * (len(tokens) - 1) + [FinishReason.LENGTH])
    report = await transfer.done()
    await until(lambda: incoming.over)
    await until(lambda: pin.free)
    assert incoming.pin_was_free == [True]
    assert prefill.node.stats().open_outgoing == 0
    assert 0 <= report.parts.noticed_s <= report.exposed_s
    assert 0 < report.parts.committed_s <= report.exposed_s
    return incoming


@pytest.mark.parametrize("tokens", [(5,), (1, 2, 3)])
async def test_a_commit_notification_needs_no_call(
    cluster: Cluster, tokens: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    prefill, decode = await pair(cluster)
    monkeypatch.setattr(transfers, "COMMIT_NOTIFICATION_WAIT_S", 30.0)
    calls = Calls(prefill, monkeypatch)
    incoming = await send(prefill, decode, tokens=tokens)
    assert incoming.ready == [Commit(tokens, (None,) * (len(tokens) - 1) + (FinishReason.LENGTH,))]
    for seed in range(5):
        await hand_over(prefill, decode, seed)
    assert calls.made == []


async def test_a_transfer_without_blocks_sends_only_the_commit(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefill, decode = await pair(cluster)
    monkeypatch.setattr(transfers, "COMMIT_NOTIFICATION_WAIT_S", 30.0)
    calls = Calls(prefill, monkeypatch)
    incoming = decode.reserve("r", 4, [])
    transfer = prefill.node.start_transfer(incoming.target, "r", 4, 30.0)
    transfer.finish([3], [None])
    assert (await transfer.done()).blocks == 0
    await until(lambda: bool(incoming.committed))  # the callback runs after the acknowledgement was sent
    assert incoming.committed == [Commit((3,), (None,))]
    assert calls.made == []


async def test_a_commit_with_checksums_goes_by_call(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    prefill, decode = await cluster.pair()
    calls = Calls(prefill, monkeypatch)
    await hand_over(prefill, decode, 1)
    assert [len(commit.checksums) for commit in calls.made] == [40]


async def test_a_target_that_polls_rarely_gets_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster("loopback")
    try:
        prefill, decode = await pair(cluster)
        calls = Calls(prefill, monkeypatch)
        await hand_over(prefill, decode, 1)
        assert len(calls.made) == 1
    finally:
        await cluster.stop()


@pytest.mark.parametrize("which", ["commit", "acknowledgement"])
async def test_the_call_follows_a_lost_notification(
    cluster: Cluster, which: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefill, decode = await pair(cluster)
    calls = Calls(prefill, monkeypatch)
    lost = lose(decode, CommitNotification) if which == "commit" else lose(prefill, CommittedNotification)
    incoming = await send(prefill, decode)
    assert incoming.ready == [Commit((7,), (FinishReason.LENGTH,))]
    assert len(lost) == len(calls.made) == 1


async def test_late_and_doubled_notifications_end_no_other_transfer(cluster: Cluster) -> None:
    prefill, decode = await pair(cluster)
    lose(decode, CommitNotification, copies=(0.0, 0.0, 0.05))
    lose(prefill, CommittedNotification, copies=(0.05, 0.1, 0.0))
    received = [await send(prefill, decode, f"r{i}", tokens=(i,)) for i in range(6)]
    await asyncio.sleep(0.15)  # every copy is due
    await until(lambda: decode.node.stats().dropped.get("notification_late", 0) >= 6)
    assert [incoming.ready[0].first_tokens for incoming in received] == [(i,) for i in range(6)]
    assert not any(incoming.failed for incoming in received)
    await hand_over(prefill, decode, 1)


async def test_an_acknowledgement_without_a_commit_is_ignored(cluster: Cluster) -> None:
    """So is the acknowledgement of another agent."""
    prefill, decode = await pair(cluster)
    prefill.backend.on_write = lambda _p, local, _r: WriteFaultPlan(delay_s=0.3 if 1 in local else 0.0)
    incoming = decode.reserve("r", 0, [1, 2])
    transfer = prefill.node.start_transfer(incoming.target, "r", 2, 30.0)
    transfer.push(0, [0], FakePin([0]))
    await until(lambda: transfer.delivered_blocks == 1)
    said = CommittedNotification(incoming.target.transfer_id, 0)
    await told(prefill, lambda: prefill.node._outgoing.on_committed(decode.agent, said))
    transfer.push(1, [1], FakePin([1]))
    lose(decode, CommitNotification)
    transfer.finish([7], [None])
    await told(prefill, lambda: prefill.node._outgoing.on_committed("prefill-stranger-1", said))
    assert not transfer.outcome.done()
    await transfer.done()
    await until(lambda: incoming.over)
    assert incoming.committed == [Commit((7,), (None,))]


async def test_a_commit_of_another_agent_is_dropped(cluster: Cluster) -> None:
    prefill, decode = await pair(cluster)
    incoming = decode.reserve("r", 0, [1])
    transfer = prefill.node.start_transfer(incoming.target, "r", 1, 30.0)
    transfer.push(0, [0], FakePin([0]))
    await until(lambda: transfer.delivered_blocks == 1)
    note = CommitNotification(incoming.target.transfer_id, Commit((9,), (None,)))
    await told(decode, lambda: decode.node._incoming.on_notification("prefill-stranger-1", note))
    assert decode.node.stats().dropped["notification_misfit"] == 1
    transfer.finish([7], [None])
    await transfer.done()
    await until(lambda: incoming.over)
    assert incoming.committed == [Commit((7,), (None,))]


async def test_the_call_gets_the_error_of_a_commit_after_the_end(cluster: Cluster) -> None:
    prefill, decode = await pair(cluster)
    incoming = decode.reserve("r", 0, [1, 2])
    transfer = prefill.node.start_transfer(incoming.target, "r", 2, 30.0)
    transfer.push(0, [0, 1], FakePin([0, 1]))
    await until(lambda: transfer.delivered_blocks == 2)
    decode.node.release(incoming.target.transfer_id)
    await until(lambda: incoming.over)
    transfer.finish([7], [None])
    with pytest.raises(TransferFailed):
        await transfer.done()
    assert incoming.ready == []
    await until(lambda: incoming.pin.free)


async def test_a_peer_of_notifications_may_be_connected_too(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """add_peer and connect work in either order, and the end of one does not end the other."""
    first = await cluster.start("pod-0", Role.PREFILL, checksums=False)
    second = await cluster.start("pod-1", Role.PREFILL, checksums=False)
    first.fill(1)
    second.fill(2)
    monkeypatch.setattr(transfers, "COMMIT_NOTIFICATION_WAIT_S", 30.0)
    calls = Calls(first, monkeypatch), Calls(second, monkeypatch)
    for seed in range(3):
        await hand_over(first, second, seed)
        await hand_over(second, first, 10 + seed)
    assert [made.made for made in calls] == [[], []]
    await told(first, lambda: first.node._incoming.remove_peer(second.agent))
    monkeypatch.setattr(transfers, "COMMIT_NOTIFICATION_WAIT_S", 0.02)
    await hand_over(first, second, 20)
    await hand_over(second, first, 21)


@pytest.mark.parametrize("connected_first", [True, False])
async def test_a_broken_connection_keeps_notifications_of_the_other_direction(
    cluster: Cluster, connected_first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two pods write to each other. Acknowledgements go to the writer's agent, not over the connection."""
    first = await cluster.start("pod-0", Role.PREFILL, checksums=False)
    second = await cluster.start("pod-1", Role.PREFILL, checksums=False)
    first.fill(1)
    second.fill(2)
    for source, target in ((first, second), (second, first)) if connected_first else ((second, first), (first, second)):
        await hand_over(source, target, 1)
    connector = first.node._connector
    (connection,) = connector._connections.values()
    await told(first, lambda: setattr(connection, "broken", True))
    await until(lambda: connection not in connector._attached)
    monkeypatch.setattr(transfers, "COMMIT_NOTIFICATION_WAIT_S", 30.0)
    calls = Calls(second, monkeypatch)
    await hand_over(second, first, 2)
    assert calls.made == []
    await hand_over(first, second, 3)


async def test_a_repeated_handshake_renews_the_way_of_acknowledgements(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefill, decode = await pair(cluster)
    notify, remove_peer, broken = decode.backend.notify, decode.backend.remove_peer, [prefill.agent]

    def fail(peer: str, payload: bytes) -> None:
        if peer in broken:
            raise TransferFailed("the way back is broken")
        notify(peer, payload)

    def mend(peer: str) -> None:
        broken.clear()
        remove_peer(peer)

    monkeypatch.setattr(decode.backend, "notify", fail)
    monkeypatch.setattr(decode.backend, "remove_peer", mend)
    calls = Calls(prefill, monkeypatch)
    await hand_over(prefill, decode, 1)
    assert len(calls.made) == 1
    connector = prefill.node._connector
    (connection,) = connector._connections.values()
    await told(prefill, lambda: setattr(connection, "broken", True))
    monkeypatch.setattr(transfers, "COMMIT_NOTIFICATION_WAIT_S", 30.0)
    await hand_over(prefill, decode, 2)
    assert len(calls.made) == 1


async def test_unanswered_notifications_are_replaced_by_calls_for_a_while(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefill, decode = await pair(cluster)
    calls, noted = Calls(prefill, monkeypatch), lose(decode, CommitNotification, copies=(0.0,))
    lose(prefill, CommittedNotification)
    for i in range(transfers.MAX_MISSED_ACKS + 2):
        await send(prefill, decode, f"r{i}")
    assert (len(noted), len(calls.made)) == (transfers.MAX_MISSED_ACKS, transfers.MAX_MISSED_ACKS + 2)
    (connection,) = prefill.node._connector._connections.values()
    connection.notifications_resume_at = 0.0  # the pause is over, and acknowledgements arrive again
    prefill.backend.on_notification = lambda _: (0.0,)
    monkeypatch.setattr(transfers, "COMMIT_NOTIFICATION_WAIT_S", 30.0)
    await send(prefill, decode, "again")
    assert (len(noted), len(calls.made)) == (transfers.MAX_MISSED_ACKS + 1, transfers.MAX_MISSED_ACKS + 2)


async def test_notifications_go_on_where_some_are_acknowledged(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefill, decode = await pair(cluster)
    calls, noted = Calls(prefill, monkeypatch), lose(decode, CommitNotification, copies=(0.0,))
    lost = transfers.MAX_MISSED_ACKS - 1
    for _ in range(2):
        lose(prefill, CommittedNotification)
        for i in range(lost):
            await send(prefill, decode, f"r{i}")
        prefill.backend.on_notification = lambda _: (0.0,)
        with monkeypatch.context() as patient:
            patient.setattr(transfers, "COMMIT_NOTIFICATION_WAIT_S", 30.0)
            await send(prefill, decode, "heard")
    assert (len(noted), len(calls.made)) == (2 * lost + 2, 2 * lost)


async def test_a_restarted_writer_can_send_notifications(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    prefill, decode = await pair(cluster)
    await hand_over(prefill, decode, 1)
    await prefill.crash()
    again = await cluster.start("prefill-0", Role.PREFILL, checksums=False)
    again.fill(3)
    monkeypatch.setattr(transfers, "COMMIT_NOTIFICATION_WAIT_S", 30.0)
    calls = Calls(again, monkeypatch)
    await hand_over(again, decode, 2)
    assert calls.made == []
    assert set(decode.node._incoming._notification_peers) == {again.agent}


async def test_a_lost_range_is_notified_again_after_the_commit_notification(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefill, decode = await pair(cluster)
    calls, lost = Calls(prefill, monkeypatch), []

    def plan(notification: Notification) -> Sequence[float]:
        if isinstance(parse_notification(notification.payload), RangeWritten) and not lost:
            lost.append(notification)
            return ()
        return (0.0,)

    decode.backend.on_notification = plan
    await send(prefill, decode)
    assert len(lost) == 1
    assert calls.made


async def told(pod: Pod, act: Callable[[], None]) -> None:
    """Runs `act` on the pod's transfer thread."""
    await asyncio.wrap_future(pod.node._thread.call(act))
