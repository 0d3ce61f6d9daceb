"""The gateway with fake pods: HTTP requests of all routes, bytes of HTTP connections, and gRPC calls.

HTTP runs in this process, without sockets: requests go to the ASGI application, bytes to the protocol class.
An input of `http-bodies` is an HTTP request in plain form: request line, headers, an empty line, the body.
An input of `http-bytes` is what a client sends on one connection. Its checksum decides where it is cut into reads.
An input of `inference` is the name of a method of the gRPC service, a line end, and a message.
"""

from __future__ import annotations

import asyncio
import codecs
import json
import zlib
from collections.abc import Callable, Sequence
from random import Random
from typing import Any
from urllib.parse import unquote

import grpc
import orjson
from google.protobuf.message import DecodeError, Message

from cli.demo.model import demo_model
from cli.stack.supervisor import PortLease
from common import rpc
from common.pb import inference_pb2 as pb
from gateway.api.openai.responses.store import StoredResponse
from gateway.app import build_app
from tests.fuzz.mutators import ODD, bend, bent_message, mutate, words
from tests.fuzz.target import AsyncFuzzTarget
from tests.rigs.gateway.gateway_rig import MODEL, Rig, rig
from tests.rigs.pods.fake_pods import fake_cluster

_MESSAGES = [{"role": "user", "content": "Hi"}]
_TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
_SCHEMA = {"type": "json_schema", "json_schema": {"name": "s", "schema": {"type": "object"}}}
#: A body for each route that takes one.
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "Hi", "stop": ["x"], "logprobs": 1, "logit_bias": {"5": 1}, "n": 1, "echo": False},
    "/v1/chat/completions": {
        "messages": _MESSAGES,
        "top_logprobs": 1,
        "logprobs": True,
        "tools": [_TOOL],
        "response_format": _SCHEMA,
        "tool_choice": "auto",
        "stream_options": {"include_usage": True},
        "chat_template_kwargs": {},
    },
    "/v1/responses": {"input": "Hi", "tools": [], "text": {"format": {"type": "text"}}, "store": False},
    "/v1/embeddings": {"input": ["Hi", "you"], "encoding_format": "float", "dimensions": None},
    "/tokenize": {"prompt": "Hi", "add_special_tokens": True},
    "/detokenize": {"tokens": [1, 2, 3]},
}
#: Fields of all routes that generate text.
COMMON: dict[str, Any] = {
    "model": MODEL,
    "max_tokens": 4,
    "temperature": 1.0,
    "top_p": 0.9,
    "top_k": 3,
    "min_p": 0.1,
    "seed": 1,
    "stream": False,
    "priority": 0,
    "cache_salt": "s",
    "user": "u",
    "ignore_eos": False,
    "min_tokens": 0,
    "stop_token_ids": [7],
    "presence_penalty": 0.0,
    "allowed_token_ids": [66],
    "bad_words": ["no"],
    "prompt_logprobs": None,
    "structured_outputs": None,
    "metadata": {},
    "use_beam_search": False,
    "length_penalty": 1.0,
    "early_stopping": False,
}
_PATHS = f"""
/v1/models /v1/models/{MODEL} /v1/responses/r /v1/responses/r/input_items?limit=1&order=asc /debug/requests/r
/health /ready /live /version /metrics /openapi.json / /reset_prefix_cache /x
/dashboard/state /dashboard/requests /dashboard/requests/r /dashboard/page/../app.py
""".split()
_HEADERS = (b"\nx-request-timeout: ", b"\nx-request-id: \xff", b"\ntraceparent: 00-", b"\nauthorization: Bearer ")
_HEADERS += (b"\ncontent-length: 9", b"\ncontent-encoding: gzip", b"?a=%00", b"%2e%2e/", b"HEAD ", b"PUT ")
_OUR_FAULT = (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN)
_END_S = 15.0  #: Longest time of one request.


