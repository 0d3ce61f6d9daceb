"""A synthetic workload of agent sessions of many tenants; its prefixes are shared differently than in recorded traces.

    tenant A:  system prompt --+-- session 1:  turn, answer, turn, answer, ...
                               +-- session 2:  turn, answer, ...

All sessions of a tenant begin with its system prompt. Each prompt of a session is the whole history with the answers,
and the text of a user or a tool. So many requests share a short prefix, and few share a long one. Tenants are drawn by
Zipf's law.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

from loadtest.workload.trace import MOONCAKE_BLOCK_SIZE, WorkloadRequest, WorkloadTrace, synthetic_block_hash


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentWorkload:
    #: Mean requests per second.
    rate: float
    #: Length of the trace.
    seconds: float
    seed: int = 0
    tenants: int = 200
    #: Exponent of Zipf's law.
    zipf: float = 1.1
    #: Mean number of turns of a session.
    turns: float = 6.0
    #: Mean pause between turns.
    pause_s: float = 20.0
    #: Range of the length of a system prompt.
    system_tokens: tuple[int, int] = (1_000, 8_000)
    #: Medians of the tokens that a turn adds and of an answer; both are log-normal.
    added_tokens: float = 700.0
    output_tokens: float = 250.0
    #: A session ends before its prompt and answer are longer than this.
    longest: int = 100_000

    def trace(self) -> WorkloadTrace:
        """Returns the trace; it is the same for the same seed."""
        rng = random.Random(self.seed)
        systems = [rng.randint(*self.system_tokens) for _ in range(self.tenants)]
        weights = [1 / (rank + 1) ** self.zipf for rank in range(self.tenants)]
        requests: list[WorkloadRequest] = []
        # Sessions start before time 0, so that the first second has as many late turns as the last.
        warm = 3 * self.turns * self.pause_s
        at, session = -warm, 0
        while at < self.seconds:
            at += rng.expovariate(self.rate / self.turns)
            tenant = rng.choices(range(self.tenants), weights)[0]
            requests += self._session(rng, at, session, tenant, systems[tenant])
            session += 1
        # Requests before time 0 are dropped: a trace begins with empty caches.
        kept = sorted((r for r in requests if 0 <= r.arrival_s < self.seconds), key=lambda r: r.arrival_s)
        return WorkloadTrace("agents", MOONCAKE_BLOCK_SIZE, tuple(kept))

    def _session(self, rng: random.Random, at: float, session: int, tenant: int, system: int) -> list[WorkloadRequest]:
        turns = max(1, round(rng.expovariate(1 / self.turns)))
        length, found = system, []
        names: list[bytes] = []
        for _ in range(turns):
            length += _lognormal(rng, self.added_tokens)
            output = _lognormal(rng, self.output_tokens)
            if length + output > self.longest:
                break
            for i in range(len(names), length // MOONCAKE_BLOCK_SIZE):
                shared = (i + 1) * MOONCAKE_BLOCK_SIZE <= system
                names.append(
                    synthetic_block_hash("tenant", tenant, i) if shared else synthetic_block_hash("session", session, i)
                )
            found.append(WorkloadRequest(at, length, output, tuple(names)))
            length += output
            at += rng.expovariate(1 / self.pause_s)
        return found


def _lognormal(rng: random.Random, median: float) -> int:
    return max(1, round(rng.lognormvariate(math.log(median), 0.8)))
