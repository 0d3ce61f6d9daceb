"""Explains in one sentence why a grammar is refused: the problem, the keyword, and its place in the schema.

llguidance's reasons are texts for its own developers. Each kind of reason has a rule here. Of other texts only
the parts about the grammar are kept.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from common.json_schema.places import Json, all_schemas, pointer, pointer_parts

_MOST_CHARS = 600  #: Max characters of a quoted reason.
_MOST_LOOKS = 20_000  #: Max schemas that are searched for a place.
TOO_LARGE = "cannot be followed: it exceeds the limits of the compiler"
ENDLESS = "allows no text that ends: it leads back to itself, or its parts exclude each other"

_Finder = Callable[[Json], bool]
_EXPECTED = {
    "f64": "a number",
    "positive integer": "a whole number that is not negative",
    "string": "a string",
    "array": "an array",
    "object": "an object",
}
_SIZES = re.compile(
    "schema too large|grammar size|too big|fuel exhausted|stack level exceeded|too complex|TooComplex|Current row has"
    "|too many items|DNF too large|precomputation failed|exceeds the supported range|too deeply nested"
    "|memory limit|CompiledTooBig|exceeds size limit|states limit",
    re.IGNORECASE,
)
_INTERNAL = re.compile(r"panic|<backtrace>|InternalError|NotStopped|Some\(|not initialized")
_NO_TEXT = re.compile("NoExtension")


class _Rule:
    """One kind of llguidance's reasons: its words, and a function that recognises the schema that causes it."""

    def __init__(
        self, pattern: str, words: Callable[[re.Match[str]], str], finder: Callable[[re.Match[str]], _Finder] | None
    ) -> None:
        self.pattern, self.words, self.finder = re.compile(pattern, re.DOTALL), words, finder


def _keyword(name: str, problem: str) -> str:
    return f'the JSON schema keyword "{name}" {problem}'


def _has(key: str) -> _Finder:
    return lambda schema: key in schema


def _has_value(key: str, text: str) -> _Finder:
    """Finds a keyword by its value as llguidance prints it, which may be cut."""
    start = text.strip().removesuffix("...")
    return lambda schema: key in schema and _printed(schema[key]).startswith(start)


