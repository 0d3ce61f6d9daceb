"""How one model converses: its chat template, its way to write calls and to think, and the grammars that enforce both.

A conversation becomes a prompt, a Reading of the answers (see reader.py) and a grammar that the answers have to match.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.errors import InvalidRequest
from common.grammar import GrammarCompiler, GrammarTokenizer, from_json_schema
from common.model.chat_template import ChatTemplate
from common.types import Grammar
from gateway.text.answer_grammar import AnswerGrammarBuilder
from gateway.text.output_parser import OutputParserConfig
from gateway.text.reasoning import ReasoningSection, choose_reasoning_format
from gateway.text.tokenizer import TextTokenizer
from gateway.text.tools.choose import choose_tool_format
from gateway.text.tools.format import RequestTools
from gateway.text.tools.lark import parameters_schema
from gateway.text.tools.prompt import render_tools_as_text

INLINE_PARTS = 128  # messages and tools; templates take some 10 us for one

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PreparedChat:
    """A rendered one: the prompt, how its answers are read, and what they have to match."""

    prompt: str
    parser_config: OutputParserConfig | None
    grammar: Grammar | None


class ChatFormat:
    """Of one model. tool_parser, reasoning_parser: names, or auto. Raises ConfigError."""

    def __init__(
        self,
        model_dir: Path,
        tokenizer: TextTokenizer,
        template: ChatTemplate,
        *,
        tool_parser: str = "auto",
        reasoning_parser: str = "auto",
    ) -> None:
        self._tokenizer = tokenizer
        self._template = template
        added = {token.content for token in tokenizer.raw.get_added_tokens_decoder().values()}
        self.tool_format = choose_tool_format(tool_parser, template.source, added)
        self.reasoning_format = choose_reasoning_format(reasoning_parser, template.source, added)
        self._grammar_tokenizer = GrammarTokenizer(model_dir, eos_ids=tokenizer.eos_ids)
        self.grammar_checker = GrammarChecker(GrammarCompiler(self._grammar_tokenizer))
        self._answer_grammar = AnswerGrammarBuilder(tokenizer, self.tool_format, self.reasoning_format)

    def warm_up(self) -> None:
        """Builds what grammars need of the tokenizer, which holds the interpreter too long for an event loop's life."""
        try:
            self._grammar_tokenizer.get()
        except InvalidRequest as e:
            _log.warning("%s", e.message)

    async def prepare(
        self,
        messages: Sequence[Mapping[str, Any]],
        template_kwargs: Mapping[str, Any],
        tools: RequestTools | None,
        text: Grammar | None,
        *,
        include_reasoning: bool = True,
        keep_special: bool = False,
    ) -> PreparedChat:
        """text: what the client wants the answer's text to match. Raises InvalidRequest."""
        if text is not None:
            await self.grammar_checker.check(text)
        prompt = await self.render(messages, template_kwargs, tools.template_tools if tools else ())
        begins = (
            ReasoningSection.AFTER
            if self.reasoning_format is None
            else ReasoningSection.from_prompt(self.reasoning_format, prompt)
        )
        grammar = self._answer_grammar.build(
            text,
            tools.callable_functions if tools else (),
            required=tools is not None and tools.required,
            parallel=tools is not None and tools.parallel,
            begins=begins,
            field=tools.field if tools else "",
        )
        if grammar is not None and grammar is not text:
            await self._check_grammar(grammar, tools)
        reading = self._parser_config(tools, begins, include_reasoning=include_reasoning, keep_special=keep_special)
        return PreparedChat(prompt, reading, grammar)

    async def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        template_kwargs: Mapping[str, Any],
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> str:
        """The prompt, made in a thread when it has many parts. Raises InvalidRequest for what the template refuses."""

        def render() -> str:
            if not self._template.supports_tools and (tools or any(_of_tools(message) for message in messages)):
                return self._template.render(render_tools_as_text(messages, tools, self.tool_format), template_kwargs)
            return self._template.render(messages, template_kwargs, tools=tools or None)

        return await asyncio.to_thread(render) if len(messages) + len(tools) > INLINE_PARTS else render()

    async def _check_grammar(self, grammar: Grammar, tools: RequestTools | None) -> None:
        """Raises InvalidRequest; where one function's parameters are at fault, it names them."""
        try:
            await self.grammar_checker.check(grammar)
        except InvalidRequest:
            for function in tools.callable_functions if tools else ():
                await self.grammar_checker.check(from_json_schema(parameters_schema(function), field=function.field))
            raise

    def _parser_config(
        self, tools: RequestTools | None, begins: ReasoningSection, *, include_reasoning: bool, keep_special: bool
    ) -> OutputParserConfig | None:
        if tools is None and self.reasoning_format is None:
            return keep_special_tokens(self._tokenizer) if keep_special else None
        tokenizer = self._tokenizer
        markers = [*(self.tool_format.markers if tools else ())]
        if self.reasoning_format is not None:
            markers += [self.reasoning_format.start, self.reasoning_format.end]
        keep = tokenizer.special_ids if keep_special else tokenizer.special_ids & _ids(tokenizer, markers)
        return OutputParserConfig(
            tokenizer=tokenizer,
            reasoning_format=self.reasoning_format,
            initial_section=begins,
            show_reasoning=include_reasoning,
            tool_format=self.tool_format if tools else None,
            function_names=frozenset(f.name for f in tools.callable_functions) if tools else frozenset(),
            max_calls=1 if tools and not tools.parallel else None,
            kept_special_ids=keep - frozenset(tokenizer.eos_ids),
        )


def keep_special_tokens(tokenizer: TextTokenizer) -> OutputParserConfig:
    """For text that is to show the special tokens in it."""
    return OutputParserConfig(
        tokenizer=tokenizer, kept_special_ids=tokenizer.special_ids - frozenset(tokenizer.eos_ids)
    )


def _of_tools(message: Mapping[str, Any]) -> bool:
    return message["role"] == "tool" or "tool_calls" in message


def _ids(tokenizer: TextTokenizer, texts: Sequence[str]) -> frozenset[int]:
    return frozenset(i for text in texts if (i := tokenizer.raw.token_to_id(text)) is not None)


MAX_COMPILING = 2  # at the same time, for one model


class GrammarChecker:
    """Refuses grammars that a model's pods would refuse."""

    def __init__(self, compiler: GrammarCompiler) -> None:
        self._compiler = compiler
        self._threads = ThreadPoolExecutor(MAX_COMPILING, "grammar")

    async def check(self, grammar: Grammar) -> None:
        """Raises InvalidRequest that names the grammar's field, and the keyword of a schema that is not supported."""
        if self._compiler.get_cached(grammar) is None:
            await asyncio.get_running_loop().run_in_executor(self._threads, self._compiler.compile, grammar)
