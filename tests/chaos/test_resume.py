"""kill -9 of a decode pod in the middle of answers: every answer equals that of a run without the kill."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest

from tests.rigs.stack.cluster import Cluster
from tests.rigs.stack.prompts import prompt_of

WAIT_S = 120.0
TOKENS = 48
SCHEMA = {
    "type": "object",
    "properties": {"text": {"type": "string", "minLength": 200}},
    "required": ["text"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "said", "schema": SCHEMA}}
DRAWN = {"temperature": 1.0, "top_p": 0.95}
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "seeded": {**DRAWN, "seed": 1},
    "penalties": {**DRAWN, "seed": 2, "repetition_penalty": 1.2, "frequency_penalty": 0.3, "min_tokens": 40},
    "logprobs": {"temperature": 0, "logprobs": 3},
    "children": {**DRAWN, "seed": 3, "n": 2},
    "grammar": {**DRAWN, "seed": 4, "response_format": FORMAT},
}


@dataclass
class ResumedAnswer:
    """A complete answer, by choice index."""

    texts: dict[int, str] = field(default_factory=lambda: defaultdict(str))
    ends: dict[int, str] = field(default_factory=dict)
    tokens: dict[int, list[str]] = field(default_factory=lambda: defaultdict(list))
    logprobs: list[float] = field(default_factory=list)
    #: Prompt tokens and completion tokens.
    counts: tuple[int, int] = (0, 0)

    def take(self, event: dict[str, Any]) -> None:
        """Adds one chunk of a stream, or a whole answer."""
        for choice in event["choices"]:
            index, scores = choice["index"], choice["logprobs"] or {"tokens": [], "token_logprobs": []}
            self.texts[index] += choice["text"]
            self.tokens[index] += scores["tokens"]
            self.logprobs += scores["token_logprobs"]
            if choice["finish_reason"] is not None:
                assert index not in self.ends
                self.ends[index] = choice["finish_reason"]
        if usage := event.get("usage"):
            self.counts = usage["prompt_tokens"], usage["completion_tokens"]

    def require(self, other: ResumedAnswer) -> None:
        """Asserts that both answers are equal."""
        assert self.texts == other.texts
        assert (self.ends, self.tokens, self.counts) == (other.ends, other.tokens, other.counts)
        assert self.logprobs == pytest.approx(other.logprobs, abs=1e-3)


@pytest.fixture(scope="module", params=["none", "ngram"])
def cluster(
    request: pytest.FixtureRequest, smollm2_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Cluster]:
    """A cluster with two decode pods, with and without speculation."""
    log_dir = tmp_path_factory.mktemp("resume")
    with Cluster(
        smollm2_dir,
        log_dir,
        prefill=1,
        decode=2,
        kv_memory="512M",
        speculation=request.param,
        pod_flags={"max-model-len": "512"},
    ) as running:
        yield running


class PendingRequest:
    """One request. `seen` counts the received chunks of its stream."""

    def __init__(self, cluster: Cluster, client: httpx.AsyncClient, body: dict[str, Any]) -> None:
        self.seen = 0
        self.stream: bool = body["stream"]
        self._client = client
        self._body = {"model": cluster.model, "max_tokens": TOKENS, "ignore_eos": True, **body}

    async def answer(self) -> ResumedAnswer:
        """Sends the request and returns the answer. Fails on an error."""
        answer = ResumedAnswer()
        if not self.stream:
            response = await self._client.post("/completions", json=self._body)
            assert response.status_code == 200, response.text
            answer.take(response.json())
            return answer
        body = {**self._body, "stream_options": {"include_usage": True}}
        async with self._client.stream("POST", "/completions", json=body) as response:
            async for line in response.aiter_lines():
                if line.startswith("data: {"):  # and not a comment
                    event = orjson.loads(line.removeprefix("data: "))
                    assert "error" not in event, event
                    self.seen += 1
                    answer.take(event)
        return answer


def resumed(client: httpx.Client, outcome: str) -> float:
    for line in client.get("/metrics").text.splitlines():
        if line.startswith(f'baton_resumed_sequences_total{{outcome="{outcome}"}}'):
            return float(line.split()[-1])
    return 0.0


@pytest.mark.timeout(600)
async def test_answers_go_on_after_a_kill(cluster: Cluster, smollm2_dir: Path) -> None:
    root = cluster.base_url.removesuffix("/v1")
    motif = prompt_of(smollm2_dir, 12, 5)
    bodies = [
        {"prompt": motif * 3 if name == "greedy" else prompt_of(smollm2_dir, 30 + 17 * i, i), "stream": stream, **kind}
        for i, (name, kind) in enumerate(KINDS.items())
        for stream in (True, False)
    ]
    async with httpx.AsyncClient(base_url=cluster.base_url, timeout=WAIT_S) as client:

        def all_of_them() -> list[PendingRequest]:
            return [PendingRequest(cluster, client, body) for body in bodies]

        expected = await asyncio.gather(*(pending.answer() for pending in all_of_them()))
        assert all(len(answer.texts) == body.get("n", 1) for answer, body in zip(expected, bodies, strict=True))
        again = all_of_them()
        tasks = [asyncio.create_task(pending.answer()) for pending in again]
        streams = [(pending, task) for pending, task in zip(again, tasks, strict=True) if pending.stream]
        deadline = time.monotonic() + WAIT_S
        while any(pending.seen < 3 and not task.done() for pending, task in streams):
            assert time.monotonic() < deadline, "no tokens come"
            await asyncio.sleep(0.01)
        await asyncio.to_thread(cluster.kill, "decode-0")
        for answer, undisturbed in zip(await asyncio.gather(*tasks), expected, strict=True):
            answer.require(undisturbed)
    with httpx.Client(base_url=root) as plain:
        assert resumed(plain, "resumed") >= 1
        assert resumed(plain, "failed") == 0
    await asyncio.to_thread(cluster.check_idle)
    await asyncio.to_thread(cluster.restart, "decode-0")
    await asyncio.to_thread(cluster.check_idle)
