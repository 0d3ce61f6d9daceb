"""Grammars that must be served, and bombs of six kinds that must not hurt anybody: for tests and benchmarks.

A bomb is refused in its proof, or it fails only its own request, after its tokens took MASK_LIMIT_S of processor time.
benchmarks/security/attacks.py measures the times of both, and how long other requests are delayed.
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
    seconds: float  # Until the sender had the verdict
    ticks: int  # How often another thread of the process ran meanwhile


def explode(prover: GrammarProver, bomb: Bomb) -> Outcome:
    """Has a bomb proven, and a neighbour's small schemas beside it, which must be proven."""
    source = bomb.source()
    stop, ticks = threading.Event(), [0]

    def tick() -> None:
        while not stop.wait(0.002):
            ticks[0] += 1

    with ThreadPoolExecutor(1) as pool:
        ticking = pool.submit(tick)
        began = time.monotonic()
        running = prover.submit(source, client="bomber")
        try:
            for number in range(5):
                schema = {"type": "object", "properties": {f"{bomb.name} {number} {began}": {"type": "string"}}}
                prover.submit(GrammarSource("json", schema, "f"), client="neighbour").result(60)
            error: BatonError | None = None
            try:
                running.result(60)
            except BatonError as raised:
                error = raised
            seconds = time.monotonic() - began
        finally:
            stop.set()
        ticking.result()
    return Outcome(error, seconds, ticks[0])
