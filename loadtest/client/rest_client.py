"""Client of the OpenAI REST API: request bodies, kept connections, streamed and whole answers."""

from __future__ import annotations

import asyncio
import functools
import ssl
import sys
import time
from typing import Any
from urllib.parse import urlsplit

import orjson

from common.errors import ConfigError, Unavailable, describe
from loadtest.client.base import (
    ABORT_WAIT_S,
    CACHED_PIECES,
    CONNECT_S,
    GRACE_S,
    RESPONSE_TIMEOUT_S,
    LoopYielder,
    RequestDraft,
    chosen_model,
)
from loadtest.client.http_connection import HttpConnection, ParseQueue
from loadtest.config import LoadConfig
from loadtest.run import RequestRecord
from loadtest.workload.sessions import ModelAnswer, PromptMessage, TextPiece

MAX_ERROR_BYTES = 1 << 16


class RestClient:
    """LoadClient over REST. The constructor must run inside the event loop."""

    def __init__(self, config: LoadConfig) -> None:
        parts = urlsplit(config.url)
        self._config, self._host = config, parts.hostname or ""
        try:
            self._port = parts.port or (443 if parts.scheme == "https" else 80)
        except ValueError as e:
            raise ConfigError(f"--url: {e}", field="url") from e
        self._ssl = ssl.create_default_context() if parts.scheme == "https" else None
        self._prefix = parts.path
        self._authority = parts.netloc.rpartition("@")[2]
        self._parse_queue = ParseQueue()
        self._idle: list[HttpConnection] = []
        self._model = config.model
        self._timeout_s = RESPONSE_TIMEOUT_S if config.deadline_s is None else config.deadline_s + GRACE_S
        self._cached_piece_json = functools.lru_cache(CACHED_PIECES)(self._piece_json)

    async def model(self) -> str:
        record = RequestRecord("", 0, 0, 0, 0, time.perf_counter())
        head = self._head("GET", "/v1/models", self._config.key_of(0), b"")
        exchange = await self._exchange(head, record, _WholeAnswer)
        if record.error == "connect":
            why = f"no server answers at {self._config.url} ({record.message})"
            raise Unavailable(f"{why}; start one with `baton serve MODEL`")
        if record.error:
            raise Unavailable(f"{self._config.url}: {record.message or record.error}")
        try:
            names = [entry["id"] for entry in orjson.loads(bytes(exchange.data))["data"]]
        except (ValueError, KeyError, TypeError) as e:
            raise Unavailable(f"{self._config.url}/v1/models is not a list of models") from e
        self._model = chosen_model(self._config, names)
        return self._model

    async def build(self, draft: RequestDraft) -> bytes:
        """Returns the bytes of the request, head and body."""
        config, turn = self._config, draft.turn
        fields: dict[str, Any] = {"model": self._model, "max_tokens": turn.output_tokens}
        fields |= {"temperature": config.temperature, "stream": config.stream}
        if config.ignore_eos:
            fields["ignore_eos"] = True
        if config.stream:
            fields["stream_options"] = {"include_usage": True}
        yielder = LoopYielder()
        if config.endpoint == "chat":
            messages = [
                b'{"role":"%b","content":"%b"}' % (m.role.encode(), await self._content(m, draft, yielder, b" "))
                for m in turn.messages
            ]
            prompt = b'"messages":[' + b",".join(messages) + b"]"
        else:
            separator = b" " if config.form == "text" else b","
            prompt = separator.join([await self._content(m, draft, yielder, separator) for m in turn.messages])
            prompt = b'"prompt":"%b"' % prompt if config.form == "text" else b'"prompt":[%b]' % prompt
        body = orjson.dumps(fields)[:-1] + b"," + prompt + b"}"
        path = "/v1/chat/completions" if config.endpoint == "chat" else "/v1/completions"
        extra = {"x-request-id": draft.request_id, "x-session-affinity": draft.affinity}
        if config.deadline_s is not None:
            extra["x-request-timeout"] = f"{config.deadline_s:g}"
        return self._head("POST", path, draft.key, body, extra) + body

    async def send(self, request: bytes, record: RequestRecord) -> None:
        await self._exchange(request, record, _StreamedAnswer if self._config.stream else _WholeAnswer)

    async def close(self) -> None:
        """Closes the idle connections."""
        for connection in self._idle:
            connection.close()
        self._idle.clear()
        await asyncio.sleep(0)  # transports close in the next loop iteration

    async def _exchange(self, request: bytes, record: RequestRecord, kind: type[_RestExchange]) -> _RestExchange:
        record.sent_s = time.perf_counter()
        while True:
            exchange = kind(record)
            try:
                connection = self._take_idle() or await self._connect()
            except (OSError, TimeoutError) as e:
                record.fail("connect", describe(e, limit_s=CONNECT_S), time.perf_counter())
                return exchange
            stale = connection.reused
            await exchange.run(connection, request, self._timeout_s - (time.perf_counter() - record.sent_s))
            if stale and not connection.began and record.error == "disconnected":
                # The server closed the idle connection before it read the request, so a retry is safe.
                record.error = record.message = ""
                continue
            if connection.idle:
                self._idle.append(connection)
            return exchange

    def _take_idle(self) -> HttpConnection | None:
        while self._idle:
            if (connection := self._idle.pop()).idle:
                return connection
        return None

    async def _connect(self) -> HttpConnection:
        loop = asyncio.get_running_loop()
        name = self._host if self._ssl is not None else None
        async with asyncio.timeout(CONNECT_S):
            _, connection = await loop.create_connection(
                lambda: HttpConnection(self._parse_queue), self._host, self._port, ssl=self._ssl, server_hostname=name
            )
        if self._ssl is None and sys.platform == "linux":
            connection.use_kernel_timestamps()
        return connection

    def _head(self, method: str, path: str, key: str, body: bytes, extra: dict[str, str] | None = None) -> bytes:
        headers = {"host": self._authority, **({"authorization": f"Bearer {key}"} if key else {}), **(extra or {})}
        if body:
            headers |= {"content-type": "application/json", "content-length": str(len(body))}
        lines = [f"{method} {self._prefix}{path} HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items())]
        return "\r\n".join([*lines, "", ""]).encode()

    async def _content(self, message: PromptMessage, draft: RequestDraft, yielder: LoopYielder, join: bytes) -> bytes:
        """Returns one message as a fragment of JSON. join: between two pieces."""
        if self._config.form == "text" and (earlier := draft.earlier_answer(message)) is not None:
            return orjson.dumps(earlier.text)[1:-1]
        return join.join([part async for part in yielder.each(self._cached_piece_json, message.pieces)])

    def _piece_json(self, piece: TextPiece) -> bytes:
        if self._config.form == "text":
            return piece.text().encode()
        return orjson.dumps(piece.ids(*self._config.vocab))[1:-1]


class _RestExchange:
    """The HttpExchange of one request. Fills the record from the response."""

    def __init__(self, record: RequestRecord) -> None:
        self.record = record
        self.data = bytearray()
        self._status = 0
        self._done = asyncio.get_running_loop().create_future()
        self._connection: HttpConnection | None = None

    async def run(self, connection: HttpConnection, request: bytes, timeout_s: float) -> None:
        """Sends the request and returns when the record is complete."""
        self._connection = connection
        loop = asyncio.get_running_loop()
        timers = [loop.call_later(max(0.0, timeout_s), self._expire)]
        if self.record.abort_after == 0:
            timers.append(loop.call_later(ABORT_WAIT_S, self._abort))
        connection.start(self, request)
        try:
            await self._done
        finally:
            for timer in timers:
                timer.cancel()
            if not self._done.done():  # cancelled from outside
                connection.close()

    def headers(self, status: int, at: float) -> None:
        self._status = status

    def body(self, data: bytes, at: float) -> None:
        if len(self.data) < MAX_ERROR_BYTES or self._status == 200:
            self.data += data

    def ended(self, at: float) -> None:
        if self._status == 200:
            self.answered(at)
        else:
            kind, message = _error(bytes(self.data))
            self.record.fail(f"http {self._status} {kind}".strip(), message, at)
        self._finish(at)

    def answered(self, at: float) -> None:
        """Called when the body of a response with status 200 is complete."""

    def lost(self, why: str, at: float) -> None:
        self.record.fail("disconnected", why, at)
        self._finish(at)

    def usage(self, usage: dict[str, Any]) -> None:
        """Stores the server's token counts."""
        record = self.record
        record.tokens = usage.get("completion_tokens") or record.tokens
        record.prompt_tokens = usage.get("prompt_tokens")
        record.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")

    def _abort(self) -> None:
        if not self._done.done():
            self.record.aborted = True
            self._close()

    def _expire(self) -> None:
        if not self._done.done():
            self.record.fail("timeout", "no complete answer before the timeout", time.perf_counter())
            self._close()

    def _close(self) -> None:
        assert self._connection is not None
        self._connection.close()
        self._finish(time.perf_counter())

    def _finish(self, at: float) -> None:
        record = self.record
        record.ended_s = record.ended_s or at
        record.tokens = record.tokens or len(record.event_times)
        if not self._done.done():
            self._done.set_result(None)


class _WholeAnswer(_RestExchange):
    """An answer that is not streamed. It has no time to first token."""

    def answered(self, at: float) -> None:
        if not self.record.planned_output:
            return  # GET /v1/models
        try:
            answer = orjson.loads(bytes(self.data))
            choice = answer["choices"][0]
            text = choice["message"]["content"] if "message" in choice else choice["text"]
            self.record.finish = choice["finish_reason"]
        except (ValueError, KeyError, IndexError, TypeError) as e:
            self.record.fail("protocol", f"not a completion object: {describe(e)}", at)
            return
        self.record.answer = ModelAnswer(text or "")
        self.usage(answer.get("usage") or {})


class _StreamedAnswer(_RestExchange):
    """An answer as server-sent events."""

    def __init__(self, record: RequestRecord) -> None:
        super().__init__(record)
        self._events = SseParser()
        self._texts: list[str] = []

    def body(self, data: bytes, at: float) -> None:
        if self._status != 200:
            super().body(data, at)
            return
        try:
            for event in self._events.feed(data):
                self._read(event, at)
        except (ValueError, KeyError, IndexError, TypeError, AttributeError) as e:
            self.record.fail("protocol", f"not an event of a completion: {describe(e)}", at)
            self._close()

    def answered(self, at: float) -> None:
        if not self.record.finish:
            self.record.fail("incomplete", "the stream ended without a finish reason", at)
        self.record.answer = ModelAnswer("".join(self._texts))

    def _read(self, event: bytes, at: float) -> None:
        if event == b"[DONE]" or self._done.done():
            return
        record, chunk = self.record, orjson.loads(event)
        if choices := chunk.get("choices"):
            choice: dict[str, Any] = choices[0]
            delta = choice.get("delta")
            text = choice.get("text") if delta is None else delta.get("content") or delta.get("reasoning_content")
            if text:
                record.event_times.append(at)
                self._texts.append(text)
                if record.abort_after is not None and len(record.event_times) >= record.abort_after > 0:
                    self._abort()
            if finish := choice.get("finish_reason"):
                record.finish, record.ended_s = finish, at
                if not record.event_times:  # tokens without text, for example half of a character
                    record.event_times.append(at)
        elif "error" in chunk:
            kind, message = _error(event)
            record.fail(f"stream {kind}".strip(), message, at)
        if usage := chunk.get("usage"):
            self.usage(usage)


def _error(body: bytes) -> tuple[str, str]:
    """Returns kind and message of an OpenAI error body. The message of another body is its first 200 bytes."""
    try:
        error = orjson.loads(body)["error"]
        return str(error.get("code") or error.get("type") or ""), str(error.get("message") or "")
    except (ValueError, KeyError, TypeError, AttributeError):
        return "", body[:200].decode(errors="replace")


class SseParser:
    """Incremental parser of server-sent events. Drops comments and all fields but `data`."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        """Returns the data of each event that these bytes complete. Lines are joined by newlines."""
        data = self._rest + data if self._rest else data
        if b"\r" in data:
            data, cr = (data[:-1], b"\r") if data.endswith(b"\r") else (data, b"")  # maybe the first half of CR LF
            data = data.replace(b"\r\n", b"\n").replace(b"\r", b"\n") + cr
        *events, self._rest = data.split(b"\n\n")
        payloads = []
        for event in events:
            if event.startswith(b"data: ") and b"\n" not in event:  # the usual case
                payloads.append(event[6:])
            elif lines := [line[5:] for line in event.split(b"\n") if line.startswith(b"data:")]:
                payloads.append(b"\n".join(line.removeprefix(b" ") for line in lines))
        return payloads
