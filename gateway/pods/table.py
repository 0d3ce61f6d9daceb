"""The pods that this gateway may use: the static list, who registered in the index, and who Kubernetes names.

Invariant: one Pod per address. A pod that nobody names any more is forgotten once it has not been heard of for FORGET_S
either; a static one never. Who is usable is worked out once per change, not per request.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress

from common.errors import IndexUnavailable, Unavailable
from common.types import Role
from gateway.pods.info import ModelLimits
from gateway.pods.pod import Pod
from gateway.pods.view import fill_in_from_peers
from prefix_index.reader import IndexReader

POLL_PERIOD_S = 0.5
FORGET_S = 10.0

_log = logging.getLogger(__name__)


class _UsablePods:
    """Who takes requests, and for what, at one moment."""

    def __init__(self, pods: Iterable[Pod]) -> None:
        serving = [pod for pod in pods if pod.serving]
        self.prefills: dict[str, list[Pod]] = {}
        for pod in _newest(pod for pod in serving if pod.can_prefill):
            assert pod.info is not None
            self.prefills.setdefault(pod.info.fingerprint, []).append(pod)
        able = _newest(pod for pod in serving if pod.can_decode)
        self.decodes = [p for p in able if p.info and (p.info.role is Role.BOTH or p.info.fingerprint in self.prefills)]
        self.layouts: dict[str, list[Pod]] = {}
        for pod in self.decodes:
            assert pod.info is not None
            self.layouts.setdefault(pod.info.fingerprint, []).append(pod)
        for fingerprint, feeders in self.prefills.items():
            if fingerprint in self.layouts:
                self.layouts[fingerprint] += feeders


def _newest(pods: Iterable[Pod]) -> list[Pod]:
    """One pod per name: of two addresses that claim the same name, the later generation."""
    by_name: dict[str, Pod] = {}
    for pod in pods:
        assert pod.info is not None
        known = by_name.get(pod.info.name)
        if known is None or known.info is None or known.info.generation < pod.info.generation:
            by_name[pod.info.name] = pod
    return list(by_name.values())


class PodTable:
    """Membership. index: the reader while Redis is configured; index_up: whether it answered last time.

    alone: the gateway serves no other model, so a pod that does not say what it serves may be used.
    """

    def __init__(
        self, static: Iterable[str], index: IndexReader | None, *, gateway_id: str, model: str, only_model: bool = True
    ) -> None:
        self.index = index
        self.index_up = False
        self.pods: dict[str, Pod] = {}
        self._static = tuple(static)
        self._endpoints: Mapping[str, bool] = {}
        self._gateway_id = gateway_id
        self._model = model
        self._alone = only_model
        self._on_change: set[Callable[[], None]] = set()
        self._on_forget: set[Callable[[str], None]] = set()
        self._usable_cache: _UsablePods | None = None
        self._poll_task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Starts watching; pods come as they answer."""
        for address in self._static:
            self._pod(address, static=True)
        self._poll_task = asyncio.get_running_loop().create_task(self._poll())

    async def stop(self) -> None:
        """Stops watching and closes every channel."""
        if self._poll_task is not None:
            self._poll_task.cancel()
            with suppress(asyncio.CancelledError):
                await self._poll_task
        pods, self.pods = list(self.pods.values()), {}
        await asyncio.gather(*(pod.stop() for pod in pods))

    def decode_pods(self) -> list[Pod]:
        """Pods that may be asked to reserve: those of role decode have a peer that can prefill for them."""
        return self._usable().decodes

    def prefill_pods(self, fingerprint: str) -> list[Pod]:
        """Pods that may be asked to prefill for a decode pod of this layout."""
        return self._usable().prefills.get(fingerprint, [])

    def pods_by_layout(self) -> dict[str, list[Pod]]:
        """Usable pods by fingerprint, whatever their role."""
        return self._usable().layouts

    def _usable(self) -> _UsablePods:
        if self._usable_cache is None:
            self._usable_cache = _UsablePods(self.pods.values())
            for pods in self._usable_cache.layouts.values():
                fill_in_from_peers([pod.view for pod in pods if pod.view])
        return self._usable_cache

    @property
    def ready(self) -> bool:
        """At least one usable pair, or one pod that does both."""
        return bool(self.decode_pods())

    def limits(self) -> ModelLimits:
        """The most that some usable pair can take. Raises Unavailable when there is none."""
        best: ModelLimits | None = None
        for decode in self.decode_pods():
            info = decode.info
            assert info is not None
            sides = (
                [info] if info.role is Role.BOTH else [p.info for p in self.prefill_pods(info.fingerprint) if p.info]
            )
            longest = min(info.max_request_tokens, max(side.max_request_tokens for side in sides))
            # A default leaves the pod a block of slack; what a client asks for by number may use everything.
            default = min(longest, (info.num_blocks - 1) * info.block_size)
            if best is None or longest > best.max_model_len:
                best = ModelLimits(longest, default, info.vocab_size)
        if best is None:
            raise Unavailable("no prefill and decode pods are ready to serve this model", retry_after_s=1.0)
        return best

    def _pod(self, address: str, *, static: bool) -> Pod:
        pod = self.pods.get(address)
        if pod is None:
            pod = self.pods[address] = Pod(
                address,
                self._gateway_id,
                model=self._model,
                only_model=self._alone,
                static=static,
                on_change=self.notify_changed,
            )
            pod.start()
        return pod

    def notify_changed(self) -> None:
        """A pod came, went or changed, or the index did."""
        self._usable_cache = None
        for call in list(self._on_change):
            call()

    def on_change(self, call: Callable[[], None]) -> None:
        """Calls `call` whenever a pod or the index came, went or changed."""
        self._on_change.add(call)

    def on_forget(self, call: Callable[[str], None]) -> None:
        """Calls `call` with the name of a pod that is gone for good."""
        self._on_forget.add(call)

    def set_endpoints(self, endpoints: Mapping[str, bool]) -> None:
        """What Kubernetes names from now on: addresses, and whether their pods are leaving.

        A pod that it named until now leaves, unless it is static.
        """
        gone = self._endpoints.keys() - endpoints.keys() - set(self._static)
        self._endpoints = endpoints
        for address, leaving in [*endpoints.items(), *((address, True) for address in gone)]:
            if address in endpoints or address in self.pods:
                self._pod(address, static=address in self._static).terminating = leaving
        self.notify_changed()

    async def _poll(self) -> None:
        while True:
            if self.index is not None:
                await self._ask(self.index)
            else:
                await self._forget(set())
            self._usable_cache = None  # who leaves may have changed, and what the rest take a pod's rates for
            await asyncio.sleep(POLL_PERIOD_S)

    async def _ask(self, index: IndexReader) -> None:
        try:
            await self._refresh(index)
            self._index_is(True)
        except IndexUnavailable as e:
            self._index_is(False, str(e))
        except Exception as e:
            _log.exception("prefix index: cannot be read")
            self._index_is(False, repr(e))

    def _index_is(self, up: bool, why: str = "") -> None:
        if up != self.index_up:
            _log.log(logging.INFO if up else logging.WARNING, "prefix index: %s", "up" if up else f"away ({why})")
            self.index_up = up
            self.notify_changed()

    async def _refresh(self, index: IndexReader) -> None:
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
        """Those that are not answering, of all that are not in the index (`named`) or in Kubernetes."""
        now = time.monotonic()
        for address, pod in list(self.pods.items()):
            known = address in named or address in self._endpoints
            if not (known or pod.static or pod.alive) and now - pod.last_answer_at > FORGET_S:
                _log.info("pod %s at %s: forgotten", pod.name, address)
                del self.pods[address]
                for call in self._on_forget:
                    call(pod.name)
                await pod.stop()
