"""A beam search over the pods, which know nothing of it.

Each step asks for one token behind every live beam, all at once, as ordinary requests that bring the beam's tokens as
part of their prompt: what a prefix cache holds of it is not computed again. Their log-probabilities are what matters,
the token itself is not used. All of it ends with the task that runs it, and inside the request's deadline.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

from common.errors import Overloaded
from common.types import SamplingParams, Token, TokenLogprob, ValidRequest
from gateway.beam import Beam, BeamParams, search
from gateway.choice import Answer, Choice, Usage
from gateway.gather import gather

PAUSE_S = (0.05, 0.25)  # before a beam that found no room is tried again


async def beam_answers(choice: Choice, params: BeamParams) -> list[Answer]:
    """The n best answers, best first. Raises BatonError.

    The choice's usage is the prompt, once, and the tokens of these answers; what it spent, every token generated.
    """
    return await _Search(choice, params).run()


class _Search:
    def __init__(self, choice: Choice, params: BeamParams) -> None:
        self._choice = choice
        self._params = params
        sampling = choice.request.sampling
        self._stops = sampling.stop_token_ids
        self._sampling = SamplingParams(
            temperature=0.0, max_tokens=1, logprobs=params.width + len(self._stops), seed=sampling.seed
        )
        self._numbers: Iterator[int] = itertools.count()
        self._usage = Usage(choice.request.prompt_len)
        self._generated = 0

    async def run(self) -> list[Answer]:
        choice, sampling = self._choice, self._choice.request.sampling
        found = await search(
            self._expand,
            self._params,
            max_tokens=sampling.max_tokens,
            min_tokens=sampling.min_tokens,
            stops=self._stops,
            num_top=choice.spec.logprobs or 0,
        )
        answers = [self._answer(beam) for beam in found[: choice.spec.n]]
        choice.record_search(self._usage, self._generated, answers[0].finish)
        return answers

    def _answer(self, beam: Beam) -> Answer:
        output = self._choice.new_output()
        answer = self._choice.complete_answer([output.add(beam.tokens, beam.finish)])
        self._usage += Usage(completion=output.num_tokens, reasoning=output.reasoning_tokens)
        return answer

    async def _expand(self, beams: Sequence[Beam]) -> list[tuple[TokenLogprob, ...]]:
        tops = await gather([self._likeliest(beam) for beam in beams])
        self._choice.record_search(self._usage, self._generated)
        return tops

    async def _likeliest(self, beam: Beam) -> tuple[TokenLogprob, ...]:
        """The likeliest tokens behind a beam. One that finds no room waits for it: the others' work would be lost."""
        while True:
            try:
                return (await self._next(beam)).top
            except Overloaded as e:
                pause = min(max(e.retry_after_s or 0.0, PAUSE_S[0]), PAUSE_S[1])
                if not beam.tokens or time.monotonic() + pause >= self._choice.deadline:
                    raise
                await asyncio.sleep(pause)

    async def _next(self, beam: Beam) -> Token:
        base, number = self._choice.request, next(self._numbers)
        request = ValidRequest(
            f"{base.request_id}-{number}",
            base.model,
            (*base.prompt_ids, *(token.id for token in beam.tokens)),
            self._sampling,
            base.cache_salt,
            base.priority,
        )
        run = self._choice.dispatch_for_search(request, first=number == 0)
        tokens: list[Token] = []
        finished = False
        try:
            while not finished:
                delta = await run.next()
                tokens.extend(delta.tokens)
                finished = delta.finish is not None
        finally:
            run.close()
        if number == 0:
            self._usage = replace(self._usage, cached=run.cached_tokens)
        self._generated += 1
        return tokens[0]
