"""Steps that a GPU runs before the first request: the largest, to measure its memory, and one of each kind that
compiles kernels or builds plans of its own, so that no request waits for that.

Kernels are compiled once for the process, cuDNN's plans are built on each thread anew.
"""

from __future__ import annotations

from collections.abc import Sequence

Rows = Sequence[tuple[int, int]]  # of a step: tokens in the cache, new tokens

PLANNED_TOKENS = 16384  # a long prompt needs plans for the length of each chunk, and of its prefix
QUANTUM = 1024  # lengths that have plans are multiples of it
MOST_EQUAL = 8  # whole prompts of one length have a plan for every power of two of them up to here


def largest_step(most_tokens: int, max_seqs: int, max_len: int, drafts: int = 0, max_drafts: int = 0) -> Rows:
    """All slots sample, as many as may with drafts; the rest is a chunk that ends the longest sequence, and where that
    is short, prompts of the other slots.
    """
    rows, drafting = min(max_seqs, most_tokens), 0
    if 0 < drafts < max_len:
        drafting = min(max_drafts // drafts, rows - 1, (most_tokens - rows) // drafts)
    spare = most_tokens - rows - drafting * drafts
    chunk = min(spare + 1, max_len)
    spare -= chunk - 1
    others: list[tuple[int, int]] = []
    for _ in range(rows - 1 - drafting):
        more = min(spare, max_len - 1)
        others.append((0, 1 + more))
        spare -= more
    return [(0, 1 + drafts)] * drafting + others[::-1] + [(max_len - chunk, chunk)]


def compiled_steps(most_tokens: int, max_seqs: int, max_len: int, drafts: int = 0) -> list[Rows]:
    """Steps of all kinds that the limits allow, for the kernels that they compile."""
    steps: list[Rows] = [
        [(0, 1), (5, 1)],
        # Drafts and ends of prompts, by how many rows their queries are padded to.
        *([(0, count), (7, count)] for count in {2, 3, 5, 1 + drafts}),
        # Chunks of all lengths beside a row that decodes.
        [(0, 1), (0, 16), (16, 40)],
        [(0, 1), (0, 1040), (48, 900)],
        [(0, 1), (1040, 1040)],
        [(0, 600)] * 4,
        # Prompts whose ends are attended for one by one, by what their number is padded to; two and four are above.
        [(0, 1040)],
        [(0, 140)] * 8,
    ]
    return _allowed(steps, most_tokens, max_seqs, max_len)


def planned_steps(
    most_tokens: int, shared_tokens: int, max_seqs: int, max_len: int, last_tokens: int = 0
) -> list[Rows]:
    """Long prompts, chunks of longer ones, and equal prompts side by side, that the limits allow, for the plans that
    they build. most_tokens: of a step with a prompt alone; shared_tokens: of one with several; last_tokens: of the
    last chunk of a prompt that is handed off.
    """
    lengths = range(QUANTUM, min(most_tokens, PLANNED_TOKENS) + 1, QUANTUM)
    steps: list[Rows] = [[(0, length)] for length in lengths]
    if shared_tokens % QUANTUM == 0:
        chunks = range(shared_tokens, PLANNED_TOKENS - shared_tokens + 1, shared_tokens)
        steps += [[(start, shared_tokens)] for start in chunks]
    steps += [
        [(start, new)]
        for new in range(QUANTUM, last_tokens + 1, QUANTUM)
        for start in range(QUANTUM, PLANNED_TOKENS - new + 1, QUANTUM)
    ]
    for length in lengths:
        count = 2
        while count <= MOST_EQUAL and count * length <= shared_tokens:
            steps.append([(0, length)] * count)
            count *= 2
    return _allowed(steps, most_tokens, max_seqs, max_len)


def captured_chunks(within: int, token_budget: int) -> list[tuple[int, int]]:
    """Cached and new tokens of the chunks that are captured: of the token budget, and of the shortest that has a plan,
    where they end within so many tokens.
    """
    lengths = {QUANTUM, token_budget} if token_budget % QUANTUM == 0 else set[int]()
    return [(start, new) for new in sorted(lengths) for start in range(0, within - new + 1, QUANTUM)]


def _allowed(steps: list[Rows], most_tokens: int, max_seqs: int, max_len: int) -> list[Rows]:
    return [
        rows
        for rows in steps
        if len(rows) <= max_seqs
        and sum(new for _, new in rows) <= most_tokens
        and max(start + new for start, new in rows) <= max_len
    ]
