"""Structured output through the gateway: every form, and the rejections with the field that they name."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from pydantic import BaseModel

from common.grammar import prover
from gateway.dispatch import attempt
from tests.rigs.engine.grammar_shapes import at_least_one, chained, rules, with_siblings
from tests.rigs.gateway.gateway_rig import MODEL, Rig
from tests.rigs.gateway.tool_rig import SCHEMA, TOOLS, asked, client_of, fits, says, tool
from tests.rigs.pods.fake_pods import FakeCluster
from tests.rigs.waiting import until


async def test_the_sdk_parses_a_model(gw: Rig, smollm2_dir: Path) -> None:
    class Step(BaseModel):
        text: str
        n: int | None = None

    class Plan(BaseModel):
        steps: list[Step]

    messages: Any = [{"role": "user", "content": "Hi"}]
    says(gw, '{"steps": [{"text": "a", "n": null}]}')
    async with client_of(gw) as client:
        parsed = await client.chat.completions.parse(model=MODEL, messages=messages, response_format=Plan)
        assert parsed.choices[0].message.parsed == Plan(steps=[Step(text="a")])
    assert not fits(smollm2_dir, asked(gw).grammar, '{"steps": [{"text": 1, "n": null}]}')
    assert fits(smollm2_dir, asked(gw).grammar, '{"steps": []}')
    assert not fits(smollm2_dir, asked(gw).grammar, '{"steps":[]}')


async def test_a_pod_has_time_to_prove_a_grammar(
    gw: Rig, cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert attempt.GRAMMAR_TIMEOUT_S > prover.POD_PATIENCE_S
    monkeypatch.setattr(attempt, "RESERVE_TIMEOUT_S", 0.2)
    cluster.decodes[0].faults.reserve_delay_s = 0.5
    says(gw, '{"a": 1}')
    answer = await gw.chat(structured_outputs={"json": SCHEMA})
    assert answer.status_code == 200, answer.text
    answer = await gw.chat()
    assert answer.status_code == 503, answer.text
    assert "did not answer Reserve within 0.2 s" in answer.text


FORMS: list[tuple[dict[str, Any], str, str]] = [
    ({"response_format": {"type": "json_object"}}, '{"x": [1]}', "[1]"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}}, '{"a": 1}', "{}"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}},
        '{"a": 1}',
        '{"a": "1"}',
    ),
    ({"response_format": {"type": "json_object", "schema": SCHEMA}}, '{"a": 1}', "{}"),
    ({"response_format": {"type": "json_schema", "schema": SCHEMA}}, '{"a": 1}', "{}"),
    ({"response_format": {"type": "json_object", "json_schema": {"schema": SCHEMA}}}, '{"a": 1}', "{}"),
    ({"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True}}, '{"a": 1}', '{"a":1}'),
    ({"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": False}}, '{"a":\n1}', "{}"),
    ({"structured_outputs": {"json_object": True, "disable_any_whitespace": False}}, '{"a":1}', "1"),
    (
        {"response_format": {"type": "json_object"}, "structured_outputs": {"disable_any_whitespace": False}},
        '{ "x" :[1]}',
        "[1]",
    ),
    ({"guided_json": SCHEMA, "structured_outputs": {"disable_any_whitespace": False}}, '{ "a":1}', "{}"),
    ({"response_format": {"type": "json_object"}}, '{"x": [1, 2]}', '{"x":[1,2]}'),
    ({"structured_outputs": {"json": SCHEMA}}, '{"a": 1}', "{}"),
    ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, '{"a": 1}', "{}"),
    ({"structured_outputs": {"regex": "a+b?"}}, "aab", "ba"),
    ({"structured_outputs": {"choice": ["yes", "no"]}}, "no", "maybe"),
    ({"structured_outputs": {"grammar": 'start: "x" | "y" start'}}, "yyx", "xy"),
    ({"structured_outputs": {"grammar": 'root ::= "x" | "y" root'}}, "yyx", "xy"),
    ({"structured_outputs": {"json_object": True}}, "{}", "1"),
    ({"guided_json": SCHEMA}, '{"a": 1}', "{}"),
    ({"guided_regex": "a+b?"}, "aab", "ba"),
    ({"guided_choice": ["yes", "no"]}, "no", "maybe"),
    ({"guided_grammar": 'start: "x" | "y" start'}, "yyx", "xy"),
]


@pytest.mark.parametrize(("fields", "good", "bad"), FORMS, ids=[str(next(iter(f[0].values())))[:40] for f in FORMS])
async def test_every_form_reaches_both_pods(
    gw: Rig, smollm2_dir: Path, fields: dict[str, Any], good: str, bad: str
) -> None:
    for answer in (await gw.chat(**fields), await gw.complete(**fields)):
        assert answer.status_code == 200
        grammar = asked(gw).grammar
        assert gw.cluster.prefills[0].seen.prefilled[-1].grammar == grammar
        assert fits(smollm2_dir, grammar, good)
        assert not fits(smollm2_dir, grammar, bad)


async def test_forms_without_effect(gw: Rig) -> None:
    for fields in (
        {"response_format": {"type": "text"}},
        {"response_format": None, "guided_json": None},
        {"tools": []},
    ):
        assert (await gw.chat(**fields)).status_code == 200
        assert asked(gw).grammar is None


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"response_format": {"type": "xml"}}, "response_format.type", "text, json_object or json_schema"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "is missing"),
    ({"structured_outputs": {}}, "structured_outputs", "must have one of"),
    ({"structured_outputs": {"disable_any_whitespace": True}}, "structured_outputs", "must have one of"),
    (
        {"structured_outputs": {"json": {}, "disable_any_whitespace": 1}},
        "structured_outputs.disable_any_whitespace",
        "boolean",
    ),
    (
        {"response_format": {"type": "text", "json_schema": {"schema": SCHEMA}}},
        "response_format.json_schema.schema",
        "needs response_format.type",
    ),
    ({"response_format": {"type": "text", "schema": SCHEMA}}, "response_format.schema", "needs response_format.type"),
    (
        {"response_format": {"type": "json_schema", "json_schema": SCHEMA}},
        "response_format.json_schema.schema",
        "is a schema itself",
    ),
    (
        {"response_format": {"type": "json_object", "json_schema": {"schema": SCHEMA}, "schema": SCHEMA}},
        "response_format.json_schema",
        "exclude each other",
    ),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"$ref": "#"}}}},
        "response_format.json_schema.schema",
        "refers to itself without end",
    ),
    ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs.choice", "exclude each other"),
    ({"response_format": {"type": "json_object"}, "guided_regex": "a"}, "guided_regex", "exclude each other"),
    ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex", "structured_outputs.regex"),
    ({"structured_outputs": {"json": "{"}}, "structured_outputs.json", "not valid JSON"),
    ({"structured_outputs": {"choice": []}}, "structured_outputs.choice", "at least one choice"),
    ({"structured_outputs": {"grammar": "start: other"}}, "structured_outputs.grammar", "other"),
    ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs.structural_tag", "not supported"),
    ({"tool_choice": "required"}, "tool_choice", "there are no tools"),
    ({"tools": TOOLS, "tool_choice": "any"}, "tool_choice", "none, auto, required"),
    (
        {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "x"}}},
        "tool_choice.function.name",
        "not one of the functions",
    ),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type", "'web_search' is not supported"),
    ({"tools": [tool("a b")]}, "tools[0].function.name", "letters, digits"),
    ({"tools": [tool(), tool()]}, "tools", "same name"),
    ({"tools": TOOLS, "functions": [{"name": "f"}]}, "functions", "exclude each other"),
    (
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "array"}}}]},
        "tools[0].function.parameters",
        "describe an object",
    ),
    ({"tools": TOOLS, "parallel_tool_calls": "no"}, "parallel_tool_calls", "boolean"),
    ({"include_reasoning": 1}, "include_reasoning", "boolean"),
    (
        {"messages": [{"role": "assistant", "tool_calls": [{"type": "function"}]}]},
        "messages[0].tool_calls[0].function",
        "is missing",
    ),
]


@pytest.mark.parametrize(("fields", "param", "message"), REFUSED, ids=[r[1] + f"-{i}" for i, r in enumerate(REFUSED)])
async def test_rejections_name_the_field(gw: Rig, fields: dict[str, Any], param: str, message: str) -> None:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "x"}], **fields}
    response = await gw.http.post("/v1/chat/completions", json=body)
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == param
    assert message in error["message"]
    assert not gw.cluster.decodes[0].seen.reserved  # no pod did any work


CHAIN = chained(lambda ref: {"type": "object", "properties": {"a": {"$ref": ref}}, "required": ["a"]}, 1100)
RULES = rules(5000)
WITH_CHAIN = {"type": "function", "function": {"name": "f", "parameters": {**CHAIN, "type": "object"}}}
STRICT_CHAIN = {"type": "function", "function": {**WITH_CHAIN["function"], "strict": True}}  # type: ignore[dict-item]
BEYOND: list[tuple[dict[str, Any], str]] = [
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": CHAIN}}},
        "response_format.json_schema.schema",
    ),
    ({"structured_outputs": {"json": CHAIN}}, "structured_outputs.json"),
    ({"structured_outputs": {"json": json.dumps(CHAIN)}}, "structured_outputs.json"),
    ({"structured_outputs": {"grammar": RULES}}, "structured_outputs.grammar"),
    ({"guided_json": {"anyOf": [{"items": CHAIN["$defs"]["d0"]}], "$defs": CHAIN["$defs"]}}, "guided_json"),
    ({"guided_grammar": RULES}, "guided_grammar"),
    ({"tools": [tool(), WITH_CHAIN], "tool_choice": "required"}, "tools[1].function.parameters"),
    (
        {"tools": [WITH_CHAIN], "tool_choice": {"type": "function", "function": {"name": "f"}}},
        "tools[0].function.parameters",
    ),
    ({"tools": [tool(), STRICT_CHAIN]}, "tools[1].function.parameters"),
    ({"functions": [WITH_CHAIN["function"]], "function_call": {"name": "f"}}, "functions[0].parameters"),
    ({"tools": [tool()], "guided_grammar": RULES}, "guided_grammar"),
    ({"tools": [WITH_CHAIN], "guided_regex": "a"}, "tools[0].function.parameters"),
]


@pytest.mark.parametrize(("fields", "param"), BEYOND, ids=[f"{i}-{b[1]}" for i, b in enumerate(BEYOND)])
async def test_a_grammar_that_would_overflow_the_stack_is_refused(gw: Rig, fields: dict[str, Any], param: str) -> None:
    """Each of these ended the process, before there were limits: see tests/unit/test_grammar_limits.py."""
    response = await gw.chat(**fields)
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == param
    assert error["message"].startswith(f"{param} has references that lead from one to the next for ")
    assert error["message"].endswith(" levels; at most 3000 are allowed")
    assert not gw.cluster.decodes[0].seen.reserved
    assert (await gw.chat(guided_regex="a")).status_code == 200


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"guided_regex": "a?" * 26_000}, "guided_regex"),
        ({"guided_json": with_siblings(22)}, "guided_json"),
        ({"tools": [tool(), tool("f", parameters=at_least_one(1000))], "tool_choice": "required"}, "tools"),
    ],
)
@pytest.mark.usefixtures("hurried_proofs")
async def test_a_grammar_that_takes_too_long_is_refused(gw: Rig, fields: dict[str, Any], param: str) -> None:
    response = await gw.chat(**fields)
    error = response.json()["error"]
    assert response.status_code in (400, 429), error  # 429: the machine was busy with other work
    if response.status_code == 400:
        assert error["param"].startswith(param)
        assert "is too costly: compiling it takes" in error["message"]
    assert not gw.cluster.decodes[0].seen.reserved

    async def compiles() -> bool:
        return (await gw.chat(guided_regex="a")).status_code == 200

    await until(compiles, 120)  # on a busy machine the first tries may be late too


@pytest.mark.usefixtures("hurried_proofs")
async def test_requests_are_served_beside_grammars_that_take_too_long(gw: Rig) -> None:
    """Another client sends four at a time, without a pause."""
    statuses: Counter[int] = Counter()
    body = {"model": MODEL, "messages": [{"role": "user", "content": "Hello"}]}

    async def bombard(bomber: httpx.AsyncClient, first: int) -> None:
        for number in itertools.count(first, 4):
            bomb = await bomber.post("/v1/chat/completions", json={**body, "guided_regex": "a?" * (25_000 + number)})
            statuses[bomb.status_code] += 1

    async def is_served(number: int) -> bool:
        asked_for = {"type": "object", "properties": {f"p{number}": {"type": "integer"}}}
        return (await gw.chat(guided_json=asked_for)).status_code == 200

    transport = httpx.AsyncHTTPTransport(local_address="127.0.0.2")
    async with httpx.AsyncClient(base_url=gw.url, transport=transport, timeout=30) as bomber:
        bombs = [asyncio.create_task(bombard(bomber, first)) for first in range(4)]
        await until(lambda: statuses.total() > 0)
        for number in range(10):
            assert (await gw.chat()).status_code == 200
            await until(partial(is_served, number), 120)  # a small proof may get no processor in its time either
        for bomb in bombs:
            bomb.cancel()
        ends = await asyncio.gather(*bombs, return_exceptions=True)
    assert all(isinstance(end, asyncio.CancelledError) for end in ends), ends
    assert statuses.keys() <= {400, 429}


@pytest.mark.parametrize(
    ("keyword", "schema"),
    [
        ("not", {"type": "object", "not": {"required": ["a"]}}),
        ("uniqueItems", {"type": "array", "uniqueItems": True}),
        ("if", {"if": {"type": "object"}, "then": {"required": ["a"]}}),
        ("contains", {"type": "array", "contains": {"type": "integer"}}),
        ("propertyNames", {"type": "object", "propertyNames": {"pattern": "^a"}}),
        ("dependentRequired", {"type": "object", "dependentRequired": {"a": ["b"]}}),
    ],
)
async def test_an_unenforceable_schema_is_rejected_by_its_keyword(
    gw: Rig, keyword: str, schema: dict[str, Any]
) -> None:
    inside = {"type": "object", "properties": {"deep": {"type": "array", "items": schema}}}
    function = {"type": "function", "function": {"name": "f", "parameters": inside, "strict": True}}
    for fields, param in (
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": inside}}},
            "response_format.json_schema.schema",
        ),
        ({"structured_outputs": {"json": inside}}, "structured_outputs.json"),
        ({"guided_json": inside}, "guided_json"),
        ({"tools": [tool(), function]}, "tools[1].function.parameters"),
        ({"tools": [tool(), function], "tool_choice": "required"}, "tools[1].function.parameters"),
    ):
        response = await gw.chat(**fields)
        assert response.status_code == 400
        error = response.json()["error"]
        assert error["param"] == param
        assert f'"{keyword}"' in error["message"]
    function["function"].pop("strict")  # then the rest is enforced, and only where it must be
    assert (await gw.chat(tools=[function])).status_code == 200
    assert (await gw.chat(tools=[function], tool_choice="required")).status_code == 200
