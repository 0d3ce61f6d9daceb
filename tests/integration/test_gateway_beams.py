"""Beam search over fake pods, over REST and gRPC: requests to the pods, answers, usage, charges and rejections."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio

from common.pb import inference_pb2, inference_pb2_grpc
from common.types import SamplingParams, TokenLogprob, ValidRequest
from gateway.admission.api_keys import create_key
from gateway.admission.key_store import KeyFile
from gateway.serving.answers import Beam, beam_search
from gateway.serving.request import BeamSearchParams, EarlyStopping
from gateway.text.tokenizer import TextTokenizer
from tests.rigs.gateway.gateway_rig import MODEL, Rig, rig, texts
from tests.rigs.pods.fake_pods import FakeCluster, fake_cluster
from tests.rigs.pods.scripted import outcome
from tests.rigs.waiting import until

EOS = 2
WIDTH = 3
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


def script(request: ValidRequest) -> list[int]:
    """Tokens depend on the prompt; in some places the second likeliest token ends the answer."""
    return [EOS - 1 if sum(request.prompt_ids) % 4 == 0 else 66 + sum(request.prompt_ids) % 26]


def resumed_script(request: ValidRequest) -> list[int]:
    """As `script`, after the output with which a request resumes."""
    return [66] * len(request.output_ids) + script(replace(request, prompt_ids=request.context_ids))


@pytest.fixture(scope="module")
def tokenizer(smollm2_dir: Path) -> TextTokenizer:
    return texts(smollm2_dir)[0]


@pytest_asyncio.fixture
async def cluster() -> AsyncIterator[FakeCluster]:
    async with fake_cluster() as c:
        c.script = script
        yield c


async def expected(
    prompt: Sequence[int], max_tokens: int, penalty: float = 1.0, early: EarlyStopping = False
) -> list[Beam]:
    """Returns the result of the same search on the fake pods' log-probabilities."""

    async def expand(beams: Sequence[Beam]) -> list[tuple[TokenLogprob, ...]]:
        asked = SamplingParams(logprobs=WIDTH + 1, max_tokens=1)
        rows = [(*prompt, *(token.id for token in beam.tokens)) for beam in beams]
        return [outcome(ValidRequest("r", MODEL, row, asked), script)[0][0].top for row in rows]

    return await beam_search(
        expand, BeamSearchParams(WIDTH, penalty, early), max_tokens=max_tokens, stops=(EOS,), num_top=1
    )


def text_of(tokenizer: TextTokenizer, beam: Beam) -> str:
    return tokenizer.decode([token.id for token in beam.tokens])


async def test_the_best_beams_are_the_choices(gw: Rig, cluster: FakeCluster, tokenizer: TextTokenizer) -> None:
    cluster.prefills[0].cached_tokens = 16
    prompt = await tokenizer.encode_async("Hello", add_special_tokens=True)
    cases: list[tuple[float, EarlyStopping]] = [(1.0, False), (3.0, "never"), (-1.0, True)]
    for penalty, early in cases:
        cluster.prefills[0].seen.prefilled.clear()
        found = await expected(prompt, 7, penalty, early)
        fields = {"length_penalty": penalty, "early_stopping": early, "temperature": 0.9, "seed": 5}
        answer = await gw.complete(use_beam_search=True, n=2, best_of=WIDTH, max_tokens=7, logprobs=1, **fields)
        body = answer.json()
        assert [c["text"] for c in body["choices"]] == [text_of(tokenizer, beam) for beam in found[:2]]
        assert [c["index"] for c in body["choices"]] == [0, 1]
        assert [c["finish_reason"] for c in body["choices"]] == [beam.finish for beam in found[:2]]
        for choice, beam in zip(body["choices"], found[:2], strict=True):
            assert choice["logprobs"]["token_logprobs"] == [token.logprob for token in beam.tokens]
        usage = body["usage"]
        assert usage["prompt_tokens"] == len(prompt)
        assert usage["completion_tokens"] == sum(len(beam.tokens) for beam in found[:2])
        assert usage["prompt_tokens_details"] == {"cached_tokens": 16}
        asked = cluster.prefills[0].seen.prefilled
        assert {(r.sampling.max_tokens, r.sampling.n, r.sampling.greedy) for r in asked} == {(1, 1, True)}
        steps = [len(r.prompt_ids) for r in asked]
        assert steps == sorted(steps)  # all beams of a step, then the next step
        assert steps.count(len(prompt)) == 1
        assert steps.count(len(prompt) + 1) == WIDTH


async def test_chat_and_several_prompts(gw: Rig, cluster: FakeCluster, tokenizer: TextTokenizer) -> None:
    chat = (await gw.chat(use_beam_search=True, n=WIDTH, max_tokens=4)).json()
    assert [c["index"] for c in chat["choices"]] == list(range(WIDTH))
    found = await expected(cluster.decodes[0].seen.reserved[0].prompt_ids, 4)
    assert [c["message"]["content"] for c in chat["choices"]] == [text_of(tokenizer, beam) for beam in found]
    assert all(c["logprobs"] is None for c in chat["choices"])
    prompts = [[70, 71], [80]]
    many = (await gw.complete(prompt=prompts, use_beam_search=True, n=1, best_of=WIDTH, max_tokens=5)).json()
    best = [(await expected(prompt, 5))[0] for prompt in prompts]
    assert [c["text"] for c in many["choices"]] == [text_of(tokenizer, beam) for beam in best]
    assert many["usage"]["prompt_tokens"] == 3


