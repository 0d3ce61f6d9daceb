"""The complete answers of a request, its beam search, and the merged stream of its choices."""

from __future__ import annotations

import asyncio
import itertools
import math
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Coroutine, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from common.errors import BatonError, Overloaded
from common.types import FinishReason, SamplingParams, Token, TokenLogprob, ValidRequest
from gateway.dispatch.dispatch import Dispatch
from gateway.serving.choice import Choice, CompleteAnswer
from gateway.serving.request import BeamSearchParams, GenerationSpec, Usage
from gateway.telemetry.timeline import Timeline
from gateway.text.output import OutputPiece

BEAM_RETRY_PAUSE_S = (0.05, 0.25)  #: Min and max seconds before a beam that found no room is tried again.

T = TypeVar("T")


async def complete_answers(choices: Sequence[Choice], spec: GenerationSpec) -> list[CompleteAnswer]:
    """Returns n complete answers for each prompt, fewer if a grammar of a beam search allows no more. BatonError.

    Of best_of candidates these are the n with the highest mean log-probability, best first. The earlier candidate wins
    a tie. The mean covers all generated tokens, also the tokens of a stop string.
    """
    if spec.beam_search is not None:
        searches = [_BeamSearch(choice, spec.beam_search).run() for choice in choices]
        found = await gather_or_cancel(searches)
        # A grammar may allow fewer than n answers.
        return [
            replace(answer, index=prompt * spec.n + number)
            for prompt, answers in enumerate(found)
            for number, answer in enumerate(answers)
        ]
    answers = await gather_or_cancel([choice.collect() for choice in choices])
    chosen = answers
    if spec.candidates != spec.n:
        chosen = []
        for first in range(0, len(answers), spec.candidates):
            chosen += sorted(answers[first : first + spec.candidates], key=_mean_logprob, reverse=True)[: spec.n]
    return [replace(answer, index=index) for index, answer in enumerate(chosen)]


async def reserve_all(choices: Sequence[Choice]) -> None:
    """Returns once decode pods have places for all choices. The first refusal is raised."""
    await gather_or_cancel([choice.reserve() for choice in choices if choice.sample_index == 0])


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
        error: BaseException = e
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        raise error from e
    return [task.result() for task in tasks]


class _BeamSearch:
    """One beam search over the pods: every expansion of a beam is a dispatch of one token.

    The choice's usage counts the prompt once and the tokens of the answers. Its charged usage counts every generated
    token. All dispatches share an affinity, so that they go to the pods that hold the prompt. Only the first one is
    recorded in the request's timeline, which has no room for all.

    With a grammar the tokens of a beam are the output that the request resumes after. The pod brings the grammar to the
    state after them, so every beam has a state of its own, and answers with the likeliest tokens that it allows.
    """

    def __init__(self, choice: Choice, params: BeamSearchParams) -> None:
        self._choice = choice
        self._params = params
        sampling = choice.request.sampling
        self._stops = sampling.stop_token_ids
        self._sampling = SamplingParams(
            temperature=0.0, max_tokens=1, logprobs=params.width + len(self._stops), seed=sampling.seed
        )
        self._min_tokens = sampling.min_tokens
        self._indexes = itertools.count()
        self._usage = Usage(choice.request.prompt_len)
        self._generated = 0

    async def run(self) -> list[CompleteAnswer]:
        """Returns the n best answers, best first, and records the result in the choice. Raises BatonError."""
        choice, sampling = self._choice, self._choice.request.sampling
        limits = {"max_tokens": sampling.max_tokens, "min_tokens": sampling.min_tokens}
        num_top = choice.spec.logprobs or 0
        beams = await beam_search(self._expand, self._params, **limits, stops=self._stops, num_top=num_top)
        answers = []
        for beam in await self._with_completed(beams[: choice.spec.n]):
            output = choice.new_output()
            answers.append(choice.complete_answer([output.add(beam.tokens, beam.finish)]))
            self._usage += Usage(completion=output.num_tokens, reasoning=output.reasoning_tokens)
        choice.record_search(self._usage, self._generated, answers[0].finish)
        return answers

    async def _with_completed(self, beams: Sequence[Beam]) -> list[Beam]:
        """Returns the beams; those that the grammar completes with token `max_tokens` end with STOP, as other answers.

        A pod that is asked for one more token tells it. The context must have room for this token.
        """
        request, cut = self._choice.request, [beam for beam in beams if beam.finish is FinishReason.LENGTH]
        longest = self._choice.model.pod_table.limits().max_model_len
        if request.grammar is None or not cut or request.prompt_len + request.sampling.max_tokens >= longest:
            return list(beams)
        complete: set[int] = set()
        with suppress(BatonError):  # the answers are known already
            tops = await self._expand(cut)
            complete = {id(beam) for beam, top in zip(cut, tops, strict=True) if not top}
        return [replace(beam, finish=FinishReason.STOP) if id(beam) in complete else beam for beam in beams]

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
                if not beam.tokens or time.monotonic() + pause >= self._choice.context.deadline:
                    raise
                await asyncio.sleep(pause)

    def _next_request(self, beam: Beam, request_id: str) -> ValidRequest:
        """Returns the request for the token after a beam."""
        base, ids = self._choice.request, tuple(token.id for token in beam.tokens)
        if base.grammar is None:
            return replace(base, request_id=request_id, prompt_ids=base.prompt_ids + ids, sampling=self._sampling)
        length = len(ids) + 1
        sampling = replace(
            self._sampling,
            max_tokens=length,
            min_tokens=min(self._min_tokens, length),
            stop_token_ids=self._stops,  # the grammar allows them where it may end
            allowed_logprobs=True,
        )
        return replace(base, request_id=request_id, output_ids=ids, sampling=sampling)

    async def _next_token(self, beam: Beam) -> Token:
        """Dispatches a beam as a prompt of its own and returns the one generated token."""
        base, context, index = self._choice.request, self._choice.context, next(self._indexes)
        request = self._next_request(beam, f"{base.request_id}-{index}")
        dispatch = Dispatch(
            self._choice.model.router,
            request,
            deadline=context.deadline,
            timeline=Timeline(request.request_id, None, context.endpoint) if index else context.timeline,
            affinity=context.affinity or base.request_id,
        )
        with closing(dispatch):
            delta = await dispatch.next()
            tokens = list(delta.tokens)
            while delta.finish is None:
                delta = await dispatch.next()
                tokens += delta.tokens
        if index == 0:
            self._usage = replace(self._usage, cached=dispatch.cached_tokens)
        self._generated += 1
        return tokens[0]


