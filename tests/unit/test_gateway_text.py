"""Tokens to text: detokenizers compared with the full decode, stop strings with a plain search; the chat template."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers

from common.errors import InvalidRequest
from common.model.chat_template import ChatTemplate
from common.types import FinishReason, Token
from gateway.text.output import (
    ByteLevelDetokenizer,
    ChoiceOutput,
    StopStringScanner,
    WindowDetokenizer,
    make_detokenizer,
)
from gateway.text.tokenizer import TextTokenizer

TEXT = st.text(max_size=60)


@pytest.fixture(scope="module")
def smol(smollm2_dir: Path) -> TextTokenizer:
    return TextTokenizer(smollm2_dir)


@pytest.fixture(scope="module")
def metaspace(tmp_path_factory: pytest.TempPathFactory) -> TextTokenizer:
    """A vocabulary like Llama 2's: spaces as U+2581, unknown characters as <0xNN> tokens."""
    words = ["▁", "▁the", "▁quick", "a", "b", "c", "é", "世", "quick", "▁世界"]
    vocab = {w: i for i, w in enumerate(["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), *words])}
    raw = Tokenizer(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
    raw.normalizer = normalizers.Replace(" ", "▁")
    raw.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    raw.add_special_tokens(["<s>", "</s>"])
    path = tmp_path_factory.mktemp("metaspace")
    raw.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "</s>"}}))
    return TextTokenizer(path)


def pieces_of(tokenizer: TextTokenizer, ids: list[int]) -> list[str]:
    detok = make_detokenizer(tokenizer)
    return [*(detok.feed(i) for i in ids), detok.flush()]


def test_the_vocabulary_decides_the_detokenizer(smol: TextTokenizer, metaspace: TextTokenizer) -> None:
    assert isinstance(make_detokenizer(smol), ByteLevelDetokenizer)
    assert isinstance(make_detokenizer(metaspace), WindowDetokenizer)
    assert (smol.eos_ids, metaspace.eos_ids) == ((2,), (2,))


@pytest.mark.parametrize(("said", "ids"), [(-1, (2,)), ([-1, 4], (4, 2)), ([], (2,)), (7, (7, 2))])
def test_a_negative_eos_id_counts_as_none(metaspace: TextTokenizer, tmp_path: Path, said: Any, ids: Any) -> None:
    metaspace.raw.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(metaspace.config))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": said}))
    assert TextTokenizer(tmp_path).eos_ids == ids


@settings(max_examples=300, deadline=None)
@given(seed=st.integers(0, 2**32), size=st.integers(0, 40))
def test_random_byte_level_ids_give_the_full_decode(smol: TextTokenizer, seed: int, size: int) -> None:
    rng = random.Random(seed)
    # Low ids are single bytes: broken and split characters at every position.
    ids = [rng.randrange(280) if rng.random() < 0.6 else rng.randrange(smol.vocab_size) for _ in range(size)]
    assert "".join(pieces_of(smol, ids)) == smol.decode(ids)


@settings(max_examples=200, deadline=None)
@given(text=TEXT)
def test_text_comes_back_in_whole_characters(smol: TextTokenizer, text: str) -> None:
    ids = smol.encode(text, add_special_tokens=False)
    pieces = pieces_of(smol, ids)
    whole = smol.decode(ids)  # not always the text: this vocabulary lacks some bytes of rare characters
    assert "".join(pieces) == whole
    if "\ufffd" not in whole:
        assert not any("\ufffd" in piece for piece in pieces)


@settings(max_examples=200, deadline=None)
@given(text=TEXT)
def test_window_detokenizer_gives_the_full_decode(metaspace: TextTokenizer, text: str) -> None:
    ids = metaspace.encode(text, add_special_tokens=False)
    pieces = pieces_of(metaspace, ids)
    assert "".join(pieces) == metaspace.decode(ids)
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in pieces)


def test_token_pieces_join_to_the_text(smol: TextTokenizer, metaspace: TextTokenizer) -> None:
    for text in ("héllo 世界 🎉", "  two  spaces\n"):
        ids = smol.encode(text, add_special_tokens=False)
        assert b"".join(smol.token_bytes(i) for i in ids).decode() == text
    ids = metaspace.encode("the é 🎉", add_special_tokens=False)
    assert b"".join(metaspace.token_bytes(i) for i in ids).decode() == "the é 🎉"
    assert smol.token_bytes(2) == b"<|im_end|>"
    assert smol.token_bytes(10**6) == b""


@settings(max_examples=500, deadline=None)
@given(
    parts=st.lists(st.text("ab", max_size=4), max_size=12),
    stops=st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3),
)
def test_the_stop_string_scanner_equals_a_search_in_the_whole_text(parts: list[str], stops: list[str]) -> None:
    scanner, out = StopStringScanner(stops), ""
    given_so_far = ""
    for part in parts:
        given_so_far += part
        out += scanner.feed(part)
        assert given_so_far.startswith(out)
        if scanner.found:
            break
        longest = max((k for s in stops for k in range(len(s)) if given_so_far.endswith(s[:k])), default=0)
        assert len(given_so_far) - len(out) == longest  # only text that may become a stop string is held back
    whole = "".join(parts)
    # A streamed scan ends at the first stop string that completes; among those that complete together, the first begun.
    ends = [whole.find(s) + len(s) for s in stops if s in whole]
    assert scanner.found == bool(ends)
    if not scanner.found:
        assert out + scanner.flush() == whole
    else:
        cut = min(given_so_far.find(s) for s in stops if s in given_so_far)
        assert out == whole[:cut]


