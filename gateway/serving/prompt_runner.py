"""Computes prompts without an answer: their embeddings, or the logits after their last token.

The prompts of a request are computed side by side, each on the prefill pod with the least queued work. If a pod fails,
its prompt is tried on another pod.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import grpc

from common.errors import (
    AdapterNotLoaded,
    BatonError,
    InternalError,
    InvalidRequest,
    NotServed,
    Unauthenticated,
    Unavailable,
)
from common.pb import embedding_pb2
from common.rpc import error_from_rpc, timeout_until
from common.types import Role, SamplingParams, ValidRequest
from common.wire import request_to_pb
from gateway.pods.pod import Pod
from gateway.serving.adapters import load_for
from gateway.serving.answers import gather_or_cancel
from gateway.serving.gateway import Gateway
from gateway.serving.models import ServedModel
from gateway.serving.request import CompletionBody, GenerationSpec, PromptInput, RequestContext

_log = logging.getLogger(__name__)

MAX_CONCURRENT_PROMPTS = 16  #: Prompts of one request that are computed at the same time.
MAX_ATTEMPTS = 3  #: Max pods on which one prompt is tried.


@dataclass(frozen=True, slots=True)
class PromptResults:
    """The results of one request's prompts."""

    values: list[list[float]]  #: For each prompt its embedding, or its logits in the order of `logit_ids`.
    prompt_tokens: int


class PromptRunner:
    """Computes prompts for one gateway."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._tokens_sent: Counter[str] = Counter()  #: Prompt tokens of running calls, by pod address.

    async def compute(
        self,
        context: RequestContext,
        model: str,
        prompts: Sequence[PromptInput],
        *,
        field: str,
        cache_salt: str = "",
        logit_ids: Sequence[int] = (),
    ) -> PromptResults:
        """Returns the embeddings of prompts, or with `logit_ids` the logits of these tokens.

        `prompts` are all texts or all token ids; errors about them name `field`. Raises BatonError.
        """
        greedy = SamplingParams(temperature=0.0)
        spec = GenerationSpec(
            model=model, sampling=greedy, max_tokens=1, max_tokens_field="prompt", seed=0, cache_salt=cache_salt
        )
        try:
            choices = await self._gateway.completion(context, CompletionBody(spec, tuple(prompts)))
        except InvalidRequest as e:
            if e.field != "prompt":
                raise
            raise type(e)(e.message.replace("your prompt", f"your {field}"), field=field) from e
        served, requests = choices[0].model, [choice.request for choice in choices]
        slots = asyncio.Semaphore(MAX_CONCURRENT_PROMPTS)
        values = await gather_or_cancel(
            [self._compute_one(served, r, logit_ids, context.deadline, slots) for r in requests]
        )
        prompt_tokens = sum(request.prompt_len for request in requests)
        context.timeline.set_facts(prompt_tokens=prompt_tokens)
        return PromptResults(values, prompt_tokens)

    async def _compute_one(
        self,
        model: ServedModel,
        request: ValidRequest,
        logit_ids: Sequence[int],
        deadline: float,
        slots: asyncio.Semaphore,
    ) -> list[float]:
        """Returns the values of one prompt, computed while a slot is taken. Raises BatonError."""
        message = embedding_pb2.EmbedRequest(request=request_to_pb(request), logit_ids=logit_ids)
        avoid: set[str] = set()
        lost: set[str] = set()  # addresses of pods that have lost the adapter, and have loaded it again
        error: BatonError = Unavailable("no prefill pod is ready to serve this model", retry_after_s=1.0)
        async with slots:
            while len(avoid) < MAX_ATTEMPTS and (pod := self._choose(model, request.adapter, avoid)) is not None:
                self._tokens_sent[pod.address] += request.prompt_len
                try:
                    if request.adapter:
                        await load_for(pod, model, timeout_until(deadline))
                    answer = await pod.embedding.Embed(message, timeout=timeout_until(deadline))
                    if len(answer.logits) != len(logit_ids):
                        raise NotServed("the pods of this model are of an older version, which gives no scores")
                    return list(answer.logits if logit_ids else answer.values)
                except grpc.aio.AioRpcError as e:
                    error = error_from_rpc(e)
                    if isinstance(error, Unauthenticated):  # the pod refuses this gateway, not the client
                        _log.error("pod %s refuses this gateway: %s", pod.name, error)
                        raise InternalError("the pods that serve this model refuse this gateway") from e
                    if isinstance(error, AdapterNotLoaded) and pod.address not in lost:
                        lost.add(pod.address)
                        pod.adapters.forget(request.adapter)
                        continue
                    if not error.retryable:
                        raise error from e
                    avoid.add(pod.address)
                    pod.recheck()
                except Unavailable as e:  # the pod did not load the adapter
                    error = e
                    avoid.add(pod.address)
                finally:
                    self._tokens_sent[pod.address] -= request.prompt_len
        raise error

    def _choose(self, model: ServedModel, adapter: str, avoid: set[str]) -> Pod | None:
        """Returns the usable pod with the fewest known prompt tokens before this prompt, None without one.

        A pod that has refused the adapter lately is the last choice.
        """

        def tokens_before(pod: Pod) -> tuple[bool, int]:
            load = None if pod.view is None else pod.view.load
            tokens = self._tokens_sent[pod.address] + (0 if load is None else load.queued_tokens)
            return pod.adapters.refuses(adapter), tokens

        usable = [
            pod
            for pod in model.pod_table.pods.values()
            if pod.serving and pod.info is not None and pod.info.role is not Role.DECODE and pod.address not in avoid
        ]
        return min(usable, key=tokens_before, default=None)
