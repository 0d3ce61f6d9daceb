"""pydantic-ai: python use_pydantic_ai.py BASE_URL MODEL. Text, streams, output types and tools over both APIs."""

import asyncio
import sys

from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider
from pydantic_ai.settings import ModelSettings

URL, MODEL = sys.argv[1:]


class Colour(BaseModel):
    """A colour."""

    red: int
    named: bool


async def use(model: OpenAIChatModel | OpenAIResponsesModel) -> None:
    short = ModelSettings(max_tokens=16, temperature=0.0)
    agent = Agent(model, instructions="Be brief.", model_settings=short)
    whole = await agent.run("Name a colour.")
    assert whole.output
    assert whole.usage.output_tokens > 0
    async with agent.run_stream("Name a colour.") as streamed:
        texts = [text async for text in streamed.stream_text(debounce_by=None)]
    assert texts[-1] == whole.output
    again = await agent.run("Another one.", message_history=whole.all_messages())
    assert again.output
    roomy = ModelSettings(max_tokens=200, temperature=0.0)
    for output in (NativeOutput(Colour), ToolOutput(Colour)):
        made = await Agent(model, output_type=output, model_settings=roomy, retries=3).run("Name a colour.")
        assert isinstance(made.output, Colour), output


async def main() -> None:
    provider = OpenAIProvider(base_url=URL, api_key="none")
    await use(OpenAIChatModel(MODEL, provider=provider))
    await use(OpenAIResponsesModel(MODEL, provider=provider))


asyncio.run(main())
