"""Bodies of /v1/completions and /v1/chat/completions: their models, and the checked requests that they become.

`serving.request.to_valid_request` then checks against the model's limits and makes the ValidRequest for the pods.
Known fields without support are rejected by name (Refused, Only) or documented as ignored (Ignored).
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, Required

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, Strict, WithJsonSchema, with_config
from typing_extensions import TypedDict

from common.errors import InvalidRequest
from common.grammar.compiler import JSON_OBJECT, GrammarSource
from common.types import MAX_N, SamplingParams
from gateway.api.openai.conversation import (
    FunctionChoice,
    Functions,
    Messages,
    TemplateVariables,
    ToolChoice,
    Tools,
    chat_messages,
    chat_tools,
    template_variables,
)
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
    validated,
    without_nulls,
)
from gateway.serving.request import BeamSearchParams, ChatBody, CompletionBody, GenerationSpec, PromptInput

MAX_LOGPROBS = 20
MAX_SEQUENCES = 1024  #: Sequences of all prompts of a body together.
MAX_ALLOWED_IDS = 1 << 20  #: Ids of allowed_token_ids, which go to the pods with each prompt, times the prompts.
MAX_BEAM_WIDTH = 10
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


#: Members of a schema that stands directly in `json_schema` instead of in its `schema`.
_SCHEMA_KEYWORDS = frozenset(("properties", "items", "enum", "const", "anyOf", "oneOf", "allOf", "$ref", "$defs"))
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


_SCHEMA_TEXT = re.compile(r"^\s*(\{|true|false)")
GuidedJson = Annotated[
    Annotated[dict[str, Any], OBJECT]
    | Annotated[bool, BOOLEAN]
    | Annotated[str, Field(json_schema_extra={"pattern": _SCHEMA_TEXT.pattern}), STRING],
    BY_KIND,
]
GuidedRegex = Annotated[str, Field(min_length=1)]
GuidedChoice = Annotated[
    list[Annotated[str, Field(min_length=1)]], Field(fail_fast=True, max_length=1024, json_schema_extra={"minItems": 1})
]
GuidedGrammar = Annotated[str, Field(min_length=1, json_schema_extra={"pattern": ":"})]
_FORMS = ("json", "regex", "choice", "grammar", "json_object")
_GUIDED = {f"guided_{form}": form for form in _FORMS[:4]}


@with_config(ConfigDict(strict=True, json_schema_extra={"anyOf": [{"required": [form]} for form in _FORMS]}))
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
    *_GUIDED,
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
    lora_request: Refused = param("LoRA adapters are not offered.")
    lora_path: Refused = param("LoRA adapters are not offered.")
    adapter_id: Refused = param("LoRA adapters are not offered.")


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


#: Sampling parameters that the gateway passes on as they are.
_SAMPLING = {f.name for f in dataclasses.fields(SamplingParams)} - {f.name for f in dataclasses.fields(GenerationSpec)}


def generation_spec(r: Sampling, *, max_tokens: int | None, logprobs: int | None, **more: Any) -> GenerationSpec:
    """Returns what a body asks to generate. `more`: further fields of the spec."""
    sampling = SamplingParams(**{name: value for name, value in vars(r).items() if name in _SAMPLING})
    given = r.model_fields_set & _SAMPLING
    if sampling.top_p == 0:
        sampling, given = dataclasses.replace(sampling, temperature=0.0, top_p=1.0), given | {"temperature"}
    return GenerationSpec(
        model=r.model,
        sampling=sampling,
        given=frozenset(given),
        max_tokens=max_tokens,
        seed=r.seed,
        stop=(r.stop,) if isinstance(r.stop, str) else r.stop,
        ignore_eos=r.ignore_eos,
        logprobs=logprobs,
        cache_salt=r.cache_salt,
        priority=r.priority,
        cache_priority=r.cache_priority,
        cache_ttl_s=r.cache_ttl_s,
        stream=r.stream,
        **more,
    )


def _spec(
    r: Generation, *, max_tokens: int | None, logprobs: int | None, best_of: int | None = None, **more: Any
) -> GenerationSpec:
    """Returns what a chat or a completion asks to generate. Raises InvalidRequest for fields that do not fit."""
    if r.stream_options is not None and not r.stream:
        raise InvalidRequest("stream_options is only allowed when stream is true", field="stream_options")
    if r.prompt_logprobs is not None and r.stream:
        raise InvalidRequest("prompt_logprobs cannot be streamed: stream must be false", field="prompt_logprobs")
    if best_of is not None and best_of < r.n:
        raise InvalidRequest(f"best_of ({best_of}) must not be less than n ({r.n})", field="best_of")
    if best_of is not None and best_of > r.n and r.stream:
        raise InvalidRequest("best_of above n cannot be streamed: stream must be false", field="best_of")
    options = r.stream_options or StreamOptions()
    return generation_spec(
        r,
        max_tokens=max_tokens,
        logprobs=logprobs,
        n=r.n,
        best_of=best_of,
        include_usage=options.include_usage,
        continuous_usage=options.continuous_usage_stats,
        grammar=_grammar(r),
        skip_special_tokens=r.skip_special_tokens,
        bad_words=r.bad_words,
        include_stop=r.include_stop_str_in_output,
        prompt_logprobs=r.prompt_logprobs,
        beam_search=_beam_search(r, best_of or r.n, "n" if best_of is None else "best_of"),
        **more,
    )


def parse_chat(body: object) -> ChatBody:
    """Checks a /v1/chat/completions body. Raises InvalidRequest, which names the field."""
    r = validated(ChatRequest, body)
    if r.top_logprobs and not r.logprobs:
        raise InvalidRequest("top_logprobs needs logprobs to be true", field="top_logprobs")
    newer = r.max_completion_tokens is not None
    spec = _spec(
        r,
        max_tokens=r.max_completion_tokens if newer else r.max_tokens,
        max_tokens_field="max_completion_tokens" if newer else "max_tokens",
        logprobs=r.top_logprobs if r.logprobs else None,
    )
    return ChatBody(
        spec,
        chat_messages(r.messages),
        template_variables(r.chat_template_kwargs, r.reasoning_effort),
        chat_tools(r.tools, r.tool_choice, r.functions, r.function_call, parallel=r.parallel_tool_calls),
        include_reasoning=r.include_reasoning,
    )


def parse_completion(body: object) -> CompletionBody:
    """Checks a /v1/completions body. Raises InvalidRequest, which names the field."""
    r = validated(CompletionRequest, body)
    spec = _spec(r, max_tokens=r.max_tokens, logprobs=r.logprobs, best_of=r.best_of or None, echo=r.echo)
    if len(r.prompt) * spec.candidates > MAX_SEQUENCES:
        text = f"{len(r.prompt)} prompts with {spec.candidates} sequences each are more than {MAX_SEQUENCES}"
        raise InvalidRequest(text, field="n" if r.best_of is None else "best_of")
    if len(r.prompt) * (allowed := len(r.allowed_token_ids)) > MAX_ALLOWED_IDS:
        text = f"{allowed} ids for each of {len(r.prompt)} prompts are more than {MAX_ALLOWED_IDS}; send fewer prompts"
        raise InvalidRequest(f"allowed_token_ids: {text}", field="allowed_token_ids")
    return CompletionBody(spec, r.prompt)


def _grammar(r: Generation) -> GrammarSource | None:
    """Returns the grammar that the answer must match, None without one. Raises InvalidRequest."""
    grammars = {name: grammar for name, grammar in _grammars(r) if grammar is not None}
    if len(grammars) > 1:
        raise InvalidRequest(f"{' and '.join(grammars)} exclude each other", field=list(grammars)[1])
    outputs: Mapping[str, Any] = r.structured_outputs or {}
    complete = any(form in outputs for form in _FORMS) or (grammars and "disable_any_whitespace" in outputs)
    if r.structured_outputs is not None and not complete:
        text = f"structured_outputs must have one of {', '.join(_FORMS)}"
        raise InvalidRequest(text, field="structured_outputs")
    grammar = next(iter(grammars.values()), None)
    if grammar is not None and grammar.form == "json" and outputs.get("disable_any_whitespace") is False:
        return dataclasses.replace(grammar, form="json_any_space")
    return grammar


def _grammars(r: Generation) -> Iterator[tuple[str, GrammarSource | None]]:
    if r.response_format is not None:
        name = "response_format.json_schema"
        asked: Mapping[str, Any] | None = r.response_format.get("json_schema")
        if r.response_format.get("schema") is not None:
            if asked is not None:
                raise InvalidRequest(f"{name} and response_format.schema exclude each other", field=name)
            name, asked = "response_format", r.response_format
        yield "response_format", format_grammar(r.response_format["type"], asked, "response_format", name)
    for name, form in _GUIDED.items():
        if (value := getattr(r, name)) is not None:
            yield name, _source(form, value, name)
    if r.structured_outputs is not None:
        given: Mapping[str, Any] = r.structured_outputs
        for form in (form for form in _FORMS if form in given):
            name, value = f"structured_outputs.{form}", given[form]
            if form != "json_object":
                yield name, _source(form, value, name)
            elif value:
                yield name, GrammarSource("json", JSON_OBJECT, name)


def _source(form: str, value: Any, field: str) -> GrammarSource:
    """Checks what the API document says about the value. Other errors come when the grammar is proven."""
    if form == "json" and isinstance(value, str) and not _SCHEMA_TEXT.match(value):
        raise InvalidRequest(f"{field} is not valid JSON: a schema is an object, true or false", field=field)
    if form == "choice" and not value:
        raise InvalidRequest(f"{field} must have at least one choice", field=field)
    if form == "grammar" and ":" not in value:
        raise InvalidRequest(f"{field} is not a grammar: it has no rules", field=field)
    return GrammarSource(form, value, field)


def format_grammar(kind: str, asked: Mapping[str, Any] | None, field: str, schema_field: str) -> GrammarSource | None:
    """Returns the grammar of a response format of type `kind`. `asked`, in `schema_field`, has the schema."""
    schema, place = None if asked is None else asked.get("schema"), f"{schema_field}.schema"
    if kind == "text":
        if schema is not None:
            raise InvalidRequest(f'{place} needs {field}.type to be "json_schema"', field=place)
        return None
    if kind == "json_object" and schema is None:
        return GrammarSource("json", JSON_OBJECT, field)
    if asked is None:
        raise InvalidRequest(f"{schema_field} is missing", field=schema_field)
    if schema is None and not _SCHEMA_KEYWORDS.isdisjoint(asked):
        raise InvalidRequest(f"{schema_field} is a schema itself; the schema must be in {place}", field=place)
    return GrammarSource("json", JSON_OBJECT if schema is None else schema, place)


#: Fields that a beam search cannot honour, unless they have their defaults. Other sampling parameters (temperature,
#: top_k, top_p, min_p, seed) are accepted and have no effect, because no token is sampled.
_NOT_WITH_BEAMS = (
    *("stream", "stop", "echo", "prompt_logprobs", "repetition_penalty", "presence_penalty", "frequency_penalty"),
    *("logit_bias", "allowed_token_ids", "bad_words"),
)


def _beam_search(r: Generation, width: int, width_field: str) -> BeamSearchParams | None:
    """Returns the parameters of a beam search, None without one. Raises InvalidRequest, which names the field."""
    if not r.use_beam_search:
        for name, given in (("length_penalty", r.length_penalty != 1.0), ("early_stopping", r.early_stopping)):
            if given:
                raise InvalidRequest(f"{name} needs use_beam_search to be true", field=name)
        return None
    for name in _NOT_WITH_BEAMS:
        if getattr(r, name) not in (None, type(r).model_fields[name].default):
            raise InvalidRequest(f"{name} cannot be combined with use_beam_search", field=name)
    if width > MAX_BEAM_WIDTH:
        raise InvalidRequest(f"a beam search has at most {MAX_BEAM_WIDTH} beams, not {width}", field=width_field)
    return BeamSearchParams(width, r.length_penalty, r.early_stopping)
