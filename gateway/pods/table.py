"""The pods of one model, from three sources: the configuration, the prefix index and Kubernetes.

Invariant: one Pod per address. A pod that no source names any more is forgotten after it has not answered for FORGET_S;
a configured pod is never forgotten. The usable pods are computed once per change, not per request.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import grpc

from common.auth import Signer
from common.errors import IndexUnavailable, Unavailable, describe
from common.pb import control_pb2
from common.tls import TlsFiles
from common.types import Role
from gateway.pods.adapters import KnownAdapters
from gateway.pods.fitness import compare_speeds
from gateway.pods.info import ModelLimits, PodInfo
from gateway.pods.pod import Pod
from gateway.pods.view import PodView, fill_in_from_peers
from prefix_index.reader import IndexReader

POLL_PERIOD_S = 0.5  #: Period in which the index is read.
FORGET_S = 10.0
REPORT_PERIOD_S = 30.0  #: While no request can be served, the log repeats the cause in this period.
REPORT_PAUSE_S = 5.0  #: A new cause is logged this long after the last one.
MAX_NAMED_PODS = 8  #: Pods that one log line names.
RESET_TIMEOUT_S = 5.0

_log = logging.getLogger(__name__)


class _UsablePods:
    """The pods that take requests at one moment."""

    def __init__(self, pods: Iterable[Pod]) -> None:
        serving = [pod for pod in pods if pod.serving]
        self.prefills = _by_layout(_newest(pod for pod in serving if pod.can_prefill))  #: By layout fingerprint.
        can_decode = _newest(pod for pod in serving if pod.can_decode)
        #: "PREFILL -> DECODE: cause" of the pairs that cannot exchange KV now.
        self.troubled_pairs = list[str]()
        #: Pods of role both, and decode pods to which a prefill pod of their layout can send KV.
        self.decodes = [pod for pod in can_decode if self._has_source(pod)]
        self.layouts = _by_layout(self.decodes)  #: Both kinds by fingerprint, without prefills alone.
        for fingerprint, prefills in self.prefills.items():
            if fingerprint in self.layouts:
                self.layouts[fingerprint] += prefills
        pairs = [self._pair_limits(pod.info) for pod in self.decodes if pod.info]
        #: The limits of the pair that takes the longest requests; None without a pair.
        self.limits = max(pairs, key=lambda pair: pair.max_model_len, default=None)

    def _has_source(self, decode: Pod) -> bool:
        """Returns whether the pod has the role both, or a prefill pod can send it KV. Records pairs in trouble."""
        assert decode.info is not None
        if decode.info.role is Role.BOTH:
            return True
        prefills = self.prefills.get(decode.info.fingerprint, [])
        troubled = [(prefill.name, why) for prefill in prefills if (why := prefill.trouble_to(decode))]
        self.troubled_pairs += [f"{prefill} -> {decode.name}: {why}" for prefill, why in troubled]
        return len(troubled) < len(prefills)

    def _pair_limits(self, info: PodInfo) -> ModelLimits:
        """Returns the limits of a decode pod with the prefill pod that takes the longest requests."""
        prefills = [info] if info.role is Role.BOTH else [p.info for p in self.prefills[info.fingerprint] if p.info]
        longest = min(info.max_request_tokens, max(prefill.max_request_tokens for prefill in prefills))
        # The default leaves one block of slack. A client that sends max_tokens may use all blocks.
        return ModelLimits(longest, min(longest, (info.num_blocks - 1) * info.block_size), info.vocab_size)


def _by_layout(pods: Iterable[Pod]) -> dict[str, list[Pod]]:
    found: dict[str, list[Pod]] = {}
    for pod in pods:
        assert pod.info is not None
        found.setdefault(pod.info.fingerprint, []).append(pod)
    return found


def _newest(pods: Iterable[Pod]) -> list[Pod]:
    """Returns one pod per name: if two addresses report the same name, the pod with the later generation."""
    by_name: dict[str, Pod] = {}
    for pod in pods:
        assert pod.info is not None
        known = by_name.get(pod.info.name)
        if known is None or known.info is None or known.info.generation < pod.info.generation:
            by_name[pod.info.name] = pod
    return list(by_name.values())


#: Words for clients in place of states of Pod.state that only operators understand.
_STATE_WORDS = {"gone": "without an answer", "connecting": "without a token stream", "refused": "refused"}


class _Report:
    """Decides when a persistent cause is logged again."""

    def __init__(self) -> None:
        self._logged = ""  #: The cause that was logged last; "" if none is.
        self._logged_at = -math.inf

    def due(self, why: str) -> bool:
        """Returns whether to log the cause `why` now; "" means no cause."""
        since = time.monotonic() - self._logged_at
        if not why or since < (REPORT_PERIOD_S if why == self._logged else REPORT_PAUSE_S):
            return False
        self._logged, self._logged_at = why, time.monotonic()
        return True

    def ended(self) -> bool:
        """Returns once, after a logged cause has ended, True; otherwise False."""
        logged, self._logged = self._logged, ""
        return bool(logged)


class PodTable:
    """Finds the pods of a model, and says which of them can be used for which task."""

    def __init__(
        self,
        static: Iterable[str],
        index: IndexReader | None,
        *,
        signer: Signer,
        model: str,
        only_model: bool = True,
        tls: TlsFiles | None = None,
        stuck_s: float = 0.0,
    ) -> None:
        """`stuck_s`: least bound of a request without a message, after which it is stalled; 0 for never."""
        self.index = index  #: None if Redis is not configured.
        self.index_up = False  #: The index answered the last poll.
        self._index_error = ""  #: Error of the last poll; "" if it was answered, and before the first.
        self._report = _Report()
        self._index_report = _Report()
        self.pods: dict[str, Pod] = {}  #: All known pods by address, usable or not.
        self._static = tuple(static)  #: Addresses from the configuration.
        self._endpoints: Mapping[str, bool] = {}  #: Addresses in Kubernetes, and whether terminating.
        self.adapters = KnownAdapters()  #: The model's LoRA adapters by name.
        self._model = model
        self._new_pod = partial(
            Pod,
            signer=signer,
            model=model,
            only_model=only_model,
            on_change=self.notify_changed,
            tls=tls,
            stuck_s=stuck_s,
            on_adapters=self.adapters.update,
        )
        self._on_change: set[Callable[[], None]] = set()
        self._on_forget: set[Callable[[str], None]] = set()
        self._usable_cache: _UsablePods | None = None  #: None after a change.
        self._poll_task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Starts to look for pods, in the background."""
        for address in self._static:
            self._pod(address, static=True)
        self._poll_task = asyncio.get_running_loop().create_task(self._poll())

    async def stop(self) -> None:
        """Stops the search and closes every pod's channel."""
        if self._poll_task is not None:
            self._poll_task.cancel()
            with suppress(asyncio.CancelledError):
                await self._poll_task
        pods, self.pods = list(self.pods.values()), {}
        await asyncio.gather(*(pod.stop() for pod in pods))

    def decode_pods(self) -> list[Pod]:
        """Returns the pods that may get a Reserve: those of role both, and decode pods with a usable prefill pod."""
        return self._usable().decodes

    def prefill_pods(self, fingerprint: str) -> list[Pod]:
        """Returns the pods that may prefill for a decode pod of this layout."""
        return self._usable().prefills.get(fingerprint, [])

    def pods_by_layout(self) -> dict[str, list[Pod]]:
        """Returns the usable pods of all roles by layout fingerprint."""
        return self._usable().layouts

    def _usable(self) -> _UsablePods:
        if self._usable_cache is None:
            self._usable_cache = _UsablePods(self.pods.values())
            for pods in self._usable_cache.layouts.values():
                fill_in_from_peers([pod.view for pod in pods if pod.view])
        return self._usable_cache

    @property
    def ready(self) -> bool:
        """There is a usable pair of pods, or a usable pod of role both."""
        return bool(self.decode_pods())

    def why_unready(self) -> str:
        """Returns why no request can be served, for clients: without addresses. "" if requests can be served."""
        if self.ready:
            return ""
        away = "the prefix index (Redis) does not answer" if self._index_error else ""
        if not self.pods:
            empty = "no pod is registered in the prefix index" if self.index_up else "no pod is known"
            return away or empty
        states: dict[str, Counter[str]] = {"prefill": Counter(), "decode": Counter(), "other pods": Counter()}
        for pod in self.pods.values():
            role = "other pods" if pod.info is None or pod.info.role is Role.BOTH else pod.info.role.value
            states[role][_STATE_WORDS.get(pod.state, pod.state)] += 1
        if states["prefill"]["ready"] and states["decode"]["ready"]:
            if self._usable().troubled_pairs:
                return "KV cannot be sent from the prefill pods to the decode pods"
            kinds = sorted({pod.info.weights or "not quantised" for pod in self.pods.values() if pod.info})
            weights = f": their weights are {' and '.join(kinds)}" if len(kinds) > 1 else ""
            return f"the prefill and decode pods that are ready have different KV layouts{weights}"
        pods = [
            f"{role}: {', '.join(f'{number} {state}' for state, number in found.items()) or 'none'}"
            for role, found in states.items()
            if found or role != "other pods"
        ]
        troubles = sorted({pod.trouble for pod in self.pods.values() if pod.trouble})
        return "; ".join(filter(None, (away, *pods, *troubles[:MAX_NAMED_PODS])))

    @property
    def weights(self) -> str:
        """How the weights of the usable pods are quantised, in words; "" if they are not, or differ."""
        kinds = {pod.info.weights for pod in self.decode_pods() if pod.info}
        return kinds.pop() if len(kinds) == 1 else ""

    def limits(self) -> ModelLimits:
        """Returns the limits of the usable pair that takes the longest requests. Raises Unavailable without a pair."""
        limits = self._usable().limits
        if limits is None:
            text = f"no prefill and decode pods are ready to serve this model ({self.why_unready()})"
            raise Unavailable(text, retry_after_s=1.0)
        return limits

    def _pod(self, address: str, *, static: bool) -> Pod:
        pod = self.pods.get(address)
        if pod is None:
            pod = self.pods[address] = self._new_pod(address, static=static)
            pod.start()
        return pod

    def notify_changed(self) -> None:
        """Recomputes the usable pods, and calls the `on_change` callbacks."""
        self._usable_cache = None
        for call in list(self._on_change):
            call()

    def on_change(self, call: Callable[[], None]) -> None:
        """Registers a callback for every change of a pod or of the index's availability."""
        self._on_change.add(call)

    def on_forget(self, call: Callable[[str], None]) -> None:
        """Registers a callback that gets the name of each forgotten pod."""
        self._on_forget.add(call)

    def set_endpoints(self, endpoints: Mapping[str, bool]) -> None:
        """Sets the addresses that Kubernetes names, and whether their pods are terminating.

        A pod that Kubernetes does not name any more counts as terminating, unless it is configured.
        """
        gone = self._endpoints.keys() - endpoints.keys() - set(self._static)
        self._endpoints = endpoints
        for address, terminating in [*endpoints.items(), *((address, True) for address in gone)]:
            if address in endpoints or address in self.pods:
                self._pod(address, static=address in self._static).terminating = terminating
        self.notify_changed()

    async def _poll(self) -> None:
        while True:
            try:
                await (self._forget(set()) if self.index is None else self._refresh(self.index))
                self._set_index_up(self.index is not None)
            except IndexUnavailable as e:
                self._set_index_up(False, str(e))
            except Exception as e:
                _log.exception("prefix index: cannot be read")
                self._set_index_up(False, describe(e))
            self._usable_cache = None  # draining pods and the mean rates of peers may have changed
            self._find_slow_pods()
            await asyncio.sleep(POLL_PERIOD_S)
            try:
                self._log_state()
            except Exception:
                _log.exception("the state of the pods cannot be logged")

    def _find_slow_pods(self) -> None:
        """Compares the measured rates of the pods of each layout."""
        for pods in self._usable().layouts.values():
            for view in compare_speeds([pod.view for pod in pods if pod.view], time.monotonic()):
                what = "slower than" if view.slowness.slow else "of the time of"
                _log.warning("pod %s is now %.1f times %s its peers", view.name, view.slowness.ratio, what)

    def count_breakers(self) -> list[tuple[tuple[str, ...], float]]:
        """Returns ((model, role, state), pods that answer and whose breaker has this state)."""
        now = time.monotonic()
        return self._count(lambda view: (view.role.value, view.breaker.state(now).value))

    def count_slow_pods(self) -> list[tuple[tuple[str, ...], float]]:
        """Returns ((model, role), pods that answer and are slow)."""
        return self._count(lambda view: (view.role.value,) if view.slowness.slow else None)

    def _count(self, labels_of: Callable[[PodView], tuple[str, ...] | None]) -> list[tuple[tuple[str, ...], float]]:
        found = (labels_of(pod.view) for pod in self.pods.values() if pod.view is not None and pod.alive)
        counts = Counter(labels for labels in found if labels is not None)
        return [((self._model, *labels), float(number)) for labels, number in counts.items()]

    def _set_index_up(self, up: bool, why: str = "") -> None:
        self._index_error = why
        # The cause follows the colon. The words before it change: a call failed, or the circuit breaker made none.
        if self._index_report.due(why.partition(": ")[2] or why):
            _log.warning("prefix index: away (%s)", why)
        if up != self.index_up:
            if up:
                self._index_report.ended()
                _log.info("prefix index: up")
            self.index_up = up
            self.notify_changed()

    def _log_state(self) -> None:
        """Logs why no request can be served: at once, when the cause changes, and from time to time."""
        why = self.why_unready()
        if self._report.due(why):
            named = [f"{pod.name} at {pod.address} is {pod.state}" for pod in self.pods.values()]
            named = [*self._usable().troubled_pairs, *named]
            more = [f"and {len(named) - MAX_NAMED_PODS} others"] if len(named) > MAX_NAMED_PODS else []
            text = "model %s cannot be served: no prefill and decode pods are ready (%s)"
            _log.warning(text, self._model, "; ".join([why, *named[:MAX_NAMED_PODS], *more]))
        elif not why and self._report.ended():
            _log.info("model %s can be served", self._model)

    async def _refresh(self, index: IndexReader) -> None:
        """Adds the pods that are registered in the index, and takes over their load."""
        named: set[str] = set()
        for status in await index.pods():
            record = status.record
            if record.model != self._model and record.address not in self._static:
                continue
            named.add(record.address)
            pod = self._pod(record.address, static=False)
            if pod.info is not None and pod.info.generation > record.generation:
                continue  # the index still describes the pod's predecessor
            pod.on_index_load(status.load)
            pod.index_draining = status.draining
        for address in self.pods.keys() - named:
            self.pods[address].index_draining = False
        await self._forget(named)

    async def _forget(self, named: set[str]) -> None:
        """Forgets pods that do not answer and are not in the index (`named`), in Kubernetes or in the configuration."""
        now = time.monotonic()
        for address, pod in list(self.pods.items()):
            known = address in named or address in self._endpoints
            if not (known or pod.static or pod.alive) and now - pod.last_answer_at > FORGET_S:
                _log.info("pod %s at %s: forgotten", pod.name, address)
                del self.pods[address]
                for call in self._on_forget:
                    call(pod.name)
                await pod.stop()


