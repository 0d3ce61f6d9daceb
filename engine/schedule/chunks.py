"""How the prompts of a step share its tokens; arithmetic only.

At least half of the step goes to the first prompt in order, so that long prompts make progress. The rest goes to the
prompts with the fewest tokens left, so that short prompts do not wait and prompts of one length run one after another.
A chunk ends with a block, with the prompt, or at the cut before the last chunk of a prompt that is handed off.
"""

from __future__ import annotations

from collections import abc

from engine.schedule.sequence import Sequence


class ChunkPolicy:
    """Splits the tokens of a step; SchedulerConfig declares `chunk_tokens` and `prompt_step_tokens`."""

    def __init__(self, chunk_tokens: int, prompt_step_tokens: int | None, block_size: int) -> None:
        self._chunk_tokens, self._block_size = chunk_tokens, block_size
        self._has_prompt_steps = prompt_step_tokens is not None
        #: Half of chunk_tokens in whole blocks. 1 without prompt steps, so nothing is rounded.
        self._half = max(chunk_tokens // 2 // block_size, 1) * block_size if self._has_prompt_steps else 1

    def split(self, prompts: abc.Sequence[Sequence], budget: int) -> dict[Sequence, int]:
        """Returns the number of tokens of each prompt in the step. `prompts` are in order, and `budget` >= 1."""
        first, *others = prompts
        first_chunk = self._first_chunk(first, budget)
        if not others:
            return {first: max(first_chunk, self._aligned(first, budget))}
        # A prompt of chunk_tokens or more does not share a longer step: all first tokens in the step would be later,
        # and no token would be cheaper.
        room = {
            seq: budget if seq.remaining < self._chunk_tokens else min(budget, self._chunk_tokens) for seq in prompts
        }
        first_chunk = self._first_chunk(first, room[first])
        chunks, taken = {first: first_chunk}, first_chunk
        remaining = {seq: seq.remaining for seq in prompts} | {first: first.remaining - first_chunk}
        for seq in sorted(prompts, key=lambda seq: remaining[seq]):
            given = chunks.get(seq, 0)
            chunk = max(given, self._aligned(seq, given + room[seq] - taken))
            if not given and chunk < self._longest_chunk(seq) and self._chunk_tokens <= budget:
                chunk = chunk // self._half * self._half  # a later chunk is slower if it starts elsewhere
            if chunk:
                chunks[seq] = chunk
                taken += chunk - given
        return chunks

    def _first_chunk(self, seq: Sequence, budget: int) -> int:
        """Returns the shortest aligned chunk of half the budget or more, or one that is not aligned if none fits."""
        half, size, longest = (budget + 1) // 2, self._block_size, self._longest_chunk(seq)
        if longest <= half:
            return longest
        above = -(-(seq.start + half) // size) * size - seq.start
        if above <= budget:
            return min(above, longest)
        below = self._aligned(seq, budget)
        return below if below >= half else min(budget, longest)

    def _aligned(self, seq: Sequence, limit: int) -> int:
        """Returns the longest chunk of at most `limit` tokens that ends with a block or is the longest chunk."""
        longest = self._longest_chunk(seq)
        if longest <= limit:
            return longest
        return max(0, (seq.start + limit) // self._block_size * self._block_size - seq.start)

    def _longest_chunk(self, seq: Sequence) -> int:
        """Returns the number of tokens left, or the tokens before the last chunk of a prompt that is handed off."""
        remaining = seq.remaining
        if not seq.hand_off or not self._has_prompt_steps or remaining <= self._chunk_tokens:
            return remaining
        # The last chunk of a hand-off is short, so that little KV is left to send after the first token. It has half of
        # chunk_tokens to all of it and begins at a multiple of that half: attention has plans for these lengths.
        cut = (seq.length - self._half - 1) // self._half * self._half
        return cut - seq.start if cut > seq.start else remaining
