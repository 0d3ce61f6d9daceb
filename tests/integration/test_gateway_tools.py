"""Tools, reasoning and structured output through the gateway: what clients get, and what pods are asked for."""

from __future__ import annotations

import functools
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import openai
import pytest
import pytest_asyncio
from pydantic import BaseModel

from common import rpc
from common.config import REASONING_PARSERS, TOOL_PARSERS
from common.grammar import GrammarCompiler, GrammarTokenizer
from common.pb import inference_pb2, inference_pb2_grpc, types_pb2
from common.types import Grammar
from gateway.reasoning import STYLES
from gateway.tools.choose import choose_format
from tests.fake_pods import FakeCluster
from tests.gateway_rig import MODEL, Rig, rig

CITY: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}


def tool(name: str = "get_weather", **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": CITY, **more}}


CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Tromsø"}}\n</tool_call>'
STOP = '<tool_call>\n{"name": "stop", "arguments": {}}\n</tool_call>'
TOOLS = [tool(), tool("stop")]


@pytest_asyncio.fixture
async def gw(cluster: FakeCluster, smollm2_dir: Path, unused_tcp_port: int) -> AsyncIterator[Rig]:
    async with rig(cluster, smollm2_dir, grpc_port=unused_tcp_port) as r:
        yield r
        await r.settled()


@asynccontextmanager
async def client_of(gw: Rig) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{gw.url}/v1", api_key="x", max_retries=0) as client:
        yield client


def says(gw: Rig, text: str) -> None:
    """Every answer from now on."""
    tokenizer = gw.gateway.tokenizer
    ids = [*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_ids[0]]
    gw.cluster.script = lambda _request: ids


def asked(gw: Rig) -> Any:
    """The last request that a pod got."""
    return gw.cluster.decodes[0].seen.reserved[-1]


def prompt_of(gw: Rig) -> str:
    text: str = gw.gateway.tokenizer.raw.decode(asked(gw).prompt_ids, skip_special_tokens=False)
    return text


async def both_ways(gw: Rig, **fields: Any) -> tuple[dict[str, Any], str | None]:
    """Message and finish reason, which are the same when the answer is streamed."""
    answer = (await gw.chat(**fields)).json()["choices"][0]
    status, events = await gw.stream("chat", **fields, messages=[{"role": "user", "content": "Hello"}])
    assert (status, events[-1]) == (200, "[DONE]")
    message: dict[str, Any] = {"role": "assistant", "content": None, "refusal": None}
    finish = None
    for event in events[:-1]:
        if not event["choices"]:
            continue
        [choice] = event["choices"]
        finish = choice["finish_reason"] or finish
        for key, value in choice["delta"].items():
            if key == "tool_calls":
                for call in value:
                    calls = message.setdefault("tool_calls", [])
                    if "id" in call:
                        assert call["index"] == len(calls)
                        calls.append({"id": call["id"], "type": call["type"], "function": dict(call["function"])})
                    else:
                        calls[call["index"]]["function"]["arguments"] += call["function"]["arguments"]
            elif key == "function_call":
                whole = message.setdefault("function_call", {"name": value.get("name"), "arguments": ""})
                whole["arguments"] += value["arguments"]
            elif key != "role":
                message[key] = (message.get(key) or "") + value

    def without_ids(message: dict[str, Any]) -> dict[str, Any]:
        calls = [{**call, "id": "..."} for call in message.get("tool_calls", ())]
        shown = {**message, "content": message["content"] or None}
        return {**shown, "tool_calls": calls} if calls else shown

    assert without_ids(message) == without_ids(answer["message"])
    assert finish == answer["finish_reason"]
    return answer["message"], finish


async def test_auto_gives_calls_or_content(gw: Rig) -> None:
    says(gw, f"Let me see.\n{CALL}\n{STOP}")
    message, finish = await both_ways(gw, tools=TOOLS)
    assert (message["content"], finish) == ("Let me see.", "tool_calls")
    first, second = (call["function"] for call in message["tool_calls"])
    assert (first["name"], json.loads(first["arguments"])) == ("get_weather", {"city": "Tromsø"})
    assert second == {"name": "stop", "arguments": "{}"}
    assert asked(gw).grammar is None
    says(gw, CALL)
    message, finish = await both_ways(gw, tools=TOOLS, tool_choice="auto")
    assert (message["content"], len(message["tool_calls"])) == (None, 1)
    says(gw, "It is cold. ")
    message, finish = await both_ways(gw, tools=TOOLS)
    assert (message["content"], finish) == ("It is cold. ", "stop")
    assert "tool_calls" not in message


@pytest.mark.parametrize(
    "text",
    ["<tool_call>{", '<tool_call>{"name": "get_weather", "arguments": {"city": oops}}</tool_call>', "<tool_call>",
     '<tool_call>{"name": "unknown", "arguments": {}}</tool_call>', "</tool_call> [] }{"],
)  # fmt: skip
@pytest.mark.parametrize("choice", ["auto", "required"])
async def test_what_is_malformed_is_content(gw: Rig, text: str, choice: str) -> None:
    says(gw, text)
    answer = (await gw.chat(tools=TOOLS, tool_choice=choice)).json()["choices"][0]
    assert (answer["message"]["content"], answer["finish_reason"]) == (text, "stop")
    assert "tool_calls" not in answer["message"]
    status, events = await gw.stream("chat", tools=TOOLS, tool_choice=choice)
    assert (status, events[-1]) == (200, "[DONE]")
    deltas = [choice["delta"] for event in events[:-1] for choice in event["choices"]]
    assert "".join(delta.get("content") or "" for delta in deltas) == text


async def test_a_call_cut_by_max_tokens_is_no_call(gw: Rig) -> None:
    says(gw, CALL)
    answer = (await gw.chat(tools=TOOLS, max_tokens=8)).json()["choices"][0]
    assert answer["finish_reason"] == "length"
    assert CALL.startswith(answer["message"]["content"])


async def test_tools_stand_in_the_prompt_and_none_leaves_them_out(gw: Rig) -> None:
    says(gw, CALL)
    await gw.chat(tools=TOOLS)
    assert "get_weather" in prompt_of(gw)
    assert "<tool_call>" in prompt_of(gw)  # this model's template knows no tools: they are described
    answer = (await gw.chat(tools=TOOLS, tool_choice="none")).json()["choices"][0]
    assert "get_weather" not in prompt_of(gw)
    assert (answer["message"]["content"], answer["finish_reason"]) == (CALL, "stop")


async def test_a_conversation_with_calls_and_their_answers(gw: Rig) -> None:
    says(gw, "Cold.")
    function = {"name": "get_weather", "arguments": '{"city": "Oslo"}'}
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Oslo?"},
        {"role": "assistant", "content": None, "tool_calls": [{"id": "c1", "type": "function", "function": function}]},
        {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "-4 °C"}]},
        {"role": "assistant", "content": None, "function_call": {"name": "stop", "arguments": "{}"}},
        {"role": "function", "name": "stop", "content": "done"},
    ]
    response = await gw.http.post("/v1/chat/completions", json={"model": MODEL, "messages": messages, "tools": TOOLS})
    assert response.status_code == 200
    prompt = prompt_of(gw)
    assert "Be brief.\n\n# Tools" in prompt
    assert '{"name": "get_weather", "arguments": {"city": "Oslo"}}' in prompt
    assert "<tool_response>\n-4 °C\n</tool_response>" in prompt


