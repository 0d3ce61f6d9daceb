"""Reads many streams of server-sent events at low cost: it records the arrival times of bytes and parses them later.

The load generator (loadtest/) parses events on arrival, which would take CPU from the gateway under test. It also does
not record the gateway's request ids and the amount of text per event.

The client connects and sends in bursts, reads until every stream has ended (with `--idle`: until stdin ends), and
writes JSON.

    python benchmarks/support/sse_client.py --port 8000 --model smollm2 --streams 256 --tokens 500
"""

from __future__ import annotations

import argparse
import asyncio
import bisect
import itertools
import json
import sys
import time
from array import array
from pathlib import Path
from typing import Any

import orjson
import uvloop


class SseStream(asyncio.Protocol):
    """One request on its own connection."""

    def __init__(self, request: bytes) -> None:
        self.request = request
        self.begun = asyncio.Event()
        self.ended = asyncio.Event()
        self.data = bytearray()
        self.at = array("d")  # Arrival time and size of each piece of data.
        self.size = array("q")
        self.transport: Any = None

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.at.append(time.monotonic())
        self.size.append(len(data))
        self.data += data
        if b"data: {" in data:
            self.begun.set()
        if b"[DONE]" in data or b'"error"' in data:
            self.ended.set()

    def connection_lost(self, exc: Exception | None) -> None:
        self.begun.set()
        self.ended.set()

    def events(self) -> list[tuple[float, dict[str, Any]]]:
        """Returns all events with the arrival time of their last byte."""
        ends = list(itertools.accumulate(self.size))
        events, at = [], 0
        while (at := self.data.find(b"data: {", at)) >= 0:
            end = self.data.index(b"\n\n", at)
            events.append((self.at[bisect.bisect_left(ends, end + 2)], orjson.loads(self.data[at + 6 : end])))
            at = end
        return events


def request_bytes(model: str, tokens: int, number: int) -> bytes:
    """Returns the HTTP request of stream `number`, with a unique prompt."""
    prompt = f"Stream {number}: say the alphabet."
    messages = [{"role": "user", "content": prompt}]
    body = {"model": model, "max_tokens": tokens, "stream": True, "ignore_eos": True, "messages": messages}
    raw = orjson.dumps(body)
    head = "POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {len(raw)}\r\n\r\n".encode() + raw


async def connect(port: int, requests: list[bytes]) -> list[SseStream]:
    connect_one, streams = asyncio.get_running_loop().create_connection, [SseStream(request) for request in requests]
    await asyncio.gather(*[connect_one(lambda stream=stream: stream, "127.0.0.1", port) for stream in streams])
    return streams


async def run(args: argparse.Namespace) -> None:
    """Runs all streams. Prints the time at which all have begun, and writes the records of all streams to --out."""
    requests = [request_bytes(args.model, args.tokens, i) for i in range(args.streams)]
    streams: list[SseStream] = []
    for at in range(0, len(requests), args.burst):
        burst = await connect(args.port, requests[at : at + args.burst])
        for stream in burst:
            stream.transport.write(stream.request)
        for stream in burst:
            await stream.begun.wait()
        streams += burst
    print(json.dumps({"begun": time.monotonic()}), flush=True)
    if args.idle:
        alive = sum(not s.ended.is_set() for s in streams)
        print(json.dumps({"alive": alive}), flush=True)
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)  # until the parent closes stdin
    else:
        for stream in streams:
            await stream.ended.wait()
        args.out.write_bytes(orjson.dumps([_record(stream) for stream in streams]))
    for stream in streams:
        stream.transport.close()


def _record(stream: SseStream) -> dict[str, Any]:
    """Returns the gateway's request id, (time, characters) of each text event, and the finish reason or error."""
    chunks: list[tuple[float, int]] = []
    request_id = finish = None
    for at, event in stream.events():
        if "error" in event:
            return {"id": request_id, "chunks": chunks, "finish": str(event["error"])}
        request_id = event["id"].split("-", 1)[1]
        for choice in event["choices"]:
            if text := choice["delta"].get("content"):
                chunks.append((at, len(text)))
            finish = choice["finish_reason"] or finish
    return {"id": request_id, "chunks": chunks, "finish": finish}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=256)
    burst_help = "requests that are sent together; the next burst follows their first events"
    parser.add_argument("--burst", type=int, default=64, help=burst_help)
    parser.add_argument("--idle", action="store_true", help="hold the streams open until stdin ends")
    parser.add_argument("--out", type=Path, help="file for the records of all streams")
    uvloop.run(run(parser.parse_args()))


if __name__ == "__main__":
    main()
