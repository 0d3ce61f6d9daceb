"""The gateway's core for all protocols: admission, prompts to requests, requests to choices.

    start -> requests -> drain (refuses new requests, waits for the running ones) -> stop

The way of a streamed chat request, which tests/integration/test_gateway_walk.py traces:

    api      http/protocol, http/endpoint: head, key, body -> openai/generate, openai/requests: the checked body
    serving  gateway: pods' limits, text/chat_format, text/tokenizer, request -> choice -> key limits, admission/gate
    pods     choice -> dispatch/dispatch -> routing/router -> dispatch/attempt -> routing/placement -> pods/pod
    tokens   pods/pod -> dispatch/attempt -> dispatch/token_queue -> choice -> text/output -> api
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from common.auth import GATEWAY, Signer
from common.errors import BatonError, Cancelled, Overloaded, PermissionDenied, Unavailable
from common.settings.gateway import GatewayConfig
from common.tls import TlsFiles
from common.tracing.tracer import TraceContext, Tracer
from gateway.admission.api_keys import Caller
from gateway.admission.gate import Gate, GateLimits
from gateway.admission.key_store import KeyRing
from gateway.admission.limiter import TIMEOUT_S, Limiter, TokenFields
from gateway.admission.queue import QueueForecast
from gateway.dispatch.dispatch import Dispatch
from gateway.dispatch.samples import SampleGroup
from gateway.pods.pod import Pod
from gateway.pods.table import CacheResetResult, PodTable, reset_prefix_caches
from gateway.routing.local_index import ANY_POD
from gateway.routing.router import Router
from gateway.serving.answer_keys import AnswerKeys
from gateway.serving.choice import Choice, PromptReport
from gateway.serving.models import ModelRegistry, ServedModel, TextProcessor
from gateway.serving.request import (
    MAX_JSON_PARTS,
    ChatBody,
    CompletionBody,
    GenerationSpec,
    RequestContext,
    Usage,
    check_prompt_scores,
    reject_too_long,
    to_valid_request,
)
from gateway.telemetry.metrics import INTERNAL_OUTCOME, GatewayMetrics
from gateway.telemetry.timeline import RecentTimelines, RequestTrace, Timeline
from gateway.text.output import OutputParserConfig
from gateway.text.tokenizer import TextTokenizer
from prefix_index.reader import IndexReader

COMPLETION_MAX_TOKENS = 16  #: OpenAI's default of max_tokens for /v1/completions.
PROMPTS_PER_LOOP_TURN = 16  #: Prompts of one request that are handled before other tasks run.
EXPECTED_OUTPUT_TOKENS = 256  #: Output tokens that the gate expects of a request that allows more.

_log = logging.getLogger(__name__)


class Gateway:
    """Serves one or several models. Raises ConfigError for contradicting model names and aliases."""

    def __init__(
        self,
        settings: GatewayConfig,
        processors: Sequence[TextProcessor],
        index: IndexReader | None,
        keys: KeyRing | None = None,
        tracer: Tracer | None = None,
        *,
        limits_timeout_s: float = TIMEOUT_S,
    ) -> None:
        self.tracer = tracer
        self.settings = settings
        self.keys = KeyRing() if keys is None else keys
        self.metrics = GatewayMetrics()
        self.timelines = RecentTimelines()
        self.id = f"gateway-{secrets.token_hex(8)}"
        signer = Signer(settings.secret.encode(), GATEWAY, self.id, time.time_ns())
        gate_limits = GateLimits(
            max_running=settings.max_running,
            max_queue=settings.max_queue,
            max_ttft_s=settings.max_ttft_s,
            tiers=settings.tiers(),
        )

        tls = TlsFiles.of_directory(settings.tls_dir, "gateway")
        if tls is not None:
            self.metrics.base.certificates["cluster"] = tls.expires_at

        def served_model(text: TextProcessor) -> ServedModel:
            only_model = len(processors) == 1
            table = PodTable(
                settings.pods,
                index,
                signer=signer,
                model=text.name,
                only_model=only_model,
                tls=tls,
                stuck_s=settings.stuck_step_s,
            )
            gate = Gate(gate_limits, QueueForecast(table), self.metrics)
            router = Router(table, self.metrics)
            return ServedModel(
                text.name,
                text.tokenizer,
                text.chat_format,
                table,
                router,
                gate,
                text.defaults,
                text.reranker,
                text.text_prefixes,
            )

        self.models = ModelRegistry([served_model(text) for text in processors], settings.aliases())
        self.metrics.watch_queue(lambda: [((model.name,), model.gate.waiting) for model in self.models])
        self.metrics.watch_tiers(
            lambda: [((m.name, tier), n) for m in self.models for tier, n in m.gate.waiting_by_tier]
        )
        self.metrics.watch_fitness(
            lambda: [row for model in self.models for row in model.pod_table.count_breakers()],
            lambda: [row for model in self.models for row in model.pod_table.count_slow_pods()],
        )
        self.metrics.watch_ready(lambda: self.ready)
        self.metrics.watch_pods(self.models.count_pods)
        self._limiter = Limiter(settings.redis, self.metrics, timeout_s=limits_timeout_s)
        self.answer_keys = AnswerKeys(
            settings.redis,
            self.metrics,
            ttl_s=settings.idempotency_ttl_s,
            max_bytes=settings.idempotency_memory,
            limit_s=settings.request_timeout_s,
            timeout_s=limits_timeout_s,
        )
        self.leaving = False  # the gateway is no longer ready, but serves the requests that arrive
        self.draining = False  #: The gateway refuses new requests.
        self._index = index
        self._requests: dict[str, RequestContext] = {}
        self._idle = asyncio.Event()
        self._idle.set()

    async def start(self) -> None:
        """Starts to look for pods and API keys."""
        await self.keys.start()
        await self._limiter.start()
        for model in self.models:
            await model.pod_table.start()

    async def drain(self) -> None:
        """Refuses new requests and waits for the running ones."""
        self.leaving = self.draining = True
        await self._idle.wait()
        await self.answer_keys.drained()

    def abort_requests(self) -> None:
        """Aborts the running requests with an error that their clients receive, and refuses new ones."""
        self.leaving = self.draining = True
        if self._requests:
            _log.warning("ending %d running requests", len(self._requests))
        for context in self._requests.values():
            context.abort(Unavailable("the gateway is stopping", retry_after_s=1.0))

    async def stop(self) -> None:
        """Frees everything; running requests fail. Call `abort_requests` first, so that their clients get an error."""
        for model in self.models:
            await model.router.stop()
            await model.pod_table.stop()
            model.gate.stop()
        await self.answer_keys.stop()
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
        """At least one model can be served."""
        return not self.leaving and any(model.pod_table.ready for model in self.models)

    def why_unready(self) -> str:
        """Returns why no model can be served, without addresses; "" if one can be."""
        if self.leaving:
            return "the gateway is stopping"
        causes = [(model.name, model.pod_table.why_unready()) for model in self.models]
        if not all(cause for _, cause in causes):
            return ""
        text = causes[0][1] if len(causes) == 1 else "; ".join(f"{name}: {cause}" for name, cause in causes)
        return f"no prefill and decode pods are ready ({text})"

    def max_json_parts(self) -> int:
        """Returns how many arrays, objects, members and entries a body may have; a full context of token ids fits."""
        limits = (model.pod_table.limits() for model in self.models if model.pod_table.ready)
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
        client_span: TraceContext | None = None,
    ) -> Iterator[RequestContext]:
        """Yields the context of one client request; at the block's end the request is counted, charged and logged.

        `client_id` is the client's own id, for logs and Abort; `client_span` the parent of the request's span. Raises
        Overloaded when too many requests run, Unavailable while draining.
        """
        if self.draining:
            raise Unavailable("the gateway is stopping", retry_after_s=1.0)
        if len(self._requests) >= self.settings.max_inflight:
            self.metrics.rejections.labels("gateway").inc()
            self.metrics.requests.labels(endpoint, "overloaded").inc()
            raise Overloaded("too many requests are being served", retry_after_s=1.0)
        timeline = self._timeline(client_id, endpoint, caller, client_span)
        limit_s = self.settings.request_timeout_s
        deadline = timeline.start + (limit_s if timeout_s is None else min(limit_s, timeout_s))
        context = RequestContext(timeline, endpoint, deadline, caller, affinity)
        self._requests[context.id] = context
        self.timelines.add(timeline)
        self.metrics.running.inc()
        self._idle.clear()
        outcome = INTERNAL_OUTCOME
        try:
            yield context
            outcome = "ok"
        except (Cancelled, asyncio.CancelledError, GeneratorExit):
            outcome = "aborted"
            self.metrics.aborts.labels("disconnect" if context.abort_error is None else "abort_call").inc()
            raise
        except BatonError as e:
            outcome = e.kind
            timeline.set_facts(error=e.message)
            raise
        finally:
            self.metrics.requests.labels(endpoint, outcome).inc()
            self.metrics.running.dec()
            for choice in context.choices:
                choice.close()
            used = sum((choice.charged_usage for choice in context.choices), Usage())
            answered = outcome == "ok" or used.completion  # a failed request without output is not charged
            self._release(context, used.prompt if answered else 0, used.completion)
            if context.choices:
                timeline.set_facts(output_tokens=used.completion)
            if context.identity is not None:
                timeline.set_facts(answer_id=context.answer_id)
            timeline.end(outcome)
            _log_request(timeline)
            del self._requests[context.id]
            if not self._requests:
                self._idle.set()

    def _release(self, context: RequestContext, prompt_tokens: int, output_tokens: int) -> None:
        """Charges the caller and frees the request's place in the gate."""
        used, caller = prompt_tokens + output_tokens, context.caller
        if context.reservation is not None:
            self._limiter.settle(context.reservation, used)
        if context.admitted is not None:
            model, entry = context.admitted
            model.gate.release(entry, used)
        if used and caller.key_id:
            self.metrics.tenant_tokens.labels(caller.tenant, "prompt").inc(prompt_tokens)
            self.metrics.tenant_tokens.labels(caller.tenant, "output").inc(output_tokens)

    def num_output_tokens(self, request_id: str) -> int:
        """Returns the output tokens of a running request so far; 0 for any other request."""
        context = self._requests.get(request_id)
        return 0 if context is None else sum(choice.usage.completion for choice in context.choices)

    def _timeline(
        self, client_id: str | None, endpoint: str, caller: Caller, client_span: TraceContext | None
    ) -> Timeline:
        trace, trace_id = None, None if client_span is None else client_span.trace_id
        if self.tracer is not None and (context := self.tracer.start_trace(client_span)) is not None:
            trace, trace_id = RequestTrace(self.tracer, context, client_span), context.trace_id
        return Timeline(secrets.token_hex(12), client_id, endpoint, caller.tenant, trace=trace, trace_id=trace_id)

    def abort(self, request_id: str, caller: Caller) -> bool:
        """Aborts running requests of the caller's tenant: the one with our id, or all that a client calls so.

        Returns False if there are none. An administrator may abort requests of every tenant.
        """
        ours = self._requests.get(request_id)
        named = [t for t in self._requests.values() if t.has_id(request_id)] if ours is None else [ours]
        contexts = [context for context in named if caller.admin or caller.tenant == context.caller.tenant]
        for context in contexts:
            context.abort(Cancelled("the request was aborted"))
        return bool(contexts)

    async def reset_prefix_cache(self) -> list[CacheResetResult]:
        """Empties the prefix caches of all pods, and forgets the local index of their contents. Raises Unavailable."""
        pods: dict[str, Pod] = {}
        for model in self.models:
            pods |= {pod.address: pod for pod in model.pod_table.pods.values() if pod.alive or pod.address not in pods}
            for name in (ANY_POD[0], *(pod.name for pod in model.pod_table.pods.values())):
                model.router.approx_index.forget(name)
        return await reset_prefix_caches(pods.values())

    def model_for(self, caller: Caller, name: str) -> ServedModel:
        """Returns the model or adapter with this name. Raises ModelNotFound, PermissionDenied."""
        model = self.models.by_name.get(name) or self.models.with_adapter(name)
        names = (model.name,) if model.adapter is None else model.own_names
        if not caller.may_use(name, *names):
            raise PermissionDenied(f"this API key may not use the model {name!r}", field="model")
        return model

    async def completion(self, context: RequestContext, body: CompletionBody) -> list[Choice]:
        """Returns `candidates` choices for each prompt, in order. Raises InvalidRequest, ModelNotFound, Unavailable."""
        spec = body.spec
        model = self.model_for(context.caller, spec.model)
        limits = model.pod_table.limits()
        self._refuse_if_late(context, model, spec)
        if spec.grammar is not None:
            spec = replace(spec, grammar=await model.chat_format.prove(spec.grammar, context.caller.client))
        texts = [prompt for prompt in body.prompts if isinstance(prompt, str)]
        for text in texts:
            reject_too_long(text, model, limits, "prompt")
        prompts: Sequence[Sequence[int]] = [prompt for prompt in body.prompts if not isinstance(prompt, str)]
        if texts:  # a body has either texts or token ids
            prompts = await model.tokenizer.encode_all(texts, add_special_tokens=True)
        parser_config = None if spec.skip_special_tokens else model.chat_format.special_tokens_config()
        limit = COMPLETION_MAX_TOKENS
        return await self._choices(
            context, model, spec, prompts, parser_config, prompt_field="prompt", default_max_tokens=limit
        )

    async def chat(self, context: RequestContext, body: ChatBody) -> list[Choice]:
        """Returns the spec's n choices. Raises InvalidRequest, ModelNotFound, Unavailable."""
        model = self.model_for(context.caller, body.spec.model)
        limits = model.pod_table.limits()
        self._refuse_if_late(context, model, body.spec)
        chat = await model.chat_format.prepare(
            body.messages,
            body.template_kwargs,
            body.tools,
            body.spec.grammar,
            client=context.caller.client,
            include_reasoning=body.include_reasoning,
            keep_special=not body.spec.skip_special_tokens,
            answer_start=body.answer_start,
        )
        reject_too_long(chat.prompt.text, model, limits, "messages")
        ids = await model.tokenizer.encode_chat(chat.prompt)
        spec = replace(body.spec, grammar=chat.grammar)
        limit = model.defaults.max_tokens
        return await self._choices(
            context, model, spec, [ids], chat.parser_config, prompt_field="messages", default_max_tokens=limit
        )

    @staticmethod
    def _refuse_if_late(context: RequestContext, model: ServedModel, spec: GenerationSpec) -> None:
        """Refuses a request that would be late, before time is spent on its text. Raises as Gate.acquire does."""
        caller = context.caller
        priority = caller.effective_priority(spec.priority)
        model.gate.refuse_if_late(caller, priority, context.deadline, context.timeline.start)

    async def _choices(
        self,
        context: RequestContext,
        model: ServedModel,
        spec: GenerationSpec,
        prompts: Sequence[Sequence[int]],
        parser_config: OutputParserConfig | None,
        *,
        prompt_field: str,
        default_max_tokens: int | None = None,
    ) -> list[Choice]:
        """Checks the tokenized prompts, and returns their choices when they may go to the pods."""
        caller, limits = context.caller, model.pod_table.limits()
        bad_words = await model.tokenizer.encode_words(spec.bad_words)
        salt = caller.effective_salt(spec.cache_salt, share_cache=self.settings.share_cache)
        priority = caller.effective_priority(spec.priority)
        sampling = spec.sampling
        if spec.given is not None and spec.beam_search is None:
            sampling = model.defaults.fill(sampling, spec.given)
        kept = caller.effective_cache_priority(spec.cache_priority)
        effective = replace(
            spec, model=model.name, priority=priority, cache_priority=kept, cache_salt=salt, sampling=sampling
        )
        deadline, timeline, affinity = context.deadline, context.timeline, context.affinity
        answer_limit = context.enter_tier(model.gate, priority)
        choices: list[Choice] = []
        for number, ids in enumerate(prompts):
            if number % PROMPTS_PER_LOOP_TURN == PROMPTS_PER_LOOP_TURN - 1:
                await asyncio.sleep(0)
            if context.identity is not None and spec.seed is None:
                effective = replace(effective, seed=context.identity.seed(number))
            request = to_valid_request(
                effective,
                ids,
                limits,
                request_id=f"{context.id}-{number}",
                eos_ids=model.tokenizer.eos_ids,
                default_max_tokens=default_max_tokens,
                prompt_field=prompt_field,
                bad_words=bad_words,
                adapter="" if model.adapter is None else model.adapter.digest,
            )
            if answer_limit is not None:
                request = context.shorten(request, answer_limit, model.gate)
            timeline.mark("tokenized", prompt_tokens=request.prompt_len)
            dispatch = Dispatch(
                model.router,
                request,
                deadline=deadline,
                timeline=timeline,
                affinity=affinity,
                pod_wait_s=self.settings.pod_wait_s,
                on_no_room=context.on_no_room,
            )
            report, n = PromptReport(model.tokenizer, dispatch), request.sampling.n
            group = SampleGroup(dispatch) if n > 1 else None
            choices += [
                Choice(context, model, spec, dispatch, parser_config, report=report, group=group, sample_index=index)
                for index in range(n)
            ]
        check_prompt_scores(spec, sum(map(len, prompts)))
        await self._pass_gate(context, model, choices, prompt_field)
        return choices

    async def _pass_gate(
        self, context: RequestContext, model: ServedModel, choices: Sequence[Choice], prompt_field: str
    ) -> None:
        """Waits until all choices may go to the pods. Raises as Limiter.reserve and Gate.acquire do."""
        context.choices = choices
        context.timeline.set_facts(model=model.name)
        if model.adapter is not None:
            context.timeline.set_facts(adapter=model.adapter.name, adapter_digest=model.adapter.digest)
            self.metrics.count_adapter(model.adapter.name)
        firsts = [choice for choice in choices if choice.sample_index == 0]
        requests = [choice.request for choice in firsts]
        prompt_tokens = sum(request.prompt_len for request in requests)
        max_output = sum(choice.request.sampling.max_tokens * choice.spec.candidates for choice in firsts)
        expected_tokens = prompt_tokens + min(max_output, EXPECTED_OUTPUT_TOKENS)
        caller, spec = context.caller, choices[0].spec
        if caller.limits:  # the most that the client asked for
            tokens = expected_tokens if spec.max_tokens is None else prompt_tokens + max_output
            fields, headers = TokenFields(prompt_tokens, prompt_field, spec.max_tokens_field), context.response_headers
            context.reservation = await self._limiter.reserve(caller, context.id, tokens, headers, fields)

        async def expected_hits() -> int:
            plans = [await model.router.plan(request, context.affinity) for request in requests]
            return sum(plan.expected_hit_tokens for plan in plans)

        priority = requests[0].priority
        entry = await model.gate.acquire(
            caller,
            priority,
            prompt_tokens,
            expected_tokens,
            context.deadline,
            expected_hits,
            arrived_at=context.timeline.start,
            prompts=len(firsts),
            on_wait=context.on_wait,
            shed=context.abort,
        )
        context.admitted, context.stage = (model, entry), "pods"
        context.timeline.mark("admitted")


def _log_request(timeline: Timeline) -> None:
    """Writes the request's one log line."""
    if not _log.isEnabledFor(logging.INFO):
        return
    fields = {
        "request_id": timeline.request_id,
        "client_request_id": timeline.client_id,
        "trace_id": timeline.trace_id,
        "tenant": timeline.tenant or None,
        "duration_s": round(timeline.changed_at - timeline.start, 6),
        **timeline.facts,
    }
    _log.info("request ended", extra={name: value for name, value in fields.items() if value is not None})
