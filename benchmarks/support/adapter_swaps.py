"""Requests for one adapter name while its adapter is exchanged under load."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from pathlib import Path

from common.errors import BatonError
from common.types import SamplingParams, ValidRequest
from engine.engine import Engine
from engine.loop import EngineLoop
from engine.schedule.outputs import StepResult

LIMIT_S = 600.0
AHEAD = 24  # Requests that are under way at once
PROMPT = tuple(range(1, 14))
PARAMS = SamplingParams(temperature=0.0, max_tokens=8)


class SwapRun:
    """Sends requests to an engine on its thread and keeps the answers by request."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.answers: dict[str, list[int]] = {}
        self.errors: list[BatonError] = []
        self._under_way = threading.Semaphore(AHEAD)
        self._loop = EngineLoop(engine, self._on_step)
        self._loop.start()

    def send(self, request_id: str, name: str) -> str:
        """Sends a request to the adapter that has the name now; returns its digest. Waits while AHEAD are under way."""
        if not self._under_way.acquire(timeout=LIMIT_S):
            raise SystemExit(f"no request ended within {LIMIT_S:.0f} s: {self.errors}")
        digest = self.engine.adapters.named(name).digest
        request = ValidRequest(request_id, self.engine.layout.model, PROMPT, PARAMS, adapter=digest)
        self.answers[request_id] = []
        self._loop.add(self.engine.new_sequence(request), self.errors.append)
        return digest

    def finish(self) -> None:
        """Waits for all requests and ends the thread."""
        until = time.monotonic() + LIMIT_S
        while self._loop.call(lambda: self.engine.has_work).result(LIMIT_S) and time.monotonic() < until:
            time.sleep(0.01)
        self._loop.stop(LIMIT_S)

    def _on_step(self, result: StepResult) -> None:
        for output in result.outputs:
            self.answers[output.seq.request_id] += [token.id for token in output.tokens]
            if output.finish_reason is not None:
                self.errors += [] if output.error is None else [output.error]
                self._under_way.release()


def swap_under_load(engine: Engine, adapters: Sequence[Path], requests: int) -> tuple[int, int]:
    """Sends requests for one name while two adapters take turns under it, every 3 to 9 requests.

    A request is right if it has the answer of the adapter that had the name when it was sent, whatever happened then.
    Returns the number of answers that are wrong, and of the exchanges of the name.
    """
    run, swaps = SwapRun(engine), 0
    for index, path in enumerate(adapters):
        engine.add_adapter(path, f"alone-{index}")
    secrets: dict[str, str] = {}
    for index in range(len(adapters)):
        secrets[run.send(f"alone-{index}", f"alone-{index}")] = f"alone-{index}"
    expected: dict[str, str] = {}
    while len(expected) < requests:
        engine.add_adapter(adapters[swaps % len(adapters)], "mine")
        swaps += 1
        for _ in range(min(3 + swaps % 7, requests - len(expected))):
            request_id = f"swap-{len(expected)}"
            expected[request_id] = run.send(request_id, "mine")
    run.finish()
    assert not run.errors, run.errors
    answers = {digest: run.answers[alone] for digest, alone in secrets.items()}
    assert len({tuple(answer) for answer in answers.values()}) == len(adapters), "the adapters answer alike"
    return sum(run.answers[request_id] != answers[digest] for request_id, digest in expected.items()), swaps
