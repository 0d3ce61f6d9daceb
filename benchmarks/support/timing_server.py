"""A server with known timing: it streams chat completions and records when it sent each token.

The server does nothing else, and each stream has its own socket, so the time before send() is the time at which the
bytes leave. time.perf_counter() is one clock for all processes of a machine (CLOCK_MONOTONIC).

It prints {"port": N} and serves until SIGTERM. Then it prints, by request id, the time at which it had read the request
and the times at which it sent each token.

    python benchmarks/support/timing_server.py --rate 20 --beat

With --beat it sends one token of every stream at the same moment, as the steps of an engine do. Without it, each stream
has its own schedule, which starts with its request.
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
FIRST_S = 0.05  # Time from a request to its first token.
HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ncache-control: no-cache\r\n"
    b"transfer-encoding: chunked\r\n\r\n"
)


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def event(delta: dict[str, Any], finish: str | None, **more: Any) -> bytes:
    """Encodes one chat event, about as long as an event of the gateway."""
    choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}
    head = {"id": "chatcmpl-0123456789abcdef", "object": "chat.completion.chunk", "created": 1_700_000_000}
    return b"data: " + orjson.dumps({**head, "model": MODEL, "choices": [choice], **more}) + b"\n\n"


TOKEN = chunk(event({"content": " word"}, None))


@dataclass(slots=True)
class Stream:
    connection: socket.socket
    tokens: int
    read_at: float  # When the request had been read.
    sent: array[float] = field(default_factory=lambda: array("d"))  # When each token was sent.


class TimingServer:
    """The server. step_s is the time between two tokens of a stream."""

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
        self.streams: dict[str, Stream] = {}  # By request id.
        self._number = 0
        self.running = True

    def serve(self) -> None:
        """Serves while `running`. Polls without sleeping while a token is due soon: the server has its own core."""
        while self.running:
            wait_s = self._due[0][0] - time.perf_counter() if self._due else 0.05
            for number, _ in self._poll.poll(wait_s - 0.002 if wait_s > 0.003 else 0, 64):
                self._ready(number)
            while self._due and self._due[0][0] <= time.perf_counter():
                due, number, stream = heapq.heappop(self._due)
                if self._send(stream):
                    heapq.heappush(self._due, (due + self._step_s, number, stream))

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
        self.streams[key[1].decode() if key else str(self._number)] = stream
        self._number += 1
        connection.send(HEAD)
        due = now + FIRST_S
        if self._beat:
            due = (due // self._step_s + 1) * self._step_s
        heapq.heappush(self._due, (due, self._number, stream))

    def _send(self, stream: Stream) -> bool:
        """Sends the next token. Returns whether another token follows."""
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
    parser.add_argument("--beat", action="store_true", help="send the tokens of all streams at the same moments")
    args = parser.parse_args()
    server = TimingServer(1 / args.rate, beat=args.beat)
    signal.signal(signal.SIGTERM, lambda *_: setattr(server, "running", False))
    print(orjson.dumps({"port": server.port}).decode(), flush=True)
    server.serve()
    times = {key: {"read_at": s.read_at, "sent": list(s.sent)} for key, s in server.streams.items()}
    sys.stdout.buffer.write(orjson.dumps(times))


if __name__ == "__main__":
    main()
