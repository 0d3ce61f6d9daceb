"""How reads travel is found out apart from writes: what is refused and measured, and what slow ones leave behind."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
import pytest_asyncio

from common.errors import DeadlineExceeded, TransferFailed
from common.types import Role
from kv_transfer import read_probe
from kv_transfer.faults import WriteFault
from kv_transfer.memory import MemoryKind
from kv_transfer.messages import PairStats, PullWay
from tests.integration.test_transfer_pull import ask, assert_same, at_rest, chain, holder
from tests.integration.transfer_pods import LAYOUT, Cluster, FakeHold, Pod
from tests.until import until


@pytest_asyncio.fixture
async def cluster() -> AsyncIterator[Cluster]:
    cluster = Cluster("loopback")
    yield cluster
    await cluster.stop()


async def two(cluster: Cluster, *, kind: MemoryKind = "VRAM", allow_tcp: bool = False) -> tuple[Pod, Pod]:
    """A pod that holds a chain of 20 blocks, and one that holds nothing."""
    owner = await cluster.start("decode-0", Role.DECODE, kind=kind, allow_tcp=allow_tcp, checksums=False)
    puller = await cluster.start("prefill-0", Role.PREFILL, kind=kind, allow_tcp=allow_tcp, checksums=False)
    owner.fill(1)
    puller.fill(2)
    owner.cache = dict(zip(chain(20), range(30, 70, 2), strict=True))
    return owner, puller


async def way(owner: Pod, puller: Pod) -> PullWay:
    return await puller.node.pull_way(holder(owner), read=True, timeout_s=20.0)


def told(owner: Pod, puller: Pod) -> PairStats:
    (pair,) = (pair for pair in puller.node.pairs() if pair.pod == owner.name)
    return pair


def slow(puller: Pod, block_s: float) -> None:
    """Every read takes so long per block."""
    puller.backend.on_read = lambda _p, local, _r: WriteFault(delay_s=block_s * len(local))


async def test_reads_over_tcp_into_device_memory_are_refused_and_the_holder_pushes(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    """Writes go another way: nothing else would tell."""
    cluster.fabric.transport, cluster.fabric.read_transport = "cuda_ipc", "tcp"
    owner, puller = await two(cluster)
    with caplog.at_level(logging.WARNING):
        ways = [await way(owner, puller) for _ in range(3)]
    assert ways == [PullWay(False, instead=True)] * 3
    warnings = [r.getMessage() for r in caplog.records if "refused" in r.getMessage()]
    assert len(warnings) == 1
    assert "reads from decode-0 would come over tcp (reported)" in warnings[0]
    pair = told(owner, puller)
    assert (pair.transport, pair.read_transport, pair.reads_refused) == ("cuda_ipc", "tcp", True)
    wanted = ask(0, 20)
    with pytest.raises(TransferFailed, match="--allow-tcp"):
        await puller.node.pull(holder(owner), wanted, read=True)
    assert isinstance(wanted.hold, FakeHold)
    assert wanted.hold.free
    again = ask(0, 20)
    got = await puller.node.pull(holder(owner), again, read=ways[0].read)
    assert_same(owner, puller, again, got.blocks)
    await at_rest(owner, puller)


@pytest.mark.parametrize(("kind", "allow_tcp"), [("VRAM", True), ("DRAM", False)])
async def test_tcp_is_read_where_it_is_allowed_or_usual(cluster: Cluster, kind: MemoryKind, allow_tcp: bool) -> None:
    cluster.fabric.transport, cluster.fabric.read_transport = "cma", "tcp"
    owner, puller = await two(cluster, kind=kind, allow_tcp=allow_tcp)
    found = await way(owner, puller)
    assert (found.read, found.instead) == (True, False)
    assert found.gbps > 0
    assert (told(owner, puller).read_transport, told(owner, puller).reads_refused) == ("tcp", False)


@pytest.mark.parametrize(("most", "read"), [(0.0, True), (1e9, False)])
async def test_a_way_that_nobody_can_name_is_judged_by_its_rate(
    cluster: Cluster, most: float, read: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """most: GB/s that TCP is thought to have."""
    monkeypatch.setattr(read_probe, "TCP_GBPS", most)
    cluster.fabric.transport, cluster.fabric.read_transport = "cuda_ipc", "unknown"
    owner, puller = await two(cluster)
    assert (await way(owner, puller)).read is read


async def test_the_rate_is_that_of_reads_however_fast_writes_are(cluster: Cluster) -> None:
    owner, puller = await two(cluster, kind="DRAM")
    block_s = 0.01
    slow(puller, block_s)
    found = await way(owner, puller)
    most = LAYOUT.block_bytes / block_s / 1e9
    assert 0 < found.gbps <= most
    pair = told(owner, puller)
    assert 0 < pair.read_gbps <= most
    assert pair.gbps > most  # of writes
    got = await puller.node.pull(holder(owner), ask(0, 8), read=True)
    assert 0 < got.gbps <= 4 * most  # so many pieces are under way at once
    assert (got.blocks, got.reason) == (8, "none")


async def test_a_slow_read_is_posted_in_pieces_of_bounded_time(cluster: Cluster) -> None:
    """What was posted cannot be recalled, so it must not be much."""
    owner, puller = await two(cluster, kind="DRAM")
    slow(puller, 0.01)
    await way(owner, puller)
    posted: list[int] = []

    def on_read(_peer: str, local: object, _remote: object) -> WriteFault:
        posted.append(len(local))  # type: ignore[arg-type]
        return WriteFault()

    puller.backend.on_read = on_read
    wanted = ask(0, 20)
    await puller.node.pull(holder(owner), wanted, read=True)
    assert_same(owner, puller, wanted, 20)
    assert sum(posted) == 20
    assert max(posted) <= 2
    await at_rest(owner, puller)


async def test_a_read_that_was_given_up_keeps_its_blocks_and_its_loan_until_nothing_moves(cluster: Cluster) -> None:
    owner, puller = await two(cluster, kind="DRAM")
    await way(owner, puller)
    puller.backend.on_read = lambda _p, _l, _r: WriteFault(delay_s=600.0)
    wanted = ask(0, 8, 20.0)
    pulling = asyncio.create_task(puller.node.pull(holder(owner), wanted, read=True))
    await until(lambda: puller.node.stats().pending_writes > 0)
    pulling.cancel()
    with pytest.raises(asyncio.CancelledError):
        await pulling
    assert isinstance(wanted.hold, FakeHold)
    beside = ask(0, 8)  # others go on
    free = tuple(block for block in range(100) if block not in wanted.blocks)[:8]
    beside = replace(beside, blocks=free, hold=FakeHold(list(free)))
    got = await puller.node.pull(holder(owner), beside, read=False)
    assert_same(owner, puller, beside, got.blocks)
    assert not wanted.hold.free
    assert not owner.lent[0].free, "the holder was told that it is over"
    puller.let_go()
    await until(lambda: wanted.hold.free)  # type: ignore[attr-defined]
    await at_rest(owner, puller)


async def test_a_holder_whose_loan_ran_out_goes_on_polling_for_a_while(cluster: Cluster) -> None:
    """Bytes that leave only while it polls would otherwise be in its way for long."""
    owner, puller = await two(cluster, kind="DRAM")
    await way(owner, puller)
    puller.backend.on_read = lambda _p, _l, _r: WriteFault(delay_s=600.0)
    with pytest.raises(DeadlineExceeded):
        await puller.node.pull(holder(owner), ask(0, 8, 0.3), read=True)
    await until(lambda: owner.node.stats().loans == 0)
    assert owner.node._lending.read_from
    puller.let_go()
    await at_rest(owner, puller)


async def test_reads_that_do_not_work_fail_the_pull_and_are_tried_anew(cluster: Cluster) -> None:
    owner, puller = await two(cluster, kind="DRAM")
    puller.backend.on_read = lambda _p, _l, _r: WriteFault(fail="the link broke")
    with pytest.raises(TransferFailed, match="the link broke"):
        await way(owner, puller)
    puller.backend.on_read = lambda _p, _l, _r: WriteFault()
    assert (await way(owner, puller)).read
    assert told(owner, puller).read_transport == "loopback"


async def test_what_is_read_has_to_be_what_is_there(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """A transport that says done and moves nothing is found out."""
    owner, puller = await two(cluster, kind="DRAM")
    monkeypatch.setattr(read_probe, "PROBE_TRIES", 2)
    monkeypatch.setattr(puller.backend, "read", lambda peer, mine, _: puller.backend.write(peer, mine, [0], b""))
    await puller.node.connect(owner.address)
    with pytest.raises(TransferFailed, match="does not arrive intact"):
        await way(owner, puller)
