"""litellm: python use_litellm.py BASE_URL MODEL."""

import asyncio
import sys

import litellm

URL, MODEL = sys.argv[1:]
ASK = {
    "model": f"openai/{MODEL}",
    "api_base": URL,
    "api_key": "none",
    "messages": [{"role": "user", "content": "Name a colour."}],
    "max_tokens": 8,
    "temperature": 0,
}

whole = litellm.completion(**ASK)
assert whole.choices[0].message.content
chunks = list(litellm.completion(**ASK, stream=True, stream_options={"include_usage": True}))
assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == whole.choices[0].message.content
assert any(getattr(c, "usage", None) and c.usage.completion_tokens == whole.usage.completion_tokens for c in chunks)
text = litellm.text_completion(
    model=f"text-completion-openai/{MODEL}", api_base=URL, api_key="none", prompt="Once", max_tokens=4
)
assert text.choices[0].text


async def asynchronous() -> None:
    answer = await litellm.acompletion(**ASK)
    assert answer.choices[0].message.content == whole.choices[0].message.content


asyncio.run(asynchronous())
