"""One request as routing sees it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Pull:
    """A pod could hold the prompt's first `tokens` tokens after pulling what it lacks from `holder` for `seconds`."""

    tokens: int
    predicted_s: float
    holder: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """Lengths in tokens, where the output so far of a request that goes on counts as prompt; what pods have of the
    prompt, by pod name, in prompt tokens from its start.

    held: in device memory, as the index says. host: further tokens, in the pod's host memory. soon: once the prompts
    that the pod computes now are done. pull: what it could fetch from a peer in less time than computing it takes.
    affinity: what the client wants to stay together (a hint). key: hash of the first blocks, the prompt's home while
    nobody knows what pods hold.
    """

    prompt_len: int
    max_tokens: int
    device_hits: Mapping[str, int] = field(default_factory=dict)
    host_hits: Mapping[str, int] = field(default_factory=dict)
    inflight_hits: Mapping[str, int] = field(default_factory=dict)
    pull_offers: Mapping[str, Pull] = field(default_factory=dict)
    affinity: str = ""
    prefix_key: bytes = b""

    def expected_hits(self) -> Mapping[str, int]:
        """Prompt tokens by pod that need no computing there when the request's turn comes."""
        if not self.host_hits and not self.inflight_hits:
            return self.device_hits
        promises = dict(self.device_hits)
        for pod, tokens in self.host_hits.items():
            promises[pod] = promises.get(pod, 0) + tokens
        for pod, tokens in self.inflight_hits.items():
            promises[pod] = max(promises.get(pod, 0), tokens)
        return promises