@pytest.mark.parametrize(
    ("choice", "good", "bad"),
    [
        ("required", STOP, "Hello"),
        ({"type": "function", "function": {"name": "get_weather"}}, CALL, STOP),
        (
            {
                "type": "allowed_tools",
                "allowed_tools": {
                    "mode": "required",
                    "tools": [{"type": "function", "function": {"name": "stop"}}],
                },
            },
            STOP.replace("{}", '{"city": "x"}'),
            CALL,
        ),
    ],
)
async def test_required_and_named_are_enforced(gw: Rig, smollm2_dir: Path, choice: Any, good: str, bad: str) -> None:
    says(gw, good)
    message, finish = await both_ways(gw, tools=[tool(), {"type": "function", "function": {"name": "stop"}}] if
                                      good == STOP else TOOLS, tool_choice=choice)  # fmt: skip
    assert (finish, len(message["tool_calls"])) == ("tool_calls", 1)
    assert fits(smollm2_dir, asked(gw).grammar, good)
    assert not fits(smollm2_dir, asked(gw).grammar, bad)
    # What prefill is asked for is the same.
    assert gw.cluster.prefills[0].seen.prefilled[-1].grammar == asked(gw).grammar


@functools.cache
def compiler_of(model_dir: Path) -> GrammarCompiler:
    return GrammarCompiler(GrammarTokenizer(model_dir, eos_ids=(2,)))


