"""Drives an engine on its thread, as a pod does, and records when the results of each step were on the host."""

from __future__ import annotations

import itertools
import json
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from typing import Any, TypeVar

from benchmarks.support.report import pairs
from common.errors import BatonError
from common.types import SamplingParams, ValidRequest
from engine.config import EngineConfig
from engine.engine import Engine
from engine.loop import EngineLoop
from engine.schedule.outputs import StepResult

T = TypeVar("T")
WAIT_S = 240.0
Condition = Callable[[StepResult], bool]
Steps = list[tuple[float, StepResult]]  # (time at which the results were on the host, results) of each step.


class Driver:
    """Runs one batch of requests at a time: with `run`, or with `begin`, `wait` any number of times, and `end`."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.loop = EngineLoop(engine, self._on_step)
        self.seen: Steps = []  # Steps since the last begin().
        self.adapters: Sequence[str] = ("",)  # Digests of the adapters of the requests, in turn.
        self._ids = itertools.count()
        self._names: list[str] = []
        self._left = 0
        self._enough: Condition | None = None
        self._reached = threading.Event()
        self._idle = threading.Event()
        self._errors: list[BatonError] = []

    def _on_step(self, result: StepResult) -> None:
        self.seen.append((time.perf_counter(), result))
        ended = [output for output in result.outputs if output.finish_reason is not None]
        self._left -= len(ended)
        self._errors += [output.error for output in ended if output.error is not None]
        if not self._left:
            self._idle.set()
        if self._enough is not None and self._enough(result):
            self._reached.set()

    def _refused(self, error: BatonError) -> None:
        self._errors.append(error)
        self._reached.set()
        self._idle.set()

    def run(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sequence[SamplingParams],
        *,
        hand_off: bool = False,
        **fields: Any,
    ) -> Steps:
        """Runs requests to their ends. Returns the steps, with times since the first request was added.

        `fields` are fields of all requests.
        """
        began = self.begin(prompts, sampling, hand_off=hand_off, **fields)
        self._wait(self._idle)
        seen = [(at - began, result) for at, result in self.seen]
        self.end()
        return seen

    def begin(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sequence[SamplingParams],
        *,
        hand_off: bool = False,
        **fields: Any,
    ) -> float:
        """Adds all requests. Returns the time before the first one. `fields` are fields of all requests."""
        self.seen.clear()
        self._idle.clear()
        self._left = sum(params.n for params in sampling)
        self._names = [f"bench-{next(self._ids)}" for _ in prompts]
        began = time.perf_counter()
        adapters = itertools.cycle(self.adapters)
        for name, prompt, params in zip(self._names, prompts, sampling, strict=True):
            more = {"adapter": next(adapters)} | fields
            request = ValidRequest(name, self.engine.layout.model, tuple(prompt), params, **more)
            self.loop.add(self.engine.new_sequence(request, hand_off=hand_off), self._refused)
        return began

    def add(self, prompt: Sequence[int], params: SamplingParams) -> str:
        """Adds a request to those of `begin`. Returns its id."""
        name = f"bench-{next(self._ids)}"
        self._names.append(name)
        request = ValidRequest(name, self.engine.layout.model, tuple(prompt), params)
        seq = self.engine.new_sequence(request)

        def add() -> None:
            self._left += 1
            self.engine.add(seq)

        self.call(add)
        return name

    @property
    def names(self) -> tuple[str, ...]:
        """The ids of the requests since `begin`."""
        return tuple(self._names)

    def watch(self, on_step: Callable[[StepResult], None]) -> None:
        """Calls on_step after each step until all requests have ended."""
        self._enough = lambda result: bool(on_step(result))
        self._wait(self._idle)
        self._enough = None
        self.end()

    def wait(self, enough: Condition) -> None:
        """Waits until a step meets the condition, which all later steps must meet too."""
        self._reached.clear()
        self._enough = enough
        self._wait(self._reached)
        self._enough = None

    def end(self) -> None:
        """Aborts running requests and waits for the step that is on the device."""
        for name in self._names:
            self.loop.abort(name)
        self._wait(self._idle)
        until = time.monotonic() + WAIT_S
        while self.call(lambda: self.engine.has_work):
            if time.monotonic() > until:
                raise SystemExit(f"the engine still has work {WAIT_S:.0f} s after its requests ended")
            time.sleep(0.001)

    def call(self, work: Callable[[], T]) -> T:
        """Returns the result of `work` on the engine's thread."""
        return self.loop.call(work).result(WAIT_S)

    def _wait(self, event: threading.Event) -> None:
        if not event.wait(WAIT_S):
            raise SystemExit(f"the requests did not reach the awaited state within {WAIT_S:.0f} s")
        if self._errors:
            raise SystemExit(f"the engine failed: {self._errors[0]}")


@contextmanager
def running(config: EngineConfig) -> Iterator[Driver]:
    driver = Driver(Engine(config))
    driver.loop.start()
    try:
        driver.call(driver.engine.warm_up)
        driver.run([[0, 0]], [SamplingParams(temperature=0.0, max_tokens=2)])  # a pod does so before it is ready
        yield driver
    finally:
        driver.loop.stop(WAIT_S)


class Prompts:
    """Unique random prompts."""

    def __init__(self, vocab_size: int) -> None:
        self.rng, self._vocab_size = random.Random(0), vocab_size

    def make(self, count: int, length: int) -> list[list[int]]:
        return [self.rng.choices(range(self._vocab_size), k=length) for _ in range(count)]


def engine_settings(texts: Sequence[str]) -> dict[str, Any]:
    """Parses fields of EngineConfig from NAME=VALUE. The engine checks the types of the values."""
    known = {f.name for f in fields(EngineConfig)}
    settings: dict[str, Any] = {}
    for name, value in pairs(texts).items():
        if name not in known:
            raise SystemExit(f"--engine {name} is not a field of EngineConfig; fields are {', '.join(sorted(known))}")
        try:
            settings[name] = json.loads(value)
        except ValueError:
            settings[name] = value
    return settings
