"""Limits of grammars: what would overflow llguidance's stack is refused, with room to spare; what people use is not."""

from __future__ import annotations

import gc
import json
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from common.errors import InvalidRequest
from common.grammar import compiler as grammars
from common.grammar import limits
from common.grammar.compiler import GrammarTokenizer, compile_grammar
from common.types import Grammar
from gateway.text.answer_grammar import AnswerGrammarBuilder
from gateway.text.reasoning import ReasoningSection
from gateway.text.tokenizer import TextTokenizer
from gateway.text.tools.format import Function, ToolFormat
from gateway.text.tools.json_formats import HermesFormat, Llama3Format, MistralFormat
from gateway.text.tools.known_formats import KIMI_K2, QWEN3_CODER
from gateway.text.tools.pythonic import PythonicFormat
from tests.rigs.engine import grammar_shapes as shapes
from tests.rigs.engine.grammar_child import COMPILED, OVERFLOW, GrammarChild

USUAL_STACK = 8 << 20


@pytest.fixture(scope="module")
def child(smollm2_dir: Path) -> Iterator[GrammarChild]:
    with GrammarChild(smollm2_dir) as running:
        yield running


@pytest.fixture(scope="module")
def tokenizer(smollm2_dir: Path) -> GrammarTokenizer:
    return GrammarTokenizer(smollm2_dir, eos_ids=(2,), vocab_size=49152)


def refusal(text: str) -> str:
    with pytest.raises(InvalidRequest) as refused:
        limits.check(text, "f")
    assert refused.value.field == "f"
    return refused.value.message


def accepted(text: str) -> bool:
    try:
        limits.check(text, "f")
    except InvalidRequest:
        return False
    return True


@pytest.mark.parametrize("name", shapes.BOMBS)
def test_a_grammar_that_would_end_the_process_is_refused(child: GrammarChild, name: str) -> None:
    make, count = shapes.BOMBS[name]
    text = make(count)
    assert child.outcome(text, stack=USUAL_STACK, checked=False) == OVERFLOW
    message = refusal(text)
    assert message.startswith("f has ")
    assert "at most" in message
    assert child.outcome(text) == f"refused: {message}"


