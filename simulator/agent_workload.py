"""A made workload with prefix sharing of another kind than a recorded one's: agents of many tenants.

Tenants are drawn by Zipf's law and have a system prompt each, which all their sessions begin with. A session takes
turns: every prompt is the whole history (the answers too), plus what a user or a tool adds, after a pause. So sharing
has two depths, a wide shallow one and a narrow deep one, and prompts grow as sessions go on.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

from loadtest.workload.trace import MOONCAKE_BLOCK_SIZE, WorkloadRequest, WorkloadTrace, synthetic_block_hash


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentWorkload:
    """rate: requests per second in the mean, over `seconds`. Means and medians in tokens, pauses in seconds."""

    rate: float
    seconds: float
    seed: int = 0
    tenants: int = 200
    zipf: float = 1.1
    turns: float = 6.0
    pause_s: float = 20.0
    system_tokens: tuple[int, int] = (1_000, 8_000)
    added_tokens: float = 700.0  # median of what a turn adds, log-normal
    output_tokens: float = 250.0
    longest: int = 100_000

    def trace(self) -> WorkloadTrace:
        """The same for the same seed."""
        rng = random.Random(self.seed)
        systems = [rng.randint(*self.system_tokens) for _ in range(self.tenants)]
        weights = [1 / (rank + 1) ** self.zipf for rank in range(self.tenants)]
        requests: list[WorkloadRequest] = []
        # Sessions start early enough for the first second to be like the last.
        warm = 3 * self.turns * self.pause_s
        at, session = -warm, 0
        while at < self.seconds:
            at += rng.expovariate(self.rate / self.turns)
            tenant = rng.choices(range(self.tenants), weights)[0]
            requests += self._session(rng, at, session, tenant, systems[tenant])
            session += 1
        # Those before zero warm no cache: a trace begins with empty ones.
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