def fits(model_dir: Path, grammar: Grammar | None, text: str) -> bool:
    assert grammar is not None
    compiler = compiler_of(model_dir)
    matcher, ids = compiler.compile(grammar).matcher(), compiler.tokenizer.get().tokenize_str(text)
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


async def test_parallel_tool_calls_off_ends_with_the_first(gw: Rig, smollm2_dir: Path) -> None:
    says(gw, f"{CALL}\n{CALL}" + " and more" * 50)
    message, finish = await both_ways(gw, tools=TOOLS, parallel_tool_calls=False)
    assert (finish, len(message["tool_calls"])) == ("tool_calls", 1)
    usage = (await gw.chat(tools=TOOLS, parallel_tool_calls=False)).json()["usage"]
    assert usage["completion_tokens"] < 60  # the pods were told to stop
    await gw.chat(tools=TOOLS, tool_choice="required", parallel_tool_calls=False)
    assert not fits(smollm2_dir, asked(gw).grammar, f"{CALL}\n{CALL}")
    await gw.chat(tools=TOOLS, tool_choice="required")
    assert fits(smollm2_dir, asked(gw).grammar, f"{CALL}\n{CALL}")


async def test_strict_functions_are_enforced_where_they_are_called(gw: Rig, smollm2_dir: Path) -> None:
    says(gw, CALL)
    await gw.chat(tools=[tool(strict=True)])
    grammar = asked(gw).grammar
    assert fits(smollm2_dir, grammar, f"Hm. {CALL}")
    assert fits(smollm2_dir, grammar, "Hm.")
    assert not fits(smollm2_dir, grammar, CALL.replace("city", "town"))


async def test_the_older_functions(gw: Rig) -> None:
    says(gw, CALL)
    functions = [t["function"] for t in TOOLS]
    message, finish = await both_ways(gw, functions=functions)
    assert (finish, message["content"]) == ("function_call", None)
    assert message["function_call"] == {"name": "get_weather", "arguments": '{"city": "Tromsø"}'}
    assert "tool_calls" not in message
    await gw.chat(functions=functions, function_call={"name": "stop"})
    assert asked(gw).grammar is not None
    await gw.chat(functions=functions, function_call="none")
    assert "get_weather" not in prompt_of(gw)


