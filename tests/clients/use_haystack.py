"""haystack: python use_haystack.py BASE_URL MODEL. Chat, stream, tools, a pipeline, embeddings."""

import sys
from typing import Annotated

from haystack import Pipeline
from haystack.components.builders import ChatPromptBuilder
from haystack.components.embedders import OpenAITextEmbedder
from haystack.components.generators.chat import OpenAIChatGenerator
from haystack.dataclasses import ChatMessage
from haystack.tools import create_tool_from_function
from haystack.utils import Secret

URL, MODEL = sys.argv[1:]
KEY = Secret.from_token("none")
SAY = [ChatMessage.from_user("Name a colour.")]


def weather(city: Annotated[str, "a city"]) -> str:
    """Returns the weather of a city."""
    return f"It is sunny in {city}."


def generator(max_tokens: int, **more: object) -> OpenAIChatGenerator:
    kwargs = {"max_tokens": max_tokens, "temperature": 0, **more.pop("kwargs", {})}
    return OpenAIChatGenerator(
        api_key=KEY, api_base_url=URL, model=MODEL, generation_kwargs=kwargs, max_retries=0, **more
    )


[whole] = generator(16).run(SAY)["replies"]
assert whole.text
assert whole.meta["usage"]["completion_tokens"] > 0
chunks: list[str] = []
[streamed] = generator(16, streaming_callback=lambda chunk: chunks.append(chunk.content)).run(SAY)["replies"]
assert streamed.text == whole.text == "".join(chunks)

tool = create_tool_from_function(weather)
[called] = generator(100, tools=[tool], kwargs={"tool_choice": "required"}).run(SAY)["replies"]
assert called.tool_calls
assert called.tool_calls[0].tool_name == "weather"
answered = ChatMessage.from_tool("It is sunny.", origin=called.tool_calls[0])
assert generator(16, tools=[tool]).run([*SAY, called, answered])["replies"]

pipeline = Pipeline()
pipeline.add_component("prompt", ChatPromptBuilder(template=[ChatMessage.from_user("Name a {{ thing }}.")]))
pipeline.add_component("model", generator(16))
pipeline.connect("prompt.prompt", "model.messages")
assert pipeline.run({"prompt": {"thing": "colour"}})["model"]["replies"][0].text == whole.text

embedder = OpenAITextEmbedder(api_key=KEY, api_base_url=URL, model=MODEL)
assert len(embedder.run("red")["embedding"]) > 8
