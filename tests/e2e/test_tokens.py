"""Greedy tokens through gateway, prefill, NIXL and decode equal those of `transformers`, over REST and gRPC."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

import grpc
import openai
import pytest
import torch
from tokenizers import Tokenizer

from common.pb import inference_pb2, inference_pb2_grpc
from tests.rigs.stack.cluster import BLOCK, CHUNK, MAX_MODEL_LEN, Cluster
from tests.rigs.stack.oracle import NEAR_TIE, Oracle, Reference, assert_same
from tests.rigs.stack.prompts import prompt_of

OUTPUT = 8
# Lengths around one and several blocks, around one and several chunks, and the longest that fits.
LONGEST = 1000
LENGTHS = [1, 2, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK, 3 * BLOCK + 1, 100, CHUNK - BLOCK, CHUNK - 1, CHUNK, CHUNK + 1]
LENGTHS += [150, 2 * CHUNK - 1, 2 * CHUNK, 2 * CHUNK + 1, 300, 3 * CHUNK, 4 * CHUNK, 4 * CHUNK + 1, LONGEST]
ALONE = 2 * CHUNK + 1  # prompts up to this length are also computed alone, without a cached prefix
# With two pods per role: a prompt on each side of every boundary.
BORDERS = [1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK, 3 * BLOCK + 1, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK]
BORDERS += [2 * CHUNK + 1, 4 * CHUNK + 1, LONGEST]
IN_FLIGHT = 16
EOS = {2}  # SmolLM2's <|im_end|>
SHARED = "shared"  # cache salt of the prompts that share prefixes


@dataclass(frozen=True, slots=True)
class Case:
    """A prompt and the reference continuation of `transformers`."""

    prompt: list[int]
    expected: Reference

    @property
    def what(self) -> str:
        return f"prompt of {len(self.prompt)} tokens"

    @property
    def clear(self) -> bool:
        """Whether no token of the reference is a near tie."""
        return min(self.expected.gaps) >= NEAR_TIE


@pytest.fixture(scope="session")
def texts(smollm2_dir: Path) -> list[list[int]]:
    return [prompt_of(smollm2_dir, MAX_MODEL_LEN - 1, seed) for seed in (0, 1)]


@pytest.fixture(scope="session")
def cases(texts: list[list[int]], oracle: Oracle) -> list[Case]:
    """All cases. Their prompts are prefixes of two texts, alternating by length."""
    found: dict[int, Case] = {}
    for text, lengths in zip(texts, (LENGTHS[::2], LENGTHS[1::2]), strict=True):
        for length, expected in oracle.references(text, lengths, OUTPUT).items():
            found[length] = Case(text[:length], expected)
    return [found[length] for length in LENGTHS]


def cases_of(cluster: Cluster, cases: list[Case]) -> list[Case]:
    return [case for case in cases if len(cluster.pods) == 2 or len(case.prompt) in BORDERS]


def assert_same_text(got: str, expected: Reference, tokenizer: Tokenizer, what: str) -> None:
    """Asserts equal text up to the first near tie of the reference."""
    ties = [i for i, gap in enumerate(expected.gaps) if gap < NEAR_TIE]
    wanted = tokenizer.decode(expected.tokens[: ties[0]] if ties else expected.tokens, skip_special_tokens=True)
    assert got.startswith(wanted) if ties else got == wanted, f"{what}: {got!r}, expected {wanted!r}"


def assert_no_prompt_tokens_on_decode(cluster: Cluster) -> None:
    for name in cluster.pods:
        if name.startswith("decode"):
            computed = cluster.info(name).computed
            assert (computed.prefill, computed.local, computed.recompute) == (0, 0, 0), name


async def in_flight(answer: Callable[[Case], Awaitable[None]], cases: list[Case]) -> None:
    """Runs all cases with IN_FLIGHT requests at a time."""
    slots = asyncio.Semaphore(IN_FLIGHT)

    async def one(case: Case) -> None:
        async with slots:
            await answer(case)

    await asyncio.gather(*(one(case) for case in cases))


async def accepted(
    stub: inference_pb2_grpc.InferenceAsyncStub, request: inference_pb2.GenerateRequest
) -> list[inference_pb2.Token]:
    """Returns the tokens of an answer. Tries again after a refusal: cold pods may forecast minutes."""
    while True:
        try:
            return [t async for part in stub.Generate(request, timeout=600) for t in part.tokens]
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.RESOURCE_EXHAUSTED:
                raise
            await asyncio.sleep(1.0)


def test_the_oracle_is_what_generate_says(oracle: Oracle, texts: list[list[int]]) -> None:
    found = oracle.references(texts[0], [1, 40, 100], OUTPUT)
    for length, reference in found.items():
        prompt = torch.tensor([texts[0][:length]])
        said = oracle.model.generate(prompt, do_sample=False, max_new_tokens=OUTPUT)[0, length:].tolist()
        assert_same(said, reference, f"prompt of {length} tokens")


@pytest.mark.timeout(600)
async def test_grpc_with_16_in_flight_and_cold_caches(cluster: Cluster, cases: list[Case]) -> None:
    async with grpc.aio.insecure_channel(cluster.stack.grpc_address) as channel:
        stub: inference_pb2_grpc.InferenceAsyncStub = inference_pb2_grpc.InferenceStub(channel)

        async def answer(case: Case) -> None:
            request = inference_pb2.GenerateRequest(
                model=cluster.model,
                tokens=inference_pb2.TokenPrompt(ids=case.prompt),
                max_tokens=OUTPUT,
                temperature=0.0,
                cache_salt=SHARED,
                logprobs=0,
            )
            tokens = await accepted(stub, request)
            assert [t.index for t in tokens] == list(range(len(tokens)))
            assert_same([t.id for t in tokens], case.expected, case.what)
            if case.clear:
                assert [t.logprob for t in tokens] == pytest.approx(case.expected.logprobs, abs=1e-3), case.what

        await in_flight(answer, cases_of(cluster, cases))
    assert_no_prompt_tokens_on_decode(cluster)
    for name in cluster.pods:  # every pod took part
        if name.startswith("prefill"):
            assert cluster.info(name).computed.prefill > 0, name


@pytest.mark.timeout(600)
async def test_rest_one_at_a_time_with_log_probabilities(
    cluster: Cluster, cases: list[Case], smollm2_dir: Path
) -> None:
    """One prefill pod computes every prompt up to ALONE without a cached prefix, under a separate cache salt."""
    tokenizer = Tokenizer.from_file(str(smollm2_dir / "tokenizer.json"))
    async with openai.AsyncOpenAI(base_url=cluster.base_url, api_key="none", max_retries=0) as client:
        for case in cases_of(cluster, cases):
            expected = case.expected
            cold = len(cluster.pods) == 2 and len(case.prompt) <= ALONE
            answer = await client.completions.create(
                model=cluster.model,
                prompt=case.prompt,
                max_tokens=OUTPUT,
                temperature=0,
                logprobs=0,
                extra_body={"cache_salt": f"own-{len(case.prompt)}" if cold else SHARED},
            )
            choice = answer.choices[0]
            assert_same_text(choice.text, expected, tokenizer, case.what)
            assert answer.usage is not None
            assert answer.usage.prompt_tokens == len(case.prompt)
            if cold:
                assert answer.usage.prompt_tokens_details is not None
                assert answer.usage.prompt_tokens_details.cached_tokens == 0
            if case.clear:
                assert choice.finish_reason == ("stop" if expected.tokens[-1] in EOS else "length"), case.what
                assert choice.logprobs is not None
                shown = len(expected.tokens) - (expected.tokens[-1] in EOS)
                assert (choice.logprobs.token_logprobs or [])[:shown] == pytest.approx(
                    expected.logprobs[:shown], abs=1e-3
                ), case.what
    assert_no_prompt_tokens_on_decode(cluster)


@pytest.mark.timeout(600)
async def test_rest_streams_with_16_in_flight(cluster: Cluster, cases: list[Case], smollm2_dir: Path) -> None:
    """Repeats the prompts. Now the prefix caches of both roles hold them."""
    tokenizer = Tokenizer.from_file(str(smollm2_dir / "tokenizer.json"))
    async with openai.AsyncOpenAI(base_url=cluster.base_url, api_key="none", max_retries=0) as client:

        async def answer(case: Case) -> None:
            text = ""
            stream = await client.completions.create(
                model=cluster.model,
                prompt=case.prompt,
                max_tokens=OUTPUT,
                temperature=0,
                stream=True,
                extra_body={"cache_salt": SHARED},
            )
            async for chunk in stream:
                text += "".join(choice.text for choice in chunk.choices)
            assert_same_text(text, case.expected, tokenizer, case.what)

        await in_flight(answer, cases_of(cluster, cases))
    assert_no_prompt_tokens_on_decode(cluster)


@pytest.mark.parametrize("cluster", ["1P+1D"], indirect=True)
async def test_beams_are_those_of_transformers(cluster: Cluster, texts: list[list[int]], oracle: Oracle) -> None:
    prompt, beams = texts[0][:40], 3
    said = oracle.model.generate(
        torch.tensor([prompt]),
        do_sample=False,
        num_beams=beams,
        num_return_sequences=beams,
        max_new_tokens=6,
        length_penalty=2.0,
        return_dict_in_generate=True,
        output_scores=True,
    )
    request = inference_pb2.GenerateRequest(
        model=cluster.model,
        tokens=inference_pb2.TokenPrompt(ids=prompt),
        max_tokens=6,
        n=beams,
        use_beam_search=True,
        length_penalty=2.0,
        logprobs=0,
        cache_salt=SHARED,
    )
    async with grpc.aio.insecure_channel(cluster.stack.grpc_address) as channel:
        stub: inference_pb2_grpc.InferenceAsyncStub = inference_pb2_grpc.InferenceStub(channel)
        parts = [part async for part in stub.Generate(request, timeout=600)]
    assert [part.index for part in parts] == list(range(beams))
    scores = [sum(token.logprob for token in part.tokens) / len(part.tokens) ** 2 for part in parts]
    assert scores == pytest.approx(said.sequences_scores.tolist(), abs=1e-3)
    for part, row in zip(parts, said.sequences[:, len(prompt) :].tolist(), strict=True):
        assert [token.id for token in part.tokens] == row[: len(part.tokens)]


async def test_the_longest_prompt_and_one_more(cluster: Cluster, texts: list[list[int]]) -> None:
    prompt = texts[LENGTHS.index(LONGEST) % 2]  # the text that the longest case is from
    async with openai.AsyncOpenAI(base_url=cluster.base_url, api_key="none", max_retries=0) as client:

        async def ask(ids: list[int]) -> openai.types.Completion:
            return await client.completions.create(
                model=cluster.model, prompt=ids, max_tokens=1, temperature=0, extra_body={"cache_salt": SHARED}
            )

        answer = await ask(prompt)
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 1
        with pytest.raises(openai.BadRequestError) as refused:
            await ask([*prompt, 5])
        assert "prompt" in refused.value.message or "max_tokens" in refused.value.message


async def test_stop_token_max_tokens_one_and_stop_string(cluster: Cluster, smollm2_dir: Path, oracle: Oracle) -> None:
    prompt = prompt_of(smollm2_dir, 200, 7)
    expected = oracle.references(prompt, [len(prompt)], 12)[len(prompt)]
    tokenizer = Tokenizer.from_file(str(smollm2_dir / "tokenizer.json"))
    async with openai.AsyncOpenAI(base_url=cluster.base_url, api_key="none", max_retries=0) as client:

        async def ask(**kw: object) -> openai.types.Completion:
            return await client.completions.create(model=cluster.model, prompt=prompt, temperature=0, **kw)  # type: ignore[call-overload, no-any-return]

        one = await ask(max_tokens=1)
        assert one.choices[0].text == tokenizer.decode(expected.tokens[:1])
        assert (one.choices[0].finish_reason, one.usage.completion_tokens) == ("length", 1)

        for at in (0, 3):  # the first token comes from prefill, the fourth from decode
            token = expected.tokens[at]
            first_at = expected.tokens.index(token)
            stopped = await ask(max_tokens=12, extra_body={"stop_token_ids": [token]})
            assert stopped.choices[0].finish_reason == "stop"
            assert stopped.usage.completion_tokens == first_at + 1

        text = tokenizer.decode(expected.tokens)
        border = len(tokenizer.decode(expected.tokens[:5]))
        stop = text[border - 2 : border + 2]  # spans the boundary between the fifth and the sixth token
        cut = await ask(max_tokens=12, stop=[stop])
        assert cut.choices[0].text == text[: text.index(stop)]
        assert cut.choices[0].finish_reason == "stop"


async def test_a_repeated_prompt_computes_and_moves_at_most_one_block(cluster: Cluster, smollm2_dir: Path) -> None:
    """With several pods, a busy machine may delay the router's index lookup too long, so the test may try again."""
    prefills = [name for name in cluster.pods if name.startswith("prefill")]
    for attempt in range(1 if len(prefills) == 1 else 5):
        prompt = prompt_of(smollm2_dir, 4 * CHUNK + 90, 1234 + attempt)
        computed, cached, moved = await repeat(cluster, prompt, prefills)
        if computed <= BLOCK:
            break
    assert computed <= BLOCK
    assert cached >= len(prompt) - BLOCK
    assert moved <= 1


