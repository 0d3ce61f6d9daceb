"""One request on its way through the simulated cluster: the steps of gateway/dispatch/attempt.py without messages.

    reserve on a decode pod -> prefill, each chunk's KV is sent when it is computed -> first token -> decode -> end

Without decode pods a request ends with its first token. If one of its pods dies, the request is routed again: with the
whole prompt, followed by the tokens that were generated.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from gateway.pods.view import PodView
from gateway.routing.policy import PullOffer
from loadtest.workload.trace import WorkloadRequest
from simulator.clock import VirtualClock
from simulator.decode_pod import DecodeSequence
from simulator.outcome import RequestOutcome
from simulator.pod import SimulatedPod
from simulator.prefill_pod import PromptSequence


@dataclass(frozen=True, slots=True)
class Route:
    """The pods of one attempt."""

    prefill: SimulatedPod
    prefill_view: PodView
    #: The decode pod and its reservation; all three None in a cluster without decode pods.
    decode: SimulatedPod | None
    decode_view: PodView | None
    sequence: DecodeSequence | None
    #: Prompt tokens that the prefill pod is expected to hold, after a pull if there is one.
    expected_hit_tokens: int
    #: The pod to pull a prefix from first, and the offer.
    holder: SimulatedPod | None = None
    pull: PullOffer | None = None


class RequestOwner(Protocol):
    """The gateway of a request."""

    def retry(self, request: SimulatedRequest) -> None:
        """Routes the request again."""

    def progress(self, request: SimulatedRequest, route: Route, tokens_left: int) -> None:
        """Called when a chunk is computed, with the number of prompt tokens left."""

    def first_token(self, request: SimulatedRequest, route: Route) -> None:
        """Called when the prompt is computed."""

    def release_bookings(self, request: SimulatedRequest, route: Route) -> None:
        """Called when the attempt has ended."""


class SimulatedRequest:
    """Ends exactly once: with outcome.done or outcome.refused, and a call of `on_end`."""

    def __init__(
        self,
        clock: VirtualClock,
        gateway: RequestOwner,
        request_id: str,
        request: WorkloadRequest,
        block_size: int,
        on_end: Callable[[SimulatedRequest], None],
    ) -> None:
        self.request_id = request_id
        self.block_hashes = request.block_hashes
        self.prompt_len = request.prompt_len
        self.output_len = request.output_len
        self.outcome = RequestOutcome(request.arrival_s, request.prompt_len, request.output_len)
        self._clock = clock
        self._gateway = gateway
        self._block_size = block_size
        self._on_end = on_end
        #: The pods of the current attempt, None between attempts.
        self._route: Route | None = None
        self._prompt: PromptSequence | None = None
        #: Prompt tokens with KV on the decode pod or on the way there.
        self._sent = 0
        self._first_token_at: float | None = None
        #: Output tokens from attempts that ended with a dead decode pod; they belong to the prompt now.
        self._resumed_tokens = 0

    def start(self, route: Route) -> None:
        """Starts an attempt on the pods of the route."""
        self._route = route
        self.outcome.attempts += 1
        self.outcome.expected_hit_tokens = route.expected_hit_tokens
        prefill = route.prefill
        prefill.prompts += 1
        prefill.requests[self.request_id] = self
        if route.decode is not None and route.sequence is not None:
            route.decode.requests[self.request_id] = self
            self._sent = route.sequence.cached_blocks * self._block_size
        self._prompt = PromptSequence(
            f"{self.request_id}.{self.outcome.attempts}",
            self.prompt_len,
            self.block_hashes,
            self._block_size,
            self._on_chunk,
            self._on_first_token,
        )
        if route.pull is not None and route.holder is not None and route.holder.alive:
            self._pull(route, route.holder, route.pull.tokens // self._block_size)
        else:
            prefill.prefill.add(self._prompt)

    def _pull(self, route: Route, holder: SimulatedPod, blocks: int) -> None:
        """Sends the blocks that the holder really has, then queues the prompt on the prefill pod."""
        prompt, pool, rates = self._prompt, route.prefill.prefill.pool, holder.rates
        assert prompt is not None
        held = list(self.block_hashes[: holder.process.pool.match_prefix(self.block_hashes[:blocks])])
        missing = max(0, len(held) - pool.match_prefix(held)) * self._block_size
        sent_at = holder.link.send(self._clock.now, missing * rates.kv_bytes / rates.link_byte_s)

        def on_pulled() -> None:
            if self._route is not route:
                return  # a pod died meanwhile
            route.prefill.prefill.add_prefix(held)
            route.prefill.prefill.add(prompt)

        self._clock.call_at(sent_at + rates.link_latency_s, on_pulled)

    def _on_chunk(self, tokens_left: int, _: int) -> None:
        route, prompt = self._route, self._prompt
        assert route is not None
        assert prompt is not None
        self._gateway.progress(self, route, tokens_left)
        if route.decode is not None and tokens_left:
            self._send_kv(route, prompt.computed)

    def _send_kv(self, route: Route, computed: int) -> float:
        """Queues the KV up to token `computed` on the prefill pod's link. Returns when it is sent."""
        new, self._sent = max(0, computed - self._sent), max(self._sent, computed)
        rates = route.prefill.rates
        return route.prefill.link.send(self._clock.now, new * rates.kv_bytes / rates.link_byte_s)

    def _on_first_token(self) -> None:
        route, prompt, now = self._route, self._prompt, self._clock.now
        assert route is not None
        assert prompt is not None
        self.outcome.hit_tokens = prompt.cached_tokens
        if self._first_token_at is None:
            self._first_token_at = now
            self.outcome.ttft_s = now - self.outcome.arrival_s
        self._gateway.first_token(self, route)
        if route.decode is None:
            route.prefill.prefill.release(prompt)
            self._end()
            return
        arrival = self._send_kv(route, self.prompt_len) + route.prefill.rates.link_latency_s
        self._clock.call_at(arrival, lambda: self._on_handed_off(route, prompt))

    def _on_handed_off(self, route: Route, prompt: PromptSequence) -> None:
        """Starts decoding: the decode pod has all KV of the prompt."""
        route.prefill.prefill.release(prompt)
        if self._route is not route:
            return  # a pod died meanwhile
        route.prefill.requests.pop(self.request_id, None)
        assert route.decode is not None
        assert route.sequence is not None
        route.decode.decode.join(route.sequence)

    def on_decoded(self, _: int) -> None:
        """Ends the request after the last token of the decode pod."""
        self._end()

    def refuse(self) -> None:
        """Ends the request without an answer: no pod takes it."""
        self.outcome.refused = True
        self._on_end(self)

    def on_pod_lost(self, pod: SimulatedPod) -> None:
        """Ends the attempt, because one of its pods has died, and starts another."""
        route, prompt = self._route, self._prompt
        assert route is not None
        self._release()
        if pod is not route.prefill and prompt is not None:
            route.prefill.prefill.cancel(prompt)
        if route.decode is not None and route.sequence is not None:
            if pod is route.decode:
                self._resume(route.decode.decode.progress(route.sequence))
            else:
                route.decode.decode.cancel(route.sequence)
        self._gateway.retry(self)

    def _resume(self, decoded: int) -> None:
        """Moves the tokens that the dead decode pod generated from the output to the prompt."""
        from_prefill = 1 if self._first_token_at is not None and self._resumed_tokens == 0 else 0
        generated = min(self.output_len - 1, decoded + from_prefill)
        self._resumed_tokens += generated
        self.prompt_len += generated
        self.output_len -= generated

    def _release(self) -> None:
        """Leaves the pods and returns the bookings. Idempotent."""
        route, self._route, self._prompt = self._route, None, None
        if route is None:
            return
        route.prefill.requests.pop(self.request_id, None)
        if route.decode is not None:
            route.decode.requests.pop(self.request_id, None)
        self._gateway.release_bookings(self, route)

    def _end(self) -> None:
        self._release()
        assert self._first_token_at is not None
        tokens = self.outcome.output_len
        if tokens > 1 and self._clock.now > self._first_token_at:
            self.outcome.mean_itl_s = (self._clock.now - self._first_token_at) / (tokens - 1)
        self.outcome.done = True
        self._on_end(self)
