"""Limits of a grammar's shape, checked before llguidance reads its text.

llguidance compiles by recursion on the native stack. An overflow of this stack ends the process. `check` measures it in
levels:

    JSON schema   a reference counts as many levels as arrays and objects are nested in its target
    Lark          a rule or terminal counts one level, and one for each bracket inside another

A reference or a rule is compiled once, inside the first one that needs it. A chain is at most as long as the heaviest
path through the graph of references, where references that lead back to each other all lie on the path.

Measured with llguidance 1.9.1 on x86-64, in a thread with COMPILE_STACK: a level takes at most 4.9 kB (`items` without
a `type`), so the stack lasts for 13,800 levels of a schema. A Lark grammar's levels take at most 3.2 kB.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from common.errors import InvalidRequest
from common.json_schema.places import resolve

COMPILE_STACK = 64 << 20  #: Native stack in bytes of the thread that compiles, whatever `ulimit -s` says.
MAX_CHAIN = 3_000  #: Levels of one chain, less than a quarter of what the stack lasts for.
#: Nested arrays and objects in a JSON schema. llguidance's JSON reader stops at 127, with 3 around the schema.
MAX_NESTING = 120
MAX_BRACKETS = 64  #: Nested brackets in Lark. llguidance allows 30 for groups, any number for `%if` conditions.
MAX_MEMBERS = 1 << 14  #: Members of one array or object, references of one schema, rules of one Lark grammar.
MAX_PATTERNS = 128  #: patternProperties of one object: llguidance compares each pair (0.1 s for 128, 20 s for 480).

_KEYS = frozenset({"$ref", "$id", "id", "$schema", "patternProperties"})  #: The walk through a schema looks at them.
_DEFINITIONS = ("$defs", "definitions")
_OLD_DRAFT = re.compile("draft-0[34]")  #: These drafts identify a part by `id`, later drafts by `$id`.
_MISSING = object()  #: Stands for the target of a reference that has none.

#: Lark's literals, in which brackets and names mean nothing: strings, regular expressions, comments, special tokens.
_LITERAL = r"""
    "(?:[^"\\\n]|\\.)*+"i? | /(?!/)(?:[^/\\]|\\.)++/[imslux]* | (?://|\#)[^\n]*+ | <[^<>\s]++>
