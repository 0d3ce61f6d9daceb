"""The complete answers of a request, and the merged stream of its choices.

A request with n choices gets all of them. With best_of it gets the candidates with the highest mean log-probability,
and with a beam search the best beams.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import time
from collections.abc import AsyncGenerator, Coroutine, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from typing import Any, TypeVar

from common.errors import BatonError, Overloaded
from common.types import SamplingParams, Token, TokenLogprob, ValidRequest
from gateway.serving.beam_search import Beam, BeamSearchParams, beam_search
from gateway.serving.choice import Choice, CompleteAnswer
from gateway.serving.request import GenerationSpec
from gateway.serving.request_context import Usage
from gateway.text.output import OutputPiece

#: Least and most seconds before a beam that found no room is tried again.
BEAM_RETRY_PAUSE_S = (0.05, 0.25)

T = TypeVar("T")


async def complete_answers(choices: Sequence[Choice], spec: GenerationSpec) -> list[CompleteAnswer]:
    """Returns n complete answers for each prompt. Raises BatonError."""
    if spec.beam_search is not None:
        return [
            a
            for answers in await gather_or_cancel([beam_search_answers(c, spec.beam_search) for c in choices])
            for a in answers
        ]
    return _best(await gather_or_cancel([choice.collect() for choice in choices]), spec)


def _best(answers: Sequence[CompleteAnswer], spec: GenerationSpec) -> list[CompleteAnswer]:
    """Returns the n best of each prompt's best_of candidates, best first; all answers, in order, if best_of is n.

    The earlier answer wins a tie. The mean covers all generated tokens, also the tokens of a stop string.
    """
    if spec.candidates == spec.n:
        return list(answers)
    chosen: list[CompleteAnswer] = []
    for first in range(0, len(answers), spec.candidates):
        chosen += sorted(answers[first : first + spec.candidates], key=_mean_logprob, reverse=True)[: spec.n]
    return chosen


def _mean_logprob(answer: CompleteAnswer) -> float:
    logprobs = [token.logprob for token in answer.tokens if token.logprob is not None]
    return sum(logprobs) / len(logprobs) if logprobs else -math.inf


async def gather_or_cancel(coroutines: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Runs the coroutines side by side and returns all results. The first failure cancels the others and is raised."""
    if len(coroutines) == 1:
        return [await coroutines[0]]
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(coroutine) for coroutine in coroutines]
    except* BatonError as e:
        raise _first_error(e) from e
    return [task.result() for task in tasks]


def _first_error(group: BaseExceptionGroup[BatonError]) -> BatonError:
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    assert isinstance(error, BatonError)
    return error


async def beam_search_answers(choice: Choice, params: BeamSearchParams) -> list[CompleteAnswer]:
    """Returns the n best answers, best first. Raises BatonError.

    The choice's usage counts the prompt once and the tokens of these answers. Its charged usage counts every generated
    token.
    """
    return await _BeamSearch(choice, params).run()


class _BeamSearch:
    """One beam search over the pods: every expansion of a beam is a dispatch of one token."""

    def __init__(self, choice: Choice, params: BeamSearchParams) -> None:
        self._choice = choice
        self._params = params
        sampling = choice.request.sampling
        self._stops = sampling.stop_token_ids
        self._sampling = SamplingParams(
            temperature=0.0, max_tokens=1, logprobs=params.width + len(self._stops), seed=sampling.seed
        )
        self._dispatch_indexes: Iterator[int] = itertools.count()
        self._usage = Usage(choice.request.prompt_len)
        self._generated = 0

    async def run(self) -> list[CompleteAnswer]:
        """Searches, records the result in the choice and returns the answers."""
        choice, sampling = self._choice, self._choice.request.sampling
        beams = await beam_search(
            self._expand,
            self._params,
            max_tokens=sampling.max_tokens,
            min_tokens=sampling.min_tokens,
            stops=self._stops,
            num_top=choice.spec.logprobs or 0,
        )
        answers = [self._answer(beam) for beam in beams[: choice.spec.n]]
        choice.record_search(self._usage, self._generated, answers[0].finish)
        return answers

    def _answer(self, beam: Beam) -> CompleteAnswer:
        """Turns a beam into an answer and adds its tokens to the usage."""
        output = self._choice.new_output()
        answer = self._choice.complete_answer([output.add(beam.tokens, beam.finish)])
        self._usage += Usage(completion=output.num_tokens, reasoning=output.reasoning_tokens)
        return answer

    async def _expand(self, beams: Sequence[Beam]) -> list[tuple[TokenLogprob, ...]]:
        """Returns the likeliest next tokens of each beam; the `expand` of `beam_search`."""
        tops = await gather_or_cancel([self._likeliest_tokens(beam) for beam in beams])
        self._choice.record_search(self._usage, self._generated)
        return tops

    async def _likeliest_tokens(self, beam: Beam) -> tuple[TokenLogprob, ...]:
        """Returns the likeliest tokens after a beam.

        A beam that finds no room is tried again until the deadline, because its failure would discard the work of the
        other beams. A search that finds no room for its first token fails at once.
        """
        while True:
            try:
                return (await self._next_token(beam)).top
            except Overloaded as e:
                pause = min(max(e.retry_after_s or 0.0, BEAM_RETRY_PAUSE_S[0]), BEAM_RETRY_PAUSE_S[1])
                if not beam.tokens or time.monotonic() + pause >= self._choice.deadline:
                    raise
                await asyncio.sleep(pause)

    async def _next_token(self, beam: Beam) -> Token:
        """Dispatches a beam as a prompt of its own and returns the one generated token."""
        base, index = self._choice.request, next(self._dispatch_indexes)
        request = ValidRequest(
            f"{base.request_id}-{index}",
            base.model,
            (*base.prompt_ids, *(token.id for token in beam.tokens)),
            self._sampling,
            base.cache_salt,
            base.priority,
        )
        dispatch = self._choice.dispatch_for_search(request, first=index == 0)
        tokens: list[Token] = []
        finished = False
        try:
            while not finished:
                delta = await dispatch.next()
                tokens.extend(delta.tokens)
                finished = delta.finish is not None
        finally:
            dispatch.close()
        if index == 0:
            self._usage = replace(self._usage, cached=dispatch.cached_tokens)
        self._generated += 1
        return tokens[0]


async def merge_choices(choices: Sequence[Choice]) -> AsyncGenerator[tuple[int, OutputPiece], None]:
    """Yields the pieces of all choices as they come, with the index of their choice."""
    # One slot: a choice waits until its piece is taken, and its next piece then holds all tokens that came meanwhile.
    queue: asyncio.Queue[tuple[int, OutputPiece | BaseException | None]] = asyncio.Queue(maxsize=1)
    tasks = [asyncio.create_task(_queue_pieces(i, choice, queue)) for i, choice in enumerate(choices)]
    try:
        running = len(tasks)
        while running:
            index, result = await queue.get()
            if result is None:
                running -= 1
            elif isinstance(result, BaseException):
                raise result
            else:
                yield index, result
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _queue_pieces(
    index: int, choice: Choice, queue: asyncio.Queue[tuple[int, OutputPiece | BaseException | None]]
) -> None:
    """Puts a choice's pieces into the queue, then None, or the exception that ended it."""
    try:
        with closing(choice):
            async for piece in choice:
                await queue.put((index, piece))
        await queue.put((index, None))
    except Exception as e:
        with suppress(asyncio.CancelledError):
            await queue.put((index, e))


def total_usage(choices: Sequence[Choice]) -> Usage:
    """Returns the usage summed over the choices of a request; a prompt counts once."""
    return sum((choice.usage_share for choice in choices), Usage())
