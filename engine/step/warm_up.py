"""Steps that a GPU runs before the first request.

The largest step measures memory. One step of each kind compiles kernels and builds cuDNN plans, so that no request
waits for that. Kernels are compiled once for the process; cuDNN plans are built once for each thread.
"""

from __future__ import annotations

from collections.abc import Sequence

#: Cached and new tokens of each row of a step.
StepRows = Sequence[tuple[int, int]]

#: Longest prompt with plans: one for each chunk length and prefix length.
MAX_PLAN_TOKENS = 16384
#: Lengths with plans are multiples of this.
PLAN_QUANTUM = 1024
#: 2, 4, ... up to this many whole prompts of one length have a plan.
MAX_EQUAL_PROMPTS = 8


def largest_step(most_tokens: int, max_seqs: int, max_len: int, drafts: int = 0, max_drafts: int = 0) -> StepRows:
    """Returns the step with the largest activations: all slots sample, and as many as possible have drafts.

    The remaining tokens are a chunk that ends the longest sequence, and then prompts in the other slots.

    Args:
        most_tokens: Most tokens of a step.
        max_len: Most tokens of a sequence.
        drafts: Most drafts of a sequence.
        max_drafts: Most drafts of a step.
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
    """Returns one step of each kind within the limits; running them compiles all kernels."""
    steps: list[StepRows] = [
        [(0, 1), (5, 1)],
        # Rows with drafts and ends of prompts, one step for each padded query length.
        *([(0, count), (7, count)] for count in {2, 3, 5, 1 + drafts}),
        # Short and long chunks beside a row that decodes.
        [(0, 1), (0, 16), (16, 40)],
        [(0, 1), (0, 1040), (48, 900)],
        [(0, 1), (1040, 1040)],
        [(0, 600)] * 4,
        # Prompts with separate attention for their ends, by the padded number of prompts; two and four are above.
        [(0, 1040)],
        [(0, 140)] * 8,
    ]
    return _within_limits(steps, most_tokens, max_seqs, max_len)


def cudnn_plan_steps(
    most_tokens: int, shared_tokens: int, max_seqs: int, max_len: int, last_tokens: int = 0
) -> list[StepRows]:
    """Returns the steps within the limits that build all cuDNN plans when they run.

    They are long prompts, chunks of longer prompts, and equal prompts side by side.

    Args:
        most_tokens: Most tokens of a step with a single prompt.
        shared_tokens: Most tokens of a step with several prompts.
        last_tokens: Most tokens of the last chunk of a prompt that is handed off.
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


def chunk_graph_shapes(within: int, chunk_tokens: int) -> list[tuple[int, int]]:
    """Returns cached and new tokens of the chunks to capture.

    They are chunks of `chunk_tokens` tokens and of the shortest length with a plan. Each ends within the first `within`
    tokens of a prompt.
    """
    lengths = {PLAN_QUANTUM, chunk_tokens} if chunk_tokens % PLAN_QUANTUM == 0 else set[int]()
    return [(start, new) for new in sorted(lengths) for start in range(0, within - new + 1, PLAN_QUANTUM)]


def _within_limits(steps: list[StepRows], most_tokens: int, max_seqs: int, max_len: int) -> list[StepRows]:
    return [
        rows
        for rows in steps
        if len(rows) <= max_seqs
        and sum(new for _, new in rows) <= most_tokens
        and max(start + new for start, new in rows) <= max_len
    ]
