"""Grammars of a shape and size that a test picks: those that overflow llguidance's stack, and ordinary ones."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any
from urllib.parse import quote

from common.grammar import compiler as grammars

Json = dict[str, Any]
Link = Callable[[str], Any]


def schema(parsed: Json) -> str:
    """The grammar of a JSON schema."""
    return grammars.from_json_schema(parsed, field="f").text


def lark(text: str) -> str:
    return grammars.from_lark(text, field="f").text


def nested(step: Callable[[Any], Json], count: int, inner: Any) -> Any:
    for _ in range(count):
        inner = step(inner)
    return inner


def chained(link: Link, count: int, name: Callable[[int], str] = "d{}".format) -> Json:
    """Definitions, each of which has a reference to the next one in it. link: the definition, from that reference."""
    made: Json = {name(i): link(f"#/$defs/{name(i + 1)}") for i in range(count)}
    return {"$ref": f"#/$defs/{name(0)}", "$defs": {**made, name(count): {"type": "string"}}}


def chain(link: Link) -> Callable[[int], str]:
    return lambda count: schema(chained(link, count))


def objects(inner: Any) -> Json:
    return {"type": "object", "properties": {"a": inner}}


def anchors(count: int) -> str:
    """References by `$anchor`."""
    made = {f"d{i}": {"$anchor": f"a{i}", "items": {"$ref": f"#a{i + 1}"}} for i in range(count)}
    return schema({"$ref": "#a0", "$defs": {**made, "end": {"$anchor": f"a{count}", "type": "string"}}})


def identifiers(count: int) -> str:
    """References by `$id`."""
    made = {f"d{i}": {"$id": f"http://x/{i}", "items": {"$ref": str(i + 1)}} for i in range(count)}
    return schema({"$ref": "http://x/0", "$defs": {**made, "end": {"$id": f"http://x/{count}", "type": "string"}}})


def misleading_identifiers(count: int) -> str:
    """Pointers that end at once in the whole schema, and form a chain in the part of it that has an `$id`."""
    inner = chained(lambda ref: {"items": {"$ref": ref}}, count)
    return schema({"allOf": [{"$id": "http://x/inner", **inner}], "$defs": {key: {} for key in inner["$defs"]}})


def escaped(count: int) -> str:
    """References by percent-encoded names. The key `$ref` is written with an escape."""
    names = "a b{}".format
    made: Json = {names(i): {"items": {"$ref": "#/$defs/" + quote(names(i + 1))}} for i in range(count)}
    text = json.dumps({"$ref": "#/$defs/a%20b0", "$defs": {**made, names(count): {"type": "string"}}})
    return f'{{"grammars": [{{"json_schema": {text.replace("$ref", chr(92) + "u0024ref")}}}]}}'


def places_in_each_other(count: int) -> str:
    """References to each of 24 arrays in each other, from the innermost: each is compiled with those inside it."""
    made: Json = {}
    for i in range(count):
        again = [{"$ref": f"#/$defs/d{i}" + "/items" * k} for k in range(1, 24)]
        inner = {"anyOf": [*again, {"$ref": f"#/$defs/d{i + 1}"}]}
        made[f"d{i}"] = nested(lambda s: {"items": s}, 24, inner)
    return schema({"$ref": "#/$defs/d0", "$defs": {**made, f"d{count}": {"type": "string"}}})


def properties_of_the_whole(count: int) -> str:
    """References to properties, without `$defs`."""
    made: Json = {f"p{i}": {"items": {"$ref": f"#/properties/p{i + 1}"}} for i in range(count)}
    return schema({"type": "object", "properties": {**made, f"p{count}": {"type": "string"}}})


def rules(count: int, *, before: str = "", rule: str = 'r{}: "a" r{}', last: str = 'r{}: "b"') -> str:
    """Rules that need the next one each."""
    lines = [rule.format(i, i + 1) for i in range(count)]
    return lark("\n".join([f"{before}start: r0", *lines, last.format(count), ""]))


def backwards(count: int) -> str:
    """The same, the last rule first."""
    lines = [f'r{i}: "a" r{i + 1}' for i in reversed(range(count))]
    return lark("\n".join([f'r{count}: "b"', *lines, "start: r0", ""]))


def mutual(count: int) -> str:
    """Each of the rules needs a few others, and all need each other by way of some."""
    lines = [f'r{i}: "a" r{(i * 7 + 1) % count} | "b" r{(i + 1) % count} | "c"' for i in range(count)]
    return lark("\n".join(["start: r0", *lines, ""]))


def in_brackets(rule: str, opening: str, closing: str) -> Callable[[int], str]:
    """A chain of rules or terminals, each of which has brackets in each other around the next one."""
    line = f"{rule}{{}}: {opening * 25}{rule}{{}}{closing * 25}"
    return lambda count: lark(
        "\n".join([f"start: {rule}0", *(line.format(i, i + 1) for i in range(count)), f'{rule}{count}: "b"', ""])
    )


#: Grammars that overflow a stack of 8 MiB from about half of the size on. All exceed the limits.
BOMBS: dict[str, tuple[Callable[[int], str], int]] = {
    "references": (chain(lambda ref: {"$ref": ref}), 5000),
    "references with other keywords": (chain(lambda ref: {"minItems": 1, "$ref": ref}), 4000),
    "properties": (chain(lambda ref: objects({"$ref": ref})), 1800),
    "required properties": (
        chain(lambda ref: {**objects({"$ref": ref}), "required": ["a"], "additionalProperties": False}),
        1800,
    ),
    "patternProperties": (chain(lambda ref: {"patternProperties": {"^a": {"$ref": ref}}}), 1800),
    "additionalProperties": (chain(lambda ref: {"type": "object", "additionalProperties": {"$ref": ref}}), 2000),
    "items": (chain(lambda ref: {"type": "array", "items": {"$ref": ref}}), 2000),
    "prefixItems": (chain(lambda ref: {"prefixItems": [{"$ref": ref}]}), 1800),
    "anyOf": (chain(lambda ref: {"anyOf": [{"$ref": ref}, {"type": "null"}]}), 2000),
    "oneOf": (chain(lambda ref: {"oneOf": [{"type": "array", "items": {"$ref": ref}}, {"type": "null"}]}), 1400),
    "allOf": (chain(lambda ref: {"allOf": [{"$ref": ref}]}), 2700),
    "objects in each other": (chain(lambda ref: nested(objects, 20, {"$ref": ref})), 140),
    "arrays in each other": (chain(lambda ref: nested(lambda s: {"items": s}, 40, {"$ref": ref})), 100),
    "properties of the whole": (properties_of_the_whole, 2000),
    "places in each other": (places_in_each_other, 20),
    "$anchor": (anchors, 2000),
    "$id": (identifiers, 2000),
    "$id around pointers": (misleading_identifiers, 1800),
    "escapes": (escaped, 2000),
    "rules": (rules, 5000),
    "rules with attributes": (lambda n: rules(n, rule='r{}[capture="x"]: "a" r{}'), 5000),
    "rules, the last one first": (backwards, 5000),
    "rules of each other": (mutual, 5000),
    "parametric rules": (
        lambda n: rules(n, before="", rule="r{}::_: r{}::_", last='r{}::_: "b" %if eq(_, 1)').replace(
            "start: r0", "start: r0::0x0"
        ),
        5000,
    ),
    "rules on one line": (lambda n: rules(n, rule='r{}: "a" r{} -> x'), 5000),
    "rules in brackets": (in_brackets("r", "(", ")"), 350),
    "optional rules": (in_brackets("r", "[", "]"), 350),
    "terminals": (lambda n: rules(n, rule="R{}: R{}", last="R{}: /b/").replace("start: r0", "start: R0"), 7000),
    "terminals in brackets": (in_brackets("T", "(", ")"), 340),
    "terminals with ~": (in_brackets("T", "~(", ")"), 270),
    "conditions": (lambda n: lark('start: r::0x0\nr::_: "a" %if ' + "not(" * n + "true" + ")" * n), 48_000),
    "templates": (lambda n: lark("start: " + "a{" * n + '"a"' + "}" * n), 32_000),
    "nested grammars": (lambda n: lark("start: %lark {\n" + rules(n) + "}\n"), 5000),
    "JSON in Lark": (
        lambda n: lark("start: x\nx: %json " + json.dumps(chained(lambda ref: {"items": {"$ref": ref}}, n))),
        2000,
    ),
    "a quote in a special token": (lambda n: rules(n, before='x: <"x> <x">\n'), 5000),
    "a quote in a comment": (lambda n: rules(n, before='# "\n// "\n'), 5000),
    "a quote in a regular expression": (lambda n: rules(n, before='x: /"/\n'), 5000),
    "a comment in a string": (lambda n: rules(n, before='x: "//#" "\\\\" "/*"i\n'), 5000),
    "a rule behind an import": (lambda n: rules(n, before="%import common.INT "), 5000),
    "a rule behind options": (lambda n: rules(n, before="%llguidance {} "), 5000),
}


def linked_list() -> Json:
    node = {"type": "object", "properties": {"value": {"type": "integer"}, "next": {"$ref": "#/$defs/node"}}}
    return {"$ref": "#/$defs/node", "$defs": {"node": node}}


def tree() -> Json:
    return {
        "type": "object",
        "properties": {"value": {"type": "string"}, "children": {"type": "array", "items": {"$ref": "#"}}},
        "required": ["value"],
        "additionalProperties": False,
    }


def side_by_side(count: int, *, recursive: bool = False) -> Json:
    made: Json = {}
    for i in range(count):
        more = {"next": {"$ref": f"#/$defs/d{i}"}} if recursive else {}
        made[f"d{i}"] = {"type": "object", "properties": {f"p{i}": {"type": "string"}, **more}}
    return {"anyOf": [{"$ref": f"#/$defs/d{i}"} for i in range(count)], "$defs": made}


def filters(tables: int) -> Json:
    """Conditions on tables, all of which lead to each other, as GraphQL servers describe them."""
    made: Json = {}
    for i in range(tables):
        reference = {"$ref": f"#/$defs/filter{i}"}
        related = {f"table{k}": {"$ref": f"#/$defs/filter{k}"} for k in ((i + 1) % tables, (i * 5) % tables)}
        many = {"type": "array", "items": reference}
        made[f"filter{i}"] = {"type": "object", "properties": {"_and": many, "_or": many, "_not": reference, **related}}
    return {"type": "object", "properties": {"where": {"$ref": "#/$defs/filter0"}}, "$defs": made}


def classes(count: int) -> Json:
    """Classes that inherit from each other by `allOf`."""
    made: Json = {"class0": {"type": "object", "properties": {"id": {"type": "string"}}}}
    for i in range(1, count):
        own = {"type": "object", "properties": {f"p{i}": {"type": "integer"}, f"o{i}": {"$ref": "#/$defs/class0"}}}
        made[f"class{i}"] = {"allOf": [{"$ref": f"#/$defs/class{i // 2}"}, own]}
    return {"anyOf": [{"$ref": f"#/$defs/class{i}"} for i in range(count)], "$defs": made}


def flat(count: int, *, required: bool) -> Json:
    properties = {f"property_{i}": {"type": "string"} for i in range(count)}
    return {
        "type": "object",
        "properties": properties,
        "required": [*properties] if required else [],
        "additionalProperties": False,
    }


def parameters(number: int) -> Json:
    """A function's, as OpenAI's documentation has them."""
    return {
        "type": "object",
        "properties": {
            "query": {"type": "string", "description": f"What to look for, {number}"},
            "limit": {"type": "integer", "minimum": 1, "maximum": 100},
            "order": {"type": "string", "enum": ["asc", "desc"]},
            "filters": {"type": "array", "items": {"$ref": "#/$defs/filter"}},
        },
        "required": ["query", "limit", "order", "filters"],
        "additionalProperties": False,
        "$defs": {"filter": {"type": "object", "properties": {"key": {"type": "string"}, "value": {}}}},
    }


def language(count: int) -> str:
    """A programming language: `count` kinds of statements, 20 levels of operators, expressions in brackets."""
    lines = ["start: statement+", "statement: " + " | ".join(f"statement{i}" for i in range(count))]
    lines += [f'statement{i}: "do{i}" expression ("," expression)* ["as" NAME] block? ";"' for i in range(count)]
    lines += ['block: "{" statement* "}"', "expression: level0"]
    lines += [f'level{i}: level{i + 1} ("op{i}" level{i + 1})*' for i in range(20)]
    lines += ['level20: NAME | NUMBER | "(" expression ")" | %json {"type": "string"}']
    return "\n".join([*lines, "NAME: /[a-z]+/", "NUMBER: /[0-9]+/", r"%ignore /[ \n]/", ""])


#: Grammars that people use, and that are large.
ORDINARY: dict[str, Callable[[], str]] = {
    "a flat schema of 100 kB": lambda: schema(flat(2300, required=True)),
    "a flat schema of 100 kB, all optional": lambda: schema(flat(3000, required=False)),
    "a linked list": lambda: schema(linked_list()),
    "a tree": lambda: schema(tree()),
    "900 definitions": lambda: schema(side_by_side(900)),
    "900 recursive definitions": lambda: schema(side_by_side(900, recursive=True)),
    "150 definitions that all lead to each other": lambda: schema(filters(150)),
    "100 classes": lambda: schema(classes(100)),
    "30 objects in each other": lambda: schema(nested(objects, 30, {"type": "string"})),
    "50 objects in each other": lambda: schema(nested(objects, 50, {"type": "string"})),
    "100 arrays in each other": lambda: schema(nested(lambda s: {"items": s, "type": "array"}, 100, {"type": "null"})),
    "a chain of 100 definitions": lambda: schema(chained(lambda ref: nested(objects, 5, {"$ref": ref}), 100)),
    "an enum of 10000": lambda: schema({"enum": [f"value {i}" for i in range(10_000)]}),
    "anyOf of 1000 objects": lambda: schema(
        {"anyOf": [{"type": "object", "properties": {f"p{i}": {"type": "null"}}} for i in range(1000)]}
    ),
    "40 patternProperties": lambda: schema(
        {"type": "object", "patternProperties": {f"^x{i}-": {"type": "string"} for i in range(10, 50)}}
    ),
    "1000 choices": lambda: grammars.from_choice([f"choice {i}" for i in range(1000)], field="f").text,
    "a long regular expression": lambda: grammars.from_regex("([a-z]+/[0-9]{2,4} )*" * 300, field="f").text,
    "a language of 50 rules": lambda: lark(language(28)),
    "a language of 500 rules": lambda: lark(language(475)),
    "500 rules side by side": lambda: lark(
        "\n".join(["start: " + " | ".join(f"r{i}" for i in range(500)), *(f'r{i}: "x{i}"' for i in range(500)), ""])
    ),
    "a chain of 500 rules": lambda: rules(500),
    "500 rules that all need each other": lambda: mutual(500),
    "GBNF of 300 rules": lambda: (
        grammars.from_lark_or_gbnf(
            "\n".join(
                ["root ::= r0", *(f'r{i} ::= "a" (r{i + 1} | "b" root)?' for i in range(300)), 'r300 ::= "c" root?']
            ),
            field="f",
        ).text
    ),
}


def with_siblings(count: int) -> Json:
    """Definitions with two references each that have other keywords beside them: each of those is compiled again."""
    made: Json = {}
    for i in range(count):
        reference = {"$ref": f"#/$defs/d{i + 1}"}
        made[f"d{i}"] = objects({**reference, "minProperties": 0})
        made[f"d{i}"]["properties"]["b"] = {**reference, "type": "object"}
    return {"$ref": "#/$defs/d0", "$defs": {**made, f"d{count}": {"type": "object"}}}


def at_least_one(count: int) -> Json:
    """Optional properties, of which one is needed."""
    return {**flat(count, required=False), "minProperties": 1}


def ambiguous(count: int) -> str:
    """Rules that all begin with each other: each mask looks at all pairs of them."""
    lines = ["start: a", "a: a a | " + " | ".join(f"r{i}" for i in range(count))]
    return "\n".join([*lines, *(f"r{i}: a r{(i + 1) % count} | /[a-z]+/" for i in range(count)), ""])


#: Grammars within common/grammar/limits.py that take seconds or gigabytes: form and value of a GrammarSource.
COSTLY: dict[str, Callable[[], tuple[str, Any]]] = {
    "nested references": lambda: ("json", with_siblings(22)),
    "optional properties": lambda: ("json", at_least_one(1000)),
    "alternatives": lambda: ("grammar", "start: " + '"a"? ' * 26_000 + "\n"),
    "many rules": lambda: ("grammar", "root ::= " + "a? " * 8_000 + '\na ::= "x"'),
    "patterns": lambda: ("json", {"type": "string", "allOf": [{"pattern": f"a.{{{i}}}b"} for i in range(30)]}),
    "intersections": lambda: (
        "grammar",
        "start: A\nA: " + " & ".join(rf"/(.|\n)*a.{{{i}}}b.*/" for i in range(1, 40)) + "\n",
    ),
    "a regular expression": lambda: ("regex", "a?" * 26_000),
    "slow masks": lambda: ("grammar", ambiguous(1500)),
}


def random_ordinary(rng: random.Random, depth: int = 0) -> Json:
    """A schema of the kinds of keywords that applications use, up to five levels deep."""
    kind = rng.choice(
        ["string", "integer", "number", "boolean", "enum", "null"]
        if depth > 3
        else ["object"] * 3 + ["array", "anyOf", "string", "enum"]
    )
    if kind == "object":
        names = [f"{rng.choice(['name', 'value', 'item', 'kind', 'note'])}_{i}" for i in range(rng.randrange(1, 12))]
        return {
            "type": "object",
            "properties": {name: random_ordinary(rng, depth + 1) for name in names},
            "required": [name for name in names if rng.random() < 0.7],
            "additionalProperties": rng.random() < 0.2,
        }
    if kind == "array":
        return {"type": "array", "items": random_ordinary(rng, depth + 1), "maxItems": rng.randrange(1, 20)}
    if kind == "anyOf":
        return {"anyOf": [random_ordinary(rng, depth + 1) for _ in range(rng.randrange(2, 5))]}
    if kind == "enum":
        return {"enum": [f"choice {i}" for i in range(rng.randrange(2, 30))]}
    if kind == "string":
        more = [{}, {"maxLength": 80}, {"pattern": "^[a-z]{2,12}-[0-9]+$"}, {"format": "date-time"}]
        return {"type": "string", "description": "A text.", **rng.choice(more)}
    if kind == "integer":
        return {"type": "integer", "minimum": rng.randrange(-10, 10), "maximum": rng.randrange(10, 1000)}
    return {"type": kind}
