"""The pods that this gateway may use: the static list and, while Redis answers, whoever registered in the index.

Invariant: one Pod per address. A pod that only the index named is forgotten once neither the index nor the pod itself
has been heard of for FORGET_S; a static one never.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from contextlib import suppress

from common.errors import IndexUnavailable, Unavailable
from common.prefix_index import IndexReader
from common.types import Role
from gateway.pod import Pod
from gateway.validation import Limits

POLL_PERIOD_S = 0.5
FORGET_S = 10.0

_log = logging.getLogger(__name__)


class PodTable:
    """Membership. index: the reader while Redis is configured; index_up: whether it answered last time."""

    def __init__(self, static: Iterable[str], index: IndexReader | None, *, gateway_id: str, model: str) -> None:
        self.index = index
        self.index_up = False
        self.pods: dict[str, Pod] = {}
        self._static = tuple(static)
        self._gateway_id = gateway_id
        self._model = model
        self._changed: set[Callable[[], None]] = set()
        self._poll_task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Starts watching; pods come as they answer."""
        for address in self._static:
            self._pod(address, static=True)
        if self.index is not None:
            self._poll_task = asyncio.get_running_loop().create_task(self._poll(self.index))

    async def stop(self) -> None:
        """Stops watching and closes every channel."""
        if self._poll_task is not None:
            self._poll_task.cancel()
            with suppress(asyncio.CancelledError):
                await self._poll_task
        pods, self.pods = list(self.pods.values()), {}
        await asyncio.gather(*(pod.stop() for pod in pods))

    def decodes(self) -> list[Pod]:
        """Pods that may be asked to reserve: those of role decode have a peer that can prefill for them."""
        alive = self._newest(pod for pod in self.pods.values() if pod.can_decode)
        fed = {pod.info.fingerprint for pod in self._feeders() if pod.info}
        return [p for p in alive if p.info and (p.info.role is Role.BOTH or p.info.fingerprint in fed)]

    def prefills(self, fingerprint: str) -> list[Pod]:
        """Pods that may be asked to prefill for a decode pod of this layout."""
        return [pod for pod in self._feeders() if pod.info and pod.info.fingerprint == fingerprint]

    def _feeders(self) -> list[Pod]:
        return self._newest(pod for pod in self.pods.values() if pod.can_prefill)

    @property
    def ready(self) -> bool:
        """At least one usable pair, or one pod that does both."""
        return bool(self.decodes())

    def limits(self) -> Limits:
        """The most that some usable pair can take. Raises Unavailable when there is none."""
        best: Limits | None = None
        for decode in self.decodes():
            info = decode.info
            assert info is not None
            sides = [info] if info.role is Role.BOTH else [p.info for p in self.prefills(info.fingerprint) if p.info]
            longest = min(info.capacity, max(side.capacity for side in sides))
            # A default leaves the pod a block of slack; what a client asks for by number may use everything.
            default = min(longest, (info.num_blocks - 1) * info.block_size)
            if best is None or longest > best.max_model_len:
                best = Limits(longest, default, info.vocab_size)
        if best is None:
            raise Unavailable("no prefill and decode pods are ready to serve this model", retry_after_s=1.0)
        return best

    def _newest(self, pods: Iterable[Pod]) -> list[Pod]:
        """One pod per name: of two addresses that claim the same name, the later generation."""
        by_name: dict[str, Pod] = {}
        for pod in pods:
            assert pod.info is not None
            known = by_name.get(pod.info.name)
            if known is None or known.info is None or known.info.generation < pod.info.generation:
                by_name[pod.info.name] = pod
        return list(by_name.values())

    def _pod(self, address: str, *, static: bool) -> Pod:
        pod = self.pods.get(address)
        if pod is None:
            pod = self.pods[address] = Pod(
                address, self._gateway_id, model=self._model, static=static, on_change=self._on_change
            )
            pod.start()
        return pod

    def _on_change(self) -> None:
        for call in list(self._changed):
            call()

    def on_change(self, call: Callable[[], None]) -> None:
        """Calls `call` whenever a pod came, went or changed."""
        self._changed.add(call)

    async def _poll(self, index: IndexReader) -> None:
        while True:
            try:
                await self._refresh(index)
                if not self.index_up:
                    _log.info("prefix index: up")
                self.index_up = True
            except IndexUnavailable as e:
                if self.index_up:
                    _log.warning("prefix index: away (%s)", e)
                self.index_up = False
            except Exception:
                _log.exception("prefix index: cannot be read")
                self.index_up = False
            await asyncio.sleep(POLL_PERIOD_S)

    async def _refresh(self, index: IndexReader) -> None:
        now = time.monotonic()
        named: set[str] = set()
        for status in await index.pods():
            record = status.record
            if record.model != self._model and record.address not in self._static:
                continue
            named.add(record.address)
            pod = self._pod(record.address, static=False)
            if pod.info is not None and pod.info.generation > record.generation:
                continue  # the index still describes the pod's predecessor
            pod.load, pod.load_seen, pod.booked_tokens = status.load, now, status.booked_tokens
            pod.index_draining = status.draining
        for address, pod in list(self.pods.items()):
            if address in named:
                continue
            pod.load, pod.index_draining = None, False
            if not pod.static and not pod.alive and now - pod.seen > FORGET_S:
                _log.info("pod %s at %s: forgotten", pod.name, address)
                del self.pods[address]
                await pod.stop()
