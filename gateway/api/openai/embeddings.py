"""/v1/embeddings: the state of a text's last token after the model's final norm, as a vector of length 1.

The inputs of a request are computed side by side, each on the prefill pod with the least queued work. If a
pod fails, its input is tried on another pod. The answer is sent when all vectors are complete.
"""

from __future__ import annotations

import asyncio
import base64
import logging
import math
import struct
from collections import Counter
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import grpc

from common.errors import BatonError, InternalError, InvalidRequest, Unauthenticated, Unavailable
from common.pb import embedding_pb2
from common.rpc import error_from_rpc, timeout_until
from common.types import Role, SamplingParams, ValidRequest
from common.wire import request_to_pb
from gateway.api.http.endpoint import HttpResponse
from gateway.api.openai.fields import TextsOrIds, param, validated
from gateway.api.openai.requests import ModelRequest
from gateway.pods.pod import Pod
from gateway.serving.answers import gather_or_cancel
from gateway.serving.gateway import Gateway
from gateway.serving.models import ServedModel
from gateway.serving.request import CompletionBody, GenerationSpec, PromptInput, RequestContext

_log = logging.getLogger(__name__)

MAX_CONCURRENT_INPUTS = 16  #: Inputs of one request that are computed at the same time.
MAX_ATTEMPTS = 3  #: Pods that one input is tried on.


class EmbeddingsRequest(ModelRequest):
    """A body of /v1/embeddings."""

    input: Annotated[tuple[PromptInput, ...], TextsOrIds(2048)] = param("A text, token ids, or lists of them.", ...)
    encoding_format: Literal["float", "base64"] = param("base64: float32, little-endian.", "float")
    dimensions: int | None = param(
        "Number of first components to return, scaled to length 1; at most the model's.", words="all", ge=1, le=1 << 20
    )


class EmbeddingsHandler:
    """Answers /v1/embeddings for one gateway."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._tokens_sent: Counter[str] = Counter()  #: Prompt tokens of running calls, by pod address.

    async def serve(self, body: Any, response: HttpResponse, context: RequestContext) -> None:
        """Answers one body; a RequestHandler."""
        parsed = validated(EmbeddingsRequest, body)
        greedy = SamplingParams(temperature=0.0)
        spec = GenerationSpec(model=parsed.model, sampling=greedy, max_tokens=1, seed=0, cache_salt=parsed.cache_salt)
        try:
            choices = await self._gateway.completion(context, CompletionBody(spec, parsed.input))
        except InvalidRequest as e:
            if e.field != "prompt":
                raise
            raise type(e)(e.message, field="input") from e
        model, requests = choices[0].model, [choice.request for choice in choices]
        slots = asyncio.Semaphore(MAX_CONCURRENT_INPUTS)
        vectors = await gather_or_cancel([self._embed(model, r, context.deadline, slots) for r in requests])
        encoded = [_encode_vector(vector, parsed) for vector in vectors]
        data = [{"object": "embedding", "index": i, "embedding": vector} for i, vector in enumerate(encoded)]
        tokens = sum(request.prompt_len for request in requests)
        usage = {"prompt_tokens": tokens, "total_tokens": tokens}
        await response.send_json(200, {"object": "list", "data": data, "model": parsed.model, "usage": usage})
        context.timeline.set_facts(prompt_tokens=tokens)

    async def _embed(
        self, model: ServedModel, request: ValidRequest, deadline: float, slots: asyncio.Semaphore
    ) -> list[float]:
        """Returns the vector of one input, computed while a slot is taken. Raises BatonError."""
        message = embedding_pb2.EmbedRequest(request=request_to_pb(request))
        avoid: set[str] = set()
        error: BatonError = Unavailable("no prefill pod is ready to serve this model", retry_after_s=1.0)
        async with slots:
            while len(avoid) < MAX_ATTEMPTS and (pod := self._choose(model, avoid)) is not None:
                self._tokens_sent[pod.address] += request.prompt_len
                try:
                    answer = await pod.embedding.Embed(message, timeout=timeout_until(deadline))
                    return list(answer.values)
                except grpc.aio.AioRpcError as e:
                    error = error_from_rpc(e)
                    if isinstance(error, Unauthenticated):  # the pod refuses this gateway, not the client
                        _log.error("pod %s refuses this gateway: %s", pod.name, error)
                        raise InternalError("the pods that serve this model refuse this gateway") from e
                    if not error.retryable:
                        raise error from e
                    avoid.add(pod.address)
                    pod.recheck()
                finally:
                    self._tokens_sent[pod.address] -= request.prompt_len
        raise error

    def _choose(self, model: ServedModel, avoid: set[str]) -> Pod | None:
        """Returns the usable pod with the fewest known prompt tokens before this input, None without one."""

        def tokens_before(pod: Pod) -> int:
            load = None if pod.view is None else pod.view.load
            return self._tokens_sent[pod.address] + (0 if load is None else load.queued_tokens)

        usable = [
            pod
            for pod in model.pod_table.pods.values()
            if pod.serving and pod.info is not None and pod.info.role is not Role.DECODE and pod.address not in avoid
        ]
        return min(usable, key=tokens_before, default=None)


def _encode_vector(vector: Sequence[float], body: EmbeddingsRequest) -> list[float] | str:
    """Returns the vector in the requested encoding. Raises InvalidRequest for more dimensions than the model has."""
    if body.dimensions is not None:
        if body.dimensions > len(vector):
            text = f"dimensions ({body.dimensions}) is larger than this model's {len(vector)}"
            raise InvalidRequest(text, field="dimensions")
        vector = vector[: body.dimensions]
        length = math.sqrt(sum(x * x for x in vector)) or 1.0
        vector = [x / length for x in vector]
    if body.encoding_format == "float":
        return list(vector)
    return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()
