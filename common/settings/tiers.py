"""Priority tiers: classes of requests that have a reserved share of the capacity."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from common.errors import ConfigError

#: NAME:PRIORITY:SHARE, and :TOKENS for a tier whose answers become shorter under overload.
TIER_PATTERN = r"[a-z][a-z0-9_-]{0,31}:-?\d{1,4}:(0(\.\d{1,6})?|1(\.0{1,6})?)(:[1-9]\d{0,6})?"


@dataclass(frozen=True, slots=True)
class Tier:
    """One priority tier."""

    name: str
    priority: int  #: Lowest priority of its requests. The lowest tier also has the requests below its priority.
    share: float  #: Share of the capacity that its waiting requests get before those of other tiers.
    max_tokens: int | None = None  #: Longest answer while the tier is overloaded; None: answers are never shortened.


def parse_tiers(texts: Sequence[str]) -> tuple[Tier, ...]:
    """Returns the tiers that texts of TIER_PATTERN name, the highest priority first. Raises ConfigError."""
    tiers = []
    for text in texts:
        name, priority, share, *tokens = text.split(":")
        tiers.append(Tier(name, int(priority), float(share), int(tokens[0]) if tokens else None))
    for what in ("name", "priority"):
        seen = set[object]()
        for value in (getattr(tier, what) for tier in tiers):
            if value in seen:
                raise ConfigError(f"tier: two tiers have the {what} {value}: give each tier its own", field="tier")
            seen.add(value)
    if (total := sum(tier.share for tier in tiers)) > 1 + 1e-9:
        raise ConfigError(f"tier: the shares add up to {total:g}: at most 1 can be reserved", field="tier")
    return tuple(sorted(tiers, key=lambda tier: -tier.priority))


def tier_of(tiers: Sequence[Tier], priority: int) -> int:
    """Returns the index of the tier that a request of this priority belongs to."""
    return next((i for i, tier in enumerate(tiers) if priority >= tier.priority), len(tiers) - 1)
