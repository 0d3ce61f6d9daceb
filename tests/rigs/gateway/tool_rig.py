"""Helpers for tests of tools, reasoning and grammars: scripted answers, and the requests that pods got."""

from __future__ import annotations

import functools
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import openai

from common.grammar.compiler import GrammarCompiler, GrammarTokenizer
from common.types import Grammar
from gateway.text.tools.harmony import HarmonyFormat
from tests.rigs.gateway.gateway_rig import Rig
from tests.rigs.tool_formats import TEMPLATES

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


@asynccontextmanager
async def client_of(gw: Rig) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{gw.url}/v1", api_key="x", max_retries=0) as client:
        yield client


def says(gw: Rig, text: str) -> None:
    """Makes `text` the answer of every request from now on."""
    tokenizer = gw.gateway.tokenizer
    ids = [*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_ids[0]]
    gw.cluster.script = lambda _request: ids


def asked(gw: Rig) -> Any:
    """Returns the last request that a pod got."""
    return gw.cluster.decodes[0].seen.reserved[-1]


def prompt_of(gw: Rig) -> str:
    text: str = gw.gateway.tokenizer.raw.decode(asked(gw).prompt_ids, skip_special_tokens=False)
    return text


async def both_ways(gw: Rig, **fields: Any) -> tuple[dict[str, Any], str | None]:
    """Returns the message and the finish reason of a chat, and checks that a stream gives the same."""
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


@functools.cache
def compiler_of(model_dir: Path) -> GrammarCompiler:
    return GrammarCompiler(GrammarTokenizer(model_dir, eos_ids=(2,)))


def fits(model_dir: Path, grammar: Grammar | None, text: str) -> bool:
    assert grammar is not None
    compiler = compiler_of(model_dir)
    matcher, ids = compiler.compile(grammar).matcher(), compiler.tokenizer.get().tokenize_str(text)
    return all(map(matcher.consume_token, ids)) and matcher.is_accepting()


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


def with_template(tmp_path: Path, model_dir: Path, template: str) -> Path:
    """Returns a model directory with another chat template."""
    for name in ("tokenizer.json", "config.json", "generation_config.json"):
        (tmp_path / name).write_bytes((model_dir / name).read_bytes())
    config = json.loads((model_dir / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": template}))
    return tmp_path


def harmony_model(model_dir: Path, source: Path) -> Path:
    """Makes `model_dir` the directory of a model with Harmony's special tokens and the template of gpt-oss."""
    raw = json.loads((source / "tokenizer.json").read_text())
    for i, name in enumerate(HarmonyFormat.markers):
        raw["added_tokens"][3 + i] |= {"content": name, "special": True}
        raw["model"]["vocab"] = {name if v == 3 + i else k: v for k, v in raw["model"]["vocab"].items()}
    (model_dir / "tokenizer.json").write_text(json.dumps(raw))
    (model_dir / "tokenizer_config.json").write_text("{}")
    ends = [3 + HarmonyFormat.markers.index(name) for name in ("<|return|>", "<|call|>")]
    (model_dir / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    config = json.loads((source / "config.json").read_text())
    (model_dir / "config.json").write_text(json.dumps({**config, "architectures": ["GptOssForCausalLM"]}))
    (model_dir / "chat_template.jinja").write_bytes((TEMPLATES / "gpt-oss-120b.jinja").read_bytes())
    return model_dir
