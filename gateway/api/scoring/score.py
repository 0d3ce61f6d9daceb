"""/v1/score: the similarity of pairs of texts, in vLLM's form."""

from __future__ import annotations

import time
from typing import Annotated, Any

from pydantic import Field

from common.errors import InvalidRequest
from gateway.api.http.endpoint import HttpResponse
from gateway.api.openai.bodies import ModelRequest
from gateway.api.openai.fields import ARRAY, BY_KIND, STRING, Only, Refused, param, validated
from gateway.serving.gateway import Gateway
from gateway.serving.pair_scorer import PairScorer, TextPairs
from gateway.serving.request import RequestContext

MAX_TEXTS = 2048
Text = Annotated[str, Field(min_length=1)]
Texts = Annotated[
    Annotated[Text, STRING] | Annotated[list[Text], Field(min_length=1, max_length=MAX_TEXTS, fail_fast=True), ARRAY],
    BY_KIND,
]


class ScoreRequest(ModelRequest):
    """A body of /v1/score."""

    text_1: Texts = param("A text or texts; for a model that judges pairs, the queries.", ...)
    text_2: Texts = param("As many texts as text_1, or any number if text_1 is one text.", ...)
    instruction: str | None = param(
        "Says which documents are relevant; only for models that judge pairs.", max_length=1 << 14
    )
    use_activation: Annotated[Any, Only(True)] = param("Scores between 0 and 1, for models that judge pairs.")
    truncate_prompt_tokens: Refused = param("The length of prompts.")


class ScoreHandler:
    """Answers /v1/score for one gateway."""

    def __init__(self, gateway: Gateway, scorer: PairScorer) -> None:
        self._gateway = gateway
        self._scorer = scorer

    async def serve(self, body: Any, response: HttpResponse, context: RequestContext) -> None:
        """Answers one body; a RequestHandler."""
        r = validated(ScoreRequest, body)
        first, second = ([given] if isinstance(given, str) else given for given in (r.text_1, r.text_2))
        if len(first) not in (1, len(second)):
            text = f"text_2 has {len(second)} texts; expected {len(first)}, as text_1 has, or one text as text_1"
            raise InvalidRequest(text, field="text_2")
        pairs = TextPairs(
            queries=first,
            documents=second,
            pairs=[(i if len(first) > 1 else 0, i) for i in range(len(second))],
            query_field=lambda i: "text_1" if isinstance(r.text_1, str) else f"text_1[{i}]",
            document_field=lambda i: "text_2" if isinstance(r.text_2, str) else f"text_2[{i}]",
            instruction=r.instruction,
            cache_salt=r.cache_salt,
        )
        model = self._gateway.model_for(context.caller, r.model)
        scored = await self._scorer.score(context, model, r.model, pairs)
        data = [{"index": i, "object": "score", "score": score} for i, score in enumerate(scored.scores)]
        usage = {"prompt_tokens": scored.prompt_tokens, "total_tokens": scored.prompt_tokens}
        head = {"id": f"score-{context.id}", "object": "list", "created": int(time.time()), "model": r.model}
        await response.send_json(200, {**head, "data": data, "usage": usage})
