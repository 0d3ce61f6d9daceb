"""One pod as routing sees it: fixed facts, its last report, and what was sent there since.

A report is as old as its way here; what this gateway sent to the pod in the meantime is added, and what the pod must
have computed in the meantime, at the rate that it measured, is taken off. So the queue costs O(1) to read.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from statistics import fmean

from common.types import PodLoad, Role

DEFAULT_PREFILL_RATE = 2000.0  # prompt tokens per second of a pod whose rate nobody knows
DEFAULT_STEP_S, DEFAULT_STEP_SLOPE_S = 0.01, 0.0001  # decode: a step, and what one more sequence adds to it
DEFAULT_TRANSFER_RATE = 20_000.0  # prompt tokens per second whose KV moves
DEFAULT_HAND_OFF_S = 0.005  # the end of a hand-off beyond moving KV
DEFAULT_PULL_S = 0.02  # a pull beyond moving KV
HOST_SPEEDUP = 8.0  # KV comes back from host memory this much faster than it is computed
DISPATCH_DELAY_S = 0.02  # what was booked this shortly before a report may not have reached the pod by then


class PodView:
    """See the top of this file. Times are one clock's seconds.

    capacity: tokens, prompt and output, that one request can ever have here. seconds_per_token, overhead_s: what a
    prompt takes. step_s, slope_s: a decode step, and its growth per running sequence. hand_off_s: the end of a
    hand-off beyond moving KV; pull_s: a pull beyond moving its bytes. rate_known: seconds_per_token was measured, by
    this pod or its peers. pulls: it fetches prefixes from others. late_targets: it computes before it is told where the
    KV goes. pair_rates: bytes per second that it wrote to other pods, by name. foreign: tokens that other
    gateways are known to have booked since the report, foreign_count in how many sequences.
    """

    __slots__ = (
        "address",
        "block_size",
        "decode_bookings",
        "foreign_sequences",
        "foreign_tokens",
        "hand_off_s",
        "late_targets",
        "load",
        "max_request_tokens",
        "name",
        "num_blocks",
        "pair_rates",
        "prefill_bookings",
        "prefill_overhead_s",
        "prefill_s_per_token",
        "pull_s",
        "pulls",
        "queue_empty_at",
        "rate_known",
        "reported_at",
        "role",
        "step_s",
        "step_slope_s",
        "transfer_s_per_token",
    )

    def __init__(
        self,
        name: str,
        *,
        block_size: int,
        max_request_tokens: int,
        num_blocks: int,
        role: Role = Role.PREFILL,
        address: str = "",
    ) -> None:
        self.name = name
        self.address = address
        self.role = role
        self.block_size = block_size
        self.max_request_tokens = max_request_tokens
        self.num_blocks = num_blocks
        self.load: PodLoad | None = None
        self.reported_at = float("-inf")
        self.queue_empty_at = float("-inf")
        self.prefill_bookings = Bookings()
        self.decode_bookings = Bookings()
        self.foreign_tokens = 0
        self.foreign_sequences = 0
        self.prefill_s_per_token = 1 / DEFAULT_PREFILL_RATE
        self.prefill_overhead_s = 0.0
        self.step_s, self.step_slope_s = DEFAULT_STEP_S, DEFAULT_STEP_SLOPE_S
        self.transfer_s_per_token = 1 / DEFAULT_TRANSFER_RATE
        self.hand_off_s = DEFAULT_HAND_OFF_S
        self.pull_s = DEFAULT_PULL_S
        self.rate_known = False
        self.pulls = False
        self.late_targets = False
        self.pair_rates: Mapping[str, float] = {}

    def apply_report(self, load: PodLoad, now: float) -> None:
        """Takes a load record that the pod made at `now`; an older one than the last is dropped."""
        if now < self.reported_at:
            return
        self.load, self.reported_at = load, now
        if load.prefill_rate > 0:
            self.prefill_s_per_token, self.prefill_overhead_s = 1 / load.prefill_rate, load.prefill_overhead_s
            self.rate_known = True
        if load.has_decode_times:
            self.step_s, self.step_slope_s = load.step_s, load.step_slope_s
        if load.transfer_rate > 0:
            self.transfer_s_per_token, self.hand_off_s = 1 / load.transfer_rate, load.hand_off_s
        self.pull_s = load.pull_s or DEFAULT_PULL_S
        self.queue_empty_at = now + load.queued_tokens * self.prefill_s_per_token
        self.foreign_tokens = self.foreign_sequences = 0
        self.prefill_bookings.mark_reported(now - DISPATCH_DELAY_S)
        self.decode_bookings.mark_reported(now - DISPATCH_DELAY_S)

    def queue_s(self, now: float) -> float:
        """Seconds of prompts that are ahead of a new one."""
        waiting = (self.prefill_bookings.unreported_tokens + self.foreign_tokens) * self.prefill_s_per_token
        return waiting + self.queue_empty_at - now if self.queue_empty_at > now else waiting

    def num_sequences(self) -> int:
        """Sequences that decode here or are about to."""
        load = self.load
        if load is None:
            return len(self.decode_bookings) + self.foreign_sequences
        return (
            load.running + load.waiting + load.reserved + self.decode_bookings.unreported_count + self.foreign_sequences
        )

    def free_blocks(self) -> int:
        """Blocks that a new sequence may have; all of them while nothing is known."""
        if self.load is None:
            return self.num_blocks
        return (
            self.load.free_blocks
            - self.decode_bookings.unreported_tokens // self.block_size
            - self.decode_bookings.unreported_count
        )


def fill_in_from_peers(views: Collection[PodView]) -> None:
    """What a pod of one layout has not measured yet is taken to be as its peers measured it, in the mean.

    Otherwise a pod that has never decoded would look faster, or slower, than one that has.
    """
    loads = [view.load for view in views if view.load is not None]
    prefill = [1 / load.prefill_rate for load in loads if load.prefill_rate > 0]
    moved = [1 / load.transfer_rate for load in loads if load.transfer_rate > 0]
    steps = [(load.step_s, load.step_slope_s) for load in loads if load.has_decode_times]
    for view in views:
        load = view.load or PodLoad()
        if prefill and load.prefill_rate <= 0:
            view.prefill_s_per_token, view.rate_known = fmean(prefill), True
        if moved and load.transfer_rate <= 0:
            view.transfer_s_per_token = fmean(moved)
        if steps and not load.has_decode_times:
            view.step_s, view.step_slope_s = (fmean(part) for part in zip(*steps, strict=True))


class Bookings:
    """Open bookings of one pod. tokens: of all; fresh, fresh_count: of those made at or after the last mark.

    fresh_booked: as fresh, of what was booked at first; that is what other gateways may know.
    """

    __slots__ = ("_open", "_since", "tokens", "unreported_booked", "unreported_count", "unreported_tokens")

    def __init__(self) -> None:
        self._open: dict[str, tuple[int, int, float]] = {}  # left, booked, when
        self._since = float("-inf")
        self.tokens = 0
        self.unreported_tokens = 0
        self.unreported_booked = 0
        self.unreported_count = 0

    def __len__(self) -> int:
        return len(self._open)

    def add(self, request_id: str, tokens: int, now: float) -> None:
        """Books work of `tokens` tokens; again replaces."""
        self.remove(request_id)
        self._open[request_id] = (tokens, tokens, now)
        self.tokens += tokens
        if now >= self._since:
            self.unreported_tokens += tokens
            self.unreported_booked += tokens
            self.unreported_count += 1

    def shrink(self, request_id: str, tokens: int) -> None:
        """Only `tokens` of a booking are left to do; without effect when there is none, or when fewer are."""
        left, booked, at = self._open.get(request_id, (0, 0, 0.0))
        if tokens < left:
            self._open[request_id] = (tokens, booked, at)
            self.tokens -= left - tokens
            if at >= self._since:
                self.unreported_tokens -= left - tokens

    def remove(self, request_id: str) -> None:
        """Returns a booking; without effect when there is none."""
        entry = self._open.pop(request_id, None)
        if entry is not None:
            left, booked, at = entry
            self.tokens -= left
            if at >= self._since:
                self.unreported_tokens -= left
                self.unreported_booked -= booked
                self.unreported_count -= 1

    def mark_reported(self, since: float) -> None:
        """What was booked before `since` is not fresh any more: the pod's own report includes it."""
        self._since = since
        fresh = [entry for entry in self._open.values() if entry[2] >= since]
        self.unreported_tokens = sum(left for left, _, _ in fresh)
        self.unreported_booked = sum(booked for _, booked, _ in fresh)
        self.unreported_count = len(fresh)
