"""The JSON of answers: texts that UTF-8 cannot express, and log-probabilities by the texts of tokens."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from common.types import Token, TokenLogprob
from gateway.api.http.json import encoded
from gateway.api.openai.generate import CompletionEncoder
from gateway.serving.request import GenerationSpec
from gateway.text.output import OutputPiece, ReportedToken
from tests.rigs.gateway.gateway_rig import texts


def test_half_a_surrogate_pair_that_leaves() -> None:
    text = encoded({"a\ud83d": ["\ude00", {"b": "\ud83d\ude00x"}], "c": "é"})
    assert json.loads(text) == {"a\ufffd": ["\ufffd", {"b": "\ufffd\ufffdx"}], "c": "é"}


def test_alternatives_of_equal_text_stay_apart(smollm2_dir: Path) -> None:
    tokenizer, _ = texts(smollm2_dir)
    emoji = tokenizer.encode("\U0001f600", add_special_tokens=False)
    broken = [i for i in range(tokenizer.vocab_size) if "\ufffd" in tokenizer.token_bytes(i).decode("utf-8", "replace")]
    assert len(emoji) > 1
    assert len(broken) > 20
    chosen, *others = dict.fromkeys([emoji[0], *broken[:20]])
    top = tuple(TokenLogprob(token, -1.0 - at) for at, token in enumerate(others))
    encoder = CompletionEncoder("r", GenerationSpec(model="m", logprobs=20), tokenizer, legacy=False)
    token = Token(0, chosen, -0.5, top)
    [chunk] = encoder.encode_piece(0, OutputPiece("", (ReportedToken(token, 0),), (token,)))
    logprobs = chunk["choices"][0]["logprobs"]
    [name], [alternatives] = logprobs["tokens"], logprobs["top_logprobs"]
    assert name.startswith("bytes:\\x")
    assert alternatives[name] == logprobs["token_logprobs"][0] == -0.5
    assert len(alternatives) == 1 + len(others)
    assert sorted(alternatives.values(), reverse=True) == [-0.5, *(t.logprob for t in top)]


def test_tokens_of_equal_bytes_are_named_by_their_ids(smollm2_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer, _ = texts(smollm2_dir)
    monkeypatch.setattr(tokenizer, "token_bytes", lambda _token: b"same")
    encoder = CompletionEncoder("r", GenerationSpec(model="m", logprobs=2), tokenizer, legacy=False)
    token = Token(0, 7, -0.5, (TokenLogprob(8, -0.25), TokenLogprob(7, -0.5), TokenLogprob(9, -3.0)))
    [chunk] = encoder.encode_piece(0, OutputPiece("", (ReportedToken(token, 0),), (token,)))
    found = chunk["choices"][0]["logprobs"]["top_logprobs"][0]
    assert found == {"same": -0.5, "token_id:8": -0.25, "token_id:9": -3.0}
