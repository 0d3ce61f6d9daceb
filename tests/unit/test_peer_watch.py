"""PeerDiscovery connects decode pods that the index lists, in spite of failures."""

from __future__ import annotations

import asyncio

import pytest

from common.errors import IndexUnavailable, Unavailable
from common.types import PodLoad, Role
from pod.index import PeerDiscovery
from prefix_index.store import PodRecord, PodStatus
from tests.rigs.waiting import until


class Index:
    """A reader whose pods the test sets; `fails` is raised once, `away` as long as it is set."""

    def __init__(self, *pods: PodStatus) -> None:
        self.listed = list(pods)
        self.fails: Exception | None = None
        self.away: Exception | None = None
        self.asked = 0

    async def pods(self) -> list[PodStatus]:
        self.asked += 1
        if self.away is not None:
            raise self.away
        error, self.fails = self.fails, None
        if error is not None:
            raise error
        return list(self.listed)

    async def close(self) -> None:
        pass


def pod(name: str, role: Role = Role.DECODE, scope: str = "s", generation: int = 1) -> PodStatus:
    return PodStatus(PodRecord(name, generation, f"{name}:1", role, "m", scope, "f", 16, 128, 64), PodLoad())


async def test_pods_that_join_fail_and_restart_are_connected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pod.index.POLL_S", 0.01)
    index = Index(pod("d0"), pod("p0", Role.PREFILL), pod("x", scope="other"))
    tried: list[tuple[str, int]] = []
    errors: dict[str, Exception] = {}

    async def connect(address: str, _name: str, generation: int) -> None:
        tried.append((address, generation))
        if address == "stuck:1":
            await asyncio.sleep(60)
        if error := errors.pop(address, None):
            raise error

    watch = PeerDiscovery(index, "s", connect)  # type: ignore[arg-type]
    await watch.start()
    try:
        assert set(tried) == {("d0:1", 1)}
        errors["d1:1"] = RuntimeError("a bug")
        errors["d2:1"] = Unavailable("not yet")
        index.listed += [pod("stuck"), pod("d1"), pod("d2"), pod("b", Role.BOTH)]
        await until(lambda: tried.count(("d1:1", 1)) > 1 and tried.count(("d2:1", 1)) > 1 and ("b:1", 1) in tried)
        assert tried.count(("stuck:1", 1)) == 1
        for error in (RuntimeError("a bug"), IndexUnavailable("away")):
            index.fails = error
            await until(lambda: index.fails is None)
        index.listed = [pod("d0", generation=2)]
        await until(lambda: ("d0:1", 2) in tried)
    finally:
        await watch.stop()


async def test_start_waits_for_a_limited_time_only() -> None:
    ended = asyncio.Event()

    async def connect(_address: str, _name: str, _generation: int) -> None:
        try:
            await asyncio.sleep(60)
        finally:
            ended.set()

    watch = PeerDiscovery(Index(pod("d0")), "s", connect)  # type: ignore[arg-type]
    await asyncio.wait_for(watch.start(0.05), 30)
    await watch.stop()
    assert ended.is_set()


@pytest.mark.parametrize("error", [IndexUnavailable("late"), RuntimeError("a bug")])
async def test_start_asks_an_index_that_is_late_until_it_answers(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    monkeypatch.setattr("pod.index.RETRY_S", 0.001)
    index = Index(pod("d0"), pod("d1"))
    index.away = error
    proven: set[str] = set()

    async def connect(address: str, _name: str, _generation: int) -> None:
        await asyncio.sleep(0)
        proven.add(address)

    watch = PeerDiscovery(index, "s", connect)  # type: ignore[arg-type]
    starting = asyncio.create_task(watch.start(60.0))
    await until(lambda: index.asked > 3)
    assert not starting.done()
    index.away = None
    await asyncio.wait_for(starting, 30)
    assert proven == {"d0:1", "d1:1"}
    assert "starts without a connection" not in caplog.text
    await watch.stop()


async def test_start_goes_on_without_an_index_that_never_answers(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("pod.index.RETRY_S", 0.001)
    monkeypatch.setattr("pod.index.POLL_S", 0.001)
    index = Index(pod("d0"))
    index.away = IndexUnavailable("away")
    proven: set[str] = set()

    async def connect(address: str, _name: str, _generation: int) -> None:
        proven.add(address)

    watch = PeerDiscovery(index, "s", connect)  # type: ignore[arg-type]
    await asyncio.wait_for(watch.start(0.05), 30)
    assert index.asked > 1
    assert not proven
    assert "starts without a connection to any decode pod" in caplog.text
    index.away = None
    await until(lambda: proven == {"d0:1"})
    await watch.stop()
