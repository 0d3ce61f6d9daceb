"""LoRA adapters as a gateway sees them: what each pod has, and what an adapter's name means for a model.

    pod --Info: the list has changed--> ListAdapters --> AdapterLoader.entries --> KnownAdapters, the newest of all pods
    request with a digest that the pod lacks --> AdapterLoader.load --> LoadAdapter

Names are only for clients. Requests to pods have the adapter's digest.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable

import grpc

from common.errors import AdapterNotLoaded, BatonError, DeadlineExceeded, Overloaded, Unavailable
from common.pb import control_pb2, control_pb2_grpc, transfer_pb2
from common.rpc import translate_rpc_errors
from common.types import AdapterEntry
from common.wire import adapter_from_pb, adapter_to_pb
from gateway.pods.view import PodView

LOAD_TIMEOUT_S = 30.0  #: Longest time for a pod to read an adapter.
LIST_TIMEOUT_S = 2.0
#: For so long the refusal of an adapter by a pod, or a load that took too long, is repeated without asking the pod.
REFUSAL_S = 5.0
#: Adapters of names that have other adapters now. Requests that began with them may continue on another pod.
MAX_FORMER = 256
#: Names without an adapter that are remembered, so that a list that is older than the removal does not bring one back.
MAX_REMOVED = 1024


class KnownAdapters:
    """The adapters of one model by name: of each name the newest meaning that a pod or this gateway knows."""

    def __init__(self) -> None:
        self._entries: dict[str, AdapterEntry] = {}  #: Removed names too.
        self._former: OrderedDict[str, AdapterEntry] = OrderedDict()  #: Replaced and removed meanings, by digest.

    def update(self, entries: Iterable[AdapterEntry]) -> None:
        """Takes over the meanings that are newer than the known ones."""
        for entry in entries:
            known = self._entries.get(entry.name)
            if known is None or (entry.version, entry.digest) > (known.version, known.digest):
                self._entries[entry.name] = entry
                self._keep(known)
            elif entry != known and entry.digest not in self._former:
                self._keep(entry)
        removed = [entry for entry in self._entries.values() if not entry.digest]
        for entry in sorted(removed, key=lambda entry: entry.version)[: max(0, len(removed) - MAX_REMOVED)]:
            del self._entries[entry.name]

    def _keep(self, former: AdapterEntry | None) -> None:
        """Keeps a meaning that does not count any more, in place of the oldest ones."""
        if former is not None and former.digest:
            self._former[former.digest] = former
            self._former.move_to_end(former.digest)
            while len(self._former) > MAX_FORMER:
                self._former.popitem(last=False)

    def find(self, name: str) -> AdapterEntry | None:
        """Returns the adapter with this name."""
        entry = self._entries.get(name)
        return entry if entry is not None and entry.digest else None

    def with_digest(self, digest: str) -> AdapterEntry | None:
        """Returns the newest meaning with this digest. A former meaning is returned only if no name has the digest."""
        current = (entry for entry in self._entries.values() if digest and entry.digest == digest)
        return max(current, key=lambda entry: entry.version, default=self._former.get(digest))

    def all(self) -> list[AdapterEntry]:
        """Returns the adapters, sorted by name."""
        return sorted((entry for entry in self._entries.values() if entry.digest), key=lambda entry: entry.name)

    def next_version(self, name: str) -> int:
        """Returns the version of a change that is made now."""
        known = self._entries.get(name)
        return max(int(time.time() * 1000), 0 if known is None else known.version + 1)


class AdapterLoader:
    """The adapters of one pod: those that it has, and the calls that change them."""

    def __init__(
        self,
        control: control_pb2_grpc.ControlAsyncStub,
        name: Callable[[], str],
        on_entries: Callable[[list[AdapterEntry]], None],
    ) -> None:
        """`name` returns the pod's name. `on_entries` gets the pod's list when it has changed."""
        self.serves = False  #: The pod serves adapters.
        self.held: set[str] = set()  #: Digests of adapters in the pod's host memory, as far as is known.
        self._control, self._name, self._on_entries = control, name, on_entries
        self._process = 0  #: Generation of the pod.
        self._listed = 0  #: Number of the pod's list that was read last.
        self._refusals: dict[str, tuple[BatonError, float]] = {}  #: By digest, with their times.
        self._loading: dict[str, asyncio.Task[AdapterEntry]] = {}  #: By digest.

    async def refresh(self, info: transfer_pb2.InfoResponse, view: PodView) -> None:
        """Takes over the adapters of an answer to Info, and reads the list if it has changed. Never fails."""
        self.serves = info.HasField("adapters")
        if self._process != info.generation:
            self._process, self._listed, self.held, self._refusals = info.generation, 0, set(), {}
        if not self.serves:
            return
        warm = {digest.hex() for digest in info.adapters.warm}
        view.held_adapters, view.adapter_load_s = self.held, info.adapters.load_s
        if info.adapters.copies >= view.adapter_copies:  # else the index was read later
            view.warm_adapters, view.adapter_copies = warm, info.adapters.copies
        self.held |= warm
        if self._listed == info.adapters.version:
            return
        try:
            answer = await self._control.ListAdapters(control_pb2.ListAdaptersRequest(), timeout=LIST_TIMEOUT_S)
        except grpc.aio.AioRpcError:
            return  # the next answer to Info comes soon
        entries = [adapter_from_pb(entry) for entry in answer.adapters]
        self._listed = answer.version
        evicted = {digest.hex() for digest in answer.evicted}
        self.held = view.held_adapters = warm | ({entry.digest for entry in entries if entry.digest} - evicted)
        self._on_entries(entries)

    def refuses(self, digest: str) -> bool:
        """Returns whether the pod has refused this adapter lately."""
        return self._refusal(digest) is not None

    def _refusal(self, digest: str) -> BatonError | None:
        error, at = self._refusals.get(digest, (None, 0.0))
        return error if time.monotonic() - at < REFUSAL_S else None

    async def load(self, entry: AdapterEntry, timeout_s: float) -> None:
        """Returns once the pod has the adapter. Requests that need it at the same time share one call.

        Raises AdapterNotLoaded if the pod cannot load it, Unavailable if the pod does not answer.
        """
        if entry.digest in self.held:
            return
        if (refusal := self._refusal(entry.digest)) is not None:
            raise refusal
        task = self._loading.get(entry.digest)
        if task is None:
            task = self._loading[entry.digest] = asyncio.get_running_loop().create_task(self.call_load(entry))
            task.add_done_callback(lambda _: self._loading.pop(entry.digest))
        try:
            async with asyncio.timeout(timeout_s):
                await asyncio.shield(task)
        except TimeoutError as e:
            raise Unavailable(f"pod {self._name()} did not load the adapter {entry.name!r} in time") from e
        except Unavailable as e:
            raise Unavailable(f"pod {self._name()} did not load the adapter {entry.name!r}: {e.message}") from e
        except (DeadlineExceeded, Overloaded) as e:  # other pods may have time
            within = f" within {LOAD_TIMEOUT_S:g} s" if isinstance(e, DeadlineExceeded) else ""
            text = f"pod {self._name()} did not load the adapter {entry.name!r}{within}: {e.message}"
            raise self._refuse(entry.digest, Unavailable(text)) from e
        except BatonError as e:
            text = f"pod {self._name()} cannot load the adapter {entry.name!r}: {e.message}"
            raise self._refuse(entry.digest, AdapterNotLoaded(text, field="model")) from e

    def _refuse(self, digest: str, error: BatonError) -> BatonError:
        """Remembers why the pod did not load an adapter. Returns `error`."""
        self._refusals = {known: refusal for known, refusal in self._refusals.items() if self.refuses(known)}
        self._refusals[digest] = error, time.monotonic()
        return error

    async def call_load(self, entry: AdapterEntry) -> AdapterEntry:
        """Calls LoadAdapter. Raises BatonError."""
        if not self.serves:
            raise AdapterNotLoaded("it serves no adapters: set --adapter-dir")
        message = control_pb2.LoadAdapterRequest(adapter=adapter_to_pb(entry))
        with translate_rpc_errors():
            answer = await self._control.LoadAdapter(message, timeout=LOAD_TIMEOUT_S)
        loaded = adapter_from_pb(answer.adapter)
        self.held.add(loaded.digest)
        self._refusals.pop(loaded.digest, None)
        return loaded

    async def call_unload(self, name: str, version: int) -> None:
        """Calls UnloadAdapter. Raises BatonError."""
        message = control_pb2.UnloadAdapterRequest(name=name, version=version)
        with translate_rpc_errors():
            await self._control.UnloadAdapter(message, timeout=LIST_TIMEOUT_S)

    def forget(self, digest: str) -> None:
        """The pod does not have this adapter any more."""
        self.held.discard(digest)