@given(
    parts=st.lists(st.text("ab", max_size=5), max_size=8),
    stops=st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3),
    early=st.integers(0, 8),
)
def test_a_stop_string_that_completes_too_early_is_content(parts: list[str], stops: list[str], early: int) -> None:
    scanner, out = StopStringScanner(stops), ""
    for number, part in enumerate(parts):
        out += scanner.feed(part, may_end=number >= early)
    whole, allowed = "".join(parts), len("".join(parts[:early]))
    ends = [at + len(stop) for stop in stops for at in range(len(whole)) if whole.startswith(stop, at)]
    assert scanner.found == any(end > allowed for end in ends)
    if not scanner.found:
        assert out + scanner.flush() == whole
    else:
        assert whole.startswith(out)


@pytest.mark.parametrize("min_tokens", [0, 3, 6])
def test_no_stop_string_ends_an_answer_before_min_tokens(smol: TextTokenizer, min_tokens: int) -> None:
    ids = smol.encode("one two three four five six seven eight", add_special_tokens=False)
    for size in (1, 2, len(ids)):
        output = ChoiceOutput(smol, [" "], logprobs=False, min_tokens=min_tokens)
        tokens = [Token(i, token) for i, token in enumerate(ids)]
        pieces = [output.add(tokens[at : at + size]) for at in range(0, len(ids), size)]
        assert output.finish is FinishReason.STOP
        assert output.num_tokens == max(2, min_tokens)
        assert "".join(piece.text for piece in pieces) == smol.decode(ids[: max(2, min_tokens) - 1])


def test_output_counts_stop_tokens_and_hides_their_text(smol: TextTokenizer) -> None:
    ids = smol.encode("one two three four", add_special_tokens=False)
    output = ChoiceOutput(smol, [" three"], logprobs=True)
    shown, text = [], ""
    for i, token in enumerate(ids):
        piece = output.add([Token(i, token, -1.0)])
        text += piece.text
        shown += [s.token.id for s in piece.reported]
        if piece.finish:
            break
    assert (text, output.finish, output.num_tokens) == ("one two", FinishReason.STOP, 3)
    assert smol.decode(shown) == "one two"


def test_output_flushes_text_held_back(smol: TextTokenizer) -> None:
    ids = smol.encode("one two", add_special_tokens=False)
    output = ChoiceOutput(smol, ["two and more"], logprobs=True)
    pieces = [output.add([Token(i, t, -1.0)]) for i, t in enumerate(ids)]
    pieces.append(output.add([Token(len(ids), 2, -1.0)], FinishReason.STOP))
    assert "".join(p.text for p in pieces) == "one two"
    assert [s.token.id for p in pieces for s in p.reported] == [*ids, 2]


def test_template_and_ids_are_those_of_transformers(smollm2_dir: Path, smol: TextTokenizer) -> None:
    from transformers import AutoTokenizer

    reference = AutoTokenizer.from_pretrained(smollm2_dir)
    template = ChatTemplate(smollm2_dir, smol.config)
    for messages in (
        [{"role": "user", "content": "Hi  there\n"}],
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "日本語"}],
        [
            {"role": "user", "content": "1+1?"},
            {"role": "assistant", "content": "2"},
            {"role": "user", "content": "why"},
        ],
    ):
        text = template.render(messages)
        assert text == reference.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        expected = reference.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        assert smol.encode(text, add_special_tokens=False) == list(expected)
    for text in ("Hello world 12345", " x", "é世🎉\n\n", "<|im_end|>"):
        assert smol.encode(text, add_special_tokens=True) == reference(text)["input_ids"]


def test_templates_that_reject_a_chat_or_do_harm(tmp_path: Path, smol: TextTokenizer) -> None:
    def render(source: str) -> str:
        (tmp_path / "chat_template.jinja").write_text(source)
        return ChatTemplate(tmp_path, smol.config).render([{"role": "user", "content": "x"}])

    assert render("{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}{% endfor %}ok") == "ok"
    assert render("{{ messages | tojson }}") == '[{"role": "user", "content": "x"}]'
    assert render("{{ bos_token }}{{ strftime_now('%Y') | length }}") == "<|im_start|>4"
    with pytest.raises(InvalidRequest, match="roles must alternate"):
        render("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(InvalidRequest):
        render("{{ messages.__class__.__mro__ }}{{ messages.append(1) }}")


def test_a_base_model_has_no_template(tmp_path: Path, metaspace: TextTokenizer) -> None:
    with pytest.raises(InvalidRequest, match="no chat template"):
        ChatTemplate(tmp_path, metaspace.config).render([{"role": "user", "content": "x"}])
