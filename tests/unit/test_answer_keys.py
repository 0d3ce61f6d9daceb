"""KeyBook, and answers with several readers: no item is lost, no key is mixed up, and keys end in time."""

from __future__ import annotations

import asyncio
import gc
import itertools
import math
import random
import weakref
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from common.errors import IdempotencyConflict, InvalidRequest, Overloaded
from gateway.api.http.endpoint import HttpResponse
from gateway.api.http.json import OPENAI_ERRORS
from gateway.api.http.keyed import EndedResponse, HttpAnswer
from gateway.serving.answer_keys import ANSWER_SHARE, ENTRY_BYTES, KeyBook, KeyEntry, digest, parse_key
from gateway.serving.request import AnswerIdentity
from gateway.serving.shared_answer import MAX_LAG, MAX_READERS, SharedAnswer

TTL_S = 10.0
ROOMY = 1 << 30


class BookMachine(RuleBasedStateMachine):
    """Clients use a few keys with two bodies. The model knows every outcome, or bounds if memory is short."""

    @initialize(max_bytes=st.sampled_from([ROOMY, 3 * ENTRY_BYTES, 20 * ENTRY_BYTES]))
    def open(self, max_bytes: int) -> None:
        self.book, self.max_bytes, self.now = KeyBook(ttl_s=TTL_S, max_bytes=max_bytes), max_bytes, 0.0
        self.running: list[tuple[KeyEntry, SharedAnswer[int]]] = []
        self.entries: set[KeyEntry] = set()
        self.bodies: dict[bytes, bytes] = {}  # the last body that each key got an answer for
        self.kept: dict[bytes, SharedAnswer[int]] = {}
        self.ended_at: dict[bytes, float] = {}

    @property
    def roomy(self) -> bool:
        return self.max_bytes == ROOMY

    def known(self, scope: bytes) -> bool:
        """Returns whether the key has a running answer, or one that ended within the time to live."""
        runs = any(entry.scope == scope for entry, _ in self.running)
        return runs or self.now < self.ended_at.get(scope, -TTL_S) + TTL_S

    @rule(key=st.sampled_from([b"a", b"b", b"c"]), body=st.sampled_from([b"1", b"2"]))
    def ask(self, key: bytes, body: bytes) -> None:
        try:
            entry = self.book.find(key, body, self.now)
        except IdempotencyConflict:
            assert self.known(key)
            assert self.bodies[key] != body
            return
        if self.roomy:
            assert (entry is not None) == self.known(key)
        if entry is None:
            entry = self.book.add(key, body, int(self.now))
        self.entries.add(entry)
        self.bodies[key] = body
        if entry.answer is not None:
            running = [answer for each, answer in self.running if each is entry]
            assert entry.answer is (running[-1] if running else self.kept[key])
            return
        if self.roomy:
            assert key not in self.kept or not self.known(key)
        answer: SharedAnswer[int] = SharedAnswer()
        self.kept.pop(key, None)
        self.book.start(entry, answer)
        self.running.append((entry, answer))

    @precondition(lambda self: self.running)
    @rule(data=st.data(), size=st.integers(0, 8 * ENTRY_BYTES))
    def grow(self, data: st.DataObject, size: int) -> None:
        entry, answer = data.draw(st.sampled_from(self.running))
        answer.add(0, size)
        self.book.on_growth(entry, answer)
        if answer.size > self.max_bytes // ANSWER_SHARE:
            assert not answer.kept
            assert entry.answer is not answer

    @precondition(lambda self: self.running)
    @rule(data=st.data(), keep=st.booleans())
    def end(self, data: st.DataObject, keep: bool) -> None:
        entry, answer = data.draw(st.sampled_from(self.running))
        self.running.remove((entry, answer))
        replaced = any(each is entry for each, _ in self.running)
        answer.end()
        self.book.end(entry, answer, self.now, keep=keep)
        self.ended_at[entry.scope] = self.now
        if not replaced and keep and answer.kept:
            self.kept[entry.scope] = answer

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def fail(self, data: st.DataObject) -> None:
        entry, answer = data.draw(st.sampled_from(self.running))
        self.running.remove((entry, answer))
        answer.end(InvalidRequest("no"))
        self.book.forget(entry)
        self.book.end(entry, answer, self.now, keep=False)
        self.kept.pop(entry.scope, None)
        self.ended_at.pop(entry.scope, None)

    @rule(seconds=st.sampled_from([1.0, TTL_S / 2, TTL_S]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @invariant()
    def size_is_the_sum_and_bounded(self) -> None:
        if not hasattr(self, "book"):
            return
        entries = list(self.book._entries.values())
        assert self.book.size == sum(entry.size for entry in entries)
        if self.book.size > self.max_bytes:
            assert not self.book._kept
            assert not self.book._ended
        ended = list(self.book._ended.values())
        assert all(before.expires_at <= after.expires_at for before, after in itertools.pairwise(ended))
        kept = [entry for entry in ended if entry.answer is not None]
        assert list(self.book._kept.values()) == kept
        assert all(self.book._entries[entry.scope] is entry for entry in ended)
        assert all(self.book._entries[scope].expires_at < math.inf for scope in self.book._ended)

    @invariant()
    def expired_keys_are_gone_after_a_look(self) -> None:
        if hasattr(self, "book"):
            self.book._forget_expired(self.now)
            assert all(entry.expires_at > self.now for entry in self.book._entries.values())


TestBook = BookMachine.TestCase
TestBook.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)


def test_answers_are_dropped_before_keys_and_the_oldest_first() -> None:
    book = KeyBook(ttl_s=TTL_S, max_bytes=4 * ENTRY_BYTES + ENTRY_BYTES // 2)
    entries = []
    for i in range(3):
        entry, answer = book.add(bytes([i]), b"body", 0), SharedAnswer[int]()
        book.start(entry, answer)
        answer.add(0, ENTRY_BYTES // 2)
        book.end(entry, answer, float(i), keep=True)
        entries.append(entry)
    assert [entry.answer is not None for entry in entries] == [False, True, True]
    for i in range(3, 6):
        book.start(book.add(bytes([i]), b"body", 0), SharedAnswer[int]())
    assert [entry.answer is not None for entry in entries] == [False, False, False]
    with pytest.raises(IdempotencyConflict):
        book.find(bytes([2]), b"another body", 3.0)
    assert book.find(bytes([0]), b"another body", 3.0) is None


@pytest.mark.parametrize("bad", ["", "x" * 256, "ké", "a\x7f", "a\nb", b"\xff"])
def test_a_bad_key_is_refused_by_the_name_of_its_header(bad: str | bytes) -> None:
    with pytest.raises(InvalidRequest, match="idempotency-key must have 1 to 255 printable ASCII") as error:
        parse_key(bad)
    assert error.value.field == "idempotency-key"


def test_every_printable_key_is_taken() -> None:
    assert parse_key(b"x" * 255) == "x" * 255
    assert parse_key("a key, {with} 'signs'") == "a key, {with} 'signs'"


def test_parts_of_a_digest_do_not_run_together() -> None:
    assert len({digest("ab", "c"), digest("a", "bc"), digest("abc"), digest("abc", "")}) == 4


def test_an_identity_gives_the_same_seeds_and_ids_and_each_prompt_another_seed() -> None:
    one, two = (AnswerIdentity(digest("tenant", "key"), "id", 7) for _ in range(2))
    other = AnswerIdentity(digest("another tenant", "key"), "id", 7)
    seeds = [one.seed(number) for number in range(20)]
    assert seeds == [two.seed(number) for number in range(20)]
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert len({*seeds, *(other.seed(number) for number in range(20))}) == 40
    assert one.id_source(1).randbytes(12) == two.id_source(1).randbytes(12) != one.id_source(2).randbytes(12)


# -- answers with several readers


async def read_all(answer: SharedAnswer[int], got: list[int], rng: random.Random) -> None:
    """Reads a whole answer, with `next` and `relay` in turns."""

    def take(item: int) -> bool:
        if rng.random() < 0.2:
            return False
        got.append(item)
        return True

    with answer.reader() as reader:
        while items := await reader.next():
            got += items
            await reader.relay(take)
            for _ in range(rng.randrange(3)):
                await asyncio.sleep(0)


@given(st.integers(0, 2**32), st.integers(0, 300))
@settings(max_examples=60, deadline=None)
def test_every_reader_gets_every_item_once_and_in_order(seed: int, count: int) -> None:
    async def run() -> None:
        rng, answer = random.Random(seed), SharedAnswer[int]()
        reads: list[list[int]] = []
        async with asyncio.TaskGroup() as group:
            for number in range(count):
                if len(reads) < MAX_READERS and answer.kept and (not reads or rng.random() < 0.05):
                    reads.append([])
                    group.create_task(read_all(answer, reads[-1], random.Random(rng.random())))
                    await asyncio.sleep(0)
                answer.add(number, 8)
                if rng.random() < 0.01:
                    answer.let_go()
                for _ in range(rng.randrange(2)):
                    await asyncio.sleep(0)
            answer.end()
            if answer.kept:
                reads.append([])
                group.create_task(read_all(answer, reads[-1], rng))
        assert all(got == list(range(count)) for got in reads)

    asyncio.run(run())


async def test_an_answer_that_was_let_go_forgets_what_all_readers_have() -> None:
    answer = SharedAnswer[int]()
    with answer.reader() as fast, answer.reader() as slow:
        assert answer.num_readers == 2
        for number in range(MAX_LAG - 1):
            answer.add(number, 8)
        answer.let_go()
        assert len(await fast.next()) == MAX_LAG - 1
        answer.add(MAX_LAG - 1, 8)
        assert answer._first == 0
        for number in range(MAX_LAG, MAX_LAG + 300):
            answer.add(number, 8)
            await fast.next()
        assert answer._first > 0
        with pytest.raises(Overloaded, match="reads too slowly"):
            await slow.next()
    assert not answer.num_readers


async def test_the_last_reader_abandons_a_running_answer() -> None:
    answer, abandoned = SharedAnswer[int](), 0

    def abandon() -> None:
        nonlocal abandoned
        abandoned += 1

    answer.on_abandoned = abandon
    with answer.reader():
        with answer.reader():
            answer.add(1, 1)
        assert not abandoned
    assert abandoned == 1
    answer.end()
    with answer.reader() as reader:
        assert await reader.next() == [1]
        assert await reader.next() == ()
    assert abandoned == 1


async def test_an_answer_has_a_bounded_number_of_readers() -> None:
    answer = SharedAnswer[int]()
    readers = [answer.reader() for _ in range(MAX_READERS)]
    for reader in readers:
        reader.__enter__()
    with pytest.raises(Overloaded, match="16 requests with this idempotency key"):
        answer.reader().__enter__()
    readers[0].__exit__(None, None, None)
    with answer.reader():
        pass
    for reader in readers[1:]:
        reader.__exit__(None, None, None)


async def test_an_answer_knows_the_request_ids_of_its_present_readers_only() -> None:
    answer = SharedAnswer[int]()
    with answer.reader():
        for client_id in ("a", "b", "a"):
            with answer.reader() as reader:
                reader.set_client_id(client_id)
                assert list(answer.client_ids) == [client_id]
        assert not answer.client_ids


async def test_readers_get_the_items_and_then_the_error() -> None:
    answer = SharedAnswer[int]()
    with answer.reader() as reader:
        answer.add(1, 1)
        answer.end(InvalidRequest("wrong"))
        assert await reader.next() == [1]
        with pytest.raises(InvalidRequest, match="wrong"):
            await reader.next()


def test_an_ended_answer_keeps_nothing_of_its_request() -> None:
    answer = HttpAnswer()
    answer.source = source = HttpResponse(answer.send, answer, OPENAI_ERRORS)
    source.request_id, source.headers = "r-1", {"x-request-id": "r-1"}
    answer.on_growth = answer.on_abandoned = partial(answer.add, b"", 0)
    watched, ended = weakref.ref(source), weakref.ref(answer)
    answer.end()
    assert answer.source == EndedResponse("r-1", {"x-request-id": "r-1"}, source.ping_event)
    gc.disable()  # only counts of references free an object
    try:
        del source
        assert watched() is None
        del answer
        assert ended() is None
    finally:
        gc.enable()
