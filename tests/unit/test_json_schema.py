"""JSON schemas before llguidance reads them: what is rewritten, what is proven, and how refusals are worded."""

from __future__ import annotations

import copy
import json
import time
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import InvalidRequest
from common.grammar import compiler as grammars
from common.grammar.compiler import GrammarTokenizer
from common.json_schema.adapted import adapted
from common.json_schema.disjoint import DisjointProof
from common.json_schema.places import all_schemas, endless_reference, pointer
from common.json_schema.refusals import in_words

Json = dict[str, Any]
#: Words of llguidance's texts that say nothing to a client.
INSIDES = (
    "NoExtension",
    "non-verbose",
    "TooComplex",
    "backtrace",
    "Some(",
    "Unimplemented",
    "f64",
    "json-schema:",
    "\n",
)


@pytest.fixture(scope="module")
def tokenizer(smollm2_dir: Path) -> GrammarTokenizer:
    return GrammarTokenizer(smollm2_dir, eos_ids=(2,), vocab_size=49152)


def accepts(tokenizer: GrammarTokenizer, schema: Any, text: str) -> bool:
    matcher = grammars.compile_grammar(tokenizer, grammars.from_json_schema(schema, field="f")).matcher()
    return all(map(matcher.consume_token, tokenizer.get().tokenize_str(text))) and matcher.is_accepting()


def refusal(tokenizer: GrammarTokenizer, schema: Any) -> str:
    with pytest.raises(InvalidRequest) as refused:
        grammars.compile_grammar(tokenizer, grammars.from_json_schema(schema, field="f"))
    assert refused.value.field == "f"
    return refused.value.message


def part(kind: str, name: str, of: str) -> Json:
    properties: Json = {"kind": {"const": kind, "type": "string"}, name: {"type": of}}
    return {"type": "object", "properties": properties, "required": ["kind", name]}


CAT, DOG = part("cat", "meows", "integer"), part("dog", "barks", "number")
PETS: Json = {
    "$defs": {"Cat": CAT, "Dog": DOG},
    "type": "object",
    "properties": {"pet": {"oneOf": [{"$ref": "#/$defs/Cat"}, {"$ref": "#/$defs/Dog"}]}},
    "required": ["pet"],
}
CLOSED = {"additionalProperties": False}

