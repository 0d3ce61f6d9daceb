"""openai-agents: python use_openai_agents.py BASE_URL MODEL. Runs, streams and tools over chats and responses."""

import asyncio
import json
import sys

from agents import (
    Agent,
    ModelBehaviorError,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI

URL, MODEL = sys.argv[1:]
called: list[str] = []


@function_tool
def weather(city: str) -> str:
    """Returns the weather of a city."""
    called.append(city)
    return f"It is sunny in {city}."


@function_tool
def stop() -> str:
    """Stops."""
    called.append("stop")
    return "stopped"


async def plain(model: object) -> None:
    agent = Agent(
        name="a", instructions="Be brief.", model=model, model_settings=ModelSettings(max_tokens=16, temperature=0)
    )
    whole = await Runner.run(agent, "Name a colour.")
    assert whole.final_output
    streamed = Runner.run_streamed(agent, "Name a colour.")
    kinds = [event.type async for event in streamed.stream_events()]
    assert "raw_response_event" in kinds
    assert streamed.final_output == whole.final_output
    again = await Runner.run(agent, [*whole.to_input_list(), {"role": "user", "content": "Another one."}])
    assert again.final_output


async def tools(model: object, choice: str, max_tokens: int) -> None:
    called.clear()
    agent = Agent(
        name="a",
        model=model,
        tools=[weather, stop],
        model_settings=ModelSettings(tool_choice=choice, max_tokens=max_tokens, temperature=0),
        tool_use_behavior="stop_on_first_tool",
    )
    whole = await Runner.run(agent, "What is the weather in Rome?", max_turns=2)
    assert whole.final_output
    streamed = Runner.run_streamed(agent, "What is the weather in Rome?", max_turns=2)
    async for _ in streamed.stream_events():
        pass
    assert streamed.final_output
    if max_tokens >= 100 and choice != "auto":
        assert called, "no tool was called"
        json.dumps(whole.to_input_list())


async def main() -> None:
    set_tracing_disabled(True)
    async with AsyncOpenAI(base_url=URL, api_key="none", max_retries=0) as client:
        for kind in (OpenAIChatCompletionsModel, OpenAIResponsesModel):
            model = kind(model=MODEL, openai_client=client)
            await plain(model)
            for choice in ("auto", "required", "weather"):
                for max_tokens in (8, 20, 100):  # the first ones cut the call
                    try:
                        await tools(model, choice, max_tokens)
                    except ModelBehaviorError as e:  # this client takes no response that max_output_tokens cut
                        if kind is not OpenAIResponsesModel or "reason='max_output_tokens'" not in str(e):
                            raise
                    except Exception as e:
                        raise AssertionError(f"{kind.__name__}, {choice}, {max_tokens} tokens") from e


asyncio.run(main())