async def test_a_client_that_leaves_ends_all_beams(gw: Rig, cluster: FakeCluster) -> None:
    cluster.prefills[0].faults.prefill_delay_s = 0.05
    asking = asyncio.create_task(gw.complete(use_beam_search=True, n=WIDTH, max_tokens=1000))
    await until(lambda: len(cluster.prefills[0].seen.prefilled) > 2 * WIDTH)
    asking.cancel()
    await gw.settled()
    asked = len(cluster.prefills[0].seen.prefilled)
    await asyncio.sleep(0.2)
    assert len(cluster.prefills[0].seen.prefilled) <= asked + WIDTH


async def test_a_deadline_ends_all_beams(gw: Rig, cluster: FakeCluster) -> None:
    cluster.prefills[0].faults.prefill_delay_s = 0.3
    body = {"model": MODEL, "prompt": "Hello", "use_beam_search": True, "n": WIDTH, "max_tokens": 1000}
    answer = await gw.http.post("/v1/completions", json=body, headers={"x-request-timeout": "1"})
    assert answer.status_code == 504, answer.text


async def test_a_beam_without_room_waits(gw: Rig, cluster: FakeCluster, tokenizer: TextTokenizer) -> None:
    cluster.decodes[0].capacity = 1
    found = await expected([70, 71], 4)
    body = (await gw.complete(prompt=[70, 71], use_beam_search=True, n=WIDTH, max_tokens=4)).json()
    assert [c["text"] for c in body["choices"]] == [text_of(tokenizer, beam) for beam in found]


async def test_a_key_is_charged_for_every_token_that_was_generated(
    cluster: FakeCluster, smollm2_dir: Path, tmp_path: Path
) -> None:
    path = tmp_path / "keys.toml"
    key, record = create_key("acme", tokens_per_day=1000)
    KeyFile(path).add(record)
    async with rig(cluster, smollm2_dir, api_keys=(str(path),)) as gw:
        gw.http.headers["authorization"] = f"Bearer {key}"
        body = (await gw.complete(prompt=[70], use_beam_search=True, n=1, best_of=WIDTH, max_tokens=4)).json()
        await gw.settled()
        asked = len(cluster.prefills[0].seen.prefilled)
        assert asked > body["usage"]["completion_tokens"]
        metrics = gw.gateway.metrics.tenant_tokens
        assert metrics.labels("acme", "output")._value.get() == asked
        assert metrics.labels("acme", "prompt")._value.get() == 1
        refused = await gw.complete(prompt=[70], use_beam_search=True, n=10, max_tokens=100)
        assert refused.status_code in (400, 429)  # 10 beams of 100 tokens are more than a day's
        await gw.settled()


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"stream": True}, "stream"),
        ({"stop": "x"}, "stop"),
        ({"echo": True}, "echo"),
        ({"n": 11}, "n"),
        ({"best_of": 11}, "best_of"),
        ({"prompt_logprobs": 0}, "prompt_logprobs"),
        ({"bad_words": ["x"]}, "bad_words"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"allowed_token_ids": [5]}, "allowed_token_ids"),
        ({"presence_penalty": 1}, "presence_penalty"),
        ({"repetition_penalty": 1.1}, "repetition_penalty"),
        ({"frequency_penalty": 1}, "frequency_penalty"),
        ({"stop_token_ids": list(range(20))}, "stop_token_ids"),
        ({"length_penalty": 11}, "length_penalty"),
        ({"early_stopping": "maybe"}, "early_stopping"),
        ({"use_beam_search": 1}, "use_beam_search"),
        ({"use_beam_search": False, "length_penalty": 2}, "length_penalty"),
        ({"use_beam_search": False, "early_stopping": True}, "early_stopping"),
    ],
)
async def test_fields_that_a_beam_search_cannot_honour_are_rejected(
    gw: Rig, fields: dict[str, Any], field: str
) -> None:
    response = await gw.complete(**{"use_beam_search": True, **fields})
    assert (response.status_code, response.json()["error"]["param"]) == (400, field)


async def test_with_a_grammar_a_beam_is_the_output_after_which_a_request_resumes(gw: Rig, cluster: FakeCluster) -> None:
    cluster.script = resumed_script
    fields = {"structured_outputs": {"regex": "[a-z]*"}, "min_tokens": 2}
    answer = await gw.complete(prompt=[70, 71], use_beam_search=True, n=WIDTH, max_tokens=4, **fields)
    assert answer.status_code == 200, answer.text
    asked = cluster.prefills[0].seen.prefilled
    assert {request.prompt_ids for request in asked} == {(70, 71)}
    assert {request.grammar is None for request in asked} == {False}
    for request in asked:
        length, sampling = len(request.output_ids), request.sampling
        assert (sampling.max_tokens, sampling.min_tokens) == (length + 1, min(2, length + 1))
        assert (sampling.allowed_logprobs, sampling.stop_token_ids) == (True, (EOS,))
    assert [len(request.output_ids) for request in asked].count(1) == WIDTH
    assert answer.json()["usage"]["prompt_tokens"] == 2


