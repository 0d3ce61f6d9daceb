"""langchain-openai: python use_langchain.py BASE_URL MODEL."""

import asyncio
import sys

from langchain_openai import ChatOpenAI
from pydantic import BaseModel

URL, MODEL = sys.argv[1:]


class Colour(BaseModel):
    """A colour."""

    red: int
    named: bool


chat = ChatOpenAI(
    base_url=URL, api_key="none", model=MODEL, max_tokens=8, temperature=0, max_retries=2, stream_usage=True
)
whole = chat.invoke("Name a colour.")
assert whole.content
assert whole.usage_metadata["output_tokens"] > 0
chunks = list(chat.stream("Name a colour."))
assert "".join(c.content for c in chunks) == whole.content
assert any(c.usage_metadata for c in chunks)
roomy = ChatOpenAI(base_url=URL, api_key="none", model=MODEL, max_tokens=200, temperature=0, max_retries=0)
assert isinstance(roomy.with_structured_output(Colour, method="json_schema").invoke("Name a colour."), Colour)
called = roomy.bind_tools([Colour], tool_choice="required").invoke("Name a colour.")
assert set(called.tool_calls[0]["args"]) == {"red", "named"}


async def asynchronous() -> None:
    assert (await chat.ainvoke("Name a colour.")).content == whole.content
    assert "".join([c.content async for c in chat.astream("Name a colour.")]) == whole.content


asyncio.run(asynchronous())
