"""Adapters in memory: by name on the host, and in a few slots of the device.

    add(name) -> on the host -> assign: a waiting sequence needs it -> copy on a side stream -> in a slot -> evicted

A slot is evicted only if no running sequence uses it; the slot that was used longest ago goes first. Steps go on during
a copy. A sequence whose adapter has no slot yet is `blocked`, and sequences behind it overtake it. Once a sequence
finds all slots in use, the sequences with adapters behind it wait too, so it gets the next slot that is free.

Sequences and slots hold their adapter, so running answers finish on the adapter with which they began, whatever its
name means by then.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from torch import nn

from common.errors import AdapterNotLoaded, ConfigError, InvalidRequest
from engine.adapters.packed import TABLE_WIDTH, Adapter, pack_adapter, padded_rank
from engine.adapters.peft import AdapterFile, read_adapter
from engine.adapters.rows import NO_ADAPTER, AdapterRows, SlotMemory
from engine.adapters.sites import MAX_PARTS, DecoderSites
from engine.adapters.torch_rows import TorchRows
from engine.device import format_bytes, require_memory, upload
from engine.models.base import Model
from engine.models.decoder import Decoder
from engine.models.layers import Attention, LatentAttention
from engine.models.spec import UNSHARDED, Shard

if TYPE_CHECKING:
    from engine.adapters.triton_rows import RowBuffer

_log = logging.getLogger(__name__)


class AdaptedSequence(Protocol):
    """The part of a sequence that has to do with adapters."""

    adapter: Adapter | None
    adapter_slot: int | None


def sites_of(model: Model, shard: Shard = UNSHARDED) -> DecoderSites:
    """Returns the sites of a model, or of a rank's part. Raises ConfigError if adapters over it are not supported."""
    if not isinstance(model, Decoder):
        raise unsupported("a model that transformers computes")
    layers: list[tuple[Attention, nn.Module]] = []
    for layer in model.layer_list:
        if not isinstance(layer.attention, Attention):
            latent = isinstance(layer.attention, LatentAttention)
            raise unsupported(f"a model with {'latent attention' if latent else 'gated delta layers'}")
        layers.append((layer.attention, layer.mlp))
    return DecoderSites(model.spec, layers, shard)


def unsupported(model: str) -> ConfigError:
    """Returns the error of a model that adapters are not computed for."""
    return ConfigError(f"max_adapters: adapters over {model} are not supported: leave it 0", field="max_adapters")


class HostAdapters:
    """The adapters on the host. Any thread may use it."""

    def __init__(self, sites: DecoderSites, dtype: torch.dtype, max_rank: int, *, pin: bool) -> None:
        self._sites, self._dtype, self._max_rank, self._pin = sites, dtype, max_rank, pin
        #: Inputs and outputs of each module of the whole model, by its name in the checkpoint.
        self.shapes = sites.shapes
        self._lock = threading.Lock()
        self._by_name: dict[str, Adapter] = {}
        self._by_digest: weakref.WeakValueDictionary[str, Adapter] = weakref.WeakValueDictionary()

    def read(self, directory: Path) -> Adapter:
        """Reads an adapter without a name, which is forgotten with its last user.

        Raises ConfigError if it is refused, AdapterNotLoaded if another rank cannot hold its part.
        """
        return self._pack(read_adapter(directory, self.shapes, self._max_rank), directory.name)

    def add(self, directory: Path, name: str) -> Adapter:
        """Reads an adapter and gives it a name, also that of another one. Raises as `read` does."""
        return self.keep(read_adapter(directory, self.shapes, self._max_rank), name)

    def keep(self, file: AdapterFile, name: str) -> Adapter:
        """Brings an adapter that has been read into the form of the device, and gives it a name."""
        adapter = self._pack(file, name)
        with self._lock:
            self._by_name[name] = adapter
        return adapter

    def _pack(self, file: AdapterFile, name: str) -> Adapter:
        """Brings an adapter into the form of the device, unless the host has it. `name` is for the log."""
        began = time.monotonic()
        with self._lock:
            adapter = self._by_digest.get(file.digest)
        if adapter is None:
            adapter = self._make(file)
        with self._lock:
            adapter = self._by_digest.setdefault(file.digest, adapter)
        size, took = format_bytes(adapter.numbers.nbytes), time.monotonic() - began
        _log.info(
            "adapter %s: rank %d, %s, packed in %.2f s, digest %s", name, adapter.rank, size, took, adapter.digest
        )
        return adapter

    def _make(self, file: AdapterFile) -> Adapter:
        return pack_adapter(file, self._sites, self._dtype, pin=self._pin)

    def remove(self, name: str) -> Adapter:
        """Forgets a name; running sequences keep the adapter. Raises InvalidRequest if the name is unknown."""
        with self._lock:
            if name not in self._by_name:
                raise self._unknown(name)
            return self._by_name.pop(name)

    def named(self, name: str) -> Adapter:
        """Returns the adapter with this name. Raises InvalidRequest if the name is unknown."""
        with self._lock:
            if name not in self._by_name:
                raise self._unknown(name)
            return self._by_name[name]

    def with_digest(self, digest: str) -> Adapter:
        """Returns an adapter that has a name, a sequence or a slot. Raises AdapterNotLoaded if there is none."""
        with self._lock:
            adapter = self._by_digest.get(digest)
        if adapter is None:
            raise AdapterNotLoaded(f"the adapter {digest} is not loaded here", field="adapter")
        return adapter

    def all(self) -> dict[str, Adapter]:
        """Returns the adapters by name."""
        with self._lock:
            return dict(self._by_name)

    def _unknown(self, name: str) -> InvalidRequest:
        known = ", ".join(sorted(self._by_name)[:10]) or "none"
        return InvalidRequest(f"unknown adapter {name!r}: loaded are {known}", field="adapter")


