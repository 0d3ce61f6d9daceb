"""Pulls of cached blocks between pods, on loopback and NIXL; statistics of pairs."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
import pytest_asyncio

from common.errors import (
    BatonError,
    DeadlineExceeded,
    LayoutMismatch,
    TransferFailed,
    Unauthenticated,
    Unavailable,
)
from common.kv_layout import KVLayout
from common.types import Role
from kv_transfer.messages import PullResult, WantedBlocks
from kv_transfer.servicer import MAX_LOANS
from tests.rigs.transfer.faulty_backend import WriteFaultPlan
from tests.rigs.transfer.transfer_pods import LAYOUT, NUM_BLOCKS, Cluster, FakePin, Pod
from tests.rigs.waiting import until


@pytest_asyncio.fixture(params=["loopback", "nixl"])
async def cluster(request: pytest.FixtureRequest) -> AsyncIterator[Cluster]:
    cluster = Cluster(request.param)
    yield cluster
    await cluster.stop()


def chain(count: int) -> list[bytes]:
    return [bytes([i]) * 16 for i in range(1, count + 1)]


async def two(cluster: Cluster, *, blocks: int = 20, checksums: bool = False) -> tuple[Pod, Pod]:
    """A pod that caches so many blocks of a prefix, and an empty one."""
    owner = await cluster.start("decode-0", Role.DECODE, checksums=checksums)
    puller = await cluster.start("prefill-0", Role.PREFILL, checksums=checksums)
    owner.fill(1)
    puller.fill(2)
    owner.cache = dict(zip(chain(blocks), random.Random(3).sample(range(NUM_BLOCKS), blocks), strict=True))
    return owner, puller


async def pull(
    owner: Pod, puller: Pod, *, first: int = 0, total: int = 20, timeout_s: float = 20.0
) -> tuple[PullResult, FakePin, WantedBlocks]:
    wanted = ask(first, total, timeout_s)
    assert isinstance(wanted.pin, FakePin)
    return await puller.node.pull(owner.address, owner.name, wanted), wanted.pin, wanted


def ask(first: int, total: int, timeout_s: float = 20.0) -> WantedBlocks:
    blocks = tuple(random.Random(first).sample(range(NUM_BLOCKS), total - first))
    pin = FakePin(list(blocks))
    return WantedBlocks(
        request_id="r", hashes=chain(total), first_block=first, blocks=blocks, pin=pin, timeout_s=timeout_s
    )


def assert_same(owner: Pod, puller: Pod, wanted: WantedBlocks, count: int) -> None:
    theirs = [owner.cache[h] for h in wanted.hashes[wanted.first_block :][:count]]
    assert puller.digest(wanted.blocks[:count]) == owner.digest(theirs)


async def at_rest(*pods: Pod) -> None:
    """Waits until nothing of an earlier pull is left.

    A pull may return before the holder has polled its last write. A test that waits for a write of its second pull
    calls this after the first one.
    """
    await until(lambda: all(pin.free for pod in pods for pin in pod.lent))
    for pod in pods:
        await until(lambda: pod.node.stats().pending_writes == 0)  # noqa: B023
        await until(lambda: pod.node.stats().loans == 0)  # noqa: B023
        await until(lambda: pod.node.stats().open_incoming == pod.node.stats().open_outgoing == 0)  # noqa: B023


@pytest.mark.parametrize("checksums", [False, True])
async def test_missing_blocks_arrive_and_nothing_else_changes(cluster: Cluster, checksums: bool) -> None:
    owner, puller = await two(cluster, checksums=checksums)
    before = puller.digest(range(NUM_BLOCKS))
    got, pin, wanted = await pull(owner, puller, first=7)
    assert (got.blocks, got.reason) == (13, "none")
    assert pin.free
    assert_same(owner, puller, wanted, 13)
    after = puller.digest(range(NUM_BLOCKS))
    assert all(after[b] == before[b] for b in range(NUM_BLOCKS) if b not in wanted.blocks)
    await at_rest(owner, puller)
    (pair,) = (p for p in owner.node.pair_stats() if p.pod == "prefill-0")
    assert (pair.pulls, pair.transfers, pair.blocks, pair.failures) == (1, 0, 13, 0)
    assert pair.bytes == 13 * LAYOUT.block_bytes
    assert pair.gb_s > 0


async def test_a_holder_without_the_last_blocks_sends_the_others(cluster: Cluster) -> None:
    owner, puller = await two(cluster)
    for lost in chain(20)[15:]:
        del owner.cache[lost]
    got, pin, wanted = await pull(owner, puller, first=3)
    assert (got.blocks, got.reason) == (12, "absent")
    assert pin.free
    assert_same(owner, puller, wanted, 12)
    await at_rest(owner, puller)


async def test_a_holder_that_lost_everything_refuses(cluster: Cluster) -> None:
    owner, puller = await two(cluster)
    owner.cache.clear()
    got, pin, _ = await pull(owner, puller)
    assert (got.blocks, got.reason) == (0, "absent")
    await until(lambda: pin.free)
    await at_rest(owner, puller)


async def test_a_failed_write_fails_the_pull_and_frees_after_the_grace(cluster: Cluster) -> None:
    owner, puller = await two(cluster)
    await pull(owner, puller, total=1)  # connected
    owner.backend.on_write = lambda _p, _l, _r: WriteFaultPlan(fail="the link broke")
    wanted = ask(1, 20, 1.5)
    with pytest.raises(BatonError):
        await puller.node.pull(owner.address, owner.name, wanted)
    assert isinstance(wanted.pin, FakePin)
    assert not wanted.pin.free  # bytes may still land after an error
    await until(lambda: wanted.pin.free)  # type: ignore[attr-defined]
    await at_rest(owner, puller)
    assert next(p for p in owner.node.pair_stats() if p.pod == "prefill-0").failures == 1
    assert puller.node.stats().pending_writes == 0


async def test_damage_fails_the_pull(cluster: Cluster) -> None:
    owner, puller = await two(cluster, checksums=True)
    await pull(owner, puller, total=1)  # connected
    owner.backend.on_write = lambda _p, _l, _r: WriteFaultPlan(corrupt=0)
    wanted = ask(2, 6)
    with pytest.raises(TransferFailed, match=r"damaged|gave the transfer up"):
        await puller.node.pull(owner.address, owner.name, wanted)
    assert puller.node.stats().damaged_transfers == 1
    await until(lambda: wanted.pin.free)  # type: ignore[attr-defined]
    await at_rest(owner, puller)


async def test_a_late_write_finds_its_blocks_still_pinned(cluster: Cluster) -> None:
    """The puller gives up. A write that lands later lands in blocks without another owner."""
    owner, puller = await two(cluster)
    await pull(owner, puller, total=1)  # connected
    owner.backend.on_write = lambda _p, _l, _r: WriteFaultPlan(delay_s=600.0)
    wanted = ask(2, 6, 1.0)
    before = puller.digest(wanted.blocks)
    with pytest.raises(DeadlineExceeded):
        await puller.node.pull(owner.address, owner.name, wanted)
    assert isinstance(wanted.pin, FakePin)
    assert not wanted.pin.free
    owner.release_late_writes()
    await until(lambda: wanted.pin.free)  # type: ignore[attr-defined]
    assert puller.digest(wanted.blocks) != before
    await at_rest(owner, puller)


async def test_a_cancelled_caller_frees_its_blocks(cluster: Cluster) -> None:
    owner, puller = await two(cluster)
    await pull(owner, puller, total=1)
    await at_rest(owner, puller)
    owner.backend.on_write = lambda _p, _l, _r: WriteFaultPlan(delay_s=600.0)
    wanted = ask(0, 8)
    pulling = puller.node.pull(owner.address, owner.name, wanted)
    await until(lambda: owner.node.stats().pending_writes > 0)
    pulling.cancel()
    with pytest.raises(asyncio.CancelledError):
        await pulling
    assert isinstance(wanted.pin, FakePin)
    assert not wanted.pin.free
    owner.release_late_writes()
    await until(lambda: wanted.pin.free)  # type: ignore[attr-defined]
    await at_rest(owner, puller)


async def test_a_pull_that_is_cancelled_before_its_first_step_frees_its_blocks(cluster: Cluster) -> None:
    owner, puller = await two(cluster)
    wanted = ask(0, 8, 600.0)  # the deadline is after the end of this test
    pulling = puller.node.pull(owner.address, owner.name, wanted)
    pulling.cancel()
    with pytest.raises(asyncio.CancelledError):
        await pulling
    assert isinstance(wanted.pin, FakePin)
    await until(lambda: wanted.pin.free)  # type: ignore[attr-defined]
    assert not owner.lent, "the holder was asked"
    await at_rest(owner, puller)


async def test_a_caller_that_is_cancelled_before_it_waits_frees_its_blocks(cluster: Cluster) -> None:
    """The cancellation is pending when the caller starts to wait. It reaches the pull before its first step."""
    owner, puller = await two(cluster)
    wanted = ask(0, 8, 600.0)

    async def caller() -> None:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        await puller.node.pull(owner.address, owner.name, wanted)

    with pytest.raises(asyncio.CancelledError):
        await asyncio.create_task(caller())
    await until(lambda: wanted.pin.free)  # type: ignore[attr-defined]
    assert not owner.lent, "the holder was asked"
    await at_rest(owner, puller)


@pytest.mark.parametrize("when", ["before its task", "in its task"])
async def test_a_pull_that_cannot_start_frees_its_blocks(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    owner, puller = await two(cluster)

    def broken(*_args: object, **_kwargs: object) -> object:
        raise RuntimeError("a bug")

    if when == "before its task":
        monkeypatch.setattr(puller.node._incoming, "new_transfer_id", broken)
    else:
        monkeypatch.setattr(puller.node._rpc, "pull", broken)
    wanted = ask(0, 8, 600.0)
    with pytest.raises(RuntimeError, match="a bug"):
        await puller.node.pull(owner.address, owner.name, wanted)
    await until(lambda: wanted.pin.free)  # type: ignore[attr-defined]
    await at_rest(owner, puller)


async def test_a_holder_that_stops_or_has_ended(cluster: Cluster) -> None:
    owner, puller = await two(cluster)
    await owner.stop()
    wanted = ask(0, 8, 2.0)
    with pytest.raises((Unavailable, DeadlineExceeded, TransferFailed)):
        await puller.node.pull(owner.address, owner.name, wanted)
    assert isinstance(wanted.pin, FakePin)
    await until(lambda: wanted.pin.free)  # type: ignore[attr-defined]
    cluster.pods.remove(owner)


async def test_a_holder_has_a_limit_of_open_loans(cluster: Cluster) -> None:
    owner, puller = await two(cluster)
    await pull(owner, puller, total=1)
    owner.backend.on_write = lambda _p, _l, _r: WriteFaultPlan(delay_s=600.0)
    asked = [ask(0, 4) for _ in range(MAX_LOANS + 4)]
    for i, one in enumerate(asked):  # each into its own blocks
        blocks = tuple(range(4 * i, 4 * i + 4))
        asked[i] = replace(one, request_id=f"r{i}", blocks=blocks, pin=FakePin(list(blocks)))
    pulls = [puller.node.pull(owner.address, owner.name, one) for one in asked]
    await until(lambda: sum(pull.done() for pull in pulls) == 4)
    owner.release_late_writes()
    got = await asyncio.gather(*pulls)
    assert sorted(g.reason for g in got) == ["busy"] * 4 + ["none"] * MAX_LOANS
    for one, g in zip(asked, got, strict=True):
        assert_same(owner, puller, one, g.blocks)
    await at_rest(owner, puller)


async def test_other_layouts_and_other_pods_are_refused(cluster: Cluster) -> None:
    other = KVLayout("test", "r1", num_layers=4, num_kv_heads=2, head_dim=32, block_size=16, dtype="float32")
    owner, _ = await two(cluster)
    different = await cluster.start("prefill-1", Role.PREFILL, layout=other)
    stranger = await cluster.start("prefill-2", Role.PREFILL, secret=b"another secret")
    for pod, error in ((different, LayoutMismatch), (stranger, Unauthenticated)):
        wanted = ask(0, 8, 5.0)
        with pytest.raises(error) as refused:
            await pod.node.pull(owner.address, owner.name, wanted)
        if error is LayoutMismatch:
            assert refused.value.field == "fingerprint"
        assert isinstance(wanted.pin, FakePin)
        await until(lambda: wanted.pin.free)  # type: ignore[attr-defined]  # noqa: B023
    assert not owner.lent


async def test_equal_ids_of_two_receivers_are_two_transfers() -> None:
    """Receivers make ids from their generation. Two that started in the same millisecond make the same ids."""
    cluster = Cluster("loopback")
    try:
        source = await cluster.start("prefill-0", Role.PREFILL)
        source.fill(1)
        receivers = []
        for name in ("decode-0", "decode-1"):
            cluster.generation = 5_000_000_000_000
            receivers.append(await cluster.start(name, Role.DECODE))
        incoming = [receiver.reserve("r", 0, [4, 5]) for receiver in receivers]
        assert incoming[0].target.transfer_id == incoming[1].target.transfer_id
        for i, one in enumerate(incoming):
            transfer = source.node.start_transfer(one.target, "r", 2, 20.0)
            transfer.push(0, [10 + i, 20 + i], FakePin([10 + i, 20 + i]))
            transfer.finish([7], [None])
            await transfer.done()
        for i, receiver in enumerate(receivers):
            assert receiver.digest([4, 5]) == source.digest([10 + i, 20 + i])
        assert {p.pod: p.transfers for p in source.node.pair_stats()} == {"decode-0": 1, "decode-1": 1}
    finally:
        await cluster.stop()


async def test_every_pair_of_pods_is_counted_separately() -> None:
    cluster = Cluster("loopback")
    try:
        sources = [await cluster.start(f"prefill-{i}", Role.PREFILL) for i in range(3)]
        receivers = [await cluster.start(f"decode-{i}", Role.DECODE) for i in range(3)]

        async def hand_over(i: int, j: int) -> None:
            blocks = list(range(10 * i, 10 * i + 1 + j))
            one = receivers[j].reserve(f"r{i}{j}", 0, blocks)
            transfer = sources[i].node.start_transfer(one.target, f"r{i}{j}", len(blocks), 20.0)
            transfer.push(0, blocks, FakePin(blocks))
            transfer.finish([7], [None])
            await transfer.done()

        await asyncio.gather(*(hand_over(i, j) for i in range(3) for j in range(3)))
        for source in sources:
            pairs = source.node.pair_stats()
            assert [(p.pod, p.transfers, p.blocks) for p in pairs] == [(f"decode-{j}", 1, j + 1) for j in range(3)]
            assert all(p.exposed_s > 0 and p.transport == "loopback" and p.generation for p in pairs)
        # A transfer that the receiver gave up is a failure of that pair only. An aborted one is no failure.
        lost, aborted = receivers[1].reserve("lost", 0, [3]), receivers[2].reserve("aborted", 0, [3])
        first = sources[0].node.start_transfer(lost.target, "lost", 1, 20.0)
        second = sources[0].node.start_transfer(aborted.target, "aborted", 1, 20.0)
        receivers[1].node.release(lost.target.transfer_id)
        second.abort("the client left")
        for transfer in (first, second):
            with pytest.raises(BatonError):
                await transfer.done()
        assert [p.failures for p in sources[0].node.pair_stats()] == [0, 1, 0]
    finally:
        await cluster.stop()