#: Schemas that no value fits together, and what shows it.
APART: dict[str, tuple[Any, Any]] = {
    "types": ({"type": "string"}, {"type": ["integer", "null"]}),
    "constants": ({"const": 1}, {"const": "1"}),
    "enums": ({"enum": ["a", "b"]}, {"enum": ["c"]}),
    "a constant and a type": ({"const": 1.5}, {"type": "integer"}),
    "a constant and a bound": ({"const": 5}, {"type": "number", "exclusiveMaximum": 5}),
    "a constant and a length": ({"enum": ["a", "bc"]}, {"type": "string", "minLength": 3}),
    "an object and a required property": ({"const": {"a": 1}}, {"type": "object", "required": ["b"]}),
    "ranges": ({"type": "integer", "maximum": 3}, {"type": "number", "minimum": 3.5}),
    "ranges that meet": ({"type": "number", "maximum": 3}, {"type": "number", "exclusiveMinimum": 3}),
    "lengths": ({"type": "string", "maxLength": 3}, {"type": "string", "minLength": 4}),
    "numbers of items": ({"type": "array", "maxItems": 1}, {"type": "array", "minItems": 2}),
    "a required constant": (CAT, DOG),
    "a required type": (
        {"type": "object", "properties": {"x": {"type": "string"}}, "required": ["x"]},
        {"type": "object", "properties": {"x": {"type": "integer"}}},
    ),
    "a required property that the other forbids": (
        {"type": "object", "properties": {"a": {}}, "required": ["a"]},
        {"type": "object", "properties": {"b": {}}, "required": ["b"], **CLOSED},
    ),
    "a property that is false": (
        {"type": "object", "required": ["a"]},
        {"type": "object", "properties": {"a": False}},
    ),
    "a constant in an inner object": (
        {"type": "object", "properties": {"meta": CAT}, "required": ["meta"]},
        {"type": "object", "properties": {"meta": DOG}, "required": ["meta"]},
    ),
    "parts of allOf": ({"allOf": [{"type": "object"}, CAT]}, {"allOf": [DOG, {"type": "object"}]}),
    "alternatives": ({"anyOf": [{"const": 1}, {"const": 2}]}, {"oneOf": [{"const": 3}, {"type": "string"}]}),
    "nothing": (False, {"type": "string"}),
}
#: Schemas with a value that fits both.
TOGETHER: dict[str, tuple[Any, Any, Any]] = {
    "integer and number": ({"type": "integer"}, {"type": "number"}, 1),
    "a whole float in an array": ({"const": [1.0]}, {"enum": [[1]]}, [1]),
    "a whole float": ({"const": 1.0}, {"type": "integer"}, 1),
    "any": ({}, {"type": "string"}, "a"),
    "ranges that meet": ({"type": "number", "maximum": 3}, {"type": "number", "minimum": 3}, 3),
    "not required": (
        {"type": "object", "properties": {"kind": {"const": "a"}}},
        {"type": "object", "properties": {"kind": {"const": "b"}}},
        {},
    ),
    "no object at all": (
        {"required": ["k"], "properties": {"k": {"const": 1}}},
        {"properties": {"k": {"const": 2}}},
        7,
    ),
    "null beside objects": (
        {**CAT, "type": ["object", "null"]},
        {**DOG, "type": ["object", "null"]},
        None,
    ),
    "patterns": (
        {"type": "object", "patternProperties": {"a": {}}, **CLOSED},
        {"type": "object", "required": ["a"]},
        {"a": 1},
    ),
    "an alternative": ({"anyOf": [{"const": 1}, {"const": 2}]}, {"type": "integer", "minimum": 2}, 2),
}


@pytest.mark.parametrize("name", APART)
def test_what_shows_that_no_value_fits_both(name: str) -> None:
    a, b = APART[name]
    assert DisjointProof({}).all_apart([a, b])
    assert DisjointProof({}).all_apart([b, a])
    assert list(adapted({"oneOf": [a, b]})) == ["anyOf"]


@pytest.mark.parametrize("name", TOGETHER)
def test_nothing_is_proven_where_a_value_fits_both(name: str) -> None:
    a, b, value = TOGETHER[name]
    for schema in (a, b):
        jsonschema.Draft202012Validator(schema).validate(value)
    assert not DisjointProof({}).all_apart([a, b])
    assert not DisjointProof({}).all_apart([b, a])
    assert adapted({"oneOf": [a, b]}) == {"oneOf": [a, b]}


SMALL = st.sampled_from([None, True, False, 0, 1, 1.5, 2, "", "a", "bb", [], [1], {}, {"a": 1}, {"a": "b", "b": 2}])
_LEAVES = st.one_of(
    st.booleans(),
    st.builds(lambda value: {"const": value}, SMALL),
    st.builds(lambda values: {"enum": values}, st.lists(SMALL, max_size=3)),
    st.builds(lambda names: {"type": names}, st.lists(st.sampled_from(["integer", "number", "string", "null"]))),
    st.builds(lambda low, high: {"type": "number", "minimum": low, "exclusiveMaximum": high}, *[st.integers(0, 2)] * 2),
    st.builds(lambda least, most: {"type": "string", "minLength": least, "maxLength": most}, *[st.integers(0, 2)] * 2),
)
SCHEMAS: Any = st.recursive(
    _LEAVES,
    lambda inner: st.one_of(
        st.builds(
            lambda a, b, required, more: {
                "type": "object",
                "properties": {"a": a, "b": b},
                "required": required,
                "additionalProperties": more,
            },
            inner,
            inner,
            st.lists(st.sampled_from(["a", "b", "c"]), unique=True),
            inner,
        ),
        st.builds(lambda parts: {"allOf": parts}, st.lists(inner, min_size=1, max_size=2)),
        st.builds(lambda parts: {"anyOf": parts}, st.lists(inner, min_size=1, max_size=2)),
    ),
    max_leaves=6,
)


