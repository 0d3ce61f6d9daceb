"""LlamaIndex: python use_llama_index.py BASE_URL MODEL. Completion, chat, streams, async, tools, embeddings."""

import asyncio
import math
import sys

from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.embeddings.openai_like import OpenAILikeEmbedding
from llama_index.llms.openai_like import OpenAILike

URL, MODEL = sys.argv[1:]
SETTINGS = {
    "model": MODEL,
    "api_base": URL,
    "api_key": "none",
    "context_window": 2048,
    "temperature": 0,
    "max_retries": 0,
}
SAY = [ChatMessage(role="user", content="Name a colour.")]


def weather(city: str) -> str:
    """Returns the weather of a city."""
    return f"It is sunny in {city}."


completing = OpenAILike(**SETTINGS, max_tokens=8, is_chat_model=False)
whole = completing.complete("Once upon a time")
assert whole.text
assert list(completing.stream_complete("Once upon a time"))[-1].text == whole.text

chatting = OpenAILike(**SETTINGS, max_tokens=16, is_chat_model=True, is_function_calling_model=True)
answer = chatting.chat(SAY)
assert answer.message.content
assert list(chatting.stream_chat(SAY))[-1].message.content == answer.message.content

roomy = OpenAILike(**SETTINGS, max_tokens=100, is_chat_model=True, is_function_calling_model=True)
tool = FunctionTool.from_defaults(weather)
called = roomy.chat_with_tools([tool], "What is the weather in Rome?", tool_required=True)
[call, *_] = roomy.get_tool_calls_from_response(called)
assert call.tool_name == "weather"
assert set(call.tool_kwargs) == {"city"}
done = roomy.predict_and_call([tool], "What is the weather in Rome?", error_on_no_tool_call=False)
assert str(done)  # the model decides whether it calls the tool


async def asynchronous() -> None:
    assert (await chatting.achat(SAY)).message.content == answer.message.content
    chunks = [chunk async for chunk in await chatting.astream_chat(SAY)]
    assert chunks[-1].message.content == answer.message.content


asyncio.run(asynchronous())
embedding = OpenAILikeEmbedding(model_name=MODEL, api_base=URL, api_key="none", max_retries=0)
[one, two] = embedding.get_text_embedding_batch(["red", "green"])
assert len(one) == len(two)
assert math.isclose(sum(x * x for x in one), 1.0, rel_tol=1e-3)