async def test_the_sdk_with_tools(gw: Rig) -> None:
    class get_weather(BaseModel):
        city: str

    messages: Any = [{"role": "user", "content": "Hi"}]
    says(gw, CALL)
    async with client_of(gw) as client:
        parsed = await client.chat.completions.parse(
            model=MODEL, messages=messages, tools=[openai.pydantic_function_tool(get_weather)]
        )
        [call] = parsed.choices[0].message.tool_calls or ()
        assert call.function.parsed_arguments == get_weather(city="Tromsø")
        async with client.chat.completions.stream(
            model=MODEL, messages=messages, tools=[openai.pydantic_function_tool(get_weather)]
        ) as stream:
            kinds = [event.type async for event in stream]
            final = await stream.get_final_completion()
        assert kinds.count("tool_calls.function.arguments.delta") > 2
        assert "tool_calls.function.arguments.done" in kinds
        [call] = final.choices[0].message.tool_calls or ()
        assert call.function.parsed_arguments == get_weather(city="Tromsø")


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
    assert fits(smollm2_dir, asked(gw).grammar, '{"steps":[]}')


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
FORMS: list[tuple[dict[str, Any], str, str]] = [
    ({"response_format": {"type": "json_object"}}, '{"x": [1]}', "[1]"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}}, '{"a": 1}', "{}"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}},
        '{"a":1}',
        '{"a":"1"}',
    ),
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


async def test_forms_that_ask_for_nothing(gw: Rig) -> None:
    for fields in (
        {"response_format": {"type": "text"}},
        {"response_format": None, "guided_json": None},
        {"tools": []},
    ):
        assert (await gw.chat(**fields)).status_code == 200
        assert asked(gw).grammar is None


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"response_format": {"type": "xml"}}, "response_format.type", "text, json_object or json_schema"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "must be an object"),
    ({"structured_outputs": {}}, "structured_outputs", "must have one of"),
    ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs.choice", "exclude each other"),
    ({"response_format": {"type": "json_object"}, "guided_regex": "a"}, "guided_regex", "exclude each other"),
    ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex", "structured_outputs.regex"),
    ({"structured_outputs": {"json": "{"}}, "structured_outputs.json", "not valid JSON"),
    ({"structured_outputs": {"choice": []}}, "structured_outputs.choice", "at least one choice"),
    ({"structured_outputs": {"grammar": "start: other"}}, "structured_outputs.grammar", "other"),
    ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs.structural_tag", "not supported"),
    ({"tool_choice": "required"}, "tool_choice", "there are no tools"),
    ({"tools": TOOLS, "tool_choice": "any"}, "tool_choice", "none, auto, required"),
    ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice.function.name",
     "not one of the functions"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type", "'web_search' is not supported"),
    ({"tools": [tool("a b")]}, "tools[0].function.name", "letters, digits"),
    ({"tools": [tool(), tool()]}, "tools", "same name"),
    ({"tools": TOOLS, "functions": [{"name": "f"}]}, "functions", "exclude each other"),
    ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "array"}}}]},
     "tools[0].function.parameters", "describe an object"),
    ({"tools": TOOLS, "parallel_tool_calls": "no"}, "parallel_tool_calls", "boolean"),
    ({"include_reasoning": 1}, "include_reasoning", "boolean"),
    ({"messages": [{"role": "assistant", "tool_calls": [{"type": "function"}]}]}, "messages[0].tool_calls[0].function",
     "object"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "param", "message"), REFUSED, ids=[r[1] + f"-{i}" for i, r in enumerate(REFUSED)])
async def test_refusals_name_the_field(gw: Rig, fields: dict[str, Any], param: str, message: str) -> None:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "x"}], **fields}
    response = await gw.http.post("/v1/chat/completions", json=body)
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == param
    assert message in error["message"]
    assert not gw.cluster.decodes[0].seen.reserved  # nothing was spent


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
async def test_a_schema_that_cannot_be_enforced_is_refused_by_its_keyword(
    gw: Rig, keyword: str, schema: dict[str, Any]
) -> None:
    inside = {"type": "object", "properties": {"deep": {"type": "array", "items": schema}}}
    function = {"type": "function", "function": {"name": "f", "parameters": inside, "strict": True}}
    for fields, param in (
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": inside}}},
         "response_format.json_schema.schema"),
        ({"structured_outputs": {"json": inside}}, "structured_outputs.json"),
        ({"guided_json": inside}, "guided_json"),
        ({"tools": [tool(), function]}, "tools[1].function.parameters"),
        ({"tools": [tool(), function], "tool_choice": "required"}, "tools[1].function.parameters"),
    ):  # fmt: skip
        response = await gw.chat(**fields)
        assert response.status_code == 400
        error = response.json()["error"]
        assert error["param"] == param
        assert f'"{keyword}"' in error["message"]
    function["function"].pop("strict")  # then the rest is enforced, and only where it must be
    assert (await gw.chat(tools=[function])).status_code == 200
    assert (await gw.chat(tools=[function], tool_choice="required")).status_code == 200


