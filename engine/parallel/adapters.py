"""LoRA adapters of a tensor-parallel engine: every rank has its own part of each adapter.

    rank 0: MirroredAdapters -- "hold", parts --> rank r: RankAdapters, host memory     channel "adapters"
            MirroredSlots -- "put", "drop" --> rank r: slots on the device           channel "engine", between steps

Rank 0 alone reads files: it cuts an adapter for every rank and sends the parts, so ranks cannot have different ones. An
adapter exists when all ranks hold it; if one refuses, all of them drop it. Ranks know an adapter by the number of its
load, since its digest may come again. A drop follows the last use in the order of the steps.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from common.errors import AdapterNotLoaded, InternalError, Unavailable, describe
from common.process.rank_channel import RankChannel, RankMessage
from engine.adapters.packed import TABLE_WIDTH, Adapter, pack_adapter
from engine.adapters.peft import AdapterFile
from engine.adapters.rows import AdapterRows, StepAdapters
from engine.adapters.sites import MAX_PARTS, DecoderSites
from engine.adapters.slots import AdaptedSequence, AdapterSlots, HostAdapters, sites_of
from engine.device import make_current
from engine.kv.kv_pool import TORCH_DTYPES
from engine.models.decoder import Decoder
from engine.models.spec import Shard
from engine.parallel.graphs import DeviceNumbers, DeviceStep
from engine.parallel.rank_group import ADAPTER_CHANNEL, POLL_S, RankGroup

_log = logging.getLogger(__name__)
HOLD_S = 30.0  # Longest wait until all ranks hold an adapter.


class MirroredAdapters(HostAdapters):
    """The adapters on the host of rank 0. The other ranks hold their parts of the same adapters."""

    def __init__(
        self, sites: DecoderSites, dtype: torch.dtype, max_rank: int, rank_group: RankGroup, *, pin: bool
    ) -> None:
        super().__init__(sites, dtype, max_rank, pin=pin)
        self._rank_group = rank_group
        self._channels_lock = threading.Lock()  # One load at a time uses the channels.
        self._loads = itertools.count(1)
        self._late: dict[int, int] = {}  #: Ranks that have not answered in time, and the newest load of each.
        #: Loads whose adapters have lost their last user here. Finalisers add them on any thread.
        self.unused: deque[int] = deque()

    def _make(self, file: AdapterFile) -> Adapter:
        """Packs this rank's part and sends the other ranks theirs.

        Raises AdapterNotLoaded if a rank cannot hold its part, InternalError if a rank is lost. No rank has one then.
        """
        with self._channels_lock:
            self._require_answers()
            load = next(self._loads)
            adapter = pack_adapter(file, self._sites, self._dtype, pin=self._pin, shard=self._sites.shard, load=load)
            try:
                refusals = self._hold(file, load)
                if refusals:
                    raise AdapterNotLoaded(
                        f"not all ranks can hold the adapter: {'; '.join(refusals)}", field="adapter"
                    )
            except BaseException:
                for rank in range(1, self._rank_group.size):
                    self._send(rank, "drop", loads=[load])
                raise
        weakref.finalize(adapter, self.unused.append, load).atexit = False
        return adapter

    def _hold(self, file: AdapterFile, load: int) -> list[str]:
        """Lets each rank hold its part. Returns why ranks do not."""
        for rank in range(1, self._rank_group.size):
            part = pack_adapter(
                file, self._sites, self._dtype, pin=False, shard=replace(self._sites.shard, rank=rank), load=load
            )
            tensors = part.numbers, part.table, part.scales
            payload = b"".join(tensor.view(-1).view(torch.uint8).numpy().tobytes() for tensor in tensors)
            self._send(
                rank, "hold", payload, load=load, digest=part.digest, largest_rank=part.rank, numbers=len(part.numbers)
            )
        until = time.monotonic() + HOLD_S
        answers = [self._answer(rank, load, until) for rank in range(1, self._rank_group.size)]
        return [f"rank {rank}: {error}" for rank, error in enumerate(answers, 1) if error]

    def _require_answers(self) -> None:
        """Raises AdapterNotLoaded while a rank is busy with an earlier load: it would not read a new part in time."""
        for rank, load in list(self._late.items()):
            self._answer(rank, load, time.monotonic())
        if self._late:
            ranks = ", ".join(map(str, self._late))
            raise AdapterNotLoaded(f"ranks {ranks} are busy with an earlier adapter: try again later", field="adapter")

    def _answer(self, rank: int, load: int, until: float) -> str | None:
        """Waits for a rank's answer. Returns why it does not hold its part, None if it does."""
        channel = self._rank_group.channels(ADAPTER_CHANNEL)[rank - 1]
        try:
            while True:
                self._rank_group.check_alive()
                if channel.wait_readable(POLL_S):
                    answer = channel.receive()
                    if answer.fields["load"] == load:  # an earlier load may have ended without its answer
                        self._late.pop(rank, None)
                        refusal: str | None = answer.fields["error"]
                        return refusal
                elif time.monotonic() > until:
                    self._late[rank] = load
                    return f"no answer within {HOLD_S:g} s"
        except Unavailable as error:
            raise self._lost(channel, error) from error

    def _send(self, rank: int, kind: str, payload: bytes = b"", **fields: Any) -> None:
        channel = self._rank_group.channels(ADAPTER_CHANNEL)[rank - 1]
        try:
            channel.send(kind, payload, **fields)
        except Unavailable as error:
            raise self._lost(channel, error) from error

    @staticmethod
    def _lost(channel: RankChannel, error: Unavailable) -> InternalError:
        """Closes a channel that may have stopped inside a message. The group notices it and has failed."""
        channel.close()
        return InternalError(error.message)


