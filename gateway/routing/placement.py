"""The pods of one reservation and all bookings made for it; `release` ends the bookings.

    new --book--> booked --on_first_token--> computed --release--> released
                    |                                                 ^
                    +------------------ release ----------------------+

Bookings:
- the prompt's tokens on the pod that computes it, until the first token;
- the sequence on the decode pod, until the release;
- the prompt in flight, until the pod has had time to publish its blocks.

The first two are counted in the pods' views and, for other gateways, in the prefix index.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from common.errors import (
    AdapterNotLoaded,
    BatonError,
    Cancelled,
    DeadlineExceeded,
    InvalidRequest,
    ModelNotFound,
    Overloaded,
    RoleChanged,
)
from common.types import RemotePrefillCost, Role
from gateway.pods.pod import Pod
from gateway.routing.local_index import ANY_POD, ApproxIndex, InFlightPrompts
from gateway.routing.policy import PodOption, PullOffer

AMPLE_FREE_SHARE = 0.125  #: A decode pod with this share of its pool free almost surely has room for a prompt.
#: After the first token a prompt stays in flight until the index has its blocks and cached look-ups have expired.
INFLIGHT_LINGER_S = 0.2

#: Errors of a request for which the pod that sent them is not to blame.
_NOT_BY_PODS = (InvalidRequest, AdapterNotLoaded, Overloaded, RoleChanged, DeadlineExceeded, Cancelled)

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ChosenPod:
    """A pod and the option by which the policy ranked it."""

    pod: Pod
    option: PodOption


@dataclass(slots=True, eq=False)
class Placement:
    """Where one reservation runs. Without a prefill pod the decode pod computes the prompt itself."""

    request_id: str
    chosen_decode: ChosenPod
    chosen_prefill: ChosenPod | None
    hashes: Sequence[bytes]  #: Block hashes of the prompt.
    inflight: InFlightPrompts
    approx_index: ApproxIndex
    unbook_shared: Callable[[str, Sequence[Pod]], None]  #: Ends bookings in the index.
    prefill_outlives: bool = False  #: The Prefill call goes on after the release; `on_prefill_end` ends it.
    _booked: bool = False  #: The bookings exist.
    _computing: bool = False  #: The booking of the prompt exists too.

    @property
    def decode(self) -> Pod:
        return self.chosen_decode.pod

    @property
    def prefill(self) -> Pod | None:
        return None if self.chosen_prefill is None else self.chosen_prefill.pod

    @property
    def _computing_pod(self) -> ChosenPod:
        return self.chosen_prefill or self.chosen_decode

    @property
    def _chosen(self) -> list[ChosenPod]:
        return [self.chosen_decode] if self.chosen_prefill is None else [self.chosen_decode, self.chosen_prefill]

    @property
    def predicted_hit_tokens(self) -> int:
        """Prompt tokens that the computing pod is expected to hold, after the pull if there is one."""
        return self._computing_pod.option.hit_tokens

    @property
    def pull_offer(self) -> PullOffer | None:
        """The prefix that the prefill pod pulls first."""
        return None if self.chosen_prefill is None else self.chosen_prefill.option.pull_offer

    @property
    def expects_target(self) -> bool:
        """Reserve will answer with a KvTarget, as far as is known; then the prefill can start before the answer.

        It will if the decode pod has ample room, and holds nothing of the prompt, so has no reason to compute it.
        """
        if self.chosen_prefill is None or self.chosen_prefill.option.pull_offer is not None:
            return False
        view, load = self.chosen_decode.option.view, self.chosen_decode.option.view.load
        if not self.chosen_prefill.option.view.late_targets or self.chosen_decode.option.hit_tokens:
            return False
        ample = view.free_blocks() >= AMPLE_FREE_SHARE * view.num_blocks
        return ample and load is not None and not load.waiting

    def remote_prefill_cost(self) -> RemotePrefillCost | None:
        """Returns the predicted cost of the remote prefill, for Reserve; None while no prefill rate is measured."""
        if self.chosen_prefill is None or not self.chosen_prefill.option.view.rate_known:
            return None
        option, view = self.chosen_prefill.option, self.chosen_prefill.option.view
        own_s = option.missing_tokens * view.prefill_s_per_token if self._computing else 0.0
        return RemotePrefillCost(
            queue_s=max(0.0, view.queue_s(time.monotonic()) - own_s),
            compute_s=view.prefill_overhead_s
            + option.missing_tokens * view.prefill_s_per_token
            + (option.pull_offer.predicted_s if option.pull_offer else 0.0),
            hand_off_s=view.hand_off_s + self.chosen_decode.option.missing_tokens * view.transfer_s_per_token,
            tokens_per_s=1 / view.prefill_s_per_token,
            same_processor=view.processor != "" and view.processor == self.chosen_decode.option.view.processor,
        )

    # -- bookings, in the order of a request's life

    def book(self) -> None:
        """Books on the pods' views and in flight, before anything is sent."""
        now, computing = time.monotonic(), self._computing_pod
        self._booked = self._computing = True
        self.chosen_decode.option.view.decode_bookings.add(
            self.request_id, self.chosen_decode.option.missing_tokens, now
        )
        computing.option.view.prefill_bookings.add(self.request_id, computing.option.missing_tokens, now)
        self.inflight.add(self.request_id, computing.option.view.name, self.hashes)
        for chosen in self._chosen:
            chosen.option.view.on_sent(self.request_id, now)

    def rebook(self, decode: ChosenPod, prefill: ChosenPod | None) -> None:
        """Books other pods instead, before anything was sent."""
        self._release_local()
        self.chosen_decode, self.chosen_prefill = decode, prefill
        self.book()

    def on_local_prefill(self) -> None:
        """The decode pod computes the prompt itself: moves the booking of the prompt there. Idempotent."""
        if self.chosen_prefill is None or not self._booked:
            return
        prefill, self.chosen_prefill = self.chosen_prefill, None
        prefill.option.view.prefill_bookings.remove(self.request_id)
        prefill.option.view.on_end(self.request_id)
        self.unbook_shared(self.request_id, [prefill.pod])
        view, tokens = self.chosen_decode.option.view, self.chosen_decode.option.missing_tokens
        view.prefill_bookings.add(self.request_id, tokens, time.monotonic())
        self.inflight.add(self.request_id, view.name, self.hashes)

    def on_progress(self, tokens_left: int) -> None:
        """Shrinks the booking of the prompt to the tokens that are left to compute."""
        self._computing_pod.option.view.prefill_bookings.shrink(self.request_id, tokens_left)

    def on_first_token(self) -> None:
        """The prompt is computed: ends its booking and records which pods hold it. Later calls have no effect."""
        if not self._computing:
            return
        self._computing = False
        self._computing_pod.option.view.prefill_bookings.remove(self.request_id)
        if self.chosen_prefill is not None or self.chosen_decode.option.view.role is Role.BOTH:
            self.unbook_shared(self.request_id, [self._computing_pod.pod])
        asyncio.get_running_loop().call_later(INFLIGHT_LINGER_S, self.inflight.remove, self.request_id)
        self.approx_index.record(*ANY_POD, self.hashes)
        pods = {pod.address: pod for pod in (self.chosen_decode.pod, self._computing_pod.pod)}
        for pod in pods.values():
            if pod.info is not None:
                self.approx_index.record(pod.info.name, pod.info.generation, self.hashes)

    def release(self) -> None:
        """Ends all bookings that are left. Idempotent."""
        if not self._booked:
            return
        pods = [self.chosen_decode.pod]
        if self.chosen_prefill is not None and self._computing:
            pods.append(self.chosen_prefill.pod)
        self._release_local()
        self.unbook_shared(self.request_id, pods)

    def _release_local(self) -> None:
        """Ends the bookings in this gateway, not those in the index."""
        self.chosen_decode.option.view.decode_bookings.remove(self.request_id)
        self.chosen_decode.option.view.on_end(self.request_id)
        if not self.prefill_outlives:
            self.on_prefill_end()
        if self._computing:
            self._computing_pod.option.view.prefill_bookings.remove(self.request_id)
            self.inflight.remove(self.request_id)
        self._booked = self._computing = False

    # -- what the pods' breakers learn

    def on_prefill_end(self) -> None:
        """The Prefill call has ended, so it is no probe any more. Idempotent."""
        if self.chosen_prefill is not None:
            self.chosen_prefill.option.view.on_end(self.request_id)

    def record_success(self, pod: Pod) -> None:
        """The pod has done its part of the request."""
        for chosen in self._chosen:
            if chosen.pod is pod:
                chosen.option.view.on_end(self.request_id, success=True)

    def record_failure(self, pod: Pod, error: BatonError, *, sure: bool = True) -> None:
        """The pod failed the request, unless the error is of the request. `sure`: no other pod may be to blame."""
        if isinstance(error, _NOT_BY_PODS) and not isinstance(error, ModelNotFound):
            return
        for chosen in self._chosen:
            if chosen.pod is pod:
                view = chosen.option.view
                if view.breaker.on_failure(self.request_id, time.monotonic(), 1.0 if sure else 0.5):
                    _log.warning("pod %s fails too many requests and gets fewer, the last: %s", view.name, error)
