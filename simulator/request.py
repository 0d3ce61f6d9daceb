"""One request on its way through the simulated cluster; the steps of gateway/dispatch/attempt.py without the messages.

reserve on a decode pod -> prefill, its chunks travel as they are done -> first token -> decode -> end. Without decode
pods it ends with its first token. When a pod dies under it, it is routed anew: the whole prompt, and what was
generated so far as a part of it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from loadtest.workload.trace import WorkloadRequest
from simulator.clock import VirtualClock
from simulator.outcome import RequestOutcome
from simulator.prefill_pod import PromptSequence

if TYPE_CHECKING:
    from simulator.gateway import SimulatedGateway
    from simulator.pod import SimulatedPod
from dataclasses import dataclass

from gateway.pods.view import PodView
from gateway.routing.policy import PullOffer
from simulator.decode_pod import DecodeSequence
from simulator.pod import SimulatedPod


class SimulatedRequest:
    """Ends once: outcome.done or outcome.refused, and on_end is called."""

    def __init__(
        self,
        clock: VirtualClock,
        gateway: SimulatedGateway,
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
        self._choice: Route | None = None
        self._prompt: PromptSequence | None = None
        self._sent = 0  # prompt tokens whose KV is on its way to the decode pod or there
        self._first_at: float | None = None
        self._resumed_tokens = 0  # tokens of the answer that came before a decode pod died

    def start(self, choice: Route) -> None:
        """Goes to the pods that were chosen."""
        self._choice = choice
        self.outcome.attempts += 1
        self.outcome.expected_hit_tokens = choice.expected_hit_tokens
        prefill = choice.prefill
        prefill.prompts += 1
        prefill.requests[self.request_id] = self
        if choice.decode is not None and choice.answer is not None:
            choice.decode.requests[self.request_id] = self
            self._sent = choice.answer.cached_blocks * self._block_size
        self._prompt = PromptSequence(
            f"{self.request_id}.{self.outcome.attempts}",
            self.prompt_len,
            self.block_hashes,
            self._block_size,
            self._on_chunk,
            self._on_first,
        )
        if choice.pull is not None and choice.holder is not None and choice.holder.alive:
            self._fetch(choice, choice.holder, choice.pull.tokens // self._block_size)
        else:
            prefill.prefill.add(self._prompt)

    def _fetch(self, choice: Route, holder: SimulatedPod, blocks: int) -> None:
        """The prompt is queued once what the holder really has of it is there."""
        prompt, pool, rates = self._prompt, choice.prefill.prefill.pool, holder.rates
        assert prompt is not None
        chain = list(self.block_hashes[: holder.pod.pool.match_prefix(self.block_hashes[:blocks])])
        missing = max(0, len(chain) - pool.match_prefix(chain)) * self._block_size
        there = holder.link.send(self._clock.now, missing * rates.kv_bytes / rates.link_byte_s) + rates.link_latency_s

        def fetched() -> None:
            if self._choice is not choice:
                return  # a pod died meanwhile
            choice.prefill.prefill.add_prefix(chain)
            choice.prefill.prefill.add(prompt)

        self._clock.call_at(there, fetched)

    def refuse(self) -> None:
        """Nobody takes it."""
        self.outcome.refused = True
        self._on_end(self)

    def on_pod_lost(self, member: SimulatedPod) -> None:
        """A pod that it needs has died."""
        choice, prompt = self._choice, self._prompt
        assert choice is not None
        self._release()
        if member is not choice.prefill and prompt is not None:
            choice.prefill.prefill.cancel(prompt)
        if choice.decode is not None and choice.answer is not None:
            if member is choice.decode:
                self._resume(choice.decode.decode.progress(choice.answer))
            else:
                choice.decode.decode.cancel(choice.answer)
        self._gateway.retry(self)

    def _resume(self, got: int) -> None:
        """What the dead decode pod had answered becomes a part of the prompt."""
        first = 1 if self._first_at is not None and self._resumed_tokens == 0 else 0
        got = min(self.output_len - 1, got + first)
        self._resumed_tokens += got
        self.prompt_len += got
        self.output_len -= got

    def _release(self) -> None:
        """Leaves the pods and returns the bookings; idempotent."""
        choice, self._choice, self._prompt = self._choice, None, None
        if choice is None:
            return
        choice.prefill.requests.pop(self.request_id, None)
        if choice.decode is not None:
            choice.decode.requests.pop(self.request_id, None)
        self._gateway.release_bookings(self, choice)

    def _on_chunk(self, left: int, _: int) -> None:
        choice, prompt = self._choice, self._prompt
        assert choice is not None
        assert prompt is not None
        self._gateway.progress(self, choice, left)
        if choice.decode is not None and left:
            self._send(choice, prompt.computed)

    def _send(self, choice: Route, computed: int) -> float:
        """Queues the KV up to `computed` on the pod's link; when it is there."""
        new, self._sent = max(0, computed - self._sent), max(self._sent, computed)
        rates = choice.prefill.rates
        return choice.prefill.link.send(self._clock.now, new * rates.kv_bytes / rates.link_byte_s)

    def _on_first(self) -> None:
        choice, prompt, now = self._choice, self._prompt, self._clock.now
        assert choice is not None
        assert prompt is not None
        self.outcome.hit_tokens = prompt.cached_tokens
        if self._first_at is None:
            self._first_at = now
            self.outcome.ttft_s = now - self.outcome.arrival_s
        self._gateway.first_token(self, choice)
        if choice.decode is None:
            choice.prefill.prefill.release(prompt)
            self._end()
            return
        there = self._send(choice, self.prompt_len) + choice.prefill.rates.link_latency_s
        self._clock.call_at(there, lambda: self._handed_off(choice, prompt))

    def _handed_off(self, choice: Route, prompt: PromptSequence) -> None:
        choice.prefill.prefill.release(prompt)
        if self._choice is not choice:
            return  # a pod died meanwhile
        choice.prefill.requests.pop(self.request_id, None)
        assert choice.decode is not None
        assert choice.answer is not None
        choice.decode.decode.join(choice.answer)

    def on_decoded(self, _: int) -> None:
        """The decode pod has produced its last token."""
        self._end()

    def _end(self) -> None:
        self._release()
        assert self._first_at is not None
        tokens = self.outcome.output_len
        if tokens > 1 and self._clock.now > self._first_at:
            self.outcome.mean_itl_s = (self._clock.now - self._first_at) / (tokens - 1)
        self.outcome.done = True
        self._on_end(self)


@dataclass(frozen=True, slots=True)
class Route:
    """Where an attempt runs. promised: prompt tokens that the prefill pod is thought to hold, after a pull if there is
    one: what `holder` has of them comes from there first.
    """

    prefill: SimulatedPod
    prefill_view: PodView
    decode: SimulatedPod | None
    decode_view: PodView | None
    answer: DecodeSequence | None
    expected_hit_tokens: int
    holder: SimulatedPod | None = None
    pull: PullOffer | None = None
