"""A parameter that several endpoints share has the same effect on each: the pods get equal requests."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from common.types import ValidRequest
from tests.rigs.gateway.gateway_rig import MODEL, Rig, rig
from tests.rigs.pods.fake_pods import FakeCluster, fake_cluster
from tests.rigs.pods.scripted import counting

HELLO = [{"role": "user", "content": "Hello"}]
FUNCTION = {"name": "pick", "parameters": {"type": "object", "properties": {}, "additionalProperties": False}}
TOOLS = [{"type": "function", "function": FUNCTION}]
SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": ["zebra"]}}}

# Parameters of all generating endpoints, and those of chats and completions only.
EVERYWHERE: dict[str, Any] = {
    "temperature": 0.5,
    "top_p": 0.5,
    "top_k": 3,
    "min_p": 0.25,
    "repetition_penalty": 1.5,
    "presence_penalty": 1.0,
    "frequency_penalty": -1.0,
    "logit_bias": {"7": 2.5},
    "seed": 9,
    "min_tokens": 2,
    "stop_token_ids": [11],
    "ignore_eos": True,
    "cache_salt": "mine",
    "priority": 4,
}
GENERATING: dict[str, Any] = {
    "n": 2,
    "allowed_token_ids": [66, 67],
    "bad_words": ["no"],
    "prompt_logprobs": 2,
    "max_tokens": 3,
    "response_format": SCHEMA,
    "structured_outputs": {"regex": "a+"},
    "guided_regex": "a+",
    "guided_choice": ["a", "b"],
    "guided_json": {"enum": ["zebra"]},
    "guided_grammar": 'start: "a"',
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster() -> AsyncIterator[FakeCluster]:
    async with fake_cluster() as c:
        c.script = lambda request: counting(request)[:20]  # some requests ask for thousands
        yield c


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gw(cluster: FakeCluster, smollm2_dir: Path) -> AsyncIterator[Rig]:
    async with rig(cluster, smollm2_dir) as r:
        yield r


pytestmark = pytest.mark.asyncio(loop_scope="module")


async def asked(gw: Rig, path: str, **fields: Any) -> ValidRequest:
    """The requests of both pods for a body, without prompt, id, a generated seed and field names."""
    response = await gw.http.post(path, json={"model": MODEL, **fields})
    assert response.status_code == 200, response.text
    request = gw.cluster.prefills[0].seen.prefilled[-1]
    assert request == gw.cluster.decodes[0].seen.reserved[-1]
    seed = request.sampling.seed if "seed" in fields else 0
    sampling = dataclasses.replace(request.sampling, seed=seed, max_tokens=fields.get("max_tokens", 0))
    grammar = request.grammar and dataclasses.replace(request.grammar, field="")
    return dataclasses.replace(request, request_id="", prompt_ids=(1,), sampling=sampling, grammar=grammar)


async def completion(gw: Rig, **fields: Any) -> ValidRequest:
    return await asked(gw, "/v1/completions", prompt="Hello", **fields)


async def chat(gw: Rig, **fields: Any) -> ValidRequest:
    return await asked(gw, "/v1/chat/completions", messages=HELLO, **fields)


async def response(gw: Rig, **fields: Any) -> ValidRequest:
    return await asked(gw, "/v1/responses", input="Hello", **fields)


@pytest.mark.parametrize("name", [*EVERYWHERE, *GENERATING])
async def test_chats_and_completions_ask_the_same_of_the_pods(gw: Rig, name: str) -> None:
    fields = {name: (EVERYWHERE | GENERATING)[name]}
    assert await completion(gw, **fields) == await chat(gw, **fields)
    assert await completion(gw, **fields) != await completion(gw)
    assert await chat(gw, **fields) != await chat(gw)


@pytest.mark.parametrize("name", EVERYWHERE)
async def test_responses_ask_the_same_of_the_pods(gw: Rig, name: str) -> None:
    fields = {name: EVERYWHERE[name]}
    assert await response(gw, **fields) == await chat(gw, **fields)
    assert await response(gw, **fields) != await response(gw)


@pytest.mark.parametrize(
    ("of_response", "of_chat"),
    [
        (
            {"text": {"format": {"type": "json_schema", "name": "x", "schema": {"enum": ["zebra"]}}}},
            {"response_format": SCHEMA},
        ),
        ({"text": {"format": {"type": "json_object"}}}, {"response_format": {"type": "json_object"}}),
        (
            {"tools": [{"type": "function", **FUNCTION}], "tool_choice": "required"},
            {"tools": TOOLS, "tool_choice": "required"},
        ),
        (
            {"tools": [{"type": "function", **FUNCTION}], "tool_choice": "required", "parallel_tool_calls": False},
            {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False},
        ),
        ({"include": ["message.output_text.logprobs"]}, {"logprobs": True}),
        ({"top_logprobs": 3}, {"logprobs": True, "top_logprobs": 3}),
    ],
)
async def test_parameters_with_another_name_in_responses_ask_the_same(gw: Rig, of_response: Any, of_chat: Any) -> None:
    assert await response(gw, **of_response) == await chat(gw, **of_chat)
    assert await response(gw, **of_response) != await response(gw)


async def test_template_variables_reach_the_template(cluster: FakeCluster, smollm2_dir: Path, tmp_path: Path) -> None:
    for name in ("tokenizer.json", "config.json", "generation_config.json"):
        shutil.copy(smollm2_dir / name, tmp_path)
    config = json.loads((smollm2_dir / "tokenizer_config.json").read_text())
    config["chat_template"] = "{{ x }} {{ reasoning_effort }} {{ enable_thinking }}"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    async with rig(cluster, tmp_path) as gw:
        cases: list[tuple[dict[str, Any], dict[str, Any], str]] = [
            ({}, {}, "  "),
            ({"reasoning_effort": "low"}, {"reasoning": {"effort": "low"}}, " low "),
            ({"reasoning_effort": "none"}, {"reasoning": {"effort": "none"}}, " none False"),
            ({"chat_template_kwargs": {"x": 5}}, {"chat_template_kwargs": {"x": 5}}, "5  "),
        ]
        for of_chat, of_response, expected in cases:
            for post, fields in ((chat, of_chat), (response, of_response)):
                await post(gw, **fields)
                ids = list(cluster.prefills[0].seen.prefilled[-1].prompt_ids)
                assert gw.gateway.tokenizer.decode(ids) == expected


async def test_a_response_is_as_long_as_it_may_be(gw: Rig) -> None:
    await response(gw, max_output_tokens=7)
    assert gw.cluster.prefills[0].seen.prefilled[-1].sampling.max_tokens == 7


async def test_stop_strings_end_answers_on_every_endpoint(gw: Rig) -> None:
    """The gateway handles stop strings; the requests to the pods do not change."""
    said = (await gw.complete(temperature=0)).json()["choices"][0]["text"]
    cut = {"stop": [said[2:4]]}
    assert (await gw.complete(**cut)).json()["choices"][0]["text"] == said[:2]
    whole = (await gw.chat(max_tokens=9)).json()["choices"][0]["message"]["content"]
    body = {"model": MODEL, "input": "Hello", "max_output_tokens": 9, "stop": [whole[3:5]]}
    answered = (await gw.http.post("/v1/responses", json=body)).json()
    assert answered["output"][0]["content"][0]["text"] == whole[:3]
    chat_cut = (await gw.chat(max_tokens=9, stop=[whole[3:5]])).json()["choices"][0]["message"]["content"]
    assert chat_cut == whole[:3]
