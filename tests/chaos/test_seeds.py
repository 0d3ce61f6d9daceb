"""Two short seeds of the chaos harness on a stack of processes, and tests of the harness itself.

`make chaos SEEDS=a-b` runs whole seeds; tests/rigs/chaos says what they do.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import random
import signal
import socket
import subprocess
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from tests.rigs.chaos import fork_server, invariants, results, seeds
from tests.rigs.chaos.catalogue import Case, ModelKind, catalogue, write_model
from tests.rigs.chaos.client import ChaosClients, Gateway, Verdict
from tests.rigs.chaos.invariants import ReadinessWatch
from tests.rigs.chaos.schedule import GROUPS, PROCESSES, FaultKind, ScheduledFault, schedule
from tests.rigs.chaos.seeds import SeedRunner
from tests.rigs.chaos.stack import ChaosStack
from tests.rigs.waiting import until

SECONDS = 4.0
#: The first kills a prefill pod and a gateway; the second kills Valkey and a decode pod, and freezes.
SEEDS = (1, 2)


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> list[Case]:
    directory = tmp_path_factory.mktemp("oracle")
    write_model(directory)
    return catalogue(directory)


@pytest.mark.timeout(240)
async def test_two_seeds_break_nothing(cases: list[Case], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with ChaosStack.running(tmp_path / "stack") as stack:
        runner = await SeedRunner.warmed_up(stack, cases, print)
        found = [await runner.run(seed, SECONDS) for seed in SEEDS]
        await require_seen(runner, monkeypatch)
    for result in found:
        assert result.good, result
        assert result.verdicts.get(Verdict.COMPLETED, 0) > 10
        assert not result.problems, result.problems
    assert sum(sum(result.deaths.values()) for result in found) >= 2


@pytest.mark.long
@pytest.mark.timeout(240)
@pytest.mark.parametrize("kind", [ModelKind.WINDOWS, ModelKind.STATES])
async def test_a_seed_with_windows_or_states_breaks_nothing(kind: ModelKind, tmp_path: Path) -> None:
    (tmp_path / "oracle").mkdir()
    write_model(tmp_path / "oracle", kind)
    cases = catalogue(tmp_path / "oracle")
    async with ChaosStack.running(tmp_path / "stack", kind) as stack:
        info = await stack.info("decode-0")
        assert (len(info.layout.groups), info.HasField("states")) == {"windows": (2, False), "states": (0, True)}[kind]
        runner = await SeedRunner.warmed_up(stack, cases, print)
        result = await runner.run(2, SECONDS)
    assert result.good, result
    assert result.verdicts.get(Verdict.COMPLETED, 0) > 10


async def require_seen(runner: SeedRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    """Opens connections, adds a key to Valkey and kills a pod. Requires that the harness finds all three."""
    stack, port = runner.stack, int(runner.stack.gateways[0].url.rpartition(":")[2])
    monkeypatch.setattr(invariants, "SETTLE_S", 0.0)
    opened = [await asyncio.open_connection("127.0.0.1", port) for _ in range(20)]
    async with stack.redis() as client:
        await client.set("forgotten", 1)
    seen = await invariants.leaks(stack, runner.start)
    assert any("gateway-0 has" in text and "descriptors" in text for text in seen), seen
    assert any("forgotten" in text for text in seen), seen
    for _, writer in opened:
        writer.close()
    os.kill(stack.pid("decode-1"), signal.SIGKILL)
    await until(lambda: not stack.alive("decode-1"))
    stack.note_crashes()
    assert [text.partition(" ")[0] for text in stack.crashes] == ["decode-1"]


def test_a_seed_gives_the_same_faults_every_time() -> None:
    for seed in range(40):
        assert schedule(seed, 20.0) == schedule(seed, 20.0)
    assert schedule(1, 20.0) != schedule(2, 20.0)


def test_every_process_dies_within_seven_seeds() -> None:
    for first in (0, 3, 193):
        killed = {fault.victim for s in range(first, first + 7) for fault in schedule(s, 4.0) if _kills(fault)}
        assert killed == set(PROCESSES)


def test_a_group_has_one_fault_at_a_time_and_all_kinds_occur() -> None:
    seen = set()
    for seed in range(200):
        faults = schedule(seed, 20.0)
        for group, names in GROUPS.items():
            own = [fault for fault in faults if fault.group == group]
            assert {fault.victim for fault in own} <= set(names)
            for one, following in itertools.pairwise(own):
                assert one.at_s + one.lasts_s < following.at_s
        seen |= {(fault.group, fault.kind) for fault in faults}
    assert {kind for _, kind in seen} == set(FaultKind)


def _kills(fault: Any) -> bool:
    return bool(fault.kind is FaultKind.KILL)


def test_a_pid_that_the_kernel_gives_again_is_a_new_process(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = socket.socketpair()
    waits = [(4242, signal.SIGKILL.value), (0, 0)]
    monkeypatch.setattr("os.fork", lambda: 4242)
    monkeypatch.setattr("os.waitpid", lambda *_: waits.pop(0))
    server = threading.Thread(target=fork_server.serve, args=(theirs.detach(), ()))
    server.start()
    with ours, ours.makefile("rw") as stream:

        def ask(**message: Any) -> Any:
            stream.write(json.dumps(message) + "\n")
            stream.flush()
            return json.loads(stream.readline())

        assert ask(do="fork") == 4242
        assert ask(do="poll", pid=4242) == -signal.SIGKILL
        assert ask(do="fork") == 4242
        assert ask(do="poll", pid=4242) is None
    server.join()


def test_a_process_that_ends_while_its_resources_are_read_is_found() -> None:
    ended = subprocess.Popen(["true"])
    start = dict.fromkeys(("prefill", "decode", "gateway"), invariants.Held(1000, 1000, 0))
    pids = dict.fromkeys(PROCESSES, os.getpid()) | {"decode-1": ended.pid}
    stack: Any = SimpleNamespace(pid=pids.__getitem__)
    end = time.monotonic() + 30
    while invariants.of_processes(stack, start) != ["decode-1 has ended"]:  # nothing has read its exit code
        assert time.monotonic() < end
        time.sleep(0.01)
    ended.wait()
    assert invariants.of_processes(stack, start) == ["decode-1 has ended"]


async def test_a_load_that_fails_ends_the_faults(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, ended = list[str](), list[str]()

    async def apply(fault: ScheduledFault) -> None:
        begun.append(fault.victim)
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(fault.victim)

    async def run(_seed: int, _until: object) -> None:
        await until(lambda: bool(begun))
        raise RuntimeError("the load is broken")

    stack: Any = SimpleNamespace(deaths={}, crashes=[], gateways=[], log_sizes=dict, apply=apply)
    monkeypatch.setattr(seeds, "clients_of", lambda *_: SimpleNamespace(run=run, prompts=1, answers=1))
    with pytest.raises(RuntimeError, match="the load is broken"):
        await SeedRunner(stack, [], {}, print).run(1, SECONDS)
    assert ended == begun != []


# -- verdicts of clients, with a gateway that gives scripted answers


class Answers(httpx.AsyncBaseTransport):
    """A gateway that gives these answers one after another. An answer is a status and a text, or an exception."""

    def __init__(self, *answers: tuple[int, str] | Exception) -> None:
        self.answers = list(answers)
        self.keys: list[str] = []

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        self.keys.append(request.headers["idempotency-key"])
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return httpx.Response(answer[0], text=answer[1])


def whole(*texts: str) -> tuple[int, str]:
    choices = [{"index": i, "text": text, "finish_reason": "length"} for i, text in enumerate(texts)]
    return 200, json.dumps({"choices": choices})


def events(*texts: str, end: bool = True) -> tuple[int, str]:
    parts = [{"choices": [{"index": 0, "text": text, "finish_reason": None}]} for text in texts]
    if end:
        parts[-1]["choices"][0]["finish_reason"] = "length"
    lines = [f"data: {json.dumps(part)}\n\n" for part in parts]
    return 200, "".join(lines) + "data: [DONE]\n\n" * end


RIGHT = Case({"prompt": [1], "max_tokens": 2, "model": "m"}, (" aaa bbb",))


async def verdict(*answers: tuple[int, str] | Exception, stream: bool = False, dies: bool = True) -> ChaosClients:
    """Sends one request. With `dies` the first gateway dies after a moment, else it lives."""
    transport = Answers(*answers)
    gateways = []
    for name in ("gateway-0", "gateway-1"):
        gateways.append(Gateway(name, "http://g", httpx.AsyncClient(transport=transport, base_url="http://g")))
        gateways[-1].in_rotation = not dies  # a gateway that died is not in rotation
    if dies:
        gateways[0].in_rotation = True
        asyncio.get_running_loop().call_later(0.03, setattr, gateways[0], "deaths", 1)
        asyncio.get_running_loop().call_later(0.03, setattr, gateways[1], "in_rotation", True)
    clients = ChaosClients(gateways, [RIGHT], key=lambda _: "k")
    await clients.one(RIGHT, {**RIGHT.body, "stream": stream}, random.Random(1))
    assert len(set(transport.keys)) == 1
    return clients


@pytest.mark.parametrize(
    ("answers", "stream", "expected"),
    [
        ([whole(" aaa bbb")], False, Verdict.COMPLETED),
        ([whole(" aaa ccc")], False, Verdict.WRONG),
        ([whole(" aaa")], False, Verdict.WRONG),
        ([events(" aaa", " bbb")], True, Verdict.COMPLETED),
        ([events(" aaa", " aaa")], True, Verdict.WRONG),
        ([events(" aaa", end=False)], True, Verdict.FAILED),
        ([(429, "full")], False, Verdict.REFUSED),
        ([(503, "no pods")], True, Verdict.FAILED),
        ([httpx.ReadError("cut"), whole(" aaa bbb")], False, Verdict.COMPLETED),
        ([httpx.ReadError("cut"), httpx.ReadError("cut")], False, Verdict.FAILED),
        ([httpx.ConnectTimeout("full"), whole(" aaa bbb")], False, Verdict.COMPLETED),
    ],
)
async def test_verdicts(answers: list[Any], stream: bool, expected: Verdict) -> None:
    clients = await verdict(*answers, stream=stream)
    assert clients.tally.verdicts == {expected: 1}, clients.tally.problems


async def test_a_living_gateway_must_not_break_a_connection() -> None:
    clients = await verdict(httpx.ReadError("cut"), whole(" aaa bbb"), dies=False)
    assert clients.tally.verdicts == {Verdict.FAILED: 1}
    assert "living gateway" in clients.tally.problems[0]


async def test_a_request_without_an_end_is_a_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.rigs.chaos.client.DEADLINE_S", 0.1)
    monkeypatch.setattr("tests.rigs.chaos.client.GRACE_S", 0.1)

    class Silent(httpx.AsyncBaseTransport):
        async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
            await asyncio.Event().wait()
            raise AssertionError

    gateway = Gateway("gateway-0", "http://g", httpx.AsyncClient(transport=Silent(), base_url="http://g"))
    clients = ChaosClients([gateway], [RIGHT], key=lambda _: "k")
    assert await clients.one(RIGHT, {**RIGHT.body, "stream": True}, random.Random(1)) is Verdict.HANG


def test_a_refusal_while_ready_is_a_lie() -> None:
    watch = ReadinessWatch([Gateway("gateway-0", "http://g", httpx.AsyncClient())])
    watch._seen["gateway-0"] = [(9.5, 9.6, True), (10.0, 10.1, True), (10.5, 10.6, True), (11.0, 11.1, False)]
    assert watch.lies([("gateway-0", 10.05, 10.2)])
    assert not watch.lies([("gateway-0", 10.4, 10.6)])


def test_answers_are_secrets(cases: list[Case]) -> None:
    """No answer begins like another one, so a right text comes from its own request."""
    texts = [text for case in cases for text in case.texts]
    for i, one in enumerate(texts):
        beginning = one[:24]  # six words
        assert not any(other.startswith(beginning) for k, other in enumerate(texts) if k != i)


def test_runs_add_up(tmp_path: Path) -> None:
    row = {
        **dict.fromkeys(("requests", "accepted", "completed"), 10),
        **dict.fromkeys(("failed", "wrong", "hang", "retried", "aborted", "refused", "leaks"), 0),
        **dict.fromkeys(("crashes", "lies", "faults"), 0),
        "seconds": 20.0,
        "deaths": {"valkey": 1},
    }
    out = tmp_path / "chaos.json"
    results.append(out, [{**row, "seed": 1, "wrong": 1}, {**row, "seed": 2}])
    found = results.append(out, [{**row, "seed": 1}, {**row, "seed": 3, "accepted": 12, "failed": 2}])
    assert (found["seeds"], found["wrong_answers"], found["deaths"]["valkey"]) == (3, 0, 3)
    assert found["completed_share"] == round(30 / 32, 6)
    assert json.loads(out.read_text())["metrics"] == found
