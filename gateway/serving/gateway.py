"""The gateway's core, whatever the protocol: admission, prompts to requests, requests to text.

Lifecycle: start -> requests -> drain (refuses new ones, waits for the running ones) -> stop. A permit is taken at
arrival and lives exactly as long as the answer, streamed or not.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from common.errors import BatonError, Cancelled, InvalidRequest, Overloaded, PermissionDenied, Unavailable
from common.tracing.context import TraceContext
from common.tracing.tracer import Tracer
from gateway.admission.api_keys import Caller
from gateway.admission.gate import Gate, GateLimits, PodQueueForecast
from gateway.admission.key_ring import KeyRing
from gateway.admission.limiter import TIMEOUT_S, Limiter
from gateway.admission.permit import Permit, RequestSize
from gateway.dashboard.history import MetricsHistory
from gateway.dispatch.dispatch import Dispatcher
from gateway.dispatch.samples import SampleGroup
from gateway.pods.cache_reset import CacheResetResult, reset_prefix_caches
from gateway.pods.info import ModelLimits
from gateway.pods.pod import Pod
from gateway.pods.table import PodTable
from gateway.routing.local_index import ANY_POD
from gateway.routing.router import Router
from gateway.serving.choice import Choice
from gateway.serving.models import ModelRegistry, ServedModel, TextProcessor
from gateway.serving.request import MAX_JSON_PARTS, ChatBody, CompletionBody, GenerationSpec, to_valid_request
from gateway.serving.request_context import RequestContext, Usage
from gateway.telemetry.metrics import INTERNAL_OUTCOME, GatewayMetrics
from gateway.telemetry.timeline import RecentTimelines, RequestTrace, Timeline
from gateway.text.chat_format import keep_special_tokens
from gateway.text.output_parser import OutputParserConfig
from gateway.text.tokenizer import TextTokenizer
from prefix_index.reader import IndexReader

COMPLETION_MAX_TOKENS = 16  # OpenAI's default for /v1/completions
PROMPTS_PER_LOOP_TURN = 16  # of a request with many, before others have their turn

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewaySettings:
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


class Gateway:
    """Serves one model or several. Raises ConfigError when their names and aliases do not fit."""

    def __init__(
        self,
        settings: GatewaySettings,
        texts: Sequence[TextProcessor],
        index: IndexReader | None,
        keys: KeyRing | None = None,
        tracer: Tracer | None = None,
    ) -> None:
        self.tracer = tracer
        self.settings = settings
        self.keys = KeyRing() if keys is None else keys
        self.metrics = GatewayMetrics()
        self.timelines = RecentTimelines()
        self.id = gateway_id = f"gateway-{secrets.token_hex(8)}"

        def served(text: TextProcessor) -> ServedModel:
            alone = len(texts) == 1
            table = PodTable(settings.pods, index, gateway_id=gateway_id, model=text.name, only_model=alone)
            router = Router(table, self.metrics)
            gate = Gate(settings.gate, PodQueueForecast(table, time.monotonic), self.metrics)
            return ServedModel(text, table, Dispatcher(router, self.metrics, gateway_id=gateway_id), gate)

        self.models = ModelRegistry([served(text) for text in texts], settings.aliases)
        self.metrics.watch_queue(lambda: [((model.name,), model.gate.waiting) for model in self.models])
        self.metrics.watch_ready(lambda: self.ready)
        self.metrics.watch_pods(self._pods_by_state)
        self.metrics_history = MetricsHistory(
            self.metrics,
            lambda: [pod for model in self.models for pod in model.pod_table.pods.values()],
            lambda: sum(model.gate.waiting for model in self.models),
        )
        self._limiter = Limiter(settings.redis, self.metrics, timeout_s=settings.limits_timeout_s)
        self.leaving = False
        self.draining = False
        self._index = index
        self._requests: dict[str, RequestContext] = {}
        self._idle = asyncio.Event()
        self._idle.set()

    def _pods_by_state(self) -> list[tuple[tuple[str, ...], float]]:
        found = Counter(
            (model.name, "unknown" if pod.info is None else pod.info.role.value, pod.state)
            for model in self.models
            for pod in model.pod_table.pods.values()
        )
        return [(labels, float(number)) for labels, number in found.items()]

    async def start(self) -> None:
        """Begins to look for pods and keys."""
        await self.keys.start()
        await self._limiter.start()
        for model in self.models:
            await model.pod_table.start()
        await self.metrics_history.start()

    def mark_not_ready(self) -> None:
        """Is not ready any more, but serves what comes."""
        self.leaving = True

    async def drain(self) -> None:
        """Refuses new requests and waits for the running ones."""
        self.leaving = self.draining = True
        await self._idle.wait()

    def abort_requests(self) -> None:
        """Ends the running requests with an error that their clients still get; refuses new ones."""
        self.leaving = self.draining = True
        if self._requests:
            _log.warning("ending %d running requests", len(self._requests))
        for ticket in self._requests.values():
            ticket.abort(Unavailable("the gateway is leaving", retry_after_s=1.0))

    async def stop(self) -> None:
        """Frees everything; requests that still run fail. end_requests first, for their clients' sake."""
        await self.metrics_history.stop()
        for model in self.models:
            await model.dispatcher.stop()
            await model.pod_table.stop()
            model.gate.stop()
        await self._limiter.stop()
        await self.keys.stop()
        if self._index is not None:
            await self._index.close()

    @property
    def pod_table(self) -> PodTable:
        """The pods of the first model."""
        return self.models.first.pod_table

    @property
    def tokenizer(self) -> TextTokenizer:
        """The tokenizer of the first model."""
        return self.models.first.tokenizer

    @property
    def ready(self) -> bool:
        """Requests for some model can be answered."""
        return not self.leaving and any(model.pod_table.ready for model in self.models)

    def max_json_parts(self) -> int:
        """Arrays, objects, members and entries that a request may have: what a prompt of token ids needs fits."""
        limits = (model.limits() for model in self.models if model.pod_table.ready)
        return MAX_JSON_PARTS + max((limit.max_model_len for limit in limits), default=0)

    @contextmanager
    def admit(
        self,
        endpoint: str,
        client_id: str | None,
        timeout_s: float | None = None,
        *,
        caller: Caller,
        affinity: str = "",
        asked_by: TraceContext | None = None,
    ) -> Iterator[RequestContext]:
        """A permit for one client request, for as long as the block lasts; its end is counted by how it ended, and told
        in the log. asked_by: the client's span.

        Raises Overloaded when too many run, Unavailable while draining.
        """
        if self.draining:
            raise Unavailable("the gateway is leaving", retry_after_s=1.0)
        if len(self._requests) >= self.settings.max_inflight:
            self.metrics.rejections.labels("gateway").inc()
            self.metrics.requests.labels(endpoint, "overloaded").inc()
            raise Overloaded("too many requests are being served", retry_after_s=1.0)
        timeline = self._timeline(client_id, endpoint, caller, asked_by)
        limit = self.settings.request_timeout_s
        permit = Permit(caller, timeline.request_id, self._limiter, self.metrics)
        time_s = limit if timeout_s is None else min(limit, timeout_s)
        ticket = RequestContext(timeline, endpoint, timeline.start + time_s, caller, permit, affinity)
        self._requests[ticket.id] = ticket
        self.timelines.add(timeline)
        self.metrics.running.inc()
        self._idle.clear()
        outcome = INTERNAL_OUTCOME
        try:
            yield ticket
            outcome = "ok"
        except (Cancelled, asyncio.CancelledError, GeneratorExit):
            outcome = "aborted"
            self.metrics.aborts.labels("disconnect" if ticket.abort_error is None else "abort_call").inc()
            raise
        except BatonError as e:
            outcome = e.kind
            timeline.set_facts(error=e.message)
            raise
        finally:
            self.metrics.requests.labels(endpoint, outcome).inc()
            self.metrics.running.dec()
            for choice in ticket.choices:
                choice.close()
            used = sum((choice.charged_usage for choice in ticket.choices), Usage())
            worked = outcome == "ok" or used.completion  # else nothing was computed, or nothing came of it
            permit.release(used.prompt if worked else 0, used.completion)
            if ticket.choices:
                timeline.set_facts(output_tokens=used.completion)
            timeline.end(outcome)
            _log_request(timeline)
            del self._requests[ticket.id]
            if not self._requests:
                self._idle.set()

    def num_output_tokens(self, request_id: str) -> int:
        """Tokens of a request's answers so far; 0 unless it runs."""
        ticket = self._requests.get(request_id)
        return 0 if ticket is None else sum(choice.usage.completion for choice in ticket.choices)

    def _timeline(
        self, client_id: str | None, endpoint: str, caller: Caller, asked_by: TraceContext | None
    ) -> Timeline:
        trace, trace_id = None, None if asked_by is None else asked_by.trace_id
        if self.tracer is not None and (context := self.tracer.start_trace(asked_by)) is not None:
            trace, trace_id = RequestTrace(self.tracer, context, asked_by), context.trace_id
        return Timeline(secrets.token_hex(12), client_id, endpoint, caller.tenant, trace=trace, trace_id=trace_id)

    def abort(self, request_id: str, caller: Caller) -> bool:
        """Ends running requests of the caller's tenant: one by our id, or all that a client gave this id of its own.

        False when there are none.
        """
        ours = self._requests.get(request_id)
        named = [t for t in self._requests.values() if t.timeline.client_id == request_id] if ours is None else [ours]
        found = [ticket for ticket in named if caller.admin or caller.tenant == ticket.caller.tenant]
        for ticket in found:
            ticket.abort(Cancelled("the request was aborted"))
        return bool(found)

    async def reset_prefix_cache(self) -> list[CacheResetResult]:
        """See reset_prefix_caches; what this gateway remembers of the pods goes with it. Raises Unavailable."""
        pods: dict[str, Pod] = {}
        for model in self.models:
            pods |= {pod.address: pod for pod in model.pod_table.pods.values() if pod.alive or pod.address not in pods}
            for name in (ANY_POD[0], *(pod.name for pod in model.pod_table.pods.values())):
                model.dispatcher.router.approx_index.forget(name)
        return await reset_prefix_caches(pods.values())

    def model_for(self, caller: Caller, name: str) -> ServedModel:
        """The model that a caller asks for. Raises ModelNotFound, PermissionDenied."""
        model = self.models.find(name)
        if not caller.may_use(name, model.name):
            raise PermissionDenied(f"this API key may not use the model {name!r}", field="model")
        return model

    async def acquire_permit(self, ticket: RequestContext, model: ServedModel, choices: Sequence[Choice]) -> None:
        """Returns when all of a request may go to the pods; see Permit.enter for what it raises."""
        ticket.choices = choices
        ticket.timeline.set_facts(model=model.name)
        firsts = [choice for choice in choices if choice.child == 0]
        requests = [choice.request for choice in firsts]
        size = RequestSize(
            sum(request.prompt_len for request in requests),
            sum(choice.request.sampling.max_tokens * choice.spec.candidates for choice in firsts),
            open_ended=any(choice.spec.max_tokens is None for choice in choices),
        )

        async def held() -> int:
            plans = [await model.dispatcher.router.plan(request, ticket.affinity) for request in requests]
            return sum(plan.expected_hit_tokens for plan in plans)

        priority = requests[0].priority
        await ticket.permit.acquire(model.gate, size, priority, ticket.deadline, ticket.response_headers, held)
        ticket.timeline.mark("admitted")

    async def completion(self, ticket: RequestContext, body: CompletionBody) -> list[Choice]:
        """Choices in order of the prompts, as many for each as the spec wants candidates.

        Raises InvalidRequest, ModelNotFound, Unavailable.
        """
        model = self.model_for(ticket.caller, body.spec.model)
        limits = model.limits()
        if body.spec.grammar is not None:
            await model.chat_format.grammar_checker.check(body.spec.grammar)
        reading = None if body.spec.skip_special_tokens else keep_special_tokens(model.tokenizer)
        texts = [prompt for prompt in body.prompts if isinstance(prompt, str)]
        for text in texts:
            _reject_too_long(text, model, limits, "prompt")
        prompts: Sequence[Sequence[int]] = [prompt for prompt in body.prompts if not isinstance(prompt, str)]
        if texts:  # then all are
            prompts = await model.tokenizer.encode_all(texts, add_special_tokens=True)
        bad_words = await model.tokenizer.encode_words(body.spec.bad_words)
        choices: list[Choice] = []
        for number, ids in enumerate(prompts):
            if number % PROMPTS_PER_LOOP_TURN == PROMPTS_PER_LOOP_TURN - 1:
                await asyncio.sleep(0)
            choices += self._choices(
                ticket, model, body.spec, ids, limits, number, COMPLETION_MAX_TOKENS, "prompt", reading, bad_words
            )
        await self.acquire_permit(ticket, model, choices)
        return choices

    async def chat(self, ticket: RequestContext, body: ChatBody) -> list[Choice]:
        """The spec's n choices. Raises InvalidRequest, ModelNotFound, Unavailable."""
        model = self.model_for(ticket.caller, body.spec.model)
        limits = model.limits()
        talk = await model.chat_format.prepare(
            body.messages,
            body.template_kwargs,
            body.tools,
            body.spec.grammar,
            include_reasoning=body.include_reasoning,
            keep_special=not body.spec.skip_special_tokens,
        )
        _reject_too_long(talk.prompt, model, limits, "messages")
        ids = await model.tokenizer.encode_async(talk.prompt, add_special_tokens=False)
        spec, bad_words = (
            replace(body.spec, grammar=talk.grammar),
            await model.tokenizer.encode_words(body.spec.bad_words),
        )
        choices = self._choices(ticket, model, spec, ids, limits, 0, None, "messages", talk.parser_config, bad_words)
        await self.acquire_permit(ticket, model, choices)
        return choices

    def _choices(
        self,
        ticket: RequestContext,
        model: ServedModel,
        spec: GenerationSpec,
        ids: Sequence[int],
        limits: ModelLimits,
        number: int,
        default_max_tokens: int | None,
        prompt_field: str,
        reading: OutputParserConfig | None,
        bad_words: Sequence[tuple[int, ...]],
    ) -> list[Choice]:
        caller = ticket.caller
        request = to_valid_request(
            replace(
                spec,
                model=model.name,
                priority=caller.effective_priority(spec.priority),
                cache_salt=caller.effective_salt(spec.cache_salt),
            ),
            ids,
            limits,
            request_id=f"{ticket.id}-{number}",
            eos_ids=model.tokenizer.eos_ids,
            default_max_tokens=default_max_tokens,
            prompt_field=prompt_field,
            bad_words=bad_words,
        )
        ticket.timeline.mark("tokenized", prompt_tokens=request.prompt_len)
        n = request.sampling.n
        family = SampleGroup(n) if n > 1 else None
        return [
            Choice(self.metrics, model, ticket, spec, request, reading, family=family, child=child)
            for child in range(n)
        ]


def _log_request(timeline: Timeline) -> None:
    """The one line of a request in the log."""
    if not _log.isEnabledFor(logging.INFO):
        return
    told = {
        "request_id": timeline.request_id,
        "client_request_id": timeline.client_id,
        "trace_id": timeline.trace_id,
        "tenant": timeline.tenant or None,
        "duration_s": round(timeline.changed_at - timeline.start, 6),
        **timeline.facts,
    }
    _log.info("request ended", extra={name: value for name, value in told.items() if value is not None})


def _reject_too_long(text: str, model: ServedModel, limits: ModelLimits, field: str) -> None:
    """Refuses, before it costs a tokenization, a text that cannot fit whatever its tokens are."""
    if len(text) > limits.max_model_len * model.tokenizer.max_chars_per_token:
        raise InvalidRequest(
            f"the prompt has {len(text)} characters, far beyond this model's context of {limits.max_model_len} tokens",
            field=field,
        )