@dataclass(frozen=True, slots=True)
class CacheResetResult:
    """The reset of one pod."""

    pod: str
    cleared: int  #: Blocks that the pod removed from its cache.
    kept: int  #: Blocks that it keeps because they are in use.
    indexed: bool  #: The prefix index has the change.


async def reset_prefix_caches(pods: Iterable[Pod]) -> list[CacheResetResult]:
    """Empties the prefix caches of all pods that have answered Info once.

    Not atomic: raises Unavailable with the names of pods that do not confirm, while other pods may have done it.
    """
    known = [pod for pod in pods if pod.info is not None]
    if not known:
        raise Unavailable("no prefix cache was reset: no pod has answered yet", retry_after_s=1.0)
    answers = await asyncio.gather(*map(_reset, known))
    missing = [pod.name for pod, answer in zip(known, answers, strict=True) if answer is None]
    if missing:
        raise Unavailable(f"these pods did not confirm the reset: {', '.join(sorted(missing))}", retry_after_s=1.0)
    return sorted((answer for answer in answers if answer is not None), key=lambda reset: reset.pod)


async def _reset(pod: Pod) -> CacheResetResult | None:
    try:
        answer = await pod.control.ResetPrefixCache(control_pb2.ResetPrefixCacheRequest(), timeout=RESET_TIMEOUT_S)
    except grpc.aio.AioRpcError:
        pod.recheck()
        return None
    return CacheResetResult(pod.name, answer.cleared, answer.kept, answer.indexed)
