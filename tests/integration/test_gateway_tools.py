"""Tools through the gateway: the answers of clients, the prompts of models, and the grammars for pods."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import openai
import pytest
from pydantic import BaseModel

from common.settings.kinds import REASONING_PARSERS, TOOL_PARSERS
from gateway.text.reasoning import choose_reasoning_format
from gateway.text.tools.choose import choose_tool_format
from tests.rigs.gateway.gateway_rig import MODEL, Rig, rig
from tests.rigs.gateway.tool_rig import (
    CALL,
    STOP,
    TOOLS,
    asked,
    both_ways,
    client_of,
    fits,
    prompt_of,
    says,
    tool,
    with_template,
)
from tests.rigs.pods.fake_pods import FakeCluster


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
    [
        "<tool_call>{",
        '<tool_call>{"name": "get_weather", "arguments": {"city": oops}}</tool_call>',
        "<tool_call>",
        '<tool_call>{"name": "unknown", "arguments": {}}</tool_call>',
        "</tool_call> [] }{",
    ],
)
@pytest.mark.parametrize("choice", ["auto", "required"])
async def test_a_malformed_call_is_content(gw: Rig, text: str, choice: str) -> None:
    says(gw, text)
    answer = (await gw.chat(tools=TOOLS, tool_choice=choice)).json()["choices"][0]
    assert (answer["message"]["content"], answer["finish_reason"]) == (text, "stop")
    assert "tool_calls" not in answer["message"]
    status, events = await gw.stream("chat", tools=TOOLS, tool_choice=choice)
    assert (status, events[-1]) == (200, "[DONE]")
    deltas = [choice["delta"] for event in events[:-1] for choice in event["choices"]]
    assert "".join(delta.get("content") or "" for delta in deltas) == text


async def test_a_call_cut_by_max_tokens_keeps_its_arguments_so_far(gw: Rig) -> None:
    says(gw, CALL)
    whole = (await gw.chat(tools=TOOLS)).json()
    for length in range(1, whole["usage"]["completion_tokens"]):
        message, finish = await both_ways(gw, tools=TOOLS, max_tokens=length)
        assert finish == "length"
        if "tool_calls" in message:
            [call] = message["tool_calls"]
            assert message["content"] is None
            assert call["function"]["name"] == "get_weather"
            shown = call["function"]["arguments"].rstrip("\ufffd")  # half of a character
            assert '{"city": "Tromsø"}'.startswith(shown)
        else:  # the function is not known yet
            assert CALL.startswith(message["content"])
    assert "tool_calls" in message
    assert call["function"]["arguments"] == '{"city": "Tromsø"}'


async def test_a_model_whose_format_is_unknown_refuses_tools(
    cluster: FakeCluster, tmp_path: Path, smollm2_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    template = "{{ tools | tojson if tools }}{% for m in messages %}{{ m.content }}{% endfor %}"
    async with rig(cluster, with_template(tmp_path, smollm2_dir, template)) as gw:
        assert "the format of this model's tool calls is unknown" in caplog.text
        answer = await gw.chat(tools=TOOLS)
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "tools"
        assert "--tool-parser" in answer.json()["error"]["message"]
        assert (await gw.chat(functions=[t["function"] for t in TOOLS])).json()["error"]["param"] == "functions"
        assert (await gw.chat(tools=TOOLS, tool_choice="none")).status_code == 200
        assert (await gw.chat()).status_code == 200


async def test_a_named_function_is_called_once(gw: Rig, smollm2_dir: Path) -> None:
    says(gw, f"{CALL}\n{CALL}\n{CALL}")
    named = {"type": "function", "function": {"name": "get_weather"}}
    message, finish = await both_ways(gw, tools=TOOLS, tool_choice=named)
    assert (finish, len(message["tool_calls"])) == ("tool_calls", 1)
    assert not fits(smollm2_dir, asked(gw).grammar, f"{CALL}\n{CALL}")
    message, _ = await both_ways(gw, tools=TOOLS, tool_choice="required")
    assert len(message["tool_calls"]) == 3
    for text in (CALL, f"{CALL}\n", f"{CALL}\n{CALL}", f"{CALL}\n{CALL}\n"):
        assert fits(smollm2_dir, asked(gw).grammar, text)


async def test_the_prompt_describes_the_tools_unless_tool_choice_is_none(gw: Rig) -> None:
    says(gw, CALL)
    await gw.chat(tools=TOOLS)
    assert "get_weather" in prompt_of(gw)
    assert "<tool_call>" in prompt_of(gw)  # this model's template does not know tools: the prompt describes them
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
    message, finish = await both_ways(
        gw,
        tools=[tool(), {"type": "function", "function": {"name": "stop"}}] if good == STOP else TOOLS,
        tool_choice=choice,
    )
    assert (finish, len(message["tool_calls"])) == ("tool_calls", 1)
    assert fits(smollm2_dir, asked(gw).grammar, good)
    assert not fits(smollm2_dir, asked(gw).grammar, bad)
    # The prefill pod gets the same grammar.
    assert gw.cluster.prefills[0].seen.prefilled[-1].grammar == asked(gw).grammar


async def test_parallel_tool_calls_off_ends_with_the_first(gw: Rig, smollm2_dir: Path) -> None:
    says(gw, f"{CALL}\n{CALL}" + " and more" * 50)
    message, finish = await both_ways(gw, tools=TOOLS, parallel_tool_calls=False)
    assert (finish, len(message["tool_calls"])) == ("tool_calls", 1)
    usage = (await gw.chat(tools=TOOLS, parallel_tool_calls=False)).json()["usage"]
    assert usage["completion_tokens"] < 60  # the pods were stopped
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


async def test_the_older_functions_form(gw: Rig) -> None:
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


async def test_tools_with_the_openai_sdk(gw: Rig) -> None:
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


async def test_templates_with_tool_support_get_tools_and_parsed_arguments(
    cluster: FakeCluster, tmp_path: Path, smollm2_dir: Path
) -> None:
    template = (
        "{{ tools | tojson if tools else 'no tools' }}{% for m in messages %}|{{ m.role }}:{{ m.content }}"
        "{% for c in m.tool_calls or [] %}[{{ c.function.name }} {{ c.function.arguments.city }}]{% endfor %}"
        "{{ m.name or '' }}{% endfor %}"
    )
    async with rig(cluster, with_template(tmp_path, smollm2_dir, template), tool_parser="hermes") as gw:
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
        message, finish = await both_ways(gw, tools=TOOLS)  # the special tokens choose the parser
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


@pytest.mark.parametrize("name", TOOL_PARSERS)
def test_a_tool_parser_of_the_settings_is_chosen_by_its_name(name: str) -> None:
    chosen = choose_tool_format(name, "", ())
    assert chosen is None if name == "auto" else chosen is not None and chosen.name == name


@pytest.mark.parametrize("name", REASONING_PARSERS)
def test_a_reasoning_parser_of_the_settings_is_chosen_by_its_name(name: str) -> None:
    chosen = choose_reasoning_format(name, "", ())
    assert chosen is None if name in ("auto", "none") else chosen is not None and chosen.name == name


async def test_each_of_several_answers_has_its_own_parser(gw: Rig) -> None:
    says(gw, CALL)  # the first of them: fake pods give the others other tokens
    first, second = (await gw.chat(tools=TOOLS, n=2)).json()["choices"]
    assert [call["function"]["name"] for call in first["message"]["tool_calls"]] == ["get_weather"]
    assert "tool_calls" not in second["message"]
    assert second["message"]["content"]
