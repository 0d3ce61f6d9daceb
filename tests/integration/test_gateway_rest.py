"""The OpenAI API over fake pods: answers, streams, errors and limits."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from common.errors import InvalidRequest
from gateway.api.openai.requests import parse_chat
from gateway.text.tokenizer import TextTokenizer
from tests.rigs.gateway.gateway_rig import MODEL, Rig, rig, texts
from tests.rigs.pods.fake_pods import FakeCluster, fake_cluster
from tests.rigs.waiting import until


@pytest.fixture(scope="module")
def tokenizer(smollm2_dir: Path) -> TextTokenizer:
    return texts(smollm2_dir)[0]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(smollm2_dir: Path) -> AsyncIterator[Rig]:
    """A gateway for requests that never reach a pod."""
    async with fake_cluster() as c, rig(c, smollm2_dir) as r:
        yield r


def says(cluster: FakeCluster, tokenizer: TextTokenizer, text: str, *, eos: bool = True) -> list[int]:
    """Makes the pods answer this text, then the end-of-sequence token."""
    ids = tokenizer.encode(text, add_special_tokens=False) + ([tokenizer.eos_ids[0]] if eos else [])
    cluster.script = lambda _request: ids
    return ids


async def test_completion_and_stream_give_the_same_text(
    gw: Rig, cluster: FakeCluster, tokenizer: TextTokenizer
) -> None:
    ids = says(cluster, tokenizer, "Grüße, 世界 🎉 and more")
    body = (await gw.complete(max_tokens=50)).json()
    choice = body["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("Grüße, 世界 🎉 and more", "stop")
    assert body["usage"]["completion_tokens"] == len(ids)
    status, events = await gw.stream("completions", max_tokens=50)
    assert status == 200
    assert events[-1] == "[DONE]"
    assert "".join(e["choices"][0]["text"] for e in events[:-1]) == choice["text"]
    assert [e["choices"][0]["finish_reason"] for e in events[:-1]][-1] == "stop"
    assert all("usage" not in e for e in events[:-1])


async def test_chat_stream_begins_with_the_role_and_ends_with_reason_and_usage(
    gw: Rig, cluster: FakeCluster, tokenizer: TextTokenizer
) -> None:
    says(cluster, tokenizer, "Hi there")
    cluster.prefills[0].cached_tokens = 16
    _, events = await gw.stream("chat", stream_options={"include_usage": True})
    deltas = [e["choices"][0]["delta"] for e in events[:-2]]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert "".join(d.get("content", "") for d in deltas) == "Hi there"
    assert events[-3]["choices"][0] == {"index": 0, "delta": {}, "logprobs": None, "finish_reason": "stop"}
    assert all(e["usage"] is None for e in events[:-2])
    assert events[-2]["choices"] == []
    assert events[-2]["usage"]["completion_tokens"] == 3
    assert events[-2]["usage"]["prompt_tokens_details"] == {"cached_tokens": 16}


async def test_continuous_usage_counts_up(gw: Rig) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    _, events = await gw.stream("completions", max_tokens=5, stream_options=options)
    counts = [e["usage"]["completion_tokens"] for e in events[:-1]]
    assert counts == sorted(counts)
    assert counts[-1] == 5


async def test_chat_prompt_is_the_rendered_template(gw: Rig, cluster: FakeCluster, tokenizer: TextTokenizer) -> None:
    parts = [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]
    response = await gw.chat(
        max_completion_tokens=1,
        messages=[{"role": "developer", "content": "Be brief."}, {"role": "user", "content": parts}],
    )
    assert response.status_code == 200
    text = tokenizer.raw.decode(list(cluster.prefills[0].seen.prefilled[0].prompt_ids), skip_special_tokens=False)
    assert text == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHel\nlo<|im_end|>\n<|im_start|>assistant\n"
    )


async def test_defaults_and_all_sampling_parameters_reach_the_pods(gw: Rig, cluster: FakeCluster) -> None:
    await gw.complete()
    await gw.complete(
        max_tokens=7,
        temperature=0,
        top_p=0.5,
        top_k=9,
        min_p=0.25,
        repetition_penalty=1.5,
        presence_penalty=-1,
        frequency_penalty=2,
        logit_bias={"5": -100, "7": 1.5},
        seed=-1,
        stop_token_ids=[11],
        ignore_eos=True,
        min_tokens=2,
        cache_salt="tenant",
        priority=3,
        user="u",
        unknown_field={"a": 1},
        logprobs=None,
        stop=None,
        stream=False,
        stream_options=None,
        n=1,
        best_of=1,
        echo=False,
        suffix=None,
    )
    first, second = (r for r in cluster.decodes[0].seen.reserved)
    assert first.sampling.max_tokens == 16
    assert (first.sampling.temperature, first.sampling.top_p) == (1.0, 1.0)
    assert first.sampling.stop_token_ids == gw.gateway.tokenizer.eos_ids
    assert first.sampling.seed < 2**63
    s = second.sampling
    assert (s.max_tokens, s.temperature, s.top_p, s.top_k, s.min_p) == (7, 0.0, 0.5, 9, 0.25)
    assert (s.repetition_penalty, s.presence_penalty, s.frequency_penalty) == (1.5, -1.0, 2.0)
    assert s.logit_bias == ((5, -100.0), (7, 1.5))
    assert (s.seed, s.stop_token_ids, s.min_tokens, s.logprobs) == (2**64 - 1, (11,), 2, None)
    assert (second.cache_salt, second.priority) == ("tenant", 3)
    assert cluster.prefills[0].seen.prefilled[1] == second


async def test_chat_without_max_tokens_may_use_the_rest_of_the_context(
    gw: Rig, cluster: FakeCluster, tokenizer: TextTokenizer
) -> None:
    says(cluster, tokenizer, "ok")
    await gw.chat(max_completion_tokens=None)
    request = cluster.decodes[0].seen.reserved[0]
    assert request.prompt_len + request.sampling.max_tokens == 2048


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("text", "stop", "expected"),
    [
        ("one two three four", ["three"], "one two "),
        ("one two three four", "o th", "one tw"),
        ("one two three four", ["four", "two", "nothing"], "one "),
        ("one two", ["one"], ""),
        ("one two", ["two but not this"], "one two"),
        ("a 世界 b", ["界"], "a 世"),
    ],
)
async def test_stop_strings(
    gw: Rig, cluster: FakeCluster, tokenizer: TextTokenizer, text: str, stop: Any, expected: str, stream: bool
) -> None:
    says(cluster, tokenizer, text)
    if stream:
        _, events = await gw.stream("completions", max_tokens=30, stop=stop)
        got = "".join(e["choices"][0]["text"] for e in events[:-1])
        reason = events[-2]["choices"][0]["finish_reason"]
    else:
        choice = (await gw.complete(max_tokens=30, stop=stop)).json()["choices"][0]
        got, reason = choice["text"], choice["finish_reason"]
    assert (got, reason) == (expected, "stop")


async def test_a_stop_string_ends_the_sequence_on_the_pods(
    gw: Rig, cluster: FakeCluster, tokenizer: TextTokenizer
) -> None:
    says(cluster, tokenizer, "one two three four five six")
    cluster.decodes[0].faults.stall_after = 3
    body = (await gw.complete(max_tokens=30, stop="three")).json()
    assert body["choices"][0]["text"] == "one two "
    await gw.settled()
    assert len(cluster.decodes[0].seen.decode_aborts) == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_max_tokens_one_is_answered_by_prefill_alone(gw: Rig, cluster: FakeCluster, stream: bool) -> None:
    if stream:
        _, events = await gw.stream("completions", max_tokens=1)
        assert events[-2]["choices"][0]["finish_reason"] == "length"
    else:
        body = (await gw.complete(max_tokens=1)).json()
        assert body["choices"][0]["finish_reason"] == "length"
        assert body["usage"]["completion_tokens"] == 1
    await gw.settled()
    assert cluster.prefills[0].seen.prefill_cancels == []
    assert len(cluster.prefills[0].seen.hand_offs) == 1
    assert cluster.decodes[0].seen.decode_aborts == []


async def test_several_prompts_are_choices_of_one_answer(gw: Rig, cluster: FakeCluster) -> None:
    single = [(await gw.complete(prompt=p)).json()["choices"][0]["text"] for p in ("a", "bb", "ccc")]
    body = (await gw.complete(prompt=["a", "bb", "ccc"])).json()
    assert [c["text"] for c in body["choices"]] == single
    assert [c["index"] for c in body["choices"]] == [0, 1, 2]
    assert body["usage"]["completion_tokens"] == 48
    _, events = await gw.stream("completions", prompt=["a", "bb", "ccc"])
    texts = ["", "", ""]
    for event in events[:-1]:
        for choice in event["choices"]:
            texts[choice["index"]] += choice["text"]
    assert texts == single
    ids = (await gw.complete(prompt=[[1, 2, 3], [4]])).json()
    assert len(ids["choices"]) == 2
    one = (await gw.complete(prompt=[1, 2, 3])).json()
    assert one["choices"][0]["text"] == ids["choices"][0]["text"]


async def test_completion_logprobs(gw: Rig) -> None:
    choice = (await gw.complete(max_tokens=3, logprobs=2)).json()["choices"][0]
    lp = choice["logprobs"]
    assert "".join(lp["tokens"]) == choice["text"]
    assert lp["token_logprobs"] == [-0.5, -1.5, -2.5]
    assert lp["text_offset"] == [0, 1, 2]
    assert all(len(top) == 2 for top in lp["top_logprobs"])
    assert (await gw.complete(max_tokens=2, logprobs=0)).json()["choices"][0]["logprobs"]["token_logprobs"] == [
        -0.5,
        -1.5,
    ]


@pytest.mark.parametrize("stream", [False, True])
async def test_chat_logprobs_join_to_the_bytes_of_the_answer(
    gw: Rig, cluster: FakeCluster, tokenizer: TextTokenizer, stream: bool
) -> None:
    says(cluster, tokenizer, "né 世", eos=False)
    fields = {"max_tokens": len(cluster.script(None)), "logprobs": True, "top_logprobs": 2}  # type: ignore[arg-type]
    if stream:
        _, events = await gw.stream("chat", **fields)
        entries = [x for e in events[:-1] for c in e["choices"] if c["logprobs"] for x in c["logprobs"]["content"]]
    else:
        entries = (await gw.chat(**fields)).json()["choices"][0]["logprobs"]["content"]
    assert bytes(b for e in entries for b in e["bytes"]).decode() == "né 世"
    assert [e["logprob"] for e in entries] == [-0.5 - i for i in range(len(entries))]
    assert all(len(e["top_logprobs"]) == 2 for e in entries)


async def test_logprobs_of_a_stop_string_are_not_shown(gw: Rig, cluster: FakeCluster, tokenizer: TextTokenizer) -> None:
    says(cluster, tokenizer, "one two three four")
    choice = (await gw.complete(max_tokens=30, stop=" three", logprobs=1)).json()["choices"][0]
    assert choice["text"] == "one two"
    assert "".join(choice["logprobs"]["tokens"]) == "one two"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": 5}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": ["a", 1]}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [49152]}, "prompt"),
        ({"prompt": [1] * 2048}, "prompt"),
        ({"prompt": "a " * 5000}, "prompt"),
        ({"prompt": "a" * 1_000_000}, "prompt"),
        ({"prompt": [1] * 2040, "max_tokens": 9}, "max_tokens"),
        ({"model": None}, "model"),
        ({"model": 3}, "model"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_tokens": "5"}, "max_tokens"),
        ({"max_tokens": 2**70}, "max_tokens"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": 2.1}, "temperature"),
        ({"temperature": "1"}, "temperature"),
        ({"temperature": False}, "temperature"),
        ({"top_p": -0.01}, "top_p"),
        ({"top_p": 1.01}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"min_p": -1}, "min_p"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"frequency_penalty": -3}, "frequency_penalty"),
        ({"seed": 1.5}, "seed"),
        ({"seed": 2**63 + 193}, "seed"),
        ({"n": 0}, "n"),
        ({"n": 129}, "n"),
        ({"n": -1}, "n"),
        ({"n": "1"}, "n"),
        ({"best_of": -1}, "best_of"),
        ({"echo": 1}, "echo"),
        ({"suffix": "x"}, "suffix"),
        ({"guided_json": 1}, "guided_json"),
        ({"logprobs": -1}, "logprobs"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"stop": 5}, "stop"),
        ({"stop": [5]}, "stop"),
        ({"stop": ""}, "stop"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"stop_token_ids": ["x"]}, "stop_token_ids"),
        ({"stop_token_ids": [99999]}, "stop_token_ids"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"1": 101}}, "logit_bias.1"),
        ({"logit_bias": {"60000": 1}}, "logit_bias"),
        ({"logit_bias": []}, "logit_bias"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {}}, "stream_options"),
        ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
        ({"min_tokens": 20}, "min_tokens"),
        ({"cache_salt": 1}, "cache_salt"),
        ({"ignore_eos": 1}, "ignore_eos"),
        ({"priority": 2**31}, "priority"),
    ],
)
@pytest.mark.asyncio(loop_scope="module")
async def test_bad_completion_fields_are_named(shared: Rig, fields: dict[str, Any], param: str) -> None:
    response = await shared.complete(**fields)
    error = response.json()["error"]
    assert response.status_code == 400, error
    assert error["param"] == param
    assert error["type"] == "invalid_request_error"
    assert set(error) == {"message", "type", "param", "code"}
    named = param in error["message"] or error["code"] == "context_length_exceeded"  # its words are OpenAI's
    assert named or param in ("prompt", "model")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"continue_final_message": True}, "continue_final_message must be false"),
        ({"modalities": ["audio"]}, 'modalities must be ["text"]'),
        ({"audio": {}}, "audio is not supported"),
    ],
)
def test_an_unsupported_value_names_the_supported_ones(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest) as error:
        parse_chat({"model": MODEL, "messages": [], **fields})
    assert error.value.message == message


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": None}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"role": "user", "content": "x"}] * 16385}, "messages"),
        ({"messages": ["hi"]}, "messages[0]"),
        ({"messages": [{"content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": 1}]}]}, "messages[0].content[0].text"),
        ({"messages": [{"role": "assistant", "tool_calls": 1}]}, "messages[0].tool_calls"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"response_format": "json"}, "response_format"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"modalities": ["audio"]}, "modalities"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": 3}, "logprobs"),
        ({"n": 129}, "n"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"max_completion_tokens": 4000}, "max_completion_tokens"),
    ],
)
@pytest.mark.asyncio(loop_scope="module")
async def test_bad_chat_fields_are_named(shared: Rig, fields: dict[str, Any], param: str) -> None:
    response = await shared.chat(**fields)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param


async def test_unknown_model_paths_and_methods(gw: Rig) -> None:
    response = await gw.complete(model="other")
    assert (response.status_code, response.json()["error"]["code"]) == (404, "model_not_found")
    assert (await gw.http.get("/v1/models/other")).status_code == 404
    assert (await gw.http.get(f"/v1/models/{MODEL}")).json()["id"] == MODEL
    assert [m["id"] for m in (await gw.http.get("/v1/models")).json()["data"]] == [MODEL]
    assert "/v1/models" in response.json()["error"]["message"]
    strays = [("GET", "/v1/nothing"), ("GET", "/v1/completions"), ("POST", "/v1/completions/"), ("GET", "/health/")]
    for method, path in strays:
        stray = await gw.http.request(method, path)
        message = stray.json()["error"]["message"]
        assert f"'{path}'" in message
        if stray.status_code == 405:
            assert (stray.headers["allow"], "POST" in message, method in message) == ("POST", True, True)
        else:
            assert (stray.status_code, "/openapi.json" in message) == (404, True)


@pytest.mark.parametrize(
    ("fields", "param", "said"),
    [
        (
            {"chat_template_kwargs": {"add_generation_prompt": False}},
            "chat_template_kwargs.add_generation_prompt",
            "true",
        ),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages", "not supported"),
        ({"tools": [{"function": {"name": "f"}}]}, "tools[0].type", "is missing"),
        ({"tools": [{"type": {}, "function": {"name": "f"}}]}, "tools[0].type", "of type object"),
        ({"structured_outputs": {"choice": ["a", 5]}}, "structured_outputs.choice", "not integer"),
    ],
)
@pytest.mark.asyncio(loop_scope="module")
async def test_an_error_names_the_field_and_the_expected_value(
    shared: Rig, fields: dict[str, Any], param: str, said: str
) -> None:
    response = await shared.chat(**fields)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, param)
    assert said in error["message"]
    assert "NoneType" not in error["message"]


async def test_request_ids_are_ours_and_the_clients_is_echoed(gw: Rig, cluster: FakeCluster) -> None:
    response = await gw.http.post(
        "/v1/completions", json={"model": MODEL, "prompt": "x"}, headers={"x-request-id": "client-7"}
    )
    assert response.headers["x-request-id"] == "client-7"
    assert "client-7" not in cluster.decodes[0].seen.reserved[0].request_id
    plain = await gw.complete()
    assert plain.json()["id"] == f"cmpl-{plain.headers['x-request-id']}"
    for name in ("client-7", plain.json()["id"]):
        timeline = (await gw.http.get(f"/debug/requests/{name}")).json()
        events = [e["event"] for e in timeline["events"]]
        assert [e for e in events if e in ("tokenized", "reserved", "prefill", "chunk", "first_token")] == [
            "tokenized",
            "reserved",
            "prefill",
            "chunk",
            "first_token",
        ]
        assert {"decode", "finished", "ended"} <= set(events)
        assert [e["t"] for e in timeline["events"]] == sorted(e["t"] for e in timeline["events"])
        assert timeline["outcome"] == "ok"
    assert (await gw.http.get("/debug/requests/none")).status_code == 404


async def test_client_timeouts(gw: Rig, cluster: FakeCluster) -> None:
    cluster.prefills[0].faults.prefill_delay_s = 30
    body = {"model": MODEL, "prompt": "x"}
    response = await gw.http.post("/v1/completions", json=body, headers={"x-request-timeout": "3.0"})
    assert response.status_code == 504
    assert cluster.decodes[0].seen.timeouts[0] < 3.05
    response = await gw.http.post("/v1/completions", json=body, headers={"x-request-timeout": "1e-9"})
    assert (response.status_code, response.json()["error"]["message"]) == (504, "the request's time is over")
    response = await gw.http.post("/v1/completions", json=body, headers={"x-request-timeout": "nan"})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "x-request-timeout")


async def test_more_than_max_inflight_gets_429_at_once(cluster: FakeCluster, smollm2_dir: Path) -> None:
    async with rig(cluster, smollm2_dir, max_inflight=2) as gw:
        refusal = asyncio.Event()
        cluster.prefills[0].faults.before_prefill = lambda _request: refusal.wait()
        running = [asyncio.create_task(gw.complete()) for _ in range(2)]
        await until(lambda: len(cluster.prefills[0].seen.prefilled) == 2)
        refused = await gw.complete()
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
        assert refused.json()["error"]["type"] == "rate_limit_error"
        refusal.set()
        assert [r.status_code for r in await asyncio.gather(*running)] == [200, 200]
        assert (await gw.complete()).status_code == 200


async def test_requests_of_one_session_go_to_the_same_pods(smollm2_dir: Path) -> None:
    async with fake_cluster(prefill=3, decode=3) as cluster, rig(cluster, smollm2_dir) as gw:
        for i in range(6):
            body = {"model": MODEL, "prompt": f"number {i}", "max_tokens": 2}
            answer = await gw.http.post("/v1/completions", json=body, headers={"x-session-affinity": "me"})
            assert answer.status_code == 200
        assert [len(pod.seen.prefilled) for pod in cluster.prefills if pod.seen.prefilled] == [6]
        assert [len(pod.seen.reserved) for pod in cluster.decodes if pod.seen.reserved] == [6]
        long = {"x-session-affinity": "x" * 5000}
        assert (await gw.http.post("/v1/completions", json=body, headers=long)).status_code == 200