@settings(max_examples=400, deadline=None)
@given(SCHEMAS, SCHEMAS, SMALL)
def test_a_proof_is_right(a: Any, b: Any, value: Any) -> None:
    if DisjointProof({}).all_apart([a, b]):
        fits = [jsonschema.Draft202012Validator(schema).is_valid(value) for schema in (a, b)]
        assert not all(fits), (a, b, value)


def test_references_are_followed_also_in_circles() -> None:
    root: Json = {"$defs": {"a": CAT, "b": {"$ref": "#/$defs/c"}, "c": {"$ref": "#/$defs/b"}}}
    assert DisjointProof(root).all_apart([{"$ref": "#/$defs/a"}, DOG])
    assert not DisjointProof(root).all_apart([{"$ref": "#/$defs/b"}, DOG])
    assert not DisjointProof(root).all_apart([{"$ref": "#/$defs/missing"}, DOG])


def test_a_proof_has_an_end() -> None:
    """Objects in which each property leads to both of two others: 2 ** 40 pairs without a limit."""
    defs: Json = {}
    for i in range(40):
        inner = {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}, {"$ref": f"#/$defs/e{i + 1}"}]}
        for name in "de":
            defs[f"{name}{i}"] = {"type": "object", "properties": {"a": inner, "b": inner}, "required": ["a", "b"]}
    defs["d40"] = defs["e40"] = {"type": "object"}
    schema = {"oneOf": [{"$ref": "#/$defs/d0"}, {"$ref": "#/$defs/e0"}], "$defs": defs}
    began = time.process_time()
    assert "oneOf" in adapted(schema)
    assert time.process_time() - began < 10  # minutes without a limit


@pytest.mark.parametrize(
    "part_of",
    [
        lambda i: {"enum": [f"{n}" for n in range(2000)]},
        lambda i: {"type": "object", "required": [f"{n}" for n in range(2000)]},
        lambda i: {"const": "x" * 20_000},
        lambda i: {"$ref": "#/$defs/" + "x" * 20_000},
        lambda i: {"allOf": [{"type": "object"}] * 2000},
        lambda i: {"anyOf": [{"type": "string"}] * 2000},
    ],
)
def test_long_parts_cost_fuel_too(part_of: Any) -> None:
    shared: Json = {f"d{i}": part_of(i) for i in range(10)}
    options = [{"$ref": f"#/$defs/d{i % 10}"} for i in range(400)]
    schema = {"$defs": shared, "anyOf": [{"oneOf": options[i:] + options[:i]} for i in range(10)]}
    began = time.process_time()
    adapted(schema)
    assert time.process_time() - began < 10  # minutes without a limit


def test_a_thousand_parts_are_told_apart_by_their_constant(tokenizer: GrammarTokenizer) -> None:
    names = [f"k{i}" for i in range(1000)]
    schema = {
        "oneOf": [{"$ref": f"#/$defs/{name}"} for name in names],
        "$defs": {name: part(name, "n", "null") for name in names},
    }
    began = time.process_time()
    assert "anyOf" in adapted(schema)
    assert time.process_time() - began < 10  # minutes without a limit
    assert accepts(tokenizer, schema, '{"kind": "k77", "n": null}')


