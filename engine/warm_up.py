"""Steps that a GPU runs before the first request: the largest, to measure its memory, and one of each kind that
compiles kernels or builds plans of its own, so that no request waits for that.
"""

from __future__ import annotations

from collections.abc import Sequence

Rows = Sequence[tuple[int, int]]  # of a step: tokens in the cache, new tokens

PLANNED_TOKENS = 16384  # long prompts build a plan for each length of prefix; up to here it is there


def largest_step(token_budget: int, max_seqs: int, max_len: int) -> Rows:
    """All slots sample, and the rest of the budget is a chunk that ends the longest sequence."""
    rows = min(max_seqs, token_budget)
    chunk = min(token_budget - rows + 1, max_len)
    return [(0, 1)] * (rows - 1) + [(max_len - chunk, chunk)]


def typical_steps(token_budget: int, max_seqs: int, max_len: int) -> list[Rows]:
    """Those of the following that the limits allow."""
    steps: list[Rows] = [
        [(0, 1), (5, 1)],
        # Drafts and ends of prompts, by how many rows their queries are padded to.
        *([(0, count), (7, count)] for count in (2, 3, 5)),
        # Chunks of all lengths beside a row that decodes.
        [(0, 1), (0, 16), (16, 40)],
        [(0, 1), (0, 1040), (48, 900)],
        [(0, 1), (1040, 1040)],
        [(0, 600)] * 3,
        [(0, 1024)],
        *([(start, token_budget)] for start in range(0, PLANNED_TOKENS, token_budget)),
    ]
    return [
        rows
        for rows in steps
        if len(rows) <= max_seqs
        and sum(new for _, new in rows) <= token_budget
        and max(start + new for start, new in rows) <= max_len
    ]