class AdapterSlots:
    """The adapters on the device. Only the engine's thread uses it."""

    def __init__(
        self,
        sites: DecoderSites,
        count: int,
        max_rank: int,
        device: torch.device,
        dtype: torch.dtype,
        *,
        fuses: bool = False,  # See SlotMemory
    ) -> None:
        self.sites, self.count, self.device = sites, count, device
        self.adapters: list[Adapter | None] = [None] * count
        self.loads = 0  #: Copies into slots since the start
        self._used_at = [0] * count  # The number of the `assign` that used the slot last
        self._assigns = 0
        self._loading: dict[int, torch.cuda.Event] = {}
        self._stream: torch.cuda.Stream | None = None
        self.memory: SlotMemory | None = None  #: None on a CPU, where a slot is a reference
        if device.type == "cuda":
            rank = padded_rank(max_rank)
            with require_memory(f"{count} adapter slots", "max_adapters", "lower max_adapters or max_adapter_rank"):
                numbers = torch.zeros(count, sites.numbers(rank), dtype=dtype, device=device)
            table = torch.zeros(count, len(sites.all), TABLE_WIDTH, dtype=torch.int64, device=device)
            scales = torch.zeros(count, len(sites.all), MAX_PARTS, device=device)
            self.memory = SlotMemory(sites, rank, numbers, table, scales, fuses)
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def assign(self, running: Sequence[AdaptedSequence], waiting: Sequence[AdaptedSequence]) -> None:
        """Sets `adapter_slot` of the waiting sequences, in their order, before a step is planned; begins copies.

        A running sequence keeps its slot.
        """
        pending = [seq for seq in waiting if seq.adapter is not None]
        if not pending:
            return
        self._assigns += 1
        self._loading = {slot: event for slot, event in self._loading.items() if not event.query()}  # type: ignore[no-untyped-call]
        kept = {slot for seq in running if (slot := seq.adapter_slot) is not None and slot != NO_ADAPTER}
        for slot in kept:
            self._used_at[slot] = self._assigns
        full = False
        for seq in pending:
            seq.adapter_slot = None
            if full:
                continue
            assert seq.adapter is not None
            found = self._slot_for(seq.adapter, kept)
            if found is None:
                full = True
                continue
            kept.add(found)
            self._used_at[found] = self._assigns
            if found not in self._loading:
                seq.adapter_slot = found

    def warm(self) -> list[Adapter]:
        """Returns the adapters in slots, the last used first. Any thread."""
        used = sorted(zip(list(self._used_at), list(self.adapters), strict=True), key=lambda pair: -pair[0])
        return [adapter for _, adapter in used if adapter is not None]

    def drop_unused(self) -> None:
        """Lets other ranks forget adapters without a user. Here are none."""

    def _slot_for(self, adapter: Adapter, kept: set[int]) -> int | None:
        """Returns the slot of an adapter, with the copy begun; None if all slots are in use."""
        if adapter in self.adapters:
            return self.adapters.index(adapter)
        free = [slot for slot in range(self.count) if slot not in kept and slot not in self._loading]
        if not free:
            return None
        slot = min(free, key=lambda slot: (self.adapters[slot] is not None, self._used_at[slot]))
        self.put(adapter, slot)
        self.loads += 1
        return slot

    def put(self, adapter: Adapter, slot: int) -> None:
        """Begins the copy of an adapter into a slot that no running sequence uses."""
        self.adapters[slot] = None  # stays so if the copy fails
        if self.memory is not None and self._stream is not None:
            self._copy(adapter, slot, self.memory, self._stream)
        self.adapters[slot] = adapter

    def wait_for_copies(self, slots: np.ndarray) -> None:
        """Lets the current stream wait for the copies into these slots."""
        for slot in self._loading.keys() & set(slots.tolist()):
            torch.cuda.current_stream(self.device).wait_event(self._loading.pop(slot))

    def _copy(self, adapter: Adapter, slot: int, memory: SlotMemory, stream: torch.cuda.Stream) -> None:
        # Launched steps may still read the slot for sequences that have ended.
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            memory.numbers[slot, : len(adapter.numbers)].copy_(adapter.numbers, non_blocking=True)
            memory.table[slot].copy_(adapter.table, non_blocking=True)
            memory.scales[slot].copy_(adapter.scales, non_blocking=True)
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(stream)
        self._loading[slot] = event

    # -- rows of a step -----------------------------------------------------------------------------------------------

    def rows(self, slots: np.ndarray) -> AdapterRows:
        """Returns the rows of a step that runs layer by layer; `slots` has the slot of each row, int64."""
        if self.memory is None:
            return TorchRows(self.sites, self.adapters, slots)
        from engine.adapters.triton_rows import TritonRows, pack_rows, tile_of, tiles_start

        count, tile = len(slots), tile_of(len(slots))
        (packed,) = upload([pack_rows(slots, count, tile, self.count)], self.device)
        return TritonRows(self.memory, packed[:count], packed[tiles_start(count) :], tile, slots)

    def buffer(self, max_rows: int) -> RowBuffer:
        """Makes a static buffer of rows, for CUDA graphs."""
        from engine.adapters.triton_rows import RowBuffer

        assert self.memory is not None, "CUDA graphs need a GPU"
        return RowBuffer(self.memory, max_rows)
