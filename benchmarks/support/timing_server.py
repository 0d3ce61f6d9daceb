"""A server of known timing: it answers chat completions with streams of tokens and remembers when it sent each.

One process that only waits, and sends from a socket of its own for each stream, at once: what it notes before send() is
when the bytes are on their way. time.perf_counter() is one clock for all processes of a machine (CLOCK_MONOTONIC).

Lifecycle: listen -> print {"port": N} -> serve -> at SIGTERM print, by request id, when it had read the request and
when it sent each token.

    python benchmarks/support/timing_server.py --rate 20 --beat

--beat sends one token of every stream at the same moment, as an engine's steps do; otherwise each stream has a beat of
its own, from its request on.
"""

from __future__ import annotations

import argparse
import heapq
import re
import select
import signal
import socket
import sys
import time
from array import array
from dataclasses import dataclass, field
from typing import Any

import orjson

MODEL = "timing"
FIRST_S = 0.05  # from a request to its first token
HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ncache-control: no-cache\r\n"
    b"transfer-encoding: chunked\r\n\r\n"
)


def chunk(data: bytes) -> bytes:
    """One HTTP chunk."""
    return b"%x\r\n%b\r\n" % (len(data), data)


def event(delta: dict[str, Any], finish: str | None, **more: Any) -> bytes:
    """One event of a chat, about as long as a gateway's."""
    choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}
    told = {"id": "chatcmpl-0123456789abcdef", "object": "chat.completion.chunk", "created": 1_700_000_000}
    return b"data: " + orjson.dumps({**told, "model": MODEL, "choices": [choice], **more}) + b"\n\n"


TOKEN = chunk(event({"content": " word"}, None))


@dataclass(slots=True)
class Stream:
    """sent: when each token left."""

    connection: socket.socket
    tokens: int
    read_at: float
    sent: array[float] = field(default_factory=lambda: array("d"))


class TimingServer:
    """See above. step_s: between two tokens of a stream."""

    def __init__(self, step_s: float, *, beat: bool) -> None:
        self._step_s = step_s
        self._beat = beat
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
        self._listener.setblocking(False)
        self.port: int = self._listener.getsockname()[1]
        self._poll = select.epoll()
        self._poll.register(self._listener.fileno(), select.EPOLLIN)
        self._connections: dict[int, socket.socket] = {}
        self._read: dict[int, bytes] = {}
        self._due: list[tuple[float, int, Stream]] = []
        self._streams: dict[str, Stream] = {}
        self._number = 0
        self._running = True

    def stop(self) -> None:
        """Ends serve()."""
        self._running = False

    def serve(self) -> None:
        """Until stop(). It never sleeps while something is due soon: it has a core of its own."""
        while self._running:
            wait_s = self._due[0][0] - time.perf_counter() if self._due else 0.05
            for number, _ in self._poll.poll(wait_s - 0.002 if wait_s > 0.003 else 0, 64):
                self._ready(number)
            while self._due and self._due[0][0] <= time.perf_counter():
                due, number, stream = heapq.heappop(self._due)
                if self._send(stream):
                    heapq.heappush(self._due, (due + self._step_s, number, stream))

    def told(self) -> dict[str, Any]:
        """By request id."""
        return {key: {"read_at": s.read_at, "sent": list(s.sent)} for key, s in self._streams.items()}

    def _ready(self, number: int) -> None:
        if number == self._listener.fileno():
            connection, _ = self._listener.accept()
            connection.setblocking(False)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._connections[connection.fileno()] = connection
            self._read[connection.fileno()] = b""
            self._poll.register(connection.fileno(), select.EPOLLIN)
            return
        connection = self._connections[number]
        data = connection.recv(1 << 16)
        if not data:
            self._poll.unregister(number)
            del self._connections[number], self._read[number]
            connection.close()
            return
        self._read[number] += data
        head, found, body = self._read[number].partition(b"\r\n\r\n")
        length = re.search(rb"content-length: (\d+)", head)
        if found and len(body) >= (int(length[1]) if length else 0):
            self._read[number] = b""
            self._answer(connection, head, body)

    def _answer(self, connection: socket.socket, head: bytes, body: bytes) -> None:
        now = time.perf_counter()
        if head.startswith(b"GET"):
            models = orjson.dumps({"object": "list", "data": [{"id": MODEL, "object": "model"}]})
            connection.send(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(models), models))
            return
        key = re.search(rb"x-request-id: (\S+)", head)
        stream = Stream(connection, orjson.loads(body)["max_tokens"], now)
        self._streams[key[1].decode() if key else str(self._number)] = stream
        self._number += 1
        connection.send(HEAD)
        due = now + FIRST_S
        if self._beat:
            due = (due // self._step_s + 1) * self._step_s
        heapq.heappush(self._due, (due, self._number, stream))

    def _send(self, stream: Stream) -> bool:
        """The next token; whether one follows."""
        last = len(stream.sent) + 1 == stream.tokens
        data = TOKEN
        if last:
            usage = {"prompt_tokens": 1, "completion_tokens": stream.tokens, "total_tokens": stream.tokens + 1}
            data += chunk(event({}, "length")) + chunk(event({}, None, usage=usage)) + chunk(b"data: [DONE]\n\n")
            data += b"0\r\n\r\n"
        stream.sent.append(time.perf_counter())
        try:
            stream.connection.send(data)
        except OSError:
            return False  # the client left
        return not last


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", type=float, default=20.0, help="tokens of a stream per second")
    parser.add_argument("--beat", action="store_true", help="all streams in step")
    args = parser.parse_args()
    server = TimingServer(1 / args.rate, beat=args.beat)
    signal.signal(signal.SIGTERM, lambda *_: server.stop())
    print(orjson.dumps({"port": server.port}).decode(), flush=True)
    server.serve()
    sys.stdout.buffer.write(orjson.dumps(server.told()))


if __name__ == "__main__":
    main()
