"""The OpenAI SDK: python use_openai.py BASE_URL MODEL. Plain, async, streamed, parsed, with tools, responses."""

import asyncio
import json
import sys

import openai
from pydantic import BaseModel

URL, MODEL = sys.argv[1:]
SAY = [{"role": "user", "content": "Name a colour."}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "enum": ["Paris", "Rome"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


class Colour(BaseModel):
    red: int
    named: bool


def plain(client: openai.OpenAI) -> None:
    assert MODEL in [m.id for m in client.models.list()]
    chat = client.chat.completions.create(model=MODEL, messages=SAY, max_tokens=8, temperature=0, logprobs=True)
    assert chat.choices[0].message.content
    assert len(chat.choices[0].logprobs.content) == chat.usage.completion_tokens
    stream = client.chat.completions.create(
        model=MODEL, messages=SAY, max_tokens=8, temperature=0, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == chat.choices[0].message.content
    assert chunks[-1].usage == chat.usage.model_copy(
        update={"prompt_tokens_details": chunks[-1].usage.prompt_tokens_details}
    )
    done = client.completions.create(model=MODEL, prompt=["One", "Two"], max_tokens=4, temperature=0)
    assert [c.index for c in done.choices] == [0, 1]
    many = client.chat.completions.create(model=MODEL, messages=SAY, max_tokens=4, n=2, seed=1)
    assert [c.index for c in many.choices] == [0, 1]


def parse(client: openai.OpenAI) -> None:
    answer = client.chat.completions.parse(model=MODEL, messages=SAY, response_format=Colour, max_tokens=200)
    assert isinstance(answer.choices[0].message.parsed, Colour)


def tools(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=SAY, tools=[WEATHER], tool_choice="required", max_tokens=100, temperature=0
    )
    call = answer.choices[0].message.tool_calls[0]
    assert answer.choices[0].finish_reason == "tool_calls"
    assert json.loads(call.function.arguments)["city"] in ("Paris", "Rome")
    with client.chat.completions.stream(
        model=MODEL, messages=SAY, tools=[WEATHER], tool_choice="required", max_tokens=100, temperature=0
    ) as stream:
        final = stream.get_final_completion()
    assert final.choices[0].message.tool_calls[0].function.arguments == call.function.arguments


def responses(client: openai.OpenAI) -> None:
    answer = client.responses.create(model=MODEL, input="Name a colour.", max_output_tokens=16, temperature=0)
    assert answer.output_text
    kinds = []
    for event in client.responses.create(
        model=MODEL, input="Name a colour.", max_output_tokens=16, temperature=0, stream=True
    ):
        kinds.append(event.type)
    assert kinds[0] == "response.created"
    assert kinds[-1] in ("response.completed", "response.incomplete")


async def asynchronous() -> None:
    async with openai.AsyncOpenAI(base_url=URL, api_key="none", max_retries=0) as client:
        stream = await client.chat.completions.create(model=MODEL, messages=SAY, max_tokens=8, stream=True)
        assert [chunk async for chunk in stream][-1].choices[0].finish_reason in ("stop", "length")
        param = None
        try:
            await client.chat.completions.create(model=MODEL, messages=SAY, temperature=9)
        except openai.BadRequestError as e:
            param = e.param
        assert param == "temperature"


failed = []
with openai.OpenAI(base_url=URL, api_key="none", max_retries=0) as sync:
    for part in (plain, parse, tools, responses):
        try:
            part(sync)
        except Exception as e:
            failed.append(f"{part.__name__}: {type(e).__name__}: {e}")
asyncio.run(asynchronous())
sys.exit("\n".join(failed) or None)