async def test_reasoning_is_split_shown_counted_and_kept_out(cluster: FakeCluster, smollm2_dir: Path) -> None:
    async with rig(cluster, smollm2_dir, reasoning_parser="think") as gw:
        says(gw, f"<think>\nHm, weather.\n</think>\n\nSo:\n{CALL}")
        message, finish = await both_ways(gw, tools=TOOLS)
        assert (message["reasoning_content"], message["reasoning"]) == ("Hm, weather.",) * 2
        assert (message["content"], finish, len(message["tool_calls"])) == ("So:", "tool_calls", 1)
        usage = (await gw.chat()).json()["usage"]
        tokens = gw.gateway.tokenizer.encode("<think>\nHm, weather.\n</think>", add_special_tokens=False)
        assert abs(usage["completion_tokens_details"]["reasoning_tokens"] - len(tokens)) <= 1
        message, _ = await both_ways(gw, include_reasoning=False)
        assert not {"reasoning", "reasoning_content"} & message.keys()
        assert message["content"].startswith("So:")
        # What has to match something stands behind the section.
        await gw.chat(response_format={"type": "json_object"})
        assert fits(smollm2_dir, asked(gw).grammar, "<think>x</think>{}")
        says(gw, "<think>on and on" * 4)
        message, finish = await both_ways(gw, max_tokens=8)
        assert finish == "length"
        assert message["reasoning_content"]
        assert message["content"] in (None, "")
    async with rig(cluster, smollm2_dir, reasoning_parser="none") as gw:
        says(gw, "<think>x</think>y")
        message, _ = await both_ways(gw)
        assert message["content"] == "<think>x</think>y"
        usage = (await gw.chat()).json()["usage"]
        assert usage["completion_tokens_details"]["reasoning_tokens"] == 0


async def test_a_template_may_begin_the_section(cluster: FakeCluster, tmp_path: Path, smollm2_dir: Path) -> None:
    model = with_template(
        tmp_path, smollm2_dir,
        "{% for m in messages %}{{ m.content }}{% endfor %}"
        "{{ '<think>\\n' if enable_thinking is not false else '<think>\\n\\n</think>\\n\\n' }}",
    )  # fmt: skip
    async with rig(cluster, model) as gw:  # told by the template
        says(gw, "hm</think>\nyes")
        message, _ = await both_ways(gw)
        assert (message["reasoning_content"], message["content"]) == ("hm", "yes")
        await gw.chat(structured_outputs={"choice": ["yes"]})
        assert fits(smollm2_dir, asked(gw).grammar, "hm</think>\nyes")
        off = {"chat_template_kwargs": {"enable_thinking": False}}
        says(gw, "yes")
        message, _ = await both_ways(gw, **off)
        assert (message.get("reasoning_content"), message["content"]) == (None, "yes")
        await gw.chat(structured_outputs={"choice": ["yes"]}, **off)
        assert fits(smollm2_dir, asked(gw).grammar, "yes")
        assert not fits(smollm2_dir, asked(gw).grammar, "hm</think>\nyes")


