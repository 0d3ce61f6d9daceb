"""The chat format of one model: a chat becomes a prompt, and a parser configuration and a grammar of its answers."""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.errors import InvalidRequest, Overloaded
from common.grammar.compiler import GrammarSource
from common.grammar.prover import PATIENCE_S, prover_of
from common.model.chat_template import ChatTemplate
from common.settings.kinds import TOOL_PARSERS
from common.types import Grammar
from gateway.text.answer_grammar import AnswerGrammarBuilder
from gateway.text.output import OutputParserConfig
from gateway.text.placeholders import Placeholders
from gateway.text.reasoning import ReasoningSection, choose_reasoning_format
from gateway.text.tokenizer import ChatPrompt, TextTokenizer, json_text
from gateway.text.tools.choose import choose_tool_format
from gateway.text.tools.format import AnswerFormat, ModelFacts, RequestTools, ToolCall, ToolFormat
from gateway.text.tools.lark import parameters_schema

_log = logging.getLogger(__name__)

UNKNOWN_FORMAT = (
    "the format of this model's tool calls is unknown (neither chat template, tokens, architecture nor name show it); "
    f"start the server with --tool-parser: {', '.join(TOOL_PARSERS[1:])}"
)
INLINE_PARTS = 128  #: Chats with more messages and tools are rendered in a thread. Each takes about 10 us.
#: Fields of an assistant's message with text of the model. The model's markers in them stay tokens.
ANSWER_FIELDS = ("content", "reasoning_content", "reasoning")
INLINE_BYTES = 1 << 18  #: Chats with longer JSON are rendered in a thread.


@dataclass(frozen=True, slots=True)
class PreparedChat:
    """A rendered chat."""

    prompt: ChatPrompt
    parser_config: OutputParserConfig | None  # how the answers are parsed, None if all of their text is content
    grammar: Grammar | None  # the grammar that the answers have to match, None if any text is allowed


