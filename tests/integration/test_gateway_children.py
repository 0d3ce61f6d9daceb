"""Several samples per prompt with fake pods: order, usage, ends, aborts and retries, over REST and gRPC."""

from __future__ import annotations

import asyncio
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import grpc
import pytest

from common.errors import InvalidRequest, Unavailable
from common.pb import inference_pb2, inference_pb2_grpc
from common.types import ValidRequest
from gateway.text.tokenizer import TextTokenizer
from tests.rigs.gateway.gateway_rig import MODEL, Rig, rig, texts
from tests.rigs.pods.fake_pods import FakeCluster
from tests.rigs.waiting import until


@pytest.fixture(scope="module")
def tokenizer(smollm2_dir: Path) -> TextTokenizer:
    return texts(smollm2_dir)[0]


def letters(tokenizer: TextTokenizer, cluster: FakeCluster, child: int, count: int) -> str:
    """Returns the text of one sample: the script of the fake pods, shifted."""
    [request] = cluster.decodes[0].seen.reserved[-1:]
    return tokenizer.decode([token + child for token in cluster.script(request)[:count]])


async def test_n_choices_cost_one_prefill(gw: Rig, cluster: FakeCluster, tokenizer: TextTokenizer) -> None:
    cluster.prefills[0].cached_tokens = 16
    body = (await gw.complete(n=3, max_tokens=6)).json()
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2]
    assert [c["text"] for c in body["choices"]] == [letters(tokenizer, cluster, c, 6) for c in range(3)]
    one = (await gw.complete(max_tokens=6)).json()
    assert body["usage"]["prompt_tokens"] == one["usage"]["prompt_tokens"]
    assert body["usage"]["prompt_tokens_details"] == {"cached_tokens": 16}
    assert body["usage"]["completion_tokens"] == 18
    assert [len(pod.seen.prefilled) for pod in cluster.prefills] == [2]
    chat = (await gw.chat(n=2, max_tokens=4)).json()
    assert [choice["message"]["content"] for choice in chat["choices"]] == [
        letters(tokenizer, cluster, c, 4) for c in range(2)
    ]
    many = (await gw.complete(prompt=["a", "b"], n=2, max_tokens=3)).json()
    assert [choice["index"] for choice in many["choices"]] == [0, 1, 2, 3]
    assert many["usage"]["completion_tokens"] == 12


async def test_stream_events_carry_the_index_of_their_choice(
    gw: Rig, cluster: FakeCluster, tokenizer: TextTokenizer
) -> None:
    for faults in ({}, {"reorder": True}, {"duplicate": True}, {"decode_before_first": True}):
        for pod in (*cluster.prefills, *cluster.decodes):
            for name, value in faults.items():
                setattr(pod.faults, name, value)
        for path in ("completions", "chat"):
            status, events = await gw.stream(path, n=3, max_tokens=7, stream_options={"include_usage": True})
            assert (status, events[-1]) == (200, "[DONE]")
            said: dict[int, str] = defaultdict(str)
            ends: list[int] = []
            for event in events[:-2]:
                [choice] = event["choices"]
                assert choice["index"] not in ends
                said[choice["index"]] += choice["text"] if path == "completions" else choice["delta"].get("content", "")
                if choice["finish_reason"]:
                    ends.append(choice["index"])
            assert dict(said) == {c: letters(tokenizer, cluster, c, 7) for c in range(3)}
            assert sorted(ends) == [0, 1, 2]
            assert events[-2]["usage"]["completion_tokens"] == 21


async def test_a_stop_string_ends_only_its_sample(gw: Rig, cluster: FakeCluster, tokenizer: TextTokenizer) -> None:
    cluster.decodes[0].faults.token_delay_s = 0.02
    await gw.complete(n=1, max_tokens=20)
    whole = [letters(tokenizer, cluster, child, 20) for child in range(3)]
    stop = next(whole[2][i : i + 3] for i in range(2, 5) if whole[2][i : i + 3] not in whole[0] + "|" + whole[1])
    body = (await gw.complete(n=3, max_tokens=20, stop=stop)).json()
    assert [c["finish_reason"] for c in body["choices"]] == ["length", "length", "stop"]
    assert body["choices"][0]["text"] == whole[0]
    assert body["choices"][2]["text"] == whole[2][: whole[2].index(stop)]
    await until(lambda: [child for _, child in cluster.decodes[0].seen.child_aborts] == [2])
    assert not cluster.decodes[0].seen.decode_aborts


async def test_a_client_that_disconnects_ends_all_samples(gw: Rig, cluster: FakeCluster) -> None:
    cluster.decodes[0].faults.stall_after = 2
    body = {"model": MODEL, "prompt": "Hello", "n": 4, "max_tokens": 20, "stream": True}
    async with gw.http.stream("POST", "/v1/completions", json=body) as response:
        lines = response.aiter_lines()
        for _ in range(6):
            await anext(lines)
    await until(lambda: len(cluster.decodes[0].seen.decode_aborts) == 1)


