"""The models of the bodies of /v1/completions and /v1/chat/completions, and the parameters that other bodies share.

Known fields without support are rejected by name (Refused, Only) or documented as ignored (Ignored).
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, Required

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, Strict, WithJsonSchema, with_config
from typing_extensions import TypedDict

from common.types import MAX_N
from gateway.api.openai.conversation import FunctionChoice, Functions, Messages, TemplateVariables, ToolChoice, Tools
from gateway.api.openai.fields import (
    ARRAY,
    BOOLEAN,
    BY_KIND,
    INT32_MAX,
    OBJECT,
    STRING,
    Ignored,
    LogitBias,
    Only,
    Refused,
    RequestModel,
    TextsOrIds,
    TokenIds,
    misplaced,
    param,
    told_by,
    without_nulls,
)
from gateway.serving.request import PromptInput

MAX_LOGPROBS = 20
MAX_CACHE_TTL_S = 7 * 86_400
MAX_SEED = 9_223_372_036_854_776_000  #: OpenAI's bound, 2**63 as JavaScript writes it; -2**63 is read as a double.
TopK = Annotated[int, Field(ge=-1, le=INT32_MAX), AfterValidator(lambda k: max(k, 0))]
Stop = Annotated[str, Field(min_length=1, max_length=1024)]
Stops = Annotated[
    Annotated[Stop, STRING] | Annotated[tuple[Stop, ...], Strict(False), Field(fail_fast=True, max_length=16), ARRAY],
    BY_KIND,
]
_UNIQUE = AfterValidator(lambda values: tuple(dict.fromkeys(values)))
AllowedIds = Annotated[TokenIds, Field(min_length=1, max_length=1 << 18), _UNIQUE]
BadWord = Annotated[str, Field(min_length=1, max_length=256)]
BadWords = Annotated[tuple[BadWord, ...], Strict(False), Field(fail_fast=True, max_length=256), _UNIQUE]


class ModelRequest(RequestModel):
    """Parameters of every endpoint that runs a model."""

    model: str = param("Name of a served model, see /v1/models.", ..., min_length=1, max_length=1024)
    cache_salt: str = param("Only requests with the same one share cached prefixes.", "", words="empty", max_length=256)
    user: str | None = param("Id of the end user, for OpenAI's abuse checks; without effect here.")


class Sampling(ModelRequest):
    """Parameters of every endpoint that generates text."""

    temperature: float = param("Softmax temperature; 0 is greedy.", 1.0, ge=0, le=2)
    top_p: float = param(
        "Keeps the fewest most likely tokens with at least this probability in sum; 0 is greedy.", 1.0, ge=0, le=1
    )
    top_k: TopK = param("Keeps the k most likely tokens; 0 and -1 are off.", 0)
    min_p: float = param("Drops tokens less likely than min_p times the likeliest.", 0.0, ge=0, le=1)
    repetition_penalty: float = param("Divides or multiplies logits of tokens in prompt or output.", 1.0, gt=0, le=2)
    presence_penalty: float = param("Subtracted once from tokens seen in the output.", 0.0, ge=-2, le=2)
    frequency_penalty: float = param("Subtracted per occurrence in the output.", 0.0, ge=-2, le=2)
    logit_bias: LogitBias = param("Added to the logits of single tokens; keys are token ids.", ())
    seed: int | None = param("Makes sampling repeatable in any batch.", words="random", ge=-(2**63), le=MAX_SEED)
    min_tokens: int = param(
        "No stop token and no stop string ends an answer before this many; at most max_tokens.", 0, ge=0, le=INT32_MAX
    )
    stop: Stops = param("Strings that end the answer; not part of it.", ())
    stop_token_ids: TokenIds = param("Tokens that end the answer, beside the model's own.", (), max_length=256)
    ignore_eos: bool = param("Goes on past the model's end-of-sequence token.", False)
    priority: int = param("Higher runs earlier.", 0, ge=-INT32_MAX, le=INT32_MAX)
    cache_priority: int = param(
        "How long the KV of the context stays cached, compared with others: -1 low, 0 normal, 1 high, 2 pinned.",
        0,
        ge=-1,
        le=2,
    )
    cache_ttl_s: int = param(
        "Seconds after the last use for which cache_priority holds; 0: until eviction.", 0, ge=0, le=MAX_CACHE_TTL_S
    )
    stream: bool = param("Server-sent events instead of one answer.", False)


class StreamOptions(RequestModel):
    """`stream_options`."""

    include_usage: bool = param("One more chunk, with the usage and no choices.", False)
    continuous_usage_stats: bool = param("The usage so far, in every chunk.", False)


@with_config(ConfigDict(strict=True, extra="allow"))
class JsonSchemaFormat(TypedDict, total=False):
    """`response_format.json_schema`."""

    name: Annotated[str, Field(max_length=1024)] | None
    strict: bool | None
    schema: dict[str, Any] | None


_SCHEMA_IF_ASKED: Any = [
    {"properties": {"type": {"enum": ["text", "json_object"]}}},
    {"properties": {"json_schema": {"type": "object"}}, "required": ["json_schema"]},
    {"properties": {"schema": {"type": "object"}}, "required": ["schema"]},
]


@with_config(ConfigDict(strict=True, json_schema_extra={"anyOf": _SCHEMA_IF_ASKED}))
class ResponseFormat(TypedDict, total=False):
    """`response_format`. A schema stands in `json_schema`, or as other servers have it in `schema` beside `type`."""

    type: Required[Literal["text", "json_object", "json_schema"]]
    json_schema: JsonSchemaFormat | None
    schema: dict[str, Any] | None


SCHEMA_TEXT = re.compile(r"^\s*(\{|true|false)")
GuidedJson = Annotated[
    Annotated[dict[str, Any], OBJECT]
    | Annotated[bool, BOOLEAN]
    | Annotated[str, Field(json_schema_extra={"pattern": SCHEMA_TEXT.pattern}), STRING],
    BY_KIND,
]
GuidedRegex = Annotated[str, Field(min_length=1)]
GuidedChoice = Annotated[
    list[Annotated[str, Field(min_length=1)]], Field(fail_fast=True, max_length=1024, json_schema_extra={"minItems": 1})
]
GuidedGrammar = Annotated[str, Field(min_length=1, json_schema_extra={"pattern": ":"})]
GRAMMAR_FORMS = ("json", "regex", "choice", "grammar", "json_object")
GUIDED_FIELDS = {f"guided_{form}": form for form in GRAMMAR_FORMS[:4]}


@with_config(ConfigDict(strict=True, json_schema_extra={"anyOf": [{"required": [form]} for form in GRAMMAR_FORMS]}))
class StructuredOutputs(TypedDict, total=False):
    """`structured_outputs`: a grammar in one of several forms."""

    json: GuidedJson
    regex: GuidedRegex
    choice: GuidedChoice
    grammar: GuidedGrammar
    json_object: bool
    structural_tag: Refused
    whitespace_pattern: Refused
    disable_any_whitespace: bool
    disable_additional_properties: Annotated[Any, Only(False)]


#: A field in which other APIs have a format. To ignore it would give an answer without the format.
FormatElsewhere = Annotated[
    Any, Only("", {}, hint="put a schema into response_format, another grammar into structured_outputs")
]
_FORMAT_FIELDS = {
    "response_format",
    "structured_outputs",
    "json_schema",
    "format",
    "regex",
    "ebnf",
    "grammar",
    *GUIDED_FIELDS,
}


def _no_format(value: Any) -> Any:
    if isinstance(value, dict) and (found := sorted(_FORMAT_FIELDS.intersection(value))):
        raise misplaced(f"holds {found[0]}, a format or schema that belongs into the body itself")
    return value


NoFormat = Annotated[
    Any, AfterValidator(_no_format), WithJsonSchema({"propertyNames": {"not": {"enum": sorted(_FORMAT_FIELDS)}}})
]
BoolOrNever = Annotated[
    Annotated[bool, BOOLEAN] | Annotated[Literal["never"], STRING],
    told_by(
        lambda value: "<string>" if value == "never" else "<boolean>" if isinstance(value, bool) else None,
        'must be true, false or "never"',
    ),
]


class Generation(Sampling):
    """Parameters of chats and completions."""

    stream_options: StreamOptions | None = param("Only with stream.")
    n: int = param("Answers per prompt, for one prefill.", 1, ge=1, le=MAX_N)
    use_beam_search: bool = param("Searches the likeliest answers, see Beam search. Not with stream.", False)
    length_penalty: float = param("Beams are ranked by log-probability / length ** length_penalty.", 1.0, ge=-10, le=10)
    early_stopping: BoolOrNever = param(
        "When a search that has as many answers as beams ends: at once (true), when no live beam scores better at its "
        "current length (false), or when none could score better at any length (never).",
        False,
    )
    allowed_token_ids: AllowedIds = param("Only these tokens are generated; include those that end the answer.", ())
    bad_words: BadWords = param("Words that are not generated, at the start of a text or after a space.", ())
    include_stop_str_in_output: bool = param("The stop string that ends the answer is part of it.", False)
    prompt_logprobs: int | None = param(
        "Alternatives reported per prompt token; no prefix cache is used. Not with stream.", ge=0, le=MAX_LOGPROBS
    )
    response_format: ResponseFormat | None = param("Format that the answer has to match; enforced, strict or not.")
    structured_outputs: Annotated[StructuredOutputs, BeforeValidator(without_nulls)] | None = param(
        "The same in vLLM's form: one of json (a schema), regex, choice, grammar (Lark or GBNF), json_object. JSON has "
        "the white space of a plain writer; disable_any_whitespace false allows any, also for another field's schema."
    )
    guided_json: GuidedJson | None = param("The older name of structured_outputs.json.")
    guided_regex: GuidedRegex | None = param("The older name of structured_outputs.regex.")
    guided_choice: GuidedChoice | None = param("The older name of structured_outputs.choice.")
    guided_grammar: GuidedGrammar | None = param("The older name of structured_outputs.grammar.")
    skip_special_tokens: bool = param("Whether special tokens stay out of the text; an ending one always does.", True)
    json_schema: FormatElsewhere = param("The place of a schema in other APIs; here it is response_format.")
    format: FormatElsewhere = param("The same.")
    text: FormatElsewhere = param("The same, of /v1/responses.")
    regex: FormatElsewhere = param("The place of an expression in other APIs; here it is structured_outputs.regex.")
    ebnf: FormatElsewhere = param("The place of a grammar in other APIs; here it is structured_outputs.grammar.")
    grammar: FormatElsewhere = param("The same.")
    extra_body: NoFormat = param("Clients send the members of this argument instead of it; without effect.")
    lora_request: Refused = param("A LoRA adapter is named as the model.")
    lora_path: Refused = param("A LoRA adapter is named as the model.")
    adapter_id: Refused = param("A LoRA adapter is named as the model.")


class Conversation(RequestModel):
    """Parameters of chats and responses."""

    chat_template_kwargs: TemplateVariables | None = param("Variables for the chat template.")
    parallel_tool_calls: bool = param("Whether an answer may have several calls.", True)
    service_tier: Ignored = param("Service class; there is only one.")
    safety_identifier: str | None = param("Id of the end user, for OpenAI's abuse checks; without effect here.")
    prompt_cache_key: str | None = param(
        "Without effect: routing finds cached prefixes without it; X-Session-Affinity is a hint."
    )
    prompt_cache_retention: Ignored = param("Cached prefixes stay while there is room.")
    prompt_cache_options: Ignored = param("Cached prefixes stay while there is room.")
    moderation: Ignored = param("Content moderation; there is none.")


class ChatRequest(Generation, Conversation):
    """A body of /v1/chat/completions."""

    messages: Messages = param("The conversation, oldest first; content is text or text parts.", ...)
    max_completion_tokens: int | None = param(
        "Max tokens after the prompt; both must fit the context.", words="the rest of the context", ge=1, le=INT32_MAX
    )
    max_tokens: int | None = param("The older name of max_completion_tokens, which has precedence.", ge=1, le=INT32_MAX)
    logprobs: bool = param("Log-probabilities of the answer's tokens.", False)
    top_logprobs: int = param("Number of alternatives per token; needs logprobs.", 0, ge=0, le=MAX_LOGPROBS)
    tools: Tools = param("Functions that the model may call.", [])
    tool_choice: ToolChoice | None = param(
        "none: no calls, the model sees no tools. required, or one function: enforced.", words="auto with tools"
    )
    functions: Functions = param("The older form of tools.", [])
    function_call: FunctionChoice | None = param("The older form of tool_choice.")
    include_reasoning: bool = param("Whether the answer shows the model's reasoning, as reasoning_content.", True)
    reasoning_effort: str | None = param(
        "How long the model thinks: a template variable; none also sets enable_thinking to false.", max_length=32
    )
    echo: Annotated[Any, Only(False)] = param("The prompt before the answer.", False)
    modalities: Annotated[Any, Only(["text"])] = param("Kinds of output.")
    continue_final_message: Annotated[Any, Only(False)] = param("Goes on with the last message.")
    add_generation_prompt: Annotated[Any, Only(True)] = param("The template's start of an answer.")
    documents: Annotated[Any, Only([])] = param("Documents for the template.")
    audio: Refused = param("Spoken answers.")
    prediction: Refused = param("Predicted outputs.")
    web_search_options: Refused = param("Web search.")
    chat_template: Refused = param("A template of the client's own.")
    metadata: Ignored = param("Labels of stored answers; nothing is stored.")
    store: Ignored = param("Stores the answer at OpenAI; nothing is stored here.")
    verbosity: Ignored = param("How long answers are.")


class CompletionRequest(Generation):
    """A body of /v1/completions."""

    prompt: Annotated[tuple[PromptInput, ...], TextsOrIds(64)] = param(
        "A text, texts, token ids, or lists of them; each gets its own choice.", ...
    )
    max_tokens: int | None = param(
        "Max tokens after the prompt; both must fit the context. 0: only the prompt counts.",
        words="16",
        ge=0,
        le=INT32_MAX,
    )
    echo: bool = param("The prompt comes before the answer, with its log-probabilities if there are any.", False)
    logprobs: int | None = param(
        "Log-probabilities, with this number of alternatives per token.", words="none", ge=0, le=MAX_LOGPROBS
    )
    suffix: Annotated[Any, Only("")] = param("Text after the answer; infilling is not supported.")
    best_of: int | None = param(
        "Candidates per prompt; the n with the best mean log-probability are answered. Not with stream. 0: n.",
        words="n",
        ge=0,
        le=MAX_N,
    )
