"""One client request under way, whatever its protocol: its deadline, its caller, its answers, and who ends it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from common.errors import BatonError
from gateway.admission.api_keys import Caller
from gateway.admission.permit import Permit
from gateway.telemetry.timeline import Timeline

if TYPE_CHECKING:
    from gateway.serving.choice import Choice
from dataclasses import dataclass


class RequestContext:
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


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens spent; cached: prompt tokens found in the prefix cache of the pod that computed the prompt.

    reasoning: of the completion's tokens, those of reasoning sections. accepted, rejected: drafts of speculative
    decoding that were right and are part of the completion, and those that were not.
    """

    prompt: int = 0
    completion: int = 0
    cached: int = 0
    reasoning: int = 0
    accepted: int = 0
    rejected: int = 0

    def __add__(self, other: Usage) -> Usage:
        return Usage(
            self.prompt + other.prompt,
            self.completion + other.completion,
            self.cached + other.cached,
            self.reasoning + other.reasoning,
            self.accepted + other.accepted,
            self.rejected + other.rejected,
        )