def test_one_of_told_apart_by_a_required_constant_is_served(tokenizer: GrammarTokenizer) -> None:
    assert accepts(tokenizer, PETS, '{"pet": {"kind": "cat", "meows": 3}}')
    assert accepts(tokenizer, PETS, '{"pet": {"kind": "dog", "barks": 2.5}}')
    assert not accepts(tokenizer, PETS, '{"pet": {"kind": "cat", "meows": 2.5}}')
    overlapping = {**PETS, "$defs": {"Cat": CAT, "Dog": {**DOG, "required": []}}}
    assert "oneOf" in refusal(tokenizer, {**overlapping, "$defs": {"Cat": {"type": "integer"}, "Dog": {}}})


def test_rewriting_keeps_the_clients_schema_and_the_other_keywords() -> None:
    schema = {"anyOf": [{"type": "object"}], "oneOf": [CAT, DOG], "required": ["kind"]}
    before = copy.deepcopy(schema)
    assert list(adapted(schema)) == ["anyOf", "allOf", "required"]
    assert adapted(schema)["allOf"] == [{"anyOf": [CAT, DOG]}]
    assert schema == before
    assert list(adapted({"title": "x", "oneOf": [CAT, DOG], "required": ["kind"]})) == ["title", "anyOf", "required"]
    into = {"oneOf": [CAT, DOG], "properties": {"a": {"$ref": "#/oneOf/0"}}}
    assert adapted(into) == into


def test_names_and_values_are_not_keywords() -> None:
    schema = {
        "properties": {"oneOf": {"type": "string"}, "format": {"const": {"format": "password", "oneOf": [1]}}},
        "enum": [{"oneOf": [{"const": 1}, {"const": 2}]}],
        "default": {"format": "binary"},
    }
    assert adapted(schema) == schema


@pytest.mark.parametrize("name", ["password", "binary", "byte", "float", "double", "int64", "decimal", "path"])
def test_a_format_that_asserts_nothing_is_left_out(tokenizer: GrammarTokenizer, name: str) -> None:
    schema = {"type": "object", "properties": {"p": {"type": "string", "format": name}}, "required": ["p"]}
    assert accepts(tokenizer, schema, '{"p": "any text"}')
    assert accepts(tokenizer, {"type": ["string", "null"], "format": name}, "null")
    assert accepts(tokenizer, {"type": "number", "format": name}, "2.5e3")


def test_formats_that_bind_are_kept(tokenizer: GrammarTokenizer) -> None:
    assert not accepts(tokenizer, {"type": "string", "format": "date"}, '"any text"')
    assert not accepts(tokenizer, {"type": "string", "format": "uuid4"}, '"any text"')
    assert accepts(tokenizer, {"type": "integer", "format": "int32"}, "2147483647")
    assert not accepts(tokenizer, {"type": "integer", "format": "int32"}, "2147483648")
    assert not accepts(tokenizer, {"type": "integer", "format": "uint8", "minimum": 3}, "2")
    assert accepts(tokenizer, {"type": "integer", "format": "int64"}, str(2**63 - 1))


def test_the_white_space_is_that_of_a_plain_writer(tokenizer: GrammarTokenizer) -> None:
    value = {"a": [1, {"b": None}], "c": {}, "d": []}
    assert accepts(tokenizer, {"type": "object"}, json.dumps(value))
    for text in (json.dumps(value, separators=(",", ":")), json.dumps(value, indent=1), json.dumps(value) + " "):
        assert not accepts(tokenizer, {"type": "object"}, text)
        loose = grammars.from_json_schema({"type": "object"}, field="f", any_space=True)
        matcher = grammars.compile_grammar(tokenizer, loose).matcher()
        ids = tokenizer.get().tokenize_str(text.rstrip())
        assert all(map(matcher.consume_token, ids))
        assert matcher.is_accepting()


