"""The pods of one attempt and all bookings made for it; `release` returns them once.

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
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from common.types import RemotePrefillCost, Role
from gateway.pods.pod import Pod
from gateway.routing.local_index import ANY_POD, ApproxIndex, InFlightPrompts
from gateway.routing.policy import PodOption, PullOffer

AMPLE_FREE_SHARE = 0.125  #: A decode pod with this share of its pool free has room for a prompt, as good as surely.

#: After the first token a prompt stays in flight until the index has its blocks and cached look-ups have expired.
INFLIGHT_LINGER_S = 0.2


@dataclass(frozen=True, slots=True)
class ChosenPod:
    """A pod and the option by which the policy ranked it."""

    pod: Pod
    option: PodOption


class Placement:
    """Where one reservation runs. Without a prefill pod the decode pod computes the prompt itself."""

    def __init__(
        self,
        request_id: str,
        decode: ChosenPod,
        prefill: ChosenPod | None,
        hashes: Sequence[bytes],
        *,
        inflight: InFlightPrompts,
        approx_index: ApproxIndex,
        unbook_shared: Callable[[str, Sequence[Pod]], None],
    ) -> None:
        """
        Args:
            hashes: Block hashes of the prompt.
            unbook_shared: Ends the bookings of a request on these pods in the index, in the background.
        """
        self.request_id = request_id
        self._decode = decode
        self._prefill = prefill
        self._hashes = hashes
        self._inflight = inflight
        self._approx_index = approx_index
        self._unbook_shared = unbook_shared
        #: The bookings exist; then `_computing` says whether that of the prompt does too.
        self._booked = self._computing = False

    @property
    def decode(self) -> Pod:
        return self._decode.pod

    @property
    def prefill(self) -> Pod | None:
        return None if self._prefill is None else self._prefill.pod

    @property
    def _computing_pod(self) -> ChosenPod:
        return self._prefill or self._decode

    @property
    def predicted_hit_tokens(self) -> int:
        """Prompt tokens that the computing pod is expected to hold, after the pull if there is one."""
        return self._computing_pod.option.hit_tokens

    @property
    def pull_offer(self) -> PullOffer | None:
        """The prefix that the prefill pod pulls first."""
        return None if self._prefill is None else self._prefill.option.pull_offer

    @property
    def expects_target(self) -> bool:
        """Reserve will answer with a KvTarget, as far as is known; then the prefill can start before the answer.

        That is so if the decode pod has ample room and holds nothing of the prompt, so that it has no reason to compute
        the prompt itself.
        """
        if self._prefill is None or self._prefill.option.pull_offer is not None:
            return False
        view, load = self._decode.option.view, self._decode.option.view.load
        if not self._prefill.option.view.late_targets or self._decode.option.hit_tokens or load is None or load.waiting:
            return False
        return view.free_blocks() >= AMPLE_FREE_SHARE * view.num_blocks

    def remote_prefill_cost(self) -> RemotePrefillCost | None:
        """Returns the predicted cost of the remote prefill; None while no pod has measured its prefill rate.

        The decode pod compares it with computing the prompt itself.
        """
        if self._prefill is None or not self._prefill.option.view.rate_known:
            return None
        option, view = self._prefill.option, self._prefill.option.view
        own_s = option.missing_tokens * view.prefill_s_per_token if self._computing else 0.0
        return RemotePrefillCost(
            queue_s=max(0.0, view.queue_s(time.monotonic()) - own_s),
            compute_s=view.prefill_overhead_s
            + option.missing_tokens * view.prefill_s_per_token
            + (option.pull_offer.predicted_s if option.pull_offer else 0.0),
            hand_off_s=view.hand_off_s + self._decode.option.missing_tokens * view.transfer_s_per_token,
            tokens_per_s=1 / view.prefill_s_per_token,
        )

    # -- bookings, in the order of a request's life

    def book(self) -> None:
        """Books on the pods' views and in flight, before anything is sent."""
        now, computing = time.monotonic(), self._computing_pod
        self._booked = self._computing = True
        self._decode.option.view.decode_bookings.add(self.request_id, self._decode.option.missing_tokens, now)
        computing.option.view.prefill_bookings.add(self.request_id, computing.option.missing_tokens, now)
        self._inflight.add(self.request_id, computing.option.view.name, self._hashes)

    def rebook(self, decode: ChosenPod, prefill: ChosenPod | None) -> None:
        """Books other pods instead, before anything was sent."""
        self._release_local()
        self._decode, self._prefill = decode, prefill
        self.book()

    def on_local_prefill(self) -> None:
        """The decode pod computes the prompt itself: moves the booking of the prompt there."""
        if self._prefill is None:
            return
        prefill, self._prefill = self._prefill, None
        prefill.option.view.prefill_bookings.remove(self.request_id)
        self._unbook_shared(self.request_id, [prefill.pod])
        view, tokens = self._decode.option.view, self._decode.option.missing_tokens
        view.prefill_bookings.add(self.request_id, tokens, time.monotonic())
        self._inflight.add(self.request_id, view.name, self._hashes)

    def on_progress(self, tokens_left: int) -> None:
        """Shrinks the booking of the prompt to the tokens that are left to compute."""
        self._computing_pod.option.view.prefill_bookings.shrink(self.request_id, tokens_left)

    def on_first_token(self) -> None:
        """The prompt is computed: ends its booking and records which pods hold it. Later calls have no effect."""
        if not self._computing:
            return
        self._computing = False
        self._computing_pod.option.view.prefill_bookings.remove(self.request_id)
        if self._prefill is not None or self._decode.option.view.role is Role.BOTH:
            self._unbook_shared(self.request_id, [self._computing_pod.pod])
        asyncio.get_running_loop().call_later(INFLIGHT_LINGER_S, self._inflight.remove, self.request_id)
        self._approx_index.record(*ANY_POD, self._hashes)
        pods = {pod.address: pod for pod in (self._decode.pod, self._computing_pod.pod)}
        for pod in pods.values():
            if pod.info is not None:
                self._approx_index.record(pod.info.name, pod.info.generation, self._hashes)

    def release(self) -> None:
        """Returns all bookings that are left. Idempotent."""
        if not self._booked:
            return
        pods = [self._decode.pod]
        if self._prefill is not None and self._computing:
            pods.append(self._prefill.pod)
        self._release_local()
        self._unbook_shared(self.request_id, pods)

    def _release_local(self) -> None:
        """Returns the bookings of this gateway, without those in the index."""
        self._decode.option.view.decode_bookings.remove(self.request_id)
        if self._computing:
            self._computing_pod.option.view.prefill_bookings.remove(self.request_id)
            self._inflight.remove(self.request_id)
        self._booked = self._computing = False
