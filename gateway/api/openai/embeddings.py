"""/v1/embeddings: the pooled states of texts after the model's final norm, as vectors."""

from __future__ import annotations

import asyncio
import base64
import math
import struct
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import orjson

from common.errors import InvalidRequest
from gateway.api.http.endpoint import HttpResponse
from gateway.api.openai.bodies import ModelRequest
from gateway.api.openai.fields import TextsOrIds, param, validated
from gateway.serving.prompt_runner import PromptRunner
from gateway.serving.request import PromptInput, RequestContext

VECTORS_PER_LOOP_TURN = 16  #: Vectors that are encoded before other tasks run.


class EmbeddingsRequest(ModelRequest):
    """A body of /v1/embeddings."""

    input: Annotated[tuple[PromptInput, ...], TextsOrIds(2048)] = param("A text, token ids, or lists of them.", ...)
    encoding_format: Literal["float", "base64"] = param("base64: float32, little-endian.", "float")
    dimensions: int | None = param(
        "Number of first components to return, scaled to length 1; at most the model's.", words="all", ge=1, le=1 << 20
    )


class EmbeddingsHandler:
    """Answers /v1/embeddings."""

    def __init__(self, prompts: PromptRunner) -> None:
        self._prompts = prompts

    async def serve(self, body: Any, response: HttpResponse, context: RequestContext) -> None:
        """Answers one body; a RequestHandler."""
        parsed = validated(EmbeddingsRequest, body)
        results = await self._prompts.compute(
            context, parsed.model, parsed.input, field="input", cache_salt=parsed.cache_salt
        )
        data = []
        for i, vector in enumerate(results.values):
            if i % VECTORS_PER_LOOP_TURN == VECTORS_PER_LOOP_TURN - 1:
                await asyncio.sleep(0)
            # JSON at once: to write all numbers with the answer would hold the event loop.
            raw = orjson.dumps(_encode_vector(vector, parsed))
            data.append({"object": "embedding", "index": i, "embedding": orjson.Fragment(raw)})
        usage = {"prompt_tokens": results.prompt_tokens, "total_tokens": results.prompt_tokens}
        await response.send_json(200, {"object": "list", "data": data, "model": parsed.model, "usage": usage})


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
