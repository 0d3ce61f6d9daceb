"""Grammars, sampler extras and log-probabilities of prompts through gateway, prefill and decode, over REST and gRPC."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import httpx
import jsonschema
import pytest
import torch
from tokenizers import Tokenizer

from common.pb import inference_pb2, inference_pb2_grpc
from tests.rigs.stack.cluster import Cluster
from tests.rigs.stack.oracle import Oracle

SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}, "size": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "size"],
    "additionalProperties": False,
}
PROMPT = "The capital of France is a city that"
TOLERANCE = 1e-3

pytestmark = pytest.mark.parametrize("cluster", ["1P+1D"], indirect=True)


@pytest.fixture
def tokenizer(smollm2_dir: Path) -> Tokenizer:
    return Tokenizer.from_file(str(smollm2_dir / "tokenizer.json"))


def post(cluster: Cluster, path: str, **fields: Any) -> Any:
    response = httpx.post(f"{cluster.base_url}/{path}", json={"model": cluster.model, **fields}, timeout=120)
    return {**response.json(), "status": response.status_code}


def complete(cluster: Cluster, **fields: Any) -> dict[str, Any]:
    body = post(cluster, "completions", **{"prompt": PROMPT, "temperature": 0.0, "max_tokens": 8, **fields})
    assert body["status"] == 200, body
    choice: dict[str, Any] = body["choices"][0]
    return choice


def generate(cluster: Cluster, **fields: Any) -> list[inference_pb2.GenerateResponse]:
    with grpc.insecure_channel(cluster.stack.grpc_address) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        request = inference_pb2.GenerateRequest(
            **{"model": cluster.model, "text": PROMPT, "temperature": 0.0, "max_tokens": 8, **fields}
        )
        return list(stub.Generate(request, timeout=120))


def rest_text(cluster: Cluster, **fields: Any) -> str:
    text: str = complete(cluster, **fields)["text"]
    return text


def grpc_text(cluster: Cluster, **fields: Any) -> str:
    return "".join(part.text for part in generate(cluster, **fields))


@pytest.fixture(params=[rest_text, grpc_text], ids=["rest", "grpc"])
def text_of(request: pytest.FixtureRequest) -> Callable[..., str]:
    found: Callable[..., str] = request.param
    return found


def test_chats_answer_by_their_schema(cluster: Cluster) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "place", "schema": SCHEMA, "strict": True}}
    for temperature in (0.0, 1.0):
        body = post(
            cluster,
            "chat/completions",
            messages=[{"role": "user", "content": "A city?"}],
            response_format=form,
            temperature=temperature,
            seed=3,
            max_tokens=60,
        )
        assert body["choices"][0]["finish_reason"] == "stop"
        jsonschema.validate(json.loads(body["choices"][0]["message"]["content"]), SCHEMA)
        assert "{" not in body["choices"][0]["message"]["content"][1:]


def test_one_grammar_holds_for_the_first_token_and_the_rest(cluster: Cluster, text_of: Callable[..., str]) -> None:
    pattern = "[A-F]{2}-[0-9]{3}"
    rest = {"structured_outputs": {"regex": pattern}}
    over_grpc = {"structured_output": inference_pb2.StructuredOutput(regex=pattern)}
    text = text_of(cluster, max_tokens=20, **(rest if text_of is rest_text else over_grpc))
    assert len(text) == 6
    assert text[:2].isalpha()
    assert text[:2].isupper()
    assert text[3:].isdigit()


def test_an_answer_of_one_token_ends_on_prefill(cluster: Cluster) -> None:
    choice = complete(cluster, structured_outputs={"choice": [" Paris", " Rome"]}, max_tokens=1)
    assert (choice["text"], choice["finish_reason"]) in ((" Paris", "stop"), (" Rome", "stop"))


def test_what_cannot_be_enforced_is_refused_by_name(cluster: Cluster) -> None:
    body = post(cluster, "completions", prompt="x", structured_outputs={"json": {"uniqueItems": True, "type": "array"}})
    assert body["status"] == 400
    assert "uniqueItems" in body["error"]["message"]
    assert body["error"]["param"].startswith("structured_outputs")


def test_nothing_but_allowed_tokens(cluster: Cluster, text_of: Callable[..., str], tokenizer: Tokenizer) -> None:
    allowed = {tokenizer.token_to_id(token) for token in ("a", "b", "c")}
    assert set(text_of(cluster, allowed_token_ids=sorted(allowed))) <= set("abc")
    assert not set(text_of(cluster)) <= set("abc")


def test_bad_words_do_not_come(cluster: Cluster, text_of: Callable[..., str]) -> None:
    plain = text_of(cluster)
    words = plain.split()[1:4]
    assert words
    other = text_of(cluster, bad_words=words)
    assert other != plain
    assert not set(words) & set(other.split())
    two = " ".join(plain.split()[:2])  # several tokens: the answer may have the first, but not the second after it
    assert two not in text_of(cluster, bad_words=[two])


def test_a_stop_string_may_be_part_of_the_answer(cluster: Cluster, text_of: Callable[..., str]) -> None:
    stop = text_of(cluster).split()[2]
    hidden, shown = (text_of(cluster, stop=[stop], include_stop_str_in_output=flag) for flag in (False, True))
    assert shown == hidden + stop


@pytest.fixture(scope="module")
def expected(smollm2_dir: Path, oracle: Oracle) -> tuple[list[int], torch.Tensor]:
    """The ids of a prompt and the reference log-probabilities after each id."""
    ids = Tokenizer.from_file(str(smollm2_dir / "tokenizer.json")).encode(PROMPT * 6).ids
    with torch.inference_mode():
        return ids, oracle.model(torch.tensor([ids])).logits[0].log_softmax(-1)


def test_log_probabilities_of_a_cached_prompt_are_those_of_transformers(
    cluster: Cluster, expected: tuple[list[int], torch.Tensor]
) -> None:
    ids, logprobs = expected
    text = PROMPT * 6
    for _ in range(2):
        post(cluster, "completions", prompt=text, max_tokens=1)
    body = post(cluster, "completions", prompt=text, max_tokens=1, prompt_logprobs=2)
    assert body["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    found = body["choices"][0]["prompt_logprobs"]
    assert len(found) == len(ids)
    assert found[0] is None
    for at in range(1, len(ids)):
        line = logprobs[at - 1]
        assert found[at][str(ids[at])]["logprob"] == pytest.approx(float(line[ids[at]]), abs=TOLERANCE)
        best = sorted((entry["logprob"] for entry in found[at].values()), reverse=True)[:2]
        assert best == pytest.approx(line.topk(2).values.tolist(), abs=TOLERANCE)
    [scores] = [
        p.prompt_logprobs
        for p in generate(cluster, text=text, max_tokens=1, prompt_logprobs=2)
        if p.HasField("prompt_logprobs")
    ]
    want = [float(logprobs[at - 1][ids[at]]) for at in range(1, len(ids))]
    assert list(scores.logprobs) == pytest.approx(want, abs=TOLERANCE)
    chat = post(
        cluster, "chat/completions", messages=[{"role": "user", "content": "Hi"}], max_tokens=1, prompt_logprobs=0
    )
    assert len(chat["prompt_logprobs"]) == chat["usage"]["prompt_tokens"]


def test_an_echo_scores_a_text_as_evaluation_harnesses_ask(
    cluster: Cluster, expected: tuple[list[int], torch.Tensor]
) -> None:
    ids, logprobs = expected
    text = PROMPT * 6
    body = post(cluster, "completions", prompt=text, echo=True, logprobs=1, max_tokens=0)
    choice = body["choices"][0]
    assert choice["text"] == text
    assert body["usage"]["completion_tokens"] == 0
    echoed = choice["logprobs"]
    assert echoed["token_logprobs"][0] is None
    assert echoed["top_logprobs"][0] is None
    want = [float(logprobs[at - 1][ids[at]]) for at in range(1, len(ids))]
    assert echoed["token_logprobs"][1:] == pytest.approx(want, abs=TOLERANCE)
    for token, offset in zip(echoed["tokens"], echoed["text_offset"], strict=True):
        assert text[offset:].startswith(token)


def test_an_echo_comes_before_the_answer(cluster: Cluster, text_of: Callable[..., str]) -> None:
    assert text_of(cluster, echo=True) == PROMPT + text_of(cluster)


def test_offsets_of_an_answer_count_from_the_echoed_prompt(cluster: Cluster) -> None:
    choice = complete(cluster, echo=True, logprobs=0)
    echoed = choice["logprobs"]
    assert "".join(echoed["tokens"]) == choice["text"]
    assert all(choice["text"][o:].startswith(t) for t, o in zip(echoed["tokens"], echoed["text_offset"], strict=True))
    assert None not in echoed["token_logprobs"][1:]
