"""Every effect of effects.py over REST and over gRPC, through the gateway, a prefill and a decode pod with SmolLM2."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import grpc
import httpx
import pytest
import pytest_asyncio
import torch
from google.rpc import error_details_pb2
from grpc_status import rpc_status
from tokenizers import Tokenizer

from common.pb import inference_pb2, inference_pb2_grpc, types_pb2
from tests.e2e.effects import CHATS, COMPLETIONS, PROMPT, TOKENS, WARM, WILD, Effect, Json, Said, Scene
from tests.rigs.stack.cluster import Cluster
from tests.rigs.stack.oracle import Oracle

pytestmark = pytest.mark.parametrize("cluster", ["1P+1D"], indirect=True)

IN_FLIGHT = 16
Ask = Callable[[Json], Awaitable[Said]]


# -- REST


def asker(http: httpx.AsyncClient, model: str) -> Ask:
    """Sends a request over REST."""

    async def ask(body: Json) -> Said:
        path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
        response = await http.post(path, json={"model": model, **body})
        if response.status_code != 200:
            return Said(refused=response.json()["error"]["param"] or response.text)
        if not body.get("stream"):
            return _of_rest(response.json())
        events = [line.removeprefix("data: ") for line in response.text.splitlines() if line]
        chunks = [json.loads(event) for event in events if event != "[DONE]"]
        usages = [chunk["usage"] for chunk in chunks if chunk.get("usage")]
        done = usages[-1]["completion_tokens"] if usages else 0
        return Said(chunks=len(chunks), usages=len(usages), completion=done)

    return ask


def _of_rest(body: Json) -> Said:
    choices, usage = body["choices"], body["usage"]
    logprobs = choices[0].get("logprobs")
    scored: tuple[int, frozenset[int]] = (0, frozenset())
    if logprobs and "tokens" in logprobs:  # a greedy token is among its alternatives
        scored = len(logprobs["tokens"]), frozenset(map(len, logprobs["top_logprobs"]))
    elif logprobs:
        scored = len(logprobs["content"]), frozenset(len(t["top_logprobs"]) for t in logprobs["content"])
    calls = choices[0].get("message", {}).get("tool_calls") or ()
    return Said(
        texts=tuple(choice["text"] if "text" in choice else choice["message"]["content"] or "" for choice in choices),
        finishes=tuple(choice["finish_reason"] for choice in choices),
        prompt=usage["prompt_tokens"],
        completion=usage["completion_tokens"],
        cached=usage["prompt_tokens_details"]["cached_tokens"],
        scored=scored[0],
        alternatives=scored[1],
        prompt_scores=max(0, len(choices[0].get("prompt_logprobs") or ()) - 1),
        calls=tuple(f"{call['function']['name']}({call['function']['arguments']})" for call in calls),
    )


# -- gRPC


def caller(channel: grpc.aio.Channel, model: str) -> Ask:
    """Sends the same request over gRPC."""
    stub: inference_pb2_grpc.InferenceAsyncStub = inference_pb2_grpc.InferenceStub(channel)

    async def ask(body: Json) -> Said:
        request = inference_pb2.GenerateRequest(**grpc_fields({"model": model, **body}))
        try:
            return _of_grpc([part async for part in stub.Generate(request, timeout=120)])
        except grpc.aio.AioRpcError as e:
            return Said(refused=_field_of(e))

    return ask


def grpc_fields(body: Json) -> Json:
    """Converts a REST body to fields of GenerateRequest."""
    fields = dict(body)
    if isinstance(prompt := fields.pop("prompt", None), str):
        fields["text"] = prompt
    if (messages := fields.pop("messages", None)) is not None:
        fields["chat"] = inference_pb2.ChatPrompt(messages=[inference_pb2.ChatMessage(**m) for m in messages])
    if "max_completion_tokens" in fields:
        fields["max_tokens"] = fields.pop("max_completion_tokens")
    if "logit_bias" in fields:
        pairs = fields["logit_bias"].items()
        fields["logit_bias"] = [types_pb2.LogitBias(token=int(token), bias=bias) for token, bias in pairs]
    if "structured_outputs" in fields:
        fields["structured_output"] = inference_pb2.StructuredOutput(**fields.pop("structured_outputs"))
    if fields.get("logprobs") is True:
        fields["logprobs"] = fields.pop("top_logprobs", 0)
    if "tools" in fields:
        functions = [tool["function"] for tool in fields["tools"]]
        fields["tools"] = [
            inference_pb2.Function(name=f["name"], parameters=json.dumps(f["parameters"])) for f in functions
        ]
    if fields.get("tool_choice") == "required":
        fields["tool_choice"] = inference_pb2.ToolChoice(mode=inference_pb2.ToolChoice.MODE_REQUIRED)
    return fields


_FINISH = {
    types_pb2.FINISH_REASON_STOP: "stop",
    types_pb2.FINISH_REASON_LENGTH: "length",
    types_pb2.FINISH_REASON_TOOL_CALLS: "tool_calls",
}


def _of_grpc(parts: list[inference_pb2.GenerateResponse]) -> Said:
    size = 1 + max(part.index for part in parts)
    own = [[part for part in parts if part.index == index] for index in range(size)]
    tokens = [token for part in own[0] for token in part.tokens]
    calls: dict[int, list[str]] = {}
    for part in own[0]:
        for call in part.tool_calls:
            texts = calls.setdefault(call.index, ["", ""])
            texts[0] += call.name
            texts[1] += call.arguments
    usage = parts[-1].usage
    return Said(
        texts=tuple("".join(part.text for part in some) for some in own),
        finishes=tuple(_FINISH[some[-1].finish_reason] for some in own),
        prompt=usage.prompt_tokens,
        completion=usage.completion_tokens,
        cached=usage.cached_tokens,
        scored=sum(token.HasField("logprob") for token in tokens),
        alternatives=frozenset(len(token.top) for token in tokens if token.HasField("logprob")),
        prompt_scores=sum(len(part.prompt_logprobs.logprobs) for part in own[0]),
        calls=tuple(f"{name}({arguments})" for name, arguments in calls.values()),
    )


def _field_of(e: Any) -> str:
    status = rpc_status.from_call(e)
    for detail in status.details if status is not None else ():
        bad = error_details_pb2.BadRequest()
        if detail.Unpack(bad):
            field: str = bad.field_violations[0].field
            return field
    return f"{e.code().name}: {e.details()}"


# -- the scene


@torch.inference_mode()
def greedy_loop(
    oracle: Oracle,
    prompt: list[int],
    count: int,
    *,
    bias: Mapping[int, float] | None = None,
    allowed: list[int] | None = None,
    repetition_penalty: float = 1.0,
    presence_penalty: float = 0.0,
    frequency_penalty: float = 0.0,
) -> list[int]:
    """Computes the greedy answer with the given bias, penalties and allowed tokens."""
    said: list[int] = []
    while len(said) < count and (not said or said[-1] not in oracle.eos):
        logits = oracle.model(torch.tensor([[*prompt, *said]])).logits[0, -1].float()
        seen = torch.tensor(sorted({*prompt, *said}))
        chosen = logits[seen]
        logits[seen] = torch.where(chosen > 0, chosen / repetition_penalty, chosen * repetition_penalty)
        for token in set(said):
            logits[token] -= presence_penalty + frequency_penalty * said.count(token)
        for token, value in (bias or {}).items():
            logits[token] += value
        if allowed is not None:
            kept = logits[allowed].clone()
            logits[:] = -torch.inf
            logits[allowed] = kept
        said.append(int(logits.argmax()))
    return said


@pytest_asyncio.fixture
async def http(cluster: Cluster) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=cluster.base_url.removesuffix("/v1"), timeout=120) as client:
        yield client


@pytest.fixture
def rest(http: httpx.AsyncClient, cluster: Cluster) -> Ask:
    return asker(http, cluster.model)


@pytest_asyncio.fixture
async def over_grpc(cluster: Cluster) -> AsyncIterator[Ask]:
    async with grpc.aio.insecure_channel(cluster.stack.grpc_address) as channel:
        yield caller(channel, cluster.model)


@dataclass(frozen=True)
class Known:
    """Answers of `transformers`, computed once for all tests."""

    encode: Callable[[str], list[int]]
    decode: Callable[[list[int]], str]
    loop: Callable[..., list[int]]
    beams: tuple[str, ...]


@pytest.fixture(scope="module")
def known(oracle: Oracle, smollm2_dir: Path) -> Known:
    tokenizer = Tokenizer.from_file(str(smollm2_dir / "tokenizer.json"))
    loops: dict[str, list[int]] = {}

    def encode(text: str) -> list[int]:
        ids: list[int] = tokenizer.encode(text).ids
        return ids

    def decode(ids: list[int]) -> str:
        text: str = tokenizer.decode(ids, skip_special_tokens=True)
        return text

    def loop(count: int, **how: Any) -> list[int]:
        if (key := f"{count} {how}") not in loops:
            loops[key] = greedy_loop(oracle, prompt, count, **how)
        return loops[key]

    prompt = encode(PROMPT)
    beams = oracle.model.generate(
        torch.tensor([prompt]), do_sample=False, num_beams=2, num_return_sequences=2, max_new_tokens=TOKENS
    )
    return Known(encode, decode, loop, tuple(decode(row[len(prompt) :].tolist()) for row in beams))


@pytest_asyncio.fixture
async def scene(http: httpx.AsyncClient, rest: Ask, cluster: Cluster, known: Known) -> Scene:
    few = {"prompt": PROMPT, "max_tokens": TOKENS}
    await rest({"prompt": WARM, "max_tokens": 2})
    seeded = await rest({**few, "temperature": 2.0, "seed": 7})
    body = {"model": cluster.model, **few, **WILD, "n": 4, "logprobs": 0}
    four = (await http.post("/v1/completions", json=body)).json()
    best = max(four["choices"], key=lambda choice: fmean(choice["logprobs"]["token_logprobs"]))
    return Scene(
        greedy=tuple(known.loop(TOKENS)),
        decode=known.decode,
        encode=known.encode,
        loop=lambda count, **how: known.decode(known.loop(count, **how)),
        beams=known.beams,
        seeded=seeded.text,
        best=best["text"],
    )


async def unseen(effects: tuple[Effect, ...], ask: Ask, scene: Scene, how: str) -> list[str]:
    """Returns the faults: effects that are missing, or present without the parameter."""
    slots, wrong = asyncio.Semaphore(IN_FLIGHT), []

    async def check(effect: Effect) -> None:
        given, plain = effect.bodies(scene, how)
        async with slots:
            said, without = await asyncio.gather(ask(given), ask(plain))
        if not effect.holds(said, scene):
            wrong.append(f"{effect.name} has no effect: {given}: {said}")
        if effect.holds(without, scene):
            wrong.append(f"the effect of {effect.name} is there without it: {plain}: {without}")

    await asyncio.gather(*[check(effect) for effect in effects])
    return wrong


def assert_prompts_were_prefilled(cluster: Cluster) -> None:
    """The decode pod computes no prompt for any parameter. A sequence with a late grammar mask is preempted."""
    info = cluster.info("decode-0")
    assert (info.computed.prefill, info.computed.local) == (0, 0)
    assert not info.computed.recompute or info.activity.preemptions


async def test_every_parameter_has_its_effect_over_rest(cluster: Cluster, rest: Ask, scene: Scene) -> None:
    assert not await unseen((*COMPLETIONS, *CHATS), rest, scene, "rest")
    assert_prompts_were_prefilled(cluster)


async def test_every_parameter_has_its_effect_over_grpc(cluster: Cluster, over_grpc: Ask, scene: Scene) -> None:
    effects = tuple(effect for effect in (*COMPLETIONS, *CHATS) if not effect.rest_only)
    assert not await unseen(effects, over_grpc, scene, "grpc")
    assert_prompts_were_prefilled(cluster)