async def repeat(cluster: Cluster, prompt: list[int], prefills: list[str]) -> tuple[int, int, int]:
    """Sends a prompt twice. Returns computed prompt tokens, cached tokens and moved blocks of the second request."""
    async with openai.AsyncOpenAI(base_url=cluster.base_url, api_key="none", max_retries=0) as client:
        body = {"model": cluster.model, "prompt": prompt, "max_tokens": 4, "temperature": 0}
        first = await client.completions.create(**body)
        await asyncio.to_thread(cluster.check_idle)
        if len(prefills) > 1:
            await asyncio.sleep(1.0)  # pods publish their blocks to the index
        before = sum(cluster.info(name).computed.prefill for name in prefills)
        second = await client.completions.with_raw_response.create(**body)
        again = second.parse()
        assert again.choices[0].text == first.choices[0].text
        computed = sum(cluster.info(name).computed.prefill for name in prefills) - before
        await asyncio.to_thread(cluster.check_idle)
        url = cluster.base_url.removesuffix("/v1") + f"/debug/requests/{again.id}"
        timeline = (await client._client.get(url)).json()
        handed_off = next(event for event in timeline["events"] if event["event"] == "handed_off")
        return computed, again.usage.prompt_tokens_details.cached_tokens, handed_off["blocks"]


async def test_a_long_prompt_streams_its_blocks_under_the_prefill(cluster: Cluster, smollm2_dir: Path) -> None:
    """Four chunks: three quarters of the blocks arrive before the end of the last chunk, by order of events."""
    prompt = prompt_of(smollm2_dir, 4 * CHUNK, 4321)
    async with openai.AsyncOpenAI(base_url=cluster.base_url, api_key="none", max_retries=0) as client:
        answer = await client.completions.create(model=cluster.model, prompt=prompt, max_tokens=4, temperature=0)
        await asyncio.to_thread(cluster.check_idle)
        url = cluster.base_url.removesuffix("/v1") + f"/debug/requests/{answer.id}"
        events = (await client._client.get(url)).json()["events"]
        handed_off = next(event for event in events if event["event"] == "handed_off")
        assert handed_off["blocks"] == 4 * CHUNK // BLOCK
        assert handed_off["blocks_before_last_chunk"] >= 3 * handed_off["blocks"] // 4
