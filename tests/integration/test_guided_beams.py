"""Beam search with a grammar on a tiny model: the beams are the best of all answers that the grammar allows."""

from __future__ import annotations

import itertools
import math
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer

from common.grammar import compiler as grammars
from common.types import FinishReason, Grammar, SamplingParams, Token, TokenLogprob, ValidRequest
from engine.llm import LLM
from gateway.serving.answers import Beam, beam_search
from gateway.serving.request import BeamSearchParams
from tests.rigs.engine.draft_models import tiny_target

VOCAB, EOS = 49152, 2
PROMPT = (5, 300, 7, 9)
#: Finite languages, and all of their words. Some words begin others, so an answer may end before it must. No character
#: is the only possible one: llguidance forces the usual token there.
LANGUAGES = {
    "[ab]{1,3}": [w for n in (1, 2, 3) for w in map("".join, itertools.product("ab", repeat=n))],
    "[xy]([ab]|[cd]{2})?": [x + rest for x in "xy" for rest in ("", "a", "b", "cc", "cd", "dc", "dd")],
    "[12]{1,2}[05]?": [a + b + c for a in "12" for b in ("", "1", "2") for c in ("", "0", "5")],
}
MANY = 64  # Alternatives per step: more than any state of these languages allows


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory, smollm2_dir: Path) -> Path:
    path = tiny_target(tmp_path_factory.mktemp("guided"), vocab=VOCAB)
    shutil.copy(smollm2_dir / "tokenizer.json", path)
    return path


@pytest.fixture(scope="module")
def llm(directory: Path) -> LLM:
    return LLM(directory, device="cpu", threads=1, block_size=4, num_blocks=256)


