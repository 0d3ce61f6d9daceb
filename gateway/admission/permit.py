"""What a request holds from when it is let through until it ends: its part of a key's limits, its place at the pods.

Given back as a whole by exactly one release, however the request ends.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from common.errors import Overloaded
from gateway.admission.api_keys import Caller
from gateway.admission.fair_queue import QueueEntry
from gateway.admission.gate import Gate
from gateway.admission.limiter import Limiter, LimitReservation
from gateway.telemetry.metrics import GatewayMetrics

EXPECTED_OUTPUT_TOKENS = 256  # tokens of an answer whose length nobody knows


@dataclass(frozen=True, slots=True)
class RequestSize:
    """Tokens of a request: its prompts, the most that may be generated, and what the client left to us of that."""

    prompt: int
    output: int
    open_ended: bool

    @property
    def expected(self) -> int:
        """What it will probably take."""
        return self.prompt + min(self.output, EXPECTED_OUTPUT_TOKENS)

    @property
    def reserved(self) -> int:
        """What it may take."""
        return self.expected if self.open_ended else self.prompt + self.output


class Permit:
    """One request's. Made when it arrives, filled by take and enter."""

    def __init__(self, caller: Caller, request: str, limiter: Limiter, metrics: GatewayMetrics) -> None:
        self._caller = caller
        self._request = request
        self._limiter = limiter
        self._metrics = metrics
        self._reservation: LimitReservation | None = None
        self._gate_entry: tuple[Gate, QueueEntry] | None = None

    async def acquire(
        self,
        gate: Gate,
        size: RequestSize,
        priority: int,
        deadline: float,
        headers: dict[str, str],
        held: Callable[[], Awaitable[int]],
    ) -> None:
        """Returns when the request may go to the pods. See Limiter.take and Gate.enter for what it raises."""
        assert self._gate_entry is None, "a request enters once"
        try:
            self._reservation = await self._limiter.reserve(self._caller, self._request, size.reserved, headers)
        except Overloaded as e:
            self._metrics.rejections.labels(e.field or "limit").inc()
            raise
        place = await gate.acquire(self._caller, priority, size.prompt, size.expected, deadline, held)
        self._gate_entry = gate, place

    def release(self, prompt: int, output: int) -> None:
        """The request ended and took so many tokens."""
        used = prompt + output
        if self._reservation is not None:
            self._limiter.settle(self._reservation, used)
        if self._gate_entry is not None:
            gate, entry = self._gate_entry
            gate.release(entry, used)
        if used and self._caller.key_id:
            self._metrics.tenant_tokens.labels(self._caller.tenant, "prompt").inc(prompt)
            self._metrics.tenant_tokens.labels(self._caller.tenant, "output").inc(output)