@pytest.mark.parametrize(
    "schema", [{"type": "string"}, {"type": "string", "maxLength": 9}, {"type": "string", "pattern": "^."}, True]
)
def test_half_a_surrogate_pair_is_not_generated(tokenizer: GrammarTokenizer, schema: Any) -> None:
    for text in (r'"\ud83d"', r'"\ude00"', r'"\ud83dx"', r'"\ud83d\ud83d"'):
        assert not accepts(tokenizer, schema, text)
    assert accepts(tokenizer, schema, '"😀"')
    assert not accepts(tokenizer, {"type": "object"}, r'{"\ud83d": 1}')


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#"},
        {"allOf": [{"$ref": "#"}, {"type": "object"}]},
        {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
        {"type": "object", "properties": {"x": {"$ref": "#/properties/x"}}},
        {"$ref": "#", "type": "object"},
        {"$ref": ""},
        {"type": "object", "properties": {"next": {"$ref": "#"}}, "required": ["next"]},
        {"type": "array", "items": {"$ref": "#"}, "minItems": 1},
    ],
)
def test_a_reference_that_never_ends_is_refused(schema: Json) -> None:
    assert endless_reference(schema) is not None
    with pytest.raises(InvalidRequest, match="refers to itself without end") as refused:
        grammars.from_json_schema(schema, field="f")
    assert refused.value.field == "f"


def test_other_references_in_circles_are_none() -> None:
    tree = {"type": "object", "properties": {"children": {"type": "array", "items": {"$ref": "#"}}}}
    assert endless_reference(tree) is None
    assert endless_reference({"allOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/a"}], "$defs": {"a": tree}}) is None


def test_the_walk_visits_each_schema_once() -> None:
    schema = {
        "components": {"x": CAT},
        "items": {"$ref": "#/components/x"},
        "anyOf": [{"$ref": "#/components/x"}, True],
    }
    found = {pointer(path) for path, _ in all_schemas(schema)}
    assert found == {
        "",
        "/items",
        "/anyOf/0",
        "/components/x",
        "/components/x/properties/kind",
        "/components/x/properties/meows",
    }


#: A schema that is refused, and what the message says of it.
REFUSED: list[tuple[Any, str]] = [
    ({"type": "colour"}, "\"type\" does not know 'colour'"),
    ({"type": ["string", 4]}, '"type" must be a string or an array of strings'),
    ({"type": []}, "is empty"),
    ({"enum": 3}, '"enum" must be an array'),
    ({"enum": []}, "is empty"),
    ({"allOf": {}}, '"allOf" must be an array'),
    ({"anyOf": []}, "is empty"),
    ({"oneOf": []}, "is empty"),
    ({"$ref": 3}, '"$ref" must be a string'),
    ({"properties": []}, '"properties" must be an object'),
    ({"properties": {"a": 3}}, "a schema that is not an object"),
    ({"additionalProperties": 3}, "a schema that is not an object"),
    ({"required": "a"}, '"required" must be an array, not "a"'),
    ({"required": [1]}, '"required" must be an array of strings'),
    ({"type": "string", "minLength": -1}, '"minLength" must be a whole number that is not negative, not -1'),
    ({"type": "string", "maxLength": 10**12}, "a length or a repetition that is too large"),
    ({"type": "string", "pattern": 3}, '"pattern" must be a string, not 3'),
    ({"type": "string", "pattern": "[a-"}, "regular expression that cannot be used: unclosed character class"),
    ({"type": "string", "pattern": "(?=a)b"}, "look-around"),
    ({"type": "string", "pattern": "\\bfoo"}, "word boundary"),
    ({"type": "string", "pattern": "^a$", "minLength": 5}, "allows no value"),
    ({"type": "string", "format": 3}, '"format" must be a string, not 3'),
    ({"type": "string", "format": "colour"}, "\"format\" does not support 'colour'"),
    ({"type": "number", "minimum": "1"}, '"minimum" must be a number, not "1"'),
    ({"type": "number", "minimum": 1e30}, "bounds that are too large"),
    ({"type": "number", "multipleOf": 0}, '"multipleOf" must be positive'),
    ({"type": "number", "multipleOf": 1e-12}, '"multipleOf" must be positive'),
    ({"type": "number", "minimum": 3, "maximum": 2}, '"minimum" (3) is greater than "maximum" (2)'),
    ({"type": "integer", "minimum": 1.2, "maximum": 1.8}, "between 1.2 and 1.8 is no integer"),
    ({"type": "integer", "minimum": 1, "maximum": 2, "multipleOf": 5}, "is no multiple of 5"),
    ({"type": "array", "minItems": 3, "maxItems": 1}, '"minItems" (3) is greater than "maxItems" (1)'),
    ({"type": "object", "minProperties": 3, "maxProperties": 1}, '"minProperties"'),
    ({"type": "object", "properties": {"x": {}, "b": {}}, "minProperties": 2}, "all named properties are required"),
    ({"type": "object", "properties": {"x": False}, "required": ["x"]}, "none fits the required property 'x'"),
    ({"$ref": "#/nowhere"}, "leads to '#/nowhere', which does not exist"),
    ({"$ref": "#anchor"}, "the anchor 'anchor', which does not exist"),
    ({"$ref": "http://x/y"}, "'http://x/y', which is not a place in it"),
    ({"$ref": "foo.json#/a"}, "'foo.json', which is not a place in it"),
    (
        {"type": "object", "patternProperties": {"a": {}, "b": {}}},
        '"patternProperties" has patterns that match the same',
    ),
    ({"if": {}, "then": {}}, 'keywords "if", "then" are not supported'),
    ({"type": "array", "uniqueItems": True}, 'keyword "uniqueItems" is not supported'),
    ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, '"oneOf" is not supported where its parts may overlap'),
    ({"allOf": [{"type": "string"}, {"type": "integer"}]}, "exclude each other"),
    ({"const": 1, "type": "string"}, "exclude each other"),
    ({"anyOf": [{"$ref": "#"}]}, "allows no text that ends"),
    ({"const": float("inf")}, "not JSON compliant"),
    ({"properties": {"\ud83d": {}}}, "half a surrogate pair"),
]


