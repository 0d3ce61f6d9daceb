"""Ranks that handle messages late still have the adapters of rank 0 in the same slots, and keep none without a user."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import AdapterNotLoaded
from common.process.rank_channel import RankMessage
from engine.adapters.peft import AdapterFile, LoraPair
from engine.adapters.rows import NO_ADAPTER
from engine.adapters.slots import AdapterSlots, sites_of
from engine.models.decoder import Decoder
from engine.models.spec import Shard, parse_spec
from engine.parallel.adapters import MirroredAdapters, MirroredSlots, RankAdapters
from tests.rigs.engine.bare_model import LLAMA

CPU, SIZE, SLOTS, MAX_RANK = torch.device("cpu"), 2, 2, 16
MODULE = "model.layers.0.self_attn.o_proj"
SPEC: Any = parse_spec(LLAMA, {})
SITES = [
    sites_of(Decoder(shard.shard_spec(SPEC), 1, CPU, torch.float32), shard) for shard in (Shard(0, 2), Shard(1, 2))
]
FILES = [
    AdapterFile(str(n), {MODULE: LoraPair(torch.full((1, 32), n + 1.0), torch.ones(32, 1), 1.0)}) for n in range(4)
]


class LateRank:
    """Rank 1. It is the end of the channel "adapters", and has the messages between steps until they are delivered."""

    def __init__(self) -> None:
        unused: Any = None
        self.adapters, self.inbox, self.answers = RankAdapters(unused), deque[RankMessage](), deque[RankMessage]()
        self.slots = self.adapters._slots = AdapterSlots(SITES[1], SLOTS, MAX_RANK, CPU, torch.float32)
        self.refuses = False

    def send(self, kind: str, payload: bytes = b"", **fields: Any) -> None:
        message = RankMessage(kind, fields, payload)
        if kind == "drop":
            self.adapters.drop(message)
            return
        error = "no memory" if self.refuses else self.adapters.hold(message)
        self.answers.append(RankMessage("held", {"load": fields["load"], "error": error}, b""))

    def wait_readable(self, _timeout_s: float) -> bool:
        return bool(self.answers)

    def receive(self) -> RankMessage:
        return self.answers.popleft()

    def deliver(self, count: int) -> None:
        while self.inbox and count:
            message, count = self.inbox.popleft(), count - 1
            {"put": self.adapters.put, "drop": self.adapters.drop}[message.kind](message)


class Ranks:
    """Rank 0 with names, slots and sequences, and the late rank."""

    def __init__(self) -> None:
        self.rank = LateRank()
        group: Any = SimpleNamespace(
            size=SIZE,
            channels=lambda _kind: [self.rank],
            check_alive=lambda: None,
            send=lambda kind, **fields: self.rank.inbox.append(RankMessage(kind, fields, b"")),
        )
        self.names = MirroredAdapters(SITES[0], torch.float32, MAX_RANK, group, pin=False)
        self.slots = MirroredSlots(self.names, group, SITES[0], SLOTS, MAX_RANK, CPU, torch.float32)
        self.running, self.waiting = list[Any](), list[Any]()

    def run(self, event: str, number: int) -> None:
        name = str(number % 3)
        if event == "load":
            self.names.keep(FILES[number], name)
        elif event == "refuse":
            self.rank.refuses = True
            known = self.names.all()
            try:
                self.names.keep(FILES[number], name)
            except AdapterNotLoaded:
                assert self.names.all() == known
            self.rank.refuses = False
        elif event == "unload" and name in self.names.all():
            self.names.remove(name)
        elif event == "add" and name in self.names.all():
            self.waiting.append(SimpleNamespace(adapter=self.names.named(name), adapter_slot=None))
        elif event == "end" and self.running:
            self.running.pop(number % len(self.running))
        elif event == "deliver":
            self.rank.deliver(number)
        self.slots.assign(self.running, self.waiting)
        for seq in [seq for seq in self.waiting if seq.adapter_slot not in (None, NO_ADAPTER)]:
            self.waiting.remove(seq)
            self.running.append(seq)


EVENTS = st.sampled_from(["load", "refuse", "unload", "add", "add", "end", "deliver"])


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(EVENTS, st.integers(0, 3)), max_size=50))
def test_the_slots_of_all_ranks_have_the_same_adapters(events: list[tuple[str, int]]) -> None:
    ranks = Ranks()
    for event, number in events:
        ranks.run(event, number)
    ranks.slots.assign([], [])  # sends the last drops
    ranks.rank.deliver(len(ranks.rank.inbox))
    site = next(site for site in SITES[1].all if MODULE in site.names)
    for ours, theirs in zip(ranks.slots.adapters, ranks.rank.slots.adapters, strict=True):
        assert (ours is None) == (theirs is None)
        if ours is not None and theirs is not None:
            assert (ours.load, ours.digest) == (theirs.load, theirs.digest)
            assert theirs.a(site).unique().tolist() == [0.0, int(ours.digest) + 1.0]
    used = {adapter.load for adapter in ranks.names.all().values()}
    used |= {adapter.load for adapter in ranks.slots.adapters if adapter is not None}
    used |= {seq.adapter.load for seq in ranks.waiting}
    assert set(ranks.rank.adapters._held) == used


def test_an_idle_engine_drops_adapters_without_a_user() -> None:
    ranks = Ranks()
    ranks.names.keep(FILES[0], "0")
    ranks.names.keep(FILES[1], "0")
    ranks.slots.drop_unused()
    ranks.rank.deliver(1)
    assert set(ranks.rank.adapters._held) == {ranks.names.named("0").load}


def test_a_load_that_fails_here_leaves_nothing_on_the_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Ranks()
    monkeypatch.setattr(ranks.names, "_answer", lambda *_: (_ for _ in ()).throw(MemoryError("no memory on rank 0")))
    with pytest.raises(MemoryError):
        ranks.names.keep(FILES[0], "0")
    assert not ranks.rank.adapters._held
    monkeypatch.undo()
    ranks.names.keep(FILES[0], "0")  # the answer of the first load is still there and is passed over
    assert len(ranks.rank.adapters._held) == 1
