"""Answers with many numbers: other tasks run while they are made, samples share their prompt, and sizes are bounded."""

from __future__ import annotations

import json
import math
import random
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

import orjson
import pytest

from common.errors import InvalidRequest
from common.types import FinishReason, PromptLogprobs, Token, TokenLogprob
from gateway.api.http.json import encoded
from gateway.api.openai.embeddings import VECTORS_PER_LOOP_TURN, EmbeddingsHandler
from gateway.api.openai.generate import TOKENS_PER_LOOP_TURN, AnswerEncoder, ChatEncoder, CompletionEncoder
from gateway.api.openai.requests import MAX_ALLOWED_IDS, parse_completion
from gateway.api.openai.responses.store import ResponseStore, StoredResponse
from gateway.serving.choice import CompleteAnswer, PromptReport
from gateway.serving.pair_scorer import PAIRS_PER_LOOP_TURN, cosines
from gateway.serving.prompt_runner import PromptResults
from gateway.serving.request import MAX_PROMPT_SCORES, GenerationSpec, Usage, check_prompt_scores
from gateway.text.output import ReportedToken, prompt_tokens_with_logprobs
from tests.rigs.waiting import turns_while


class Words:
    """A tokenizer of words like "w5". It counts the texts that it was asked for."""

    def __init__(self) -> None:
        self.asked = 0

    def token_bytes(self, token: int) -> bytes:
        self.asked += 1
        return b"w%d" % token


def prompt_part(length: int) -> PromptLogprobs:
    """The log-probabilities of a prompt of `length` tokens, with one alternative each."""
    numbers = range(length - 1)
    return PromptLogprobs(
        1, tuple(-float(i) for i in numbers), (2,) * (length - 1), tuple(numbers), tuple(-i / 2 for i in numbers)
    )


def reported(count: int) -> tuple[ReportedToken, ...]:
    tokens = [Token(i, i, -i / 4, (TokenLogprob(i, -i / 4), TokenLogprob(i + 1, -float(i)))) for i in range(count)]
    return tuple(ReportedToken(token, 2 * token.index) for token in tokens)


def encoder(kind: type[AnswerEncoder], tokenizer: Any) -> AnswerEncoder:
    return kind("r", GenerationSpec(model="m", logprobs=2, prompt_logprobs=1), tokenizer, legacy=False)


