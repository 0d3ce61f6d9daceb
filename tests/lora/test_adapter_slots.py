"""Tiles cover all rows once; slots go to the sequences in order and are not taken from running ones."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.adapters.rows import NO_ADAPTER, max_tiles, tile_rows
from engine.adapters.slots import AdapterSlots

COUNT = 2


@given(st.lists(st.integers(NO_ADAPTER, 5), min_size=1, max_size=200), st.sampled_from([1, 4, 16]))
def test_tiles_cover_each_row_once(slots: list[int], tile: int) -> None:
    order, tiles = tile_rows(np.array(slots), tile)
    assert sorted(order.tolist()) == list(range(len(slots)))
    assert len(tiles) <= max_tiles(len(slots), tile, 6)
    places: list[int] = []
    for slot, first, count in tiles.tolist():
        assert 1 <= count <= tile
        assert {slots[row] for row in order[first : first + count]} == {slot}
        places += range(first, first + count)
    assert sorted(places) == list(range(len(slots)))


def slots_of_two() -> AdapterSlots:
    sites: Any = SimpleNamespace(all=[])
    return AdapterSlots(sites, COUNT, 16, torch.device("cpu"), torch.float32)


def sequence(adapter: object) -> Any:
    return SimpleNamespace(adapter=adapter, adapter_slot=NO_ADAPTER if adapter is None else None)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["add", "admit", "end", "preempt"]), st.integers(0, 4)), max_size=60))
def test_slots_follow_the_order_and_stay_with_running_sequences(events: list[tuple[str, int]]) -> None:
    """Any order of arrivals, admissions, ends and preemptions; adapter 4 is the base."""
    slots, adapters = slots_of_two(), [object() for _ in range(4)]
    running: list[Any] = []
    waiting: list[Any] = []
    for event, number in events:
        if event == "add":
            waiting.append(sequence(adapters[number] if number < 4 else None))
        elif event == "end" and running:
            running.pop(number % len(running))
        elif event == "preempt" and running:
            waiting.insert(0, running.pop(number % len(running)))
        slots.assign(running, waiting)
        if event == "admit":
            ready = [seq for seq in waiting if seq.adapter_slot is not None]
            for seq in ready[: 1 + number]:
                waiting.remove(seq)
                running.append(seq)
        for seq in running:
            if seq.adapter is not None:
                assert slots.adapters[seq.adapter_slot] is seq.adapter
        with_adapter = [seq for seq in waiting if seq.adapter is not None]
        ready_first = [seq.adapter_slot is not None for seq in with_adapter]
        assert ready_first == sorted(ready_first, reverse=True), "no sequence with an adapter overtakes another"
        if not running and with_adapter:
            assert ready_first[0], "a free slot is given at once"


def test_the_slot_that_was_used_longest_ago_is_evicted() -> None:
    slots, (a, b, c) = slots_of_two(), (object(), object(), object())
    for adapter in (a, b, a, c):
        slots.assign([], [sequence(adapter)])
    assert set(slots.adapters) == {a, c}
    slots.assign([], [sequence(a)])
    assert slots.loads == 3


def test_a_slot_whose_copy_failed_has_no_adapter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the next sequence would compute with the weights of the adapter before it."""
    slots, adapter = slots_of_two(), object()
    slots.memory, slots._stream = SimpleNamespace(), SimpleNamespace()  # type: ignore[assignment]
    copies: list[int] = []

    def copy(_adapter: object, slot: int, *_: object) -> None:
        copies.append(slot)
        if len(copies) == 1:
            raise RuntimeError("the copy failed")

    monkeypatch.setattr(slots, "_copy", copy)
    with pytest.raises(RuntimeError):
        slots.assign([], [sequence(adapter)])
    assert slots.adapters == [None, None]
    slots.assign([], [sequence(adapter)])
    assert copies == [0, 0]