async def test_after_a_failed_attempt_each_sample_continues(
    gw: Rig, cluster: FakeCluster, tokenizer: TextTokenizer
) -> None:
    """The attempt fails after the client has the first token of each sample."""
    faults, has_first_tokens = cluster.decodes[0].faults, asyncio.Event()
    faults.decode_error, faults.decode_errors = Unavailable("gone"), 3

    async def wait_for_first_tokens(_: ValidRequest) -> None:
        await has_first_tokens.wait()

    faults.before_decode_error = wait_for_first_tokens
    said: dict[int, str] = defaultdict(str)
    body = {"model": MODEL, "prompt": "Hello", "n": 3, "max_tokens": 5, "stream": True}
    async with gw.http.stream("POST", "/v1/completions", json=body) as response:
        assert response.status_code == 200
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                for choice in json.loads(line.removeprefix("data: "))["choices"]:
                    said[choice["index"]] += choice["text"]
                if len(said) == 3:
                    has_first_tokens.set()
    first, *continued = (r.child for r in cluster.decodes[0].seen.reserved)
    assert first == 0
    assert sorted(continued) == [0, 1, 2]  # each sample continues on its own, in any order
    assert dict(said) == {c: letters(tokenizer, cluster, c, 5) for c in range(3)}


async def test_best_of_answers_the_likeliest(gw: Rig, cluster: FakeCluster, tokenizer: TextTokenizer) -> None:
    body = (await gw.complete(n=2, best_of=4, max_tokens=5)).json()
    assert [c["text"] for c in body["choices"]] == [letters(tokenizer, cluster, c, 5) for c in (3, 2)]
    assert [c["index"] for c in body["choices"]] == [0, 1]
    assert all(c["logprobs"] is None for c in body["choices"])
    assert body["usage"]["completion_tokens"] == 20
    shown = (await gw.complete(n=1, best_of=3, logprobs=1, max_tokens=5)).json()["choices"][0]
    assert shown["text"] == letters(tokenizer, cluster, 2, 5)
    assert len(shown["logprobs"]["token_logprobs"]) == 5


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"n": 129}, "n"),
        ({"n": 0}, "n"),
        ({"n": "2"}, "n"),
        ({"best_of": 129}, "best_of"),
        ({"n": 3, "best_of": 2}, "best_of"),
        ({"n": 1, "best_of": 2, "stream": True}, "best_of"),
        ({"n": 100, "prompt": ["a"] * 11}, "n"),
    ],
)
async def test_invalid_values_are_refused_by_name(gw: Rig, fields: dict[str, Any], field: str) -> None:
    response = await gw.complete(**fields)
    assert (response.status_code, response.json()["error"]["param"]) == (400, field)


async def test_a_pod_of_an_older_version_refuses_by_name(gw: Rig, cluster: FakeCluster) -> None:
    for pod, name in ((cluster.decodes[0], "reserve_error"), (cluster.prefills[0], "prefill_error")):
        setattr(pod.faults, name, InvalidRequest("n is 3, outside [1, 1]", field="n"))
        response = await gw.complete(n=3)
        assert (response.status_code, response.json()["error"]["param"]) == (400, "n")
        setattr(pod.faults, name, None)


async def test_grpc_messages_carry_the_index_of_their_choice(
    cluster: FakeCluster, smollm2_dir: Path, tokenizer: TextTokenizer, unused_tcp_port: int
) -> None:
    async with rig(cluster, smollm2_dir, grpc_port=unused_tcp_port) as gw:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{gw.server.grpc_port}") as channel:
            stub: inference_pb2_grpc.InferenceAsyncStub = inference_pb2_grpc.InferenceStub(channel)
            request = inference_pb2.GenerateRequest(model=MODEL, text="Hello", max_tokens=6, n=3)
            parts = [part async for part in stub.Generate(request, timeout=30)]
            for child in range(3):
                mine = [part for part in parts if part.index == child]
                assert "".join(part.text for part in mine) == letters(tokenizer, cluster, child, 6)
                assert [t.index for part in mine for t in part.tokens] == list(range(6))
                assert {t.child for part in mine for t in part.tokens} == {child}
                assert [part.finish_reason for part in mine if part.finish_reason] == [mine[-1].finish_reason]
            assert [part.HasField("usage") for part in parts] == [False] * (len(parts) - 1) + [True]
            assert parts[-1].usage.completion_tokens == 18
            chat = inference_pb2.ChatPrompt(messages=[inference_pb2.ChatMessage(role="user", content="Hi")])
            for refused in (
                inference_pb2.GenerateRequest(model=MODEL, chat=chat, best_of=2),
                inference_pb2.GenerateRequest(model=MODEL, text="Hello", n=129),
            ):
                with pytest.raises(grpc.aio.AioRpcError) as error:
                    await stub.Generate(refused, timeout=30).read()
                assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            chosen = inference_pb2.GenerateRequest(model=MODEL, text="Hello", max_tokens=4, n=1, best_of=3)
            [part] = [part async for part in stub.Generate(chosen, timeout=30)]
            assert part.text == letters(tokenizer, cluster, 2, 4)
            assert part.usage.completion_tokens == 12
        await gw.settled()
