"""A pod as routing sees it: its facts, its last load report, and the bookings that the report does not include yet.

    queue_s(now) =  reported queue - computed since the report  +  own unreported bookings + those of other gateways
                    (queue_empty_at - now)                         (tokens * prefill_s_per_token)

So reading the queue of a pod is O(1). Times are seconds of one clock.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean

from common.types import PodLoad, Role
from gateway.pods.fitness import Breaker, Slowness

# Assumed until the pod or its peers have measured.
DEFAULT_PREFILL_RATE = 2000.0  #: Prompt tokens per second.
DEFAULT_STEP_S, DEFAULT_STEP_SLOPE_S = 0.01, 0.0001  #: A decode step, and its growth per sequence.
DEFAULT_TRANSFER_RATE = 20_000.0  #: Rate at which KV is moved, in prompt tokens per second.
DEFAULT_HAND_OFF_S, DEFAULT_PULL_S = 0.005, 0.02  #: End of a hand-off, latency of a pull, without moving KV.

DEFAULT_ADAPTER_LOAD_S = 0.5  #: A pod reads a LoRA adapter from its files.
#: A LoRA adapter goes from host memory to the device: about 100 MB at 25 GB/s, and the wait for the next step.
ADAPTER_COPY_S = 0.01

HOST_SPEEDUP = 8.0  #: Loading KV from host memory is this much faster than computing it.
DISK_SPEEDUP = 2.0  #: The same for the disk and the shared tier of a pod that has not measured them.
DISPATCH_DELAY_S = 0.02  #: A booking made this shortly before a report may have reached the pod after it.


@dataclass(slots=True)
class Bookings:
    """The open bookings of one pod. A booking is unreported until a report of the pod includes it."""

    _open: dict[str, tuple[int, int, float]] = field(default_factory=dict)  #: By request: left, booked, time.
    _since: float = float("-inf")  #: Bookings before this time are reported.
    tokens: int = 0  #: Tokens left of all bookings.
    unreported_tokens: int = 0  #: Tokens left of the unreported bookings.
    unreported_booked: int = 0  #: Their tokens when booked; other gateways never see a booking shrink.
    unreported_count: int = 0

    def __len__(self) -> int:
        return len(self._open)

    def add(self, request_id: str, tokens: int, now: float) -> None:
        """Books tokens for a request. Replaces its earlier booking."""
        self.remove(request_id)
        self._open[request_id] = (tokens, tokens, now)
        self.tokens += tokens
        if now >= self._since:
            self.unreported_tokens += tokens
            self.unreported_booked += tokens
            self.unreported_count += 1

    def shrink(self, request_id: str, tokens: int) -> None:
        """Sets the tokens that are left of a booking. Has no effect without a booking, or if fewer are left."""
        left, booked, at = self._open.get(request_id, (0, 0, 0.0))
        if tokens < left:
            self._open[request_id] = (tokens, booked, at)
            self.tokens -= left - tokens
            if at >= self._since:
                self.unreported_tokens -= left - tokens

    def remove(self, request_id: str) -> None:
        """Removes a booking. Has no effect if there is none."""
        entry = self._open.pop(request_id, None)
        if entry is not None:
            left, booked, at = entry
            self.tokens -= left
            if at >= self._since:
                self.unreported_tokens -= left
                self.unreported_booked -= booked
                self.unreported_count -= 1

    def mark_reported(self, since: float) -> None:
        """Marks the bookings before `since` as included in the pod's report."""
        self._since = since
        unreported = [entry for entry in self._open.values() if entry[2] >= since]
        self.unreported_tokens = sum(left for left, _, _ in unreported)
        self.unreported_booked = sum(booked for _, booked, _ in unreported)
        self.unreported_count = len(unreported)


