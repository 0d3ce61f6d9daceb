"""A run: what was asked, and what became of every request; it grows while the run goes on."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

from loadtest.config import LoadConfig
from loadtest.workload.prompts import ModelAnswer


@dataclass(slots=True)
class LoadRun:
    """began: time.perf_counter() at the run's zero; began_at: the same, in seconds since the epoch; ended: at its end.

    stopped: it was ended early. unfinished: requests that were under way then. skipped: turns whose conversation had
    failed. left_out: requests of the trace that are too long. planned: requests in all, where that is known.
    cpu_s: what this process used from the beginning to the end.
    """

    config: LoadConfig
    model: str
    began: float = 0.0
    began_at: float = 0.0
    ended: float = 0.0
    cpu_s: float = 0.0
    records: list[RequestRecord] = field(default_factory=list)
    unfinished: int = 0
    stopped: bool = False
    skipped: int = 0
    skipped_too_long: int = 0
    planned: int | None = None
    sent: int = 0
    running: int = 0
    done: int = 0
    failed: int = 0


@dataclass(slots=True)
class RequestRecord:
    """One request.

    intended_s: when it should have been sent; sent_s: when it was; ended_s: when its last byte came, or it failed.
    at: when each event came that brought text or tokens. An event may bring several tokens, so tokens, from the
    server's usage where it tells, may be more than len(at).
    error: kind of its failure, "" for none; message: what was said of it. aborted: the client left on purpose.
    counted: neither warm-up nor settling. leave_after: events after which the client leaves; None: it stays.
    """

    request_id: str
    session: int
    turn: int
    planned_input: int
    planned_output: int
    intended_s: float
    counted: bool = True
    abort_after: int | None = None
    sent_s: float = 0.0
    ended_s: float = 0.0
    event_times: array[float] = field(default_factory=lambda: array("d"))
    tokens: int = 0
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    finish: str = ""
    error: str = ""
    message: str = ""
    aborted: bool = False
    answer: ModelAnswer | None = None

    @property
    def ok(self) -> bool:
        """Answered to its end."""
        return not self.error and not self.aborted

    @property
    def ttft_s(self) -> float | None:
        """From sending to the first text; None without any."""
        return self.event_times[0] - self.sent_s if self.event_times else None

    @property
    def lag_s(self) -> float:
        """How late it was sent."""
        return self.sent_s - self.intended_s

    @property
    def e2e_s(self) -> float:
        """From sending to the end."""
        return self.ended_s - self.sent_s

    @property
    def tpot_s(self) -> float | None:
        """Mean time of a token after the first; None of one token."""
        if self.tokens < 2 or len(self.event_times) < 2:
            return None
        return (self.event_times[-1] - self.event_times[0]) / (self.tokens - 1)

    def gaps(self) -> list[float]:
        """Seconds between events."""
        return [later - earlier for earlier, later in zip(self.event_times, self.event_times[1:], strict=False)]

    def fail(self, kind: str, message: str, at: float) -> None:
        """It failed; the first reason counts."""
        if not self.error:
            self.error, self.message, self.ended_s = kind, message[:300], at