class ChatFormat:
    """Chat template, tool and reasoning format of one model. Raises ConfigError for an unknown name of a parser."""

    def __init__(
        self,
        model_dir: Path,
        tokenizer: TextTokenizer,
        template: ChatTemplate,
        *,
        tool_parser: str = "auto",
        reasoning_parser: str = "auto",
        name: str = "",
    ) -> None:
        """`name`: the served name; it may show the format of the model."""
        self._tokenizer = tokenizer
        self._template = template
        facts = _model_facts(model_dir, tokenizer, template, name)
        #: None if the model's format is unknown: its requests have no tools.
        self.tool_format = choose_tool_format(
            tool_parser, facts.template, facts.tokens, facts.architectures, facts.names
        )
        self.reasoning_format = choose_reasoning_format(
            reasoning_parser, facts.template, facts.tokens, facts.architectures, facts.names
        )
        if self.tool_format is None:
            _log.warning("model %s: %s; requests with tools are refused", name or model_dir.name, UNKNOWN_FORMAT)
        #: The format of the whole answer; None if reasoning and calls have separate formats.
        self._answer_format = self.tool_format if isinstance(self.tool_format, AnswerFormat) else None
        if self._answer_format is not None:
            self.reasoning_format = None
        # The markers of an answer format separate messages, so text of a message must not spell them.
        kept = self.tool_format.markers if self.tool_format and not self._answer_format else ()
        self._assistant_markers = {*kept}
        if self.reasoning_format is not None:
            self._assistant_markers |= {*self.reasoning_format.markers}
        self._prover = prover_of(model_dir, tuple(tokenizer.eos_ids))
        self._answer_grammar = AnswerGrammarBuilder(tokenizer, self.tool_format, self.reasoning_format)

    @property
    def template_source(self) -> str:
        """The source of the chat template (of two, the one for tools); "" without a template."""
        return self._template.source

    def warm_up(self) -> None:
        """Prepares the process that proves grammars and the encoding of literals, so that no request waits for them."""
        self._prover.start()
        self._tokenizer.control_tokens.warm_up()

    async def prepare(
        self,
        messages: Sequence[Mapping[str, Any]],
        template_kwargs: Mapping[str, Any],
        tools: RequestTools | None,
        source: GrammarSource | Grammar | None,
        *,
        client: str = "",
        include_reasoning: bool = True,
        keep_special: bool = False,
        answer_start: str = "",
    ) -> PreparedChat:
        """Renders a chat and derives the parser configuration and the grammar of its answers. Raises InvalidRequest.

        `source` is the client's grammar for the answer's text; `keep_special` shows special tokens in it. Proofs of
        grammars count for `client`. `answer_start` is the text with which the answer begins; a grammar is for the rest.
        """
        if tools is not None and self.tool_format is None:
            raise InvalidRequest(f"{tools.field}: {UNKNOWN_FORMAT}", field=tools.field)
        deadline = time.monotonic() + PATIENCE_S
        text = None if source is None else await self.prove(source, client, deadline)
        prompt = await self.render(messages, template_kwargs, tools.template_tools if tools else ())
        reasoning = self.reasoning_format
        # Without reasoning sections the answer begins at once, as it does after a section.
        section = ReasoningSection.AFTER if reasoning is None else ReasoningSection.from_prompt(reasoning, prompt.text)
        if answer_start:
            prompt, section = self.begun(prompt, answer_start), ReasoningSection.AFTER
        grammar = None
        if text is not None or tools is not None:
            grammar = self._answer_grammar.build(
                text,
                tools.callable_functions if tools else (),
                required=tools is not None and tools.required,
                parallel=tools is not None and tools.parallel,
                initial_section=section,
                field=tools.field if tools else "",
            )
        if grammar is not None and grammar is not text:
            await self._prove_answer_grammar(grammar, tools, client, deadline)
        config = self._parser_config(tools, section, include_reasoning=include_reasoning, keep_special=keep_special)
        return PreparedChat(prompt, config, grammar)

    def begun(self, prompt: ChatPrompt, answer_start: str) -> ChatPrompt:
        """Returns the prompt of an answer that begins with a text, after its reasoning section if there is one.

        Control tokens that the text spells are text, except markers. Raises InvalidRequest.
        """
        if self._answer_format is not None:
            text = "messages must end with the user's turn: an answer of this model cannot begin with given text"
            raise InvalidRequest(text, field="messages")
        text, reasoning = prompt.text, self.reasoning_format
        if reasoning and ReasoningSection.from_prompt(reasoning, text) is ReasoningSection.INSIDE:
            text += f"\n{reasoning.end}\n\n"
        spelled = self._tokenizer.control_tokens.spelled(answer_start)
        literals = [(first, end) for first, end in spelled if answer_start[first:end] not in self._assistant_markers]
        shifted = tuple((len(text) + first, len(text) + end) for first, end in literals)
        return ChatPrompt(text + answer_start, (*prompt.literals, *shifted))

    def _parser_config(
        self, tools: RequestTools | None, section: ReasoningSection, *, include_reasoning: bool, keep_special: bool
    ) -> OutputParserConfig | None:
        reasoning, tokenizer = self.reasoning_format, self._tokenizer
        answer_format = self._answer_format
        if tools is None and reasoning is None and answer_format is None:
            return self.special_tokens_config() if keep_special else None
        markers = list(self.tool_format.markers if self.tool_format and (tools or answer_format) else ())
        if reasoning is not None:
            markers += reasoning.markers
        marker_ids = {tokenizer.raw.token_to_id(marker) for marker in markers}
        kept_ids = tokenizer.special_ids if keep_special else tokenizer.special_ids & marker_ids
        return OutputParserConfig(
            tokenizer=tokenizer,
            reasoning_format=reasoning,
            initial_section=section,
            show_reasoning=include_reasoning,
            tool_format=self.tool_format if tools else answer_format,
            function_names=frozenset(f.name for f in tools.callable_functions) if tools else frozenset(),
            schemas={f.name: f.parameters for f in tools.callable_functions} if tools else {},
            max_calls=1 if tools and not tools.parallel else None,
            kept_special_ids=kept_ids - frozenset(tokenizer.eos_ids),
        )

    async def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        template_kwargs: Mapping[str, Any],
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> ChatPrompt:
        """Returns the prompt; long chats render in a thread. Raises InvalidRequest if the template rejects the chat."""
        body, control_tokens = json_text([messages, tools, template_kwargs]), self._tokenizer.control_tokens

        def render() -> ChatPrompt:
            if not control_tokens.may_be_in(body):
                return ChatPrompt(self._render(messages, template_kwargs, tools))
            placeholders = Placeholders(control_tokens, body)
            kept = self._assistant_markers
            safe = [
                {
                    **placeholders.put(m),
                    **{k: placeholders.put(m[k], kept) for k in ANSWER_FIELDS if k in m and m["role"] == "assistant"},
                    "role": m["role"],
                }
                for m in messages
            ]
            return placeholders.restore(self._render(safe, placeholders.put(template_kwargs), placeholders.put(tools)))

        if len(messages) + len(tools) > INLINE_PARTS or len(body) > INLINE_BYTES or control_tokens.may_be_in(body):
            return await asyncio.to_thread(render)
        return ChatPrompt(self._render(messages, template_kwargs, tools))

    def _render(
        self,
        messages: Sequence[Mapping[str, Any]],
        template_kwargs: Mapping[str, Any],
        tools: Sequence[Mapping[str, Any]],
    ) -> str:
        if self._answer_format is not None:
            messages, tools = self._answer_format.history(messages), self._answer_format.declared(tools)
        with_tools = tools or any(m["role"] == "tool" or "tool_calls" in m for m in messages)
        if with_tools and not self._template.supports_tools:
            if self.tool_format is None:
                raise InvalidRequest(f"messages have tool calls, but {UNKNOWN_FORMAT}", field="messages")
            return self._template.render(render_tools_as_text(messages, tools, self.tool_format), template_kwargs)
        return self._template.render(messages, template_kwargs, tools=tools or None)

    async def prove(self, source: GrammarSource | Grammar, client: str, deadline: float | None = None) -> Grammar:
        """Proves a grammar and returns it as the pods will compile it; see GrammarProver.submit.

        Raises InvalidRequest, which names the grammar's field and the JSON schema keyword that is not supported.
        """
        if isinstance(source, Grammar):
            source = GrammarSource("text", source.text, source.field)
        return await asyncio.wrap_future(self._prover.submit(source, client=client, deadline=deadline))

    async def _prove_answer_grammar(
        self, grammar: Grammar, tools: RequestTools | None, client: str, deadline: float
    ) -> None:
        """Raises InvalidRequest if the grammar is rejected.

        If parameters of a function are the reason, the error names the function.
        """
        try:
            await self.prove(grammar, client, deadline)
        except InvalidRequest as refusal:
            for function in tools.callable_functions if tools else ():
                try:
                    await self.prove(
                        GrammarSource("json", parameters_schema(function), function.field), client, deadline
                    )
                except Overloaded:  # no time is left to find the function
                    break
            raise refusal from None

    def special_tokens_config(self) -> OutputParserConfig:
        """Returns the parser configuration of answers without tools and reasoning that show special tokens."""
        kept_ids = self._tokenizer.special_ids - frozenset(self._tokenizer.eos_ids)
        return OutputParserConfig(tokenizer=self._tokenizer, kept_special_ids=kept_ids)