def plain_body(rng: Random, path: str) -> bytes:
    """Returns a body for a route: JSON with some changed values, or bytes that are not JSON."""
    first = list(BODIES[path])[:1]
    body = {**COMMON, **BODIES[path]}
    for key in rng.sample(list(body), rng.randrange(len(body))):
        if key not in ("model", *first):
            del body[key]
    for _ in range(rng.randrange(1, 4)):
        body = bend(body, rng)
        if not isinstance(body, dict) or not body:
            break
    raw = json.dumps(body).encode("utf-8", "surrogatepass")  # orjson refuses lone surrogates and large numbers
    kind = rng.random()
    if kind < 0.14:
        return mutate(raw, rng)
    if kind < 0.16:
        return rng.choice((b"", b"[" * 5000, b'{"a":' * 2000, b"\xff\xfe", b"nul", b"{}{}", b'"x"'))
    return raw


def bent_request(rng: Random) -> pb.GenerateRequest:
    """Returns a request that gRPC itself accepts, of few tokens."""
    request = bent_message(pb.GenerateRequest(model=MODEL, max_tokens=4, text="Hi"), rng)
    request.max_tokens = min(request.max_tokens, 16)
    return request


class _Store:
    """Stored responses in memory."""

    def __init__(self) -> None:
        self._kept: dict[str, StoredResponse] = {}

    async def save(self, _tenant: str, response: StoredResponse) -> bool:
        if len(self._kept) < 100:
            self._kept[response.response["id"]] = response
        return True

    async def find(self, _tenant: str, response_id: str) -> StoredResponse | None:
        return self._kept.get(response_id) or next(iter(self._kept.values()), None)

    async def delete(self, _tenant: str, response_id: str) -> bool:
        return self._kept.pop(response_id, None) is not None


class _GatewayTarget(AsyncFuzzTarget):
    rig: Rig

    async def start(self) -> None:
        cluster = await self.stack.enter_async_context(fake_cluster())
        cluster.script = lambda request: [66] * min(request.sampling.max_tokens, 8)
        grpc_port = self.stack.enter_context(PortLease()).port
        self.rig = await self.stack.enter_async_context(rig(cluster, demo_model(), grpc_port=grpc_port))


class HttpBodies(_GatewayTarget):
    """Requests of all routes, and answers of their handlers."""

    words = words("json")

    async def start(self) -> None:
        await super().start()
        self._app = build_app(self.rig.gateway, self.rig.server.metrics_history, _Store())  # type: ignore[arg-type]

    def seeds(self) -> Sequence[bytes]:
        bodies = [(path, {**more, **body}) for path, body in BODIES.items() for more in (COMMON, {"model": MODEL})]
        bodies += [("/v1/responses", {"model": MODEL, "input": "Hi", "store": True})]
        posts = [_request("POST", path, json.dumps(body).encode()) for path, body in bodies]
        return [*posts, *(_request(method, path) for path in _PATHS for method in ("GET", "DELETE", "POST"))]

    def make(self, corpus: Sequence[bytes], rng: Random) -> bytes:
        kind = rng.random()
        if kind < 0.55:
            path = rng.choice(list(BODIES))
            return _request("POST", path, plain_body(rng, path))
        head, _, body = rng.choice(corpus).partition(b"\n\n")
        if kind < 0.65:
            head = mutate(head, rng, _HEADERS)
        elif body:
            try:
                body = json.dumps(bend(json.loads(body), rng, [*ODD, *_GRAMMARS])).encode("utf-8", "surrogatepass")
            except (ValueError, RecursionError):
                body = mutate(body, rng, self.words)
        return head + b"\n\n" + body

    async def handle(self, data: bytes) -> str:
        scope, body = _scope(data)
        sent: list[dict[str, Any]] = []
        parts = [body[: len(body) // 2], body[len(body) // 2 :]] if len(body) % 3 else [body]
        done = asyncio.Event()

        async def receive() -> dict[str, Any]:
            if parts:
                return {"type": "http.request", "body": parts.pop(0), "more_body": bool(parts)}
            await done.wait()
            return {"type": "http.disconnect"}

        async def send(message: dict[str, Any]) -> None:
            sent.append(message)

        async with asyncio.timeout(_END_S):
            await self._app(scope, receive, send)  # type: ignore[arg-type]
        done.set()
        status = sent[0]["status"]
        content = b"".join(message.get("body", b"") for message in sent[1:])
        assert status != 500, content
        if status >= 400 and scope["path"] in BODIES:
            error = orjson.loads(content)["error"]
            assert error["message"]
            return f"{scope['path']} {status} {error['param']} {str(error['message'])[:40]}"
        assert b'"internal error"' not in content, content
        return f"{scope['path'] if status < 400 else ''} {status}"


#: Grammars that are refused, and those that are slow to prove.
_GRAMMARS: list[Any] = [
    {"type": "json_schema", "json_schema": {"name": "s", "schema": {"$ref": "#"}}},
    {"type": "json_schema", "json_schema": {"name": "s", "schema": {"anyOf": [{"$ref": "#/$defs/a"}], "$defs": {}}}},
    {"json": {"patternProperties": {f"^{i}": {} for i in range(50)}}},
    {"grammar": "start: a\n" + "\n".join(f'{chr(97 + i)}: "x" {chr(98 + i)}?' for i in range(24)) + '\ny: "z"\nz: y'},
    {"regex": "(a{1,50}){1,50}"},
    {"choice": ["a", "a" * 300]},
    {"structural_tag": {}},
]


def _request(method: str, path: str, body: bytes = b"") -> bytes:
    return f"{method} {path}\ncontent-type: application/json\n\n".encode() + body


def _scope(data: bytes) -> tuple[dict[str, Any], bytes]:
    """Returns the ASGI scope of an input, as uvicorn makes it, and the body."""
    head, _, body = data.partition(b"\n\n")
    line, *lines = head.split(b"\n")
    method, _, target = line.partition(b" ")
    raw_path, _, query = target.partition(b"?")
    headers = [(name.strip().lower(), value.strip()) for name, _, value in (line.partition(b":") for line in lines)]
    scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.4"},
        "http_version": "1.1",
        "method": method.decode("latin-1")[:20].upper() or "GET",
        "scheme": "http",
        "path": unquote(raw_path.decode("latin-1")) or "/",
        "raw_path": raw_path,
        "query_string": query,
        "root_path": "",
        "headers": headers,
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 80),
        "state": {},
    }
    return scope, body