@dataclass(slots=True, eq=False, kw_only=True)
class PodView:
    name: str = field(kw_only=False)
    block_size: int
    max_request_tokens: int  #: Prompt and output tokens that one request can have on the pod.
    num_blocks: int
    role: Role = Role.PREFILL
    address: str = ""

    load: PodLoad | None = None  #: The last report, None before the first.
    reported_at: float = float("-inf")  #: When the pod made it.
    queue_empty_at: float = float("-inf")  #: When the reported prompt queue will be empty.

    prefill_bookings: Bookings = field(default_factory=Bookings)  #: Prompts that this gateway sent to the pod.
    decode_bookings: Bookings = field(default_factory=Bookings)  #: Sequences, in prompt tokens.
    foreign_tokens: int = 0  #: Prompt tokens that other gateways booked since the report, as far as is known.
    foreign_sequences: int = 0  #: The same for sequences.

    prefill_overhead_s: float = 0.0  #: Fixed time of a prompt.
    prefill_s_per_token: float = 1 / DEFAULT_PREFILL_RATE  #: Further time per prompt token.
    rate_known: bool = False  #: The pod or its peers have measured `prefill_s_per_token`.
    step_s: float = DEFAULT_STEP_S  #: Fixed time of a decode step.
    step_slope_s: float = DEFAULT_STEP_SLOPE_S  #: Further time per sequence of the step.
    transfer_s_per_token: float = 1 / DEFAULT_TRANSFER_RATE  #: Time to move the KV of one token.
    hand_off_s: float = DEFAULT_HAND_OFF_S  #: Time of the end of a hand-off, without moving KV.
    peers_shared_rate: float = 0.0  #: Mean rate of reads from the shared tier; 0 while no pod has measured one.

    pulls: bool = False  #: The pod pulls prefixes from other pods.
    pull_s: float = DEFAULT_PULL_S  #: Latency of a pull beyond moving the KV.
    pair_rates: Mapping[str, float] = field(default_factory=dict)  #: Bytes/s written, by receiver.
    #: Why the pod cannot send KV to other pods: by receiver, its generation (0: any) and the cause.
    pair_troubles: Mapping[str, tuple[int, str]] = field(default_factory=dict)
    processor: str = ""  #: The processor that computes the pod's steps; empty while unknown.
    card: str = ""  #: The kind of this processor; empty from older pods.
    breaker: Breaker = field(default_factory=Breaker)
    slowness: Slowness = field(default_factory=Slowness)
    late_targets: bool = False  #: The pod computes a prompt before SetTarget says where the KV goes.

    warm_adapters: set[str] = field(default_factory=set)  #: Digests of the LoRA adapters on the device.
    adapter_copies: int = 0  #: Copies to the pod's device up to this list of warm adapters.
    held_adapters: Collection[str] = ()  #: Digests of those in host memory, as far as is known.
    adapter_load_s: float = 0.0  #: Time to read an adapter from files; 0 until the pod has measured it.

    def apply_report(self, load: PodLoad, now: float) -> None:
        """Takes a load report that the pod made at `now`. A report older than the last one has no effect."""
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

    def takes_requests(self, now: float) -> bool:
        """Returns whether the pod may get one more request though others could take it."""
        if self.breaker.closed and not self.slowness.slow:
            return True
        return self.breaker.allows(now) and self.slowness.allows(now)

    def on_sent(self, request_id: str, now: float) -> None:
        """A request goes to the pod."""
        if not self.breaker.closed:
            self.breaker.on_sent(request_id, now)
        if self.slowness.slow:
            self.slowness.on_sent(now)

    def on_end(self, request_id: str, *, success: bool = False) -> None:
        """A request has ended on the pod: with a success, or with an outcome that tells nothing or is counted."""
        if self.breaker.closed:
            self.breaker.successes += success
            return
        if success:
            self.breaker.on_success(request_id)
        self.breaker.on_end(request_id)

    @property
    def disk_s_per_token(self) -> float:
        """Time to read the KV of one prompt token from the pod's disk tier."""
        rate = 0.0 if self.load is None else self.load.disk_rate
        return 1 / rate if rate > 0 else self.prefill_s_per_token / DISK_SPEEDUP

    @property
    def shares_cache(self) -> bool:
        """Whether the pod reads and writes the shared tier."""
        return self.load is not None and self.load.shared_cache

    @property
    def shared_s_per_token(self) -> float:
        """Time to read the KV of one prompt token from the shared tier."""
        rate = (0.0 if self.load is None else self.load.shared_rate) or self.peers_shared_rate
        return 1 / rate if rate > 0 else self.prefill_s_per_token / DISK_SPEEDUP

    def adapter_s(self, digest: str) -> float:
        """Returns the seconds until the pod can compute with a LoRA adapter; 0 for the base model ("")."""
        if not digest or digest in self.warm_adapters:
            return 0.0
        load_s = 0.0 if digest in self.held_adapters else self.adapter_load_s or DEFAULT_ADAPTER_LOAD_S
        return load_s + ADAPTER_COPY_S

    def queue_s(self, now: float) -> float:
        """Returns the seconds until the pod can start a new prompt."""
        waiting = (self.prefill_bookings.unreported_tokens + self.foreign_tokens) * self.prefill_s_per_token
        return waiting + self.queue_empty_at - now if self.queue_empty_at > now else waiting

    def num_sequences(self) -> int:
        """Returns the number of sequences that decode on the pod or are about to."""
        load = self.load
        if load is None:
            return len(self.decode_bookings) + self.foreign_sequences
        booked = self.decode_bookings.unreported_count + self.foreign_sequences
        return load.running + load.waiting + load.reserved + booked

    def free_blocks(self) -> int:
        """Returns the blocks that a new sequence may have; without a report these are all blocks."""
        if self.load is None:
            return self.num_blocks
        booked = self.decode_bookings
        return self.load.free_blocks - booked.unreported_tokens // self.block_size - booked.unreported_count


def fit_views(views: Sequence[PodView], now: float) -> Sequence[PodView]:
    """Returns the pods that may get a request: all of them if each fails or is much too slow."""
    return [view for view in views if view.takes_requests(now)] or views


def fill_in_from_peers(views: Collection[PodView]) -> None:
    """Sets rates that a pod has not measured to the mean of its peers, so that it looks neither faster nor slower."""
    loads = [view.load for view in views if view.load is not None]
    prefill_s = [1 / load.prefill_rate for load in loads if load.prefill_rate > 0]
    transfer_s = [1 / load.transfer_rate for load in loads if load.transfer_rate > 0]
    shared_rates = [load.shared_rate for load in loads if load.shared_rate > 0]
    steps = [(load.step_s, load.step_slope_s) for load in loads if load.has_decode_times]
    for view in views:
        load = view.load or PodLoad()
        view.peers_shared_rate = fmean(shared_rates) if shared_rates else 0.0
        if prefill_s and load.prefill_rate <= 0:
            view.prefill_s_per_token, view.rate_known = fmean(prefill_s), True
        if transfer_s and load.transfer_rate <= 0:
            view.transfer_s_per_token = fmean(transfer_s)
        if steps and not load.has_decode_times:
            view.step_s, view.step_slope_s = (fmean(part) for part in zip(*steps, strict=True))