@pytest.mark.parametrize("kind", [CompletionEncoder, ChatEncoder])
async def test_other_tasks_run_while_an_answer_is_encoded(
    kind: type[AnswerEncoder], monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = prompt_tokens_with_logprobs(range(3000), [prompt_part(3000)], 1)
    counts = (5 * TOKENS_PER_LOOP_TURN + 1, 0, *[300] * 40)  # a long answer, and many short ones
    answers = [CompleteAnswer("x", reported(n), FinishReason.STOP, None, prompt) for n in counts]
    whole, turns = await turns_while(encoder(kind, Words()).encode_answer(answers, Usage()))
    assert turns > sum(counts) // TOKENS_PER_LOOP_TURN
    monkeypatch.setattr("gateway.api.openai.generate.TOKENS_PER_LOOP_TURN", 1 << 30)
    at_once, turns = await turns_while(encoder(kind, Words()).encode_answer(answers, Usage()))
    assert turns < 5
    assert json.loads(encoded(whole)) == json.loads(encoded(at_once))


async def test_a_whole_answer_has_the_log_probabilities_of_the_pieces() -> None:
    tokens = reported(5)
    answer = CompleteAnswer("x", tokens, FinishReason.STOP)
    completions, chats = encoder(CompletionEncoder, Words()), encoder(ChatEncoder, Words())
    [choice] = json.loads(encoded(await completions.encode_answer([answer], Usage())))["choices"]
    assert choice["logprobs"] == {
        "tokens": [f"w{i}" for i in range(5)],
        "token_logprobs": [-i / 4 for i in range(5)],
        "top_logprobs": [{f"w{i}": -i / 4, f"w{i + 1}": -float(i)} for i in range(5)],
        "text_offset": [0, 2, 4, 6, 8],
    }
    [choice] = json.loads(encoded(await chats.encode_answer([answer], Usage())))["choices"]
    assert [token["token"] for token in choice["logprobs"]["content"]] == [f"w{i}" for i in range(5)]
    assert choice["logprobs"]["refusal"] is None
    empty = CompleteAnswer("", (), FinishReason.STOP)
    [choice] = json.loads(encoded(await completions.encode_answer([empty], Usage())))["choices"]
    assert choice["logprobs"] == {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    [choice] = json.loads(encoded(await chats.encode_answer([empty], Usage())))["choices"]
    assert choice["logprobs"] == {"content": [], "refusal": None}


async def test_the_samples_of_a_prompt_share_its_tokens_and_their_json() -> None:
    dispatch: Any = SimpleNamespace(request=SimpleNamespace(prompt_ids=range(50)), prompt_logprobs=[prompt_part(50)])
    report = PromptReport(Words(), dispatch)  # type: ignore[arg-type]
    tokens = report.tokens(1)
    assert tokens == prompt_tokens_with_logprobs(range(50), [prompt_part(50)], 1)
    assert report.tokens(1) is tokens
    assert report.tokens(0)[7].top == ()
    answers = [CompleteAnswer("x", (), FinishReason.STOP, None, report.tokens(1)) for _ in range(20)]
    one, many = Words(), Words()
    await encoder(CompletionEncoder, one).encode_answer(answers[:1], Usage())
    whole = await encoder(CompletionEncoder, many).encode_answer(answers, Usage())
    assert many.asked == one.asked > 0
    lines = [choice["prompt_logprobs"] for choice in json.loads(encoded(whole))["choices"]]
    assert (lines[0][0], lines[0][3]["3"]["decoded_token"]) == (None, "w3")
    assert lines == [lines[0]] * 20


@pytest.mark.parametrize(
    ("fields", "tokens", "field"),
    [
        ({"prompt_logprobs": 20, "n": 128}, 8000, "prompt_logprobs"),
        ({"prompt_logprobs": 20, "n": 2, "best_of": 128}, 8000, "prompt_logprobs"),
        ({"logprobs": 20, "echo": True, "n": 128}, 8000, "logprobs"),
        ({"prompt_logprobs": 1, "logprobs": 1, "echo": True}, MAX_PROMPT_SCORES // 4 + 1, "logprobs"),
        ({"prompt_logprobs": 1, "logprobs": 1, "echo": True}, MAX_PROMPT_SCORES // 4, None),
        ({"prompt_logprobs": 0}, MAX_PROMPT_SCORES + 1, "prompt_logprobs"),
        ({"prompt_logprobs": 0}, MAX_PROMPT_SCORES, None),
        ({"prompt_logprobs": 20}, 8192, None),
        ({"logprobs": 20, "n": 128}, 1 << 20, None),
        ({"echo": True, "n": 128}, 1 << 20, None),
    ],
)
def test_log_probabilities_of_prompts_are_bounded(fields: dict[str, Any], tokens: int, field: str | None) -> None:
    spec = GenerationSpec(model="m", **fields)
    if field is None:
        check_prompt_scores(spec, tokens)
        return
    with pytest.raises(InvalidRequest, match=str(MAX_PROMPT_SCORES)) as e:
        check_prompt_scores(spec, tokens)
    assert e.value.field == field


def test_allowed_ids_of_many_prompts_are_bounded() -> None:
    body = {"model": "m", "prompt": ["x"] * 64, "allowed_token_ids": list(range(MAX_ALLOWED_IDS // 64))}
    assert len(parse_completion(body).prompts) == 64
    most = list(range(1 << 18))
    assert parse_completion({**body, "prompt": "x", "allowed_token_ids": most}).spec.sampling.allowed_token_ids
    with pytest.raises(InvalidRequest, match="64 prompts") as e:
        parse_completion({**body, "allowed_token_ids": list(range(MAX_ALLOWED_IDS // 64 + 1))})
    assert e.value.field == "allowed_token_ids"


async def test_other_tasks_run_while_embeddings_are_compared() -> None:
    draw = random.Random(5)
    vectors = [[draw.uniform(-1, 1) for _ in range(8)] for _ in range(8)]
    vectors[3] = [0.0] * 8
    pairs = [(i % 2 + 2, i % 8) for i in range(50 * PAIRS_PER_LOOP_TURN)]
    scores, turns = await turns_while(cosines(vectors, vectors, pairs))
    assert turns >= 50
    for (query, document), score in zip(pairs, scores, strict=True):
        one, other = vectors[query], vectors[document]
        length = math.hypot(*one) * math.hypot(*other)
        assert score == pytest.approx(sum(a * b for a, b in zip(one, other, strict=True)) / length if length else 0.0)


@pytest.mark.parametrize("encoding", ["float", "base64"])
async def test_other_tasks_run_while_embeddings_are_encoded(encoding: str) -> None:
    sent: list[Any] = []
    count = 20 * VECTORS_PER_LOOP_TURN

    async def compute(*_args: Any, **_kwargs: Any) -> PromptResults:
        return PromptResults([[3.0, 4.0, 0.5]] * count, count)

    async def send_json(_status: int, body: Any) -> None:
        sent.append(json.loads(encoded(body)))

    handler = EmbeddingsHandler(SimpleNamespace(compute=compute))  # type: ignore[arg-type]
    body = {"model": "m", "input": ["x"] * count, "dimensions": 2, "encoding_format": encoding}
    _, turns = await turns_while(handler.serve(body, SimpleNamespace(send_json=send_json), None))  # type: ignore[arg-type]
    assert turns >= 20
    vector = [0.6, 0.8] if encoding == "float" else "mpkZP83MTD8="
    assert sent[0]["data"] == [{"object": "embedding", "index": i, "embedding": vector} for i in range(count)]


class Countable(list[Any]):
    """A list that counts the lists of its kind."""

    made = 0

    def __init__(self, *entries: Any) -> None:
        super().__init__(*entries)
        Countable.made += 1


async def test_a_stored_response_is_not_copied_before_it_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    store = ResponseStore("redis://127.0.0.1:1", ttl_s=60, max_bytes_per_tenant=1)
    written: list[bytes] = []
    dumps = orjson.dumps

    def dump(value: Any) -> bytes:
        written.append(dumps(value))
        return written[-1]

    monkeypatch.setattr(orjson, "dumps", dump)
    item = {"id": "i", "type": "message", "content": [{"text": "é\n"}]}
    response = StoredResponse({"id": "r", "output": [item]}, Countable([item]), Countable([item, item]))
    try:
        before = Countable.made
        assert not await store.save("t", response)  # larger than a tenant may store
        assert Countable.made == before
    finally:
        await store.close()
    assert written == [dumps(asdict(response))]
    assert StoredResponse(**orjson.loads(written[0])) == response
