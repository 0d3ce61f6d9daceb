"""Grammars that must be served, and bombs of six kinds that must not hurt anybody: for tests and benchmarks.

A bomb is refused in its proof, with an error within ERROR_S, or it fails only its own request, after its tokens took
MASK_LIMIT_S of processor time. Another request is delayed by at most DELAY_S.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from common.errors import BatonError
from common.grammar.compiler import GrammarSource
from common.grammar.prover import GrammarProver
from tests.rigs.engine import grammar_shapes as shapes

ERROR_S = 2.0
DELAY_S = 0.05
KINDS = ("nested references", "reference chains", "alternatives", "many rules", "patterned properties", "slow masks")
PREFIX = "a literal prefix of some words, which no random walk of a proof follows to its end "


@dataclass(frozen=True, slots=True)
class Bomb:
    """A grammar that costs far more than its length."""

    kind: str  # One of KINDS
    name: str
    make: Callable[[], tuple[str, Any]]  # Form and value of a GrammarSource
    proven: bool = False  # The proof does not find it: it fails while its answer is generated

    def source(self, field: str = "guided") -> GrammarSource:
        return GrammarSource(*self.make(), field)


def _costly(name: str) -> Callable[[], tuple[str, Any]]:
    return shapes.COSTLY[name]


def _too_deep(name: str) -> Callable[[], tuple[str, Any]]:
    make, count = shapes.BOMBS[name]
    return lambda: ("text", make(count))


def behind_prefix(count: int) -> str:
    """Rules that all begin with each other, behind a literal: only the masks after the literal are slow."""
    return shapes.ambiguous(count).replace("start: a", f'start: "{PREFIX}" a')


BOMBS = (
    Bomb("nested references", "references with keywords beside them", _costly("nested references")),
    Bomb("nested references", "places in each other", _too_deep("places in each other")),
    Bomb("reference chains", "925 references", lambda: ("json", shapes.chained(_five_objects, 925))),
    Bomb("reference chains", "anyOf", _too_deep("anyOf")),
    Bomb("alternatives", "optional properties", _costly("optional properties")),
    Bomb("alternatives", "26,000 optional letters", _costly("alternatives")),
    Bomb("alternatives", "a regular expression", _costly("a regular expression")),
    Bomb("many rules", "5,000 rules", _too_deep("rules")),
    Bomb("many rules", "GBNF", _costly("many rules")),
    Bomb("patterned properties", "5,000 patterns", lambda: ("json", patterned(5000))),
    Bomb("patterned properties", "patterns of one string", _costly("patterns")),
    Bomb("patterned properties", "intersections", _costly("intersections")),
    Bomb("slow masks", "rules that begin with each other", _costly("slow masks")),
    Bomb("slow masks", "behind a literal", lambda: ("grammar", behind_prefix(1500)), proven=True),
)


def _five_objects(reference: str) -> dict[str, Any]:
    inner: dict[str, Any] = shapes.nested(shapes.objects, 5, {"$ref": reference})
    return inner


def patterned(count: int) -> dict[str, Any]:
    return {"type": "object", "patternProperties": {f"^p{i}.*x": {"type": "string"} for i in range(count)}}


def ordinary(field: str = "f") -> list[GrammarSource]:
    """Returns 200 grammars that people use; those of the first ones are large."""
    rng = random.Random(20)
    made = [GrammarSource("text", make(), field) for make in shapes.ORDINARY.values()]
    made += [GrammarSource("json", shapes.parameters(i), field) for i in range(20)]
    return made + [GrammarSource("json", shapes.random_ordinary(rng), field) for _ in range(200 - len(made))]


#: Ordinary schemas in which many alternatives are open at once, and text that follows each.
WIDE: dict[str, Sequence[str]] = {
    "900 definitions": ('{"p7": "abc def"}', '{"other": 1, "p5": "x"}'),
    "900 recursive definitions": ('{"p7": "abc", "next": {"p7": "x"}}',),
    "anyOf of 1000 objects": ('{"p77": null}',),
    "a flat schema of 100 kB, all optional": ('{"property_7": "abc", "property_2900": "x"}',),
}


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a bomb did in its proof."""

    error: BatonError | None  # None: it was proven
    error_s: float  # Until the sender had the verdict
    delays_s: tuple[float, ...]  # Times of another client's small schemas meanwhile, less the median without a bomb
    tick_s: float  # Longest time that another thread of the process did not run


def explode(prover: GrammarProver, bomb: Bomb) -> Outcome:
    """Has a bomb proven, and a neighbour's small schemas beside it."""
    usual = sorted(_small_schema_s(prover, "usual", number) for number in range(5))[2]
    source = bomb.source()
    stop, ticks = threading.Event(), [0.0]

    def tick() -> None:
        before = time.monotonic()
        while not stop.wait(0.002):
            now = time.monotonic()
            ticks[0] = max(ticks[0], now - before)
            before = now

    with ThreadPoolExecutor(1) as pool:
        ticking = pool.submit(tick)
        began = time.monotonic()
        running = prover.submit(source, client="bomber")
        taken = [_small_schema_s(prover, f"{bomb.name} {began}", number) for number in range(5)]
        error: BatonError | None = None
        try:
            running.result(60)
        except BatonError as raised:
            error = raised
        error_s = time.monotonic() - began
        stop.set()
        ticking.result()
    return Outcome(error, error_s, tuple(seconds - usual for seconds in taken), ticks[0] - 0.002)


def _small_schema_s(prover: GrammarProver, name: str, number: int) -> float:
    schema = {"type": "object", "properties": {f"{name} {number} {time.monotonic()}": {"type": "string"}}}
    began = time.monotonic()
    prover.submit(GrammarSource("json", schema, "f"), client="neighbour").result(60)
    return time.monotonic() - began
