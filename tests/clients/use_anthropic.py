"""The Anthropic SDK: python use_anthropic.py BASE_URL MODEL. Whole, streamed, tools, counts, beta, errors."""

import asyncio
import sys

import anthropic

URL, MODEL = sys.argv[1].removesuffix("/v1"), sys.argv[2]
SAY = [{"role": "user", "content": "Name a colour."}]
GREEDY = {"temperature": 0}  # the SDK has no argument for it any more
WEATHER = {
    "name": "weather",
    "description": "Looks at the weather of a city.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string", "enum": ["Paris", "Rome"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
}


def plain(client: anthropic.Anthropic) -> None:
    assert MODEL in [m.id for m in client.models.list()]
    message = client.messages.create(model=MODEL, max_tokens=8, messages=SAY, extra_body=GREEDY)
    [block] = message.content
    assert block.type == "text"
    assert block.text
    assert message.stop_reason in ("end_turn", "max_tokens")
    assert message.usage.input_tokens + message.usage.cache_read_input_tokens > 0
    assert message._request_id
    with client.messages.stream(model=MODEL, max_tokens=8, messages=SAY, extra_body=GREEDY) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == final.content[0].text == block.text
    assert final.usage.output_tokens == message.usage.output_tokens
    total = message.usage.input_tokens + message.usage.cache_read_input_tokens
    assert final.usage.input_tokens + final.usage.cache_read_input_tokens == total
    assert client.messages.count_tokens(model=MODEL, messages=SAY).input_tokens == total
    events = [event.type for event in client.messages.create(model=MODEL, max_tokens=4, messages=SAY, stream=True)]
    assert events[:2] == ["message_start", "content_block_start"]
    assert events[-2:] == ["message_delta", "message_stop"]


def tools(client: anthropic.Anthropic) -> None:
    ask = [{"role": "user", "content": "How is the weather in Paris?"}]
    shared = {"model": MODEL, "max_tokens": 200, "tools": [WEATHER], "extra_body": GREEDY}
    called = client.messages.create(messages=ask, tool_choice={"type": "tool", "name": "weather"}, **shared)
    assert called.stop_reason == "tool_use"
    call = called.content[-1]
    assert call.type == "tool_use"
    assert call.input["city"] in ("Paris", "Rome")
    with client.messages.stream(messages=ask, tool_choice={"type": "tool", "name": "weather"}, **shared) as stream:
        final = stream.get_final_message()
    assert final.content[-1].input == call.input
    result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "Sunny, 20 degrees"}]}
    history = [*ask, {"role": "assistant", "content": called.content}, {"role": "user", "content": [result]}]
    answer = client.messages.create(messages=history, tool_choice={"type": "none"}, **shared)
    assert answer.content[0].text


def agent(client: anthropic.Anthropic) -> None:
    """A request like those of coding agents: cached system blocks, betas, thinking, tools of the server."""
    message = client.beta.messages.create(
        model=MODEL,
        max_tokens=32000,
        betas=["interleaved-thinking-2025-05-14", "context-management-2025-06-27"],
        thinking={"type": "enabled", "budget_tokens": 1024},
        system=[{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
        tools=[{"type": "web_search_20250305", "name": "web_search"}, WEATHER],
        stop_sequences=["\n"],
        metadata={"user_id": "u"},
        extra_body={"context_management": {"edits": []}},
        messages=SAY,
    )
    assert message.stop_reason in ("end_turn", "stop_sequence", "tool_use", "model_context_window_exceeded")


async def asynchronous() -> None:
    async with anthropic.AsyncAnthropic(base_url=URL, api_key="none", max_retries=0) as client:
        async with client.messages.stream(model=MODEL, max_tokens=8, messages=SAY) as stream:
            assert (await stream.get_final_message()).content[0].text
        said, image = "", {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}
        try:
            await client.messages.create(model=MODEL, max_tokens=8, messages=[{"role": "user", "content": [image]}])
        except anthropic.BadRequestError as e:
            said = e.body["error"]["message"]
        assert "'image' is not supported" in said
        try:
            await client.messages.create(model="other", max_tokens=8, messages=SAY)
        except anthropic.NotFoundError as e:
            said = e.body["error"]["type"]
        assert said == "not_found_error"


failed = []
with anthropic.Anthropic(base_url=URL, api_key="none", max_retries=0, timeout=300) as sync:
    for part in (plain, tools, agent):
        try:
            part(sync)
        except Exception as e:
            failed.append(f"{part.__name__}: {type(e).__name__}: {e}")
asyncio.run(asynchronous())
sys.exit("\n".join(failed) or None)
