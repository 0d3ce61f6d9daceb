"""Steps that a GPU runs before the first request: the largest, to measure its memory, and one of each kind that
compiles kernels or builds plans of its own, so that no request waits for that.

Kernels are compiled once for the process, cuDNN's plans are built on each thread anew.
"""

from __future__ import annotations

from collections.abc import Sequence

StepRows = Sequence[tuple[int, int]]  # of a step: tokens in the cache, new tokens

MAX_PLAN_TOKENS = 16384  # a long prompt needs plans for the length of each chunk, and of its prefix
PLAN_QUANTUM = 1024  # lengths that have plans are multiples of it
MAX_EQUAL_PROMPTS = 8  # whole prompts of one length have a plan for every power of two of them up to here


def largest_step(most_tokens: int, max_seqs: int, max_len: int, drafts: int = 0, max_drafts: int = 0) -> StepRows:
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


def kernel_steps(most_tokens: int, max_seqs: int, max_len: int, drafts: int = 0) -> list[StepRows]:
    """Steps of all kinds that the limits allow, for the kernels that they compile."""
    steps: list[StepRows] = [
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
    return _within_limits(steps, most_tokens, max_seqs, max_len)


def cudnn_plan_steps(
    most_tokens: int, shared_tokens: int, max_seqs: int, max_len: int, last_tokens: int = 0
) -> list[StepRows]:
    """Long prompts, chunks of longer ones, and equal prompts side by side, that the limits allow, for the plans that
    they build. most_tokens: of a step with a prompt alone; shared_tokens: of one with several; last_tokens: of the
    last chunk of a prompt that is handed off.
    """
    lengths = range(PLAN_QUANTUM, min(most_tokens, MAX_PLAN_TOKENS) + 1, PLAN_QUANTUM)
    steps: list[StepRows] = [[(0, length)] for length in lengths]
    if shared_tokens % PLAN_QUANTUM == 0:
        chunks = range(shared_tokens, MAX_PLAN_TOKENS - shared_tokens + 1, shared_tokens)
        steps += [[(start, shared_tokens)] for start in chunks]
    steps += [
        [(start, new)]
        for new in range(PLAN_QUANTUM, last_tokens + 1, PLAN_QUANTUM)
        for start in range(PLAN_QUANTUM, MAX_PLAN_TOKENS - new + 1, PLAN_QUANTUM)
    ]
    for length in lengths:
        count = 2
        while count <= MAX_EQUAL_PROMPTS and count * length <= shared_tokens:
            steps.append([(0, length)] * count)
            count *= 2
    return _within_limits(steps, most_tokens, max_seqs, max_len)


def chunk_graph_shapes(within: int, token_budget: int) -> list[tuple[int, int]]:
    """Cached and new tokens of the chunks that are captured: of the token budget, and of the shortest that has a plan,
    where they end within so many tokens.
    """
    lengths = {PLAN_QUANTUM, token_budget} if token_budget % PLAN_QUANTUM == 0 else set[int]()
    return [(start, new) for new in sorted(lengths) for start in range(0, within - new + 1, PLAN_QUANTUM)]


def _within_limits(steps: list[StepRows], most_tokens: int, max_seqs: int, max_len: int) -> list[StepRows]:
    return [
        rows
        for rows in steps
        if len(rows) <= max_seqs
        and sum(new for _, new in rows) <= most_tokens
        and max(start + new for start, new in rows) <= max_len
    ]
