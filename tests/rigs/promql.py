"""The part of PromQL that our rules use, over series in memory: enough to see an alert fire where promtool is absent.

`rate` and `increase` take the slope between the first and last sample of the window and do not extrapolate to its ends.
"""

from __future__ import annotations

import itertools
import math
import operator
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import promql_parser as promql

LOOKBACK_S = 300.0

Labels = frozenset[tuple[str, str]]
Points = list[tuple[float, float]]
Vector = dict[Labels, float]
Value = float | Vector

_ARITHMETIC: dict[str, Callable[[float, float], float]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": lambda a, b: a / b if b else math.nan,
}
_COMPARE: dict[str, Callable[[float, float], bool]] = {
    ">": operator.gt,
    "<": operator.lt,
    ">=": operator.ge,
    "<=": operator.le,
    "==": operator.eq,
    "!=": operator.ne,
}
_AGGREGATE: dict[str, Callable[[Sequence[float]], float]] = {"sum": math.fsum, "max": max, "min": min, "count": len}


def selectors(node: Any) -> Iterator[Any]:
    """All vector selectors in an expression."""
    if isinstance(node, promql.VectorSelector):
        yield node
    elif isinstance(node, promql.MatrixSelector):
        yield node.vector_selector
    elif isinstance(node, promql.BinaryExpr):
        yield from selectors(node.lhs)
        yield from selectors(node.rhs)
    elif isinstance(node, promql.Call):
        for arg in node.args:
            yield from selectors(arg)
    elif isinstance(node, promql.AggregateExpr | promql.ParenExpr | promql.UnaryExpr):
        yield from selectors(node.expr)
    elif not isinstance(node, promql.NumberLiteral | promql.StringLiteral):
        raise TypeError(f"{type(node).__name__} is not known here")


def label_names(node: Any) -> set[str]:
    """Labels that an expression groups by, matches on or selects by, whatever the metric."""
    found: set[str] = set()
    for selector in selectors(node):
        found |= {matcher.name for matcher in selector.matchers.matchers}
    stack = [node]
    while stack:
        one = stack.pop()
        if isinstance(one, promql.AggregateExpr):
            found |= set(one.modifier.labels if one.modifier else ())
            stack.append(one.expr)
        elif isinstance(one, promql.BinaryExpr):
            if one.modifier and one.modifier.matching:
                found |= set(one.modifier.matching.labels)
            stack += [one.lhs, one.rhs]
        elif isinstance(one, promql.Call):
            stack += one.args
        elif isinstance(one, promql.ParenExpr):
            stack.append(one.expr)
    return found


class Series:
    """Samples by name and labels, appended in order of time."""

    def __init__(self) -> None:
        self._by_name: dict[str, dict[Labels, Points]] = defaultdict(dict)

    def add(self, name: str, labels: Mapping[str, str] | Labels, at: float, value: float) -> None:
        key = labels if isinstance(labels, frozenset) else frozenset(labels.items())
        self._by_name[name].setdefault(key, []).append((at, value))

    def points(self, selector: Any, start: float, end: float) -> dict[Labels, Points]:
        """The samples of every selected series in (start, end]."""
        shift = selector.offset.total_seconds() if selector.offset is not None else 0.0
        found = {}
        for labels, points in self._by_name.get(selector.name, {}).items():
            if all(_matches(matcher, dict(labels)) for matcher in selector.matchers.matchers):
                inside = [point for point in points if start - shift < point[0] <= end - shift]
                if inside:
                    found[labels] = inside
        return found


def _matches(matcher: Any, labels: Mapping[str, str]) -> bool:
    value, op = labels.get(matcher.name, ""), str(matcher.op)
    equal = bool(re.fullmatch(matcher.value, value)) if "Re" in op else value == matcher.value
    return not equal if "Not" in op else equal


def evaluate(node: Any, series: Series, at: float) -> Value:
    """Evaluates a parsed expression at one time."""
    if isinstance(node, promql.NumberLiteral):
        return float(node.val)
    if isinstance(node, promql.ParenExpr):
        return evaluate(node.expr, series, at)
    if isinstance(node, promql.VectorSelector):
        return {labels: points[-1][1] for labels, points in series.points(node, at - LOOKBACK_S, at).items()}
    if isinstance(node, promql.AggregateExpr):
        return _aggregate(node, _vector(evaluate(node.expr, series, at)))
    if isinstance(node, promql.Call):
        return _call(node, series, at)
    if isinstance(node, promql.BinaryExpr):
        return _binary(node, evaluate(node.lhs, series, at), evaluate(node.rhs, series, at))
    raise TypeError(f"{type(node).__name__} is not known here")


