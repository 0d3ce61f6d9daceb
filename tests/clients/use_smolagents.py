"""smolagents: python use_smolagents.py BASE_URL MODEL. The model alone, its stream, and one step of a tool agent."""

import sys

from smolagents import AgentMaxStepsError, OpenAIModel, ToolCallingAgent, tool  # noqa: F401

URL, MODEL = sys.argv[1:]
SAY = [{"role": "user", "content": [{"type": "text", "text": "Name a colour."}]}]


@tool
def weather(city: str) -> str:
    """Returns the weather of a city.

    Args:
        city: The city.
    """
    return f"It is sunny in {city}."


short = OpenAIModel(model_id=MODEL, api_base=URL, api_key="none", max_tokens=16, temperature=0)
whole = short.generate(SAY)
assert whole.content
assert whole.token_usage.output_tokens > 0
assert "".join(chunk.content or "" for chunk in short.generate_stream(SAY)) == whole.content
stopped = short.generate(SAY, stop_sequences=[" "])
assert " " not in stopped.content

roomy = OpenAIModel(model_id=MODEL, api_base=URL, api_key="none", max_tokens=120, temperature=0)
called = roomy.generate(SAY, tools_to_call_from=[weather])
assert called.tool_calls
assert called.tool_calls[0].function.name == "weather"
for stream in (False, True):  # the small model may not find the end, but each of its steps has to be a step
    agent = ToolCallingAgent(tools=[weather], model=roomy, max_steps=1, stream_outputs=stream, verbosity_level=0)
    agent.run("What is the weather in Rome?")
    [step, *_] = [s for s in agent.memory.steps if getattr(s, "step_number", None) == 1]
    assert step.tool_calls or step.error is None, step.error