@pytest.mark.parametrize("name", shapes.BOMBS)
def test_the_largest_that_is_accepted_needs_less_than_a_third_of_the_stack(child: GrammarChild, name: str) -> None:
    make, refused = shapes.BOMBS[name]
    most = 1
    while refused - most > max(1, refused // 100):
        middle = (most + refused) // 2
        if accepted(make(middle)):
            most = middle
        else:
            refused = middle
    outcome = child.outcome(make(most), stack=limits.COMPILE_STACK // 3)
    assert outcome == COMPILED or outcome.startswith("refused: f"), outcome


@pytest.mark.parametrize("name", shapes.ORDINARY)
def test_an_ordinary_grammar_compiles(child: GrammarChild, name: str) -> None:
    assert child.outcome(shapes.ORDINARY[name]()) == COMPILED


@pytest.mark.parametrize(
    "calls",
    [
        HermesFormat(),
        Llama3Format(),
        MistralFormat(),
        MistralFormat(named=True),
        PythonicFormat(),
        QWEN3_CODER,
        KIMI_K2,
    ],
    ids=lambda f: f.name,
)
def test_so_do_fifty_functions(child: GrammarChild, smollm2_dir: Path, calls: ToolFormat) -> None:
    functions = [Function(f"function_{i}", shapes.parameters(i), strict=True) for i in range(50)]
    functions += [Function("walk", shapes.tree()), Function("list", shapes.linked_list())]
    composer = AnswerGrammarBuilder(TextTokenizer(smollm2_dir), calls, None)
    for text, required in ((None, True), (None, False), (grammars.from_json_schema(shapes.tree(), field="f"), False)):
        made = composer.build(
            text, functions, required=required, parallel=True, initial_section=ReasoningSection.BEFORE, field="tools"
        )
        assert made is not None
        assert child.outcome(made.text) == COMPILED


def test_the_thread_that_compiles_has_its_own_stack(child: GrammarChild) -> None:
    make, _ = shapes.BOMBS["properties"]
    text = make(990)  # 2976 levels
    assert child.outcome(text, stack=USUAL_STACK) == OVERFLOW
    assert child.outcome(text) == COMPILED


class TestMeasures:
    """Each limit, at its edge."""

    def test_arrays_and_objects_in_each_other(self, tokenizer: GrammarTokenizer) -> None:
        def deep(levels: int) -> Any:
            return shapes.nested(lambda s: {"type": "array", "items": s}, levels - 1, {"type": "null"})

        most = limits.MAX_NESTING
        compile_grammar(tokenizer, Grammar(shapes.schema(deep(most)), "f"))
        assert (
            refusal(shapes.schema(deep(most + 1))) == f"f is nested {most + 1} levels deep; at most {most} are allowed"
        )

    @pytest.mark.parametrize("levels", [128, 190, 2000, 100_000])
    def test_deeper_ones_are_refused_before(self, levels: int) -> None:
        text = '{"items":' * levels + "true" + "}" * levels
        with pytest.raises(InvalidRequest) as refused:
            grammars.from_json_schema(text, field="f")
        assert refused.value.field == "f"
        if levels < 900:  # Python's JSON reader takes it
            assert refused.value.message == f"f is nested {levels} levels deep; at most 120 are allowed"
        wrapped = f'{{"grammars": [{{"json_schema": {text}}}]}}'
        assert ("nested" if levels < 900 else "recursion") in refusal(wrapped)
        assert ("nested" if levels < 900 else "recursion") in refusal(f"start: %json {text}")

    def test_members(self) -> None:
        most = limits.MAX_MEMBERS
        for many in (
            lambda n: {"enum": [0] * n},
            lambda n: {"anyOf": [True] * n},
            lambda n: {"required": [str(i) for i in range(n)]},
            lambda n: {str(i): 0 for i in range(n)},
        ):
            limits.check_schema({"items": many(most)}, "f")
            with pytest.raises(InvalidRequest, match=f"f has {most + 1} members in one array or object; at most"):
                limits.check_schema({"items": many(most + 1)}, "f")

    def test_references(self) -> None:
        most = limits.MAX_MEMBERS
        halves = [[{"$ref": "#"}] * (most // 2), [{"$ref": "#"}] * (most // 2)]
        limits.check_schema(halves, "f")
        with pytest.raises(InvalidRequest, match=f"f has {most + 1} references; at most {most} are allowed"):
            limits.check_schema([*halves, {"$ref": "#"}], "f")

    def test_patterns(self, child: GrammarChild) -> None:
        def patterns(count: int) -> str:
            made = {f"^{chr(97 + i // 10)}{i % 10}x": {"type": "null"} for i in range(count)}
            return shapes.schema({"type": "object", "patternProperties": made})

        most = limits.MAX_PATTERNS
        assert child.outcome(patterns(most)) == COMPILED
        assert (
            refusal(patterns(most + 1)) == f"f has {most + 1} patternProperties in one object; at most 128 are allowed"
        )

    def test_rules(self) -> None:
        most = limits.MAX_MEMBERS
        line = "r{}: /a/\n".format
        limits.check("".join(map(line, range(most))), "f")
        assert f"f has {most + 1} rules; at most {most}" in refusal("".join(map(line, range(most + 1))))

    def test_brackets(self) -> None:
        most = limits.MAX_BRACKETS
        text = 'start: {}"(" /[(]/ "a"{} # ((\nother: ("a")'
        limits.check(text.format("([" * (most // 2), "])" * (most // 2)), "f")
        assert refusal(text.format("(" * (most + 1), ")" * (most + 1))) == (
            f"f has brackets nested {most + 1} levels deep; at most {most} are allowed"
        )

    def test_a_long_grammar_from_elsewhere(self, tokenizer: GrammarTokenizer) -> None:
        text = 'start: "a"' + " " * grammars.MAX_GRAMMAR_CHARS
        with pytest.raises(InvalidRequest, match="f is longer than"):
            compile_grammar(tokenizer, Grammar(text, "f"))


def by_search(weights: list[int], edges: list[list[int]]) -> int:
    """heaviest_path, from its definition."""
    count = len(weights)
    reach = [{v} for v in range(count)]
    for _ in range(count):
        for v in range(count):
            for w in edges[v]:
                reach[v] |= reach[w]
    together = [frozenset(w for w in reach[v] if v in reach[w]) for v in range(count)]

    def heaviest(component: frozenset[int]) -> int:
        behind = {together[w] for v in component for w in edges[v]} - {component}
        return sum(weights[v] for v in component) + max(map(heaviest, behind), default=0)

    return max(map(heaviest, together), default=0)


@given(
    st.lists(st.integers(0, 9), max_size=9),
    st.lists(st.tuples(st.integers(0, 8), st.integers(0, 8)), max_size=20),
)
def test_the_heaviest_path(weights: list[int], pairs: list[tuple[int, int]]) -> None:
    edges: list[list[int]] = [[] for _ in weights]
    for v, w in pairs:
        if v < len(weights) and w < len(weights):
            edges[v].append(w)
    assert limits.heaviest_path(weights, edges) == by_search(weights, edges)


# Grammars that are hard to read: brackets and quotes in literals, rules that begin in the middle of a line.
VALID = [
    'start: "a" | b\nb[capture]: "(" B*\nB: /[(]/',
    'start: "\\"(" /\\/"/ "//" /#/',
    'start: a -> x b: "y"\na: "z"',
    "start: <|im_end|> <[1-3]> <[^5]>",
    'start: "a"i "b"i /c/i\ni: "d"',
    "?start: x\n!x: _Y | _z\n_Y: /y/\n_z: /z/",
    'start: r::0x0\nr::_: "a" r::incr(_) %if lt(_, 3) | "b" %if eq([0:3], 3)',
    'start: T\nT: "a".."z" & ~/[aeiou]/ | "x"{2,3} | "y"~2..4',
    'start: %json{"type":"string"}| %json {"enum": ["%json {", "\\\\", "\\""]} "x"',
    'start: T\nT: %regex {"substring_chars": "a(b\\"c"}',
    '%llguidance {"no_forcing": true}\n%ignore /[ ]/ // (\nstart: "a" # "(\n  | "b"\n',
    "start: %lark {\n start: x\n x: /a/\n}\n  | y\ny: /b/",
    'start[stop="("]: /[a-z]+/',
    'x[suffix=Y]: /a*/\nY: ")"\nstart: x',
    'start: /a\n"b/ [ /c/ ] ( /d/ )+',
    "%import common.INT -> N start: N",
    "start: /a/\n%ignoreX\nX: / /",
]


@pytest.mark.parametrize("text", VALID)
def test_what_llguidance_can_read_can_be_checked(tokenizer: GrammarTokenizer, text: str) -> None:
    compile_grammar(tokenizer, Grammar(text, "f"))


@pytest.mark.parametrize("before", VALID)
def test_no_rule_hides_behind_something(before: str) -> None:
    """A chain of rules that follows, whatever is before it."""
    before = before.replace("start", "before") + "\n"

    def rules(count: int) -> str:
        made = shapes.rules(count, before=before, rule='q{}: "a" q{}', last='q{}: "b"')
        return made.replace("start: r0", "start: q0")

    limits.check(rules(limits.MAX_CHAIN - 5), "f")
    assert "lead from one to the next" in refusal(rules(limits.MAX_CHAIN))


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ('start: "a', "nothing can begin with '\"' in line 1, column 8"),
        ("start: a\na: /x\n", "nothing can begin with '/' in line 2, column 4"),
        ("start: %json {", "%json that is not JSON"),
        ('{"grammars": [["g", null, "start: x"]]}', "must be an object"),
        ('{"grammars": [', "is not a grammar"),
    ],
)
def test_what_cannot_be_checked_is_refused(text: str, why: str) -> None:
    assert why in refusal(text)


GROWING: list[Callable[[int], str]] = [
    lambda n: shapes.schema(shapes.flat(20 * n, required=True)),
    lambda n: shapes.schema(shapes.side_by_side(10 * n, recursive=True)),
    lambda n: shapes.schema(shapes.filters(4 * n)),
    lambda n: shapes.rules(60 * n),
    lambda n: shapes.backwards(60 * n),
    lambda n: shapes.mutual(60 * n),
    lambda n: shapes.lark("start: " + '"' * 1000 * n),
    lambda n: shapes.lark("start: " + "(" * 1000 * n),
    lambda n: shapes.lark("a: %json1\n" * 100 * n),
]


@pytest.mark.parametrize("make", GROWING, ids=range(len(GROWING)))
def test_the_check_is_linear(make: Callable[[int], str]) -> None:
    """Ten times the text takes about ten times the processor time, not a hundred times."""
    short, long = make(10), make(100)
    assert best_of(3, long) < 4 * best_of(5, short) * len(long) / len(short)


def best_of(count: int, text: str) -> float:
    """Seconds of processor time that a check takes."""
    taken = []
    gc.disable()  # its time depends on all else that the process has
    for _ in range(count):
        began = time.thread_time()
        accepted(text)
        taken.append(time.thread_time() - began)
    gc.enable()
    return min(taken)


LINKS: list[shapes.Link] = [
    lambda ref: {"$ref": ref},
    lambda ref: {"type": "object", "properties": {"a": {"$ref": ref}}, "required": ["a"]},
    lambda ref: {"items": {"$ref": ref}},
    lambda ref: {"prefixItems": [{"$ref": ref}, {"$ref": "#"}]},
    lambda ref: {"anyOf": [{"$ref": ref}, {"type": "null"}]},
    lambda ref: {"type": "array", "items": {"anyOf": [{"$ref": ref}, {"$ref": "#/$defs/d0"}]}},
    lambda ref: shapes.nested(shapes.objects, 12, {"$ref": ref}),
    lambda ref: {"additionalProperties": {"$ref": ref}},
]


def random_schema(rng: random.Random) -> str:
    """Definitions that lead to the next one and to some others, of many kinds and near the limit."""
    count, others = rng.randrange(1, 900), rng.choice([0.0, 0.1, 0.5])
    kinds = rng.sample(LINKS, rng.randrange(1, 4))
    made: shapes.Json = {}
    for i in range(count):
        made[f"d{i}"] = rng.choice(kinds)(f"#/$defs/d{i + 1}")
        if rng.random() < others:
            made[f"d{i}"].setdefault("properties", {})["other"] = {"$ref": f"#/$defs/d{rng.randrange(count)}"}
    rng.shuffle(order := [*made.items()])
    return shapes.schema({"$ref": "#/$defs/d0", "$defs": dict([*order, (f"d{count}", {"type": "string"})])})


def random_lark(rng: random.Random) -> str:
    count, others = rng.randrange(1, 2900), rng.choice([0.0, 0.1, 0.5])
    depth = rng.choice([0, 0, 1, 5, 25])
    name = rng.choice(["r{}", "T{}"]).format
    lines = [f"start: {name(0)}"]
    for i in range(count):
        other = f'"x" {name(rng.randrange(i, count) + 1)}' if rng.random() < others else '"y"'
        lines.append(f'{name(i)}: {"(" * depth}"a" {name(i + 1)} | {other}{")" * depth}')
    rng.shuffle(lines)
    return shapes.lark("\n".join([*lines, f'{name(count)}: "b"', ""]))


@settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(st.integers(0, 1 << 32), st.sampled_from([random_schema, random_lark]))
def test_what_is_accepted_never_overflows(child: GrammarChild, seed: int, make: Callable[[random.Random], str]) -> None:
    """With a third of the stack, and among both grammars that are accepted and grammars that are not."""
    text = make(random.Random(seed))
    outcome = child.outcome(text, stack=limits.COMPILE_STACK // 3)
    assert outcome == COMPILED or outcome.startswith("refused: f"), outcome
    assert accepted(text) != (outcome.startswith("refused: f has") and "at most" in outcome)


def test_a_schema_of_a_tool_is_checked_in_its_place(smollm2_dir: Path) -> None:
    """Where parameters are a part of a larger schema, their references lead there too."""
    chain = shapes.chained(lambda ref: shapes.objects({"$ref": ref}), 1100)
    function = Function("f", {"type": "object", "properties": {"a": chain | {"$defs": {}}}, "$defs": chain["$defs"]})
    for calls in (HermesFormat(), Llama3Format(), MistralFormat(), PythonicFormat()):
        composer = AnswerGrammarBuilder(TextTokenizer(smollm2_dir), calls, None)
        made = composer.build(
            None, [function], required=True, parallel=True, initial_section=ReasoningSection.BEFORE, field="tools"
        )
        assert made is not None
        assert "lead from one to the next" in refusal(made.text)


def test_what_is_wrong_in_another_way_is_left_to_llguidance() -> None:
    limits.check(json.dumps({"grammars": [{"json_schema": {"$ref": "#/nowhere"}}, {"json_schema": True}]}), "f")