def with_template(tmp_path: Path, model_dir: Path, template: str) -> Path:
    """The model's texts under another template."""
    for name in ("tokenizer.json", "config.json", "generation_config.json"):
        (tmp_path / name).write_bytes((model_dir / name).read_bytes())
    config = json.loads((model_dir / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": template}))
    return tmp_path


async def test_templates_that_know_tools_get_them_and_arguments_as_objects(
    cluster: FakeCluster, tmp_path: Path, smollm2_dir: Path
) -> None:
    template = (
        "{{ tools | tojson if tools else 'no tools' }}{% for m in messages %}|{{ m.role }}:{{ m.content }}"
        "{% for c in m.tool_calls or [] %}[{{ c.function.name }} {{ c.function.arguments.city }}]{% endfor %}"
        "{{ m.name or '' }}{% endfor %}"
    )
    async with rig(cluster, with_template(tmp_path, smollm2_dir, template)) as gw:
        function = {"name": "get_weather", "arguments": '{"city": "Oslo"}'}
        messages = [
            {"role": "user", "content": "Oslo?"},
            {"role": "assistant", "tool_calls": [{"id": "c1", "type": "function", "function": function}]},
            {"role": "tool", "tool_call_id": "c1", "content": "cold"},
        ]
        body = {"model": MODEL, "messages": messages}
        assert (await gw.http.post("/v1/chat/completions", json={**body, "tools": [tool()]})).status_code == 200
        shown, *rest = prompt_of(gw).split("|")
        assert json.loads(shown) == [tool()]
        assert rest == ["user:Oslo?", "assistant:[get_weather Oslo]", "tool:coldget_weather"]
        await gw.http.post("/v1/chat/completions", json=body)
        assert prompt_of(gw).startswith("no tools")
        tokens = await gw.http.post("/tokenize", json={"messages": messages, "tools": [tool()]})
        await gw.http.post("/v1/chat/completions", json={**body, "tools": [tool()]})
        assert tokens.json()["tokens"] == list(asked(gw).prompt_ids)


@pytest.mark.parametrize(
    ("parser", "text"),
    [
        ("llama3_json", '{"name": "get_weather", "parameters": {"city": "Oslo"}}'),
        ("mistral", '[TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Oslo"}}]'),
        ("mistral", '[TOOL_CALLS]get_weather[ARGS]{"city": "Oslo"}'),
        ("pythonic", '[get_weather(city="Oslo")]'),
    ],
)
async def test_the_parser_is_a_setting(cluster: FakeCluster, smollm2_dir: Path, parser: str, text: str) -> None:
    async with rig(cluster, smollm2_dir, tool_parser=parser) as gw:
        says(gw, text)
        message, finish = await both_ways(gw, tools=TOOLS)
        [call] = message["tool_calls"]
        assert (finish, message["content"], call["function"]["name"]) == ("tool_calls", None, "get_weather")
        assert json.loads(call["function"]["arguments"]) == {"city": "Oslo"}
        if parser == "mistral":
            assert len(call["id"]) == 9


async def test_special_tokens_reach_the_parsers_and_the_client_only_if_asked(
    cluster: FakeCluster, tmp_path: Path, smollm2_dir: Path
) -> None:
    raw = json.loads((smollm2_dir / "tokenizer.json").read_text())
    for i, name in enumerate(("[TOOL_CALLS]", "[ARGS]")):
        raw["added_tokens"][3 + i] |= {"content": name, "special": True}
        raw["model"]["vocab"] = {name if v == 3 + i else k: v for k, v in raw["model"]["vocab"].items()}
    model = with_template(tmp_path, smollm2_dir, "{% for m in messages %}{{ m.content }}{% endfor %}")
    (model / "tokenizer.json").write_text(json.dumps(raw))
    async with rig(cluster, model) as gw:
        says(gw, '[TOOL_CALLS]get_weather[ARGS]{"city": "Oslo"}')
        message, finish = await both_ways(gw, tools=TOOLS)  # the parser is told by the special tokens
        assert (finish, message["content"], len(message["tool_calls"])) == ("tool_calls", None, 1)
        text = 'get_weather{"city": "Oslo"}'
        assert (await gw.chat()).json()["choices"][0]["message"]["content"] == text
        assert (await gw.complete(max_tokens=99)).json()["choices"][0]["text"] == text
        text = '[TOOL_CALLS]get_weather[ARGS]{"city": "Oslo"}'
        answer = (await gw.chat(skip_special_tokens=False)).json()["choices"][0]
        assert answer["message"]["content"] == text  # without the one that ended it
        answer = (await gw.complete(skip_special_tokens=False, max_tokens=99)).json()["choices"][0]
        assert answer["text"] == text
        await gw.chat(tools=TOOLS, tool_choice="required")
        assert "<[3]>" in asked(gw).grammar.text


def test_the_settings_and_the_gateway_know_the_same_parsers() -> None:
    for name in TOOL_PARSERS:
        assert name in ("auto", choose_format(name, "", ()).name)
    assert set(REASONING_PARSERS) == {"auto", "none", *(style.name for style in STYLES)}


@pytest_asyncio.fixture
async def stub(gw: Rig) -> AsyncIterator[Any]:
    channel = rpc.channel(f"127.0.0.1:{gw.server.grpc_port}")
    yield inference_pb2_grpc.InferenceStub(channel)
    await channel.close()


async def generate(stub: Any, **fields: Any) -> list[inference_pb2.GenerateResponse]:
    return [m async for m in stub.Generate(inference_pb2.GenerateRequest(model=MODEL, **fields))]


def chat_prompt(*messages: dict[str, Any]) -> inference_pb2.ChatPrompt:
    return inference_pb2.ChatPrompt(messages=[inference_pb2.ChatMessage(**m) for m in messages or (HELLO,)])


HELLO = {"role": "user", "content": "Hello"}
WEATHER = inference_pb2.Function(name="get_weather", parameters=json.dumps(CITY))


async def test_grpc_has_tools_too(gw: Rig, stub: Any, smollm2_dir: Path) -> None:
    says(gw, f"So: {CALL}\n{CALL}")
    got = await generate(stub, chat=chat_prompt(), tools=[WEATHER])
    assert "".join(m.text for m in got) == "So:"
    parts = [part for m in got for part in m.tool_calls]
    assert [(p.index, p.name, bool(p.id)) for p in parts if p.name] == [(i, "get_weather", True) for i in (0, 1)]
    for index in (0, 1):
        assert json.loads("".join(p.arguments for p in parts if p.index == index)) == {"city": "Tromsø"}
    assert got[-1].finish_reason == types_pb2.FINISH_REASON_TOOL_CALLS
    rest_prompt = asked(gw).prompt_ids
    await gw.chat(tools=[tool()])
    assert asked(gw).prompt_ids == rest_prompt
    got = await generate(stub, chat=chat_prompt(), tools=[WEATHER], parallel_tool_calls=False)
    assert {part.index for m in got for part in m.tool_calls} == {0}
    for choice, good, bad in (
        (inference_pb2.ToolChoice(mode=inference_pb2.ToolChoice.MODE_REQUIRED), CALL, "x"),
        (inference_pb2.ToolChoice(function="get_weather"), CALL, STOP),
    ):
        await generate(stub, chat=chat_prompt(), tools=[WEATHER], tool_choice=choice)
        assert fits(smollm2_dir, asked(gw).grammar, good)
        assert not fits(smollm2_dir, asked(gw).grammar, bad)
    none = inference_pb2.ToolChoice(mode=inference_pb2.ToolChoice.MODE_NONE)
    got = await generate(stub, chat=chat_prompt(), tools=[WEATHER], tool_choice=none)
    assert not any(m.tool_calls for m in got)
    assert "get_weather" not in prompt_of(gw)
    strict = inference_pb2.Function(name="f", parameters=json.dumps(CITY), strict=True)
    await generate(stub, chat=chat_prompt(), tools=[strict])
    assert asked(gw).grammar is not None
    call = inference_pb2.ToolCall(id="c", name="get_weather", arguments='{"city": "Oslo"}')
    answer = {"role": "tool", "content": "cold", "tool_call_id": "c"}
    await generate(stub, chat=chat_prompt(HELLO, {"role": "assistant", "tool_calls": [call]}, answer))
    assert '"arguments": {"city": "Oslo"}' in prompt_of(gw)
    assert "<tool_response>\ncold\n" in prompt_of(gw)


@pytest.mark.parametrize(
    ("form", "good", "bad"),
    [
        ({"json_schema": json.dumps(SCHEMA)}, '{"a": 1}', "{}"),
        ({"json_object": True}, "{}", "1"),
        ({"regex": "a+b?"}, "aab", "ba"),
        ({"choice": inference_pb2.Alternatives(texts=["yes", "no"])}, "no", "maybe"),
        ({"grammar": 'start: "x"'}, "x", "y"),
    ],
)
async def test_grpc_has_structured_output_too(
    gw: Rig, stub: Any, smollm2_dir: Path, form: dict[str, Any], good: str, bad: str
) -> None:
    for prompt in ({"text": "x"}, {"chat": chat_prompt()}):
        await generate(stub, structured_output=inference_pb2.StructuredOutput(**form), **prompt)
        assert fits(smollm2_dir, asked(gw).grammar, good)
        assert not fits(smollm2_dir, asked(gw).grammar, bad)


@pytest.mark.parametrize(
    "fields",
    [
        {"text": "x", "tools": [WEATHER]},
        {"text": "x", "include_reasoning": False},
        {"text": "x", "structured_output": inference_pb2.StructuredOutput()},
        {"text": "x", "structured_output": inference_pb2.StructuredOutput(json_schema='{"not": {}}')},
        {"chat": chat_prompt(), "tools": [inference_pb2.Function(name="f", parameters="[")]},
        {"chat": chat_prompt(), "tool_choice": inference_pb2.ToolChoice(function="f")},
        {"chat": chat_prompt(), "chat_template_kwargs": "1"},
    ],
)
async def test_grpc_refuses_what_rest_refuses(gw: Rig, stub: Any, fields: dict[str, Any]) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await generate(stub, **fields)
    assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert not gw.cluster.decodes[0].seen.reserved


async def test_grpc_splits_reasoning_and_passes_template_variables(
    cluster: FakeCluster, tmp_path: Path, smollm2_dir: Path, unused_tcp_port: int
) -> None:
    model = with_template(tmp_path, smollm2_dir, "{{ x }}{{ '<think>' if on }}{% for m in messages %}{% endfor %}")
    async with rig(cluster, model, reasoning_parser="think", grpc_port=unused_tcp_port) as gw:
        says(gw, "<think>hm</think>yes")
        channel = rpc.channel(f"127.0.0.1:{gw.server.grpc_port}")
        stub = inference_pb2_grpc.InferenceStub(channel)
        got = await generate(stub, chat=chat_prompt(), chat_template_kwargs='{"x": "seen"}')
        assert ("".join(m.reasoning for m in got), "".join(m.text for m in got)) == ("hm", "yes")
        assert got[-1].usage.reasoning_tokens > 2
        assert prompt_of(gw) == "seen"
        got = await generate(stub, chat=chat_prompt(), include_reasoning=False, chat_template_kwargs='{"x": "seen"}')
        assert ("".join(m.reasoning for m in got), "".join(m.text for m in got)) == ("", "yes")
        says(gw, "<|im_start|>hm")
        for skip, text in ((True, "hm"), (False, "<|im_start|>hm")):
            got = await generate(stub, text="x", skip_special_tokens=skip)
            assert "".join(m.text for m in got) == text
        await channel.close()


async def test_each_of_several_answers_is_read_by_itself(gw: Rig) -> None:
    says(gw, CALL)  # the first of them: fake pods give the others other tokens
    first, second = (await gw.chat(tools=TOOLS, n=2)).json()["choices"]
    assert [call["function"]["name"] for call in first["message"]["tool_calls"]] == ["get_weather"]
    assert "tool_calls" not in second["message"]
    assert second["message"]["content"]
