"""One client request from its arrival to its end, for all protocols."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from common.errors import BatonError
from gateway.admission.api_keys import Caller
from gateway.admission.permit import Permit
from gateway.telemetry.timeline import Timeline


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of a choice, or summed over choices."""

    #: Prompt tokens.
    prompt: int = 0
    #: Generated tokens that belong to the answer.
    completion: int = 0
    #: Prompt tokens found in the prefix cache of the pod that computed the prompt.
    cached: int = 0
    #: Completion tokens inside reasoning sections.
    reasoning: int = 0
    #: Draft tokens of speculative decoding that were right; they are part of the completion.
    accepted: int = 0
    #: Draft tokens of speculative decoding that were wrong.
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


class OpenChoice(Protocol):
    """The part of a Choice that the end of its request needs."""

    @property
    def usage(self) -> Usage:
        """Token counts so far."""

    @property
    def charged_usage(self) -> Usage:
        """Token counts that the caller's limits are charged for."""

    def close(self) -> None:
        """Ends the choice; idempotent."""


class RequestContext:
    """One client request in progress: its caller, permit, deadline, timeline and choices."""

    def __init__(
        self, timeline: Timeline, endpoint: str, deadline: float, caller: Caller, permit: Permit, affinity: str = ""
    ) -> None:
        #: Our id of the request.
        self.id = timeline.request_id
        self.caller = caller
        self.permit = permit
        #: The choices of the answer; empty until the request is tokenized.
        self.choices: Sequence[OpenChoice] = ()
        #: Rate limit headers of the answer.
        self.response_headers: dict[str, str] = {}
        self.timeline = timeline
        #: Name of the endpoint in metrics and timelines.
        self.endpoint = endpoint
        #: Deadline as a time.monotonic() value.
        self.deadline = deadline
        #: Affinity hint of the client, "" for none. The router prefers the same pods for requests with the same value.
        self.affinity = affinity
        #: The error of the first `abort`, None while the request was not aborted.
        self.abort_error: BatonError | None = None
        self._task: asyncio.Task[Any] | None = None

    def set_task(self, task: asyncio.Task[Any]) -> None:
        """Sets the task that `abort` cancels. An abort that came earlier cancels it now."""
        self._task = task
        if self.abort_error is not None:
            task.cancel()

    def abort(self, error: BatonError) -> None:
        """Cancels the request's task (Abort call, shutdown). The client gets the first error given."""
        self.abort_error = self.abort_error or error
        if self._task is not None:
            self._task.cancel()
