"""How the prompts of a step share its tokens. Pure arithmetic on sequences.

At least half of a step goes to the first in rank and the rest by shortest remaining time, so that neither starves the
other and prompts of one length come one after another. Chunks end with a block, with the prompt, or where it is cut.
"""

from __future__ import annotations

from collections import abc

from engine.schedule.sequence import Sequence


class ChunkPolicy:
    """chunk_tokens, prompt_step_tokens: see SchedulerConfig. block_size: tokens of a block."""

    def __init__(self, chunk_tokens: int, prompt_step_tokens: int | None, block_size: int) -> None:
        self._chunk_tokens, self._has_prompt_steps, self._size = (
            chunk_tokens,
            prompt_step_tokens is not None,
            block_size,
        )
        # Of the token budget, in whole blocks; 1 where steps have no more than that: then nothing is cut for its sake.
        self._half = max(chunk_tokens // 2 // block_size, 1) * block_size if self._has_prompt_steps else 1

    def split(self, prompts: abc.Sequence[Sequence], budget: int) -> dict[Sequence, int]:
        """Tokens of each of these prompts, in rank, that has some of `budget` >= 1 in this step."""
        first, *others = prompts
        grant = self._first_chunk(first, budget)
        if not others:
            return {first: max(grant, self._aligned(first, budget))}
        # A prompt that fills the token budget shares no more than that.
        room = {
            seq: budget if seq.remaining < self._chunk_tokens else min(budget, self._chunk_tokens) for seq in prompts
        }
        grant = self._first_chunk(first, room[first])
        chunks, taken = {first: grant}, grant
        left = {seq: seq.remaining for seq in prompts} | {first: first.remaining - grant}
        for seq in sorted(prompts, key=lambda seq: left[seq]):
            had = chunks.get(seq, 0)
            chunk = max(had, self._aligned(seq, had + room[seq] - taken))
            if not had and chunk < self._longest_chunk(seq) and self._chunk_tokens <= budget:
                chunk = chunk // self._half * self._half  # what goes on at an odd place is slower
            if chunk:
                chunks[seq] = chunk
                taken += chunk - had
        return chunks

    def _first_chunk(self, seq: Sequence, budget: int) -> int:
        """Least aligned chunk of half the budget or more; unaligned where the budget is too small for one."""
        half, size, want = (budget + 1) // 2, self._size, self._longest_chunk(seq)
        if want <= half:
            return want
        above = -(-(seq.start + half) // size) * size - seq.start
        if above <= budget:
            return min(above, want)
        below = self._aligned(seq, budget)
        return below if below >= half else min(budget, want)

    def _aligned(self, seq: Sequence, limit: int) -> int:
        """Largest chunk of at most `limit` tokens that ends with a block, with the sequence or where that is cut."""
        want = self._longest_chunk(seq)
        if want <= limit:
            return want
        return max(0, (seq.start + limit) // self._size * self._size - seq.start)

    def _longest_chunk(self, seq: Sequence) -> int:
        """The longest chunk: what remains, or what is before the last chunk of a prompt that is handed off."""
        remaining = seq.remaining
        if not seq.hand_off or not self._has_prompt_steps or remaining <= self._chunk_tokens:
            return remaining
        # The last chunk has between half of the token budget and all of it, and begins at a multiple of that half:
        # lengths for which kernels have plans.
        cut = (seq.length - self._half - 1) // self._half * self._half
        return cut - seq.start if cut > seq.start else remaining
