"""Where one attempt of a request runs, and everything that was booked for it; returned by exactly one idempotent end.

    booked -> computing -> computed -> ended       (local: the decode pod computes, nothing is booked for a prefill)

What is booked: the prompt's tokens on the pod that computes it, until its first token; the sequence on the decode pod,
until the end; both here and, for the other gateways, in the index. And the prompt in flight, until the pod has had time
to tell the index about it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from common.types import Role
from gateway.pods.pod import Pod
from gateway.routing.local_index import ANY_POD, ApproxIndex, InFlightPrompts
from gateway.routing.policy import PodOption, PullOffer

AMPLE_FREE_SHARE = 0.125  # share of its pool that a decode pod has free for sure to have room for a prompt
INFLIGHT_LINGER_S = (
    0.2  # from the first token until the index knows the prompt's blocks, and kept answers of it are old
)


@dataclass(frozen=True, slots=True)
class RemotePrefillCost:
    """What computing the prompt on the prefill pod is thought to take; seconds, see RemotePrefill in decode.proto."""

    queue_s: float
    compute_s: float
    hand_off_s: float
    tokens_per_s: float


@dataclass(frozen=True, slots=True)
class ChosenPod:
    """A pod and what routing thought of it."""

    pod: Pod
    pod_option: PodOption


class Placement:
    """See the top of this file. prefill None: the decode pod computes the prompt itself.

    predicted: prompt tokens that whoever computes is thought to hold.
    """

    def __init__(
        self,
        request_id: str,
        decode: ChosenPod,
        prefill: ChosenPod | None,
        hashes: Sequence[bytes],
        *,
        inflight: InFlightPrompts,
        approx: ApproxIndex,
        unbook: Callable[[str, Sequence[Pod]], None],
    ) -> None:
        self.request_id = request_id
        self._decode = decode
        self._prefill = prefill
        self._hashes = hashes
        self._inflight = inflight
        self._approx = approx
        self._unbook = unbook
        self._computing = self._booked = False

    @property
    def decode(self) -> Pod:
        return self._decode.pod

    @property
    def prefill(self) -> Pod | None:
        return None if self._prefill is None else self._prefill.pod

    @property
    def predicted_hit_tokens(self) -> int:
        return self._computing_pod.pod_option.hit_tokens

    @property
    def pull_offer(self) -> PullOffer | None:
        """What the prefill pod is to fetch from another one first."""
        return None if self._prefill is None else self._prefill.pod_option.pull_offer

    @property
    def expects_target(self) -> bool:
        """Reserve will have the prompt computed on the prefill pod, as far as can be told: the decode pod holds nothing
        of it and has room. Then that pod need not wait for the answer.
        """
        if self._prefill is None or self._prefill.pod_option.pull_offer is not None:
            return False
        view, load = self._decode.pod_option.view, self._decode.pod_option.view.load
        if (
            not self._prefill.pod_option.view.late_targets
            or self._decode.pod_option.hit_tokens
            or load is None
            or load.waiting
        ):
            return False
        return view.free_blocks() >= AMPLE_FREE_SHARE * view.num_blocks

    def remote_prefill_cost(self) -> RemotePrefillCost | None:
        """What the decode pod may weigh computing the prompt itself against; None while nobody has measured it."""
        if self._prefill is None or not self._prefill.pod_option.view.rate_known:
            return None
        option, view = self._prefill.pod_option, self._prefill.pod_option.view
        own_s = option.missing_tokens * view.prefill_s_per_token if self._computing else 0.0
        return RemotePrefillCost(
            queue_s=max(0.0, view.queue_s(time.monotonic()) - own_s),
            compute_s=view.prefill_overhead_s
            + option.missing_tokens * view.prefill_s_per_token
            + (option.pull_offer.predicted_s if option.pull_offer else 0.0),
            hand_off_s=view.hand_off_s + self._decode.pod_option.missing_tokens * view.transfer_s_per_token,
            tokens_per_s=1 / view.prefill_s_per_token,
        )

    @property
    def _computing_pod(self) -> ChosenPod:
        return self._prefill or self._decode

    def book(self) -> None:
        """Counts it here, before anything is sent."""
        now, chosen = time.monotonic(), self._computing_pod
        self._booked = self._computing = True
        self._decode.pod_option.view.decode_bookings.add(self.request_id, self._decode.pod_option.missing_tokens, now)
        chosen.pod_option.view.prefill_bookings.add(self.request_id, chosen.pod_option.missing_tokens, now)
        self._inflight.add(self.request_id, chosen.pod_option.view.name, self._hashes)

    def rebook(self, decode: ChosenPod, prefill: ChosenPod | None) -> None:
        """Elsewhere, before anything was sent."""
        self._release_local()
        self._decode, self._prefill = decode, prefill
        self.book()

    def on_local_prefill(self) -> None:
        """The decode pod computes the prompt itself."""
        if self._prefill is None:
            return
        prefill, self._prefill = self._prefill, None
        prefill.pod_option.view.prefill_bookings.remove(self.request_id)
        self._unbook(self.request_id, [prefill.pod])
        view, left = self._decode.pod_option.view, self._decode.pod_option.missing_tokens
        view.prefill_bookings.add(self.request_id, left, time.monotonic())
        self._inflight.add(self.request_id, view.name, self._hashes)

    def on_progress(self, tokens_left: int) -> None:
        """So much of the prompt is still to be computed."""
        self._computing_pod.pod_option.view.prefill_bookings.shrink(self.request_id, tokens_left)

    def on_first_token(self) -> None:
        """The first token is here."""
        if not self._computing:
            return
        self._computing = False
        self._computing_pod.pod_option.view.prefill_bookings.remove(self.request_id)
        if self._prefill is not None or self._decode.pod_option.view.role is Role.BOTH:
            self._unbook(self.request_id, [self._computing_pod.pod])
        asyncio.get_running_loop().call_later(INFLIGHT_LINGER_S, self._inflight.remove, self.request_id)
        self._approx.record(*ANY_POD, self._hashes)
        for pod in {
            self._decode.pod.address: self._decode.pod,
            self._computing_pod.pod.address: self._computing_pod.pod,
        }.values():
            if pod.info is not None:
                self._approx.record(pod.info.name, pod.info.generation, self._hashes)

    def release(self) -> None:
        """The attempt is over, however it ended. Idempotent."""
        if not self._booked:
            return
        pods = [self._decode.pod]
        if self._prefill is not None and self._computing:
            pods.append(self._prefill.pod)
        self._release_local()
        self._unbook(self.request_id, pods)

    def _release_local(self) -> None:
        self._decode.pod_option.view.decode_bookings.remove(self.request_id)
        if self._computing:
            self._computing_pod.pod_option.view.prefill_bookings.remove(self.request_id)
            self._inflight.remove(self.request_id)
        self._booked = self._computing = False
