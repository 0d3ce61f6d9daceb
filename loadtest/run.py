"""The state of one load run: its configuration, its counters, and a record of each request."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

from loadtest.config import LoadConfig
from loadtest.workload.prompts import ModelAnswer


@dataclass(slots=True)
class LoadRun:
    """One run, updated while it goes on."""

    config: LoadConfig
    model: str
    #: time.perf_counter() at the start of the run.
    began: float = 0.0
    #: Start of the run in seconds since the epoch.
    began_at: float = 0.0
    #: time.perf_counter() at the end.
    ended: float = 0.0
    #: CPU seconds of this process from start to end.
    cpu_s: float = 0.0
    records: list[RequestRecord] = field(default_factory=list)
    #: Requests in flight when the run was stopped.
    unfinished: int = 0
    #: The run was ended early.
    stopped: bool = False
    #: Turns that were not sent because an earlier turn of their conversation failed.
    skipped: int = 0
    #: Requests of the trace that are longer than the limits.
    skipped_too_long: int = 0
    #: Number of requests, if it is known before the run.
    planned: int | None = None
    sent: int = 0
    running: int = 0
    done: int = 0
    failed: int = 0


@dataclass(slots=True)
class RequestRecord:
    """One request. All times are time.perf_counter() seconds."""

    request_id: str
    session: int
    turn: int
    planned_input: int
    planned_output: int
    #: The time at which the request should be sent.
    intended_s: float
    #: False for warm-up and settling requests.
    counted: bool = True
    #: Number of events after which the client aborts; None if it never aborts.
    abort_after: int | None = None
    sent_s: float = 0.0
    #: The time of the last byte or of the failure.
    ended_s: float = 0.0
    #: The time of each event with text or tokens.
    event_times: array[float] = field(default_factory=lambda: array("d"))
    #: Output tokens, from the server's usage if it sends one. An event may bring several tokens.
    tokens: int = 0
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    finish: str = ""
    #: The kind of failure, "" for none.
    error: str = ""
    message: str = ""
    #: The client aborted on purpose.
    aborted: bool = False
    answer: ModelAnswer | None = None

    @property
    def ok(self) -> bool:
        """Whether the answer is complete."""
        return not self.error and not self.aborted

    @property
    def ttft_s(self) -> float | None:
        """Seconds from sending to the first text; None without text."""
        return self.event_times[0] - self.sent_s if self.event_times else None

    @property
    def lag_s(self) -> float:
        """Seconds between the intended and the real sending."""
        return self.sent_s - self.intended_s

    @property
    def e2e_s(self) -> float:
        """Seconds from sending to the end."""
        return self.ended_s - self.sent_s

    @property
    def tpot_s(self) -> float | None:
        """Mean seconds per token after the first; None for fewer than two tokens."""
        if self.tokens < 2 or len(self.event_times) < 2:
            return None
        return (self.event_times[-1] - self.event_times[0]) / (self.tokens - 1)

    def gaps(self) -> list[float]:
        """Seconds between events."""
        return [later - earlier for earlier, later in zip(self.event_times, self.event_times[1:], strict=False)]

    def fail(self, kind: str, message: str, at: float) -> None:
        """Marks the request as failed. The first failure counts."""
        if not self.error:
            self.error, self.message, self.ended_s = kind, message[:300], at