async def merge_choices(choices: Sequence[Choice]) -> AsyncGenerator[tuple[int, OutputPiece], None]:
    """Yields the pieces of all choices as they come, with the index of their choice."""
    # One slot: a choice waits until its piece is taken, and its next piece then holds all tokens that came meanwhile.
    queue: asyncio.Queue[tuple[int, OutputPiece | BaseException | None]] = asyncio.Queue(maxsize=1)

    async def queue_pieces(index: int, choice: Choice) -> None:
        try:
            with closing(choice):
                async for piece in choice:
                    await queue.put((index, piece))
            await queue.put((index, None))
        except Exception as e:
            with suppress(asyncio.CancelledError):
                await queue.put((index, e))

    tasks = [asyncio.create_task(queue_pieces(i, choice)) for i, choice in enumerate(choices)]
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


@dataclass(frozen=True, slots=True)
class Beam:
    """A complete answer, or the beginning of one."""

    tokens: tuple[Token, ...] = ()
    logprob: float = 0.0  # sum of the tokens' log-probabilities
    finish: FinishReason | None = None  # why the beam ended; None while it is live

    def extended(self, choice: TokenLogprob, top: tuple[TokenLogprob, ...], finish: FinishReason | None) -> Beam:
        """Returns the beam with one more token. `top` holds the alternatives that are reported with that token."""
        token = Token(len(self.tokens), choice.token, choice.logprob, top)
        return Beam((*self.tokens, token), self.logprob + choice.logprob, finish)


Expand = Callable[[Sequence[Beam]], Awaitable[Sequence[Sequence[TokenLogprob]]]]
"""Returns, for each beam, its likeliest next tokens, best first: at least `width` plus the number of stop tokens.

A grammar may allow fewer. No token at all means that the beam is complete.
"""


async def beam_search(
    expand: Expand,
    params: BeamSearchParams,
    *,
    max_tokens: int,
    min_tokens: int = 0,
    stops: Collection[int] = (),
    num_top: int = 0,
) -> list[Beam]:
    """Finds the likeliest answers. Returns `width` hypotheses, best first; fewer only if the vocabulary is too small.

    Scores and ends follow transformers (generation/utils.py, `_beam_search`): a hypothesis scores log-probability /
    length ** length_penalty, its stop token included, and a candidate that ends is kept only if it is among the best
    `width` of its step. No token of `stops` is taken before `min_tokens`; `num_top` alternatives are kept per token.
    A beam that its grammar completes is a hypothesis, without a stop token, in the step that would expand it. Raises
    what `expand` raises.
    """
    live, hypotheses = [Beam()], list[Beam]()
    for length in range(1, max_tokens + 1):
        tops = await expand(live)
        ends = stops if length > min_tokens else ()
        candidates = [
            (beam.logprob + choice.logprob, beam, choice, tuple(top[:num_top]))
            for beam, top in zip(live, tops, strict=True)
            for choice in top
            if choice.token in ends or choice.token not in stops
        ]
        candidates.sort(key=lambda candidate: candidate[0], reverse=True)
        best = candidates[: params.width]
        hypotheses += [replace(beam, finish=FinishReason.STOP) for beam, top in zip(live, tops, strict=True) if not top]
        hypotheses += [beam.extended(c, top, FinishReason.STOP) for _, beam, c, top in best if c.token in ends]
        if length == max_tokens:
            longest = [candidate for candidate in best if candidate[2].token not in ends]
            hypotheses += [beam.extended(c, top, FinishReason.LENGTH) for _, beam, c, top in longest]
        hypotheses.sort(key=lambda beam: params.score(beam.logprob, len(beam.tokens)), reverse=True)
        del hypotheses[params.width :]
        continuing = [candidate for candidate in candidates if candidate[2].token not in ends][: params.width]
        live = [beam.extended(choice, top, None) for _, beam, choice, top in continuing]
        if not live or (len(hypotheses) == params.width and _enough(live[0], hypotheses[-1], params, max_tokens)):
            break
    return hypotheses


def _enough(live: Beam, worst: Beam, params: BeamSearchParams, max_tokens: int) -> bool:
    """The best live beam cannot displace the worst hypothesis, or `early_stopping` says not to wait for it."""
    if params.early_stopping is True:
        return True
    longest = params.early_stopping == "never" and params.length_penalty > 0
    reachable = params.score(live.logprob, max_tokens if longest else len(live.tokens))
    return reachable <= params.score(worst.logprob, len(worst.tokens))