class _Transport(asyncio.Transport):
    """Keeps what is written. Closing tells the protocol in the next turn of the event loop."""

    def __init__(self) -> None:
        super().__init__({"peername": ("127.0.0.1", 1), "sockname": ("127.0.0.1", 80)})
        self.written = bytearray()
        self.protocol: asyncio.Protocol | None = None
        self._closing = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if not self._closing:  # a real transport drops it, too
            self.written += data

    def is_closing(self) -> bool:
        return self._closing

    def close(self) -> None:
        if not self._closing:
            self._closing = True
            assert self.protocol is not None
            asyncio.get_running_loop().call_soon(self.protocol.connection_lost, None)

    def abort(self) -> None:
        self.close()

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...

    def is_reading(self) -> bool:
        return True

    def get_protocol(self) -> asyncio.BaseProtocol:
        assert self.protocol is not None
        return self.protocol

    def get_write_buffer_size(self) -> int:
        return 0

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None: ...


_CHAT = json.dumps({"model": MODEL, "messages": _MESSAGES, "max_tokens": 2}).encode()
_STREAM = json.dumps({"model": MODEL, "prompt": "Hi", "max_tokens": 2, "stream": True}).encode()


class HttpBytes(_GatewayTarget):
    """Connections: any bytes, in any pieces, to the protocol class in front of the application."""

    words = tuple(codecs.escape_decode(word)[0] for word in words("http"))  # type: ignore[attr-defined]

    def seeds(self) -> Sequence[bytes]:
        head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        chat = head + b"Content-Length: %d\r\n\r\n" % len(_CHAT) + _CHAT
        chunks = b"%x\r\n%b\r\n%x\r\n%b\r\n0\r\n\r\n" % (9, _CHAT[:9], len(_CHAT) - 9, _CHAT[9:])
        chunked = head + b"Transfer-Encoding: chunked\r\n\r\n" + chunks
        stream = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(_STREAM) + _STREAM
        get = b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n"
        old = b"GET /version HTTP/1.0\r\n\r\n"
        return [
            chat,
            chunked,
            stream,
            get,
            get * 3,
            chat + get,
            stream + chat + get,
            old,
            b"HEAD /live HTTP/1.1\r\n\r\n",
        ]

    async def handle(self, data: bytes) -> str:
        http = self.rig.server._http
        assert http is not None
        transport, config, loop = _Transport(), http.config, asyncio.get_running_loop()
        make: Callable[..., Any] = config.http_protocol_class
        protocol = make(config=config, server_state=http.server_state, app_state={}, _loop=loop)
        transport.protocol = protocol
        protocol.connection_made(transport)
        rng, at = Random(zlib.crc32(data)), 0
        while at < len(data) and not transport.is_closing():
            size = rng.choice((1, 7, 100, len(data)))
            protocol.data_received(data[at : at + size])
            at += size
            if rng.random() < 0.3:
                await asyncio.sleep(0)
        async with asyncio.timeout(_END_S):
            while (cycle := protocol.cycle) is not None and not transport.is_closing():
                if cycle.response_complete and not protocol.pipeline:
                    break
                if cycle.more_body:  # the rest of the body would have to come
                    break
                await asyncio.sleep(0.001)
        transport.close()
        await asyncio.sleep(0)
        async with asyncio.timeout(_END_S):
            while http.server_state.tasks:
                await asyncio.sleep(0.001)
        assert not protocol._head_timer, "the timer of a closed connection"
        statuses = [line[9:12] for line in bytes(transport.written).split(b"\r\n") if line.startswith(b"HTTP/1.1 ")]
        assert transport.written.startswith(b"HTTP/1.1 ") or not transport.written
        assert b"500" not in statuses, bytes(transport.written)
        return b" ".join(statuses[:4]).decode("latin-1")


