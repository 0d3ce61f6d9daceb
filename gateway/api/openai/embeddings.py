"""/v1/embeddings: the state of a text's last token after the model's final norm, as a vector of length 1.

The inputs of a request are computed side by side, each on the prefill pod with the least queued work. If a
pod fails, its input is tried on another pod. The answer is sent when all vectors are complete.
"""

from __future__ import annotations

import asyncio
import base64
import math
import sys
from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import grpc

from common.errors import BatonError, InvalidRequest, Unavailable
from common.pb import embedding_pb2
from common.rpc import error_from_rpc, timeout_until
from common.types import Role, ValidRequest
from common.wire import request_to_pb
from gateway.api.http.endpoint import HttpResponse
from gateway.api.http.json_fields import JsonFields, wrong_type
from gateway.api.openai.requests import MAX_SALT_CHARS, parse_token_ids
from gateway.pods.pod import Pod
from gateway.serving.gateway import Gateway
from gateway.serving.models import ServedModel
from gateway.serving.request import CompletionBody, GenerationSpec, PromptInput
from gateway.serving.request_context import RequestContext

MAX_INPUTS = 2048
MAX_DIMENSIONS = 1 << 20
#: Inputs of one request that are computed at the same time.
MAX_CONCURRENT_INPUTS = 16
#: Pods that one input is tried on.
MAX_ATTEMPTS = 3


@dataclass(frozen=True, slots=True)
class EmbeddingsBody:
    """A checked /v1/embeddings body."""

    model: str
    inputs: tuple[PromptInput, ...]
    base64: bool
    #: Number of the vector's first components to return, scaled to length 1; None returns all.
    dimensions: int | None
    cache_salt: str


def parse_embeddings(body: object) -> EmbeddingsBody:
    """Checks a /v1/embeddings body. Raises InvalidRequest, which names the field."""
    fields = JsonFields.of_body(body)
    model = fields.string("model", 1024)
    if not model:
        raise InvalidRequest("model is missing", field="model")
    encoding = fields.raw("encoding_format")
    if encoding not in (None, "float", "base64"):
        raise InvalidRequest("encoding_format must be float or base64", field="encoding_format")
    dimensions = fields.integer("dimensions", 1, MAX_DIMENSIONS)
    salt = fields.string("cache_salt", MAX_SALT_CHARS) or ""
    return EmbeddingsBody(model, _inputs(fields.raw("input")), encoding == "base64", dimensions, salt)


def _inputs(value: object) -> tuple[PromptInput, ...]:
    """Parses a non-empty string, an array of strings, an array of token ids, or an array of arrays of token ids."""
    kinds = "a string, an array of strings, or token ids"
    if value is None:
        raise InvalidRequest("input is missing", field="input")
    if isinstance(value, str):
        value = [value]
    if not isinstance(value, list):
        raise wrong_type("input", kinds, value)
    if value and isinstance(value[0], int):
        return (parse_token_ids(value, "input"),)
    if not 1 <= len(value) <= MAX_INPUTS:
        raise InvalidRequest(f"input must have 1 to {MAX_INPUTS} entries", field="input")
    inputs: list[PromptInput] = []
    for entry in value:
        if type(entry) is not type(value[0]) or not isinstance(entry, str | list):
            raise wrong_type("input", kinds, entry)
        if not entry:
            raise InvalidRequest("an input is empty", field="input")
        inputs.append(entry if isinstance(entry, str) else parse_token_ids(entry, "input"))
    return tuple(inputs)


class EmbeddingsHandler:
    """Answers /v1/embeddings for one gateway."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        #: Prompt tokens of running calls, by pod address.
        self._tokens_sent: Counter[str] = Counter()

    async def serve(self, body: Any, response: HttpResponse, context: RequestContext) -> None:
        """Answers one body; a RequestHandler."""
        parsed = parse_embeddings(body)
        spec = GenerationSpec(model=parsed.model, max_tokens=1, temperature=0.0, seed=0, cache_salt=parsed.cache_salt)
        try:
            choices = await self._gateway.completion(context, CompletionBody(spec, parsed.inputs))
        except InvalidRequest as e:
            if e.field != "prompt":
                raise
            raise type(e)(e.message, field="input") from e
        model, requests = choices[0].model, [choice.request for choice in choices]
        vectors = await self._embed_all(model, requests, context.deadline)
        data = [
            {"object": "embedding", "index": i, "embedding": _encode_vector(vector, parsed)}
            for i, vector in enumerate(vectors)
        ]
        tokens = sum(request.prompt_len for request in requests)
        usage = {"prompt_tokens": tokens, "total_tokens": tokens}
        await response.send_json(200, {"object": "list", "data": data, "model": parsed.model, "usage": usage})
        context.timeline.set_facts(prompt_tokens=tokens)

    async def _embed_all(
        self, model: ServedModel, requests: Sequence[ValidRequest], deadline: float
    ) -> list[list[float]]:
        slots = asyncio.Semaphore(MAX_CONCURRENT_INPUTS)

        async def one(request: ValidRequest) -> list[float]:
            async with slots:
                return await self._embed(model, request, deadline)

        tasks = [asyncio.ensure_future(one(request)) for request in requests]
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _embed(self, model: ServedModel, request: ValidRequest, deadline: float) -> list[float]:
        """Returns the vector of one input. Raises BatonError."""
        message = embedding_pb2.EmbedRequest(request=request_to_pb(request))
        avoid: set[str] = set()
        error: BatonError = Unavailable("no prefill pod is ready to serve this model", retry_after_s=1.0)
        for _ in range(MAX_ATTEMPTS):
            pod = self._choose(model, avoid)
            if pod is None:
                break
            self._tokens_sent[pod.address] += request.prompt_len
            try:
                answer = await pod.embedding.Embed(message, timeout=timeout_until(deadline))
                return list(answer.values)
            except grpc.aio.AioRpcError as e:
                error = error_from_rpc(e)
                if not error.retryable:
                    raise error from e
                avoid.add(pod.address)
                pod.recheck()
            finally:
                self._tokens_sent[pod.address] -= request.prompt_len
        raise error

    def _choose(self, model: ServedModel, avoid: set[str]) -> Pod | None:
        """Returns the usable pod with the fewest known prompt tokens before this input, None without one."""
        usable = [
            pod
            for pod in model.pod_table.pods.values()
            if pod.serving and pod.info is not None and pod.info.role is not Role.DECODE and pod.address not in avoid
        ]
        return min(usable, key=lambda pod: self._tokens_sent[pod.address] + _queued_tokens(pod), default=None)


def _queued_tokens(pod: Pod) -> int:
    load = None if pod.view is None else pod.view.load
    return 0 if load is None else load.queued_tokens


def _encode_vector(vector: Sequence[float], body: EmbeddingsBody) -> list[float] | str:
    """Returns the vector in the requested encoding. Raises InvalidRequest for more dimensions than the model has."""
    if body.dimensions is not None:
        if body.dimensions > len(vector):
            text = f"dimensions ({body.dimensions}) is larger than this model's {len(vector)}"
            raise InvalidRequest(text, field="dimensions")
        vector = vector[: body.dimensions]
        length = math.sqrt(sum(x * x for x in vector)) or 1.0
        vector = [x / length for x in vector]
    if not body.base64:
        return list(vector)
    return base64.b64encode(_little_endian(vector)).decode()


def _little_endian(vector: Sequence[float]) -> bytes:
    values = array("f", vector)
    if sys.byteorder == "big":
        values.byteswap()
    return values.tobytes()