async def test_with_fewer_answers_than_choices_an_index_still_tells_the_prompt(
    gw: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def no_token(self: Any, beam: Beam) -> tuple[TokenLogprob, ...]:
        return ()  # as if a grammar allowed only the empty answer

    monkeypatch.setattr("gateway.serving.answers._BeamSearch._likeliest_tokens", no_token)
    body = (await gw.complete(prompt=[[70, 71], [80]], use_beam_search=True, n=2, max_tokens=3)).json()
    assert [(c["index"], c["text"], c["finish_reason"]) for c in body["choices"]] == [(0, "", "stop"), (2, "", "stop")]


async def test_an_answer_that_the_last_token_completes_ends_with_stop(gw: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    async def two_tokens(self: Any, beam: Beam) -> tuple[TokenLogprob, ...]:
        return () if len(beam.tokens) == 2 else (TokenLogprob(70, -0.5),)

    monkeypatch.setattr("gateway.serving.answers._BeamSearch._likeliest_tokens", two_tokens)
    fields = {"prompt": [70], "use_beam_search": True, "structured_outputs": {"regex": "[a-z]+"}}
    for max_tokens, finish in ((1, "length"), (2, "stop"), (3, "stop")):
        [choice] = (await gw.complete(max_tokens=max_tokens, **fields)).json()["choices"]
        assert choice["finish_reason"] == finish


async def test_required_tools_and_neutral_values_are_accepted(gw: Rig, cluster: FakeCluster) -> None:
    cluster.script = resumed_script
    forced = await gw.chat(use_beam_search=True, tools=[TOOL], tool_choice="required", max_tokens=2)
    assert forced.status_code == 200, forced.text
    inert = {"stop": [], "stream": False, "echo": False, "repetition_penalty": 1, "logit_bias": {}, "bad_words": []}
    assert (await gw.complete(use_beam_search=True, max_tokens=2, **inert)).status_code == 200


async def test_grpc_gives_each_answer_as_one_message(
    cluster: FakeCluster, smollm2_dir: Path, tokenizer: TextTokenizer, unused_tcp_port: int
) -> None:
    async with rig(cluster, smollm2_dir, grpc_port=unused_tcp_port) as gw:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{gw.server.grpc_port}") as channel:
            stub: inference_pb2_grpc.InferenceAsyncStub = inference_pb2_grpc.InferenceStub(channel)
            prompt = inference_pb2.TokenPrompt(ids=[70, 71])
            early_stopping: list[tuple[inference_pb2.EarlyStopping.ValueType, EarlyStopping]] = [
                (inference_pb2.EARLY_STOPPING_UNSPECIFIED, False),
                (inference_pb2.EARLY_STOPPING_FIRST, True),
                (inference_pb2.EARLY_STOPPING_NEVER, "never"),
            ]
            for early, meant in early_stopping:
                found = await expected([70, 71], 6, 2.0, meant)
                request = inference_pb2.GenerateRequest(
                    model=MODEL,
                    tokens=prompt,
                    max_tokens=6,
                    n=2,
                    best_of=WIDTH,
                    use_beam_search=True,
                    length_penalty=2.0,
                    early_stopping=early,
                )
                parts = [part async for part in stub.Generate(request, timeout=30)]
                assert [part.index for part in parts] == [0, 1]
                for part, beam in zip(parts, found[:2], strict=True):
                    assert part.text == text_of(tokenizer, beam)
                    assert [t.id for t in part.tokens] == [t.id for t in beam.tokens]
                    assert part.finish_reason
                assert [part.HasField("usage") for part in parts] == [False, True]
                assert parts[-1].usage.completion_tokens == sum(len(beam.tokens) for beam in found[:2])
            chat = inference_pb2.ChatPrompt(messages=[inference_pb2.ChatMessage(role="user", content="Hi")])
            request = inference_pb2.GenerateRequest(model=MODEL, chat=chat, n=2, max_tokens=3, use_beam_search=True)
            said = [part.text async for part in stub.Generate(request, timeout=30)]
            assert len(said) == len(set(said)) == 2
            for refused in (
                inference_pb2.GenerateRequest(model=MODEL, tokens=prompt, n=11, use_beam_search=True),
                inference_pb2.GenerateRequest(model=MODEL, tokens=prompt, length_penalty=2.0),
                inference_pb2.GenerateRequest(
                    model=MODEL, tokens=prompt, early_stopping=inference_pb2.EARLY_STOPPING_FIRST
                ),
                inference_pb2.GenerateRequest(model=MODEL, tokens=prompt, use_beam_search=True, stop=["x"]),
            ):
                with pytest.raises(grpc.aio.AioRpcError) as error:
                    await stub.Generate(refused, timeout=30).read()
                assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        await gw.settled()
