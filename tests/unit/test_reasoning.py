"""Reasoning sections are split from answers, however the text is cut, and their tokens are counted."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import ConfigError
from common.model.chat_template import ChatTemplate
from common.types import FinishReason, Token
from gateway.text.output import ChoiceOutput, OutputParserConfig
from gateway.text.reasoning import (
    REASONING_FORMATS,
    ReasoningFormat,
    ReasoningParser,
    ReasoningSection,
    choose_reasoning_format,
)
from gateway.text.tokenizer import TextTokenizer
from gateway.text.tools.format import assemble
from gateway.text.tools.json_formats import HermesFormat
from tests.rigs.tool_formats import TEMPLATES

THINK = ReasoningFormat("think", "<think>", "</think>")


def split(text: str, begins: ReasoningSection, sizes: list[int]) -> tuple[str, str]:
    reader, thought, answer, at = ReasoningParser(THINK, begins), "", "", 0
    for size in [*sizes, len(text)]:
        more = reader.feed(text[at : at + size])
        thought, answer, at = thought + more[0], answer + more[1], at + size
    more = reader.finish()
    return thought + more[0], answer + more[1]


@pytest.mark.parametrize(
    ("begins", "text", "thought", "answer"),
    [
        (ReasoningSection.BEFORE, "<think>\nhm, 1 < 2\n</think>\n\nHi.\n", "hm, 1 < 2", "Hi.\n"),
        (ReasoningSection.BEFORE, "\n <think>hm</think>Hi", "hm", "Hi"),
        (ReasoningSection.BEFORE, "Hi <think>x</think>", "", "Hi <think>x</think>"),
        (ReasoningSection.BEFORE, "<thin", "", "<thin"),
        (ReasoningSection.BEFORE, " ", "", " "),
        (ReasoningSection.INSIDE, "hm\n\nhm</think>Hi", "hm\n\nhm", "Hi"),
        (ReasoningSection.INSIDE, "<think>hm</think>Hi", "hm", "Hi"),  # the model repeats what the template said
        (ReasoningSection.INSIDE, "hm </thin", "hm </thin", ""),
        (ReasoningSection.INSIDE, "\n</think>\n", "", ""),
        (ReasoningSection.INSIDE, "a</think>b</think>c", "a", "b</think>c"),
        (ReasoningSection.AFTER, "<think>x</think>", "", "<think>x</think>"),
    ],
)
@given(sizes=st.lists(st.integers(1, 5), max_size=20))
def test_sections(begins: ReasoningSection, text: str, thought: str, answer: str, sizes: list[int]) -> None:
    assert split(text, begins, sizes) == (thought, answer)


@given(
    text=st.lists(st.sampled_from(["<think>", "</think>", "<", "th", " ", "\n", "x"]), max_size=8).map("".join),
    begins=st.sampled_from(ReasoningSection),
    sizes=st.lists(st.integers(1, 5), max_size=20),
)
def test_the_split_does_not_depend_on_the_pieces(text: str, begins: ReasoningSection, sizes: list[int]) -> None:
    assert split(text, begins, sizes) == split(text, begins, [])


def test_the_prompt_decides_where_the_answer_begins() -> None:
    assert ReasoningSection.from_prompt(THINK, "<|assistant|>\n") is ReasoningSection.BEFORE
    assert ReasoningSection.from_prompt(THINK, "<|assistant|>\n<think>\n") is ReasoningSection.INSIDE
    assert ReasoningSection.from_prompt(THINK, "<|assistant|>\n<think>\n\n</think>\n\n") is ReasoningSection.AFTER
    implied = ReasoningFormat("x", "<think>", "</think>", starts_inside=True)
    assert ReasoningSection.from_prompt(implied, "<|assistant|>\n") is ReasoningSection.INSIDE


def test_the_model_or_the_flag_decides_the_format() -> None:
    assert choose_reasoning_format("auto", "{% if '</think>' in content %}", ()) == REASONING_FORMATS[0]
    assert choose_reasoning_format("auto", "", {"[THINK]", "[/THINK]"}) == REASONING_FORMATS[2]
    assert choose_reasoning_format("auto", "plain", {"<|im_end|>"}) is None
    assert choose_reasoning_format("none", "</think>", ()) is None
    assert all(choose_reasoning_format(style.name, "", ()) == style for style in REASONING_FORMATS)
    with pytest.raises(ConfigError, match="reasoning_parser: 'x' is not one of"):
        choose_reasoning_format("x", "", ())


BEFORE, INSIDE, AFTER = ReasoningSection.BEFORE, ReasoningSection.INSIDE, ReasoningSection.AFTER


@pytest.mark.parametrize(
    ("name", "variables", "section"),
    [
        ("qwen3-0.6b", {}, BEFORE),
        ("qwen3-0.6b", {"enable_thinking": False}, AFTER),
        ("qwq-32b", {}, AFTER),
        ("qwq-32b", {"enable_thinking": True}, INSIDE),
        ("deepseek-v3.1", {}, AFTER),
        ("deepseek-v3.1", {"thinking": True}, INSIDE),
        ("deepseek-r1", {}, BEFORE),
        ("glm-4.5", {}, BEFORE),
        ("glm-4.5", {"enable_thinking": False}, AFTER),
        ("glm-4.6", {}, BEFORE),
        ("kimi-k2-thinking", {}, BEFORE),
        ("minimax-m2", {}, INSIDE),
        ("seed-oss", {}, BEFORE),
        ("seed-oss", {"thinking_budget": 0}, AFTER),
    ],
)
def test_where_the_answers_of_vendors_templates_begin(
    name: str, variables: dict[str, object], section: ReasoningSection
) -> None:
    template = ChatTemplate(TEMPLATES, {}, file=TEMPLATES / f"{name}.jinja")
    chosen = choose_reasoning_format("auto", template.source, ())
    assert chosen is not None
    assert chosen.name == ("seed_oss" if name == "seed-oss" else "think")
    prompt = template.render([{"role": "user", "content": "Hi"}], variables)
    assert ReasoningSection.from_prompt(chosen, prompt) is section


def test_models_that_show_no_sign_of_reasoning_are_known_by_architecture_and_name() -> None:
    for name in ("minimax-m1", "kimi-k2-instruct", "qwen3-coder", "deepseek-v3", "qwen2.5-7b-instruct"):
        template = (TEMPLATES / f"{name}.jinja").read_text()
        assert choose_reasoning_format("auto", template, ()) is None
    think = REASONING_FORMATS[0]
    assert choose_reasoning_format("auto", "", (), ("MiniMaxM1ForCausalLM",), ("m1",)) == think
    assert choose_reasoning_format("auto", "", (), ("LlamaForCausalLM",), ("DeepSeek-R1-Distill-Llama-8B",)) == think
    assert choose_reasoning_format("auto", "", (), ("LlamaForCausalLM",), ("Llama-3.1-8B",)) is None


TEXT = '<think>\nhm hm\n</think>\n\nSo: <tool_call>{"name": "f", "arguments": {}}</tool_call>'


@pytest.mark.parametrize("step", [1, 3, 1000])
@pytest.mark.parametrize("show", [True, False])
def test_an_answer_with_reasoning_and_a_call(smollm2_dir: Path, step: int, show: bool) -> None:
    tokenizer = TextTokenizer(smollm2_dir)
    reading = OutputParserConfig(
        tokenizer=tokenizer,
        reasoning_format=THINK,
        show_reasoning=show,
        tool_format=HermesFormat(),
        function_names=frozenset({"f"}),
    )
    output = ChoiceOutput(tokenizer, (), logprobs=False, parser_config=reading)
    ids = tokenizer.encode(TEXT, add_special_tokens=False)
    thinking = len(tokenizer.encode("<think>\nhm hm\n</think>", add_special_tokens=False))
    tokens = [Token(i, token) for i, token in enumerate([*ids, tokenizer.eos_ids[0]])]
    pieces = [output.add(tokens[i : i + step]) for i in range(0, len(tokens) - 1, step)]
    pieces.append(output.add([], FinishReason.STOP))
    message = assemble(delta for piece in pieces for delta in piece.deltas or ())
    assert message.reasoning == ("hm hm" if show else None)
    assert message.content == "So:"
    assert [call.name for call in message.tool_calls] == ["f"]
    assert pieces[-1].finish is FinishReason.TOOL_CALLS
    assert abs(output.reasoning_tokens - thinking) <= 1  # a token may hold the marker's end and more


def test_an_answer_without_a_section_has_no_reasoning_tokens(smollm2_dir: Path) -> None:
    tokenizer = TextTokenizer(smollm2_dir)
    output = ChoiceOutput(
        tokenizer, (), logprobs=False, parser_config=OutputParserConfig(tokenizer=tokenizer, reasoning_format=THINK)
    )
    for i, token in enumerate(tokenizer.encode("< thinking is hard", add_special_tokens=False)):
        output.add([Token(i, token)])
    assert output.reasoning_tokens == 0
