"""Grammars are proven by a child process: bombs end only their proof, soon, and what people use is proven."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from cli.demo.model import demo_model
from common.errors import BatonError, InvalidRequest, Overloaded, RateLimited, Unavailable
from common.grammar import prover as prover_module
from common.grammar.compiler import MAX_GRAMMAR_CHARS, GrammarSource, GrammarTokenizer
from common.grammar.prover import GrammarProver
from common.grammar.zygote import verdict
from common.json_schema.refusals import in_words
from common.types import Grammar
from tests.rigs.engine import grammar_shapes as shapes
from tests.rigs.engine.grammar_cases import BOMBS, KINDS, Bomb, explode, ordinary

SMALL = {"type": "object", "properties": {"a": {"type": "integer"}}}


@pytest.fixture(scope="module")
def prover(smollm2_dir: Path) -> Iterator[GrammarProver]:
    proving = GrammarProver(smollm2_dir, (2,), 49152)
    proving.submit(GrammarSource("json", SMALL, "f")).result(60)
    yield proving
    assert proving.pid is not None
    os.kill(proving.pid, signal.SIGKILL)


def outcome(future: Future[Grammar]) -> Grammar | BatonError:
    try:
        return future.result(60)
    except BatonError as error:
        return error


def schema(number: int) -> dict[str, Any]:
    """Another small schema for each number."""
    return {"type": "object", "properties": {f"p{number}": {"type": "string"}}}


def settled(prover: GrammarProver, source: GrammarSource, **kwargs: Any) -> Grammar | BatonError:
    """Repeats what a busy machine did not finish, as a client would."""
    deadline = time.monotonic() + 20.0
    while isinstance(got := outcome(prover.submit(source, **kwargs)), Overloaded) and time.monotonic() < deadline:
        pass
    return got


def proven(prover: GrammarProver, source: GrammarSource, **kwargs: Any) -> None:
    """Asserts that a grammar is proven.

    Children have a low priority, so beside two busy loops a proof of a second gets no processor. This process has one.
    """
    got = settled(prover, source, **kwargs)
    if isinstance(got, Overloaded) or (isinstance(got, InvalidRequest) and "takes too long" in got.message):
        answer = verdict(tokenizer(), {"form": source.form, "value": source.value})
        assert answer["verdict"] == "proven", answer
    else:
        assert isinstance(got, Grammar), got


@cache
def tokenizer() -> GrammarTokenizer:
    return GrammarTokenizer(demo_model(), eos_ids=[2], vocab_size=49152)


def test_two_hundred_ordinary_grammars_are_proven(prover: GrammarProver) -> None:
    sources = ordinary()
    assert len(sources) == 200
    wait([prover.submit(source) for source in sources], 120)
    for source in sources:
        proven(prover, source)


def test_there_are_bombs_of_six_kinds() -> None:
    assert {bomb.kind for bomb in BOMBS} == {*KINDS}
    assert len(KINDS) == 6


@pytest.mark.parametrize("bomb", BOMBS, ids=lambda bomb: f"{bomb.kind}: {bomb.name}")
def test_a_bomb_ends_only_its_proof_and_its_sender_hears_so(prover: GrammarProver, bomb: Bomb) -> None:
    pid = prover.pid
    done = explode(prover, bomb)
    assert done.ticks > 10 or done.seconds < 1  # no proof holds the interpreter of this process
    assert prover.pid == pid
    if bomb.proven:
        proven(prover, bomb.source())
        return
    if not isinstance(done.error, Overloaded):  # beside other work a bomb may get no processor in its time
        assert isinstance(done.error, InvalidRequest)
        assert done.error.field == "guided"
        assert re.match(r"guided (is too costly: .* (limit|more than)|cannot be followed: |has )", done.error.message)
        assert "backtrace" not in done.error.message
    proven(prover, GrammarSource("json", schema(-1), "f"))


def test_every_shape_that_overflowed_the_stack_is_refused(prover: GrammarProver) -> None:
    for make, count in shapes.BOMBS.values():
        error = outcome(prover.submit(GrammarSource("text", make(count), "f")))
        assert isinstance(error, InvalidRequest)
        assert "at most" in error.message


def test_a_small_schema_does_not_wait_for_another_clients_bombs(prover: GrammarProver) -> None:
    bombs = [GrammarSource("regex", "a?" * (26_000 + i), "f") for i in range(8)]
    running = [prover.submit(bomb, client="bomber") for bomb in bombs]
    proven(prover, GrammarSource("json", schema(0), "f"), client="neighbour")
    assert not all(future.done() for future in running)
    errors = [outcome(future) for future in running]
    assert any(isinstance(error, RateLimited) for error in errors)  # those that never had their turn
    assert not any(isinstance(error, Grammar) for error in errors)


async def test_an_event_loop_goes_on_while_bombs_are_proven(prover: GrammarProver) -> None:
    longest = 0.0

    async def tick() -> None:
        nonlocal longest
        while True:
            began = time.thread_time(), time.monotonic()
            await asyncio.sleep(0.005)
            # Processor time, because other processes on the machine delay the wall clock.
            longest = max(longest, time.thread_time() - began[0])

    ticking = asyncio.create_task(tick())
    sources = [GrammarSource("json", shapes.flat(2500 + i, required=True), "f") for i in range(3)]
    sources += [GrammarSource("regex", "a?" * (25_000 + i), "f") for i in range(3)]
    futures = [asyncio.wrap_future(prover.submit(source, client=str(i))) for i, source in enumerate(sources)]
    await asyncio.gather(*futures, return_exceptions=True)
    ticking.cancel()
    assert longest < 1.0


def test_one_grammar_is_proven_once(prover: GrammarProver, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[bytes] = []
    inner = prover._send

    def send(proof: Any, wall_s: float) -> None:
        sent.append(proof.key)
        inner(proof, wall_s)

    monkeypatch.setattr(prover, "_send", send)
    for source in (GrammarSource("json", schema(100), "f"), GrammarSource("regex", "[a-", "f")):
        sent.clear()
        results = [prover.submit(GrammarSource(source.form, source.value, field)) for field in ("x", "y")]
        results.append(prover.submit(source))
        wait(results, 30)
        again = outcome(prover.submit(source))
        assert len(sent) == 1
        for field, got in [*zip("xyf", map(outcome, results), strict=True), ("f", again)]:
            assert got.field == field
            assert isinstance(got, Grammar) or field in got.message.split()[0]


def test_the_verdicts_that_are_kept_are_bounded(smollm2_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prover_module, "MAX_KEPT", 3)
    prover = GrammarProver(smollm2_dir, (2,), 49152)
    for number in range(6):
        proven(prover, GrammarSource("json", schema(number), "f"))
    assert len(prover._kept) == 3
    assert prover._kept_chars == sum(len(answer["text"]) for answer, _ in prover._kept.values())


def test_the_process_is_replaced_when_it_died(prover: GrammarProver) -> None:
    before = prover.pid
    assert before is not None
    lost = prover.submit(GrammarSource("regex", "a?" * 24_000, "f"))
    while not lost.done() and not Path(f"/proc/{before}/task/{before}/children").read_text():
        time.sleep(0.01)  # until the proof has its process
    os.kill(before, signal.SIGKILL)
    assert isinstance(outcome(lost), Unavailable)
    proven(prover, GrammarSource("json", schema(200), "f"))
    assert prover.pid not in (None, before)


def test_a_grammar_beyond_the_limit_is_refused_before_it_is_sent(smollm2_dir: Path) -> None:
    prover = GrammarProver(smollm2_dir, (2,), 49152)
    for form, value in (
        ("json", {"enum": ["x" * 100 + str(i) for i in range(20_000)]}),
        ("json", "{" + " " * MAX_GRAMMAR_CHARS),
        ("regex", "a" * (MAX_GRAMMAR_CHARS + 1)),
        ("choice", ["x" * 1000 + str(i) for i in range(1000)]),
    ):
        error = outcome(prover.submit(GrammarSource(form, value, "f")))
        assert isinstance(error, InvalidRequest)
        assert (error.message, error.field) == (f"f is longer than {MAX_GRAMMAR_CHARS} characters", "f")
    assert prover.pid is None


def test_a_process_that_does_not_read_delays_no_caller_and_loses_no_grammar(prover: GrammarProver) -> None:
    """As at its start, when it builds the tokenizer. Each frame is larger than the buffer of a socket."""
    sources = [GrammarSource("json", {"description": "é" * (200_000 + i), **schema(600 + i)}, "f") for i in range(2)]
    sources.append(GrammarSource("json", schema(602), "f"))
    pid = prover.pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    try:
        futures = [prover.submit(source, client=str(i)) for i, source in enumerate(sources)]
        time.sleep(1.5)  # more than the limit of one write
        assert not any(future.done() for future in futures)
    finally:
        os.kill(pid, signal.SIGCONT)
    assert not any(isinstance(outcome(future), Unavailable) for future in futures)
    assert prover.pid == pid
    for source in sources:
        proven(prover, source)


PARENT = """
import sys, time
from pathlib import Path
from common.grammar.compiler import GrammarSource, GrammarTokenizer
from common.grammar.prover import GrammarProver
from common.grammar.zygote import verdict
prover = GrammarProver(Path(sys.argv[1]), (2,), 49152)
prover.submit(GrammarSource("json", {}, "f")).result(60)
prover.submit(GrammarSource("regex", "a?" * 24_000, "f"))
print(prover.pid, flush=True)
time.sleep(60)
"""


def test_the_process_and_its_proofs_end_with_their_parent(smollm2_dir: Path) -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT, str(smollm2_dir)], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    time.sleep(0.2)
    proofs = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    parent.kill()
    parent.wait()
    end = time.monotonic() + 10
    while any(running(p) for p in (pid, *map(int, proofs))) and time.monotonic() < end:
        time.sleep(0.05)
    assert not any(running(p) for p in (pid, *map(int, proofs)))


def running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def test_a_value_that_is_no_grammar_is_refused(prover: GrammarProver) -> None:
    for form, value in (
        ("json", float("nan")),
        ("json", "{"),
        ("choice", []),
        ("grammar", "\ud800: x"),
        ("regex", "("),
    ):
        error = outcome(prover.submit(GrammarSource(form, value, "f")))
        assert isinstance(error, InvalidRequest)
        assert error.field == "f"


def test_reasons_have_no_internals() -> None:
    assert "backtrace" not in in_words("panic: x\n<backtrace>\n 0: core\n</backtrace>")
    assert in_words("unknown name: x\n<non-verbose/>") == "cannot be followed: unknown name: x"


def test_threads_may_share_a_prover(prover: GrammarProver) -> None:
    results: list[Any] = []
    threads = [
        threading.Thread(target=lambda i=i: results.append(proven(prover, GrammarSource("json", schema(300 + i), "f"))))
        for i in range(20)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 20


def test_a_request_does_not_wait_for_the_turn_of_another_client_with_the_same_grammar(prover: GrammarProver) -> None:
    bombs = [prover.submit(GrammarSource("regex", "a?" * (23_000 + i), "f"), client="bomber") for i in range(2)]
    source = GrammarSource("json", schema(400), "f")
    held, neighbour = (prover.submit(source, client=client) for client in ("bomber", "neighbour"))
    assert neighbour in wait([*bombs, held, neighbour], 30, FIRST_COMPLETED).done
    wait([*bombs, held], 30)


def test_clients_take_turns(prover: GrammarProver) -> None:
    """One client's queue of slow grammars does not hold another client's, although all places may be taken."""
    bombs = [
        prover.submit(GrammarSource("regex", "a?" * (21_000 + 10 * i + k), "f"), client=f"bomber {i}")
        for k in range(3)
        for i in range(6)
    ]
    got = outcome(prover.submit(GrammarSource("json", schema(500), "f"), client="neighbour"))
    assert isinstance(got, Grammar | Overloaded)  # the latter if the machine was busy with other work
    assert any(isinstance(outcome(bomb), RateLimited) for bomb in bombs)
    assert not any(isinstance(outcome(bomb), Grammar) for bomb in bombs)


def test_the_cause_of_a_failed_proof_is_logged_without_the_grammar(
    prover: GrammarProver, caplog: pytest.LogCaptureFixture
) -> None:
    error = outcome(prover.submit(GrammarSource("regex", ["secret"], "f")))
    assert isinstance(error, Unavailable)
    assert "TypeError in from_regex" in caplog.text
    assert "secret" not in caplog.text
