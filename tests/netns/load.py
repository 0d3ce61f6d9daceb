"""A client of the gateway: several streams at a time over kept connections, without a single retry.

    python -P tests/netns/load.py URL MODEL STREAMS

Writes a line "+" for each complete stream. At the end of standard input it prints one line of JSON: the number of
complete streams and the faults of the others.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import sys
import time
from typing import Any

import httpx

TOKENS = 16


async def one(http: httpx.AsyncClient, model: str, number: int) -> str:
    """Requests one stream. Returns its fault, or an empty text if it is complete."""
    body: dict[str, Any] = {
        "model": model,
        "messages": [{"role": "user", "content": f"{number}. Say something about the number {number}."}],
        "max_tokens": TOKENS,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    finish, usage, done, text = None, None, False, ""
    try:
        async with http.stream("POST", "/v1/chat/completions", json=body) as response:
            if response.status_code != 200:
                return f"{response.status_code}: {(await response.aread())[:300]!r}"
            async for line in response.aiter_lines():
                data = "" if line.startswith(":") else line.removeprefix("data: ")
                if data == "[DONE]":
                    done = True
                elif data:
                    event = json.loads(data)
                    if "error" in event:
                        return f"in the stream: {event['error']}"
                    usage = event.get("usage") or usage
                    for choice in event["choices"]:
                        finish = choice["finish_reason"] or finish
                        text += choice["delta"].get("content") or ""
    except httpx.HTTPError as e:
        return f"{type(e).__name__}: {e}"
    whole = done and finish == "length" and usage and usage["completion_tokens"] == TOKENS and text
    return "" if whole else f"cut off: {done=} {finish=} {usage=} {text=}"


async def main(url: str, model: str, streams: int) -> None:
    failures: list[str] = []
    answers, numbers, stopping = 0, itertools.count(1), asyncio.Event()

    async def keep(http: httpx.AsyncClient) -> None:
        nonlocal answers
        while not stopping.is_set():
            began = time.time()
            failure = await one(http, model, next(numbers))
            if failure:
                failures.append(f"{began:.1f} to {time.time():.1f}: {failure}")
                await asyncio.sleep(0.2)
            else:
                answers += 1
                print("+", flush=True)

    async with httpx.AsyncClient(base_url=url, timeout=120) as http:
        workers = [asyncio.create_task(keep(http)) for _ in range(streams)]
        await asyncio.to_thread(sys.stdin.read)
        stopping.set()
        await asyncio.gather(*workers)
    print(json.dumps({"answers": answers, "failures": failures}))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3])))
