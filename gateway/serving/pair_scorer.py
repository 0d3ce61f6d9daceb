"""Scores pairs of texts: by the verdict of a reranker, else by the cosine of their embeddings."""

from __future__ import annotations

import asyncio
import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gateway.serving.models import ServedModel
from gateway.serving.prompt_runner import PromptRunner
from gateway.serving.request import RequestContext, context_overflow
from gateway.text.reranker import Reranker, require_no_instruction

PAIRS_PER_LOOP_TURN = 16  #: Pairs that are tokenized, or compared, before other tasks run.


@dataclass(frozen=True, slots=True)
class TextPairs:
    """The pairs of one request."""

    queries: Sequence[str]
    documents: Sequence[str]
    pairs: Sequence[tuple[int, int]]  #: Indices of the query and the document of each pair.
    query_field: Callable[[int], str]  #: Returns the name of a query's field by its index, for errors.
    document_field: Callable[[int], str]
    instruction: str | None = None  #: Says which documents are relevant; None for the model's own instruction.
    cache_salt: str = ""


@dataclass(frozen=True, slots=True)
class PairScores:
    """The scores of one request's pairs."""

    scores: list[float]
    prompt_tokens: int


class PairScorer:
    """Scores pairs for one gateway."""

    def __init__(self, prompts: PromptRunner) -> None:
        self._prompts = prompts

    async def score(self, context: RequestContext, model: ServedModel, name: str, pairs: TextPairs) -> PairScores:
        """Returns the score of each pair. `name` is the model's name as the client wrote it. Raises BatonError."""
        if model.reranker is not None:
            return await self._by_verdict(context, model, name, pairs, model.reranker)
        require_no_instruction(pairs.instruction)
        return await self._by_embedding(context, model, name, pairs)

    async def _by_verdict(
        self, context: RequestContext, model: ServedModel, name: str, pairs: TextPairs, reranker: Reranker
    ) -> PairScores:
        limits = model.pod_table.limits()
        prompts = []
        for number, (query, document) in enumerate(pairs.pairs, 1):
            if number % PAIRS_PER_LOOP_TURN == 0:
                await asyncio.sleep(0)
            prompt = await reranker.prompt(
                model.tokenizer,
                model.chat_format,
                pairs.queries[query],
                pairs.documents[document],
                pairs.instruction,
            )
            async with model.tokenizer.turn(prompt.text):
                ids = await model.tokenizer.encode_chat(prompt)
            if len(ids) >= limits.max_model_len:
                field = pairs.document_field(document)
                said = f"your {field} and {pairs.query_field(query)} resulted in {len(ids)} tokens"
                raise context_overflow(limits, said, field)
            prompts.append(tuple(ids))
        field, salt = pairs.document_field(0), pairs.cache_salt
        results = await self._prompts.compute(
            context, name, prompts, field=field, cache_salt=salt, logit_ids=reranker.logit_ids
        )
        return PairScores([reranker.score(logits) for logits in results.values], results.prompt_tokens)

    async def _by_embedding(
        self, context: RequestContext, model: ServedModel, name: str, pairs: TextPairs
    ) -> PairScores:
        limits, prefixes = model.pod_table.limits(), model.text_prefixes
        texts = [prefixes.query + text for text in pairs.queries]
        texts += [prefixes.document + text for text in pairs.documents]
        fields = [pairs.query_field(i) for i in range(len(pairs.queries))]
        fields += [pairs.document_field(i) for i in range(len(pairs.documents))]
        async with model.tokenizer.turn(*texts):
            prompts = await model.tokenizer.encode_all(texts, add_special_tokens=True)
        for ids, field in zip(prompts, fields, strict=True):
            if len(ids) >= limits.max_model_len:
                raise context_overflow(limits, f"your {field} resulted in {len(ids)} tokens", field)
        results = await self._prompts.compute(
            context, name, [tuple(ids) for ids in prompts], field=fields[0], cache_salt=pairs.cache_salt
        )
        queries, documents = results.values[: len(pairs.queries)], results.values[len(pairs.queries) :]
        return PairScores(await cosines(queries, documents, pairs.pairs), results.prompt_tokens)


async def cosines(
    queries: Sequence[Sequence[float]], documents: Sequence[Sequence[float]], pairs: Sequence[tuple[int, int]]
) -> list[float]:
    """Returns the cosine of each pair of a query and a document, given by their indices; 0 for a vector of zeros."""
    scores: list[float] = []
    squares: dict[int, float] = {}  # the squared length of each query
    for number, (query, document) in enumerate(pairs, 1):
        if number % PAIRS_PER_LOOP_TURN == 0:
            await asyncio.sleep(0)
        one, other = queries[query], documents[document]
        if query not in squares:
            squares[query] = _product(one, one)
        lengths = math.sqrt(squares[query] * _product(other, other))
        scores.append(_product(one, other) / lengths if lengths else 0.0)
    return scores


def _product(one: Sequence[float], other: Sequence[float]) -> float:
    return math.fsum(map(operator.mul, one, other))
