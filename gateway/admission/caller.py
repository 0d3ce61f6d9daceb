"""Whom a request is from, and what that allows. Without keys every request is from the same anonymous caller."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyLimits:
    """What one key may use; 0 means that there is no such limit. Tokens are of prompts and answers together."""

    requests_per_minute: int = 0
    tokens_per_minute: int = 0
    tokens_per_day: int = 0
    concurrent: int = 0

    def __bool__(self) -> bool:
        return any((self.requests_per_minute, self.tokens_per_minute, self.tokens_per_day, self.concurrent))


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """One key's owner. tenant: whose requests share a fair part, and a cache if it is isolated.

    key_id: empty for the anonymous caller. weight: the tenant's part in relation to others. priority: what requests
    have that name none, and the most that they may ask for; None: any. models: the names that may be used; empty: all.
    admin: may do what concerns everybody.
    """

    tenant: str = ""
    key_id: str = ""
    limits: KeyLimits = field(default_factory=KeyLimits)
    weight: float = 1.0
    priority: int | None = None
    models: tuple[str, ...] = ()
    isolated: bool = False
    admin: bool = False

    def may_use(self, *names: str) -> bool:
        """Whether a model that has these names, aliases included, may be used."""
        return not self.models or any(name in self.models for name in names)

    def effective_priority(self, wanted: int) -> int:
        """The priority of a request that asks for `wanted` (0: for none)."""
        return wanted if self.priority is None else min(wanted or self.priority, self.priority)

    def effective_salt(self, wanted: str) -> str:
        """The cache salt of a request that asks for `wanted`. No tenant can name the salt of an isolated one."""
        if self.isolated:
            return f"tenant:{self.tenant}:{wanted}"
        return f"salt:{wanted}" if wanted and self.key_id else wanted


ANONYMOUS = Caller(admin=True)
