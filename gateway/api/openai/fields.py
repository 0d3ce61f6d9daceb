"""Parts of request models: their base, kinds of fields, and errors that name a field of the client's body.

A model declares each parameter once. Types and bounds check a body. Types, bounds and meanings make /openapi.json and
the tables of docs/api.md (gateway/api/docs). To add a parameter, add a field with `param` to its model and run
`python -m gateway.api.docs`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Any, TypeVar

import orjson
from pydantic import (
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    PlainValidator,
    Strict,
    Tag,
    ValidationError,
    WithJsonSchema,
    WrapValidator,
    model_validator,
)
from pydantic_core import CoreSchema, ErrorDetails, PydanticCustomError, core_schema

from common.errors import InvalidRequest
from gateway.api.http.json import Json, type_name
from gateway.serving.request import PromptInput

INT32_MAX = 2**31 - 1
MAX_IDS = 1 << 20  #: Token ids in one array.
MAX_LOGIT_BIAS = 1024
_UNSUPPORTED = "unsupported"
_UNKNOWN_TYPE = "unknown_type"


def without_nulls(value: Any) -> Any:
    """Returns an object without its null members, because null counts as absent."""
    return {k: v for k, v in value.items() if v is not None} if isinstance(value, dict) else value


def _whole(value: Any) -> Any:
    return int(value) if type(value) is float and value.is_integer() and abs(value) < 2**64 else value


class RequestModel(BaseModel):
    """An object of a request body. null counts as absent, 1.0 as 1, but booleans and texts never count as numbers.

    Unknown members are ignored.
    """

    model_config = ConfigDict(strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _members(cls, body: Any) -> Any:
        return {k: _whole(v) for k, v in body.items() if v is not None} if isinstance(body, dict) else body


def param(meaning: str, default: Any = None, *, words: str = "", **bounds: Any) -> Any:
    """Declares a parameter of a model; a `default` of `...` makes it required.

    `words` say the default, if `default` does not show it. `bounds` are arguments of pydantic's Field.
    """
    return Field(default, description=meaning, json_schema_extra={"x-default": words} if words else None, **bounds)


class Only:
    """Accepts only null and values without effect: the parameter is known and not served."""

    def __init__(self, *values: object, hint: str = "") -> None:
        """`hint`: what to do instead, for the error."""
        self._values = values
        self._hint = hint and f"; {hint}"

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(self._check)

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> Json:
        if self._values:
            return {"enum": list(self._values), "x-support": "limited"}
        return {"type": "null", "x-support": "refused"}

    def _check(self, value: Any) -> Any:
        if value is None or any(type(value) is type(v) and value == v for v in self._values):
            return value
        served = " or ".join(orjson.dumps(v).decode() for v in self._values)
        said = (f"must be {served}" if served and not self._hint else "is not supported") + self._hint
        raise PydanticCustomError(_UNSUPPORTED, "{said}", {"said": said})


def misplaced(what: str) -> PydanticCustomError:
    """Returns the error of a value that belongs elsewhere. `what` follows the name of the field."""
    return PydanticCustomError(_UNSUPPORTED, "{said}", {"said": what})


Refused = Annotated[Any, Only()]
Ignored = Annotated[Any, WithJsonSchema({"x-support": "ignored"})]
TokenId = Annotated[int, Field(ge=0, le=INT32_MAX)]
#: Arrays stop at their first wrong entry (FailFast), because an error costs more than an entry.
TokenIds = Annotated[tuple[TokenId, ...], Strict(False), Field(fail_fast=True)]
#: Checks a value and keeps it with the order of its members, which chat templates print.
KEEP = WrapValidator(lambda value, check: (check(value), value)[1])

#: Tags of the members of a union that `BY_KIND` distinguishes. Their brackets keep them out of errors.
STRING, ARRAY, OBJECT, BOOLEAN = Tag("<string>"), Tag("<array>"), Tag("<object>"), Tag("<boolean>")
_TAGS = {str: "<string>", list: "<array>", dict: "<object>", bool: "<boolean>"}
BY_KIND = Discriminator(lambda value: _TAGS.get(type(value), "<other>"))


def told_by(kind: Callable[[Any], str | None], problem: str) -> Discriminator:
    """Returns a discriminator. `kind` returns a tag, or None for a value of which `problem` says what it must be."""
    return Discriminator(kind, custom_error_type="unknown_kind", custom_error_message=problem)


def by_type(kind: Callable[[Any], str | None], served: str) -> Discriminator:
    """Returns the discriminator of objects with a member `type`. `kind` returns a tag, or None for an unknown type."""
    return Discriminator(kind, custom_error_type=_UNKNOWN_TYPE, custom_error_message=served)


class TextsOrIds:
    """The type of prompts: a text, texts, token ids, or arrays of token ids; each but the first at most `most`."""

    def __init__(self, most: int) -> None:
        self._most = most

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        def array(entry: CoreSchema, most: int) -> CoreSchema:
            bounds: Any = {"min_length": 1, "max_length": most}
            return core_schema.tuple_schema([entry], variadic_item_index=0, strict=False, fail_fast=True, **bounds)

        text = core_schema.str_schema(min_length=1)
        ids = array(core_schema.int_schema(ge=0, le=INT32_MAX), MAX_IDS)
        kinds = {"<text>": text, "<texts>": array(text, self._most), "<ids>": ids, "<arrays>": array(ids, self._most)}
        problem = "must be a string, an array of strings, or token ids"
        either = core_schema.tagged_union_schema(
            kinds, _kind_of_prompts, custom_error_type="prompts", custom_error_message=problem
        )
        return core_schema.no_info_after_validator_function(_prompts, either)


def _kind_of_prompts(value: Any) -> str | None:
    if isinstance(value, list):
        first = type_name(value[0]) if value else "string"
        return {"string": "<texts>", "array": "<arrays>", "integer": "<ids>", "boolean": "<ids>"}.get(first)
    return "<text>" if isinstance(value, str) else None


def _prompts(value: Any) -> tuple[PromptInput, ...]:
    return (value,) if isinstance(value, str) or type(value[0]) is int else value


def _logit_bias(value: Any) -> tuple[tuple[int, float], ...]:
    """Returns the pairs of token id and bias. null counts as absent."""
    if not isinstance(value, dict):
        raise InvalidRequest(f"logit_bias must be an object, not {type_name(value)}", field="logit_bias")
    if len(value) > MAX_LOGIT_BIAS:
        raise InvalidRequest(f"logit_bias may have at most {MAX_LOGIT_BIAS} entries", field="logit_bias")
    out: dict[int, float] = {}
    for key, bias in without_nulls(value).items():
        if not (key.isascii() and key.isdecimal() and len(key) < 10):
            raise InvalidRequest(f"logit_bias: the key {key[:40]!r} is not a token id", field="logit_bias")
        if isinstance(bias, bool) or not isinstance(bias, int | float):
            raise InvalidRequest(f"logit_bias.{key} must be a number, not {type_name(bias)}", field=f"logit_bias.{key}")
        if not -100 <= bias <= 100:
            text = f"logit_bias.{key} must be at least -100 and at most 100, not {bias}"
            raise InvalidRequest(text, field=f"logit_bias.{key}")
        out[int(key)] = float(bias)
    return tuple(out.items())


_BIASES = {
    "type": "object",
    "propertyNames": {"pattern": "^[0-9]{1,9}$"},
    "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
    "maxProperties": MAX_LOGIT_BIAS,
}
LogitBias = Annotated[tuple[tuple[int, float], ...], PlainValidator(_logit_bias), WithJsonSchema(_BIASES)]


_M = TypeVar("_M", bound=RequestModel)

_KINDS = {"string": "a string", "array": "an array", "object": "an object", "boolean": "a boolean"}
#: What a value must be, by pydantic's type of error.
_TYPES = {
    "int_type": "an integer",
    "float_type": "a number",
    "bool_type": "a boolean",
    "string_type": "a string",
    "list_type": "an array",
    "tuple_type": "an array",
    "dict_type": "an object",
    "model_type": "an object",
}
#: The problem in words, by pydantic's type of error.
_PROBLEMS = {
    "missing": "is missing",
    "too_short": "is empty",
    "string_too_short": "is empty",
    "too_long": "may have at most {max_length} entries",
    "string_too_long": "must have at most {max_length} characters",
    "string_pattern_mismatch": "must be 1 to 128 letters, digits, underscores, dots or dashes",
}
_BOUNDS = {"ge": "at least {}", "gt": "greater than {}", "le": "at most {}"}
_NO_MARKS = str.maketrans("", "", "'<>")


def validated(model: type[_M], body: object) -> _M:
    """Returns the checked body. Raises InvalidRequest, which names the first wrong field."""
    try:
        return model.model_validate(body)
    except ValidationError as e:
        errors = e.errors(include_url=False)
    raise _to_invalid_request(model, next((e for e in errors if e["type"] == _UNSUPPORTED), errors[0]))


def _to_invalid_request(model: type[RequestModel], error: ErrorDetails) -> InvalidRequest:
    kind, value = error["type"], error["input"]
    parts = [part for part in error["loc"] if not (isinstance(part, str) and part.startswith("<"))]
    if not parts:
        return InvalidRequest(f"the request body must be a JSON object, not {type_name(value)}")
    if value is None and isinstance(parts[-1], str):
        kind = "missing"
    subject = ""
    while isinstance(parts[-1], int) and kind not in ("dict_type", _UNKNOWN_TYPE):  # only objects are named by index
        parts.pop()
        subject = "an entry of "
    if kind == _UNKNOWN_TYPE:
        if isinstance(value, dict):
            parts.append("type")
            value = value.get("type")
        else:
            kind = "dict_type"
    name = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in parts).removeprefix(".")
    ctx, metadata = error.get("ctx", {}), model.model_fields[str(parts[0])].metadata
    return InvalidRequest(f"{subject}{name} {_problem(kind, value, error['msg'], ctx, metadata)}", field=name)


def _problem(kind: str, value: Any, text: str, ctx: Json, metadata: Sequence[object]) -> str:
    """Returns the problem of a value, from pydantic's error (type, message, details) and the field's bounds."""
    if kind in _PROBLEMS:
        return _PROBLEMS[kind].format(**ctx)
    if kind in _TYPES:
        return f"must be {_TYPES[kind]}, not {type_name(value)}"
    if kind == "union_tag_invalid":
        tags = ctx["expected_tags"].translate(_NO_MARKS).split(", ")
        return f"must be {' or '.join(_KINDS[tag] for tag in tags)}, not {type_name(value)}"
    if kind in ("literal_error", _UNKNOWN_TYPE):
        given = repr(value[:60]) if isinstance(value, str) else f"of type {type_name(value)}"
        return f"{given} is not supported, only {ctx['expected'].translate(_NO_MARKS) if ctx else text}"
    bounds = {bound: getattr(m, bound) for m in metadata for bound in _BOUNDS if hasattr(m, bound)}
    bounds = bounds or {bound: ctx[bound] for bound in _BOUNDS if bound in ctx}
    if bounds:
        return f"must be {' and '.join(_BOUNDS[bound].format(limit) for bound, limit in bounds.items())}, not {value}"
    return text