@pytest.fixture(scope="module")
def reference(directory: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()


def by_engine(llm: LLM, grammar: Grammar, stops: tuple[int, ...], min_tokens: int = 0) -> Any:
    """Returns an `expand` that asks the engine as the gateway asks a pod."""
    number = iter(range(1 << 20))

    async def expand(beams: Sequence[Beam]) -> list[tuple[TokenLogprob, ...]]:
        engine, rows = llm.engine, list[str]()
        for beam in beams:
            ids = tuple(token.id for token in beam.tokens)
            params = SamplingParams(
                temperature=0.0,
                max_tokens=len(ids) + 1,
                min_tokens=min(min_tokens, len(ids) + 1),
                logprobs=MANY,
                stop_token_ids=stops,
                allowed_logprobs=True,
            )
            request = ValidRequest(f"r{next(number)}", "m", PROMPT, params, grammar=grammar, output_ids=ids)
            engine.add(engine.new_sequence(request, output=ids))
            rows.append(request.request_id)
        found: dict[str, Token] = {}
        while len(found) < len(rows):
            for output in engine.step().outputs:
                assert output.error is None, output.error
                found |= dict.fromkeys([output.seq.request_id] * len(output.tokens), *output.tokens)
        return [found[row].top for row in rows]

    return expand


def answers(words: Sequence[str], tokenizer: Tokenizer, max_tokens: int, min_tokens: int) -> set[tuple[int, ...]]:
    """Returns all token sequences of all words, with a stop token where another word goes on; cut at max_tokens."""
    pieces = {i: tokenizer.id_to_token(i).replace("\u0120", " ") for i in range(3, VOCAB)}
    useful = [(i, text) for i, text in pieces.items() if any(text in word for word in words)]
    found = set[tuple[int, ...]]()

    def grow(ids: tuple[int, ...], text: str) -> None:
        longer = any(word != text and word.startswith(text) for word in words)
        if text in words and not longer:
            found.add(ids)
            return
        if len(ids) == max_tokens:
            found.add(ids)
            return
        if text in words and len(ids) >= min_tokens:
            found.add((*ids, EOS))
        for i, piece in useful:
            if any(word.startswith(text + piece) for word in words):
                grow((*ids, i), text + piece)

    grow((), "")
    return found


@pytest.mark.parametrize("min_tokens", [0, 2])
@pytest.mark.parametrize("penalty", [0.0, 1.0, -1.0])
@pytest.mark.parametrize("language", LANGUAGES)
async def test_a_wide_search_finds_the_best_of_all_answers(
    language: str, penalty: float, min_tokens: int, llm: LLM, reference: Any
) -> None:
    words, max_tokens = LANGUAGES[language], 5
    assert all(re.fullmatch(language, word) for word in words)
    params = BeamSearchParams(1000, penalty, "never")

    def score(ids: tuple[int, ...]) -> float:
        with torch.inference_mode():
            logprobs = reference(torch.tensor([[*PROMPT, *ids]])).logits[0, len(PROMPT) - 1 : -1].log_softmax(-1)
        return params.score(sum(float(row[i]) for row, i in zip(logprobs, ids, strict=True)), len(ids))

    every = answers(words, llm.tokenizer, max_tokens, min_tokens)
    grammar = grammars.from_regex(language, field="f")
    expand = by_engine(llm, grammar, (EOS,), min_tokens)
    found = await beam_search(expand, params, max_tokens=max_tokens, min_tokens=min_tokens, stops=(EOS,), num_top=1)
    got = [tuple(token.id for token in beam.tokens) for beam in found]
    assert set(got) == every
    scores = {ids: score(ids) for ids in every}
    for beam, ids in zip(found, got, strict=True):
        assert params.score(beam.logprob, len(ids)) == pytest.approx(scores[ids], abs=1e-4)
        if len(ids) < max_tokens:
            assert beam.finish is FinishReason.STOP
    assert [scores[ids] for ids in got] == pytest.approx(sorted(scores.values(), reverse=True), abs=1e-4)


async def test_a_narrow_search_is_that_of_masked_candidates(llm: LLM, reference: Any) -> None:
    """Three beams, against a search whose candidates come from the reference and a list of all answers."""
    language = "[ab]{1,3}"
    every = answers(LANGUAGES[language], llm.tokenizer, 5, 0)

    async def expand(beams: Sequence[Beam]) -> list[list[TokenLogprob]]:
        rows = []
        for beam in beams:
            ids = tuple(token.id for token in beam.tokens)
            nexts = sorted({other[len(ids)] for other in every if other[: len(ids)] == ids and len(other) > len(ids)})
            with torch.inference_mode():
                logprobs = reference(torch.tensor([[*PROMPT, *ids]])).logits[0, -1].log_softmax(-1)
            rows.append(sorted((TokenLogprob(i, float(logprobs[i])) for i in nexts), key=lambda t: -t.logprob))
        return rows

    for early in (False, True, "never"):
        params = BeamSearchParams(3, 1.0, early)  # type: ignore[arg-type]
        wanted = await beam_search(expand, params, max_tokens=5, stops=(EOS,))
        grammar = grammars.from_regex(language, field="f")
        found = await beam_search(by_engine(llm, grammar, (EOS,)), params, max_tokens=5, stops=(EOS,))
        assert [[t.id for t in beam.tokens] for beam in found] == [[t.id for t in beam.tokens] for beam in wanted]
        assert [beam.finish for beam in found] == [beam.finish for beam in wanted]
        assert all(math.isclose(a.logprob, b.logprob, abs_tol=1e-4) for a, b in zip(found, wanted, strict=True))


async def test_beams_with_a_grammar_beside_other_requests(llm: LLM) -> None:
    """Alternatives of a request without the flag stay those of the whole vocabulary, also in the same step."""
    engine = llm.engine
    grammar = grammars.from_regex("[ab]{3}", field="f")
    plain = SamplingParams(temperature=0.0, max_tokens=1, logprobs=3)
    requests = [
        ValidRequest("plain", "m", PROMPT, plain),
        ValidRequest("grammar", "m", PROMPT, plain, grammar=grammar),
        ValidRequest(
            "beam",
            "m",
            PROMPT,
            SamplingParams(temperature=0.0, max_tokens=1, logprobs=3, allowed_logprobs=True),
            grammar=grammar,
        ),
    ]
    for request in requests:
        engine.add(engine.new_sequence(request))
    found: dict[str, Token] = {}
    while len(found) < len(requests):
        found |= {output.seq.request_id: token for output in engine.step().outputs for token in output.tokens}
    assert found["plain"].top == found["grammar"].top
    texts = [llm.tokenizer.id_to_token(t.token) for t in found["beam"].top]
    assert len(texts) == 3
    assert all(set(text) <= {"a", "b"} for text in texts)
    assert found["beam"].top[0].token == found["beam"].id == found["grammar"].id
