"""A change of the role of a pod: what it counts, and that it ends."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest

from common.errors import BatonError, RoleChanged, Unavailable
from common.types import Role
from pod import role as role_module
from pod.requests import RequestRegistry
from pod.role import PodRole


class SlowRequest:
    """A request that leaves the pod some time after it was told to end."""

    num_sequences, queued_tokens = 1, 0

    def __init__(self, leaves_after_s: float) -> None:
        self._leaves_after_s = leaves_after_s
        self._told = asyncio.Event()

    def fail(self, error: BatonError) -> None:
        self._told.set()

    async def drained(self) -> None:
        await self._told.wait()
        await asyncio.sleep(self._leaves_after_s)


class FakeService:
    full_name = "test"

    def __init__(self, requests: RequestRegistry[SlowRequest], *roles: Role) -> None:
        self.requests, self.roles = requests, frozenset(roles)

    def on_drained(self, request: Any) -> None: ...

    def move_away(self, error: BatonError) -> list[SlowRequest]:
        moved = list(self.requests)
        self.requests.fail_all(error)
        return moved

    def abort_all(self, error: BatonError) -> None: ...


def pod_role(requests: RequestRegistry[Any]) -> PodRole:
    role = PodRole(Role.DECODE, "d", requests, on_change=lambda: None)
    services: Any = (FakeService(requests, Role.PREFILL), FakeService(requests, Role.DECODE, Role.BOTH))
    role.add_services(*services)
    return role


async def at_once(_role: Role) -> None: ...


async def never(_role: Role) -> None:
    await asyncio.Event().wait()


async def test_a_request_that_leaves_slowly_is_counted_once() -> None:
    requests = RequestRegistry[SlowRequest]()
    role = pod_role(requests)
    for i in range(3):
        requests.add(str(i), SlowRequest(0.1))
    assert (await role.switch(Role.PREFILL, 0.01, at_once)).moved == 3


async def test_a_change_that_the_engine_does_not_take_over_ends_and_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A change waited for ever for an engine in a step that does not end: the pod was never ready again."""
    monkeypatch.setattr(role_module, "PREPARE_S", 0.05, raising=False)
    role = pod_role(RequestRegistry[Any]())
    with caplog.at_level(logging.WARNING), pytest.raises(Unavailable, match="did not take the role prefill"):
        await asyncio.wait_for(role.switch(Role.PREFILL, 1.0, never), 2.0)
    assert (role.current, role.target) == (Role.DECODE, None)
    assert "the role stays decode" in caplog.text
    role.require(Role.DECODE)


async def test_of_two_changes_at_once_one_is_refused() -> None:
    role, entered, go_on = pod_role(RequestRegistry[Any]()), asyncio.Event(), asyncio.Event()

    async def prepare(_role: Role) -> None:
        entered.set()
        await go_on.wait()

    first = asyncio.create_task(role.switch(Role.PREFILL, 1.0, prepare))
    await entered.wait()
    for other in (Role.BOTH, Role.PREFILL, Role.DECODE):
        with pytest.raises(Unavailable, match="already"):
            await role.switch(other, 1.0, at_once)
    with pytest.raises(RoleChanged):
        role.require(Role.DECODE)
    go_on.set()
    assert (await first).former is Role.DECODE
    role.require(Role.PREFILL)
