"""Requests as Codex sends them: python use_codex.py BASE_URL MODEL. Its tools, its items, its event stream."""

import json
import sys

import httpx

URL, MODEL = sys.argv[1:]
SHELL = {
    "type": "function",
    "name": "shell",
    "description": "Runs a command.",
    "strict": False,
    "parameters": {
        "type": "object",
        "properties": {"command": {"type": "array", "items": {"type": "string"}}, "workdir": {"type": "string"}},
        "required": ["command"],
        "additionalProperties": False,
    },
}
TOOLS = [
    SHELL,
    {"type": "local_shell"},
    {"type": "web_search", "external_web_access": False},
    {
        "type": "custom",
        "name": "apply_patch",
        "description": "Edits files.",
        "format": {"type": "grammar", "syntax": "lark", "definition": "start: /.+/"},
    },
    {"type": "namespace", "name": "mcp__docs", "description": "Documents.", "tools": [{**SHELL, "name": "search"}]},
]
HEADERS = {
    "originator": "codex_cli_rs",
    "session_id": "0199a213-81c0-7800-8aa1-bbab2a035a53",
    "accept": "text/event-stream",
    "authorization": "Bearer none",
}


def request(items: list[dict], **more: object) -> dict:
    return {
        "model": MODEL,
        "instructions": "You are a coding agent.",
        "input": items,
        "tools": TOOLS,
        "tool_choice": "auto",
        "parallel_tool_calls": False,
        "reasoning": None,
        "store": False,
        "stream": True,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "0199a213-81c0-7800-8aa1-bbab2a035a53",
        "text": {"verbosity": "low"},
        "max_output_tokens": 60,
        "temperature": 0,
        **more,
    }


def events(client: httpx.Client, body: dict) -> list[dict]:
    found = []
    with client.stream("POST", f"{URL}/responses", json=body, headers=HEADERS) as response:
        assert response.status_code == 200, response.read()
        kind = ""
        for line in response.iter_lines():
            if line.startswith("event: "):
                kind = line[7:]
            elif line.startswith("data: "):
                found.append(json.loads(line[6:]))
                assert found[-1]["type"] == kind
    return found


def user(text: str) -> dict:
    return {"type": "message", "role": "user", "content": [{"type": "input_text", "text": text}]}


with httpx.Client(timeout=120) as client:
    items = [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Sandboxed."}]},
        user("List the files."),
    ]
    first = events(client, request(items))
    assert first[0]["type"] == "response.created"
    assert first[-1]["type"] in ("response.completed", "response.incomplete")
    assert first[-1]["response"]["usage"]["output_tokens"] > 0
    done = [event["item"] for event in first if event["type"] == "response.output_item.done"]
    assert done == first[-1]["response"]["output"]
    forced = events(client, request(items, tool_choice={"type": "function", "name": "shell"}, max_output_tokens=200))
    [call, *_] = [e["item"] for e in forced if e["type"] == "response.output_item.done"]
    assert (call["type"], call["name"]) == ("function_call", "shell")
    output = {"type": "function_call_output", "call_id": call["call_id"], "output": "README.md"}
    again = events(client, request([*items, *done, call, output, user("And now?")]))
    assert again[-1]["type"] in ("response.completed", "response.incomplete")
    refused = client.post(
        f"{URL}/responses", json=request(items, tool_choice={"type": "custom", "name": "apply_patch"})
    )
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "tool_choice"
