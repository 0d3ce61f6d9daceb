"""instructor: python use_instructor.py BASE_URL MODEL. A model class as answer, in each of its modes."""

import asyncio
import sys

import instructor
import openai
from pydantic import BaseModel

URL, MODEL = sys.argv[1:]
MODES = (instructor.Mode.TOOLS, instructor.Mode.TOOLS_STRICT, instructor.Mode.JSON_SCHEMA)


class Colour(BaseModel):
    """A colour."""

    red: int
    named: bool


ASKED = {
    "model": MODEL,
    "response_model": Colour,
    "messages": [{"role": "user", "content": "Name a colour."}],
    "max_tokens": 200,
    "temperature": 0,
    "max_retries": 1,
}


def synchronous() -> None:
    client = openai.OpenAI(base_url=URL, api_key="none", max_retries=0)
    for mode in MODES:
        colour, raw = instructor.from_openai(client, mode=mode).create_with_completion(**ASKED)
        assert isinstance(colour, Colour), mode
        assert raw.usage.completion_tokens > 0
    [*parts] = instructor.from_openai(client, mode=instructor.Mode.TOOLS).create_partial(**ASKED)
    assert parts[-1].red is not None


async def asynchronous() -> None:
    client = openai.AsyncOpenAI(base_url=URL, api_key="none", max_retries=0)
    colour = await instructor.from_openai(client, mode=instructor.Mode.TOOLS).create(**ASKED)
    assert isinstance(colour, Colour)


synchronous()
asyncio.run(asynchronous())
