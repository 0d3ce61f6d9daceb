"""One request as the engine runs it: its tokens, how many of them have KV, and the lease that holds the KV.

Invariant: computed <= allocated <= max_len. Prefill, chunk, decode and verify are the same operation on it: a step
computes KV for `num_new` tokens from `computed` on, and where it reaches the end of `tokens`, samples what follows.
A preemption takes lease and KV away (computed = 0) and leaves the tokens: the same arithmetic computes them again.
"""

from __future__ import annotations

from collections import abc

from common.block_hash import BlockHasher, matchable_blocks
from common.types import FinishReason, ValidRequest
from engine.block_pool import Lease


class Sequence:
    """tokens: prompt and output. computed: tokens whose KV exists in the lease's blocks.

    cached_tokens: prompt tokens that the prefix cache supplied. hand_off: ends after its first token, another pod goes
    on. paused: not scheduled until its reader catches up. finish: why it ended, None while it lives. The scheduler sets
    `arrival`, `lease`, `preemptions` and, on admission, `computed`; the engine advances it after each step.
    """

    __slots__ = (
        "_hasher",
        "_recompute_until",
        "arrival",
        "block_size",
        "cached_tokens",
        "computed",
        "finish",
        "hand_off",
        "lease",
        "paused",
        "preemptions",
        "priority",
        "prompt_len",
        "request",
        "request_id",
        "tokens",
    )

    def __init__(
        self,
        request: ValidRequest,
        *,
        fingerprint: str,
        block_size: int,
        lease: Lease | None = None,
        computed: int = 0,
        output: abc.Sequence[int] = (),
        hand_off: bool = False,
    ) -> None:
        assert computed == 0 or lease is not None
        self.request = request
        self.request_id = request.request_id
        self.priority = request.priority
        self.prompt_len = request.prompt_len
        self.tokens = [*request.prompt_ids, *output]
        self.block_size = block_size
        self.lease = lease
        self.computed = computed
        self.cached_tokens = lease.cached_blocks * block_size if lease is not None else 0
        self.hand_off = hand_off
        self.finish: FinishReason | None = None
        self.paused = False
        self.preemptions = 0
        self.arrival = 0
        self._recompute_until = 0
        self._hasher = BlockHasher(fingerprint, block_size, request.cache_salt)

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.prompt_len

    @property
    def output(self) -> list[int]:
        return self.tokens[self.prompt_len :]

    @property
    def remaining(self) -> int:
        """Known tokens that have no KV yet; 1 for a sequence that decodes."""
        return len(self.tokens) - self.computed

    @property
    def decoding(self) -> bool:
        """All but the newest token have KV, and the newest is an output."""
        return self.computed >= self.prompt_len and self.computed == len(self.tokens) - 1

    @property
    def allocated(self) -> int:
        """Tokens for which the lease has room."""
        return 0 if self.lease is None else len(self.lease.blocks) * self.block_size

    @property
    def max_len(self) -> int:
        """Tokens at its longest; the last of them never gets KV."""
        return self.prompt_len + (1 if self.hand_off else self.request.sampling.max_tokens)

    @property
    def recompute_until(self) -> int:
        """KV below this token existed once and was lost to a preemption."""
        return self._recompute_until

    @property
    def recomputing(self) -> bool:
        """Preempted, and not yet caught up."""
        return self.computed < self._recompute_until

    def append(self, token: int) -> None:
        """The token that was sampled after the last one."""
        self.tokens.append(token)

    def matchable_hashes(self) -> list[bytes]:
        """Hashes of the blocks that a cache may supply: at least one token is left to compute."""
        return self._hasher.extend(self.tokens)[: matchable_blocks(len(self.tokens), self.block_size)]

    def publishable_hashes(self) -> list[bytes]:
        """Hashes of the blocks whose KV is complete."""
        return self._hasher.extend(self.tokens)[: self.computed // self.block_size]

    def publish(self) -> None:
        """Publish what became complete since the last call; cheap when nothing did."""
        assert self.lease is not None
        if self.computed // self.block_size > self.lease.published:
            self.lease.publish(self.publishable_hashes())

    def preempt(self) -> None:
        """Give blocks and KV up, keep the tokens."""
        assert self.lease is not None
        self.lease.finish("preempted")
        self.lease = None
        self._recompute_until = max(self._recompute_until, self.computed)
        self.computed = 0
        self.preemptions += 1
