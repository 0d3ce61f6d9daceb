"""The seam between a pod and its role: what prefill_service and decode_service give to `PodRuntime.start`."""

from __future__ import annotations

from typing import Protocol

import grpc

from common.errors import BatonError
from engine.engine import StepResult


class PodService(Protocol):
    """What a pod needs of the role it plays. on_step runs on the engine thread, everything else on the event loop."""

    full_name: str

    def register(self, server: grpc.aio.Server) -> None: ...

    def on_step(self, result: StepResult) -> None: ...

    @property
    def num_active(self) -> int: ...

    @property
    def num_sequences(self) -> int: ...

    @property
    def queued_tokens(self) -> int: ...

    async def wait_idle(self) -> None: ...

    def abort_all(self, error: BatonError) -> None: ...
