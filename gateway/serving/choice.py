"""One answer in the making: tokens of a run through the pods become pieces of text, counted and timed.

Lifecycle: made with its request -> read piece by piece, or collected -> closed, whatever came of it. Nothing runs
before the first piece is asked for.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Self

from common.types import FinishReason, PromptLogprobs, Token, ValidRequest
from gateway.dispatch.dispatch import Dispatch
from gateway.dispatch.samples import Sample, SampleGroup
from gateway.dispatch.token_queue import OnTokenId
from gateway.serving.models import ServedModel
from gateway.serving.request import GenerationSpec
from gateway.serving.request_context import RequestContext, Usage
from gateway.telemetry.metrics import GatewayMetrics
from gateway.telemetry.timeline import Timeline
from gateway.text.output import (
    ChoiceOutput,
    OutputPiece,
    PromptToken,
    ReportedToken,
    join_prompt_logprobs,
    prompt_echo,
    prompt_tokens_with_logprobs,
)
from gateway.text.output_parser import OutputParserConfig
from gateway.text.tools.format import MessageDelta, ParsedMessage, assemble


@dataclass(frozen=True, slots=True)
class CompleteAnswer:
    """A complete choice. message: what its text means, None where all of it is content. prompt: its tokens with
    log-probabilities, None where nobody asked for them. tokens: all generated ones. deltas: as those of its pieces.
    """

    text: str
    reported: tuple[ReportedToken, ...]
    finish: FinishReason
    message: ParsedMessage | None = None
    prompt_tokens: tuple[PromptToken, ...] | None = None
    tokens: tuple[Token, ...] = ()
    deltas: tuple[MessageDelta, ...] | None = None


class Choice:
    """An answer in the making: iterate it for pieces of text, or `collect` it; `close` ends it early.

    child: its number among those of its prompt, which are one family where there are several.
    """

    def __init__(
        self,
        metrics: GatewayMetrics,
        model: ServedModel,
        ticket: RequestContext,
        spec: GenerationSpec,
        request: ValidRequest,
        parser_config: OutputParserConfig | None = None,
        *,
        family: SampleGroup | None = None,
        child: int = 0,
    ) -> None:
        self.child = child
        self._group = family
        self.model = model
        self.parser_config = parser_config
        self._metrics = metrics
        self._context = ticket
        self.spec = spec
        self.request = request
        self._output = self.new_output()
        self._dispatch: Dispatch | Sample | None = None
        self._last: float | None = None  # when tokens came last
        self._echoed_chars = 0  # characters of the prompt that were echoed
        self._echoed = not spec.echo
        self._prompt_logprobs_taken = False
        self._search_usage: Usage | None = None  # instead of `_output` and `_run`, where beams were searched
        self._generated = 0

    @property
    def usage(self) -> Usage:
        """Tokens of the answer so far; of all answers that a search for it gave."""
        if self._search_usage is not None:
            return self._search_usage
        output, run = self._output, self._dispatch
        usage = Usage(self.request.prompt_len, output.num_tokens, reasoning=output.reasoning_tokens)
        if run is None:
            return usage
        return replace(
            usage,
            cached=run.cached_tokens,
            accepted=run.drafts_accepted,
            rejected=run.drafts_proposed - run.drafts_accepted,
        )

    @property
    def usage_share(self) -> Usage:
        """The part of `usage` that counts where choices are added up: a prompt of several is computed once."""
        return replace(self.usage, prompt=0, cached=0) if self.child else self.usage

    @property
    def charged_usage(self) -> Usage:
        """What `cost` is to the caller's limits: tokens count that were generated and are not answered, too."""
        return self.usage_share if self._search_usage is None else replace(self.usage_share, completion=self._generated)

    @property
    def deadline(self) -> float:
        """A time.monotonic()."""
        return self._context.deadline

    def dispatch_for_search(self, request: ValidRequest, *, first: bool) -> Dispatch:
        """A run that a search for this answer needs. All had better go to the pods that have the beginning already.

        The first one is told in the request's timeline, which has no room for all.
        """
        ticket = self._context
        return self.model.dispatcher.dispatch(
            request,
            deadline=ticket.deadline,
            timeline=ticket.timeline if first else Timeline(request.request_id, None, ticket.endpoint),
            affinity=ticket.affinity or self.request.request_id,
        )

    def record_search(self, usage: Usage, generated: int, finish: FinishReason | None = None) -> None:
        """What a search has come to. generated: tokens, of answers or not. finish: of the best answer, at the end."""
        if self._search_usage is None:
            self._on_first_token(time.monotonic())
        self._search_usage, self._generated = usage, generated
        if finish is not None:
            self._on_finished(finish, stop_string=False)

    def new_output(self) -> ChoiceOutput:
        """For an answer's tokens, from the first one on."""
        logprobs = self.spec.logprobs is not None
        return ChoiceOutput(
            self.model.tokenizer,
            self.spec.stop,
            logprobs=logprobs,
            reading=self.parser_config,
            include_stop=self.spec.include_stop,
        )

    def prompt_tokens(self, num_top: int | None) -> tuple[PromptToken, ...]:
        """The prompt's tokens, with log-probabilities once there is a token; None alternatives: without."""
        parts = () if self._dispatch is None or num_top is None else self._dispatch.prompt_logprobs
        return prompt_tokens_with_logprobs(self.request.prompt_ids, parts, num_top or 0)

    def take_prompt_logprobs(self) -> PromptLogprobs | None:
        """Of the prompt behind its first token, once, after the first piece, where they were asked for."""
        run = self._dispatch
        if run is None or self._prompt_logprobs_taken or self.spec.prompt_logprobs is None or not run.prompt_logprobs:
            return None
        self._prompt_logprobs_taken = True
        return join_prompt_logprobs(run.prompt_logprobs)

    def _echo(self, piece: OutputPiece) -> OutputPiece:
        """The first piece, behind the prompt; without itself when nothing was to be generated."""
        tokens = self.prompt_tokens(self.spec.logprobs)
        if self.spec.logprobs is None:
            tokens = tuple(map(PromptToken, self.request.prompt_ids))
        echo = prompt_echo(self.model.tokenizer, tokens)
        self._echoed_chars = len(echo.text)
        shown = echo.reported if self.spec.logprobs is not None else ()
        if self.spec.max_tokens == 0:
            return OutputPiece(echo.text, shown, (), FinishReason.LENGTH)
        piece = self._shift_offsets(piece)
        return replace(piece, text=echo.text + piece.text, reported=(*shown, *piece.reported))

    def _shift_offsets(self, piece: OutputPiece) -> OutputPiece:
        """Offsets count from the prompt's start where that is echoed."""
        if not (self._echoed_chars and piece.reported):
            return piece
        return replace(
            piece, reported=tuple(ReportedToken(s.token, s.offset + self._echoed_chars) for s in piece.reported)
        )

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> OutputPiece:
        """What came since the last piece; the last one has a finish reason. Raises BatonError."""
        if self._output.finish is not None:
            raise StopAsyncIteration
        return await self._next()

    async def relay(self, take: Callable[[OutputPiece], bool], take_text: Callable[[str], bool] | None = None) -> None:
        """After a piece: hands over those that follow as they come, with no task's turn between, until `take` says
        False. Returns then, at the end, and where that is not possible; iterating goes on from there. Raises what
        `take` raises. take_text: gets most of those that are a token's text and nothing else.
        """
        run = self._dispatch
        if not isinstance(run, Dispatch) or self._output.finish is not None:
            return

        def relayed(tokens: Sequence[Token], finish: FinishReason | None) -> bool:
            piece = self._piece(tokens, finish, run)
            return take(piece) and piece.finish is None

        await run.relay(
            relayed, self._text_callback(take_text) if take_text is not None and self._output.text_only else None
        )

    def _text_callback(self, take_text: Callable[[str], bool]) -> OnTokenId:
        """What `_piece` does, for one token that is behind the first and ends nothing."""
        output, observe = self._output, self._metrics.itl.observe

        def relayed(token_id: int) -> bool:
            assert self._last is not None
            now = time.monotonic()
            observe(now - self._last)
            self._last = now
            return take_text(output.add_id(token_id))

        return relayed

    async def collect(self) -> CompleteAnswer:
        """The whole answer. Raises BatonError."""
        pieces: list[OutputPiece] = []
        try:
            while not pieces or pieces[-1].finish is None:
                pieces.append(await self._next())
        finally:
            self.close()
        return self.complete_answer(pieces)

    def complete_answer(self, pieces: Sequence[OutputPiece]) -> CompleteAnswer:
        """The answer that these are all pieces of."""
        finish = pieces[-1].finish
        assert finish is not None
        deltas = None if self.parser_config is None else tuple(d for piece in pieces for d in piece.deltas or ())
        scored = self.spec.prompt_logprobs
        return CompleteAnswer(
            "".join([piece.text for piece in pieces]),
            tuple(token for piece in pieces for token in piece.reported),
            finish,
            None if deltas is None else assemble(deltas),
            None if scored is None else self.prompt_tokens(scored),
            tuple(token for piece in pieces for token in piece.tokens),
            deltas,
        )

    def close(self) -> None:
        """Gives everything back, which aborts on the pods what is not complete; idempotent."""
        if self._dispatch is not None:
            self._dispatch.close()
        elif self._group is not None:
            self._group.samples[self.child].close()

    async def _next(self) -> OutputPiece:
        run = self._dispatch or self._start()
        delta = await run.next()
        return self._piece(delta.tokens, delta.finish, run)

    def _piece(self, tokens: Sequence[Token], finish: FinishReason | None, run: Dispatch | Sample) -> OutputPiece:
        metrics, now = self._metrics, time.monotonic()
        if self._last is None and not self.child:
            self._on_first_token(now)
        elif self._last is not None and tokens:
            metrics.itl.observe((now - self._last) / len(tokens))
        self._last = now
        if self.spec.max_tokens == 0:
            self._output.finish = FinishReason.LENGTH
            piece = self._echo(OutputPiece("", (), ()))
        else:
            piece = self._output.add(tokens, finish)
            if not self._echoed:
                piece = self._echo(piece)
            elif self._echoed_chars:
                piece = self._shift_offsets(piece)
        self._echoed = True
        if piece.finish is not None:
            self._on_finished(piece.finish, stop_string=finish is None)
            run.close()
        return piece

    def _start(self) -> Dispatch | Sample:
        if self._group is None:
            self._dispatch = self._new_dispatch()
        else:
            self._dispatch = self._group.start(self.child, self._new_dispatch)
        return self._dispatch

    def _new_dispatch(self) -> Dispatch:
        ticket = self._context
        return self.model.dispatcher.dispatch(
            self.request,
            deadline=ticket.deadline,
            timeline=ticket.timeline,
            affinity=ticket.affinity,
        )

    def _on_first_token(self, now: float) -> None:
        """The first token of a prompt is here."""
        timeline = self._context.timeline
        ttft_s = now - timeline.start
        self._metrics.ttft.observe(ttft_s, timeline.exemplar)
        timeline.set_facts(ttft_s=round(ttft_s, 6))

    def _on_finished(self, finish: FinishReason, *, stop_string: bool) -> None:
        metrics, usage = self._metrics, self.charged_usage
        timeline = self._context.timeline
        metrics.e2e.observe(time.monotonic() - timeline.start, timeline.exemplar)
        metrics.prompt_tokens.inc(usage.prompt)
        metrics.output_tokens.inc(usage.completion)
        if stop_string:
            metrics.aborts.labels("stop_string").inc()
        drafts = {"accepted": usage.accepted, "rejected": usage.rejected} if usage.accepted or usage.rejected else {}
        timeline.mark("finished", reason=finish.value, output_tokens=usage.completion, **drafts)
