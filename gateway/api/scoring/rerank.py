"""/v1/rerank, /rerank and /v2/rerank: documents in the order of their relevance to a query, as at Jina and Cohere."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import Field
from typing_extensions import TypedDict

from gateway.api.http.endpoint import HttpResponse
from gateway.api.http.json import Json
from gateway.api.openai.bodies import ModelRequest
from gateway.api.openai.fields import BY_KIND, INT32_MAX, OBJECT, STRING, Ignored, Refused, param, validated
from gateway.serving.gateway import Gateway
from gateway.serving.pair_scorer import PairScorer, TextPairs
from gateway.serving.request import RequestContext
from gateway.text.tokenizer import TextTokenizer

MAX_DOCUMENTS = 2048


class TextDocument(TypedDict):
    """A document as an object."""

    text: str


Document = Annotated[Annotated[str, STRING] | Annotated[TextDocument, OBJECT], BY_KIND]


class RerankRequest(ModelRequest):
    """A body of /v1/rerank."""

    query: str = param("The text that documents are compared with.", ..., min_length=1)
    documents: Annotated[list[Document], Field(min_length=1, max_length=MAX_DOCUMENTS, fail_fast=True)] = param(
        "Texts, or objects with a member text.", ...
    )
    top_n: int | None = param("Number of best documents to return; 0: all.", words="all", ge=0, le=INT32_MAX)
    return_documents: bool | None = param(
        "Whether results have the documents' texts.", words="true; false on /v2/rerank"
    )
    instruction: str | None = param(
        "Says which documents are relevant; only for models that judge pairs.", max_length=1 << 14
    )
    max_tokens_per_doc: int | None = param(
        "Cuts longer documents after this many tokens.", words="no limit", ge=1, le=INT32_MAX
    )
    rank_fields: Refused = param("Members of documents to compare; always the member text.")
    truncate_prompt_tokens: Refused = param("The length of prompts; use max_tokens_per_doc.")
    max_chunks_per_doc: Ignored = param("A document is one prompt.")
    priority: Ignored = param("Order of waiting.")


class RerankHandler:
    """Answers the routes for one gateway."""

    def __init__(self, gateway: Gateway, scorer: PairScorer, *, return_documents: bool) -> None:
        self._gateway = gateway
        self._scorer = scorer
        self._return_documents = return_documents  #: The default of the parameter.

    async def serve(self, body: Any, response: HttpResponse, context: RequestContext) -> None:
        """Answers one body; a RequestHandler."""
        r = validated(RerankRequest, body)
        model = self._gateway.model_for(context.caller, r.model)
        texts = [document if isinstance(document, str) else document["text"] for document in r.documents]
        compared = texts
        if r.max_tokens_per_doc is not None:
            compared = await _cut_all(model.tokenizer, texts, r.max_tokens_per_doc)
        pairs = TextPairs(
            queries=[r.query],
            documents=compared,
            pairs=[(0, i) for i in range(len(compared))],
            query_field=lambda _i: "query",
            document_field=lambda i: f"documents[{i}]",
            instruction=r.instruction,
            cache_salt=r.cache_salt,
        )
        scored = await self._scorer.score(context, model, r.model, pairs)
        order = sorted(range(len(texts)), key=lambda i: scored.scores[i], reverse=True)[: r.top_n or None]
        shown = self._return_documents if r.return_documents is None else r.return_documents
        results = [
            {
                "index": i,
                "relevance_score": scored.scores[i],
                **({"document": {"text": texts[i]}} if shown else {}),
            }
            for i in order
        ]
        answer: Json = {"id": f"rerank-{context.id}", "object": "list", "model": r.model, "results": results}
        usage = {"prompt_tokens": scored.prompt_tokens, "total_tokens": scored.prompt_tokens}
        await response.send_json(200, {**answer, "usage": usage})


async def _cut_all(tokenizer: TextTokenizer, texts: Sequence[str], max_tokens: int) -> list[str]:
    """Returns each text up to the end of its first `max_tokens` tokens; long texts are cut in a thread."""

    def cut() -> list[str]:
        return [_cut(tokenizer, text, max_tokens) for text in texts]

    if tokenizer.is_quick(texts):
        return cut()
    async with tokenizer.turn(*texts):
        return await asyncio.to_thread(cut)


def _cut(tokenizer: TextTokenizer, text: str, max_tokens: int) -> str:
    if len(text) <= max_tokens:  # no token is shorter than a character, except parts of one
        return text
    offsets = tokenizer.raw.encode_batch([text], add_special_tokens=False)[0].offsets  # without the interpreter lock
    return text[: offsets[max_tokens - 1][1]] if len(offsets) > max_tokens else text
