"""What two sequences begin with."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile


def shared(a: Sequence[object], b: Sequence[object]) -> int:
    """Length of the common prefix."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))
