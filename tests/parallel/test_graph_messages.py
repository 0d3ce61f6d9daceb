"""The messages of graphs: buffers keep their numbers, and late ranks do what rank 0 did, in its order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from common.errors import InternalError
from common.process.rank_channel import RankMessage
from engine.adapters.rows import StepAdapters
from engine.attention.triton_backend import DecodeRows, RowSpan, TritonMetadata
from engine.cuda_graphs import CudaGraphs
from engine.parallel.graphs import CAPTURE_S, DeviceStep, LeaderGraphs, RankGraphs, pack_device_step
from tests.rigs.parallel.fake_graphs import FakeRecorder

CPU = torch.device("cpu")


class Attention:
    """Makes metadata as `TritonAttention` does, without plans."""

    def decode_metadata(self, slots: Tensor, cu_q: Tensor, lens: Tensor, tables: Tensor, *, max_new: int) -> Any:
        span = RowSpan(0, len(slots), max_new, cu_q, lens, tables)
        return TritonMetadata(slots, cu_q, tables, span, {}, (), ())

    def listed_metadata(
        self, slots: Tensor, cu_q: Tensor, lens: Tensor, tables: Tensor, tiles: Tensor, decode: DecodeRows | None
    ) -> Any:
        listed = RowSpan(0, len(slots), len(slots), cu_q, lens, tables, tiles=tiles)
        span = None if decode is None else RowSpan(0, len(slots), decode.max_new, *decode[:2], tables)
        return TritonMetadata(slots, cu_q, tables, span, {}, (listed,), ())


class AdapterNumbers(NamedTuple):
    """Order and tiles, as `TritonRows` has them."""

    order: Tensor
    tiles: Tensor


def metadata_of(tokens: int, rows: int, width: int, max_new: int, tiles: int, draw: Callable[[int], Tensor]) -> Any:
    shape = draw(tokens), draw(rows + 1), draw(rows), draw(rows * width).view(rows, width)
    if not tiles:
        return Attention().decode_metadata(*shape, max_new=max_new)
    decode = DecodeRows(draw(rows + 1), draw(rows), max_new) if max_new else None
    return Attention().listed_metadata(*shape, draw(tiles), decode)


@settings(max_examples=100, deadline=None)
@given(
    tokens=st.integers(1, 9),
    results=st.none() | st.integers(1, 5),
    rows=st.integers(1, 5),
    width=st.integers(1, 6),
    max_new=st.integers(0, 8),
    tiles=st.integers(0, 7),
    adapters=st.none() | st.tuples(st.integers(1, 9), st.none() | st.integers(1, 9)),
    seed=st.integers(0, 99),
)
def test_a_buffer_keeps_the_numbers_of_a_step(
    tokens: int,
    results: int | None,
    rows: int,
    width: int,
    max_new: int,
    tiles: int,
    adapters: tuple[int, int | None] | None,
    seed: int,
) -> None:
    random = torch.Generator().manual_seed(seed)

    def draw(count: int) -> Tensor:
        return torch.randint(-(2**31), 2**31, (count,), generator=random).int()

    max_new = max_new if tiles else max(1, max_new)
    metadata = metadata_of(tokens, rows, width, max_new, tiles, draw)
    ids, positions, asked = draw(tokens).long(), draw(tokens), None if results is None else draw(results).long()
    adapted, own_results = None, False
    if adapters is not None:
        of_tokens = AdapterNumbers(draw(tokens), draw(3 * adapters[0]))
        own_results = asked is not None and adapters[1] is not None
        of_results = AdapterNumbers(draw(results or 0), draw(3 * (adapters[1] or 0))) if own_results else None
        adapted = StepAdapters(of_tokens, of_results)  # type: ignore[arg-type]
    step, packed = pack_device_step(ids, positions, asked, metadata, adapted, torch.zeros(4, dtype=torch.int32))
    assert (packed.dtype, packed.shape) == (torch.int32, step.empty_buffer(CPU).shape)
    told = DeviceStep(*list(step))  # as JSON carries it
    numbers = told.unpack(packed)
    assert all(part.data_ptr() % 16 == packed.data_ptr() % 16 for part in numbers if len(part))
    assert torch.equal(numbers.tokens.long(), ids)
    assert torch.equal(numbers.positions, positions)
    assert told.results is None if asked is None else torch.equal(numbers.results.long(), asked)
    there = numbers.metadata(told, Attention())
    pairs = [(metadata.slot_mapping, there.slot_mapping), (metadata.cu_q, there.cu_q), (metadata.tables, there.tables)]
    spans = [*zip(metadata.paged, there.paged, strict=True)]
    assert (metadata.decode is None) == (there.decode is None)
    if metadata.decode is not None:
        spans.append((metadata.decode, there.decode))
    for mine, theirs in spans:
        assert mine.max_new == theirs.max_new
        pairs += [(mine.cu_q, theirs.cu_q), (mine.seq_lens, theirs.seq_lens)]
        pairs += [] if mine.tiles is None else [(mine.tiles, theirs.tiles)]
    assert bool(told.adapter_tiles) == (adapted is not None)
    assert bool(told.result_tiles) == own_results
    if adapted is not None:
        ours = cast("AdapterNumbers", adapted.tokens)
        pairs += [(ours.order, numbers.adapter_order), (ours.tiles, numbers.adapter_tiles)]
    if adapted is not None and own_results:
        ours = cast("AdapterNumbers", adapted.results)
        pairs += [(ours.order, numbers.result_order), (ours.tiles, numbers.result_tiles)]
    assert all(torch.equal(a, b) for a, b in pairs)


class LateRank:
    """Another rank. It has messages until it handles them, and logs the steps that it computes."""

    def __init__(self, failing: str | None = None) -> None:
        self.inbox, self.log, self.failing = deque[RankMessage](), list[Any](), failing
        self.graphs = RankGraphs(CPU, self.log.append, lambda: self.log.append("waits"))

    def handle(self, count: int) -> int:
        """Handles messages. Returns the number of answers."""
        answers = 0
        while self.inbox and count:
            message, count = self.inbox.popleft(), count - 1
            if message.kind == "step":
                self.log.append(message.fields["number"])
                continue
            if message.kind == "capture" and message.fields["name"] == self.failing:
                raise RuntimeError("no memory")
            {"device_step": self.graphs.run, "replay": self.graphs.replay, "capture": self.graphs.capture}[
                message.kind
            ](message)
            answers += message.kind == "capture"
        return answers


class Group:
    """A group whose ranks handle messages when they are delivered, or at the latest when rank 0 waits for them."""

    step_bound_s = 3.0

    def __init__(self, size: int, failing: str | None = None) -> None:
        self.ranks = [LateRank(failing if rank == size - 1 else None) for rank in range(1, size)]
        self.failure: str | None = None

    def send(self, kind: str, **fields: Any) -> None:
        self.check_alive()
        assert "bound_s" in fields or kind in ("capture", "step")
        for rank in self.ranks:
            rank.inbox.append(RankMessage(kind, fields, b""))

    def receive(self, *, limit_s: float) -> None:
        assert limit_s == CAPTURE_S
        for number, rank in enumerate(self.ranks, 1):
            try:
                answers = rank.handle(len(rank.inbox))
            except RuntimeError as error:
                raise self.fail(f"rank {number} failed: {error}") from error
            assert answers == 1

    def check_alive(self) -> None:
        if self.failure is not None:
            raise InternalError(self.failure)

    def fail(self, reason: str) -> InternalError:
        self.failure = self.failure or reason
        return InternalError(self.failure)


class Leader:
    """Rank 0 with two computations, "decode" and "prompt". It logs the steps that it computes."""

    def __init__(self, group: Any) -> None:
        self.group, self.mirror, self.log = group, LeaderGraphs(group, CPU), list[Any]()
        self.raises: Exception | None = None
        self.graphs = {
            name: CudaGraphs(name, CPU, self.compute, keep=lambda out: out, describe=str, mirror=self.mirror)
            for name in ("decode", "prompt")
        }
        self.shape = 0
        self.steps = 0

    def compute(self, shape: int) -> tuple[Tensor, ...]:
        step = DeviceStep(shape, None, 1, 1, 1, 0)
        with self.mirror.running(step):
            if self.raises is not None:
                raise self.raises
            self.log.append(step)
        return ()

    def do(self, event: str, name: str, shape: int) -> None:
        if event == "run":
            self.graphs[name].run(shape)
        elif event == "capture":
            self.graphs[name].capture([shape], lambda _shape: None)
        elif event == "step":
            self.steps += 1
            self.group.send("step", number=self.steps)
            self.log.append(self.steps)
        else:
            for index, rank in enumerate(self.group.ranks):
                rank.handle(shape + index)


@pytest.fixture(scope="module", autouse=True)
def recorder() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        announce = LeaderGraphs.announce

        def announce_once(self: LeaderGraphs, step: DeviceStep) -> None:
            if not FakeRecorder.replaying():
                announce(self, step)

        patch.setattr(LeaderGraphs, "announce", announce_once)
        for module in ("engine.cuda_graphs", "engine.parallel.graphs"):
            patch.setattr(f"{module}.GraphRecorder", FakeRecorder)
        yield


KINDS = st.sampled_from(["run", "run", "capture", "step", "deliver"])
EVENTS = st.tuples(KINDS, st.sampled_from(["decode", "prompt"]), st.integers(1, 3))


@settings(max_examples=150, deadline=None)
@given(st.integers(2, 4), st.lists(EVENTS, max_size=40))
def test_late_ranks_compute_the_steps_of_rank_0_in_its_order(size: int, events: list[tuple[str, str, int]]) -> None:
    group = Group(size)
    leader = Leader(group)
    for event in events:
        leader.do(*event)
        for rank in group.ranks:
            assert rank.log == leader.log[: len(rank.log)]
    for rank in group.ranks:
        rank.handle(len(rank.inbox))
        assert rank.log == leader.log


@settings(max_examples=30, deadline=None)
@given(st.lists(EVENTS, max_size=12), st.integers(2, 4))
def test_a_rank_that_cannot_capture_ends_the_group(events: list[tuple[str, str, int]], size: int) -> None:
    """No step follows the failure, in whatever state the ranks are."""
    group = Group(size, failing="decode: 7")
    leader = Leader(group)
    for event in events:
        leader.do(*event)
    with pytest.raises(InternalError, match=f"rank {size - 1} failed: no memory"):
        leader.do("capture", "decode", 7)
    sent = [len(rank.inbox) for rank in group.ranks]
    for event, name, shape in [*events, ("run", "decode", 7), ("capture", "prompt", 1)]:
        if event != "deliver":
            with pytest.raises(InternalError, match="no memory"):
                leader.do(event, name, shape)
    assert [len(rank.inbox) for rank in group.ranks] == sent


@pytest.mark.parametrize("captured", [False, True])
def test_an_error_of_rank_0_ends_the_group(captured: bool) -> None:
    group = Group(2)
    leader = Leader(group)
    if captured:
        leader.do("capture", "decode", 1)
    leader.raises = ValueError("a kernel failed")
    with pytest.raises(InternalError, match=r"failed on rank 0: .*a kernel failed"):
        leader.do("run", "decode", 1)
    with pytest.raises(InternalError, match="a kernel failed"):
        leader.do("run", "decode", 2)


def test_rank_0_without_memory_for_a_graph_raises_what_names_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _device: (1 << 20, 1 << 30))
    group = Group(2)
    leader = Leader(group)
    leader.raises = torch.OutOfMemoryError("CUDA out of memory.")
    with pytest.raises(torch.OutOfMemoryError, match=r"the decode graph of 1 \(1 of 1\) found 1 MiB of"):
        leader.do("capture", "decode", 1)
    assert group.failure is not None


def test_steps_with_adapters_wait_for_the_copies_to_slots() -> None:
    rank = LateRank()
    plain, adapted = DeviceStep(1, None, 1, 1, 1, 0), DeviceStep(1, None, 1, 1, 1, 0, 3, 0)
    for name, step in (("plain", plain), ("adapted", adapted)):
        rank.graphs.run(RankMessage("device_step", {"sizes": step}, b""))
        rank.graphs.capture(RankMessage("capture", {"name": name, "sizes": step}, b""))
        rank.graphs.replay(RankMessage("replay", {"name": name}, b""))
    assert rank.log == [plain] * 3 + ["waits", adapted, adapted, "waits", adapted]


def test_a_rank_without_the_graph_says_which_it_has() -> None:
    rank = LateRank()
    rank.graphs.capture(RankMessage("capture", {"name": "decode: 2", "sizes": [1, None, 1, 1, 1, 0]}, b""))
    with pytest.raises(InternalError, match=r"no graph 'decode: 1': it has \['decode: 2'\]"):
        rank.graphs.replay(RankMessage("replay", {"name": "decode: 1"}, b""))
