"""A synthetic workload of agent sessions: one shared prefix per tenant, and one per session.

    tenant A:  system prompt --+-- session 1:  turn, answer, turn, answer, ...
                               +-- session 2:  turn, answer, ...

Each prompt of a session is the session so far (prompts and answers) and new text of a user or a tool. Many requests
share a short prefix, few share a long one. Tenants are drawn by Zipf's law.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

from loadtest.workload.trace import MOONCAKE_BLOCK_SIZE, WorkloadRequest, WorkloadTrace, synthetic_block_hash


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentWorkload:
    """The parameters of a workload, and the trace made from them."""

    rate: float  # Mean requests per second.
    seconds: float  # Seconds from the first to the last possible arrival.
    seed: int = 0
    tenants: int = 200
    zipf: float = 1.1  # Exponent of Zipf's law.
    turns: float = 6.0  # About the mean number of turns of a session; each has at least one.
    pause_s: float = 20.0  # Mean pause between turns.
    system_tokens: tuple[int, int] = (1_000, 8_000)  # Range of the length of a system prompt.
    added_tokens: float = 700.0  # Median of the tokens that a turn adds; log-normal.
    output_tokens: float = 250.0  # Median of the tokens of an answer; log-normal.
    max_tokens: int = 100_000  # A session ends before a prompt and its answer have more tokens than this.

    def trace(self) -> WorkloadTrace:
        """Returns the trace; it is the same for the same seed."""
        rng = random.Random(self.seed)
        systems = [rng.randint(*self.system_tokens) for _ in range(self.tenants)]
        weights = [1 / (rank + 1) ** self.zipf for rank in range(self.tenants)]
        requests: list[WorkloadRequest] = []
        # Sessions start before time 0, so that the first second already has sessions in all stages.
        lead_s = 3 * self.turns * self.pause_s
        arrival_s, session = -lead_s, 0
        while arrival_s < self.seconds:
            arrival_s += rng.expovariate(self.rate / self.turns)
            tenant = rng.choices(range(self.tenants), weights)[0]
            requests += self._session(rng, arrival_s, session, tenant, systems[tenant])
            session += 1
        # Requests before time 0 are dropped: a trace begins with empty caches.
        kept = sorted((r for r in requests if 0 <= r.arrival_s < self.seconds), key=lambda r: r.arrival_s)
        return WorkloadTrace("agents", MOONCAKE_BLOCK_SIZE, tuple(kept))

    def _session(
        self, rng: random.Random, arrival_s: float, session: int, tenant: int, system: int
    ) -> list[WorkloadRequest]:
        prompt_tokens, requests = system, []
        block_hashes: list[bytes] = []
        for _ in range(max(1, round(rng.expovariate(1 / self.turns)))):
            prompt_tokens += _lognormal(rng, self.added_tokens)
            output = _lognormal(rng, self.output_tokens)
            if prompt_tokens + output > self.max_tokens:
                break
            for i in range(len(block_hashes), prompt_tokens // MOONCAKE_BLOCK_SIZE):
                owner = ("tenant", tenant) if (i + 1) * MOONCAKE_BLOCK_SIZE <= system else ("session", session)
                block_hashes.append(synthetic_block_hash(*owner, i))
            requests.append(WorkloadRequest(arrival_s, prompt_tokens, output, tuple(block_hashes)))
            prompt_tokens += output
            arrival_s += rng.expovariate(1 / self.pause_s)
        return requests


def _lognormal(rng: random.Random, median: float) -> int:
    return max(1, round(rng.lognormvariate(math.log(median), 0.8)))