@pytest.mark.parametrize(("schema", "words"), REFUSED, ids=[str(schema)[:60] for schema, _ in REFUSED])
def test_a_refusal_says_in_words_what_is_wrong(tokenizer: GrammarTokenizer, schema: Any, words: str) -> None:
    message = refusal(tokenizer, schema)
    assert message.startswith(("f ", "f: "))
    assert words in message
    assert not any(word in message for word in INSIDES), message


PLACED = (0, 3, 5, 14, 17, 21, 22, 23, 27, 34, 35, 36, 40)


@pytest.mark.parametrize("number", PLACED)
def test_a_refusal_names_the_place(tokenizer: GrammarTokenizer, number: int) -> None:
    schema, words = REFUSED[number]
    outer = {
        "type": "object",
        "properties": {"ok": {"type": "string"}, "a/b": {"type": "array", "items": schema, "minItems": 1}},
        "required": ["a/b"],
    }
    message = refusal(tokenizer, outer)
    if "is empty" in words or "is greater" in words:  # no value fits, and so none fits the property
        assert "'a/b'" in message
    else:
        assert words in message
        assert message.endswith("(at /properties/a~1b/items)")


def test_reasons_for_other_grammars_are_one_line() -> None:
    reason = 'at 1(8): unknown special token: "<|x|>"; following special tokens are available: a\n   1 | start: <|x|>\n'
    assert in_words(reason) == 'cannot be followed: line 1, column 8: unknown special token: "<|x|>"'
    reason = (
        'at 1(8): invalid regex "[a-" (in regex): regex parse error:\n    [a-\n    ^\nerror: unclosed character class\n'
    )
    assert in_words(reason) == 'has a regular expression that cannot be used, "[a-": unclosed character class'
    for inside in ("panic: x\n<backtrace>\n 0: core\n</backtrace>", "ParserTooComplex\n<non-verbose/>"):
        assert in_words(inside) == "cannot be followed: it exceeds the limits of the compiler"
    assert "NoExtension" not in in_words("NoExtensionBias\n<non-verbose/>")