class MirroredSlots(AdapterSlots):
    """The slots of rank 0. The other ranks put their parts of the same adapters into the same slots."""

    def __init__(self, names: MirroredAdapters, rank_group: RankGroup, *place: Any) -> None:
        super().__init__(*place)
        self._unused, self._rank_group = names.unused, rank_group

    def assign(self, running: Sequence[AdaptedSequence], waiting: Sequence[AdaptedSequence]) -> None:
        """Does what `AdapterSlots.assign` does, after the other ranks have dropped adapters that are not used."""
        self.drop_unused()
        super().assign(running, waiting)

    def drop_unused(self) -> None:
        if self._unused:
            self._rank_group.send("drop", loads=[self._unused.popleft() for _ in range(len(self._unused))])

    def put(self, adapter: Adapter, slot: int) -> None:
        self._rank_group.send("put", load=adapter.load, slot=slot)
        super().put(adapter, slot)


def pack_slots(adapters: StepAdapters | None) -> tuple[bytes, list[int]]:
    """Packs the slots of a step's tokens and results for other ranks, int32.

    Returns the numbers of both, no result if results have the slots of the tokens, and nothing without adapters.
    """
    if adapters is None:
        return b"", []
    parts: list[Any] = [adapters.tokens.slots, [] if adapters.results is adapters.tokens else adapters.results.slots]
    arrays = [np.asarray(part, dtype=np.int32) for part in parts]
    return b"".join(array.tobytes() for array in arrays), [len(array) for array in arrays]


