"""Clients of the chaos harness. Each request ends with exactly one verdict.

A client chooses one of the gateways in rotation, as a load balancer does. When its connection breaks, it sends the same
request once more to another gateway, with the same Idempotency-Key. The texts of a client that leaves early, or loses
its connection, are checked too.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import httpx
import orjson

from tests.rigs.chaos.catalogue import Case

DEADLINE_S = 20.0  #: Deadline of each request.
GRACE_S = 1.0  #: A request that has not ended this long after its deadline is a hang.
CLIENTS = 6
ABORT_SHARE = 0.1  #: Share of requests that their client leaves early.
THINK_S = 0.15  #: Longest pause of a client between two requests.
REFUSED_PAUSE_S = 0.2  #: Pause of a client after a refusal.
RETRY_PAUSE_S = 0.05  #: Pause before a request is sent again. In it the harness notices the death of a gateway.


class Verdict(StrEnum):
    """How a request ended."""

    COMPLETED = "completed"  #: The whole answer came, and it is right.
    ABORTED = "aborted"  #: The client left early, and the part that it read is right.
    REFUSED = "refused"  #: Status 429: the request was not accepted.
    FAILED = "failed"  #: An error came, or the connection broke without an excuse.
    WRONG = "wrong"  #: A text differs from the known answer.
    HANG = "hang"  #: The request did not end in time.


@dataclass
class Tally:
    """The verdicts of all requests."""

    verdicts: Counter[Verdict] = field(default_factory=Counter)
    retried: int = 0  #: Requests that were sent again because their connection broke.
    problems: list[str] = field(default_factory=list)  #: One line for each failed, wrong or hanging request.
    seconds: list[float] = field(default_factory=list)  #: Time of each completed request.

    @property
    def accepted(self) -> int:
        """Requests that were neither refused nor left by their client."""
        bad = self.verdicts[Verdict.FAILED] + self.verdicts[Verdict.WRONG] + self.verdicts[Verdict.HANG]
        return self.verdicts[Verdict.COMPLETED] + bad


@dataclass(eq=False)
class Gateway:
    """A gateway as clients see it."""

    name: str
    url: str
    http: httpx.AsyncClient
    in_rotation: bool = True  #: Clients may choose this gateway.
    deaths: int = 0  #: How often the harness has killed the process.


@dataclass
class _Reading:
    """The part of one answer that a client has read."""

    texts: list[str]  #: By choice.
    finished: set[int] = field(default_factory=set)  #: Choices with a finish reason.
    chunks: int = 0  #: Chunks of a stream.
    gone: bool = False  #: The client left.
    error: str = ""  #: Why the answer is not complete; "" if no error came.


class _Refused(Exception):
    """The gateway answered 429."""


class ChaosClients:
    """Clients that each have one request at a time."""

    def __init__(self, gateways: Sequence[Gateway], cases: Sequence[Case], *, key: Callable[[int], str]) -> None:
        """key: returns the API key of client number i."""
        self.tally = Tally()
        self.prompts = 0  #: Requests in flight without a first token.
        self.answers = 0  #: Streams in flight with a first token.
        self.refusals: list[tuple[str, float, float]] = []  #: Gateway, begin and end of each request with status 503.
        self._gateways, self._cases, self._key = gateways, cases, key

    async def run(self, seed: int | str, until: Callable[[], bool]) -> None:
        """Runs CLIENTS clients until `until()` is true, and waits for the requests in flight."""
        async with asyncio.TaskGroup() as group:
            for number in range(CLIENTS):
                group.create_task(self._client(random.Random(f"client-{seed}-{number}"), number, until))

    async def _client(self, rng: random.Random, number: int, until: Callable[[], bool]) -> None:
        while not until():
            case, aborts = rng.choice(self._cases), rng.random() < ABORT_SHARE
            salt = {} if rng.random() < 0.5 else {"cache_salt": f"{rng.getrandbits(64):x}"}
            body = {**case.body, **salt, "stream": rng.random() < 0.6}
            leave_after = rng.randrange(case.body["max_tokens"]) if aborts else None
            await self.one(case, body, rng, number=number, leave_after=leave_after)
            await asyncio.sleep(rng.uniform(0, THINK_S))

    async def one(
        self, case: Case, body: dict[str, Any], rng: random.Random, *, number: int = 0, leave_after: int | None = None
    ) -> Verdict:
        """Sends one request, counts its verdict and returns it.

        Args:
            number: The client.
            leave_after: The client leaves after this many chunks of a stream. If the answer comes whole, it leaves
                after this many hundredths of a second. None: it stays.
        """
        headers = {
            "authorization": f"Bearer {self._key(number)}",
            "x-request-timeout": f"{DEADLINE_S:g}",
            "idempotency-key": f"{rng.getrandbits(128):032x}",
            "content-type": "application/json",
        }
        began, reading = time.monotonic(), _Reading([])
        verdict, why = Verdict.HANG, "no end in time"
        try:
            async with asyncio.timeout(DEADLINE_S + GRACE_S):
                verdict, why = await self._ended(case, body, headers, rng, leave_after, reading)
        except TimeoutError:
            pass
        seconds = time.monotonic() - began
        self.tally.verdicts[verdict] += 1
        if verdict is Verdict.COMPLETED:
            self.tally.seconds.append(seconds)
        elif verdict is Verdict.REFUSED:
            await asyncio.sleep(REFUSED_PAUSE_S)
        elif verdict is not Verdict.ABORTED:
            what = f"{len(body['prompt'])} prompt tokens, {'stream' if body['stream'] else 'whole'}"
            self.tally.problems.append(f"{verdict} after {seconds:.1f} s ({what}): {why}; read {reading.texts}")
        return verdict

    async def _ended(
        self,
        case: Case,
        body: dict[str, Any],
        headers: dict[str, str],
        rng: random.Random,
        leave_after: int | None,
        reading: _Reading,
    ) -> tuple[Verdict, str]:
        """Sends the request, at most twice. Returns the verdict and its reason."""
        broken: list[str] = []
        avoided: Gateway | None = None
        while True:
            gateway = await self._choose(rng, avoided)
            deaths = gateway.deaths
            reading.texts, reading.finished, reading.chunks = [""] * len(case.texts), set(), 0
            try:
                await self._read(gateway, body, headers, leave_after, reading)
            except (httpx.ConnectError, httpx.ConnectTimeout):  # nothing was sent
                avoided = gateway
                await asyncio.sleep(RETRY_PAUSE_S)
                continue
            except httpx.TransportError as error:
                if not case.agrees(reading.texts, whole=False):
                    return Verdict.WRONG, f"a part of an answer of {gateway.name}"
                broken.append(f"{gateway.name} {type(error).__name__}, {reading.chunks} chunks")
                await asyncio.sleep(RETRY_PAUSE_S)
                if len(broken) > 1:
                    return Verdict.FAILED, f"the connection broke twice: {broken}"
                if gateway.deaths == deaths and gateway.in_rotation:
                    return Verdict.FAILED, f"a living gateway broke the connection: {broken}"
                self.tally.retried += 1
                avoided = gateway
                continue
            except _Refused as error:
                return Verdict.REFUSED, str(error)
            whole = not (reading.gone or reading.error)
            if not case.agrees(reading.texts, whole=whole):
                return Verdict.WRONG, f"from {gateway.name} {broken or ''}, expected {case.texts}"
            if reading.gone:
                return Verdict.ABORTED, ""
            if reading.error:
                return Verdict.FAILED, f"{gateway.name} {broken or ''}: {reading.error}"
            if len(reading.finished) < len(case.texts):
                return Verdict.FAILED, f"{gateway.name}: the stream ended without a finish reason"
            return Verdict.COMPLETED, ""

    async def _choose(self, rng: random.Random, avoided: Gateway | None) -> Gateway:
        """Returns a gateway in rotation. It is not `avoided` if another one is in rotation too."""
        while not (usable := [gateway for gateway in self._gateways if gateway.in_rotation]):
            await asyncio.sleep(RETRY_PAUSE_S)
        return rng.choice([gateway for gateway in usable if gateway is not avoided] or usable)

    async def _read(
        self,
        gateway: Gateway,
        body: dict[str, Any],
        headers: dict[str, str],
        leave_after: int | None,
        reading: _Reading,
    ) -> None:
        """Sends the request to one gateway, and reads the answer into `reading`.

        Raises httpx.TransportError if the connection breaks, and _Refused.
        """
        began, answering = time.monotonic(), False
        self.prompts += 1
        try:
            timeout = httpx.Timeout(None, connect=2.0)
            content = orjson.dumps(body)
            if not body["stream"]:
                with_limit = asyncio.timeout(None if leave_after is None else leave_after / 100)
                try:
                    async with with_limit:
                        response = await gateway.http.post(
                            "/v1/completions", content=content, headers=headers, timeout=timeout
                        )
                except TimeoutError:
                    if not with_limit.expired():
                        raise
                    reading.gone = True
                    return
                if self._answered(gateway, response.status_code, response.text, began, reading):
                    _take(response.json(), reading)
                return
            async with gateway.http.stream(
                "POST", "/v1/completions", content=content, headers=headers, timeout=timeout
            ) as response:
                if response.status_code != 200:
                    await response.aread()
                    self._answered(gateway, response.status_code, response.text, began, reading)
                    return
                done = False
                async for line in response.aiter_lines():
                    if not line.startswith("data: "):
                        continue
                    if done:
                        reading.error = "an event after [DONE]"
                        return
                    if line == "data: [DONE]":
                        done = True
                        continue
                    if leave_after is not None and reading.chunks >= leave_after:
                        reading.gone = True
                        return
                    if not answering:
                        answering = True
                        self.prompts, self.answers = self.prompts - 1, self.answers + 1
                    reading.chunks += 1
                    _take(orjson.loads(line[6:]), reading)
                    if reading.error:
                        return
                if not done:
                    reading.error = "the stream ended without [DONE]"
        finally:
            if answering:
                self.answers -= 1
            else:
                self.prompts -= 1

    def _answered(self, gateway: Gateway, status: int, text: str, began: float, reading: _Reading) -> bool:
        """Returns whether the status is 200. Raises _Refused for 429, and records any other status as an error."""
        if status == 200:
            return True
        if status == 429:
            raise _Refused(text)
        if status == 503:
            self.refusals.append((gateway.name, began, time.monotonic()))
        reading.error = f"{status} {text[:300]}"
        return False


def _take(event: dict[str, Any], reading: _Reading) -> None:
    """Adds a whole answer, or one chunk of a stream, to `reading`."""
    if "error" in event:
        reading.error = f"an error event: {str(event['error'])[:300]}"
        return
    for choice in event["choices"]:
        index = choice["index"]
        if index in reading.finished:
            reading.error = f"choice {index} went on after its end"
            return
        reading.texts[index] += choice["text"]
        if choice["finish_reason"] is not None:
            reading.finished.add(index)
