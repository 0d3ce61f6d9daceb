"""One answer in progress: tokens of a dispatch become pieces of text, counted and timed."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Self

from common.types import FinishReason, PromptLogprobs, Token
from gateway.dispatch.dispatch import Dispatch
from gateway.dispatch.samples import Sample, SampleGroup
from gateway.dispatch.token_queue import OnTokenId
from gateway.serving.models import ServedModel
from gateway.serving.request import GenerationSpec, RequestContext, Usage
from gateway.text.output import (
    ChoiceOutput,
    OutputParserConfig,
    OutputPiece,
    PromptToken,
    ReportedToken,
    join_prompt_logprobs,
    prompt_echo,
    prompt_tokens_with_logprobs,
)
from gateway.text.tokenizer import TextTokenizer
from gateway.text.tools.format import MessageDelta, ParsedMessage, assemble


@dataclass(frozen=True, slots=True)
class CompleteAnswer:
    """One complete choice."""

    text: str
    reported: tuple[ReportedToken, ...]  #: Tokens with log-probabilities; empty if the client asked for none.
    finish: FinishReason
    message: ParsedMessage | None = None  #: Content, reasoning and calls; None if all of the text is content.
    prompt_tokens: tuple[PromptToken, ...] | None = None  #: With log-probabilities, None if not asked for.
    tokens: tuple[Token, ...] = ()  # all generated tokens, also the tokens of a stop string
    deltas: tuple[MessageDelta, ...] | None = None  # the deltas of all pieces, None if all of the text is content
    index: int = 0  #: Of the choice among those of all prompts: prompt * n + number.


class PromptReport:
    """A prompt as its answers report it. Each form is built once, because the samples of a prompt share it."""

    def __init__(self, tokenizer: TextTokenizer, dispatch: Dispatch) -> None:
        self._tokenizer = tokenizer
        self._dispatch = dispatch
        self._ids = dispatch.request.prompt_ids
        self._tokens: dict[int, tuple[PromptToken, ...]] = {}  #: By the number of alternatives.
        self._echo: tuple[str, tuple[ReportedToken, ...]] | None = None

    def tokens(self, num_top: int) -> tuple[PromptToken, ...]:
        """Returns the prompt's tokens with `num_top` alternatives each, once the first token was generated."""
        if num_top not in self._tokens:
            parts = self._dispatch.prompt_logprobs
            self._tokens[num_top] = prompt_tokens_with_logprobs(self._ids, parts, num_top)
        return self._tokens[num_top]

    def echo(self, num_top: int | None) -> tuple[str, tuple[ReportedToken, ...]]:
        """Returns the prompt's text and its tokens to report, none without `num_top`, which is always the same."""
        if self._echo is None:
            tokens = tuple(map(PromptToken, self._ids)) if num_top is None else self.tokens(num_top)
            text, reported = prompt_echo(self._tokenizer, tokens)
            self._echo = text, () if num_top is None else reported
        return self._echo