class RankAdapters:
    """The parts of another rank: in host memory, filled by a thread, and in slots, which the main thread uses."""

    def __init__(self, channel: RankChannel) -> None:
        self._channel = channel
        self._held: dict[int, Adapter] = {}  # By load. Both threads change it, one key at a time.
        self._slots: AdapterSlots | None = None
        self._dtype = torch.float32

    def open(self, model: Decoder, shard: Shard, message: RankMessage, device: torch.device) -> None:
        """Makes the slots and starts the thread. ConfigError if the device has no room for the slots."""
        fields = message.fields
        self._dtype = TORCH_DTYPES[fields["dtype"]]
        place = fields["count"], fields["max_rank"], device, self._dtype
        self._slots = AdapterSlots(sites_of(model, shard), *place)
        threading.Thread(target=self._run, name="adapters", daemon=True).start()

    def hold(self, message: RankMessage) -> str | None:
        """Takes a part to host memory. Returns why it cannot, None if it has."""
        try:
            self._held[message.fields["load"]] = self._unpack(message)
        except Exception as error:  # no memory: other adapters and steps go on
            _log.error("this rank cannot hold an adapter: %s", describe(error))
            return describe(error)
        return None

    def put(self, message: RankMessage) -> None:
        """Begins the copy of a part into a slot."""
        assert self._slots is not None
        self._slots.put(self._held[message.fields["load"]], message.fields["slot"])

    def drop(self, message: RankMessage) -> None:
        """Forgets parts. One in a slot stays in memory until another takes its place."""
        for load in message.fields["loads"]:
            self._held.pop(load, None)

    def of_step(self, message: RankMessage) -> tuple[StepAdapters | None, bytes]:
        """Returns the adapters of a step, and the payload of its message without them."""
        counts = message.fields["slots"]
        if not counts:
            return None, message.payload
        assert self._slots is not None
        end = len(message.payload) - 4 * sum(counts)
        slots = np.frombuffer(message.payload, dtype=np.int32, offset=end).astype(np.int64)
        self._slots.wait_for_copies(slots)
        tokens, results = (self._slots.rows(part) if len(part) else None for part in np.split(slots, [counts[0]]))
        assert tokens is not None
        return StepAdapters(tokens, results), message.payload[:end]

    def wait_for_copies(self) -> None:
        """Lets the current stream wait for all copies to slots: the host does not know the slots of a device step."""
        assert self._slots is not None
        self._slots.wait_for_copies(np.arange(self._slots.count))

    def of_device_step(self, step: DeviceStep, numbers: DeviceNumbers) -> StepAdapters | None:
        """Returns the adapters of a device step, None if no row has one. A graph can record it."""
        if not step.adapter_tiles:
            return None
        tokens = self._device_rows(numbers.adapter_order, numbers.adapter_tiles)
        results = self._device_rows(numbers.result_order, numbers.result_tiles) if step.result_tiles else None
        return StepAdapters(tokens, results)

    def _device_rows(self, order: Tensor, tiles: Tensor) -> AdapterRows:
        from engine.adapters.triton_rows import TritonRows, tile_of

        assert self._slots is not None
        assert self._slots.memory is not None, "device steps need a GPU"
        return TritonRows(self._slots.memory, order, tiles, tile_of(len(order)))

    def _run(self) -> None:
        assert self._slots is not None
        make_current(self._slots.device)
        try:
            while (message := self._channel.receive()).kind != "stop":
                if message.kind == "drop":
                    self.drop(message)
                    continue
                self._channel.send("held", load=message.fields["load"], error=self.hold(message))
        except Unavailable:
            _log.info("rank 0 has ended")
        except Exception:
            _log.exception("the adapters of this rank failed")
            self._channel.close()  # rank 0 notices, and the group has failed

    def _unpack(self, message: RankMessage) -> Adapter:
        """Brings a part into page-locked memory on a GPU's rank."""
        assert self._slots is not None
        fields, sites, pin = message.fields, len(self._slots.sites.all), self._slots.device.type == "cuda"
        shapes = ((fields["numbers"],), self._dtype), ((sites, TABLE_WIDTH), torch.int64), ((sites, MAX_PARTS), None)
        start, tensors = 0, []
        for shape, dtype in shapes:
            tensor = torch.empty(shape, dtype=dtype or torch.float32, pin_memory=pin)
            content = np.frombuffer(message.payload, dtype=np.uint8, count=tensor.nbytes, offset=start)
            tensor.view(-1).view(torch.uint8).numpy()[:] = content
            start += tensor.nbytes
            tensors.append(tensor)
        numbers, table, scales = tensors
        return Adapter(fields["digest"], fields["largest_rank"], numbers, table, scales, fields["load"])
