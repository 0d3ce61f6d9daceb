"""The admission of one request: its reservation from the key's limits and its entry in the gate, released together."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from common.errors import Overloaded
from gateway.admission.api_keys import Caller
from gateway.admission.fair_queue import QueueEntry
from gateway.admission.gate import Gate
from gateway.admission.limiter import Limiter, LimitReservation
from gateway.telemetry.metrics import GatewayMetrics

#: Assumed output tokens of a request that allows more.
EXPECTED_OUTPUT_TOKENS = 256


@dataclass(frozen=True, slots=True)
class RequestSize:
    """Size of a request in tokens."""

    #: All prompts.
    prompt: int
    #: The most that may be generated.
    output: int
    #: The client set no limit to the output.
    open_ended: bool

    @property
    def expected(self) -> int:
        """Prompt and expected output tokens."""
        return self.prompt + min(self.output, EXPECTED_OUTPUT_TOKENS)

    @property
    def reserved(self) -> int:
        """Tokens to reserve from the key's limits: the most that the client asked for."""
        return self.expected if self.open_ended else self.prompt + self.output


class Permit:
    """Lifecycle: `acquire` once, then `release` exactly once, however the request ends (also if acquire raised)."""

    def __init__(self, caller: Caller, request_id: str, limiter: Limiter, metrics: GatewayMetrics) -> None:
        self._caller = caller
        self._request_id = request_id
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
        count_hits: Callable[[], Awaitable[int]],
    ) -> None:
        """Returns when the request may go to the pods. Raises as Limiter.reserve and Gate.acquire do.

        Args:
            headers: Gets the x-ratelimit-* headers of the response.
            count_hits: Returns the prompt tokens that need no computing.
        """
        assert self._gate_entry is None, "a permit is acquired once"
        try:
            self._reservation = await self._limiter.reserve(self._caller, self._request_id, size.reserved, headers)
        except Overloaded as e:
            self._metrics.rejections.labels(e.field or "limit").inc()
            raise
        entry = await gate.acquire(self._caller, priority, size.prompt, size.expected, deadline, count_hits)
        self._gate_entry = gate, entry

    def release(self, prompt_tokens: int, output_tokens: int) -> None:
        """The request has ended and used so many tokens."""
        used = prompt_tokens + output_tokens
        if self._reservation is not None:
            self._limiter.settle(self._reservation, used)
        if self._gate_entry is not None:
            gate, entry = self._gate_entry
            gate.release(entry, used)
        if used and self._caller.key_id:
            self._metrics.tenant_tokens.labels(self._caller.tenant, "prompt").inc(prompt_tokens)
            self._metrics.tenant_tokens.labels(self._caller.tenant, "output").inc(output_tokens)
