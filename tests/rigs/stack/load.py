"""Clients that load a cluster and count how each request ended: an answer, an error, or a hang."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import openai

from tests.rigs.stack.prompts import prompt_of

DEADLINE_S = 60.0


@dataclass(slots=True)
class Outcomes:
    """Counts of ended requests."""

    #: Different texts by prompt.
    answers: dict[int, set[str]] = field(default_factory=dict)
    #: By kind.
    errors: Counter[str] = field(default_factory=Counter)
    aborted: int = 0
    #: Requests without an end before their deadline.
    hangs: int = 0
    done: int = 0


class StackLoad:
    """`clients` loops over a fixed set of prompts with mixed lengths. Aborts a share of the streams half-way."""

    def __init__(
        self, base_url: str, model: str, model_dir: Path, *, clients: int, abort_share: float = 0.0, seed: int = 0
    ) -> None:
        self.outcomes = Outcomes()
        self._client = openai.AsyncOpenAI(base_url=base_url, api_key="none", max_retries=0, timeout=DEADLINE_S + 20)
        self._model = model
        self._rng = random.Random(seed)
        lengths = (1, 15, 16, 17, 40, 100, 150, 300)
        self._prompts = [prompt_of(model_dir, n, 1000 + n) for n in lengths]
        self._abort_share = abort_share
        self._clients = clients
        self._stop = False

    @property
    def prompts(self) -> int:
        """Number of different prompts."""
        return len(self._prompts)

    async def run(self, until: Callable[[], bool]) -> Outcomes:
        """Sends requests until `until()` is true. Requests in flight then end or count as a hang at their deadline."""
        self._stop = False
        workers = [asyncio.create_task(self._work()) for _ in range(self._clients)]
        while not until():
            await asyncio.sleep(0.1)
        self._stop = True
        await asyncio.gather(*workers)
        return self.outcomes

    async def close(self) -> None:
        await self._client.close()

    async def _work(self) -> None:
        while not self._stop:
            await self.one(self._rng.randrange(len(self._prompts)), abort=self._rng.random() < self._abort_share)

    async def each(self) -> list[str | None]:
        """Sends every prompt once, all at the same time."""
        return await asyncio.gather(*(self.one(i) for i in range(len(self._prompts))))

    async def one(self, which: int, *, abort: bool = False, max_tokens: int = 10) -> str | None:
        """Sends one streamed greedy request. Returns its text, or None if it failed or was aborted."""
        begin = time.monotonic()
        try:
            text = await self._stream(which, max_tokens, abort)
        except openai.APITimeoutError:
            self.outcomes.hangs += 1
            return None
        except openai.APIStatusError as e:
            if e.status_code not in (429, 503, 504):
                raise
            self.outcomes.errors[f"{e.status_code}"] += 1
            await asyncio.sleep(0.2)
            return None
        except openai.APIConnectionError as e:
            self.outcomes.errors[type(e).__name__] += 1
            await asyncio.sleep(0.2)
            return None
        except openai.APIError as e:  # an error event inside the stream
            self.outcomes.errors[f"in stream: {e.type}"] += 1
            return None
        finally:
            self.outcomes.done += 1
            self.outcomes.hangs += time.monotonic() - begin > DEADLINE_S + 10
        if text is None:
            self.outcomes.aborted += 1
            return None
        self.outcomes.answers.setdefault(which, set()).add(text)
        return text

    async def _stream(self, which: int, max_tokens: int, abort: bool) -> str | None:
        stream = await self._client.completions.create(
            model=self._model,
            prompt=self._prompts[which],
            max_tokens=max_tokens,
            temperature=0,
            stream=True,
            extra_headers={"x-request-timeout": str(DEADLINE_S)},
        )
        leave_after = self._rng.randrange(max_tokens) if abort else None
        text, finished = "", False
        async with stream:
            seen = 0
            async for chunk in stream:
                if leave_after is not None and seen >= leave_after:
                    return None
                seen += 1
                for choice in chunk.choices:
                    text += choice.text
                    finished = finished or choice.finish_reason is not None
        assert finished, "a stream ended without a finish reason or an error"
        return text