def _vector(value: Value) -> Vector:
    assert isinstance(value, dict), "a vector is expected"
    return value


def _kept(labels: Labels, names: Iterable[str], *, include: bool) -> Labels:
    chosen = set(names)
    return frozenset(pair for pair in labels if (pair[0] in chosen) is include)


def _aggregate(node: Any, vector: Vector) -> Vector:
    groups: dict[Labels, list[float]] = defaultdict(list)
    for labels, value in vector.items():
        if node.modifier is None:
            groups[frozenset()].append(value)
        else:
            groups[_kept(labels, node.modifier.labels, include="By" in str(node.modifier.type))].append(value)
    return {labels: _AGGREGATE[str(node.op)](values) for labels, values in groups.items()}


def _call(node: Any, series: Series, at: float) -> Value:
    name = node.func.name
    if name == "vector":
        return {frozenset(): float(node.args[0].val)}
    if name == "time":
        return at
    if name == "absent":
        return {} if evaluate(node.args[0], series, at) else {frozenset(): 1.0}
    if name == "histogram_quantile":
        return _histogram_quantile(float(node.args[0].val), _vector(evaluate(node.args[1], series, at)))
    window = node.args[0]
    seconds = window.range.total_seconds()
    found = {}
    for labels, points in series.points(window.vector_selector, at - seconds, at).items():
        value = _over(name, points, seconds)
        if value is not None:
            found[labels] = value
    return found


def _over(name: str, points: Points, seconds: float) -> float | None:
    values = [value for _, value in points]
    if name.endswith("_over_time"):
        return {"avg": math.fsum(values) / len(values), "min": min(values), "max": max(values)}[name.split("_")[0]]
    if name == "changes":
        return float(sum(a != b for a, b in itertools.pairwise(values)))
    if len(points) < 2:
        return None
    passed = points[-1][0] - points[0][0]
    if name == "deriv":
        middle = math.fsum(t for t, _ in points) / len(points)
        spread = math.fsum((t - middle) ** 2 for t, _ in points)
        return math.fsum((t - middle) * v for t, v in points) / spread
    grew = math.fsum(b - a if b >= a else b for a, b in itertools.pairwise(values))
    return grew / passed * {"rate": 1.0, "increase": seconds}[name]


def _histogram_quantile(q: float, vector: Vector) -> Vector:
    groups: dict[Labels, list[tuple[float, float]]] = defaultdict(list)
    for labels, value in vector.items():
        groups[_kept(labels, ["le"], include=False)].append((float(dict(labels)["le"]), value))
    found = {}
    for labels, buckets in groups.items():
        buckets.sort()
        if total := buckets[-1][1]:
            below = start = 0.0
            for bound, count in buckets:
                if count >= q * total:
                    inside = (q * total - below) / (count - below) if count > below else 1.0
                    found[labels] = start if math.isinf(bound) else start + (bound - start) * inside
                    break
                below, start = count, bound
    return found


def _binary(node: Any, left: Value, right: Value) -> Value:
    op = str(node.op)
    if op in ("and", "or", "unless"):
        return _set(node, op, _vector(left), _vector(right))
    if isinstance(left, float) and isinstance(right, float):
        return _ARITHMETIC[op](left, right)
    if isinstance(right, float):
        return _each(op, _vector(left), lambda _: right)
    if isinstance(left, float):
        return {labels: _ARITHMETIC[op](left, value) for labels, value in right.items()}
    others = {_key(node, labels): value for labels, value in right.items()}
    assert len(others) == len(right), "one to one only"
    return _each(op, left, lambda labels: others.get(_key(node, labels)))


def _each(op: str, left: Vector, other: Callable[[Labels], float | None]) -> Vector:
    found = {}
    for labels, value in left.items():
        against = other(labels)
        if against is None:
            continue
        if op in _ARITHMETIC:
            found[labels] = _ARITHMETIC[op](value, against)
        elif _COMPARE[op](value, against):
            found[labels] = value
    return found


def _key(node: Any, labels: Labels) -> Labels:
    matching = node.modifier.matching if node.modifier else None
    if matching is None:
        return labels
    return _kept(labels, matching.labels, include="Include" in str(matching.type))


def _set(node: Any, op: str, left: Vector, right: Vector) -> Vector:
    there = {_key(node, labels) for labels in right}
    if op == "or":
        here = {_key(node, labels) for labels in left}
        return {**left, **{labels: value for labels, value in right.items() if _key(node, labels) not in here}}
    return {labels: value for labels, value in left.items() if (_key(node, labels) in there) is (op == "and")}