class Choice:
    """An answer in progress: iterate it for pieces of text, or `collect` it; `close` ends it early.

    Nothing is sent to the pods before `reserve`, or before the first piece is read.
    """

    def __init__(
        self,
        context: RequestContext,
        model: ServedModel,
        spec: GenerationSpec,
        dispatch: Dispatch,
        parser_config: OutputParserConfig | None = None,
        *,
        report: PromptReport,
        group: SampleGroup | None = None,
        sample_index: int = 0,
    ) -> None:
        self.context = context
        self.model = model
        self.spec = spec
        self.request = dispatch.request  # the client's own; a dispatch that resumes goes on with another
        self.parser_config = parser_config  # how the text is parsed, None if all of it is content
        self.sample_index = sample_index  #: Among the samples of its prompt; 0 if there is no other.
        self._report = report
        self._group = group
        self._metrics = model.router.metrics
        self._output = self.new_output()
        self._dispatch = dispatch  # the way through the pods, which samples of one prompt share
        self._reader: Dispatch | Sample = dispatch if group is None else group.samples[sample_index]
        self._last_tokens_at: float | None = None
        self._echoed_chars: int | None = None  #: Characters of the echoed prompt; None before it was shown.
        self._prompt_logprobs_taken = False
        self._search_usage: Usage | None = None  #: Of a beam search, which uses no `_output` and no `_dispatch`.
        self._generated = 0

    # -- reading

    async def reserve(self) -> None:
        """Returns once a decode pod has a place for the choice. Raises BatonError, as reading does later."""
        await self._dispatch.reserve()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> OutputPiece:
        """Returns the text and tokens since the last piece; the last piece has a finish reason. Raises BatonError."""
        if self._output.finish is not None:
            raise StopAsyncIteration
        delta = await self._reader.next()
        return self._piece(delta.tokens, delta.finish)

    async def relay(
        self, on_piece: Callable[[OutputPiece], bool], on_text: Callable[[str], bool] | None = None
    ) -> None:
        """Calls `on_piece` for each following piece until it returns False.

        The call comes in the event loop turn in which the tokens arrive, after the first piece. `on_text`, if given, is
        called instead for most pieces that are the text of one token and nothing else. `relay` also returns when the
        answer ended, and at once if the choice cannot be relayed; iteration continues. Raises what `on_piece` raises.
        """
        if self._group is not None or self._output.finish is not None:
            return

        def on_tokens(tokens: Sequence[Token], finish: FinishReason | None) -> bool:
            piece = self._piece(tokens, finish)
            return on_piece(piece) and piece.finish is None

        on_token_id = self._text_callback(on_text) if on_text is not None and self._output.text_only else None
        await self._dispatch.relay(on_tokens, on_token_id)

    def _text_callback(self, on_text: Callable[[str], bool]) -> OnTokenId:
        """Returns the callback for a token that is neither the first nor the last. It does the work of `_piece`."""
        output, observe = self._output, self._metrics.itl.observe

        def on_token_id(token_id: int) -> bool:
            assert self._last_tokens_at is not None
            now = time.monotonic()
            observe(now - self._last_tokens_at)
            self._last_tokens_at = now
            return on_text(output.add_id(token_id))

        return on_token_id

    async def collect(self) -> CompleteAnswer:
        """Reads all pieces and returns the complete answer. Raises BatonError."""
        try:
            return self.complete_answer([piece async for piece in self])
        finally:
            self.close()

    def complete_answer(self, pieces: Sequence[OutputPiece]) -> CompleteAnswer:
        """Returns the answer that these pieces make up; they are all of its pieces."""
        finish = pieces[-1].finish
        assert finish is not None
        deltas = None if self.parser_config is None else tuple(d for piece in pieces for d in piece.deltas or ())
        num_top = self.spec.prompt_logprobs
        return CompleteAnswer(
            "".join([piece.text for piece in pieces]),
            tuple(token for piece in pieces for token in piece.reported),
            finish,
            None if deltas is None else assemble(deltas),
            None if num_top is None else self._report.tokens(num_top),
            tuple(token for piece in pieces for token in piece.tokens),
            deltas,
        )

    def close(self) -> None:
        """Ends the choice and aborts incomplete work on the pods; idempotent."""
        self._reader.close()

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended the answer, None if none has."""
        return self._output.stop_string

    # -- tokens

    @property
    def usage(self) -> Usage:
        """Tokens of the answer so far; after a beam search, of all answers that it found."""
        if self._search_usage is not None:
            return self._search_usage
        output, dispatch = self._output, self._dispatch
        usage = Usage(self.request.prompt_len, output.num_tokens, dispatch.cached_tokens, output.reasoning_tokens)
        if self.sample_index:  # the first sample of a prompt reports the drafts of all
            return usage
        proposed, accepted = dispatch.drafts
        return replace(usage, accepted=accepted, rejected=proposed - accepted)

    @property
    def usage_share(self) -> Usage:
        """The part of `usage` that is summed over choices: the prompt counts for the first sample of a prompt only."""
        return replace(self.usage, prompt=0, cached=0) if self.sample_index else self.usage

    @property
    def charged_usage(self) -> Usage:
        """What the caller's limits are charged: `usage_share`, and after a beam search every generated token."""
        return self.usage_share if self._search_usage is None else replace(self.usage_share, completion=self._generated)

    def take_prompt_logprobs(self) -> PromptLogprobs | None:
        """Returns the prompt's log-probabilities once, after the first piece; else, and if not requested, None."""
        if self._prompt_logprobs_taken or self.spec.prompt_logprobs is None:
            return None
        parts = self._dispatch.prompt_logprobs
        self._prompt_logprobs_taken = bool(parts)
        return join_prompt_logprobs(parts) if parts else None

    # -- pieces

    def new_output(self) -> ChoiceOutput:
        """Returns an empty ChoiceOutput for this request."""
        return ChoiceOutput(
            self.model.tokenizer,
            self.spec.stop,
            logprobs=self.spec.logprobs is not None,
            parser_config=self.parser_config,
            include_stop=self.spec.include_stop,
            min_tokens=self.spec.sampling.min_tokens,
            id_source=self.context.id_source(),
        )

    def _piece(self, tokens: Sequence[Token], finish: FinishReason | None) -> OutputPiece:
        """Turns tokens into a piece; records latencies, and closes the dispatch with the last piece."""
        now = time.monotonic()
        if self._last_tokens_at is None and not self.sample_index:
            self._on_first_token(now)
        elif self._last_tokens_at is not None and tokens:
            self._metrics.itl.observe((now - self._last_tokens_at) / len(tokens))
        self._last_tokens_at = now
        if self.spec.max_tokens == 0:  # the client wants the prompt only
            self._output.finish = FinishReason.LENGTH
            piece = OutputPiece("", (), (), FinishReason.LENGTH)
        else:
            piece = self._output.add(tokens, finish)
        if self.spec.echo:
            piece = self._with_echo(piece)
        if piece.finish is not None:
            self._on_finished(piece.finish, stop_string=finish is None)
            self.close()
        return piece

    def _with_echo(self, piece: OutputPiece) -> OutputPiece:
        """Puts the prompt before the first piece, and makes token offsets count from the start of the prompt."""
        text, reported = "", tuple[ReportedToken, ...]()
        if self._echoed_chars is None:
            text, reported = self._report.echo(self.spec.logprobs)
            self._echoed_chars = len(text)
        shifted = [ReportedToken(r.token, r.offset + self._echoed_chars) for r in piece.reported]
        return replace(piece, text=text + piece.text, reported=(*reported, *shifted))

    # -- what is recorded

    def record_search(self, usage: Usage, generated: int, finish: FinishReason | None = None) -> None:
        """Records a beam search: tokens of the answers, all `generated` tokens, and how the best answer ended."""
        if self._search_usage is None:
            self._on_first_token(time.monotonic())
        self._search_usage, self._generated = usage, generated
        if finish is not None:
            self._on_finished(finish, stop_string=False)

    def _on_first_token(self, now: float) -> None:
        """Records TTFT: the first token of the prompt has arrived."""
        timeline = self.context.timeline
        self.context.on_first_token()
        ttft_s = now - timeline.start
        self._metrics.ttft.observe(ttft_s, timeline.exemplar)
        timeline.set_facts(ttft_s=round(ttft_s, 6))

    def _on_finished(self, finish: FinishReason, *, stop_string: bool) -> None:
        metrics, usage, timeline = self._metrics, self.charged_usage, self.context.timeline
        metrics.e2e.observe(time.monotonic() - timeline.start, timeline.exemplar)
        metrics.prompt_tokens.inc(usage.prompt)
        metrics.output_tokens.inc(usage.completion)
        if stop_string:
            metrics.aborts.labels("stop_string").inc()
        drafts = {"accepted": usage.accepted, "rejected": usage.rejected} if usage.accepted or usage.rejected else {}
        timeline.mark("finished", reason=finish.value, output_tokens=usage.completion, **drafts)


def total_usage(choices: Sequence[Choice]) -> Usage:
    """Returns the usage summed over the choices of a request; a prompt counts once."""
    return sum((choice.usage_share for choice in choices), Usage())