def _model_facts(model_dir: Path, tokenizer: TextTokenizer, template: ChatTemplate, name: str) -> ModelFacts:
    try:
        config = json.loads((model_dir / "config.json").read_bytes())
    except (OSError, ValueError):  # the tests' directories may have a tokenizer only
        config = {}
    named = [*(config.get("architectures") or ()), config.get("model_type")] if isinstance(config, dict) else []
    return ModelFacts(
        template.source,
        {token.content for token in tokenizer.raw.get_added_tokens_decoder().values()},
        tuple(text for text in named if isinstance(text, str)),
        (name, model_dir.name),
    )


def render_tools_as_text(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], tool_format: ToolFormat
) -> list[dict[str, Any]]:
    """Returns the chat for a template without tools: calls and their answers become text, tools a system message.

    The wording is taken from Qwen 2.5's templates, because a model may have seen it in training.
    """
    plain: list[dict[str, Any]] = []
    for are_answers, group in itertools.groupby(messages, lambda message: message["role"] == "tool"):
        if are_answers:
            answers = (f"<tool_response>\n{message['content']}\n</tool_response>" for message in group)
            plain.append({"role": "user", "content": "\n".join(answers)})
            continue
        for message in group:
            calls = message.get("tool_calls")
            if not calls:
                plain.append(dict(message))
                continue
            written = tool_format.render_calls([_call(call["function"]) for call in calls])
            plain.append({"role": message["role"], "content": "\n".join(filter(None, (message["content"], written)))})
    if not tools:
        return plain
    system = plain.pop(0)["content"] if plain and plain[0]["role"] == "system" else ""
    return [{"role": "system", "content": "\n\n".join(filter(None, (system, _described(tools, tool_format))))}, *plain]


def _call(function: Mapping[str, Any]) -> ToolCall:
    arguments = function["arguments"]
    # A client may send arguments that are not an object; formats that write objects need one.
    return ToolCall("", function["name"], json.dumps(arguments if isinstance(arguments, dict) else {"": arguments}))


def _described(tools: Sequence[Mapping[str, Any]], tool_format: ToolFormat) -> str:
    signatures = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    example = tool_format.render_calls([ToolCall("", "function_name", '{"argument": "value"}')])
    return (
        "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
        "You are provided with function signatures within <tools></tools> XML tags:\n"
        f"<tools>\n{signatures}\n</tools>\n\n"
        f"To call a function, write exactly this, with its name and its arguments:\n{example}"
    )