_METHODS: dict[str, Message] = {
    "Generate": pb.GenerateRequest(model=MODEL, max_tokens=4, text="Hi"),
    "Tokenize": pb.TokenizeRequest(model=MODEL, text="Hi"),
    "Detokenize": pb.DetokenizeRequest(model=MODEL, ids=[1, 2]),
    "Abort": pb.AbortGenerateRequest(request_id="r"),
    "ListModels": pb.ListModelsRequest(),
}


class Inference(_GatewayTarget):
    """Calls of the gRPC service."""

    async def start(self) -> None:
        await super().start()
        self._channel = rpc.open_channel(f"127.0.0.1:{self.rig.server.grpc_port}")
        self.stack.push_async_callback(self._channel.close)

    def seeds(self) -> Sequence[bytes]:
        return [_call(name, message) for name, message in _METHODS.items()]

    def make(self, corpus: Sequence[bytes], rng: Random) -> bytes:
        data = rng.choice(corpus)
        name, _, body = data.partition(b"\n")
        if rng.random() < 0.1 or name.decode("latin-1") not in _METHODS:
            return mutate(data, rng, (), corpus)
        message = _METHODS[name.decode()].__class__()
        try:
            message.ParseFromString(body)
        except DecodeError:
            return _call(name.decode(), bent_request(rng)) if name == b"Generate" else data
        return _call(name.decode(), bent_message(message, rng))

    async def handle(self, data: bytes) -> str:
        name, _, body = data.partition(b"\n")
        method = name.decode("latin-1") if name.decode("latin-1") in _METHODS else "Generate"
        parsed = _METHODS[method].__class__()
        try:
            parsed.ParseFromString(body)
            valid = True
        except DecodeError:
            valid = False  # gRPC itself answers INTERNAL
        call: Any = self._channel.unary_stream(f"/baton.v1.Inference/{method}")
        code, details, messages = grpc.StatusCode.OK, "", 0
        try:
            async for _ in call(body, timeout=_END_S):
                messages += 1
        except grpc.aio.AioRpcError as error:
            code, details = error.code(), error.details() or ""
        assert not valid or code not in _OUR_FAULT, details
        return f"{method} {code.name} {details[:40]}" if valid else f"{method} no message"


def _call(name: str, message: Message) -> bytes:
    return name.encode() + b"\n" + message.SerializeToString()
