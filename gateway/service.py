"""The gateway's core, whatever the protocol: admission, prompts to requests, requests to text.

Lifecycle: start -> requests -> drain (refuses new ones, waits for the running ones) -> stop. A permit is taken at
arrival and lives exactly as long as the answer, streamed or not.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Self

from common.errors import BatonError, Cancelled, InvalidRequest, Overloaded, PermissionDenied, Unavailable
from common.prefix_index import IndexReader
from common.types import FinishReason, PromptLogprobs, Token, ValidRequest
from gateway.admission.caller import Caller
from gateway.admission.gate import Gate, GateLimits
from gateway.admission.key_ring import KeyRing
from gateway.admission.limiter import TIMEOUT_S, Limiter
from gateway.admission.outlook import PodOutlook
from gateway.admission.permit import Permit, Size
from gateway.cache_reset import Reset, reset_prefix_caches
from gateway.dialect import kept_special
from gateway.family import Child, Family
from gateway.metrics import GatewayMetrics
from gateway.models import Models, ModelText, ServedModel
from gateway.output import ChoiceOutput, Piece, ShownToken
from gateway.pipeline import Pipeline, Run
from gateway.pod import Pod
from gateway.pods import PodTable
from gateway.prompt_output import PromptToken, echo_of, joined, prompt_tokens
from gateway.reader import Reading
from gateway.routing.router import Router
from gateway.timeline import Timeline, Timelines
from gateway.tokenizer import TextTokenizer
from gateway.tools.protocol import Delta, Message, assemble
from gateway.validation import ChatBody, CompletionBody, Limits, Spec, to_valid

COMPLETION_MAX_TOKENS = 16  # OpenAI's default for /v1/completions

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What the core takes from the configuration. aliases: further names of models, by alias."""

    aliases: Mapping[str, str] = field(default_factory=dict)
    pods: tuple[str, ...] = ()
    request_timeout_s: float = 600.0
    max_inflight: int = 1024
    max_body_bytes: int = 8 << 20
    open_metrics: bool = True
    redis: str | None = None
    limits_timeout_s: float = TIMEOUT_S
    gate: GateLimits = field(default_factory=GateLimits)
    routing_policy: str = "cost"


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens spent; cached: prompt tokens found in the prefix cache of the pod that computed the prompt.

    reasoning: of the completion's tokens, those of reasoning sections. accepted, rejected: drafts of speculative
    decoding that were right and are part of the completion, and those that were not.
    """

    prompt: int = 0
    completion: int = 0
    cached: int = 0
    reasoning: int = 0
    accepted: int = 0
    rejected: int = 0

    def __add__(self, other: Usage) -> Usage:
        return Usage(
            self.prompt + other.prompt,
            self.completion + other.completion,
            self.cached + other.cached,
            self.reasoning + other.reasoning,
            self.accepted + other.accepted,
            self.rejected + other.rejected,
        )


@dataclass(frozen=True, slots=True)
class Answer:
    """A complete choice. message: what its text means, None where all of it is content. prompt: its tokens with
    log-probabilities, None where nobody asked for them. tokens: all generated ones. deltas: as those of its pieces.
    """

    text: str
    shown: tuple[ShownToken, ...]
    finish: FinishReason
    message: Message | None = None
    prompt: tuple[PromptToken, ...] | None = None
    tokens: tuple[Token, ...] = ()
    deltas: tuple[Delta, ...] | None = None


class Ticket:
    """One client request under way. end: ends it from elsewhere (the Abort call, the gateway's stop).

    affinity: requests with the same one had better meet the same pods. headers: what the answer's head says of limits.
    """

    def __init__(
        self, timeline: Timeline, endpoint: str, deadline: float, caller: Caller, permit: Permit, affinity: str = ""
    ) -> None:
        self.id = timeline.request_id
        self.caller = caller
        self.permit = permit
        self.choices: Sequence[Choice] = ()
        self.headers: dict[str, str] = {}
        self.timeline = timeline
        self.endpoint = endpoint
        self.deadline = deadline
        self.affinity = affinity
        self.ended_with: BatonError | None = None
        self._task: asyncio.Task[Any] | None = None

    def serve_by(self, task: asyncio.Task[Any]) -> None:
        """The task that end cancels."""
        self._task = task
        if self.ended_with is not None:
            task.cancel()

    def end(self, error: BatonError) -> None:
        """Cancels the task that serves the request; what the client gets instead is the first error given."""
        self.ended_with = self.ended_with or error
        if self._task is not None:
            self._task.cancel()


class Choice:
    """An answer in the making: iterate it for pieces of text, or `collect` it; `close` ends it early.

    child: its number among those of its prompt, which are one family where there are several.
    """

    def __init__(
        self,
        gateway: Gateway,
        model: ServedModel,
        ticket: Ticket,
        spec: Spec,
        request: ValidRequest,
        reading: Reading | None = None,
        *,
        family: Family | None = None,
        child: int = 0,
    ) -> None:
        self.child = child
        self._family = family
        self.model = model
        self.reading = reading
        self._gateway = gateway
        self._ticket = ticket
        self.spec = spec
        self.request = request
        self._output = self.new_output()
        self._run: Run | Child | None = None
        self._last: float | None = None  # when tokens came last
        self._before = 0  # characters of the prompt that were echoed
        self._echoed = not spec.echo
        self._scores_taken = False
        self._searched: Usage | None = None  # instead of `_output` and `_run`, where beams were searched
        self._generated = 0

    @property
    def usage(self) -> Usage:
        """Tokens of the answer so far; of all answers that a search for it gave."""
        if self._searched is not None:
            return self._searched
        output, run = self._output, self._run
        usage = Usage(self.request.prompt_len, output.num_tokens, reasoning=output.reasoning_tokens)
        if run is None:
            return usage
        return replace(usage, cached=run.cached_tokens, accepted=run.accepted, rejected=run.proposed - run.accepted)

    @property
    def cost(self) -> Usage:
        """The part of `usage` that counts where choices are added up: a prompt of several is computed once."""
        return replace(self.usage, prompt=0, cached=0) if self.child else self.usage

    @property
    def spent(self) -> Usage:
        """What `cost` is to the caller's limits: tokens count that were generated and are not answered, too."""
        return self.cost if self._searched is None else replace(self.cost, completion=self._generated)

    @property
    def deadline(self) -> float:
        """A time.monotonic()."""
        return self._ticket.deadline

    def look_up(self, request: ValidRequest, *, first: bool) -> Run:
        """A run that a search for this answer needs. All had better go to the pods that have the beginning already.

        The first one is told in the request's timeline, which has no room for all.
        """
        ticket = self._ticket
        return self.model.pipeline.run(
            request,
            deadline=ticket.deadline,
            replayable=True,
            timeline=ticket.timeline if first else Timeline(request.request_id, None, ticket.endpoint),
            affinity=ticket.affinity or self.request.request_id,
        )

    def searched(self, usage: Usage, generated: int, finish: FinishReason | None = None) -> None:
        """What a search has come to. generated: tokens, of answers or not. finish: of the best answer, at the end."""
        if self._searched is None:
            self._gateway.metrics.ttft.observe(time.monotonic() - self._ticket.timeline.start)
        self._searched, self._generated = usage, generated
        if finish is not None:
            self._end(finish, stop_string=False)

    def new_output(self) -> ChoiceOutput:
        """For an answer's tokens, from the first one on."""
        logprobs = self.spec.logprobs is not None
        return ChoiceOutput(
            self.model.tokenizer,
            self.spec.stop,
            logprobs=logprobs,
            reading=self.reading,
            include_stop=self.spec.include_stop,
        )

    def prompt_tokens(self, num_top: int | None) -> tuple[PromptToken, ...]:
        """The prompt's tokens, with log-probabilities once there is a token; None alternatives: without."""
        parts = () if self._run is None or num_top is None else self._run.prompt_logprobs
        return prompt_tokens(self.request.prompt_ids, parts, num_top or 0)

    def take_prompt_logprobs(self) -> PromptLogprobs | None:
        """Of the prompt behind its first token, once, after the first piece, where they were asked for."""
        run = self._run
        if run is None or self._scores_taken or self.spec.prompt_logprobs is None or not run.prompt_logprobs:
            return None
        self._scores_taken = True
        return joined(run.prompt_logprobs)

    def _echo(self, piece: Piece) -> Piece:
        """The first piece, behind the prompt; without itself when nothing was to be generated."""
        tokens = self.prompt_tokens(self.spec.logprobs)
        if self.spec.logprobs is None:
            tokens = tuple(map(PromptToken, self.request.prompt_ids))
        echo = echo_of(self.model.tokenizer, tokens)
        self._before = len(echo.text)
        shown = echo.shown if self.spec.logprobs is not None else ()
        if self.spec.max_tokens == 0:
            return Piece(echo.text, shown, (), FinishReason.LENGTH)
        piece = self._moved(piece)
        return piece._replace(text=echo.text + piece.text, shown=(*shown, *piece.shown))

    def _moved(self, piece: Piece) -> Piece:
        """Offsets count from the prompt's start where that is echoed."""
        if not (self._before and piece.shown):
            return piece
        return piece._replace(shown=tuple(ShownToken(s.token, s.offset + self._before) for s in piece.shown))

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Piece:
        """What came since the last piece; the last one has a finish reason. Raises BatonError."""
        if self._output.finish is not None:
            raise StopAsyncIteration
        piece = await self._next(replayable=False)
        assert piece is not None
        return piece

    async def collect(self) -> Answer:
        """The whole answer. Raises BatonError."""
        pieces: list[Piece] = []
        try:
            while not pieces or pieces[-1].finish is None:
                piece = await self._next(replayable=True)
                if piece is None:
                    pieces = []
                else:
                    pieces.append(piece)
        finally:
            self.close()
        return self.whole(pieces)

    def whole(self, pieces: Sequence[Piece]) -> Answer:
        """The answer that these are all pieces of."""
        finish = pieces[-1].finish
        assert finish is not None
        deltas = None if self.reading is None else tuple(d for piece in pieces for d in piece.deltas or ())
        scored = self.spec.prompt_logprobs
        return Answer(
            "".join([piece.text for piece in pieces]),
            tuple(token for piece in pieces for token in piece.shown),
            finish,
            None if deltas is None else assemble(deltas),
            None if scored is None else self.prompt_tokens(scored),
            tuple(token for piece in pieces for token in piece.tokens),
            deltas,
        )

    def close(self) -> None:
        """Gives everything back, which aborts on the pods what is not complete; idempotent."""
        if self._run is not None:
            self._run.close()
        elif self._family is not None:
            self._family.children[self.child].close()

    async def _next(self, *, replayable: bool) -> Piece | None:
        """The next piece; None means that all before is void."""
        run = self._run or self._start(replayable)
        delta = await run.next()
        if delta.restart:
            self._output, self._last = self.new_output(), None
            self._echoed = not self.spec.echo
            return None
        metrics, now = self._gateway.metrics, time.monotonic()
        if self._last is None and not self.child:
            metrics.ttft.observe(now - self._ticket.timeline.start)
        elif self._last is not None and delta.tokens:
            metrics.itl.observe((now - self._last) / len(delta.tokens))
        self._last = now
        if self.spec.max_tokens == 0:
            self._output.finish = FinishReason.LENGTH
            piece = self._echo(Piece("", (), ()))
        else:
            piece = self._output.add(delta.tokens, delta.finish)
            piece = self._moved(piece) if self._echoed else self._echo(piece)
        self._echoed = True
        if piece.finish is not None:
            self._end(piece.finish, stop_string=delta.finish is None)
            run.close()
        return piece

    def _start(self, replayable: bool) -> Run | Child:
        if self._family is None:
            self._run = self._new_run(replayable)
        else:
            self._run = self._family.begin(self.child, lambda: self._new_run(replayable))
        return self._run

    def _new_run(self, replayable: bool) -> Run:
        ticket = self._ticket
        return self.model.pipeline.run(
            self.request,
            deadline=ticket.deadline,
            replayable=replayable,
            timeline=ticket.timeline,
            affinity=ticket.affinity,
        )

    def _end(self, finish: FinishReason, *, stop_string: bool) -> None:
        metrics, usage = self._gateway.metrics, self.spent
        metrics.e2e.observe(time.monotonic() - self._ticket.timeline.start)
        metrics.prompt_tokens.inc(usage.prompt)
        metrics.output_tokens.inc(usage.completion)
        if stop_string:
            metrics.aborts.labels("stop_string").inc()
        drafts = {"accepted": usage.accepted, "rejected": usage.rejected} if usage.accepted or usage.rejected else {}
        self._ticket.timeline.mark("finished", reason=finish.value, output_tokens=usage.completion, **drafts)


class Gateway:
    """Serves one model or several. Raises ConfigError when their names and aliases do not fit."""

    def __init__(
        self,
        settings: Settings,
        texts: Sequence[ModelText],
        index: IndexReader | None,
        keys: KeyRing | None = None,
    ) -> None:
        self.settings = settings
        self.keys = KeyRing() if keys is None else keys
        self.metrics = GatewayMetrics()
        self.timelines = Timelines()
        gateway_id = f"gateway-{secrets.token_hex(8)}"

        def served(text: ModelText) -> ServedModel:
            alone = len(texts) == 1
            table = PodTable(settings.pods, index, gateway_id=gateway_id, model=text.name, alone=alone)
            router = Router(table, self.metrics, policy=settings.routing_policy)
            gate = Gate(settings.gate, PodOutlook(table, time.monotonic), self.metrics)
            return ServedModel(text, table, Pipeline(router, self.metrics, gateway_id=gateway_id), gate)

        self.models = Models([served(text) for text in texts], settings.aliases)
        self.metrics.watch_queue(lambda: [((model.name,), model.gate.waiting) for model in self.models])
        self._limiter = Limiter(settings.redis, self.metrics, timeout_s=settings.limits_timeout_s)
        self.draining = False
        self._index = index
        self._tickets: dict[str, Ticket] = {}
        self._idle = asyncio.Event()
        self._idle.set()

    async def start(self) -> None:
        """Begins to look for pods and keys."""
        await self.keys.start()
        await self._limiter.start()
        for model in self.models:
            await model.table.start()

    async def drain(self) -> None:
        """Refuses new requests and waits for the running ones."""
        self.draining = True
        await self._idle.wait()

    def end_requests(self) -> None:
        """Ends the running requests with an error that their clients still get; refuses new ones."""
        self.draining = True
        if self._tickets:
            _log.warning("ending %d running requests", len(self._tickets))
        for ticket in self._tickets.values():
            ticket.end(Unavailable("the gateway is leaving", retry_after_s=1.0))

    async def stop(self) -> None:
        """Frees everything; requests that still run fail. end_requests first, for their clients' sake."""
        for model in self.models:
            await model.pipeline.stop()
            await model.table.stop()
            model.gate.stop()
        await self._limiter.stop()
        await self.keys.stop()
        if self._index is not None:
            await self._index.close()

    @property
    def table(self) -> PodTable:
        """The pods of the first model."""
        return self.models.first.table

    @property
    def tokenizer(self) -> TextTokenizer:
        """The tokenizer of the first model."""
        return self.models.first.tokenizer

    @property
    def ready(self) -> bool:
        """Requests for some model can be answered."""
        return not self.draining and any(model.table.ready for model in self.models)

    @contextmanager
    def admit(
        self,
        endpoint: str,
        client_id: str | None,
        timeout_s: float | None = None,
        *,
        caller: Caller,
        affinity: str = "",
    ) -> Iterator[Ticket]:
        """A permit for one client request, for as long as the block lasts; its end is counted by how it ended.

        Raises Overloaded when too many run, Unavailable while draining.
        """
        if self.draining:
            raise Unavailable("the gateway is leaving", retry_after_s=1.0)
        if len(self._tickets) >= self.settings.max_inflight:
            self.metrics.rejections.labels("gateway").inc()
            self.metrics.requests.labels(endpoint, "overloaded").inc()
            raise Overloaded("too many requests are being served", retry_after_s=1.0)
        timeline = Timeline(secrets.token_hex(12), client_id, endpoint, caller.tenant)
        limit = self.settings.request_timeout_s
        permit = Permit(caller, timeline.request_id, self._limiter, self.metrics)
        ticket = Ticket(timeline, endpoint, timeline.start + min(limit, timeout_s or limit), caller, permit, affinity)
        self._tickets[ticket.id] = ticket
        self.timelines.add(timeline)
        self.metrics.running.inc()
        self._idle.clear()
        outcome = "internal"
        try:
            yield ticket
            outcome = "ok"
        except (Cancelled, asyncio.CancelledError, GeneratorExit):
            outcome = "aborted"
            self.metrics.aborts.labels("disconnect" if ticket.ended_with is None else "abort_call").inc()
            raise
        except BatonError as e:
            outcome = e.kind
            timeline.note(error=e.message)
            raise
        finally:
            timeline.mark("ended", outcome=outcome)
            timeline.note(outcome=outcome)
            self.metrics.requests.labels(endpoint, outcome).inc()
            self.metrics.running.dec()
            for choice in ticket.choices:
                choice.close()
            used = sum((choice.spent for choice in ticket.choices), Usage())
            worked = outcome == "ok" or used.completion  # else nothing was computed, or nothing came of it
            permit.release(used.prompt if worked else 0, used.completion)
            del self._tickets[ticket.id]
            if not self._tickets:
                self._idle.set()

    def abort(self, request_id: str, caller: Caller) -> bool:
        """Ends a running request of the caller's tenant by our id; False when there is none."""
        ticket = self._tickets.get(request_id)
        if ticket is None or not (caller.admin or caller.tenant == ticket.caller.tenant):
            return False
        ticket.end(Cancelled("the request was aborted"))
        return True

    async def reset_prefix_cache(self) -> list[Reset]:
        """See reset_prefix_caches; what this gateway remembers of the pods goes with it. Raises Unavailable."""
        pods: dict[str, Pod] = {}
        for model in self.models:
            pods |= {pod.address: pod for pod in model.table.pods.values() if pod.alive or pod.address not in pods}
            for pod in model.table.pods.values():
                model.pipeline.router.approx.forget(pod.name)
        return await reset_prefix_caches(pods.values())

    def model_for(self, caller: Caller, name: str) -> ServedModel:
        """The model that a caller asks for. Raises ModelNotFound, PermissionDenied."""
        model = self.models.find(name)
        if not caller.may_use(name, model.name):
            raise PermissionDenied(f"this API key may not use the model {name!r}", field="model")
        return model

    async def enter(self, ticket: Ticket, model: ServedModel, choices: Sequence[Choice]) -> None:
        """Returns when all of a request may go to the pods; see Permit.enter for what it raises."""
        ticket.choices = choices
        firsts = [choice for choice in choices if choice.child == 0]
        requests = [choice.request for choice in firsts]
        size = Size(
            sum(request.prompt_len for request in requests),
            sum(choice.request.sampling.max_tokens * choice.spec.candidates for choice in firsts),
            open_ended=any(choice.spec.max_tokens is None for choice in choices),
        )

        async def held() -> int:
            plans = [await model.pipeline.router.plan(request, ticket.affinity) for request in requests]
            return sum(plan.held for plan in plans)

        priority = requests[0].priority
        await ticket.permit.enter(model.gate, size, priority, ticket.deadline, ticket.headers, held)
        ticket.timeline.mark("admitted")

    async def completion(self, ticket: Ticket, body: CompletionBody) -> list[Choice]:
        """Choices in order of the prompts, as many for each as the spec wants candidates.

        Raises InvalidRequest, ModelNotFound, Unavailable.
        """
        model = self.model_for(ticket.caller, body.spec.model)
        limits = model.limits()
        if body.spec.grammar is not None:
            await model.dialect.grammars.require(body.spec.grammar)
        reading = None if body.spec.skip_special_tokens else kept_special(model.tokenizer)
        choices: list[Choice] = []
        for number, prompt in enumerate(body.prompts):
            if isinstance(prompt, str):
                _refuse_hopeless(prompt, model, limits, "prompt")
                ids: Sequence[int] = await model.tokenizer.encode_async(prompt, add_special_tokens=True)
            else:
                ids = prompt
            choices += self._choices(
                ticket, model, body.spec, ids, limits, number, COMPLETION_MAX_TOKENS, "prompt", reading
            )
        await self.enter(ticket, model, choices)
        return choices

    async def chat(self, ticket: Ticket, body: ChatBody) -> list[Choice]:
        """The spec's n choices. Raises InvalidRequest, ModelNotFound, Unavailable."""
        model = self.model_for(ticket.caller, body.spec.model)
        limits = model.limits()
        talk = await model.dialect.converse(
            body.messages,
            body.template_kwargs,
            body.tools,
            body.spec.grammar,
            include_reasoning=body.include_reasoning,
            keep_special=not body.spec.skip_special_tokens,
        )
        _refuse_hopeless(talk.prompt, model, limits, "messages")
        ids = await model.tokenizer.encode_async(talk.prompt, add_special_tokens=False)
        spec = replace(body.spec, grammar=talk.grammar)
        choices = self._choices(ticket, model, spec, ids, limits, 0, None, "messages", talk.reading)
        await self.enter(ticket, model, choices)
        return choices

    def _choices(
        self,
        ticket: Ticket,
        model: ServedModel,
        spec: Spec,
        ids: Sequence[int],
        limits: Limits,
        number: int,
        default_max_tokens: int | None,
        prompt_field: str,
        reading: Reading | None,
    ) -> list[Choice]:
        caller = ticket.caller
        request = to_valid(
            replace(
                spec,
                model=model.name,
                priority=caller.priority_of(spec.priority),
                cache_salt=caller.salt_of(spec.cache_salt),
            ),
            ids,
            limits,
            request_id=f"{ticket.id}-{number}",
            eos_ids=model.tokenizer.eos_ids,
            default_max_tokens=default_max_tokens,
            prompt_field=prompt_field,
            bad_words=list(dict.fromkeys(ids for word in spec.bad_words for ids in model.tokenizer.words(word))),
        )
        ticket.timeline.mark("tokenized", prompt_tokens=request.prompt_len)
        n = request.sampling.n
        family = Family(n) if n > 1 else None
        return [Choice(self, model, ticket, spec, request, reading, family=family, child=child) for child in range(n)]


def _refuse_hopeless(text: str, model: ServedModel, limits: Limits, field: str) -> None:
    """Refuses, before it costs a tokenization, a text that cannot fit whatever its tokens are."""
    if len(text) > limits.max_model_len * model.tokenizer.longest_token:
        raise InvalidRequest(
            f"the prompt has {len(text)} characters, far beyond this model's context of {limits.max_model_len} tokens",
            field=field,
        )