"""
_UNTIL_JSON = re.compile(rf"""(?: [^"/\#<%]++ | {_LITERAL} | %(?!json|regex|llguidance) )*+""", re.X)
_BEFORE_JSON = re.compile(r"%(json|regex|llguidance)[ \t\r\n]*+")
_TOKEN = re.compile(
    rf"""
    {_LITERAL} | :: | @[\w-]+ | %(?:ignore|import|override|declare|lark|if)
    | ( _?[a-z][_a-z0-9-]* | _?[A-Z][_A-Z0-9-]* | [:()\[\]{{}}] )
    """,
    re.X,
)
_CLOSING = frozenset(")]}")
_MARKS = frozenset(":([{") | _CLOSING | {""}  #: All other tokens are names; a literal gives "".
_JSON = json.JSONDecoder()


def refused(field: str, problem: str) -> InvalidRequest:
    """Returns the error of a grammar in the request's field `field`."""
    return InvalidRequest(f"{field} {problem}", field=field)


def check(text: str, field: str) -> None:
    """Checks a grammar as llguidance takes it: Lark, or JSON with a list of Lark grammars and JSON schemas.

    Linear in the text. Raises InvalidRequest that names the field, the limit and the grammar's own value.
    """
    if not text.lstrip().startswith("{"):
        check_lark(text, field)
        return
    try:
        parsed = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise refused(field, f"is not a grammar: {error}") from None
    grammars = parsed.get("grammars")
    for grammar in grammars if isinstance(grammars, list) else ():
        if not isinstance(grammar, dict):  # llguidance would take an array of the members' values
            raise refused(field, "is not a grammar: each of `grammars` must be an object")
        if isinstance(lark := grammar.get("lark_grammar"), str):
            check_lark(lark, field)
        check_schema(grammar.get("json_schema"), field)


def check_schema(schema: object, field: str) -> None:
    """Checks a parsed JSON schema. Raises InvalidRequest as `check` does."""
    if not isinstance(schema, dict | list):
        return
    walk = _Walk(schema, field)
    if walk.depth > MAX_NESTING:
        raise refused(field, f"is nested {walk.depth} levels deep; at most {MAX_NESTING} are allowed")
    _require_few(len(walk.references), "references", field)
    distinct = dict.fromkeys(reference for _, reference in walk.references)
    most = (len(distinct) + 1) * walk.depth
    if most <= MAX_CHAIN:
        return
    targets = None if walk.has_ids else _targets(walk, distinct)
    if targets is None:
        has = f"has {len(distinct)} different references and {walk.depth} levels of nesting. They multiply to {most}"
        where = "in a schema with $id, or with references that are not a JSON pointer to a place in it"
        raise refused(field, f"{has}, and at most {MAX_CHAIN} are allowed {where}")
    graph = _ReferenceGraph(walk, targets)
    if sum(graph.weights) > MAX_CHAIN:
        _require_short_chain(graph.weights, graph.edges(), field)


def check_lark(text: str, field: str) -> None:
    """Checks a grammar in llguidance's dialect of Lark. Raises InvalidRequest as `check` does."""
    tokens = (token for run in _without_json(text, field) for token in _TOKEN.findall(run))
    bodies, nesting = _lark_rules(tokens)
    deepest = max(nesting.values(), default=0)
    if deepest > MAX_BRACKETS:
        raise refused(field, f"has brackets nested {deepest} levels deep; at most {MAX_BRACKETS} are allowed")
    _require_few(len(bodies), "rules", field)
    weights = [1 + nesting.get(name, 0) for name in bodies]
    if sum(weights) > MAX_CHAIN:
        numbers = {name: number for number, name in enumerate(bodies)}
        edges = [[numbers[name] for name in set(body) if name in numbers] for body in bodies.values()]
        _require_short_chain(weights, edges, field)


class _Walk:
    """The arrays and objects of a schema (nodes), outer before inner ones."""

    def __init__(self, schema: dict[str, Any] | list[Any], field: str) -> None:
        self.nodes: list[Any] = [schema]
        self.parents = [0]  #: The number of the node around each node.
        self.depths = [1]  #: How many nodes are around each node, itself included.
        self.references: list[tuple[int, str]] = []  #: Each `$ref`: its object's number, and its value.
        has_id = has_old_id = old = False
        for number, node in enumerate(self.nodes):
            _require_few(len(node), "members in one array or object", field)
            if type(node) is not dict:
                members = node
            else:
                members = node.values()
                if not _KEYS.isdisjoint(node):
                    if isinstance(reference := node.get("$ref"), str):
                        self.references.append((number, reference))
                    has_id |= number > 0 and isinstance(node.get("$id"), str)
                    has_old_id |= number > 0 and isinstance(node.get("id"), str)
                    old |= isinstance(draft := node.get("$schema"), str) and _OLD_DRAFT.search(draft) is not None
                    if isinstance(patterns := node.get("patternProperties"), dict) and len(patterns) > MAX_PATTERNS:
                        has = f"has {len(patterns)} patternProperties in one object"
                        raise refused(field, f"{has}; at most {MAX_PATTERNS} are allowed")
            inner = [member for member in members if type(member) is dict or type(member) is list]
            if inner:
                self.nodes += inner
                self.parents += [number] * len(inner)
                self.depths += [self.depths[number] + 1] * len(inner)
        #: A part of the schema has an identifier. Pointers within that part begin there, not at the whole schema.
        self.has_ids = has_id or (has_old_id and old)
        self.depth = self.depths[-1]  #: The largest depth.


def _targets(walk: _Walk, references: Iterable[str]) -> dict[str, int | None] | None:
    """Returns the node that each reference leads to, or None where it leads to true, false or the like.

    Returns None if one of the references is not a pointer to a place in the schema.
    """
    numbers = {id(node): number for number, node in enumerate(walk.nodes)}
    found: dict[str, int | None] = {}
    for reference in references:
        node = resolve(walk.nodes[0], reference, _MISSING) if reference else _MISSING
        if node is _MISSING:
            return None
        found[reference] = numbers.get(id(node)) if isinstance(node, dict | list) else None
    return found


class _ReferenceGraph:
    """The places in a schema and the references between them.

    A place is the whole schema, or a node that a reference leads to, without the places inside it. The vertices are
    the places and then the references. A place leads to the places and references in it, a reference to its place.
    """

    def __init__(self, walk: _Walk, targets: Mapping[str, int | None]) -> None:
        self._walk, self._targets = walk, targets
        self._nodes = sorted({0}.union(node for node in targets.values() if node is not None))
        self._places = {node: place for place, node in enumerate(self._nodes)}
        self._place_of: list[int] = []  #: Place of each node of the walk.
        heights = [1] * len(self._nodes)
        for number, (parent, depth) in enumerate(zip(walk.parents, walk.depths, strict=True)):
            place = self._places[number] if number in self._places else self._place_of[parent]
            self._place_of.append(place)
            heights[place] = max(heights[place], depth - walk.depths[self._nodes[place]] + 1)
        for place in range(len(heights) - 1, 0, -1):  # inner places before those around them
            node = self._nodes[place]
            outer = self._place_of[walk.parents[node]]
            height = walk.depths[node] - walk.depths[self._nodes[outer]] + heights[place]
            heights[outer] = max(heights[outer], height)
        #: A reference weighs as much as its place is high, since two references to a place are compiled separately. A
        #: place itself weighs nothing, except for the whole schema, which is compiled without a reference.
        self.weights = [heights[0], *[0] * (len(heights) - 1)]
        self.weights += [1 if node is None else heights[self._places[node]] for node in targets.values()]

    def edges(self) -> list[list[int]]:
        """Returns for each vertex the vertices that it leads to."""
        walk, places = self._walk, self._places
        found: list[list[int]] = [[] for _ in places]
        for node, place in places.items():
            if place > 0 and not self._is_definition(node):
                found[self._place_of[walk.parents[node]]].append(place)
        vertices = {reference: len(places) + i for i, reference in enumerate(self._targets)}
        for number, reference in walk.references:
            found[self._place_of[number]].append(vertices[reference])
        found += [[] if node is None else [places[node]] for node in self._targets.values()]
        return found

    def _is_definition(self, node: int) -> bool:
        """Returns whether the node is an entry of the whole schema's `$defs`, to which only references lead."""
        container = self._walk.parents[node]
        if container == 0 or self._walk.parents[container] != 0 or container in self._places:
            return False
        schema = self._walk.nodes[0]
        return isinstance(schema, dict) and any(schema.get(key) is self._walk.nodes[container] for key in _DEFINITIONS)


def _without_json(text: str, field: str) -> Iterator[str]:
    """Yields a Lark grammar's text in pieces, without the JSON values in it. Checks the JSON schemas among them."""
    at = 0
    while True:
        run = _UNTIL_JSON.match(text, at)
        assert run is not None  # it matches "" too
        yield run[0]
        at = run.end()
        if at == len(text):
            return
        keyword = _BEFORE_JSON.match(text, at)
        if keyword is None:
            line, column = text.count("\n", 0, at) + 1, at - text.rfind("\n", 0, at)
            problem = f"nothing can begin with {text[at]!r} in line {line}, column {column}"
            raise refused(field, f"is not a grammar: {problem}")
        try:
            value, at = _JSON.raw_decode(text, keyword.end())
        except (ValueError, RecursionError) as error:
            raise refused(field, f"has a %{keyword[1]} that is not JSON: {error}") from None
        if keyword[1] == "json":
            check_schema(value, field)


def _lark_rules(tokens: Iterable[str]) -> tuple[dict[str, list[str]], dict[str, int]]:
    """Returns the names in the body, and the depth of the brackets there, by the name of each rule or terminal.

    Rules of a nested grammar (`%lark {...}`) count as rules of the grammar around it.
    """
    bodies, nesting = dict[str, list[str]](), dict[str, int]()
    rule, body, depth = "", list[str](), 0
    last = -1  # the index in `body` of the last name directly inside the innermost open bracket; -1: there is none
    outside: list[tuple[str, list[str], int]] = []  # for each open bracket: rule, body and last of the text around it
    for token in tokens:
        if token not in _MARKS:
            last = len(body)
            body.append(token)
        elif token == ":":
            if last >= 0:  # a rule begins: its name, and names from its [attributes]
                rule, *attributes = body[last:]
                del body[last:]
                body = bodies.setdefault(rule, [])
                body += attributes
                last = -1
        elif token in _CLOSING:
            if 0 < depth == len(outside):
                rule, body, last = outside.pop()
            depth = max(depth - 1, 0)
        elif token:
            depth += 1
            if depth <= MAX_BRACKETS:  # deeper brackets are counted only, since the grammar is refused
                outside.append((rule, body, last))
                last = -1
            if depth > nesting.get(rule, 0):
                nesting[rule] = depth
    return bodies, nesting


def _require_few(count: int, what: str, field: str) -> None:
    if count > MAX_MEMBERS:
        raise refused(field, f"has {count} {what}; at most {MAX_MEMBERS} are allowed")


def _require_short_chain(weights: Sequence[int], edges: Sequence[Sequence[int]], field: str) -> None:
    longest = heaviest_path(weights, edges)
    if longest > MAX_CHAIN:
        has = f"has references that lead from one to the next for {longest} levels"
        raise refused(field, f"{has}; at most {MAX_CHAIN} are allowed")


def heaviest_path(weights: Sequence[int], edges: Sequence[Sequence[int]]) -> int:
    """Returns the weight of a graph's heaviest path.

    Vertices that reach each other (by Tarjan's algorithm) count as one vertex with the sum of their weights.
    """
    unseen, count, open_vertices = 0, 0, list[int]()
    order, low = [unseen] * len(weights), [0] * len(weights)
    total = [-1] * len(weights)  # weight of the heaviest path from each vertex; -1 while its component is open
    for root in range(len(weights)):
        if order[root] != unseen:
            continue
        count += 1
        order[root] = low[root] = count
        open_vertices.append(root)
        path = [(root, iter(edges[root]))]
        while path:
            vertex, rest = path[-1]
            for other in rest:
                if order[other] == unseen:
                    count += 1
                    order[other] = low[other] = count
                    open_vertices.append(other)
                    path.append((other, iter(edges[other])))
                    break
                if total[other] < 0 and order[other] < low[vertex]:
                    low[vertex] = order[other]
            else:
                path.pop()
                if path and low[vertex] < low[path[-1][0]]:
                    low[path[-1][0]] = low[vertex]
                if low[vertex] == order[vertex]:
                    component: list[int] = []
                    while not component or component[-1] != vertex:
                        component.append(open_vertices.pop())
                    behind = max((total[other] for member in component for other in edges[member]), default=0)
                    weight = sum(weights[member] for member in component) + max(behind, 0)
                    for member in component:
                        total[member] = weight
    return max(total, default=0)
