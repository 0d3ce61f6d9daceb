"""One client request under way, whatever its protocol: its deadline, its caller, its answers, and who ends it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from common.errors import BatonError
from gateway.admission.caller import Caller
from gateway.admission.permit import Permit
from gateway.timeline import Timeline

if TYPE_CHECKING:
    from gateway.choice import Choice


class Ticket:
    """One client request under way. end: ends it from elsewhere (the Abort call, the gateway's stop).

    affinity: requests with the same one had better meet the same pods. headers: what the answer's head says of limits.
    """

    def __init__(
        self, timeline: Timeline, endpoint: str, deadline: float, caller: Caller, permit: Permit, affinity: str = ""
    ) -> None:
        self.id = timeline.request_id
        self.caller = caller
        self.permit = permit
        self.choices: Sequence[Choice] = ()
        self.response_headers: dict[str, str] = {}
        self.timeline = timeline
        self.endpoint = endpoint
        self.deadline = deadline
        self.affinity = affinity
        self.abort_error: BatonError | None = None
        self._task: asyncio.Task[Any] | None = None

    def set_task(self, task: asyncio.Task[Any]) -> None:
        """The task that end cancels."""
        self._task = task
        if self.abort_error is not None:
            task.cancel()

    def abort(self, error: BatonError) -> None:
        """Cancels the task that serves the request; what the client gets instead is the first error given."""
        self.abort_error = self.abort_error or error
        if self._task is not None:
            self._task.cancel()