def _printed(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _unknown_keys(match: re.Match[str]) -> str:
    several = "," in match[1]
    return f"the JSON schema keyword{'s' if several else ''} {match[1]} {'are' if several else 'is'} not supported"


def _bounds(match: re.Match[str]) -> str:
    return f'allows no value: "{match[1]}" ({match[2]}) is greater than "{match[3]}" ({match[4]})'


def _refers(match: re.Match[str]) -> _Finder:
    target = pointer_parts("#" + match[1])
    return lambda schema: isinstance(ref := schema.get("$ref"), str) and ref[:1] == "#" and pointer_parts(ref) == target


def _regex(match: re.Match[str]) -> str:
    detail = " ".join(part.strip() for part in match[0].splitlines()[-1:]).removeprefix("error: ")
    return f"has a regular expression that cannot be used: {detail}"


def _same_pattern(match: re.Match[str]) -> _Finder:
    def found(schema: Json) -> bool:
        patterns = [schema.get("pattern"), *(schema.get("patternProperties") or ())]
        return any(isinstance(pattern, str) and pattern and pattern in match.string for pattern in patterns)

    return found


_RULES = (
    _Rule(r"Unimplemented keys: \[(.*?)\]", _unknown_keys, lambda m: _has(json.loads(f"[{m[1]}]")[0])),
    _Rule(
        r"Unknown format: ([^\n]*)",
        lambda m: _keyword("format", f"does not support {m[1]!r}"),
        lambda m: lambda schema: schema.get("format") == m[1],
    ),
    _Rule(
        "oneOf constraints",
        lambda m: _keyword("oneOf", "is not supported where its parts may overlap"),
        lambda m: _has("oneOf"),
    ),
    _Rule(
        r"Invalid type: ([^\n]*)",
        lambda m: _keyword("type", f"does not know {m[1]!r}"),
        lambda m: lambda schema: m[1] in (types if isinstance(types := schema.get("type"), list) else (types,)),
    ),
    _Rule(
        r"type must be a string",
        lambda m: _keyword("type", "must be a string or an array of strings"),
        lambda m: lambda schema: "type" in schema and not _is_type(schema["type"]),
    ),
    _Rule(
        r"Expected (f64|positive integer|string|array|object) for (?:numeric )?'?([$\w]+)'?( item)?, got ([^\n]*)",
        lambda m: _keyword(m[2], "must be an array of strings" if m[3] else f"must be {_EXPECTED[m[1]]}, not {m[4]}"),
        lambda m: _has(m[2]) if m[3] else _has_value(m[2], m[4]),
    ),
    _Rule(
        "schema must be an object or boolean",
        lambda m: "has a schema that is not an object, true or false",
        lambda m: _has_no_schema,
    ),
    _Rule(
        r"(\$?\w+) must be (an array|an object|a string)",
        lambda m: _keyword(m[1], f"must be {m[2]}"),
        lambda m: (
            lambda schema: (
                m[1] in schema
                and not isinstance(schema[m[1]], {"an array": list, "an object": dict, "a string": str}[m[2]])
            )
        ),
    ),
    _Rule(
        r"[Pp]ointer '([^']*)'",
        lambda m: _keyword("$ref", f"leads to {'#' + m[1]!r}, which does not exist"),
        _refers,
    ),
    _Rule(
        r"[Aa]nchor '([^']*)' does not exist",
        lambda m: _keyword("$ref", f"leads to the anchor {m[1]!r}, which does not exist"),
        lambda m: lambda schema: schema.get("$ref") == f"#{m[1]}",
    ),
    _Rule(
        r"(?:Resource|Invalid URI reference) '(?:json-schema:///)?([^']*)'",
        lambda m: f'leads by "$ref", "$schema" or "$id" to {m[1]!r}, which is not a place in it',
        lambda m: lambda schema: any(str(schema.get(key)).startswith(m[1]) for key in ("$ref", "$schema", "$id")),
    ),
    _Rule(
        "circular references with sibling keys",
        lambda m: _keyword("$ref", "refers to a schema around itself and has keywords beside it"),
        lambda m: lambda schema: "$ref" in schema and len(schema) > 1,
    ),
    _Rule(
        r"(minimum|exclusiveMinimum|minLength|minItems) \(([^)]*)\) is (?:greater than|equal to) (\w+) \(([^)]*)\)",
        _bounds,
        lambda m: lambda schema: m[1] in schema and m[3] in schema and _number(schema[m[1]]) == _number(m[2]),
    ),
    _Rule(
        r"(?:integer interval|range) ([\[(][^\])]*[\])]) (contains no integer values|does not contain a multiple of)"
        r" ?([^\n]*)",
        lambda m: (
            f"allows no value: between {m[1][1:-1].replace(', ', ' and ')} is no "
            + (f"multiple of {m[3]}" if m[3] else "integer")
        ),
        lambda m: lambda schema: not {"minimum", "exclusiveMinimum"}.isdisjoint(schema),
    ),
    _Rule(
        "minProperties|required > maxProperties|min/maxProperties",
        lambda m: (
            _keyword("minProperties", "and maxProperties are supported only where all named properties are required")
            if m[0].startswith("min/max")
            else 'allows no value: "minProperties", "maxProperties" and "required" exclude each other'
        ),
        lambda m: lambda schema: not {"minProperties", "maxProperties"}.isdisjoint(schema),
    ),
    _Rule(
        r"required property '([^']*)' is unsatisfiable",
        lambda m: f"allows no value: none fits the required property {m[1]!r}",
        lambda m: lambda schema: isinstance(required := schema.get("required"), list) and m[1] in required,
    ),
    _Rule(
        "required item is unsatisfiable|prefixItems.* is unsatisfiable",
        lambda m: "allows no value: none fits an item that the array must have",
        lambda m: _has("minItems"),
    ),
    _Rule(
        r"(anyOf|oneOf) is empty|No options in anyOf",
        lambda m: "allows no value: one of its lists of types, values or schemas is empty",
        lambda m: lambda schema: any(schema.get(key) == [] for key in ("type", "enum", "anyOf", "oneOf")),
    ),
    _Rule("All options in anyOf", lambda m: f"allows no value: {_keyword('anyOf', 'has no part that fits one')}", None),
    _Rule("schema is false", lambda m: "allows no value: it is false", None),
    _Rule("incompatible (types|boolean values)", lambda m: "allows no value: its keywords exclude each other", None),
    _Rule(
        "doesn't match length constraints|Regex is empty",
        lambda m: "allows no value: no text has that pattern, format and length",
        lambda m: lambda schema: not {"minLength", "maxLength", "pattern", "format"}.isdisjoint(schema),
    ),
    _Rule(
        "patternProperty regexes (.*) and (.*) are not disjoint",
        lambda m: _keyword("patternProperties", f"has patterns that match the same names: {m[1]} and {m[2]}"),
        lambda m: _has("patternProperties"),
    ),
    _Rule(
        "can't determine if patternProperty regexes (.*) and (.*) are disjoint",
        lambda m: _keyword("patternProperties", f"has patterns too complex to compare: {m[1]} and {m[2]}"),
        lambda m: _has("patternProperties"),
    ),
    _Rule(
        "Unable to determine if regex is empty",
        lambda m: _keyword("pattern", "is too complex beside the other keywords of that string"),
        lambda m: lambda schema: not {"pattern", "format"}.isdisjoint(schema),
    ),
    _Rule(
        "'?multiple ?[oO]f",
        lambda m: _keyword("multipleOf", "must be positive, with at most nine digits"),
        lambda m: _has("multipleOf"),
    ),
    _Rule(
        "Failed to generate regex for (integer|float) range|range.*(?:overflow|digit|number)",
        lambda m: "has bounds that are too large or too close to each other to be enforced",
        lambda m: lambda schema: any("inimum" in key or "aximum" in key for key in schema),
    ),
    _Rule(
        r"lookarounds? not supported[^\n]*|lookaround|look-around[^\n]*",
        lambda m: "has a regular expression with a look-around or a word boundary, which is not supported",
        _same_pattern,
    ),
    _Rule(
        "decimal literal invalid|repetition quantifier",
        lambda m: "has a length or a repetition that is too large",
        lambda m: lambda schema: not {"minLength", "maxLength", "pattern"}.isdisjoint(schema),
    ),
    _Rule(r"regex parse error:.*", _regex, _same_pattern),
)
_REGEX = re.compile(r'invalid regex (".*?") \(in [^\n]*', re.DOTALL)
_REGEX_ERROR = re.compile(r"^error: ([^\n]*)", re.MULTILINE)
_LINE = re.compile(r"^(?:at )?([0-9]+)\(([0-9]+)\): ")
_MORE = re.compile(r"; following [^\n]* available: .*| \(at [^\n]*\)$", re.DOTALL)


def in_words(reason: str, schema: object = None) -> str:
    """Returns the rest of a sentence that begins with the grammar's name: "allows no value: ...".

    `reason` is llguidance's. `schema` is the JSON schema of the grammar; its place is named if it can be found.
    """
    if _NO_TEXT.search(reason):
        return ENDLESS
    if schema is not None or "JSON schema" in reason:
        for rule in _RULES:
            if (match := rule.pattern.search(reason)) is not None:
                finder = rule.finder(match) if rule.finder is not None else None
                return f"{rule.words(match)}{_place(schema, finder)}"
    if _SIZES.search(reason) or _INTERNAL.search(reason):
        return TOO_LARGE
    if (match := _REGEX.search(reason)) is not None:
        error = _REGEX_ERROR.search(reason)
        problem = error[1] if error is not None else "word boundaries and the like are not supported"
        return f"has a regular expression that cannot be used, {match[1][:100]}: {problem}"
    first = reason.replace("<non-verbose/>", "").strip().split("\n")[0]
    cleaned = _LINE.sub(r"line \1, column \2: ", _MORE.sub("", first))
    return f"cannot be followed: {cleaned[:_MOST_CHARS]}"


def _place(schema: object, finder: _Finder | None) -> str:
    if not isinstance(schema, dict) or finder is None:
        return ""
    for looks, (path, part) in enumerate(all_schemas(schema)):
        if looks > _MOST_LOOKS:
            break
        if finder(part):
            return f" (at {pointer(path)})" if path else ""
    return ""


def _is_type(value: object) -> bool:
    return isinstance(value, str) or (isinstance(value, list) and all(isinstance(name, str) for name in value))


def _number(value: Any) -> float | None:
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return None


def _has_no_schema(schema: Json) -> bool:
    """Returns whether a member of a schema must be a schema and is not."""
    members = [schema[key] for key in ("additionalProperties", "items") if key in schema]
    for key in ("properties", "patternProperties", "$defs", "definitions"):
        members += schema[key].values() if isinstance(schema.get(key), dict) else ()
    for key in ("allOf", "anyOf", "oneOf", "prefixItems"):
        members += schema[key] if isinstance(schema.get(key), list) else ()
    return any(not isinstance(member, dict | bool | list) for member in members)
