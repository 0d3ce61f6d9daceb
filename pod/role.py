"""The role of a pod, and its change while the pod runs.

    serving --switch--> draining --present work moved or ended--> serving in the new role

Weights, graphs, KV pool and prefix cache stay. The pod keeps its name, its generation and the identity with which it
signs calls. An aggregated pod and a decode pod have the same service, so between these roles no request moves.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import logging
import time
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass
from typing import Any, Protocol

import grpc

from common.errors import BatonError, ConfigError, RoleChanged, Unavailable
from common.model.directory import default_served_name, resolve_eagle_head, resolve_model
from common.settings.engine import PodEngineSettings
from common.settings.pod import PodConfig
from common.settings.table import declared
from common.types import Role
from engine.config import EngineConfig
from engine.schedule.outputs import StepResult
from pod.requests import RequestRegistry

#: Longest time for work that was told to end, after the drain time: the engine and the transfer thread release it.
RELEASE_S = 10.0
#: Longest time for the engine to take over the new role, between two of its steps.
PREPARE_S = 4.0

#: Adapters on the device at once, with an adapter directory.
DEFAULT_ADAPTERS = 8

_log = logging.getLogger(__name__)


class PodService(Protocol):
    """The service of some roles, in prefill_service and decode_service. Event loop, except on_step."""

    full_name: str
    #: Roles that the service is for.
    roles: frozenset[Role]

    def register(self, server: grpc.aio.Server) -> None:
        """Adds the service to the server."""

    def on_step(self, result: StepResult) -> None:
        """Runs after each engine step, before the leases of ended sequences are finished. Engine thread."""

    def on_drained(self, request: Any) -> None:
        """Called with each request that was drained."""

    def move_away(self, error: BatonError) -> Collection[object]:
        """Ends with `error` the requests that other pods can take over now. Returns them."""

    def abort_all(self, error: BatonError) -> None:
        """Ends every request with `error`, and every stream, because the pod stops or has another role now."""


@dataclass(frozen=True, slots=True)
class RoleSwitchReport:
    """A finished change of the role."""

    former: Role
    moved: int  # Requests that went on elsewhere
    drained_s: float  # Seconds until the last request of the former role had left
    ready_s: float  # Seconds from then until the pod was ready in the new role


class PodRole:
    """The present role of one pod, and its service. On the event loop; `current` may be read by any thread."""

    def __init__(
        self,
        role: Role,
        pod: str,
        requests: RequestRegistry[Any],
        *,
        on_change: Callable[[], None],
    ) -> None:
        """`on_change` is called when a switch begins and when it ends."""
        self.current = role
        self.target: Role | None = None  # The role that the pod changes to; None while it does not change
        self._pod = pod
        self._requests = requests
        self._on_change = on_change
        self._services: tuple[PodService, ...] = ()

    def add_services(self, *services: PodService) -> None:
        """Sets the services of the pod. It can take the roles of these services."""
        self._services = services
        self._requests.on_drained = self.service.on_drained

    @property
    def started(self) -> bool:
        """The pod has services."""
        return bool(self._services)

    @property
    def service(self) -> PodService:
        """The service of the present role."""
        return self._service_of(self.current)

    def _service_of(self, role: Role) -> PodService:
        for service in self._services:
            if role in service.roles:
                return service
        raise Unavailable(f"pod {self._pod} has no service for the role {role}")

    def require(self, *roles: Role) -> None:
        """Raises RoleChanged unless the pod has one of these roles, and keeps it."""
        if self.target is not None:
            raise RoleChanged(f"pod {self._pod} changes its role to {self.target}")
        if self.current not in roles:
            raise RoleChanged(f"pod {self._pod} has the role {self.current}; expected {' or '.join(roles)}")

    async def switch(
        self, role: Role, drain_s: float, prepare: Callable[[Role], Awaitable[object]]
    ) -> RoleSwitchReport:
        """Changes the role, after the present work has moved or ended. Returns once the pod is ready in the new role.

        Args:
            drain_s: seconds after which work that still runs is moved too.
            prepare: awaited with the new role when the pod is empty, before it takes work.

        Raises:
            Unavailable: Another switch runs, or the work or `prepare` does not end in time; the pod keeps its role.
        """
        began, former, after = time.monotonic(), self.service, self._service_of(role)
        if self.target is not None:
            raise Unavailable(f"pod {self._pod} is changing its role to {self.target} already", retry_after_s=1.0)
        if role is self.current:
            return RoleSwitchReport(role, 0, 0.0, 0.0)
        previous, self.target = self.current, role
        self._on_change()
        try:
            moved = 0 if former is after else await self._empty(former, role, drain_s)
            drained = time.monotonic()
            await self._prepared(prepare(role), role)
            self.current = role
            self._requests.on_drained = after.on_drained
        except BatonError as error:
            # The caller may have left, so the log says it too.
            _log.warning("the role stays %s: the change to %s failed: %s", previous, role, error.message)
            raise
        finally:
            self.target = None
            self._on_change()
        report = RoleSwitchReport(previous, moved, drained - began, time.monotonic() - drained)
        text = "role changed from %s to %s: %d requests moved, drained in %.3f s, ready %.3f s later"
        _log.info(text, previous, role, moved, report.drained_s, report.ready_s)
        return report

    async def _empty(self, service: PodService, role: Role, drain_s: float) -> int:
        """Moves or ends all requests of the service. Returns how many moved."""
        error = RoleChanged(f"pod {self._pod} changes its role to {role}")
        told = service.move_away(error)
        moved = len(told)
        if not await self._idle_within(drain_s):
            moved += sum(request not in told for request in self._requests)
            self._requests.fail_all(error)
            if not await self._idle_within(RELEASE_S):
                raise Unavailable(f"{len(self._requests)} requests did not leave pod {self._pod} in {RELEASE_S:g} s")
        await asyncio.sleep(0)  # the errors above are queued on the streams that end now
        service.abort_all(error)
        return moved

    async def _prepared(self, prepare: Awaitable[object], role: Role) -> None:
        try:
            async with asyncio.timeout(PREPARE_S):
                await prepare
        except TimeoutError as e:
            raise Unavailable(
                f"pod {self._pod} did not take the role {role} in {PREPARE_S:g} s: its engine is in a long step"
            ) from e

    async def _idle_within(self, seconds: float) -> bool:
        try:
            async with asyncio.timeout(seconds):
                await self._requests.wait_idle()
        except TimeoutError:
            return False
        return True


def engine_config(config: PodConfig) -> EngineConfig:
    """Builds the engine's part of a pod's configuration. Decode pods compute local prompts in small chunks."""
    shared = {name: getattr(config, name) for name in declared(PodEngineSettings)}
    find = functools.partial(resolve_model, tokenizer=False, weights=config.load_format == "auto")
    if config.adapter_dir is not None and not config.max_adapters:
        shared["max_adapters"] = DEFAULT_ADAPTERS
    if config.speculation_model is not None:  # a draft model, which may be a known name, or an EAGLE head
        find_draft = find if config.speculation == "draft_model" else resolve_eagle_head
        try:
            shared["speculation_model"] = find_draft(str(config.speculation_model))
        except ConfigError as error:
            raise ConfigError(error.message, field="speculation_model") from error
    made = EngineConfig(model_dir=find(config.model), **shared)
    return dataclasses.replace(
        made,
        local_chunk_tokens=local_chunk_tokens(config, config.role, made.resolve_device().type),
        recurrent_states=config.kv_groups,
    )


def served_name(config: PodConfig) -> str:
    """Returns the model's name for clients."""
    return config.served_name or default_served_name(config.model)


def local_chunk_tokens(config: PodConfig, role: Role, device_type: str) -> int:
    """Returns the prompt tokens of a step with decodes, for a pod of this role; 0: no limit of its own."""
    if role is not Role.DECODE:
        return 0
    return config.local_chunk_tokens or (256 if device_type == "cuda" else 64)
